"""One PPO update as a pure function of the training state, `train_step`:

    train_step = sample_randomness . n_steps x rollout_step . build_batch . (n_epochs * n_minibatches) x minibatch_step

`init` makes the first state. `StepFunctions` names the functions that an update calls, for a runtime that replaces them
by compiled ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any, Generic, NamedTuple, cast

import torch
from torch import Tensor

from funcppo import losses, minibatch, optim, rollout
from funcppo.advantages import Estimate, Steps, estimate_gae, next_values
from funcppo.config import Config
from funcppo.core import random, tree
from funcppo.core.settings import check_kind, reads_scalars_apart
from funcppo.core.types import (
    F32,
    I64,
    Bool,
    Obs,
    Params,
    Scan,
    State,
    check_tensor,
)
from funcppo.interfaces import GatherShards, MaskedObservation, Memory
from funcppo.losses import Batch, LossMetrics, Scalars, Sequence
from funcppo.minibatch import (
    MinibatchIndices,
    MinibatchMetrics,
    Moments,
    ShardedIndices,
    UpdateState,
    minibatch_step,
)
from funcppo.nets import fused_mlp
from funcppo.optim import AdamState
from funcppo.rollout import (
    EpisodeStats,
    RandomInputs,
    RolloutState,
    Transition,
    rollout_step,
)


class TrainState(NamedTuple, Generic[Params, State]):
    """Whole state of training; a run that is saved and restored continues bit for bit."""

    params: Params
    opt_state: AdamState[Params]
    env_state: State
    episode_stats: EpisodeStats
    key: I64[Tensor, "... 2"]  # with several shards one for each
    # Updates made so far, each of one rollout and all its minibatches; `opt_state.step` counts the latter.
    update: I64[Tensor, ""]
    scalars: Scalars  # before their schedules
    # What the network remembers of the episodes that its rows are in; () if it has no memory.
    memory: Memory = ()


class RolloutMetrics(NamedTuple):
    """Episode sums and explained variance of one rollout."""

    # Episodes that ended in it, with finite returns; often 0 if episodes are longer than a rollout.
    n_episodes: F32[Tensor, ""]
    episode_return_sum: F32[Tensor, ""]  # sum of their undiscounted returns
    episode_length_sum: F32[Tensor, ""]  # sum of their lengths, steps
    n_truncated_episodes: F32[Tensor, ""]  # how many of them were truncated
    # Rows that are not learnt from, by their cause.
    n_nonfinite_observations: F32[Tensor, ""]
    n_nonfinite_rewards: F32[Tensor, ""]
    n_empty_masks: F32[Tensor, ""]  # rows without a legal action
    # Share of the variance of the value targets that the values explain, before the update; NaN if all targets are
    # equal. Rows whose value or target is not finite are left out.
    explained_variance: F32[Tensor, ""]


class Metrics(NamedTuple):
    """Measures of one update: of its rollout, its loss and its optimiser steps.

    The loss, its parts and the gradient norm are means over the minibatches that were applied; NaN if none was.
    """

    rollout: RolloutMetrics
    loss: LossMetrics
    grad_norm: F32[Tensor, ""]  # before clipping
    # Minibatches that changed the parameters.
    n_applied_minibatches: F32[Tensor, ""]
    # Minibatches skipped because no row, or the loss, the gradient or the new parameters were not finite.
    n_nonfinite_minibatches: F32[Tensor, ""]
    learning_rate: F32[Tensor, ""]  # in this update


class UpdateRandomness(NamedTuple):
    """All random choices of one update."""

    next_key: I64[Tensor, "2"]  # of the next update
    random_inputs: RandomInputs[Any]  # of the rollout's steps
    minibatches: MinibatchIndices  # which rows each minibatch learns from


class Rollout(NamedTuple):
    """Trajectory of a rollout with its last state, and the random choices of the update that learns from it."""

    next_key: I64[Tensor, "2"]  # of the next update
    minibatches: MinibatchIndices
    rollout_state: RolloutState[Any]  # after the rollout
    trajectory: Transition[Any]


class RolloutResult(NamedTuple):
    """Batch and loop state that one update learns from, and the key and rollout state for the next update."""

    key: I64[Tensor, "2"]  # of the next update
    rollout_state: RolloutState[Any]  # after the rollout
    update_state: UpdateState  # before the first minibatch
    # with several shards a tuple of one for each shard of this process
    batch: Batch[Any]
    scalars: Scalars  # of this update
    # with several shards `ShardedIndices`
    minibatches: MinibatchIndices
    metrics: RolloutMetrics


def init(
    cfg: Config, world: object, key: I64[Tensor, "2"]
) -> TrainState[Any, Any]:
    """Build the training state before the first update.

    Raises:
      TypeError: the key is none of `random.key`; or params, or the state of the environment, are no tree of tensors, or
        params mix dtypes.
      ValueError: the state of the environment has another number of rows than there are environments, or the network
        does not fit the environment's `spec`.
    """
    random.check_key(key)
    next_key, init_key = random.split(key).unbind()
    _, loop_key = random.split(random.split(next_key)[0]).unbind()

    params = cfg.agent.init(cfg.agent.cfg, init_key)
    tree.check_tree(params, "params of the network")
    tree.check_common_dtype(params, "params of the network")
    params = tree.contiguous_copy(params)
    rollout_state = init_rollout(cfg, world, key)
    any_key = random.key(0, key.device)
    rollout.check_step(cfg, world, params, rollout_state, any_key)
    scalars = [
        torch.full((), getattr(cfg.ppo, name), device=key.device)
        for name in losses.SCALARS
    ]
    if cfg.ppo.n_shards > 1:
        loop_key = random.split(loop_key, cfg.ppo.n_shards)
    return TrainState(
        params=params,
        opt_state=optim.init(params),
        env_state=rollout_state.env_state,
        episode_stats=rollout_state.episode_stats,
        key=loop_key,
        update=torch.zeros((), dtype=torch.int64, device=key.device),
        scalars=Scalars(*scalars),
        memory=rollout_state.memory,
    )


def init_rollout(
    cfg: Config, world: object, key: I64[Tensor, "2"]
) -> RolloutState[Any]:
    """Build the first rollout state of all rows, for the key of `init`; each shard from a key of its own.

    Raises:
      TypeError: the environment's state is no tree of tensors.
      ValueError: a tensor of it has another number of rows than there are environments.
    """
    ppo = cfg.ppo
    key = random.split(random.split(key)[0])[1]
    keys = [key] if ppo.n_shards == 1 else random.split(key, ppo.n_shards)
    own = [
        rollout.init_rollout_state(cfg, world, k, ppo.n_envs_per_shard)
        for k in keys
    ]
    return tree.map(lambda *rows: torch.cat(rows), *own)


def apply_schedules(
    cfg: Config, update_index: I64[Tensor, ""], scalars: Scalars
) -> Scalars:
    """Return the scalars of update `update_index`, counted from 0, with the factors of their schedules applied."""
    ppo = cfg.ppo
    names = ("learning_rate", "clip_eps", "entropy_coef")
    factors = [
        optim.schedule_factor(
            getattr(ppo, f"{name}_schedule"),
            update_index,
            ppo.n_updates,
            losses.given(getattr(scalars, f"{name}_schedule_end_factor"), None),
        )
        for name in names
    ]
    scaled = [getattr(scalars, x) * y for x, y in zip(names, factors)]
    return scalars._replace(**dict(zip(names, scaled)))


@reads_scalars_apart
def build_batch(
    cfg: Config,
    world: object,
    params: object,
    env_state: object,
    trajectory: Transition[Obs],
    scalars: Scalars,
    memory: tuple[Memory, Memory] = ((), ()),
    final_value: Callable[..., Tensor] = rollout.estimate_final_value,
) -> tuple[Batch[Any], RolloutMetrics]:
    """Estimate advantages and value targets, and flatten the trajectory to a batch of T * B rows.

    Args:
      env_state: the state after the last transition, finished rows reset.
      memory: of the network, before the first transition and after the last one.
      final_value: how the values of truncated episodes are computed.

    Returns:
      The rows to learn from, and measures of the rollout.
    """
    value = trajectory.value
    memory_before, memory_after = memory
    last_value = rollout.estimate_value(
        cfg, world, params, env_state, memory_after
    )
    next_value = next_values(
        value,
        final_value(cfg, world, params, trajectory),
        last_value,
        trajectory.truncated,
    )

    # Without bootstrapping a truncation counts as a termination.
    done = trajectory.terminated | trajectory.truncated
    terminated = trajectory.terminated if cfg.ppo.bootstrap_truncated else done
    steps = Steps(trajectory, terminated, next_value)
    estimate = (cfg.advantages or estimate_gae)(
        cfg, world, params, steps, scalars
    )
    # What is compiled is called eagerly, too.
    if cfg.advantages is not None and not tree.is_traced():
        _check_estimate(estimate, value)
    advantage, value_target, extras = estimate
    is_finite = _finite_observations(trajectory)
    batch = Batch(
        trajectory.obs,
        trajectory.action,
        # `losses.finite_rows` reads it: a network may return finite numbers for an observation that is not.
        torch.where(is_finite, trajectory.log_prob, torch.nan),
        value,
        advantage.detach(),
        value_target.detach(),
        extras=tree.map(torch.Tensor.detach, extras),
    )

    def total(x: Tensor) -> Tensor:
        return x.to(value.dtype).sum()

    stats = trajectory.episode_stats
    ended = done & stats.total_reward.isfinite()
    moments = _target_moments(value.flatten(), value_target.flatten())
    metrics = RolloutMetrics(
        n_episodes=total(ended),
        episode_return_sum=total(torch.where(ended, stats.total_reward, 0.0)),
        episode_length_sum=total(torch.where(ended, stats.length, 0)),
        n_truncated_episodes=total(trajectory.truncated & ended),
        n_nonfinite_observations=total(~is_finite),
        n_nonfinite_rewards=total(~trajectory.reward.isfinite()),
        n_empty_masks=total(_has_empty_mask(cfg, trajectory)),
        explained_variance=_explained_variance(*moments),
    )
    *rows, _, extras = tree.map(lambda x: x.flatten(0, 1), batch)
    is_recurrent = cfg.agent.initial_memory is not None
    sequence = Sequence(done.flatten(), memory_before) if is_recurrent else ()
    return Batch(*cast(Any, rows), sequence=sequence, extras=extras), metrics


def _check_estimate(estimate: Any, value: F32[Tensor, "T B"]) -> None:
    """Check what an estimator of the user's returns.

    Raises:
      TypeError: it is no `Estimate`, or names a tensor of another shape or dtype.
    """
    name = "advantages"
    check_kind(
        estimate, Estimate, f"{name}: expected an fp.advantages.Estimate"
    )
    numbers = estimate._replace(extras=())
    for path, x in tree.named_leaves(numbers, name):
        check_tensor(x, value.shape, value.dtype, path)
    for path, x in tree.named_leaves(estimate.extras, f"{name}.extras"):
        check_kind(x, Tensor, f"{path}: expected a tensor")
        rows = [*value.shape, *x.shape[value.ndim :]]
        check_tensor(x, rows, x.dtype, path)


def _target_moments(
    value: F32[Tensor, "TB"], target: F32[Tensor, "TB"]
) -> tuple[Moments, Moments]:
    """Compute the moments of targets less values, and of targets, over rows where both are finite."""
    residual = target - value
    moments_of = partial(minibatch.masked_moments, residual.isfinite())
    return moments_of(residual), moments_of(target)


def _explained_variance(residual: Moments, target: Moments) -> F32[Tensor, ""]:
    return 1 - residual.square_sum / target.square_sum


def _finite_observations(trajectory: Transition[Any]) -> Bool[Tensor, "T B"]:
    """Return which observations hold no NaN and no infinity."""
    reward = trajectory.reward
    is_finite = torch.ones_like(reward, dtype=torch.bool)
    for x in tree.leaves(trajectory.obs):
        if x.is_floating_point():
            by_row = x.isfinite().reshape(*reward.shape, -1).all(-1)
            is_finite = is_finite & by_row
    return is_finite


def _has_empty_mask(cfg: Config, trajectory: Transition[Any]) -> Tensor:
    """Return which observations have a mask that leaves no legal action, or none of one of several actions."""
    if not isinstance(trajectory.obs, MaskedObservation):
        return torch.zeros_like(trajectory.terminated)
    mask, spec = trajectory.obs.action_mask, cfg.env.spec
    sizes = spec.action_sizes if spec is not None else None
    parts = torch.split(mask, list(sizes or mask.shape[-1:]), -1)
    return torch.stack([~part.any(-1) for part in parts]).any(0)


@reads_scalars_apart
def sample_randomness(
    cfg: Config, world: object, key: I64[Tensor, "2"]
) -> UpdateRandomness:
    """Sample all random choices of one update: keys and resets of its rollout, and the order of its rows."""
    ppo = cfg.ppo
    next_key, rollout_key, order_key = random.split(key, 3).unbind()

    keys = rollout.rollout_keys(
        rollout_key,
        ppo.n_steps,
        ppo.n_envs_per_shard,
        cfg.agent.action_key_steps,
    )
    random_inputs = rollout.sample_random_inputs(cfg.env, world, *keys)

    # Each epoch goes through all rows in an order of its own: [n_epochs, TB], cut into minibatches [n_minibatches, MB].
    # A network with memory goes through all environments, and learns from each as a whole.
    n_minibatches = ppo.n_epochs * ppo.n_minibatches
    is_recurrent = cfg.agent.initial_memory is not None
    n_envs = ppo.n_envs_per_shard
    n_rows = n_envs if is_recurrent else n_envs * ppo.n_steps
    order = random.permutation(random.split(order_key, ppo.n_epochs), n_rows)
    rows = order.view(n_minibatches, -1)
    if is_recurrent:
        rows = minibatch.rows_of_environments(cfg, rows)

    minibatch_index = torch.arange(n_minibatches, device=key.device)
    minibatches = MinibatchIndices(
        rows=rows,
        ends_epoch=(minibatch_index + 1) % ppo.n_minibatches == 0,
    )
    return UpdateRandomness(next_key, random_inputs, minibatches)


RolloutStepFn = Callable[..., tuple[RolloutState[Any], Transition[Any]]]
BuildBatchFn = Callable[..., tuple[Batch[Any], RolloutMetrics]]
MinibatchStepFn = Callable[..., tuple[UpdateState, MinibatchMetrics]]


_build_batch_by_kernels: BuildBatchFn = partial(
    build_batch, final_value=fused_mlp.final_value
)
_minibatch_step_by_kernels: MinibatchStepFn = partial(
    minibatch_step, gradient_fn=fused_mlp.loss_gradient
)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelFunctions:
    """Functions that run a network as kernels; a runtime may substitute them for those of `StepFunctions`.

    `actor_step` is a rollout step without the critic's values, and `values` computes those of a whole rollout.
    `reason_against` the settings says why their network cannot be computed by kernels; it is empty if it can.
    """

    rollout_step: RolloutStepFn = fused_mlp.rollout_step
    actor_step: RolloutStepFn = fused_mlp.actor_step
    values: Callable[..., Tensor] = fused_mlp.values
    build_batch: BuildBatchFn = _build_batch_by_kernels
    minibatch_step: MinibatchStepFn = _minibatch_step_by_kernels
    reason_against: Callable[[Config], str] = fused_mlp.reason_against


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFunctions:
    """Functions that make up `train_step`; a runtime may replace them by compiled ones.

    `train_step` calls them in the order in which they stand, but for the loop `scan`, which runs `rollout_step`, by
    `unroll`, and later `minibatch_step`. It calls none of the last two: a runtime that cannot compile `minibatch_step`
    as a whole compiles `minibatch_loss`, and on a GPU it may use `kernels`.
    """

    scan: Scan = tree.scan
    sample_randomness: Callable[..., UpdateRandomness] = sample_randomness
    rollout_step: RolloutStepFn = rollout_step
    unroll: RolloutStepFn = rollout.unroll
    build_batch: BuildBatchFn = build_batch
    minibatch_step: MinibatchStepFn = minibatch_step
    minibatch_loss: Callable[..., tuple[Tensor, LossMetrics]] = (
        minibatch.minibatch_loss
    )
    kernels: KernelFunctions = KernelFunctions()


EAGER_PARTS = StepFunctions()


def collect(
    cfg: Config,
    world: object,
    state: TrainState[Params, State],
    parts: StepFunctions = EAGER_PARTS,
    rollout_data: Rollout | None = None,
) -> RolloutResult:
    """Sample the random choices, roll out and estimate advantages: the first half of `train_step`."""
    if cfg.ppo.n_shards == 1:
        made = rollout_data or roll_out(cfg, world, state, parts)
        return _prepare(cfg, world, state, made, parts)

    # Each shard by itself, then what all of them must know of each.
    own = [
        _prepare(cfg, world, shard, roll_out(cfg, world, shard, parts), parts)
        for shard in _shards(state)
    ]
    moments = [_shard_moments(shard) for shard in own]
    metrics, advantage = _merge_shards(minibatch.gather(cfg, moments))

    minibatches = ShardedIndices(
        rows=torch.stack([shard.minibatches.rows for shard in own], 1),
        ends_epoch=own[0].minibatches.ends_epoch,
        advantage=advantage,
    )
    states = [shard.rollout_state for shard in own]
    return own[0]._replace(
        key=torch.stack([shard.key for shard in own]),
        rollout_state=tree.map(lambda *rows: torch.cat(rows), *states),
        batch=cast(Any, tuple(shard.batch for shard in own)),
        minibatches=cast(Any, minibatches),
        metrics=metrics,
    )


def _shards(
    state: TrainState[Params, State],
) -> list[TrainState[Params, State]]:
    """Split a state into the states of its shards, each with a single key.

    Raises:
      ValueError: the key is not one for each shard.
    """
    if state.key.ndim != 2:
        raise ValueError(
            f"n_shards: expected a state with one key for each shard, got keys {list(state.key.shape)}; "
            "`vmap_parts` is for 1 shard"
        )
    n = state.key.shape[0]
    shards_of_state = [take_shards(state, i, n) for i in range(n)]
    return [shard._replace(key=shard.key[0]) for shard in shards_of_state]


def take_shards(
    state: TrainState[Params, State], index: int, n: int
) -> TrainState[Params, State]:
    """Return share `index` of `n` equal shares of a state's shards: their rows and keys."""
    # Copied: at an address of its own a tensor is computed with alike, whatever lies beside it.
    return _map_rows(lambda x: x.chunk(n)[index].clone(), state)


def gather_shards(
    state: TrainState[Params, State], gather: GatherShards
) -> TrainState[Params, State]:
    """Return the state with the shards of all processes, given the state with this process's shards.

    Args:
      gather: the rows of all processes from those of this one.
    """
    return _map_rows(gather, state)


def _map_rows(
    fn: Callable[[Tensor], Tensor], state: TrainState[Params, State]
) -> TrainState[Params, State]:
    """Apply a function to the leaves of a state that belong to shards: environments, statistics and keys."""
    rows = (state.env_state, state.episode_stats, state.key)
    env_state, episode_stats, key = tree.map(fn, rows)
    return state._replace(
        env_state=env_state, episode_stats=episode_stats, key=key
    )


# The metrics of a rollout, and the moments of its value targets less values, of its
# value targets, and of the advantages of each minibatch.
_ShardMoments = tuple[RolloutMetrics, Moments, Moments, Moments]


def _shard_moments(shard: RolloutResult) -> _ShardMoments:
    """Compute the rollout metrics and moments of one shard that all shards must share."""
    batch = shard.batch
    advantage = batch.advantage[shard.minibatches.rows]
    return (
        shard.metrics,
        *_target_moments(batch.value, batch.value_target),
        minibatch.masked_moments(torch.isfinite(advantage), advantage),
    )


def _merge_shards(
    all_shards: list[_ShardMoments],
) -> tuple[RolloutMetrics, Moments]:
    """Merge the rollout metrics of all shards, and the moments of the advantages of each minibatch."""
    metrics, *moments = zip(*all_shards)
    *targets, advantage = map(minibatch.merge_moments, moments)
    sums = minibatch.sum_in_order(metrics)[:-1]
    return RolloutMetrics(
        *sums, explained_variance=_explained_variance(*targets)
    ), advantage


def roll_out(
    cfg: Config,
    world: object,
    state: TrainState[Params, State],
    parts: StepFunctions = EAGER_PARTS,
) -> Rollout:
    """Sample the random choices of an update and roll out: the part of `train_step` that steps environments."""
    randomness = parts.sample_randomness(cfg, world, state.key)
    first = RolloutState(state.env_state, state.episode_stats, state.memory)
    rollout_state, trajectory = parts.unroll(
        cfg,
        world,
        state.params,
        first,
        randomness.random_inputs,
        parts.scan,
        parts.rollout_step,
    )
    return Rollout(
        randomness.next_key, randomness.minibatches, rollout_state, trajectory
    )


def _prepare(
    cfg: Config,
    world: object,
    state: TrainState[Params, State],
    rollout_data: Rollout,
    parts: StepFunctions,
) -> RolloutResult:
    """Build the batch of a rollout, with its advantages, and the state of the loop over minibatches."""
    scalars = apply_schedules(cfg, state.update, state.scalars)
    rollout_state = rollout_data.rollout_state
    batch, metrics = parts.build_batch(
        cfg,
        world,
        state.params,
        rollout_state.env_state,
        rollout_data.trajectory,
        scalars,
        (state.memory, rollout_state.memory),
    )

    return RolloutResult(
        key=rollout_data.next_key,
        rollout_state=rollout_state,
        update_state=minibatch.ravel_update_state(
            state.params, state.opt_state
        ),
        batch=batch,
        scalars=scalars,
        minibatches=rollout_data.minibatches,
        metrics=metrics,
    )


def train_step(
    cfg: Config,
    world: object,
    state: TrainState[Params, State],
    parts: StepFunctions = EAGER_PARTS,
    rollout_data: Rollout | None = None,
) -> tuple[TrainState[Params, State], Metrics]:
    """Make one update: collect a rollout, then learn from it. Return the next state and metrics; write to no argument.

    Args:
      world: tensors of the environment that no step changes; `NoWorld()` if there are none.
      parts: the functions to use, eager or compiled.
      rollout_data: of `roll_out`, from the same state, to learn from; None: it is made.

    Returns:
      The state after the update, and its metrics.
    """
    collected = collect(cfg, world, state, parts, rollout_data)
    step = partial(
        parts.minibatch_step,
        cfg,
        world,
        state.params,
        collected.batch,
        collected.scalars,
    )
    update_state, minibatch_metrics = parts.scan(
        step, collected.update_state, collected.minibatches
    )

    params, opt_state = minibatch.unravel_update_state(
        state.params, update_state
    )
    env_state, episode_stats, memory = collected.rollout_state
    next_state = TrainState(
        params=params,
        opt_state=opt_state,
        env_state=env_state,
        episode_stats=episode_stats,
        key=collected.key,
        update=state.update + 1,
        scalars=state.scalars,
        memory=memory,
    )
    return next_state, _update_metrics(collected, minibatch_metrics)


def _update_metrics(
    collected: RolloutResult, minibatches: MinibatchMetrics
) -> Metrics:
    """Compute the metrics of an update from those of its rollout and of all its minibatches."""
    is_applied = minibatches.is_applied
    dtype = minibatches.grad_norm.dtype
    n_applied = is_applied.to(dtype).sum(0)

    def mean_over_applied(x: Tensor) -> Tensor:
        # 0 / 0 = NaN if no minibatch was applied: a loss of 0 would look like one that has converged.
        return torch.where(is_applied, x, 0.0).sum(0) / n_applied

    return Metrics(
        rollout=collected.metrics,
        loss=tree.map(mean_over_applied, minibatches.loss),
        grad_norm=mean_over_applied(minibatches.grad_norm),
        n_applied_minibatches=n_applied,
        n_nonfinite_minibatches=(~minibatches.is_finite).to(dtype).sum(0),
        learning_rate=collected.scalars.learning_rate,
    )


def _vmap_part(
    fn: Callable[..., Any],
    n_static: int,
    in_dims: int | tuple[int, ...] = 0,
    out_dim: int = 0,
) -> Callable[..., Any]:
    """Return `fn` under vmap over all but its first `n_static` arguments; `inspect.unwrap` of the result gives `fn`.

    No closure, because the compiled code of one is not found again by a later process.
    """
    return update_wrapper(
        partial(_call_for_each, fn, n_static, in_dims, out_dim), fn
    )


@reads_scalars_apart
def _call_for_each(
    fn: Callable[..., Any],
    n_static: int,
    in_dims: int | tuple[int, ...],
    out_dim: int,
    *args: Any,
) -> Any:
    """Call `fn` under vmap over all but its first `n_static` arguments; return contiguous results."""
    vmapped = torch.vmap(partial(fn, *args[:n_static]), in_dims, out_dim)
    # One memory layout for all outputs, to avoid a recompilation.
    return tree.map(lambda x: x.contiguous(), vmapped(*args[n_static:]))


@reads_scalars_apart
def _sample_for_each(
    sample_randomness: Callable[..., UpdateRandomness],
    cfg: Config,
    world: object,
    key: I64[Tensor, "L 2"],
) -> UpdateRandomness:
    """Sample the random choices of L learners: inputs [T, L, ...] and minibatch indices [n, L, ...]."""
    randomness = sample_randomness(cfg, world, key)
    random_inputs, minibatches = tree.map(
        lambda x: x.transpose(0, 1).contiguous(),
        (randomness.random_inputs, randomness.minibatches),
    )
    return UpdateRandomness(randomness.next_key, random_inputs, minibatches)


def vmap_parts(parts: StepFunctions) -> StepFunctions:
    """Return the step functions for L learners at once: each leaf of `TrainState` and `Metrics` has a leading axis L.

    `train_step(cfg, world, states, vmap_parts(parts))` equals `torch.vmap` of the whole step, and each of its parts can
    be compiled. Trajectories are [T, L, B] and minibatches [n, L, MB]: `scan` goes along the first axis.
    """
    vmap = partial(_vmap_part, n_static=2)

    def vmap_shared(
        functions: StepFunctions | KernelFunctions,
    ) -> dict[str, Any]:
        return {
            "rollout_step": vmap(functions.rollout_step),
            "build_batch": vmap(functions.build_batch, in_dims=(0, 0, 1, 0, 0)),
            "minibatch_step": vmap(functions.minibatch_step),
        }

    kernels = dataclasses.replace(
        parts.kernels,
        actor_step=vmap(parts.kernels.actor_step),
        values=vmap(parts.kernels.values, in_dims=(0, 1), out_dim=1),
        **vmap_shared(parts.kernels),
    )
    sample = partial(_sample_for_each, vmap(parts.sample_randomness))
    return dataclasses.replace(
        parts,
        sample_randomness=update_wrapper(sample, parts.sample_randomness),
        kernels=kernels,
        **vmap_shared(parts),
    )
