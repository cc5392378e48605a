"""Freeway beside the package `minatar`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from funcppo.envs.minatar import freeway
from tests.envs.minatar.reference import assert_plays_alike, keys

GAME = freeway.freeway(minimal_actions=False, sticky_probability=0.0)


def first_state(env):
    speed = torch.tensor([[car[3] for car in env.cars]])
    state = GAME.reset(GAME.cfg, None, keys())
    return state._replace(car_speed=speed, car_timer=speed.abs())


def step(state, action, units):
    """The reference draws speeds and signs where the player has crossed."""
    speed = np.ones(8)
    if units:
        speed = (1 + np.floor(5 * units[0])) * np.sign(units[1] - 0.5)
    speed = torch.from_numpy(speed).long().unsqueeze(0)
    return freeway.transition(GAME.cfg, state, action, speed)


@pytest.mark.parametrize("seed", range(2))
def test_each_step_equals_the_reference(seed):
    draws = torch.Generator().manual_seed(seed)

    def mostly_up(env, t):
        is_random = float(torch.rand((), generator=draws)) < 0.2
        return int(torch.randint(6, (), generator=draws)) if is_random else 2

    _, reward = assert_plays_alike(
        "freeway",
        GAME,
        first_state,
        step,
        seed=seed,
        n_steps=400,
        action=mostly_up,
    )
    assert reward > 0


def test_the_game_ends_after_its_time():
    state = GAME.reset(GAME.cfg, None, keys())
    for left, ends in [(1, False), (0, True)]:
        late = state._replace(time_left=torch.tensor([left]))
        _, timestep = GAME.step_functional(
            GAME.cfg, None, late, torch.tensor([0]), keys()
        )
        assert bool(timestep.terminated[0]) == ends


def test_speeds_are_as_likely_as_in_the_reference():
    speed = freeway.sample_speeds(keys(2000)).flatten()
    counts = torch.stack([(speed == s).sum() for s in range(-5, 6) if s])
    # 16,000 draws of ten values: a standard deviation is 38.
    assert ((counts - 1600).abs() < 5 * 38).all()
