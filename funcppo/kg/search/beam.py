"""The beam search for proofs, and the scores of many candidates through a fixed number of its slots.

A slot holds the beam of one candidate. `extend_beams` extends up to R partial proofs by one resolution step, those of
one slot always together, and keeps of each slot's children the K most probable that are still open. No row depends on
another slot's. `score_candidates` loads candidates in chunks, runs `evaluate_step` until all of a chunk are finished,
and refills finished slots in between. `score_by_rules` needs no search: it scores candidates whose proofs are known
beforehand.

Log-probabilities are natural logarithms, -inf where an entry is empty or a probability is 0. Every result is written to
the candidate's own row, so neither the order of candidates nor their neighbours in a batch matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from funcppo.core import tree
from funcppo.core.settings import Size, check_fields
from funcppo.core.types import F32, F64, I32, I64, Bool
from funcppo.kg.logic.resolve import (
    Goals,
    ResolveConfig,
    Successors,
    resolve,
)
from funcppo.kg.logic.row_index import count_to, row_numbers
from funcppo.kg.scores.score import to_log_odds
from funcppo.kg.search.env import (
    Observation,
    World,
    make_observation,
    single_goal,
    take,
)
from funcppo.kg.search.network import Params, filled_positions
from funcppo.nets.networks import Agent

ScoreName = Literal["success", "best-proof"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchConfig:
    """Static settings of a beam search; changing them recompiles compiled functions."""

    resolve: ResolveConfig
    agent: Agent
    score: ScoreName
    max_depth: Size  # resolution steps
    slots: Size  # B, candidates searched at the same time
    beam: Size  # K, partial proofs kept for each candidate
    rows_per_step: Size  # R, partial proofs extended in one step; at least K
    chunk_size: Size  # candidates that are loaded at once

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class SearchResult(NamedTuple):
    """Results of candidates, one per row."""

    log_score: F32[Tensor, "B"]  # logarithm of the score
    # log-probability of all choices that lead to no proof, of partial proofs at the depth limit, and of those that the
    # beam dropped: the logarithm of 1 - `success`; not counted for the other scores
    failed_log_mass: F32[Tensor, "B"]
    # log-probability of all partial proofs that the beam dropped
    pruned_log_mass: F32[Tensor, "B"]
    # log-probability of all partial proofs some of whose successors did not fit
    overflow_log_mass: F32[Tensor, "B"]
    # log-probability of the most probable proof
    best_log_prob: F32[Tensor, "B"]
    trace: I32[Tensor, "B T"]  # choice ids of that proof; 0-padded
    # number of its choices; 0 where there is no proof
    proof_length: I32[Tensor, "B"]
    n_steps: I32[Tensor, "B"]  # steps that the candidate's beam took


class SearchState(NamedTuple):
    """Candidates in the slots, and their beams of partial proofs."""

    goals: Goals  # goals that are left of each partial proof, [B, K, A, ...]
    # of each partial proof; -inf where the beam entry is empty
    log_prob: F32[Tensor, "B K"]
    # ids of the choices so far: a rule's id, or -1 - a fact's id
    trace: I32[Tensor, "B K T"]
    query: I32[Tensor, "B W"]  # the candidate
    # its row in the chunk; the chunk's size where the slot is idle
    candidate_row: I64[Tensor, "B"]
    depth: I32[Tensor, "B"]  # steps so far
    result: SearchResult  # result of the candidate so far, [B]


class _Children(NamedTuple):
    """Successors of the partial proofs that one step extends, in the order of slots."""

    goals: Goals  # [R, S, ...]
    # of the whole path; -inf where there is no successor
    log_prob: F32[Tensor, "R S"]
    # of the path and any choice that leads to no proof, END included
    failed_log_prob: F32[Tensor, "R"]
    proved: Bool[Tensor, "R S"]  # no goals are left
    choice_id: I32[Tensor, "R S"]  # the choice made, as in a trace
    # some successors did not fit the successor table
    overflow: Bool[Tensor, "R"]
    # of the row: slot * K + beam entry; B * K where it is empty
    source: I64[Tensor, "R"]


def slots_for_rows(rows: int) -> int:
    """Return the number of slots that fill so many rows.

    A beam holds about two partial proofs on average.
    """
    return max(1, rows // 2)


def extend_beams(
    cfg: SearchConfig, world: World, params: Params, search: SearchState
) -> tuple[SearchState, I64[Tensor, ""]]:
    """Extend the partial proofs of as many slots as fit the rows of a step; also return how many were extended."""
    selected, source, mask = _select_rows(cfg, search)
    children = _expand(cfg, world, params, search, source, mask)
    advanced = _advance_slots(cfg, search, children)
    return tree.where(selected, advanced, search), mask.sum()


def _look_ahead(
    cfg: SearchConfig,
    world: World,
    params: Params,
    goals: Goals,
    query: I32[Tensor, "R W"],
    remaining: F32[Tensor, "R"],
) -> tuple[Successors, Observation, F32[Tensor, "R S1"]]:
    """Return the successors of partial proofs, their observation, and the policy's log-probabilities of them and END.

        log p_i = (x_i - x_m) - log(1 + sum_{j != m} exp(x_j - x_m)),    m the most probable one

    Without the term of m itself in the sum, the digits of a log p near 0 are exact, where the common form rounds to
    multiples of 1e-7.
    """
    successors = resolve(cfg.resolve, world.kb, goals, query)
    observation = make_observation(
        cfg.resolve, world, goals, successors, query, remaining
    )
    output = cfg.agent.apply(cfg.agent.cfg, world, params, observation)
    largest, most_probable = output.logits.max(-1, keepdim=True)
    below_largest = output.logits - largest
    others = below_largest.exp().scatter(-1, most_probable, 0.0)
    log_policy = below_largest - torch.log1p(others.sum(-1, keepdim=True))
    return successors, observation, log_policy


def log_odds(cfg: SearchConfig, result: SearchResult) -> F64[Tensor, "B"]:
    """Compute the log-odds of the score of each candidate.

    Those of `success` are the ratio of two masses, which both are sums of what the search met, so that neither end
    of the scale loses digits. The others are products of probabilities, which lose none near 1.
    """
    if cfg.score == "success":
        return result.log_score.double() - result.failed_log_mass.double()
    return to_log_odds(result.log_score)


def _select_rows(
    cfg: SearchConfig, search: SearchState
) -> tuple[Bool[Tensor, "B"], I64[Tensor, "R"], Bool[Tensor, "R"]]:
    """Select slots whose open beam entries together fit into the rows of a step, and gather their entries into rows.

    First the slots that come first, as many as fit; then, in further rounds, those that fit into the rows left over.

    Returns:
      The slots; the beam entry of each row, slot * K + entry, B * K where it is empty; and which rows hold one.
    """
    is_open = torch.isfinite(search.log_prob)
    n_open = is_open.sum(1)
    selected = torch.zeros_like(n_open, dtype=torch.bool)
    n_free = n_open.new_full((), cfg.rows_per_step, dtype=torch.int64)
    for _ in range(3):  # passes over the slots to fill the rows
        is_excluded = selected | (n_open > n_free)
        demand = torch.where(is_excluded, 0, n_open)
        fits = (demand > 0) & (demand.cumsum(0) <= n_free)
        selected = selected | fits
        n_free = n_free - torch.where(fits, n_open, 0).sum()
    source = filled_positions(is_open & selected[:, None], cfg.rows_per_step)
    return selected, source, source < is_open.numel()


def _expand(
    cfg: SearchConfig,
    world: World,
    params: Params,
    search: SearchState,
    source: I64[Tensor, "R"],
    mask: Bool[Tensor, "R"],
) -> _Children:
    """Compute the successors of the selected rows, with their log-probabilities under the policy."""
    entry = torch.where(mask, source, 0)
    slot = entry // cfg.beam
    query = search.query[slot]
    goals = tree.map(lambda x: x.flatten(0, 1)[entry], search.goals)
    goals = Goals(
        atoms=torch.where(mask[:, None, None], goals.atoms, 0),
        height=goals.height,
    )

    remaining = 1.0 - search.depth[slot] / cfg.max_depth
    successors, observation, log_policy = _look_ahead(
        cfg, world, params, goals, query, remaining
    )

    path_log_prob = search.log_prob.flatten()[entry]
    path_log_prob = torch.where(mask, path_log_prob, -torch.inf)
    choice_log_prob = log_policy[:, :-1]
    is_rule = successors.rule >= 0
    if cfg.score == "best-proof":
        choice_log_prob = torch.where(is_rule, choice_log_prob, 0.0)
    # A dead end leads to no proof, so it adds nothing to either score.
    may_prove = observation.action_mask[:, :-1] & ~observation.dead_end
    choice_log_prob = torch.where(may_prove, choice_log_prob, -torch.inf)
    is_followed = torch.nn.functional.pad(
        torch.isfinite(choice_log_prob), (0, 1)
    )
    failed_log_policy = torch.where(is_followed, -torch.inf, log_policy)
    return _Children(
        goals=successors.goals,
        log_prob=path_log_prob[:, None] + choice_log_prob,
        failed_log_prob=path_log_prob + failed_log_policy.logsumexp(1),
        proved=successors.goals.atoms[:, :, 0, 0] == 0,
        choice_id=torch.where(is_rule, successors.rule, -1 - successors.fact),
        overflow=successors.overflow & mask,
        source=source,
    )


def _advance_slots(
    cfg: SearchConfig, search: SearchState, children: _Children
) -> SearchState:
    """Return the search after one step: each slot's K most probable open children form its new beam."""
    open_log_prob = torch.where(children.proved, -torch.inf, children.log_prob)
    child, dropped = _place_children(cfg, children.source, open_log_prob)
    result = _update_result(cfg, search, children, open_log_prob, dropped)
    has_child, child = child >= 0, child.clamp_min(0)

    # Entries without a child, at the depth limit, or no better than a proof are empty.
    log_prob = open_log_prob.flatten()[child]
    log_prob = torch.where(has_child, log_prob, -torch.inf)
    log_prob = log_prob.view(cfg.slots, cfg.beam)
    may_continue = search.depth + 1 < cfg.max_depth
    log_prob = torch.where(may_continue[:, None], log_prob, -torch.inf)
    if cfg.score == "best-proof":
        # A path only loses probability: one that is no better than the best proof so far is closed.
        may_win = log_prob > result.log_score[:, None]
        log_prob = torch.where(may_win, log_prob, -torch.inf)

    parent = children.source[child // cfg.resolve.max_successors]
    parent = torch.where(has_child, parent, 0)
    parent_trace = search.trace.flatten(0, 1)[parent].view_as(search.trace)
    choice_id = children.choice_id.flatten()[child]

    def take_children(new: Tensor, old: Tensor) -> Tensor:
        return new.flatten(0, 1)[child].view_as(old)

    return SearchState(
        goals=tree.map(take_children, children.goals, search.goals),
        log_prob=log_prob,
        trace=_append_choice(
            parent_trace, search.depth, choice_id.view_as(log_prob)
        ),
        query=search.query,
        candidate_row=search.candidate_row,
        depth=search.depth + 1,
        result=result,
    )


def _place_children(
    cfg: SearchConfig,
    source: I64[Tensor, "R"],
    open_log_prob: F32[Tensor, "R S"],
) -> tuple[I64[Tensor, "BK"], Bool[Tensor, "R S"]]:
    """Rank the open children of each slot by probability and give the first K their beam entries.

    Returns:
      The child (row * S + successor) of each beam entry, -1 without one; and which children have no entry.
    """
    n_entries = cfg.slots * cfg.beam
    row_slot = source // cfg.beam
    slot = row_slot[:, None].expand_as(open_log_prob).flatten()
    log_prob = open_log_prob.flatten()

    # Closed children sort behind all slots.
    is_open = torch.isfinite(log_prob)
    slot = torch.where(is_open, slot, cfg.slots)

    # Two stable sorts: by slot, and by descending probability within a slot.
    best_first = torch.sort(log_prob, descending=True, stable=True).indices
    slot, by_slot = torch.sort(slot[best_first], stable=True)
    order = best_first[by_slot]

    rank = row_numbers(order)
    rank = rank - torch.searchsorted(slot, slot)
    is_kept = (rank < cfg.beam) & (slot < cfg.slots)

    # Children without an entry go to a spare one, which is cut off.
    place = torch.where(is_kept, slot * cfg.beam + rank, n_entries)
    child = order.new_full((n_entries + 1,), -1)
    child = child.scatter(0, place, order)[:n_entries]
    is_dropped = torch.zeros_like(is_kept).scatter(0, order, ~is_kept)
    return child, is_dropped.view_as(open_log_prob)


def _update_result(
    cfg: SearchConfig,
    search: SearchState,
    children: _Children,
    open_log_prob: F32[Tensor, "R S"],
    dropped: Bool[Tensor, "R S"],
) -> SearchResult:
    """Add one step to the results: its proofs, and the mass that failed, was pruned or did not fit."""
    result = _record_proofs(cfg, search, children)

    is_filled = children.source < cfg.slots * cfg.beam
    entry = torch.where(is_filled, children.source, 0)
    path_log_prob = search.log_prob.flatten()[entry]
    overflow_log_prob = torch.where(
        children.overflow, path_log_prob, -torch.inf
    )

    dropped_log_prob = torch.where(dropped, open_log_prob, -torch.inf)
    pruned = _mass_by_entry(cfg, children, dropped_log_prob)
    overflow = _mass_by_entry(cfg, children, overflow_log_prob[:, None])
    result = result._replace(
        pruned_log_mass=_add_log_mass(cfg, result.pruned_log_mass, pruned),
        overflow_log_mass=_add_log_mass(
            cfg, result.overflow_log_mass, overflow
        ),
        n_steps=result.n_steps + 1,
    )
    if cfg.score != "success":
        return result

    # At the depth limit no child goes on.
    is_last_step = search.depth[entry // cfg.beam] + 1 >= cfg.max_depth
    is_lost = dropped | is_last_step[:, None]
    lost_log_prob = torch.where(is_lost, open_log_prob, -torch.inf)
    failed_log_prob = torch.cat(
        [lost_log_prob, children.failed_log_prob[:, None]], dim=1
    )
    failed = _mass_by_entry(cfg, children, failed_log_prob)
    return result._replace(
        failed_log_mass=_add_log_mass(cfg, result.failed_log_mass, failed)
    )


def _record_proofs(
    cfg: SearchConfig, search: SearchState, children: _Children
) -> SearchResult:
    """Return the results with the proofs of this step added."""
    result = search.result
    proved_log_prob = torch.where(
        children.proved, children.log_prob, -torch.inf
    )
    log_prob, trace = _best_proof(cfg, search, children, proved_log_prob)
    is_better = log_prob > result.best_log_prob
    proof_length = torch.where(is_better, search.depth + 1, result.proof_length)

    proved = _mass_by_entry(cfg, children, proved_log_prob)
    return result._replace(
        log_score=_add_log_mass(cfg, result.log_score, proved),
        best_log_prob=torch.where(is_better, log_prob, result.best_log_prob),
        trace=torch.where(is_better[:, None], trace, result.trace),
        proof_length=proof_length,
    )


def _best_proof(
    cfg: SearchConfig,
    search: SearchState,
    children: _Children,
    proved_log_prob: F32[Tensor, "R S"],
) -> tuple[F32[Tensor, "B"], I32[Tensor, "B T"]]:
    """Return, per slot, the log-probability and trace of this step's most probable proof; -inf without a proof."""
    # First the best successor of each row, then the best row of each slot.
    row_log_prob, row_action = proved_log_prob.max(1)
    entry_log_prob = _scatter_to_entries(
        cfg, children, row_log_prob, -torch.inf
    )
    log_prob, entry = entry_log_prob.max(1)

    row_choice = take(children.choice_id, row_action[:, None])
    entry_choice = _scatter_to_entries(cfg, children, row_choice[:, 0], 0)
    choice_id = entry_choice.gather(1, entry[:, None])

    parent_trace = take(search.trace, entry[:, None])
    trace = _append_choice(parent_trace, search.depth, choice_id)
    return log_prob, trace[:, 0]


def _mass_by_entry(
    cfg: SearchConfig, children: _Children, log_prob: F32[Tensor, "R n"]
) -> F32[Tensor, "B K"]:
    """Add up each row's probabilities (best-proof: the largest) at its beam entry, in logarithms; -inf elsewhere."""
    mass = (
        log_prob.amax(1) if cfg.score == "best-proof" else log_prob.logsumexp(1)
    )
    return _scatter_to_entries(cfg, children, mass, -torch.inf)


def _scatter_to_entries(
    cfg: SearchConfig, children: _Children, value: Tensor, empty: float
) -> Tensor:
    """Scatter a value per row, [R], to the beam entries [B, K] of the rows; `empty` elsewhere."""
    n_entries = cfg.slots * cfg.beam
    entries = value.new_full((n_entries + 1,), empty)
    entries = entries.scatter(0, children.source, value)
    return entries[:n_entries].view(cfg.slots, cfg.beam)


def _add_log_mass(
    cfg: SearchConfig,
    log_mass: F32[Tensor, "B"],
    entry_mass: F32[Tensor, "B K"],
) -> F32[Tensor, "B"]:
    """Add the mass of beam entries to that of their slots; for best-proof the largest counts, not the sum."""
    if cfg.score == "best-proof":
        return torch.maximum(log_mass, entry_mass.amax(1))
    slot_mass = torch.logsumexp(entry_mass, 1)
    return torch.logaddexp(log_mass, slot_mass)


def _append_choice(
    trace: I32[Tensor, "B n T"],
    depth: I32[Tensor, "B"],
    choice_id: I32[Tensor, "B n"],
) -> I32[Tensor, "B n T"]:
    """Return the traces with a choice written at position `depth`."""
    position = count_to(trace.shape[-1], trace)
    is_next = position == depth[:, None, None]
    return torch.where(is_next, choice_id[..., None], trace)


# -- slots


class SchedulerState(NamedTuple):
    """Search through one chunk of candidates, its results so far and the work done."""

    search: SearchState
    # [chunk_size + 1, ...]; the last row is for idle slots
    results: SearchResult
    n_started: I64[Tensor, ""]  # candidates that entered a slot
    n_candidates: I64[Tensor, ""]  # candidates of the chunk
    # partial proofs extended, summed over steps
    active_row_steps: I64[Tensor, ""]


class ScoringRun(NamedTuple):
    """Results of a scoring run and the work that it took."""

    results: SearchResult  # of each candidate
    active_row_steps: int  # rows that held a partial proof, summed over steps
    row_steps: int  # all rows, summed over steps


# `evaluate_step`, or a compiled or graphed version of it. It may overwrite the state that it is given.
SearchStep = Callable[
    [SearchConfig, World, Params, Tensor, SchedulerState], SchedulerState
]
# Yields chunks of at most so many candidates, in order, on the scoring device.
ChunkLoader = Callable[[Tensor, int], Iterable[Tensor]]
# Brings numbers to the host: these, or those of an earlier call where it is asynchronous; None if none arrived yet.
Readback = Callable[[Tensor], Tensor | None]
# Receives the number of candidates started so far, and of all that are to be scored.
ProgressCallback = Callable[[int, int], object]


def init_scheduler(
    cfg: SearchConfig, chunk: I32[Tensor, "n W"]
) -> SchedulerState:
    """Return the state before the first step, with every slot idle.

    Args:
      chunk: as `evaluate_step`.
    """
    # Idle slots hold no candidate; their results are thrown away.
    device = chunk.device
    query = chunk.new_zeros((cfg.slots, chunk.shape[1]))
    row = torch.full((cfg.slots,), cfg.chunk_size, device=device)
    search = tree.contiguous_copy(_init_search(cfg, query, row))
    return SchedulerState(
        search=search,
        results=_empty_results(cfg, cfg.chunk_size + 1, device),
        n_started=torch.zeros((), dtype=torch.int64, device=device),
        n_candidates=(chunk[:, 0] > 0).sum(),
        active_row_steps=torch.zeros((), dtype=torch.int64, device=device),
    )


def evaluate_step(
    cfg: SearchConfig,
    world: World,
    params: Params,
    chunk: I32[Tensor, "n W"],
    state: SchedulerState,
) -> SchedulerState:
    """Refill the free slots, then extend partial proofs by one choice.

    Args:
      chunk: candidates [chunk_size + 1, W]; rows that pad the chunk are all 0, the last row always.
    """
    state = _refill(cfg, chunk, state)
    search, n_rows = extend_beams(cfg, world, params, state.search)
    return SchedulerState(
        search=search,
        results=tree.map(
            lambda old, new: _write_rows(old, search.candidate_row, new),
            state.results,
            search.result,
        ),
        n_started=state.n_started,
        n_candidates=state.n_candidates,
        active_row_steps=state.active_row_steps + n_rows,
    )


def ignore_progress(n_started: int, n_candidates: int, /) -> None:
    """Ignore the numbers: the default progress callback."""


def score_candidates(
    cfg: SearchConfig,
    world: World,
    params: Params,
    candidates: I32[Tensor, "n W"],
    step: SearchStep = evaluate_step,
    on_progress: ProgressCallback = ignore_progress,
    load_chunks: ChunkLoader = torch.split,
    make_readback: Callable[[], Readback] = lambda: lambda numbers: numbers,
) -> ScoringRun:
    """Score every candidate by a beam search for its proofs.

    Args:
      candidates: ground atoms, at least one.
      on_progress: called before the first step, and every few steps; on a CPU, where they are slow, after each. What
        it raises ends the search.
      load_chunks: such as `runtime.memory.prefetch`.
      make_readback: such as `runtime.memory.AsyncReadback`.

    Returns:
      The result of each candidate, and the work done.
    """
    results: list[SearchResult] = []
    active_row_steps = row_steps = n_scored = n_started = 0
    on_progress(0, len(candidates))
    for part in load_chunks(candidates, cfg.chunk_size):
        padding = part.new_zeros(
            (cfg.chunk_size + 1 - len(part), part.shape[1])
        )
        chunk = torch.cat([part, padding]).to(torch.int32)
        state = init_scheduler(cfg, chunk)
        read = make_readback()

        finished = False
        while not finished:
            for _ in range(4):
                state = step(cfg, world, params, chunk, state)
                if not chunk.is_cuda:
                    on_progress(n_scored + n_started, len(candidates))
            row_steps += 4 * cfg.rows_per_step

            numbers = read(
                torch.stack([state.n_started, all_finished(state).long()])
            )
            if numbers is not None:
                n_started, finished = numbers.tolist()
                n_started = min(n_started, len(part))
                on_progress(n_scored + n_started, len(candidates))

        # a copy, because the next chunk may overwrite the originals
        copy = partial(_copy_rows, len(part))
        results.append(tree.map(copy, state.results))
        active_row_steps += int(state.active_row_steps)
        n_scored, n_started = n_scored + len(part), 0
    return ScoringRun(
        results=tree.map(
            lambda *parts: torch.cat(parts), results[0], *results[1:]
        ),
        active_row_steps=active_row_steps,
        row_steps=row_steps,
    )


def _copy_rows(n: int, x: Tensor) -> Tensor:
    """Return a copy of the first n rows."""
    return x[:n].clone()


def score_by_rules(
    cfg: SearchConfig, world: World, params: Params, atoms: I32[Tensor, "n W"]
) -> F64[Tensor, "n"]:
    """Compute the log-odds of the scores of ground atoms without a search (height 1, facts from the oracle).

    A rule then proves an atom if and only if it derives it, which the derivability index tells. The scores are

        success:     sum of the probabilities of the rules that derive the atom
        best-proof:  the largest of these probabilities
    """
    goals = single_goal(cfg.resolve.max_goals, atoms)
    remaining = torch.ones_like(atoms[:, 0], dtype=torch.float32)
    _, observation, log_policy = _look_ahead(
        cfg, world, params, goals, atoms, remaining
    )

    # At a ground root every successor that does not derive it is a dead end.
    derives = observation.action_mask[:, :-1] & ~observation.dead_end
    derives = torch.nn.functional.pad(derives, (0, 1))  # END does not
    derivation_log_prob = torch.where(derives, log_policy, -torch.inf)
    if cfg.score == "success":
        # The ratio of two sums: neither of a small and a large probability loses digits.
        other_log_prob = torch.where(derives, -torch.inf, log_policy)
        log_success = derivation_log_prob.logsumexp(1).double()
        return log_success - other_log_prob.logsumexp(1).double()

    return to_log_odds(derivation_log_prob.amax(1))


def all_finished(state: SchedulerState) -> Bool[Tensor, ""]:
    """Check whether every candidate of the chunk has its result."""
    return (state.n_started >= state.n_candidates) & ~torch.isfinite(
        state.search.log_prob
    ).any()


def _refill(
    cfg: SearchConfig, chunk: I32[Tensor, "n W"], state: SchedulerState
) -> SchedulerState:
    """Give free slots the next candidates of the chunk."""
    search = state.search
    is_free = ~torch.isfinite(search.log_prob).any(1)

    # Free slots take candidates in order; beyond the end of the chunk all read its last row, which is empty.
    next_row = state.n_started + is_free.long().cumsum(0) - 1
    next_row = next_row.clamp_max(cfg.chunk_size)
    candidate_row = torch.where(is_free, next_row, search.candidate_row)
    fresh = _init_search(cfg, chunk[candidate_row], candidate_row)

    n_started = state.n_started + is_free.sum()
    return state._replace(
        search=tree.where(is_free, fresh, search),
        n_started=n_started.clamp_max(cfg.chunk_size),
    )


def _init_search(
    cfg: SearchConfig,
    query: I32[Tensor, "B W"],
    candidate_row: I64[Tensor, "B"],
) -> SearchState:
    """Return beams with one partial proof each: the query as its only goal; an all-0 query leaves its slot idle."""
    shape = (len(query), cfg.beam, cfg.resolve.max_goals)
    root = single_goal(cfg.resolve.max_goals, query)
    is_first_entry = count_to(cfg.beam, query) == 0
    is_filled = is_first_entry & (query[:, :1] > 0)
    return SearchState(
        goals=Goals(
            atoms=root.atoms[:, None].expand(*shape, -1),
            height=query.new_zeros(shape),
        ),
        log_prob=torch.where(is_filled, 0.0, -torch.inf),
        trace=query.new_zeros((*shape[:2], cfg.max_depth)),
        query=query,
        candidate_row=candidate_row,
        depth=torch.zeros_like(query[:, 0]),
        result=_empty_results(cfg, len(query), query.device),
    )


def _empty_results(
    cfg: SearchConfig, n: int, device: torch.device
) -> SearchResult:
    """Return results of n candidates without any proof yet.

    No tensor is in two places: a compiled step would be compiled again for the next state, where none is.
    """

    def none() -> Tensor:
        """Return a log-probability of -inf for each candidate."""
        return torch.full((n,), -torch.inf, device=device)

    whole = partial(torch.zeros, dtype=torch.int32, device=device)
    return SearchResult(
        log_score=none(),
        failed_log_mass=none(),
        pruned_log_mass=none(),
        overflow_log_mass=none(),
        best_log_prob=none(),
        trace=whole((n, cfg.max_depth)),
        proof_length=whole(n),
        n_steps=whole(n),
    )


def _write_rows(table: Tensor, row: I64[Tensor, "B"], value: Tensor) -> Tensor:
    """Return the table [n, ...] with value[b] written to row[b]."""
    index = row.view(-1, *[1] * (value.ndim - 1)).expand_as(value)
    return table.scatter(0, index, value)
