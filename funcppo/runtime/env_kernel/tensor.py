"""Tensors of many rows as Triton expressions: what a program of rows (`rollout_kernel`) knows of a tensor."""

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
    """A function cannot be written as a program of rows; the text says why."""


Kind: TypeAlias = Literal["scalar", "row", "wide"]


@dataclass(frozen=True, slots=True)
class Expression:
    """A Triton expression: one number, one for each row [R], or several for each row [R, W]."""

    code: str
    kind: Kind = "scalar"


class RowTensor(NamedTuple):
    """What the program knows of a tensor."""

    # Of expressions, or of offsets from `pointer`; in place of the rows an axis of the numbers that follow each other
    # in the memory of a row. Axes of the tile have size 1.
    elements: NDArray[Any]
    dtype: torch.dtype
    row_dim: int | None = None  # where the rows are; None: all rows share it
    # the last axes, which each expression holds; (): an expression is one number
    tile: tuple[int, ...] = ()
    pointer: str = ""  # a tensor in memory, not loaded yet
    # For each number its place, where a tensor shows some numbers of its tiles, [N, 1] in `elements`: a view or a stack
    # of tiles costs nothing until it is used.
    shown: NDArray[Any] | None = None

    @property
    def width(self) -> int:
        """Numbers in each expression."""
        return math.prod(self.tile)

    def places(self) -> NDArray[Any]:
        """For each number its place: in memory, or by expressions and then in the tile."""
        if self.pointer:
            return self.elements
        if self.shown is not None:
            return self.shown
        lead = self.elements.shape[: self.elements.ndim - len(self.tile)]
        n = self.elements.size * self.width
        return np.arange(n).reshape((*lead, *self.tile))


TRITON_DTYPES = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.bfloat16: "tl.bfloat16",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.bool: "tl.int1",
}


def memory_tensor(pointer: str, x: Tensor) -> RowTensor:
    """A contiguous tensor in memory that all rows share."""
    offsets = np.arange(x.numel()).reshape(x.shape)
    return RowTensor(offsets, x.dtype, pointer=pointer)


def expressions_tensor(numbers: Sequence[Expression], x: Tensor) -> RowTensor:
    """A tensor that all rows share, from an expression for each of its numbers."""
    return RowTensor(array_of(numbers, tuple(x.shape)), x.dtype)


def named_tensor(name: str, x: Tensor) -> RowTensor:
    """A tensor [TRACED_ROWS, ...] whose numbers are the variables `name_0`, `name_1` and so on of the program.

    Where a row has more than `MAX_NUMBERS_A_ROW` numbers, the first of them holds all.
    """
    shape = x.shape[1:]
    n = math.prod(shape)
    if n > MAX_TILE_WIDTH:
        raise UnsupportedError(f"{n} numbers for each environment")
    if n > MAX_NUMBERS_A_ROW:
        elements = array_of([Expression(f"{name}_0", "wide")], (1,) * x.ndim)
        return RowTensor(elements, x.dtype, 0, tuple(shape))
    names = [Expression(f"{name}_{j}", "row") for j in range(n)]
    return RowTensor(array_of(names, (1, *shape)), x.dtype, row_dim=0)


def numbers_a_row(x: RowTensor) -> list[Expression]:
    """The expressions of a tensor [rows, ...] without tiles, in the order of memory.

    Raises:
      UnsupportedError: the rows are not its first axis.
    """
    if x.row_dim not in (0, None) or x.tile:
        raise UnsupportedError("an output whose first axis is not the rows")
    return list(x.elements.reshape(-1))


class Part(NamedTuple):
    """A tile, and which numbers of a row it holds."""

    tile: Expression
    numbers: NDArray[Any]  # in steps of one size


def parts_of(x: RowTensor, places: NDArray[Any]) -> list[Part] | None:
    """The tiles that hold a row of numbers, by their places; None if it shows some as a part only, or not in steps."""
    tiles: list[Expression] = x.elements.reshape(-1).tolist()
    flat = places.reshape(-1)
    tile = flat // x.width
    parts: list[Part] = []
    for i in dict.fromkeys(tile.tolist()):
        (numbers,) = (tile == i).nonzero()
        is_whole = np.array_equal(flat[numbers] % x.width, np.arange(x.width))
        if not is_whole or len(set(np.diff(numbers).tolist())) > 1:
            return None
        parts.append(Part(tiles[i], numbers))
    return parts


def show(x: RowTensor, places: NDArray[Any], row_dim: int | None) -> RowTensor:
    """Some numbers of the tiles of a tensor."""
    tiles = x.elements.reshape(-1, 1)
    return RowTensor(tiles, x.dtype, row_dim, (x.width,), "", places)


def constant_tensor(x: Tensor) -> RowTensor:
    """A tensor whose numbers are literals."""
    if x.numel() > MAX_NUMBERS_A_ROW:
        raise UnsupportedError(f"a constant of {x.numel()} numbers")
    numbers = [literal(n, x.dtype) for n in x.flatten().tolist()]
    return RowTensor(array_of(numbers, tuple(x.shape)), x.dtype)


def array_of(
    elements: Sequence[object], shape: tuple[int, ...]
) -> NDArray[Any]:
    """An array of objects."""
    array = np.empty(len(elements), dtype=object)
    for i, element in enumerate(elements):
        array[i] = element
    return array.reshape(shape)


def map_numbers(
    fn: Callable[..., object], *arrays: NDArray[Any]
) -> NDArray[Any]:
    """A function of the elements of arrays that broadcast."""
    arrays = tuple(np.broadcast_arrays(*arrays))
    columns = (array.reshape(-1).tolist() for array in arrays)
    return array_of([fn(*row) for row in zip(*columns)], arrays[0].shape)


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


# a view: the elements and the axis of the rows of its result, of a tensor, one like the result, and the options
ViewFn: TypeAlias = Callable[..., tuple[NDArray[Any], int | None]]


def unsqueeze(
    x: RowTensor, result: Tensor, dim: int
) -> tuple[NDArray[Any], int | None]:
    """A new axis of size 1, a `ViewFn`."""
    dim %= x.elements.ndim + 1
    row_dim = x.row_dim
    if row_dim is not None:
        row_dim += dim <= row_dim
    return np.expand_dims(x.elements, dim), row_dim
