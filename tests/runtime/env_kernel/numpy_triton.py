"""Triton's language on numpy arrays: runs generated kernels on a machine without a GPU, block by block.

A scalar is an array [1], so that it has a dtype and broadcasts.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


class Block(np.ndarray):
    """An array with the cast of Triton."""

    def to(self, dtype: Any) -> Block:
        """The numbers in another dtype; those of bfloat16, which numpy has not, are held as float32."""
        if dtype is torch.bfloat16:
            rounded = torch.from_numpy(np.asarray(self)).bfloat16().float()
            return block(rounded.numpy())
        return self.astype(dtype)

    def __index__(self) -> int:
        return int(self.item())

    def __mod__(self, other: Any) -> Block:
        """The remainder with the sign of the dividend, as C and Triton have it."""
        return np.fmod(self, other)


def block(x: Any) -> Block:
    """An array of at least one axis."""
    return np.atleast_1d(x).view(Block)


class Pointer:
    """Places in the memory of a tensor."""

    def __init__(self, memory: np.ndarray, places: Any = 0) -> None:
        self.memory, self.places = memory, places

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.places + offset)


def pointer(x: torch.Tensor) -> Pointer:
    """A pointer to the first number of a tensor, whose memory it shares."""
    n_bytes = x.untyped_storage().nbytes()
    n = n_bytes // x.element_size() - x.storage_offset()
    return Pointer(x.as_strided((n,), (1,)).numpy())


def _load(source: Pointer, mask: Any = True, other: Any = 0) -> Block:
    places, mask = np.broadcast_arrays(block(source.places), block(mask))
    values = source.memory[np.where(mask, places, 0)]
    return block(np.where(mask, values, np.asarray(other, values.dtype)))


def _store(target: Pointer, value: Any, mask: Any = True) -> None:
    places, values, mask = np.broadcast_arrays(
        block(target.places), block(value), block(mask)
    )
    target.memory[places[mask]] = values[mask]


def _device_assert(condition: Block, problem: str) -> None:
    assert condition.all(), problem


def _assembly(
    code: str,
    constraints: str,
    words: list[Block],
    dtype: tuple[Any, ...],
    **_: Any,
) -> tuple[Block, ...]:
    """NVIDIA's assembly code of words of 32 bits: the outputs are the first registers."""
    assert constraints == ",".join(["=r"] * len(dtype) + ["r"] * len(words))
    registers = {f"${len(dtype) + i}": word for i, word in enumerate(words)}

    def value(name: str) -> Any:
        return np.uint32(name) if name.isdigit() else registers[name]

    for line in code.strip().strip("{}").split(";"):
        operator, _, names = line.strip().partition(" ")
        if not operator.strip() or operator == ".reg":
            continue
        target, *sources = names.split(", ")
        registers[target] = PTX[operator](*map(value, sources))
    return tuple(block(registers[f"${i}"]) for i in range(len(dtype)))


def _rotate(high: Any, low: Any, n_bits: Any) -> Any:
    return (high << n_bits) | (low >> (32 - n_bits))


PTX: dict[str, Callable[..., Any]] = {
    "mov.b32": lambda x: x,
    "add.u32": lambda x, y: x + y,
    "xor.b32": lambda x, y: x ^ y,
    "shf.l.wrap.b32": _rotate,
}


def _elementwise(fn: Callable[..., Any]) -> Callable[..., Block]:
    return lambda *args: block(fn(*args))


def _erfinv(x: Block) -> Block:
    return block(torch.erfinv(torch.from_numpy(np.asarray(x))).numpy())


def _jit(fn=None, **_):
    """As `triton.jit`, with options or without: the function itself."""
    return fn if fn is not None else _jit


def run(
    source: str, kernel: str, grid: tuple[int, ...], *args: Any, **kwargs: Any
) -> None:
    """Run a kernel of a module's source, for every block of a grid."""
    program: tuple[int, ...] = ()
    tl = types.SimpleNamespace(
        constexpr=int,
        float64=np.float64,
        float32=np.float32,
        bfloat16=torch.bfloat16,
        int64=np.int64,
        int32=np.int32,
        uint32=np.uint32,
        int1=np.bool_,
        program_id=lambda axis: block(program[axis]),
        num_programs=lambda axis: block(grid[axis]),
        arange=_elementwise(np.arange),
        load=_load,
        store=_store,
        where=_elementwise(np.where),
        sum=lambda x, axis: block(np.sum(np.asarray(x), axis, dtype=x.dtype)),
        max=lambda x, axis: block(np.max(np.asarray(x), axis)),
        min=lambda x, axis: block(np.min(np.asarray(x), axis)),
        dot=lambda a, b, input_precision="": block(
            np.asarray(a) @ np.asarray(b)
        ),
        reshape=_elementwise(np.reshape),
        trans=_elementwise(np.transpose),
        maximum=_elementwise(np.maximum),
        minimum=_elementwise(np.minimum),
        broadcast_to=_elementwise(np.broadcast_to),
        gather=_elementwise(np.take_along_axis),
        device_assert=_device_assert,
        inline_asm_elementwise=_assembly,
        full=lambda shape, value, dtype: block(np.full(shape, value, dtype)),
        zeros=lambda shape, dtype: block(np.zeros(shape, dtype)),
        **{
            name: _elementwise(getattr(np, name))
            for name in [
                "abs",
                "sin",
                "cos",
                "exp",
                "log",
                "sqrt",
                "floor",
                "ceil",
            ]
        },
    )
    libdevice = types.SimpleNamespace(
        tanh=_elementwise(np.tanh),
        log1p=_elementwise(np.log1p),
        erfinv=_erfinv,
        fast_expf=_elementwise(np.exp),
        fast_dividef=_elementwise(np.divide),
    )
    lines = [x for x in source.splitlines() if "import" not in x]
    names = {
        "tl": tl,
        "libdevice": libdevice,
        "triton": types.SimpleNamespace(jit=_jit),
    }
    exec("\n".join(lines), names)
    with np.errstate(all="ignore"):
        for program in np.ndindex(*grid):  # noqa: B007  (read by program_id)
            names[kernel](*args, **kwargs)


# options of a launch that say nothing to numpy
OF_TRITON = ("num_warps", "num_stages", "maxnreg", "debug", "sanitize_overflow")


class Kernel:
    """Launches a kernel's code on numpy, as Triton launches it on a GPU."""

    def __init__(self, source: str, name: str) -> None:
        self.source, self.name = source, name

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """The function that launches so many programs."""

        def launch(*args: Any, **constants: Any) -> None:
            values = [
                pointer(x) if isinstance(x, torch.Tensor) else x for x in args
            ]
            for name in OF_TRITON:
                constants.pop(name, None)
            run(self.source, self.name, grid, *values, **constants)

        return launch
