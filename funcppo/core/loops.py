"""Loops over the leading axis of trees of tensors: in Python, and as one operator of a compiled function.

The compiler unrolls a Python loop, so that its time grows with the number of turns. It compiles the body of PyTorch's
`scan` once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan as scan_operator

from funcppo.core import tree
from funcppo.core.types import Carry, ScanBody, X, Y


def scan(body: ScanBody[Carry, X, Y], carry: Carry, xs: X) -> tuple[Carry, Y]:
    """Loop over the leading axis of `xs`.

    Args:
      body: (carry, x) -> (carry, y).
      carry: before the first turn.
      xs: a tree whose leaves share their leading axis.

    Returns:
      The carry after the last turn, and the outputs stacked along a leading axis.
    """
    ys: list[Y] = []
    for x_leaves in zip(*(leaf.unbind() for leaf in tree.leaves(xs))):
        carry, y = body(carry, tree.unflatten(xs, list(x_leaves)))
        ys.append(y)
    return carry, tree.map(_stack, *ys)


def _stack(*leaves: Tensor) -> Tensor:
    return torch.stack(leaves)


def graph_scan(
    body: ScanBody[Carry, X, Y], carry: Carry, xs: X
) -> tuple[Carry, Y]:
    """As `scan`, but only inside a compiled function, where it stays one loop."""
    # One call beside the loop gives the structure of the outputs; the compiler drops its operations.
    _, output_like = body(carry, tree.map(lambda leaf: leaf[0], xs))

    # A body may return neither a NamedTuple nor a tensor that it received, so leaves are listed and cloned.
    def step(
        carry_leaves: list[Tensor], x_leaves: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        this_carry = tree.unflatten(carry, carry_leaves)
        next_carry, y = body(this_carry, tree.unflatten(xs, x_leaves))
        return _clone_leaves(next_carry), _clone_leaves(y)

    first_leaves = [x.contiguous() for x in tree.leaves(carry)]
    x_leaves = [x.contiguous() for x in tree.leaves(xs)]
    last_leaves, y_leaves = scan_operator(step, first_leaves, x_leaves)
    last_carry = tree.unflatten(carry, list(last_leaves))
    ys = tree.unflatten(output_like, list(y_leaves))
    return last_carry, ys


def _clone_leaves(x: object) -> list[Tensor]:
    return [leaf.clone() for leaf in tree.leaves(x)]


def keeps_loops() -> bool:
    """Whether `graph_scan` works here: in a compiled function, but not under `torch.vmap` or `torch.func.grad`."""
    return (
        torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )
