"""The rollout of small networks and environments as one Triton kernel.

Each block of threads carries a row, or some of many, through all steps of the rollout. Params stay in shared memory,
the state never leaves the registers, and nothing is launched between two steps: a rollout of 128 steps is one kernel
instead of a thousand. A large layer, such as the first one of an image, is read at each step, from a cache mostly; then
each block carries one row.
Learners that train side by side (`train_step.vmap_parts`) have blocks of their own, with the params of each.

`compile_unroll` makes the function that a training step calls in place of its loop over steps.

`write_program` traces a function of many rows and goes through its graph. What it knows of a tensor is a Triton
expression for each number of a row: a view, a transposition or a stack of tensors costs nothing then. The last axes of
hidden layers, and of tensors of many numbers a row, are held in one expression (a *wide* one, see `tensor`), so that a
matrix product is an operation on tiles. Functions that mix rows, or whose tensors have too many numbers a row, are
refused.
"""

from __future__ import annotations

import inspect
import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from funcppo.core import random, tree
from funcppo.runtime import cache
from funcppo.runtime.distributed import error_line
from funcppo.runtime.env_kernel.operators import (
    OPERATORS,
    POINTWISE,
    VIEWS,
    pointwise,
)
from funcppo.runtime.env_kernel.writer import (
    MAX_NUMBERS_A_ROW,
    TRACED_ROWS,
    TRITON_DTYPES,
    Expression,
    LaneTensor,
    UnsupportedError,
    Writer,
    axis_code,
    column_code,
    constant_tensor,
    held_tensor,
    mask_code,
    memory_tensor,
    named_tensor,
    padded,
    parts_of,
)

# lines of a program: Triton takes more than linear time to compile them
MAX_LINES = 1_200

NAME = re.compile(r"\bv\d+\b")  # of a variable that a line computes

aten = torch.ops.aten


class Program(NamedTuple):
    """Code of a function: lines that run once, and lines that run at each call."""

    preamble: list[str]
    body: list[str]
    outputs: list[LaneTensor]
    # of tensors in memory that must hold numbers of bfloat16, as float32
    rounded: frozenset[str]
    n_streamed: int  # numbers of params that each call reads from memory
    has_checks: bool  # the kernel ends with an error where one does not hold


# Options of operators that say nothing of a result whose dtype is known.
IGNORED_OPTIONS = {"dtype", "layout", "device", "pin_memory", "memory_format"}
# Operators that leave all numbers as they are.
COPIES = (
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
)


# Operators that are written as others, beside those that are not of core ATen.
DECOMPOSED = [aten._log_softmax, aten.index_select, aten.split_with_sizes]
# Operators that no program has. A function that calls one is refused before it is traced, which may take seconds.
REFUSED = (aten.searchsorted.Tensor, aten.nonzero.default, aten.topk.default)


def _refuse(op: object, *_: object, **__: object) -> None:
    """Stop the trace of a function that calls an operator of `REFUSED`."""
    raise UnsupportedError(f"operator {op}")


def write_program(
    fn: Callable[..., Sequence[Tensor]],
    examples: Sequence[Tensor],
    inputs: Sequence[LaneTensor],
    max_held: int | None = None,
    n_carried: int = 0,
) -> Program:
    """Write a traced function as Triton code; return its lines and outputs.

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
    outputs: list[LaneTensor] = []
    for node in graph.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "placeholder":
            values[node] = next(arguments)
        elif node.op == "output":
            outputs = [
                writer.hold(x, i < n_carried) for i, x in enumerate(args[0])
            ]
        elif node.op == "call_function":
            values[node] = _apply(writer, node, args, kwargs)
        else:
            values[node] = constant_tensor(getattr(graph, node.target))
    results = [x.code for output in outputs for x in output.needed()]
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
    counts = (writer.n_streamed, writer.has_checks)
    return Program(preamble, body, outputs, rounded, *counts)


def _trace(
    fn: Callable[..., Sequence[Tensor]], examples: Sequence[Tensor]
) -> fx.GraphModule:
    """Trace a function on examples; return its graph of core ATen operators.

    Raises:
      UnsupportedError: it calls an operator that no program has, or cannot be traced.
    """
    decompositions: Any = {
        **core_aten_decompositions(),
        **get_decompositions(DECOMPOSED),
        **{op: partial(_refuse, op) for op in REFUSED},
    }
    # not with real tensors, of which some operators read numbers to check them
    traced = make_fx(
        fn,
        decomposition_table=decompositions,
        tracing_mode="fake",
        _allow_non_fake_inputs=True,
    )
    try:
        return traced(*examples)
    except UnsupportedError:
        raise
    except Exception as error:
        line = error_line(error)
        raise UnsupportedError(f"it cannot be traced: {line}") from error


def _apply(
    writer: Writer, node: fx.Node, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Write the code of one graph node; return its value."""
    op: Any = node.target
    if op is operator.getitem:
        return args[0][args[1]]
    if op in COPIES:
        return args[0]
    result = node.meta["val"]
    dtype = result.dtype if isinstance(result, Tensor) else torch.int64
    packet = getattr(op, "overloadpacket", None)
    is_rounded = "rounding_mode" in kwargs
    if packet in POINTWISE and kwargs.get("alpha", 1) == 1 and not is_rounded:
        return pointwise(writer, packet, dtype, args)
    if packet in VIEWS:
        return writer.view(op, *args)
    if packet not in OPERATORS:
        raise UnsupportedError(f"operator {op}")
    # Any other option is one that the operator below takes, or an error.
    options = {k: v for k, v in kwargs.items() if k not in IGNORED_OPTIONS}
    return OPERATORS[packet](writer, dtype, result, *args, **options)


def _needed_lines(
    lines: Sequence[str], codes: Iterable[str]
) -> tuple[list[str], set[str]]:
    """Keep the lines that the codes need, and all checks; return them with all names that occur."""
    names = set(NAME.findall(" ".join(codes)))
    kept: list[str] = []
    for line in reversed(lines):
        name, is_assignment, _ = line.partition(" = ")
        if name in names or not is_assignment:
            names.update(NAME.findall(line))
            kept.append(line)
    return kept[::-1], names


# numbers of all params together, which a block keeps in its registers and in shared memory
MAX_PARAMS = 24_576
# those of a matrix, where there are more in all; a larger one is read from memory at each step
MAX_HELD = 8_192
# numbers of params that a block may read at each step, so that they stay in its cache
MAX_STREAMED = 131_072
# blocks that read params at each step: about two for each processor of a GPU
MAX_STREAMING_BLOCKS = 256
# rows of a learner from which what several rows of a block share is worth more
MIN_ROWS_TO_SHARE = 256

INDENT = "    "
BEFORE_STEP = "t * n_learners * n_rows + "  # rows, in [T, (L,) B, ...]
# Functions that load and store a number of each row. A pass of Triton looks at the whole program once for each tensor
# that is read from memory or written there; it leaves out scalars, which a block of one row has.
HEADER = """import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def load(pointer, place, step, mask, R: tl.constexpr):
    if R == 1:
        return tl.broadcast_to(tl.load(pointer + place), [R])
    else:
        return tl.load(pointer + place + step * tl.arange(0, R), mask=mask, other=0)


@triton.jit
def store(pointer, place, step, value, mask, R: tl.constexpr):
    if R == 1:
        tl.store(pointer + place, tl.sum(value, 0))
    else:
        tl.store(pointer + place + step * tl.arange(0, R), value, mask=mask)


"""
THREEFRY = """@triton.jit
def threefry(k0, k1, x0, x1):
    return tl.inline_asm_elementwise(
        '''{
CODE
}''',
        "=r,=r,r,r,r,r",
        [k0.to(tl.uint32), k1.to(tl.uint32), x0.to(tl.uint32), x1.to(tl.uint32)],
        dtype=(tl.uint32, tl.uint32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def threefry_0(k0, k1, x0, x1):
    y0, y1 = threefry(k0, k1, x0, x1)
    return y0.to(tl.int64)


@triton.jit
def threefry_1(k0, k1, x0, x1):
    y0, y1 = threefry(k0, k1, x0, x1)
    return y1.to(tl.int64)


"""


class StepArguments(NamedTuple):
    """Trees that one step of a rollout reads: see `rollout.rollout_step`."""

    world: object
    params: object
    rollout_state: object
    random_inputs: object


# options of Triton, which leaves checks out otherwise; that of integers that overflow is not meant
CHECKED = {"debug": True, "sanitize_overflow": False}


class RolloutCode(NamedTuple):
    """Source of a rollout kernel, with examples of the trees that it returns."""

    source: str
    batch_shape: tuple[int, ...]  # B environments, or [L, B] of L learners
    # of a block of threads: its rows, its warps, and the stages of its loops
    block: tuple[int, int, int]
    rounded: frozenset[str]  # as of `Program`
    has_checks: bool  # as of `Program`
    next_state: object  # [TRACED_ROWS, ...]
    transition: object  # [TRACED_ROWS, ...]


def compile_unroll(
    step: Callable[..., tuple[Any, Any]],
    cfg: object,
    args: StepArguments,
    values: Callable[..., Tensor] | None = None,
) -> RolloutKernel:
    """Build a rollout kernel for the shapes of one step's arguments.

    Args:
      values: as of `RolloutKernel`.

    Raises:
      UnsupportedError: why there is no such kernel.
    """
    if torch.version.hip:
        raise UnsupportedError("a GPU that is not NVIDIA's")
    try:
        import triton  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
    except ImportError as error:
        raise UnsupportedError("triton is not installed") from error
    return RolloutKernel(write_rollout_kernel(step, cfg, args), values)


def write_rollout_kernel(
    step: Callable[..., tuple[Any, Any]], cfg: object, args: StepArguments
) -> RolloutCode:
    """Write the kernel of a rollout for the shapes of one step's arguments.

    Args:
      step: as `rollout.rollout_step`; of several learners, `torch.vmap` of the step that `inspect.unwrap` finds in it.
      args: of one step, on any device. Those of several learners have a leading axis L, but for `world`.

    Raises:
      UnsupportedError: the params do not fit into a block, or the step is no program of rows: see
        `write_program`.
    """
    batch_shape = _batch_shape(args)
    if len(batch_shape) == 2:
        step = inspect.unwrap(step)
        args = StepArguments(args.world, *tree.map(lambda x: x[0], args[1:]))
    n_params = sum(x.numel() for x in tree.leaves((args.world, args.params)))
    max_held = MAX_HELD if n_params > MAX_PARAMS else None
    examples, inputs = _examples(args)
    like = tree.unflatten(args, [*examples.values()])

    def flat_step(*leaves: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return tree.leaves(step(cfg, *tree.unflatten(args, [*leaves])))

    with torch.no_grad():
        results = step(cfg, *like)
    n_states, n_outputs = (len(tree.leaves(x)) for x in results)
    program = write_program(
        flat_step, [*examples.values()], inputs, max_held, n_states
    )
    _check_params(n_params, program.n_streamed, math.prod(batch_shape))
    n_world = len(tree.leaves(args.world))
    source = _kernel_source(program, examples, n_world, n_outputs)
    block = _block(batch_shape[-1], args.params, program)
    return RolloutCode(
        source,
        batch_shape,
        block,
        program.rounded,
        program.has_checks,
        *results,
    )


def _check_params(n_params: int, n_streamed: int, n_rows: int) -> None:
    """Check that a block can hold the parameters in registers, and can read the remaining ones at each step.

    Args:
      n_streamed: numbers that it reads.
      n_rows: of all learners, a block each if they read params.

    Raises:
      UnsupportedError: it cannot.
    """
    n_blocks = n_rows if n_streamed else 0
    for number, most, text in (
        (
            n_params - n_streamed,
            MAX_PARAMS,
            "params, more than the {} that one block can hold",
        ),
        (
            n_streamed,
            MAX_STREAMED,
            "params of large layers, more than the {} that a block can read at each step",
        ),
        (
            n_blocks,
            MAX_STREAMING_BLOCKS,
            "environments would read large layers at each step, more than {}",
        ),
    ):
        if number > most:
            raise UnsupportedError(f"{number} {text.format(most)}")


def _batch_shape(args: StepArguments) -> tuple[int, ...]:
    """Return the batch shape of a step: (environments,), or (learners, environments of each).

    Raises:
      UnsupportedError: tensors of the state do not have one row for each environment.
    """
    n_dims = tree.leaves(args.random_inputs)[0].ndim
    shapes = {x.shape[:n_dims] for x in tree.leaves(args.rollout_state)}
    if len(shapes) != 1 or n_dims > 2:
        raise UnsupportedError("a state without a row for each environment")
    return tuple(*shapes)


def _block(
    n_rows: int, params: object, program: Program
) -> tuple[int, int, int]:
    """Choose the block size for a learner's environments. With bfloat16, several rows would spill registers."""
    if program.n_streamed:
        # One stage: params that are read are not copied to shared memory, which they would fill.
        return 1, 4, 1
    if n_rows >= MIN_ROWS_TO_SHARE and not program.rounded:
        return 16, 8, 3
    widths = (x.shape[-1] for x in tree.leaves(params) if x.ndim)
    # One warp is fastest for narrow layers: its threads wait for no others.
    is_wide = max(widths, default=1) > 64
    return 1, 4 if is_wide else 1, 3


def _examples(
    args: StepArguments,
) -> tuple[dict[str, Tensor], list[LaneTensor]]:
    """Build leaves of the arguments with `TRACED_ROWS` rows by their names, and the kernel's tensor for each.

    A name begins with p for params and world, s for the state, k for the key of all rows, x for other random inputs.
    """
    world, params, state, (key, *drawn) = map(tree.leaves, args)
    kinds = [("p", world + params), ("s", state), ("k", [key]), ("x", drawn)]
    examples: dict[str, Tensor] = {}
    inputs: list[LaneTensor] = []
    for kind, x in [(kind, x) for kind, leaves in kinds for x in leaves]:
        name = f"{kind}{len(examples)}"
        example = torch.zeros(x.shape, dtype=x.dtype)
        if kind == "p":
            held = memory_tensor(name, x)
        elif kind == "k":
            numbers = [Expression(f"{name}_{j}") for j in range(x.numel())]
            held = held_tensor(numbers, x.shape, x.dtype)
        else:
            example = example.new_zeros(TRACED_ROWS, *x.shape[1:])
            held = named_tensor(name, example)
        examples[name] = example
        inputs.append(held)
    return examples, inputs


def _kernel_source(
    program: Program, examples: dict[str, Tensor], n_world: int, n_outputs: int
) -> str:
    """Write the source of the kernel's module.

    Args:
      examples: of `_examples`; the first `n_world` are of the world.
    """
    shared, states, (key, *_), drawn = (
        {name: x for name, x in examples.items() if name[0] == kind}
        for kind in "pskx"
    )
    lines = [
        "blocks = (n_rows + R - 1) // R",  # of each learner
        "learner = (tl.program_id(0) // blocks).to(tl.int64)",
        "first = (tl.program_id(0) % blocks * R).to(tl.int64)",
        "rows = first + tl.arange(0, R)",
        "mask = rows < n_rows",
        "place = learner * n_rows + first",
        "places = place + tl.arange(0, R)",
    ]
    for name in [*shared][n_world:]:
        lines.append(f"{name} = {name} + learner * {shared[name].numel()}")
    lines += program.preamble
    for name, x in states.items():
        lines += load_rows(name, x)

    # one step: load keys and random inputs, compute, store outputs, carry the state
    n_words = examples[key].numel()
    step = [
        f"{key}_{j} = tl.load({key}_ptr + (t * n_learners + learner) * {n_words} + {j})"
        for j in range(n_words)
    ]
    for name, x in drawn.items():
        step += load_rows(name, x, BEFORE_STEP)
    step += program.body
    for i, value in enumerate(program.outputs[len(states) :]):
        step += store_rows(f"y{i}_ptr", value, BEFORE_STEP)
    step += _carry(states, program.outputs)
    lines.append("for t in range(n_steps):")
    lines += [INDENT + line for line in step]
    for name, x in states.items():
        lines += store_rows(f"{name}_out", named_tensor(name, x))

    signature = ", ".join(
        [
            *shared,
            *(f"{name}_ptr" for name in [*states, key, *drawn]),
            *(f"{name}_out" for name in states),
            *(f"y{i}_ptr" for i in range(n_outputs)),
            "n_rows, n_learners, n_steps, R: tl.constexpr",
        ]
    )
    # else another number of steps, of a check and of the rollout, would be another kernel to compile
    jit = '@triton.jit(do_not_specialize=["n_steps"])'
    head = f"{jit}\ndef rollout_kernel({signature}):\n"
    body = "".join(f"{INDENT}{line}\n" for line in lines)
    return "".join([HEADER, threefry_source(), head, body])


def _tile_places(places: str, n: int, numbers: NDArray[Any]) -> tuple[str, str]:
    """Write the code of the addresses of evenly spaced numbers in rows of n, and of the mask of valid ones."""
    width = len(numbers)
    first = int(numbers[0])
    step = int(numbers[1]) - first if width > 1 else 1
    padding = mask_code(width)
    mask = "mask[:, None]" + (f" & {padding}" if padding else "")
    numbers_code = f"{first} + {step} * {axis_code(width)}"
    return f"({places})[:, None] * {n} + {numbers_code}", mask


def load_rows(name: str, x: Tensor, before: str = "") -> list[str]:
    """Write lines that load the numbers of each row, under the names of `named_tensor`.

    Args:
      before: code of the rows before these in memory.
    """
    n = math.prod(x.shape[1:])
    suffix = " != 0" if x.dtype == torch.bool else ""
    if n > MAX_NUMBERS_A_ROW:
        place, mask = _tile_places(f"{before}places", n, np.arange(n))
        code = f"tl.load({name}_ptr + {place}, mask={mask}, other=0)"
        return [f"{name}_0 = {code}{suffix}"]
    return [
        f"{name}_{j} = load({name}_ptr, ({before}place) * {n} + {j}, {n}, mask, R){suffix}"
        for j in range(n)
    ]


def store_rows(pointer: str, value: LaneTensor, before: str = "") -> list[str]:
    """Write lines that store the numbers of each row.

    Args:
      before: code of the rows before these in memory.
    """
    lines: list[str] = []
    n = value.places.size
    if value.tile != 0:
        parts = parts_of(value, value.places)
        if parts is None:
            raise UnsupportedError("an output of parts of tiles")
        for tile, numbers in parts:
            place, mask = _tile_places(f"{before}places", n, numbers)
            code = _spread(tile, len(numbers))
            lines.append(f"tl.store({pointer} + {place}, {code}, mask={mask})")
        return lines

    for j, number in enumerate(value.numbers()):
        place = f"({before}place) * {n} + {j}, {n}, {number.code}, mask, R)"
        line = f"store({pointer}, {place}"
        if number.kind != "row":
            place = f"({before}places) * {n} + {j}, {number.code}, mask=mask)"
            line = f"tl.store({pointer} + {place}"
        lines.append(line)
    return lines


def _spread(number: Expression, n: int) -> str:
    """Write the code that broadcasts a number to a tile [R, P] for n numbers."""
    return f"tl.broadcast_to({column_code(number)}, [R, {padded(n)}])"


def _carry(
    states: dict[str, Tensor], values: Sequence[LaneTensor]
) -> list[str]:
    """Write lines that assign the next state, which is the first of the values, in the dtypes of the state."""
    computed: list[str] = []
    assigned: list[str] = []
    for (name, x), value in zip(states.items(), values):
        dtype = TRITON_DTYPES[x.dtype]
        for j, number in enumerate(value.needed()):
            code = number.code
            if value.tile != 0:
                code = _spread(number, value.width)
            elif number.kind == "scalar":
                code = f"tl.zeros([R], {dtype}) + {code}"
            computed.append(f"next_{name}_{j} = ({code}).to({dtype})")
            assigned.append(f"{name}_{j} = next_{name}_{j}")
    return [*computed, *assigned]


class _Word(NamedTuple):
    """32-bit word in assembly code, for `random.threefry_rounds`."""

    code: str  # a register, or a literal
    lines: list[str]

    def write(self, operation: str, *operands: str) -> _Word:
        """Return the result of an operation in a new register."""
        name = f"w{len(self.lines)}"
        self.lines.append(f"{operation} {', '.join([name, *operands])};")
        return _Word(name, self.lines)

    def __add__(self, other: Any) -> Any:
        return self.write("add.u32", self.code, other.code)

    def __xor__(self, other: Any) -> Any:
        return self.write("xor.b32", self.code, other.code)

    def __and__(self, other: Any) -> Any:
        return self  # a word of 32 bits has no more


def threefry_source() -> str:
    """Write the source of the Triton functions that compute the Threefry random words.

    Their 80 operations are assembly code of NVIDIA (PTX), which is one operation to Triton: its passes take more than
    linear time in the operations of a program.
    """
    lines: list[str] = []
    words = random.threefry_rounds(
        *(_Word(f"${i}", lines) for i in range(2, 6)),
        constant=lambda value: _Word(str(value), lines),
        rotate_left=lambda word, n_bits: word.write(
            "shf.l.wrap.b32", word.code, word.code, str(n_bits)
        ),
    )
    moves = [f"mov.b32 ${i}, {word.code};" for i, word in enumerate(words)]
    code = "\n".join([f".reg .b32 w<{len(lines)}>;", *lines, *moves])
    return THREEFRY.replace("CODE", code)


class RolloutKernel:
    """Rollout as one kernel, for the shapes that it was written for; called like `rollout.unroll`.

    Args:
      values: the field `value` of all transitions, by the configuration, the world, the params and the observations
        [T, (L,) B, ...]; None: the step has it.
    """

    def __init__(
        self, code: RolloutCode, values: Callable[..., Tensor] | None = None
    ) -> None:
        from torch._inductor.codecache import PyCodeCache

        self.code = code
        self._values = values
        cache.use_folder()
        module: Any = PyCodeCache.load(code.source)  # Triton reads source files
        self._kernel = module.rollout_kernel

    def __call__(
        self,
        cfg: object,
        world: object,
        params: object,
        rollout_state: Any,
        random_inputs: Any,
        *_: object,
    ) -> tuple[Any, Any]:
        """Roll out; return the last state and all transitions [T, (L,) B, ...]."""
        code = self.code
        shared = tree.leaves((world, params))
        for i, x in enumerate(shared):
            if f"p{i}" in code.rounded:
                shared[i] = x.to(torch.bfloat16).to(torch.float32)
        key = tree.leaves(random_inputs)[0]
        n_steps = len(key)

        def empty(shape: tuple[int, ...], x: Tensor) -> Tensor:
            shape = (*shape, *code.batch_shape, *x.shape[1:])
            return torch.empty(shape, dtype=x.dtype, device=key.device)

        next_state = tree.map(partial(empty, ()), code.next_state)
        trajectory: Any = tree.map(partial(empty, (n_steps,)), code.transition)
        *of_learners, n_rows = code.batch_shape
        n_learners = math.prod(of_learners)
        rows_a_block, n_warps, n_stages = code.block
        inputs = [*shared, *tree.leaves((rollout_state, random_inputs))]
        self._kernel[(n_learners * -(-n_rows // rows_a_block),)](
            *(_bytes(x.contiguous()) for x in inputs),
            *map(_bytes, tree.leaves((next_state, trajectory))),
            n_rows,
            n_learners,
            n_steps,
            R=rows_a_block,
            num_warps=n_warps,
            num_stages=n_stages,
            **(CHECKED if code.has_checks else {}),
        )
        if self._values is not None:
            value = self._values(cfg, world, params, trajectory.obs)
            trajectory = trajectory._replace(value=value)
        return next_state, trajectory


def _bytes(x: Tensor) -> Tensor:
    """View a bool tensor as bytes; return any other tensor unchanged."""
    return x.view(torch.uint8) if x.dtype == torch.bool else x
