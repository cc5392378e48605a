"""A function of many rows, written as Triton code that one block of threads runs for some of the rows.

`write_row_program` traces the function and goes through its graph. What it knows of a tensor is a Triton expression for
each number of a row: a view, a transposition or a stack of tensors costs nothing then. The last axis of a hidden layer
is held in one expression (a *wide* one), so that a matrix product is an operation on tiles. Functions that mix rows, or
whose tensors have too many numbers a row, are refused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from funcppo import random

# Rows while a function is traced: a prime that no other axis has.
TRACED_ROWS = 509
# numbers a row of a tensor that are an expression each
MAX_NUMBERS_A_ROW = 64
# last axes that are held in one expression have at least as many numbers
MIN_WIDTH = 16

aten = torch.ops.aten


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
    # in the memory of a row.
    elements: NDArray[Any]
    dtype: torch.dtype
    row_dim: int | None = None  # where the rows are; None: all rows share it
    width: int = 0  # numbers in each expression, of the last axis; 0: one
    pointer: str = ""  # a tensor in memory, not loaded yet


class Program(NamedTuple):
    """The code of a function: what is done once, and what at each call."""

    preamble: list[str]
    body: list[str]
    outputs: list[RowTensor]
    # of tensors in memory that must hold numbers of bfloat16, as float32
    rounded: frozenset[str]


TRITON_DTYPES = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.bfloat16: "tl.bfloat16",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.bool: "tl.int1",
}

# Operators that act on each number by itself, given operands of the dtype of the result.
ARITHMETIC = {
    aten.add.Tensor: "({0} + {1})",
    aten.sub.Tensor: "({0} - {1})",
    aten.mul.Tensor: "({0} * {1})",
    aten.div.Tensor: "({0} / {1})",
    aten.neg.default: "(-{0})",
    aten.abs.default: "tl.abs({0})",
    aten.sin.default: "tl.sin({0})",
    aten.cos.default: "tl.cos({0})",
    aten.exp.default: "tl.exp({0})",
    aten.log.default: "tl.log({0})",
    aten.sqrt.default: "tl.sqrt({0})",
    aten.floor.default: "tl.floor({0})",
    aten.ceil.default: "tl.ceil({0})",
    aten.tanh.default: "libdevice.tanh({0})",
    aten.log1p.default: "libdevice.log1p({0})",
    aten.erfinv.default: "libdevice.erfinv({0})",
    aten.relu.default: "tl.where({0} <= 0, 0.0, {0})",
    aten.maximum.default: "tl.where(({0} > {1}) | ({0} != {0}), {0}, {1})",
    aten.minimum.default: "tl.where(({0} < {1}) | ({0} != {0}), {0}, {1})",
    aten.bitwise_and.Tensor: "({0} & {1})",
    aten.bitwise_or.Tensor: "({0} | {1})",
    aten.bitwise_xor.Tensor: "({0} ^ {1})",
    aten.bitwise_and.Scalar: "({0} & {1})",
    aten.bitwise_or.Scalar: "({0} | {1})",
    aten.bitwise_xor.Scalar: "({0} ^ {1})",
    aten.__rshift__.Scalar: "({0} >> {1})",
    aten.__lshift__.Scalar: "({0} << {1})",
    aten.logical_and.default: "({0} & {1})",
    aten.logical_or.default: "({0} | {1})",
}
# Operators whose operands are compared, and whose result is a bool.
COMPARISONS = {
    aten.eq: "({0} == {1})",
    aten.ne: "({0} != {1})",
    aten.lt: "({0} < {1})",
    aten.le: "({0} <= {1})",
    aten.gt: "({0} > {1})",
    aten.ge: "({0} >= {1})",
}
# Options of operators that say nothing of a result whose dtype is known.
IGNORED_OPTIONS = {"dtype", "layout", "device", "pin_memory", "memory_format"}
# Operators that leave all numbers as they are.
COPIES = (
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
)


def write_row_program(
    fn: Callable[..., Sequence[Tensor]],
    examples: Sequence[Tensor],
    inputs: Sequence[RowTensor],
) -> Program:
    """Write a function as Triton code.

    Args:
      fn: takes and returns tensors; each row of its results depends on the same row of its arguments only.
      examples: arguments with `TRACED_ROWS` rows, on the CPU.
      inputs: where the program finds the arguments.

    Returns:
      Code for a block of R rows, whose indices are `rows` [R], int64.

    Raises:
      UnsupportedError: the function mixes rows, calls an operator that is not known here, or has tensors of too many
        numbers a row.
    """
    decompositions: Any = core_aten_decompositions()
    graph = make_fx(fn, decomposition_table=decompositions)(*examples)
    writer = _Writer()
    values: dict[fx.Node, Any] = {}
    arguments = iter(inputs)
    outputs: list[RowTensor] = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(arguments)
        elif node.op == "output":
            outputs = [writer.load(values[x]) for x in node.args[0]]
        elif node.op == "call_function":
            args, kwargs = fx.map_arg(
                (node.args, node.kwargs), lambda x: values[x]
            )
            values[node] = writer.call(node, args, kwargs)
        else:
            values[node] = _constant(getattr(graph, node.target))
    if both := writer.rounded & writer.loaded:
        raise UnsupportedError(
            f"params that are read both in bfloat16 and in another dtype: {min(both)}"
        )
    rounded = frozenset(writer.rounded)
    return Program(writer.preamble, writer.body, outputs, rounded)


def memory_tensor(pointer: str, x: Tensor) -> RowTensor:
    """A contiguous tensor in memory that all rows share."""
    offsets = np.arange(x.numel()).reshape(x.shape)
    return RowTensor(offsets, x.dtype, pointer=pointer)


def expressions_tensor(numbers: Sequence[Expression], x: Tensor) -> RowTensor:
    """A tensor that all rows share, from an expression for each of its numbers."""
    return RowTensor(_array(numbers, tuple(x.shape)), x.dtype)


def named_tensor(name: str, x: Tensor) -> RowTensor:
    """A tensor [TRACED_ROWS, ...] whose numbers are the variables `name_0`, `name_1` and so on of the program."""
    shape = x.shape[1:]
    n = math.prod(shape)
    if n > MAX_NUMBERS_A_ROW:
        raise UnsupportedError(f"{n} numbers for each environment")
    names = [Expression(f"{name}_{j}", "row") for j in range(n)]
    return RowTensor(_array(names, (1, *shape)), x.dtype, row_dim=0)


def numbers_a_row(x: RowTensor) -> list[Expression]:
    """The expressions of a tensor [rows, ...], in the order of memory.

    Raises:
      UnsupportedError: the rows are not its first axis, or it has too many numbers a row.
    """
    if x.row_dim not in (0, None) or x.width:
        raise UnsupportedError("an output whose first axis is not the rows")
    return list(x.elements.reshape(-1))


def _constant(x: Tensor) -> RowTensor:
    if x.numel() > MAX_NUMBERS_A_ROW:
        raise UnsupportedError(f"a constant of {x.numel()} numbers")
    numbers = [literal(n, x.dtype) for n in x.flatten().tolist()]
    return RowTensor(_array(numbers, tuple(x.shape)), x.dtype)


def _array(elements: Sequence[object], shape: tuple[int, ...]) -> NDArray[Any]:
    """An array of objects."""
    array = np.empty(len(elements), dtype=object)
    for i, element in enumerate(elements):
        array[i] = element
    return array.reshape(shape)


def _map(fn: Callable[..., object], *arrays: NDArray[Any]) -> NDArray[Any]:
    """A function of the elements of arrays that broadcast."""
    arrays = tuple(np.broadcast_arrays(*arrays))
    columns = (array.reshape(-1).tolist() for array in arrays)
    return _array([fn(*row) for row in zip(*columns)], arrays[0].shape)


def _map_elements(
    fn: Callable[[Expression], Expression], x: RowTensor
) -> RowTensor:
    return x._replace(elements=_map(fn, x.elements))


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


class _Writer:
    """Writes the code of one graph, operator by operator."""

    def __init__(self) -> None:
        self.preamble: list[str] = []
        self.body: list[str] = []
        # pointers to what is read in bfloat16, and in the dtype that it has
        self.rounded: set[str] = set()
        self.loaded: set[str] = set()
        self._names: dict[str, Expression] = {}  # of what is computed already

    def call(self, node: fx.Node, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of an operator."""
        op: Any = node.target
        if op is operator.getitem:
            return args[0][args[1]]
        result = node.meta["val"]
        dtype = result.dtype if isinstance(result, Tensor) else torch.int64
        if op in COPIES:
            return args[0]
        if op in ARITHMETIC and kwargs.get("alpha", 1) == 1:
            return self.pointwise(ARITHMETIC[op], args, dtype, dtype)
        packet = getattr(op, "overloadpacket", None)
        if packet in COMPARISONS:
            operands = _common_dtype(args)
            return self.pointwise(COMPARISONS[packet], args, operands, dtype)
        if packet in VIEWS:
            return self.view(VIEWS[packet], result, args)
        if packet in OPERATORS:
            # Any other option is one that the operator below takes, or an error.
            options = {
                k: v for k, v in kwargs.items() if k not in IGNORED_OPTIONS
            }
            return OPERATORS[packet](self, dtype, result, *args, **options)
        raise UnsupportedError(f"operator {op}")

    # Lines of code

    def line(self, code: str, kind: Kind, *, once: bool = False) -> Expression:
        """A variable that holds the value of some code; the same code is written once.

        Args:
          once: it is the same in each call.
        """
        if code not in self._names:
            name = f"v{len(self._names)}"
            lines = self.preamble if once else self.body
            lines.append(f"{name} = {code}")
            self._names[code] = Expression(name, kind)
        return self._names[code]

    def load(self, x: RowTensor) -> RowTensor:
        """The tensor with an expression for each number; one in memory is loaded."""
        if not x.pointer:
            return x
        if x.elements.size > MAX_NUMBERS_A_ROW:
            raise UnsupportedError(
                f"{x.elements.size} numbers that all rows share, beside numbers of rows"
            )
        elements = _map(
            lambda i: self.line(
                self._load_expression(x, str(i)),
                "scalar",
                once=True,
            ),
            x.elements,
        )
        return x._replace(elements=elements, pointer="")

    def _load_expression(
        self, x: RowTensor, offset: str, mask: str = ""
    ) -> str:
        """Code that loads from memory; numbers of bfloat16 are held as float32."""
        is_rounded = x.dtype == torch.bfloat16
        (self.rounded if is_rounded else self.loaded).add(x.pointer)
        options = f", mask={mask}, other=0" if mask else ""
        code = f"tl.load({x.pointer} + {offset}{options})"
        return f"({code} != 0)" if x.dtype == torch.bool else code

    def _load_wide(self, x: RowTensor, width: int) -> RowTensor:
        """The tensor in memory with its last axis, of `width` numbers, in one expression [1, W]."""
        offsets = x.elements
        step = int(offsets[..., 1].flat[0] - offsets[..., 0].flat[0])
        axis, mask = _axis(width)

        def load(offset: int) -> Expression:
            place = f"{offset} + {step} * {axis}"
            code = self._load_expression(x, place, mask)
            return self.line(f"{code}[None, :]", "wide", once=True)

        elements = _map(load, offsets[..., :1])
        return RowTensor(elements, x.dtype, None, width)

    def cast(
        self, x: Expression, dtype: torch.dtype, to: torch.dtype
    ) -> Expression:
        """A number in another dtype."""
        if dtype == to:
            return x
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
        operand_dtype: torch.dtype | Sequence[torch.dtype],
        dtype: torch.dtype,
    ) -> RowTensor:
        """An operator on each number.

        Args:
          template: code, {0} the first operand.
          operand_dtype: what operands are cast to, one for all or one for each.
          dtype: of the result.
        """
        if dtype == torch.bfloat16:
            raise UnsupportedError("arithmetic in bfloat16")
        if isinstance(operand_dtype, torch.dtype):
            operand_dtype = [operand_dtype] * len(args)
        operands, row_dim, width = self._align_operands(args, operand_dtype)

        def compute(*numbers: Expression) -> Expression:
            kinds = [number.kind for number in numbers]
            kind = "wide" if width else "row" if "row" in kinds else "scalar"
            codes = (
                f"{number.code}[:, None]"
                if kind == "wide" and number.kind == "row"
                else number.code
                for number in numbers
            )
            return self.line(template.format(*codes), kind)

        return RowTensor(_map(compute, *operands), dtype, row_dim, width)

    def _align_operands(
        self, args: Sequence[Any], dtypes: Sequence[torch.dtype]
    ) -> tuple[list[NDArray[Any]], int | None, int]:
        """The numbers of operands, broadcast and cast; where their rows are, and how wide they are."""
        tensors = [x for x in args if isinstance(x, RowTensor)]
        n_dims = max(x.elements.ndim for x in tensors)
        width = max(x.width for x in tensors)
        row_dims = {
            x.row_dim + n_dims - x.elements.ndim
            for x in tensors
            if x.row_dim is not None
        }
        if len(row_dims) > 1:
            raise UnsupportedError("rows beside rows in another axis")

        arrays: list[NDArray[Any]] = []
        for x, dtype in zip(args, dtypes):
            if not isinstance(x, RowTensor):
                arrays.append(_array([literal(x, dtype)], ()))
                continue
            has_width = x.elements.ndim > 0 and x.elements.shape[-1] == width
            if x.pointer and width and has_width:
                x = self._load_wide(x, width)
            x = self.load(x)
            if width and not x.width and has_width:
                raise UnsupportedError("a hidden layer beside rows as wide")
            arrays.append(
                _map(
                    lambda e, x=x, t=dtype: self.cast(e, x.dtype, t), x.elements
                )
            )
        return arrays, next(iter(row_dims), None), width

    # Views

    def view(
        self, fn: ViewFn, result: Tensor, args: Sequence[Any]
    ) -> RowTensor:
        """A view: the same numbers in another order."""
        x, *options = args
        if x.width and result.shape[-1:] != (x.width,):
            raise UnsupportedError("a view of the axis of a hidden layer")
        elements, row_dim = fn(x, result, *options)
        return x._replace(elements=elements, row_dim=row_dim)

    def narrow(self, x: RowTensor, dim: int) -> tuple[RowTensor, int]:
        """A tensor whose axis `dim` is neither rows nor wide, and the axis counted from 0."""
        x = self.load(x)
        dim %= x.elements.ndim
        if dim == x.row_dim:
            raise UnsupportedError("an operator over the rows")
        return x, dim

    def fold(
        self, template: str, x: RowTensor, dim: int, keep: bool
    ) -> RowTensor:
        """A reduction of an axis, from its first number to its last."""
        x, dim = self.narrow(x, dim)
        if x.width and dim == x.elements.ndim - 1:
            raise UnsupportedError("a reduction of a hidden layer")
        slices = np.moveaxis(x.elements, dim, 0)
        total = slices[0]
        for numbers in slices[1:]:
            total = self.pointwise(
                template,
                [RowTensor(total, x.dtype), RowTensor(numbers, x.dtype)],
                x.dtype,
                x.dtype,
            ).elements
        if keep:
            return x._replace(elements=np.expand_dims(total, dim))
        return x._replace(elements=total, row_dim=_without(x.row_dim, dim))


def _axis(width: int) -> tuple[str, str]:
    """Code of the indices of an axis of `width` numbers, padded to a power of two, and the mask of its padding."""
    padded = 1 << (width - 1).bit_length()
    axis = f"tl.arange(0, {padded})"
    return axis, "" if padded == width else f"{axis} < {width}"


def _without(row_dim: int | None, dim: int) -> int | None:
    """Where the rows are once another axis is gone."""
    return row_dim - (dim < row_dim) if row_dim is not None else None


def _common_dtype(args: Sequence[Any]) -> torch.dtype:
    """The dtype in which operands are compared."""
    dtypes = [x.dtype for x in args if isinstance(x, RowTensor)]
    if any(isinstance(x, float) for x in args):
        dtypes.append(torch.float32)
    dtype = dtypes[0]
    for other in dtypes[1:]:
        dtype = torch.promote_types(dtype, other)
    return dtype


# Views: the elements and the axis of the rows of the result.

ViewFn: TypeAlias = Callable[..., tuple[NDArray[Any], int | None]]


def _reshape(
    x: RowTensor, result: Tensor, *_: object
) -> tuple[NDArray[Any], int | None]:
    shape = list(result.shape)
    if x.width:
        shape[-1] = 1
    if x.row_dim is None:
        return x.elements.reshape(shape), None
    before = math.prod(x.elements.shape[: x.row_dim])
    for row_dim, n in enumerate(shape):
        if n % TRACED_ROWS == 0 and math.prod(shape[:row_dim]) == before:
            shape[row_dim] = n // TRACED_ROWS
            return x.elements.reshape(shape), row_dim
    raise UnsupportedError("a view that mixes rows")


def _expand(
    x: RowTensor, result: Tensor, *_: object
) -> tuple[NDArray[Any], int | None]:
    shape = list(result.shape)
    if x.width:
        shape[-1] = 1
    if x.row_dim is None:
        # Rows that share all their numbers.
        is_rows = [n == TRACED_ROWS for n in shape]
        row_dim = is_rows.index(True) if any(is_rows) else None
    else:
        row_dim = x.row_dim + len(shape) - x.elements.ndim
    if row_dim is not None:
        shape[row_dim] = 1 if x.row_dim is None else x.elements.shape[x.row_dim]
    return np.broadcast_to(x.elements, shape), row_dim


def _permute(
    x: RowTensor, result: Tensor, dims: Sequence[int], *_: object
) -> tuple[NDArray[Any], int | None]:
    order = [dim % x.elements.ndim for dim in dims]
    row_dim = None if x.row_dim is None else order.index(x.row_dim)
    return x.elements.transpose(order), row_dim


def _transpose(
    x: RowTensor, result: Tensor, first: int, second: int
) -> tuple[NDArray[Any], int | None]:
    order = list(range(x.elements.ndim))
    order[first], order[second] = order[second], order[first]
    return _permute(x, result, order)


def _unsqueeze(
    x: RowTensor, result: Tensor, dim: int
) -> tuple[NDArray[Any], int | None]:
    dim %= x.elements.ndim + 1
    row_dim = x.row_dim
    if row_dim is not None:
        row_dim += dim <= row_dim
    return np.expand_dims(x.elements, dim), row_dim


def _squeeze(
    x: RowTensor, result: Tensor, dims: int | Sequence[int]
) -> tuple[NDArray[Any], int | None]:
    wanted = [dims] if isinstance(dims, int) else dims
    gone = {dim % x.elements.ndim for dim in wanted} - {x.row_dim}
    gone = {dim for dim in gone if x.elements.shape[dim] == 1}
    row_dim = x.row_dim
    if row_dim is not None:
        row_dim -= sum(dim < row_dim for dim in gone)
    return np.squeeze(x.elements, tuple(gone)), row_dim


def _select(
    x: RowTensor, result: Tensor, dim: int, index: int
) -> tuple[NDArray[Any], int | None]:
    dim %= x.elements.ndim
    if dim == x.row_dim:
        raise UnsupportedError("one of the rows")
    elements = np.take(x.elements, index, dim)
    return _as_array(elements), _without(x.row_dim, dim)


def _as_array(x: Any) -> NDArray[Any]:
    return x if isinstance(x, np.ndarray) else _array([x], ())


def _slice(
    x: RowTensor,
    result: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> tuple[NDArray[Any], int | None]:
    dim %= x.elements.ndim
    if dim == x.row_dim:
        if result.shape[dim] % TRACED_ROWS:
            raise UnsupportedError("some of the rows")
        return x.elements, x.row_dim
    index = [slice(None)] * x.elements.ndim
    index[dim] = slice(start, end, step)
    return x.elements[tuple(index)], x.row_dim


VIEWS: dict[Any, ViewFn] = {
    aten.view: _reshape,
    aten.reshape: _reshape,
    aten._unsafe_view: _reshape,
    aten.expand: _expand,
    aten.permute: _permute,
    aten.transpose: _transpose,
    aten.unsqueeze: _unsqueeze,
    aten.squeeze: _squeeze,
    aten.select: _select,
    aten.slice: _slice,
}


# Other operators: of the writer, the dtype and a tensor like the result, and the operator's arguments.


def _to_copy(
    writer: _Writer, dtype: torch.dtype, result: Tensor, x: RowTensor, **_: Any
) -> RowTensor:
    if x.pointer and (x.dtype, dtype) == (torch.float32, torch.bfloat16):
        return x._replace(dtype=dtype)  # `Program.rounded` says so
    x = writer.load(x)
    elements = _map(lambda e: writer.cast(e, x.dtype, dtype), x.elements)
    return x._replace(elements=elements, dtype=dtype)


def _where(
    writer: _Writer, dtype: torch.dtype, result: Tensor, *args: Any
) -> RowTensor:
    dtypes = [torch.bool, dtype, dtype]
    return writer.pointwise("tl.where({0}, {1}, {2})", args, dtypes, dtype)


def _bitwise_not(
    writer: _Writer, dtype: torch.dtype, result: Tensor, x: RowTensor
) -> RowTensor:
    template = "({0} == 0)" if dtype == torch.bool else "(~{0})"
    return writer.pointwise(template, [x], dtype, dtype)


def _remainder(
    writer: _Writer, dtype: torch.dtype, result: Tensor, *args: Any
) -> RowTensor:
    """The remainder with the sign of the divisor."""
    template = "({0} - tl.floor({0} / {1}) * {1})"
    if not dtype.is_floating_point:
        template = "(({0} % {1} + {1}) % {1})"
    return writer.pointwise(template, args, dtype, dtype)


def _clamp(
    writer: _Writer,
    dtype: torch.dtype,
    result: Tensor,
    x: RowTensor,
    low: Any = None,
    high: Any = None,
) -> RowTensor:
    # A NaN stays one.
    for bound, sign in ((low, "<"), (high, ">")):
        if bound is not None:
            template = f"tl.where({{0}} {sign} {{1}}, {{1}}, {{0}})"
            x = writer.pointwise(template, [x, bound], dtype, dtype)
    return x


def _pow(
    writer: _Writer,
    dtype: torch.dtype,
    result: Tensor,
    x: RowTensor,
    exponent: float,
) -> RowTensor:
    if exponent not in (2, 3, 4):
        raise UnsupportedError(f"a power of {exponent}")
    template = "(" + " * ".join(["{0}"] * int(exponent)) + ")"
    return writer.pointwise(template, [x], dtype, dtype)


def _cat(
    writer: _Writer,
    dtype: torch.dtype,
    result: Tensor,
    tensors: Sequence[RowTensor],
    dim: int = 0,
) -> RowTensor:
    parts = [_to_copy(writer, dtype, result, x) for x in tensors]
    dim %= result.ndim
    row_dims = {x.row_dim for x in parts if x.row_dim is not None}
    if len(row_dims) > 1 or dim in row_dims or any(x.width for x in parts):
        raise UnsupportedError("tensors side by side, along their rows")
    # Where no rows are, all rows share the numbers.
    row_dim = next(iter(row_dims), None)
    elements = np.concatenate([x.elements for x in parts], dim)
    return RowTensor(elements, dtype, row_dim)


def _full(
    writer: _Writer, dtype: torch.dtype, result: Tensor, value: float
) -> RowTensor:
    shape = [1 if n % TRACED_ROWS == 0 else n for n in result.shape]
    if math.prod(shape) > MAX_NUMBERS_A_ROW:
        raise UnsupportedError(f"a constant of {math.prod(shape)} numbers")
    # A literal has no axis of rows; it broadcasts against those that have.
    elements = _array([literal(value, dtype)] * math.prod(shape), tuple(shape))
    rows = [i for i, n in enumerate(result.shape) if n % TRACED_ROWS == 0]
    for i in rows:
        n = result.shape[i] // TRACED_ROWS
        elements = np.repeat(elements, n, i)
    return RowTensor(elements, dtype, rows[0] if rows else None)


def _full_like(
    writer: _Writer,
    dtype: torch.dtype,
    result: Tensor,
    x: RowTensor,
    value: float = 0.0,
    **_: Any,
) -> RowTensor:
    return _full(writer, dtype, result, value)


def _new_full(
    writer: _Writer,
    dtype: torch.dtype,
    result: Tensor,
    shape: object,
    value: float,
    **_: Any,
) -> RowTensor:
    return _full(writer, dtype, result, value)


def _scalar_tensor(
    writer: _Writer, dtype: torch.dtype, result: Tensor, value: float, **_: Any
) -> RowTensor:
    return _full(writer, dtype, result, value)


def _arange(
    writer: _Writer,
    dtype: torch.dtype,
    result: Tensor,
    start: int,
    end: int,
    step: int = 1,
    **_: Any,
) -> RowTensor:
    n = len(result)
    if n % TRACED_ROWS:
        numbers = [literal(start + i * step, dtype) for i in range(n)]
        return RowTensor(_array(numbers, (n,)), dtype)
    k = n // TRACED_ROWS
    numbers = [
        writer.line(f"({start} + (rows * {k} + {j}) * {step})", "row")
        for j in range(k)
    ]
    x = RowTensor(_array(numbers, (k,)), torch.int64, row_dim=0)
    return _to_copy(writer, dtype, result, x)


def _threefry(
    writer: _Writer, dtype: torch.dtype, result: object, *words: RowTensor
) -> list[RowTensor]:
    dtypes = [torch.int64] * 4
    # A function takes no literals.
    words = tuple(
        _map_elements(
            lambda e: (
                writer.line(f"tl.full([], {e.code}, tl.int64)", "scalar")
                if e.code.isdigit()
                else e
            ),
            writer.load(word),
        )
        for word in words
    )
    return [
        writer.pointwise(
            f"threefry_{i}({{0}}, {{1}}, {{2}}, {{3}})",
            words,
            dtypes,
            torch.int64,
        )
        for i in range(2)
    ]


def _sum(
    writer: _Writer,
    dtype: torch.dtype,
    result: Tensor,
    x: RowTensor,
    dims: Sequence[int],
    keep: bool = False,
    **_: Any,
) -> RowTensor:
    if len(dims) != 1:
        raise UnsupportedError("a sum over several axes")
    x = _to_copy(writer, dtype, result, writer.load(x))
    return writer.fold("({0} + {1})", x, dims[0], keep)


def _log_softmax(
    writer: _Writer,
    dtype: torch.dtype,
    result: Tensor,
    x: RowTensor,
    dim: int,
    *_: Any,
) -> RowTensor:
    largest = writer.fold(ARITHMETIC[aten.maximum.default], x, dim, True)

    def apply(template: str, *args: RowTensor) -> RowTensor:
        return writer.pointwise(template, args, dtype, dtype)

    shifted = apply("({0} - {1})", x, largest)
    total = writer.fold("({0} + {1})", apply("tl.exp({0})", shifted), dim, True)
    return apply("({0} - tl.log({1}))", shifted, total)


def _argmax(
    writer: _Writer,
    dtype: torch.dtype,
    result: Tensor,
    x: RowTensor,
    dim: int,
    keep: bool = False,
) -> RowTensor:
    """The first of the largest numbers; a NaN is larger than any other."""
    x, dim = writer.narrow(x, dim)
    slices = np.moveaxis(x.elements, dim, 0)
    row_dim = _without(x.row_dim, dim)
    best = RowTensor(slices[0], x.dtype, row_dim)
    index = RowTensor(
        _map(lambda _: Expression("0"), slices[0]), dtype, row_dim
    )
    is_larger = "(({0} > {1}) | (({0} != {0}) & ({1} == {1})))"
    for i, numbers in enumerate(slices[1:], 1):
        other = RowTensor(numbers, x.dtype, row_dim)
        larger = writer.pointwise(is_larger, [other, best], x.dtype, torch.bool)
        index = _where(writer, dtype, result, larger, i, index)
        best = _where(writer, x.dtype, result, larger, other, best)
    if not keep:
        return index
    elements, row_dim = _unsqueeze(index, result, dim)
    return RowTensor(elements, dtype, row_dim)


def _gather(
    writer: _Writer,
    dtype: torch.dtype,
    result: Tensor,
    x: RowTensor,
    dim: int,
    index: RowTensor,
) -> RowTensor:
    x, dim = writer.narrow(x, dim)
    index = writer.load(index)
    slices = np.split(x.elements, x.elements.shape[dim], dim)
    chosen = x._replace(elements=slices[0])
    for i, numbers in enumerate(slices[1:], 1):
        is_it = writer.pointwise(
            f"({{0}} == {i})", [index], torch.int64, torch.bool
        )
        other = x._replace(elements=numbers)
        chosen = _where(writer, dtype, result, is_it, other, chosen)
    # Also where there is but one number to choose from.
    shape = np.broadcast_shapes(chosen.elements.shape, index.elements.shape)
    return chosen._replace(
        elements=np.broadcast_to(chosen.elements, shape),
        row_dim=index.row_dim if chosen.row_dim is None else chosen.row_dim,
    )


def _matmul(
    writer: _Writer,
    dtype: torch.dtype,
    result: Tensor,
    x: RowTensor,
    weight: RowTensor,
) -> RowTensor:
    """A product of [..., rows, K] with [..., K, N] that all rows share."""
    row_dim = x.elements.ndim - 2
    if not weight.pointer or x.row_dim != row_dim:
        raise UnsupportedError("a matrix product other than of rows and params")
    if x.elements.shape[row_dim] != 1:
        raise UnsupportedError("a matrix product of several numbers a row")
    if dtype == torch.bfloat16:
        x = _to_copy(writer, torch.float32, result, x)

    *batch, _, n_out = weight.elements.shape
    n_columns = 1 if n_out >= MIN_WIDTH else n_out
    elements = np.empty((*batch, 1, n_columns), dtype=object)
    for index in np.ndindex(*batch):
        numbers = list(x.elements[index].reshape(-1))
        matrix = weight._replace(elements=weight.elements[index])
        if n_out >= MIN_WIDTH:
            elements[(*index, 0, 0)] = _wide_product(writer, x, numbers, matrix)
            continue
        for j in range(n_out):
            column = matrix._replace(elements=matrix.elements[:, j])
            elements[(*index, 0, j)] = _dot(writer, x, numbers, column)
    width = n_out if n_out >= MIN_WIDTH else 0
    product = RowTensor(elements, x.dtype, x.row_dim, width)
    return _to_copy(writer, dtype, result, product)


def _wide_product(
    writer: _Writer, x: RowTensor, numbers: list[Expression], matrix: RowTensor
) -> Expression:
    """The product of the numbers of a row, one expression or few, with a matrix of many columns."""
    _, n_out = matrix.elements.shape
    if not x.width:
        rows = writer._load_wide(matrix, n_out).elements[:, 0]
        terms = [
            f"{_column(number)} * {row.code}"
            for number, row in zip(numbers, rows)
        ]
        return writer.line(" + ".join(terms), "wide")

    operands = f"{numbers[0].code}, {_load_tile(writer, matrix)}"
    return writer.line(f'tl.dot({operands}, input_precision="ieee")', "wide")


def _column(number: Expression) -> str:
    return f"{number.code}[:, None]" if number.kind == "row" else number.code


def _load_tile(writer: _Writer, matrix: RowTensor) -> str:
    """Code of a matrix [K, N] in registers; its padding is 0."""
    offsets = matrix.elements
    first = int(offsets[0, 0])
    step = int(offsets[1, 0]) - first, int(offsets[0, 1]) - first
    (k, k_mask), (n, n_mask) = (_axis(size) for size in offsets.shape)
    masks = [
        f"({mask}){index}"
        for mask, index in ((k_mask, "[:, None]"), (n_mask, "[None, :]"))
        if mask
    ]
    place = f"{first} + {step[0]} * {k}[:, None] + {step[1]} * {n}[None, :]"
    code = writer._load_expression(matrix, place, " & ".join(masks))
    return writer.line(code, "wide", once=True).code


def _dot(
    writer: _Writer, x: RowTensor, numbers: list[Expression], column: RowTensor
) -> Expression:
    """The product of the numbers of a row with one column."""
    if x.width:
        row = column._replace(elements=column.elements[None])
        weights = writer._load_wide(row, x.width).elements[0, 0]
        return writer.line(
            f"tl.sum({numbers[0].code} * {weights.code}, 1)", "row"
        )
    weights = writer.load(column).elements
    terms = [
        f"{number.code} * {weight.code}"
        for number, weight in zip(numbers, weights)
    ]
    return writer.line(" + ".join(terms), "row")


OPERATORS: dict[Any, Callable[..., Any]] = {
    aten._to_copy: _to_copy,
    aten.where: _where,
    aten.bitwise_not: _bitwise_not,
    aten.logical_not: _bitwise_not,
    aten.remainder: _remainder,
    aten.clamp: _clamp,
    aten.pow: _pow,
    aten.cat: _cat,
    aten.full: _new_full,
    aten.full_like: _full_like,
    aten.scalar_tensor: _scalar_tensor,
    aten.arange: _arange,
    aten.sum: _sum,
    aten._log_softmax: _log_softmax,
    aten.argmax: _argmax,
    aten.gather: _gather,
    aten.bmm: _matmul,
    aten.mm: _matmul,
    cast(Any, random.threefry2x32).overloadpacket: _threefry,
}
