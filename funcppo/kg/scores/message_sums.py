"""Sums of messages along the edges of a graph on a GPU, and their gradients.

A message is the product of two rows, number by number: of the state of the edge's source and of the weight of the
edge's label. The sum of messages to each target, and both of its gradients, are one operation with three roles of rows:

    sums[target]     = sum of states[source] * weights[label] over the edges to the target
    d states[source] = sum of d sums[target] * weights[label] over the edges of the source
    d weights[label] = sum of states[source] * d sums[target] over the edges of the label

No row is kept for an edge. Terms are added in a fixed order: in parts of at most `PART` of the edges of a group, then
the sums of a group's parts likewise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcppo.core.types import F32, I64, Bool
from funcppo.kg.logic import row_index
from funcppo.kg.logic.joins import expand_ranges

# terms that are added one after the other
PART = 128
# columns of a program, and the warps that have them
MAX_COLUMNS = 256
N_WARPS = 2


class SumOrder(NamedTuple):
    """The products that each row of a sum has."""

    left_row: I64[Tensor, "N"]
    right_row: I64[Tensor, "N"]
    edge: I64[Tensor, "N"]
    offsets: list[I64[Tensor, "P1"]]
    """Of the parts that are added together: of products first, then of the sums before. The last has a part for each
    row of the sum."""


class MessageOrders(NamedTuple):
    """The orders of the sums of messages and of their gradients."""

    of_targets: SumOrder
    of_sources: SumOrder
    of_labels: SumOrder


@dataclass(frozen=True, slots=True)
class _Edges:
    """What is no input of a gradient, and no tree for its transform to look into."""

    orders: MessageOrders
    is_kept: Bool[Tensor, "N"] | None

    def sum_products(
        self,
        order: SumOrder,
        left: F32[Tensor, "L C"],
        right: F32[Tensor, "R C"],
    ) -> F32[Tensor, "P C"]:
        """The sum of the products of each group."""
        rows = (*order[:3], self.is_kept)
        first, *others = order.offsets
        total = _sum_parts(first, *rows, left, right)
        for offsets in others:
            total = _sum_parts(offsets, *rows, total, None)
        return total


def order_messages(
    source: I64[Tensor, "N"],
    label: I64[Tensor, "N"],
    target: I64[Tensor, "N"],
    n_entities: int,
    n_labels: int,
) -> MessageOrders:
    """The orders of the edges of a graph.

    Args:
      source: entity of each edge, from 0.
      target: entity of each edge, from 0.
    """
    return MessageOrders(
        _order(target, n_entities, source, label),
        _order(source, n_entities, target, label),
        _order(label, n_labels, source, target),
    )


def _order(
    group: I64[Tensor, "N"],
    n_groups: int,
    left_row: I64[Tensor, "N"],
    right_row: I64[Tensor, "N"],
) -> SumOrder:
    order = torch.argsort(group, stable=True)
    counts = torch.bincount(group, minlength=n_groups)
    offsets: list[Tensor] = []
    while not offsets or int(counts.max()) > 1:
        start = row_index.offsets(counts)
        counts = ((counts + PART - 1) // PART).clamp_min(1)
        group, place = expand_ranges(torch.zeros_like(counts), counts)
        part = start[group] + place * PART
        offsets.append(torch.cat([part, start[-1:]]))
    return SumOrder(left_row[order], right_row[order], order, offsets)


def sum_messages(
    states: F32[Tensor, "E C"],
    weights: F32[Tensor, "B C"],
    orders: MessageOrders,
    is_kept: Bool[Tensor, "N"] | None = None,
) -> F32[Tensor, "E C"]:
    """The sum of the messages to each entity, of a type that is wide enough: float64 for float64, float32 otherwise.

    Args:
      states: of the entities; all on a GPU.
      weights: of the labels.
      is_kept: the edges that there are messages along; None for all.
    """
    return _MessageSums.apply(states, weights, _Edges(orders, is_kept))


class _MessageSums(torch.autograd.Function):
    """`sum_messages` with its gradients."""

    @staticmethod
    def forward(states: Tensor, weights: Tensor, edges: _Edges) -> Tensor:
        return edges.sum_products(edges.orders.of_targets, states, weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        states, weights, ctx.edges = inputs
        ctx.save_for_backward(states, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        states, weights = ctx.saved_tensors
        gradient = gradients[0].to(states.dtype)
        edges, orders = ctx.edges, ctx.edges.orders
        of_states = edges.sum_products(orders.of_sources, gradient, weights)
        of_weights = edges.sum_products(orders.of_labels, states, gradient)
        return of_states.to(states.dtype), of_weights.to(weights.dtype), None


def _sum_parts_on_gpu(
    offsets: I64[Tensor, "P1"],
    left_row: I64[Tensor, "N"],
    right_row: I64[Tensor, "N"],
    edge: I64[Tensor, "N"],
    is_kept: Bool[Tensor, "N"] | None,
    left: F32[Tensor, "L C"],
    right: F32[Tensor, "R C"] | None,
) -> F32[Tensor, "P C"]:
    """The sum of each part: of products, or of consecutive rows where there is no right."""
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    from funcppo.kg.scores.message_kernel import sum_products_kernel

    is_double = left.dtype == torch.float64
    n_parts, width = len(offsets) - 1, left.shape[1]
    dtype = torch.float64 if is_double else torch.float32
    out = torch.empty((n_parts, width), dtype=dtype, device=left.device)
    columns = min(MAX_COLUMNS, 1 << (width - 1).bit_length())
    left = left.contiguous()
    sum_products_kernel[(n_parts, -(-width // columns))](
        offsets,
        left_row,
        right_row,
        edge,
        edge if is_kept is None else is_kept,
        left,
        left if right is None else right.contiguous(),
        out,
        width,
        columns=columns,
        has_right=right is not None,
        has_mask=is_kept is not None,
        dtype=tl.float64 if is_double else tl.float32,
        num_warps=N_WARPS,
    )
    return out


# An operator, because tensors of a gradient's gradient have no memory that a kernel could read. It is declared by hand
# because `torch.library.custom_op` imports Dynamo.
_LIBRARY = torch.library.Library("funcppo", "FRAGMENT")
_LIBRARY.define(
    "sum_parts(Tensor offsets, Tensor left_row, Tensor right_row, Tensor edge, Tensor? is_kept, Tensor left, "
    "Tensor? right) -> Tensor"
)
_LIBRARY.impl("sum_parts", _sum_parts_on_gpu, "CUDA")
_sum_parts: Any = torch.ops.funcppo.sum_parts.default
