"""How many candidates are scored at once: what is nearly the fastest here, within a budget of memory.

Sizes are tried in ascending order on a sample. A size is not tried when twice the growth of the one before would pass
the budget, so that the trial itself keeps it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from funcppo.evaluation.beam_search import SearchConfig, slots_for_rows
from funcppo.evaluation.slot_scheduler import SchedulerState, init_scheduler, score_by_rules, width_schedule
from funcppo.prover.env import World
from funcppo.runtime import memory

TRIAL_SIZES = tuple(1 << i for i in range(17))  # partial proofs extended in one step, or candidates of one chunk
CHUNK_CANDIDATES_PER_SLOT = 16  # candidates of a table for each slot, at least: its last ones leave slots idle
TRIAL_STEPS = 8  # of a search before it is timed, by when its slots hold partial proofs of every depth; and timed
MIN_GAIN = 1.05  # trying ends when two sizes in a row are not this much faster than the best one before them
NEAR_BEST = 1.2  # as fast as the fastest, is a size that is so many times slower
MAX_TRIAL_SECONDS = 1.0  # seconds; or when a trial took so long


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A size, and what it took."""

    size: int
    rows_per_second: float  # rows a second
    peak_bytes: int  # of the whole process or device


def tune_slots(
    cfg: SearchConfig,
    world: World,
    params: Any,
    sample: Tensor,
    max_bytes: int,
    make_step: Callable[[], Callable[..., SchedulerState]],
) -> tuple[SearchConfig, list[Trial]]:
    """The settings of a search with the number of slots that is fastest within the budget, and what was tried.

    Args:
      sample: candidates such as are to be scored, not empty.
      budget: bytes that the process may hold on the device, all it holds already included.
      steps: makes a way to run `evaluate_step`, anew for each size.
    Errors: ValueError when not even the smallest search fits.
    """

    def shaped(rows: int) -> SearchConfig:
        slots = slots_for_rows(rows, cfg.beam)
        return replace(
            cfg, rows_per_step=rows, slots=slots, chunk_size=max(cfg.chunk_size, CHUNK_CANDIDATES_PER_SLOT * slots)
        )

    def run(rows: int) -> tuple[int, float]:
        narrow, *_ = width_schedule(shaped(rows))
        full = sample.repeat(-(-narrow.chunk_size // len(sample)), 1)[: narrow.chunk_size].to(torch.int32)
        table, step = torch.cat([full, torch.zeros_like(full[:1])]), make_step()
        state = init_scheduler(narrow, table)
        for _ in range(TRIAL_STEPS):
            state = step(narrow, world, params, table, state)
        before, begun = int(state.active_row_steps), time.perf_counter()
        for _ in range(TRIAL_STEPS):
            state = step(narrow, world, params, table, state)
        return int(state.active_row_steps) - before, time.perf_counter() - begun

    trials = run_trials(run, [rows for rows in TRIAL_SIZES if rows >= 2 * cfg.beam], max_bytes, sample.device)
    return shaped(select_trial(trials).size), trials


def tune_chunk_size(
    cfg: SearchConfig, world: World, params: Any, sample: Tensor, max_bytes: int
) -> tuple[SearchConfig, list[Trial]]:
    """The same where rules alone are chosen, which needs no search: how many candidates make a chunk."""

    def run(window: int) -> tuple[int, float]:
        part = sample.repeat(-(-window // len(sample)), 1)[:window].to(torch.int32)
        score_by_rules(replace(cfg, chunk_size=window), world, params, part)
        begun = time.perf_counter()
        n = len(score_by_rules(replace(cfg, chunk_size=window), world, params, part).cpu())
        return n, time.perf_counter() - begun

    trials = run_trials(run, [size for size in TRIAL_SIZES if size >= 64], max_bytes, sample.device)
    return replace(cfg, chunk_size=select_trial(trials).size), trials


def select_trial(trials: list[Trial]) -> Trial:
    """The smallest size that is nearly the fastest: the last candidates leave fewer of its slots idle."""
    fastest = max(trial.rows_per_second for trial in trials)
    return next(trial for trial in trials if trial.rows_per_second * NEAR_BEST >= fastest)


def run_trials(
    run: Callable[[int], tuple[int, float]], sizes: Iterable[int], max_bytes: int, device: torch.device
) -> list[Trial]:
    """The sizes that were tried and kept the budget.

    Args:
      run: from a size to rows and the seconds that they took.
    """
    trials: list[Trial] = []
    held = memory.used_bytes(device)
    for size in sizes:
        expected = held + 2 * (trials[-1].peak_bytes - held) if trials else held
        if expected > max_bytes or _enough(trials):
            break
        begun = time.perf_counter()
        memory.reset_peak(device)
        rows, seconds = run(size)
        trials.append(Trial(size=size, rows_per_second=rows / seconds, peak_bytes=memory.peak_bytes(device)))
        if time.perf_counter() - begun > MAX_TRIAL_SECONDS:
            break
    fitting = [trial for trial in trials if trial.peak_bytes <= max_bytes]
    if not fitting:
        need = trials[0].peak_bytes if trials else held
        raise ValueError(f"--memory {max_bytes}: want at least {need} bytes here, of which {held} are held already")
    return fitting


def _enough(trials: list[Trial]) -> bool:
    """Whether the last two sizes were no faster than those before them."""
    best = max((trial.rows_per_second for trial in trials[:-2]), default=0.0)
    return len(trials) > 2 and max(trial.rows_per_second for trial in trials[-2:]) < MIN_GAIN * best
