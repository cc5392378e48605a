"""Seaquest beside the package `minatar`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from funcppo.envs import minatar
from funcppo.envs.minatar import (
    Bullets,
    Enemies,
    Player,
    Swimmers,
)
from funcppo.envs.minatar import SeaquestState as EnvState
from funcppo.envs.minatar import SeaquestTimers as Timers
from tests.envs.minatar.reference import (
    assert_plays_alike,
    keys,
    reference_game,
)
from tests.learning import one_thread

pytestmark = pytest.mark.usefixtures(one_thread.__name__)

GAME = minatar.seaquest(sticky_probability=0.0)
NOTHING, LEFT, UP, RIGHT, DOWN, FIRE = range(6)


def first_state(env):
    return GAME.reset(GAME.cfg, None, keys())


def step(state, action, units):
    """The reference draws three numbers for an enemy, then two for a diver."""
    units = [float(x) for x in units]
    enemy = units[:3] if len(units) >= 3 else [0.0] * 3
    diver = units[-2:] if len(units) in (2, 5) else [0.0] * 2
    unit = torch.tensor([enemy + diver], dtype=torch.float64)
    return minatar.seaquest_transition(GAME.cfg, state, action, unit)


def slots(rows, n, n_columns):
    """A list of the reference in slots: which are filled, and its columns."""
    table = np.zeros((n, n_columns), np.int64)
    for i, row in enumerate(rows):
        table[i] = [int(x) for x in row]
    exists = torch.arange(n) < len(rows)
    columns = torch.from_numpy(table).unsqueeze(0).unbind(-1)
    return exists.unsqueeze(0), columns


def swimmers(rows, n):
    exists, (x, y, right, timer) = slots([r[:4] for r in rows], n, 4)
    birth = torch.arange(n).unsqueeze(0)  # the order of the list
    return Swimmers(exists, x, y, right == 1, timer, birth)


def state_of(env):
    """The state of the reference."""

    def scalar(value):
        return torch.tensor([int(value)])

    enemies = [*env.e_fish, *env.e_subs]
    n_fish = len(env.e_fish)
    index = torch.arange(minatar.N_ENEMIES).unsqueeze(0)
    _, (shot_timer,) = slots(
        [[0]] * n_fish + [[sub[4]] for sub in env.e_subs],
        minatar.N_ENEMIES,
        1,
    )
    exists, (x, y, right) = slots(env.f_bullets, minatar.N_BULLETS, 3)
    flying = np.zeros((2, 10, 10), bool)
    for bullet in env.e_bullets:
        flying[int(bullet[2]), bullet[1], bullet[0]] = True
    left_and_right = torch.from_numpy(flying).unsqueeze(1)
    return EnvState(
        player=Player(
            x=scalar(env.sub_x),
            y=scalar(env.sub_y),
            faces_right=scalar(env.sub_or) == 1,
            oxygen=scalar(env.oxygen),
            n_divers=scalar(env.diver_count),
            is_up=scalar(env.surface) == 1,
            shot_timer=scalar(env.shot_timer),
        ),
        bullets=Bullets(exists, x, y, right == 1),
        enemies=Enemies(
            swimmers(enemies, minatar.N_ENEMIES), index >= n_fish, shot_timer
        ),
        leftward=left_and_right[0],
        rightward=left_and_right[1],
        divers=swimmers(env.divers, minatar.N_DIVERS),
        timers=Timers(
            time=torch.tensor([1000]),
            enemy_spawn_speed=scalar(env.e_spawn_speed),
            enemy_spawn=scalar(env.e_spawn_timer),
            diver_spawn=scalar(env.d_spawn_timer),
            move_speed=scalar(env.move_speed),
            n_ramps=scalar(env.ramp_index),
        ),
        terminal=scalar(env.terminal) == 1,
    )


def observed(state):
    return GAME.observe(GAME.cfg, None, state)[0].numpy()


def contents(state):
    """What is in the sea, in no order: enemies, divers and bullets of the player."""
    enemies = state.enemies
    is_submarine = enemies.is_submarine
    shot_timer = torch.where(is_submarine, enemies.shot_timer, 0)
    groups = [
        (*enemies.swimmers[:5], is_submarine, shot_timer),
        state.divers[:5],
        state.bullets,
    ]
    return [
        sorted(
            row[1:]
            for row in torch.stack([x[0].long() for x in g], -1).tolist()
            if row[0]
        )
        for g in groups
    ]


@pytest.mark.parametrize("seed", range(3))
def test_one_step_from_any_state_equals_the_reference(seed):
    """Random players that cannot die, from the first difficulty to the last, with divers and air at random."""
    draws = np.random.default_rng(seed)
    env = reference_game("seaquest", seed)
    n_shot, n_ends, largest_reward = 0, 0, 0
    for t in range(600):
        if t == 200 * seed:
            env.e_spawn_speed, env.move_speed = 1, 2
        if t % 20 == 0:  # so that some swim into each other's cells
            env.move_speed = int(draws.integers(2, 6))
            del env.e_fish[6:], env.e_subs[3:]
        if draws.random() < 0.1:
            env.diver_count = int(draws.choice([-1, 0, 1, 5, 6, 6, 6]))
            env.oxygen = int(draws.integers(0, 201))
        # Half the time up, or else there is little to shoot.
        weights = [1, 3, 3, 3, 2, 6] if draws.random() < 0.5 else [1] * 6
        action = int(draws.choice(6, p=np.array(weights) / sum(weights)))

        before = state_of(env)
        assert np.array_equal(observed(before), env.state()), f"step {t}"
        env.random.units.clear()
        reward, terminal = env.act(action)
        after, timestep = step(before, torch.tensor([action]), env.random.units)
        assert float(timestep.reward[0]) == reward, f"step {t}"
        assert bool(timestep.terminated[0]) == terminal, f"step {t}"
        assert np.array_equal(observed(after), env.state()), f"step {t}"
        want = state_of(env)
        assert contents(after) == contents(want), f"step {t}"
        scalars = zip(
            (*after.player, *after.timers[1:]), (*want.player, *want.timers[1:])
        )
        assert all(torch.equal(a, b) for a, b in scalars), f"step {t}"

        n_shot += reward > 0
        n_ends += terminal
        largest_reward = max(largest_reward, reward)
        env.terminal = False
    assert n_shot > 10 and n_ends > 10 and largest_reward > 2


def test_each_step_of_an_episode_equals_the_reference():
    """Players that stay under water, meet divers, and shoot; slots and births are ours throughout."""
    lengths, rewards = [], []
    for seed in range(3):
        draws = np.random.default_rng(seed)

        def play(env, t, draws=draws):
            if env.oxygen < 40 and env.diver_count > 0:
                return UP
            if draws.random() < 0.4:
                return FIRE
            return int(
                draws.choice([LEFT, RIGHT, DOWN, UP if env.sub_y > 1 else DOWN])
            )

        length, reward = assert_plays_alike(
            "seaquest", GAME, first_state, step,
            seed=seed, n_steps=400, action=play,
        )  # fmt: skip
        lengths.append(length)
        rewards.append(reward)
    assert max(lengths) > 30 and sum(rewards) > 0


def swimmer(x, y, right=True, timer=0, n=minatar.N_ENEMIES):
    return swimmers([[x, y, right, timer]], n)


def test_six_divers_are_worth_the_air_that_is_left():
    """And the quirk of the reference after it: one diver fewer than none."""
    state = first_state(None)
    player = state.player._replace(
        y=torch.tensor([1]),
        is_up=torch.tensor([False]),
        n_divers=torch.tensor([6]),
        oxygen=torch.tensor([119]),
    )
    after, timestep = step(
        state._replace(player=player), torch.tensor([UP]), []
    )
    assert float(timestep.reward[0]) == 5.0
    assert int(after.player.n_divers[0]) == -1
    assert int(after.player.oxygen[0]) == minatar.MAX_OXYGEN
    assert not bool(timestep.terminated[0])


def test_surfacing_without_a_diver_ends_the_episode():
    state = first_state(None)
    down, _ = step(state, torch.tensor([DOWN]), [])
    _, timestep = step(down, torch.tensor([UP]), [])
    assert bool(timestep.terminated[0])


def test_a_board_that_is_full_takes_no_diver():
    state = first_state(None)
    x, y = int(state.player.x[0]), 0
    for n_divers, boards in [(5, True), (6, False)]:
        player = state.player._replace(n_divers=torch.tensor([n_divers]))
        divers = swimmer(x, y, timer=3, n=minatar.N_DIVERS)
        after, _ = step(
            state._replace(player=player, divers=divers),
            torch.tensor([NOTHING]),
            [],
        )
        assert int(after.player.n_divers[0]) == n_divers + boards
        assert bool(after.divers.exists.any()) != boards
