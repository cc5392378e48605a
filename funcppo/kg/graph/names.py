"""Names of a stored data set: mapped from files, so that all processes of a host share them.

Names stand one after the other in one file, and offsets tell where each starts. A name is found by a hash of its bytes:
the hashes are stored in ascending order, each with the id of its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, overload

import numpy as np

from funcppo.kg.graph.cells import Cells, hash_cells

_BLOCK_NAMES = 1 << 16


class NameColumns(NamedTuple):
    """Distinct names as arrays."""

    content: np.ndarray  # uint8, the names in UTF-8, one after the other
    offsets: np.ndarray  # int64 [n + 1], where each starts
    hashes: np.ndarray  # uint64 [n], ascending
    ids: np.ndarray  # int32 [n], the id, from 1, of the name of each hash


def to_columns(names: Sequence[str]) -> NameColumns:
    """The columns of distinct names."""
    if isinstance(names, MappedNames):
        return names.columns
    parts: list[bytes] = []
    lengths = [np.zeros(1, np.int64)]
    for first in range(0, len(names), _BLOCK_NAMES):
        block = [name.encode() for name in names[first : first + _BLOCK_NAMES]]
        lengths.append(np.fromiter(map(len, block), np.int64, len(block)))
        parts.append(b"".join(block))
    content = b"".join(parts)
    return index_names(
        np.frombuffer(content, np.uint8), np.cumsum(np.concatenate(lengths))
    )


def index_names(content: np.ndarray, offsets: np.ndarray) -> NameColumns:
    """The columns of names that stand one after the other."""
    cells = Cells(offsets[:-1], np.diff(offsets))
    hashes = hash_cells(content.tobytes(), cells)
    order = np.argsort(hashes, kind="stable")
    return NameColumns(
        content, offsets, hashes[order], (order + 1).astype(np.int32)
    )


class MappedNames(Sequence[str]):
    """Distinct names as a sequence; each is made when it is read."""

    def __init__(self, columns: NameColumns) -> None:
        """The names of some columns."""
        self.columns = columns

    def __len__(self) -> int:
        """How many names there are."""
        return len(self.columns.ids)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        """The name at an index, or the names of a slice."""
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        i = range(len(self))[index]
        start, stop = self.columns.offsets[i : i + 2].tolist()
        return self.columns.content[start:stop].tobytes().decode()

    def __iter__(self) -> Iterator[str]:
        """The names in their order, read block by block."""
        for first in range(0, len(self), _BLOCK_NAMES):
            bounds = self.columns.offsets[first : first + _BLOCK_NAMES + 1]
            start = int(bounds[0])
            block = self.columns.content[start : bounds[-1]].tobytes()
            ends = (bounds - start).tolist()
            for a, b in pairwise(ends):
                yield block[a:b].decode()

    def __contains__(self, name: object) -> bool:
        """Whether a name is one of these."""
        return isinstance(name, str) and self.find(name) is not None

    def find(self, name: str) -> int | None:
        """The id of a name, from 1; None where it is not one of these."""
        content = name.encode("utf-8", "surrogatepass")
        cell = Cells(np.zeros(1, np.int64), np.array([len(content)]))
        columns, wanted = self.columns, hash_cells(content, cell)[0]
        row = int(np.searchsorted(columns.hashes, wanted))
        while row < len(self) and columns.hashes[row] == wanted:
            number = int(columns.ids[row])
            start, stop = columns.offsets[number - 1 : number + 1].tolist()
            if columns.content[start:stop].tobytes() == content:
                return number
            row += 1
        return None


class NameIds(Mapping[str, int]):
    """The ids of mapped names, from 1."""

    def __init__(self, names: MappedNames) -> None:
        """The ids of some names."""
        self._names = names

    def __getitem__(self, name: str) -> int:
        """The id of a name."""
        number = self._names.find(name)
        if number is None:
            raise KeyError(name)
        return number

    def __iter__(self) -> Iterator[str]:
        """The names in the order of their ids."""
        return iter(self._names)

    def __len__(self) -> int:
        """How many names there are."""
        return len(self._names)
