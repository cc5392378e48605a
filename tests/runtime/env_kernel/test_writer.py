"""The writer of a program of rows: lines that are written once, literals, tiles of single numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from funcppo.runtime.env_kernel.tensor import (
    Expression,
    LaneTensor,
)
from funcppo.runtime.env_kernel.writer import Writer


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("(3 + 4)", "7"),
        ("(3 >= 4)", "False"),
        ("(True & False)", "False"),
        ("(12 % 11)", "1"),
        ("(1 << 4)", "16"),
    ],
)
def test_operations_on_literals_are_computed(code: str, value: str) -> None:
    writer = Writer(None)
    assert writer.line(code, "scalar").code == value
    assert writer.body == []


def test_literals_are_cast_at_once() -> None:
    writer = Writer(None)
    true = writer.cast(Expression("True"), torch.bool, torch.int64)
    assert true.code == "1"
    assert writer.cast(true, torch.int64, torch.float32).code == "1.0"
    minus = writer.cast(Expression("-3"), torch.int64, torch.float32)
    assert minus.code == "-3.0"
    assert writer.body == []


def compared(writer: Writer, numbers: list[str]) -> LaneTensor:
    """Comparisons of a number of each row with literals."""
    elements = np.empty((1, len(numbers)), dtype=object)
    elements[0] = [Expression(number) for number in numbers]
    one = np.array([[Expression("x_0", "row")]], object)
    pair = [
        LaneTensor(one, torch.int64, 0),
        LaneTensor(elements, torch.int64),
    ]
    return writer.pointwise("({0} == {1})", pair, torch.int64, torch.bool)


@pytest.mark.parametrize("start", [0, 7])
def test_comparisons_with_integers_that_count_up_are_one_of_a_tile(
    start: int,
) -> None:
    writer = Writer(None)
    x = compared(writer, [str(start + i) for i in range(4)])
    n_lines = len(writer.body)
    tile = writer.take(x, x.places(), 0, 1)
    (line,) = writer.body[n_lines:]
    (coordinate,) = writer.preamble
    name, _, code = coordinate.partition(" = ")
    assert line == f"{tile.elements.item().code} = (x_0[:, None] == {name})"
    assert code == f"(tl.arange(0, 4)[None, :] + {start}).to(tl.int64)"


def test_a_tile_of_single_numbers_chooses_those_that_differ_from_most() -> None:
    writer = Writer(None)
    row = [Expression(f"x_{int(j == 0)}", "row") for j in range(8)]
    elements = np.empty((1, 8), dtype=object)
    elements[0] = row
    x = LaneTensor(elements, torch.float32, 0)
    writer.take(x, x.places(), 0, 1)
    assert sum("tl.where" in line for line in writer.body) == 1
