"""The interface of Gymnasium: environments that keep it, and each way to break it is named."""

from __future__ import annotations

import itertools
import warnings

import gymnasium as gym
import numpy as np
import pytest

import funcppo as fp
from funcppo.envs import wrappers
from funcppo.envs.gymnasium_bridge import check_environment
from tests.learning import one_thread

pytestmark = pytest.mark.usefixtures(one_thread.__name__)

COUNTER = itertools.count()


class Walk(gym.Env):
    """Walks from 0 by random steps of its own until it is beyond 3, or for 8 steps."""

    observation_space = gym.spaces.Box(-9, 9, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.steps = 0.0, 0
        return self.observe(), {}

    def step(self, action):
        self.place += (2 * action - 1) * float(self.np_random.uniform(1, 2))
        self.steps += 1
        is_over = abs(self.place) > 3
        is_late = self.steps >= 8 and not is_over
        return self.observe(), self.place, is_over, is_late, {}

    def observe(self):
        return np.array([self.place, self.steps], np.float32)


class Endless(Walk):
    def step(self, action):
        obs, reward, _, _, info = super().step(action)
        self.place = self.steps = 0
        return obs, reward, False, False, info


class GlobalGenerator(Walk):
    def observe(self):
        return np.array([self.place, np.random.rand()], np.float32)


class SharedCounter(Walk):
    """Its episodes depend on how often other objects were stepped; the first of equal seeds are equal."""

    n_rows = 0

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            type(self).total = 0
        return super().reset(seed=seed)

    def step(self, action):
        type(self).total = min(type(self).total + 1, 9)
        obs, *others = super().step(action)
        return np.array([obs[0], self.total], np.float32), *others


class Unseeded(Walk):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None)


class Reused(Walk):
    buffer = np.zeros(2, np.float32)

    def observe(self):
        self.buffer[:] = self.place, self.steps
        return self.buffer


def returning(**changes):
    """A walk whose steps return something else in some places of the five."""
    names = ("obs", "reward", "terminated", "truncated", "info")

    class Changed(Walk):
        def step(self, action):
            result = dict(zip(names, super().step(action), strict=True))
            return tuple((result | changes).values())

    return Changed


def observing(obs):
    return type("Observing", (Walk,), {"observe": lambda self: obs})


def dividing():
    env = Walk()
    env.step = lambda action: 1 / 0
    return env


BROKEN = {
    "dtype": (observing(np.zeros(2)), "AssertionError: The first element"),
    "an infinite reward": (
        returning(reward=float("inf")),
        "The reward is an inf value",
    ),
    "a flag of numbers": (returning(terminated=0), "`terminated` signal"),
    "the interface of Gym": (
        type("Old", (Walk,), {"step": lambda self, a: Walk.step(self, a)[1:]}),
        "ValueError: not enough values",
    ),
    "an exception": (dividing, "ZeroDivisionError: division by zero"),
    "seeds that are not passed on": (Unseeded, "AssertionError: .*seed"),
    "a buffer that is used again": (
        Reused,
        "AssertionError: The observations .* share an object",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_the_interface_is_named_in_one_line(name):
    make_env, problem = BROKEN[name]
    with pytest.raises(
        ValueError, match=f"^it: expected .*check_env accepts, got .*{problem}"
    ) as error:
        check_environment("it", make_env, 16, 0)
    assert "\n" not in str(error.value)


def test_gymnasiums_own_environments_keep_it():
    for name in ("FrozenLake-v1", "CartPole-v1", "Pendulum-v1"):
        check_environment(name, lambda name=name: gym.make(name), 32, 0)


def test_an_environment_that_may_never_end_is_warned_of():
    with pytest.warns(UserWarning, match="^it: no episode ended in 16 .*limit"):
        check_environment("it", Endless, 16, 0)
    limited = lambda: gym.wrappers.TimeLimit(Endless(), 99)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_environment("it", limited, 16, 0)


# Through the bridge


def test_a_bridge_keeps_the_laws():
    fp.check(fp.envs.gymnasium(Walk))
    env = fp.envs.gymnasium("FrozenLake-v1", n_envs=8)
    fp.check(wrappers.sticky_actions(wrappers.time_limit(env, 5)), n_steps=16)
    env = wrappers.normalize_observation(fp.envs.gymnasium(Walk))
    fp.check(wrappers.normalize_reward(env), n_steps=16)


def test_a_check_leaves_the_environments_of_a_learner_alone():
    env = fp.envs.gymnasium(Walk)
    ppo = fp.ppo(env=env, network=fp.nets.mlp(8), n_envs=2, n_steps=8)
    state = ppo.init(fp.random.key(0))
    fp.check(env, n_steps=8)
    ppo.step(state)  # refused if others had been stepped


@pytest.mark.parametrize(
    ("make_env", "problem"),
    [
        (Unseeded, "Unseeded: expected an environment .*check_env"),
        (
            GlobalGenerator,
            "GlobalGenerator: expected an environment that .*check_env",
        ),
        (
            SharedCounter,
            r"step 1 of rows \[3, 0\] alone: next_obs: expected 4.0 at \[0, 1\], got 1.0$",
        ),
    ],
)
def test_a_law_that_a_bridged_environment_breaks_is_named(make_env, problem):
    with pytest.raises(ValueError, match=f"^{problem}") as error:
        fp.check(fp.envs.gymnasium(make_env), n_steps=8)
    assert "\n" not in str(error.value)


def test_steps_that_differ_the_second_time_are_named():
    """What `check_env` cannot see, because the first step of an episode is the same."""

    class Drifting(Walk):
        def observe(self):
            drift = next(COUNTER) if self.steps == 2 else 0
            return np.array([self.place, 9 * np.sin(drift)], np.float32)

    with pytest.raises(
        ValueError, match=r"^step 2 a second time with the same seeds: next_obs"
    ):
        fp.check(fp.envs.gymnasium(Drifting), n_steps=8)
