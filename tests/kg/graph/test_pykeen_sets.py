"""Data sets of PyKEEN: by a look-alike, and by PyKEEN itself where it is installed."""

import sys
from types import SimpleNamespace

import pytest

from funcppo.kg.graph.loaders import load
from tests.kg.graph.test_in_memory import triples_factory


def get_dataset(dataset):
    if dataset == "far":
        raise OSError("no\nnetwork")
    return SimpleNamespace(
        training=triples_factory([("a b", "r", "c"), ("c", "r", "d")]),
        validation=None,
        testing=triples_factory([("d", "r", "a b")]),
    )


@pytest.fixture
def pykeen(monkeypatch):
    """What is read of `pykeen.datasets`, with two data sets."""
    resolver = SimpleNamespace(lookup_dict={"kinships": None, "far": None})
    module = SimpleNamespace(dataset_resolver=resolver, get_dataset=get_dataset)
    monkeypatch.setitem(sys.modules, "pykeen", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "pykeen.datasets", module)


def test_the_splits_are_those_of_pykeen(pykeen):
    d = load("pykeen:kinships")
    assert (d.name, d.entities) == ("pykeen:kinships", ("a b", "c", "d"))
    assert d.train.tolist() == [[1, 1, 2], [1, 2, 3]]
    assert (d.valid.tolist(), d.test.tolist()) == ([], [[1, 3, 1]])


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("kinship", "has no 'kinship' (close: 'kinships')"),
        ("far", "PyKEEN could not load it: no network"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(pykeen, name, problem):
    with pytest.raises(ValueError) as caught:
        load(f"pykeen:{name}")
    assert str(caught.value).startswith(f"'pykeen:{name}': ")
    assert problem in str(caught.value)


def test_without_pykeen_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pykeen", None)
    monkeypatch.setitem(sys.modules, "pykeen.datasets", None)
    with pytest.raises(ValueError, match="pip install pykeen"):
        load("pykeen:kinships")


def test_pykeen_itself():
    pytest.importorskip("pykeen", reason="PyKEEN is not installed")
    d = load("pykeen:kinships")
    sizes = [len(d.train), len(d.valid), len(d.test)]
    assert (d.n_constants, d.n_predicates) == (104, 25)
    assert sizes == [8544, 1068, 1074]
