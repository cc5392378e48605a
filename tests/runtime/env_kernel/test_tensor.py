"""What a program of rows knows of tensors: expressions, places, and whole tiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from funcppo.runtime.env_kernel.tensor import (
    MAX_NUMBERS_A_ROW,
    MAX_TILE_WIDTH,
    TRACED_ROWS,
    UnsupportedError,
    literal,
    memory_tensor,
    named_tensor,
    numbers_a_row,
    parts_of,
    show,
)


def rows(*shape: int) -> torch.Tensor:
    return torch.zeros(TRACED_ROWS, *shape)


def test_few_numbers_have_an_expression_each() -> None:
    x = named_tensor("x", rows(2, 3))
    assert [number.code for number in numbers_a_row(x)] == [
        f"x_{j}" for j in range(6)
    ]
    assert x.tile == ()
    assert x.places().tolist() == [[[0, 1, 2], [3, 4, 5]]]


def test_many_numbers_have_one_expression() -> None:
    x = named_tensor("x", rows(10, 10))
    assert x.tile == (10, 10)
    assert x.width == 100 > MAX_NUMBERS_A_ROW
    assert x.elements.shape == (1, 1, 1)
    assert np.array_equal(x.places(), np.arange(100).reshape(1, 10, 10))
    with pytest.raises(UnsupportedError, match="first axis"):
        numbers_a_row(x)


def test_too_many_numbers_are_refused() -> None:
    with pytest.raises(
        UnsupportedError, match=f"{MAX_TILE_WIDTH + 1} numbers for each"
    ):
        named_tensor("x", rows(MAX_TILE_WIDTH + 1))


def test_the_places_of_memory_are_offsets() -> None:
    x = memory_tensor("p0", torch.zeros(2, 3))
    assert x.places().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_whole_tiles_of_a_row() -> None:
    x = named_tensor("x", rows(10, 10))
    (part,) = parts_of(x, x.places()) or []
    assert part.tile.code == "x_0"
    assert np.array_equal(part.numbers, np.arange(100))

    # Each tile is one channel of an image.
    channels = np.stack([x.places(), x.places() + 100], -1)
    two = np.array([x.elements.flat[0]] * 2, dtype=object)
    image = show(x._replace(elements=two), channels, 0)
    assert image.places().shape == (1, 10, 10, 2)
    parts = parts_of(image, image.places()) or []
    assert [part.numbers[:3].tolist() for part in parts] == [
        [0, 2, 4],
        [1, 3, 5],
    ]


@pytest.mark.parametrize(
    "places",
    [np.arange(99), np.arange(100)[::-1], np.arange(100) // 2],
    ids=["a part", "another order", "twice"],
)
def test_parts_of_tiles_are_not_whole(places: np.ndarray) -> None:
    x = named_tensor("x", rows(10, 10))
    assert parts_of(x, places) is None


@pytest.mark.parametrize(
    ("value", "dtype", "code"),
    [
        (True, torch.bool, "True"),
        (3.0, torch.int64, "3"),
        (2, torch.float32, "2.0"),
        (float("inf"), torch.float32, 'float("inf")'),
        (0.5, torch.float64, "tl.full([], 0.5, tl.float64)"),
    ],
)
def test_literals(value: float, dtype: torch.dtype, code: str) -> None:
    assert literal(value, dtype).code == code
