"""Triples as tables of numbers of names: how files of millions of lines are held.

A table is int32 [n, 3], head, relation and tail as numbers of a `NameTable`, in the order of the file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

Triple = tuple[str, str, str]  # head, relation, tail


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
    first[numbers[::-1]] = np.arange(unseen)[::-1]
    occurring = np.flatnonzero(first < unseen)
    return occurring[np.argsort(first[occurring], kind="stable")]


def drop_duplicates(triples: np.ndarray) -> np.ndarray:
    """The distinct rows of a table, each at its first occurrence.

    Args:
      triples: int [n, 3], none negative.
    """
    a, b, c = triples.astype(np.int64).T
    n_a, n_b, n_c = (int(column.max(initial=0)) + 1 for column in (a, b, c))
    code = a * n_c + c
    if n_a * n_b * n_c >= 1 << 63:
        _, code = np.unique(code, return_inverse=True)
    code = code * n_b + b
    # Where each came from takes longer to find than that none repeats another.
    ascending = np.sort(code)
    if not (ascending[1:] == ascending[:-1]).any():
        return triples
    _, first = np.unique(code, return_index=True)
    return triples[np.sort(first)]
