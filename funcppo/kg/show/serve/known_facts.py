"""Known facts of all splits, found by their relation and their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from funcppo.kg.graph.dataset import Dataset

# splits in the order of their bits
SPLITS = ("train", "facts", "valid", "test")


@dataclass(frozen=True, kw_only=True, slots=True)
class FactGroupRows:
    """Facts that have an entity in one place of a relation."""

    relation: int
    place: int
    rows: np.ndarray


class KnownFacts:
    """The distinct facts of a data set in lexicographic order.

    Attributes:
      atoms: int [n, W].
    """

    def __init__(self, dataset: Dataset) -> None:
        """Sort the facts, and index them by their arguments."""
        parts = {
            "train": dataset.train,
            "facts": dataset.facts[len(dataset.train) :],
            "valid": dataset.valid,
            "test": dataset.test,
        }
        atoms = np.concatenate([parts[split] for split in SPLITS])
        bits = np.repeat(
            1 << np.arange(len(SPLITS)), [len(parts[s]) for s in SPLITS]
        )
        order = np.lexsort(atoms.T[::-1])
        atoms = atoms[order]
        is_first = np.ones(len(atoms), dtype=bool)
        is_first[1:] = (atoms[1:] != atoms[:-1]).any(1)
        starts = np.flatnonzero(is_first)

        self.atoms = atoms[is_first]
        self._split_bits = bits
        if len(starts):
            self._split_bits = np.bitwise_or.reduceat(bits[order], starts)
        # for each place, the rows by ascending argument, and these arguments
        self._order = {
            place: np.argsort(self.atoms[:, place], kind="stable")
            for place in range(1, self.atoms.shape[1])
        }
        self._arguments = {
            place: self.atoms[rows, place]
            for place, rows in self._order.items()
        }

    def splits_of(self, row: int) -> list[str]:
        """The splits that hold a fact."""
        bits = int(self._split_bits[row])
        return [name for i, name in enumerate(SPLITS) if bits >> i & 1]

    def find(
        self, relation: int | None, arguments: Mapping[int, int]
    ) -> np.ndarray:
        """The rows of the facts with given names.

        Args:
          relation: None for any.
          arguments: entities by their place, from 1.
        """
        if any(place not in self._order for place in arguments):
            return np.arange(0)
        if arguments:
            rows = self._rows_of(*next(iter(arguments.items())))
        elif relation is not None:
            relations = self.atoms[:, 0]
            rows = np.arange(
                *np.searchsorted(relations, [relation, relation + 1])
            )
        else:
            rows = np.arange(len(self.atoms))

        is_found = np.ones(len(rows), dtype=bool)
        if relation is not None:
            is_found &= self.atoms[rows, 0] == relation
        for place, entity in arguments.items():
            is_found &= self.atoms[rows, place] == entity
        return rows[is_found]

    def groups_of(self, entity: int) -> list[FactGroupRows]:
        """The facts of an entity by relation and place; one that has it twice is in two groups."""
        found: list[FactGroupRows] = []
        for place in self._order:
            rows = self._rows_of(place, entity)
            relations, starts = np.unique(
                self.atoms[rows, 0], return_index=True
            )
            parts = np.split(rows, starts[1:])
            for relation, part in zip(relations.tolist(), parts):
                group = FactGroupRows(relation=relation, place=place, rows=part)
                found.append(group)
        return sorted(found, key=lambda group: (group.relation, group.place))

    def _rows_of(self, place: int, entity: int) -> np.ndarray:
        """The rows with an entity in a place, in lexicographic order."""
        start, stop = np.searchsorted(
            self._arguments[place], [entity, entity + 1]
        )
        return self._order[place][start:stop]
