"""Shards: PPO over parts of the environments that are computed one by one and combined in a fixed order.

Each of the `n_shards` shards has an equal share of the environments, a key, and an order of its rows. A minibatch is
the union of the shards' minibatches; its gradient is the mean of theirs, weighted by the rows that they learn from and
summed in the order of the shards. A process may hold all shards, or some: no shard is computed otherwise beside others,
and what is gathered of all is the same everywhere (`Config.gather_shards`). So the number of processes changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcppo import minibatch, optim
from funcppo.config import Config
from funcppo.core import tree
from funcppo.core.settings import reads_scalars_apart
from funcppo.core.types import F32, I64, Bool, Obs, Tree
from funcppo.losses import Batch, LossMetrics, Scalars, finite_rows
from funcppo.minibatch import GradientFn, MinibatchMetrics, UpdateState


class Moments(NamedTuple):
    """Count, mean and sum of squared differences from the mean, of some numbers."""

    n: F32[Tensor, "..."]
    mean: F32[Tensor, "..."]
    square_sum: F32[Tensor, "..."]


class ShardedIndices(NamedTuple):
    """All minibatches of an update, of several shards; without the first axis, one of them."""

    # indices into the batch of each shard that this process holds
    rows: I64[Tensor, "... K MB"]
    ends_epoch: Bool[Tensor, "..."]  # the last minibatch of an epoch
    advantage: Moments  # of the minibatch's advantages in all shards


# The raveled gradient and the metrics of one shard's part of a minibatch, and how many
# of its rows are learned from.
ShardGradient = tuple[Tensor, LossMetrics, Tensor]


def gather(cfg: Config, own: Sequence[Tree]) -> list[Tree]:
    """The trees of all shards, in their order.

    Args:
      own: the trees of the shards that this process holds, of floating-point tensors.

    Raises:
      ValueError: this process, and those that it gathers from, hold another number of shards than `n_shards`.
    """
    table = torch.stack([tree.ravel(shard) for shard in own])
    if cfg.gather_shards is not None:
        table = cfg.gather_shards(table)
    n_shards = cfg.ppo.n_shards
    if table.shape[0] != n_shards:
        raise ValueError(
            f"state: expected {n_shards} shards in all processes together, got {table.shape[0]}"
        )

    like = own[0]
    dtypes = [leaf.dtype for leaf in tree.leaves(like)]
    shards: list[Tree] = []
    for row in table.unbind():
        leaves = tree.leaves(tree.unravel(like, row))
        own_dtypes = [x.to(dtype) for x, dtype in zip(leaves, dtypes)]
        shards.append(tree.unflatten(like, own_dtypes))
    return shards


def sum_in_order(terms: Sequence[Tree]) -> Tree:
    """((a + b) + c) + ... leaf by leaf: the same bits, however the terms came together."""
    total = terms[0]
    for term in terms[1:]:
        total = tree.map(torch.add, total, term)
    return total


def masked_moments(
    mask: Bool[Tensor, "... N"], x: F32[Tensor, "... N"]
) -> Moments:
    """Moments along the last axis, of the numbers that the mask shows; mean 0 if there are none."""
    n = mask.to(x.dtype).sum(-1)
    mean = torch.where(mask, x, 0.0).sum(-1) / n.clamp_min(1.0)
    squares = torch.where(mask, x - mean[..., None], 0.0) ** 2
    return Moments(n, mean, squares.sum(-1))


def merge_moments(shards: Sequence[Moments]) -> Moments:
    """Moments of the numbers of all shards together.

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
    gradient_fn: GradientFn = minibatch.loss_gradient,
    adam_update: Callable[..., Any] = optim.update,
) -> tuple[UpdateState, MinibatchMetrics]:
    """Forward, loss, backward, clipping and Adam on one minibatch.

    Args:
      params_like: a tree with the structure and shapes of the parameters; its numbers are not read.
      batch: with several shards a tuple of one `Batch` for each shard that this process holds.
      indices: `MinibatchIndices`; with several shards `ShardedIndices`.
      gradient_fn: the gradient over some rows of a batch.
      adam_update: the step of Adam on flat vectors.

    Returns:
      The state for the next minibatch, and the metrics of this one.
    """
    accumulate: Any = minibatch.accumulate_gradients
    if cfg.ppo.n_shards > 1:
        batch = tuple(
            [_normalize(cfg, indices.advantage, shard) for shard in batch]
        )
        accumulate = _accumulate_over_shards
    params = tree.unravel(params_like, update_state.flat_params)
    grads, loss_metrics = accumulate(
        cfg, world, params, batch, indices.rows, scalars, gradient_fn
    )
    return minibatch.apply_gradients(
        cfg,
        update_state,
        grads,
        loss_metrics,
        indices.ends_epoch,
        scalars,
        adam_update,
    )


def _normalize(cfg: Config, moments: Moments, batch: Batch[Obs]) -> Batch[Obs]:
    """A shard's batch with the advantages normalised as by `losses.normalize_advantages`, by given moments."""
    if cfg.ppo.advantage_ddof is None:
        return batch
    degrees_of_freedom = (moments.n - cfg.ppo.advantage_ddof).clamp_min(1.0)
    deviation = (moments.square_sum / degrees_of_freedom).sqrt()
    advantage = (batch.advantage - moments.mean) / (deviation + 1e-8)
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
    """The gradient over a minibatch of all shards, raveled, and its metrics."""
    own: list[ShardGradient] = []
    for batch, shard_rows in zip(batches, rows.unbind()):
        grads, metrics = minibatch.accumulate_gradients(
            cfg, world, params, batch, shard_rows, scalars, gradient_fn
        )
        n_counted = _count_rows(cfg, batch, shard_rows)
        own.append((tree.ravel(grads), metrics, n_counted))
    return mean_over_shards(gather(cfg, own))


def _count_rows(
    cfg: Config, batch: Batch[Obs], rows: I64[Tensor, "MB"]
) -> F32[Tensor, ""]:
    """Number of rows that a loss is a mean over: see `losses.loss_fn`."""
    agent = cfg.update_agent or cfg.agent
    is_counted = finite_rows(batch)[rows]
    if agent.within_capacity is not None:
        obs = tree.map(lambda x: x[rows], batch.obs)
        is_counted = is_counted & agent.within_capacity(agent.cfg, obs)
    return is_counted.to(batch.advantage.dtype).sum()


def mean_over_shards(
    shards: Sequence[ShardGradient],
) -> tuple[F32[Tensor, "NP"], LossMetrics]:
    """The gradient and the metrics of a minibatch of all shards.

    The loss is a mean over rows, so that its derivative is the mean of the shards', weighted by the rows that count.
    Fractions are of all rows, which are as many in each shard.
    """
    all_metrics = [metrics for _, metrics, _ in shards]
    counts = [n_counted for _, _, n_counted in shards]
    n_counted = sum_in_order(counts).clamp_min(1.0)
    weighted: list[Any] = []
    for flat_grads, metrics, count in shards:
        weight = count / n_counted
        weighted.append(
            tree.map(lambda x, w=weight: x * w, (flat_grads, metrics))
        )
    flat_grads, metrics = sum_in_order(weighted)

    fractions = [
        (x.dropped_fraction, x.nonfinite_fraction) for x in all_metrics
    ]
    dropped, nonfinite = tree.map(
        lambda x: x / len(shards), sum_in_order(fractions)
    )
    # Dynamo of PyTorch 2.11 cannot return a tuple that `_replace` made.
    metrics = LossMetrics(
        loss=metrics.loss,
        policy_loss=metrics.policy_loss,
        value_loss=metrics.value_loss,
        entropy=metrics.entropy,
        approx_kl=metrics.approx_kl,
        clip_fraction=metrics.clip_fraction,
        dropped_fraction=dropped,
        nonfinite_fraction=nonfinite,
    )
    return flat_grads, metrics
