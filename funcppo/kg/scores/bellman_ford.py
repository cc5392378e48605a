"""A generalised Bellman-Ford network over known facts, as pure functions.

A question has a label (a relation and the side that is asked for, see `derive.make_label`) and an entity that
is given. Every entity has a state for the question; after T layers it has heard of all paths of up to T facts from the
given entity:

    state_0[v] = asked[label] where v is given, and 0 elsewhere
    total_t[v] = state_0[v] + sum over facts u -> v of state_(t-1)[u] * weight_t[label of the fact, label]
    state_t[v] = state_(t-1)[v] + relu(norm_t([state_(t-1)[v], total_t[v]] linear_t + bias_t))
    logit[v] = relu([state_T[v], asked[label]] hidden + hidden_bias) output

No weight belongs to an entity. A fact is an edge in both directions, each of which is a question that the fact
answers; it is learnt from a graph without the fact.

`train_step` learns from the edges of a batch, which all of its questions are asked without. `apply` may leave other
edges out of each question, see `question_edges`.

Source: Zhu et al. 2021, arXiv:2106.06935, with DistMult messages that are summed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.nn.functional import embedding, embedding_bag, layer_norm, pad

from funcppo import optim
from funcppo.config import AdamConfig
from funcppo.core import random, tree
from funcppo.core.settings import Size, UnitInterval, check_fields
from funcppo.core.types import F32, I64, Bool
from funcppo.kg.logic.derive import LeftOut, make_label
from funcppo.kg.logic.joins import expand_ranges
from funcppo.kg.logic.row_index import sort_keys, unique_inverse
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.scores import message_sums
from funcppo.kg.scores.message_sums import MessageOrders

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
# numbers of the size of a state that a layer keeps for its gradient
STATES_KEPT = 8
# the sum of the messages to each entity, by layer, states [E, n, D] and weights [B, m, D]
Summation = Callable[[int, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkConfig:
    """Sizes of a network."""

    n_entities: Size
    """Number of entities; their ids are 1 to this number."""
    n_labels: Size
    """Number of labels, those of the unused predicate 0 included."""
    width: Size = 32
    """Numbers of a state."""
    n_layers: Size = 5
    """Number of facts of the longest path."""
    asks: bool = True
    """Let the weight of a fact depend on the label of the question too."""
    messages: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the messages that are summed."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class Params(NamedTuple):
    """The weights; those of layers have the layers first."""

    asked: F32[Tensor, "B D"]
    weight: F32[Tensor, "T B D"]
    # of asked[label], what it adds to `weight`; without rows where it adds nothing
    weight_by_asked: F32[Tensor, "T D BD"]
    linear: F32[Tensor, "T 2D D"]
    bias: F32[Tensor, "T D"]
    norm_scale: F32[Tensor, "T D"]
    norm_shift: F32[Tensor, "T D"]
    hidden: F32[Tensor, "2D D"]
    hidden_bias: F32[Tensor, "D"]
    output: F32[Tensor, "D"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig:
    """Settings of a gradient step."""

    network: NetworkConfig
    """Sizes of the network."""
    dropped: UnitInterval = 0.0
    """Share of the known facts that a step leaves out of the graph beside those that are asked for."""
    n_at_once: Size
    """Questions that are in memory together; the step is the same."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class TrainState(NamedTuple):
    """The weights, the moments of their optimizer, and the mean loss before the last step."""

    params: Params
    adam: optim.AdamState[Params]
    loss: F32[Tensor, ""]


class Graph(NamedTuple):
    """Facts as edges in both directions, ascending by target. A source is a label and an entity that has its edges."""

    source: I64[Tensor, "S"]  # label * C1 + entity, ascending
    source_label: I64[Tensor, "S"]
    source_entity: I64[Tensor, "S"]
    edge_source: I64[Tensor, "N"]  # row of the source
    edge_target: I64[Tensor, "N"]
    edge_group: I64[Tensor, "N"]  # edges of a group are left out together


class TrainingWorld(NamedTuple):
    """What a gradient step reads and never writes."""

    graph: Graph  # of all known facts
    orders: MessageOrders | None  # for the kernel, where there is one


class Questions(NamedTuple):
    """Questions with an answer each."""

    label: I64[Tensor, "n"]
    given: I64[Tensor, "n"]
    answer: I64[Tensor, "n"]


class OmittedEdges(NamedTuple):
    """Edges that one of several questions is asked without."""

    row: I64[Tensor, "m"]  # of the question, ascending
    edge: I64[Tensor, "m"]


def build_graph(
    cfg: NetworkConfig, facts: I64[Tensor, "N W"], left_out: LeftOut
) -> Graph:
    """The graph of facts of two arguments.

    Args:
      left_out: a group is the edges of a fact, or all edges between two entities.
    """
    head, tail = facts[:, HEAD], facts[:, TAIL]
    base = cfg.n_entities + 1
    group = torch.arange(len(facts), device=facts.device)
    if left_out == "pair":
        pair = torch.minimum(head, tail) * base + torch.maximum(head, tail)
        _, group = unique_inverse(pair)

    label = torch.cat([make_label(facts[:, 0], side) for side in (HEAD, TAIL)])
    entity, target = torch.cat([tail, head]), torch.cat([head, tail])
    source, edge_source = unique_inverse(label * base + entity)
    order = torch.argsort(target, stable=True)
    return Graph(
        source=source,
        source_label=source // base,
        source_entity=source % base,
        edge_source=edge_source[order],
        edge_target=target[order],
        edge_group=group.repeat(2)[order],
    )


def edge_questions(graph: Graph, edge: I64[Tensor, "n"]) -> Questions:
    """The questions that some edges answer."""
    source = graph.edge_source[edge]
    return Questions(
        label=graph.source_label[source],
        given=graph.source_entity[source],
        answer=graph.edge_target[edge],
    )


def without_edges(graph: Graph, edge: I64[Tensor, "n"]) -> Graph:
    """The graph without some edges."""
    every = torch.arange(len(graph.edge_target), device=edge.device)
    return _select_edges(graph, ~torch.isin(every, edge))


def _select_edges(graph: Graph, is_kept: Bool[Tensor, "N"]) -> Graph:
    """The graph with some of its edges."""
    kept = is_kept.nonzero().squeeze(1)
    return graph._replace(
        edge_source=graph.edge_source[kept],
        edge_target=graph.edge_target[kept],
        edge_group=graph.edge_group[kept],
    )


def question_edges(
    cfg: NetworkConfig, graph: Graph, questions: Questions, left_out: LeftOut
) -> OmittedEdges:
    """The edges of the fact that answers each question, or all edges of its pair of entities.

    Args:
      questions: one whose answer is 0 has no such edge.
      left_out: what a question leaves out.
    """
    every = torch.arange(len(graph.edge_target), device=graph.source.device)
    key = _omission_key(cfg, edge_questions(graph, every), left_out)
    key, order = sort_keys(key)
    wanted = _omission_key(cfg, questions, left_out)
    start = torch.searchsorted(key, wanted)
    stop = torch.searchsorted(key, wanted, right=True)
    row, position = expand_ranges(start, stop - start)
    return OmittedEdges(row, order[position])


def _omission_key(
    cfg: NetworkConfig, questions: Questions, left_out: LeftOut
) -> I64[Tensor, "n"]:
    """A number of the fact, or of the pair of entities, that each question leaves out."""
    base = cfg.n_entities + 1
    given, answer = questions.given, questions.answer
    if left_out == "pair":
        return torch.minimum(given, answer) * base + torch.maximum(
            given, answer
        )
    is_head = questions.label % 2 == 0
    head = torch.where(is_head, answer, given)
    tail = torch.where(is_head, given, answer)
    return (questions.label // 2 * base + head) * base + tail


def known_answers(
    cfg: NetworkConfig, graph: Graph, questions: Questions
) -> Bool[Tensor, "n E"]:
    """Which entities answer each question in a graph."""
    base = cfg.n_entities + 1
    key = questions.label * base + questions.given
    source = torch.searchsorted(graph.source, key)
    source = source.clamp_max(len(graph.source) - 1)
    # A question that is no source has no row of an edge.
    source = torch.where(graph.source[source] == key, source, -1)
    is_answer = graph.edge_source == source[:, None]
    answer = torch.where(is_answer, graph.edge_target, 0)
    known = torch.zeros((len(key), base), dtype=torch.bool, device=key.device)
    return known.scatter(1, answer, True)[:, 1:]  # no entity is 0


def init(cfg: NetworkConfig, key: I64[Tensor, "2"]) -> Params:
    """Random weights; linear maps keep the size of what they map."""
    n_labels, width, n_layers = cfg.n_labels, cfg.width, cfg.n_layers
    keys = random.split(key, 6).unbind(-2)
    n_asked = width if cfg.asks else 0

    def draw(key: I64[Tensor, "2"], n_inputs: int, *shape: int) -> Tensor:
        return random.normal(key, shape) / n_inputs**0.5

    zeros = torch.zeros((n_layers, width), device=key.device)
    by_asked = (n_layers, n_asked, n_labels * width)
    return Params(
        asked=draw(keys[0], 1, n_labels, width),
        weight=draw(keys[1], 1, n_layers, n_labels, width),
        weight_by_asked=draw(keys[2], 4 * width, *by_asked),
        linear=draw(keys[3], width, n_layers, 2 * width, width),
        bias=zeros,
        norm_scale=torch.ones_like(zeros),
        norm_shift=zeros,
        hidden=draw(keys[4], width, 2 * width, width),
        hidden_bias=zeros[0],
        output=draw(keys[5], width, width),
    )


def apply(
    cfg: NetworkConfig,
    params: Params,
    graph: Graph,
    label: I64[Tensor, "n"],
    given: I64[Tensor, "n"],
    omitted: OmittedEdges | None = None,
    sum_messages: Summation | None = None,
) -> F32[Tensor, "n E"]:
    """The logit of every entity as the answer to each question.

    Args:
      omitted: edges that are left out of the graph of one of the questions.
      sum_messages: how messages are added up; None for `summation` of the graph.
    """
    asked = params.asked[label]
    row = torch.arange(len(label), device=label.device)
    # Entities come first: a message to all questions is a row.
    start = asked.new_zeros(cfg.n_entities, *asked.shape)
    start = start.index_put((given - 1, row), asked)
    sum_messages = sum_messages or summation(cfg, graph)

    state = start
    for layer in range(cfg.n_layers):
        weight = _message_weight(cfg, params, layer, asked)
        total = start + sum_messages(layer, state, weight)
        if omitted is not None:
            total = _without_messages(graph, state, weight, omitted, total)
        change = torch.cat([state, total], -1) @ params.linear[layer]
        change = layer_norm(
            change + params.bias[layer],
            [cfg.width],
            params.norm_scale[layer],
            params.norm_shift[layer],
        )
        state = state + change.relu()

    final = torch.cat([state, asked.expand_as(state)], -1)
    hidden = (final @ params.hidden + params.hidden_bias).relu()
    return (hidden @ params.output).transpose(0, 1)


def _message_weight(
    cfg: NetworkConfig, params: Params, layer: int, asked: F32[Tensor, "n D"]
) -> F32[Tensor, "B m D"]:
    """The weight of each label in the messages of a layer, for each question, or one for all of them."""
    weight = params.weight[layer][:, None]
    if not cfg.asks:
        return weight
    by_asked = asked @ params.weight_by_asked[layer]
    by_asked = by_asked.view(len(asked), cfg.n_labels, cfg.width)
    return weight + by_asked.transpose(0, 1)


def has_kernel(graph: Graph) -> bool:
    """Whether messages are added up by a kernel that keeps none of them."""
    return graph.source.is_cuda and len(graph.edge_target) > 0


def summation(
    cfg: NetworkConfig,
    graph: Graph,
    edge_weight: F32[Tensor, "T N"] | None = None,
) -> Summation:
    """How the messages of a graph are added up.

    Args:
      edge_weight: factor of the message along each edge in each layer; None for 1.
    """
    if has_kernel(graph) and edge_weight is None:
        return _summation_by_kernel(cfg, order_messages(cfg, graph))
    factors = [None] * cfg.n_layers if edge_weight is None else edge_weight
    return lambda layer, state, weight: _sum_messages(
        cfg, graph, state, weight, factors[layer]
    )


def _summation_by_kernel(
    cfg: NetworkConfig,
    orders: MessageOrders,
    is_kept: Bool[Tensor, "N"] | None = None,
) -> Summation:
    """How the kernel adds up messages.

    Args:
      is_kept: the edges that there are messages along; None for all.
    """
    return lambda _, state, weight: _sum_by_kernel(
        cfg, orders, state, weight, is_kept
    )


def order_messages(cfg: NetworkConfig, graph: Graph) -> MessageOrders:
    """The orders in which the kernel adds up messages."""
    return message_sums.order_messages(
        source=graph.source_entity[graph.edge_source] - 1,
        label=graph.source_label[graph.edge_source],
        target=graph.edge_target - 1,
        n_entities=cfg.n_entities,
        n_labels=cfg.n_labels,
    )


def _sum_by_kernel(
    cfg: NetworkConfig,
    orders: MessageOrders,
    state: F32[Tensor, "E n D"],
    weight: F32[Tensor, "B m D"],
    is_kept: Bool[Tensor, "N"] | None,
) -> F32[Tensor, "E n D"]:
    """The sum of the messages to each entity.

    Args:
      weight: for each question, or one for all of them.
      is_kept: the edges that there are messages along; None for all.
    """
    dtype = DTYPES[cfg.messages]
    weight = weight.expand(-1, state.shape[1], -1)
    total = message_sums.sum_messages(
        state.to(dtype).flatten(1), weight.to(dtype).flatten(1), orders, is_kept
    )
    return total.view_as(state).to(state.dtype)


def _sum_messages(
    cfg: NetworkConfig,
    graph: Graph,
    state: F32[Tensor, "E n D"],
    weight: F32[Tensor, "B m D"],
    factor: F32[Tensor, "N"] | None,
) -> F32[Tensor, "E n D"]:
    """The sum of the messages to each entity; a source sends all its targets the same.

    Args:
      weight: for each question, or one for all of them.
      factor: of the message along each edge; None for 1.
    """
    dtype = DTYPES[cfg.messages]
    # The gradient of `embedding` adds up faster than that of an index.
    sent = embedding(graph.source_entity - 1, state.to(dtype).flatten(1))
    by_source = embedding(graph.source_label, weight.to(dtype).flatten(1))
    sent = sent.view(-1, *state.shape[1:])
    message = sent * by_source.view(len(sent), *weight.shape[1:])
    entities = torch.arange(cfg.n_entities, device=state.device)
    offsets = torch.searchsorted(graph.edge_target, entities + 1)
    total = embedding_bag(
        graph.edge_source,
        message.flatten(1),
        offsets,
        mode="sum",
        per_sample_weights=factor,
    )
    return total.view_as(state).to(state.dtype)


def _without_messages(
    graph: Graph,
    state: F32[Tensor, "E n D"],
    weight: F32[Tensor, "B m D"],
    omitted: OmittedEdges,
    total: F32[Tensor, "E n D"],
) -> F32[Tensor, "E n D"]:
    """Sums of messages without those along some edges."""
    row = omitted.row
    source = graph.edge_source[omitted.edge]
    weight = weight.expand(-1, state.shape[1], -1)
    sent = state[graph.source_entity[source] - 1, row]
    message = sent * weight[graph.source_label[source], row]
    target = graph.edge_target[omitted.edge] - 1
    return total.index_put((target, row), -message, accumulate=True)


def loss(
    cfg: NetworkConfig,
    params: Params,
    graph: Graph,
    questions: Questions,
    is_other: Bool[Tensor, "n E"],
    sum_messages: Summation | None = None,
) -> F32[Tensor, ""]:
    """The sum of -log p(answer) among all entities.

    Args:
      is_other: known answers, which are no candidates; the answer may be marked.
      sum_messages: how messages are added up; None for `summation` of the graph.
    """
    logits = apply(
        cfg,
        params,
        graph,
        questions.label,
        questions.given,
        sum_messages=sum_messages,
    )
    answer = questions.answer[:, None] - 1
    entity = torch.arange(cfg.n_entities, device=answer.device)
    is_out = is_other & (entity != answer)
    log_p = logits.masked_fill(is_out, -torch.inf).log_softmax(1)
    return -log_p.gather(1, answer).sum()


def make_world(cfg: NetworkConfig, graph: Graph) -> TrainingWorld:
    """What gradient steps read.

    Args:
      graph: of all known facts, on the device of the steps.
    """
    orders = order_messages(cfg, graph) if has_kernel(graph) else None
    return TrainingWorld(graph, orders)


def init_training(params: Params) -> TrainState:
    """The state before the first step."""
    loss = torch.zeros((), device=params.asked.device)
    return TrainState(params, optim.init(params), loss)


def train_step(
    cfg: StepConfig,
    world: TrainingWorld,
    edge: I64[Tensor, "n"],
    key: I64[Tensor, "2"],
    learning_rate: F32[Tensor, ""],
    state: TrainState,
) -> TrainState:
    """A step of Adam down the mean loss of the questions that some edges answer.

    Args:
      edge: the groups of these edges are left out of the graph.
      key: of the groups that are dropped beside them.
    """
    group = world.graph.edge_group
    is_dropped = random.uniform(key, group.shape) < cfg.dropped
    is_dropped = is_dropped.index_fill(0, group[edge], True)
    gradient, loss = mean_gradient(
        cfg, world, state.params, edge, ~is_dropped[group]
    )
    gradient, _ = optim.clip_by_global_norm(gradient, 1.0)
    params, adam = optim.update(
        AdamConfig(), gradient, state.adam, state.params, learning_rate
    )
    return TrainState(params, adam, loss)


def mean_gradient(
    cfg: StepConfig,
    world: TrainingWorld,
    params: Params,
    edge: I64[Tensor, "n"],
    is_kept: Bool[Tensor, "N"],
) -> tuple[Params, F32[Tensor, ""]]:
    """The gradient of the mean loss of the questions that some edges answer, and that loss.

    Args:
      is_kept: the edges of the graph that they are asked by.
    """
    network, graph = cfg.network, world.graph
    if world.orders is not None:
        sum_messages = _summation_by_kernel(network, world.orders, is_kept)
    else:
        sum_messages = summation(network, _select_edges(graph, is_kept))
    asked = edge_questions(graph, edge)
    total: tuple[Params, Tensor] | None = None
    rows = torch.arange(len(edge), device=edge.device)
    for some in rows.split(cfg.n_at_once):
        part = Questions(*(column[some] for column in asked))
        known = known_answers(network, graph, part)
        of_part = grad_and_value(loss, argnums=1)(
            network, params, graph, part, known, sum_messages
        )
        total = tree.map(torch.add, total, of_part) if total else of_part
    assert total is not None, "there are edges"
    return tree.map(lambda x: x / len(edge), total)


def answer_log_p(
    cfg: NetworkConfig,
    params: Params,
    graph: Graph,
    label: I64[Tensor, "n"],
    given: I64[Tensor, "n"],
    n_at_once: int,
) -> F32[Tensor, "n C1"]:
    """The log-probability of every entity as an answer, on the host; column 0 is of no entity."""
    parts = [torch.zeros(0, cfg.n_entities)]
    sums = summation(cfg, graph)
    for rows in torch.arange(len(label), device=label.device).split(n_at_once):
        with torch.no_grad():
            logits = apply(
                cfg,
                params,
                graph,
                label[rows],
                given[rows],
                sum_messages=sums,
            )
        parts.append(logits.log_softmax(1).cpu())
    return pad(torch.cat(parts), (1, 0), value=-torch.inf)


def bytes_per_question(cfg: NetworkConfig, graph: Graph) -> int:
    """A count of what a question keeps for its gradient: in each layer what the sources send, and some states."""
    n_bytes = DTYPES[cfg.messages].itemsize
    by_source = 2 if cfg.asks else 1  # what is sent, and its weight
    sent = by_source * n_bytes * len(graph.source)
    if has_kernel(graph):
        sent = 0
    states = 4 * STATES_KEPT * cfg.n_entities
    return cfg.n_layers * cfg.width * (sent + states)
