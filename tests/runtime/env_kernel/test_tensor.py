"""Code of places in a tile, evaluated on numpy, gives these places."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from funcppo.runtime.env_kernel.writer import (
    UnsupportedError,
    axis_code,
    coordinate_code,
    index_code,
    mask_code,
    n_tile_axes,
    padded,
    rearrange,
)

LANGUAGE = types.SimpleNamespace(
    arange=np.arange, minimum=np.minimum, maximum=np.maximum, where=np.where
)


def evaluate(code: str) -> NDArray[np.int64]:
    """The numbers [P] of some code of a tile [1, P]."""
    value = eval(code, {"tl": LANGUAGE})
    return np.broadcast_to(value, (1, value.shape[-1]))[0]


@pytest.mark.parametrize(
    ("width", "n"), [(1, 1), (2, 2), (3, 4), (64, 64), (100, 128)]
)
def test_tiles_are_padded_to_a_power_of_two(width: int, n: int) -> None:
    assert padded(width) == n
    assert evaluate(axis_code(width)).tolist() == list(range(n))
    mask = mask_code(width)
    assert (mask == "") == (width == n)
    if mask:
        assert evaluate(mask).sum() == width


@pytest.mark.parametrize("shape", [(10, 10), (4, 8), (3, 5, 2)])
def test_coordinates_are_those_of_the_axes(shape: tuple[int, ...]) -> None:
    expected = np.indices(shape).reshape(len(shape), -1)
    width = expected.shape[1]
    for dim, size in enumerate(shape):
        actual = evaluate(coordinate_code(shape, dim))
        assert np.array_equal(actual[:width], expected[dim])
        assert actual.min() >= 0
        assert actual.max() < size


GRID = np.arange(100).reshape(10, 10)
VIEWS = {
    "whole": GRID,
    "a part": GRID[2:5, 1:9],
    "one column": GRID[:, 3],
    "flipped": GRID[::-1, ::-1],
    "transposed": GRID.T,
    "rolled": np.roll(GRID, 3, 1),
    "rows in any order": np.random.default_rng(0).permutation(GRID),
    "repeated": np.repeat(GRID[..., None], 4, -1),
    "one number": GRID[4:5, 4:5],
    "the last one again": np.minimum(np.arange(103), 99),
    "the first one before": np.maximum(np.arange(-3, 70), 0),
    "down and then the same": np.maximum(np.arange(96, -60, -3), 3),
}


@pytest.mark.parametrize("name", VIEWS)
def test_code_of_places(name: str) -> None:
    places = VIEWS[name]
    code = index_code(places)
    assert code is not None
    actual = evaluate(code)
    assert np.array_equal(actual[: places.size], places.reshape(-1))
    # Places in the padding are in the tile, too: they are read.
    assert actual.min() >= 0
    assert actual.max() < 100


@pytest.mark.parametrize(
    "places",
    [
        np.where(GRID == 7, 8, GRID),
        np.random.default_rng(0).permutation(100),
    ],
    ids=["one other", "shuffled"],
)
def test_places_of_no_rule_have_no_code(places: NDArray[np.int64]) -> None:
    assert index_code(places) is None


def test_axes_that_one_expression_holds() -> None:
    expressions = np.array([0, 1]).repeat(20).reshape(2, 1, 4, 5)
    # By learners, rows, and two axes of numbers.
    assert n_tile_axes(expressions, 1) == 2
    assert n_tile_axes(expressions[0], 0) == 2
    assert n_tile_axes(expressions[:1, 0], None) == 3
    mixed = np.arange(4).reshape(1, 4)
    assert n_tile_axes(mixed, 0) is None


@pytest.mark.parametrize(
    ("op", "options", "row_dim", "places"),
    [
        (torch.transpose, (0, 1), 1, [[[0], [3]], [[1], [4]], [[2], [5]]]),
        (torch.flatten, (), 0, [0, 1, 2, 3, 4, 5]),
        (torch.select, (2, 1), 0, [[1, 4]]),
        (torch.unsqueeze, (0,), 1, [[[[0, 1, 2], [3, 4, 5]]]]),
    ],
)
def test_numbers_of_rows_in_another_order(op, options, row_dim, places):
    """Of rows [2, 3], in an axis where the rows are."""
    before = np.arange(6).reshape(1, 2, 3)
    if op is torch.transpose:
        places = np.arange(6).reshape(1, 2, 3).transpose(1, 0, 2).tolist()
    got, dim = rearrange(op, before, 0, *options)
    assert (got.tolist(), dim) == (places, row_dim)


def test_an_order_that_mixes_rows_is_refused():
    for op, options in ((torch.flip, ((0,),)), (torch.roll, (1, 0))):
        with pytest.raises(UnsupportedError, match="mixes rows"):
            rearrange(op, np.arange(6).reshape(1, 6), 0, *options)
