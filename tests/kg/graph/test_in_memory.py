"""Triples in memory: every kind of source, names of all kinds, bad rows by their number."""

from types import SimpleNamespace

import numpy as np
import pytest

from funcppo.kg.graph import loaders
from funcppo.kg.graph.config import DataConfig
from funcppo.kg.graph.loaders import to_triples, write_splits

TRIPLES = [("a", "p", "b"), ("b", "q", "c")]


class Frame:
    """What is read of a data frame of pandas or polars."""

    def __init__(self, columns):
        self._columns = columns
        self.columns = list(columns)

    def __getitem__(self, name):
        return SimpleNamespace(to_list=lambda: self._columns[name])


class LazyFrame:
    """What is read of a lazy data frame of polars, whose columns cannot be indexed."""

    def __init__(self, frame):
        self._frame = frame
        self.columns = frame.columns

    def collect(self):
        return self._frame


def triples_factory(triples):
    """What is read of a triples factory of PyKEEN; ids do not begin with the first triple."""
    heads, relations, tails = zip(*triples)
    entities = sorted({*heads, *tails}, reverse=True)
    relations = sorted(set(relations), reverse=True)
    ids = [
        [entities.index(h), relations.index(r), entities.index(t)]
        for h, r, t in triples
    ]
    return SimpleNamespace(
        mapped_triples=np.array(ids),
        entity_id_to_label=dict(enumerate(entities)),
        relation_id_to_label=dict(enumerate(relations)),
    )


@pytest.mark.parametrize(
    "source",
    [
        TRIPLES,
        iter(TRIPLES),
        [list(triple) for triple in TRIPLES],
        np.array(TRIPLES),
        np.array(TRIPLES, dtype=object),
        Frame({"head": ["a", "b"], "relation": ["p", "q"], "tail": ["b", "c"]}),
        Frame({"tail": ["b", "c"], "n": [1, 2], "relation": ["p", "q"]}
              | {"head": ["a", "b"]}),
        Frame({0: ["a", "b"], 1: ["p", "q"], 2: ["b", "c"]}),
        LazyFrame(Frame({"h": ["a", "b"], "r": ["p", "q"], "t": ["b", "c"]})),
        triples_factory(TRIPLES),
    ],
)  # fmt: skip
def test_triples_are_read_from_every_kind_of_source(source):
    triples = to_triples(source)
    assert triples == TRIPLES
    assert all(type(name) is str for triple in triples for name in triple)


def test_whole_numbers_are_names():
    expected = [("1", "2", "3")]
    assert to_triples([(1, 2, 3)]) == to_triples(np.array([[1, 2, 3]]))
    assert to_triples([(1, np.int64(2), "3")]) == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([("a", "p", "b"), ("a", "p")], "triple 1: expected three names"),
        ([("a", "p", "")], "triple 0: expected"),
        ([("a", "p", None)], "triple 0: expected"),
        ([("a", "p", float("nan"))], "triple 0: expected"),
        ([("a", "p", "x\ny")], "triple 0: expected"),
        (["abc"], "triple 0: expected"),
        (np.zeros((2, 2)), r"shape \[n, 3\], got \[2, 2\]"),
        (Frame({"x": [], "y": []}), "expected the columns head"),
        (SimpleNamespace(mapped_triples=...), "got one with ids alone"),
        (7, "got int"),
    ],
)
def test_a_bad_source_is_one_line(source, message):
    with pytest.raises(ValueError, match=message) as error:
        to_triples(source)
    assert "\n" not in str(error.value)


def test_a_data_set_is_read_back_as_it_was(tmp_path):
    names = [" a ", "b,c", "d'e", 'f"g', "#h", "i\tj", "Zoë 🙂", "\x1b[0m"]
    rows = [(name, "head relation", names[0]) for name in names]
    dataset = loaders.from_triples(
        [("head", "relation", "tail"), *rows],
        valid=[("b,c", "relation", "tail")],
        test=[("new", "other", "b,c")],
    )
    write_splits(dataset, tmp_path / "graph")
    config = DataConfig(columns="head,relation,tail")
    read = loaders.load(tmp_path / "graph", cfg=config)
    assert read.entities == dataset.entities
    assert read.fingerprint == dataset.fingerprint
