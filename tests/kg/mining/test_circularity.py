"""A fact is derived from itself alone exactly if its body has no path left without the fact."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings

from funcppo.kg.mining import closing
from tests.kg.mining.brute_force import edge_sets, edges_of, graphs


def count_walks(facts, body, source, target):
    """The number of walks along the labels of a body, by a dictionary of the entities reached."""
    steps = edge_sets(facts)
    reached = {source: 1}
    for label in body:
        after = {}
        for x, y in steps[label]:
            if x in reached:
                after[y] = after.get(y, 0) + reached[x]
        reached = after
    return reached.get(target, 0)


def test_a_path_that_walks_along_the_fact_itself_is_circular():
    """likes(X,Y) :- likes(X,Z), likes(W,Z), likes(W,Y) derives likes(1,2) from itself alone, Z = Y and W = X."""
    fact, body = torch.tensor([0]), torch.tensor([[0, 1, 0]])
    one = torch.tensor([1.0])
    alone = edges_of([(1, 1, 2)])
    assert closing.is_circular(alone, fact, body, one).tolist() == [True]

    # likes(1,3), likes(4,3) and likes(4,2) derive it too, and so do the walks that go out or come back along it.
    others = edges_of([(1, 1, 2), (1, 1, 3), (1, 4, 2), (1, 4, 3)])
    n_paths = torch.tensor([4.0])
    found = closing.is_circular(others, fact, body, n_paths)
    assert found.tolist() == [False]


@given(graphs)
@settings(max_examples=40)
def test_circular_facts_are_those_that_have_no_path_without_themselves(facts):
    edges = edges_of(facts)
    for length, every in ((1, 1), (2, 1), (3, 1), (4, 5), (5, 31)):
        cases, expected, n_paths = [], [], []
        bodies = itertools.product(range(4), repeat=length)
        for body in itertools.islice(bodies, 0, None, every):
            for i, (_, x, y) in enumerate(facts):
                n = count_walks(facts, body, x, y)
                if n:
                    rest = facts[:i] + facts[i + 1 :]
                    cases.append((i, *body))
                    n_paths.append(float(n))
                    expected.append(count_walks(rest, body, x, y) == 0)
        if cases:
            table = torch.tensor(cases)
            found = closing.is_circular(
                edges, table[:, 0], table[:, 1:], torch.tensor(n_paths)
            )
            assert found.tolist() == expected
