"""The tree verbs. The only module that imports optree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import optree
import torch
from torch import Tensor

Tree = TypeVar("Tree")


def map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """`fn` over matching leaves; raises ValueError when the structures differ."""
    return cast(Tree, optree.tree_map(fn, cast(Any, tree), *cast(Any, rest)))


def leaves(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in field order."""
    return cast(list[Tensor], optree.tree_leaves(tree))


def unflatten(like: Tree, tensors: list[Tensor]) -> Tree:
    """The tree of the same structure as `like` that has these leaves."""
    return cast(Tree, optree.tree_unflatten(optree.tree_structure(cast(Any, like)), tensors))


def structure(tree: Any) -> Any:
    """The tree without its tensors, to be compared; fast, where `paths` is not."""
    return optree.tree_structure(tree)


def paths(tree: Any) -> list[str]:
    """The name of each leaf, as in `opt_state.mu.rule`, in the order of `leaves`."""
    accessors = optree.treespec_accessors(optree.tree_structure(tree))
    return [".".join(str(getattr(entry, "field", entry.entry)) for entry in path) for path in accessors]


def zeros_like(tree: Tree) -> Tree:
    """A tree of zeros with the structure, shapes and dtypes of `tree`."""
    return map(torch.zeros_like, tree)


def where(mask: Tensor, on_true: Tree, on_false: Tree) -> Tree:
    """Row-wise select: `mask` is [B], every leaf is [B, ...]."""
    return map(lambda a, b: torch.where(mask.view(-1, *[1] * (a.ndim - 1)), a, b), on_true, on_false)


def global_norm(tree: Any) -> Tensor:
    """The L2 norm over all leaves together, 0-d."""
    return torch.stack([(x * x).sum() for x in leaves(tree)]).sum().sqrt()


def ravel(tree: Any) -> Tensor:
    """All leaves as one vector, in the order of `leaves`; they share a dtype."""
    return torch.cat([x.reshape(-1) for x in leaves(tree)])


def unravel(like: Tree, flat: Tensor) -> Tree:
    """The tree with the structure and shapes of `like` whose leaves are views of `flat`: undoes `ravel`."""
    shapes = [x.shape for x in leaves(like)]
    parts = flat.split([shape.numel() for shape in shapes])
    return unflatten(like, [part.view(shape) for part, shape in zip(parts, shapes)])
