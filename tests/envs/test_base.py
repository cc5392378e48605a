"""CartPole and Pendulum beside Gymnasium's, and the contract of every environment."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch

from funcppo import random, tree
from funcppo.envs.base import Timestep, autoreset
from funcppo.envs.classic_control import cartpole, pendulum
from tests.learning import (
    WORLD,
    assert_trees_equal,
    cartpole_config,
    double,
    one_thread,
    pendulum_config,
)

pytestmark = pytest.mark.usefixtures(one_thread.__name__)

ENVS = {"cartpole": cartpole_config(max_steps=7).env, "pendulum": pendulum_config(max_steps=7).env}


def actions(env, key, n):
    unit = random.uniform(key, (n,))
    return (unit < 0.5).long() if env.cfg.__class__ is cartpole.CartPoleConfig else 6 * unit[:, None] - 3


def play(env, seed, n, steps):
    """States, actions, keys and timesteps of some random steps without any restart."""
    reset_key, *keys = random.split(random.key(seed), steps + 1)
    state, out = env.reset(env.cfg, WORLD, random.split(reset_key, n)), []
    for key in keys:
        action = actions(env, key, n)
        after, timestep = env.step_functional(env.cfg, WORLD, state, action, random.split(key, n))
        out.append((state, action, after, timestep))
        state = after
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_cartpole_step_equals_gymnasium_from_any_upright_state(dtype):
    """200 states over the whole upright range; 1e-6, in float64 1e-12."""
    cfg, n = cartpole.CartPoleConfig(), 200
    key, action_key = random.split(random.key(0))
    span = torch.tensor([2.4, 3.0, cartpole.ANGLE_LIMIT, 3.0], dtype=dtype)
    motion = random.uniform(key, (n, 4), -1.0, 1.0).to(dtype) * span
    state = cartpole.EnvState(motion, torch.zeros(n, dtype=torch.int64))
    action = actions(ENVS["cartpole"], action_key, n)
    after, timestep = cartpole.step_functional(cfg, WORLD, state, action, random.split(key, n))
    env = gymnasium.make("CartPole-v1").unwrapped
    for i in range(n):
        env.reset()
        env.state = motion[i].double().numpy()
        _, reward, terminated, _, _ = env.step(int(action[i]))
        tolerance = 1e-6 if dtype == torch.float32 else 1e-12
        np.testing.assert_allclose(after.motion[i].double().numpy(), env.state, rtol=tolerance, atol=tolerance)
        assert (float(timestep.reward[i]), bool(timestep.terminated[i])) == (reward, terminated)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_pendulum_step_equals_gymnasium_from_any_state(dtype):
    """200 states, three turns each way and torques beyond the limit; 1e-6, in float64 1e-12."""
    n = 200
    key, action_key = random.split(random.key(1))
    motion = random.uniform(key, (n, 2), -1.0, 1.0).to(dtype) * torch.tensor([20.0, 8.0], dtype=dtype)
    state = pendulum.EnvState(motion, torch.zeros(n, dtype=torch.int64))
    action = actions(ENVS["pendulum"], action_key, n).to(dtype)
    after, timestep = pendulum.step_functional(pendulum.PendulumConfig(), WORLD, state, action, random.split(key, n))
    obs = pendulum.observe(pendulum.PendulumConfig(), WORLD, after)
    env = gymnasium.make("Pendulum-v1").unwrapped
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    for i in range(n):
        env.reset()
        env.state = motion[i].double().numpy()
        want_obs, reward, terminated, _, _ = env.step(action[i].double().numpy())
        np.testing.assert_allclose(after.motion[i].double().numpy(), env.state, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(float(timestep.reward[i]), reward, rtol=2 * tolerance, atol=2 * tolerance)
        np.testing.assert_allclose(obs[i].double().numpy(), want_obs, rtol=0, atol=3e-6)  # Gymnasium rounds to float32
        assert not terminated and not timestep.terminated[i]


@pytest.mark.parametrize(("name", "limit"), [("CartPole-v1", 500), ("Pendulum-v1", 200)])
def test_the_time_limit_is_gymnasiums(name, limit):
    assert gymnasium.spec(name).max_episode_steps == limit
    cfg = cartpole_config() if name == "CartPole-v1" else pendulum_config()
    assert cfg.env.cfg.max_steps == limit


def test_resets_lie_where_gymnasium_puts_them():
    keys = random.split(random.key(5), 10_000)
    cart = cartpole.reset(cartpole.CartPoleConfig(), WORLD, keys).motion
    assert float(cart.abs().max()) <= 0.05 and float(cart.abs().mean()) == pytest.approx(0.025, rel=0.02)
    pole = pendulum.reset(pendulum.PendulumConfig(), WORLD, keys).motion.abs()
    assert float(pole[:, 0].max()) <= np.pi + 1e-6 and float(pole[:, 1].max()) <= 1
    assert pole.mean(0).tolist() == pytest.approx([np.pi / 2, 0.5], rel=0.03)


@pytest.mark.parametrize("name", ENVS)
def test_a_finished_row_stays_as_it_is_and_is_paid_nothing(name):
    env, seen = ENVS[name], False
    history = play(env, 2, 32, 40)
    done = [t.terminated | t.truncated for *_, t in history]
    for (_, _, before, first), (_, _, after, second), ended in zip(history, history[1:], done):
        rows = ended.nonzero().flatten()
        seen = seen or len(rows) > 0
        assert_trees_equal(
            tree.map(lambda x, r=rows: x[r], after), tree.map(lambda x, r=rows: x[r], before), rtol=0, atol=0
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
            got = env.step_functional(env.cfg, WORLD, pick(state), action[rows], keys[rows])
            assert_trees_equal(got, (pick(after), pick(timestep)), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ENVS)
def test_an_episode_ends_for_one_reason_at_the_limit_and_before_it(name):
    for *_, after, timestep in play(ENVS[name], 4, 64, 7):
        assert torch.equal(timestep.truncated, after.steps >= 7)
        if name == "pendulum":
            assert not timestep.terminated.any()


def test_autoreset_replaces_finished_rows_only():
    env = ENVS["cartpole"]
    state, keys = play(env, 6, 4, 3)[-1][2], random.split(random.key(7), 4)
    flags = torch.tensor([True, False, False, False]), torch.tensor([False, False, True, False])
    fresh = env.reset(env.cfg, WORLD, keys)
    after = autoreset(state, Timestep(torch.zeros(4), *flags), fresh)
    assert torch.equal(after.motion[::2], fresh.motion[::2]) and torch.equal(after.motion[1::2], state.motion[1::2])
    assert after.steps.tolist() == [0, 3, 0, 3]


@pytest.mark.parametrize("name", ENVS)
def test_an_environment_computes_in_the_dtype_of_its_state(name):
    env = ENVS[name]
    state = double(play(env, 8, 3, 1)[0][0])
    action = actions(env, random.key(0), 3)
    after, timestep = env.step_functional(env.cfg, WORLD, state, action, random.split(random.key(0), 3))
    assert after.motion.dtype == timestep.reward.dtype == env.observe(env.cfg, WORLD, after).dtype == torch.float64
