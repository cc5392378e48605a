"""A path network over known facts, as pure functions, and the score that it gives candidates.

It is a generalised Bellman-Ford network. A question has a label (a relation and the side that is asked for, see
`derive.make_label`) and an entity that is given. Every entity has a state for the question; after T layers it has heard
of all paths of up to T facts from the given entity. That of an entity without such a path is 0:

    state_0[v] = asked[label] where v is given, and 0 elsewhere
    weight_t[b] = weight[t, b] + asked[label] weight_by_asked[t, b],    b the label of a fact
    total_t[v] = state_0[v] + sum over facts u -> v of state_(t-1)[u] * weight_t[label of the fact]
    state_t[v] = state_(t-1)[v] + relu(norm_t([state_(t-1)[v], total_t[v]] linear_t + bias_t)),    0 if not reached
    logit[v] = relu([state_T[v], asked[label]] hidden + hidden_bias) output

A CPU lists the messages of a layer where they are few, as in sparse graphs. Elsewhere messages go along all edges, and
the states of entities that none has reached are held at 0; on a GPU by a kernel, as a CUDA graph needs.

No weight belongs to an entity. A fact is an edge in both directions, each of which is a question that the fact
answers; it is learnt from a graph without the fact.

`train_step` learns from the edges of a batch, which all of its questions are asked without. `candidate_scores` gives
the logits of candidates above the mean of all entities; what a question leaves out is left out of its graph alone.
These scores are computed in float64 and rounded to `SCORE_UNIT`, so that no question changes those of another.

Source: Zhu et al. 2021, arXiv:2106.06935, with DistMult messages that are summed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, embedding_bag, layer_norm

from funcppo import optim
from funcppo.config import AdamConfig
from funcppo.core import random, tree
from funcppo.core.settings import Size, UnitInterval, check_fields
from funcppo.core.types import F32, F64, I64, Bool
from funcppo.kg.config import BellmanFordConfig
from funcppo.kg.logic import derive, row_index
from funcppo.kg.logic.derive import LeftOut, make_label
from funcppo.kg.logic.kb import HEAD, TAIL
from funcppo.kg.logic.row_index import expand_ranges, sort_keys, unique_inverse

# what the scores of candidates are multiples of
SCORE_UNIT = 2.0**-16
# terms that the kernel adds one after the other
PART = 128
# numbers of a row that a program of the kernel adds up; the same for rows of any width, which need one kernel
COLUMNS = 256
# questions whose messages are counted for a plan
COUNTED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkConfig:
    """Sizes of a network, and settings of its gradient steps."""

    n_entities: Size
    """Number of entities; their ids are 1 to this number."""
    n_labels: Size
    """Number of labels, those of the unused predicate 0 included."""
    width: Size = 32
    """Numbers of a state."""
    n_layers: Size = 5
    """Number of facts of the longest path."""
    dropped: UnitInterval = 0.0
    """Share of the known facts that a step leaves out of the graph in addition to those that are asked for."""
    n_at_once: Size = 1
    """Questions of a step, or of scores, that are in memory together; the results are the same."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class Params(NamedTuple):
    """Weights of the network; the first axis of a layer's weight is the layer."""

    asked: F32[Tensor, "B D"]
    weight: F32[Tensor, "T B D"]
    weight_by_asked: F32[Tensor, "T D BD"]
    linear: F32[Tensor, "T 2D D"]
    bias: F32[Tensor, "T D"]
    norm_scale: F32[Tensor, "T D"]
    norm_shift: F32[Tensor, "T D"]
    hidden: F32[Tensor, "2D D"]
    hidden_bias: F32[Tensor, "D"]
    output: F32[Tensor, "D"]


class TrainState(NamedTuple):
    """Weights, the moments of their optimizer, and the mean loss before the last step."""

    params: Params
    adam: optim.AdamState[Params]
    loss: F32[Tensor, ""]


class SumOrder(NamedTuple):
    """Order in which products are summed into rows, in parts of fixed size."""

    left_row: I64[Tensor, "N"]
    right_row: I64[Tensor, "N"]
    edge: I64[Tensor, "N"]
    offsets: list[I64[Tensor, "P1"]]
    """Of the parts that are added together: of products first, then of the sums before. The last has a part for each
    row of the sum."""


class Graph(NamedTuple):
    """Facts as edges in both directions; a source is an entity with a label that it has edges of."""

    source: I64[Tensor, "S"]  # entity * B + label, ascending
    source_label: I64[Tensor, "S"]
    source_entity: I64[Tensor, "S"]
    edge_source: I64[Tensor, "N"]  # row of the source, ascending
    edge_target: I64[Tensor, "N"]
    edge_group: I64[Tensor, "N"]  # edges of a group are left out together
    # of the sums by target, by source and by label, for the kernel; none without one
    orders: tuple[SumOrder, ...] = ()
    # the edges ascending by target; none where messages are listed or the kernel adds them up
    by_target: tuple[I64[Tensor, "N"], ...] = ()


class Questions(NamedTuple):
    """Questions with one answer each."""

    label: I64[Tensor, "n"]
    given: I64[Tensor, "n"]
    answer: I64[Tensor, "n"]


class OmittedEdges(NamedTuple):
    """Edges that are left out of the graph of one of several questions."""

    row: I64[Tensor, "m"]  # of the question, ascending
    edge: I64[Tensor, "m"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PathNetwork:
    """Trained network with the graph of facts that it reads."""

    cfg: NetworkConfig
    """Sizes of the network."""
    params: Params
    """Its weights."""
    graph: Graph
    """The known facts."""


# -- the graph


def build_graph(
    cfg: NetworkConfig, facts: I64[Tensor, "N W"], left_out: LeftOut
) -> Graph:
    """Build the graph of facts of two arguments, on the facts' device.

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
    source, edge_source = unique_inverse(entity * cfg.n_labels + label)
    order = torch.argsort(edge_source, stable=True)
    graph = Graph(
        source=source,
        source_label=source % cfg.n_labels,
        source_entity=source // cfg.n_labels,
        edge_source=edge_source[order],
        edge_target=target[order],
        edge_group=group.repeat(2)[order],
    )
    if facts.is_cuda and len(facts):
        return with_orders(cfg, graph)
    # A listed message takes about as long as two others.
    n_rows = cfg.n_layers * (len(source) + 2 * cfg.n_entities)
    is_dense = 2 * count_messages(cfg, graph) > n_rows
    return with_all_sent(graph) if is_dense else graph


def with_all_sent(graph: Graph) -> Graph:
    """Return the graph with what sending messages along all edges needs on a CPU."""
    return graph._replace(by_target=(torch.argsort(graph.edge_target),))


def with_orders(cfg: NetworkConfig, graph: Graph) -> Graph:
    """Return the graph with the orders of sums that the kernel needs."""
    orders = order_messages(
        graph.source_entity[graph.edge_source] - 1,
        graph.source_label[graph.edge_source],
        graph.edge_target - 1,
        cfg.n_entities,
        cfg.n_labels,
    )
    return graph._replace(orders=orders)


def edge_questions(graph: Graph, edge: I64[Tensor, "n"]) -> Questions:
    """Return the question that each edge answers."""
    source = graph.edge_source[edge]
    return Questions(
        label=graph.source_label[source],
        given=graph.source_entity[source],
        answer=graph.edge_target[edge],
    )


def edges_of(
    cfg: NetworkConfig, graph: Graph, facts: I64[Tensor, "n W"]
) -> I64[Tensor, "2n"]:
    """Return the edges of some facts of the graph, in its order."""
    every = torch.arange(len(graph.edge_target), device=facts.device)
    if 2 * len(facts) == len(every):
        return every
    asked = build_graph(cfg, facts, "fact")
    key, wanted = (
        _omission_key(
            cfg, edge_questions(x, every[: len(x.edge_target)]), "fact"
        )
        for x in (graph, asked)
    )
    return every[torch.isin(key, wanted)]


def question_edges(
    cfg: NetworkConfig, graph: Graph, questions: Questions, left_out: LeftOut
) -> OmittedEdges:
    """Return the edges of the fact that answers each question, or all edges of its pair of entities.

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
    """Compute a key of the fact, or of the pair of entities, that each question leaves out."""
    base = cfg.n_entities + 1
    label, given, answer = questions
    if left_out == "pair":
        first, last = torch.minimum(given, answer), torch.maximum(given, answer)
        return first * base + last
    is_head = label % 2 == 0
    head = torch.where(is_head, answer, given)
    tail = torch.where(is_head, given, answer)
    return (label // 2 * base + head) * base + tail


def known_answers(
    cfg: NetworkConfig, graph: Graph, questions: Questions
) -> Bool[Tensor, "n E"]:
    """Return which entities answer each question in the graph."""
    key = questions.given * cfg.n_labels + questions.label
    source = torch.searchsorted(graph.source, key)
    source = source.clamp_max(len(graph.source) - 1)
    # A question that is no source has no row of an edge.
    source = torch.where(graph.source[source] == key, source, -1)
    shape = len(key), cfg.n_entities + 1
    known = torch.zeros(shape, dtype=torch.bool, device=key.device)
    if graph.orders:  # a CUDA graph cannot hold a number of answers
        is_answer = graph.edge_source == source[:, None]
        answer = torch.where(is_answer, graph.edge_target, 0)
        return known.scatter(1, answer, True)[:, 1:]  # no entity is 0
    start = torch.searchsorted(graph.edge_source, source)
    stop = torch.searchsorted(graph.edge_source, source, right=True)
    row, edge = expand_ranges(start, stop - start)
    key = row * shape[1] + graph.edge_target[edge]
    return known.flatten().index_fill(0, key, True).view(shape)[:, 1:]


# -- the network


def network_config(
    cfg: BellmanFordConfig, n_entities: int, n_labels: int, n_at_once: int = 1
) -> NetworkConfig:
    """Return the sizes and settings of a network from the settings of a run."""
    return NetworkConfig(
        n_entities=n_entities,
        n_labels=n_labels,
        width=cfg.width,
        n_layers=cfg.n_layers,
        dropped=cfg.dropped,
        n_at_once=n_at_once,
    )


def init(cfg: NetworkConfig, key: I64[Tensor, "2"]) -> Params:
    """Draw random weights, scaled so that linear maps keep the size of their inputs."""
    n_labels, width, n_layers = cfg.n_labels, cfg.width, cfg.n_layers
    keys = random.split(key, 6).unbind(-2)

    def draw(key: I64[Tensor, "2"], n_inputs: int, *shape: int) -> Tensor:
        return random.normal(key, shape) / n_inputs**0.5

    zeros = torch.zeros((n_layers, width), device=key.device)
    by_asked = (n_layers, width, n_labels * width)
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
    is_kept: Bool[Tensor, "N"] | None = None,
) -> F32[Tensor, "n E"]:
    """Compute the logit of every entity as the answer to each question.

    Args:
      omitted: edges that are left out of the graph of one of the questions.
      is_kept: edges that there are messages along; None for all.
    """
    asked = params.asked[label]
    inputs = cfg, params, graph, asked, given, omitted, is_kept
    if graph.orders or graph.by_target:
        state = _send_all(*inputs)
        logits = _final_logits(params, state, asked.expand_as(state))
    else:
        reached, state = _send_listed(*inputs)
        unreached = _final_logits(params, torch.zeros_like(asked), asked)
        logits = unreached.repeat(cfg.n_entities).index_put(
            (reached,),
            _final_logits(
                params, state, embedding(reached % len(label), asked)
            ),
        )
    return logits.view(cfg.n_entities, -1).transpose(0, 1)


def _final_logits(
    params: Params, state: F32[Tensor, "... D"], asked: F32[Tensor, "... D"]
) -> F32[Tensor, "..."]:
    """Compute the logits of final states."""
    hidden = torch.cat([state, asked], -1) @ params.hidden + params.hidden_bias
    return hidden.relu() @ params.output


def _label_weights(
    cfg: NetworkConfig, params: Params, layer: int, asked: F32[Tensor, "n D"]
) -> F32[Tensor, "B n D"]:
    """Compute the weight of each label of a fact for each question."""
    by_asked = asked @ params.weight_by_asked[layer]
    by_asked = by_asked.view(len(asked), cfg.n_labels, cfg.width)
    return params.weight[layer][:, None] + by_asked.transpose(0, 1)


def _next_state(
    cfg: NetworkConfig,
    params: Params,
    layer: int,
    state: F32[Tensor, "... D"],
    total: F32[Tensor, "... D"],
) -> F32[Tensor, "... D"]:
    """Compute states from those before and the sums of their messages."""
    change = torch.cat([state, total], -1) @ params.linear[layer]
    change = layer_norm(
        change + params.bias[layer],
        [cfg.width],
        params.norm_scale[layer],
        params.norm_shift[layer],
    )
    return state + change.relu()


def _send_listed(
    cfg: NetworkConfig,
    params: Params,
    graph: Graph,
    asked: F32[Tensor, "n D"],
    given: I64[Tensor, "n"],
    omitted: OmittedEdges | None,
    is_kept: Bool[Tensor, "N"] | None,
) -> tuple[I64[Tensor, "P"], F32[Tensor, "P D"]]:
    """Send the messages of states that are not 0.

    Returns:
      The final states that paths reach, each as (entity - 1) * n + question, ascending; and their values.
    """
    n = len(asked)
    begun = (given - 1) * n + torch.arange(n, device=given.device)
    reached, order = sort_keys(begun)
    state = asked[order]
    for layer in range(cfg.n_layers):
        weight = _label_weights(cfg, params, layer, asked).flatten(0, 1)
        sent = _list_messages(cfg, graph, n, reached, omitted, is_kept)
        # The gradient of `embedding` adds up faster than that of an index.
        message = embedding(sent.sender, state) * embedding(sent.weight, weight)
        total = _ListedSums.apply(message, sent)
        place = torch.searchsorted(sent.receiver, begun)
        total = total.index_put((place,), asked, accumulate=True)
        place = torch.searchsorted(sent.receiver, reached)
        before = torch.zeros_like(total).index_put((place,), state)
        state = _next_state(cfg, params, layer, before, total)
        reached = sent.receiver
    return reached, state


class _ListedMessages(NamedTuple):
    """Messages of a layer; the state of an entity sends one to all targets of a label."""

    sender: I64[Tensor, "M"]  # row of the state that sends each
    weight: I64[Tensor, "M"]  # label * n + question
    receiver: I64[Tensor, "P"]  # (entity - 1) * n + question, ascending
    # what goes to each target, by message and by receiver, and where the rows of each begin
    target: I64[Tensor, "N"]
    target_offsets: I64[Tensor, "M"]
    source: I64[Tensor, "N"]
    source_offsets: I64[Tensor, "P"]


def _list_messages(
    cfg: NetworkConfig,
    graph: Graph,
    n: int,
    reached: I64[Tensor, "P"],
    omitted: OmittedEdges | None = None,
    is_kept: Bool[Tensor, "N"] | None = None,
) -> _ListedMessages:
    """List the messages from the states that are reached; these receive some too, if none but their own."""
    ends = torch.stack([reached // n + 1, reached // n + 2]) * cfg.n_labels
    start, stop = torch.searchsorted(graph.source, ends)
    sender, source = expand_ranges(start, stop - start)
    question = reached[sender] % n
    start = torch.searchsorted(graph.edge_source, source)
    stop = torch.searchsorted(graph.edge_source, source, right=True)
    message, edge = expand_ranges(start, stop - start)
    if is_kept is not None:
        kept = is_kept[edge].nonzero().squeeze(1)
        message, edge = message[kept], edge[kept]
    if omitted is not None:
        n_edges = len(graph.edge_target)
        key = question[message] * n_edges + edge
        is_out = torch.isin(key, omitted.row * n_edges + omitted.edge)
        kept = (~is_out).nonzero().squeeze(1)
        message, edge = message[kept], edge[kept]

    key = (graph.edge_target[edge] - 1) * n + question[message]
    receiver, target = unique_inverse(torch.cat([key, reached]))
    target = target[: len(key)]
    by_receiver, order = sort_keys(target)
    return _ListedMessages(
        sender=sender,
        weight=graph.source_label[source] * n + question,
        receiver=receiver,
        target=target,
        target_offsets=_first_rows(message, len(sender)),
        source=message[order],
        source_offsets=_first_rows(by_receiver, len(receiver)),
    )


def _first_rows(group: I64[Tensor, "N"], n_groups: int) -> I64[Tensor, "G"]:
    """Return where the rows of each group begin, of ascending groups."""
    groups = torch.arange(n_groups, device=group.device)
    return torch.searchsorted(group, groups)


class _ListedSums(torch.autograd.Function):
    """Autograd function of the sum of what each state receives of listed messages."""

    @staticmethod
    def forward(message: Tensor, sent: _ListedMessages) -> Tensor:
        return embedding_bag(
            sent.source, message, sent.source_offsets, mode="sum"
        )

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, _ListedMessages], output: Tensor
    ) -> None:
        _, ctx.sent = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        sent = ctx.sent
        gradient = embedding_bag(
            sent.target, gradients[0], sent.target_offsets, mode="sum"
        )
        return gradient, None


def _send_all(
    cfg: NetworkConfig,
    params: Params,
    graph: Graph,
    asked: F32[Tensor, "n D"],
    given: I64[Tensor, "n"],
    omitted: OmittedEdges | None,
    is_kept: Bool[Tensor, "N"] | None,
) -> F32[Tensor, "E n D"]:
    """Send messages along all edges; states of entities that none has reached stay 0."""
    n = len(asked)
    row = torch.arange(n, device=given.device)
    # Entities come first: a message to all questions is a row.
    start = asked.new_zeros(cfg.n_entities, *asked.shape)
    state = start = start.index_put((given - 1, row), asked)
    one = asked.detach().new_ones(1)
    is_reached = one.new_zeros(cfg.n_entities, n, 1)
    is_reached = is_reached.index_put((given - 1, row), one)
    no_weight = one.expand(cfg.n_labels, n, 1)

    def add_up(sent: Tensor, weight: Tensor) -> Tensor:
        flat = sent.flatten(1), weight.flatten(1)
        total = (
            sum_messages(*flat, graph.orders, is_kept)
            if graph.orders
            else _sum_by_source(graph, *flat, is_kept)
        ).view_as(sent)
        if omitted is None:
            return total
        return _without_messages(graph, sent, weight, omitted, total)

    for layer in range(cfg.n_layers):
        weight = _label_weights(cfg, params, layer, asked)
        total = start + add_up(state, weight)
        is_reached = (is_reached + add_up(is_reached, no_weight)).clamp_max(1.0)
        state = _next_state(cfg, params, layer, state, total) * is_reached
    return state


def _sum_by_source(
    graph: Graph,
    states: F32[Tensor, "E C"],
    weights: F32[Tensor, "B C"],
    is_kept: Bool[Tensor, "N"] | None,
) -> F32[Tensor, "E C"]:
    """Sum the messages to each entity as `sum_messages` does, without a kernel."""
    (edge,) = graph.by_target
    if is_kept is not None:
        edge = edge[is_kept[edge]]
    # A source sends all its targets the same message.
    sent = embedding(graph.source_entity - 1, states)
    message = sent * embedding(graph.source_label, weights)
    offsets = _first_rows(graph.edge_target[edge] - 1, len(states))
    return embedding_bag(graph.edge_source[edge], message, offsets, mode="sum")


def _without_messages(
    graph: Graph,
    state: F32[Tensor, "E n D"],
    weight: F32[Tensor, "B n D"],
    omitted: OmittedEdges,
    total: F32[Tensor, "E n D"],
) -> F32[Tensor, "E n D"]:
    """Subtract the messages along omitted edges from the sums."""
    row = omitted.row
    source = graph.edge_source[omitted.edge]
    sent = state[graph.source_entity[source] - 1, row]
    message = sent * weight[graph.source_label[source], row]
    target = graph.edge_target[omitted.edge] - 1
    return total.index_put((target, row), -message, accumulate=True)


# -- training


def loss(
    cfg: NetworkConfig,
    params: Params,
    graph: Graph,
    questions: Questions,
    is_other: Bool[Tensor, "n E"],
    is_kept: Bool[Tensor, "N"] | None = None,
) -> F32[Tensor, ""]:
    """Compute the sum of -log p(answer) among all entities over the questions.

    Args:
      is_other: known answers, which are no candidates; the answer may be marked.
      is_kept: as for `apply`.
    """
    label, given, answer = questions
    logits = apply(cfg, params, graph, label, given, is_kept=is_kept)
    answer = answer[:, None] - 1
    entity = torch.arange(cfg.n_entities, device=answer.device)
    is_out = is_other & (entity != answer)
    log_p = logits.masked_fill(is_out, -torch.inf).log_softmax(1)
    return -log_p.gather(1, answer).sum()


def init_training(params: Params) -> TrainState:
    """Return the training state before the first step."""
    loss = torch.zeros((), device=params.asked.device)
    return TrainState(params, optim.init(params), loss)


def train_step(
    cfg: NetworkConfig,
    graph: Graph,
    edge: I64[Tensor, "n"],
    key: I64[Tensor, "2"],
    learning_rate: F32[Tensor, ""],
    state: TrainState,
) -> TrainState:
    """Take a step of Adam down the mean loss of the questions that the edges answer.

    Args:
      edge: the groups of these edges are left out of the graph.
      key: of the groups that are dropped in addition.
    """
    group = graph.edge_group
    is_dropped = random.uniform(key, group.shape) < cfg.dropped
    is_dropped = is_dropped.index_fill(0, group[edge], True)
    gradient, loss = _mean_gradient(
        cfg, graph, state.params, edge, ~is_dropped[group]
    )
    gradient, _ = optim.clip_by_global_norm(gradient, 1.0)
    params, adam = optim.update(
        AdamConfig(), gradient, state.adam, state.params, learning_rate
    )
    return TrainState(params, adam, loss)


def _mean_gradient(
    cfg: NetworkConfig,
    graph: Graph,
    params: Params,
    edge: I64[Tensor, "n"],
    is_kept: Bool[Tensor, "N"],
) -> tuple[Params, F32[Tensor, ""]]:
    """Compute the gradient and value of the mean loss of the questions that the edges answer.

    Args:
      is_kept: the edges of the graph that they are asked by.
    """
    asked = edge_questions(graph, edge)
    total: tuple[Params, Tensor] | None = None
    rows = torch.arange(len(edge), device=edge.device)
    for some in rows.split(cfg.n_at_once):
        part = Questions(*(column[some] for column in asked))
        known = known_answers(cfg, graph, part)
        of_part = tree.grad_and_value(
            partial(
                loss,
                cfg,
                graph=graph,
                questions=part,
                is_other=known,
                is_kept=is_kept,
            ),
            params,
        )
        total = tree.map(torch.add, total, of_part) if total else of_part
    assert total is not None, "there are edges"
    return tree.map(lambda x: x / len(edge), total)


def bytes_per_question(cfg: NetworkConfig, graph: Graph) -> int:
    """Estimate the bytes that a question keeps for its gradient: states and messages of each layer, and logits."""
    if graph.orders:
        return 4 * cfg.n_layers * cfg.width * 8 * cfg.n_entities
    listed = count_messages(cfg, graph)
    if graph.by_target:
        listed = cfg.n_layers * (len(graph.source) + 4 * cfg.n_entities)
    return 12 * cfg.width * listed + 24 * cfg.n_entities


def count_messages(cfg: NetworkConfig, graph: Graph) -> int:
    """Count what a question lists in all layers, messages once and states twice: the mean of a few, and 1 more."""
    n_edges = len(graph.edge_target)
    n = min(n_edges, COUNTED)
    if not n:
        return 1
    row = torch.arange(n, device=graph.source.device)
    asked = edge_questions(graph, row * n_edges // n)
    reached = (asked.given - 1) * n + row
    reached, _ = sort_keys(reached)
    total = 0
    for _ in range(cfg.n_layers):
        sent = _list_messages(cfg, graph, n, reached)
        reached = sent.receiver
        total += len(sent.sender) + 2 * len(reached)
    return total // n + 1


# -- scores of candidates


def make_network(
    params: Params, facts: I64[Tensor, "N W"], n_entities: int
) -> PathNetwork:
    """Build a network that reads facts.

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
    )
    graph = build_graph(cfg, facts, "fact")
    cfg = replace(cfg, n_at_once=_n_scored_at_once(cfg, graph))
    return PathNetwork(cfg=cfg, params=params, graph=graph)


def _n_scored_at_once(cfg: NetworkConfig, graph: Graph) -> int:
    """Return the number of questions whose scores are computed at once, at least 1."""
    # numbers that there are for each number of a state
    numbers = 8 * cfg.n_entities
    if not graph.orders:
        numbers = 3 * count_messages(cfg, graph)
    n_bytes = cfg.width * numbers * torch.float64.itemsize
    # a small part of the memory
    most = 1 << 31 if graph.source.is_cuda else 1 << 26
    return max(1, most // n_bytes)


def without_network(device: torch.device | str) -> Params:
    """Return weights without entries, which stand for no network."""
    dimensions = (2, 3, 3, 3, 2, 2, 2, 2, 1, 1)
    return Params(*(torch.zeros([0] * n, device=device) for n in dimensions))


def is_network(params: Params) -> bool:
    """Return whether the parameters hold a network's weights."""
    return params.asked.numel() > 0


def candidate_scores(
    network: PathNetwork,
    questions: derive.Questions,
    left_out: LeftOut,
    offsets: I64[Tensor, "Q1"],
    entity: I64[Tensor, "L"],
) -> F64[Tensor, "L"]:
    """Compute each candidate's logit minus the mean over all entities.

    Args:
      left_out: what a question leaves out.
      offsets: of the candidates of each question.
      entity: the candidates.
    """
    asked = Questions(
        questions.label,
        questions.entity,
        questions.left_out,
    )
    omitted = question_edges(network.cfg, network.graph, asked, left_out)
    omitted_offsets = row_index.offsets(
        torch.bincount(omitted.row, minlength=len(asked.label))
    )
    counts = offsets.diff()
    # `split` would give one empty part.
    asked_rows = counts.nonzero().squeeze(1)
    size = network.cfg.n_at_once
    parts = asked_rows.split(size) if len(asked_rows) else ()

    places, values = [entity[:0]], [torch.zeros_like(entity[:0]).double()]
    for rows in parts:
        edges, count = omitted_offsets[rows], omitted_offsets.diff()[rows]
        row, position = expand_ranges(edges, count)
        some = OmittedEdges(row, omitted.edge[position])
        logits = _answer_logits(
            network, asked.label[rows], asked.given[rows], some
        )
        row, place = expand_ranges(offsets[rows], counts[rows])
        places.append(place)
        values.append(logits[row, entity[place] - 1])
    zero = torch.zeros(len(entity), dtype=torch.float64, device=entity.device)
    return zero.index_put((torch.cat(places),), torch.cat(values))


def entity_scores(
    network: PathNetwork, label: I64[Tensor, "n"], given: I64[Tensor, "n"]
) -> F64[Tensor, "n E"]:
    """Compute every entity's score as `candidate_scores` does, for questions that leave nothing out."""
    size = network.cfg.n_at_once
    pairs = zip(label.split(size), given.split(size))
    return torch.cat([_answer_logits(network, *pair) for pair in pairs])


def _answer_logits(
    network: PathNetwork,
    label: I64[Tensor, "n"],
    given: I64[Tensor, "n"],
    omitted: OmittedEdges | None = None,
) -> F64[Tensor, "n E"]:
    """Compute the rounded logits of all entities minus their mean, as answers to questions."""
    params = tree.map(lambda x: x.double(), network.params)
    with torch.no_grad():
        logits = apply(
            network.cfg, params, network.graph, label, given, omitted
        )
    above = logits - logits.mean(1, keepdim=True)
    return (above / SCORE_UNIT).round() * SCORE_UNIT


# -- sums of messages by a kernel
#
# A message is the product of two rows, number by number: of the state of the edge's source and of the weight of the
# edge's label. The sum of messages to each target, and both of its gradients, are one operation with three roles of
# rows, which keeps no row of an edge:
#
#     sums[target]     = sum of states[source] * weights[label] over the edges to the target
#     d states[source] = sum of d sums[target] * weights[label] over the edges of the source
#     d weights[label] = sum of states[source] * d sums[target] over the edges of the label
#
# Terms are added in a fixed order: in parts of at most `PART` of the edges of a group, then the sums of a group's parts
# likewise.


@dataclass(frozen=True, slots=True)
class _Edges:
    """Inputs of message sums that have no gradient, hidden from the gradient's tree transform."""

    orders: tuple[SumOrder, ...]
    is_kept: Bool[Tensor, "N"] | None

    def sum_products(
        self, role: int, left: F32[Tensor, "L C"], right: F32[Tensor, "R C"]
    ) -> F32[Tensor, "P C"]:
        """Sum the products of each group of edges; `role` selects the grouping."""
        *rows, offsets = self.orders[role]
        total = _sum_parts(offsets[0], *rows, self.is_kept, left, right)
        for part_offsets in offsets[1:]:
            total = _sum_parts(part_offsets, *rows, self.is_kept, total, None)
        return total


def order_messages(
    source: I64[Tensor, "N"],
    label: I64[Tensor, "N"],
    target: I64[Tensor, "N"],
    n_entities: int,
    n_labels: int,
) -> tuple[SumOrder, ...]:
    """Order the sums of messages by target, and of their gradients by source and by label.

    Args:
      source: entity of each edge, from 0.
      target: entity of each edge, from 0.
    """
    return (
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
    orders: tuple[SumOrder, ...],
    is_kept: Bool[Tensor, "N"] | None = None,
) -> F32[Tensor, "E C"]:
    """Sum the messages to each entity, in float64 for float64 inputs and in float32 otherwise.

    Args:
      states: of the entities; all on a GPU.
      weights: of the labels.
      is_kept: the edges that there are messages along; None for all.
    """
    return _MessageSums.apply(states, weights, _Edges(orders, is_kept))


class _MessageSums(torch.autograd.Function):
    """Autograd function of `sum_messages` and its gradients."""

    @staticmethod
    def forward(states: Tensor, weights: Tensor, edges: _Edges) -> Tensor:
        return edges.sum_products(0, states, weights)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, _Edges], output: Tensor
    ) -> None:
        states, weights, ctx.edges = inputs
        ctx.save_for_backward(states, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        states, weights = ctx.saved_tensors
        gradient = gradients[0].to(states.dtype)
        of_states = ctx.edges.sum_products(1, gradient, weights)
        of_weights = ctx.edges.sum_products(2, states, gradient)
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
    """Sum the products of each part, or its consecutive rows of `left` if `right` is None."""
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    from funcppo.runtime.triton_kernels import sum_products_kernel

    is_double = left.dtype == torch.float64
    n_parts, width = len(offsets) - 1, left.shape[1]
    dtype = torch.float64 if is_double else torch.float32
    out = torch.empty((n_parts, width), dtype=dtype, device=left.device)
    left = left.contiguous()
    sum_products_kernel[(n_parts, -(-width // COLUMNS))](
        offsets,
        left_row,
        right_row,
        edge,
        edge if is_kept is None else is_kept,
        left,
        left if right is None else right.contiguous(),
        out,
        width,
        columns=COLUMNS,
        has_right=right is not None,
        has_mask=is_kept is not None,
        dtype=tl.float64 if is_double else tl.float32,
        num_warps=2,
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
