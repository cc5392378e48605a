"""Whether a compiled part computes what the eager one does: some compilers are fast and wrong.

Every leaf is held against its own size: in a norm over a learner's whole state the optimizer's count of steps, which is
large and right, would hide params that are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funcppo import tree

DEFAULT_TOLERANCE = (
    0.01  # the largest difference from eager, as a share of the change that a step makes, or of what a part gives
)
BF16_TOLERANCE = 0.1  # the same where products round to 8 bits
ABSOLUTE_TOLERANCE = 1e-6  # what rounding leaves of a difference of ones
MAX_CHECKED_MINIBATCHES = 4  # minibatches that are looked at


class EquivalenceError(RuntimeError):
    """A compiled part that runs, and gives other numbers than the eager one."""


def check_update(
    step: Callable[..., Any],
    eager: Callable[..., Any],
    learner: Any,
    minibatches: Any,
    tolerance: float = DEFAULT_TOLERANCE,
) -> None:
    """Compare two minibatch steps, one minibatch after another: heads that start at zero hide all gradients but theirs.

    Args:
      step, eager: `(learner, minibatch) -> (learner, shown)`.
      minibatches: a tree whose leaves have a leading axis of minibatches.
    Errors: ParityError when a leaf of the learner differs by more than `parity` of its change.
    """
    got = want = learner
    for i in range(min(MAX_CHECKED_MINIBATCHES, len(tree.leaves(minibatches)[0]))):
        minibatch = tree.map(lambda x, i=i: x[i], minibatches)
        got, want = step(got, minibatch)[0], eager(want, minibatch)[0]
    for name, a, b, c in zip(tree.paths(want), *map(tree.leaves, (got, want, learner))):
        off, change = _norm(a, b), _norm(b, c)
        if not off <= tolerance * change:
            raise EquivalenceError(f"differs from eager by {off:.3g} in {name}, where that changes by {change:.3g}")


def check_output(actual: Any, expected: Any, tolerance: float = DEFAULT_TOLERANCE) -> None:
    """Compare what a part of acting gives. A draw that falls otherwise changes all numbers of its row, and only those.

    Errors: ParityError when more than that share of a leaf differs, floats by more than that share of their size, or of
      what is usual in the leaf.
    """
    for name, a, b in zip(tree.paths(expected), tree.leaves(actual), tree.leaves(expected)):
        wrong = a != b
        if b.dtype.is_floating_point:
            wrong &= ~(a.isnan() & b.isnan())
            finite = torch.where(b.isfinite(), b, 0.0)
            size = finite.abs().clamp_min(float(finite.square().mean().sqrt()) if b.numel() else 0.0)
            wrong &= ~((a - b).abs() <= tolerance * size + ABSOLUTE_TOLERANCE)
        if (n := int(wrong.sum())) > tolerance * b.numel():
            raise EquivalenceError(f"{n} of {b.numel()} numbers differ from eager in {name}")


def _norm(a: Tensor, b: Tensor) -> float:
    """Of a - b; where both are the same infinity, or no number, they do not differ."""
    a, b = a.double(), b.double()
    return float(torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b).norm())
