"""Triples and rules of a data set by their names."""

import numpy as np

from funcppo.kg.graph.dataset import Dataset


def triples(dataset: Dataset, table: np.ndarray) -> set[tuple[str, str, str]]:
    """The rows of a table of binary atoms as (head, relation, tail) names."""
    names = dataset.entities
    return {
        (names[h - 1], dataset.predicates[r - 1], names[t - 1])
        for r, h, t in table.tolist()
    }
