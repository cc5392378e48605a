"""Matrix products in the form that costs least for their shape: a pass over the graph that Inductor compiles.

Libraries are at their best with large square products. A learner of this kind has four others. Small ones (4 x 64 by
64 x 64) cost a launch each and fuse with nothing; written as a sum of products they melt into their neighbours. Long
ones (the gradient of a weight: 64 x 65536 by 65536 x 64) leave most of a GPU idle; cut along the long axis they are a
batch of products and a sum. Thin ones in large batches (4 x 64 by 64 x 64, a thousand times) are `runtime/inductor/batched_gemm.py`'s.
Narrow ones of a transposed matrix (the gradient of a head) are fast on a CPU when turned: (b^T a^T)^T. The pass sees
shapes as they are, batches of vmap and gradients included.

A CPU sums fast along contiguous numbers alone, so there a factor that does not lie so is copied first. For a CPU the
pass also writes tanh by one exponential, which is faster than the library's tanh and whose error is below 2e-7, and a
small stack as a sum of its parts, each filled up with zeros: otherwise every part is a view, made anew at every step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from funcppo.runtime.inductor import batched_gemm

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, slots=True)
class RewriteThresholds:
    """Where one form gives way to another; measured on one H200 and on a 2-core CPU."""

    mul_sum_max_macs: int  # multiplications up to which a product is written as a sum
    mul_sum_max_k: int  # so is one with so short an inner axis: it needs no reduction
    narrow_mul_sum_max_macs: int  # multiplications up to which one with at most four columns is
    split_k_min_k: int  # inner axis from which a product is cut
    split_k_chunk_size: int  # inner length of the pieces
    skinny_max_m: int  # rows up to which one of a large batch is thin
    transpose_max_n: int  # columns up to which a product of a transposed matrix is turned
    rowwise_max_n: int  # columns up to which a sum is along rows of both factors
    cat_as_sum_max_elements: int  # elements up to which a stack is written as a sum
    tanh_from_exp: bool  # whether tanh is written by its exponential


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
)
CPU_THRESHOLDS = replace(
    GPU_THRESHOLDS,
    split_k_min_k=1 << 62,
    skinny_max_m=0,
    transpose_max_n=4,
    rowwise_max_n=4,
    cat_as_sum_max_elements=64,
    tanh_from_exp=True,
)


class MatmulPass(CustomGraphPass):
    """The pass. Inductor caches what it compiles under this file's hash and the limits."""

    def __init__(self, gpu: RewriteThresholds = GPU_THRESHOLDS, cpu: RewriteThresholds = CPU_THRESHOLDS) -> None:
        self.limits = {"cuda": gpu, "cpu": cpu}

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite each node that has a better form."""
        for node in list(graph.nodes):
            if node.target in REWRITES and (limits := self.limits.get(node.meta["val"].device.type)):
                form = REWRITES[node.target](limits, node)
                if form is not None:
                    with graph.inserting_before(node):
                        node.replace_all_uses_with(form(graph, *node.args))
                    graph.erase_node(node)

    def uuid(self) -> Any:
        """What the cache knows the pass by."""
        return get_hash_for_files((__file__, batched_gemm.__file__), repr(self.limits))


def _product(limits: RewriteThresholds, node: Any) -> Any:
    a, b = (arg.meta["val"] for arg in node.args)
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if n <= limits.transpose_max_n < m and a.stride(-2) < a.stride(-1):
        return lambda graph, x, y: _turned(graph, x, y, node.target, limits)
    if k >= limits.split_k_min_k and k % limits.split_k_chunk_size == 0:
        return lambda graph, x, y: _cut(graph, x, y, limits.split_k_chunk_size)
    if k <= limits.mul_sum_max_k or a.shape[:-2].numel() * m * k * n <= (
        limits.narrow_mul_sum_max_macs if n <= 4 else limits.mul_sum_max_macs
    ):
        return partial(_along if n <= limits.rowwise_max_n and a.stride(-1) == 1 else _summed, limits)
    if batched_gemm.supports_skinny_bmm(a, b, limits.skinny_max_m):
        return lambda graph, x, y: _call(graph, torch.ops.funcppo.thin_product.default, x, y)
    return None


def _turned(graph: fx.Graph, a: fx.Node, b: fx.Node, product: Any, limits: RewriteThresholds) -> fx.Node:
    """(b^T a^T)^T, the product inside in the form that its shape asks for."""
    node = _call(graph, product, _transposed(graph, b), _transposed(graph, a))
    if (form := _product(limits, node)) is None:
        return _transposed(graph, node)
    formed = form(graph, *node.args)
    graph.erase_node(node)
    return _transposed(graph, formed)


def _summed(limits: RewriteThresholds, graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
    """sum_k a[.., m, k, 1] b[.., 1, k, n]"""
    left = _call(graph, aten.unsqueeze.default, a, -1)
    right = _call(graph, aten.unsqueeze.default, _contiguous(graph, b) if limits.rowwise_max_n else b, -3)
    return _call(graph, aten.sum.dim_IntList, _call(graph, aten.mul.Tensor, left, right), [-2])


def _along(limits: RewriteThresholds, graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
    """sum_k a[.., m, 1, k] b^T[.., 1, n, k]"""
    left = _call(graph, aten.unsqueeze.default, a, -2)
    right = _call(graph, aten.unsqueeze.default, _contiguous(graph, _transposed(graph, b)), -3)
    return _call(graph, aten.sum.dim_IntList, _call(graph, aten.mul.Tensor, left, right), [-1])


def _transposed(graph: fx.Graph, x: fx.Node) -> fx.Node:
    order = [*range(x.meta["val"].ndim)]
    return _call(graph, aten.permute.default, x, [*order[:-2], order[-1], order[-2]])


def _contiguous(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """x with contiguous rows: itself, or a copy, which Inductor computes anew at every use but for `as_strided`."""
    val = x.meta["val"]
    if val.stride(-1) == 1:
        return x
    copy = _call(graph, aten.clone.default, x, memory_format=torch.contiguous_format)
    return _call(graph, aten.as_strided.default, copy, list(val.shape), list(copy.meta["val"].stride()))


def _cut(graph: fx.Graph, a: fx.Node, b: fx.Node, piece: int) -> fx.Node:
    """sum_c a[.., m, c k'] b[.., c k', n] over pieces c, as one batch of products."""
    *batch, m, k = a.meta["val"].shape
    n, pieces = b.meta["val"].shape[-1], k // piece
    order = [*range(len(batch)), len(batch) + 1, len(batch), len(batch) + 2]
    left = _call(graph, aten.reshape.default, a, [*batch, m, pieces, piece])
    left = _call(graph, aten.reshape.default, _call(graph, aten.permute.default, left, order), [-1, m, piece])
    right = _call(graph, aten.reshape.default, b, [-1, piece, n])
    product = _call(graph, aten.bmm.default, left, right)
    return _call(graph, aten.sum.dim_IntList, _call(graph, aten.reshape.default, product, [*batch, pieces, m, n]), [-3])


def _exponential(limits: RewriteThresholds, node: Any) -> Any:
    return _tanh if limits.tanh_from_exp else None


def _tanh(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """1 - 2 / (exp(2 x) + 1)"""
    above = _call(graph, aten.add.Tensor, _call(graph, aten.exp.default, _call(graph, aten.mul.Tensor, x, 2.0)), 1.0)
    part = _call(graph, aten.mul.Tensor, _call(graph, aten.reciprocal.default, above), -2.0)
    return _call(graph, aten.add.Tensor, part, 1.0)


def _stack(limits: RewriteThresholds, node: Any) -> Any:
    val, parts = node.meta["val"], node.args[0]
    dim = (node.args[1] if len(node.args) > 1 else 0) % val.ndim
    if val.numel() > limits.cat_as_sum_max_elements or any(part.meta["val"].shape[dim] != 1 for part in parts):
        return None
    return lambda graph, *_: _padded(graph, parts, 2 * (val.ndim - 1 - dim))


def _padded(graph: fx.Graph, parts: Any, inner: int) -> fx.Node:
    """sum_i part_i between i and n - 1 - i zeros; a -0.0 comes out as 0.0."""
    last = len(parts) - 1
    filled = (_call(graph, aten.constant_pad_nd.default, x, [0] * inner + [i, last - i]) for i, x in enumerate(parts))
    return reduce(partial(_call, graph, aten.add.Tensor), filled)


REWRITES = {
    aten.mm.default: _product,
    aten.bmm.default: _product,
    aten.tanh.default: _exponential,
    aten.cat.default: _stack,
}


def _call(graph: fx.Graph, target: Any, *args: Any, **options: Any) -> fx.Node:
    node = graph.call_function(target, args, options)
    node.meta["val"] = target(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args), **options)
    return node
