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

PARITY = 0.01  # the largest difference from eager, as a share of the change that a step makes, or of what a part gives
ROUNDED = 0.1  # the same where products round to 8 bits
CHECKED = 4  # minibatches that are looked at


class ParityError(RuntimeError):
    """A compiled part that runs, and gives other numbers than the eager one."""


def check_learning(
    step: Callable[..., Any], eager: Callable[..., Any], learner: Any, minibatches: Any, parity: float = PARITY
) -> None:
    """Compare two minibatch steps, one minibatch after another: heads that start at zero hide all gradients but theirs.

    Args:
      step, eager: `(learner, minibatch) -> (learner, shown)`.
      minibatches: a tree whose leaves have a leading axis of minibatches.
    Errors: ParityError when a leaf of the learner differs by more than `parity` of its change.
    """
    got = want = learner
    for i in range(min(CHECKED, len(tree.leaves(minibatches)[0]))):
        minibatch = tree.map(lambda x, i=i: x[i], minibatches)
        got, want = step(got, minibatch)[0], eager(want, minibatch)[0]
    _compare(got, want, learner, parity)


def check_output(got: Any, want: Any, parity: float = PARITY) -> None:
    """Errors: ParityError when a leaf of floats differs by more than `parity` of its size, or that share of others."""
    _compare(got, want, tree.zeros_like(want), parity)


def _compare(got: Any, want: Any, before: Any, parity: float) -> None:
    for name, a, b, c in zip(tree.paths(want), *map(tree.leaves, (got, want, before))):
        if b.dtype.is_floating_point:
            off, change = _norm(a, b), _norm(torch.where(b.isfinite(), b, c), c)
            if not off <= parity * change + torch.finfo(b.dtype).eps * b.numel() ** 0.5:
                raise ParityError(f"differs from eager by {off:.3g} in {name}, where that changes by {change:.3g}")
        elif not float((a != b).double().mean()) <= parity:
            raise ParityError(f"differs from eager in {name}")


def _norm(a: Tensor, b: Tensor) -> float:
    """Of a - b; where both are the same infinity, or no number, they do not differ."""
    a, b = a.double(), b.double()
    return float(torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b).norm())
