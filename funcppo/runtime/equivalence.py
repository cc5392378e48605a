"""Numerical equivalence of compiled and eager functions: some compilers are fast and wrong.

`check_update` compares minibatch steps, `check_output` the outputs of any other part. Every leaf is compared at its own
scale. In one norm over the whole update state, the optimizer's step count is large and right and would hide wrong
parameters.
"""

from __future__ import annotations

import math
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from funcppo.core import tree

# Tolerances are relative: to the change that an update makes to a leaf, or to the size of an output.
# In float32 compilers reorder sums, and that is all. Largest errors of all strategies for CartPole and the prover
# on a CPU: 3e-6 of a change, 8e-6 of an output. An iteration of 16 minibatches on an H200: 2e-5 of its change.
DEFAULT_TOLERANCE = 3e-5
TF32_TOLERANCE = 0.01  # for TF32 matrix products: 11 significant bits
# for matrix products in bfloat16, which has 8 significant bits
BF16_TOLERANCE = 0.1
# rounding error of a difference of numbers near 1, in float32; larger for products of lower precision, as their
# tolerance is
ABSOLUTE_TOLERANCE = 1e-6
ROUNDING = 2.0**-23  # spacing of float32 numbers, relative to their size
# Rounding changes a random choice about once in a million rows; more than this share of choices is an error.
MAX_CHANGED_SHARE = 1e-3
# Numbers that are 1 less a quotient: near 0 too their rounding is that of 1.
LESS_THAN_ONE = frozenset({"explained_variance"})
# minibatches over which two update steps are compared
MAX_CHECKED_MINIBATCHES = 4

State = TypeVar("State")
Minibatch = TypeVar("Minibatch", contravariant=True)


class EquivalenceError(RuntimeError):
    """A compiled function runs, but returns other numbers than the eager one."""


class UpdateStep(Protocol[State, Minibatch]):
    """One minibatch update."""

    def __call__(
        self, state: State, minibatch: Minibatch, /
    ) -> tuple[State, object]:
        """Return the state after the minibatch, and its metrics."""
        ...


def check_update(
    step: UpdateStep[State, Minibatch],
    eager: UpdateStep[State, Minibatch],
    state: State,
    minibatches: Minibatch,
    tolerance: float = DEFAULT_TOLERANCE,
) -> None:
    """Compare two minibatch steps over the first minibatches, each from its own previous state.

    One minibatch is not enough: while a network's last layer is zero, all other gradients are zero too.

    Args:
      step: the step to check, `(state, minibatch) -> (state, metrics)`.
      eager: the step to compare with.
      state: the update state before the first minibatch.
      minibatches: a tree whose leaves have a leading axis of minibatches.
      tolerance: the largest L2 distance of a leaf between both, relative to the distance that eager moves it, beyond
        the rounding of the leaf. Integers and booleans are equal. Metrics are compared as by `check_output`.

    Raises:
      EquivalenceError: a leaf of the update state or of the metrics differs by more.
    """
    actual = state
    expected = state
    shown: list[tuple[object, object]] = []
    n_checked = min(MAX_CHECKED_MINIBATCHES, tree.length(minibatches))
    for i in range(n_checked):
        minibatch = tree.item(minibatches, i)
        actual, metrics = step(actual, minibatch)
        expected, expected_metrics = eager(expected, minibatch)
        shown.append((metrics, expected_metrics))

    names = tree.paths(expected)
    leaves = zip(tree.leaves(actual), tree.leaves(expected), tree.leaves(state))
    for name, (actual_leaf, expected_leaf, initial_leaf) in zip(names, leaves):
        error = _distance(actual_leaf, expected_leaf)
        change = _distance(expected_leaf, initial_leaf)
        bound = _bound(expected_leaf, change, tolerance)
        if not error <= bound:  # true for NaN as well
            raise EquivalenceError(
                f"differs from eager by {error:.3g} in {name}, where that changes by {change:.3g}"
            )
    for metrics, expected_metrics in shown:
        check_output(metrics, expected_metrics, tolerance)


def check_output(
    actual: object, expected: object, tolerance: float = DEFAULT_TOLERANCE
) -> None:
    """Compare two outputs leaf by leaf, as of one part of a rollout.

    Rounding may change a random choice, which changes all numbers of its row. So a few elements of large leaves may
    differ, one in a thousand; all elements of a leaf with fewer are equal, or close if they are floats.

    Args:
      actual: output of the compiled part, a tree.
      expected: output of the eager part.
      tolerance: a float differs when its error exceeds this share of its size, or of the root mean square of its leaf
        where that is larger; of 1 in a leaf of `LESS_THAN_ONE`.

    Raises:
      EquivalenceError: too many elements of a leaf differ.
    """
    names = tree.paths(expected)
    leaves = zip(tree.leaves(actual), tree.leaves(expected))
    for name, (actual_leaf, expected_leaf) in zip(names, leaves):
        is_less = name.rpartition(".")[2] in LESS_THAN_ONE
        is_wrong = _wrong_elements(
            actual_leaf, expected_leaf, tolerance, 1.0 if is_less else 0.0
        )
        n_wrong = int(is_wrong.sum())
        n = expected_leaf.numel()
        if n_wrong > MAX_CHANGED_SHARE * n:
            raise EquivalenceError(
                f"{n_wrong} of {n} numbers differ from eager in {name}"
            )


def _wrong_elements(
    actual: Tensor, expected: Tensor, tolerance: float, least_size: float
) -> Tensor:
    """Mask of the elements that differ by more than rounding may, where none is taken for smaller than `least_size`."""
    wrong = actual != expected
    if not expected.dtype.is_floating_point:
        return wrong

    both_nan = actual.isnan() & expected.isnan()
    finite = torch.where(expected.isfinite(), expected, 0.0)
    typical_size = (
        float(finite.square().mean().sqrt()) if expected.numel() else 0.0
    )
    size = finite.abs().clamp_min(max(typical_size, least_size))
    error = (actual - expected).abs()
    rounding = ABSOLUTE_TOLERANCE * max(1.0, tolerance / DEFAULT_TOLERANCE)
    is_close = error <= tolerance * size + rounding
    return wrong & ~both_nan & ~is_close


def _bound(expected: Tensor, change: float, tolerance: float) -> float:
    """The largest error of a leaf that changes by so much; 0 for integers."""
    if not expected.dtype.is_floating_point:
        return 0.0
    # A change smaller than the rounding of what it changes is lost in it.
    size = float(expected.double().norm())
    rounding = ROUNDING * size if math.isfinite(size) else 0.0
    return tolerance * change + rounding


def _distance(a: Tensor, b: Tensor) -> float:
    """L2 norm of a - b, in which equal infinities and pairs of NaN count as 0."""
    a = a.double()
    b = b.double()
    both_nan = a.isnan() & b.isnan()
    is_equal = (a == b) | both_nan
    difference = torch.where(is_equal, 0.0, a - b)
    return float(difference.norm())
