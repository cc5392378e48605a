"""Keys of rows compare as the rows do; both lookups agree with a Python dictionary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.kg.logic import row_index

WIDE = 31  # bits of a column: two fit a key, a third needs a prefix table


@st.composite
def row_tables(draw):
    """Rows of one to four columns, and bits that hold their values: narrow, or so wide that one key is too short."""
    n_columns = draw(st.integers(1, 4))
    bits = draw(st.sampled_from([3, WIDE]))
    value = st.integers(0, 7).map(lambda v: v << (bits - 3))
    row = st.lists(value, min_size=n_columns, max_size=n_columns)
    return draw(st.lists(row, min_size=1, max_size=12)), [bits] * n_columns


def columns_of(rows):
    return torch.tensor(rows, dtype=torch.int64).unbind(1)


def test_a_narrow_row_is_packed_column_by_column():
    encoded = row_index.encode_rows(
        columns_of([[1, 2, 3], [0, 1, 0]]), [2, 3, 4]
    )
    assert encoded.key_prefixes == ()
    assert encoded.key.tolist() == [(1 << 7) + (2 << 4) + 3, 1 << 4]


@given(row_tables())
@settings(max_examples=200)
def test_keys_compare_as_rows_do(table):
    rows, bits = table
    key = row_index.encode_rows(columns_of(rows), bits).key.tolist()
    assert sorted(range(len(rows)), key=lambda i: (rows[i], i)) == sorted(
        range(len(rows)), key=lambda i: (key[i], i)
    )
    assert len(set(key)) == len({tuple(row) for row in rows})


@given(row_tables(), st.lists(st.integers(0, 7), min_size=4, max_size=4))
@settings(max_examples=200)
def test_a_row_encodes_to_its_key_again_and_an_unknown_prefix_is_reported(
    table, other
):
    rows, bits = table
    encoded = row_index.encode_rows(columns_of(rows), bits)
    again = row_index.encode_with_prefixes(
        encoded.key_prefixes, columns_of(rows), bits
    )
    assert again.found.all() and torch.equal(again.value, encoded.key)

    probe = [value << (width - 3) for value, width in zip(other, bits)]
    key, found = row_index.encode_with_prefixes(
        encoded.key_prefixes, columns_of([probe]), bits
    )
    is_row = found & (
        row_index.binary_search(torch.sort(encoded.key)[0], key).found
    )
    assert bool(is_row) == (probe in rows)


@given(row_tables())
@settings(max_examples=100)
def test_unique_columns_are_those_of_a_set(table):
    rows, bits = table
    columns = row_index.unique_columns(columns_of(rows), bits)
    assert list(
        map(list, zip(*(column.tolist() for column in columns)))
    ) == sorted(map(list, {tuple(r) for r in rows}))


@given(
    st.dictionaries(st.integers(0, 2**62), st.integers(0, 2**62), max_size=40),
    st.lists(st.integers(0, 2**62)),
)
@settings(max_examples=200)
def test_a_hash_table_answers_as_a_dictionary(entries, others):
    pairs = torch.tensor(list(entries.items()), dtype=torch.int64).view(-1, 2)
    table = row_index.build_hash_table(pairs)
    probes = [*entries, *others]
    value, found = row_index.hash_lookup(
        table, torch.tensor(probes, dtype=torch.int64)
    )
    assert found.tolist() == [key in entries for key in probes]
    assert value.tolist() == [entries.get(key, 0) for key in probes]


@given(st.lists(st.integers(0, 5), max_size=20))
def test_runs_are_those_of_the_sorted_list(values):
    values = sorted(values)
    encoded = row_index.run_length_encode(
        torch.tensor(values, dtype=torch.int64)
    )
    start, length = row_index.decode_span(encoded[:, 1])
    expected = [
        (v, values.index(v), values.count(v)) for v in sorted(set(values))
    ]
    assert (
        list(zip(encoded[:, 0].tolist(), start.tolist(), length.tolist()))
        == expected
    )


@pytest.mark.parametrize("bits", [[1], [3, 5], [7, 1, 9]])
def test_decoding_undoes_encoding(bits):
    rows = [
        [(5 * i + j) % (1 << width) for j, width in enumerate(bits)]
        for i in range(10)
    ]
    key = row_index.encode_rows(columns_of(rows), bits).key
    assert [
        list(row)
        for row in zip(*(c.tolist() for c in row_index.decode_rows(key, bits)))
    ] == rows


def test_a_search_in_an_empty_table_finds_nothing():
    position, found = row_index.binary_search(
        torch.empty(0, dtype=torch.int64), torch.tensor([3, 4])
    )
    assert position.tolist() == [0, 0] and not found.any()
