"""Distinct cells of a text: parts of its bytes, compared 8 bytes at a time in numpy.

Each cell writes its number into a slot that a hash of its content names, and reads there which cell was the last to do
so. Cells whose content is that of the cell found are done; the others, whose slot several contents share, go on with
other slots. So the groups are exact whatever the hash is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

_WORD = 8  # bytes
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
# keeps the first n bytes of a word
_MASKS = np.array([(1 << 8 * n) - 1 for n in range(_WORD + 1)], np.uint64)
# cells that are hashed or compared at a time, so that what is made of them stays in the cache
_BLOCK_CELLS = 1 << 15


class Cells(NamedTuple):
    """Where cells stand in a text."""

    start: np.ndarray  # int64 [n], of the first byte
    length: np.ndarray  # int64 [n], in bytes


class DistinctCells(NamedTuple):
    """Cells, each content once."""

    chosen: np.ndarray  # int64 [m], a cell of each content
    inverse: np.ndarray  # int64 [n], the content of each cell


def find_distinct(content: bytes, cells: Cells) -> DistinctCells:
    """Group the cells of a text by their content."""
    n_cells = len(cells.start)
    words = _words_at_bytes(content)
    same = _find_same(words, cells, _hash_blocks(words, cells))
    is_chosen = same == np.arange(n_cells, dtype=np.int32)
    number = np.cumsum(is_chosen) - 1
    return DistinctCells(np.flatnonzero(is_chosen), number[same])


def hash_cells(content: bytes, cells: Cells) -> np.ndarray:
    """A hash of the content of each cell, uint64 [n]; it depends on nothing but that."""
    return _hash_blocks(_words_at_bytes(content), cells)


def _words_at_bytes(content: bytes) -> np.ndarray:
    """The word that starts at each byte of a text."""
    padded = np.frombuffer(content + bytes(_WORD), np.uint8)
    return np.ndarray((len(content) + 1,), "<u8", padded, strides=(1,))


def _hash_blocks(words: np.ndarray, cells: Cells) -> np.ndarray:
    """A hash of the content of each cell, some cells at a time."""
    hashes = [
        _hash_cells(words, Cells(cells.start[block], cells.length[block]))
        for block in _iter_blocks(len(cells.start))
    ]
    return np.concatenate([np.zeros(0, np.uint64), *hashes])


def _find_same(
    words: np.ndarray, cells: Cells, hashes: np.ndarray
) -> np.ndarray:
    """A cell of the same content for each cell, int32 [n]; one cell for all of that content."""
    n_cells = len(hashes)
    slots = np.empty(1 << n_cells.bit_length(), np.int32)
    shift = np.uint64(64 - (len(slots).bit_length() - 1))
    same = np.empty(n_cells, np.int32)
    left = np.arange(n_cells, dtype=np.int32)
    while len(left):
        for block in _iter_blocks(len(left)):
            rows = left[block]
            slots[hashes[rows] >> shift] = rows
        is_done = np.empty(len(left), bool)
        for block in _iter_blocks(len(left)):
            rows = left[block]
            other = slots[hashes[rows] >> shift]
            same[rows] = other
            is_done[block] = _are_equal(words, cells, rows, other)
        left = left[~is_done]
        hashes[left] *= _MULTIPLIER
    return same


def _iter_blocks(n: int) -> Iterator[slice]:
    """Yield slices of n cells, block after block."""
    for first in range(0, n, _BLOCK_CELLS):
        yield slice(first, first + _BLOCK_CELLS)


def _hash_cells(words: np.ndarray, cells: Cells) -> np.ndarray:
    """A hash of the content of each cell, uint64 [n]."""
    start, length = cells
    hashes = np.zeros(len(start), np.uint64)
    rows = np.arange(len(start))
    while len(rows):
        mask = _MASKS[np.minimum(length, _WORD)]
        mixed = (hashes[rows] ^ (words[start] & mask)) * _MULTIPLIER
        hashes[rows] = mixed ^ (mixed >> _HALF)
        longer = np.flatnonzero(length > _WORD)
        rows = rows[longer]
        start, length = start[longer] + _WORD, length[longer] - _WORD
    return hashes * _MULTIPLIER


def _are_equal(
    words: np.ndarray, cells: Cells, a: np.ndarray, b: np.ndarray
) -> np.ndarray:
    """Whether two cells have the same content, bool [n]."""
    length = cells.length[a]
    are_equal = length == cells.length[b]
    rows = np.flatnonzero(are_equal)
    start, other_start = cells.start[a[rows]], cells.start[b[rows]]
    length = length[rows]
    while len(rows):
        mask = _MASKS[np.minimum(length, _WORD)]
        difference = (words[start] ^ words[other_start]) & mask
        are_equal[rows[difference != 0]] = False
        longer = np.flatnonzero((length > _WORD) & (difference == 0))
        rows, length = rows[longer], length[longer] - _WORD
        start = start[longer] + _WORD
        other_start = other_start[longer] + _WORD
    return are_equal
