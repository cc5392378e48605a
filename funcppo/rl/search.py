"""Search of learning rate, clip range and entropy weight: all trials are one population in one step.

Random search trains every trial to the end. Successive halving trains them to a fraction of the steps, keeps the better
half, and goes on with those to twice as many, until those that are left have made all steps.

Source: Jamieson & Talwalkar 2016, "Non-stochastic best arm identification and hyperparameter optimization",
arXiv:1502.07943.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from funcppo import trainer
from funcppo.compiled_step import CHECKPOINT_SECONDS
from funcppo.core import tree
from funcppo.core.atomic_io import write_atomically
from funcppo.learner import Learner
from funcppo.rl.many import Evaluations, State, init_many, prepare_many
from funcppo.trainer import (
    N_EPISODES,
    Callback,
    MetricsLog,
    Progress,
    TrainResult,
    UpdateIntervals,
)

Method = Literal["random", "halving"]
# of the numbers that trials draw, log-uniformly
RANGES = {
    "learning_rate": (1e-5, 1e-2),
    "clip_eps": (0.05, 0.5),
    "entropy_coef": (1e-5, 1e-1),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Numbers that were tried, and what they came to."""

    number: int  # 0: the settings of the learner
    scalars: Mapping[str, float]  # by name of a field of `losses.Scalars`
    steps: int  # environment steps of each seed
    returns: tuple[float, ...]  # mean sampled return of each seed

    @property
    def mean_return(self) -> float:
        """The mean over seeds."""
        return sum(self.returns) / len(self.returns)


def draw_trials(
    learner: Learner[Any, Any],
    n_trials: int,
    seed: int = 0,
    ranges: Mapping[str, tuple[float, float]] = RANGES,
) -> tuple[Trial, ...]:
    """Trials before their training; the first one has the numbers of the learner, the others draw theirs.

    Args:
      ranges: by name of a field of `losses.Scalars`, the least and the largest number.
    """
    generator = np.random.default_rng(seed)
    trials: list[Trial] = []
    for number in range(n_trials):
        drawn = {
            name: math.exp(generator.uniform(math.log(low), math.log(high)))
            for name, (low, high) in ranges.items()
        }
        own = {name: getattr(learner.cfg.ppo, name) for name in ranges}
        trials.append(
            Trial(
                number=number,
                scalars=drawn if number else own,
                steps=0,
                returns=(),
            )
        )
    return tuple(trials)


def rungs(method: Method, n_trials: int, n_updates: int) -> list[int]:
    """The updates after which trials are compared; each rung but the first has half of those before it."""
    if method == "random":
        return [n_updates]
    n_rungs = max(1, math.ceil(math.log2(n_trials)))
    updates = [n_updates >> i for i in reversed(range(n_rungs))]
    return [update for update in updates if update > 0]


def search(
    learner: Learner[Any, Any],
    total_steps: int,
    trials: Sequence[Trial],
    *,
    method: Method = "random",
    seeds: Sequence[int] = (0,),
    device: torch.device | str = "cpu",
    strategy: str = "eager",
    callbacks: Sequence[Callback] = (),
    n_episodes: int = N_EPISODES,
    checkpoint: str | Path | None = None,
) -> Iterator[list[Trial]]:
    """Train trials, each with every seed, and yield those of each rung with their returns so far, the best first.

    Checkpoints are written every minute, at the end of each rung, and when a callback ends the search.

    Args:
      learner: of `fp.ppo`.
      total_steps: environment steps of each seed of a trial that is trained to the end.
      trials: of `draw_trials`.
      seeds: of each trial; the mean over them is what trials are compared by.
      strategy: as of `train_many`.
      callbacks: as of `train_many`, with a first axis of trials and seeds; one that returns true ends the search. A
        `MetricsLog` logs each trial in a subfolder of its own, trial-N.
      checkpoint: file that holds the states, and the rungs before; if it exists, the search yields these rungs again
        and goes on, to the bits of one that was not stopped.

    Raises:
      ValueError: a number is out of range, the checkpoint is damaged or of another search, or trials are to be logged
        by W&B.
    """
    trainer.check_positive(
        total_steps=total_steps, trials=len(trials), seeds=len(seeds)
    )
    trainer.check_callbacks(callbacks)
    learner = trainer.with_length(learner, total_steps)
    path = trainer.checkpoint_path(checkpoint)
    plan = _plan(method, trials, seeds)
    found = _read_rungs(path, plan, trials)
    yield from found

    alive = _better_half(found[-1]) if found else list(trials)
    state = _init_trials(learner, alive, seeds, device, path)
    updates = rungs(method, len(trials), learner.cfg.ppo.n_updates)
    for update in updates[len(found) :]:
        members = tuple(seeds) * len(alive)
        if int(state.update[0]) < update:
            with _logging_trials(callbacks, alive, len(seeds)) as by_trial:
                trained = _train_to(
                    update,
                    prepare_many(learner, members, state, strategy),
                    state,
                    by_trial,
                    partial(_save, path, learner, plan, tuple(found)),
                )
            if trained.is_stopped:
                return
            state = trained.state

        evaluations = trainer.evaluate_many(
            learner, state, seeds=members, n_episodes=n_episodes
        )
        alive = _with_returns(alive, learner, update, evaluations)
        order = np.argsort([-t.mean_return for t in alive], kind="stable")
        found.append([alive[i] for i in order])
        yield found[-1]

        alive = _better_half(found[-1])
        state = _select(state, order[: len(alive)], len(seeds))


def _with_returns(
    trials: Sequence[Trial],
    learner: Learner[Any, Any],
    update: int,
    evaluations: Evaluations,
) -> list[Trial]:
    """Trials after an update, with the mean sampled return of each of their seeds."""
    steps = update * trainer.batch_size(learner.cfg.ppo)
    means = np.array([each.sampled.mean for each in evaluations])
    by_trial = means.reshape(len(trials), -1).tolist()
    return [
        replace(trial, steps=steps, returns=tuple(returns))
        for trial, returns in zip(trials, by_trial)
    ]


def _better_half(rung: Sequence[Trial]) -> list[Trial]:
    """The trials of a rung that the next one goes on with."""
    return list(rung[: math.ceil(len(rung) / 2)])


def _init_trials(
    learner: Learner[Any, Any],
    trials: Sequence[Trial],
    seeds: Sequence[int],
    device: torch.device | str,
    path: Path | None,
) -> State:
    """The states of trials, each with every seed: those of the checkpoint if there is one, or the first ones."""
    scalars = {
        name: [trial.scalars[name] for trial in trials for _ in seeds]
        for name in trials[0].scalars
    }
    members = tuple(seeds) * len(trials)
    first = init_many(learner, members, device, scalars)
    return trainer.restore_latest(learner, first, path)[0]


def _train_to(
    update: int,
    stepper: trainer.Stepper,
    state: State,
    callbacks: Sequence[Callback],
    save: Callable[[State], None],
) -> TrainResult[Any]:
    """States after an update of the run, or those at which a callback ends it."""
    schedule = UpdateIntervals(
        evaluate_every=None,
        evaluate=lambda state: (),
        save=save,
        checkpoint_seconds=CHECKPOINT_SECONDS,
    )
    return trainer.make_updates(stepper, state, schedule, callbacks, update)


def _select(state: State, kept: np.ndarray, n_seeds: int) -> State:
    """The states of some trials."""
    rows = (kept[:, None] * n_seeds + np.arange(n_seeds)).flatten()
    index = torch.from_numpy(rows).to(state.key.device)
    return tree.map(lambda x: x[index], state)


# Checkpoints


def _plan(
    method: Method, trials: Sequence[Trial], seeds: Sequence[int]
) -> dict[str, Any]:
    """What a checkpoint and the search that continues it share, as JSON."""
    return {
        "method": method,
        "seeds": list(seeds),
        "trials": [dict(trial.scalars) for trial in trials],
    }


def _save(
    path: Path | None,
    learner: Learner[Any, Any],
    plan: dict[str, Any],
    found: Sequence[Sequence[Trial]],
    state: State,
) -> None:
    """Write the states of the trials of a rung, and the rungs before it."""
    rungs = [
        [(trial.number, trial.steps, trial.returns) for trial in rung]
        for rung in found
    ]
    trainer.save_checkpoint(
        path, learner, state, {"search": plan | {"rungs": rungs}}
    )


def _read_rungs(
    path: Path | None, plan: dict[str, Any], trials: Sequence[Trial]
) -> list[list[Trial]]:
    """The rungs before that of a checkpoint; none without one.

    Raises:
      ValueError: the checkpoint is damaged or of another search.
    """
    meta = trainer.read_meta(path) if path is not None else None
    if meta is None:
        return []
    stored = meta.get("search", {})
    for name, value in plan.items():
        if stored.get(name) != value:
            raise ValueError(
                f"{path}: made by another search: {name}: expected {value}, got {stored.get(name)}"
            )
    return [
        [
            replace(trials[number], steps=steps, returns=tuple(returns))
            for number, steps, returns in rung
        ]
        for rung in stored["rungs"]
    ]


# Logs of trials


@dataclass(frozen=True, slots=True)
class _TrialLog:
    """A callback that logs one of the trials that are trained side by side."""

    log: MetricsLog
    scalars: Mapping[str, float]
    members: slice  # of the states

    def __call__(self, progress: Progress[Any]) -> None:
        """Log an update of the trial, which is made with its own numbers."""
        learner, seeds = progress.learner, progress.seeds or ()
        ppo = replace(learner.cfg.ppo, **self.scalars)
        metrics = tree.map(lambda x: x[self.members], progress.metrics)
        self.log(
            replace(
                progress,
                learner=replace(learner, cfg=replace(learner.cfg, ppo=ppo)),
                seeds=seeds[self.members],
                metrics=metrics,
            )
        )


@contextmanager
def _logging_trials(
    callbacks: Sequence[Callback], trials: Sequence[Trial], n_seeds: int
) -> Iterator[list[Callback]]:
    """The callbacks with a log for each trial in place of each `MetricsLog`; these are closed at the end."""
    by_trial: list[Callback] = []
    with ExitStack() as stack:
        for callback in callbacks:
            if not isinstance(callback, MetricsLog):
                by_trial.append(callback)
                continue
            if "wandb" in callback.names:
                raise ValueError(
                    "log: expected csv or tensorboard with a search, "
                    "got wandb, whose runs cannot be open side by side"
                )
            for i, trial in enumerate(trials):
                log = callback.in_subfolder(f"trial-{trial.number}")
                stack.callback(log.close)
                members = slice(i * n_seeds, (i + 1) * n_seeds)
                by_trial.append(_TrialLog(log, trial.scalars, members))
        yield by_trial


# The table


def trial_rows(rungs: Sequence[Sequence[Trial]]) -> list[dict[str, float]]:
    """A row for each trial as its last rung left it; those that came furthest first, and of these the best.

    Returns:
      Rows of the number of the trial, its numbers, the steps of each seed and the mean sampled return.
    """
    last = {trial.number: trial for rung in rungs for trial in rung}
    order = sorted(
        last.values(), key=lambda trial: (-trial.steps, -trial.mean_return)
    )
    return [
        {
            "trial": trial.number,
            **trial.scalars,
            "steps": trial.steps,
            "return": trial.mean_return,
        }
        for trial in order
    ]


def write_trials(path: Path, rungs: Sequence[Sequence[Trial]]) -> None:
    """Write the rows of trials as CSV."""
    rows = trial_rows(rungs)
    lines = [list(rows[0]), *(row.values() for row in rows)]
    text = "".join(",".join(map(str, line)) + "\n" for line in lines)
    write_atomically(path, lambda file: file.write(text.encode()))
