"""A function of many rows, written as Triton code that one block of threads runs for some of the rows.

`write_row_program` traces the function and goes through its graph. What it knows of a tensor is a Triton expression for
each number of a row: a view, a transposition or a stack of tensors costs nothing then. The last axes of hidden layers,
and of tensors of many numbers a row, are held in one expression (a *wide* one, see `row_tiles`), so that a matrix
product is an operation on tiles. Functions that mix rows, or whose tensors have too many numbers a row, are refused.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from funcppo.runtime.env_kernel.row_operators import OPERATORS, VIEWS
from funcppo.runtime.env_kernel.row_tensor import (
    RowTensor,
    UnsupportedError,
    constant_tensor,
)
from funcppo.runtime.env_kernel.row_writer import MAXIMUM, MINIMUM, Writer
from funcppo.runtime.reasons import error_line

# lines of a program: Triton takes more than linear time to compile them
MAX_LINES = 1_200

NAME = re.compile(r"\bv\d+\b")  # of a variable that a line computes

aten = torch.ops.aten


class Program(NamedTuple):
    """The code of a function: what is done once, and what at each call."""

    preamble: list[str]
    body: list[str]
    outputs: list[RowTensor]
    # of tensors in memory that must hold numbers of bfloat16, as float32
    rounded: frozenset[str]
    n_streamed: int  # numbers of params that each call reads from memory
    has_checks: bool  # the kernel ends with an error where one does not hold


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
    aten.maximum.default: MAXIMUM,
    aten.minimum.default: MINIMUM,
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
    aten.isnan: "({0} != {0})",
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


# Operators that no program has. A function that calls one is refused before it is traced, which may take seconds.
REFUSED = {aten.searchsorted, aten.nonzero, aten.topk}


class _Refusal(TorchDispatchMode):
    """Raises an error at operators that no program has."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.overloadpacket in REFUSED:
            raise UnsupportedError(f"operator {func}")
        return func(*args, **(kwargs or {}))


def write_row_program(
    fn: Callable[..., Sequence[Tensor]],
    examples: Sequence[Tensor],
    inputs: Sequence[RowTensor],
    max_held: int | None = None,
    n_carried: int = 0,
) -> Program:
    """Write a function as Triton code.

    Args:
      fn: takes and returns tensors; each row of its results depends on the same row of its arguments only.
      examples: arguments with `TRACED_ROWS` rows, on the CPU.
      inputs: where the program finds the arguments.
      max_held: numbers of a matrix up to which a block keeps it; larger ones, and those with wide rows, are read from
        memory at each call. None: no limit.
      n_carried: how many outputs, the first ones, are arguments of the next call.

    Returns:
      Code for a block of R rows, whose indices are `rows` [R], int64.

    Raises:
      UnsupportedError: the function mixes rows, calls an operator that is not known here, or has tensors of too many
        numbers a row.
    """
    graph = _trace(fn, examples)
    writer = Writer(max_held)
    values: dict[fx.Node, Any] = {}
    arguments = iter(inputs)
    outputs: list[RowTensor] = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(arguments)
        elif node.op == "output":
            outputs = [
                writer.hold(values[x], x.meta["val"], i < n_carried)
                for i, x in enumerate(node.args[0])
            ]
        elif node.op == "call_function":
            args, kwargs = fx.map_arg(
                (node.args, node.kwargs), lambda x: values[x]
            )
            values[node] = _apply(writer, node, args, kwargs)
        else:
            values[node] = constant_tensor(getattr(graph, node.target))
    results = [str(x.code) for output in outputs for x in output.elements.flat]
    body, needed = _needed_lines(writer.body, results)
    preamble, _ = _needed_lines(writer.preamble, needed)
    if len(body) > MAX_LINES:
        raise UnsupportedError(
            f"a program of {len(body)} lines, more than {MAX_LINES}"
        )
    if both := writer.rounded & writer.loaded:
        raise UnsupportedError(
            f"params that are read both in bfloat16 and in another dtype: {min(both)}"
        )
    rounded = frozenset(writer.rounded)
    return Program(
        preamble,
        body,
        outputs,
        rounded,
        writer.n_streamed,
        writer.has_checks,
    )


def _trace(
    fn: Callable[..., Sequence[Tensor]], examples: Sequence[Tensor]
) -> fx.GraphModule:
    """The graph of a function.

    Raises:
      UnsupportedError: it calls an operator that no program has, or cannot be traced.
    """
    with _Refusal():
        fn(*examples)
    decompositions: Any = core_aten_decompositions()
    # not with real tensors, of which some operators read numbers to check them
    traced = make_fx(
        fn,
        decomposition_table=decompositions,
        tracing_mode="fake",
        _allow_non_fake_inputs=True,
    )
    try:
        return traced(*examples)
    except Exception as error:
        line = error_line(error)
        raise UnsupportedError(f"it cannot be traced: {line}") from error


def _apply(
    writer: Writer, node: fx.Node, args: Any, kwargs: dict[str, Any]
) -> Any:
    """The result of an operator."""
    op: Any = node.target
    if op is operator.getitem:
        return args[0][args[1]]
    result = node.meta["val"]
    dtype = result.dtype if isinstance(result, Tensor) else torch.int64
    if op in COPIES:
        return args[0]
    if op in ARITHMETIC and kwargs.get("alpha", 1) == 1:
        return writer.pointwise(ARITHMETIC[op], args, dtype, dtype)
    packet = getattr(op, "overloadpacket", None)
    if packet in COMPARISONS:
        operands = _common_dtype(args)
        return writer.pointwise(COMPARISONS[packet], args, operands, dtype)
    if packet in VIEWS:
        return writer.view(VIEWS[packet], result, args)
    if packet in OPERATORS:
        # Any other option is one that the operator below takes, or an error.
        options = {k: v for k, v in kwargs.items() if k not in IGNORED_OPTIONS}
        return OPERATORS[packet](writer, dtype, result, *args, **options)
    raise UnsupportedError(f"operator {op}")


def _needed_lines(
    lines: Sequence[str], codes: Iterable[str]
) -> tuple[list[str], set[str]]:
    """The lines that compute what some code names, or check something; and all names in these lines and that code."""
    names = set(NAME.findall(" ".join(codes)))
    kept: list[str] = []
    for line in reversed(lines):
        name, is_assignment, _ = line.partition(" = ")
        if name in names or not is_assignment:
            names.update(NAME.findall(line))
            kept.append(line)
    return kept[::-1], names


def _common_dtype(args: Sequence[Any]) -> torch.dtype:
    """The dtype in which operands are compared."""
    dtypes = [x.dtype for x in args if isinstance(x, RowTensor)]
    if any(isinstance(x, float) for x in args):
        dtypes.append(torch.float32)
    dtype = dtypes[0]
    for other in dtypes[1:]:
        dtype = torch.promote_types(dtype, other)
    return dtype
