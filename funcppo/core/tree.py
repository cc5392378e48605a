"""Functions on trees of tensors: map, flatten, select, ravel, loop. The only module that imports optree.

A tree is a tensor, or a NamedTuple, tuple or list of trees. Both optree and `torch.utils._pytree` must see the same
leaves in the same order (`check_tree`): this package walks trees with the first, `torch.func` and PyTorch's compiler
with the second.

The compiler unrolls a Python loop, so that its time grows with the number of turns. It compiles the body of
`graph_scan` once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import optree
import optree.registry as optree_registry
import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor, compiler
from torch._higher_order_ops.scan import scan as scan_operator

from funcppo.core.types import (
    Bool,
    Carry,
    ScanBody,
    Tree,
    X,
    Y,
    check_tensor,
)

Record = TypeVar("Record")  # a dataclass
Value = TypeVar("Value")
_optree: Any = optree  # its types know no tensors
# Registered there, a class is a tree in every namespace.
_GLOBAL_NAMESPACE: Any = vars(optree_registry)["__GLOBAL_NAMESPACE"]


@overload
def map(fn: Callable[[Tensor], Tensor], tree: Tree, /) -> Tree: ...
@overload
def map(
    fn: Callable[[Tensor, Tensor], Tensor], tree: Tree, second: Tree, /
) -> Tree: ...
@overload
def map(
    fn: Callable[[Tensor, Tensor, Tensor], Tensor],
    tree: Tree,
    second: Tree,
    third: Tree,
    /,
) -> Tree: ...
@overload
def map(fn: Callable[..., Tensor], tree: Tree, /, *rest: Tree) -> Tree: ...
def map(fn: Any, tree: Any, /, *rest: Any) -> Any:
    """Apply `fn` to matching leaves.

    Raises:
      ValueError: the structures differ.
    """
    return optree.tree_map(fn, tree, *rest)


def leaves(tree: object) -> list[Tensor]:
    """List the tensors of a tree, in field order."""
    return _optree.tree_leaves(tree)


def unflatten(like: Tree, tensors: list[Tensor]) -> Tree:
    """Build the tree with the structure of `like` and the given leaves."""
    return _optree.tree_unflatten(_optree.tree_structure(like), tensors)


def structure(tree: object) -> optree.PyTreeSpec:
    """Return the structure of a tree without its tensors, for comparison; faster than `paths`."""
    return _optree.tree_structure(tree)


def paths(tree: object) -> list[str]:
    """List the name of each leaf, such as `opt_state.mu.rule`, in the order of `leaves`."""
    accessors = optree.treespec_accessors(structure(tree))
    return [
        ".".join(
            str(getattr(entry, "field", entry.entry)) for entry in accessor
        )
        for accessor in accessors
    ]


def named_leaves(tree: object, name: str) -> list[tuple[str, Tensor]]:
    """List each leaf with its name below `name`, such as `state.motion`, for errors."""
    names = [f"{name}.{path}".rstrip(".") for path in paths(tree)]
    return list(zip(names, leaves(tree)))


def zeros_like(tree: Tree) -> Tree:
    """Build a tree of zeros with the structure, shapes and dtypes of `tree`."""
    return map(torch.zeros_like, tree)


def contiguous_copy(tree: Tree) -> Tree:
    """Copy a first state so that it is laid out as later ones: each leaf contiguous, no tensor in two places.

    A compiled step would be compiled for the first state alone otherwise.
    """
    return map(lambda x: x.clone(memory_format=torch.contiguous_format), tree)


def where(mask: Bool[Tensor, "B"], on_true: Tree, on_false: Tree) -> Tree:
    """Select rows by the mask [B] from two trees; every leaf is [B, ...]."""

    def select(a: Tensor, b: Tensor) -> Tensor:
        row_mask = mask.view(-1, *[1] * (a.ndim - 1))
        return torch.where(row_mask, a, b)

    return map(select, on_true, on_false)


def global_norm(tree: object) -> Tensor:
    """Compute the L2 norm of all leaves together, 0-d."""
    return torch.stack([(x * x).sum() for x in leaves(tree)]).sum().sqrt()


def grad_and_value(
    loss: Callable[[Tree], Value], tree: Tree
) -> tuple[Tree, Value]:
    """Compute the gradient of a loss in a tree, and its value, by the autograd engine, where that works (`is_eager`).

    `torch.func.grad` takes longer for each tensor of a loss, and its first call imports Dynamo, which takes seconds.

    Args:
      loss: returns a scalar, or a scalar and a tree of others.
    """
    variables = [x.detach() for x in leaves(tree)]
    for x in variables:
        x.requires_grad = True
    with torch.enable_grad():
        value = loss(unflatten(tree, variables))
    scalar = leaves(value)[0]
    found = torch.autograd.grad(scalar, variables, materialize_grads=True)
    return unflatten(tree, list(found)), map(Tensor.detach, value)


def ravel(tree: object, n_axes: int = 0) -> Tensor:
    """Concatenate all leaves as one vector, in the order of `leaves`; they share a dtype.

    Args:
      n_axes: leading axes that all leaves have, and that stay.
    """
    flat = [x.reshape(*x.shape[:n_axes], -1) for x in leaves(tree)]
    return torch.cat(flat, -1)


def unravel(like: Tree, flat: Tensor) -> Tree:
    """Build the tree with the structure and shapes of `like` from views of `flat`: the inverse of `ravel`."""
    shapes = [x.shape for x in leaves(like)]
    sizes = [shape[flat.ndim - 1 :].numel() for shape in shapes]
    pieces = torch.split(flat, sizes, -1)
    return unflatten(
        like, [piece.view(shape) for piece, shape in zip(pieces, shapes)]
    )


def register_dataclass(cls: type[Record]) -> type[Record]:
    """Register a dataclass as a tree for optree and PyTorch, and return it; usable as a decorator.

    Raises:
      TypeError: the class is no dataclass.
    """
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"expected a dataclass, got {cls.__qualname__}")
    names = tuple(field.name for field in dataclasses.fields(cls))

    def flatten(
        record: Record,
    ) -> tuple[tuple[object, ...], None, tuple[str, ...]]:
        return tuple(getattr(record, name) for name in names), None, names

    def unflatten(_: None, values: Iterable[object]) -> Record:
        return cls(**dict(zip(names, values)))

    _optree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        path_entry_type=optree.DataclassEntry,
        namespace=_GLOBAL_NAMESPACE,
    )
    torch_pytree.register_dataclass(cls)
    return cls


def check_tree(tree: object, name: str) -> None:
    """Check that a value is a tree of tensors in which optree and PyTorch see the same leaves.

    A dataclass passes if it is registered with both (`register_dataclass`). A dict never does: optree sorts its keys
    and PyTorch does not, so that zipped leaves would pair the wrong tensors.

    Args:
      name: what the value is, for the error text.

    Raises:
      TypeError: one line that names the value, or the part of it, that is no tensor.
    """
    expected = (
        f"{name}: expected a tensor, or a NamedTuple, tuple or list of such"
    )
    any_tree: Any = tree
    accessors, found, _ = optree.tree_flatten_with_accessor(
        any_tree,
        is_leaf=lambda node: node is None or isinstance(node, dict),
    )
    for accessor, leaf in zip(accessors, found):
        if not isinstance(leaf, Tensor):
            place = f" at {accessor.codify('')}" if accessor else ""
            raise TypeError(
                f"{expected}, got {type(leaf).__name__}{place}{_registration_hint(leaf)}"
            )

    torch_leaves = torch_pytree.tree_leaves(tree)
    if [id(leaf) for leaf in torch_leaves] != [id(leaf) for leaf in found]:
        raise TypeError(
            f"{expected}, got {type(tree).__name__}, whose leaves PyTorch does not see: use fp.tree.register_dataclass"
        )


def check_layout(
    value: object, like: object, name: str, error: type[Exception] = TypeError
) -> None:
    """Check that a value has the structure of another value, and its tensors their shapes and dtypes.

    Args:
      name: what the value is, for the error text.
      error: what is raised.

    Raises:
      TypeError: one line that names the first tensor that differs.
    """
    # Names take long; a compiler reads them once, and knows no comparison of structures.
    if not compiler.is_compiling() and structure(value) == structure(like):
        pairs = zip(leaves(value), leaves(like))
        if all(
            # A leaf of a wrong value may be a number.
            getattr(x, "dtype", None) == y.dtype and x.shape == y.shape
            for x, y in pairs
        ):
            return
    wanted, found = named_leaves(like, name), named_leaves(value, name)
    expected, got = ([path for path, _ in x] for x in (wanted, found))
    if type(value) is not type(like) or expected != got:
        if type(value) is type(like):
            missing = _list_some([x for x in expected if x not in got])
            others = _list_some([x for x in got if x not in expected])
        else:
            missing, others = (
                f"a {type(x).__name__} of {_list_some(paths)}"
                for x, paths in ((like, expected), (value, got))
            )
        problem = f"{name}: expected {missing}, got {others}"
        raise error(
            problem.replace(f" of {name},", ",").removesuffix(f" of {name}")
        )
    for (path, x), (_, y) in zip(wanted, found):
        check_tensor(y, x.shape, x.dtype, path, error)


def _list_some(paths: list[str]) -> str:
    """List up to four paths."""
    return ", ".join(paths[:4] + ["..."] * (len(paths) > 4)) or "no other"


def check_rows(value: object, n: int, name: str) -> None:
    """Check that each tensor of a tree has n rows along its leading axis.

    Args:
      name: what the value is, for the error text.

    Raises:
      ValueError: one line that names the first tensor with others.
    """
    for path, leaf in named_leaves(value, name):
        if leaf.shape[:1] != (n,):
            raise ValueError(
                f"{path}: expected {n} rows, got {leaf.dtype} {list(leaf.shape)}"
            )


def check_common_dtype(tree: object, name: str) -> None:
    """Check that all leaves share one floating-point dtype; `ravel` would otherwise promote dtypes silently.

    Args:
      name: what the value is, for the error text.

    Raises:
      TypeError: one line that names the first leaf of another dtype.
    """
    found = leaves(tree)
    if not found:
        raise TypeError(f"{name}: expected a tensor, got an empty tree")
    dtype = found[0].dtype
    if not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    for path, leaf in zip(paths(tree), found):
        if leaf.dtype != dtype:
            place = f" at {path}" if path else ""
            raise TypeError(
                f"{name}: expected {dtype} in every tensor, got {leaf.dtype}{place}"
            )


def _registration_hint(value: object) -> str:
    return (
        "; register it by fp.tree.register_dataclass"
        if dataclasses.is_dataclass(value)
        else ""
    )


def scan(body: ScanBody[Carry, X, Y], carry: Carry, xs: X) -> tuple[Carry, Y]:
    """Loop over the leading axis of `xs`; return the last carry and the stacked outputs.

    Args:
      body: (carry, x) -> (carry, y).
      carry: before the first turn.
      xs: a tree whose leaves share their leading axis.

    Returns:
      The carry after the last turn, and the outputs stacked along a leading axis.
    """
    ys: list[Y] = []
    inputs, spec = _optree.tree_flatten(xs)
    for x_leaves in zip(*(leaf.unbind() for leaf in inputs)):
        carry, y = body(carry, spec.unflatten(x_leaves))
        ys.append(y)
    return carry, map(_stack, *ys)


def _stack(*leaves: Tensor) -> Tensor:
    return torch.stack(leaves)


def graph_scan(
    body: ScanBody[Carry, X, Y], carry: Carry, xs: X
) -> tuple[Carry, Y]:
    """Run `scan` inside a compiled function, where it stays one loop."""
    # One call beside the loop gives the structure of the outputs; the compiler drops its operations.
    _, output_like = body(carry, map(lambda leaf: leaf[0], xs))

    # A body may return neither a NamedTuple nor a tensor that it received, so leaves are listed and cloned.
    def step(
        carry_leaves: list[Tensor], x_leaves: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        this_carry = unflatten(carry, carry_leaves)
        next_carry, y = body(this_carry, unflatten(xs, x_leaves))
        return _clone_leaves(next_carry), _clone_leaves(y)

    first_leaves = [x.contiguous() for x in leaves(carry)]
    x_leaves = [x.contiguous() for x in leaves(xs)]
    last_leaves, y_leaves = scan_operator(step, first_leaves, x_leaves)
    last_carry = unflatten(carry, list(last_leaves))
    ys = unflatten(output_like, list(y_leaves))
    return last_carry, ys


def _clone_leaves(x: object) -> list[Tensor]:
    return [leaf.clone() for leaf in leaves(x)]


def keeps_loops() -> bool:
    """Return whether `graph_scan` works here: in a compiled function, not under `torch.vmap` or `torch.func.grad`."""
    return compiler.is_compiling() and not _is_transformed()


def is_traced() -> bool:
    """Return whether the call is part of a function that a compiler reads."""
    return compiler.is_compiling()


def is_eager() -> bool:
    """Return whether code runs as it stands: in no compiled function, under no `torch.vmap` nor `torch.func.grad`."""
    return not compiler.is_compiling() and not _is_transformed()


def _is_transformed() -> bool:
    return torch._C._are_functorch_transforms_active()  # pyright: ignore[reportPrivateUsage]


def length(stacked: object) -> int:
    """Return the size of the leading axis."""
    return len(leaves(stacked)[0])


def item(stacked: Tree, index: int) -> Tree:
    """Return the tree at an index of the leading axis; its leaves are views."""
    return map(lambda leaf: leaf[index], stacked)
