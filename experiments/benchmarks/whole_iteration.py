"""A whole training iteration (rollout, advantages, epochs, minibatches) as one graph, its loops kept as loops.

The compiler would unroll a Python loop, and 128 rollout steps take minutes to compile. PyTorch's `scan` compiles the
body once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from funcppo.core import tree
from funcppo.core.tree import graph_scan
from funcppo.runtime.compile import compile_function
from funcppo.train_step import Parts, train_step

# Inductor asserts the sizes of its own buffers in every step of a loop, which costs as much as a small step itself.
# Dynamo checks at every call that no module has changed since. Both are dropped; arguments are still checked.
UNCHECKED_OPTIONS = {
    "size_asserts": False,
    "scalar_asserts": False,
    "guard_filter_fn": torch.compiler.skip_guard_on_globals_unsafe,
}


def compile_iteration(
    parts: Parts, backend: str = "inductor"
) -> Callable[..., tuple[Any, Any]]:
    """Compile a whole training iteration as one graph.

    Args:
      parts: the eager parts.
      backend: a backend of `torch.compile`.

    Returns:
      The compiled `train_step(cfg, world, state)`.
    """

    def accumulate_gradients(
        cfg: object, world: object, params: object, *args: object
    ) -> tuple[object, object]:
        # Cloned: the parameters are views of the carry of the loop over minibatches.
        own_params = tree.map(torch.clone, params)
        accumulate: Any = parts.minibatch_parts.accumulate_gradients
        return accumulate(cfg, world, own_params, *args, scan=graph_scan)

    step_of_minibatch: Any = parts.minibatch_step
    looped_parts = dataclasses.replace(
        parts,
        scan=graph_scan,
        minibatch_step=partial(
            step_of_minibatch, accumulate_gradients=accumulate_gradients
        ),
    )
    step: Any = compile_function(train_step, backend, **UNCHECKED_OPTIONS)
    return lambda cfg, world, state: step(cfg, world, state, looped_parts)
