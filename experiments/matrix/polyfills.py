"""optree for a Dynamo that does not trace it, as that of PyTorch 2.9: funcppo's trees must be traced on every version.

Later versions bring such substitutes themselves (`torch/_dynamo/polyfills/pytree.py`), and there nothing is done here.
PyTorch's own trees have the same order of leaves as optree's for what funcppo puts into one: tuples, lists, tensors.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch.utils import _pytree as pytree


@functools.cache
def needed() -> bool:
    """Whether this version's Dynamo lacks them."""
    from torch._dynamo.polyfills import pytree as shipped

    return "substitute_in_graph(optree.tree_leaves" not in inspect.getsource(
        shipped
    )


def register() -> None:
    """Let Dynamo trace the functions below in place of optree's, where it needs them."""
    substitutes: dict[Callable[..., Any], Callable[..., Any]] = {
        optree.tree_leaves: tree_leaves,
        optree.tree_structure: tree_structure,
        optree.tree_unflatten: tree_unflatten,
        optree.tree_map: tree_map,
    }
    for original, substitute in substitutes.items() if needed() else ():
        torch.compiler.substitute_in_graph(original, skip_signature_check=True)(
            substitute
        )


def tree_leaves(tree: Any) -> list[Any]:
    """As `optree.tree_leaves`."""
    return pytree.tree_leaves(tree)


def tree_structure(tree: Any) -> Any:
    """As `optree.tree_structure`."""
    return pytree.tree_structure(tree)


def tree_unflatten(structure: Any, leaves: Any) -> Any:
    """As `optree.tree_unflatten`."""
    return pytree.tree_unflatten(leaves, structure)


def tree_map(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """As `optree.tree_map`."""
    return pytree.tree_map(fn, tree, *rest)
