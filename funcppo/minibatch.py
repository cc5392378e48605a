"""The parts of a step of learning on one minibatch: forward, loss, backward, clipping and Adam.

Parameters and moments are flat vectors here (`UpdateState`): the optimizer is then a few kernels, however many leaves
the parameters have. `minibatch_step` composes the step.

Shards: PPO over parts of the environments that are computed one by one and combined in a fixed order.

Each of the `n_shards` shards has an equal share of the environments, a key, and an order of its rows. A minibatch is
the union of the shards' minibatches; its gradient is the mean of theirs, weighted by the rows that they learn from and
summed in the order of the shards. A process may hold all shards, or some: no shard is computed otherwise beside others,
and what is gathered of all is the same everywhere (`Config.gather_shards`). So the number of processes changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.func import grad, grad_and_value

from funcppo import losses, optim
from funcppo.config import AdamConfig, Config
from funcppo.core import tree
from funcppo.core.settings import reads_scalars_apart
from funcppo.core.tree import is_eager, keeps_loops, scan
from funcppo.core.types import F32, I64, Bool, Obs, Params, Scan, Tree
from funcppo.losses import (
    Batch,
    LossMetrics,
    Scalars,
    finite_rows,
    minibatch_loss_fn,
    normalize_advantages,
)
from funcppo.optim import AdamState
from funcppo.rollout import adjoints, next_memories, step_memories


class UpdateState(NamedTuple):
    """Carry of the loop over an update's minibatches; parameters and moments are raveled to vectors."""

    flat_params: F32[Tensor, "NP"]
    opt_state: AdamState[Tensor]
    # False once the KL limit has stopped this update.
    continue_update: Bool[Tensor, ""]
    # The moments before the update hold no NaN and no infinity. Then no step makes one.
    has_finite_moments: Bool[Tensor, ""]


class MinibatchIndices(NamedTuple):
    """Row indices of all minibatches of all epochs of an update; without the first axis, of one minibatch."""

    rows: I64[Tensor, "... MB"]  # indices into the batch
    ends_epoch: Bool[Tensor, "..."]  # the last minibatch of an epoch


class MinibatchMetrics(NamedTuple):
    """Loss metrics, gradient norm and flags of one minibatch."""

    loss: LossMetrics
    grad_norm: F32[Tensor, ""]  # before clipping
    is_applied: Bool[Tensor, ""]  # the optimizer step was applied
    # Some row is finite, and neither loss nor gradient nor moments nor learning rate hold a NaN or an infinity;
    # otherwise nothing is applied.
    is_finite: Bool[Tensor, ""]


# The gradient of the loss over some rows of a batch, as `loss_gradient`.
GradientFn: TypeAlias = Callable[..., tuple[Any, LossMetrics]]


def ravel_update_state(
    params: Params, opt_state: AdamState[Params]
) -> UpdateState:
    """Build the loop's state before the first minibatch, with vectors [NP], or [L, NP] for L stacked learners."""
    step, *trees = opt_state
    ravel = partial(tree.ravel, n_axes=step.ndim)
    mu, nu = map(ravel, trees)
    return UpdateState(
        flat_params=ravel(params),
        opt_state=AdamState(step, mu, nu),
        continue_update=torch.ones_like(step, dtype=torch.bool),
        has_finite_moments=_has_finite_moments(mu, nu),
    )


def _has_finite_moments(mu: Tensor, nu: Tensor) -> Bool[Tensor, "..."]:
    # One pass over memory each: a NaN is the largest and the smallest number, and compares as False.
    is_finite = (_max_norm(mu) < torch.inf) & (_max_norm(nu) < torch.inf)
    return is_finite & (nu.amin(-1) >= 0)


def _max_norm(x: Tensor) -> F32[Tensor, "..."]:
    norm = torch.linalg.vector_norm(x, torch.inf, -1)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return cast(Tensor, norm)


def unravel_update_state(
    params_like: Params, update_state: UpdateState
) -> tuple[Params, AdamState[Params]]:
    """Return parameters and Adam state as trees; the inverse of `ravel_update_state`.

    Args:
      params_like: a tree with the structure and shapes of the parameters.

    Returns:
      Parameters and optimizer state as trees; the leaves of a single learner are views of the vectors.
    """
    step, *moments = update_state.opt_state
    params, mu, nu = (
        # One memory layout for all learners, to avoid a recompilation.
        tree.map(torch.Tensor.contiguous, tree.unravel(params_like, flat))
        for flat in (update_state.flat_params, *moments)
    )
    return params, AdamState(step, mu, nu)


@reads_scalars_apart
def minibatch_loss(
    cfg: Config,
    world: object,
    params: object,
    batch: Batch[Obs],
    rows: I64[Tensor, "MB"],
    scalars: Scalars,
) -> tuple[F32[Tensor, ""], LossMetrics]:
    """Compute the loss over the given rows of a batch, and its metrics."""
    minibatch = select_rows(cfg, batch, rows)
    return minibatch_loss_fn(cfg, world, params, minibatch, scalars)


def rows_of_environments(
    cfg: Config, environments: I64[Tensor, "... B"]
) -> I64[Tensor, "... TB"]:
    """Return the batch rows t * n_envs + b of the given environments b, in time-major order."""
    step = torch.arange(cfg.ppo.n_steps, device=environments.device)
    rows = step[:, None] * cfg.ppo.n_envs + environments[..., None, :]
    return rows.flatten(-2)


def select_rows(
    cfg: Config, batch: Batch[Obs], rows: I64[Tensor, "MB"]
) -> Batch[Obs]:
    """Return the given rows of a batch; with memory, rows of whole environments (`rows_of_environments`)."""
    selected = tree.map(lambda x: x[rows], batch._replace(sequence=()))
    if not isinstance(batch.sequence, losses.Sequence):
        return selected

    done, memory = batch.sequence
    # the rows of the first step, which number the environments
    environments = rows[: rows.shape[0] // cfg.ppo.n_steps]
    memory = tree.map(lambda x: x[environments], memory)
    return selected._replace(sequence=losses.Sequence(done[rows], memory))


def split_rows(
    cfg: Config, rows: I64[Tensor, "MB"]
) -> I64[Tensor, "n_microbatches MB"]:
    """Split a minibatch's rows into microbatches [n_microbatches, MB]; with memory, each holds whole environments."""
    n_microbatches = cfg.ppo.n_microbatches
    if cfg.agent.initial_memory is None:
        return rows.view(n_microbatches, -1)
    by_step = rows.view(cfg.ppo.n_steps, n_microbatches, -1)
    return by_step.transpose(0, 1).flatten(1)


@reads_scalars_apart
def loss_gradient(
    cfg: Config,
    world: object,
    params: Params,
    batch: Batch[Obs],
    rows: I64[Tensor, "MB"],
    scalars: Scalars,
) -> tuple[Params, LossMetrics]:
    """Compute the gradient of the loss over the given rows of a batch, and the loss metrics."""
    if isinstance(batch.sequence, losses.Sequence) and keeps_loops():
        sequences = select_rows(cfg, batch, rows)
        return sequence_gradient(cfg, world, params, sequences, scalars)

    def loss(params: Params) -> tuple[Tensor, LossMetrics]:
        return minibatch_loss(cfg, world, params, batch, rows, scalars)

    if is_eager():
        grads, (_, metrics) = tree.grad_and_value(loss, params)
        return grads, metrics
    grads, (_, metrics) = grad_and_value(loss, has_aux=True)(params)
    return cast(Params, grads), cast(LossMetrics, metrics)


def sequence_gradient(
    cfg: Config,
    world: object,
    params: Params,
    batch: Batch[Obs],
    scalars: Scalars,
    scan: Scan | None = None,
) -> tuple[Params, LossMetrics]:
    """Compute `loss_gradient` for a network with memory, over whole environments, by two loops over the steps.

    The loss is differentiated in the memory before every step, as if each were given; `rollout.adjoints` carries that
    through the steps before. Automatic differentiation in place of the second loop would need the first one unrolled.

    Args:
      scan: as that of `rollout.step_memories`.
    """
    agent = cfg.update_agent or cfg.agent
    assert isinstance(batch.sequence, losses.Sequence)
    # As `loss_fn` reads them: a bad number is 0.
    rows, memory = tree.map(
        losses.zero_if_bad, (batch.obs, batch.sequence.memory)
    )
    n_steps = cfg.ppo.n_steps
    obs, done = tree.map(
        lambda x: x.view(n_steps, -1, *x.shape[1:]), (rows, batch.sequence.done)
    )
    memories = step_memories(agent, world, params, obs, done, memory, scan)

    def loss(
        params: Params, memory_leaves: list[Tensor]
    ) -> tuple[Tensor, LossMetrics]:
        sequence = losses.Sequence(
            done.flatten(), memories.with_floating_leaves(memory_leaves)
        )
        return minibatch_loss_fn(
            cfg, world, params, batch._replace(sequence=sequence), scalars
        )

    given = memories.floating_leaves()
    of_next: list[Tensor] = []
    if given:
        memory_grads, _ = grad(partial(loss, params), has_aux=True)(given)
        of_next = adjoints(
            agent, world, params, obs, done, memories, memory_grads, scan
        )

    # As the loss reads them, so that what it computes is not computed again.
    read = tree.map(losses.zero_if_bad, memories)

    def loss_through_time(params: Params) -> tuple[Tensor, LossMetrics]:
        value, metrics = loss(params, given)
        after = next_memories(agent, world, params, obs, done, read)
        for memory, of_memory in zip(after, of_next):
            value = value + (memory * of_memory).sum()
        return value, metrics

    grads, metrics = grad(loss_through_time, has_aux=True)(params)
    return cast(Params, grads), cast(LossMetrics, metrics)


@reads_scalars_apart
def accumulate_gradients(
    cfg: Config,
    world: object,
    params: Params,
    batch: Batch[Obs],
    rows: I64[Tensor, "MB"],
    scalars: Scalars,
    gradient_fn: GradientFn = loss_gradient,
    scan: Scan = scan,
) -> tuple[Params, LossMetrics]:
    """Compute the gradient of the loss over a minibatch, microbatch by microbatch, and the mean loss metrics.

    Args:
      gradient_fn: the gradient over the rows of one microbatch.
      scan: the loop over microbatches.

    Returns:
      The mean of the microbatches' gradients, and the mean of their metrics.
    """
    ppo = cfg.ppo
    if ppo.n_microbatches == 1:
        return gradient_fn(cfg, world, params, batch, rows, scalars)

    # Normalise advantages over the whole minibatch first: a microbatch has another mean and deviation. They go back to
    # their rows, because microbatches index the whole batch, as `rows` does.
    advantage = normalize_advantages(ppo, batch.advantage[rows])
    batch = batch._replace(
        advantage=batch.advantage.scatter(0, rows, advantage)
    )

    def add_gradient(
        grad_sum: Params, microbatch_rows: I64[Tensor, "MB"]
    ) -> tuple[Params, LossMetrics]:
        grads, metrics = gradient_fn(
            cfg, world, params, batch, microbatch_rows, scalars
        )
        return tree.map(torch.add, grad_sum, grads), metrics

    grad_sum, metrics = scan(
        add_gradient, tree.zeros_like(params), split_rows(cfg, rows)
    )
    mean_grads = tree.map(lambda x: x / ppo.n_microbatches, grad_sum)
    mean_metrics = tree.map(lambda x: x.mean(0), metrics)
    return mean_grads, mean_metrics


@reads_scalars_apart
def apply_gradients(
    cfg: Config,
    update_state: UpdateState,
    grads: object,
    loss_metrics: LossMetrics,
    ends_epoch: Bool[Tensor, ""],
    scalars: Scalars,
    adam_update: Callable[..., tuple[Any, AdamState[Any]]] = optim.update,
) -> tuple[UpdateState, MinibatchMetrics]:
    """Make one step of Adam on clipped gradients; return the next loop state and the minibatch metrics.

    Nothing changes if the loss, the gradient, a moment or the learning rate is not finite, nor once the KL limit has
    stopped the update: a compiled update does the same work whatever happens, so the minibatches after the stop are
    computed and discarded. A single number that the step would take out of range stays as it is.

    The KL estimate compared with `target_kl` is this minibatch's, of the parameters before its step.

    Args:
      grads: a tree of the structure of the parameters, or their flat vector.
      loss_metrics: of the minibatch that the gradients are of.
      ends_epoch: the minibatch is the last one of its epoch.
      adam_update: the step of Adam on flat vectors.

    Returns:
      The state for the next minibatch, and the metrics of this one.
    """
    ppo = cfg.ppo
    flat_grads, grad_norm = optim.clip_by_global_norm(
        tree.ravel(grads), scalars.max_grad_norm
    )
    stepped = adam_update(
        _adam_settings(ppo.adam, scalars),
        flat_grads,
        update_state.opt_state,
        update_state.flat_params,
        scalars.learning_rate,
    )

    is_finite = (
        torch.isfinite(loss_metrics.loss)
        & torch.isfinite(grad_norm)
        & (loss_metrics.nonfinite_fraction < 1)
        & torch.isfinite(scalars.learning_rate)
        & ~torch.isnan(scalars.max_grad_norm)
        & update_state.has_finite_moments
    )
    continue_update = update_state.continue_update
    is_applied = continue_update & is_finite
    target_kl = losses.given(scalars.target_kl, ppo.target_kl)
    if target_kl is not None:
        exceeds_kl = loss_metrics.approx_kl > target_kl
        if ppo.kl_stop == "epoch":
            # The last minibatch of the epoch is applied, the next epoch is not.
            continue_update = continue_update & ~(exceeds_kl & ends_epoch)
        else:
            continue_update = continue_update & ~exceeds_kl
            is_applied = is_applied & ~exceeds_kl

    # A number that the step takes out of range stays. Everything else is checked
    # before the step: a sum over its result would be one more pass over memory.
    # The moments are checked before the update: with a finite gradient a step
    # keeps them finite, with another it keeps them as they are.
    unchanged = (update_state.flat_params, update_state.opt_state)
    params, opt_state = tree.map(
        lambda new, old: torch.where(
            is_applied & torch.isfinite(new), new, old
        ),
        stepped,
        unchanged,
    )
    metrics = MinibatchMetrics(
        loss_metrics, grad_norm, is_applied=is_applied, is_finite=is_finite
    )
    # Dynamo of PyTorch 2.11 cannot return what `_replace` makes.
    next_state = UpdateState(
        params, opt_state, continue_update, update_state.has_finite_moments
    )
    return next_state, metrics


def _adam_settings(adam: AdamConfig, scalars: Scalars) -> optim.AdamScalars:
    """Return the settings of Adam, with the numbers that learners differ in as tensors."""
    names = ("b1", "b2", "eps", "weight_decay")
    b1, b2, eps, weight_decay = [
        losses.given(getattr(scalars, f"adam_{name}"), getattr(adam, name))
        for name in names
    ]
    return optim.AdamScalars(
        b1, b2, eps, weight_decay, adam.decoupled_weight_decay
    )


class Moments(NamedTuple):
    """Count, mean and sum of squared differences from the mean, of a set of numbers."""

    n: F32[Tensor, "..."]
    mean: F32[Tensor, "..."]
    square_sum: F32[Tensor, "..."]


class ShardedIndices(NamedTuple):
    """Row indices of all minibatches of an update, for several shards; without the first axis, of one minibatch."""

    # indices into the batch of each shard that this process holds
    rows: I64[Tensor, "... K MB"]
    ends_epoch: Bool[Tensor, "..."]  # the last minibatch of an epoch
    advantage: Moments  # of the minibatch's advantages in all shards


def gather(cfg: Config, own: Sequence[Tree]) -> list[Tree]:
    """Return the trees of all shards of all processes, in the order of shards.

    Args:
      own: the trees of the shards that this process holds, of floating-point tensors.

    Raises:
      ValueError: this process, and those that it gathers from, hold another number of shards than `n_shards`.
    """
    table = torch.stack([tree.ravel(shard) for shard in own])
    if cfg.gather_shards is not None:
        table = cfg.gather_shards(table)
    if len(table) != cfg.ppo.n_shards:
        raise ValueError(
            f"state: expected {cfg.ppo.n_shards} shards in all processes together, got {len(table)}"
        )

    def as_own(x: Tensor, like: Tensor) -> Tensor:
        return x.to(like.dtype)

    like = own[0]
    rows = table.unbind()
    return [tree.map(as_own, tree.unravel(like, row), like) for row in rows]


def sum_in_order(terms: Sequence[Tree]) -> Tree:
    """Sum trees leaf by leaf as ((a + b) + c) + ..., so that the bits do not depend on the number of processes."""
    total = terms[0]
    for term in terms[1:]:
        total = tree.map(torch.add, total, term)
    return total


def masked_moments(
    mask: Bool[Tensor, "... N"], x: F32[Tensor, "... N"]
) -> Moments:
    """Compute the moments of the masked numbers along the last axis; mean 0 where the mask is empty."""
    n = mask.to(x.dtype).sum(-1)
    mean = torch.where(mask, x, 0.0).sum(-1) / n.clamp_min(1.0)
    squares = torch.where(mask, x - mean[..., None], 0.0) ** 2
    return Moments(n, mean, squares.sum(-1))


def merge_moments(shards: Sequence[Moments]) -> Moments:
    """Merge the moments of all shards into the moments of all their numbers together.

    Source: Chan, Golub & LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """
    n = sum_in_order([shard.n for shard in shards])
    total = sum_in_order([shard.n * shard.mean for shard in shards])
    mean = total / n.clamp_min(1.0)
    square_sums = [
        shard.square_sum + shard.n * (shard.mean - mean) ** 2
        for shard in shards
    ]
    return Moments(n, mean, sum_in_order(square_sums))


@reads_scalars_apart
def minibatch_step(
    cfg: Config,
    world: object,
    params_like: object,
    batch: Any,
    scalars: Scalars,
    update_state: UpdateState,
    indices: Any,
    gradient_fn: GradientFn = loss_gradient,
    adam_update: Callable[..., Any] = optim.update,
) -> tuple[UpdateState, MinibatchMetrics]:
    """Train on one minibatch: forward, loss, backward, clipping and Adam; return the next loop state and metrics.

    Args:
      params_like: a tree with the structure and shapes of the parameters; its numbers are not read.
      batch: with several shards a tuple of one `Batch` for each shard that this process holds.
      indices: `MinibatchIndices`; with several shards `ShardedIndices`.
      gradient_fn: the gradient over some rows of a batch.
      adam_update: the step of Adam on flat vectors.

    Returns:
      The state for the next minibatch, and the metrics of this one.
    """
    accumulate: Any = accumulate_gradients
    if cfg.ppo.n_shards > 1:
        batch = tuple(
            [_normalize(cfg, indices.advantage, shard) for shard in batch]
        )
        accumulate = _accumulate_over_shards
    params = tree.unravel(params_like, update_state.flat_params)
    grads, loss_metrics = accumulate(
        cfg, world, params, batch, indices.rows, scalars, gradient_fn
    )
    return apply_gradients(
        cfg,
        update_state,
        grads,
        loss_metrics,
        indices.ends_epoch,
        scalars,
        adam_update,
    )


def _normalize(cfg: Config, moments: Moments, batch: Batch[Obs]) -> Batch[Obs]:
    """Normalise a shard's advantages like `losses.normalize_advantages`, by given moments over all shards."""
    ddof = cfg.ppo.advantage_ddof
    if ddof is None:
        return batch
    advantage = losses.standardize(batch.advantage, *moments, ddof)
    return batch._replace(advantage=advantage)


def _accumulate_over_shards(
    cfg: Config,
    world: object,
    params: object,
    batches: Sequence[Batch[Obs]],
    rows: I64[Tensor, "K MB"],
    scalars: Scalars,
    gradient_fn: GradientFn,
) -> tuple[Tensor, LossMetrics]:
    """Compute the raveled gradient of the loss over a minibatch of all shards, and its metrics.

    The loss is a mean over rows, so that its derivative is the mean of the shards', weighted by the rows that count.
    Fractions are of all rows, which are as many in each shard.
    """
    own: list[Any] = []
    for batch, shard_rows in zip(batches, rows.unbind()):
        grads, metrics = accumulate_gradients(
            cfg, world, params, batch, shard_rows, scalars, gradient_fn
        )
        n_counted = _count_rows(cfg, batch, shard_rows)
        sums = _scale((tree.ravel(grads), metrics), n_counted)
        fractions = (metrics.dropped_fraction, metrics.nonfinite_fraction)
        own.append((sums, fractions, n_counted))

    sums, fractions, n_counted = sum_in_order(gather(cfg, own))
    flat_grads, mean = _scale(sums, 1.0 / n_counted.clamp_min(1.0))
    dropped, nonfinite = _scale(fractions, 1.0 / cfg.ppo.n_shards)
    # Dynamo of PyTorch 2.11 cannot return a tuple that `_replace` made.
    return flat_grads, LossMetrics(
        *mean[:6],
        dropped_fraction=dropped,
        nonfinite_fraction=nonfinite,
        extra=mean.extra,
    )


def _scale(x: Tree, factor: Tensor | float) -> Tree:
    return tree.map(lambda leaf: leaf * factor, x)


def _count_rows(
    cfg: Config, batch: Batch[Obs], rows: I64[Tensor, "MB"]
) -> F32[Tensor, ""]:
    """Count the rows of a shard that the loss averages over: see `losses.loss_fn`."""
    agent = cfg.update_agent or cfg.agent
    is_counted = finite_rows(batch)[rows]
    if agent.within_capacity is not None:
        obs = tree.map(lambda x: x[rows], batch.obs)
        is_counted = is_counted & agent.within_capacity(agent.cfg, obs)
    return is_counted.to(batch.advantage.dtype).sum()
