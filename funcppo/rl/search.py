"""Search of learning rate, clip range and entropy weight: all trials are one population in one step.

Random search trains every trial to the end. Successive halving trains them to a fraction of the steps, keeps the better
half, and goes on with those to twice as many, until those that are left have made all steps.

Source: Jamieson & Talwalkar 2016, "Non-stochastic best arm identification and hyperparameter optimization",
arXiv:1502.07943.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from funcppo import trainer, tree
from funcppo.atomic_io import write_atomically
from funcppo.learner import Learner
from funcppo.rl.many import State, init_many, prepare_many
from funcppo.trainer import N_EPISODES, Callback, UpdateIntervals

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
) -> Iterator[list[Trial]]:
    """Train trials, each with every seed, and yield those of each rung with their returns so far, the best first.

    Args:
      learner: of `fp.ppo`.
      total_steps: environment steps of each seed of a trial that is trained to the end.
      trials: of `draw_trials`.
      seeds: of each trial; the mean over them is what trials are compared by.
      strategy: as of `train_many`.
      callbacks: as of `train_many`, with a first axis of trials and seeds; one that returns true ends the search.

    Raises:
      ValueError: a number is out of range.
    """
    trainer.check_positive(
        total_steps=total_steps, trials=len(trials), seeds=len(seeds)
    )
    learner = trainer.with_length(learner, total_steps)
    n_updates = learner.cfg.ppo.n_updates
    alive = list(trials)
    members = tuple(seeds) * len(alive)
    scalars = {
        name: [trial.scalars[name] for trial in alive for _ in seeds]
        for name in alive[0].scalars
    }
    state = init_many(learner, members, device, scalars)

    for update in rungs(method, len(trials), n_updates):
        members = tuple(seeds) * len(alive)
        stepper = prepare_many(learner, members, state, strategy)
        state = _train_to(update, stepper, state, callbacks)
        if int(state.update[0]) < update:
            return
        evaluations = trainer.evaluate_many(
            learner, state, seeds=members, n_episodes=n_episodes
        )
        returns = np.array([each.sampled.mean for each in evaluations])
        by_trial = returns.reshape(len(alive), len(seeds))
        steps = update * trainer.batch_size(learner.cfg.ppo)
        alive = [
            replace(trial, steps=steps, returns=tuple(row.tolist()))
            for trial, row in zip(alive, by_trial)
        ]
        order = np.argsort(-by_trial.mean(1), kind="stable")
        yield [alive[i] for i in order]

        kept = order[: math.ceil(len(alive) / 2)]
        alive = [alive[i] for i in kept.tolist()]
        state = _select(state, kept, len(seeds))


def _train_to(
    update: int,
    stepper: trainer.Stepper,
    state: State,
    callbacks: Sequence[Callback],
) -> State:
    """States after an update of the run, or those at which a callback ends it."""
    schedule = UpdateIntervals(
        evaluate_every=None, evaluate=lambda state: (), save=lambda state: None
    )
    stop = partial(_is_at, update)
    callbacks = [*callbacks, stop]
    return trainer.make_updates(stepper, state, schedule, callbacks).state


def _is_at(update: int, progress: trainer.Progress[Any]) -> bool:
    return progress.update >= update


def _select(state: State, kept: np.ndarray, n_seeds: int) -> State:
    """The states of some trials."""
    rows = (kept[:, None] * n_seeds + np.arange(n_seeds)).flatten()
    index = torch.from_numpy(rows).to(state.key.device)
    return tree.map(lambda x: x[index], state)


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
