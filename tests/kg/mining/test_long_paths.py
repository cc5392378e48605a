"""Long rules are counted as by brute force; one is dropped only where it cannot be among the best of a fact."""

from __future__ import annotations

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
)
from tests.kg.mining.brute_force import (
    brute_force,
    clauses_of,
    counts_of,
    edges_of,
    facts_by_rule,
    graphs,
    path_counts,
)


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
