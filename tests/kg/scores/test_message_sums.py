"""Messages are added up in parts; the kernel's sums and gradients are those of plain tensors."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad

from funcppo.kg.scores import message_sums

N_ENTITIES, N_LABELS, WIDTH = 40, 7, 24


def random_edges(n, device="cpu", seed=0):
    """Edges of which half come from one entity, and half go to another."""
    generator = torch.Generator().manual_seed(seed)

    def draw(size, hub):
        drawn = torch.randint(0, size, (n,), generator=generator)
        is_hub = torch.rand(n, generator=generator) < 0.5
        return torch.where(is_hub, hub, drawn).to(device)

    return draw(N_ENTITIES, 3), draw(N_LABELS, 2), draw(N_ENTITIES, 5)


def random_rows(n, device="cpu", dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn((n, WIDTH), generator=generator, dtype=torch.float64)
    return rows.to(device=device, dtype=dtype)


def plain_sums(states, weights, edges, is_kept=None):
    if is_kept is not None:
        edges = [x[is_kept] for x in edges]
    source, label, target = edges
    total = torch.zeros(N_ENTITIES, WIDTH, dtype=states.dtype)
    return total.index_add(0, target, states[source] * weights[label])


def sum_parts_on_cpu(offsets, left_row, right_row, edge, is_kept, left, right):
    """What the kernel computes, part by part."""
    assert left.data_ptr(), "a tensor with memory"
    rows = left if right is None else left[left_row] * right[right_row]
    if right is not None and is_kept is not None:
        rows = rows * is_kept[edge][:, None]
    parts = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    return torch.stack([rows[start:stop].sum(0) for start, stop in parts])


@pytest.fixture(scope="module", autouse=True)
def operator_on_cpu():
    library = torch.library.Library("funcppo", "IMPL")
    library.impl("sum_parts", sum_parts_on_cpu, "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize(
    "n", [1, 5, message_sums.PART, message_sums.PART + 1, 40_000]
)
def test_parts_add_up_to_the_sums_and_their_gradients(n):
    """40,000 edges, half of which one hub has, take three levels of parts; some entities have no edge."""
    edges = random_edges(n)
    orders = message_sums.order_messages(*edges, N_ENTITIES, N_LABELS)
    assert len(orders.of_targets.offsets) == (3 if n == 40_000 else 1)
    for order in (orders.of_targets, orders.of_sources, orders.of_labels):
        lengths = torch.cat([offsets.diff() for offsets in order.offsets])
        assert int(lengths.max()) <= message_sums.PART
    check(edges, orders, torch.float64, rtol=1e-12, atol=1e-12 * n**0.5)


def test_messages_along_edges_that_are_not_kept_are_left_out():
    edges = random_edges(500)
    orders = message_sums.order_messages(*edges, N_ENTITIES, N_LABELS)
    is_kept = torch.arange(500) % 3 > 0
    check(edges, orders, torch.float64, 1e-12, 1e-12, is_kept)
    check(edges, orders, torch.float64, 1e-12, 1e-12, is_kept & False)


def check(edges, orders, dtype, rtol, atol, is_kept=None):
    """Sums and gradients of random rows beside those of plain tensors of float64."""
    device = edges[0].device
    states = random_rows(N_ENTITIES, device, dtype, 1)
    weights = random_rows(N_LABELS, device, dtype, 2)
    against = random_rows(N_ENTITIES, device, torch.float64, 3)
    on_host = [x.cpu() for x in edges]
    exact = (states.cpu().double(), weights.cpu().double())
    kept_there = None if is_kept is None else is_kept.to(device)

    def by_parts(states, weights):
        sums = message_sums.sum_messages(states, weights, orders, kept_there)
        return (sums * against).sum()

    def plainly(states, weights):
        sums = plain_sums(states, weights, on_host, is_kept)
        return (sums * against.cpu()).sum()

    sums = message_sums.sum_messages(states, weights, orders, kept_there)
    pairs = [(sums, plain_sums(*exact, on_host, is_kept))]
    gradients = grad(by_parts, (0, 1))(states, weights)
    pairs += zip(gradients, grad(plainly, (0, 1))(*exact), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(
            found.cpu().double(), expected, rtol=rtol, atol=atol
        )
