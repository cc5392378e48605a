"""Acting: `n_steps` transitions of every environment under fixed params, time-major."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from funcppo import random, tree
from funcppo.config import Config
from funcppo.envs.base import Environment, sample_reset, step_with_autoreset
from funcppo.types import F32, I64, Bool

Carry = TypeVar("Carry")


class EpisodeStats(NamedTuple):
    """The episode that each row is in."""

    total_reward: F32[Tensor, "B"]  # undiscounted sum of rewards so far
    length: I64[Tensor, "B"]  # steps so far


class RolloutState(NamedTuple):
    """What a rollout threads."""

    env_state: Any
    episode_stats: EpisodeStats


class RandomInputs(NamedTuple):
    """What is drawn for one step; with a leading axis T for a rollout, all at once because one by one costs more."""

    action_key: I64[Tensor, "... 2"]  # key
    step_key: I64[Tensor, "... B 2"]  # keys of the environments, one a row
    reset_sample: Any  # what each row restarts from, if it does: of `envs.base.draw`


class Transition(NamedTuple):
    """One step of every row; stacked over time it is the trajectory [T, B]."""

    obs: Any  # what the action was chosen on
    action: Tensor
    log_prob: F32[Tensor, "... B"]  # under the behaviour policy
    value: F32[Tensor, "... B"]
    reward: F32[Tensor, "... B"]
    terminated: Bool[Tensor, "... B"]
    truncated: Bool[Tensor, "... B"]
    final_obs: Any  # of the state reached, before any restart; () where no truncated episode is worth anything
    episode_stats: EpisodeStats  # the transition included


def init_rollout_state(cfg: Config, world: Any, key: I64[Tensor, "2"], n_envs: int) -> tuple[Any, EpisodeStats]:
    """`n` fresh rows and their empty episodes."""
    env_state = cfg.env.reset(cfg.env.cfg, world, random.split(key, n_envs))
    own = lambda x: x.clone(memory_format=torch.contiguous_format)  # as later states lie: no second graph is compiled
    none = EpisodeStats(
        torch.zeros(n_envs, device=key.device), torch.zeros(n_envs, dtype=torch.int64, device=key.device)
    )
    return tree.map(own, env_state), none


def rollout_keys(key: I64[Tensor, "2"], n_steps: int, n_envs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Independent keys for every step of a rollout: of actions [T, 2], steps [T, B, 2] and restarts [T, B, 2]."""
    action, env = random.split(random.split(key), n_steps).unbind()
    step, restart = random.split(random.split(env, n_envs)).unbind(-2)
    return action, step, restart


def sample_random_inputs(
    env: Environment, world: Any, action_key: Tensor, step_key: Tensor, reset_key: Tensor
) -> RandomInputs:
    """What a rollout needs of chance, given `step_keys`."""
    starts = sample_reset(env, world, reset_key.flatten(0, 1))
    return RandomInputs(action_key, step_key, tree.map(lambda x: x.unflatten(0, reset_key.shape[:2]), starts))


def rollout_step(
    cfg: Config, world: Any, params: Any, rollout_state: RolloutState, random_inputs: RandomInputs
) -> tuple[RolloutState, Transition]:
    """Observe, act, step, and restart the rows that finished."""
    env, agent = cfg.env, cfg.agent
    obs = env.observe(env.cfg, world, rollout_state.env_state)
    out = agent.apply(agent.cfg, world, params, obs)
    action = agent.distribution.sample(random_inputs.action_key, out)
    reached, timestep, onward = step_with_autoreset(
        env, world, rollout_state.env_state, action, random_inputs.step_key, random_inputs.reset_sample
    )
    done = timestep.terminated | timestep.truncated
    episode = EpisodeStats(
        rollout_state.episode_stats.total_reward + timestep.reward, rollout_state.episode_stats.length + 1
    )
    transition = Transition(
        obs=obs,
        action=action,
        log_prob=agent.distribution.log_prob(out, action),
        value=out.value,
        reward=timestep.reward,
        terminated=timestep.terminated,
        truncated=timestep.truncated,
        final_obs=env.observe(env.cfg, world, reached) if _bootstraps(cfg) else (),
        episode_stats=episode,
    )
    episode = tree.map(lambda x: torch.where(done, 0, x).to(x.dtype), episode)
    return RolloutState(onward, episode), transition


def _bootstraps(cfg: Config) -> bool:
    return cfg.env.truncates and cfg.ppo.bootstrap_truncated


def estimate_final_value(cfg: Config, world: Any, params: Any, trajectory: Transition) -> F32[Tensor, "T B"]:
    """V of the last observation of each truncated episode, else 0; all at once, after the rollout."""
    if not _bootstraps(cfg):
        return torch.zeros_like(trajectory.reward)
    obs = tree.map(lambda x: x.flatten(0, 1), trajectory.final_obs)
    reached = cfg.agent.apply(cfg.agent.cfg, world, params, obs).value
    return torch.where(trajectory.truncated, reached.view_as(trajectory.reward), 0.0)


def estimate_value(cfg: Config, world: Any, params: Any, env_state: Any) -> F32[Tensor, "B"]:
    """V of a state."""
    obs = cfg.env.observe(cfg.env.cfg, world, env_state)
    return cfg.agent.apply(cfg.agent.cfg, world, params, obs).value


def scan(fn: Callable[[Carry, Any], tuple[Carry, Any]], carry: Carry, xs: Any) -> tuple[Carry, Any]:
    """Thread `carry` through `fn` over the leading axis of `xs`: the last carry, and the outputs stacked."""
    ys = []
    for x in zip(*(leaf.unbind() for leaf in tree.leaves(xs))):
        carry, y = fn(carry, tree.unflatten(xs, list(x)))
        ys.append(y)
    return carry, tree.map(lambda *y: torch.stack(y), *ys)
