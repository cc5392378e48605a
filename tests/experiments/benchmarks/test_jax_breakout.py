"""Breakout in JAX plays as Breakout in PyTorch does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")

from experiments.benchmarks import jax_breakout  # noqa: E402
from funcppo.core import random, tree  # noqa: E402
from funcppo.envs.minatar import breakout  # noqa: E402
from funcppo.envs.minatar.game import GameConfig  # noqa: E402
from funcppo.interfaces import NoWorld  # noqa: E402

CFG = GameConfig(actions=breakout.MINIMAL_ACTIONS, sticky_probability=0.0)
N_ROWS = 64


def test_a_step_is_ours_and_so_is_an_observation():
    """A paddle that mostly follows the ball, so that walls are cleared; finished rows start anew."""
    torch.manual_seed(0)
    step, observe = jax.jit(jax_breakout.step), jax.jit(jax_breakout.observe)
    keys = random.split(random.key(0), N_ROWS)
    state = breakout.reset(CFG, NoWorld(), keys)
    n_bricks = 0.0
    for t in range(300):
        way = torch.sign(state.ball_x - state.paddle)
        followed = torch.where(way > 0, 2, way.abs())
        is_random = torch.rand(N_ROWS) < 0.1
        action = torch.where(
            is_random, torch.randint(0, 3, way.shape), followed
        )

        theirs = jax_breakout.State(
            *(x.numpy() for x in state[:-1]), action=np.full(N_ROWS, -1)
        )
        after, reward, terminated = step(theirs, action.numpy())
        state, timestep = breakout.step_functional(
            CFG, NoWorld(), state, action, keys
        )
        for ours, other in zip(state[:-1], after):
            np.testing.assert_array_equal(ours.numpy(), other)
        np.testing.assert_array_equal(timestep.reward.numpy(), reward)
        np.testing.assert_array_equal(state.terminal.numpy(), terminated)
        image = breakout.observe(CFG, NoWorld(), state).flatten(1)
        np.testing.assert_array_equal(image.numpy(), observe(after))

        n_bricks += float(timestep.reward.sum())
        fresh_keys = random.split(random.key(t + 1), N_ROWS)
        fresh = breakout.reset(CFG, NoWorld(), fresh_keys)
        state = tree.where(state.terminal, fresh, state)
    assert n_bricks > 1000
