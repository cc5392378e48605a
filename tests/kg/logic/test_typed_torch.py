"""Typed PyTorch calls: worked by hand, and equal to loops over Python lists."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.logic import row_index

integers = st.lists(st.integers(-3, 3), max_size=12)


def test_values_worked_by_hand():
    values = torch.tensor([2, 2, 1, 2])
    assert row_index.int_list(values) == [2, 2, 1, 2]
    runs = row_index.runs(values)
    assert [part.tolist() for part in runs] == [[2, 1, 2], [2, 1, 1]]
    table = torch.tensor([[2, 1], [1, 3], [2, 1]])
    assert row_index.atom_tuples(table) == [(2, 1), (1, 3), (2, 1)]
    assert row_index.rule_tuples(table[None, :2]) == [[(2, 1), (1, 3)]]
    assert row_index.unique_rows(table).tolist() == [[1, 3], [2, 1]]


@given(integers)
def test_values_and_runs_are_those_of_python(values):
    tensor = torch.tensor(values, dtype=torch.int64)
    assert row_index.int_list(tensor) == values
    value, length = row_index.runs(tensor)
    assert list(zip(value.tolist(), length.tolist())) == [
        (value, len(list(run))) for value, run in itertools.groupby(values)
    ]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12))
def test_rows_are_those_of_python(rows):
    table = torch.tensor(rows, dtype=torch.int32).reshape(-1, 2)
    assert row_index.atom_tuples(table) == rows
    assert row_index.unique_rows(table).tolist() == [
        list(row) for row in sorted(set(rows))
    ]


def test_a_tensor_shares_the_memory_of_its_array():
    array = np.zeros(2, dtype=np.int32)
    tensor = row_index.from_numpy(array)
    array[1] = 7
    assert tensor.tolist() == [0, 7] and tensor.dtype == torch.int32


def test_broadcast_gives_views_of_the_common_shape():
    column = torch.arange(2)[:, None]
    row = torch.arange(3)
    left, right = row_index.broadcast(column, row)
    assert left.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert right.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert left.data_ptr() == column.data_ptr()
