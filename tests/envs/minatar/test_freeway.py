"""Freeway beside the package `minatar`."""

from __future__ import annotations

import numpy as np
import torch

from funcppo.envs import minatar
from tests.envs.minatar.reference import (
    assert_steps_alike,
    keys,
)

GAME = minatar.freeway(minimal_actions=False, sticky_probability=0.0)


def step_rows(state, action, units):
    """The reference draws speeds and signs where the player has crossed."""
    speed = np.ones((len(units), 8))
    for i, u in enumerate(units):
        if u:
            speed[i] = (1 + np.floor(5 * u[0])) * np.sign(u[1] - 0.5)
    speed = torch.from_numpy(speed).long()
    return minatar.freeway_transition(GAME.cfg, state, action, speed)


def place(env, draws):
    """Any player, at the first and the last lane often, any cars, at the player's column often, and any timers."""
    env.pos = int(draws.choice([0, 1, 9, draws.integers(10)]))
    env.move_timer = int(draws.choice([0, draws.integers(4)]))
    env.terminate_timer = int(draws.choice([0, 1, draws.integers(2501)]))
    for car in env.cars:
        car[0] = int(draws.choice([3, 4, 5, draws.integers(10)]))
        car[3] = int(draws.choice([-1, 1]) * draws.integers(1, 6))
        car[2] = int(draws.choice([0, draws.integers(abs(car[3]) + 1)]))


def state_of(env):
    def scalar(value):
        return torch.tensor([int(value)])

    x, _, timer, speed = (
        torch.tensor([[int(value) for value in column]])
        for column in zip(*env.cars)
    )
    return minatar.FreewayState(
        position=scalar(env.pos),
        car_x=x,
        car_timer=timer,
        car_speed=speed,
        move_timer=scalar(env.move_timer),
        time_left=scalar(env.terminate_timer),
        terminal=torch.tensor([env.terminal]),
    )


def test_one_step_from_any_state_equals_the_reference():
    reward, n_ends = assert_steps_alike(
        "freeway", GAME, step_rows, place=place, state_of=state_of
    )
    assert reward > 100 and n_ends > 100


def test_the_game_ends_after_its_time():
    state = GAME.reset(GAME.cfg, None, keys())
    for left, ends in [(1, False), (0, True)]:
        late = state._replace(time_left=torch.tensor([left]))
        _, timestep = GAME.step_functional(
            GAME.cfg, None, late, torch.tensor([0]), keys()
        )
        assert bool(timestep.terminated[0]) == ends


def test_speeds_are_as_likely_as_in_the_reference():
    speed = minatar.sample_speeds(keys(2000)).flatten()
    counts = torch.stack([(speed == s).sum() for s in range(-5, 6) if s])
    # 16,000 draws of ten values: a standard deviation is 38.
    assert ((counts - 1600).abs() < 5 * 38).all()
