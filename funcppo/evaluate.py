"""Candidates through a fixed number of slots, each a beam of partial proofs; finished slots are masked and refilled.

The score of a candidate is held as a natural logarithm, minus infinity where it is 0. Everything is written to the
candidate's own row, so neither the order of candidates nor their neighbours in a batch matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from funcppo import tree
from funcppo.envs.prover import Observation, World
from funcppo.logic import kb as kbase
from funcppo.logic.resolve import Goals, ResolveConfig, Successors, resolve
from funcppo.nets.base import Agent
from funcppo.types import F32, I32, I64

Score = Literal["success", "best-proof", "greedy"]
_STEPS_BETWEEN_LOOKS = 4  # how often the host asks whether all are finished
NOT_PROVED = -100.0  # added to a greedy path that does not end in a proof


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Static settings; a new value is a new graph."""

    resolve: ResolveConfig
    agent: Agent
    score: Score
    max_depth: int  # resolution steps
    slots: int  # B, candidates under way at once
    beam: int  # K, partial proofs kept for each; 1 for greedy
    window: int  # candidates that one table holds
    refill: bool  # finished slots take the next candidate at once; otherwise when all are finished


class Result(NamedTuple):
    """What is known of each candidate; logarithms of probabilities."""

    score: F32[Tensor, "B"]
    pruned: F32[Tensor, "B"]  # mass of partial proofs that the beam dropped
    overflowed: F32[Tensor, "B"]  # mass of partial proofs some of whose successors did not fit
    best: F32[Tensor, "B"]  # of the single most probable proof
    trace: I32[Tensor, "B T"]  # its choices; 0-padded
    length: I32[Tensor, "B"]  # number of its choices; 0 where there is no proof
    steps: I32[Tensor, "B"]


class Search(NamedTuple):
    """The candidates under way. Log-probabilities are -inf where a beam entry is empty."""

    goals: Goals  # [B, K, A, ...]
    log_prob: F32[Tensor, "B K"]
    trace: I32[Tensor, "B K T"]  # choices so far: a rule's id, or -1 - a fact's id
    query: I32[Tensor, "B W"]
    candidate: I64[Tensor, "B"]  # its row in the table; the table's length where the slot is idle
    depth: I32[Tensor, "B"]
    result: Result  # of the candidate so far, [B]


class Evaluation(NamedTuple):
    """A search, the results so far and the work done."""

    search: Search
    results: Result  # [window + 1, ...]; the last row is for idle slots
    next: I64[Tensor, ""]  # candidates started
    row_steps: I64[Tensor, ""]  # rows x beam entries stepped that held a partial proof


def start(cfg: EvalConfig, table: I32[Tensor, "n W"]) -> Evaluation:
    """All slots idle; the first step fills them."""
    B, K, A, W, device = cfg.slots, cfg.beam, cfg.resolve.max_goals, table.shape[1], table.device
    ints = lambda *shape: torch.zeros(shape, dtype=torch.int32, device=device)
    search = Search(
        goals=Goals(ints(B, K, A, W), ints(B, K, A)),
        log_prob=torch.full((B, K), -torch.inf, device=device),
        trace=ints(B, K, cfg.max_depth),
        query=ints(B, W),
        candidate=torch.full((B,), cfg.window, dtype=torch.int64, device=device),
        depth=ints(B),
        result=_nothing_found(cfg, B, device),
    )
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return Evaluation(search, _nothing_found(cfg, cfg.window + 1, device), zero, zero)


def evaluate_step(
    cfg: EvalConfig, world: World, params: Any, table: I32[Tensor, "n W"], state: Evaluation
) -> Evaluation:
    """Refill the free slots, then extend every partial proof by one choice.

    Args:
      table: candidates [window + 1, W]; the last row is all 0, and so is any row that pads the window.
    """
    state = _refill(cfg, table, state)
    search, alive = state.search, torch.isfinite(state.search.log_prob)
    search = _extend(cfg, world, params, search)
    results = tree.map(lambda old, new: _write(old, search.candidate, new), state.results, search.result)
    return Evaluation(search, results, state.next, state.row_steps + alive.sum())


def score_candidates(
    cfg: EvalConfig,
    world: World,
    params: Any,
    candidates: I32[Tensor, "n W"],
    step: Callable[..., Evaluation] = evaluate_step,
    on_progress: Callable[[int], None] = lambda done: None,
) -> tuple[Result, int, int]:
    """The result of each candidate; the row-steps that held a partial proof, and all row-steps taken.

    Args:
      step: `evaluate_step`, or what the runtime made of it.
      on_progress: told the number of candidates started, every few steps.
    """
    windows, active, taken = [], 0, 0
    padding = torch.zeros((cfg.window + 1, candidates.shape[1]), dtype=torch.int32, device=candidates.device)
    for first in range(0, len(candidates), cfg.window):
        part = candidates[first : first + cfg.window].to(torch.int32)
        table = torch.cat([part, padding[len(part) :]])
        state, done = start(cfg, table), False
        while not done:
            for _ in range(_STEPS_BETWEEN_LOOKS):
                state = step(cfg, world, params, table, state)
                taken += cfg.slots * cfg.beam
            done = bool(finished(cfg, state))
            on_progress(first + min(int(state.next), len(part)))
        windows.append(_rows_before(state.results, len(part)))
        active += int(state.row_steps)
    return tree.map(lambda *parts: torch.cat(parts), windows[0], *windows[1:]), active, taken


def best_rule_scores(
    cfg: EvalConfig, world: World, params: Any, atoms: I32[Tensor, "n W"], derived: I64[Tensor, "m"]
) -> F32[Tensor, "n"]:
    """The `best-proof` scores of ground atoms at height 1: of the rules that derive each, the policy's largest.

    Args:
      derived: ascending keys, row * R + rule, of the pairs in which the rule derives the atom.
    """
    first = torch.arange(cfg.resolve.max_goals, device=atoms.device) == 0
    rows = Goals(
        torch.where(first[:, None], atoms[:, None], 0),
        torch.zeros_like(first, dtype=torch.int32).expand(len(atoms), -1),
    )
    successors = resolve(cfg.resolve, world.kb, rows, atoms)
    log_policy = _log_policy(cfg, world, params, torch.zeros_like(atoms[:, 0]), rows, successors, atoms)
    row = torch.arange(len(atoms), device=atoms.device)[:, None]
    key = row * cfg.resolve.sizes.n_rules + successors.rule
    at = torch.searchsorted(derived, key).clamp_max(max(len(derived) - 1, 0))
    applies = (derived[at] == key) & successors.mask if len(derived) else torch.zeros_like(successors.mask)
    return torch.where(applies, log_policy[:, :-1], -torch.inf).amax(1)


def finished(cfg: EvalConfig, state: Evaluation) -> Tensor:
    """Whether every candidate of the table has its result, 0-d."""
    return (state.next >= cfg.window) & ~torch.isfinite(state.search.log_prob).any()


def _refill(cfg: EvalConfig, table: Tensor, state: Evaluation) -> Evaluation:
    search = state.search
    free = ~torch.isfinite(search.log_prob).any(1)
    free = free if cfg.refill else free & free.all()
    order = state.next + free.long().cumsum(0) - 1
    candidate = torch.where(free, order.clamp_max(cfg.window), search.candidate)
    query = table[candidate]
    first = torch.arange(cfg.resolve.max_goals, device=query.device) == 0
    atoms = torch.where(first[:, None], query[:, None], 0)[:, None].expand_as(search.goals.atoms)
    one = torch.arange(cfg.beam, device=query.device) == 0
    fresh = Search(
        goals=Goals(atoms, torch.zeros_like(search.goals.height)),
        log_prob=torch.where(one & (query[:, :1] > 0), 0.0, -torch.inf),
        trace=torch.zeros_like(search.trace),
        query=query,
        candidate=candidate,
        depth=torch.zeros_like(search.depth),
        result=_nothing_found(cfg, cfg.slots, query.device),
    )
    started = (state.next + free.sum()).clamp_max(cfg.window)
    return state._replace(search=tree.where(free, fresh, search), next=started)


def _extend(cfg: EvalConfig, world: World, params: Any, search: Search) -> Search:
    """One choice more on every partial proof; the beam keeps the most probable of those that are still open."""
    B, K, S = cfg.slots, cfg.beam, cfg.resolve.max_successors
    rows = tree.map(lambda x: x.reshape(B * K, *x.shape[2:]), search.goals)
    query = search.query.repeat_interleave(K, 0)
    alive = torch.isfinite(search.log_prob)
    rows = Goals(torch.where(alive.view(-1, 1, 1), rows.atoms, 0), rows.height)
    successors = resolve(cfg.resolve, world.kb, rows, query)
    depth = search.depth.repeat_interleave(K, 0)
    log_policy = _log_policy(cfg, world, params, depth, rows, successors, query)
    choice = _choices(cfg, log_policy, successors).view(B, K, S)
    child = (search.log_prob[:, :, None] + choice).view(B, K * S)
    proved = (successors.goals.atoms[:, :, 0, 0] == 0).view(B, K * S)
    code = torch.where(successors.rule >= 0, successors.rule, -1 - successors.fact).view(B, K * S)
    still_open = torch.where(proved, -torch.inf, child)
    order = torch.sort(still_open, dim=1, descending=True, stable=True).indices
    kept, dropped = order[:, :K], order[:, K:]
    result = _found(cfg, search, torch.where(proved, child, -torch.inf), code)
    overflowed = torch.where(successors.overflow.view(B, K), search.log_prob, -torch.inf)
    result = result._replace(
        pruned=_add(cfg, result.pruned, still_open.gather(1, dropped)),
        overflowed=_add(cfg, result.overflowed, overflowed),
        steps=result.steps + alive.any(1).int(),
    )
    if cfg.score == "greedy":  # the path so far, END included, at a price unless it is a proof
        path = search.log_prob[:, 0] + log_policy.amax(1)
        result = result._replace(score=torch.where(result.length > 0, path, path + NOT_PROVED))
    log_prob = still_open.gather(1, kept)
    log_prob = torch.where((search.depth + 1 < cfg.max_depth)[:, None], log_prob, -torch.inf)
    if cfg.score == "best-proof":  # no open proof can beat one already found
        log_prob = torch.where(log_prob > result.score[:, None], log_prob, -torch.inf)
    return Search(
        goals=tree.map(lambda x: _rows(x.reshape(B, K * S, *x.shape[2:]), kept), successors.goals),
        log_prob=log_prob,
        trace=_with_choice(_rows(search.trace, kept // S), search.depth, code.gather(1, kept)),
        query=search.query,
        candidate=search.candidate,
        depth=search.depth + 1,
        result=result,
    )


def _log_policy(
    cfg: EvalConfig, world: World, params: Any, depth: Tensor, rows: Goals, successors: Successors, query: Tensor
) -> F32[Tensor, "BK S1"]:
    """Log-probabilities of the policy over the successors of each partial proof, and END."""
    observation = Observation(
        goals=rows,
        successors=successors.goals,
        rule=successors.rule,
        mask=torch.cat([successors.mask, torch.ones_like(successors.mask[:, :1])], 1),
        query=query,
        known=kbase.contains(world.kb, cfg.resolve.sizes, query.long()),
        remaining=1.0 - depth / cfg.max_depth,
    )
    return torch.log_softmax(cfg.agent.apply(cfg.agent.cfg, world, params, observation).logits, -1)


def _choices(cfg: EvalConfig, log_policy: F32[Tensor, "BK S1"], successors: Successors) -> F32[Tensor, "BK S"]:
    """What the score counts each choice as, a logarithm; -inf where there is no successor or it is not followed."""
    choice, mask = log_policy[:, :-1], successors.mask
    if cfg.score == "best-proof":
        choice = torch.where(successors.rule >= 0, choice, 0.0)
    if cfg.score == "greedy":
        slots = torch.arange(mask.shape[1], device=mask.device)
        mask = mask & (slots == log_policy.argmax(-1, keepdim=True))
    return torch.where(mask, choice, -torch.inf)


def _found(cfg: EvalConfig, search: Search, proved: F32[Tensor, "B KS"], code: Tensor) -> Result:
    """The results with this step's proofs, whose log-probabilities are `proved`."""
    result = search.result
    best, at = proved.max(1)
    parent = at // cfg.resolve.max_successors
    trace = _with_choice(_rows(search.trace, parent[:, None]), search.depth, code.gather(1, at[:, None]))[:, 0]
    better = best > result.best
    return result._replace(
        score=_add(cfg, result.score, proved),
        best=torch.where(better, best, result.best),
        trace=torch.where(better[:, None], trace, result.trace),
        length=torch.where(better, search.depth + 1, result.length),
    )


def _add(cfg: EvalConfig, log_mass: F32[Tensor, "B"], more: F32[Tensor, "B n"]) -> F32[Tensor, "B"]:
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


def _rows_before(results: Result, n: int) -> Result:
    return tree.map(lambda x: x[:n], results)


def _write(table: Tensor, row: I64[Tensor, "B"], value: Tensor) -> Tensor:
    return table.scatter(0, row.view(-1, *[1] * (value.ndim - 1)).expand_as(value), value)


def _nothing_found(cfg: EvalConfig, n: int, device: torch.device) -> Result:
    none = torch.full((n,), -torch.inf, device=device)
    zero = torch.zeros(n, dtype=torch.int32, device=device)
    trace = torch.zeros((n, cfg.max_depth), dtype=torch.int32, device=device)
    return Result(none, none, none, none, trace, zero, zero)
