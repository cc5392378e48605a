"""Typed PyTorch calls: worked by hand, and equal to loops over Python lists."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from funcppo.logic import typed_torch

integers = st.lists(st.integers(-3, 3), max_size=12)


def test_values_worked_by_hand():
    values = torch.tensor([2, 2, 1, 2])
    assert typed_torch.int_list(values) == [2, 2, 1, 2]
    assert typed_torch.unique_values(values).tolist() == [1, 2]
    assert typed_torch.run_lengths(values).tolist() == [2, 1, 1]
    table = torch.tensor([[2, 1], [1, 3], [2, 1]])
    assert typed_torch.atom_tuples(table) == [(2, 1), (1, 3), (2, 1)]
    assert typed_torch.rule_tuples(table[None, :2]) == [[(2, 1), (1, 3)]]
    assert typed_torch.unique_rows(table).tolist() == [[1, 3], [2, 1]]


@given(integers)
def test_values_and_runs_are_those_of_python(values):
    tensor = torch.tensor(values, dtype=torch.int64)
    assert typed_torch.int_list(tensor) == values
    assert typed_torch.unique_values(tensor).tolist() == sorted(set(values))
    assert typed_torch.run_lengths(tensor).tolist() == [
        len(list(run)) for _, run in itertools.groupby(values)
    ]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12))
def test_rows_are_those_of_python(rows):
    table = torch.tensor(rows, dtype=torch.int32).reshape(-1, 2)
    assert typed_torch.atom_tuples(table) == rows
    assert typed_torch.unique_rows(table).tolist() == [
        list(row) for row in sorted(set(rows))
    ]
