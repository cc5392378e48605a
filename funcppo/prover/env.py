"""Proof search as a decision process: the state is a goal list, an action picks one of its successors or END.

No state of a path can recur: a resolution step removes a goal or replaces it by higher ones, none above `max_height`,
so the multiset of heights falls in a well-founded order (Dershowitz & Manna 1979). Visited states therefore need no
memory here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from funcppo import tree
from funcppo.envs.base import Environment, Timestep
from funcppo.logic import derivability as outlooks
from funcppo.logic import kb as kbase
from funcppo.logic.derivability import DerivabilityIndex
from funcppo.logic.kb import KnowledgeBase
from funcppo.logic.resolve import Goals, ResolveConfig, Successors, resolve
from funcppo.prover.query_sampling import sample_training_queries
from funcppo.types import F32, I32, I64, Bool

RUNNING, PROVED, FAILED, ENDED, EXHAUSTED = range(5)
STATUS_NAMES = ("running", "proved", "failed", "ended", "exhausted")
RewardScheme = Literal["proof", "signed", "balanced"]
FactSelection = Literal["policy", "oracle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProverEnvConfig:
    """Static settings of the search and of the queries drawn at a reset."""

    resolve: ResolveConfig
    max_depth: int  # resolution steps, after which a row is EXHAUSTED
    reward: RewardScheme
    fact_selection: FactSelection  # found: which rules derive the root, the outlook knows; needs max_height 1
    negatives_per_positive: float  # training negatives for each positive
    hard_negative_fraction: float  # share of the negatives drawn from `World.hard`; the others are uniform corruptions


class World(NamedTuple):
    """What proof search reads and training never writes."""

    kb: KnowledgeBase
    positives: I32[Tensor, "Q W"]  # positive queries
    hard_negatives: I32[Tensor, "Q2 W"]  # provable atoms that are not known; may be empty
    derivability_index: DerivabilityIndex


class EnvState(NamedTuple):
    """One partial proof a row."""

    goals: Goals  # [B, A, ...]
    successors: Successors  # [B, S, ...]
    query: I32[Tensor, "B W"]
    is_positive: Bool[Tensor, "B"]  # the query is a positive
    depth: I32[Tensor, "B"]  # resolution steps taken
    status: I32[Tensor, "B"]  # RUNNING, PROVED, FAILED, ENDED or EXHAUSTED
    overflow: Bool[Tensor, "B"]  # a successor was dropped somewhere on this path


class _Drawn(NamedTuple):
    """A query to start from."""

    query: I32[Tensor, "B W"]
    label: Bool[Tensor, "B"]


class Observation(NamedTuple):
    """What a network sees."""

    goals: Goals
    successors: Goals
    rule: I32[Tensor, "B S"]  # rule applied, -1 for a fact
    action_mask: Bool[Tensor, "B S1"]  # legal actions: S successors, then END
    dead_end: Bool[Tensor, "B S"]  # successors that T_P shows to lead to no proof
    query: I32[Tensor, "B W"]
    query_is_fact: Bool[Tensor, "B"]  # the query is itself a fact, so confidences leave it out
    remaining_depth: F32[Tensor, "B"]  # share of the depth limit that is left


def initial_state(cfg: ProverEnvConfig, world: World, query: I32[Tensor, "B W"], label: Bool[Tensor, "B"]) -> EnvState:
    """The state that has each query as its only goal. It is RUNNING even without successors: END is legal."""
    goals = _only_goal(cfg, query)
    return _started(query, label, goals, resolve(cfg.resolve, world.kb, goals, query))


def reset(cfg: ProverEnvConfig, world: World, key: I64[Tensor, "B 2"]) -> EnvState:
    """Fresh searches for training queries: facts of `train`, and corruptions of them that are not facts."""
    return _begun(cfg, world, _drawn(cfg, world, key))


def step_functional(
    cfg: ProverEnvConfig, world: World, state: EnvState, action: I64[Tensor, "B"], key: I64[Tensor, "B 2"]
) -> tuple[EnvState, Timestep]:
    """Follow each running row's chosen successor, or end it; finished rows stay as they are and are paid nothing.

    Args:
      action: a successor 0..S-1, or S for END. An illegal successor counts as END.
      key: unused: resolution is deterministic.
    """
    if cfg.fact_selection == "oracle":
        return _arrived(cfg, state, action, *_proved_at_once(cfg, world, state, action))
    goals = _followed(cfg, state, action)
    return _arrived(cfg, state, action, goals, resolve(cfg.resolve, world.kb, goals, state.query))


def advance(
    cfg: ProverEnvConfig,
    world: World,
    state: EnvState,
    action: I64[Tensor, "B"],
    key: I64[Tensor, "B 2"],
    reset_sample: _Drawn,
) -> tuple[EnvState, Timestep, EnvState]:
    """As `envs.base.advance` of step and start; rows that go on and rows that start are resolved together."""
    query, label = reset_sample
    goals, only = _followed(cfg, state, action), _only_goal(cfg, query)
    both, roots = tree.map(lambda *x: torch.cat(x), (goals, state.query), (only, query))
    resolved = resolve(cfg.resolve, world.kb, both, roots)
    B = len(query)
    reached, timestep = _arrived(cfg, state, action, goals, tree.map(lambda x: x[:B], resolved))
    fresh = _started(query, label, only, tree.map(lambda x: x[B:], resolved))
    return reached, timestep, tree.where(timestep.terminated, fresh, reached)


def observe(cfg: ProverEnvConfig, world: World, state: EnvState) -> Observation:
    """The tensors a policy decides on; END is legal in every state."""
    return make_observation(
        cfg.resolve, world, state.goals, state.successors, state.query, 1.0 - state.depth / cfg.max_depth
    )


def make_observation(
    cfg: ResolveConfig,
    world: World,
    goals: Goals,
    successors: Successors,
    query: I32[Tensor, "B W"],
    remaining: F32[Tensor, "B"],
) -> Observation:
    """The observation of partial proofs, wherever they are held."""
    sizes = cfg.sizes
    return Observation(
        goals=goals,
        successors=successors.goals,
        rule=successors.rule,
        action_mask=torch.cat([successors.mask, torch.ones_like(successors.mask[:, :1])], 1),
        dead_end=outlooks.dead_end_mask(world.derivability_index, sizes, cfg.max_height, query, goals, successors),
        query=query,
        query_is_fact=kbase.contains(world.kb, sizes, query.long()),
        remaining_depth=remaining,
    )


def environment(cfg: ProverEnvConfig) -> Environment:
    """Proof search as the learner takes it. The depth limit is a terminal: what is left of it is observed."""
    return Environment(
        cfg=cfg,
        reset=reset,
        step_functional=step_functional,
        observe=observe,
        truncates=False,
        sample_reset=_drawn,
        reset_from_sample=_begun,
        step_with_autoreset=advance if cfg.fact_selection == "policy" else None,  # otherwise only a start resolves
    )


def terminal_reward(cfg: ProverEnvConfig, proved: Bool[Tensor, "B"], label: Bool[Tensor, "B"]) -> F32[Tensor, "B"]:
    """The reward at the end of a search, by the name in `cfg.reward`.

    proof: +1 for a proved positive. signed: +1 / -1 for proving a positive / negative. balanced: a proved positive +1,
    a missed one -1, a proved negative -1, a rejected one +1 over the number of negatives per positive.
    """
    right = torch.where(label, 1.0, -1.0)
    if cfg.reward == "proof":
        return torch.where(proved & label, 1.0, 0.0)
    if cfg.reward == "signed":
        return torch.where(proved, right, 0.0)
    rejected = 1.0 / cfg.negatives_per_positive if cfg.negatives_per_positive else 0.0
    return torch.where(proved, right, torch.where(label, -1.0, rejected))


def _drawn(cfg: ProverEnvConfig, world: World, key: I64[Tensor, "B 2"]) -> _Drawn:
    drawn = sample_training_queries(
        key,
        world.kb,
        cfg.resolve.sizes,
        world.positives,
        world.hard_negatives,
        positive_fraction=1.0 / (1.0 + cfg.negatives_per_positive),
        hard_negative_fraction=cfg.hard_negative_fraction,
    )
    return _Drawn(drawn.query.to(torch.int32), drawn.label)


def _begun(cfg: ProverEnvConfig, world: World, drawn: _Drawn) -> EnvState:
    return initial_state(cfg, world, *drawn)


def _only_goal(cfg: ProverEnvConfig, query: I32[Tensor, "B W"]) -> Goals:
    padding = torch.zeros(
        (len(query), cfg.resolve.max_goals - 1, query.shape[1]), dtype=torch.int32, device=query.device
    )
    height = torch.zeros_like(query[:, :1]).expand(-1, cfg.resolve.max_goals).contiguous()
    return Goals(torch.cat([query[:, None], padding], 1), height)


def _started(query: I32[Tensor, "B W"], label: Bool[Tensor, "B"], goals: Goals, successors: Successors) -> EnvState:
    zero = torch.zeros_like(query[:, 0])
    return EnvState(goals, successors, query, label, depth=zero, status=zero, overflow=successors.overflow)


def _slot(state: EnvState, action: I64[Tensor, "B"]) -> I64[Tensor, "B 1"]:
    """The successor chosen, any where END is."""
    return action.clamp(0, state.successors.mask.shape[1] - 1)[:, None]


def _followed(cfg: ProverEnvConfig, state: EnvState, action: I64[Tensor, "B"]) -> Goals:
    """The goal list of each row's chosen successor."""
    slot = _slot(state, action)
    return tree.map(lambda x: _pick(x, slot), state.successors.goals)


def _proved_at_once(
    cfg: ProverEnvConfig, world: World, state: EnvState, action: I64[Tensor, "B"]
) -> tuple[Goals, Successors]:
    """An empty goal list where the chosen rule derives the root, and no successors."""
    rule = state.successors.rule.gather(1, _slot(state, action))
    proved = outlooks.rule_derives(world.derivability_index, cfg.resolve.sizes, state.query, rule)
    goals = Goals(torch.where(proved[..., None], 0, state.goals.atoms), state.goals.height)
    return goals, state.successors._replace(mask=torch.zeros_like(state.successors.mask))


def _arrived(
    cfg: ProverEnvConfig, state: EnvState, action: I64[Tensor, "B"], goals: Goals, successors: Successors
) -> tuple[EnvState, Timestep]:
    """The state after an action, given what a row that moves comes to."""
    active = state.status == RUNNING
    legal = state.successors.mask.gather(1, _slot(state, action)).squeeze(1)
    moves = active & (action < cfg.resolve.max_successors) & legal
    goals, successors = tree.where(moves, (goals, successors), (state.goals, state.successors))
    depth = torch.where(moves, state.depth + 1, state.depth)
    overflow = state.overflow | (moves & successors.overflow)
    status = _status(cfg, goals, successors, depth, ended=active & ~moves)
    status = torch.where(active, status, state.status)
    after = EnvState(goals, successors, state.query, state.is_positive, depth, status, overflow)
    done = active & (status != RUNNING)
    reward = torch.where(done & ~overflow, terminal_reward(cfg, status == PROVED, state.is_positive), 0.0)
    return after, Timestep(reward=reward, terminated=status != RUNNING, truncated=torch.zeros_like(done))


def _status(cfg: ProverEnvConfig, goals: Goals, successors: Successors, depth: Tensor, *, ended: Tensor) -> Tensor:
    """How each row stands after a step, the strongest reason first."""
    stuck = ~successors.mask.any(-1)
    status = torch.where(depth >= cfg.max_depth, EXHAUSTED, RUNNING)
    status = torch.where(stuck, FAILED, status)
    status = torch.where(ended, ENDED, status)
    return torch.where(goals.atoms[:, 0, 0] == 0, PROVED, status).to(torch.int32)


def _pick(x: Tensor, slot: I64[Tensor, "B 1"]) -> Tensor:
    """Row b's entry `slot[b]` of [B, S, ...]."""
    index = slot.view(-1, *[1] * (x.ndim - 1)).expand(-1, 1, *x.shape[2:])
    return x.gather(1, index).squeeze(1)
