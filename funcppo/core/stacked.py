"""Trees whose leaves are stacked along a leading axis, such as the inputs of a loop."""

from __future__ import annotations

from typing import TypeVar

from funcppo.core import tree

Tree = TypeVar("Tree")


def length(stacked: object) -> int:
    """Size of the leading axis."""
    first_leaf = tree.leaves(stacked)[0]
    return len(first_leaf)


def item(stacked: Tree, index: int) -> Tree:
    """The tree at an index of the leading axis; its leaves are views."""
    return tree.map(lambda leaf: leaf[index], stacked)
