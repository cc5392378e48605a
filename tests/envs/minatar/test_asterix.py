"""Asterix beside the package `minatar`."""

from __future__ import annotations

import pytest
import torch

from funcppo.core import tree
from funcppo.envs import minatar
from tests.envs.minatar.reference import assert_steps_alike


def place(env, draws):
    """Any player, anything in any line, and timers of any difficulty, at 0 often."""
    env.player_x = int(draws.integers(10))
    env.player_y = int(draws.integers(1, 9))
    density = draws.choice([0.0, 0.5, 0.9, 1.0])
    for i in range(8):
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
