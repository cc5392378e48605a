"""The paths of known facts that a Bellman-Ford network reads an answer from, the most important ones.

The importance of a fact in a layer is the derivative of the answer's logit by a factor of the message along it. That of
a walk is the sum over its facts, each taken in a later layer than the one before; a walk may wait, as states do. A walk
that comes back to an entity is no path and is left out.

Source: Zhu et al. 2021, arXiv:2106.06935, section 4.5 (path interpretations).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad
from torch.nn.functional import pad

from funcppo.core import tree
from funcppo.core.types import F64, I64
from funcppo.kg.logic import row_index
from funcppo.kg.logic.derive import LeftOut, Questions, make_label
from funcppo.kg.scores import bellman_ford
from funcppo.kg.scores.bellman_ford import Graph
from funcppo.kg.scores.network_prior import NetworkPrior

# the best walks to an entity that are kept after each layer; fewer where all edges together would have too many
MAX_WALKS = 16
MAX_EXTENDED_WALKS = 1 << 22


class KnownPath(NamedTuple):
    """Known facts that lead from the entity of a question to an answer, in this order."""

    importance: float
    facts: tuple[tuple[int, int, int], ...]  # predicate, head, tail


class _Walks(NamedTuple):
    """Walks to entities after a layer, the best ones of each: place p of entity e is row e * W + p."""

    value: F64[Tensor, "C1W"]  # -inf where there is none
    before: I64[Tensor, "C1W"]  # row after the layer before
    previous: I64[Tensor, "C1W"]  # entity before the last one; 0 for none
    edge: I64[Tensor, "C1W"]  # the last one; -1 where the walk waited


def best_paths(
    network: NetworkPrior,
    question: Questions,
    left_out: LeftOut,
    answer: int,
    n_paths: int,
) -> list[KnownPath]:
    """The most important paths of an answer, the most important one first.

    Args:
      question: one, which is asked without what it leaves out.
      left_out: what that is.
    """
    asked = bellman_ford.Questions(
        make_label(question.predicate, question.side),
        question.entity,
        question.left_out,
    )
    omitted = bellman_ford.question_edges(
        network.cfg, network.graph, asked, left_out
    )
    graph = bellman_ford.without_edges(network.graph, omitted.edge)
    params = tree.map(lambda x: x.double(), network.params)

    def logit(factor: F64[Tensor, "T N"]) -> F64[Tensor, ""]:
        logits = bellman_ford.apply(
            network.cfg,
            params,
            graph,
            asked.label,
            asked.given,
            sum_messages=bellman_ford.summation(network.cfg, graph, factor),
        )
        return logits[0, answer - 1]

    ones = torch.ones(
        (network.cfg.n_layers, len(graph.edge_target)),
        dtype=torch.float64,
        device=graph.edge_target.device,
    )
    importance = grad(logit)(ones)
    given = int(question.entity)
    paths: dict[tuple[tuple[int, int, int], ...], float] = {}
    for value, edges in _best_walks(
        graph, importance, network.cfg.n_entities, given, answer
    ):
        facts = _path_facts(graph, edges, given)
        if facts is not None and len(paths) < n_paths:
            # Of the same facts in other layers the best comes first.
            paths.setdefault(facts, value)
    return [KnownPath(value, facts) for facts, value in paths.items()]


def _best_walks(
    graph: Graph,
    importance: F64[Tensor, "T N"],
    n_entities: int,
    given: int,
    answer: int,
) -> list[tuple[float, list[int]]]:
    """The most important walks to an answer with their edges, the most important one first."""
    n_edges = max(len(graph.edge_target), 1)
    width = max(1, min(MAX_WALKS, MAX_EXTENDED_WALKS // n_edges))
    n_rows = (n_entities + 1) * width
    rows = torch.arange(n_rows, device=importance.device)
    is_start = rows == given * width
    walks = _Walks(
        value=torch.where(is_start, 0.0, -torch.inf).to(importance.dtype),
        before=rows,
        previous=torch.zeros_like(rows),
        edge=torch.full_like(rows, -1),
    )
    layers: list[_Walks] = []
    for of_layer in importance:
        walks = _walk_on(graph, of_layer, walks, width, (given, answer))
        layers.append(walks)

    found: list[tuple[float, list[int]]] = []
    for row in range(answer * width, (answer + 1) * width):
        value = float(walks.value[row])
        if value > -torch.inf:
            found.append((value, _trace(layers, row)))
    return found


def _walk_on(
    graph: Graph,
    importance: F64[Tensor, "N"],
    walks: _Walks,
    width: int,
    ends: tuple[int, int],
) -> _Walks:
    """The best walks to each entity after one more layer.

    Args:
      ends: the entities that a path begins and ends with, which no walk comes back to or goes on from.
    """
    entity = graph.source_entity[graph.edge_source]
    place = torch.arange(width, device=entity.device)
    waiting = torch.arange(len(walks.value), device=entity.device)
    row = (entity[:, None] * width + place).flatten()
    edge = torch.arange(len(entity), device=entity.device)

    before = torch.cat([waiting, row])
    target = torch.cat(
        [waiting // width, graph.edge_target.repeat_interleave(width)]
    )
    edge = torch.cat(
        [torch.full_like(waiting, -1), edge.repeat_interleave(width)]
    )
    # Row -1, of a walk that waits, is the added one.
    value = walks.value[before] + pad(importance, (0, 1))[edge]

    # Without those that come back to an entity here, the best walks would seldom be paths.
    given, answer = ends
    here, previous = before // width, walks.previous[before]
    comes_back = (target == given) | (target == here) | (target == previous)
    is_walk = (edge < 0) | ~(comes_back | (here == answer))
    longer = _Walks(
        value=torch.where(is_walk, value, -torch.inf),
        before=before,
        previous=torch.where(edge < 0, previous, here),
        edge=edge,
    )
    return _keep_best(longer, target, len(waiting), width)


def _keep_best(
    walks: _Walks, target: I64[Tensor, "n"], n_rows: int, width: int
) -> _Walks:
    """The best walks to each entity, in its rows.

    Args:
      walks: to any entity, in any order.
      target: their last entity.
    """
    kept = (walks.value > -torch.inf).nonzero().squeeze(1)
    order = torch.argsort(walks.value[kept], descending=True, stable=True)
    kept = kept[order]
    key, order = row_index.sort_keys(target[kept])
    kept = kept[order]
    rank = torch.arange(len(key), device=key.device)
    rank = rank - torch.searchsorted(key, key)
    is_best = rank < width
    kept, at = kept[is_best], (key * width + rank)[is_best]

    def fill(column: Tensor, default: float) -> Tensor:
        return column.new_full((n_rows,), default).scatter(0, at, column[kept])

    return _Walks(
        value=fill(walks.value, -torch.inf),
        before=fill(walks.before, 0),
        previous=fill(walks.previous, 0),
        edge=fill(walks.edge, -1),
    )


def _trace(layers: list[_Walks], row: int) -> list[int]:
    """The edges of a walk, first one first."""
    edges: list[int] = []
    for walks in reversed(layers):
        if walks.edge[row] >= 0:
            edges.append(int(walks.edge[row]))
        row = int(walks.before[row])
    return edges[::-1]


def _path_facts(
    graph: Graph, edges: list[int], given: int
) -> tuple[tuple[int, int, int], ...] | None:
    """The facts of a walk; None if it comes back to an entity, or has no fact."""
    facts: list[tuple[int, int, int]] = []
    visited = {given}
    for edge in edges:
        source = int(graph.edge_source[edge])
        label = int(graph.source_label[source])
        here = int(graph.source_entity[source])
        there = int(graph.edge_target[edge])
        if there in visited:
            return None
        visited.add(there)
        # The place that is asked for is that of the target.
        ends = (there, here) if label % 2 == 0 else (here, there)
        facts.append((label // 2, *ends))
    return tuple(facts) or None
