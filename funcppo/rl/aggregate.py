"""What returns of several seeds say: the interquartile mean with its stratified bootstrap interval.

Source: Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice", arXiv:2108.13264,
and its library rliable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from funcppo.core.types import F64

N_RESAMPLES = 2000
CONFIDENCE = 0.95
TRIMMED_SHARE = 0.25  # at either end

Statistic = Callable[[F64[np.ndarray, "... K M"]], F64[np.ndarray, "..."]]


class Estimate(NamedTuple):
    """A statistic of returns with its interval of 95 %."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1f} [{self.low:.1f}, {self.high:.1f}]"


def mean(returns: F64[np.ndarray, "... K M"]) -> F64[np.ndarray, "..."]:
    """The mean over seeds and tasks."""
    return returns.mean((-2, -1))


def interquartile_mean(
    returns: F64[np.ndarray, "... K M"],
) -> F64[np.ndarray, "..."]:
    """The mean of the middle half of all returns, those of K seeds on M tasks taken together.

    A quarter of them, rounded down, is left out at either end.
    """
    pooled = np.sort(returns.reshape(*returns.shape[:-2], -1), axis=-1)
    n = pooled.shape[-1]
    n_trimmed = int(TRIMMED_SHARE * n)
    return pooled[..., n_trimmed : n - n_trimmed].mean(-1)


def estimate(
    returns: F64[np.ndarray, "K M"],
    statistic: Statistic = interquartile_mean,
    seed: int = 0,
) -> Estimate:
    """A statistic with its percentile interval by the stratified bootstrap: seeds are resampled task by task.

    Args:
      returns: of K seeds on M tasks.
      seed: of the resampling.
    """
    n_seeds, n_tasks = returns.shape
    generator = np.random.default_rng(seed)
    rows = generator.integers(0, n_seeds, (N_RESAMPLES, n_seeds, n_tasks))
    resampled = returns[rows, np.arange(n_tasks)]
    tails = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    low, high = np.quantile(statistic(resampled), tails)
    return Estimate(float(statistic(returns)), float(low), float(high))
