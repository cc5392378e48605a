"""Loops by hand, and in a graph."""

from __future__ import annotations

import torch

from funcppo.core.loops import graph_scan, keeps_loops, scan
from funcppo.rollout import EpisodeStats
from tests.learning import assert_trees_equal


def test_scan_by_hand():
    carry, ys = scan(
        lambda c, x: (c + x, c * x), torch.tensor(1), torch.tensor([2, 3, 4])
    )
    assert int(carry) == 10 and ys.tolist() == [2, 9, 24]


def test_a_scan_in_a_graph_equals_the_loop():
    """A running sum and product of 1 to 5, the carry a NamedTuple."""

    def step(carry, x):
        return EpisodeStats(carry.total_reward + x, carry.length * x.long()), {
            "seen": carry.total_reward
        }["seen"]

    start = EpisodeStats(torch.zeros(2), torch.ones(2, dtype=torch.int64))
    xs = torch.arange(1.0, 6.0)
    got = torch.compile(
        lambda: graph_scan(step, start, xs), fullgraph=True, backend="eager"
    )()
    assert_trees_equal(got, scan(step, start, xs), rtol=0, atol=0)


def test_a_loop_stays_one_in_compiled_functions_but_not_under_vmap():
    def where(x):
        return x + 1 if keeps_loops() else x

    x = torch.zeros(2)
    graph = torch.compile(where, fullgraph=True, backend="eager")
    mapped = torch.compile(torch.vmap(where), fullgraph=True, backend="eager")
    assert graph(x).all() and not where(x).any() and not mapped(x).any()
