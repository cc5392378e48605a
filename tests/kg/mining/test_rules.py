"""What is sampled, counts of given rules, and long rules: against brute force; the miner counts all kinds so."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.kg.mining import counts, paths, rules
from tests.kg.mining.brute_force import (
    brute_force,
    clauses_of,
    counts_of,
    edges_of,
    facts_by_rule,
    graphs,
    no_found,
    path_counts,
    unlimited,
)

EVERY = 1, 0.0  # the least support and confidence


def samples_of(edges, max_length, max_rows=1e12):
    """The samples of each length, every body extended where the rows suffice."""
    priority = torch.linspace(0, 0.99, edges.n_entity_ids)
    samples = list(rules.iter_first_bodies(edges, unlimited()))
    yield 1, samples
    for length in range(1, max_length):
        bodies = bodies_of(edges, samples)
        plan = rules.plan_extensions(edges, bodies, length, max_rows)
        how = length, priority, unlimited()
        samples = list(rules.iter_extensions(edges, plan, *how))
        yield length + 1, samples


def bodies_of(edges, samples):
    several = [rules.summarise_bodies(edges, sample) for sample in samples]
    return counts.concatenate(several)


def dense_graph():
    """300 entities, 2 predicates, 3,000 facts."""
    draw = Random(0).randint
    facts = {(draw(1, 2), draw(1, 300), draw(1, 300)) for _ in range(3000)}
    return paths.build_edge_index(torch.tensor(sorted(facts)), 2, 300)


def test_what_does_not_fit_is_sampled_and_then_left_out():
    edges = dense_graph()
    (_, _), (_, longer) = samples_of(edges, 2)
    bodies = bodies_of(edges, longer)
    whole = rules.plan_extensions(edges, bodies, 2, 1e12)
    assert whole.fraction == 1.0 and whole.n_left_out == 0

    half = rules.plan_extensions(edges, bodies, 2, whole.n_rows / 2)
    assert half.fraction == pytest.approx(0.5) and half.n_left_out == 0
    assert half.n_rows == pytest.approx(whole.n_rows / 2)

    # Of 300 entities at least 64 are sources, which does not fit.
    little = rules.plan_extensions(edges, bodies, 2, whole.n_rows / 20)
    assert little.fraction == pytest.approx(64 / 300)
    assert little.n_left_out > 0
    assert len(little.bodies.code) + little.n_left_out == len(bodies.code)
    assert little.n_rows <= whole.n_rows / 20


# -- counts of given rules

LABELS = [
    *([head, body] for head in (0, 2) for body in range(4)),
    *([0, first, last] for first in range(4) for last in range(4)),
    [2, 0, 1, 2],
    [0, 0, 1, 0],
    [2, 3, 3, 0],
    [0, 2, 2, 2],
]


def padded(labels):
    """Labels of rules as the columns of a table."""
    width = counts.MAX_RULE_ATOMS
    return torch.tensor([row + [-1] * (width - len(row)) for row in labels])


def to_count(labels, cost=1.0):
    """Rules without counts."""
    table = padded(labels)
    zeros = torch.zeros(len(table), dtype=torch.float64)
    edges = edges_of([(1, 1, 1)])
    return paths.make_rules(edges, table, [zeros] * 4, zeros + cost)


def counted(edges, found, priority, budget=None):
    limits = budget or unlimited(), 1.0
    return list(rules.count_path_rules(edges, found, priority, *limits))


@pytest.mark.parametrize("chunk_rows", [2, paths.CHUNK_ROWS])
@given(facts=graphs)
def test_exact_counts_are_those_of_brute_force(chunk_rows, facts):
    """Also in parts of few sources, and rules a few at a time."""
    edges = edges_of(facts)
    priority = torch.arange(7) / 7
    budget = unlimited()
    found = to_count(LABELS)
    clauses = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "CHUNK_ROWS", chunk_rows)
        parts = counted(edges, found, priority, budget=budget)
    for part in parts:
        table = part.rules
        clauses += clauses_of(table)
        assert counts_of(table) == brute_force(facts, clauses_of(table))
        n_derived = [len(some) for some in facts_by_rule(facts, part)]
        assert n_derived == table.n_derived.tolist()
    assert sorted(clauses) == sorted(clauses_of(found))
    assert budget.rows > 0
    budget = counts.Budget(max_rows=10, seconds=1e9)
    budget.spend(10)
    assert not counted(edges, found, priority, budget=budget)


# -- long rules


def start_search(edges, length, **options):
    """A search without a limit, and the rules of one length that derive a fact from others."""
    defaults = {
        "priority": torch.linspace(0, 0.99, edges.n_entity_ids),
        "thresholds": EVERY,
        "budget": unlimited(),
        "share": 1.0,
    }
    options = defaults | options
    search = rules.LongPathSearch(edges=edges, length=length, **options)
    plan = paths.plan_closing(edges, length, 1e12)
    parts = paths.iter_closed_rules(edges, plan, length, 1, unlimited(), 1.0)
    return search, counts.concatenate_found([no_found(edges), *parts])


def found_rules(search, closed, to_beat):
    first = search.count_range(closed, 0.0, rules.RANGE_ENDS[0])
    for batch in search.iter_batches(first):
        yield search.find_rules(batch, to_beat)


def test_pca_pairs_are_those_of_a_clause():
    facts = [(1, 1, 2), (1, 1, 3), (1, 3, 4), (1, 4, 5), (1, 5, 2), (2, 5, 6)]
    edges = edges_of(facts)
    lowest = torch.full((len(facts),), -1.0).double()
    search, closed = start_search(edges, 4)
    for found in found_rules(search, closed, lowest):
        clauses = clauses_of(found.rules)
        assert counts_of(found.rules) == brute_force(facts, clauses)


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
            wins = counts.held_out_smoothed_confidence(found.rules) > score
            labels[-1] |= set(map(tuple, found.rules.labels[wins].tolist()))
    assert labels[0] == labels[1]


def test_rules_below_the_thresholds_are_dropped():
    facts = [(1, x, y) for x in range(1, 4) for y in range(1, 7)]
    search, closed = start_search(edges_of(facts), 4, thresholds=(3, 0.5))
    lowest = torch.full((len(facts),), -1.0).double()
    (found,) = found_rules(search, closed, lowest)
    expected = {
        rule
        for rule, (derived, support, pairs) in path_counts(facts, [4]).items()
        if len(derived) >= 3
        and len(derived) >= 0.5 * (pairs - support + len(derived))
    }
    labels = found.rules.labels.tolist()
    kept = {tuple(x for x in row if x >= 0) for row in labels}
    assert kept == expected and expected

    # Nothing is counted where the budget does not suffice.
    budget = counts.Budget(max_rows=10, seconds=1e9)
    search, closed = start_search(edges_of(facts), 4, budget=budget)
    assert search.find_rules(closed, lowest) is None
    assert budget.rows >= 10
