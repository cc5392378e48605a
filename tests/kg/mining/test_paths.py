"""Indexes of edges, and walks along bodies: both equal Python sets and dictionaries."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.mining import paths
from funcppo.kg.mining.paths import SourceRange
from tests.kg.mining.brute_force import edge_sets, edges_of, graphs

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
    columns = pairs.body_code[pairs.body], pairs.source, pairs.target
    columns += (pairs.n_paths,)
    rows = list(zip(*(column.tolist() for column in columns)))
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
    expected = expected_walks(facts, bodies[1:middle])
    assert table_of(paths.joined_pairs(part)) == expected


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
            asked = table[:, 0], table[:, 1:], torch.tensor(n_paths)
            found = paths.is_circular(edges, *asked)
            assert found.tolist() == expected
