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

from funcppo.beam import EvalConfig, slots_for
from funcppo.envs.prover import World
from funcppo.evaluate import Evaluation, narrowed, rule_scores, start
from funcppo.runtime import memory

ROWS = tuple(1 << i for i in range(17))  # partial proofs extended in one step, or candidates of one chunk
WINDOW = 16  # candidates of a table for each slot, at least: its last ones leave slots idle
STEPS = 8  # of a search before it is timed, by when its slots hold partial proofs of every depth; and timed
FASTER = 1.05  # trying ends when two sizes in a row are not this much faster than the best one before them
NEARLY = 1.2  # as fast as the fastest, is a size that is so many times slower
LONG = 1.0  # seconds; or when a trial took so long


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A size, and what it took."""

    size: int
    speed: float  # rows a second
    peak_bytes: int  # of the whole process or device


def fit_search(
    cfg: EvalConfig,
    world: World,
    params: Any,
    sample: Tensor,
    budget: int,
    steps: Callable[[], Callable[..., Evaluation]],
) -> tuple[EvalConfig, list[Trial]]:
    """The settings of a search with the number of slots that is fastest within the budget, and what was tried.

    Args:
      sample: candidates such as are to be scored, not empty.
      budget: bytes that the process may hold on the device, all it holds already included.
      steps: makes a way to run `evaluate_step`, anew for each size.
    Errors: ValueError when not even the smallest search fits.
    """

    def shaped(rows: int) -> EvalConfig:
        slots = slots_for(rows, cfg.beam)
        return replace(cfg, rows=rows, slots=slots, window=max(cfg.window, WINDOW * slots))

    def run(rows: int) -> tuple[int, float]:
        narrow, *_ = narrowed(shaped(rows))
        full = sample.repeat(-(-narrow.window // len(sample)), 1)[: narrow.window].to(torch.int32)
        table, step = torch.cat([full, torch.zeros_like(full[:1])]), steps()
        state = start(narrow, table)
        for _ in range(STEPS):
            state = step(narrow, world, params, table, state)
        before, begun = int(state.row_steps), time.perf_counter()
        for _ in range(STEPS):
            state = step(narrow, world, params, table, state)
        return int(state.row_steps) - before, time.perf_counter() - begun

    trials = _try(run, [rows for rows in ROWS if rows >= 2 * cfg.beam], budget, sample.device)
    return shaped(best(trials).size), trials


def fit_rules(
    cfg: EvalConfig, world: World, params: Any, sample: Tensor, budget: int
) -> tuple[EvalConfig, list[Trial]]:
    """The same where rules alone are chosen, which needs no search: how many candidates make a chunk."""

    def run(window: int) -> tuple[int, float]:
        part = sample.repeat(-(-window // len(sample)), 1)[:window].to(torch.int32)
        rule_scores(replace(cfg, window=window), world, params, part)
        begun = time.perf_counter()
        n = len(rule_scores(replace(cfg, window=window), world, params, part).cpu())
        return n, time.perf_counter() - begun

    trials = _try(run, [size for size in ROWS if size >= 64], budget, sample.device)
    return replace(cfg, window=best(trials).size), trials


def best(trials: list[Trial]) -> Trial:
    """The smallest size that is nearly the fastest: the last candidates leave fewer of its slots idle."""
    fastest = max(trial.speed for trial in trials)
    return next(trial for trial in trials if trial.speed * NEARLY >= fastest)


def _try(
    run: Callable[[int], tuple[int, float]], sizes: Iterable[int], budget: int, device: torch.device
) -> list[Trial]:
    """The sizes that were tried and kept the budget.

    Args:
      run: from a size to rows and the seconds that they took.
    """
    trials: list[Trial] = []
    held = memory.held_bytes(device)
    for size in sizes:
        expected = held + 2 * (trials[-1].peak_bytes - held) if trials else held
        if expected > budget or _enough(trials):
            break
        begun = time.perf_counter()
        memory.reset_peak(device)
        rows, seconds = run(size)
        trials.append(Trial(size=size, speed=rows / seconds, peak_bytes=memory.peak_bytes(device)))
        if time.perf_counter() - begun > LONG:
            break
    fitting = [trial for trial in trials if trial.peak_bytes <= budget]
    if not fitting:
        need = trials[0].peak_bytes if trials else held
        raise ValueError(f"--memory {budget}: want at least {need} bytes here, of which {held} are held already")
    return fitting


def _enough(trials: list[Trial]) -> bool:
    """Whether the last two sizes were no faster than those before them."""
    best = max((trial.speed for trial in trials[:-2]), default=0.0)
    return len(trials) > 2 and max(trial.speed for trial in trials[-2:]) < FASTER * best
