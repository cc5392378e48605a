"""Tensors of many rows as Triton expressions: what a kernel (`rollout`) knows of a tensor.

A tile holds the last axes of a tensor in one expression [R, P], flattened and padded to a power of two. What a view of
it shows is an array of places: for each number of the view its number in the tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Rows while a function is traced: a prime that no other axis has.
TRACED_ROWS = 509
# numbers a row of a tensor that are an expression each; more are held in a tile
MAX_NUMBERS_A_ROW = 96
# numbers a row of a tile
MAX_TILE_WIDTH = 4096


class UnsupportedError(RuntimeError):
    """A function cannot be written as a kernel; the text says why."""


Kind: TypeAlias = Literal["scalar", "row", "wide"]


@dataclass(frozen=True, slots=True)
class Expression:
    """A Triton expression: one number, one for each row [R], or several for each row [R, W]."""

    code: str
    kind: Kind = "scalar"


class LaneTensor(NamedTuple):
    """What a kernel knows of a tensor: for each number its place.

    The number at place p of a tensor in memory is p numbers after `pointer`; of any other it is the number p % width of
    the expression p // width. So a view, a transposition or a stack of tensors costs nothing until it is used.
    """

    # in place of the rows an axis of the numbers that follow each other in the memory of a row
    places: NDArray[Any]
    dtype: torch.dtype
    row_dim: int | None = None  # where the rows are; None: all rows share it
    held: tuple[Expression, ...] = ()
    width: int = 1  # numbers in each expression
    # last axes that each expression holds, in their order; 0: an expression is one number; None: a view of tiles
    tile: int | None = 0
    pointer: str = ""  # a tensor in memory, not loaded yet

    def numbers(self) -> list[Expression]:
        """The expressions of a tensor without tiles, in the order of its numbers."""
        return [self.held[place] for place in self.places.reshape(-1)]

    def needed(self) -> Sequence[Expression]:
        """All expressions that its numbers are in."""
        return self.numbers() if self.tile == 0 else self.held


TRITON_DTYPES = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.bfloat16: "tl.bfloat16",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.bool: "tl.int1",
}


def memory_tensor(pointer: str, x: Tensor) -> LaneTensor:
    """A contiguous tensor in memory that all rows share."""
    return LaneTensor(_count(*x.shape), x.dtype, pointer=pointer)


def held_tensor(
    held: Sequence[Expression],
    shape: Sequence[int],
    dtype: torch.dtype,
    row_dim: int | None = None,
    tile: int = 0,
) -> LaneTensor:
    """A tensor of some expressions, each of which holds its last axes."""
    width = math.prod(shape[len(shape) - tile :])
    return LaneTensor(_count(*shape), dtype, row_dim, tuple(held), width, tile)


def _count(*shape: int) -> NDArray[Any]:
    return np.arange(math.prod(shape)).reshape(shape)


def named_tensor(name: str, x: Tensor) -> LaneTensor:
    """A tensor [TRACED_ROWS, ...] whose numbers are the variables `name_0`, `name_1` and so on of the program.

    Where a row has more than `MAX_NUMBERS_A_ROW` numbers, the first of them holds all.
    """
    shape = x.shape[1:]
    n = math.prod(shape)
    if n > MAX_TILE_WIDTH:
        raise UnsupportedError(f"{n} numbers for each environment")
    is_wide = n > MAX_NUMBERS_A_ROW
    held = [Expression(f"{name}_{j}", "row") for j in range(n)]
    if is_wide:
        held = [Expression(f"{name}_0", "wide")]
    return held_tensor(
        held, (1, *shape), x.dtype, 0, len(shape) if is_wide else 0
    )


def numbers_a_row(x: LaneTensor) -> list[Expression]:
    """The expressions of a tensor [rows, ...] without tiles, in the order of memory.

    Raises:
      UnsupportedError: the rows are not its first axis.
    """
    if x.row_dim not in (0, None) or x.tile != 0:
        raise UnsupportedError("an output whose first axis is not the rows")
    return x.numbers()


# a tile, and which numbers of a row it holds, in steps of one size
Part: TypeAlias = tuple[Expression, NDArray[Any]]


def parts_of(x: LaneTensor, places: NDArray[Any]) -> list[Part] | None:
    """The tiles that hold a row of numbers, by their places; None if it shows some as a part only, or not in steps."""
    flat = places.reshape(-1)
    tile = flat // x.width
    parts: list[Part] = []
    for i in dict.fromkeys(tile.tolist()):
        (numbers,) = (tile == i).nonzero()
        is_whole = np.array_equal(flat[numbers] % x.width, np.arange(x.width))
        if not is_whole or len(set(np.diff(numbers).tolist())) > 1:
            return None
        parts.append((x.held[i], numbers))
    return parts


def constant_tensor(x: Tensor) -> LaneTensor:
    """A tensor whose numbers are literals."""
    if x.numel() > MAX_NUMBERS_A_ROW:
        raise UnsupportedError(f"a constant of {x.numel()} numbers")
    numbers = [literal(n, x.dtype) for n in x.flatten().tolist()]
    return held_tensor(numbers, tuple(x.shape), x.dtype)


def concatenate(
    tensors: Sequence[LaneTensor], dim: int, row_dim: int | None
) -> LaneTensor:
    """Tensors side by side along an axis, whose expressions hold equally many numbers."""
    (first, *_) = tensors
    held: list[Expression] = []
    places: list[NDArray[Any]] = []
    for x in tensors:
        places.append(x.places + len(held) * x.width)
        held += x.held
    tile = 0 if first.tile == 0 else None
    return LaneTensor(
        np.concatenate(places, dim),
        first.dtype,
        row_dim,
        tuple(held),
        first.width,
        tile,
    )


def literal(value: float | bool, dtype: torch.dtype) -> Expression:
    """A number as Triton code."""
    if dtype == torch.bool:
        return Expression(str(bool(value)))
    if not dtype.is_floating_point:
        return Expression(str(int(value)))
    code = repr(float(value))
    if not math.isfinite(value):
        code = f'float("{value}")'
    if dtype == torch.float64:
        code = f"tl.full([], {code}, tl.float64)"
    return Expression(code)


def without_axis(row_dim: int | None, dim: int) -> int | None:
    """Where the rows are once another axis is gone."""
    return row_dim - (dim < row_dim) if row_dim is not None else None


def column_code(number: Expression) -> str:
    """Code of an expression beside tiles."""
    return f"{number.code}[:, None]" if number.kind == "row" else number.code


def rearrange(
    op: Callable[..., Tensor],
    places: NDArray[Any],
    row_dim: int | None,
    *options: Any,
) -> tuple[NDArray[Any], int | None]:
    """Places of numbers in another order, and where the rows are then.

    Args:
      op: an operator of PyTorch that moves numbers, such as a view.
      places: of the numbers of one row, as `LaneTensor.places`.
      options: arguments of the operator other than its tensor.

    Raises:
      UnsupportedError: it mixes rows.
    """
    n = int(places.max(initial=0)) + 1
    if row_dim is not None:
        # The numbers of row r are r * n places further.
        first = np.arange(TRACED_ROWS) * n
        shape = [1] * (places.ndim + 1)
        shape[row_dim] = TRACED_ROWS
        rows = np.expand_dims(places, row_dim) + first.reshape(shape)
        shape = list(places.shape)
        shape[row_dim] *= TRACED_ROWS
        places = rows.reshape(shape)
    whole = torch.from_numpy(np.array(places, order="C"))
    result = op(whole, *options).numpy()

    dims = [i for i, k in enumerate(result.shape) if k % TRACED_ROWS == 0 < k]
    if not dims:
        if row_dim is not None and result.size:
            raise UnsupportedError("some of the rows")
        return result, None
    (dim, *_) = dims
    shape = list(result.shape)
    shape[dim : dim + 1] = [TRACED_ROWS, shape[dim] // TRACED_ROWS]
    rows = np.moveaxis(result.reshape(shape), dim, 0)
    step = 0 if row_dim is None else n
    steps = (step * np.arange(TRACED_ROWS)).reshape(-1, *[1] * rows[0].ndim)
    if (rows != rows[:1] + steps).any():
        raise UnsupportedError("a view that mixes rows")
    return rows[0], dim


# ---- Places of numbers in a tile, and Triton code that computes them.


def padded(width: int) -> int:
    """The numbers of a tile of `width` numbers, with its padding."""
    return 1 << (width - 1).bit_length()


def axis_code(width: int) -> str:
    """Code of the numbers of a tile [1, P]."""
    return f"tl.arange(0, {padded(width)})[None, :]"


def mask_code(width: int) -> str:
    """Code that tells which numbers of a tile are no padding; empty if all are."""
    return "" if padded(width) == width else f"({axis_code(width)} < {width})"


def coordinate_code(shape: tuple[int, ...], dim: int, n_dims: int = 1) -> str:
    """Code of the coordinate along axes of a tile that follow each other; in the padding it is within bounds, too."""
    end = dim + n_dims
    after = math.prod(shape[end:])
    code = axis_code(math.prod(shape))
    if after > 1:
        code = f"({code} // {after})"
    is_bounded = dim == 0 and not mask_code(math.prod(shape))
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
        terms.append(
            _function_code(coordinate_code(places.shape, dim), offsets)
        )
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
    code = f"{start} + {step} * {axis_code(len(places))}"
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
    if n > 64:
        return ""
    code = str(int(values[-1]))
    for i in reversed(range(n - 1)):
        code = f"tl.where({variable} == {i}, {int(values[i])}, {code})"
    return code
