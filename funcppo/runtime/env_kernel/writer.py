"""Tensors of many rows as Triton expressions: what a kernel (`rollout`) knows of a tensor.

A tile holds the last axes of a tensor in one expression [R, P], flattened and padded to a power of two. What a view of
it shows is an array of places: for each number of the view its number in the tile.

Writes the code of a kernel (`rollout`): its lines, tiles, and operators on each number by itself.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
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
    """Error for a function that cannot be written as a kernel; the text is the reason."""


Kind: TypeAlias = Literal["scalar", "row", "wide"]


@dataclass(frozen=True, slots=True)
class Expression:
    """Triton expression for one number, for one number in each row [R], or for several in each row [R, W]."""

    code: str
    kind: Kind = "scalar"


class LaneTensor(NamedTuple):
    """Symbolic tensor of a kernel: for each of its numbers, the place where the kernel holds it.

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
        """Return the expression of each number in order, for a tensor without tiles."""
        return [self.held[place] for place in self.places.reshape(-1)]

    def needed(self) -> Sequence[Expression]:
        """Return all expressions that hold the tensor's numbers."""
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
    """Describe a contiguous tensor in memory that all rows share."""
    return LaneTensor(_count(*x.shape), x.dtype, pointer=pointer)


def held_tensor(
    held: Sequence[Expression],
    shape: Sequence[int],
    dtype: torch.dtype,
    row_dim: int | None = None,
    tile: int = 0,
) -> LaneTensor:
    """Build a tensor from expressions, each of which holds the numbers of the last axes."""
    width = math.prod(shape[len(shape) - tile :])
    return LaneTensor(_count(*shape), dtype, row_dim, tuple(held), width, tile)


def _count(*shape: int) -> NDArray[Any]:
    return np.arange(math.prod(shape)).reshape(shape)


def named_tensor(name: str, x: Tensor) -> LaneTensor:
    """Build a tensor [TRACED_ROWS, ...] from the program's variables `name_0`, `name_1` and so on.

    Where a row has more than `MAX_NUMBERS_A_ROW` numbers, the first of them holds all.
    """
    shape = (1, *x.shape[1:])
    n = math.prod(shape)
    if n > MAX_TILE_WIDTH:
        raise UnsupportedError(f"{n} numbers for each environment")
    if n > MAX_NUMBERS_A_ROW:
        held = [Expression(f"{name}_0", "wide")]
        return held_tensor(held, shape, x.dtype, 0, len(shape) - 1)
    held = [Expression(f"{name}_{j}", "row") for j in range(n)]
    return held_tensor(held, shape, x.dtype, 0)


# a tile, and which numbers of a row it holds, in steps of one size
Part: TypeAlias = tuple[Expression, NDArray[Any]]


def parts_of(x: LaneTensor, places: NDArray[Any]) -> list[Part] | None:
    """Return the tiles that hold a row of numbers, with their positions.
    None if a tile is not shown whole and evenly spaced.
    """
    tiles, numbers = np.divmod(places.reshape(-1), x.width)
    parts: list[Part] = []
    for i in dict.fromkeys(tiles.tolist()):
        (where,) = (tiles == i).nonzero()
        is_whole = np.array_equal(numbers[where], np.arange(x.width))
        if not is_whole or len(np.unique(np.diff(where))) > 1:
            return None
        parts.append((x.held[i], where))
    return parts


def constant_tensor(x: Tensor) -> LaneTensor:
    """Build a tensor of literals from a constant tensor."""
    if x.numel() > MAX_NUMBERS_A_ROW:
        raise UnsupportedError(f"a constant of {x.numel()} numbers")
    numbers = [literal(n, x.dtype) for n in x.flatten().tolist()]
    return held_tensor(numbers, tuple(x.shape), x.dtype)


def concatenate(
    tensors: Sequence[LaneTensor], dim: int, row_dim: int | None
) -> LaneTensor:
    """Concatenate tensors along an axis; their expressions hold equally many numbers."""
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
    """Write a number as a Triton expression of a dtype."""
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


def first_tile_axis(row_dim: int | None) -> int:
    """Return the first axis that a tile may hold: it holds none before the rows."""
    return 0 if row_dim is None else row_dim + 1


def column_code(number: Expression) -> str:
    """Write an expression so that it broadcasts beside tiles."""
    return f"{number.code}[:, None]" if number.kind == "row" else number.code


def rearrange(
    op: Callable[..., Tensor],
    places: NDArray[Any],
    row_dim: int | None,
    *options: Any,
) -> tuple[NDArray[Any], int | None]:
    """Apply a view operator to the places of a tensor; return the new places and the new axis of the rows.

    Args:
      op: an operator of PyTorch that moves numbers, such as a view.
      places: of the numbers of one row, as `LaneTensor.places`.
      options: arguments of the operator other than its tensor.

    Raises:
      UnsupportedError: it mixes rows.
    """
    step = 0
    if row_dim is not None:
        # The numbers of row r are r * step places further.
        step = int(places.max(initial=0)) + 1
        first = np.arange(TRACED_ROWS).reshape(-1, *[1] * places.ndim)
        rows = np.moveaxis(places + step * first, 0, row_dim)
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
    if (np.diff(rows, axis=0) != step).any():
        raise UnsupportedError("a view that mixes rows")
    return rows[0], dim


# ---- Places of numbers in a tile, and Triton code that computes them.


def padded(width: int) -> int:
    """Round the width of a tile up to a power of two."""
    return 1 << (width - 1).bit_length()


def axis_code(width: int) -> str:
    """Write the indices of the numbers of a tile [1, P]."""
    return f"tl.arange(0, {padded(width)})[None, :]"


def mask_code(width: int) -> str:
    """Write the mask of the numbers of a tile that are not padding; empty if there is no padding."""
    return "" if padded(width) == width else f"({axis_code(width)} < {width})"


def coordinate_code(shape: tuple[int, ...], dim: int, n_dims: int = 1) -> str:
    """Write the coordinate along consecutive axes of a tile; in the padding too it stays within bounds."""
    end = dim + n_dims
    after = math.prod(shape[end:])
    code = axis_code(math.prod(shape))
    if after > 1:
        code = f"({code} // {after})"
    is_bounded = dim == 0 and not mask_code(math.prod(shape))
    return code if is_bounded else f"({code} % {math.prod(shape[dim:end])})"


def n_tile_axes(expressions: NDArray[Any], first: int) -> int:
    """Return the largest number of last axes, from axis `first` on, that single expressions can hold.

    Args:
      expressions: which of the expressions each number of a tensor is in.
    """
    for start in range(first, expressions.ndim):
        blocks = expressions.reshape(*expressions.shape[:start], -1)
        if (blocks == blocks[..., :1]).all():
            return expressions.ndim - start
    return 0


def varying_axes(numbers: NDArray[Any]) -> list[int]:
    """List the axes along which an array changes."""
    return [
        dim
        for dim in range(numbers.ndim)
        if (numbers != np.take(numbers, [0], dim)).any()
    ]


def index_code(places: NDArray[Any]) -> str | None:
    """Write places in a tile as a sum of functions of each coordinate; None if no such sum gives them."""
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
    """Write places that change in steps of one size, perhaps constant before and after; empty for any other places."""
    steps = np.diff(places)
    first = int(np.argmax(steps != 0)) if len(steps) else 0
    step = int(steps[first]) if len(steps) else 0
    start = int(places[0]) - step * first
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
    """Write a function of a coordinate from its values; empty if the code would be too long."""
    n = len(values)
    if (values == values[1] * np.arange(n)).all():
        return f"{int(values[1])} * {variable}"
    if n > 64:
        return ""
    code = str(int(values[-1]))
    for i in reversed(range(n - 1)):
        code = f"tl.where({variable} == {i}, {int(values[i])}, {code})"
    return code


Reduction: TypeAlias = Literal["sum", "max", "min", "any"]

# an operation on literal integers and bools; languages divide negative integers differently
CONSTANT = re.compile(
    r"\((?:\d|True|False|==|!=|[<>]=?|<<|>>|[-+*&|^() ])+\)|\(\d+ % \d+\)"
)
BOOLS = {"True": True, "False": False}  # literals
MAXIMUM = "tl.where(({0} > {1}) | ({0} != {0}), {0}, {1})"
MINIMUM = "tl.where(({0} < {1}) | ({0} != {0}), {0}, {1})"
# Reductions: of two numbers, of a tile, and the number that changes nothing.
REDUCTIONS: dict[Reduction, tuple[str, str, str]] = {
    "sum": ("({0} + {1})", "tl.sum({0}, 1)", "0"),
    "max": (MAXIMUM, "tl.max({0}, 1)", 'float("-inf")'),
    "min": (MINIMUM, "tl.min({0}, 1)", 'float("inf")'),
    "any": ("({0} | {1})", "(tl.max({0}.to(tl.int32), 1) != 0)", "False"),
}


# an operator on numbers of rows, as `Writer.pointwise` writes it: its template, and the dtypes of its operands and they
# an operator on numbers of rows, as `Writer.pointwise` writes it: its template, and the dtype of its operands and they
_Operation: TypeAlias = tuple[str, torch.dtype, tuple[Expression, ...]]


class Writer:
    """Writer of the code of one graph, called by the operators of `operators`."""

    def __init__(self, max_held: int | None) -> None:
        self.max_held = max_held
        self.n_streamed = 0
        self.preamble: list[str] = []
        self.body: list[str] = []
        # pointers to what is read in bfloat16, and in the dtype that it has
        self.rounded: set[str] = set()
        self.loaded: set[str] = set()
        self._names: dict[str, Expression] = {}  # of what is computed already
        self._operations: dict[Expression, _Operation] = {}  # of rows
        self.has_checks = False

    # Lines of code

    def line(self, code: str, kind: Kind, *, once: bool = False) -> Expression:
        """Return a variable for the value of some code, which is written once.

        Args:
          once: it is the same in each call.
        """
        if CONSTANT.fullmatch(code):
            return Expression(str(eval(code)))  # an operation on literals
        if code not in self._names:
            name = f"v{len(self._names)}"
            lines = self.preamble if once else self.body
            lines.append(f"{name} = {code}")
            self._names[code] = Expression(name, kind)
        return self._names[code]

    def check(self, condition: Expression, problem: str) -> None:
        """Write a check that ends the kernel with an error unless the condition holds in each valid row."""
        line = f'tl.device_assert({condition.code} | ~mask, "{problem}")'
        if line not in self.body:
            self.body.append(line)
        self.has_checks = True

    def load(self, x: LaneTensor) -> LaneTensor:
        """Return the tensor with an expression for each number or tile; a tensor in memory is loaded."""
        if not x.pointer:
            return self.settle(x)
        if x.places.size > MAX_NUMBERS_A_ROW:
            raise UnsupportedError(
                f"{x.places.size} numbers that all rows share, beside numbers of rows"
            )
        return self.take(x, x.places, x.row_dim, 0)

    def load_expression(
        self, x: LaneTensor, offset: str, mask: str = ""
    ) -> str:
        """Write code that loads from memory; bfloat16 numbers are held as float32."""
        is_rounded = x.dtype == torch.bfloat16
        (self.rounded if is_rounded else self.loaded).add(x.pointer)
        options = f", mask={mask}, other=0" if mask else ""
        code = f"tl.load({x.pointer} + {offset}{options})"
        return f"({code} != 0)" if x.dtype == torch.bool else code

    def load_tile(self, x: LaneTensor, offsets: NDArray[Any]) -> Expression:
        """Load numbers of a tensor in memory as one expression [1, P]."""
        place = index_code(offsets)
        if place is None:
            raise UnsupportedError("params in an order of no rule")
        mask = mask_code(offsets.size)
        code = self.load_expression(x, f"({place})", mask)
        return self.line(code, "wide", once=True)

    # Tiles

    def hold(self, x: LaneTensor, is_carried: bool) -> LaneTensor:
        """Return an output [rows, ...] with an expression for each number, or with tiles if it has many numbers."""
        if x.row_dim != 0:
            raise UnsupportedError("an output whose first axis is not the rows")
        n = x.places.size
        if n <= MAX_NUMBERS_A_ROW and x.tile == 0:
            return self.load(x)
        if n > MAX_TILE_WIDTH:
            raise UnsupportedError(f"an output of {n} numbers for each row")
        if is_carried and n <= MAX_NUMBERS_A_ROW:
            raise UnsupportedError("a state that is a hidden layer")
        if is_carried or x.tile == 0:
            return self.take(x, x.places, 0, x.places.ndim - 1)
        if parts_of(x, x.places) is None:
            x = self.settle(x)
        return x._replace(tile=None)

    def settle(self, x: LaneTensor) -> LaneTensor:
        """Return the tensor in tiles that hold exactly the numbers of its last axes."""
        if x.tile is not None:
            return x
        first = first_tile_axis(x.row_dim)
        n_tile = n_tile_axes(x.places // x.width, first)
        return self.take(
            x, x.places, x.row_dim, n_tile or x.places.ndim - first
        )

    def take(
        self,
        x: LaneTensor,
        places: NDArray[Any],
        row_dim: int | None,
        n_tile: int,
    ) -> LaneTensor:
        """Return the numbers of a tensor at given places, with the last `n_tile` axes held in tiles."""
        lead = places.shape[: places.ndim - n_tile]
        fetch = self.tile if n_tile else self._number
        held = [fetch(x, places[index]) for index in np.ndindex(lead)]
        return held_tensor(held, places.shape, x.dtype, row_dim, n_tile)

    def _number(self, x: LaneTensor, place: Any) -> Expression:
        """Return the expression of one number, loaded if it is in memory."""
        if not x.pointer:
            return x.held[int(place)]
        code = self.load_expression(x, str(int(place)))
        return self.line(code, "scalar", once=True)

    def tile(self, x: LaneTensor, places: NDArray[Any]) -> Expression:
        """Return one expression for the numbers at some places."""
        if x.pointer:
            return self.load_tile(x, places)
        # Equal expressions are one, wherever they are.
        place_of: dict[Expression, int] = {}
        same = [
            place_of.setdefault(number, i) for i, number in enumerate(x.held)
        ]
        expressions = np.array(same)[places // x.width]
        first = x.held[expressions.flat[0]]
        if (expressions == expressions.flat[0]).all():
            if first.kind != "wide":
                return first
            return self._regard(first, x, places % x.width)
        if x.tile == 0:
            return self._choose(x.held, expressions, x.dtype)
        return self._tile_of_parts(x, expressions, places % x.width)

    def _tile_of_parts(
        self,
        x: LaneTensor,
        expressions: NDArray[Any],
        numbers: NDArray[Any],
    ) -> Expression:
        """Build a tile from several tiles that lie side by side along one of its axes.

        Args:
          expressions: which tile of the tensor each number is in.
          numbers: its place there.
        """
        dim, *others = varying_axes(expressions)
        along = np.moveaxis(expressions, dim, 0).reshape(
            expressions.shape[dim], -1
        )[:, 0]
        ends = [*np.flatnonzero(np.diff(along)) + 1, len(along)]
        if others or len(ends) > len(np.unique(along)):
            raise UnsupportedError("tiles that are mixed")
        parts: list[Expression] = []
        for start, end in pairwise([0, *ends]):
            inside = np.clip(np.arange(len(along)), start, end - 1)
            tile = x.held[along[start]]
            if tile.kind == "wide":
                tile = self._regard(tile, x, np.take(numbers, inside, dim))
            parts.append(tile)
        return self.join(parts, ends, numbers.shape, dim)

    def join(
        self,
        parts: Sequence[Expression],
        ends: Sequence[int],
        shape: tuple[int, ...],
        dim: int,
    ) -> Expression:
        """Join tiles along an axis: each covers the coordinates from the end of the previous tile to its own end."""
        coordinate = coordinate_code(shape, dim)
        joined = parts[-1]
        for part, end in zip(reversed(parts[:-1]), reversed(ends[:-1])):
            is_in = self.line(f"{coordinate} < {end}", "wide", once=True)
            codes = f"{is_in.code}, {column_code(part)}, {column_code(joined)}"
            joined = self.line(f"tl.where({codes})", "wide")
        return joined

    def _regard(
        self, tile: Expression, x: LaneTensor, places: NDArray[Any]
    ) -> Expression:
        """Rearrange some numbers of a tile into another tile."""
        if np.array_equal(places.reshape(-1), np.arange(x.width)):
            return tile
        place = index_code(places)
        if place is None:
            raise UnsupportedError("a view of a tile in an order of no rule")
        n = padded(places.size)
        code = f"tl.broadcast_to({place}, [R, {n}]).to(tl.int32)"
        index = self.line(code, "wide", once=True)
        # Bools are gathered as integers.
        held = torch.int32 if x.dtype == torch.bool else x.dtype
        source = self.full_tile(self.cast(tile, x.dtype, held), x.width)
        n_times = n // padded(x.width)
        if n_times > 1:
            # Triton 3.6 gathers no more numbers than there are.
            shape = f"[R, {n_times}, {n // n_times}]"
            repeated = f"tl.broadcast_to({source.code}[:, None, :], {shape})"
            code = f"tl.reshape({repeated}, [R, {n}])"
            source = self.line(code, "wide")
        found = self.line(f"tl.gather({source.code}, {index.code}, 1)", "wide")
        return self.cast(found, held, x.dtype)

    def _choose(
        self,
        held: Sequence[Expression],
        expressions: NDArray[Any],
        dtype: torch.dtype,
    ) -> Expression:
        """Build a tile of single numbers, chosen by the coordinate along the axes where they differ."""
        dims = varying_axes(expressions)
        first, end = dims[0], dims[-1] + 1
        shape = expressions.shape
        coordinate = coordinate_code(shape, first, end - first)
        blocks = expressions.reshape(
            math.prod(shape[:first]), math.prod(shape[first:end]), -1
        )
        numbers = [held[i] for i in blocks[0, :, 0]]
        if operation := self._of_coordinate(numbers, coordinate):
            return operation

        ((most, _),) = Counter(numbers).most_common(1)
        chosen = most
        for i, number in enumerate(numbers):
            if number != most:
                is_it = self.line(f"{coordinate} == {i}", "wide", once=True)
                codes = f"{column_code(number)}, {column_code(chosen)}"
                chosen = self.line(f"tl.where({is_it.code}, {codes})", "wide")
        return self.line(f"({chosen.code}).to({TRITON_DTYPES[dtype]})", "wide")

    def _of_coordinate(
        self, numbers: Sequence[Expression], coordinate: str
    ) -> Expression | None:
        """Return one operation on a coordinate for numbers like `x == 0`, `x == 1`; None if they have no such form."""
        operations = [
            self._operations[x] for x in numbers if x in self._operations
        ]
        kinds = {operation[:2] for operation in operations}
        if len(operations) < len(numbers) or len(kinds) > 1:
            return None

        ((template, dtype),) = kinds
        codes: list[str] = []
        # by the place of the operand: what it is in each operation
        for operands in zip(*(x[2] for x in operations)):
            first, *others = (x.code for x in operands)
            if all(code == first for code in others):
                codes.append(column_code(operands[0]))
            elif first.isdigit() and others == [
                str(int(first) + i) for i in range(1, len(operands))
            ]:
                code = f"({coordinate} + {first}).to({TRITON_DTYPES[dtype]})"
                codes.append(self.line(code, "wide", once=True).code)
            else:
                return None
        return self.line(template.format(*codes), "wide")

    def full_tile(self, x: Expression, width: int) -> Expression:
        """Broadcast an expression to a tile [R, P]."""
        shape = f"[R, {padded(width)}]"
        return self.line(f"tl.broadcast_to({column_code(x)}, {shape})", "wide")

    def cast(
        self, x: Expression, dtype: torch.dtype, to: torch.dtype
    ) -> Expression:
        """Convert a number to another dtype."""
        if dtype == to:
            return x
        if x.code in BOOLS or x.code.removeprefix("-").isdigit():
            return literal(int(BOOLS.get(x.code, x.code)), to)
        if to == torch.bool:
            return self.line(f"({x.code} != 0)", x.kind)
        if to not in TRITON_DTYPES:
            raise UnsupportedError(f"numbers of dtype {to}")
        return self.line(f"({x.code}).to({TRITON_DTYPES[to]})", x.kind)

    # Operators on each number

    def pointwise(
        self,
        template: str,
        args: Sequence[Any],
        operands: torch.dtype,
        dtype: torch.dtype,
    ) -> LaneTensor:
        """Apply an operator to each number of broadcast operands.

        Args:
          template: code, {0} the first operand.
          operands: the dtype to which they are cast.
          dtype: of the result.
        """
        if dtype == torch.bfloat16:
            raise UnsupportedError("arithmetic in bfloat16")
        tensors = [x for x in args if isinstance(x, LaneTensor)]
        if len(tensors) == 1 and tensors[0].tile is None:
            # of whole tiles, of which the result shows what the operand does
            (x,) = tensors
            held = self._compute(template, args, operands)
            return x._replace(held=held, dtype=dtype)

        tensors = [self.settle(x) for x in tensors]
        row_dim = common_row_dim(tensors)
        shape = np.broadcast_shapes(*(x.places.shape for x in tensors))
        n_tile = _tile_axes_of(tensors, shape, row_dim)
        settled = iter(tensors)
        columns: list[Any] = []
        for x in args:
            if isinstance(x, LaneTensor):
                x = next(settled)
                x = x if n_tile else self.load(x)
                x = self.take(x, np.broadcast_to(x.places, shape), None, n_tile)
            columns.append(x)
        held = self._compute(template, columns, operands)
        return held_tensor(held, shape, dtype, row_dim, n_tile)

    def _compute(
        self, template: str, args: Sequence[Any], operands: torch.dtype
    ) -> tuple[Expression, ...]:
        """Apply an operator to the expressions that tensors hold, one after the other, and to numbers."""
        columns = [
            [self.cast(number, x.dtype, operands) for number in x.held]
            if isinstance(x, LaneTensor)
            else repeat(literal(x, operands))
            for x in args
        ]
        results: list[Expression] = []
        for numbers in zip(*columns):
            kinds = {number.kind for number in numbers}
            kind: Kind = "row" if "row" in kinds else "scalar"
            code = template.format(*(number.code for number in numbers))
            if "wide" in kinds:
                kind = "wide"
                code = template.format(*map(column_code, numbers))
            result = self.line(code, kind)
            if kind == "row":
                self._operations[result] = (template, operands, numbers)
            results.append(result)
        return tuple(results)

    # Views

    def view(
        self, op: Callable[..., Tensor], x: LaneTensor, *options: Any
    ) -> LaneTensor:
        """Apply an operator of PyTorch that only rearranges numbers; see `rearrange`."""
        places, row_dim = rearrange(op, x.places, x.row_dim, *options)
        if x.tile == 0:
            return x._replace(places=places, row_dim=row_dim)
        is_whole = np.array_equal(
            places.reshape(-1), np.arange(len(x.held) * x.width)
        )
        if is_whole and x.tile is not None:
            n_tile = n_tile_axes(places // x.width, first_tile_axis(row_dim))
            if n_tile:
                return self.take(x, places, row_dim, n_tile)
        return x._replace(places=places, row_dim=row_dim, tile=None)

    def narrow(self, x: LaneTensor, dim: int) -> tuple[LaneTensor, int]:
        """Load a tensor without tiles, and count axis `dim`, which must not be the rows, from 0."""
        x = self.load(x)
        if x.tile:
            raise UnsupportedError("an operator over a hidden layer")
        return x, _not_rows(x, dim)

    def fold(
        self, reduction: Reduction, x: LaneTensor, dim: int, keep: bool
    ) -> LaneTensor:
        """Reduce an axis, from its first number to its last."""
        x = self.load(x)
        dim = _not_rows(x, dim)
        n_tile, size = x.tile or 0, x.places.shape[dim]
        in_tile = x.places.ndim - n_tile <= dim
        if in_tile and x.width <= MAX_NUMBERS_A_ROW * size:
            total = self._fold_tile(reduction, x, dim)
        else:
            template, *_ = REDUCTIONS[reduction]
            total, *others = (
                self.take(x, places, x.row_dim, n_tile)
                for places in np.split(x.places, size, dim)
            )
            for other in others:
                total = self.pointwise(
                    template, [total, other], x.dtype, x.dtype
                )
        return total if keep else self.view(torch.squeeze, total, dim)

    def _fold_tile(
        self, reduction: Reduction, x: LaneTensor, dim: int
    ) -> LaneTensor:
        """Reduce an axis of a tile to one number; each place of the remaining tile axes becomes an expression."""
        _, template, neutral = REDUCTIONS[reduction]
        if "inf" in neutral and not x.dtype.is_floating_point:
            raise UnsupportedError("the largest or least integer of a tile")
        start = x.places.ndim - (x.tile or 0)
        tile = x.places.shape[start:]
        first = np.take(x.places, [0], dim)
        held: list[Expression] = []
        for index in np.ndindex(first.shape):
            number = x.held[first[index] // x.width]
            mask = _mask_of_others(tile, dim - start, index[start:])
            code = self.full_tile(number, x.width).code
            if mask:
                code = f"tl.where({mask}, {code}, {neutral})"
            held.append(self.line(template.format(code), "row"))
        return held_tensor(held, first.shape, x.dtype, x.row_dim)


def common_row_dim(tensors: Sequence[LaneTensor]) -> int | None:
    """Return the axis of the rows in the result of broadcast tensors; None if no tensor has rows.

    Raises:
      UnsupportedError: in several axes.
    """
    n_dims = max(x.places.ndim for x in tensors)
    row_dims = {
        x.row_dim + n_dims - x.places.ndim
        for x in tensors
        if x.row_dim is not None
    }
    if len(row_dims) > 1:
        raise UnsupportedError("rows beside rows in another axis")
    return next(iter(row_dims), None)


def _not_rows(x: LaneTensor, dim: int) -> int:
    """Return an axis counted from 0; raise UnsupportedError if it is the rows.

    Raises:
      UnsupportedError: it is the rows.
    """
    dim %= x.places.ndim
    if dim == x.row_dim:
        raise UnsupportedError("an operator over the rows")
    return dim


def _mask_of_others(
    tile: tuple[int, ...], dim: int, index: tuple[int, ...]
) -> str:
    """Write the mask of the numbers of a tile at fixed coordinates of all axes but one; empty for all numbers."""
    masks = [mask_code(math.prod(tile))]
    for i, place in enumerate(index):
        if i != dim and tile[i] > 1:
            masks.append(f"({coordinate_code(tile, i)} == {place})")
    return " & ".join(filter(None, masks))


def _tile_axes_of(
    tensors: Sequence[LaneTensor], shape: tuple[int, ...], row_dim: int | None
) -> int:
    """Return the number of a result's last axes that tiles hold, given its shape with one row."""
    tiles = [x.tile for x in tensors if x.tile]
    if not tiles and math.prod(shape) <= MAX_NUMBERS_A_ROW:
        return 0
    n_axes = len(shape) - first_tile_axis(row_dim)
    # As many as make a tile of moderate size, and one at least.
    widths = np.cumprod(shape[::-1])[:n_axes]
    n_moderate = max(int((widths <= 256).sum()), 1)
    n_tile = min(n_axes, min(tiles, default=n_moderate))
    width = math.prod(shape[len(shape) - n_tile :])
    if width > MAX_TILE_WIDTH:
        raise UnsupportedError(f"{width} numbers for each row")
    return n_tile
