"""The writer of a program of rows: lines that are written once, literals, tiles of single numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from funcppo.runtime.env_kernel.tensor import (
    TRACED_ROWS,
    Expression,
    RowTensor,
    UnsupportedError,
    memory_tensor,
)
from funcppo.runtime.env_kernel.writer import Writer


def test_the_same_code_is_written_once() -> None:
    writer = Writer(None)
    first = writer.line("tl.exp(x_0)", "row")
    assert writer.line("tl.exp(x_0)", "row") == first
    assert writer.body == [f"{first.code} = tl.exp(x_0)"]
    assert writer.preamble == []


def test_what_is_the_same_in_each_call_is_written_before() -> None:
    writer = Writer(None)
    writer.line("tl.arange(0, 4)", "wide", once=True)
    assert len(writer.preamble) == 1
    assert writer.body == []


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


@pytest.mark.parametrize("code", ["(-7 % 3)", "(x_0 + 4)", "(v1 & True)"])
def test_other_operations_are_written(code: str) -> None:
    writer = Writer(None)
    writer.line(code, "row")
    assert len(writer.body) == 1


def test_literals_are_cast_at_once() -> None:
    writer = Writer(None)
    true = writer.cast(Expression("True"), torch.bool, torch.int64)
    assert true.code == "1"
    assert writer.cast(true, torch.int64, torch.float32).code == "1.0"
    minus = writer.cast(Expression("-3"), torch.int64, torch.float32)
    assert minus.code == "-3.0"
    assert writer.body == []


def test_numbers_in_two_axes_make_a_tile_in_the_padding_too() -> None:
    writer = Writer(None)
    numbers = np.array([Expression(f"x_{j}", "row") for j in range(6)])
    elements = np.empty(6, dtype=object)
    elements[:] = list(numbers)
    x = RowTensor(elements.reshape(1, 2, 3), torch.float32, 0)
    tile = writer.take(x, x.places(), 0, 2)
    assert tile.tile == (2, 3)
    # A comparison for each number but the last.
    assert len(writer.preamble) == 5
    assert "% 6" in writer.preamble[0]


def compared(writer: Writer, numbers: list[str]) -> RowTensor:
    """Comparisons of a number of each row with literals."""
    elements = np.empty((1, len(numbers)), dtype=object)
    elements[0] = [Expression(number) for number in numbers]
    one = np.array([[Expression("x_0", "row")]], object)
    pair = [
        RowTensor(one, torch.int64, 0),
        RowTensor(elements, torch.int64),
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


@pytest.mark.parametrize(
    "numbers", [["0", "2", "1"], ["0", "1", "x_1"], ["-1", "0", "1"]]
)
def test_other_comparisons_are_chosen_one_by_one(numbers: list[str]) -> None:
    writer = Writer(None)
    x = compared(writer, numbers)
    writer.take(x, x.places(), 0, 1)
    assert sum("tl.where" in line for line in writer.body) == 2


def test_different_operations_are_no_operation_of_a_tile() -> None:
    writer = Writer(None)
    equal = compared(writer, ["0", "1"])
    less = writer.pointwise(
        "({0} < {1})",
        [equal._replace(elements=np.array([[Expression("x_0", "row")]])), 2],
        torch.int64,
        torch.bool,
    )
    both = np.concatenate([equal.elements, less.elements], 1)
    x = equal._replace(elements=both)
    writer.take(x, x.places(), 0, 1)
    assert sum("tl.where" in line for line in writer.body) == 2


def test_a_tile_of_single_numbers_chooses_those_that_differ_from_most() -> None:
    writer = Writer(None)
    row = [Expression(f"x_{int(j == 0)}", "row") for j in range(8)]
    elements = np.empty((1, 8), dtype=object)
    elements[0] = row
    x = RowTensor(elements, torch.float32, 0)
    writer.take(x, x.places(), 0, 1)
    assert sum("tl.where" in line for line in writer.body) == 1


def test_a_tile_of_equal_numbers_is_one_number() -> None:
    writer = Writer(None)
    elements = np.empty((1, 200), dtype=object)
    elements[:] = [[Expression("x_0", "row")] * 200]
    x = RowTensor(elements, torch.float32, 0)
    (number,) = writer.take(x, x.places(), 0, 1).elements.reshape(-1)
    assert number.code == "x_0"
    assert writer.body == []


def test_a_state_of_few_numbers_is_no_tile() -> None:
    writer = Writer(None)
    elements = np.empty((1, 1), dtype=object)
    elements[:] = [[Expression("v0", "wide")]]
    layer = RowTensor(elements, torch.float32, 0, (64,))
    like = torch.zeros(TRACED_ROWS, 64)
    with pytest.raises(UnsupportedError, match="a state that is a hidden"):
        writer.hold(layer, like, is_carried=True)
    assert writer.hold(layer, like, is_carried=False).width == 64


def test_params_in_an_order_of_no_rule_are_refused() -> None:
    x = memory_tensor("p0", torch.zeros(100))
    order = np.random.default_rng(0).permutation(100)
    with pytest.raises(UnsupportedError, match="an order of no rule"):
        Writer(None).load_tile(x, order)
