"""Paths that close facts, and the pairs that bodies join."""

from __future__ import annotations

import torch
from hypothesis import given, settings

from funcppo.mining import paths
from tests.mining.brute_force import (
    edges_of,
    graphs,
    mined,
)


def test_a_path_that_walks_along_the_fact_itself_is_circular():
    """likes(X,Y) :- likes(X,Z), likes(W,Z), likes(W,Y) derives likes(1,2) from itself alone, Z = Y and W = X."""
    steps = edges_of([(1, 1, 2)])
    found = paths.find_closed_paths(steps, torch.tensor([0]), 3)
    assert found.body_labels.tolist() == [
        [0, 1, 0]
    ] and found.is_circular.tolist() == [True]
    assert len(mined([(1, 1, 2)]).rules.support) == 0


@given(graphs)
@settings(max_examples=60)
def test_the_pairs_of_a_body_are_those_of_a_walk_over_sets(facts):
    edges = edges_of(facts)
    steps = {label: set() for label in range(4)}
    for predicate, a, b in facts:
        steps[2 * predicate - 2].add((a, b))
        steps[2 * predicate - 1].add((b, a))
    bodies = torch.tensor([[a, b] for a in range(4) for b in range(4)])
    sources = torch.diff(edges.offsets).nonzero().squeeze(1)
    priority = torch.linspace(0, 0.9, edges.n_entity_ids)
    found = set()
    for pairs, _ in paths.iter_body_pairs(
        edges, bodies, sources, torch.ones(len(bodies)), priority
    ):
        rows = list(zip(*(column.tolist() for column in pairs)))
        assert rows == sorted(set(rows)) and not found & set(rows)
        found |= set(rows)
    expected = set()
    for i, (a, b) in enumerate(bodies.tolist()):
        expected |= {
            (i, x, z) for x, y in steps[a] for y2, z in steps[b] if y == y2
        }
    assert found == expected


@given(graphs)
@settings(max_examples=60)
def test_edges_are_found_by_label_and_by_pair(facts):
    edges = edges_of(facts)
    source = torch.repeat_interleave(torch.diff(edges.offsets))
    listed = sorted(
        zip(source.tolist(), edges.label.tolist(), edges.target.tolist())
    )
    both_ways = [(a, 2 * p - 2, b) for p, a, b in facts] + [
        (b, 2 * p - 1, a) for p, a, b in facts
    ]
    assert listed == sorted(both_ways)

    entity = torch.arange(7).repeat_interleave(4)
    label = torch.arange(4).repeat(7)
    start, length = paths.outgoing_edges(edges, entity, label)
    assert length.tolist() == [
        sum(e[:2] == (x, at) for e in listed)
        for x, at in zip(entity.tolist(), label.tolist())
    ]
    assert all(
        source[s] == x
        for s, n, x in zip(start.tolist(), length.tolist(), entity.tolist())
        if n
    )

    first, second = torch.cartesian_prod(
        torch.arange(7), torch.arange(7)
    ).unbind(1)
    joined = [
        pair
        for row, edge in paths.edges_between(edges, first, second)
        for pair in zip(row.tolist(), edge.tolist())
    ]
    assert sorted(edge for _, edge in joined) == list(range(len(listed)))
    assert all(
        (source[e], edges.target[e]) == (first[r], second[r]) for r, e in joined
    )


@given(graphs)
def test_the_cost_of_closing_a_fact_follows_from_the_degrees_of_its_ends(facts):
    edges = edges_of(facts)
    degree = torch.diff(edges.offsets)
    first = degree[edges.first_argument].tolist()
    second = degree[edges.second_argument].tolist()
    assert paths.closed_path_cost(edges, 1).tolist() == [1] * len(facts)
    assert paths.closed_path_cost(edges, 2).tolist() == [
        min(ends) for ends in zip(first, second)
    ]
    assert paths.closed_path_cost(edges, 3).tolist() == [
        a * b for a, b in zip(first, second)
    ]
