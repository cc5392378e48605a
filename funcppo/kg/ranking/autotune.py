"""Batch size of a scorer: the number of candidates scored at once that is nearly the fastest within a memory limit.

`tune_slots` chooses the number of slots of a beam search, `tune_chunk_size` the chunk size where no search is needed.
Both time a sample at ascending sizes (`run_trials`) and take the smallest size near the best throughput
(`select_trial`). A size is tried only if it is expected to stay within the limit, so the trials themselves do.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from funcppo.kg.search.beam_search import SearchConfig, slots_for_rows
from funcppo.kg.search.env import World
from funcppo.kg.search.network import Params
from funcppo.kg.search.slot_scheduler import (
    SearchStep,
    init_scheduler,
    score_by_rules,
    width_schedule,
)
from funcppo.runtime import memory

# partial proofs extended in one step, or candidates of one chunk
TRIAL_SIZES = tuple(1 << i for i in range(17))
MIN_CHUNK_SIZE = 64  # candidates; smaller chunks are not tried
# at least so many, because slots idle while the last candidates of a chunk finish
CHUNK_CANDIDATES_PER_SLOT = 16
# steps before a search is timed, so that its slots hold partial proofs of every depth; and steps
# timed
TRIAL_STEPS = 8
# trials end when two sizes in a row are not faster than the best smaller one by this factor
MIN_GAIN = 1.05
# a size within this factor of the best throughput counts as equally fast
NEAR_BEST = 1.2
MAX_TRIAL_SECONDS = 1.0  # trials end after one that took longer


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A size that was timed."""

    size: int
    rows_per_second: float
    # held at once during the trial, by the whole process or device
    peak_bytes: int


class TrialTiming(NamedTuple):
    """The work of a trial and its time."""

    n_rows: int
    seconds: float


class TrialRun(Protocol):
    """Runs a trial of a size."""

    def __call__(self, size: int, /) -> tuple[int, float]:
        """The number of rows, and the seconds that they took."""
        ...


class SearchStepFactory(Protocol):
    """Makes a way to run `evaluate_step`."""

    def __call__(self) -> SearchStep:
        """A new search step."""
        ...


class TunedConfig(NamedTuple):
    """The chosen settings, and the sizes that were tried for them."""

    cfg: SearchConfig
    trials: list[Trial]


def tune_slots(
    cfg: SearchConfig,
    world: World,
    params: Params,
    sample: Tensor,
    max_bytes: int,
    make_step: SearchStepFactory,
) -> TunedConfig:
    """Choose the number of slots of a search.

    Args:
      sample: typical candidates, at least one.
      max_bytes: memory that the process may hold on the device, what it holds already included.
      make_step: called once for each size.

    Raises:
      ValueError: the smallest search does not fit.
    """
    sizes = [rows for rows in TRIAL_SIZES if rows >= 2 * cfg.beam]
    run = partial(_time_search, cfg, world, params, sample, make_step)
    trials = run_trials(run, sizes, max_bytes, sample.device)
    return TunedConfig(
        cfg=_with_rows(cfg, select_trial(trials).size), trials=trials
    )


def tune_chunk_size(
    cfg: SearchConfig,
    world: World,
    params: Params,
    sample: Tensor,
    max_bytes: int,
) -> TunedConfig:
    """Choose the number of candidates of a chunk where scores follow from the rules alone, without a search.

    Args:
      sample: typical candidates, at least one.
      max_bytes: memory that the process may hold on the device, what it holds already included.

    Raises:
      ValueError: the smallest chunk does not fit.
    """
    sizes = [size for size in TRIAL_SIZES if size >= MIN_CHUNK_SIZE]
    run = partial(_time_rules, cfg, world, params, sample)
    trials = run_trials(run, sizes, max_bytes, sample.device)
    return TunedConfig(
        cfg=replace(cfg, chunk_size=select_trial(trials).size),
        trials=trials,
    )


def select_trial(trials: list[Trial]) -> Trial:
    """The smallest size near the best throughput: a small size leaves fewer slots idle at the end of a chunk."""
    fastest = max(trial.rows_per_second for trial in trials)
    return next(
        trial
        for trial in trials
        if trial.rows_per_second * NEAR_BEST >= fastest
    )


def run_trials(
    run: TrialRun, sizes: Iterable[int], max_bytes: int, device: torch.device
) -> list[Trial]:
    """Try ascending sizes and return the trials that kept the memory limit.

    Trials end at the first size that is expected to exceed the limit or that runs out of memory, when larger sizes are
    no faster, or after one that took long.

    Args:
      max_bytes: memory that the process may hold on the device, what it holds already included.

    Raises:
      ValueError: the smallest size does not fit.
    """
    trials: list[Trial] = []
    initial_bytes = memory.used_bytes(device)
    for size in sizes:
        # A size twice as large is expected to take at most twice the memory.
        growth = trials[-1].peak_bytes - initial_bytes if trials else 0
        if initial_bytes + 2 * growth > max_bytes or _is_saturated(trials):
            break

        start = time.perf_counter()
        memory.reset_peak(device)
        try:
            n_rows, seconds = run(size)
        except RuntimeError as error:
            if not trials or not memory.is_out_of_memory(error):
                raise
            break
        trials.append(
            Trial(
                size=size,
                rows_per_second=n_rows / seconds,
                peak_bytes=memory.peak_bytes(device),
            )
        )
        if time.perf_counter() - start > MAX_TRIAL_SECONDS:
            break

    memory.collect_unused()
    within_limit = [trial for trial in trials if trial.peak_bytes <= max_bytes]
    if not within_limit:
        needed_bytes = trials[0].peak_bytes if trials else initial_bytes
        raise ValueError(
            f"--memory {max_bytes}: expected at least {needed_bytes} bytes here, "
            f"of which {initial_bytes} are in use already"
        )
    return within_limit


def _with_rows(cfg: SearchConfig, rows: int) -> SearchConfig:
    """The same search with so many rows a step, and slots and chunks to fill them."""
    slots = slots_for_rows(rows, cfg.beam)
    chunk_size = max(cfg.chunk_size, CHUNK_CANDIDATES_PER_SLOT * slots)
    return replace(cfg, rows_per_step=rows, slots=slots, chunk_size=chunk_size)


def _time_search(
    cfg: SearchConfig,
    world: World,
    params: Params,
    sample: Tensor,
    make_step: SearchStepFactory,
    rows: int,
    /,
) -> TrialTiming:
    """Time steps of the narrowest search with so many rows; reading the row count waits for the device."""
    cfg = width_schedule(_with_rows(cfg, rows))[0]
    candidates = _repeat_rows(sample, cfg.chunk_size)
    chunk = torch.cat([candidates, torch.zeros_like(candidates[:1])])
    step = make_step()

    state = init_scheduler(cfg, chunk)
    for _ in range(TRIAL_STEPS):
        state = step(cfg, world, params, chunk, state)
    n_warm_up = int(state.active_row_steps)

    start = time.perf_counter()
    for _ in range(TRIAL_STEPS):
        state = step(cfg, world, params, chunk, state)
    n_rows = int(state.active_row_steps) - n_warm_up
    return TrialTiming(n_rows=n_rows, seconds=time.perf_counter() - start)


def _time_rules(
    cfg: SearchConfig,
    world: World,
    params: Params,
    sample: Tensor,
    chunk_size: int,
    /,
) -> TrialTiming:
    """Time the scores of one chunk; copying them to the host waits for the device."""
    cfg = replace(cfg, chunk_size=chunk_size)
    chunk = _repeat_rows(sample, chunk_size)
    score_by_rules(cfg, world, params, chunk)  # warm-up

    start = time.perf_counter()
    n_rows = len(score_by_rules(cfg, world, params, chunk).cpu())
    return TrialTiming(n_rows=n_rows, seconds=time.perf_counter() - start)


def _repeat_rows(sample: Tensor, n: int) -> Tensor:
    """n rows of the sample, repeated as often as needed, as int32."""
    n_repeats = -(-n // len(sample))
    return sample.repeat(n_repeats, 1)[:n].to(torch.int32)


def _is_saturated(trials: list[Trial]) -> bool:
    """Whether the last two sizes were no faster than the smaller ones."""
    if len(trials) <= 2:
        return False
    best_smaller = max(trial.rows_per_second for trial in trials[:-2])
    best_recent = max(trial.rows_per_second for trial in trials[-2:])
    return best_recent < MIN_GAIN * best_smaller
