"""Episodes of the package `minatar`, and ours beside them, step by step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from funcppo import random

LETTERS = "nlurdf"


class Recorded(np.random.RandomState):
    """A generator whose uniform numbers are kept, and whose integers are made of them."""

    def __init__(self, seed):
        super().__init__(seed)
        self.units = []

    def rand(self, *shape):
        value = super().rand(*shape)
        self.units.append(value)
        return value

    def randint(self, low, high=None, size=None):
        low, high = (0, low) if high is None else (low, high)
        unit = self.rand(*(() if size is None else (size,)))
        return (low + np.floor(unit * (high - low))).astype(int)


def reference_game(name, seed, **options):
    module = pytest.importorskip(
        f"minatar.environments.{name}",
        reason="the package minatar is not installed: pip install minatar",
    )
    env = module.Env(**options)
    env.random = Recorded(seed)
    env.reset()
    return env


def assert_plays_alike(
    name, ours, state, step, *, seed, n_steps, action, draws=None
):
    """Play an episode in both from equal states with equal draws.

    Args:
      state: our state that equals that of the reference after its reset.
      step: (state, action, draws of the reference) -> (state, timestep).
      action: (reference, t) -> number of the action, of all six.
    """
    env, rewards = reference_game(name, seed), 0.0
    state = state(env)
    for t in range(n_steps):
        seen = ours.observe(ours.cfg, None, state)[0].numpy()
        assert np.array_equal(seen, env.state()), f"step {t}"
        number = action(env, t)
        env.random.units.clear()
        reward, terminal = env.act(number)
        state, timestep = step(
            state, torch.tensor([number]), list(env.random.units)
        )
        assert float(timestep.reward[0]) == reward, f"step {t}"
        assert bool(timestep.terminated[0]) == terminal, f"step {t}"
        rewards += reward
        if terminal:
            break
    return t, rewards


def keys(n=1, seed=0):
    return random.split(random.key(seed), n)
