"""Counts of rules with constants equal brute force over Python sets."""

from __future__ import annotations

from hypothesis import given, settings

from funcppo.kg.mining import constant_rules
from funcppo.kg.mining.mined_rules import Budget
from tests.kg.mining.brute_force import (
    brute_force,
    clauses_of,
    constant_clauses,
    counts_of,
    edges_of,
    facts_by_rule,
    graphs,
)


@given(graphs)
@settings(max_examples=40)
def test_counts_of_rules_with_constants_are_those_of_brute_force(facts):
    clauses = constant_clauses()
    expected = {
        c: n for c, n in zip(clauses, brute_force(facts, clauses)) if n[0]
    }
    edges, seen = edges_of(facts), {}
    budget = Budget(max_rows=10**9, seconds=1e9)
    search = constant_rules.plan_search(edges, 1)
    for found in constant_rules.find_constant_rules(edges, search, budget):
        assert found.rules.pca_std_error.isinf().all()
        counted = facts_by_rule(facts, found)
        parts = list(constant_rules.count_pca_pairs(edges, found.rules, budget))
        rows = [row for part in parts for row in part.rows.tolist()]
        assert rows == list(range(len(found.cost)))
        clauses = [c for part in parts for c in clauses_of(part.rules)]
        counts = [n for part in parts for n in counts_of(part.rules)]
        for i, clause in enumerate(clauses):
            assert clause not in seen
            seen[clause] = counts[i]
            assert len(counted[i]) == counts[i][0] - counts[i][1]
        assert not any(part.rules.pca_std_error.any() for part in parts)
    assert seen == expected
    assert budget.rows > 0


def test_what_has_too_few_entities_is_no_head_and_no_body():
    facts = [(1, x, 6) for x in (1, 2, 3)] + [(2, x, 5) for x in (1, 2)]
    edges = edges_of(facts)
    search = constant_rules.plan_search(edges, 3)
    assert set(edges.target[search.heads].tolist()) == {6}
    assert not len(constant_rules.plan_search(edges, 4).heads)
    assert constant_rules.plan_search(edges, 4).n_rows == 0


def test_the_budget_ends_the_count_of_pca_pairs():
    facts = [(p, x, y) for p in (1, 2) for x in (1, 2, 3) for y in (4, 5)]
    edges = edges_of(facts)
    search = constant_rules.plan_search(edges, 1)
    budget = Budget(max_rows=1, seconds=1e9)
    found = next(constant_rules.find_constant_rules(edges, search, budget))
    budget.spend(1)
    assert not list(constant_rules.count_pca_pairs(edges, found.rules, budget))
