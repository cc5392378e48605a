"""One PPO update as a pure function of the training state:

train_step = plan . n_steps x rollout_step . learning_batch . (n_epochs * n_minibatches) x minibatch_step
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcppo import minibatch, optim, random, rollout, tree
from funcppo.advantages import gae, next_values
from funcppo.config import Config
from funcppo.losses import Batch, LossMetrics, Scalars
from funcppo.minibatch import MinibatchIndices, MinibatchMetrics, UpdateState, minibatch_step
from funcppo.rollout import EpisodeStats, RandomInputs, RolloutState, Transition, rollout_step
from funcppo.types import F32, I64


class TrainState(NamedTuple):
    """Everything that training threads: saved and restored, it goes on bit for bit."""

    params: Any
    opt_state: optim.AdamState[Any]
    env_state: Any
    episode_stats: EpisodeStats
    key: I64[Tensor, "2"]
    update: I64[Tensor, ""]  # updates made
    scalars: Scalars  # before their schedules


class RolloutMetrics(NamedTuple):
    """What one trajectory shows."""

    n_episodes: F32[Tensor, ""]  # episodes that ended in it
    episode_return_sum: F32[Tensor, ""]  # sum of their undiscounted returns
    episode_length_sum: F32[Tensor, ""]  # sum of their lengths, steps
    n_truncated_episodes: F32[Tensor, ""]  # how many of them were cut
    explained_variance: F32[Tensor, ""]  # of the value targets by the values, before learning


class Metrics(NamedTuple):
    """What one update shows; of the losses the mean over its minibatches, those that moved nothing left out."""

    rollout: RolloutMetrics
    loss: LossMetrics
    grad_norm: F32[Tensor, ""]  # before clipping, mean over the minibatches
    n_applied_minibatches: F32[Tensor, ""]  # how many were learnt from
    n_nonfinite_minibatches: F32[Tensor, ""]  # how many were not, because a loss or a gradient was not finite
    learning_rate: F32[Tensor, ""]  # in this update


def init(cfg: Config, world: Any, key: I64[Tensor, "2"]) -> TrainState:
    """The state before the first update."""
    key, init_key = random.split(key).unbind()
    key, reset_key = random.split(key).unbind()
    key, loop_key = random.split(key).unbind()
    params = cfg.agent.init(cfg.agent.cfg, init_key)
    env_state, episode = rollout.init_rollout_state(cfg, world, reset_key, cfg.ppo.n_envs)
    return TrainState(
        params=params,
        opt_state=optim.init(params),
        env_state=env_state,
        episode_stats=episode,
        key=loop_key,
        update=torch.zeros((), dtype=torch.int64, device=key.device),
        scalars=Scalars(*(torch.full((), getattr(cfg.ppo, name), device=key.device) for name in Scalars._fields)),
    )


def apply_schedules(cfg: Config, update_index: I64[Tensor, ""], scalars: Scalars) -> Scalars:
    """The scalars of update number `update`."""
    ppo = cfg.ppo
    factor = partial(optim.schedule_factor, update_index=update_index, n_updates=ppo.n_updates)
    return scalars._replace(
        learning_rate=scalars.learning_rate * factor(ppo.learning_rate_schedule),
        clip_eps=scalars.clip_eps * factor(ppo.clip_eps_schedule),
        entropy_coef=scalars.entropy_coef * factor(ppo.entropy_coef_schedule),
    )


def build_batch(
    cfg: Config, world: Any, params: Any, env_state: Any, trajectory: Transition, scalars: Scalars
) -> tuple[Batch, RolloutMetrics]:
    """The trajectory with its advantages and targets, flattened to N = T * B, and what it shows.

    Args:
      env_state: the state after the last transition, finished rows restarted.
    """
    last_value = rollout.estimate_value(cfg, world, params, env_state)
    value, done = trajectory.value, trajectory.terminated | trajectory.truncated
    final_value, bootstrap = rollout.estimate_final_value(cfg, world, params, trajectory), cfg.ppo.bootstrap_truncated
    advantage, target = gae(
        trajectory.reward,
        trajectory.terminated if bootstrap else done,
        trajectory.truncated,
        value,
        next_values(value, final_value, last_value, trajectory.truncated),
        gamma=scalars.gamma,
        gae_lambda=scalars.gae_lambda,
    )
    batch = Batch(trajectory.obs, trajectory.action, trajectory.log_prob, value, advantage, target)
    metrics = RolloutMetrics(
        n_episodes=done.to(value.dtype).sum(),
        episode_return_sum=torch.where(done, trajectory.episode_stats.total_reward, 0.0).sum(),
        episode_length_sum=torch.where(done, trajectory.episode_stats.length, 0).to(value.dtype).sum(),
        n_truncated_episodes=trajectory.truncated.to(value.dtype).sum(),
        explained_variance=1 - (target - value).var(correction=0) / target.var(correction=0),
    )
    return tree.map(lambda x: x.flatten(0, 1), batch), metrics


def sample_randomness(
    cfg: Config, world: Any, key: I64[Tensor, "2"]
) -> tuple[I64[Tensor, "2"], RandomInputs, MinibatchIndices]:
    """The next key, what is drawn for every rollout step, and which rows every minibatch learns from."""
    ppo = cfg.ppo
    key, rollout_key, order_key = random.split(key, 3).unbind()
    draws = rollout.sample_random_inputs(cfg.env, world, *rollout.rollout_keys(rollout_key, ppo.n_steps, ppo.n_envs))
    order = random.permutation(random.split(order_key, ppo.n_epochs), ppo.n_envs * ppo.n_steps)
    number = torch.arange(ppo.n_epochs * ppo.n_minibatches, device=key.device)
    ends_epoch = (number + 1) % ppo.n_minibatches == 0
    return key, draws, MinibatchIndices(rows=order.view(len(number), -1), ends_epoch=ends_epoch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The functions that `train_step` is made of; a runtime may put compiled ones in their place.

    `minibatch_step` is `gradient` and `apply_gradient` in one, `gradient` the sum of `loss_gradient` over microbatches,
    that the derivative of `minibatch_loss`: those four are here for a runtime that does not compile the whole.
    """

    scan: Callable[..., Any] = rollout.scan
    sample_randomness: Callable[..., Any] = sample_randomness
    rollout_step: Callable[..., Any] = rollout_step
    build_batch: Callable[..., Any] = build_batch
    ravel_update_state: Callable[..., Any] = minibatch.ravel_update_state
    minibatch_step: Callable[..., Any] = minibatch_step
    unravel_update_state: Callable[..., Any] = minibatch.unravel_update_state
    accumulate_gradients: Callable[..., Any] = minibatch.accumulate_gradients
    apply_gradients: Callable[..., Any] = minibatch.apply_gradients
    loss_gradient: Callable[..., Any] = minibatch.loss_gradient
    minibatch_loss: Callable[..., Any] = minibatch.minibatch_loss


EAGER_PARTS = Parts()


def vmap_parts(parts: Parts) -> Parts:
    """The parts for K learners at once: every leaf of `TrainState` and of `Metrics` has a leading axis K.

    `train_step(cfg, world, states, vectorised(parts))` equals `torch.vmap` of the whole step, and each of its parts can
    be compiled. Trajectories are [T, K, B] and minibatches [n, K, M]: `scan` goes along the first axis.
    """

    def over(fn: Callable[..., Any], n_static: int, **dims: Any) -> Callable[..., Any]:
        def part(*args: Any) -> Any:
            out = torch.vmap(partial(fn, *args[:n_static]), **dims)(*args[n_static:])
            return tree.map(lambda x: x.contiguous(), out)  # one layout, so that no second graph is compiled

        return part

    def plan(
        cfg: Config, world: Any, key: I64[Tensor, "K 2"]
    ) -> tuple[I64[Tensor, "K 2"], RandomInputs, MinibatchIndices]:
        key, *ahead = over(parts.sample_randomness, 2)(cfg, world, key)
        draws, minibatches = tree.map(lambda x: x.transpose(0, 1).contiguous(), ahead)
        return key, draws, minibatches

    return dataclasses.replace(
        parts,
        sample_randomness=plan,
        rollout_step=over(parts.rollout_step, 2),
        build_batch=over(parts.build_batch, 2, in_dims=(0, 0, 1, 0)),
        ravel_update_state=over(parts.ravel_update_state, 0),
        minibatch_step=over(parts.minibatch_step, 2),
        unravel_update_state=over(parts.unravel_update_state, 0),
    )


class RolloutResult(NamedTuple):
    """What one update learns from."""

    key: I64[Tensor, "2"]  # of the next update
    rollout_state: RolloutState  # after the rollout
    update_state: UpdateState
    batch: Batch
    scalars: Scalars  # of this update
    minibatches: MinibatchIndices
    metrics: RolloutMetrics


def collect(cfg: Config, world: Any, state: TrainState, parts: Parts = EAGER_PARTS) -> RolloutResult:
    """Draw what is random, act, and estimate advantages."""
    scalars = apply_schedules(cfg, state.update, state.scalars)
    key, draws, minibatches = parts.sample_randomness(cfg, world, state.key)
    act = partial(parts.rollout_step, cfg, world, state.params)
    actor, trajectory = parts.scan(act, RolloutState(state.env_state, state.episode_stats), draws)
    batch, shown = parts.build_batch(cfg, world, state.params, actor.env_state, trajectory, scalars)
    learner = parts.ravel_update_state(state.params, state.opt_state)
    return RolloutResult(key, actor, learner, batch, scalars=scalars, minibatches=minibatches, metrics=shown)


def train_step(cfg: Config, world: Any, state: TrainState, parts: Parts = EAGER_PARTS) -> tuple[TrainState, Metrics]:
    """One update: collect, then learn. Reads and returns; writes nothing."""
    got = collect(cfg, world, state, parts)
    learn = partial(parts.minibatch_step, cfg, world, state.params, got.batch, got.scalars)
    learner, learnt = parts.scan(learn, got.update_state, got.minibatches)
    params, opt_state = parts.unravel_update_state(state.params, learner)
    after = TrainState(
        params=params,
        opt_state=opt_state,
        env_state=got.rollout_state.env_state,
        episode_stats=got.rollout_state.episode_stats,
        key=got.key,
        update=state.update + 1,
        scalars=state.scalars,
    )
    return after, _metrics(got.metrics, learnt, got.scalars)


def _metrics(shown: RolloutMetrics, learnt: MinibatchMetrics, scalars: Scalars) -> Metrics:
    n = learnt.applied.to(learnt.grad_norm.dtype).sum(0)
    mean = lambda x: torch.where(learnt.applied, x, 0.0).sum(0) / n.clamp(min=1.0)
    return Metrics(
        rollout=shown,
        loss=tree.map(mean, learnt.loss),
        grad_norm=mean(learnt.grad_norm),
        n_applied_minibatches=n,
        n_nonfinite_minibatches=(~learnt.all_finite).to(n.dtype).sum(0),
        learning_rate=scalars.learning_rate,
    )
