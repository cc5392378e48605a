"""Interquartile means and their intervals."""

from __future__ import annotations

import numpy as np
import pytest

from funcppo.rl import aggregate


@pytest.mark.parametrize(
    ("returns", "expected"),
    [
        ([[1.0], [2.0], [3.0], [100.0]], 2.5),
        ([[100.0], [1.0], [3.0]], 104 / 3),  # a quarter of 3 is none
        ([[0.0, 8.0], [2.0, 4.0]], 3.0),  # two tasks, pooled
        ([[7.0]], 7.0),
    ],
)
def test_the_interquartile_mean_of_small_samples(returns, expected):
    got = aggregate.interquartile_mean(np.array(returns))
    assert got == pytest.approx(expected)


def test_an_outlier_moves_the_mean_and_not_the_interquartile_mean():
    returns = np.arange(10.0)[:, None]
    spoilt = returns.copy()
    spoilt[-1] = 1e6
    assert aggregate.interquartile_mean(spoilt) == aggregate.interquartile_mean(
        returns
    )
    assert aggregate.mean(spoilt) > 1e4


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution():
    """400 seeds: half of it is 1.96 standard errors, within a tenth for the 2000 resamples."""
    returns = np.random.default_rng(0).normal(5.0, 2.0, (400, 1))
    got = aggregate.estimate(returns, aggregate.mean)
    half = 1.96 * returns.std() / 20
    assert got.value == pytest.approx(returns.mean())
    assert got.value - got.low == pytest.approx(half, rel=0.1)
    assert got.high - got.value == pytest.approx(half, rel=0.1)


def test_seeds_are_resampled_task_by_task():
    """Tasks that differ widely do not widen the interval: each keeps its weight."""
    returns = np.array([[0.0, 1000.0]] * 5)
    got = aggregate.estimate(returns, aggregate.mean)
    assert got == (500.0, 500.0, 500.0)


def test_one_seed_has_an_interval_of_no_width():
    got = aggregate.estimate(np.array([[3.0]]))
    assert got == (3.0, 3.0, 3.0) and str(got) == "3.0 [3.0, 3.0]"
