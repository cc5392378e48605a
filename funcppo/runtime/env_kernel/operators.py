"""PyTorch's operators in a kernel (`rollout`).

`VIEWS` move numbers; the operators of `POINTWISE` act on each number by itself, those of `OPERATORS` write other code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from funcppo.core import random
from funcppo.runtime.env_kernel.writer import (
    MAX_NUMBERS_A_ROW,
    MAX_TILE_WIDTH,
    MAXIMUM,
    MINIMUM,
    TRACED_ROWS,
    Expression,
    LaneTensor,
    Part,
    Reduction,
    UnsupportedError,
    Writer,
    column_code,
    common_row_dim,
    concatenate,
    first_tile_axis,
    held_tensor,
    index_code,
    literal,
    mask_code,
    padded,
    parts_of,
    rearrange,
)

aten = torch.ops.aten

# last axes of layers that are held in one expression have at least as many numbers
MIN_WIDTH = 16

VIEWS = {
    *(aten.flip, aten.view, aten.reshape, aten._unsafe_view, aten.expand),
    *(aten.permute, aten.transpose, aten.unsqueeze, aten.squeeze),
    *(aten.select, aten.slice),
}

# Operators on each number by itself: their code, by kinds of dtypes of the result (f: floating point, i: integers,
# b: bools). Operands have the dtype of the result.
POINTWISE: dict[Any, dict[str, str]] = {
    aten.add: {"fi": "({0} + {1})"},
    aten.sub: {"fi": "({0} - {1})"},
    aten.mul: {"fi": "({0} * {1})", "b": "({0} & {1})"},
    aten.div: {"f": "({0} / {1})"},
    aten.neg: {"fi": "(-{0})"},
    aten.abs: {"fi": "tl.abs({0})"},
    aten.sin: {"f": "tl.sin({0})"},
    aten.cos: {"f": "tl.cos({0})"},
    aten.exp: {"f": "tl.exp({0})"},
    aten.log: {"f": "tl.log({0})"},
    aten.sqrt: {"f": "tl.sqrt({0})"},
    aten.floor: {"f": "tl.floor({0})"},
    aten.ceil: {"f": "tl.ceil({0})"},
    aten.tanh: {"f": "libdevice.tanh({0})"},
    aten.log1p: {"f": "libdevice.log1p({0})"},
    aten.erfinv: {"f": "libdevice.erfinv({0})"},
    aten.relu: {"f": "tl.where({0} <= 0, 0.0, {0})"},
    aten.maximum: {"fi": MAXIMUM},
    aten.minimum: {"fi": MINIMUM},
    aten.bitwise_and: {"ib": "({0} & {1})"},
    aten.bitwise_or: {"ib": "({0} | {1})"},
    aten.bitwise_xor: {"ib": "({0} ^ {1})"},
    aten.bitwise_not: {"i": "(~{0})", "b": "({0} == 0)"},
    aten.__rshift__: {"i": "({0} >> {1})"},
    aten.__lshift__: {"i": "({0} << {1})"},
    aten.logical_and: {"b": "({0} & {1})"},
    aten.logical_or: {"b": "({0} | {1})"},
    aten.logical_not: {"b": "({0} == 0)"},
    # with the sign of the divisor
    aten.remainder: {
        "f": "({0} - tl.floor({0} / {1}) * {1})",
        "i": "(({0} % {1} + {1}) % {1})",
    },
    # with the sign of the dividend
    aten.fmod: {"i": "({0} % {1})"},
    aten.sign: {"i": "tl.where({0} > 0, 1, tl.where({0} < 0, -1, 0))"},
    # The operands of a comparison have their common dtype.
    aten.eq: {"b": "({0} == {1})"},
    aten.ne: {"b": "({0} != {1})"},
    aten.lt: {"b": "({0} < {1})"},
    aten.le: {"b": "({0} <= {1})"},
    aten.gt: {"b": "({0} > {1})"},
    aten.ge: {"b": "({0} >= {1})"},
    aten.isnan: {"b": "({0} != {0})"},
}
WHERE = "tl.where({0}, {1}, {2})"
COMPARISONS = {
    *(aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.isnan)
}


def pointwise(
    writer: Writer, op: Any, dtype: torch.dtype, args: Sequence[Any]
) -> LaneTensor:
    """Write an operator of `POINTWISE` in the form for its dtype.

    Raises:
      UnsupportedError: it has no code for this dtype.
    """
    operands = dtype
    if op in COMPARISONS:
        samples = [
            torch.empty(1, dtype=x.dtype) if isinstance(x, LaneTensor) else x
            for x in args
        ]
        operands = torch.result_type(samples[0], samples[-1])
    kind = {torch.bool: "b", torch.int64: "i", torch.int32: "i"}.get(dtype, "f")
    for kinds, template in POINTWISE[op].items():
        if kind in kinds:
            return writer.pointwise(template, args, operands, dtype)
    raise UnsupportedError(f"operator {op} of {dtype}")


# Other operators: of the writer, the dtype and a tensor like the result, and the operator's arguments.


def _to_copy(
    writer: Writer, dtype: torch.dtype, result: Tensor, x: LaneTensor, **_: Any
) -> LaneTensor:
    if x.pointer and (x.dtype, dtype) == (torch.float32, torch.bfloat16):
        return x._replace(dtype=dtype)  # `Program.rounded` says so
    if x.dtype == dtype and not x.pointer:
        return x
    x = writer.load(x) if x.pointer else x
    held = [writer.cast(number, x.dtype, dtype) for number in x.held]
    return x._replace(held=tuple(held), dtype=dtype)


def _where(
    writer: Writer,
    dtype: torch.dtype,
    result: object,
    condition: LaneTensor,
    *args: Any,
) -> LaneTensor:
    condition = condition._replace(dtype=dtype)  # it is not cast
    return writer.pointwise(WHERE, [condition, *args], dtype, dtype)


def _divide(
    writer: Writer,
    dtype: torch.dtype,
    result: Tensor,
    *args: Any,
    rounding_mode: str | None = None,
) -> LaneTensor:
    """Write the quotient of integers, rounded down."""
    if dtype.is_floating_point or rounding_mode != "floor":
        raise UnsupportedError(f"a quotient, rounded: {rounding_mode}")
    # Languages round an inexact quotient of integers differently.
    template = "(({0} - ({0} % {1} + {1}) % {1}) // {1})"
    return writer.pointwise(template, args, dtype, dtype)


def _clamp(
    writer: Writer,
    dtype: torch.dtype,
    result: Tensor,
    x: LaneTensor,
    low: Any = None,
    high: Any = None,
) -> LaneTensor:
    # A NaN stays one.
    for bound, sign in ((low, "<"), (high, ">")):
        if bound is not None:
            template = f"tl.where({{0}} {sign} {{1}}, {{1}}, {{0}})"
            x = writer.pointwise(template, [x, bound], dtype, dtype)
    return x


def _pow(
    writer: Writer,
    dtype: torch.dtype,
    result: Tensor,
    x: LaneTensor,
    exponent: float,
) -> LaneTensor:
    if exponent not in (2, 3, 4):
        raise UnsupportedError(f"a power of {exponent}")
    template = "(" + " * ".join(["{0}"] * int(exponent)) + ")"
    return writer.pointwise(template, [x], dtype, dtype)


def _cat(
    writer: Writer,
    dtype: torch.dtype,
    result: Tensor,
    tensors: Sequence[LaneTensor],
    dim: int = 0,
) -> LaneTensor:
    parts = [_to_copy(writer, dtype, result, x) for x in tensors]
    dim %= result.ndim
    # Where no rows are, all rows share the numbers.
    row_dim = common_row_dim(parts)
    if dim == row_dim:
        raise UnsupportedError("tensors side by side, along their rows")
    n = sum(x.places.size for x in parts)
    if n <= MAX_NUMBERS_A_ROW and all(x.tile == 0 for x in parts):
        return concatenate(parts, dim, row_dim)
    first = first_tile_axis(row_dim)
    if dim < first or n > MAX_TILE_WIDTH:
        raise UnsupportedError(f"{n} numbers of tensors side by side")
    if math.prod(parts[0].places.shape[:first]) > 1:
        raise UnsupportedError("several hidden layers beside others")

    # along an axis of the tile that holds the result
    n_tile = result.ndim - first
    if len({x.places.size for x in parts}) == 1:
        # Each stays a tile of its own.
        tiles = [writer.take(x, x.places, row_dim, n_tile) for x in parts]
        return concatenate(tiles, dim, row_dim)
    return _join(writer, parts, dim, row_dim, n_tile)


def _join(
    writer: Writer,
    parts: Sequence[LaneTensor],
    dim: int,
    row_dim: int | None,
    n_tile: int,
) -> LaneTensor:
    """Concatenate tensors of several sizes in one tile."""
    sizes = [x.places.shape[dim] for x in parts]
    ends = np.cumsum(sizes).tolist()
    pieces: list[Expression] = []
    shape: tuple[int, ...] = ()
    for x, size, end in zip(parts, sizes, ends):
        # Outside of its part a tensor shows its first or last number.
        along = np.clip(
            np.arange(size - end, ends[-1] + size - end), 0, size - 1
        )
        shown = np.take(x.places, along, dim)
        shape = shown.shape
        pieces += writer.take(x, shown, row_dim, n_tile).held
    first = len(shape) - n_tile
    joined = writer.join(pieces, ends, shape[first:], dim - first)
    return held_tensor([joined], shape, parts[0].dtype, row_dim, n_tile)


def _full(
    writer: Writer, dtype: torch.dtype, result: Tensor, *args: Any, **_: Any
) -> LaneTensor:
    """Return a tensor of the result's shape filled with the last argument."""
    zeros = np.zeros(result.shape, np.int64)
    places, row_dim = rearrange(torch.clone, zeros, None)
    return LaneTensor(places, dtype, row_dim, (literal(args[-1], dtype),))


def _arange(
    writer: Writer,
    dtype: torch.dtype,
    result: Tensor,
    start: int,
    end: int,
    step: int = 1,
    **_: Any,
) -> LaneTensor:
    n = len(result)
    k, rest = divmod(n, TRACED_ROWS)
    if rest:
        numbers = [literal(start + i * step, dtype) for i in range(n)]
        return held_tensor(numbers, (n,), dtype)
    numbers = [
        writer.line(f"({start} + (rows * {k} + {j}) * {step})", "row")
        for j in range(k)
    ]
    x = held_tensor(numbers, (k,), torch.int64, 0)
    return _to_copy(writer, dtype, result, x)


def _threefry(
    writer: Writer, dtype: torch.dtype, result: object, *words: LaneTensor
) -> list[LaneTensor]:
    arguments: list[LaneTensor] = []
    for word in map(writer.load, words):
        # A function takes no literals.
        held = [
            writer.line(f"tl.full([], {x.code}, tl.int64)", "scalar")
            if x.code.isdigit()
            else x
            for x in word.held
        ]
        arguments.append(word._replace(held=tuple(held)))
    return [
        writer.pointwise(
            f"threefry_{i}({{0}}, {{1}}, {{2}}, {{3}})",
            arguments,
            torch.int64,
            torch.int64,
        )
        for i in range(2)
    ]


def _reduce(
    writer: Writer,
    dtype: torch.dtype,
    result: Tensor,
    x: LaneTensor,
    dims: int | Sequence[int] = (),
    keep: bool = False,
    *,
    reduction: Reduction,
    **_: Any,
) -> LaneTensor:
    """Reduce one axis, in the dtype of the result."""
    axes = (dims,) if isinstance(dims, int) else tuple(dims)
    if len(axes) != 1:
        raise UnsupportedError(f"{reduction} of several axes")
    x = _to_copy(writer, dtype, result, writer.load(x))
    return writer.fold(reduction, x, axes[0], keep)


def _cumsum(
    writer: Writer, dtype: torch.dtype, result: Tensor, x: LaneTensor, dim: int
) -> LaneTensor:
    x, dim = writer.narrow(_to_copy(writer, dtype, result, x), dim)
    sums: list[LaneTensor] = []
    for n in range(x.places.shape[dim]):
        part = x._replace(places=np.take(x.places, range(n + 1), dim))
        sums.append(writer.fold("sum", part, dim, True))
    if any(total.tile for total in sums):
        raise UnsupportedError("many running sums")
    return concatenate(sums, dim, x.row_dim)


def _index(
    writer: Writer,
    dtype: torch.dtype,
    result: Tensor,
    x: LaneTensor,
    indices: Sequence[LaneTensor | None],
) -> LaneTensor:
    """Index a tensor: by constant indices along an axis, or by computed indices of a table that all rows share."""
    given = [index for index in indices if index is not None]
    dim = indices.index(given[0])
    if any(index.dtype == torch.bool or index.pointer for index in given):
        raise UnsupportedError("numbers by a mask, or by indices in memory")
    numbers = _constant_index(given[0])
    if len(given) == 1 and numbers is not None:
        return writer.view(_take, x, dim, torch.from_numpy(numbers))

    if x.row_dim is not None or any(index.tile != 0 for index in given):
        raise UnsupportedError("numbers of a row by computed indices")
    if all(index.row_dim is None for index in given):
        raise UnsupportedError("numbers by several constant indices")
    if dim or None in indices[: len(given)]:
        raise UnsupportedError("computed indices of axes that are not first")
    if x.pointer:
        return _look_up(writer, x, given)
    return _choose_row(writer, x, given)


def _take(x: Tensor, dim: int, numbers: Tensor) -> Tensor:
    return x[(*[slice(None)] * dim, numbers)]


def _constant_index(index: LaneTensor) -> NDArray[Any] | None:
    """Return the numbers of an index [N] or [] if all are known and not negative; otherwise None."""
    if index.tile != 0 or index.row_dim is not None:
        return None
    codes = [number.code for number in index.numbers()]
    if not all(map(str.isdigit, codes)):
        return None
    return np.array([int(c) for c in codes]).reshape(index.places.shape)


def _choose_row(
    writer: Writer, x: LaneTensor, indices: Sequence[LaneTensor]
) -> LaneTensor:
    """Choose rows of a small constant table by one computed index."""
    if len(indices) > 1 or indices[0].places.ndim != 1:
        raise UnsupportedError("constants by several indices")
    (index,) = indices
    n_rows, *rest = x.places.shape
    _check_index(writer, index, n_rows)
    shape = (*index.places.shape, *(1 for _ in rest))
    beside = index._replace(places=index.places.reshape(shape))
    chosen = _choose(writer, x, 0, beside, n_rows)
    # Also where there is but one row.
    return chosen._replace(row_dim=index.row_dim)


def _choose(
    writer: Writer, x: LaneTensor, dim: int, index: LaneTensor, n_back: int = 0
) -> LaneTensor:
    """Choose a slice of a tensor along an axis by an index; the first slice if the index names no slice.

    Args:
      n_back: how much less an index may be that names the same slice; 0: no less.
    """
    first, *others = np.split(x.places, x.places.shape[dim], dim)
    chosen = x._replace(places=first)
    for i, numbers in enumerate(others, 1):
        template = f"({{0}} == {i})"
        if n_back:
            template = f"({template} | ({{0}} == {i - n_back}))"
        is_it = writer.pointwise(template, [index], torch.int64, torch.bool)
        other = x._replace(places=numbers)
        chosen = _where(writer, x.dtype, None, is_it, other, chosen)
    return chosen


def _check_index(writer: Writer, index: LaneTensor, n: int) -> LaneTensor:
    """Return the mask of indices within bounds; the kernel ends with an error if an index of a valid row is not."""
    is_within = writer.pointwise(
        f"(({{0}} >= {-n}) & ({{0}} < {n}))",
        [index],
        torch.int64,
        torch.bool,
    )
    for number in is_within.numbers():
        writer.check(number, f"index out of bounds: expected {-n} to {n - 1}")
    return is_within


def _look_up(
    writer: Writer, table: LaneTensor, indices: Sequence[LaneTensor]
) -> LaneTensor:
    """Load numbers of a table in memory, given an index for each of its first axes."""
    sizes = table.places.shape[: len(indices)]
    steps = _steps(table.places, len(indices))
    are_within = [
        _check_index(writer, index, size) for index, size in zip(indices, sizes)
    ]
    numbers = [f"{{{i}}}" for i in range(len(sizes))]
    is_there = writer.pointwise(
        f"({' & '.join(numbers)} & mask)", are_within, torch.bool, torch.bool
    )
    terms = (
        f"tl.where({number} < 0, {number} + {size}, {number}) * {step}"
        for number, size, step in zip(numbers, sizes, steps)
    )
    start = writer.pointwise(
        f"({' + '.join(terms)})", indices, torch.int64, torch.int64
    )
    rest = table.places[(0,) * len(indices)]
    if start.places.size * rest.size > MAX_NUMBERS_A_ROW:
        return _load_many(writer, table, rest, start, is_there)

    held: list[Expression] = []
    for place, there in zip(start.numbers(), is_there.numbers()):
        for offset in rest.reshape(-1):
            code = writer.load_expression(
                table, f"({place.code} + {offset})", there.code
            )
            held.append(writer.line(code, "row"))
    shape = (*start.places.shape, *rest.shape)
    return held_tensor(held, shape, table.dtype, start.row_dim)


def _steps(offsets: NDArray[Any], n_axes: int) -> list[int]:
    """Return the memory strides of the first axes of a table.

    Raises:
      UnsupportedError: there are no such steps.
    """
    rest = offsets[(0,) * n_axes]
    first = offsets.reshape(*offsets.shape[:n_axes], -1)[..., 0]
    steps = [
        int(np.diff(first, axis=dim).flat[0]) if size > 1 else 0
        for dim, size in enumerate(first.shape)
    ]
    rows = np.tensordot(steps, np.indices(first.shape), 1)
    if (np.add.outer(rows, rest) != offsets).any():
        raise UnsupportedError("a table in an order of no rule")
    return steps


def _load_many(
    writer: Writer,
    table: LaneTensor,
    offsets: NDArray[Any],
    start: LaneTensor,
    is_there: LaneTensor,
) -> LaneTensor:
    """Load many numbers of a table in memory as a tile, at offsets from each row's start."""
    if start.places.size > 1 or offsets.size > MAX_TILE_WIDTH:
        raise UnsupportedError("many numbers by computed indices")
    code = index_code(offsets)
    if code is None:
        raise UnsupportedError("a table in an order of no rule")
    place, there = map(column_code, start.numbers() + is_there.numbers())
    mask = " & ".join(filter(None, [there, mask_code(offsets.size)]))
    loaded = writer.load_expression(table, f"({place} + {code})", mask)
    tile = writer.line(loaded, "wide")
    shape = (*start.places.shape, *offsets.shape)
    return held_tensor([tile], shape, table.dtype, start.row_dim, offsets.ndim)


def _argmax(
    writer: Writer,
    dtype: torch.dtype,
    result: Tensor,
    x: LaneTensor,
    dim: int,
    keep: bool = False,
    *,
    sign: str = ">",
) -> LaneTensor:
    """Return the index of the first largest number, or smallest by `sign`; a NaN counts as the extreme."""
    x, dim = writer.narrow(x, dim)
    first, *others = np.split(x.places, x.places.shape[dim], dim)
    best = x._replace(places=first)
    index = LaneTensor(first * 0, dtype, x.row_dim, (Expression("0"),))
    is_larger = (
        f"(({{0}} {sign} {{1}}) | (({{0}} != {{0}}) & ({{1}} == {{1}})))"
    )
    for i, numbers in enumerate(others, 1):
        other = x._replace(places=numbers)
        larger = writer.pointwise(is_larger, [other, best], x.dtype, torch.bool)
        index = _where(writer, dtype, result, larger, i, index)
        best = _where(writer, x.dtype, result, larger, other, best)
    return index if keep else writer.view(torch.squeeze, index, dim)


def _gather(
    writer: Writer,
    dtype: torch.dtype,
    result: Tensor,
    x: LaneTensor,
    dim: int,
    index: LaneTensor,
) -> LaneTensor:
    x, dim = writer.narrow(x, dim)
    index = writer.load(index)
    chosen = _choose(writer, x, dim, index)
    if chosen.tile:
        raise UnsupportedError("many numbers, chosen by an index")
    # Also where there is but one number to choose from.
    shape = np.broadcast_shapes(chosen.places.shape, index.places.shape)
    places = np.broadcast_to(chosen.places, shape)
    row_dim = common_row_dim([chosen, index])
    return chosen._replace(places=places, row_dim=row_dim)


def _matmul(
    writer: Writer,
    dtype: torch.dtype,
    result: Tensor,
    x: LaneTensor,
    weight: LaneTensor,
) -> LaneTensor:
    """Multiply [..., rows, K] by a matrix [..., K, N] that all rows share."""
    row_dim = x.places.ndim - 2
    if not weight.pointer or x.row_dim != row_dim:
        raise UnsupportedError("a matrix product other than of rows and params")
    if x.places.shape[row_dim] != 1:
        raise UnsupportedError("a matrix product of several numbers a row")
    if dtype == torch.bfloat16:
        x = _to_copy(writer, torch.float32, result, x)

    *batch, _, n_out = weight.places.shape
    indices = [*np.ndindex(*batch)]
    if x.tile != 0 and any(parts_of(x, x.places[i]) is None for i in indices):
        x = writer.settle(x)
    held: list[Expression] = []
    for index in indices:
        row = _row(x, x.places[index])
        matrix = weight._replace(places=weight.places[index])
        if n_out >= MIN_WIDTH:
            held.append(_wide_product(writer, row, matrix))
            continue
        for j in range(n_out):
            column = matrix._replace(places=matrix.places[:, j])
            held.append(_dot(writer, row, column))
    product = held_tensor(
        held, (*batch, 1, n_out), x.dtype, x.row_dim, int(n_out >= MIN_WIDTH)
    )
    return _to_copy(writer, dtype, result, product)


def _row(x: LaneTensor, places: NDArray[Any]) -> list[Part]:
    """Split the numbers [K] of a row into tiles with their positions, or into single numbers."""
    if x.tile != 0:
        return parts_of(x, places) or []
    numbers = x._replace(places=places).numbers()
    return [(number, np.array([i])) for i, number in enumerate(numbers)]


def _wide_product(
    writer: Writer, row: list[Part], matrix: LaneTensor
) -> Expression:
    """Multiply a row of numbers by a matrix with many columns."""
    n_in, n_out = matrix.places.shape
    if len(row) == n_in:
        terms = [
            f"{column_code(tile)} * {writer.load_tile(matrix, weights).code}"
            for (tile, _), weights in zip(row, matrix.places)
        ]
        return writer.line(" + ".join(terms), "wide")

    is_held = writer.max_held is None or n_in * n_out <= writer.max_held
    if len(row) > 1 or n_in > 256 or not is_held:
        writer.n_streamed += n_in * n_out
        return _streamed_product(writer, row, matrix)
    tile = _without_padding(writer, row[0][0], n_in)
    weights = writer.line(_matrix_code(writer, matrix), "wide", once=True)
    operands = f"{tile.code}, {weights.code}"
    return writer.line(f'tl.dot({operands}, input_precision="ieee")', "wide")


def _streamed_product(
    writer: Writer, row: list[Part], matrix: LaneTensor
) -> Expression:
    """Multiply a row by a matrix in memory, which is read in chunks of rows that fit in registers."""
    n_read = max(8_192 // padded(matrix.places.shape[1]), 1)
    # products [R, P, N] of numbers with the rows that were read, by P: summed up, as a sum over P waits for all threads
    products: dict[int, str] = {}
    for part, part_numbers in row:
        n = len(part_numbers)
        tile = _without_padding(writer, part, n)
        whole = held_tensor([tile], (n,), torch.float32, None, 1)
        for start in range(0, n, n_read):
            chunk = np.arange(start, min(start + n_read, n))
            rows = matrix._replace(places=matrix.places[part_numbers[chunk]])
            weights = writer.line(_matrix_code(writer, rows, "None, "), "wide")
            numbers = f"{writer.tile(whole, chunk).code}[:, :, None]"
            code = f"{numbers} * {weights.code}"
            width = padded(len(chunk))
            if width in products:
                code = f"{products[width]} + {code}"
            products[width] = writer.line(code, "wide").code
    terms = [
        writer.line(f"tl.sum({product}, 1)", "wide").code
        for product in products.values()
    ]
    return writer.line(" + ".join(terms), "wide")


def _without_padding(
    writer: Writer, tile: Expression, width: int
) -> Expression:
    """Set the padding of a tile to 0; otherwise a quotient there may be NaN."""
    full = writer.full_tile(tile, width)
    if mask := mask_code(width):
        return writer.line(f"tl.where({mask}, {full.code}, 0.0)", "wide")
    return full


def _matrix_code(writer: Writer, matrix: LaneTensor, before: str = "") -> str:
    """Write code that loads a matrix [K, N], with axes of size 1 before it and padding 0."""
    offsets = matrix.places
    first = int(offsets[0, 0])
    places = [str(first)]
    masks: list[str] = []
    for size, after, index in zip(
        offsets.shape, (offsets[1, 0], offsets[0, 1]), (":, None", "None, :")
    ):
        numbers = f"tl.arange(0, {padded(size)})[{before}{index}]"
        places.append(f"{int(after) - first} * {numbers}")
        if mask_code(size):
            masks.append(f"({numbers} < {size})")
    return writer.load_expression(
        matrix, f"({' + '.join(places)})", " & ".join(masks)
    )


def _dot(writer: Writer, row: list[Part], column: LaneTensor) -> Expression:
    """Multiply a row of numbers by one column and sum."""
    offsets = column.places
    if len(row) == len(offsets):
        weights = writer.load(column).numbers()
        terms = [
            f"{tile.code} * {weight.code}"
            for (tile, _), weight in zip(row, weights)
        ]
        return writer.line(" + ".join(terms), "row")
    terms: list[str] = []
    for part, numbers in row:
        weights = writer.load_tile(column, offsets[numbers])
        tile = _without_padding(writer, part, len(numbers))
        terms.append(
            writer.line(f"tl.sum({tile.code} * {weights.code}, 1)", "row").code
        )
    return writer.line(" + ".join(terms), "row")


OPERATORS: dict[Any, Callable[..., Any]] = {
    aten._to_copy: _to_copy,
    aten.where: _where,
    aten.amax: partial(_reduce, reduction="max"),
    aten.amin: partial(_reduce, reduction="min"),
    aten.cumsum: _cumsum,
    aten.div: _divide,
    aten.index: _index,
    aten.clamp: _clamp,
    aten.pow: _pow,
    aten.cat: _cat,
    aten.full: _full,
    aten.full_like: _full,
    aten.scalar_tensor: _full,
    aten.arange: _arange,
    aten.sum: partial(_reduce, reduction="sum"),
    aten.any: partial(_reduce, reduction="any"),
    aten.argmax: _argmax,
    aten.argmin: partial(_argmax, sign="<"),
    aten.gather: _gather,
    aten.bmm: _matmul,
    aten.mm: _matmul,
    cast(Any, random.threefry2x32).overloadpacket: _threefry,
}
