"""A prior of candidates by a Bellman-Ford network over the known facts.

The network (`bellman_ford`) gives every entity a logit as the answer to a question, from the paths of known facts that
lead to it from the question's entity. The prior of a candidate is its logit above the mean of all entities. What a
question leaves out is left out of its graph, and of no other question's.

A prior is computed in float64 and rounded to `PRIOR_UNIT`, so that the questions that are asked beside it do not
change it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from funcppo.core import tree
from funcppo.core.types import F64, I64, Bool
from funcppo.kg.logic import row_index
from funcppo.kg.logic.derive import LeftOut, Questions, make_label
from funcppo.kg.logic.joins import expand_ranges
from funcppo.kg.scores import bellman_ford
from funcppo.kg.scores.bellman_ford import (
    Graph,
    NetworkConfig,
    OmittedEdges,
    Params,
    Summation,
)
from funcppo.kg.scores.question_config import BellmanFordConfig

# what priors are multiples of
PRIOR_UNIT = 2.0**-16
# for what the questions that are answered at once hold: what the caches of a CPU keep, and a part of a GPU's memory
MAX_BYTES_AT_ONCE = 1 << 24
GPU_BYTES_AT_ONCE = 1 << 31
# numbers that a layer holds of each source and of each entity, for each number of a state
SOURCE_NUMBERS = 3
ENTITY_NUMBERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkPrior:
    """A trained network and the facts that it reads."""

    cfg: NetworkConfig
    """Sizes of the network."""
    params: Params
    """Its weights."""
    graph: Graph
    """The known facts."""
    sum_messages: Summation
    """How the messages along these are added up."""


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


def without_network(device: torch.device | str) -> Params:
    """No weights."""
    cfg = NetworkConfig(n_entities=1, n_labels=1, width=1, n_layers=1)
    params = bellman_ford.init(cfg, torch.zeros(2, dtype=torch.int64))
    return tree.map(lambda x: torch.zeros([0] * x.dim(), device=device), params)


def is_network(params: Params) -> bool:
    """Whether there are weights."""
    return params.asked.numel() > 0


def make_prior(
    params: Params, facts: I64[Tensor, "N W"], n_entities: int
) -> NetworkPrior:
    """The prior by a network.

    Args:
      params: its weights.
      facts: known ones, of two arguments.
    """
    n_labels, width = params.asked.shape
    cfg = NetworkConfig(
        n_entities=n_entities,
        n_labels=n_labels,
        width=width,
        n_layers=len(params.weight),
        asks=params.weight_by_asked.shape[1] > 0,
        messages="float64",
    )
    graph = bellman_ford.build_graph(cfg, facts, "fact")
    return NetworkPrior(
        cfg=cfg,
        params=params,
        graph=graph,
        sum_messages=bellman_ford.summation(cfg, graph),
    )


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
    # `split` would give one empty part.
    asked_rows = has_prior.nonzero().squeeze(1)
    size = n_at_once(network.cfg, graph)
    parts = asked_rows.split(size) if len(asked_rows) else ()

    places, values = [entity[:0]], [torch.zeros_like(entity[:0]).double()]
    for rows in parts:
        edges, count = omitted_offsets[rows], omitted_offsets.diff()[rows]
        row, position = expand_ranges(edges, count)
        logits = _answer_logits(
            network,
            asked,
            rows,
            OmittedEdges(row, omitted.edge[position]),
        )
        row, place = expand_ranges(offsets[rows], counts[rows])
        places.append(place)
        values.append(logits[row, entity[place] - 1])
    zero = torch.zeros(len(entity), dtype=torch.float64, device=entity.device)
    return zero.index_put((torch.cat(places),), torch.cat(values))


def _answer_logits(
    network: NetworkPrior,
    asked: bellman_ford.Questions,
    rows: I64[Tensor, "n"],
    omitted: OmittedEdges,
) -> F64[Tensor, "n E"]:
    """The logits of all entities above their mean, rounded, as answers to some questions."""
    params = tree.map(lambda x: x.double(), network.params)
    with torch.no_grad():
        logits = bellman_ford.apply(
            network.cfg,
            params,
            network.graph,
            asked.label[rows],
            asked.given[rows],
            omitted,
            network.sum_messages,
        )
    above = logits - logits.mean(1, keepdim=True)
    return (above / PRIOR_UNIT).round() * PRIOR_UNIT


def n_at_once(cfg: NetworkConfig, graph: Graph) -> int:
    """How many questions are answered at once, at least one."""
    numbers = ENTITY_NUMBERS * cfg.n_entities
    if not bellman_ford.has_kernel(graph):
        numbers += SOURCE_NUMBERS * len(graph.source)
    n_bytes = cfg.width * numbers * torch.float64.itemsize
    most = GPU_BYTES_AT_ONCE if graph.source.is_cuda else MAX_BYTES_AT_ONCE
    return max(1, most // n_bytes)
