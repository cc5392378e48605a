"""A whole training iteration (rollout, advantages, epochs, minibatches) as one graph, its loops kept as loops.

The compiler would unroll a Python loop, and 128 rollout steps take minutes to compile. PyTorch's `scan` compiles the
body once. `compile_iteration` is the entry point.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan

from funcppo import tree
from funcppo.runtime import stacked
from funcppo.runtime.compile import compile_function
from funcppo.runtime.protocols import TrainingParts

# Inductor asserts the sizes of its own buffers in every step of a loop, which costs as much as a small step itself.
# Dynamo checks at every call that no module has changed since. Both are dropped; arguments are still checked.
UNCHECKED_OPTIONS = {
    "size_asserts": False,
    "scalar_asserts": False,
    "guard_filter_fn": torch.compiler.skip_guard_on_globals_unsafe,
}

Carry = TypeVar("Carry")
Inputs = TypeVar("Inputs")
Output = TypeVar("Output")
Parts = TypeVar("Parts", bound=TrainingParts)
Cfg = TypeVar("Cfg")
World = TypeVar("World")
State = TypeVar("State")
CfgIn = TypeVar("CfgIn", contravariant=True)
WorldIn = TypeVar("WorldIn", contravariant=True)
PartsIn = TypeVar("PartsIn", contravariant=True)
OutputOf = TypeVar("OutputOf", covariant=True)


def graph_scan(
    fn: Callable[[Carry, Inputs], tuple[Carry, Output]],
    carry: Carry,
    xs: Inputs,
) -> tuple[Carry, Output]:
    """As `rollout.scan`, but only inside a compiled function, where it stays one loop.

    Args:
      fn: the body of the loop, `(carry, x) -> (carry, y)`.
      carry: the carry before the first step.
      xs: inputs of the steps, along the leading axis of every leaf.

    Returns:
      The last carry, and the outputs of all steps stacked.
    """
    # One call beside the loop gives the structure of the outputs; the compiler drops its operations.
    _, output_like = fn(carry, stacked.item(xs, 0))

    # A body may return neither a NamedTuple nor a tensor that it received, so leaves are listed and cloned.
    def body(
        carry_leaves: list[Tensor], x_leaves: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        this_carry = tree.unflatten(carry, carry_leaves)
        x = tree.unflatten(xs, x_leaves)
        next_carry, y = fn(this_carry, x)
        return _clone_leaves(next_carry), _clone_leaves(y)

    first_leaves = tree.leaves(carry)
    x_leaves = [x.contiguous() for x in tree.leaves(xs)]
    last_leaves, y_leaves = scan(body, first_leaves, x_leaves)
    last_carry = tree.unflatten(carry, list(last_leaves))
    ys = tree.unflatten(output_like, list(y_leaves))
    return last_carry, ys


def _clone_leaves(x: object) -> list[Tensor]:
    return [leaf.clone() for leaf in tree.leaves(x)]


class TrainStep(Protocol[CfgIn, WorldIn, State, OutputOf, PartsIn]):
    """One training iteration: see `train_step.train_step`."""

    def __call__(
        self, cfg: CfgIn, world: WorldIn, state: State, parts: PartsIn, /
    ) -> tuple[State, OutputOf]:
        """Return the next state, and metrics."""
        ...


def compile_iteration(
    train_step: TrainStep[Cfg, World, State, Output, Parts],
    parts: Parts,
    backend: str = "inductor",
) -> Callable[[Cfg, World, State], tuple[State, Output]]:
    """Compile a whole training iteration as one graph.

    Args:
      train_step: `train_step(cfg, world, state, parts) -> (state, metrics)`.
      parts: the eager parts, `train_step.EAGER_PARTS`.
      backend: a backend of `torch.compile`.

    Returns:
      The compiled `train_step(cfg, world, state)`.
    """

    def accumulate_gradients(
        cfg: Cfg, world: World, params: object, *args: object
    ) -> tuple[object, object]:
        # Cloned: the parameters are views of the carry of the loop over minibatches.
        own_params = tree.map(torch.clone, params)
        return parts.minibatch_parts.accumulate_gradients(
            cfg, world, own_params, *args, scan=graph_scan
        )

    looped_parts = dataclasses.replace(
        parts,
        scan=graph_scan,
        minibatch_step=partial(
            parts.minibatch_step, accumulate_gradients=accumulate_gradients
        ),
    )
    step = compile_function(train_step, backend, **UNCHECKED_OPTIONS)
    return lambda cfg, world, state: step(cfg, world, state, looped_parts)
