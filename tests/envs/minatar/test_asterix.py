"""Asterix beside the package `minatar`."""

from __future__ import annotations

import pytest
import torch

from funcppo.envs.minatar import asterix
from tests.envs.minatar.reference import assert_plays_alike, keys

GAME = asterix.asterix(minimal_actions=False, sticky_probability=0.0)


def first_state(env):
    return GAME.reset(GAME.cfg, None, keys())


def step(state, action, units):
    unit = torch.zeros(1, 3, dtype=torch.float64)
    if units:
        drawn = [float(x) for x in units] + [0.0] * (3 - len(units))
        unit = torch.tensor([drawn], dtype=torch.float64)
    return asterix.transition(GAME.cfg, state, action, unit)


def test_each_step_equals_the_reference():
    """Players that flee enemies, and collect some gold."""
    lengths, rewards = [], []
    for seed in range(3):
        draws = torch.Generator().manual_seed(seed)

        def flee(env, t, draws=draws):
            lines = [x and not x[3] for x in env.entities]
            danger = lines[env.player_y - 1] if 1 <= env.player_y <= 8 else 0
            if danger or float(torch.rand((), generator=draws)) < 0.2:
                return int(torch.randint(1, 5, (), generator=draws))
            return 0

        length, reward = assert_plays_alike(
            "asterix",
            GAME,
            first_state,
            step,
            seed=seed,
            n_steps=500,
            action=flee,
        )
        lengths.append(length)
        rewards.append(reward)
    assert max(lengths) > 50 and sum(rewards) > 0


def test_the_game_becomes_faster_as_in_the_reference():
    """Both are made immortal, by gold alone."""

    def gold_only(env, t):
        for entity in env.entities:
            if entity is not None:
                entity[3] = True
        return t % 5

    def step_with_gold(state, action, units):
        units = [units[0], 0.0, *units[2:]] if units else units
        return step(state, action, units)

    with pytest.MonkeyPatch.context() as patch:
        module = pytest.importorskip("minatar.environments.asterix")
        spawn = module.Env._spawn_entity

        def spawn_gold(self):
            spawn(self)
            gold_only(self, 0)

        patch.setattr(module.Env, "_spawn_entity", spawn_gold)
        length, _ = assert_plays_alike(
            "asterix", GAME, first_state, step_with_gold,
            seed=0, n_steps=1200, action=gold_only,
        )  # fmt: skip
    assert length == 1199
