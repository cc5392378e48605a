"""Runs a function of rows by its program, whose code runs on numpy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from funcppo.runtime.env_kernel.rollout import (
    BEFORE_STEP,
    HEADER,
    INDENT,
    load_rows,
    store_rows,
    threefry_source,
    write_program,
)
from funcppo.runtime.env_kernel.writer import (
    TRACED_ROWS,
    memory_tensor,
    named_tensor,
)
from tests.runtime.env_kernel import numpy_triton


def run(fn: Callable[..., Tensor], x: Tensor, *shared: Tensor) -> Tensor:
    """A function of rows [ROWS, ...] and of what they share, by its program."""
    example = torch.ones(TRACED_ROWS, *x.shape[1:], dtype=x.dtype)
    inputs = [
        named_tensor("x", example),
        *(memory_tensor(f"p{i}", y) for i, y in enumerate(shared)),
    ]
    program = write_program(
        lambda *args: [fn(*args)], [example, *shared], inputs
    )
    like = fn(x, *shared)
    lines = [
        "t, n_learners, n_rows = 0, 1, 0",
        "place = (tl.program_id(0) * R).to(tl.int64)",
        "places = place + tl.arange(0, R)",
        "rows = places",
        f"mask = rows < {len(x)}",
        *program.preamble,
        *load_rows("x", x),
        *program.body,
        *store_rows("y_ptr", program.outputs[0], BEFORE_STEP),
    ]
    shared_names = [f"p{i}" for i in range(len(shared))]
    names = ", ".join(["x_ptr", "y_ptr", *shared_names, "R"])
    source = (
        f"{HEADER}{threefry_source()}def kernel({names}):\n{INDENT}"
        + f"\n{INDENT}".join(lines)
    )
    y = torch.empty(like.shape, dtype=like.dtype)
    in_memory = (
        y.bfloat16().float() if f"p{i}" in program.rounded else y
        for i, y in enumerate(shared)
    )
    memory = map(numpy_triton.pointer, (x, y, *in_memory))
    numpy_triton.run(source, "kernel", (-(-len(x) // 8),), *memory, R=8)
    return y
