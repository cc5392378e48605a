"""Triples as tables of numbers of names: how files of millions of lines are held.

A table is int32 [n, 3], head, relation and tail as numbers of a `NameTable`, in the order of the file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

Triple = tuple[str, str, str]  # head, relation, tail
# rows that are worked on at a time, where a table may have hundreds of millions
_BLOCK_ROWS = 1 << 22


class NameTable:
    """Names of entities and relations, numbered from 0 in the order in which they come."""

    def __init__(self) -> None:
        """No names."""
        self._numbers: defaultdict[str, int] = defaultdict()
        self._numbers.default_factory = self._numbers.__len__

    def __len__(self) -> int:
        """How many names there are."""
        return len(self._numbers)

    def names(self) -> list[str]:
        """The names in the order of their numbers."""
        return list(self._numbers)

    def number(self, names: Sequence[str]) -> np.ndarray:
        """The numbers of names, int32 [n]; names that are not in the table join it."""
        numbers = map(self._numbers.__getitem__, names)
        return np.fromiter(numbers, np.int32, len(names))

    def number_triples(self, triples: Sequence[Triple]) -> np.ndarray:
        """The table of triples, int32 [n, 3]; their names join this table."""
        names = [name for triple in triples for name in triple]
        return self.number(names).reshape(-1, 3)


def order_of_occurrence(numbers: np.ndarray, n_names: int) -> np.ndarray:
    """The distinct numbers among some, in the order of first occurrence.

    Args:
      numbers: int [n], from 0 to n_names - 1.
      n_names: how many there may be.
    """
    unseen = len(numbers)
    first = np.full(n_names, unseen)
    # Of an index that is repeated numpy keeps the last value: backwards, the first one.
    for start in reversed(range(0, unseen, _BLOCK_ROWS)):
        block = numbers[start : start + _BLOCK_ROWS]
        places = np.arange(start, start + len(block))
        first[block[::-1]] = places[::-1]
    occurring = np.flatnonzero(first < unseen)
    return occurring[np.argsort(first[occurring], kind="stable")]


def drop_duplicates(triples: np.ndarray) -> np.ndarray:
    """The distinct rows of a table, each at its first occurrence.

    Args:
      triples: int [n, 3], none negative.
    """
    if not len(triples) or not _has_duplicates(_row_codes(triples)):
        return triples
    # Where each came from takes longer to find than that none repeats another.
    _, first = np.unique(_row_codes(triples), return_index=True)
    return triples[np.sort(first)]


def _row_codes(triples: np.ndarray) -> np.ndarray:
    """A number for each row of a table, int64 [n], equal for equal rows."""
    n_a, n_b, n_c = (int(top) + 1 for top in triples.max(axis=0))
    code = triples[:, 0].astype(np.int64)
    code *= n_c
    code += triples[:, 2]
    if n_a * n_b * n_c >= 1 << 63:
        _, code = np.unique(code, return_inverse=True)
    code *= n_b
    code += triples[:, 1]
    return code


def _has_duplicates(codes: np.ndarray) -> bool:
    """Whether two numbers are equal; they are sorted in place, as a table may have hundreds of millions."""
    codes.sort()
    return bool((codes[1:] == codes[:-1]).any())
