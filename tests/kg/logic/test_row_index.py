"""Keys of rows: sorted, told apart, found; a table on huge pages; calls of PyTorch that type checkers do not know."""

import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.logic import row_index


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_large_table_in_huge_pages_is_the_same_table_elsewhere(dtype):
    table = torch.arange(
        row_index.MIN_HUGE_PAGE_BYTES // dtype.itemsize, dtype=dtype
    ).view(2, -1)
    copied = row_index.on_huge_pages(table)
    assert copied.dtype == dtype and torch.equal(copied, table)
    is_copy = copied.data_ptr() != table.data_ptr()
    assert is_copy == hasattr(mmap, "MADV_HUGEPAGE")
    small = table[:, 1:]
    assert row_index.on_huge_pages(small) is small


# -- test sorting


@st.composite
def key_tensors(draw):
    """Random keys with repetitions: from the smallest that are packed to ones that do not fit beside a position."""
    packed = row_index.MIN_PACKED
    n = draw(st.sampled_from([0, 1, 2, 100, packed, 2 * packed]))
    high = draw(st.sampled_from([1, 7, 2**20, 2**51, 2**52, 2**63 - 1]))
    low = draw(st.sampled_from([0, 0, -5]))
    seed = draw(st.integers(0, 2**30))
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (n,), generator=generator)


@given(key_tensors())
def test_they_are_those_of_torch(key):
    expected, order = torch.sort(key, stable=True)
    assert torch.equal(row_index.sort_values(key), expected)
    found = row_index.sort_keys(key)
    assert found.key.dtype == key.dtype
    assert torch.equal(found.key, expected)
    assert torch.equal(found.order, order)

    distinct, inverse, counts = torch.unique(
        key, return_inverse=True, return_counts=True
    )
    assert torch.equal(row_index.unique_values(key), distinct)
    found = row_index.unique_inverse(key)
    assert torch.equal(found.key, distinct)
    assert torch.equal(found.inverse, inverse)
    assert torch.equal(row_index.value_counts(key), counts)
    first = row_index.first_of_run(expected).nonzero().squeeze(1)
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    assert torch.equal(first, ends[: len(counts)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_sorts_the_same():
    key = torch.randint(0, 99, (3 * row_index.MIN_PACKED,))
    for here, there in zip(
        row_index.sort_keys(key), row_index.sort_keys(key.cuda())
    ):
        assert torch.equal(here, there.cpu())


# -- test row index

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


@given(row_tables())
def test_keys_compare_as_rows_do(table):
    rows, bits = table
    key = row_index.encode_rows(columns_of(rows), bits).key.tolist()
    order = lambda of: sorted(range(len(rows)), key=lambda i: (of[i], i))
    assert order(rows) == order(key)
    assert len(set(key)) == len({tuple(row) for row in rows})


@given(row_tables(), st.lists(st.integers(0, 7), min_size=4, max_size=4))
def test_a_row_encodes_to_its_key_and_no_other_prefix_does(table, other):
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
    keys = torch.sort(encoded.key)[0]
    is_row = found & row_index.binary_search(keys, key).found
    assert bool(is_row) == (probe in rows)


@given(row_tables())
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
def test_a_hash_table_answers_as_a_dictionary(entries, others):
    pairs = torch.tensor(list(entries.items()), dtype=torch.int64).view(-1, 2)
    table = row_index.build_hash_table(pairs)
    probes = [*entries, *others]
    asked = torch.tensor(probes, dtype=torch.int64)
    value, found = row_index.hash_lookup(table, asked)
    assert found.tolist() == [key in entries for key in probes]
    assert value.tolist() == [entries.get(key, 0) for key in probes]


@given(st.lists(st.integers(0, 5), max_size=20))
def test_runs_are_those_of_the_sorted_list(values):
    values = sorted(values)
    column = torch.tensor(values, dtype=torch.int64)
    encoded = row_index.run_length_encode(column)
    start, length = row_index.decode_span(encoded[:, 1])
    expected = [
        (v, values.index(v), values.count(v)) for v in sorted(set(values))
    ]
    found = zip(encoded[:, 0].tolist(), start.tolist(), length.tolist())
    assert list(found) == expected
