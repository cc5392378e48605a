"""Pendulum beside Gymnasium's."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch

from funcppo.core import random
from funcppo.envs.classic_control import pendulum
from tests.learning import WORLD


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_pendulum_step_equals_gymnasium_from_any_state(dtype):
    """200 states, three turns each way and torques beyond the limit; 1e-6, in float64 1e-12."""
    n = 200
    key, action_key = random.split(random.key(1))
    motion = random.uniform(key, (n, 2), -1.0, 1.0).to(dtype) * torch.tensor(
        [20.0, 8.0], dtype=dtype
    )
    state = pendulum.EnvState(motion, torch.zeros(n, dtype=torch.int64))
    action = (6 * random.uniform(action_key, (n,))[:, None] - 3).to(dtype)
    after, timestep = pendulum.step_functional(
        pendulum.PendulumConfig(), WORLD, state, action, random.split(key, n)
    )
    obs = pendulum.observe(pendulum.PendulumConfig(), WORLD, after)
    env = gymnasium.make("Pendulum-v1").unwrapped
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    for i in range(n):
        env.reset()
        env.state = motion[i].double().numpy()
        want_obs, reward, terminated, _, _ = env.step(
            action[i].double().numpy()
        )
        np.testing.assert_allclose(
            after.motion[i].double().numpy(),
            env.state,
            rtol=tolerance,
            atol=tolerance,
        )
        np.testing.assert_allclose(
            float(timestep.reward[i]),
            reward,
            rtol=2 * tolerance,
            atol=2 * tolerance,
        )
        np.testing.assert_allclose(
            obs[i].double().numpy(), want_obs, rtol=0, atol=3e-6
        )  # Gymnasium rounds to float32
        assert not terminated and not timestep.terminated[i]


def test_the_time_limit_is_gymnasiums():
    limit = gymnasium.spec("Pendulum-v1").max_episode_steps
    assert (
        pendulum.pendulum().cfg.max_steps
        == pendulum.PendulumConfig().max_steps
        == limit
        == 200
    )


def test_resets_lie_where_gymnasium_puts_them():
    keys = random.split(random.key(5), 10_000)
    motion = pendulum.reset(pendulum.PendulumConfig(), WORLD, keys).motion.abs()
    assert (
        float(motion[:, 0].max()) <= np.pi + 1e-6
        and float(motion[:, 1].max()) <= 1
    )
    assert motion.mean(0).tolist() == pytest.approx([np.pi / 2, 0.5], rel=0.03)


def test_the_reward_is_scaled_by_its_setting():
    env, half = pendulum.pendulum(), pendulum.pendulum(reward_scale=0.5)
    keys, action = random.split(random.key(0), 3), torch.ones(3, 1)
    state = env.reset(env.cfg, WORLD, keys)
    rewards = [
        e.step_functional(e.cfg, WORLD, state, action, keys)[1].reward
        for e in (env, half)
    ]
    assert rewards[0].all() and torch.equal(0.5 * rewards[0], rewards[1])


def test_the_spec_has_the_sizes_of_observations_and_actions():
    env, theirs = pendulum.pendulum(max_steps=7), gymnasium.make("Pendulum-v1")
    obs = env.observe(
        env.cfg,
        WORLD,
        env.reset(env.cfg, WORLD, random.split(random.key(0), 3)),
    )
    assert (
        obs.shape
        == (3, env.spec.observation_size)
        == (3, *theirs.observation_space.shape)
    )
    assert (env.cfg.max_steps, env.spec.action_size) == (
        7,
        *theirs.action_space.shape,
    )
    assert env.spec.continuous_actions
