"""Proof search as a Markov decision process: what a state, an action and a reward are.

A state is a list of goals still to prove. An action picks one of its successors (the goal lists after one resolution
step) or END, which gives up. `environment` packs the functions below for the learner; `initial_state`,
`step_functional` and `observe` can be called on their own.

Visited states need no memory, because no state recurs on a path: a resolution step removes a goal or replaces it by
goals of greater height, none above `max_height`, so the multiset of heights decreases in a well-founded order
(Dershowitz & Manna 1979).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core import random, tree
from funcppo.core.random import integer_from_key, unit_from_key
from funcppo.core.settings import (
    NonNegativeFloat,
    Size,
    UnitInterval,
    check_fields,
)
from funcppo.core.types import F32, I32, I64, Bool
from funcppo.interfaces import Environment, Timestep
from funcppo.kg.config import FactSelection, RewardScheme
from funcppo.kg.logic import derive
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.derive import DerivabilityIndex
from funcppo.kg.logic.kb import KBSizes, KnowledgeBase
from funcppo.kg.logic.resolve import Goals, ResolveConfig, Successors, resolve
from funcppo.kg.logic.row_index import count_to

# corruptions sampled for a negative before it counts as failed
CORRUPTION_ATTEMPTS = 8
# classes of constants by their number of facts
N_DEGREE_CLASSES = 8
# goals, and the height left, that a policy over classes sees
SEEN_GOALS, SEEN_HEIGHT = 4, 3
RUNNING, PROVED, FAILED, ENDED, EXHAUSTED = range(5)
# indexed by the numbers above
STATUS_NAMES = ("running", "proved", "failed", "ended", "exhausted")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProverEnvConfig:
    """Static settings of the search and of the queries sampled at a reset."""

    resolve: ResolveConfig
    """Settings of a resolution step."""

    max_depth: Size
    """Maximum number of resolution steps; a row that reaches it is EXHAUSTED."""

    reward: RewardScheme
    """How an episode is rewarded; see `terminal_reward`."""

    fact_selection: FactSelection
    """Who selects facts. oracle: a chosen rule proves its goal at once if the derivability index says so; needs
    max_height 1."""

    negatives_per_positive: NonNegativeFloat
    """Number of negative training queries per positive one."""

    hard_negative_fraction: UnitInterval
    """Fraction of the negatives sampled from `World.hard_negatives`; the others are uniform corruptions."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class World(NamedTuple):
    """Tensors that proof search reads and training never writes."""

    kb: KnowledgeBase
    positives: I32[Tensor, "Q W"]  # positive queries
    # provable atoms that are not facts; may be empty
    hard_negatives: I32[Tensor, "Q2 W"]
    # what T_P derives, and by which rules
    derivability_index: DerivabilityIndex
    # what a policy sees of each constant that is no argument of the query, see
    # `term_classes`; empty where it sees the constant itself
    term_class: I32[Tensor, "C1"]


class EnvState(NamedTuple):
    """State of proof search: one partial proof per row."""

    goals: Goals  # [B, A, ...], what is left to prove
    successors: Successors  # [B, S, ...], of `goals`
    query: I32[Tensor, "B W"]  # the atom that the search started from
    is_positive: Bool[Tensor, "B"]  # the query is a positive
    depth: I32[Tensor, "B"]  # resolution steps taken
    status: I32[Tensor, "B"]  # RUNNING, PROVED, FAILED, ENDED or EXHAUSTED
    # a successor was dropped somewhere on this path
    overflow: Bool[Tensor, "B"]


class ResetSample(NamedTuple):
    """Random part of a reset: the queries to start from."""

    query: I32[Tensor, "B W"]
    label: Bool[Tensor, "B"]  # the query is a positive


class Observation(NamedTuple):
    """Input of the policy and value network."""

    goals: Goals  # [B, A, ...]
    successors: Goals  # [B, S, A, ...]
    rule: I32[Tensor, "B S"]  # rule that makes each successor, -1 for a fact
    action_mask: Bool[Tensor, "B S1"]  # legal actions: S successors, then END
    # successors that T_P shows to lead to no proof; of a policy that sees classes of constants, those with a goal that
    # no fact matches though its predicate has facts
    dead_end: Bool[Tensor, "B S"]
    query: I32[Tensor, "B W"]  # the atom that the search started from
    # the query is itself a fact, so rule confidences leave it out
    query_is_fact: Bool[Tensor, "B"]
    # fraction of the depth limit that is left
    remaining_depth: F32[Tensor, "B"]


class _SearchNode(NamedTuple):
    """A goal list and its successors, per row."""

    goals: Goals
    successors: Successors


def initial_state(
    cfg: ProverEnvConfig,
    world: World,
    query: I32[Tensor, "B W"],
    label: Bool[Tensor, "B"],
) -> EnvState:
    """Return the state whose only goal is the query; RUNNING even without successors, because END is legal.

    Args:
      query: the atoms to prove.
      label: whether each is a positive; only rewards depend on it.
    """
    goals = single_goal(cfg.resolve.max_goals, query)
    successors = resolve(cfg.resolve, world.kb, goals, query)
    zero = torch.zeros_like(query[:, 0])  # also the status: RUNNING is 0
    return EnvState(
        goals=goals,
        successors=successors,
        query=query,
        is_positive=label,
        depth=zero,
        status=zero,
        overflow=successors.overflow,
    )


def reset(
    cfg: ProverEnvConfig, world: World, key: I64[Tensor, "B 2"]
) -> EnvState:
    """Start searches for sampled training queries, one row per key."""
    reset_sample = sample_reset(cfg, world, key)
    return reset_from_sample(cfg, world, reset_sample)


def sample_reset(
    cfg: ProverEnvConfig, world: World, key: I64[Tensor, "B 2"]
) -> ResetSample:
    """Sample the queries of a reset: positives, hard negatives and corruptions, in the proportions of `cfg`."""
    query, label, _ = sample_training_queries(
        key,
        world.kb,
        cfg.resolve.sizes,
        world.positives,
        world.hard_negatives,
        positive_fraction=1.0 / (1.0 + cfg.negatives_per_positive),
        hard_negative_fraction=cfg.hard_negative_fraction,
    )
    return ResetSample(query=query.to(torch.int32), label=label)


def reset_from_sample(
    cfg: ProverEnvConfig, world: World, reset_sample: ResetSample
) -> EnvState:
    """Start searches for queries that are already sampled."""
    return initial_state(cfg, world, reset_sample.query, reset_sample.label)


def step_functional(
    cfg: ProverEnvConfig,
    world: World,
    state: EnvState,
    action: I64[Tensor, "B"],
    key: I64[Tensor, "B 2"],
) -> tuple[EnvState, Timestep]:
    """Follow each running row's chosen successor, or end the row.

    A finished row stays as it is and gets reward 0.

    Args:
      action: a successor 0..S-1, or S for END. An illegal successor counts as END.
      key: unused, because resolution is deterministic.

    Returns:
      The next state, and the reward and flags of the transition.
    """
    if cfg.fact_selection == "oracle":
        node = _apply_rule_by_index(cfg, world, state, action)
    else:
        slot = _successor_slot(state, action)
        goals = tree.map(
            lambda x: take(x, slot).squeeze(1), state.successors.goals
        )
        node = _SearchNode(
            goals, resolve(cfg.resolve, world.kb, goals, state.query)
        )
    return _transition(cfg, state, action, node)


def observe(cfg: ProverEnvConfig, world: World, state: EnvState) -> Observation:
    """Return the observation of a state; END is legal in every state, or only in one without successors."""
    return make_observation(
        cfg.resolve,
        world,
        state.goals,
        state.successors,
        state.query,
        remaining=1.0 - state.depth / cfg.max_depth,
    )


def make_observation(
    cfg: ResolveConfig,
    world: World,
    goals: Goals,
    successors: Successors,
    query: I32[Tensor, "B W"],
    remaining: F32[Tensor, "B"],
) -> Observation:
    """Build the observation of partial proofs, whether an environment state or a beam search holds them.

    Args:
      query: the atom that each proof started from.
      remaining: fraction of the depth limit that is left.
    """
    sizes = cfg.sizes
    end_is_legal = torch.ones_like(successors.mask[:, :1])
    if cfg.selects_goal:
        # A search for any proof gives up where nothing is left.
        end_is_legal = ~successors.mask.any(1, keepdim=True)
    dead_end = derive.dead_end_mask(
        world.derivability_index,
        sizes,
        cfg.max_height,
        query,
        goals,
        successors,
    )
    query_is_fact = kbase.contains(world.kb, sizes, query.long())
    seen, seen_successors, seen_query = goals, successors.goals, query
    if len(world.term_class):
        classify = partial(_classify, world, cfg, query)
        seen, seen_successors = classify(goals), classify(successors.goals)
        seen_query = _classify_terms(world, sizes, query, query)
        dead_end = _has_unmatched_goal(cfg, world.kb, successors.goals)
        remaining = torch.ones_like(remaining)
    return Observation(
        goals=seen,
        successors=seen_successors,
        rule=successors.rule,
        action_mask=torch.cat([successors.mask, end_is_legal], 1),
        dead_end=dead_end,
        query=seen_query,
        query_is_fact=query_is_fact,
        remaining_depth=remaining,
    )


def n_term_classes(sizes: KBSizes) -> int:
    """Return the number of classes of `term_classes`, with one for each argument of the query."""
    return sizes.atom_width - 1 + N_DEGREE_CLASSES


def term_classes(kb: KnowledgeBase, sizes: KBSizes) -> I32[Tensor, "C1"]:
    """Return the class of each constant: the number of its facts, rounded down to a power of 2.

    A policy that sees classes alone knows constants that it has not met.
    """
    arguments = kb.facts[:, 1:].flatten().long()
    degree = arguments.bincount(minlength=sizes.n_constants + 1)
    power = (1.0 + degree).log2().floor().clamp_max(N_DEGREE_CLASSES - 1)
    number = (sizes.atom_width + power).to(torch.int32)
    return number.index_fill(0, arguments.new_zeros(1), 0)


def _classify(
    world: World, cfg: ResolveConfig, query: I32[Tensor, "B W"], goals: Goals
) -> Goals:
    """Return what a policy sees of goals that is to know larger proofs than those that it has met.

    These are classes of constants, the first goals, and the height that is left where it is little.
    """
    atoms = goals.atoms[..., :SEEN_GOALS, :]
    left = cfg.max_height - goals.height[..., :SEEN_GOALS]
    return Goals(
        _classify_terms(world, cfg.sizes, query, atoms),
        SEEN_HEIGHT - left.clamp(0, SEEN_HEIGHT),
    )


def _has_unmatched_goal(
    cfg: ResolveConfig, kb: KnowledgeBase, goals: Goals
) -> Bool[Tensor, "B S"]:
    """Check, per successor, whether no fact matches one of its first goals though there are facts of its predicate."""
    atoms = goals.atoms[..., :SEEN_GOALS, :].long()
    _, _, n_facts = kbase.lookup_facts(kb, cfg.sizes, atoms, 0)
    has_facts = torch.diff(kb.fact_offsets) > 0
    return ((n_facts == 0) & has_facts[atoms[..., 0]]).any(-1)


def _classify_terms(
    world: World,
    sizes: KBSizes,
    query: I32[Tensor, "B W"],
    atoms: I32[Tensor, "B ... W"],
) -> I32[Tensor, "B ... W"]:
    """Replace the constants of atoms by their classes, those of the query by their places in it."""
    n_constants = sizes.n_constants
    terms = atoms[..., 1:]
    seen = world.term_class[terms.clamp(0, n_constants).long()]
    for place in range(query.shape[1] - 1, 0, -1):
        asked = query[:, place].view(-1, *[1] * (terms.dim() - 1))
        seen = torch.where((terms == asked) & (terms > 0), place, seen)
    variable = terms - n_constants + n_term_classes(sizes)
    seen = torch.where(terms > n_constants, variable, seen)
    return torch.cat([atoms[..., :1], seen.to(atoms.dtype)], -1)


def environment(cfg: ProverEnvConfig) -> Environment:
    """Return proof search as an `Environment`.

    The depth limit terminates an episode and does not truncate it, because the remaining depth is observed.
    """
    return Environment(
        cfg=cfg,
        reset=reset,
        step_functional=step_functional,
        observe=observe,
        truncates=False,
        sample_reset=sample_reset,
        reset_from_sample=reset_from_sample,
    )


def terminal_reward(
    cfg: ProverEnvConfig, proved: Bool[Tensor, "B"], label: Bool[Tensor, "B"]
) -> F32[Tensor, "B"]:
    """Compute the reward at the end of a search, under the scheme `cfg.reward`.

    proof: +1 for a proved positive, else 0. signed: +1 for a proved positive and -1 for a proved negative, else 0.
    balanced: +1 for a proved positive, -1 for a missed positive, -1 for a proved negative, and
    +1 / negatives_per_positive for a negative left unproved.

    Args:
      proved: whether the search found a proof.
      label: whether the query is a positive.
    """
    if cfg.reward == "proof":
        return torch.where(proved & label, 1.0, 0.0)

    proof_reward = torch.where(label, 1.0, -1.0)
    if cfg.reward == "signed":
        return torch.where(proved, proof_reward, 0.0)

    rejection_reward = 0.0
    if cfg.negatives_per_positive:
        rejection_reward = 1.0 / cfg.negatives_per_positive
    no_proof_reward = torch.where(label, -1.0, rejection_reward)
    return torch.where(proved, proof_reward, no_proof_reward)


def single_goal(max_goals: int, query: I32[Tensor, "B W"]) -> Goals:
    """Return goal lists that hold the query alone, at height 0."""
    n_rows, atom_width = query.shape
    padding = query.new_zeros((n_rows, max_goals - 1, atom_width))
    atoms = torch.cat([query[:, None], padding], 1)
    return Goals(atoms, query.new_zeros((n_rows, max_goals)))


def _successor_slot(
    state: EnvState, action: I64[Tensor, "B"]
) -> I64[Tensor, "B 1"]:
    """Return the slot of the chosen successor, [B, 1]; an arbitrary valid slot if the action is END."""
    n_slots = state.successors.mask.shape[1]
    slot = action.clamp(0, n_slots - 1)
    return slot[:, None]


def _apply_rule_by_index(
    cfg: ProverEnvConfig,
    world: World,
    state: EnvState,
    action: I64[Tensor, "B"],
) -> _SearchNode:
    """Return the node after a rule choice if facts come from the derivability index.

    The goal list is empty, which means proved, where the chosen rule derives the root, and unchanged elsewhere. There
    are no successors, so a row that is not proved has failed.
    """
    rule = state.successors.rule.gather(1, _successor_slot(state, action))
    proved = derive.rule_derives(
        world.derivability_index,
        cfg.resolve.sizes,
        state.query,
        rule,
    )
    atoms = torch.where(proved[..., None], 0, state.goals.atoms)
    no_successor = torch.zeros_like(state.successors.mask)
    return _SearchNode(
        goals=state.goals._replace(atoms=atoms),
        successors=state.successors._replace(mask=no_successor),
    )


def _transition(
    cfg: ProverEnvConfig,
    state: EnvState,
    action: I64[Tensor, "B"],
    node: _SearchNode,
) -> tuple[EnvState, Timestep]:
    """Return the next state and the timestep, given the node that a legal successor leads to."""
    # A running row moves, or ends its search by END or by an illegal action.
    active = state.status == RUNNING
    legal = state.successors.mask.gather(
        1, _successor_slot(state, action)
    ).squeeze(1)
    moves = active & (action < cfg.resolve.max_successors) & legal
    ends = active & ~moves

    current_node = _SearchNode(state.goals, state.successors)
    next_node = tree.where(moves, node, current_node)
    depth = torch.where(moves, state.depth + 1, state.depth)
    status = _status(cfg, next_node, depth, ends)
    next_state = EnvState(
        goals=next_node.goals,
        successors=next_node.successors,
        query=state.query,
        is_positive=state.is_positive,
        depth=depth,
        status=torch.where(active, status, state.status),
        overflow=state.overflow | (moves & node.successors.overflow),
    )

    # A dropped successor could have been the proof, so an overflowed row is neither rewarded nor punished.
    terminated = next_state.status != RUNNING
    is_rewarded = active & terminated & ~next_state.overflow
    reward = terminal_reward(
        cfg, next_state.status == PROVED, state.is_positive
    )
    timestep = Timestep(
        reward=torch.where(is_rewarded, reward, 0.0),
        terminated=terminated,
        truncated=torch.zeros_like(terminated),
    )
    return next_state, timestep


def _status(
    cfg: ProverEnvConfig,
    node: _SearchNode,
    depth: I32[Tensor, "B"],
    ends: Bool[Tensor, "B"],
) -> I32[Tensor, "B"]:
    """Compute the status of each row after a step; a proof at the depth limit is a proof."""
    has_no_successor = ~node.successors.mask.any(-1)
    has_no_goal = node.goals.atoms[:, 0, 0] == 0
    status = torch.where(depth >= cfg.max_depth, EXHAUSTED, RUNNING)
    status = torch.where(has_no_successor, FAILED, status)
    status = torch.where(ends, ENDED, status)
    status = torch.where(has_no_goal, PROVED, status)
    return status.to(torch.int32)


def take(x: Tensor, index: I64[Tensor, "B n"]) -> Tensor:
    """Return x[b, index[b, i]] for x [B, m, ...]."""
    trailing_shape = x.shape[2:]
    index = index.view(*index.shape, *[1] * len(trailing_shape))
    return x.gather(1, index.expand(-1, -1, *trailing_shape))


# -- training queries: which atoms to prove, and whether each of them is true


def sample_training_queries(
    key: I64[Tensor, "B 2"],
    kb: KnowledgeBase,
    sizes: KBSizes,
    train: I64[Tensor, "N W"],
    hard_negatives: I64[Tensor, "H W"],
    positive_fraction: float,
    hard_negative_fraction: float,
) -> tuple[I64[Tensor, "B W"], Bool[Tensor, "B"], Bool[Tensor, "B"]]:
    """Sample one training query for each key: a train fact, a corruption of one, or a hard negative.

    A corruption replaces one argument of a train fact by a constant; fact, argument and constant are uniform. The first
    of `CORRUPTION_ATTEMPTS` corruptions that is not a fact is taken, so the result is uniform over such corruptions. A
    row whose attempts are all facts becomes a positive, its first attempt, and is flagged.

    Args:
      key: one PRNG key per row; a row depends on no other key.
      kb: the knowledge base whose facts a negative must differ from; no other split is consulted.
      train: the facts to sample positives from and to corrupt; not empty.
      hard_negatives: provable atoms that are not facts; may be empty if `hard_negative_fraction` is 0.
      positive_fraction: probability that a row is a positive.
      hard_negative_fraction: probability that a negative comes from `hard_negatives`.

    Returns:
      query: the atoms, padded to the width of the facts.
      label: whether each is a train fact.
      corruption_failed: rows meant as negatives for which no corruption was found.

    Raises:
      ValueError: a table that rows are sampled from is empty.
    """
    if len(train) == 0 or (
        len(hard_negatives) == 0 and hard_negative_fraction > 0
    ):
        raise ValueError(
            f"expected facts to sample queries from, got {len(train)} train facts and "
            f"{len(hard_negatives)} hard negatives"
        )
    # Every use has a random word of its own, so that no two uses are correlated: the first four are below, and each
    # attempt of a corruption has three, for fact, argument and constant.
    n_words = 4 + 3 * CORRUPTION_ATTEMPTS
    word_index = count_to(n_words, key)
    words = random.fold_in(key[:, None], word_index)
    positive_word, fact_word, hard_word, hard_row_word = words[:, :4].unbind(1)

    is_positive = unit_from_key(positive_word) < positive_fraction
    fact_row = integer_from_key(fact_word, len(train))
    positive = train[fact_row].to(torch.int64)

    # Every row gets a corruption and, if there are any, a hard negative; which of them counts is selected below. The
    # work is the same for all rows, so shapes stay fixed.
    attempt_words = words[:, 4:].unflatten(1, (CORRUPTION_ATTEMPTS, 3))
    negative, is_fact = _sample_corruptions(attempt_words, kb, sizes, train)
    is_hard = unit_from_key(hard_word) < hard_negative_fraction
    is_hard = ~is_positive & is_hard
    if len(hard_negatives):
        hard_row = integer_from_key(hard_row_word, len(hard_negatives))
        hard_negative = hard_negatives[hard_row].to(torch.int64)
        negative = torch.where(is_hard[:, None], hard_negative, negative)

    corruption_failed = is_fact & ~is_positive & ~is_hard
    query = torch.where(is_positive[:, None], positive, negative)
    return query, is_positive | corruption_failed, corruption_failed


def _sample_corruptions(
    words: I64[Tensor, "B G 3 2"],
    kb: KnowledgeBase,
    sizes: KBSizes,
    train: I64[Tensor, "N W"],
) -> tuple[I64[Tensor, "B W"], Bool[Tensor, "B"]]:
    """Return, per row, the first of G corruptions that is not a fact, and whether all of them are facts.

    If all are facts, the first corruption is returned.

    Args:
      words: the random words of each attempt: for the fact, for the argument position and for the constant.
    """
    n_columns = train.shape[1]
    fact_words, argument_words, constant_words = words.unbind(-2)
    row = integer_from_key(fact_words, len(train))
    fact = train[row].to(torch.int64)

    # Arguments are columns 1..arity; column 0 is the predicate. An atom without arguments is left as it is.
    arity = (fact[..., 1:] > 0).sum(-1)
    argument = 1 + integer_from_key(argument_words, arity.clamp_min(1))
    constant = 1 + integer_from_key(constant_words, sizes.n_constants)
    column = count_to(n_columns, fact)
    has_argument = (argument <= arity)[..., None]
    is_replaced = (column == argument[..., None]) & has_argument
    corrupted = torch.where(is_replaced, constant[..., None], fact)

    # `argmax` of 0/1 numbers returns the first 1, and 0 if there is none.
    is_fact = kbase.contains(kb, sizes, corrupted)
    first_negative = (~is_fact).to(torch.int64).argmax(1)
    atom = take(corrupted, first_negative[:, None]).squeeze(1)
    return atom, is_fact.all(1)
