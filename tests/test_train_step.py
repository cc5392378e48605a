"""The training step learns, and is the same compiled as eager."""

from __future__ import annotations

import pytest
import torch

from funcppo import random
from funcppo.config import Config, PPOConfig
from funcppo.envs import cartpole
from funcppo.envs.base import NoWorld
from funcppo.nets import mlp
from funcppo.train_step import init, train_step


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cartpole_config(**ppo) -> Config:
    return Config(
        ppo=PPOConfig(**ppo),
        env=cartpole.environment(cartpole.CartPoleConfig()),
        agent=mlp.agent(mlp.MLPConfig(n_obs=4, n_actions=2)),
    )


def test_cartpole_improves():
    """From about 22 steps an episode to above 60 within 20 updates of 32 environments."""
    cfg = cartpole_config(n_envs=32, n_steps=32, learning_rate=2.5e-3, n_updates=20)
    state, returns = init(cfg, NoWorld(), random.key(0)), []
    with torch.no_grad():
        for _ in range(20):
            state, metrics = train_step(cfg, NoWorld(), state)
            returns.append(float(metrics.rollout.episode_return / metrics.rollout.episodes))
    assert returns[0] < 30
    assert sum(returns[-3:]) / 3 > 60
