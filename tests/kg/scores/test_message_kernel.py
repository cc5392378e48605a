"""The kernel's sums and gradients are those of plain tensors, and added up in a fixed order."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.func import grad

from funcppo.core import tree
from funcppo.kg.scores import bellman_ford, message_sums
from tests.kg.scores.test_bellman_ford import (
    CFG,
    ORDER,
    all_questions,
    random_facts,
    random_params,
)
from tests.kg.scores.test_message_sums import (
    N_ENTITIES,
    N_LABELS,
    check,
    random_edges,
    random_rows,
)
from tests.runtime.test_capture import on_gpu

pytestmark = on_gpu


@pytest.mark.parametrize("n", [1, 10_000])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, 1e-12),
        (torch.float32, 1e-4),
        # 3 significant digits of each factor
        (torch.bfloat16, 1e-1),
    ],
)
def test_the_kernel_adds_up_messages(n, dtype, tolerance):
    edges = random_edges(n, "cuda")
    orders = message_sums.order_messages(*edges, N_ENTITIES, N_LABELS)
    check(edges, orders, dtype, rtol=tolerance, atol=tolerance * n**0.5)


@pytest.mark.parametrize("asks", [True, False])
def test_the_network_gives_the_logits_of_the_cpu(asks):
    cfg = dataclasses.replace(CFG, asks=asks)
    facts, params = random_facts(), random_params(cfg)
    graph = bellman_ford.build_graph(cfg, facts, "fact")
    label, given = all_questions(cfg)
    expected = bellman_ford.apply(cfg, params, graph, label, given)
    there = tree.map(lambda x: x.cuda(), (params, graph, label, given))
    logits = bellman_ford.apply(cfg, *there)
    torch.testing.assert_close(logits.cpu(), expected, **ORDER)


def test_the_kernel_adds_in_a_fixed_order():
    """Gradients of `embedding` and of `scatter_add` are added up as the threads come."""
    edges = random_edges(20_000, "cuda")
    orders = message_sums.order_messages(*edges, N_ENTITIES, N_LABELS)
    states = random_rows(N_ENTITIES, "cuda", torch.float32, 1)
    weights = random_rows(N_LABELS, "cuda", torch.float32, 2)

    def loss(states, weights):
        return message_sums.sum_messages(states, weights, orders).square().sum()

    first = grad(loss, (0, 1))(states, weights)
    for _ in range(20):
        again = grad(loss, (0, 1))(states, weights)
        assert all(map(torch.equal, first, again))
