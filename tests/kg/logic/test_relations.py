"""Views of a relation at some terms equal a scan of its rows."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.kg.logic.joins import (
    UNIT_TABLE,
    Relation,
    Table,
    distinct,
    find_rows,
    indexed_view,
    make_literal,
    select_rows,
)

N_CONSTANTS = 4
X, Y = 5, 6  # variables
rows_of_three = st.sets(
    st.tuples(*[st.integers(1, N_CONSTANTS)] * 3), min_size=1, max_size=20
).map(sorted)


def relation_of(rows) -> Relation:
    return Relation(
        tuple(torch.tensor(rows, dtype=torch.int64).unbind(1)), len(rows)
    )


def as_rows(columns):
    return list(zip(*(column.tolist() for column in columns)))


def test_a_view_worked_by_hand():
    relation = relation_of([(1, 2, 1), (1, 3, 2), (2, 2, 2)])
    view = indexed_view(
        make_literal(relation, (X, Y, X), N_CONSTANTS), (Y, X), 1, N_CONSTANTS
    )
    assert as_rows(view.columns) == [(2, 1), (2, 2)]
    assert view.row_offsets is not None and view.row_offsets.tolist() == [
        0,
        0,
        0,
        2,
        2,
        2,
    ]


@given(
    rows_of_three,
    st.tuples(*[st.sampled_from([1, 2, X, Y])] * 3),
    st.booleans(),
    st.integers(0, 2),
)
@settings(max_examples=200)
def test_a_view_holds_the_rows_that_agree_with_the_terms(
    rows, terms, reverse, n_indexed
):
    relation = relation_of(rows)
    literal = make_literal(relation, terms, N_CONSTANTS)
    variables = tuple(sorted(literal.variables, reverse=reverse))
    if not variables:
        return
    view = indexed_view(
        literal, variables, min(n_indexed, len(variables)), N_CONSTANTS
    )

    expected = set()
    for row in rows:
        binding = {}
        if all(
            value == binding.setdefault(t, value)
            if t > N_CONSTANTS
            else value == t
            for t, value in zip(terms, row)
        ):
            expected.add(tuple(binding[v] for v in variables))
    assert as_rows(view.columns) == sorted(expected) and view.size == len(
        expected
    )


def test_a_view_is_computed_once():
    relation = relation_of([(1, 2, 1), (1, 3, 2)])
    literal = make_literal(relation, (X, 2, Y), N_CONSTANTS)
    same_pattern = make_literal(relation, (Y, 2, X), N_CONSTANTS)
    view = indexed_view(literal, (X, Y), 1, N_CONSTANTS)
    assert indexed_view(same_pattern, (Y, X), 1, N_CONSTANTS) is view
    assert indexed_view(literal, (X, Y), 2, N_CONSTANTS) is not view
    # whose keys have more bits
    assert indexed_view(literal, (X, Y), 1, 2 * N_CONSTANTS) is not view


@given(
    rows_of_three,
    st.lists(
        st.tuples(*[st.integers(1, N_CONSTANTS)] * 3), min_size=1, max_size=10
    ),
)
def test_rows_are_found_where_they_stand(rows, probes):
    position, found = find_rows(
        tuple(torch.tensor(probes).unbind(1)), relation_of(rows), N_CONSTANTS
    )
    assert found.tolist() == [probe in rows for probe in probes]
    assert all(
        rows[p] == probe
        for p, probe, is_row in zip(position.tolist(), probes, found.tolist())
        if is_row
    )


def test_selecting_and_merging_rows():
    table = Table((X, Y), (torch.tensor([3, 1, 3]), torch.tensor([1, 2, 1])), 3)
    assert as_rows(
        select_rows(table, torch.tensor([True, False, True])).columns
    ) == [(3, 1), (3, 1)]
    assert as_rows(distinct(table, 3).columns) == [(1, 2), (3, 1)]
    assert distinct(Table((), (), 5), 3) == UNIT_TABLE
