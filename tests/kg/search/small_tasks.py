"""Small tasks that the tests of the prover share, built once."""

import dataclasses
from functools import cache

import torch

from funcppo import train_step
from funcppo.config import PPOConfig
from funcppo.core import random, tree
from funcppo.kg.config import ProverTaskConfig
from funcppo.kg.graph import loaders
from funcppo.kg.search import env as prover_env
from funcppo.kg.search import task as prover_task

PPO = PPOConfig(n_envs=8, n_steps=6, n_epochs=1, n_minibatches=2)
SETTINGS = ProverTaskConfig(
    max_height=2,
    max_depth=5,
    embed_dim=4,
    hidden_dim=8,
    hard_negative_fraction=0.3,
)
# of a search that prunes nothing
SIZES = dict(slots=8, beam=64, rows_per_step=64, chunk_size=64)


@cache
def small_task(name="countries_s2", **fields):
    """A task of an embedded data set; `fields` replace those of SETTINGS."""
    return prover_task.build_task(
        loaders.load(name), dataclasses.replace(SETTINGS, **fields)
    )


def untrained_policy(task):
    """The config of a small PPO on a task, and first params."""
    cfg = prover_task.build_config(task, PPO)
    world = prover_task.training_world(task)
    return cfg, train_step.init(cfg, world, random.key(0)).params


@cache
def small_problem(**fields):
    """The config, world and first training state of a small task."""
    task = small_task(**fields)
    cfg = prover_task.build_config(task, PPO)
    world = prover_task.training_world(task)
    return cfg, world, train_step.init(cfg, world, random.key(1))


def network_call(cfg, world, state):
    """The network's function and its arguments in the first training state."""
    obs = prover_env.observe(cfg.env.cfg, world, state.env_state)
    return cfg.agent.apply, (cfg.agent.cfg, world, state.params, obs)


def perturbed(params):
    """Params that are nowhere zero, always the same ones."""
    return tree.map(
        lambda x: (
            x + 0.3 * torch.sin(torch.arange(x.numel()).view(x.shape) * 1.7)
        ),
        params,
    )
