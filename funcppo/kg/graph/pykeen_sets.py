"""Data sets of PyKEEN by name, where PyKEEN is installed.

PyKEEN brings some with it (kinships, nations, umls, ...) and downloads others when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

from funcppo.core.files import shorten
from funcppo.kg.graph.dataset import Dataset, from_splits
from funcppo.kg.graph.in_memory import to_triples
from funcppo.kg.graph.similar_names import similar_names_hint

PREFIX = "pykeen:"
_FACTORIES = {"train": "training", "valid": "validation", "test": "testing"}


def load_pykeen(name: str) -> Dataset:
    """The data set of PyKEEN of a name such as pykeen:kinships, its splits as PyKEEN has them.

    Raises:
      ValueError: PyKEEN is not installed, has no such data set, or cannot load it.
    """
    try:
        # PyKEEN is optional, and its types are not needed to run.
        datasets: Any = importlib.import_module("pykeen.datasets")
    except ImportError as error:
        raise ValueError(
            f"{shorten(name)}: data sets of PyKEEN need PyKEEN (pip install pykeen): {error}"
        ) from None

    asked = name.removeprefix(PREFIX)
    known = sorted(datasets.dataset_resolver.lookup_dict)
    if asked not in known:
        hint = similar_names_hint(asked, known)
        raise ValueError(
            f"{shorten(name)}: expected {PREFIX}NAME with a data set of PyKEEN, which has no {shorten(asked)} ({hint})"
        )
    try:
        dataset = datasets.get_dataset(dataset=asked)
        splits = {
            split: to_triples(getattr(dataset, factory))
            for split, factory in _FACTORIES.items()
            if getattr(dataset, factory) is not None
        }
    # Downloads and their files fail in ways that have no type in common.
    except Exception as error:
        problem = " ".join(str(error).split())
        raise ValueError(
            f"{shorten(name)}: PyKEEN could not load it: {problem}"
        ) from None
    return from_splits(name, {"train": [], "valid": [], "test": []} | splits)
