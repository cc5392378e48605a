"""Rules found by meeting in the middle are all that derive facts from other facts, with these facts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from funcppo.kg.mining import closing, long_paths, paths
from funcppo.kg.mining.mined_rules import Budget, path_labels
from tests.kg.mining.brute_force import edges_of, graphs, path_counts


def unlimited():
    return Budget(max_rows=10**12, seconds=1e9)


def closed_rules(edges, length, min_support=1, budget=None):
    plan = closing.plan_closing(edges, length, 1e12)
    parts = closing.iter_closed_rules(
        edges, plan, length, min_support, budget or unlimited(), 1.0
    )
    return plan, list(parts)


def facts_by_labels(facts, edges, closed, length):
    """The facts that each rule derives, by its labels."""
    labels = path_labels(
        closed.predicate, closed.body_code, length, edges.n_labels
    )
    rules = [tuple(x for x in row if x >= 0) for row in labels.tolist()]
    derived = {rule: [] for rule in rules}
    assert len(derived) == len(rules)
    for fact, rule in zip(closed.fact.tolist(), closed.rule.tolist()):
        derived[rules[rule]].append(facts[fact])
    for rule, support in zip(rules, closed.support.tolist()):
        assert len(derived[rule]) == support
    return {rule: sorted(some) for rule, some in derived.items()}


def test_a_square_closes_its_fourth_side():
    """likes(1,2) follows from likes(1,3), likes(3,4), likes(4,5), likes(5,2), and from no walk along itself."""
    facts = [(1, 1, 2), (1, 1, 3), (1, 3, 4), (1, 4, 5), (1, 5, 2)]
    edges = edges_of(facts)
    _, parts = closed_rules(edges, 4)
    derived = facts_by_labels(
        facts, edges, closing.concatenate_closed(parts), 4
    )
    assert derived[0, 0, 0, 0, 0] == [(1, 1, 2)]
    assert not any((1, 1, 2) in some for some in list(derived.values())[1:])
    assert all(len(some) == 1 for some in derived.values())


@pytest.mark.parametrize("chunk_rows", [5, 1 << 20])
@pytest.mark.parametrize("length", [4, 5])
@given(facts=graphs)
@settings(max_examples=15)
def test_closed_rules_are_those_of_brute_force(length, chunk_rows, facts):
    edges = edges_of(facts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_paths, "CHUNK_ROWS", chunk_rows)
        _, parts = closed_rules(edges, length)
    closed = closing.concatenate_closed(
        [closing.no_closed_rules(edges.label.device), *parts]
    )
    expected = {
        rule: sorted(derived)
        for rule, (derived, _, _) in path_counts(facts, [length]).items()
    }
    assert facts_by_labels(facts, edges, closed, length) == expected

    _, parts = closed_rules(edges, length, min_support=3)
    n_kept = sum(len(part.support) for part in parts)
    assert n_kept == sum(len(some) >= 3 for some in expected.values())


def test_the_longer_half_is_made_where_it_is_less_work():
    """1 - 2 - 3 - 4 in a row: 3 walks of up to two steps from 1 and 5 from 2; 6 and 10 of up to three."""
    edges = edges_of([(1, 1, 2), (1, 2, 3), (1, 3, 4)])
    rows, _ = closing.closing_rows(edges, 4)
    assert rows.tolist() == [3 + 5, 5 + 5, 5 + 3]
    rows, is_forward = closing.closing_rows(edges, 5)
    assert rows.tolist() == [6 + 5, 10 + 5, 5 + 6]
    assert is_forward.tolist() == [True, True, False]


def test_heads_with_too_much_work_are_left_out_and_counted(monkeypatch):
    facts = [(1, x, y) for x in range(1, 7) for y in range(1, 7)] + [(2, 1, 2)]
    edges = edges_of(facts)
    whole = closing.plan_closing(edges, 5, 1e12)
    assert whole.predicates == (1, 0) and whole.n_left_out == 0
    little = closing.plan_closing(edges, 5, whole.n_rows / 2)
    assert little.predicates == (1,) and little.n_left_out == 1
    monkeypatch.setattr(closing, "MAX_FACT_ROWS", 10)
    none = closing.plan_closing(edges, 5, 1e12)
    assert none.predicates == () and none.n_left_out == 2


def test_a_head_with_too_many_closed_pairs_is_none(monkeypatch):
    facts = [(1, x, y) for x in range(1, 7) for y in range(1, 7)] + [(2, 1, 2)]
    monkeypatch.setattr(closing, "MAX_CLOSED_PAIRS", 500)
    monkeypatch.setattr(long_paths, "CHUNK_ROWS", 5)
    _, parts = closed_rules(edges_of(facts), 5)
    assert [part is None for part in parts] == [False, True]


def test_labels_beyond_the_numbers_are_left_out():
    facts = torch.tensor([[p, 1, 2] for p in range(1, 20_001)])
    edges = paths.build_edge_index(facts, 20_000, 2)
    assert closing.plan_closing(edges, 5, 1e18).predicates == ()


def test_the_budget_ends_the_search():
    budget = Budget(max_rows=10, seconds=1e9)
    budget.spend(10)
    _, parts = closed_rules(edges_of([(1, 1, 2), (1, 2, 3)]), 4, 1, budget)
    assert parts == [None]
