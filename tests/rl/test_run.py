"""The learner of a run, the results that are read from its log, and what returns of several seeds say."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from funcppo import logs
from funcppo.core.settings import METRICS_FILE
from funcppo.envs.wrappers import MomentsConfig
from funcppo.rl import run
from funcppo.rl.settings import published_settings


def row(update, seed, greedy, sampled):
    """A row of the log."""
    return {
        "seed": seed,
        "update": update,
        "steps": 10 * update,
        "greedy_return": greedy,
        "sampled_return": sampled,
        "n_unfinished_episodes": seed,
    }


def test_returns_are_read_from_the_rows_with_an_evaluation(tmp_path):
    path = tmp_path / METRICS_FILE
    logs.truncate(path, 0)
    logs.append(path, {"seed": 3, "update": 1, "steps": 10})
    logs.append(path, row(2, 3, 1.0, 2.0), row(2, 4, 3.0, 4.0))
    logs.append(path, row(4, 3, 5.0, 6.0), row(4, 4, 7.0, 8.0))
    got = run.read_returns(tmp_path)
    assert got.seeds == (3, 4) and got.steps.tolist() == [20, 40]
    assert got.greedy.tolist() == [[1.0, 5.0], [3.0, 7.0]]
    assert got.sampled.tolist() == [[2.0, 6.0], [4.0, 8.0]]
    assert got.n_unfinished.tolist() == [7, 7]

    summary = run.summarize(got)
    assert summary["greedy"]["mean"] == summary["greedy"]["iqm"] == 6.0
    assert summary["greedy"]["iqm_interval"] == [5.0, 7.0]
    assert summary["sampled"]["by_seed"] == {"3": 6.0, "4": 8.0}


def test_a_log_without_an_evaluation_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"{METRICS_FILE}: expected an eval"):
        run.read_returns(tmp_path)


def test_environments_are_wrapped_as_the_settings_say():
    settings = dataclasses.replace(
        published_settings("Pendulum-v1"), normalize_reward=True
    )
    outer = run.make_learner("Pendulum-v1", settings).cfg.env.cfg
    assert isinstance(outer.settings, MomentsConfig)
    assert outer.settings.gamma == 0.9
    image = run.make_learner(
        "MinAtar/Breakout-v1", published_settings("CartPole-v1")
    )
    assert image.cfg.env.spec.observation_shape is None


def test_gsde_is_refused_where_it_cannot_be():
    published = published_settings("CartPole-v1")
    gsde = dataclasses.replace(published, exploration="gsde")
    with pytest.raises(ValueError, match="exploration: expected independent"):
        run.make_learner("CartPole-v1", gsde)


@pytest.mark.parametrize(
    "option",
    [{"noise_steps": 4}, {"first_log_std": -1.0}, {"orthogonal": False}],
)
def test_an_option_of_gsde_alone_is_refused_without_it(option):
    published = published_settings("CartPole-v1")
    with pytest.raises(ValueError, match=f"{next(iter(option))}: expected"):
        dataclasses.replace(published, **option)


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
    got = run.interquartile_mean(np.array(returns))
    assert got == pytest.approx(expected)


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution():
    """400 seeds: half of it is 1.96 standard errors, within a tenth for the 2000 resamples."""
    returns = np.random.default_rng(0).normal(5.0, 2.0, (400, 1))
    got = run.estimate(returns, run.mean_return)
    half = 1.96 * returns.std() / 20
    assert got.value == pytest.approx(returns.mean())
    assert got.value - got.low == pytest.approx(half, rel=0.1)
    assert got.high - got.value == pytest.approx(half, rel=0.1)


def test_seeds_are_resampled_task_by_task():
    """Tasks that differ widely do not widen the interval: each keeps its weight."""
    returns = np.array([[0.0, 1000.0]] * 5)
    got = run.estimate(returns, run.mean_return)
    assert got == (500.0, 500.0, 500.0)


def test_one_seed_has_an_interval_of_no_width():
    got = run.estimate(np.array([[3.0]]))
    assert got == (3.0, 3.0, 3.0) and str(got) == "3.0 [3.0, 3.0]"
