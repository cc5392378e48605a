"""Space Invaders beside the package `minatar`."""

from __future__ import annotations

import pytest
import torch

from funcppo.envs import minatar
from tests.envs.minatar.reference import (
    assert_plays_alike,
    assert_steps_alike,
    keys,
)

GAME = minatar.space_invaders(minimal_actions=False, sticky_probability=0.0)


def first_state(env):
    return GAME.reset(GAME.cfg, None, keys())


def step(state, action, _):
    return GAME.step_functional(GAME.cfg, None, state, action, keys())


def place(env, draws):
    """Any cannon, any bullets, aliens anywhere but at least one, and timers of any difficulty, at 0 often."""

    def cells(*densities):
        return (draws.random((10, 10)) < draws.choice(densities)).astype(float)

    env.pos = int(draws.integers(10))
    env.f_bullet_map = cells(0.02, 0.2, 1.0)
    env.e_bullet_map = cells(0.0, 0.02, 0.2)
    env.alien_map = cells(0.0, 0.02, 0.3)
    if draws.random() < 0.7:  # above the row of the cannon
        env.alien_map[9] = 0
    env.alien_map[tuple(draws.integers(0, 9, 2))] = 1
    env.alien_dir = int(draws.choice([-1, 1]))
    env.enemy_move_interval = int(draws.integers(6, 13))
    env.alien_move_timer = int(draws.choice([0, draws.integers(13)]))
    env.alien_shot_timer = int(draws.choice([0, draws.integers(11)]))
    env.shot_timer = int(draws.choice([0, draws.integers(6)]))


def state_of(env):
    def scalar(value):
        return torch.tensor([int(value)])

    def cells(values):
        return torch.from_numpy(values == 1).unsqueeze(0)

    return minatar.SpaceInvadersState(
        position=scalar(env.pos),
        bullets=cells(env.f_bullet_map),
        alien_bullets=cells(env.e_bullet_map),
        aliens=cells(env.alien_map),
        direction=scalar(env.alien_dir),
        move_interval=scalar(env.enemy_move_interval),
        move_timer=scalar(env.alien_move_timer),
        alien_shot_timer=scalar(env.alien_shot_timer),
        shot_timer=scalar(env.shot_timer),
        terminal=torch.tensor([env.terminal]),
    )


@pytest.mark.parametrize("ramping", [True, False])
def test_one_step_from_any_state_equals_the_reference(ramping):
    game = minatar.space_invaders(
        minimal_actions=False, ramping=ramping, sticky_probability=0.0
    )

    def step_rows(state, action, _):
        n = len(action)
        return game.step_functional(game.cfg, None, state, action, keys(n))

    reward, n_ends = assert_steps_alike(
        "space_invaders", game, step_rows,
        place=place, state_of=state_of, ramping=ramping,
    )  # fmt: skip
    assert reward > 100 and n_ends > 100


def test_the_next_wave_is_faster_as_in_the_reference():
    """From a last alien above the cannon."""

    def last_alien(env):
        env.alien_map[:] = 0
        env.alien_map[3, 5] = 1
        aliens = torch.from_numpy(env.alien_map == 1).unsqueeze(0)
        return first_state(env)._replace(aliens=aliens)

    _, reward = assert_plays_alike(
        "space_invaders", GAME, last_alien, step,
        seed=0, n_steps=60, action=lambda env, t: 5,
    )  # fmt: skip
    assert reward > 1  # shots at the second wave hit
