"""Breakout beside the package `minatar`."""

from __future__ import annotations

import pytest
import torch

import funcppo as fp
from funcppo.envs.minatar import breakout
from tests.envs.minatar.reference import assert_plays_alike, keys

GAME = breakout.breakout(minimal_actions=False, sticky_probability=0.0)


def first_state(env):
    """One of our two first states, that of the reference."""
    states = [GAME.reset(GAME.cfg, None, keys(seed=i)) for i in range(20)]
    return next(s for s in states if int(s.ball_x[0]) == env.ball_x)


def step(state, action, _):
    return GAME.step_functional(GAME.cfg, None, state, action, keys())


@pytest.mark.parametrize("seed", range(4))
def test_each_step_equals_the_reference(seed):
    """A paddle that follows the ball, with some random moves, plays long and clears walls."""
    draws = torch.Generator().manual_seed(seed)

    def follow(env, t):
        if float(torch.rand((), generator=draws)) < 0.02:
            return int(torch.randint(6, (), generator=draws))
        target = env.ball_x + (1 if env.ball_dir in (1, 2) else -1)
        return 1 if target < env.pos else 3 if target > env.pos else 0

    length, reward = assert_plays_alike(
        "breakout",
        GAME,
        first_state,
        step,
        seed=seed,
        n_steps=400,
        action=follow,
    )
    assert length > 5 and reward > 0


def test_the_minimal_actions_are_nothing_left_and_right():
    env = fp.envs.make("MinAtar/Breakout-v1", sticky_probability=0.0)
    assert env.spec.action_size == 3 and env.spec.shape == (10, 10, 4)
    state = env.reset(env.cfg, None, keys(3))
    after, _ = env.step_functional(
        env.cfg, None, state, torch.tensor([0, 1, 2]), keys(3)
    )
    assert (after.paddle - state.paddle).tolist() == [0, -1, 1]
