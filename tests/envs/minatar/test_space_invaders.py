"""Space Invaders beside the package `minatar`."""

from __future__ import annotations

import torch

from funcppo.envs.minatar import space_invaders
from tests.envs.minatar.reference import assert_plays_alike, keys

GAME = space_invaders.space_invaders(
    minimal_actions=False, sticky_probability=0.0
)


def first_state(env):
    return GAME.reset(GAME.cfg, None, keys())


def step(state, action, _):
    return GAME.step_functional(GAME.cfg, None, state, action, keys())


def test_each_step_equals_the_reference():
    """Cannons that shoot and dodge."""
    rewards = []
    for seed in range(5):
        draws = torch.Generator().manual_seed(seed)

        def dodge(env, t, draws=draws):
            is_aimed_at = env.e_bullet_map[6:9, env.pos].any()
            if is_aimed_at or float(torch.rand((), generator=draws)) < 0.4:
                return (1, 3)[int(torch.randint(2, (), generator=draws))]
            return 5

        _, reward = assert_plays_alike(
            "space_invaders", GAME, first_state, step,
            seed=seed, n_steps=600, action=dodge,
        )  # fmt: skip
        rewards.append(reward)
    assert max(rewards) > 5


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


def test_the_cannon_waits_between_two_shots():
    state = first_state(None)
    n_shots = 0
    for _ in range(6):
        ready = int(state.shot_timer[0]) == 0
        n_shots += ready
        state, _ = step(state, torch.tensor([5]), None)
    assert n_shots == 2
