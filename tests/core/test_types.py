"""Annotations are checked as they read, and an error names the field."""

from __future__ import annotations

from typing import Generic, NamedTuple

import pytest
import torch
from torch import Tensor

from funcppo.core.types import F32, I64, Bool, State, check_shapes_and_dtypes


class Leaf(NamedTuple):
    count: I64[Tensor, "B"]


class Record(NamedTuple, Generic[State]):
    state: State
    x: F32[Tensor, "B 3"]
    stacked: Bool[Tensor, "... B"]
    optional: F32[Tensor, ""] | tuple[()]


GOOD = Record(
    Leaf(torch.zeros(2, dtype=torch.int64)),
    torch.zeros(2, 3),
    torch.zeros(7, 5, 2, dtype=torch.bool),
    (),
)


def test_the_sizes_of_named_axes_are_returned():
    assert check_shapes_and_dtypes(GOOD) == {"B": 2}
    assert check_shapes_and_dtypes(GOOD, {"T": 4}) == {"B": 2, "T": 4}


def test_float64_stands_for_float32_and_nothing_else_does():
    check_shapes_and_dtypes(GOOD._replace(x=GOOD.x.double()))
    with pytest.raises(
        TypeError,
        match=r"Record\.x: expected torch.float32 \[B 3\] .* got torch.float16 \[2, 3\]",
    ):
        check_shapes_and_dtypes(GOOD._replace(x=GOOD.x.half()))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("x", torch.zeros(2, 4)),  # a number that differs
        ("x", torch.zeros(5, 3)),  # another size of B than before
        ("x", torch.zeros(3)),  # too few axes
        (
            "stacked",
            torch.zeros(5, 3, dtype=torch.bool),
        ),  # the last axis counts
        ("stacked", torch.zeros(5, 2)),  # another dtype
        ("optional", torch.zeros(1)),  # a tensor in a union is checked
    ],
)
def test_an_error_names_the_field(field, value):
    with pytest.raises(
        TypeError, match=rf"^Record\.{field}: expected .*, got "
    ):
        check_shapes_and_dtypes(GOOD._replace(**{field: value}))


def test_the_path_of_a_nested_field_is_named():
    with pytest.raises(
        TypeError, match=r"^top\.state\.count: expected torch.int64 \[B\]"
    ):
        check_shapes_and_dtypes(
            GOOD._replace(state=Leaf(torch.zeros(2))), path="top"
        )
