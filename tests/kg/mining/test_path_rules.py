"""Path rules found by extending bodies: their counts are those of brute force; plans keep to their limit."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings

from funcppo.kg.mining import path_rules, paths
from funcppo.kg.mining.mined_rules import Budget, Thresholds
from tests.kg.mining.brute_force import (
    brute_force,
    clauses_of,
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
