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

from funcppo import tree
from funcppo.logic import sorting
from funcppo.logic.question_types import LeftOut, Questions, make_label
from funcppo.prover import bellman_ford
from funcppo.prover.bellman_ford import Graph
from funcppo.prover.network_prior import NetworkPrior
from funcppo.types import F64, I64

# the best walks to an entity that are kept after each layer; fewer where all edges together would have too many
MAX_WALKS = 32
MAX_EXTENDED_WALKS = 1 << 22


class KnownPath(NamedTuple):
    """Known facts that lead from the entity of a question to an answer, in this order."""

    importance: float
    facts: tuple[tuple[int, int, int], ...]  # predicate, head, tail


class _Walks(NamedTuple):
    """Walks to entities after a layer, the best ones of each: place p of entity e is row e * W + p."""

    value: F64[Tensor, "C1W"]  # -inf where there is none
    before: I64[Tensor, "C1W"]  # row after the layer before
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
            edge_weight=factor,
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
        edge=torch.full_like(rows, -1),
    )
    layers: list[_Walks] = []
    for of_layer in importance:
        walks = _walk_on(graph, of_layer, walks, width)
        layers.append(walks)

    found: list[tuple[float, list[int]]] = []
    for row in range(answer * width, (answer + 1) * width):
        value = float(walks.value[row])
        if value > -torch.inf:
            found.append((value, _trace(layers, row)))
    return found


def _walk_on(
    graph: Graph, importance: F64[Tensor, "N"], walks: _Walks, width: int
) -> _Walks:
    """The best walks to each entity after one more layer."""
    entity = graph.source_entity[graph.edge_source]
    place = torch.arange(width, device=entity.device)
    waiting = torch.arange(len(walks.value), device=entity.device)
    row = (entity[:, None] * width + place).flatten()
    edge = torch.arange(len(entity), device=entity.device)
    edge = edge.repeat_interleave(width)
    target = graph.edge_target.repeat_interleave(width)

    before = torch.cat([waiting, row])
    edge = torch.cat([torch.full_like(waiting, -1), edge])
    target = torch.cat([waiting // width, target])
    value = walks.value[before]
    # Row -1, of a walk that waits, is the added one.
    value = value + pad(importance, (0, 1))[edge]

    # by entity, the best walk first
    kept = (value > -torch.inf).nonzero().squeeze(1)
    kept = kept[torch.argsort(value[kept], descending=True, stable=True)]
    key, order = sorting.sort_keys(target[kept])
    kept = kept[order]
    rank = torch.arange(len(key), device=key.device)
    rank = rank - torch.searchsorted(key, key)
    is_best = rank < width
    kept, at = kept[is_best], (key * width + rank)[is_best]
    return _Walks(
        value=torch.full_like(walks.value, -torch.inf).scatter(
            0, at, value[kept]
        ),
        before=torch.zeros_like(walks.before).scatter(0, at, before[kept]),
        edge=torch.full_like(walks.edge, -1).scatter(0, at, edge[kept]),
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
