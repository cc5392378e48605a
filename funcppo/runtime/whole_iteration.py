"""A whole iteration - rollout, advantages, epochs, minibatches - as one graph, its loops kept as loops.

A Python loop would be unrolled, and 128 rollout steps take minutes to compile; `scan` compiles its body once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._higher_order_ops.scan import scan

from funcppo import tree
from funcppo.runtime.compile import compile_function

# What Inductor asserts of its own buffers, at every turn of a loop, costs as much as a small turn itself; and that no
# module's contents have changed since, which Dynamo checks at every call, is taken for granted. Arguments are checked.
UNCHECKED_OPTIONS = {
    "size_asserts": False,
    "scalar_asserts": False,
    "guard_filter_fn": torch.compiler.skip_guard_on_globals_unsafe,
}


def graph_scan(fn: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any) -> tuple[Any, Any]:
    """As `rollout.scan`, inside a compiled function only.

    Bodies may return no NamedTuple and no tensor that they received: leaves are listed and cloned. The structure of the
    outputs is that of one call beside the loop, whose operations the compiler drops.
    """
    _, like = fn(carry, tree.map(lambda x: x[0], xs))

    def body(carry_leaves: list[torch.Tensor], x_leaves: list[torch.Tensor]) -> tuple[Any, Any]:
        after, y = fn(tree.unflatten(carry, carry_leaves), tree.unflatten(xs, x_leaves))
        return [leaf.clone() for leaf in tree.leaves(after)], [leaf.clone() for leaf in tree.leaves(y)]

    last, ys = scan(body, tree.leaves(carry), [x.contiguous() for x in tree.leaves(xs)])
    return tree.unflatten(carry, list(last)), tree.unflatten(like, list(ys))


def compile_iteration(train_step: Callable[..., Any], parts: Any, backend: str = "inductor") -> Callable[..., Any]:
    """`train_step(cfg, world, state)` as one graph.

    Args:
      parts: the eager parts.
    """

    def gradient(cfg: Any, world: Any, params: Any, *args: Any) -> Any:
        return parts.accumulate_gradients(cfg, world, tree.map(torch.clone, params), *args, scan=graph_scan)

    looped = dataclasses.replace(
        parts, scan=graph_scan, minibatch_step=partial(parts.minibatch_step, accumulate_gradients=gradient)
    )
    step = compile_function(train_step, backend, **UNCHECKED_OPTIONS)
    return lambda cfg, world, state: step(cfg, world, state, looped)
