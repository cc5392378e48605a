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

from funcppo.core import tree
from funcppo.core.tree import graph_scan
from funcppo.runtime.compile import compile_function
from funcppo.runtime.protocols import TrainingParts

# Inductor asserts the sizes of its own buffers in every step of a loop, which costs as much as a small step itself.
# Dynamo checks at every call that no module has changed since. Both are dropped; arguments are still checked.
UNCHECKED_OPTIONS = {
    "size_asserts": False,
    "scalar_asserts": False,
    "guard_filter_fn": torch.compiler.skip_guard_on_globals_unsafe,
}

Output = TypeVar("Output")
Parts = TypeVar("Parts", bound=TrainingParts)
Cfg = TypeVar("Cfg")
World = TypeVar("World")
State = TypeVar("State")
CfgIn = TypeVar("CfgIn", contravariant=True)
WorldIn = TypeVar("WorldIn", contravariant=True)
PartsIn = TypeVar("PartsIn", contravariant=True)
OutputOf = TypeVar("OutputOf", covariant=True)


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
