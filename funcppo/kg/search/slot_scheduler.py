"""Scores of many candidates through a fixed number of search slots.

Each slot holds the beam of one candidate (`beam_search`). `score_candidates` loads candidates in chunks, runs
`evaluate_step` until all of a chunk are finished, and refills finished slots in between. `score_by_width` does so with
narrow successor tables first and repeats only what did not fit. `score_by_rules` needs no search: it scores candidates
whose proofs are known beforehand.

Results hold natural logarithms, -inf where a score is 0. Every result is written to the candidate's own row, so neither
the order of candidates nor their neighbours in a batch matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from funcppo.core import tree
from funcppo.core.types import F64, I32, I64, Bool
from funcppo.kg.logic.resolve import Goals, resolve
from funcppo.kg.scores import rules
from funcppo.kg.search.beam_search import (
    UNPROVED_PENALTY,
    SearchConfig,
    SearchResult,
    SearchState,
    extend_beams,
    policy_log_probs,
)
from funcppo.kg.search.env import World, make_observation
from funcppo.kg.search.network import Params

NARROW_WIDTHS = (32,)  # successors a row, tried before the width that holds all
# successors a row that the network has capacity for, on average over a step
ROW_CAPACITY = 10
# steps between two questions of the host whether all candidates are finished
_STEPS_PER_READBACK = 4


class SchedulerState(NamedTuple):
    """A search through one chunk of candidates, its results so far and the work done."""

    search: SearchState
    # [chunk_size + 1, ...]; the last row is for idle slots
    results: SearchResult
    n_started: I64[Tensor, ""]  # candidates that entered a slot
    n_candidates: I64[Tensor, ""]  # candidates of the chunk
    # partial proofs extended, summed over steps
    active_row_steps: I64[Tensor, ""]


class ScoringRun(NamedTuple):
    """The results of a scoring run and the work that it took."""

    results: SearchResult  # of each candidate
    active_row_steps: int  # rows that held a partial proof, summed over steps
    row_steps: int  # all rows, summed over steps


class SearchStep(Protocol):
    """`evaluate_step`, or a compiled or graphed version of it. It may overwrite the state that it is given."""

    def __call__(
        self,
        cfg: SearchConfig,
        world: World,
        params: Params,
        chunk: Tensor,
        state: SchedulerState,
        /,
    ) -> SchedulerState:
        """The state after one step."""
        ...


class ChunkLoader(Protocol):
    """Brings candidates to the device where they are scored."""

    def __call__(
        self, candidates: Tensor, chunk_size: int, /
    ) -> Iterator[Tensor]:
        """Chunks of at most `chunk_size` candidates, in order, on the scoring device."""
        ...


class Readback(Protocol):
    """Brings numbers from the device to the host."""

    def __call__(self, numbers: Tensor, /) -> Tensor | None:
        """These numbers, or those of an earlier call where the transfer is asynchronous; None if none arrived yet."""
        ...


class ReadbackFactory(Protocol):
    """Makes a readback for one chunk."""

    def __call__(self) -> Readback:
        """A new readback."""
        ...


class ProgressCallback(Protocol):
    """Receives the progress of a scoring run."""

    def __call__(self, n_started: int, n_candidates: int, /) -> None:
        """Receive the number of candidates started so far, and of all that are to be scored."""
        ...


def init_scheduler(
    cfg: SearchConfig, chunk: I32[Tensor, "n W"]
) -> SchedulerState:
    """The state before the first step, which fills the slots.

    Args:
      chunk: as `evaluate_step`.
    """
    n_slots, beam, device = cfg.slots, cfg.beam, chunk.device

    # Idle slots: no partial proofs, and a candidate row whose results are thrown away.
    goals_shape = (n_slots, beam, cfg.resolve.max_goals)
    atom_width = chunk.shape[1]
    search = SearchState(
        goals=Goals(
            torch.zeros(
                (*goals_shape, atom_width), dtype=torch.int32, device=device
            ),
            torch.zeros(goals_shape, dtype=torch.int32, device=device),
        ),
        log_prob=torch.full((n_slots, beam), -torch.inf, device=device),
        trace=torch.zeros(
            (n_slots, beam, cfg.max_depth),
            dtype=torch.int32,
            device=device,
        ),
        query=torch.zeros(
            (n_slots, atom_width), dtype=torch.int32, device=device
        ),
        candidate_row=torch.full(
            (n_slots,),
            cfg.chunk_size,
            dtype=torch.int64,
            device=device,
        ),
        depth=torch.zeros(n_slots, dtype=torch.int32, device=device),
        result=_empty_results(cfg, n_slots, device),
    )

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


def split_chunks(candidates: Tensor, chunk_size: int, /) -> Iterator[Tensor]:
    """Load candidates from the device where they are."""
    yield from candidates.split(chunk_size)


def blocking_readback() -> Readback:
    """Make a readback that waits for the device."""
    return _read_now


def ignore_progress(n_started: int, n_candidates: int, /) -> None:
    """Show no progress."""


def _add_progress(
    on_progress: ProgressCallback, n_before: int, n_started: int, n: int, /
) -> None:
    """Report the progress of a run that comes after another one of `n_before` candidates."""
    on_progress(n_before + n_started, n_before + n)


def score_candidates(
    cfg: SearchConfig,
    world: World,
    params: Params,
    candidates: I32[Tensor, "n W"],
    step: SearchStep = evaluate_step,
    on_progress: ProgressCallback = ignore_progress,
    load_chunks: ChunkLoader = split_chunks,
    make_readback: ReadbackFactory = blocking_readback,
) -> ScoringRun:
    """Search for proofs of every candidate.

    Args:
      candidates: ground atoms, at least one.
      on_progress: called before the first step, and every few steps; on a CPU, where they are slow, after each. What
        it raises ends the search.
      load_chunks: such as `runtime.host_transfer.prefetch`.
      make_readback: such as `runtime.host_transfer.AsyncReadback`.

    Returns:
      The result of each candidate, and the work done.
    """
    results: list[SearchResult] = []
    active_row_steps, row_steps = 0, 0
    n_scored, n_started = 0, 0
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
            for _ in range(_STEPS_PER_READBACK):
                state = step(cfg, world, params, chunk, state)
                if not chunk.is_cuda:
                    on_progress(n_scored + n_started, len(candidates))
            row_steps += _STEPS_PER_READBACK * cfg.rows_per_step

            numbers = read(
                torch.stack([state.n_started, all_finished(state).long()])
            )
            if numbers is not None:
                n_started, finished = numbers.tolist()
                n_started = min(n_started, len(part))
                on_progress(n_scored + n_started, len(candidates))

        results.append(_copy_rows(state.results, len(part)))
        active_row_steps += int(state.active_row_steps)
        n_scored, n_started = n_scored + len(part), 0
    return ScoringRun(
        results=tree.map(
            lambda *parts: torch.cat(parts), results[0], *results[1:]
        ),
        active_row_steps=active_row_steps,
        row_steps=row_steps,
    )


def width_schedule(cfg: SearchConfig) -> list[SearchConfig]:
    """The same search with ascending widths of the successor table, the full one last.

    Most goals have few successors, and a step costs what the table is wide. A wider search extends fewer rows at a
    time, so that each takes about as much memory.
    """
    full_width = cfg.resolve.max_successors
    widths = [width for width in NARROW_WIDTHS if 2 * width <= full_width]
    narrow = [_with_width(cfg, width) for width in widths]

    rows = cfg.rows_per_step
    if widths:
        rows = max(cfg.beam, rows * widths[-1] // full_width)
    full = replace(cfg, rows_per_step=rows, slots=min(cfg.slots, rows))
    return [_with_capacity(search) for search in (*narrow, full)]


def score_by_width(
    cfgs: Sequence[SearchConfig],
    world: World,
    params: Params,
    candidates: I32[Tensor, "n W"],
    step: SearchStep = evaluate_step,
    on_progress: ProgressCallback = ignore_progress,
    load_chunks: ChunkLoader = split_chunks,
    make_readback: ReadbackFactory = blocking_readback,
) -> ScoringRun:
    """As `score_candidates`, narrow searches first; candidates with successors that did not fit are scored again.

    Args:
      cfgs: what `width_schedule` returns.
    """
    run = score_candidates(
        cfgs[0],
        world,
        params,
        candidates,
        step,
        on_progress,
        load_chunks,
        make_readback,
    )
    for cfg in cfgs[1:]:
        overflowed = torch.isfinite(run.results.overflow_log_mass).nonzero()[
            :, 0
        ]
        if not len(overflowed):
            break

        again = candidates[overflowed.to(candidates.device)]
        wider = score_candidates(
            cfg,
            world,
            params,
            again,
            step,
            partial(_add_progress, on_progress, len(candidates)),
            load_chunks,
            make_readback,
        )
        run = ScoringRun(
            results=_replace_rows(run.results, overflowed, wider.results),
            active_row_steps=run.active_row_steps + wider.active_row_steps,
            row_steps=run.row_steps + wider.row_steps,
        )
    return run


def score_by_rules(
    cfg: SearchConfig, world: World, params: Params, atoms: I32[Tensor, "n W"]
) -> F64[Tensor, "n"]:
    """The log-odds of the scores of ground atoms without a search, at height 1 with facts selected by the oracle.

    There a rule proves an atom if and only if it derives it, which is known beforehand. The scores are

        success:     sum of the probabilities of the rules that derive the atom
        best-proof:  the largest of these probabilities
        greedy:      probability of the most probable action, times exp(`UNPROVED_PENALTY`) unless it derives the atom
    """
    position = torch.arange(cfg.resolve.max_goals, device=atoms.device)
    is_root = position == 0
    height = torch.zeros_like(is_root, dtype=torch.int32)
    goals = Goals(
        atoms=torch.where(is_root[:, None], atoms[:, None], 0),
        height=height.expand(len(atoms), -1),
    )
    successors = resolve(cfg.resolve, world.kb, goals, atoms)
    remaining_depth = torch.ones_like(atoms[:, 0], dtype=torch.float32)
    observation = make_observation(
        cfg.resolve,
        world,
        goals,
        successors,
        atoms,
        remaining_depth,
    )
    log_policy = policy_log_probs(cfg, world, params, observation)

    # At a ground root every successor that does not derive it is a dead end.
    derives = observation.action_mask[:, :-1] & ~observation.dead_end
    derives = torch.nn.functional.pad(derives, (0, 1))  # END does not
    derivation_log_prob = torch.where(derives, log_policy, -torch.inf)
    if cfg.score == "success":
        # The ratio of two sums: neither of a small and a large probability loses digits.
        other_log_prob = torch.where(derives, -torch.inf, log_policy)
        log_success = derivation_log_prob.logsumexp(1).double()
        return log_success - other_log_prob.logsumexp(1).double()

    best_derivation = derivation_log_prob.amax(1)
    best_action = log_policy.amax(1)
    if cfg.score == "greedy":
        best_derivation = torch.where(
            best_derivation == best_action,
            best_action,
            best_action + UNPROVED_PENALTY,
        )
    return rules.log_odds(best_derivation)


def all_finished(state: SchedulerState) -> Bool[Tensor, ""]:
    """Whether every candidate of the chunk has its result."""
    return (state.n_started >= state.n_candidates) & ~torch.isfinite(
        state.search.log_prob
    ).any()


def _read_now(numbers: Tensor, /) -> Tensor:
    """The numbers themselves: reading them on the host waits for the device."""
    return numbers


def _with_width(cfg: SearchConfig, width: int) -> SearchConfig:
    """The same search with a narrower successor table."""
    max_fanout = min(width, cfg.resolve.max_fanout)
    narrow = replace(cfg.resolve, max_successors=width, max_fanout=max_fanout)
    return replace(cfg, resolve=narrow)


def _with_capacity(cfg: SearchConfig) -> SearchConfig:
    """The same search with a network that runs on compacted successors, where that saves a third of its work."""
    width = cfg.resolve.max_successors
    table_size = cfg.rows_per_step * width

    # One slot always fits, so that every slot moves on eventually.
    one_slot = cfg.beam * width
    capacity = max(ROW_CAPACITY * cfg.rows_per_step, one_slot)
    if 3 * capacity > 2 * table_size:
        return cfg
    network_cfg = replace(cfg.agent.cfg, capacity=capacity)
    agent = replace(cfg.agent, cfg=network_cfg)
    return replace(cfg, agent=agent)


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
    fresh = _init_search(cfg, search, chunk[candidate_row], candidate_row)

    n_started = state.n_started + is_free.sum()
    return state._replace(
        search=tree.where(is_free, fresh, search),
        n_started=n_started.clamp_max(cfg.chunk_size),
    )


def _init_search(
    cfg: SearchConfig, like: SearchState, query: Tensor, candidate_row: Tensor
) -> SearchState:
    """Beams that hold one partial proof each, the query as its only goal; an all-0 query leaves its slot idle.

    Args:
      like: a state of the same shapes.
    """
    is_root = torch.arange(cfg.resolve.max_goals, device=query.device) == 0
    root_atoms = torch.where(is_root[:, None], query[:, None], 0)
    goals = Goals(
        atoms=root_atoms[:, None].expand_as(like.goals.atoms),
        height=torch.zeros_like(like.goals.height),
    )
    is_first_entry = torch.arange(cfg.beam, device=query.device) == 0
    is_filled = is_first_entry & (query[:, :1] > 0)
    return SearchState(
        goals=goals,
        log_prob=torch.where(is_filled, 0.0, -torch.inf),
        trace=torch.zeros_like(like.trace),
        query=query,
        candidate_row=candidate_row,
        depth=torch.zeros_like(like.depth),
        result=_empty_results(cfg, cfg.slots, query.device),
    )


def _empty_results(
    cfg: SearchConfig, n: int, device: torch.device
) -> SearchResult:
    """Results of candidates of which no proof was found yet.

    No tensor is in two places: a compiled step would be compiled again for the next state, where none is.
    """
    log_probs = torch.full((5, n), -torch.inf, device=device).unbind()
    log_score, failed, pruned, overflow, best = (x.clone() for x in log_probs)
    return SearchResult(
        log_score=log_score,
        failed_log_mass=failed,
        pruned_log_mass=pruned,
        overflow_log_mass=overflow,
        best_log_prob=best,
        trace=torch.zeros((n, cfg.max_depth), dtype=torch.int32, device=device),
        proof_length=torch.zeros(n, dtype=torch.int32, device=device),
        n_steps=torch.zeros(n, dtype=torch.int32, device=device),
    )


def _copy_rows(results: SearchResult, n: int) -> SearchResult:
    """A copy of the first n rows: the next chunk may overwrite the originals."""
    return tree.map(lambda x: x[:n].clone(), results)


def _replace_rows(
    results: SearchResult, row: I64[Tensor, "m"], new: SearchResult
) -> SearchResult:
    """The results with new ones in some rows."""
    return tree.map(lambda old, x: old.index_copy(0, row, x), results, new)


def _write_rows(table: Tensor, row: I64[Tensor, "B"], value: Tensor) -> Tensor:
    """The table, [n, ...], with value[b] in row[b]."""
    index = row.view(-1, *[1] * (value.ndim - 1)).expand_as(value)
    return table.scatter(0, index, value)
