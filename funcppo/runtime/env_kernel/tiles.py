"""Places of numbers in a tile, and Triton code that computes them.

A tile holds the last axes of a tensor in one expression [R, P], flattened and padded to a power of two. What a view of
it shows is an array of places: for each number of the view its number in the tile.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

# numbers of an axis whose places follow no rule
MAX_TABLE = 64


def padded(width: int) -> int:
    """The numbers of a tile of `width` numbers, with its padding."""
    return 1 << (width - 1).bit_length()


def axis(width: int) -> str:
    """Code of the numbers of a tile [1, P]."""
    return f"tl.arange(0, {padded(width)})[None, :]"


def mask(width: int) -> str:
    """Code that tells which numbers of a tile are no padding; empty if all are."""
    return "" if padded(width) == width else f"({axis(width)} < {width})"


def coordinate(shape: tuple[int, ...], dim: int, n_dims: int = 1) -> str:
    """Code of the coordinate along axes of a tile that follow each other; in the padding it is within bounds, too."""
    end = dim + n_dims
    after = math.prod(shape[end:])
    code = axis(math.prod(shape))
    if after > 1:
        code = f"({code} // {after})"
    is_bounded = dim == 0 and not mask(math.prod(shape))
    return code if is_bounded else f"({code} % {math.prod(shape[dim:end])})"


def n_tile_axes(expressions: NDArray[Any], row_dim: int | None) -> int | None:
    """How many of the last axes one expression each can hold: as many as possible; None if none can.

    Args:
      expressions: which of the expressions each number of a tensor is in.
      row_dim: its rows, which are in no tile.
    """
    first = 0 if row_dim is None else row_dim + 1
    for start in range(first, expressions.ndim):
        blocks = expressions.reshape(
            *expressions.shape[:start], math.prod(expressions.shape[start:])
        )
        if (blocks == blocks[..., :1]).all():
            return expressions.ndim - start
    return None


def varying_axes(numbers: NDArray[Any]) -> list[int]:
    """The axes along which an array changes."""
    return [
        dim
        for dim in range(numbers.ndim)
        if (numbers != np.take(numbers, [0], dim)).any()
    ]


def index_code(places: NDArray[Any]) -> str | None:
    """Code of places in a tile of the shape of `places`; None if no sum of functions of each coordinate gives them."""
    flat = places.reshape(-1)
    if code := _line_code(flat):
        return code

    terms = [str(int(flat[0]))]
    rest = places - flat[0]
    for dim in varying_axes(places):
        line = np.moveaxis(places, dim, 0).reshape(places.shape[dim], -1)[:, 0]
        offsets = line - line[0]
        shape = [1] * places.ndim
        shape[dim] = -1
        rest = rest - offsets.reshape(shape)
        terms.append(_function_code(coordinate(places.shape, dim), offsets))
    if rest.any() or "" in terms:
        return None
    return " + ".join(terms)


def _line_code(places: NDArray[Any]) -> str:
    """Code of places in steps of one size, which may stay the same before and after; empty if they are others."""
    changes = np.flatnonzero(np.diff(places))
    start, step = int(places[0]), 0
    if len(changes):
        first = int(changes[0])
        step = int(places[first + 1] - places[first])
        start -= step * first
    low, high = int(places.min()), int(places.max())
    numbers = start + step * np.arange(padded(len(places)))
    if not np.array_equal(np.clip(numbers[: len(places)], low, high), places):
        return ""
    code = f"{start} + {step} * {axis(len(places))}"
    # In the padding, too, places are among those of the tile.
    if numbers.min() < low:
        code = f"tl.maximum({code}, {low})"
    if numbers.max() > high:
        code = f"tl.minimum({code}, {high})"
    return code


def _function_code(variable: str, values: NDArray[Any]) -> str:
    """Code of a function of a coordinate, from its values; empty if it would be too long."""
    n = len(values)
    if (values == values[1] * np.arange(n)).all():
        return f"{int(values[1])} * {variable}"
    if n > MAX_TABLE:
        return ""
    code = str(int(values[-1]))
    for i in reversed(range(n - 1)):
        code = f"tl.where({variable} == {i}, {int(values[i])}, {code})"
    return code
