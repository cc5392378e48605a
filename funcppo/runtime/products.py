"""Matrix products in the form that costs least for their shape: a pass over the graph that Inductor compiles.

Libraries are at their best with large square products. A learner of this kind has four others. Small ones (4 x 64 by
64 x 64) cost a launch each and fuse with nothing; written as a sum of products they melt into their neighbours. Long
ones (the gradient of a weight: 64 x 65536 by 65536 x 64) leave most of a GPU idle; cut along the long axis they are a
batch of products and a sum. Thin ones in large batches (4 x 64 by 64 x 64, a thousand times) are `runtime/thin.py`'s.
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

from funcppo.runtime import thin

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Where one form gives way to another; measured on one H200 and on a 2-core CPU."""

    summed: int  # multiplications up to which a product is written as a sum
    inner: int  # so is one with so short an inner axis: it needs no reduction
    narrow: int  # multiplications up to which one with at most four columns is
    long: int  # inner axis from which a product is cut
    piece: int  # inner length of the pieces
    thin: int  # rows up to which one of a large batch is thin
    turned: int  # columns up to which a product of a transposed matrix is turned
    along: int  # columns up to which a sum is along rows of both factors
    stacked: int  # elements up to which a stack is written as a sum
    exponential: bool  # whether tanh is written by its exponential


GPU = Limits(
    summed=1 << 18,
    inner=4,
    narrow=1 << 20,
    long=4096,
    piece=256,
    thin=8,
    turned=0,
    along=0,
    stacked=0,
    exponential=False,
)
CPU = replace(GPU, long=1 << 62, thin=0, turned=4, along=4, stacked=64, exponential=True)


class Products(CustomGraphPass):
    """The pass. Inductor caches what it compiles under this file's hash and the limits."""

    def __init__(self, gpu: Limits = GPU, cpu: Limits = CPU) -> None:
        self.limits = {"cuda": gpu, "cpu": cpu}

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite each node that has a better form."""
        for node in list(graph.nodes):
            if node.target in FORMS and (limits := self.limits.get(node.meta["val"].device.type)):
                form = FORMS[node.target](limits, node)
                if form is not None:
                    with graph.inserting_before(node):
                        node.replace_all_uses_with(form(graph, *node.args))
                    graph.erase_node(node)

    def uuid(self) -> Any:
        """What the cache knows the pass by."""
        return get_hash_for_files((__file__, thin.__file__), repr(self.limits))


def _product(limits: Limits, node: Any) -> Any:
    a, b = (arg.meta["val"] for arg in node.args)
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if n <= limits.turned < m and a.stride(-2) < a.stride(-1):
        return lambda graph, x, y: _turned(graph, x, y, node.target, limits)
    if k >= limits.long and k % limits.piece == 0:
        return lambda graph, x, y: _cut(graph, x, y, limits.piece)
    if k <= limits.inner or a.shape[:-2].numel() * m * k * n <= (limits.narrow if n <= 4 else limits.summed):
        return partial(_along if n <= limits.along and a.stride(-1) == 1 else _summed, limits)
    if thin.fits(a, b, limits.thin):
        return lambda graph, x, y: _call(graph, torch.ops.funcppo.thin_product.default, x, y)
    return None


def _turned(graph: fx.Graph, a: fx.Node, b: fx.Node, product: Any, limits: Limits) -> fx.Node:
    """(b^T a^T)^T, the product inside in the form that its shape asks for."""
    node = _call(graph, product, _transposed(graph, b), _transposed(graph, a))
    if (form := _product(limits, node)) is None:
        return _transposed(graph, node)
    formed = form(graph, *node.args)
    graph.erase_node(node)
    return _transposed(graph, formed)


def _summed(limits: Limits, graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
    """sum_k a[.., m, k, 1] b[.., 1, k, n]"""
    left = _call(graph, aten.unsqueeze.default, a, -1)
    right = _call(graph, aten.unsqueeze.default, _contiguous(graph, b) if limits.along else b, -3)
    return _call(graph, aten.sum.dim_IntList, _call(graph, aten.mul.Tensor, left, right), [-2])


def _along(limits: Limits, graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
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


def _exponential(limits: Limits, node: Any) -> Any:
    return _tanh if limits.exponential else None


def _tanh(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """1 - 2 / (exp(2 x) + 1)"""
    above = _call(graph, aten.add.Tensor, _call(graph, aten.exp.default, _call(graph, aten.mul.Tensor, x, 2.0)), 1.0)
    part = _call(graph, aten.mul.Tensor, _call(graph, aten.reciprocal.default, above), -2.0)
    return _call(graph, aten.add.Tensor, part, 1.0)


def _stack(limits: Limits, node: Any) -> Any:
    val, parts = node.meta["val"], node.args[0]
    dim = (node.args[1] if len(node.args) > 1 else 0) % val.ndim
    if val.numel() > limits.stacked or any(part.meta["val"].shape[dim] != 1 for part in parts):
        return None
    return lambda graph, *_: _padded(graph, parts, 2 * (val.ndim - 1 - dim))


def _padded(graph: fx.Graph, parts: Any, inner: int) -> fx.Node:
    """sum_i part_i between i and n - 1 - i zeros; a -0.0 comes out as 0.0."""
    last = len(parts) - 1
    filled = (_call(graph, aten.constant_pad_nd.default, x, [0] * inner + [i, last - i]) for i, x in enumerate(parts))
    return reduce(partial(_call, graph, aten.add.Tensor), filled)


FORMS = {
    aten.mm.default: _product,
    aten.bmm.default: _product,
    aten.tanh.default: _exponential,
    aten.cat.default: _stack,
}


def _call(graph: fx.Graph, target: Any, *args: Any, **options: Any) -> fx.Node:
    node = graph.call_function(target, args, options)
    node.meta["val"] = target(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args), **options)
    return node
