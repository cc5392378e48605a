"""Order-preserving int64 keys of integer rows, and their lookup by `torch.searchsorted`.

A row is packed column by column, `key << bits | column`, as long as 63 bits hold it. Where they do not, the key so far
is replaced by its rank among the distinct keys so far: a *level*. Two ids of an atom over 5 million constants fit one
key; a wide atom makes a short trie of levels, whatever its arity.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = 63  # bits of a non-negative int64


def pack(columns: Sequence[Tensor], bits: Sequence[int]) -> tuple[tuple[Tensor, ...], Tensor]:
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


def walk(levels: Sequence[Tensor], columns: Sequence[Tensor], bits: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The key that `pack` gave to rows with these values, and whether its levels know them.

    Values outside their bits are the caller's to exclude.
    """
    todo = list(levels)
    key, used, found = columns[0], bits[0], torch.ones_like(columns[0], dtype=torch.bool)
    for column, width in zip(columns[1:], bits[1:]):
        if used + width > _WORD:
            level = todo.pop(0)
            key, hit = find(level, key)
            found, used = found & hit, level.numel().bit_length()
        key, used = key << width | column, used + width
    return key, found


def find(keys: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Where `key` stands in ascending `keys`, and whether it does; `keys` may be empty."""
    if keys.numel() == 0:
        return torch.zeros_like(key), torch.zeros_like(key, dtype=torch.bool)
    at = torch.searchsorted(keys, key).clamp_max(keys.numel() - 1)
    return at, keys.take(at) == key


def unpack(key: Tensor, bits: Sequence[int]) -> tuple[Tensor, ...]:
    """The columns of keys that needed no level."""
    shifts = [sum(bits[j + 1 :]) for j in range(len(bits))]
    return tuple((key >> shift if shift else key) & ((1 << width) - 1) for shift, width in zip(shifts, bits))


def distinct(columns: Sequence[Tensor], bits: Sequence[int]) -> tuple[Tensor, ...]:
    """The distinct rows of a table in lexicographic order, column by column."""
    levels, key = pack(columns, bits)
    if not levels:
        return unpack(torch.unique(key), bits)
    key, order = torch.sort(key)
    first = torch.cat([torch.ones_like(key[:1], dtype=torch.bool), key[1:] != key[:-1]])
    return tuple(column.index_select(0, order[first]) for column in columns)
