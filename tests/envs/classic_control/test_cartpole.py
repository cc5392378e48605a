"""CartPole beside Gymnasium's."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch

from funcppo.core import random
from funcppo.envs.classic_control import cartpole
from tests.learning import WORLD


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_cartpole_step_equals_gymnasium_from_any_upright_state(dtype):
    """200 states over the whole upright range; 1e-6, in float64 1e-12."""
    cfg, n = cartpole.CartPoleConfig(), 200
    key, action_key = random.split(random.key(0))
    span = torch.tensor([2.4, 3.0, cartpole.ANGLE_LIMIT, 3.0], dtype=dtype)
    motion = random.uniform(key, (n, 4), -1.0, 1.0).to(dtype) * span
    state = cartpole.EnvState(motion, torch.zeros(n, dtype=torch.int64))
    action = (random.uniform(action_key, (n,)) < 0.5).long()
    after, timestep = cartpole.step_functional(
        cfg, WORLD, state, action, random.split(key, n)
    )
    env = gymnasium.make("CartPole-v1").unwrapped
    for i in range(n):
        env.reset()
        env.state = motion[i].double().numpy()
        _, reward, terminated, _, _ = env.step(int(action[i]))
        tolerance = 1e-6 if dtype == torch.float32 else 1e-12
        np.testing.assert_allclose(
            after.motion[i].double().numpy(),
            env.state,
            rtol=tolerance,
            atol=tolerance,
        )
        assert (float(timestep.reward[i]), bool(timestep.terminated[i])) == (
            reward,
            terminated,
        )


def test_the_time_limit_is_gymnasiums():
    limit = gymnasium.spec("CartPole-v1").max_episode_steps
    assert (
        cartpole.cartpole().cfg.max_steps
        == cartpole.CartPoleConfig().max_steps
        == limit
        == 500
    )


def test_resets_lie_where_gymnasium_puts_them():
    keys = random.split(random.key(5), 10_000)
    motion = cartpole.reset(cartpole.CartPoleConfig(), WORLD, keys).motion
    assert float(motion.abs().max()) <= 0.05 and float(
        motion.abs().mean()
    ) == pytest.approx(0.025, rel=0.02)


def test_the_spec_has_the_sizes_of_observations_and_actions():
    env, theirs = cartpole.cartpole(max_steps=7), gymnasium.make("CartPole-v1")
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
    assert (
        env.cfg.max_steps == 7 and env.spec.action_size == theirs.action_space.n
    )
    assert not env.spec.continuous_actions
