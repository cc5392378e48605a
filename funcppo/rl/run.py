"""A run of `funcppo rl`: its learner, and its results, which are read from its metrics log."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from funcppo import envs, learner, logs, nets
from funcppo.core.files import Json
from funcppo.core.settings import METRICS_FILE, FieldError
from funcppo.core.types import F64, I64
from funcppo.envs import wrappers
from funcppo.interfaces import NetworkFactory
from funcppo.learner import Learner
from funcppo.rl.settings import RLConfig, RLSettings

Statistic = Callable[[F64[np.ndarray, "... K M"]], F64[np.ndarray, "..."]]


class Estimate(NamedTuple):
    """Statistic of returns with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1f} [{self.low:.1f}, {self.high:.1f}]"


def mean_return(returns: F64[np.ndarray, "... K M"]) -> F64[np.ndarray, "..."]:
    """Compute the mean return over seeds and tasks."""
    return returns.mean((-2, -1))


def interquartile_mean(
    returns: F64[np.ndarray, "... K M"],
) -> F64[np.ndarray, "..."]:
    """Compute the mean of the middle half of all returns, pooled over K seeds and M tasks.

    A quarter of them, rounded down, is left out at either end.
    """
    pooled = np.sort(returns.reshape(*returns.shape[:-2], -1), axis=-1)
    n = pooled.shape[-1]
    n_trimmed = int(0.25 * n)
    return pooled[..., n_trimmed : n - n_trimmed].mean(-1)


def estimate(
    returns: F64[np.ndarray, "K M"],
    statistic: Statistic = interquartile_mean,
    seed: int = 0,
) -> Estimate:
    """Compute a statistic with its percentile interval by the stratified bootstrap: seeds are resampled task by task.

    Args:
      returns: of K seeds on M tasks.
      seed: of the resampling.
    """
    n_seeds, n_tasks = returns.shape
    generator = np.random.default_rng(seed)
    rows = generator.integers(0, n_seeds, (2000, n_seeds, n_tasks))
    resampled = returns[rows, np.arange(n_tasks)]
    tails = [(1 - 0.95) / 2, (1 + 0.95) / 2]
    low, high = np.quantile(statistic(resampled), tails)
    return Estimate(float(statistic(returns)), float(low), float(high))


POLICIES = ("greedy", "sampled")


class Returns(NamedTuple):
    """Mean returns of K seeds in the E evaluations of a run."""

    seeds: tuple[int, ...]
    steps: I64[np.ndarray, "E"]  # environment steps of each seed before it
    greedy: F64[np.ndarray, "K E"]
    sampled: F64[np.ndarray, "K E"]
    n_unfinished: I64[np.ndarray, "E"]  # episodes that had not ended


def make_learner(env: str, settings: RLSettings) -> Learner[Any, Any]:
    """Build the learner of an environment by its name; images are flattened.

    Raises:
      ValueError: there is no environment of that name, or its actions are discrete and the exploration is gSDE.
    """
    wrapped = envs.make(env)
    if wrapped.spec is not None and wrapped.spec.observation_shape is not None:
        wrapped = wrappers.flatten_observation(wrapped)
    if settings.clip_action:
        wrapped = wrappers.clip_action(wrapped)
    if settings.normalize_observation:
        wrapped = wrappers.normalize_observation(wrapped)
    if settings.normalize_reward:
        wrapped = wrappers.normalize_reward(wrapped, gamma=settings.ppo.gamma)
    is_continuous = wrapped.spec is not None and wrapped.spec.continuous_actions
    if settings.exploration == "gsde" and not is_continuous:
        expected = f"independent for the discrete actions of {env}"
        raise FieldError("exploration", expected, settings.exploration)
    options = {
        field.name: getattr(settings.ppo, field.name)
        for field in dataclasses.fields(settings.ppo)
    }
    return learner.ppo(env=wrapped, network=_network(settings), **options)


def _network(settings: RLSettings) -> NetworkFactory:
    """Build the network that the settings describe."""
    if settings.exploration == "independent":
        return nets.mlp(*settings.hidden, activation=settings.activation)
    return nets.gsde(
        *settings.hidden,
        activation=settings.activation,
        first_log_std=settings.first_log_std,
        noise_steps=settings.noise_steps,
        orthogonal=settings.orthogonal,
    )


def seeds_of(config: RLConfig) -> tuple[int, ...]:
    """Return the seeds of a run."""
    return tuple(range(config.seed, config.seed + config.seeds))


def n_updates(config: RLConfig) -> int:
    """Return the number of updates of the whole run."""
    batch_size = config.ppo.n_envs * config.ppo.n_steps
    return math.ceil(config.steps / batch_size)


def evaluation_interval(config: RLConfig) -> int:
    """Return the updates between two evaluations: `evaluate_every`, or 20 evaluations a run if it is None."""
    interval = max(1, n_updates(config) // 20)
    return config.evaluate_every or interval


def read_returns(folder: Path) -> Returns:
    """Read the evaluations from the metrics log of a run.

    Raises:
      ValueError: it holds none, or a line is no row.
    """
    path = folder / METRICS_FILE
    rows = logs.read(path) if path.exists() else []
    evaluated = [row for row in rows if row.get("greedy_return") is not None]
    if not evaluated:
        raise ValueError(
            f"{path}: expected an evaluation, got none: the run has just begun"
        )
    return _stack_returns(evaluated)


def _stack_returns(rows: Sequence[logs.Row]) -> Returns:
    """Stack the evaluations for which all seeds have a row."""
    seeds = tuple(dict.fromkeys(row["seed"] for row in rows))
    by_seed = [
        {row["steps"]: row for row in rows if row["seed"] == seed}
        for seed in seeds
    ]
    steps = sorted(set.intersection(*map(set, by_seed)))

    table = np.array(
        [
            [
                [of_seed[n]["greedy_return"] for n in steps],
                [of_seed[n]["sampled_return"] for n in steps],
                [of_seed[n]["n_unfinished_episodes"] for n in steps],
            ]
            for of_seed in by_seed
        ],
        dtype=np.float64,
    )
    return Returns(
        seeds=seeds,
        steps=np.array(steps, dtype=np.int64),
        greedy=table[:, 0],
        sampled=table[:, 1],
        n_unfinished=table[:, 2].sum(0).astype(np.int64),
    )


def summarize(returns: Returns) -> Json:
    """Summarise the last evaluation: for each policy the mean, the interquartile mean, and each seed's return."""
    summary: Json = {}
    for policy in POLICIES:
        last = getattr(returns, policy)[:, -1:]
        mean = estimate(last, mean_return)
        iqm = estimate(last, interquartile_mean)
        summary[policy] = {
            "mean": mean.value,
            "mean_interval": [mean.low, mean.high],
            "iqm": iqm.value,
            "iqm_interval": [iqm.low, iqm.high],
            "by_seed": dict(zip(map(str, returns.seeds), last[:, 0].tolist())),
        }
    return summary
