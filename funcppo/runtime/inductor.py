"""What Inductor learns of this package: a graph pass, and the lowering of random bits. Importing registers the latter.

The pass rewrites matrix products into the form that costs least for their shape.

Libraries are at their best with large square products. A training step of small networks has four other kinds:

    small    4 x 64 by 64 x 64: costs a launch and fuses with nothing. As multiply and sum it fuses with its neighbours.
    long     64 x 65536 by 65536 x 64, the gradient of a weight: leaves most of a GPU idle. Split along K it is a batch
             of products and a sum (split-K).
    skinny   4 x 64 by 64 x 64, a thousand of them: see `operators.skinny_bmm`.
    narrow   by a transposed matrix, the gradient of an output layer: on a CPU it is faster as (b^T a^T)^T.

`MatmulPass` is Inductor's hook. It runs on the final graph, so it sees the shapes after vmap and differentiation.

On a GPU the order of short rows comes from `operators.stable_argsort`.

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
from functools import partial
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

from funcppo.core import random
from funcppo.runtime import operators

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
    # m up to which a product of a large batch uses `skinny_bmm`
    skinny_max_m: int
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
    skinny_max_m=8,
    transpose_max_n=0,
    rowwise_max_n=0,
    cat_as_sum_max_elements=0,
    tanh_from_exp=False,
    argsort_by_pytorch=True,
)
CPU_THRESHOLDS = replace(
    GPU_THRESHOLDS,
    split_k_min_k=1 << 62,
    skinny_max_m=0,
    transpose_max_n=4,
    rowwise_max_n=4,
    cat_as_sum_max_elements=64,
    tanh_from_exp=True,
    argsort_by_pytorch=False,
)


# inserts nodes that compute what a node of the graph does, and returns the last of them
Rewrite: TypeAlias = Callable[[fx.Graph, fx.Node, RewriteThresholds], fx.Node]


class MatmulPass(CustomGraphPass):
    """Graph pass of Inductor that rewrites operators to faster forms, by thresholds for each device type."""

    def __init__(
        self,
        gpu: RewriteThresholds = GPU_THRESHOLDS,
        cpu: RewriteThresholds = CPU_THRESHOLDS,
    ) -> None:
        self.thresholds = {"cuda": gpu, "cpu": cpu}

    def __call__(self, graph: fx.Graph) -> None:
        """Replace each node of a graph that has a faster form."""
        for node in list(graph.nodes):
            value = node.meta.get("val")
            if node.target not in REWRITES or not isinstance(value, Tensor):
                continue
            thresholds = self.thresholds.get(value.device.type)
            if thresholds is None:
                continue

            # A version of PyTorch whose graphs are others compiles them as they are.
            try:
                rewrite = REWRITES[node.target](node, thresholds)
                if rewrite is None:
                    continue
                with graph.inserting_before(node):
                    value = rewrite(graph, node, thresholds)
            except Exception as error:
                message = f"{node.target} is not rewritten: {error}"
                warnings.warn(message, stacklevel=2)
                continue
            node.replace_all_uses_with(value)
            graph.erase_node(node)
        graph.eliminate_dead_code()

    def uuid(self) -> bytes:
        """Return the pass's identifier in Inductor's cache: a hash of the sources and the thresholds."""
        sources = (__file__, operators.__file__)
        return get_hash_for_files(sources, repr(self.thresholds))


def _choose_matmul_rewrite(
    node: fx.Node, thresholds: RewriteThresholds
) -> Rewrite | None:
    """Choose the fastest form of a product by its shape; None to leave it unchanged."""
    a, b = (_value(arg) for arg in node.args)
    m, k = a.shape[-2:]
    n = b.shape[-1]

    is_transposed = a.stride(-2) < a.stride(-1)
    if n <= thresholds.transpose_max_n < m and is_transposed:
        return _transposed_matmul
    if k >= thresholds.split_k_min_k and k % thresholds.split_k_chunk_size == 0:
        return _split_k

    batch_size = a.shape[:-2].numel()
    macs = batch_size * m * k * n
    max_macs = (
        thresholds.narrow_mul_sum_max_macs
        if n <= 4
        else thresholds.mul_sum_max_macs
    )
    if k <= thresholds.mul_sum_max_k or macs <= max_macs:
        has_contiguous_rows = a.stride(-1) == 1
        if n <= thresholds.rowwise_max_n and has_contiguous_rows:
            return _rowwise_mul_sum
        return _mul_sum

    if operators.supports_skinny_bmm(a, b, thresholds.skinny_max_m):
        return _skinny_bmm
    return None


def _transposed_matmul(
    graph: fx.Graph, node: fx.Node, thresholds: RewriteThresholds
) -> fx.Node:
    """Compute (b^T a^T)^T, with the inner product itself rewritten by its shape."""
    a, b = _factors(node)
    b_transposed = _transpose(graph, b)
    a_transposed = _transpose(graph, a)
    product = _call(graph, node.target, b_transposed, a_transposed)

    rewrite = _choose_matmul_rewrite(product, thresholds)
    if rewrite is None:
        return _transpose(graph, product)
    rewritten = rewrite(graph, product, thresholds)
    graph.erase_node(product)
    return _transpose(graph, rewritten)


def _mul_sum(
    graph: fx.Graph, node: fx.Node, thresholds: RewriteThresholds
) -> fx.Node:
    """Compute sum_k a[.., m, k, 1] b[.., 1, k, n]."""
    a, b = _factors(node)
    left = _unsqueeze(graph, a, -1)
    if thresholds.rowwise_max_n:  # a device that wants contiguous rows
        b = _make_contiguous(graph, b)
    right = _unsqueeze(graph, b, -3)
    products = _mul(graph, left, right)
    return _sum(graph, products, -2)


def _rowwise_mul_sum(
    graph: fx.Graph, node: fx.Node, thresholds: RewriteThresholds
) -> fx.Node:
    """Compute sum_k a[.., m, 1, k] b^T[.., 1, n, k]."""
    a, b = _factors(node)
    left = _unsqueeze(graph, a, -2)
    columns = _make_contiguous(graph, _transpose(graph, b))
    right = _unsqueeze(graph, columns, -3)
    products = _mul(graph, left, right)
    return _sum(graph, products, -1)


def _split_k(
    graph: fx.Graph, node: fx.Node, thresholds: RewriteThresholds
) -> fx.Node:
    """Compute sum_c a[.., m, c k'] b[.., c k', n] over chunks c of k, as one batch of products and a sum."""
    a, b = _factors(node)
    *batch, m, k = _value(a).shape
    n = _value(b).shape[-1]
    chunk_size = thresholds.split_k_chunk_size
    n_chunks = k // chunk_size

    # [.., m, c k'] -> [.., c, m, k'] -> [(.. c), m, k']
    left = _reshape(graph, a, [*batch, m, n_chunks, chunk_size])
    *batch_axes, m_axis, chunk_axis, k_axis = range(len(batch) + 3)
    left = _permute(graph, left, [*batch_axes, chunk_axis, m_axis, k_axis])
    left = _reshape(graph, left, [-1, m, chunk_size])

    right = _reshape(graph, b, [-1, chunk_size, n])
    products = _call(graph, aten.bmm.default, left, right)
    by_chunk = _reshape(graph, products, [*batch, n_chunks, m, n])
    return _sum(graph, by_chunk, -3)


def _skinny_bmm(
    graph: fx.Graph, node: fx.Node, thresholds: RewriteThresholds
) -> fx.Node:
    """Call the Triton kernel of tall products with few columns."""
    return _call(graph, torch.ops.funcppo.skinny_bmm.default, *node.args)


def _choose_tanh_rewrite(
    node: fx.Node, thresholds: RewriteThresholds
) -> Rewrite | None:
    return _tanh_from_exp if thresholds.tanh_from_exp else None


def _tanh_from_exp(
    graph: fx.Graph, node: fx.Node, thresholds: RewriteThresholds
) -> fx.Node:
    """Compute 1 - 2 / (exp(2 x) + 1)."""
    x = node.all_input_nodes[0]
    exponent = _mul(graph, x, 2.0)
    exponential = _call(graph, aten.exp.default, exponent)
    denominator = _add(graph, exponential, 1.0)
    reciprocal = _call(graph, aten.reciprocal.default, denominator)
    fraction = _mul(graph, reciprocal, -2.0)
    return _add(graph, fraction, 1.0)


def _choose_cat_rewrite(
    node: fx.Node, thresholds: RewriteThresholds
) -> Rewrite | None:
    """Choose a sum of padded parts for a small stack; None if it is large or a part is longer than 1 along the axis."""
    value = _value(node)
    if value.numel() > thresholds.cat_as_sum_max_elements:
        return None

    parts: Any = node.args[0]
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    dim = dim % value.ndim
    lengths = {_value(part).shape[dim] for part in parts}
    if lengths != {1}:
        return None
    return partial(
        _cat_as_padded_sum, parts=parts, n_inner_axes=value.ndim - 1 - dim
    )


def _cat_as_padded_sum(
    graph: fx.Graph,
    node: fx.Node,
    thresholds: RewriteThresholds,
    parts: list[fx.Node],
    n_inner_axes: int,
) -> fx.Node:
    """Compute sum_i part_i between i and n - 1 - i zeros; -0.0 becomes 0.0."""
    total: fx.Node | None = None
    for i, part in enumerate(parts):
        n_before = i
        n_after = len(parts) - 1 - i
        # Padding is listed from the last axis on: two numbers an axis, none for the axes inside.
        padding = [0, 0] * n_inner_axes + [n_before, n_after]
        padded = _call(graph, aten.constant_pad_nd.default, part, padding)
        total = padded if total is None else _add(graph, total, padded)
    assert total is not None
    return total


def _choose_order_rewrite(
    node: fx.Node, thresholds: RewriteThresholds
) -> Rewrite | None:
    """Choose an argsort for a stable sort whose values are not read; otherwise None."""
    source, index = node.args
    assert isinstance(source, fx.Node)
    if source.target is not aten.sort.stable or index != 1:
        return None
    is_order_alone = all(u.args[1] == 1 or not u.users for u in source.users)
    return (
        _argsort if thresholds.argsort_by_pytorch and is_order_alone else None
    )


def _argsort(
    graph: fx.Graph, node: fx.Node, thresholds: RewriteThresholds
) -> fx.Node:
    """Replace sort(x)[1] by argsort(x)."""
    (source,) = node.all_input_nodes
    options = source.kwargs
    return _call(
        graph,
        torch.ops.funcppo.stable_argsort.default,
        source.args[0],
        options.get("dim", -1),
        options.get("descending", False),
    )


REWRITES: dict[
    object, Callable[[fx.Node, RewriteThresholds], Rewrite | None]
] = {
    aten.mm.default: _choose_matmul_rewrite,
    aten.bmm.default: _choose_matmul_rewrite,
    aten.tanh.default: _choose_tanh_rewrite,
    aten.cat.default: _choose_cat_rewrite,
    operator.getitem: _choose_order_rewrite,
}


def _factors(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return both factors of a product."""
    a, b = node.args
    assert isinstance(a, fx.Node)
    assert isinstance(b, fx.Node)
    return a, b


def _value(node: Any) -> Tensor:
    """Return the fake tensor of a node's value, with its shape, strides, dtype and device."""
    return node.meta["val"]


def _transpose(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """Exchange the last two axes of x."""
    *batch_axes, rows, columns = range(_value(x).ndim)
    return _permute(graph, x, [*batch_axes, columns, rows])


def _make_contiguous(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """Return x with contiguous rows: x itself, or a copy."""
    value = _value(x)
    if value.stride(-1) == 1:
        return x

    # `as_strided` makes Inductor store the copy; otherwise it would compute the copy again at every use.
    copy = _call(
        graph, aten.clone.default, x, memory_format=torch.contiguous_format
    )
    return _call(
        graph,
        aten.as_strided.default,
        copy,
        list(value.shape),
        list(_value(copy).stride()),
    )


def _reshape(graph: fx.Graph, x: fx.Node, shape: list[int]) -> fx.Node:
    return _call(graph, aten.reshape.default, x, shape)


def _permute(graph: fx.Graph, x: fx.Node, axes: list[int]) -> fx.Node:
    return _call(graph, aten.permute.default, x, axes)


def _unsqueeze(graph: fx.Graph, x: fx.Node, axis: int) -> fx.Node:
    return _call(graph, aten.unsqueeze.default, x, axis)


def _sum(graph: fx.Graph, x: fx.Node, axis: int) -> fx.Node:
    return _call(graph, aten.sum.dim_IntList, x, [axis])


def _mul(graph: fx.Graph, x: fx.Node, y: fx.Node | float) -> fx.Node:
    return _call(graph, aten.mul.Tensor, x, y)


def _add(graph: fx.Graph, x: fx.Node, y: fx.Node | float) -> fx.Node:
    return _call(graph, aten.add.Tensor, x, y)


def _call(graph: fx.Graph, target: Any, *args: Any, **options: Any) -> fx.Node:
    """Add a node to a graph, with the fake value that later rewrites read."""
    node = graph.call_function(target, args, options)
    values = [_value(arg) if isinstance(arg, fx.Node) else arg for arg in args]
    node.meta["val"] = target(*values, **options)
    return node


# ---- Random bits.

# output words from which a kernel of their own costs less than recomputing them
MIN_WORDS_TO_REALIZE = 1024

_Word = Any  # a value in Inductor's virtualized arithmetic
# reads one element of an input, given its index
_Loader = Callable[[Sequence[_Word]], _Word]


@register_lowering(
    torch.ops.funcppo.threefry2x32.default,
    broadcast=True,
    type_promotion_kind=None,
)
def _threefry2x32(*words: TensorBox) -> list[TensorBox]:
    """Lower the operator: compute both output words from two key words and two counter words."""
    loaders = [word.make_loader() for word in words]
    device = words[0].get_device()
    size = words[0].get_size()
    outputs = [_pointwise_output(loaders, i, device, size) for i in range(2)]

    if math.prod(int(n) for n in size) >= MIN_WORDS_TO_REALIZE:
        for output in outputs:
            output.realize()
    return outputs


def _pointwise_output(
    loaders: list[_Loader],
    output_index: int,
    device: torch.device | None,
    size: Sequence[_Word],
) -> TensorBox:
    """Return one output word as a pointwise expression of the four input words."""

    def compute(index: Sequence[_Word]) -> _Word:
        key_and_counter = (load(index) for load in loaders)
        words = random.threefry_rounds(
            *key_and_counter, constant=_constant, rotate_left=_rotate_left
        )
        return words[output_index]

    return Pointwise.create(
        device=device, dtype=torch.int64, inner_fn=compute, ranges=size
    )


def _constant(n: int) -> _Word:
    return ops.constant(n, torch.int64)


def _rotate_left(x: _Word, n_bits: int) -> _Word:
    """Rotate a 32-bit word to the left; the bits above the lowest 32 are left undefined."""
    shifted = ops.bitwise_left_shift(x, _constant(n_bits))
    return shifted | ops.bitwise_right_shift(shifted, _constant(32))
