"""The policy and value network of the prover.

Atoms become vectors, a goal list becomes the sum of its atoms' vectors, and each successor is scored against the state.
The logit of a rule is the log-odds of its train confidence plus the output of the network; the logit of a fact, and of
END, is the output of the network alone. The output layers start at zero, so an untrained prover follows the confidences
and picks facts uniformly. Entry points: `agent`, or `init` and `apply`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu

from funcppo.core import random, tree
from funcppo.core.settings import NonNegativeInt, Size, check_fields
from funcppo.core.types import F32, I32, I64, Bool
from funcppo.interfaces import KL_REGULARISED_CATEGORICAL
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.kb import KBSizes, KnowledgeBase
from funcppo.kg.logic.resolve import Goals
from funcppo.kg.logic.row_index import count_to
from funcppo.kg.search.env import Observation, World
from funcppo.nets.networks import Agent, Dense, dense, init_dense

# Confidences are clipped to [c, 1 - c], so that prior logits stay finite and training can still overrule them.
CONFIDENCE_CLIP = 0.01


# A dense layer, x W + b, with the dtype of its matrix product already chosen.
ApplyDense = Callable[[Dense, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProverNetworkConfig:
    """Static sizes of the prover's network."""

    sizes: KBSizes
    """Sizes of the knowledge base."""

    n_variables: NonNegativeInt
    """Number of variables that a goal list, or a rule, can hold."""

    max_height: Size
    """Maximum height of a goal."""

    embed_dim: Size
    """Dimension D of the embeddings."""

    hidden_dim: Size
    """Width H of the hidden layers."""

    n_residual_blocks: NonNegativeInt = 0
    """Number of residual blocks applied to the state vector."""

    matmul_dtype: torch.dtype | None = None
    """Data type of matrix products; None: that of the parameters."""

    capacity: Size | None = None
    """Number of successors per batch that are embedded, the first ones; None: every slot, filled or not."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class Params(NamedTuple):
    """Weights of the prover's network."""

    term_embedding: F32[Tensor, "C1 D"]  # constants, then canonical variables
    predicate_embedding: F32[Tensor, "P1 D"]
    # one per argument position, from the first argument on
    position_embedding: F32[Tensor, "J D"]
    height_embedding: F32[Tensor, "H1 D"]  # heights 0 to max_height
    # row 0 stands for every fact, row r + 1 for rule r
    rule_embedding: F32[Tensor, "R1 D"]
    # added to a successor that leads to no proof
    dead_end_embedding: F32[Tensor, "D"]
    successor_layer: Dense  # D to H, the vector of a successor
    state_layer: Dense  # 3 D + 1 to H, features of the state
    # 2 H to H, the state together with the mean of its successors
    hidden_layer: Dense
    residual_blocks: tuple[Dense, ...]  # H to H each
    # H to H, the vector that successors are scored against
    score_projection: Dense
    end_head: Dense  # H to 1, the logit of END
    value_head: Dense  # H to 1


# The vectors of each state's successors, one by one [B, S, H]; or a table [V, H], and the row of each successor [B, S].
_SuccessorVectors = tuple[Tensor, Tensor | None]


class ProverOutput(NamedTuple):
    """Policy logits over S successors and END, the logits before training, and the value."""

    # the smallest finite number where an action is illegal
    logits: F32[Tensor, "B S1"]
    # likewise; from the rule confidences alone
    prior_logits: F32[Tensor, "B S1"]
    value: F32[Tensor, "B"]


def init(cfg: ProverNetworkConfig, key: I64[Tensor, "2"]) -> Params:
    """Sample the initial weights: zero in score projection, END and value heads, otherwise uniform.

    The uniform weights are scaled for unit output variance.
    """
    keys = random.split(key, 9)
    sizes = cfg.sizes
    embed_dim = cfg.embed_dim
    hidden_dim = cfg.hidden_dim

    def init_table(key_index: int, n_rows: int) -> Tensor:
        """Return a table of entries uniform on [-1, 1)."""
        return 2.0 * random.uniform(keys[key_index], (n_rows, embed_dim)) - 1.0

    residual_blocks = [
        init_dense(random.fold_in(keys[6], i), hidden_dim, hidden_dim)
        for i in range(cfg.n_residual_blocks)
    ]
    return Params(
        term_embedding=init_table(0, 1 + sizes.n_constants + cfg.n_variables),
        predicate_embedding=init_table(1, 1 + sizes.n_predicates),
        position_embedding=init_table(2, sizes.atom_width - 1),
        height_embedding=init_table(3, 1 + cfg.max_height),
        rule_embedding=init_table(4, 1 + sizes.n_rules),
        dead_end_embedding=init_table(7, 1)[0],
        successor_layer=init_dense(keys[8], embed_dim, hidden_dim),
        state_layer=init_dense(keys[5], 3 * embed_dim + 1, hidden_dim),
        hidden_layer=init_dense(keys[6], 2 * hidden_dim, hidden_dim),
        residual_blocks=tuple(residual_blocks),
        # With scale 0 the weights are zero, so the key has no influence.
        score_projection=init_dense(keys[7], hidden_dim, hidden_dim, scale=0.0),
        end_head=init_dense(keys[7], hidden_dim, 1, scale=0.0),
        value_head=init_dense(keys[7], hidden_dim, 1, scale=0.0),
    )


def apply(
    cfg: ProverNetworkConfig, world: World, params: Params, obs: Observation
) -> ProverOutput:
    """Compute the policy logits, prior logits and value of each state.

        logits = log-odds of the rule's confidence (0 for facts and END) + output of the network

    Args:
      world: the knowledge base, whose rules and confidences are read.
      obs: the states; rows for which `exceeds_capacity` holds get numbers without a meaning.
    """
    layer = partial(dense, matmul_dtype=cfg.matmul_dtype)

    # What the network adds: an inner product for each successor, and a number for END.
    successors = _successor_vectors(layer, world.kb, params, obs, cfg.capacity)
    successor_mask = obs.action_mask[:, :-1]
    mean_successor = _masked_mean(successors, successor_mask)
    state = _state_vector(layer, params, obs, mean_successor)
    direction = layer(params.score_projection, state)
    scores = _inner_products(successors, direction) / cfg.hidden_dim**0.5
    end_score = layer(params.end_head, state)
    correction = torch.cat([scores, end_score], 1)

    # Only at the root is a rule applied to the query itself, which must not count as its own evidence.
    at_root = obs.goals.height[:, :1] == 0
    leave_one_out = obs.query_is_fact[:, None] & at_root
    rule_prior = rule_prior_logits(world.kb, obs.rule, leave_one_out)
    end_prior = torch.zeros_like(rule_prior[:, :1])
    prior = torch.cat([rule_prior, end_prior], 1)

    lowest = torch.finfo(prior.dtype).min
    return ProverOutput(
        logits=torch.where(obs.action_mask, prior + correction, lowest),
        prior_logits=torch.where(obs.action_mask, prior, lowest),
        value=layer(params.value_head, state).squeeze(-1),
    )


def agent(
    cfg: ProverNetworkConfig,
) -> Agent[World, Params, Observation, ProverOutput]:
    """Return the network as an `Agent`, whose entropy is relative to the rule confidences."""
    return Agent(
        cfg=cfg,
        init=init,
        apply=apply,
        distribution=KL_REGULARISED_CATEGORICAL,
        within_capacity=None if cfg.capacity is None else _within_capacity,
    )


def rule_prior_logits(
    kb: KnowledgeBase,
    rule: I32[Tensor, "B S"],
    leave_one_out: Bool[Tensor, "B 1"],
) -> F32[Tensor, "B S"]:
    """Return the log-odds of each rule's train confidence; 0 for facts.

    Args:
      rule: id of the rule, -1 for a fact.
      leave_one_out: the rule is applied to a known fact, which then counts neither as support nor as a body pair.
    """
    # Row 0 of the table holds plain confidences, row 1 leave-one-out ones; column 0 stands for facts.
    plain = _confidence_log_odds(kbase.rule_confidence(kb, False))
    without_query = _confidence_log_odds(kbase.rule_confidence(kb, True))
    rule_logits = torch.stack([plain, without_query])
    fact_logits = torch.zeros_like(rule_logits[:, :1])
    logits = torch.cat([fact_logits, rule_logits], 1)
    column = (rule + 1).long()
    return logits[leave_one_out.long(), column]


def _confidence_log_odds(confidence: F32[Tensor, "R"]) -> F32[Tensor, "R"]:
    """Compute the log-odds of confidences scaled to [c, 1 - c]."""
    scale = 1.0 - 2.0 * CONFIDENCE_CLIP
    clipped = CONFIDENCE_CLIP + scale * confidence
    return torch.logit(clipped)


def exceeds_capacity(
    cfg: ProverNetworkConfig, mask: Bool[Tensor, "B S1"]
) -> Bool[Tensor, "B"]:
    """Check, per row of a batch, whether it has a successor beyond the capacity; its logits have no meaning then.

    Args:
      mask: the action mask, END in the last column.
    """
    if cfg.capacity is None:
        return torch.zeros_like(mask[:, 0])
    n_successors = mask[:, :-1].sum(1)
    n_used = n_successors.cumsum(0)
    return (n_successors > 0) & (n_used > cfg.capacity)


def _within_capacity(
    cfg: ProverNetworkConfig, obs: Observation
) -> Bool[Tensor, "B"]:
    return ~exceeds_capacity(cfg, obs.action_mask)


def _successor_vectors(
    layer: ApplyDense,
    kb: KnowledgeBase,
    params: Params,
    obs: Observation,
    capacity: int | None,
) -> _SuccessorVectors:
    """Compute the vector of every successor, by the cheapest of three ways."""
    successors_have_goals = obs.successors.atoms.shape[2] > 0
    if not successors_have_goals:
        return _rule_vectors(layer, kb, params, obs)
    if capacity is None:
        vectors = _embed_successors(
            layer, params, obs.successors, obs.rule, obs.dead_end
        )
        return vectors, None
    return _ragged_successor_vectors(layer, params, obs, capacity)


def _ragged_successor_vectors(
    layer: ApplyDense, params: Params, obs: Observation, capacity: int
) -> _SuccessorVectors:
    """Compute the vectors of the first `capacity` successors of the batch; zero for all other slots."""
    mask = obs.action_mask[:, :-1]
    n_slots = mask.numel()
    position = filled_positions(mask, capacity)

    # An unused position is n_slots: it reads the last slot, and writes a row that is cut off at the end.
    readable = position.clamp_max(n_slots - 1)
    goals, rule, dead_end = tree.map(
        lambda x: x.flatten(0, 1)[readable],
        (obs.successors, obs.rule, obs.dead_end),
    )
    vectors = _embed_successors(layer, params, goals, rule, dead_end)

    # Scatter in the forward pass so the backward pass is a gather; a forward gather would need an atomic scatter-add.
    all_slots = vectors.new_zeros((n_slots + 1, vectors.shape[1]))
    all_slots = all_slots.index_copy(0, position, vectors)
    all_slots = all_slots[:n_slots]
    return all_slots.view(*mask.shape, -1), None


def filled_positions(
    mask: Bool[Tensor, "B S"], capacity: int
) -> I64[Tensor, "C"]:
    """Return flat positions of the first `capacity` true entries, in order, padded with `mask.numel()`."""
    n_slots = mask.numel()
    filled = mask.flatten()
    # The rank of each true entry; false entries and those beyond the capacity share the last bin, which is dropped.
    rank = torch.where(filled, filled.cumsum(0) - 1, capacity)
    rank = rank.clamp_max(capacity)
    position = count_to(n_slots, mask)
    unused = torch.full((capacity + 1,), n_slots, device=mask.device)
    return unused.scatter(0, rank, position)[:capacity]


def _embed_successors(
    layer: ApplyDense,
    params: Params,
    goals: Goals,
    rule: I32[Tensor, "..."],
    dead_end: Bool[Tensor, "..."],
) -> F32[Tensor, "... H"]:
    """Compute the vectors of successors from their goals, their rule, and whether they are dead ends."""
    goal_vector = _embed_goals(params, goals)
    rule_vector = _look_up(params.rule_embedding, rule + 1)
    vector = goal_vector + rule_vector
    as_dead_end = vector + params.dead_end_embedding
    vector = torch.where(dead_end[..., None], as_dead_end, vector)
    return gelu(layer(params.successor_layer, vector))


def _rule_vectors(
    layer: ApplyDense, kb: KnowledgeBase, params: Params, obs: Observation
) -> _SuccessorVectors:
    """Compute the vectors of successors without goals, where a rule stands for its body as written.

    Such a vector depends on the rule and on being a dead end alone, so a table with both variants of every rule holds
    them all.
    """
    body = kb.rules[:, 1:]
    height = torch.ones_like(body[..., 0])
    body_vectors = _embed_goals(params, Goals(body, height))
    fact_vector = params.rule_embedding[:1]
    rule_vectors = body_vectors + params.rule_embedding[1:]

    fact_and_rules = torch.cat([fact_vector, rule_vectors])
    as_dead_ends = fact_and_rules + params.dead_end_embedding
    variants = torch.cat([fact_and_rules, as_dead_ends])
    table = gelu(layer(params.successor_layer, variants))
    table_index = obs.rule + 1 + obs.dead_end * len(fact_and_rules)

    # Products with the table have as many numbers a state as it has rows; copies of its rows have S * H.
    copies_are_smaller = table_index.shape[1] * table.shape[1] < len(table)
    if copies_are_smaller:
        return _look_up(table, table_index), None
    return table, table_index.long()


def _masked_mean(
    successor: _SuccessorVectors, legal: Bool[Tensor, "B S"]
) -> F32[Tensor, "B H"]:
    """Return the mean vector of each state's legal successors; zero without legal successors."""
    vectors, table_index = successor
    weight = legal.to(vectors.dtype)
    if table_index is None:
        total = (vectors * weight[..., None]).sum(1)
    else:
        # Count how often each row of the table occurs; gathered vectors would take far more memory.
        counts = weight.new_zeros((len(table_index), len(vectors)))
        counts = counts.scatter_add(1, table_index, weight)
        total = counts @ vectors
    n_legal = weight.sum(1, keepdim=True)
    return total / n_legal.clamp_min(1.0)


def _inner_products(
    successor: _SuccessorVectors, against: F32[Tensor, "B H"]
) -> F32[Tensor, "B S"]:
    """Return the inner product of each successor's vector with `against` of its state."""
    vectors, table_index = successor
    if table_index is None:
        products = vectors * against[:, None]
        return products.sum(-1)
    table_scores = against @ vectors.T
    return table_scores.gather(1, table_index)


def _state_vector(
    layer: ApplyDense,
    params: Params,
    obs: Observation,
    mean_successor: F32[Tensor, "B H"],
) -> F32[Tensor, "B H"]:
    """Compute the vector of each state from its goals, its query, the depth left, and its successors' mean."""
    root_height = torch.zeros_like(obs.query[:, 0])
    features = [
        _embed_goals(params, obs.goals),
        _embed_atoms(params, obs.query, root_height),
        _query_product(params, obs.query),
        obs.remaining_depth[:, None],
    ]
    hidden = gelu(layer(params.state_layer, torch.cat(features, 1)))
    hidden_and_successors = torch.cat([hidden, mean_successor], 1)
    state = gelu(layer(params.hidden_layer, hidden_and_successors))
    for block in params.residual_blocks:
        state = state + gelu(layer(block, state))
    return state


def _query_product(
    params: Params, query: I32[Tensor, "B W"]
) -> F32[Tensor, "B D"]:
    """Return the elementwise product of predicate and arguments, as in a bilinear link predictor (DistMult)."""
    predicate = query[:, 0].long()
    argument = query[:, 1:].long()
    is_argument = (argument > 0)[..., None]
    argument_vectors = torch.where(
        is_argument, params.term_embedding[argument], 1.0
    )
    return params.predicate_embedding[predicate] * argument_vectors.prod(1)


def _embed_goals(params: Params, goals: Goals) -> F32[Tensor, "... D"]:
    """Return the sum of the atom vectors of each goal list."""
    filled = goals.atoms[..., 0] > 0
    atom_vectors = _embed_atoms(params, goals.atoms, goals.height)
    atom_vectors = torch.where(filled[..., None], atom_vectors, 0.0)
    return atom_vectors.sum(-2)


def _embed_atoms(
    params: Params, atoms: I32[Tensor, "... W"], height: I32[Tensor, "..."]
) -> F32[Tensor, "... D"]:
    """Compute gelu(predicate + height + sum over arguments j of position_j * term_j)."""
    # Small tables are combined before the lookups: one lookup per argument, and one for predicate and height.
    n_heights = params.height_embedding.shape[0]
    table = params.predicate_embedding[:, None] + params.height_embedding
    predicate = atoms[..., 0]
    table_index = predicate * n_heights + height
    vector = _look_up(table.flatten(0, 1), table_index)
    for j, position in enumerate(params.position_embedding):
        argument = atoms[..., j + 1]
        terms_at_position = params.term_embedding * position
        vector = vector + _look_up(terms_at_position, argument)
    return gelu(vector)


def _look_up(
    table: F32[Tensor, "n D"], index: I32[Tensor, "..."]
) -> F32[Tensor, "... D"]:
    """Return rows of a table by index, with gradients that are added up in a fixed order.

    On a GPU the gradient of an index is, and that of `embedding` is not; on a CPU both are, and `embedding` is faster.
    """
    if table.is_cuda:
        return table[index.long()]
    return embedding(index, table)
