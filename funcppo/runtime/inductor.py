"""What Inductor learns of this package: a graph pass, and the lowering of random bits. Importing registers the latter.

The pass computes equal nodes once, and rewrites matrix products into the form that costs least for their shape.

Libraries are at their best with large square products. A training step of small networks has three other kinds:

    small    4 x 64 by 64 x 64: costs a launch and fuses with nothing. As multiply and sum it fuses with its neighbours.
    long     64 x 65536 by 65536 x 64, the gradient of a weight: leaves most of a GPU idle. Split along K it is a batch
             of products and a sum (split-K).
    narrow   by a transposed matrix, the gradient of an output layer: on a CPU it is faster as (b^T a^T)^T.

`MatmulPass` is Inductor's hook. It runs on the final graph, so it sees the shapes after vmap and differentiation. Each
faster form is a function of tensors, whose operators take the place of a node.

On a GPU the order of short rows comes from `compile.stable_argsort`.

A CPU sums fast along contiguous numbers only, so there a factor with another layout is copied first. The pass makes two
more rewrites for a CPU. It computes tanh from one exponential, which is faster than the library's tanh, with an error
below 2e-7. And it computes a small concatenation as a sum of zero-padded parts, because each part of a concatenation
is a view that is created again at every step.

The operator `funcppo::threefry2x32` of random bits becomes one expression of 20 rounds. Written as 150 graph operations
it would be most of the graph, and Inductor would inline its chain of rounds again and again. A small output is
recomputed where it is used, which costs less than a kernel of its own; a large one is computed once.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import (
    CustomGraphPass,
    get_hash_for_files,
)
from torch._inductor.ir import Pointwise, TensorBox
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import ops
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import pad

from funcppo.core import random

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, slots=True)
class RewriteThresholds:
    """Shapes from which one form is faster than another; m, k and n as in [m, k] @ [k, n]."""

    # multiply-accumulates up to which a product is written as multiply and sum
    mul_sum_max_macs: int
    # k up to which it is so written whatever its size: the sum needs no reduction kernel
    mul_sum_max_k: int
    # as mul_sum_max_macs, for products with n <= 4
    narrow_mul_sum_max_macs: int
    split_k_min_k: int  # k from which a product is split along k
    split_k_chunk_size: int  # k of each part of a split product
    # n up to which a product with a transposed left factor is computed as (b^T a^T)^T
    transpose_max_n: int
    # n up to which multiply and sum reads contiguous rows of both factors
    rowwise_max_n: int
    # elements up to which a concatenation is written as a sum of padded parts
    cat_as_sum_max_elements: int
    tanh_from_exp: bool  # whether tanh is computed from an exponential
    argsort_by_pytorch: (
        bool  # whether PyTorch sorts where the order alone is read
    )


# Measured on one H200 and on a 2-core CPU.
GPU_THRESHOLDS = RewriteThresholds(
    mul_sum_max_macs=1 << 18,
    mul_sum_max_k=4,
    narrow_mul_sum_max_macs=1 << 20,
    split_k_min_k=4096,
    split_k_chunk_size=256,
    transpose_max_n=0,
    rowwise_max_n=0,
    cat_as_sum_max_elements=0,
    tanh_from_exp=False,
    argsort_by_pytorch=True,
)
CPU_THRESHOLDS = replace(
    GPU_THRESHOLDS,
    split_k_min_k=1 << 62,
    transpose_max_n=4,
    rowwise_max_n=4,
    cat_as_sum_max_elements=64,
    tanh_from_exp=True,
    argsort_by_pytorch=False,
)


# computes of the inputs of a node what the node does; None leaves the node as it is
Form: TypeAlias = Callable[..., Tensor] | None


class MatmulPass(CustomGraphPass):
    """Graph pass of Inductor that rewrites operators to faster forms, by thresholds for each device type."""

    def __init__(
        self,
        gpu: RewriteThresholds = GPU_THRESHOLDS,
        cpu: RewriteThresholds = CPU_THRESHOLDS,
    ) -> None:
        self.thresholds = {"cuda": gpu, "cpu": cpu}

    def __call__(self, graph: fx.Graph) -> None:
        """Compute equal nodes once, and replace each node of a graph that has a faster form."""
        _merge_equal(graph)
        for node in list(graph.nodes):
            value = node.meta.get("val")
            if node.target not in REWRITES or not isinstance(value, Tensor):
                continue
            thresholds = self.thresholds.get(value.device.type)
            if thresholds is None:
                continue

            # A version of PyTorch whose graphs are others compiles them as they are.
            try:
                form, inputs = REWRITES[node.target](node, thresholds)
                if form is None:
                    continue
                traced = make_fx(form)(*(x.meta["val"] for x in inputs)).graph
                places = dict(zip(traced.find_nodes(op="placeholder"), inputs))
                with graph.inserting_before(node):
                    value = graph.graph_copy(traced, places)
            except Exception as error:
                message = f"{node.target} is not rewritten: {error}"
                warnings.warn(message, stacklevel=2)
                continue
            node.replace_all_uses_with(value)
            graph.erase_node(node)
        graph.eliminate_dead_code()

    def uuid(self) -> bytes:
        """Return the pass's identifier in Inductor's cache: a hash of the source and the thresholds."""
        return get_hash_for_files((__file__,), repr(self.thresholds))


def _merge_equal(graph: fx.Graph) -> None:
    """Compute what several nodes compute alike once; results of the graph stay tensors of their own.

    PyTorch does so in graphs that its autograd differentiates, not in those that `torch.func` did.
    """
    first: dict[tuple[object, str, str], fx.Node] = {}
    results = set(graph.output_node().all_input_nodes)
    for node in list(graph.nodes):
        target = node.target
        is_pure = (
            isinstance(target, torch._ops.OpOverload)
            and not target._schema.is_mutable
            and torch.Tag.nondeterministic_seeded not in target.tags
        )
        if not is_pure or node in results:
            continue
        # A node's text is its name, which is unique.
        same = first.setdefault(
            (target, repr(node.args), repr(node.kwargs)), node
        )
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _rewrite_product(
    node: fx.Node, thresholds: RewriteThresholds
) -> tuple[Form, Sequence[Any]]:
    a, b = (x.meta["val"] for x in node.args)  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    return _product_form(a, b, thresholds), node.args


def _product_form(a: Tensor, b: Tensor, thresholds: RewriteThresholds) -> Form:
    """Choose the fastest form of a product by its shape."""
    m, k = a.shape[-2:]
    n = b.shape[-1]

    is_transposed = a.stride(-2) < a.stride(-1)
    if n <= thresholds.transpose_max_n < m and is_transposed:
        form = _product_form(_transpose(b), _transpose(a), thresholds)
        product = form or (torch.bmm if a.ndim == 3 else torch.mm)
        return lambda a, b: _transpose(product(_transpose(b), _transpose(a)))
    chunk_size = thresholds.split_k_chunk_size
    if k >= thresholds.split_k_min_k and k % chunk_size == 0:
        return partial(_split_k, chunk_size)

    max_macs = (
        thresholds.narrow_mul_sum_max_macs
        if n <= 4
        else thresholds.mul_sum_max_macs
    )
    if k > thresholds.mul_sum_max_k and a.numel() * n > max_macs:
        return None
    if n <= thresholds.rowwise_max_n and a.stride(-1) == 1:
        return _rowwise_mul_sum
    return partial(_mul_sum, thresholds.rowwise_max_n > 0)


def _mul_sum(wants_rows: bool, a: Tensor, b: Tensor) -> Tensor:
    """Compute sum_k a[.., m, k, 1] b[.., 1, k, n], on a device that wants contiguous rows or on another one."""
    b = _make_contiguous(b) if wants_rows else b
    return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)


def _rowwise_mul_sum(a: Tensor, b: Tensor) -> Tensor:
    """Compute sum_k a[.., m, 1, k] b^T[.., 1, n, k]."""
    columns = _make_contiguous(_transpose(b))
    return (a.unsqueeze(-2) * columns.unsqueeze(-3)).sum(-1)


def _split_k(chunk_size: int, a: Tensor, b: Tensor) -> Tensor:
    """Compute sum_c a[.., m, c k'] b[.., c k', n] over chunks c of k, as one batch of products and a sum."""
    n_chunks = a.shape[-1] // chunk_size
    # [.., m, c k'] -> [.., c, m, k'] -> [(.. c), m, k']
    left = a.unflatten(-1, (n_chunks, chunk_size)).movedim(-2, -3)
    left = left.reshape(-1, *left.shape[-2:])
    products = torch.bmm(left, b.reshape(-1, chunk_size, b.shape[-1]))
    return products.view(*b.shape[:-2], n_chunks, *products.shape[1:]).sum(-3)


def _transpose(x: Tensor) -> Tensor:
    """Exchange the last two axes of x."""
    *batch_axes, rows, columns = range(x.ndim)
    return x.permute(*batch_axes, columns, rows)


def _make_contiguous(x: Tensor) -> Tensor:
    """Return x with contiguous rows: x itself, or a copy."""
    if x.stride(-1) == 1:
        return x
    # `as_strided` makes Inductor store the copy; otherwise it would compute the copy again at every use.
    copy = x.clone(memory_format=torch.contiguous_format)
    return copy.as_strided(x.shape, copy.stride())


def _rewrite_tanh(
    node: fx.Node, thresholds: RewriteThresholds
) -> tuple[Form, Sequence[Any]]:
    form = _tanh_from_exp if thresholds.tanh_from_exp else None
    return form, node.args


def _tanh_from_exp(x: Tensor) -> Tensor:
    """Compute 1 - 2 / (exp(2 x) + 1)."""
    return (torch.exp(x * 2.0) + 1.0).reciprocal() * -2.0 + 1.0


def _rewrite_cat(
    node: fx.Node, thresholds: RewriteThresholds
) -> tuple[Form, Sequence[Any]]:
    """Rewrite a small stack as a sum; not a large one, nor one with a part that is longer than 1 along the axis."""
    value = node.meta["val"]
    parts: Any = node.args[0]
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    dim %= value.ndim
    is_stack = all(part.meta["val"].shape[dim] == 1 for part in parts)
    if value.numel() > thresholds.cat_as_sum_max_elements or not is_stack:
        return None, ()
    return partial(_cat_as_sum, value.ndim - 1 - dim), parts


def _cat_as_sum(n_inner_axes: int, *parts: Tensor) -> Tensor:
    """Compute sum_i part_i between i and n - 1 - i zeros; -0.0 becomes 0.0."""
    # Padding is listed from the last axis on: two numbers an axis, none for the axes inside.
    inside = [0, 0] * n_inner_axes
    last = len(parts) - 1
    return reduce(
        torch.add,
        [pad(x, [*inside, i, last - i]) for i, x in enumerate(parts)],
    )


def _rewrite_order(
    node: fx.Node, thresholds: RewriteThresholds
) -> tuple[Form, Sequence[Any]]:
    """Rewrite a stable sort whose values are not read as an argsort."""
    source: Any
    source, index = node.args
    if source.target is not aten.sort.stable or index != 1:
        return None, ()
    is_order_alone = all(u.args[1] == 1 or not u.users for u in source.users)
    if not (thresholds.argsort_by_pytorch and is_order_alone):
        return None, ()
    options = {"dim": -1, "descending": False, **source.kwargs}
    del options["stable"]
    argsort = torch.ops.funcppo.stable_argsort.default
    return partial(argsort, **options), source.args


REWRITES: dict[
    object,
    Callable[[fx.Node, RewriteThresholds], tuple[Form, Sequence[Any]]],
] = {
    aten.mm.default: _rewrite_product,
    aten.bmm.default: _rewrite_product,
    aten.tanh.default: _rewrite_tanh,
    aten.cat.default: _rewrite_cat,
    operator.getitem: _rewrite_order,
}


# ---- Random bits.

# output words from which a kernel of their own costs less than recomputing them
MIN_WORDS_TO_REALIZE = 1024

_Word = Any  # a value in Inductor's virtualized arithmetic


@register_lowering(
    torch.ops.funcppo.threefry2x32.default,
    broadcast=True,
    type_promotion_kind=None,
)
def _threefry2x32(*words: TensorBox) -> list[TensorBox]:
    """Lower the operator: compute both output words from two key words and two counter words."""
    loaders = [word.make_loader() for word in words]
    size = words[0].get_size()

    def compute(output_index: int, index: Sequence[_Word]) -> _Word:
        return random.threefry_rounds(
            *(load(index) for load in loaders),
            constant=_constant,
            rotate_left=_rotate_left,
        )[output_index]

    outputs = [
        Pointwise.create(
            device=words[0].get_device(),
            dtype=torch.int64,
            inner_fn=partial(compute, i),
            ranges=size,
        )
        for i in range(2)
    ]
    if math.prod(int(n) for n in size) >= MIN_WORDS_TO_REALIZE:
        for output in outputs:
            output.realize()
    return outputs


def _constant(n: int) -> _Word:
    return ops.constant(n, torch.int64)


def _rotate_left(x: _Word, n_bits: int) -> _Word:
    """Rotate a 32-bit word to the left; the bits above the lowest 32 are left undefined."""
    shifted = ops.bitwise_left_shift(x, _constant(n_bits))
    return shifted | ops.bitwise_right_shift(shifted, _constant(32))
