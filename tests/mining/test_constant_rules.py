"""Counts of rules with constants equal brute force over Python sets."""

from __future__ import annotations

from hypothesis import given, settings

from funcppo.mining import constant_rules
from tests.mining.brute_force import (
    X,
    Y,
    brute_force,
    constant_clauses,
    edges_of,
    graphs,
)


@given(graphs)
@settings(max_examples=40)
def test_counts_of_rules_with_constants_are_those_of_brute_force(facts):
    clauses = constant_clauses()
    expected = {
        c: n
        for c, n in zip(clauses, brute_force(facts, clauses))
        if n[0] - n[1] > 0
    }
    steps, seen = edges_of(facts), {}
    for found in constant_rules.find_constant_rules(steps, 1):
        pca = constant_rules.count_pca_pairs(
            steps, found.head_label, found.body_label, found.body_constant
        )
        atom = lambda label, x, y: (
            (label // 2 + 1, x, y) if label % 2 == 0 else (label // 2 + 1, y, x)
        )
        for i in range(len(found.support)):
            body = atom(
                int(found.body_label[i]), X, int(found.body_constant[i]) or Y
            )
            clause = (
                atom(int(found.head_label[i]), X, int(found.head_constant[i])),
                body,
            )
            assert clause not in seen
            seen[clause] = (
                int(found.support[i]),
                int(found.circular_support[i]),
                int(found.body_pairs[i]),
                int(pca[i]),
            )
    assert seen == expected
