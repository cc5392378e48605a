"""Breakout beside the package `minatar`."""

from __future__ import annotations

import numpy as np
import torch

from funcppo.envs import minatar
from tests.envs.minatar.reference import (
    assert_steps_alike,
    keys,
)

GAME = minatar.breakout(minimal_actions=False, sticky_probability=0.0)


def place(env, draws):
    """Any ball above the paddle's row, any paddle, and a wall of any bricks, full, sparse or empty."""
    env.ball_y, env.ball_x = int(draws.integers(9)), int(draws.integers(10))
    env.last_y, env.last_x = int(draws.integers(10)), int(draws.integers(10))
    env.ball_dir = int(draws.integers(4))
    env.pos = int(draws.integers(10))
    if draws.random() < 0.5:  # near the ball
        env.pos = int(np.clip(env.ball_x + draws.integers(-1, 2), 0, 9))
    density = draws.choice([0.0, 0.02, 0.5, 1.0])
    env.brick_map = (draws.random((10, 10)) < density).astype(float)
    if draws.random() < 0.5:  # where bricks are in a game
        env.brick_map[[0, *range(4, 10)]] = 0
    env.strike = bool(draws.random() < 0.5)
    if draws.random() < 0.3:
        env.ball_y = 8


def state_of(env):
    def scalar(value):
        return torch.tensor([value])

    return minatar.BreakoutState(
        ball_y=scalar(env.ball_y),
        ball_x=scalar(env.ball_x),
        direction=scalar(env.ball_dir),
        paddle=scalar(env.pos),
        bricks=torch.from_numpy(env.brick_map == 1).unsqueeze(0),
        strike=scalar(env.strike),
        last_y=scalar(env.last_y),
        last_x=scalar(env.last_x),
        terminal=scalar(env.terminal),
    )


def step_rows(state, action, _):
    n = len(action)
    return GAME.step_functional(GAME.cfg, None, state, action, keys(n))


def test_one_step_from_any_state_equals_the_reference():
    reward, n_ends = assert_steps_alike(
        "breakout", GAME, step_rows, place=place, state_of=state_of
    )
    assert reward > 100 and n_ends > 100
