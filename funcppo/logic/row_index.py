"""Order-preserving int64 keys of integer rows, and two ways to look a key up: by search, and by hash.

A row is packed column by column, `key << bits | column`, as long as 63 bits hold it. Where they do not, the key so far
is replaced by its rank among the distinct keys so far: a *level*. Two ids of an atom over 5 million constants fit one
key; a wide atom makes a short trie of levels, whatever its arity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.logic.hugepages import on_huge_pages
from funcppo.types import I32, I64, Bool

ROW_COUNT_BITS = 31  # bits of a number of rows; two of them share a value
_WORD = 63  # bits of a non-negative int64
HASH_MULTIPLIER = 0x2545F4914F6CDD1D  # odd; Steele and Vigna 2021, arXiv:2001.05304


class HashTable(NamedTuple):
    """Distinct keys grouped by bucket, so that a lookup reads memory in two places however many keys there are."""

    bucket_offsets: I32[
        Tensor, "..."
    ]  # [buckets + 1]: bucket b holds places start[b] to start[b + 1]; a power of two of them
    entries: I64[Tensor, "..."]  # [2 D]: key and value in turn, by bucket
    bucket_slots: I64[Tensor, "..."]  # [fullest]: 0, 1, ... for each key of the fullest bucket


def build_hash_table(entries: I64[Tensor, "D 2"]) -> HashTable:
    """The table of entries (key, value), whose keys are distinct and not negative."""
    if not len(entries):
        entries = torch.full((1, 2), -1, device=entries.device)
    start, order = _by_bucket(entries[:, 0])
    places = entries.index_select(0, order).view(-1)
    del entries, order  # so that they and the copy in huge pages are not held at once
    return HashTable(
        bucket_offsets=on_huge_pages(start),
        entries=on_huge_pages(places),
        bucket_slots=torch.arange(int((start[1:] - start[:-1]).max()), device=start.device),
    )


def _by_bucket(keys: Tensor) -> tuple[Tensor, Tensor]:
    n_buckets = 1 << max(keys.numel() - 1, 1).bit_length() - 1
    bucket, order = torch.sort(bucket_index(keys, n_buckets).to(torch.int32))
    edges = torch.arange(n_buckets + 1, device=keys.device, dtype=torch.int32)
    return torch.searchsorted(bucket, edges, out_int32=True), order


def run_length_encode(key: I64[Tensor, "n"]) -> I64[Tensor, "D 2"]:
    """Each distinct value of an ascending tensor, with the start and the length of its run in one number."""
    first = torch.cat([torch.ones_like(key[:1], dtype=torch.bool), key[1:] != key[:-1]]).nonzero().squeeze(1)
    count = torch.diff(first, append=first.new_tensor([len(key)]))
    return torch.stack([key.index_select(0, first), first << ROW_COUNT_BITS | count], dim=1)


def hash_lookup(table: HashTable, key: I64[Tensor, "..."]) -> tuple[I64[Tensor, "..."], Bool[Tensor, "..."]]:
    """The value of each key, 0 where there is none, and whether the table holds it."""
    flat, fullest = key.reshape(-1), table.bucket_slots.numel()
    windows = table.entries.unfold(0, 2 * fullest, 2)
    start = table.bucket_offsets.index_select(0, bucket_index(flat, table.bucket_offsets.numel() - 1)).clamp_max(
        len(windows) - 1
    )
    found = windows.index_select(0, start).view(-1, fullest, 2)
    same = found[..., 0] == flat[:, None]
    value = torch.where(same, found[..., 1], 0).sum(1)
    return value.view(key.shape), same.any(1).view(key.shape)


def bucket_index(key: Tensor, n_buckets: int) -> Tensor:
    mixed = key * HASH_MULTIPLIER
    return (mixed ^ (mixed >> 32)) & (n_buckets - 1)


def encode_rows(columns: Sequence[Tensor], bits: Sequence[int]) -> tuple[tuple[Tensor, ...], Tensor]:
    """The levels of a table, and the key of every row: rows compare as their keys do.

    Args:
      columns: at least one tensor [N] of integers, non-negative.
      bits: how many bits hold any value of each column.
    """
    levels: list[Tensor] = []
    key, used = columns[0].to(torch.int64).contiguous(), bits[0]
    for column, width in zip(columns[1:], bits[1:]):
        if used + width > _WORD:
            level, key = torch.unique(key, return_inverse=True)
            levels.append(level)
            used = level.numel().bit_length()
        key, used = key << width | column, used + width
    return tuple(levels), key


def encode_with_prefixes(
    key_prefixes: Sequence[Tensor], columns: Sequence[Tensor], bits: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The key that `pack` gave to rows with these values, and whether its levels know them.

    Values outside their bits are the caller's to exclude.
    """
    todo = list(key_prefixes)
    key, used, found = columns[0], bits[0], torch.ones_like(columns[0], dtype=torch.bool)
    for column, width in zip(columns[1:], bits[1:]):
        if used + width > _WORD:
            level = todo.pop(0)
            key, hit = binary_search(level, key)
            found, used = found & hit, level.numel().bit_length()
        key, used = key << width | column, used + width
    return key, found


def binary_search(keys: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Where `key` stands in ascending `keys`, and whether it does; `keys` may be empty."""
    if keys.numel() == 0:
        return torch.zeros_like(key), torch.zeros_like(key, dtype=torch.bool)
    at = torch.searchsorted(keys, key).clamp_max(keys.numel() - 1)
    return at, keys.take(at) == key


def decode_rows(key: Tensor, bits: Sequence[int]) -> tuple[Tensor, ...]:
    """The columns of keys that needed no level."""
    shifts = [sum(bits[j + 1 :]) for j in range(len(bits))]
    return tuple((key >> shift if shift else key) & ((1 << width) - 1) for shift, width in zip(shifts, bits))


def unique_rows(columns: Sequence[Tensor], bits: Sequence[int]) -> tuple[Tensor, ...]:
    """The distinct rows of a table in lexicographic order, column by column."""
    levels, key = encode_rows(columns, bits)
    if not levels:
        return decode_rows(torch.unique(key), bits)
    key, order = torch.sort(key)
    first = torch.cat([torch.ones_like(key[:1], dtype=torch.bool), key[1:] != key[:-1]])
    return tuple(column.index_select(0, order[first]) for column in columns)
