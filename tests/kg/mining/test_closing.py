"""Long rules found from the facts that they derive, their counts, and facts that derive themselves."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.kg.mining import closing, long_paths, paths
from funcppo.kg.mining.mined_rules import (
    Budget,
    Thresholds,
    held_out_smoothed_confidence,
    path_labels,
)
from tests.kg.mining.brute_force import (
    brute_force,
    clauses_of,
    counts_of,
    edge_sets,
    edges_of,
    facts_by_rule,
    graphs,
    path_counts,
)


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
    monkeypatch.setattr(closing, "CHUNK_ROWS", 5)
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


# -- test circularity


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


# -- test long paths


def start_search(edges, length, **settings):
    """A search without a limit, and the rules of one length that derive a fact from others."""
    defaults = {
        "priority": torch.linspace(0, 0.99, edges.n_entity_ids),
        "thresholds": Thresholds(min_support=1, min_confidence=0.0),
        "budget": Budget(max_rows=10**12, seconds=1e9),
        "share": 1.0,
    }
    search = long_paths.LongPathSearch(
        edges=edges, length=length, **(defaults | settings)
    )
    plan = closing.plan_closing(edges, length, 1e12)
    unlimited = Budget(max_rows=10**12, seconds=1e9)
    parts = closing.iter_closed_rules(edges, plan, length, 1, unlimited, 1.0)
    none = closing.no_closed_rules(edges.label.device)
    closed = closing.concatenate_closed([none, *parts])
    return search, long_paths.without_counts(closed)


def found_rules(search, rules, to_beat):
    counted = search.count_first(rules)
    for batch in search.iter_batches(counted):
        yield search.find_rules(batch, to_beat)


@pytest.mark.parametrize("chunk_rows", [40, 1 << 20])
@pytest.mark.parametrize("length", [4, 5])
@given(facts=graphs)
@settings(max_examples=10)
def test_counts_are_those_of_brute_force(length, chunk_rows, facts):
    edges = edges_of(facts)
    lowest = torch.full((len(facts),), -1.0).double()
    seen = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "CHUNK_ROWS", chunk_rows)
        patch.setattr(long_paths, "BATCH_ROWS", 1000.0)
        for found in found_rules(*start_search(edges, length), lowest):
            derived = facts_by_rule(facts, found)
            rows = zip(found.rules.labels.tolist(), counts_of(found.rules))
            for i, (labels, counts) in enumerate(rows):
                rule = tuple(label for label in labels if label >= 0)
                assert rule not in seen
                seen[rule] = sorted(derived[i]), counts[0], counts[2]
                assert counts[1] == counts[0] - len(derived[i])
    expected = {
        rule: (sorted(derived), support, pairs)
        for rule, (derived, support, pairs) in path_counts(
            facts, [length]
        ).items()
    }
    assert seen == expected


def test_pca_pairs_are_those_of_a_clause():
    facts = [(1, 1, 2), (1, 1, 3), (1, 3, 4), (1, 4, 5), (1, 5, 2), (2, 5, 6)]
    edges = edges_of(facts)
    lowest = torch.full((len(facts),), -1.0).double()
    search, rules = start_search(edges, 4)
    for found in found_rules(search, rules, lowest):
        clauses = clauses_of(found.rules)
        assert counts_of(found.rules) == brute_force(facts, clauses)
        assert not found.rules.pca_std_error.any()


@given(facts=graphs, score=st.floats(0.01, 0.2))
@settings(max_examples=10)
def test_only_rules_that_beat_no_fact_are_dropped(facts, score):
    """The second search is told that every fact has a rule of this score."""
    edges = edges_of(facts)
    lowest = torch.full((len(facts),), -1.0).double()
    labels = []
    for to_beat in (lowest, torch.full_like(lowest, score)):
        labels.append(set())
        for found in found_rules(*start_search(edges, 4), to_beat):
            wins = held_out_smoothed_confidence(found.rules) > score
            labels[-1] |= set(map(tuple, found.rules.labels[wins].tolist()))
    assert labels[0] == labels[1]


def test_rules_below_the_thresholds_are_dropped():
    facts = [(1, x, y) for x in range(1, 4) for y in range(1, 7)]
    thresholds = Thresholds(min_support=3, min_confidence=0.5)
    search, rules = start_search(edges_of(facts), 4, thresholds=thresholds)
    lowest = torch.full((len(facts),), -1.0).double()
    (found,) = found_rules(search, rules, lowest)
    counted = {
        rule
        for rule, (derived, support, pairs) in path_counts(facts, [4]).items()
        if len(derived) >= 3
        and len(derived) >= 0.5 * (pairs - support + len(derived))
    }
    assert counted
    assert {
        tuple(label for label in labels if label >= 0)
        for labels in found.rules.labels.tolist()
    } == counted


def test_what_the_budget_does_not_suffice_for_is_not_counted():
    facts = [(1, x, y) for x in range(1, 4) for y in range(1, 7)]
    budget = Budget(max_rows=10, seconds=1e9)
    search, rules = start_search(edges_of(facts), 4, budget=budget)
    lowest = torch.full((len(facts),), -1.0).double()
    assert search.find_rules(rules, lowest) is None
    assert budget.rows >= 10
    everyone = torch.zeros(len(search.priority))
    search = replace(search, priority=everyone)
    assert search.count_first(rules) is None
