"""What one minibatch does to the learner: forward, loss, backward, clip and Adam, as pure functions.

The learner holds params and moments as flat vectors: the optimizer is then a few kernels, however many leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value

from funcppo import optim, tree
from funcppo.config import Config
from funcppo.losses import Batch, LossMetrics, Scalars, loss_fn, normalize_advantages
from funcppo.rollout import scan
from funcppo.types import F32, I64, Bool


class UpdateState(NamedTuple):
    """What the minibatches of one update thread. Params are raveled: P numbers in all."""

    flat_params: F32[Tensor, "P"]
    opt_state: optim.AdamState[Tensor]
    continue_update: Bool[Tensor, ""]  # false once the KL limit has stopped this update


class MinibatchIndices(NamedTuple):
    """All minibatches of an update, of all its epochs; without its first axis, one of them."""

    rows: I64[Tensor, "... M"]  # of the batch
    ends_epoch: Bool[Tensor, "..."]


class MinibatchMetrics(NamedTuple):
    """What one minibatch shows."""

    loss: LossMetrics
    grad_norm: F32[Tensor, ""]  # before clipping
    applied: Bool[Tensor, ""]  # params moved
    all_finite: Bool[Tensor, ""]  # neither loss nor gradient holds a NaN or an infinity; where one does, nothing moves


def ravel_update_state(params: Any, opt_state: optim.AdamState[Any]) -> UpdateState:
    """The learner before the first minibatch of an update."""
    flat = optim.AdamState(step=opt_state.step, mu=tree.ravel(opt_state.mu), nu=tree.ravel(opt_state.nu))
    return UpdateState(tree.ravel(params), flat, torch.ones_like(opt_state.step, dtype=torch.bool))


def unravel_update_state(params_like: Any, update_state: UpdateState) -> tuple[Any, optim.AdamState[Any]]:
    """Params and optimizer state as trees with the structure and shapes of `like`; their leaves are views."""
    step, mu, nu = update_state.opt_state
    params, mu, nu = (tree.unravel(params_like, x) for x in (update_state.flat_params, mu, nu))
    return params, optim.AdamState(step=step, mu=mu, nu=nu)


def minibatch_loss(
    cfg: Config, world: Any, params: Any, batch: Batch, rows: I64[Tensor, "M"], scalars: Scalars
) -> tuple[F32[Tensor, ""], LossMetrics]:
    """The loss over some rows of the batch."""
    return loss_fn(cfg, world, params, tree.map(lambda x: x[rows], batch), scalars)


def loss_gradient(
    cfg: Config, world: Any, params: Any, batch: Batch, rows: I64[Tensor, "M"], scalars: Scalars
) -> tuple[Any, LossMetrics]:
    """The gradient of the loss over some rows of the batch, and what the loss shows."""
    loss = partial(minibatch_loss, cfg, world)
    grads, (_, metrics) = grad_and_value(loss, has_aux=True)(params, batch, rows, scalars)
    return grads, metrics


def accumulate_gradients(
    cfg: Config,
    world: Any,
    params: Any,
    batch: Batch,
    rows: I64[Tensor, "M"],
    scalars: Scalars,
    gradient_fn: Callable[..., tuple[Any, LossMetrics]] = loss_gradient,
    scan: Callable[..., Any] = scan,
) -> tuple[Any, LossMetrics]:
    """The same, microbatch by microbatch: the mean of their gradients, advantages normalised over all rows.

    Args:
      of: what computes the gradient over the rows of one.
      scan: what goes from one to the next.
    """
    ppo = cfg.ppo
    if ppo.n_microbatches == 1:
        return gradient_fn(cfg, world, params, batch, rows, scalars)
    batch = batch._replace(advantage=batch.advantage.scatter(0, rows, normalize_advantages(ppo, batch.advantage[rows])))
    cfg = replace(cfg, ppo=replace(ppo, advantage_ddof=None))

    def add(total: Any, part: I64[Tensor, "M"]) -> tuple[Any, LossMetrics]:
        grads, metrics = gradient_fn(cfg, world, params, batch, part, scalars)
        return tree.map(torch.add, total, grads), metrics

    total, metrics = scan(add, tree.zeros_like(params), rows.view(ppo.n_microbatches, -1))
    return tree.map(lambda x: x / ppo.n_microbatches, total), tree.map(lambda x: x.mean(0), metrics)


def apply_gradients(
    cfg: Config,
    update_state: UpdateState,
    grads: Any,
    loss_metrics: LossMetrics,
    ends_epoch: Bool[Tensor, ""],
    scalars: Scalars,
    adam_update: Callable[..., Any] = optim.update,
) -> tuple[UpdateState, MinibatchMetrics]:
    """The learner after a clipped Adam step; unchanged once stopped, and where a number is not finite."""
    ppo = cfg.ppo
    clipped, norm = optim.clip_by_global_norm(tree.ravel(grads), scalars.max_grad_norm)
    stepped = adam_update(ppo.adam, clipped, update_state.opt_state, update_state.flat_params, scalars.learning_rate)
    finite = torch.isfinite(loss_metrics.loss) & torch.isfinite(norm)
    steps, active = update_state.continue_update & finite, update_state.continue_update
    if ppo.target_kl is not None:
        beyond = loss_metrics.approx_kl > ppo.target_kl
        active = active & ~(beyond & ends_epoch if ppo.kl_stop == "epoch" else beyond)
        steps = steps if ppo.kl_stop == "epoch" else steps & ~beyond
    old = (update_state.flat_params, update_state.opt_state)
    params, opt_state = tree.map(lambda new, old: torch.where(steps, new, old), stepped, old)
    return UpdateState(params, opt_state, active), MinibatchMetrics(
        loss_metrics, norm, applied=steps, all_finite=finite
    )


def minibatch_step(
    cfg: Config,
    world: Any,
    params_like: Any,
    batch: Batch,
    scalars: Scalars,
    update_state: UpdateState,
    minibatch: MinibatchIndices,
    accumulate_gradients: Callable[..., Any] = accumulate_gradients,
    apply_gradients: Callable[..., Any] = apply_gradients,
) -> tuple[UpdateState, MinibatchMetrics]:
    """Forward, loss, backward, clip and Adam on one minibatch.

    Args:
      like: a tree of params, whose structure and shapes alone count.
    """
    params = tree.unravel(params_like, update_state.flat_params)
    grads, loss = accumulate_gradients(cfg, world, params, batch, minibatch.rows, scalars)
    return apply_gradients(cfg, update_state, grads, loss, minibatch.ends_epoch, scalars)
