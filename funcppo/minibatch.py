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
from funcppo.losses import Batch, LossMetrics, Scalars, loss_fn, normalised
from funcppo.rollout import scan
from funcppo.types import F32, I64, Bool


class Learner(NamedTuple):
    """What the minibatches of one update thread. Params are raveled: P numbers in all."""

    params: F32[Tensor, "P"]
    opt_state: optim.AdamState[Tensor]
    active: Bool[Tensor, ""]  # false once the KL limit has stopped this update


class Minibatches(NamedTuple):
    """All minibatches of an update, of all its epochs; without its first axis, one of them."""

    rows: I64[Tensor, "... M"]  # of the batch
    ends_epoch: Bool[Tensor, "..."]


class Learnt(NamedTuple):
    """What one minibatch shows."""

    loss: LossMetrics
    grad_norm: F32[Tensor, ""]  # before clipping
    stepped: Bool[Tensor, ""]  # params moved
    finite: Bool[Tensor, ""]  # neither loss nor gradient holds a NaN or an infinity; where one does, nothing moves


def pack(params: Any, opt_state: optim.AdamState[Any]) -> Learner:
    """The learner before the first minibatch of an update."""
    flat = optim.AdamState(step=opt_state.step, mu=tree.ravel(opt_state.mu), nu=tree.ravel(opt_state.nu))
    return Learner(tree.ravel(params), flat, torch.ones_like(opt_state.step, dtype=torch.bool))


def unpack(like: Any, learner: Learner) -> tuple[Any, optim.AdamState[Any]]:
    """Params and optimizer state as trees with the structure and shapes of `like`; their leaves are views."""
    step, mu, nu = learner.opt_state
    params, mu, nu = (tree.unravel(like, x) for x in (learner.params, mu, nu))
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


def gradient(
    cfg: Config,
    world: Any,
    params: Any,
    batch: Batch,
    rows: I64[Tensor, "M"],
    scalars: Scalars,
    of: Callable[..., tuple[Any, LossMetrics]] = loss_gradient,
    scan: Callable[..., Any] = scan,
) -> tuple[Any, LossMetrics]:
    """The same, microbatch by microbatch: the mean of their gradients, advantages normalised over all rows.

    Args:
      of: what computes the gradient over the rows of one.
      scan: what goes from one to the next.
    """
    ppo = cfg.ppo
    if ppo.n_microbatches == 1:
        return of(cfg, world, params, batch, rows, scalars)
    batch = batch._replace(advantage=batch.advantage.scatter(0, rows, normalised(ppo, batch.advantage[rows])))
    cfg = replace(cfg, ppo=replace(ppo, advantage_ddof=None))

    def add(total: Any, part: I64[Tensor, "M"]) -> tuple[Any, LossMetrics]:
        grads, metrics = of(cfg, world, params, batch, part, scalars)
        return tree.map(torch.add, total, grads), metrics

    total, metrics = scan(add, tree.zeros_like(params), rows.view(ppo.n_microbatches, -1))
    return tree.map(lambda x: x / ppo.n_microbatches, total), tree.map(lambda x: x.mean(0), metrics)


def apply_gradient(
    cfg: Config,
    learner: Learner,
    grads: Any,
    loss: LossMetrics,
    ends_epoch: Bool[Tensor, ""],
    scalars: Scalars,
    adam: Callable[..., Any] = optim.update,
) -> tuple[Learner, Learnt]:
    """The learner after a clipped Adam step; unchanged once stopped, and where a number is not finite."""
    ppo = cfg.ppo
    clipped, norm = optim.clip_by_global_norm(tree.ravel(grads), scalars.max_grad_norm)
    stepped = adam(ppo.adam, clipped, learner.opt_state, learner.params, scalars.learning_rate)
    finite = torch.isfinite(loss.loss) & torch.isfinite(norm)
    steps, active = learner.active & finite, learner.active
    if ppo.target_kl is not None:
        beyond = loss.approx_kl > ppo.target_kl
        active = active & ~(beyond & ends_epoch if ppo.kl_stop == "epoch" else beyond)
        steps = steps if ppo.kl_stop == "epoch" else steps & ~beyond
    old = (learner.params, learner.opt_state)
    params, opt_state = tree.map(lambda new, old: torch.where(steps, new, old), stepped, old)
    return Learner(params, opt_state, active), Learnt(loss, norm, stepped=steps, finite=finite)


def minibatch_step(
    cfg: Config,
    world: Any,
    like: Any,
    batch: Batch,
    scalars: Scalars,
    learner: Learner,
    minibatch: Minibatches,
    gradient: Callable[..., Any] = gradient,
    apply_gradient: Callable[..., Any] = apply_gradient,
) -> tuple[Learner, Learnt]:
    """Forward, loss, backward, clip and Adam on one minibatch.

    Args:
      like: a tree of params, whose structure and shapes alone count.
    """
    params = tree.unravel(like, learner.params)
    grads, loss = gradient(cfg, world, params, batch, minibatch.rows, scalars)
    return apply_gradient(cfg, learner, grads, loss, minibatch.ends_epoch, scalars)
