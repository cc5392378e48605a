"""Counts of given path rules: exact ones equal brute force, estimates are within their error and say so."""

from __future__ import annotations

import itertools
from random import Random

import pytest
import torch
from hypothesis import given, settings

from funcppo.core import tree
from funcppo.kg.mining import mined_rules, path_rules, paths
from funcppo.kg.mining.mined_rules import Budget, FoundRules
from funcppo.kg.mining.paths import SourceRange
from tests.kg.mining.brute_force import (
    brute_force,
    clauses_of,
    counts_of,
    edges_of,
    facts_by_rule,
    graphs,
    path_clauses,
)

LABELS = [
    *([head, body] for head in (0, 2) for body in range(4)),
    *([0, first, last] for first in range(4) for last in range(4)),
    [2, 0, 1, 2],
    [0, 0, 1, 0],
    [2, 3, 3, 0],
    [0, 2, 2, 2],
    [0, 0, 1, 2, 3],
    [2, 0, 3, 3, 1, 2],
]


def padded(labels):
    """Labels of rules as the columns of a table."""
    width = mined_rules.MAX_RULE_ATOMS
    return torch.tensor([row + [-1] * (width - len(row)) for row in labels])


def to_count(labels, cost=1.0):
    """Rules without counts."""
    table = padded(labels)
    zeros = torch.zeros(len(table), dtype=torch.float64)
    rules = mined_rules.no_rules(zeros.device)._replace(
        labels=table, end_constants=torch.zeros_like(table[:, :2])
    )
    columns = [zeros] * (len(rules) - 2)
    rules = mined_rules.MinedRules(*rules[:2], *columns)
    none = table[:0, 0]
    return FoundRules(rules, zeros + cost, none, none)


@pytest.mark.parametrize("cost", [1.0, 3.0 * paths.CHUNK_ROWS])
@given(facts=graphs)
@settings(max_examples=25)
def test_exact_counts_are_those_of_brute_force(cost, facts):
    """Rules that cost more than a chunk are counted from three ranges of sources."""
    edges = edges_of(facts)
    priority = torch.arange(7) / 7
    budget = Budget(max_rows=10**12, seconds=1e9)
    found = to_count(LABELS, cost)
    rows = []
    for part in path_rules.count_exactly(edges, found, priority, budget, 1.0):
        rows += part.rows.tolist()
        clauses = clauses_of(part.rules)
        assert counts_of(part.rules) == brute_force(facts, clauses)
        assert not part.rules.std_error.any()
        counted = FoundRules(part.rules, part.rules.support, *part[2:])
        n_derived = [len(some) for some in facts_by_rule(facts, counted)]
        derives = part.rules.support - part.rules.circular_support
        assert n_derived == derives.tolist()
    assert sorted(rows) == list(range(len(LABELS)))
    assert budget.rows == pytest.approx(len(LABELS) * cost)


def test_the_budget_ends_exact_counts():
    edges = edges_of([(1, 1, 2), (1, 2, 3)])
    budget = Budget(max_rows=10, seconds=1e9)
    budget.spend(5)
    found = to_count(LABELS)
    assert not list(
        path_rules.count_exactly(edges, found, torch.zeros(7), budget, 0.5)
    )
    assert list(
        path_rules.count_exactly(edges, found, torch.zeros(7), budget, 1.0)
    )


def large_graph():
    """1,000 entities, 2 predicates, 6,000 facts; most facts have few of the entities as first argument."""
    random = Random(3)
    facts = {
        (
            random.randint(1, 2),
            int(1000 * random.random() ** 2) + 1,
            random.randint(1, 1000),
        )
        for _ in range(6000)
    }
    facts |= {
        (2, y, x) for p, x, y in facts if p == 1 and random.random() < 0.5
    }
    return paths.build_edge_index(torch.tensor(sorted(facts)), 2, 1001)


def test_estimates_are_within_their_error_and_unbiased():
    """Thirty samples of two rules with 1,445 right pairs each, so that errors are nearly normal.

    No more than two of sixty are off by over 3 standard errors, and the mean is not off.
    """
    edges = large_graph()
    labels = padded([[0, 3], [2, 1]])
    deviations, count_ratios = [], []
    for seed in range(30):
        priority = torch.rand(
            edges.n_entity_ids, generator=torch.Generator().manual_seed(seed)
        )
        for row in labels[:, None]:
            length = int((row[0, 1:] >= 0).sum())
            every = SourceRange(priority)
            some = every._replace(high=0.3)
            true = path_rules.count_rules(edges, row, length, every).sums
            sums = path_rules.count_rules(edges, row, length, some).sums
            rules = path_rules.estimate_rules(edges, row, some, sums)
            truth = true.support / true.body_pairs
            error = mined_rules.confidence(rules) - truth
            assert 0 < float(rules.std_error) < 0.2
            deviations.append(float(error / rules.std_error))
            count_ratios.append(float(rules.body_pairs / true.body_pairs))
    deviation = torch.tensor(deviations)
    assert (deviation.abs() > 3).sum() <= 2
    assert deviation.mean().abs() < 0.5
    assert torch.tensor(count_ratios).mean() == pytest.approx(1, abs=0.05)


def test_an_estimate_from_all_sources_is_exact():
    edges = large_graph()
    priority = torch.linspace(0, 0.999, edges.n_entity_ids)
    budget = Budget(max_rows=10**9, seconds=1e9)
    found = to_count([[0, 3], [2, 0, 3]])
    (exact, longer) = path_rules.count_exactly(
        edges, found, priority, budget, 1.0
    )
    estimates = list(path_rules.estimate(edges, found, priority, budget, 10**9))
    for part, other in zip((exact, longer), estimates):
        for column, estimated in zip(part.rules, other.rules):
            assert torch.equal(column, estimated)


def test_an_estimate_that_costs_more_than_a_chunk_is_made_range_by_range(
    monkeypatch,
):
    """From .4 of the sources: five ranges of a chunk of rows, with the sums of the sample as a whole."""
    edges = large_graph()
    priority = torch.rand(
        edges.n_entity_ids, generator=torch.Generator().manual_seed(1)
    )
    chunk = paths.CHUNK_ROWS
    ranges = []
    count_rules = path_rules.count_rules

    def record(edges, labels, length, sources):
        ranges.append((sources.low, sources.high))
        return count_rules(edges, labels, length, sources)

    monkeypatch.setattr(path_rules, "count_rules", record)

    def estimates(cost):
        budget = Budget(max_rows=10**12, seconds=1e9)
        found = to_count([[0, 3], [2, 0]], cost)
        parts = path_rules.estimate(
            edges, found, priority, budget, 0.4 * 2 * cost
        )
        rules = [part.rules for part in parts]
        assert budget.rows == pytest.approx(0.4 * 2 * cost)
        return tree.map(lambda *column: torch.cat(column), *rules)

    whole, parted = estimates(1.0), estimates(12.5 * chunk)
    for column, other in zip(parted, whole, strict=True):
        assert torch.equal(column, other)
    assert int((whole.std_error > 0).sum()) > 0
    assert ranges[0] == (0.0, 0.4)
    ends = [0.0, 0.08, 0.16, 0.24, 0.32, 0.4]
    both = 2 * [*itertools.pairwise(ends)]
    assert ranges[1:] == [pytest.approx(ends) for ends in both]


def test_a_sample_that_shows_no_difference_has_an_error_all_the_same():
    """All sources seen derive one fact from one pair: the others may differ."""
    facts = [(p, x, x + 500) for p in (1, 2) for x in range(1, 101)]
    edges = paths.build_edge_index(torch.tensor(facts), 2, 601)
    priority = torch.linspace(0, 0.999, edges.n_entity_ids)
    some = SourceRange(priority, 0.0, 0.05)
    labels = padded([[0, 2]])
    sums = path_rules.count_rules(edges, labels, 1, some).sums
    rules = path_rules.estimate_rules(edges, labels, some, sums)
    assert mined_rules.confidence(rules).tolist() == [1.0]
    assert 0 < float(rules.std_error) < 0.2


def test_a_sample_without_a_source_of_the_body_has_an_unknown_error():
    edges = edges_of([(1, 6, 1), (2, 6, 1)])
    some = SourceRange(torch.arange(7) / 7, 0.0, 0.5)
    labels = padded([[0, 2]])
    sums = path_rules.count_rules(edges, labels, 1, some).sums
    rules = path_rules.estimate_rules(edges, labels, some, sums)
    assert rules.std_error.tolist() == [float("inf")]


def test_every_clause_of_the_table_is_a_path():
    assert set(clauses_of(to_count(LABELS).rules)) <= set(path_clauses(5))
