"""The contract of every environment, and the reset of finished rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from funcppo import envs
from funcppo.core import random, tree
from funcppo.envs.base import restart, sample_reset, step_with_autoreset
from tests.learning import (
    WORLD,
    assert_trees_equal,
    cartpole_config,
    double,
    one_thread,
    pendulum_config,
)

pytestmark = pytest.mark.usefixtures(one_thread.__name__)

ENVS = {
    "cartpole": cartpole_config(max_steps=7).env,
    "pendulum": pendulum_config(max_steps=7).env,
    "acrobot": envs.acrobot(max_steps=7),
    "mountain_car": envs.mountain_car(max_steps=7),
    "mountain_car_continuous": envs.mountain_car_continuous(max_steps=7),
}


def actions(env, key, n):
    unit = random.uniform(key, (n,))
    return (
        6 * unit[:, None] - 3
        if env.spec.continuous_actions
        else (unit * env.spec.action_size).long()
    )


def play(env, seed, n, steps):
    """States, actions, keys and timesteps of some random steps without any restart."""
    reset_key, *keys = random.split(random.key(seed), steps + 1)
    state, out = env.reset(env.cfg, WORLD, random.split(reset_key, n)), []
    for key in keys:
        action = actions(env, key, n)
        after, timestep = env.step_functional(
            env.cfg, WORLD, state, action, random.split(key, n)
        )
        out.append((state, action, after, timestep))
        state = after
    return out


@pytest.mark.parametrize("name", ENVS)
def test_a_finished_row_stays_as_it_is_and_is_paid_nothing(name):
    env, seen = ENVS[name], False
    history = play(env, 2, 32, 40)
    done = [t.terminated | t.truncated for *_, t in history]
    for (_, _, before, first), (_, _, after, second), ended in zip(
        history, history[1:], done
    ):
        rows = ended.nonzero().flatten()
        seen = seen or len(rows) > 0
        assert_trees_equal(
            tree.map(lambda x, r=rows: x[r], after),
            tree.map(lambda x, r=rows: x[r], before),
            rtol=0,
            atol=0,
        )
        assert not second.reward[rows].any()
        assert torch.equal(second.terminated[rows], first.terminated[rows])
        assert torch.equal(second.truncated[rows], first.truncated[rows])
    assert seen and done[-1].all()


@pytest.mark.parametrize("name", ENVS)
def test_rows_are_independent(name):
    """A row's step is the same alone, reversed and among others."""
    env = ENVS[name]
    for state, action, after, timestep in play(env, 3, 6, 9):
        keys = random.split(random.key(0), 6)
        for rows in (torch.arange(5, -1, -1), torch.tensor([4])):
            pick = lambda x, r=rows: tree.map(lambda t: t[r], x)
            got = env.step_functional(
                env.cfg, WORLD, pick(state), action[rows], keys[rows]
            )
            assert_trees_equal(
                got, (pick(after), pick(timestep)), rtol=1e-6, atol=1e-7
            )


@pytest.mark.parametrize("name", ENVS)
def test_an_episode_ends_for_one_reason_at_the_limit_and_before_it(name):
    for *_, after, timestep in play(ENVS[name], 4, 64, 7):
        assert torch.equal(timestep.truncated, after.steps >= 7)
        if name == "pendulum":
            assert not timestep.terminated.any()


def test_a_restart_replaces_finished_rows_only():
    env = ENVS["cartpole"]
    state, keys = play(env, 6, 4, 3)[-1][2], random.split(random.key(7), 4)
    finished = torch.tensor([True, False, True, False])
    fresh = env.reset(env.cfg, WORLD, keys)
    after = restart(env, WORLD, state, finished, fresh)
    assert torch.equal(after.motion[::2], fresh.motion[::2]) and torch.equal(
        after.motion[1::2], state.motion[1::2]
    )
    assert after.steps.tolist() == [0, 3, 0, 3]


@pytest.mark.parametrize("name", ENVS)
def test_an_environment_computes_in_the_dtype_of_its_state(name):
    env = ENVS[name]
    state = double(play(env, 8, 3, 1)[0][0])
    action = actions(env, random.key(0), 3)
    after, timestep = env.step_functional(
        env.cfg, WORLD, state, action, random.split(random.key(0), 3)
    )
    assert (
        after.motion.dtype
        == timestep.reward.dtype
        == env.observe(env.cfg, WORLD, after).dtype
        == torch.float64
    )


@pytest.mark.parametrize("name", ENVS)
def test_a_step_with_a_reset_in_two_parts_equals_one_with_whole_states(name):
    """The sample is the state there, and the halves of a state here."""
    env = ENVS[name]
    in_parts = replace(
        env,
        sample_reset=lambda cfg, world, key: tree.map(
            lambda x: x / 2, env.reset(cfg, world, key)
        ),
        reset_from_sample=lambda cfg, world, sample: tree.map(
            lambda x: 2 * x, sample
        ),
    )
    state, action, keys = (
        play(env, 3, 6, 7)[-1][0],
        actions(env, random.key(1), 6),
        random.split(random.key(0), 6),
    )
    steps = [
        step_with_autoreset(
            e, WORLD, state, action, keys, sample_reset(e, WORLD, keys)
        )
        for e in (env, in_parts)
    ]
    assert_trees_equal(steps[1][0], steps[0][0], rtol=0, atol=0)
    assert_trees_equal(steps[1][2].motion, steps[0][2].motion, rtol=0, atol=0)
    assert not torch.equal(
        steps[0][2].motion, steps[0][0].motion
    )  # some row was reset
