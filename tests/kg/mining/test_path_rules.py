"""Path rules and their counts, exact and estimated, against brute force."""

from __future__ import annotations

import itertools
from random import Random

import pytest
import torch
from hypothesis import given, settings

from funcppo.core import tree
from funcppo.kg.mining import mined_rules, path_rules, paths
from funcppo.kg.mining.mined_rules import Budget, FoundRules, Thresholds
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

EVERY = Thresholds(min_support=1, min_confidence=0.0)


def unlimited():
    return Budget(max_rows=10**12, seconds=1e9)


def samples_of(edges, max_length, max_rows=1e12):
    """The samples of each length, every body extended where the rows suffice."""
    priority = torch.linspace(0, 0.99, edges.n_entity_ids)
    samples = list(path_rules.iter_first_bodies(edges, unlimited()))
    yield 1, samples
    for length in range(1, max_length):
        bodies = path_rules.concatenate_bodies(
            [path_rules.summarise_bodies(edges, sample) for sample in samples]
        )
        plan = path_rules.plan_extensions(edges, bodies, length, max_rows)
        samples = list(
            path_rules.iter_extensions(
                edges, plan, length, priority, unlimited()
            )
        )
        yield length + 1, samples


def rules_of(edges, sample, length, thresholds=EVERY):
    candidates = path_rules.find_candidates(edges, sample.pairs, thresholds)
    lowest = torch.full((len(edges.predicate),), -1.0).double()
    return [
        path_rules.find_rules(
            edges, sample, length, candidates, rows, thresholds, lowest
        )
        for rows in path_rules.pack_candidates(candidates.table, length)
    ]


@pytest.mark.parametrize("chunk_rows", [3, 1 << 20])
@given(facts=graphs)
@settings(max_examples=20)
def test_path_counts_are_those_of_brute_force(chunk_rows, facts):
    """Of length 3 every seventh rule is compared: brute force over all takes long."""
    clauses = path_clauses(2)
    clauses += path_clauses(3)[len(clauses) :: 7]
    expected = {
        clause: (support, circular, pairs)
        for clause, (support, circular, pairs, _) in zip(
            clauses, brute_force(facts, clauses)
        )
        if support - circular > 0
    }
    edges, seen = edges_of(facts), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(path_rules, "CHUNK_ROWS", chunk_rows)
        for length, samples in samples_of(edges, 3):
            for sample in samples:
                # A body beyond MAX_BODY_ROWS alone is sampled.
                assert sample.fraction == 1.0
                for found in rules_of(edges, sample, length):
                    derived = facts_by_rule(facts, found)
                    columns = (
                        found.rules.support,
                        found.rules.circular_support,
                        found.rules.body_pairs,
                    )
                    counts = zip(*(column.int().tolist() for column in columns))
                    for i, (clause, row) in enumerate(
                        zip(clauses_of(found.rules), counts)
                    ):
                        assert clause not in seen
                        seen[clause] = row
                        assert len(derived[i]) == row[0] - row[1]
    assert {clause: seen.get(clause) for clause in expected} == expected
    assert all(clause in expected for clause in set(seen) & set(clauses))


def dense_graph():
    """300 entities, 2 predicates, 3,000 facts."""
    random = Random(0)
    facts = {
        (random.randint(1, 2), random.randint(1, 300), random.randint(1, 300))
        for _ in range(3000)
    }
    return paths.build_edge_index(torch.tensor(sorted(facts)), 2, 300)


def test_what_does_not_fit_is_sampled_and_then_left_out():
    edges = dense_graph()
    (_, _), (_, longer) = samples_of(edges, 2)
    bodies = path_rules.concatenate_bodies(
        [path_rules.summarise_bodies(edges, sample) for sample in longer]
    )
    whole = path_rules.plan_extensions(edges, bodies, 2, 1e12)
    assert whole.fraction == 1.0 and whole.n_left_out == 0

    half = path_rules.plan_extensions(edges, bodies, 2, whole.n_rows / 2)
    assert half.fraction == pytest.approx(0.5) and half.n_left_out == 0
    assert half.n_rows == pytest.approx(whole.n_rows / 2)

    # Of 300 entities at least 64 are sources, which does not fit.
    little = path_rules.plan_extensions(edges, bodies, 2, whole.n_rows / 20)
    assert little.fraction == pytest.approx(64 / 300)
    assert little.n_left_out > 0
    assert len(little.bodies.code) + little.n_left_out == len(bodies.code)
    assert little.n_rows <= whole.n_rows / 20


def test_the_work_of_an_extension_is_what_was_planned():
    edges = dense_graph()
    budget = unlimited()
    samples = list(path_rules.iter_first_bodies(edges, budget))
    assert budget.rows == pytest.approx(len(edges.label), rel=0.01)
    bodies = path_rules.concatenate_bodies(
        [path_rules.summarise_bodies(edges, sample) for sample in samples]
    )
    plan = path_rules.plan_extensions(edges, bodies, 1, 1e12)
    budget = unlimited()
    priority = torch.zeros(edges.n_entity_ids)
    list(path_rules.iter_extensions(edges, plan, 1, priority, budget))
    assert budget.rows == pytest.approx(plan.n_rows)


def test_a_body_larger_than_a_chunk_is_counted_from_fewer_sources(monkeypatch):
    edges = dense_graph()
    monkeypatch.setattr(path_rules, "CHUNK_ROWS", 1000)
    monkeypatch.setattr(path_rules, "MAX_BODY_ROWS", 2000)
    (_, _), (_, longer) = samples_of(edges, 2)
    assert all(0 < sample.fraction < 1 for sample in longer)
    assert {len(sample.pairs.source) < 4000 for sample in longer} == {True}


def test_candidates_and_rules_keep_to_the_thresholds():
    facts = [(1, x, x + 1) for x in range(1, 6)]
    facts += [(2, x + 1, x) for x in range(1, 4)]
    edges = edges_of(sorted(facts))
    (sample,) = path_rules.iter_first_bodies(edges, unlimited())
    found_by_support = {}
    for support in (3, 4):
        thresholds = Thresholds(min_support=support, min_confidence=0.0)
        rules = rules_of(edges, sample, 1, thresholds)
        found_by_support[support] = [
            clause for found in rules for clause in clauses_of(found.rules)
        ]
    assert sorted(found_by_support[3]) == [
        ((1, 7, 8), (2, 8, 7)),
        ((2, 7, 8), (1, 8, 7)),
    ]
    assert found_by_support[4] == []
    thresholds = Thresholds(min_support=1, min_confidence=0.9)
    (found,) = rules_of(edges, sample, 1, thresholds)
    assert clauses_of(found.rules) == [((1, 7, 8), (2, 8, 7))]


# -- test counting

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
