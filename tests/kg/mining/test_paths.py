"""Indexes of edges, and walks along bodies: both equal Python sets and dictionaries."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.kg.mining import paths
from funcppo.kg.mining.counts import Budget, path_labels
from funcppo.kg.mining.paths import SourceRange
from tests.kg.mining.brute_force import (
    edge_sets,
    edges_of,
    graphs,
    path_counts,
    unlimited,
)

EVERYONE = SourceRange(torch.zeros(7))


def walks(facts, body, sources):
    """The number of walks of a body between each pair that it joins."""
    steps = edge_sets(facts)
    counts = {(x, x): 1 for x in sources}
    for label in body:
        after = {}
        for (x, y), n in counts.items():
            for y2, z in steps[label]:
                if y == y2:
                    after[x, z] = after.get((x, z), 0) + n
        counts = after
    return counts


def code_of(body):
    code = 0
    for label in body:
        code = code * 4 + label
    return code


def table_of(pairs):
    """The pairs of each body, with their numbers of paths; each pair once a body."""
    rows = list(
        zip(
            pairs.body_code[pairs.body].tolist(),
            pairs.source.tolist(),
            pairs.target.tolist(),
            pairs.n_paths.tolist(),
        )
    )
    table = {row[:3]: row[3] for row in rows}
    assert len(table) == len(rows)
    return table


def expected_walks(facts, bodies, sources=range(1, 7)):
    return {
        (code_of(body), x, y): n
        for body in bodies
        for (x, y), n in walks(facts, body, sources).items()
    }


@given(graphs, st.integers(1, 3))
def test_walks_are_those_over_sets(facts, length):
    edges = edges_of(facts)
    bodies = list(itertools.product(range(4), repeat=length))[::3]
    codes = torch.tensor([code_of(body) for body in bodies])
    block = paths.walk(edges, codes, length, EVERYONE)
    assert table_of(paths.joined_pairs(block)) == expected_walks(facts, bodies)
    assert (torch.diff(block.row_body) >= 0).all()
    assert (torch.diff(block.entry_row) >= 0).all()

    middle = len(bodies) // 2
    part = paths.select_bodies(block, 1, middle)
    assert table_of(paths.joined_pairs(part)) == expected_walks(
        facts, bodies[1:middle]
    )


@given(graphs, st.integers(1, 5))
def test_walks_in_parts_are_those_over_sets(facts, length):
    """Parts of few entries; the work of a step is what the walks of its prefix go on by."""
    edges = edges_of(facts)
    bodies = list(itertools.product(range(4), repeat=length))[:: 3**length // 3]
    codes = torch.tensor([code_of(body) for body in bodies])
    spent = []
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "CHUNK_ROWS", 3)
        for block in paths.walk_in_parts(
            edges, codes, length, EVERYONE, spent.append
        ):
            part = table_of(paths.joined_pairs(block))
            assert not part.keys() & found.keys()
            found |= part
    assert found == expected_walks(facts, bodies)
    assert bool(spent) == (length > 1) or not found
    assert length == 1 or sum(spent) >= len(found)


@given(graphs)
def test_a_range_of_sources_walks_from_these_alone(facts):
    edges = edges_of(facts)
    bodies = list(itertools.product(range(4), repeat=2))
    codes = torch.tensor([code_of(body) for body in bodies])
    everyone = SourceRange(torch.arange(7) / 7)
    some = everyone._replace(low=2 / 7, high=4 / 7)
    expected = expected_walks(facts, bodies, sources=(2, 3))
    block = paths.walk(edges, codes, 2, some)
    assert table_of(paths.joined_pairs(block)) == expected
    whole = paths.walk(edges, codes, 2, everyone)
    chosen = paths.select_sources(whole, some)
    assert table_of(paths.joined_pairs(chosen)) == expected


@given(facts=graphs)
def test_extended_bodies_are_walks_of_one_label_more(facts):
    edges = edges_of(facts)
    prefixes = list(itertools.product(range(4), repeat=2))[::2]
    codes = torch.tensor([code_of(body) for body in prefixes])
    block = paths.walk(edges, codes, 2, EVERYONE)
    extended = paths.extend(edges, block, 1, 3)
    bodies = [(*body, label) for body in prefixes for label in (1, 2)]
    assert table_of(extended) == expected_walks(facts, bodies)


@given(graphs)
def test_the_index_lists_both_directions_of_every_fact(facts):
    edges = edges_of(facts)
    columns = (edges.source, edges.label, edges.target, edges.fact)
    listed = list(zip(*(column.tolist() for column in columns)))
    forward = [(x, 2 * p - 2, y, i) for i, (p, x, y) in enumerate(facts)]
    backward = [(y, 2 * p - 1, x, i) for i, (p, x, y) in enumerate(facts)]
    assert listed == sorted(forward + backward)

    steps = edge_sets(facts)
    cases = list(itertools.product(range(1, 7), range(4), range(1, 7)))
    source, label, target = torch.tensor(cases).unbind(1)
    assert paths.has_edge(edges, source, label, target).tolist() == [
        (x, y) in steps[at] for x, at, y in cases
    ]


@pytest.mark.parametrize("scale", [1, 1 << 24])
def test_keys_are_found_with_and_without_a_search(scale):
    """Keys of more bits than there are slots share one, so that a search decides."""
    keys = torch.tensor([1, 1, 3, 9, 9, 9, 14]) * scale
    index = paths.build_key_index(keys, 16 * scale)
    row, position = paths.find_keys(index, torch.arange(16) * scale)
    assert row.tolist() == [1, 3, 9, 14]
    assert position.tolist() == [0, 1, 2, 3]
    assert index.offsets.tolist() == [0, 2, 3, 6, 7]


@given(st.lists(st.integers(0, 50)), st.integers(1, 60))
def test_packed_ranges_cover_all_items_and_exceed_the_limit_alone(cost, limit):
    ranges = list(paths.pack(torch.tensor(cost).double(), limit))
    assert [i for a, b in ranges for i in range(a, b)] == list(range(len(cost)))
    for a, b in ranges:
        # A range begins in a multiple of the limit that the item before began.
        assert sum(cost[a:b]) < 2 * limit or b == a + 1


def test_runs_of_a_group_are_not_cut():
    group = torch.tensor([4, 4, 2, 2, 2, 7])
    cost = torch.tensor([3, 3, 1, 1, 1, 9])
    assert list(paths.pack_runs(group, cost, 5)) == [(0, 2), (2, 5), (5, 6)]
    assert not list(paths.pack_runs(group[:0], cost[:0], 5))


# -- bodies found from facts


def closed_rules(edges, length, min_support=1, budget=None):
    plan = paths.plan_closing(edges, length, 1e12)
    parts = paths.iter_closed_rules(
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
    for rule, support in zip(rules, closed.n_derived.tolist()):
        assert len(derived[rule]) == support
    return {rule: sorted(some) for rule, some in derived.items()}


@pytest.mark.parametrize("length", [4, 5])
@given(facts=graphs)
@settings(max_examples=20)
def test_closed_rules_are_those_of_brute_force(length, facts):
    edges = edges_of(facts)
    _, parts = closed_rules(edges, length)
    closed = paths.concatenate_closed(
        [paths.no_closed_rules(edges.label.device), *parts]
    )
    expected = {
        rule: sorted(derived)
        for rule, (derived, _, _) in path_counts(facts, [length]).items()
    }
    assert facts_by_labels(facts, edges, closed, length) == expected

    _, parts = closed_rules(edges, length, min_support=3)
    n_kept = sum(len(part.n_derived) for part in parts)
    assert n_kept == sum(len(some) >= 3 for some in expected.values())


def test_the_longer_half_is_made_where_it_is_less_work():
    """1 - 2 - 3 - 4 in a row: 3 walks of up to two steps from 1 and 5 from 2; 6 and 10 of up to three."""
    edges = edges_of([(1, 1, 2), (1, 2, 3), (1, 3, 4)])
    rows, _ = paths.closing_rows(edges, 4)
    assert rows.tolist() == [3 + 5, 5 + 5, 5 + 3]
    rows, is_forward = paths.closing_rows(edges, 5)
    assert rows.tolist() == [6 + 5, 10 + 5, 5 + 6]
    assert is_forward.tolist() == [True, True, False]


def test_heads_with_too_much_work_are_left_out_and_counted(monkeypatch):
    facts = [(1, x, y) for x in range(1, 7) for y in range(1, 7)] + [(2, 1, 2)]
    edges = edges_of(facts)
    whole = paths.plan_closing(edges, 5, 1e12)
    assert whole.predicates == (1, 0) and whole.n_left_out == 0
    little = paths.plan_closing(edges, 5, whole.n_rows / 2)
    assert little.predicates == (1,) and little.n_left_out == 1

    # A head with too many pairs is none, and so is any where the budget is spent.
    monkeypatch.setattr(paths, "MAX_CLOSED_PAIRS", 500)
    monkeypatch.setattr(paths, "CHUNK_ROWS", 2000)
    _, parts = closed_rules(edges, 5)
    assert [part is None for part in parts] == [False, True]
    budget = Budget(max_rows=10, seconds=1e9)
    budget.spend(10)
    _, parts = closed_rules(edges_of([(1, 1, 2), (1, 2, 3)]), 4, 1, budget)
    assert parts == [None]


def test_labels_beyond_the_numbers_are_left_out():
    facts = torch.tensor([[p, 1, 2] for p in range(1, 20_001)])
    edges = paths.build_edge_index(facts, 20_000, 2)
    assert paths.plan_closing(edges, 5, 1e18).predicates == ()


# -- circularity


@given(graphs)
def test_circular_facts_are_those_that_have_no_path_without_themselves(facts):
    edges = edges_of(facts)
    for length in (1, 2, 3):
        cases, expected, n_paths = [], [], []
        for body in itertools.product(range(4), repeat=length):
            for i, (_, x, y) in enumerate(facts):
                n = walks(facts, body, [x]).get((x, y))
                if n:
                    rest = facts[:i] + facts[i + 1 :]
                    cases.append((i, *body))
                    n_paths.append(float(n))
                    expected.append((x, y) not in walks(rest, body, [x]))
        if cases:
            table = torch.tensor(cases)
            found = paths.is_circular(
                edges, table[:, 0], table[:, 1:], torch.tensor(n_paths)
            )
            assert found.tolist() == expected
