"""Integer rows as keys: sort them, tell equal ones apart, and look one up by binary search or by hashing.

`encode_rows` packs a row column by column, `key << bits | column`, as long as 63 bits hold the result. Where they do
not, it replaces the key so far by its rank among the distinct keys so far; the sorted distinct keys are then a *prefix
table*. Two ids out of 5 million fit one key; a wider row needs a few prefix tables, whatever its width.

`build_hash_table` and `hash_lookup` find a key at a cost that hardly depends on the number of keys; `binary_search`
needs nothing but the sorted keys. On the host numpy sorts keys, much faster than torch does. A sort that must tell
where each key came from packs the position into its low bits, where 63 bits hold both.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from funcppo.core import tree
from funcppo.core.types import I32, I64, Bool

TableT = TypeVar("TableT", bound=tuple[Any, ...])
# bytes; smaller tables are within reach of the processor's caches
MIN_HUGE_PAGE_BYTES = 1 << 25


def on_huge_pages(table: Tensor) -> Tensor:
    """Copy a large CPU tensor onto huge pages where the system grants them.

    Returns:
      The copy; the tensor itself if it is small or on another device, or if there are no huge pages.
    """
    is_large = (
        table.device.type == "cpu" and table.nbytes >= MIN_HUGE_PAGE_BYTES
    )
    if not is_large or not hasattr(mmap, "MADV_HUGEPAGE"):
        return table
    try:
        memory = mmap.mmap(
            -1, table.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without huge pages, or no memory for a copy
        return table

    source = table.numpy()
    copy = np.frombuffer(memory, dtype=source.dtype).reshape(table.shape)
    np.copyto(copy, source)
    return from_numpy(copy)


# -- typed torch


def count_to(n: int, like: Tensor) -> I64[Tensor, "n"]:
    """Return 0, 1, ..., n - 1 on the device of another tensor."""
    return torch.arange(n, device=like.device)


def row_numbers(x: Tensor) -> I64[Tensor, "n"]:
    """Return the numbers of the rows of a tensor, 0, 1, ..., on its device."""
    return count_to(len(x), x)


def true_rows(mask: Bool[Tensor, "n"]) -> I64[Tensor, "m"]:
    """Return the numbers of the rows in which a mask is true, ascending."""
    return mask.nonzero().squeeze(1)


def from_numpy(array: np.ndarray) -> Tensor:
    """Return a CPU tensor that shares the memory of an array."""
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]


def broadcast(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors as views of their common broadcast shape."""
    views = torch.broadcast_tensors(a, b)  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    return cast("tuple[Tensor, Tensor]", views)


def int_list(values: I64[Tensor, "n"]) -> list[int]:
    """Return the integers of a one-dimensional tensor as a Python list."""
    return cast("list[int]", values.tolist())  # pyright: ignore[reportUnknownMemberType]


def atom_tuples(atoms: I32[Tensor, "n W"]) -> list[tuple[int, ...]]:
    """Return each atom of a table as a tuple of ids, padding included."""
    rows = cast("list[list[int]]", atoms.tolist())  # pyright: ignore[reportUnknownMemberType]
    return [tuple(row) for row in rows]


def rule_tuples(
    rules: I32[Tensor, "R M W"],
) -> list[list[tuple[int, ...]]]:
    """Return each rule of a table as a list of atom tuples, head first, padding atoms included."""
    tables = cast("list[list[list[int]]]", rules.tolist())  # pyright: ignore[reportUnknownMemberType]
    return [[tuple(atom) for atom in table] for table in tables]


def unique_rows(table: Tensor) -> Tensor:
    """Return the distinct rows of a table, in lexicographic order."""
    return cast("Tensor", torch.unique(table, dim=0))  # pyright: ignore[reportUnknownMemberType]


def unique_rows_with_inverse(
    table: Tensor,
) -> tuple[Tensor, I64[Tensor, "n"]]:
    """Return the distinct rows of a table in lexicographic order, and the position of each row among them."""
    result = torch.unique(table, dim=0, return_inverse=True)  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    return cast("tuple[Tensor, Tensor]", result)


def runs(values: Tensor) -> tuple[Tensor, I64[Tensor, "r"]]:
    """Return the value and the length of each run of equal consecutive values."""
    result = torch.unique_consecutive(values, return_counts=True)  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    return cast("tuple[Tensor, Tensor]", result)


# -- sorting

KEY_BITS = 63  # bits of a non-negative int64
# below this many keys a sort by torch takes less than packing does
MIN_PACKED = 2048
# values that numpy sorts in one call, in well under a second: Python answers a signal between two calls
MAX_SORTED_AT_ONCE = 1 << 24


class SortedKeys(NamedTuple):
    """Keys in ascending order, with the position that each had before."""

    key: I64[Tensor, "n"]
    # where each was before; equal keys stay in their order
    order: I64[Tensor, "n"]


class UniqueKeys(NamedTuple):
    """Distinct keys in ascending order, and the position of each original key among them."""

    key: I64[Tensor, "d"]  # ascending
    inverse: I64[Tensor, "n"]  # position of each key among them


def sort_values(values: Tensor) -> Tensor:
    """Return the values of a one-dimensional integer tensor, ascending."""
    if values.is_cuda or len(values) < MIN_PACKED:
        return torch.sort(values).values
    array = values.numpy().copy()
    _sort_in_place(array)
    return from_numpy(array)


def sort_keys(key: I64[Tensor, "n"]) -> SortedKeys:
    """Sort keys stably; return them with the positions that they had."""
    position_bits = max(len(key) - 1, 0).bit_length()
    if key.is_cuda or len(key) < MIN_PACKED:
        return SortedKeys(*torch.sort(key, stable=True))
    least, most = (int(bound) for bound in torch.aminmax(key))
    if least < 0 or most.bit_length() + position_bits > KEY_BITS:
        return SortedKeys(*torch.sort(key, stable=True))
    # In place, because tables may have tens of millions of rows.
    packed = key.numpy().astype(np.int64)
    packed <<= position_bits
    packed |= np.arange(len(key))
    _sort_in_place(packed)
    order = packed & ((1 << position_bits) - 1)
    packed >>= position_bits
    return SortedKeys(from_numpy(packed).to(key.dtype), from_numpy(order))


def unique_values(values: Tensor) -> Tensor:
    """Return the distinct values of an integer tensor, ascending."""
    ascending = sort_values(values.reshape(-1))
    return ascending[first_of_run(ascending)]


def unique_inverse(values: I64[Tensor, "n"]) -> UniqueKeys:
    """Return the distinct values of a tensor, ascending, and the position of each value among them."""
    key, order = sort_keys(values)
    is_first = first_of_run(key)
    rank = is_first.cumsum(0) - 1
    inverse = torch.empty_like(order).scatter(0, order, rank)
    return UniqueKeys(key[is_first], inverse)


def value_counts(values: I64[Tensor, "n"]) -> I64[Tensor, "d"]:
    """Count how often each distinct value occurs, in ascending order of the values."""
    return runs(sort_values(values))[1]


def first_of_run(sorted_key: Tensor) -> Bool[Tensor, "n"]:
    """Return a mask of the first element of each run of equal values."""
    is_new = sorted_key[1:] != sorted_key[:-1]
    return torch.cat(
        [torch.ones_like(sorted_key[:1], dtype=torch.bool), is_new]
    )


def best_first(score: Tensor) -> I64[Tensor, "n"]:
    """Return the rows of a tensor by descending value; equal ones stay in their order."""
    return torch.sort(score, descending=True, stable=True).indices


def sort_rows(
    rows: I64[Tensor, "n"], *keys: I64[Tensor, "m"]
) -> I64[Tensor, "n"]:
    """Sort rows by the first of their keys, then by the second, ...; equal ones stay in their order."""
    for key in reversed(keys):
        rows = rows[sort_keys(key[rows]).order]
    return rows


# -- tables of columns


def select_rows(table: TableT, rows: Tensor | slice) -> TableT:
    """Return the rows of a table of columns that are given, or where a mask is true."""
    return tree.map(lambda column: column[rows], table)


def concatenate(tables: Iterable[TableT]) -> TableT:
    """Return the rows of all tables of columns, at least one, in one table."""
    return tree.map(lambda *columns: torch.cat(columns), *tables)


def _sort_in_place(array: np.ndarray) -> None:
    """Sort integers in many short calls: split at the median and sort both halves."""
    if len(array) <= MAX_SORTED_AT_ONCE:
        array.sort()
        return
    middle = len(array) // 2
    array.partition(middle)
    _sort_in_place(array[:middle])
    _sort_in_place(array[middle:])


# -- row index

# bits of a number of rows; a start and a count share one int64
ROW_COUNT_BITS = 31
# odd; Steele and Vigna 2021, arXiv:2001.05304
HASH_MULTIPLIER = 0x2545F4914F6CDD1D


class HashTable(NamedTuple):
    """Distinct keys grouped by bucket: a lookup reads memory in two places, however many keys there are."""

    # [buckets + 1]: entries of bucket b are offsets[b] to offsets[b + 1]
    bucket_offsets: I32[Tensor, "..."]
    # [2 D]: key and value in turn, grouped by bucket
    entries: I64[Tensor, "..."]
    # [size of the fullest bucket]: 0, 1, ...; only its length counts
    bucket_slots: I64[Tensor, "..."]


class Lookup(NamedTuple):
    """Result of a lookup, per key: its value or position, and whether it was found."""

    # value or position of each key; arbitrary where it was not found
    value: I64[Tensor, "..."]
    found: Bool[Tensor, "..."]


class EncodedRows(NamedTuple):
    """Integer keys of the rows of a table, and what is needed to encode other rows alike."""

    # prefix tables, needed to encode other rows alike
    key_prefixes: tuple[Tensor, ...]
    key: I64[Tensor, "N"]  # rows compare as their keys do


class Span(NamedTuple):
    """Ranges of consecutive rows, each a start and a length."""

    start: I64[Tensor, "..."]
    length: I64[Tensor, "..."]


def spans(offsets: I64[Tensor, "G1"], group: I64[Tensor, "n"]) -> Span:
    """Return the rows of each group: group g has those from offsets[g] to below offsets[g + 1]."""
    start = offsets[group]
    return Span(start, offsets[group + 1] - start)


def find_spans(keys: Tensor, key: I64[Tensor, "..."]) -> Span:
    """Return the rows of ascending `keys` that equal each `key`."""
    start = torch.searchsorted(keys, key)
    stop = torch.searchsorted(keys, key, right=True)
    return Span(start, stop - start)


def build_hash_table(entries: I64[Tensor, "D 2"]) -> HashTable:
    """Build the hash table of (key, value) entries, whose keys are distinct and not negative."""
    if not len(entries):
        # An entry that matches no key.
        entries = torch.full((1, 2), -1, device=entries.device)

    offsets, order = _group_by_bucket(entries[:, 0])
    interleaved = entries.index_select(0, order).view(-1)

    # Free the inputs first, so that they and the copy on huge pages are not held at once.
    del entries, order
    fullest = int((offsets[1:] - offsets[:-1]).max())
    return HashTable(
        bucket_offsets=on_huge_pages(offsets),
        entries=on_huge_pages(interleaved),
        bucket_slots=torch.arange(fullest, device=offsets.device),
    )


def _group_by_bucket(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the start of each hash bucket, and the order of the keys by bucket."""
    n_buckets = 1 << max(keys.numel() - 1, 1).bit_length() - 1
    bucket, order = sort_keys(bucket_index(keys, n_buckets))
    bucket = bucket.to(torch.int32)
    boundaries = torch.arange(
        n_buckets + 1, device=keys.device, dtype=torch.int32
    )
    return torch.searchsorted(bucket, boundaries, out_int32=True), order


def bucket_index(key: Tensor, n_buckets: int) -> Tensor:
    """Return the hash bucket of each key, by multiplicative hashing; `n_buckets` is a power of two."""
    mixed = key * HASH_MULTIPLIER
    return (mixed ^ (mixed >> 32)) & (n_buckets - 1)


def hash_lookup(table: HashTable, key: I64[Tensor, "..."]) -> Lookup:
    """Look keys up in a hash table.

    Returns:
      value: the value of each key, 0 where the table does not hold it.
      found: whether the table holds the key.
    """
    flat = key.reshape(-1)
    fullest = table.bucket_slots.numel()
    n_buckets = table.bucket_offsets.numel() - 1

    # Read as many entries as the fullest bucket has, from the start of the key's bucket: one gather, no loop.
    windows = table.entries.unfold(0, 2 * fullest, 2)
    start = table.bucket_offsets.index_select(
        0, bucket_index(flat, n_buckets)
    ).clamp_max(len(windows) - 1)
    candidates = windows.index_select(0, start).view(-1, fullest, 2)

    # Keys are distinct, so at most one entry matches and a sum selects its value.
    matches = candidates[..., 0] == flat[:, None]
    value = torch.where(matches, candidates[..., 1], 0).sum(1)
    return Lookup(value.view(key.shape), matches.any(1).view(key.shape))


def run_length_encode(key: I64[Tensor, "n"]) -> I64[Tensor, "D 2"]:
    """Return (value, encoded span) for each run of an ascending tensor; `decode_span` reads the span."""
    start = true_rows(first_of_run(key))
    count = torch.diff(start, append=start.new_tensor([len(key)]))
    return torch.stack(
        [key.index_select(0, start), start << ROW_COUNT_BITS | count], dim=1
    )


def decode_span(span: I64[Tensor, "..."]) -> Span:
    """Return the start and the length of each run that `run_length_encode` encoded."""
    return Span(span >> ROW_COUNT_BITS, span & ((1 << ROW_COUNT_BITS) - 1))


def encode_rows(columns: Sequence[Tensor], bits: Sequence[int]) -> EncodedRows:
    """Encode the rows of a table as int64 keys that compare as the rows do.

    Args:
      columns: at least one tensor [N] of non-negative integers.
      bits: how many bits hold any value of each column.

    Returns:
      key_prefixes: the prefix tables that the keys needed; `encode_with_prefixes` takes them.
      key: [N], the key of every row.
    """
    prefixes: list[Tensor] = []
    key = columns[0].to(torch.int64).contiguous()
    used_bits = bits[0]
    for column, width in zip(columns[1:], bits[1:]):
        if used_bits + width > KEY_BITS:
            prefix, key = unique_inverse(key)
            prefixes.append(prefix)
            used_bits = prefix.numel().bit_length()
        key = key << width | column
        used_bits += width
    return EncodedRows(tuple(prefixes), key)


def encode_with_prefixes(
    key_prefixes: Sequence[Tensor],
    columns: Sequence[Tensor],
    bits: Sequence[int],
) -> Lookup:
    """Compute the keys that `encode_rows` gave to rows with these values.

    The caller excludes values that do not fit their bits.

    Returns:
      value: the key of each row.
      found: whether the prefix tables hold the row; without prefix tables always true.
    """
    remaining = list(key_prefixes)
    key = columns[0]
    used_bits = bits[0]
    found = torch.ones_like(key, dtype=torch.bool)
    for column, width in zip(columns[1:], bits[1:]):
        if used_bits + width > KEY_BITS:
            prefix = remaining.pop(0)
            key, hit = binary_search(prefix, key)
            found = found & hit
            used_bits = prefix.numel().bit_length()
        key = key << width | column
        used_bits += width
    return Lookup(key, found)


def offsets(lengths: I64[Tensor, "n"]) -> I64[Tensor, "n1"]:
    """Return where consecutive runs of the given lengths start, followed by where the last one ends: [n + 1]."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def binary_search(keys: Tensor, key: Tensor) -> Lookup:
    """Return the position of each `key` in ascending `keys` and whether it is found; `keys` may be empty."""
    if keys.numel() == 0:
        return Lookup(
            torch.zeros_like(key), torch.zeros_like(key, dtype=torch.bool)
        )
    position = torch.searchsorted(keys, key.contiguous())
    position = position.clamp_max(keys.numel() - 1)
    return Lookup(position, keys.take(position) == key)


def decode_rows(key: Tensor, bits: Sequence[int]) -> tuple[Tensor, ...]:
    """Return the columns that keys were encoded from; only for keys without prefix tables."""
    columns: list[Tensor] = []
    shift = sum(bits)
    for width in bits:
        shift -= width
        shifted = key >> shift if shift else key
        columns.append(shifted & ((1 << width) - 1))
    return tuple(columns)


def unique_columns(
    columns: Sequence[Tensor], bits: Sequence[int]
) -> tuple[Tensor, ...]:
    """Return the distinct rows of a table in lexicographic order, as columns."""
    prefixes, key = encode_rows(columns, bits)
    if not prefixes:
        return decode_rows(unique_values(key), bits)

    # Keys with prefix tables cannot be decoded: select the first row of each key instead.
    key, order = sort_keys(key)
    first = order[first_of_run(key)]
    return tuple(column.index_select(0, first) for column in columns)


# rows, and for each of them a position that belongs to it
RowPairs = tuple[I64[Tensor, "n"], I64[Tensor, "n"]]


def expand_ranges(start: I64[Tensor, "n"], count: I64[Tensor, "n"]) -> RowPairs:
    """Return all pairs (row, start[row] + i) with i < count[row]."""
    row = torch.repeat_interleave(count)
    shift = start - torch.cumsum(count, 0) + count
    number = torch.arange(len(row), device=start.device)
    return row, number + shift.index_select(0, row)
