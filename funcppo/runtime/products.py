"""Matrix products in the form that costs least for their shape: a pass over the graph that Inductor compiles.

Libraries are at their best with large square products. A learner of this kind has four others. Small ones (4 x 64 by
64 x 64) cost a launch each and fuse with nothing; written as a sum of products they melt into their neighbours. Long
ones (the gradient of a weight: 64 x 65536 by 65536 x 64) leave most of a GPU idle; cut along the long axis they are a
batch of products and a sum. Thin ones in large batches (4 x 64 by 64 x 64, a thousand times) are `runtime/thin.py`'s.
Narrow ones of a transposed matrix (the gradient of a head) are fast on a CPU when turned: (b^T a^T)^T. The pass sees
shapes as they are, batches of vmap and gradients included.

On a CPU it also writes tanh by one exponential, which is faster than the library's tanh; its error is below 2e-7.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    exponential: bool  # whether tanh is written by its exponential


GPU = Limits(summed=1 << 18, inner=4, narrow=1 << 20, long=4096, piece=256, thin=8, turned=0, exponential=False)
CPU = Limits(summed=1 << 18, inner=4, narrow=1 << 20, long=1 << 62, piece=256, thin=0, turned=4, exponential=True)


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
        return _summed
    if thin.fits(a, b, limits.thin):
        return lambda graph, x, y: _call(graph, torch.ops.funcppo.thin_product.default, x, y)
    return None


def _turned(graph: fx.Graph, a: fx.Node, b: fx.Node, product: Any, limits: Limits) -> fx.Node:
    """(b^T a^T)^T, the product inside in the form that its shape asks for."""
    order = [*range(a.meta["val"].ndim)]
    turn = lambda x: _call(graph, aten.permute.default, x, [*order[:-2], order[-1], order[-2]])
    node = _call(graph, product, turn(b), turn(a))
    if (form := _product(limits, node)) is None:
        return turn(node)
    formed = form(graph, *node.args)
    graph.erase_node(node)
    return turn(formed)


def _summed(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
    """sum_k a[.., m, k, 1] b[.., 1, k, n]"""
    left = _call(graph, aten.unsqueeze.default, a, -1)
    right = _call(graph, aten.unsqueeze.default, b, -3)
    return _call(graph, aten.sum.dim_IntList, _call(graph, aten.mul.Tensor, left, right), [-2])


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


FORMS = {aten.mm.default: _product, aten.bmm.default: _product, aten.tanh.default: _exponential}


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args))
    return node
