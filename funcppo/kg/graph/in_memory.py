"""Triples in memory as a data set: from tuples, arrays, data frames and triples factories of PyKEEN.

Nothing of pandas, polars or PyKEEN is imported: what looks like their objects is read as such.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from funcppo.core.files import shorten
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.triple_table import Triple

HEADER = ("head", "relation", "tail")
# other names of the three columns of a data frame
COLUMN_NAMES = (HEADER, ("subject", "predicate", "object"), ("h", "r", "t"))
# characters that no name in a file may have
FORBIDDEN = ("\n", "\r", "\0")


def to_triples(source: object) -> list[Triple]:
    """The (head, relation, tail) names of triples in memory.

    Args:
      source: tuples of three names; an array [n, 3] of names; a data frame of pandas or polars, lazy or not, with the
        columns head, relation and tail (or subject, predicate and object, or h, r and t), or with three columns; or a
        TriplesFactory of PyKEEN. A name is a text or a whole number.

    Raises:
      ValueError: it is none of these, or a name is missing, empty or has a line break; names the row.
    """
    rows = _rows(source)
    triples: list[Triple] = []
    for number, row in enumerate(rows):
        names = (
            [_name(value) for value in row]
            if isinstance(row, Sequence) and not isinstance(row, str)
            else []
        )
        if len(names) != 3 or None in names:
            raise ValueError(
                f"triple {number}: expected three names (texts without line breaks, or whole numbers), got "
                f"{shorten(repr(row))}"
            )
        head, relation, tail = map(str, names)
        triples.append((head, relation, tail))
    return triples


def write_splits(dataset: Dataset, folder: Path) -> None:
    """Write the triples of a data set to a new folder, as CSV files with a header.

    `load` with `DataConfig(columns="head,relation,tail")` reads them back with the same names and ids.

    Args:
      dataset: triples of train, valid and test, without further facts.
    """
    folder.mkdir(parents=True)
    for split in ("train", "valid", "test"):
        table: np.ndarray = getattr(dataset, split)
        if split != "train" and not len(table):
            continue
        path = folder / f"{split}.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(
                file, lineterminator="\n", quoting=csv.QUOTE_ALL
            )
            writer.writerow(HEADER)
            for relation, head, tail in table[:, :3].tolist():
                writer.writerow(
                    [
                        dataset.entities[head - 1],
                        dataset.predicates[relation - 1],
                        dataset.entities[tail - 1],
                    ]
                )


def _rows(source: Any) -> Iterable[Any]:
    """The rows of triples in memory.

    Raises:
      ValueError: there are none to be read.
    """
    if hasattr(source, "mapped_triples"):
        return _factory_rows(source)
    if hasattr(source, "collect"):  # a lazy data frame
        source = source.collect()
    if hasattr(source, "columns"):  # a data frame
        labels = {str(label): label for label in source.columns}
        names = _frame_columns(list(labels))
        return list(zip(*(source[labels[name]].to_list() for name in names)))
    if isinstance(source, np.ndarray):
        if source.ndim != 2 or source.shape[1] != 3:
            raise ValueError(
                f"expected an array of the shape [n, 3], got {list(source.shape)}"
            )
        return source.tolist()
    if isinstance(source, Iterable) and not isinstance(source, str | bytes):
        return source
    raise ValueError(
        f"expected triples: tuples, an array, a data frame or a triples factory, got {type(source).__name__}"
    )


def _factory_rows(factory: Any) -> list[tuple[object, object, object]]:
    """The rows of a triples factory, whose own table of labels is slow and warns of it.

    Raises:
      ValueError: it has no labels.
    """
    if not hasattr(factory, "entity_id_to_label"):
        raise ValueError(
            "expected a triples factory with labels (TriplesFactory), got one with ids alone"
        )
    entities = factory.entity_id_to_label
    relations = factory.relation_id_to_label
    return [
        (entities[head], relations[relation], entities[tail])
        for head, relation, tail in factory.mapped_triples.tolist()
    ]


def _frame_columns(columns: list[str]) -> list[str]:
    """The three columns of a data frame.

    Raises:
      ValueError: it does not have them.
    """
    for names in COLUMN_NAMES:
        if all(name in columns for name in names):
            return list(names)
    if len(columns) == 3:
        return columns
    raise ValueError(
        f"expected the columns {', '.join(HEADER)}, or three columns, got {', '.join(columns)}"
    )


def _name(value: object) -> str | None:
    """A value as a name; None if it is none."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        return None
    return None if any(char in value for char in FORBIDDEN) else str(value)
