"""Which facts a body derives from themselves alone: every path between their arguments walks along the fact.

Let f = h(x, y) be the fact. The paths x -> z -> w -> y of a body l1, l2, l3 are counted elsewhere; those along f are
counted here by the step that takes f:

    step 1 takes f, so z = y                    step 3 takes f, so w = x
    step 2 takes f forwards, so z = x, w = y    step 2 takes f backwards, so z = y, w = x

The path with z = y and w = x can be in three of these cases; it counts once. Where x = y, either direction of f is a
step from x to itself, and the one path that step 2 takes f on is that path again. Shorter bodies are alike. For longer
ones, paths that do not walk along f are looked for, half from x and half from y.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funcppo.core.types import F32, I64, Bool
from funcppo.kg.logic import sorting
from funcppo.kg.logic.joins import expand_ranges
from funcppo.kg.mining import closing, paths
from funcppo.kg.mining.paths import EdgeIndex


def is_circular(
    edges: EdgeIndex,
    fact: I64[Tensor, "n"],
    body_labels: I64[Tensor, "n J"],
    n_paths: F32[Tensor, "n"],
) -> Bool[Tensor, "n"]:
    """Whether each fact is derived by its body from itself alone.

    Args:
      fact: facts whose arguments their bodies join.
      body_labels: labels of the body.
      n_paths: number of paths of the body between the arguments.
    """
    has_own_predicate = (
        body_labels // 2 == edges.predicate[fact][:, None]
    ).any(1)
    row = has_own_predicate.nonzero().squeeze(1)
    count_along = _COUNT_ALONG.get(body_labels.shape[1])
    if count_along is not None:
        n_along = count_along(edges, fact[row], body_labels[row])
        circular = n_along == n_paths[row]
    else:
        circular = ~_has_path_beside(edges, fact[row], body_labels[row])
    none = torch.zeros_like(fact, dtype=torch.bool)
    return none.index_copy(0, row, circular)


def _takes_fact(edges: EdgeIndex, fact: Tensor, label: Tensor) -> Tensor:
    """Whether a step along the label from the fact's first argument to its second is the fact."""
    head = 2 * edges.predicate[fact]
    is_loop = edges.first_argument[fact] == edges.second_argument[fact]
    return (label == head) | (is_loop & (label == head + 1))


def _count_along_1(edges: EdgeIndex, fact: Tensor, labels: Tensor) -> Tensor:
    """Paths of one step along the fact."""
    return _takes_fact(edges, fact, labels[:, 0]).float()


def _count_along_2(edges: EdgeIndex, fact: Tensor, labels: Tensor) -> Tensor:
    """Paths of two steps along the fact."""
    x = edges.first_argument[fact]
    y = edges.second_argument[fact]
    l1, l2 = labels.unbind(1)
    takes_1 = _takes_fact(edges, fact, l1)
    takes_2 = _takes_fact(edges, fact, l2)

    by_step_1 = takes_1 & paths.has_edge(edges, y, l2, y)
    by_step_2 = takes_2 & paths.has_edge(edges, x, l1, x)
    is_both = (x == y) & takes_1 & takes_2
    return by_step_1.float() + by_step_2.float() - is_both.float()


def _count_along_3(edges: EdgeIndex, fact: Tensor, labels: Tensor) -> Tensor:
    """Paths of three steps along the fact."""
    x = edges.first_argument[fact]
    y = edges.second_argument[fact]
    l1, l2, l3 = labels.unbind(1)
    head = 2 * edges.predicate[fact]
    is_loop = x == y
    takes_1 = _takes_fact(edges, fact, l1)
    takes_3 = _takes_fact(edges, fact, l3)
    is_forward = (l2 == head) & ~is_loop
    is_backward = (l2 == head + 1) | (is_loop & (l2 == head))

    by_step_1 = _count_round_trips(edges, y, l2, l3, takes_1)
    by_step_3 = _count_round_trips(edges, x, l1, l2, takes_3)
    by_step_2 = (
        is_forward
        & paths.has_edge(edges, x, l1, x)
        & paths.has_edge(edges, y, l3, y)
    )

    # The path with z = y and w = x counts once if any step takes the fact.
    is_path = (
        paths.has_edge(edges, x, l1, y)
        & paths.has_edge(edges, y, l2, x)
        & paths.has_edge(edges, x, l3, y)
    )
    is_along = takes_1 | takes_3 | is_backward
    n_counted = takes_1.float() + takes_3.float()
    correction = is_path.float() * (is_along.float() - n_counted)
    return by_step_1 + by_step_3 + by_step_2.float() + correction


_COUNT_ALONG = {1: _count_along_1, 2: _count_along_2, 3: _count_along_3}


def _count_round_trips(
    edges: EdgeIndex,
    entity: Tensor,
    there: Tensor,
    back: Tensor,
    is_asked: Tensor,
) -> Tensor:
    """The paths from each entity along the label `there` and then `back` to it; 0 where it is not asked."""
    asked = is_asked.nonzero().squeeze(1)
    n_labels = edges.n_labels
    key = (entity * n_labels + there) * n_labels + back
    distinct, inverse = sorting.unique_inverse(key[asked])
    start = paths.find_keys(edges.starts, distinct // n_labels)
    offsets = edges.starts.offsets
    first = offsets[start.position]
    n_edges = offsets[start.position + 1] - first

    count = torch.zeros_like(distinct, dtype=torch.float32)
    for begin, end in paths.pack(n_edges.double(), paths.CHUNK_ROWS):
        row, edge = expand_ranges(first[begin:end], n_edges[begin:end])
        trip = start.row[begin:end][row]
        home = distinct[trip] // (n_labels * n_labels)
        returns = paths.has_edge(
            edges, edges.target[edge], distinct[trip] % n_labels, home
        )
        count = count + torch.bincount(
            trip, returns.float(), minlength=len(count)
        )
    zeros = torch.zeros_like(entity, dtype=torch.float32)
    return zeros.index_copy(0, asked, count[inverse])


def _has_path_beside(edges: EdgeIndex, fact: Tensor, labels: Tensor) -> Tensor:
    """Whether each body has a path between the arguments of its fact that does not walk along it."""
    length = labels.shape[1]
    middle = length - length // 2
    fact_rows, _ = closing.closing_rows(edges, length)
    found = [torch.zeros_like(fact[:0], dtype=torch.bool)]
    for begin, end in paths.pack(fact_rows[fact], paths.CHUNK_ROWS):
        rows = fact[begin:end]
        x = edges.first_argument[rows]
        y = edges.second_argument[rows]
        to_middle = labels[begin:end, :middle]
        from_middle = labels[begin:end, middle:].flip(1) ^ 1
        forward = _reachable_keys(edges, rows, x, to_middle)
        backward = _reachable_keys(edges, rows, y, from_middle)
        meets = forward[torch.isin(forward, backward)] // edges.n_entity_ids
        none = torch.zeros_like(rows, dtype=torch.bool)
        found.append(none.index_fill(0, meets, True))
    return torch.cat(found)


def _reachable_keys(
    edges: EdgeIndex, fact: Tensor, start: Tensor, labels: Tensor
) -> Tensor:
    """Each row with an entity that its labels lead to, not along its fact: row * n_entity_ids + entity."""
    offsets = edges.starts.offsets
    row = torch.arange(len(fact), device=fact.device)
    entity = start
    key = row * edges.n_entity_ids + entity
    for label in labels.unbind(1):
        found = paths.find_keys(
            edges.starts, entity * edges.n_labels + label[row]
        )
        first = offsets[found.position]
        at, edge = expand_ranges(first, offsets[found.position + 1] - first)
        row = row[found.row[at]]
        is_other = edges.fact[edge] != fact[row]
        target = edges.target[edge[is_other]]
        key = sorting.unique_values(row[is_other] * edges.n_entity_ids + target)
        row = key // edges.n_entity_ids
        entity = key % edges.n_entity_ids
    return key
