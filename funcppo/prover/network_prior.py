"""A prior of candidates by Bellman-Ford networks over the known facts.

A network (`bellman_ford`) gives every entity a logit as the answer to a question, from the paths of known facts that
lead to it from the question's entity. The prior of a candidate is its logit above the mean of all entities. What a
question leaves out is left out of its graph, and of no other question's.

There may be several networks: the facts are divided into folds (`link_embedding.fold_of`), and network m has not
learnt to answer the questions about those of fold m; the last network has learnt from all.

A prior is computed in float64 and rounded to `PRIOR_UNIT`, so that the questions that are asked beside it do not
change it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from funcppo import tree
from funcppo.logic import row_index
from funcppo.logic.joins import expand_ranges
from funcppo.logic.question_types import LeftOut, Questions, make_label
from funcppo.prover import bellman_ford, link_embedding
from funcppo.prover.bellman_ford import (
    Graph,
    NetworkConfig,
    OmittedEdges,
    Params,
)
from funcppo.prover.question_config import BellmanFordConfig
from funcppo.types import F64, I64, Bool

# what priors are multiples of
PRIOR_UNIT = 2.0**-16
# for what the questions that are answered at once hold: what the caches of a CPU keep, and a part of a GPU's memory
MAX_BYTES_AT_ONCE = 1 << 24
GPU_BYTES_AT_ONCE = 1 << 29
# numbers that a layer holds of each source and of each entity, for each number of a state
SOURCE_NUMBERS = 3
ENTITY_NUMBERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkPrior:
    """Trained networks and the facts that they read."""

    cfg: NetworkConfig
    """Sizes of each network."""
    params: Params
    """Weights of all networks, networks first."""
    graph: Graph
    """The known facts."""


def network_config(
    cfg: BellmanFordConfig, n_entities: int, n_labels: int
) -> NetworkConfig:
    """The sizes that settings give a network."""
    return NetworkConfig(
        n_entities=n_entities,
        n_labels=n_labels,
        width=cfg.width,
        n_layers=cfg.n_layers,
    )


def n_trained(cfg: BellmanFordConfig) -> int:
    """The number of networks that settings ask for."""
    return cfg.n_folds + 1 if cfg.n_folds > 1 else 1


def n_networks(params: Params) -> int:
    """The number of networks, 0 where there are none."""
    return len(params.asked)


def without_networks(device: torch.device | str) -> Params:
    """No weights."""
    cfg = NetworkConfig(n_entities=1, n_labels=1, width=1, n_layers=1)
    one = bellman_ford.init(cfg, torch.zeros(2, dtype=torch.int64))
    return tree.map(lambda x: x[None][:0].to(device), one)


def make_prior(
    params: Params, facts: I64[Tensor, "N W"], n_entities: int
) -> NetworkPrior:
    """The prior by some networks.

    Args:
      params: of one network at least.
      facts: known ones, of two arguments.
    """
    _, n_labels, width = params.asked.shape
    cfg = NetworkConfig(
        n_entities=n_entities,
        n_labels=n_labels,
        width=width,
        n_layers=params.weight.shape[1],
        asks=params.weight_by_asked.shape[2] > 0,
        messages="float64",
    )
    return NetworkPrior(
        cfg=cfg,
        params=params,
        graph=bellman_ford.build_graph(cfg, facts, "fact"),
    )


def network_of(
    params: Params, questions: Questions, left_out: LeftOut
) -> I64[Tensor, "Q"]:
    """The network that has not learnt what each question leaves out; the last one where nothing is left out."""
    last = n_networks(params) - 1
    if not last:
        return torch.zeros_like(questions.entity)
    fold = link_embedding.fold_of(questions, last, left_out)
    return torch.where(questions.left_out > 0, fold, last)


def prior(
    network: NetworkPrior,
    questions: Questions,
    left_out: LeftOut,
    offsets: I64[Tensor, "Q1"],
    entity: I64[Tensor, "L"],
    is_asked: Bool[Tensor, "Q"] | None = None,
) -> F64[Tensor, "L"]:
    """The prior of each candidate.

    Args:
      left_out: what a question leaves out.
      offsets: of the candidates of each question.
      entity: the candidates.
      is_asked: the questions whose candidates have a prior, that of others is 0; None for all.
    """
    graph = network.graph
    asked = bellman_ford.Questions(
        make_label(questions.predicate, questions.side),
        questions.entity,
        questions.left_out,
    )
    omitted = bellman_ford.question_edges(network.cfg, graph, asked, left_out)
    omitted_offsets = row_index.offsets(
        torch.bincount(omitted.row, minlength=len(asked.label))
    )
    counts = offsets.diff()
    has_prior = counts > 0
    if is_asked is not None:
        has_prior = has_prior & is_asked
    used = network_of(network.params, questions, left_out)

    places, values = [entity[:0]], [torch.zeros_like(entity[:0]).double()]
    for i, rows in _iter_rows(network, used, has_prior):
        edges, count = omitted_offsets[rows], omitted_offsets.diff()[rows]
        row, position = expand_ranges(edges, count)
        logits = _answer_logits(
            network, i, asked, rows, OmittedEdges(row, omitted.edge[position])
        )
        row, place = expand_ranges(offsets[rows], counts[rows])
        places.append(place)
        values.append(logits[row, entity[place] - 1])
    zero = torch.zeros(len(entity), dtype=torch.float64, device=entity.device)
    return zero.index_put((torch.cat(places),), torch.cat(values))


def _iter_rows(
    network: NetworkPrior,
    used: I64[Tensor, "Q"],
    has_prior: Bool[Tensor, "Q"],
) -> Iterator[tuple[int, I64[Tensor, "n"]]]:
    """Yield questions that the same network answers, as many at once as the bound on memory allows."""
    size = n_at_once(network.cfg, network.graph)
    for i in range(n_networks(network.params)):
        rows = (has_prior & (used == i)).nonzero().squeeze(1)
        if len(rows):
            yield from ((i, part) for part in rows.split(size))


def _answer_logits(
    network: NetworkPrior,
    i: int,
    asked: bellman_ford.Questions,
    rows: I64[Tensor, "n"],
    omitted: OmittedEdges,
) -> F64[Tensor, "n E"]:
    """The logits of all entities above their mean, rounded, as answers to some questions by a network."""
    params = tree.map(lambda x: x[i].double(), network.params)
    with torch.no_grad():
        logits = bellman_ford.apply(
            network.cfg,
            params,
            network.graph,
            asked.label[rows],
            asked.given[rows],
            omitted,
        )
    above = logits - logits.mean(1, keepdim=True)
    return (above / PRIOR_UNIT).round() * PRIOR_UNIT


def n_at_once(cfg: NetworkConfig, graph: Graph) -> int:
    """How many questions are answered at once, at least one."""
    numbers = SOURCE_NUMBERS * len(graph.source)
    numbers += ENTITY_NUMBERS * cfg.n_entities
    n_bytes = cfg.width * numbers * torch.float64.itemsize
    most = GPU_BYTES_AT_ONCE if graph.source.is_cuda else MAX_BYTES_AT_ONCE
    return max(1, most // n_bytes)
