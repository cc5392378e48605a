"""Mapped names are the names that they were made of, in order and by look-up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.graph.triples import MappedNames, NameIds, to_columns
from tests.kg.graph.clause_strategies import NAMES


@given(st.lists(NAMES, unique=True, max_size=9), NAMES)
def test_names_are_a_sequence_and_ids_a_mapping(names, other):
    mapped = MappedNames(to_columns(names))
    ids = NameIds(mapped)
    assert list(mapped) == [mapped[i] for i in range(len(mapped))] == names
    assert mapped[1:3] == tuple(names[1:3])
    assert dict(ids) == {name: i for i, name in enumerate(names, 1)}
    assert (other in mapped) == (other in ids) == (other in names)
    assert to_columns(mapped) is mapped.columns


def test_names_of_one_hash_are_told_apart():
    columns = to_columns(["a", "b", "c"])
    same = columns._replace(
        hashes=np.full_like(columns.hashes, columns.hashes[0])
    )
    mapped = MappedNames(same)
    wanted = mapped[int(columns.ids[0]) - 1]
    assert mapped.find(wanted) == int(columns.ids[0])
    assert list(mapped) == ["a", "b", "c"]


def test_what_is_no_name_is_not_found():
    mapped = MappedNames(to_columns(["a"]))
    assert 5 not in mapped and "\ud800" not in mapped
    with pytest.raises(KeyError):
        NameIds(mapped)["b"]
    with pytest.raises(IndexError):
        mapped[1]
