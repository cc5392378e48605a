"""Environments by name."""

from __future__ import annotations

import gymnasium
import pytest

import funcppo as fp
from funcppo.envs import ENVIRONMENTS


@pytest.mark.parametrize(
    "name", [name for name in ENVIRONMENTS if "/" not in name]
)
def test_a_name_is_gymnasiums_and_the_sizes_agree(name):
    env, theirs = fp.envs.make(name), gymnasium.make(name)
    assert env.spec.observation_size == theirs.observation_space.shape[0]
    assert env.cfg.max_steps == theirs.spec.max_episode_steps


def test_options_reach_the_environment():
    assert fp.envs.make("CartPole-v1", max_steps=7).cfg.max_steps == 7
    with pytest.raises(ValueError, match=r"^max_steps: expected 1 or more"):
        fp.envs.make("CartPole-v1", max_steps=0)


def test_an_unknown_option_is_named():
    with pytest.raises(TypeError, match=r"^steps: expected .*max_steps"):
        fp.envs.make("CartPole-v1", steps=3)


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("CartPole-v0", "CartPole-v1"),
        ("cartpole", "CartPole-v1"),
        ("acrobot-v1", "Acrobot-v1"),
        ("MinAtar/Breakout", "MinAtar/Breakout-v[01]"),
        ("MountainCarContinous-v0", "MountainCarContinuous-v0"),
    ],
)
def test_an_unknown_name_is_answered_by_the_nearest(given, nearest):
    with pytest.raises(ValueError, match=f"^{given}: .*{nearest}$") as error:
        fp.envs.make(given)
    assert "\n" not in str(error.value)


def test_what_is_no_name_is_refused():
    with pytest.raises(TypeError, match=r"^name: expected a string such as"):
        fp.envs.make(5)


def test_a_name_like_none_is_answered_by_all():
    with pytest.raises(ValueError, match="there are CartPole-v1, Pendulum-v1"):
        fp.envs.make("zzz")
