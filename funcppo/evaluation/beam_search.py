"""Partial proofs extended by one choice: the costly part of scoring, on rows that are nearly all filled.

A slot holds the beam of one candidate. A step extends the R partial proofs that come first, those of one slot always
together, and keeps of each slot's children the K most probable that are still open. No row depends on another slot's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from funcppo import tree
from funcppo.logic.resolve import Goals, ResolveConfig, resolve
from funcppo.nets.base import Agent
from funcppo.prover.env import Observation, World, make_observation
from funcppo.prover.network import exceeds_capacity
from funcppo.types import F32, I32, I64, Bool

ScoreName = Literal["success", "best-proof", "greedy"]
_ROUNDS = 3  # in which slots are chosen for a step
UNPROVED_PENALTY = -100.0  # added to a greedy path that does not end in a proof


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchConfig:
    """Static settings; a new value is a new graph."""

    resolve: ResolveConfig
    agent: Agent
    score: ScoreName
    max_depth: int  # resolution steps
    slots: int  # B, candidates under way at once
    beam: int  # K, partial proofs kept for each; 1 for greedy
    rows_per_step: int  # R, partial proofs extended in one step; at least K
    chunk_size: int  # candidates that one table holds
    refill: bool  # finished slots take the next candidate at once; otherwise when all are finished


class SearchResult(NamedTuple):
    """What is known of each candidate; logarithms of probabilities."""

    log_score: F32[Tensor, "B"]
    pruned_log_mass: F32[Tensor, "B"]  # mass of partial proofs that the beam dropped
    overflow_log_mass: F32[Tensor, "B"]  # mass of partial proofs some of whose successors did not fit
    best_log_prob: F32[Tensor, "B"]  # of the single most probable proof
    trace: I32[Tensor, "B T"]  # its choices; 0-padded
    proof_length: I32[Tensor, "B"]  # number of its choices; 0 where there is no proof
    n_steps: I32[Tensor, "B"]


class SearchState(NamedTuple):
    """The candidates under way. Log-probabilities are -inf where a beam entry is empty."""

    goals: Goals  # [B, K, A, ...]
    log_prob: F32[Tensor, "B K"]
    trace: I32[Tensor, "B K T"]  # choices so far: a rule's id, or -1 - a fact's id
    query: I32[Tensor, "B W"]
    candidate_row: I64[Tensor, "B"]  # its row in the table; the table's length where the slot is idle
    depth: I32[Tensor, "B"]
    result: SearchResult  # of the candidate so far, [B]


def slots_for_rows(rows: int, beam: int) -> int:
    """The slots that keep so many rows filled: a beam holds about two partial proofs on average, that of greedy one."""
    return rows if beam == 1 else max(1, rows // 2)


def extend_beams(
    cfg: SearchConfig, world: World, params: Any, search: SearchState
) -> tuple[SearchState, I64[Tensor, ""]]:
    """The search after one choice on the partial proofs whose turn it is, and how many these were.

    A slot some of whose successors the network has no room for waits for the next step.
    """
    chosen, source, filled = _choose_rows(cfg, search)
    children = _children(cfg, world, params, search, source, filled)
    waits = torch.where(children.crowded, source // cfg.beam, cfg.slots)
    waiting = torch.zeros(cfg.slots + 1, dtype=torch.bool, device=waits.device).index_fill(0, waits, True)[: cfg.slots]
    chosen, taken = chosen & ~waiting, filled & ~waiting[(source // cfg.beam).clamp_max(cfg.slots - 1)]
    return tree.where(chosen, _kept(cfg, search, children), search), taken.sum()


def policy_log_probs(cfg: SearchConfig, world: World, params: Any, observation: Observation) -> F32[Tensor, "R S1"]:
    """Log-probabilities of the policy over the successors of each partial proof, and END."""
    return torch.log_softmax(cfg.agent.apply(cfg.agent.cfg, world, params, observation).logits, -1)


class _Children(NamedTuple):
    """The successors of the rows extended, in the order of slots."""

    goals: Goals  # [R, S, ...]
    log_prob: F32[Tensor, "R S"]  # of the whole path, -inf where there is none
    proved: Bool[Tensor, "R S"]
    code: I32[Tensor, "R S"]  # the choice made
    overflow: Bool[Tensor, "R"]
    crowded: Bool[Tensor, "R"]  # the network had no room for some successors: nothing here is known of the row
    end: F32[Tensor, "R"]  # log-probability of the policy's best action, whatever it is
    source: I64[Tensor, "R"]  # slot * K + beam entry; B * K where the row is empty


def _choose_rows(cfg: SearchConfig, search: SearchState) -> tuple[Tensor, Tensor, Tensor]:
    """Which slots are extended [B], the entries they hold [R], and which of these rows are filled [R]."""
    alive = torch.isfinite(search.log_prob)
    count, room = alive.sum(1), torch.full((), cfg.rows_per_step, dtype=torch.int64, device=alive.device)
    chosen = torch.zeros_like(count, dtype=torch.bool)
    for _ in range(_ROUNDS):  # those that come first; then what fits into the room that they leave
        left = torch.where(chosen | (count > room), 0, count)
        more = (left > 0) & (left.cumsum(0) <= room)
        chosen, room = chosen | more, room - torch.where(more, count, 0).sum()
    taken = (alive & chosen[:, None]).flatten()
    place = torch.where(taken, taken.long().cumsum(0) - 1, cfg.rows_per_step)
    n = cfg.slots * cfg.beam
    none = torch.full((cfg.rows_per_step + 1,), n, dtype=torch.int64, device=place.device)
    source = none.scatter(0, place, torch.arange(n, device=place.device))[: cfg.rows_per_step]
    filled = torch.arange(cfg.rows_per_step, device=place.device) < taken.sum()
    return chosen, torch.where(filled, source, n), filled


def _children(
    cfg: SearchConfig,
    world: World,
    params: Any,
    search: SearchState,
    source: I64[Tensor, "R"],
    filled: Bool[Tensor, "R"],
) -> _Children:
    entry = torch.where(filled, source, 0)
    slot = entry // cfg.beam
    rows = tree.map(lambda x: x.flatten(0, 1)[entry], search.goals)
    rows = Goals(torch.where(filled[:, None, None], rows.atoms, 0), rows.height)
    query = search.query[slot]
    successors = resolve(cfg.resolve, world.kb, rows, query)
    observation = make_observation(
        cfg.resolve, world, rows, successors, query, 1.0 - search.depth[slot] / cfg.max_depth
    )
    policy = policy_log_probs(cfg, world, params, observation)
    path = torch.where(filled, search.log_prob.flatten()[entry], -torch.inf)
    return _Children(
        goals=successors.goals,
        log_prob=path[:, None] + _choices(cfg, policy, observation),
        proved=successors.goals.atoms[:, :, 0, 0] == 0,
        code=torch.where(successors.rule >= 0, successors.rule, -1 - successors.fact),
        overflow=successors.overflow & filled,
        crowded=exceeds_capacity(cfg.agent.cfg, observation.action_mask) & filled,
        end=path + policy.amax(1),
        source=source,
    )


def _kept(cfg: SearchConfig, search: SearchState, children: _Children) -> SearchState:
    """The search after all slots that have children: of each, the K most probable children that are still open."""
    S = cfg.resolve.max_successors
    still_open = torch.where(children.proved, -torch.inf, children.log_prob)
    target, dropped = _places(cfg, children.source, still_open)
    n = cfg.slots * cfg.beam
    none = torch.full((n + 1,), -1, dtype=torch.int64, device=target.device)
    child = none.scatter(0, target, torch.arange(len(target), device=target.device))[:n]
    found = child >= 0
    child = torch.where(found, child, 0)
    result = _found(cfg, search, children)
    path = search.log_prob.flatten()[torch.where(children.source < n, children.source, 0)]
    result = result._replace(
        pruned_log_mass=_add(
            cfg, result.pruned_log_mass, _by_entry(cfg, children, torch.where(dropped, still_open, -torch.inf))
        ),
        overflow_log_mass=_add(
            cfg,
            result.overflow_log_mass,
            _by_entry(cfg, children, torch.where(children.overflow, path, -torch.inf)[:, None]),
        ),
        n_steps=result.n_steps + 1,
    )
    log_prob = torch.where(found, still_open.flatten()[child], -torch.inf).view(cfg.slots, cfg.beam)
    log_prob = torch.where((search.depth + 1 < cfg.max_depth)[:, None], log_prob, -torch.inf)
    if cfg.score == "best-proof":  # no open proof can beat one already found
        log_prob = torch.where(log_prob > result.log_score[:, None], log_prob, -torch.inf)
    parent = torch.where(found, children.source[child // S], 0)
    trace = search.trace.flatten(0, 1)[parent].view_as(search.trace)
    code = children.code.flatten()[child].view(cfg.slots, cfg.beam)
    return SearchState(
        goals=tree.map(lambda x, old: x.flatten(0, 1)[child].view_as(old), children.goals, search.goals),
        log_prob=log_prob,
        trace=_with_choice(trace, search.depth, code),
        query=search.query,
        candidate_row=search.candidate_row,
        depth=search.depth + 1,
        result=result,
    )


def _places(cfg: SearchConfig, source: I64[Tensor, "R"], still_open: F32[Tensor, "R S"]) -> tuple[Tensor, Tensor]:
    """Where each child goes [R * S]: slot * K + its rank in the slot, or B * K; and which are dropped [R, S]."""
    n = cfg.slots * cfg.beam
    slot = (source // cfg.beam)[:, None].expand_as(still_open).flatten()
    slot = torch.where(torch.isfinite(still_open.flatten()), slot, cfg.slots)
    best_first = torch.sort(still_open.flatten(), descending=True, stable=True).indices
    by_slot = torch.sort(slot[best_first], stable=True)
    order = best_first[by_slot.indices]
    rank = torch.arange(len(order), device=order.device) - torch.searchsorted(by_slot.values, by_slot.values)
    kept = (rank < cfg.beam) & (by_slot.values < cfg.slots)
    target = torch.zeros_like(order).scatter(0, order, torch.where(kept, by_slot.values * cfg.beam + rank, n))
    return target, (target == n).view_as(still_open)


def _by_entry(cfg: SearchConfig, children: _Children, value: F32[Tensor, "R n"]) -> F32[Tensor, "B K"]:
    """The mass of each row's children at the beam entry that they come from; -inf elsewhere."""
    n = cfg.slots * cfg.beam
    mass = value.amax(1) if cfg.score == "best-proof" else torch.logsumexp(value, 1)
    none = torch.full((n + 1,), -torch.inf, dtype=value.dtype, device=value.device)
    return none.scatter(0, children.source, mass)[:n].view(cfg.slots, cfg.beam)


def _choices(cfg: SearchConfig, log_policy: F32[Tensor, "R S1"], observation: Observation) -> F32[Tensor, "R S"]:
    """What the score counts each choice as, a logarithm; -inf where there is no successor or it is not followed."""
    choice, mask = log_policy[:, :-1], observation.action_mask[:, :-1]
    if cfg.score == "best-proof":
        choice = torch.where(observation.rule >= 0, choice, 0.0)
    if cfg.score == "greedy":
        slots = torch.arange(mask.shape[1], device=mask.device)
        mask = mask & (slots == log_policy.argmax(-1, keepdim=True))
    else:  # what leads to no proof adds nothing to either score
        mask = mask & ~observation.dead_end
    return torch.where(mask, choice, -torch.inf)


def _found(cfg: SearchConfig, search: SearchState, children: _Children) -> SearchResult:
    """The results with this step's proofs."""
    result, n = search.result, cfg.slots * cfg.beam
    proved = torch.where(children.proved, children.log_prob, -torch.inf)
    at_row, slot_of = proved.max(1)
    spread = lambda empty, x: (
        torch.full((n + 1,), empty, dtype=x.dtype, device=x.device)
        .scatter(0, children.source, x)[:n]
        .view(cfg.slots, cfg.beam)
    )
    best, entry = spread(-torch.inf, at_row).max(1)
    code = spread(0, _rows(children.code, slot_of[:, None])[:, 0]).gather(1, entry[:, None])
    trace = _with_choice(_rows(search.trace, entry[:, None]), search.depth, code)[:, 0]
    better = best > result.best_log_prob
    score = _add(cfg, result.log_score, _by_entry(cfg, children, proved))
    length = torch.where(better, search.depth + 1, result.proof_length)
    if cfg.score == "greedy":  # the path so far, END included, at a price unless it is a proof
        path = spread(-torch.inf, children.end)[:, 0]
        score = torch.where(length > 0, path, path + UNPROVED_PENALTY)
    return result._replace(
        log_score=score,
        best_log_prob=torch.where(better, best, result.best_log_prob),
        trace=torch.where(better[:, None], trace, result.trace),
        proof_length=length,
    )


def _add(cfg: SearchConfig, log_mass: F32[Tensor, "B"], more: F32[Tensor, "B n"]) -> F32[Tensor, "B"]:
    """Probabilities of distinct proofs add up; of a best proof only the largest counts."""
    if cfg.score == "best-proof":
        return torch.maximum(log_mass, more.amax(1))
    return torch.logaddexp(log_mass, torch.logsumexp(more, 1))


def _with_choice(trace: I32[Tensor, "B n T"], depth: I32[Tensor, "B"], code: I32[Tensor, "B n"]) -> Tensor:
    here = torch.arange(trace.shape[-1], device=trace.device) == depth[:, None, None]
    return torch.where(here, code[..., None], trace)


def _rows(x: Tensor, index: I64[Tensor, "B n"]) -> Tensor:
    """x[b, index[b, i]] for x [B, m, ...]."""
    return x.gather(1, index.view(*index.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:]))
