"""Asterix beside the package `minatar`."""

from __future__ import annotations

import pytest
import torch

from funcppo.core import tree
from funcppo.envs import minatar
from tests.envs.minatar.reference import (
    assert_plays_alike,
    assert_steps_alike,
    keys,
)

GAME = minatar.asterix(minimal_actions=False, sticky_probability=0.0)


def first_state(env):
    return GAME.reset(GAME.cfg, None, keys())


def step(state, action, units):
    unit = torch.zeros(1, 3, dtype=torch.float64)
    if units:
        drawn = [float(x) for x in units] + [0.0] * (3 - len(units))
        unit = torch.tensor([drawn], dtype=torch.float64)
    return minatar.asterix_transition(GAME.cfg, state, action, unit)


def place(env, draws):
    """Any player, anything in any line, and timers of any difficulty, at 0 often."""
    env.player_x = int(draws.integers(10))
    env.player_y = int(draws.integers(1, 9))
    density = draws.choice([0.0, 0.5, 0.9, 1.0])
    for i in range(minatar.N_SLOTS):
        x = int(draws.integers(10))
        if draws.random() < 0.5:  # near the player
            x = min(max(env.player_x + int(draws.integers(-1, 2)), 0), 9)
        if draws.random() < density:
            right, gold = (bool(x) for x in draws.integers(0, 2, 2))
            env.entities[i] = [x, i + 1, right, gold]
    env.spawn_speed = int(draws.integers(1, 11))
    env.move_speed = int(draws.integers(1, 6))
    if draws.random() < 0.1:
        env.spawn_speed = env.move_speed = 1
    env.spawn_timer = int(
        draws.choice([0, draws.integers(env.spawn_speed + 1)])
    )
    env.move_timer = int(draws.choice([0, draws.integers(env.move_speed + 1)]))
    env.ramp_timer = int(draws.choice([-1, 0, draws.integers(101)]))
    env.ramp_index = int(draws.integers(20))


def state_of(env):
    def scalar(value):
        return torch.tensor([value])

    rows = [
        (x is not None, *((x[0], x[2], x[3]) if x else (0, False, False)))
        for x in env.entities
    ]
    entities = (torch.tensor([column]) for column in zip(*rows))
    return minatar.AsterixState(
        player_y=scalar(env.player_y),
        player_x=scalar(env.player_x),
        entities=minatar.Entities(*entities),
        timers=minatar.AsterixTimers(
            spawn_speed=scalar(env.spawn_speed),
            spawn=scalar(env.spawn_timer),
            move_speed=scalar(env.move_speed),
            move=scalar(env.move_timer),
            ramp=scalar(env.ramp_timer),
            ramp_index=scalar(env.ramp_index),
        ),
        terminal=scalar(env.terminal),
    )


def seen(state):
    """All but what was in slots that are empty."""
    exists = state.entities.exists
    entities = tree.map(
        lambda x: torch.where(exists, x, torch.zeros_like(x)), state.entities
    )
    return state._replace(entities=entities)


@pytest.mark.parametrize("ramping", [True, False])
def test_one_step_from_any_state_equals_the_reference(ramping):
    game = minatar.asterix(
        minimal_actions=False, ramping=ramping, sticky_probability=0.0
    )

    def step_rows(state, action, units):
        unit = [[*map(float, u), 0.0, 0.0, 0.0][:3] for u in units]
        unit = torch.tensor(unit, dtype=torch.float64)
        return minatar.asterix_transition(game.cfg, state, action, unit)

    reward, n_ends = assert_steps_alike(
        "asterix", game, step_rows,
        place=place, state_of=state_of, seen=seen, ramping=ramping,
    )  # fmt: skip
    assert reward > 100 and n_ends > 100


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
