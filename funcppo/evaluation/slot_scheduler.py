"""Candidates through a fixed number of slots, each a beam of partial proofs; finished slots are masked and refilled.

The score of a candidate is held as a natural logarithm, minus infinity where it is 0. Everything is written to the
candidate's own row, so neither the order of candidates nor their neighbours in a batch matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcppo import tree
from funcppo.evaluation.beam_search import (
    UNPROVED_PENALTY,
    SearchConfig,
    SearchResult,
    SearchState,
    extend_beams,
    policy_log_probs,
)
from funcppo.logic.resolve import Goals, resolve
from funcppo.prover.env import World, make_observation
from funcppo.types import F32, I32, I64

ChunkLoader = Callable[
    [Tensor, int], Iterator[Tensor]
]  # candidates and a number to parts of as many, where they are scored
Readback = Callable[[Tensor], Tensor | None]  # from numbers on the device to those of this look, or of an earlier one
NARROW_WIDTHS = (32,)  # successors a row, tried before the width that holds any
ROW_CAPACITY = 10  # successors a row that the network has room for, on average over a step
_STEPS_BETWEEN_LOOKS = 4  # how often the host asks whether all are finished


class SchedulerState(NamedTuple):
    """A search, the results so far and the work done."""

    search: SearchState
    results: SearchResult  # [window + 1, ...]; the last row is for idle slots
    n_started: I64[Tensor, ""]  # candidates started
    n_candidates: I64[Tensor, ""]  # candidates of the table
    active_row_steps: I64[Tensor, ""]  # rows x beam entries stepped that held a partial proof


def init_scheduler(cfg: SearchConfig, chunk: I32[Tensor, "n W"]) -> SchedulerState:
    """All slots idle; the first step fills them."""
    B, K, A, W, device = cfg.slots, cfg.beam, cfg.resolve.max_goals, chunk.shape[1], chunk.device
    ints = lambda *shape: torch.zeros(shape, dtype=torch.int32, device=device)
    search = SearchState(
        goals=Goals(ints(B, K, A, W), ints(B, K, A)),
        log_prob=torch.full((B, K), -torch.inf, device=device),
        trace=ints(B, K, cfg.max_depth),
        query=ints(B, W),
        candidate_row=torch.full((B,), cfg.chunk_size, dtype=torch.int64, device=device),
        depth=ints(B),
        result=_nothing_found(cfg, B, device),
    )
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return SchedulerState(search, _nothing_found(cfg, cfg.chunk_size + 1, device), zero, (chunk[:, 0] > 0).sum(), zero)


def evaluate_step(
    cfg: SearchConfig, world: World, params: Any, chunk: I32[Tensor, "n W"], state: SchedulerState
) -> SchedulerState:
    """Refill the free slots, then extend partial proofs by one choice.

    Args:
      table: candidates [window + 1, W]; the last row is all 0, and so is any row that pads the window.
    """
    state = _refill(cfg, chunk, state)
    search, n_rows = extend_beams(cfg, world, params, state.search)
    results = tree.map(lambda old, new: _write(old, search.candidate_row, new), state.results, search.result)
    return SchedulerState(search, results, state.n_started, state.n_candidates, state.active_row_steps + n_rows)


def split_chunks(candidates: Tensor, size: int) -> Iterator[Tensor]:
    """The candidates in parts, left on the device where they are."""
    yield from candidates.split(size)


def blocking_readback() -> Readback:
    """A look that waits for the device."""
    return lambda numbers: numbers


def score_candidates(
    cfg: SearchConfig,
    world: World,
    params: Any,
    candidates: I32[Tensor, "n W"],
    step: Callable[..., SchedulerState] = evaluate_step,
    on_progress: Callable[[int], None] = lambda done: None,
    load_chunks: ChunkLoader = split_chunks,
    make_readback: Callable[[], Readback] = blocking_readback,
) -> tuple[SearchResult, int, int]:
    """The result of each candidate; the row-steps that held a partial proof, and all row-steps taken.

    Args:
      step: `evaluate_step`, or what the runtime made of it; it may overwrite the state that it is given.
      on_progress: told the number of candidates started, every few steps.
      stage: how windows of candidates come to the device, such as `runtime.inputs.staged`.
      looking: how the host looks at each window's progress, such as `runtime.inputs.lagging`.
    """
    windows, active, taken, first = [], 0, 0, 0
    for part in load_chunks(candidates, cfg.chunk_size):
        padding = part.new_zeros((cfg.chunk_size + 1 - len(part), part.shape[1]))
        table = torch.cat([part, padding]).to(torch.int32)
        state, look, done = init_scheduler(cfg, table), make_readback(), False
        while not done:
            for _ in range(_STEPS_BETWEEN_LOOKS):
                state = step(cfg, world, params, table, state)
                taken += cfg.rows_per_step
            numbers = look(torch.stack([state.n_started, all_finished(state).long()]))
            if numbers is not None:
                started, done = numbers.tolist()
                on_progress(first + min(started, len(part)))
        windows.append(_rows_before(state.results, len(part)))
        active, first = active + int(state.active_row_steps), first + len(part)
    return tree.map(lambda *parts: torch.cat(parts), windows[0], *windows[1:]), active, taken


def width_schedule(cfg: SearchConfig) -> list[SearchConfig]:
    """The same search in ascending widths: most goals have few successors, and steps cost what slots there are.

    A wider search extends fewer rows at a time, so that each takes about as much memory.
    """
    full, searches = cfg.resolve.max_successors, []
    for width in NARROW_WIDTHS:
        if 2 * width <= full:
            shape = replace(cfg.resolve, max_successors=width, max_fanout=min(width, cfg.resolve.max_fanout))
            searches.append(replace(cfg, resolve=shape))
    rows = (
        max(cfg.beam, cfg.rows_per_step * searches[-1].resolve.max_successors // full)
        if searches
        else cfg.rows_per_step
    )
    return [_packed(search) for search in (*searches, replace(cfg, rows_per_step=rows, slots=min(cfg.slots, rows)))]


def _packed(cfg: SearchConfig) -> SearchConfig:
    """The same search with a network that runs on the successors that there are, where that spares it a third."""
    places = cfg.resolve.max_successors
    capacity = max(ROW_CAPACITY * cfg.rows_per_step, cfg.beam * places)  # what one slot holds always has room
    if 3 * capacity > 2 * cfg.rows_per_step * places:
        return cfg
    return replace(cfg, agent=replace(cfg.agent, cfg=replace(cfg.agent.cfg, capacity=capacity)))


def score_by_width(
    cfgs: Sequence[SearchConfig], world: World, params: Any, candidates: I32[Tensor, "n W"], **how: Any
) -> tuple[SearchResult, int, int]:
    """As `score_candidates`: candidates some of whose successors did not fit are scored again, wider.

    Args:
      cfgs: what `narrowed` returns.
      how: the other arguments of `score_candidates`.
    """
    result, active, taken = score_candidates(cfgs[0], world, params, candidates, **how)
    for cfg in cfgs[1:]:
        again = torch.isfinite(result.overflow_log_mass).nonzero()[:, 0]
        if not len(again):
            break
        wider, more, steps = score_candidates(cfg, world, params, candidates[again.to(candidates.device)], **how)
        result = tree.map(lambda old, new: old.index_copy(0, again, new), result, wider)  # noqa: B023
        active, taken = active + more, taken + steps
    return result, active, taken


def score_by_rules(cfg: SearchConfig, world: World, params: Any, atoms: I32[Tensor, "n W"]) -> F32[Tensor, "n"]:
    """The scores of ground atoms at height 1 where facts are found: which rules prove an atom is known beforehand.

    success: the probabilities of the rules that derive the atom, summed; best-proof: the largest of them; greedy: that
    of the most probable choice, at a price unless it derives the atom.
    """
    first = torch.arange(cfg.resolve.max_goals, device=atoms.device) == 0
    goals = Goals(
        torch.where(first[:, None], atoms[:, None], 0),
        torch.zeros_like(first, dtype=torch.int32).expand(len(atoms), -1),
    )
    successors = resolve(cfg.resolve, world.kb, goals, atoms)
    observation = make_observation(
        cfg.resolve, world, goals, successors, atoms, torch.ones_like(atoms[:, 0], dtype=torch.float32)
    )
    policy = policy_log_probs(cfg, world, params, observation)
    derives = (
        observation.action_mask[:, :-1] & ~observation.dead_end
    )  # of a ground root's successors all others are hopeless
    proving = torch.where(derives, policy[:, :-1], -torch.inf)
    if cfg.score == "success":
        return torch.logsumexp(proving, 1)
    if cfg.score == "best-proof":
        return proving.amax(1)
    best = policy.amax(1)
    return torch.where(proving.amax(1) == best, best, best + UNPROVED_PENALTY)


def all_finished(state: SchedulerState) -> Tensor:
    """Whether every candidate of the table has its result, 0-d."""
    return (state.n_started >= state.n_candidates) & ~torch.isfinite(state.search.log_prob).any()


def _refill(cfg: SearchConfig, table: Tensor, state: SchedulerState) -> SchedulerState:
    search = state.search
    free = ~torch.isfinite(search.log_prob).any(1)
    free = free if cfg.refill else free & free.all()
    order = state.n_started + free.long().cumsum(0) - 1
    candidate = torch.where(free, order.clamp_max(cfg.chunk_size), search.candidate_row)
    query = table[candidate]
    first = torch.arange(cfg.resolve.max_goals, device=query.device) == 0
    atoms = torch.where(first[:, None], query[:, None], 0)[:, None].expand_as(search.goals.atoms)
    one = torch.arange(cfg.beam, device=query.device) == 0
    fresh = SearchState(
        goals=Goals(atoms, torch.zeros_like(search.goals.height)),
        log_prob=torch.where(one & (query[:, :1] > 0), 0.0, -torch.inf),
        trace=torch.zeros_like(search.trace),
        query=query,
        candidate_row=candidate,
        depth=torch.zeros_like(search.depth),
        result=_nothing_found(cfg, cfg.slots, query.device),
    )
    started = (state.n_started + free.sum()).clamp_max(cfg.chunk_size)
    return state._replace(search=tree.where(free, fresh, search), n_started=started)


def _rows_before(results: SearchResult, n: int) -> SearchResult:
    return tree.map(lambda x: x[:n].clone(), results)


def _write(table: Tensor, row: I64[Tensor, "B"], value: Tensor) -> Tensor:
    return table.scatter(0, row.view(-1, *[1] * (value.ndim - 1)).expand_as(value), value)


def _nothing_found(cfg: SearchConfig, n: int, device: torch.device) -> SearchResult:
    none = torch.full((n,), -torch.inf, device=device)
    zero = torch.zeros(n, dtype=torch.int32, device=device)
    trace = torch.zeros((n, cfg.max_depth), dtype=torch.int32, device=device)
    return SearchResult(none, none, none, none, trace, zero, zero)
