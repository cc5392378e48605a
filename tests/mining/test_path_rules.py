"""Counts of path rules equal brute force over Python sets; estimates are within their error."""

from __future__ import annotations

from random import Random

import torch
from hypothesis import given, settings

from funcppo.mining import path_rules, paths
from tests.mining.brute_force import (
    X,
    Y,
    Z,
    brute_force,
    edges_of,
    graphs,
    never,
    path_clauses,
)


@given(graphs)
@settings(max_examples=40)
def test_path_counts_are_those_of_brute_force(facts):
    clauses = path_clauses(2)
    clauses += path_clauses(3)[len(clauses) :: 7]
    expected = {
        c: n
        for c, n in zip(clauses, brute_force(facts, clauses))
        if n[0] - n[1] > 0
    }
    steps, seen = edges_of(facts), {}
    draw = torch.linspace(0, 0.9, 20)
    for length in (1, 2, 3):
        predicate = torch.tensor(facts)[:, 0]
        found, share, told = path_rules.find_path_rules(
            steps, predicate, length, 1, 10**9, draw[: len(facts)], never
        )
        assert told == [] and (share == 1).all()
        bodies, which = torch.unique(
            found.body_labels, dim=0, return_inverse=True
        )
        pairs = path_rules.count_body_pairs(
            steps, bodies, 10**9, draw[:7], never
        )
        assert not pairs.std_error.any()
        exact = torch.ones(len(which), dtype=torch.bool)
        pca = path_rules.count_pca_pairs(
            steps,
            2 * found.head_predicate - 2,
            found.body_labels,
            exact,
            10**9,
            draw[:7],
        )
        assert not pca.std_error.any()
        counted = (
            found.support,
            found.circular_support,
            pairs.total[which],
            pca.total,
        )
        rows = zip(
            found.head_predicate.tolist(), found.body_labels.tolist(), *counted
        )
        for head, body, *counts in rows:
            inner = [X, *range(Z, Z + length - 1), Y]
            ends = [
                (a, b) if label % 2 == 0 else (b, a)
                for label, a, b in zip(body, inner, inner[1:])
            ]
            clause = (
                (head, X, Y),
                *((label // 2 + 1, *pair) for label, pair in zip(body, ends)),
            )
            seen[clause] = tuple(int(n) for n in counts)
    assert {c: seen.get(c) for c in expected} == expected
    assert all(c in expected for c in seen if c in set(clauses))


def test_pca_pairs_that_the_work_does_not_suffice_for_are_estimates_and_say_so():
    random = Random(0)
    facts = sorted(
        {
            (1, random.randint(1, 400), random.randint(1, 400))
            for _ in range(16_000)
        }
    )
    facts += [(2, x, x + 1) for x in range(1, 200)]
    steps, draw = (
        paths.build_edge_index(torch.tensor(facts), 2, 400),
        torch.tensor([random.random() for _ in range(401)]),
    )
    head, body = torch.tensor([0, 2]), torch.zeros((2, 2), dtype=torch.int64)
    count = lambda work: path_rules.count_pca_pairs(
        steps, head, body, torch.tensor([True, True]), work, draw
    )
    true, cut = count(10**9), count(1000)
    assert (
        not true.std_error.any()
        and (cut.std_error > 0).all()
        and cut.std_error.isfinite().all()
    )
    assert ((cut.total - true.total).abs() <= 4 * cut.std_error).all()
