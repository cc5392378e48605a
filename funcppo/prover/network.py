"""The prover's network: atoms to vectors, goal lists to sums of them, successors scored against the state.

A rule's logit is the log-odds of its train confidence plus the network's output, a fact's and END's logit the
network's output alone. All heads start at zero: an untrained prover follows confidences and picks facts uniformly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu

from funcppo import random, tree
from funcppo.logic import kb as kbase
from funcppo.logic.kb import KBSizes, KnowledgeBase
from funcppo.logic.resolve import Goals
from funcppo.nets.base import CATEGORICAL, Agent, Dense, Distribution, dense, init_dense
from funcppo.prover.env import Observation, World
from funcppo.types import F32, I32, I64, Bool

ApplyDense = Callable[[Dense, Tensor], Tensor]
CONFIDENCE_CLIP = (
    0.01  # confidences are drawn this far in from 0 and 1: a rule that never failed must not be beyond learning
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProverNetworkConfig:
    """Static sizes of the network."""

    sizes: KBSizes
    n_variables: int  # that a goal list, or a rule, can hold
    max_height: int
    embed_dim: int  # D
    hidden_dim: int
    n_residual_blocks: int = 0  # residual layers that the state passes
    matmul_dtype: torch.dtype | None = None  # of matrices; None: that of the params
    capacity: int | None = None  # successors of a batch that have room, those that come first; None: a place for each


class Params(NamedTuple):
    """Tables are looked up by id, the padding id 0 included."""

    term_embedding: F32[Tensor, "C1 D"]  # constants, then canonical variables
    predicate_embedding: F32[Tensor, "P1 D"]
    position_embedding: F32[Tensor, "J D"]  # one for each argument position
    height_embedding: F32[Tensor, "H1 D"]
    rule_embedding: F32[Tensor, "R1 D"]  # entry 0 stands for every fact
    dead_end_embedding: F32[Tensor, "D"]
    successor_layer: Dense
    state_layer: Dense
    hidden_layer: Dense
    residual_blocks: tuple[Dense, ...]
    score_projection: Dense  # what successors are scored against
    end_head: Dense
    value_head: Dense


class _SuccessorVectors(NamedTuple):
    """The vectors of each state's successors."""

    vectors: F32[Tensor, "B S H"] | F32[Tensor, "V H"]  # one each; or a table that all states share
    table_index: I64[Tensor, "B S"] | None  # in the table


class ProverOutput(NamedTuple):
    """A policy over successors and END, what it was before any training, and a value."""

    logits: F32[Tensor, "B S1"]  # the smallest finite number where an action is illegal
    prior_logits: F32[Tensor, "B S1"]  # likewise
    value: F32[Tensor, "B"]


def init(cfg: ProverNetworkConfig, key: I64[Tensor, "2"]) -> Params:
    """Uniform weights of unit output variance; score, END and value heads are zero."""
    keys = random.split(key, 9)
    sizes, D, H = cfg.sizes, cfg.embed_dim, cfg.hidden_dim

    def table(i: int, rows: int) -> Tensor:
        return 2.0 * random.uniform(keys[i], (rows, D)) - 1.0

    return Params(
        term_embedding=table(0, 1 + sizes.n_constants + cfg.n_variables),
        predicate_embedding=table(1, 1 + sizes.n_predicates),
        position_embedding=table(2, sizes.atom_width - 1),
        height_embedding=table(3, 1 + cfg.max_height),
        rule_embedding=table(4, 1 + sizes.n_rules),
        dead_end_embedding=table(7, 1)[0],
        successor_layer=init_dense(keys[8], D, H),
        state_layer=init_dense(keys[5], 3 * D + 1, H),
        hidden_layer=init_dense(keys[6], 2 * H, H),
        residual_blocks=tuple(init_dense(random.fold_in(keys[6], i), H, H) for i in range(cfg.n_residual_blocks)),
        score_projection=init_dense(keys[7], H, H, scale=0.0),
        end_head=init_dense(keys[7], H, 1, scale=0.0),
        value_head=init_dense(keys[7], H, 1, scale=0.0),
    )


def apply(cfg: ProverNetworkConfig, world: World, params: Params, obs: Observation) -> ProverOutput:
    """The policy: log-odds of the rules' confidences, and what the network adds to them and to END."""
    layer = partial(dense, matmul_dtype=cfg.matmul_dtype)
    successor = _successors(layer, world.kb, params, obs, cfg.capacity)
    state = _state(layer, params, obs, _masked_mean(successor, obs.action_mask[:, :-1]))
    score = _inner(successor, layer(params.score_projection, state)) / cfg.hidden_dim**0.5
    at_root = obs.goals.height[:, :1] == 0
    known = rule_prior_logits(world.kb, obs.rule, obs.query_is_fact[:, None] & at_root)
    known = torch.cat([known, torch.zeros_like(known[:, :1])], 1)
    legal = lambda logits: torch.where(obs.action_mask, logits, torch.finfo(logits.dtype).min)
    return ProverOutput(
        logits=legal(known + torch.cat([score, layer(params.end_head, state)], 1)),
        prior_logits=legal(known),
        value=layer(params.value_head, state).squeeze(-1),
    )


def negative_kl_to_prior(out: ProverOutput) -> F32[Tensor, "B"]:
    """-KL(policy, prior): a bonus on it draws the policy to what the confidences say, not to uniform choices.

    With the bonus tau the best policy is proportional to prior exp(Q / tau), Q the return of each action.

    Source: Todorov 2009, "Efficient computation of optimal actions", PNAS 106(28).
    """
    log_p, log_prior = torch.log_softmax(out.logits, -1), torch.log_softmax(out.prior_logits, -1)
    p = log_p.exp()
    return -torch.where(p > 0, p * (log_p - log_prior), 0.0).sum(-1)


KL_REGULARISED_CATEGORICAL = Distribution(
    sample=CATEGORICAL.sample, log_prob=CATEGORICAL.log_prob, entropy=negative_kl_to_prior, mode=CATEGORICAL.mode
)


def agent(cfg: ProverNetworkConfig) -> Agent:
    """The prover's network as the learner takes it."""
    fits = None if cfg.capacity is None else _fits
    return Agent(cfg=cfg, init=init, apply=apply, distribution=KL_REGULARISED_CATEGORICAL, within_capacity=fits)


def rule_prior_logits(
    kb: KnowledgeBase, rule: I32[Tensor, "B S"], leave_one_out: Bool[Tensor, "B 1"]
) -> F32[Tensor, "B S"]:
    """Log-odds of each rule's train confidence, 0 for facts (rule -1).

    Args:
      left_out: the rule is applied to a known fact, which then counts neither as support nor as a pair.
    """
    odds = lambda confidence: torch.logit(CONFIDENCE_CLIP + (1.0 - 2.0 * CONFIDENCE_CLIP) * confidence)
    tables = torch.stack([odds(kbase.rule_confidence(kb, less)) for less in (False, True)])
    none = torch.zeros_like(tables[:, :1])
    return torch.cat([none, tables], 1)[leave_one_out.long(), (rule + 1).long()]


def exceeds_capacity(cfg: ProverNetworkConfig, mask: Bool[Tensor, "B S1"]) -> Bool[Tensor, "B"]:
    """The rows of a batch whose logits mean nothing, for want of room for some of their successors."""
    if cfg.capacity is None:
        return torch.zeros_like(mask[:, 0])
    count = mask[:, :-1].sum(1)
    return (count > 0) & (count.cumsum(0) > cfg.capacity)


def _fits(cfg: ProverNetworkConfig, obs: Observation) -> Bool[Tensor, "B"]:
    return ~exceeds_capacity(cfg, obs.action_mask)


def _packed(mask: Bool[Tensor, "B S"], capacity: int) -> I64[Tensor, "C"]:
    """The places of the entries that are filled, the first `capacity` of them; then a place beyond all."""
    n, filled = mask.numel(), mask.flatten()
    order = torch.where(filled, filled.cumsum(0) - 1, capacity).clamp_max(capacity)
    beyond = torch.full((capacity + 1,), n, device=mask.device)
    return beyond.scatter(0, order, torch.arange(n, device=mask.device))[:capacity]


def _successors(
    layer: ApplyDense, kb: KnowledgeBase, params: Params, obs: Observation, capacity: int | None
) -> _SuccessorVectors:
    if not obs.successors.atoms.shape[2]:
        return _rules(layer, kb, params, obs)
    if capacity is None:
        return _SuccessorVectors(_embed_successors(layer, params, obs.successors, obs.rule, obs.dead_end), None)
    mask = obs.action_mask[:, :-1]
    n, place = mask.numel(), _packed(mask, capacity)
    each = place.clamp_max(n - 1)
    vector = _embed_successors(
        layer, params, *tree.map(lambda x: x.flatten(0, 1)[each], (obs.successors, obs.rule, obs.dead_end))
    )
    # Copied to their places, for the gradient is a lookup then; looked up, it would be a sum by atomic additions.
    spread = vector.new_zeros((n + 1, vector.shape[1])).index_copy(0, place, vector)
    return _SuccessorVectors(spread[:n].view(*mask.shape, -1), None)


def _embed_successors(
    layer: ApplyDense, params: Params, goals: Goals, rule: I32[Tensor, "..."], hopeless: Bool[Tensor, "..."]
) -> F32[Tensor, "... H"]:
    vector = _embed_goals(params, goals) + embedding(rule + 1, params.rule_embedding)
    return gelu(
        layer(params.successor_layer, torch.where(hopeless[..., None], vector + params.dead_end_embedding, vector))
    )


def _rules(layer: ApplyDense, kb: KnowledgeBase, params: Params, obs: Observation) -> _SuccessorVectors:
    """Successors without goals: each rule stands for its body as it is written, so it is embedded once."""
    body = kb.rules[:, 1:]
    written = _embed_goals(params, Goals(body, torch.ones_like(body[..., 0])))
    vector = torch.cat([params.rule_embedding[:1], written + params.rule_embedding[1:]])
    both = gelu(layer(params.successor_layer, torch.cat([vector, vector + params.dead_end_embedding])))
    place = obs.rule + 1 + obs.dead_end * len(vector)
    if place.shape[1] * both.shape[1] < len(both):  # products with the table would be more numbers than vectors are
        return _SuccessorVectors(embedding(place, both), None)
    return _SuccessorVectors(both, place.long())


def _masked_mean(successor: _SuccessorVectors, legal: Bool[Tensor, "B S"]) -> F32[Tensor, "B H"]:
    """The mean of each state's legal successors, zero where there are none."""
    vector, place = successor
    weight = legal.to(vector.dtype)
    if place is None:
        total = (vector * weight[..., None]).sum(1)
    else:  # a product with the table: of thousands of rules a state, vectors would be far more than numbers
        total = weight.new_zeros((len(place), len(vector))).scatter_add(1, place, weight) @ vector
    return total / weight.sum(1, keepdim=True).clamp_min(1.0)


def _inner(successor: _SuccessorVectors, against: F32[Tensor, "B H"]) -> F32[Tensor, "B S"]:
    """The inner product of each state's successors with the state's own vector."""
    vector, place = successor
    if place is None:
        return (vector * against[:, None]).sum(-1)
    return (against @ vector.T).gather(1, place)


def _state(layer: ApplyDense, params: Params, obs: Observation, options: F32[Tensor, "B H"]) -> F32[Tensor, "B H"]:
    """What there is to prove, and the mean of what can be done about it."""
    goals = _embed_goals(params, obs.goals)
    query = _embed_atoms(params, obs.query, torch.zeros_like(obs.query[:, 0]))
    arguments = torch.where((obs.query[:, 1:] > 0)[..., None], params.term_embedding[obs.query[:, 1:].long()], 1.0)
    product = params.predicate_embedding[obs.query[:, 0].long()] * arguments.prod(
        1
    )  # what a bilinear link predictor sees
    features = torch.cat([goals, query, product, obs.remaining_depth[:, None]], 1)
    state = gelu(layer(params.hidden_layer, torch.cat([gelu(layer(params.state_layer, features)), options], 1)))
    for block in params.residual_blocks:
        state = state + gelu(layer(block, state))
    return state


def _embed_goals(params: Params, goals: Goals) -> F32[Tensor, "... D"]:
    """The sum of a list's atom vectors."""
    filled = goals.atoms[..., 0] > 0
    return torch.where(filled[..., None], _embed_atoms(params, goals.atoms, goals.height), 0.0).sum(-2)


def _embed_atoms(params: Params, atoms: I32[Tensor, "... W"], height: I32[Tensor, "..."]) -> F32[Tensor, "... D"]:
    """gelu(predicate + height + sum over arguments j of role_j * term_j)."""
    n_heights = params.height_embedding.shape[0]
    kind = (params.predicate_embedding[:, None] + params.height_embedding).flatten(
        0, 1
    )  # small tables are combined before the lookups
    vector = embedding(atoms[..., 0] * n_heights + height, kind)
    for j, role in enumerate(params.position_embedding):
        vector = vector + embedding(atoms[..., j + 1], params.term_embedding * role)
    return gelu(vector)
