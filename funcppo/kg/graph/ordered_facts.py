"""The known facts of a data set in an order that depends on their names alone, and a hash of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from funcppo.kg.graph.dataset import Dataset


class OrderedFacts(NamedTuple):
    """The known facts of a data set with the names in use numbered in the order of names."""

    facts: np.ndarray  # int32 [N, W], in lexicographic order
    # ids in the data set of numbers 0, 1, ...; of 0 it is 0
    predicates: np.ndarray
    entities: np.ndarray  # the same


def order_facts(dataset: Dataset) -> OrderedFacts:
    """The known facts in an order that depends on their names alone."""
    predicates = _ids_by_name(dataset.facts[:, 0], dataset.predicates)
    entities = _ids_by_name(dataset.facts[:, 1:], dataset.entities)
    predicate_number = np.zeros(dataset.n_predicates + 1, np.int32)
    predicate_number[predicates] = np.arange(len(predicates))
    entity_number = np.zeros(dataset.n_constants + 1, np.int32)
    entity_number[entities] = np.arange(len(entities))

    columns = (
        predicate_number[dataset.facts[:, :1]],
        entity_number[dataset.facts[:, 1:]],
    )
    facts = np.unique(np.concatenate(columns, axis=1), axis=0)
    return OrderedFacts(facts, predicates, entities)


def facts_digest(dataset: Dataset) -> str:
    """A hash of the names and the known facts, 16 hexadecimal digits; neither order nor held-out triples count."""
    ordered = order_facts(dataset)
    described = [
        [dataset.predicates[i - 1] for i in ordered.predicates[1:]],
        [dataset.entities[i - 1] for i in ordered.entities[1:]],
        ordered.facts.shape,
    ]
    digest = hashlib.sha256(json.dumps(described).encode())
    digest.update(np.ascontiguousarray(ordered.facts, dtype="<i4").tobytes())
    return digest.hexdigest()[:16]


def _ids_by_name(ids: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """The distinct ids of a table in the order of their names, after the 0 of padding."""
    in_use = np.unique(ids[ids > 0]).tolist()

    def name_of(i: int) -> str:
        return names[i - 1]

    return np.array([0, *sorted(in_use, key=name_of)])
