"""One step of learning on one minibatch, `minibatch_step`: forward, loss, backward, clipping and Adam.

Parameters and moments are flat vectors here (`UpdateState`): the optimizer is then a few kernels, however many leaves
the parameters have.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.func import grad_and_value

from funcppo import optim
from funcppo.config import AdamConfig, Config
from funcppo.core import tree
from funcppo.core.settings import reads_scalars_apart
from funcppo.core.tree import graph_scan, keeps_loops, scan
from funcppo.core.types import F32, I64, Bool, Obs, Params, Scan
from funcppo.losses import (
    Batch,
    LossMetrics,
    Scalars,
    Sequence,
    loss_fn,
    normalize_advantages,
)
from funcppo.optim import AdamState
from funcppo.rollout import backpropagate, step_memories


class UpdateState(NamedTuple):
    """The carry of an update's loop over minibatches. Parameters and moments are raveled to vectors."""

    flat_params: F32[Tensor, "NP"]
    opt_state: AdamState[Tensor]
    # False once the KL limit has stopped this update.
    continue_update: Bool[Tensor, ""]
    # The moments before the update hold no NaN and no infinity. Then no step makes one.
    has_finite_moments: Bool[Tensor, ""]


class MinibatchIndices(NamedTuple):
    """All minibatches of an update, of all its epochs; without the first axis, one of them."""

    rows: I64[Tensor, "... MB"]  # indices into the batch
    ends_epoch: Bool[Tensor, "..."]  # the last minibatch of an epoch


class MinibatchMetrics(NamedTuple):
    """Measures of one minibatch."""

    loss: LossMetrics
    grad_norm: F32[Tensor, ""]  # before clipping
    is_applied: Bool[Tensor, ""]  # the optimizer step was applied
    # Some row is finite, and neither loss nor gradient nor moments nor learning rate hold a NaN or an infinity;
    # otherwise nothing is applied.
    is_finite: Bool[Tensor, ""]


class LossFn(Protocol):
    """The loss over some rows of a batch, as `minibatch_loss`."""

    def __call__(
        self,
        cfg: Config,
        world: object,
        params: object,
        batch: Batch[Obs],
        rows: I64[Tensor, "MB"],
        scalars: Scalars,
        /,
    ) -> tuple[F32[Tensor, ""], LossMetrics]: ...


class GradientFn(Protocol):
    """The gradient of the loss over some rows of a batch, as `loss_gradient`."""

    def __call__(
        self,
        cfg: Config,
        world: object,
        params: Params,
        batch: Batch[Obs],
        rows: I64[Tensor, "MB"],
        scalars: Scalars,
        /,
    ) -> tuple[Params, LossMetrics]: ...


class AdamUpdateFn(Protocol):
    """One step of Adam, as `optim.update`."""

    def __call__(
        self,
        cfg: AdamConfig,
        grads: Params,
        state: AdamState[Params],
        params: Params,
        learning_rate: F32[Tensor, ""],
        /,
    ) -> tuple[Params, AdamState[Params]]: ...


class ApplyGradientsFn(Protocol):
    """A step of the optimizer on given gradients, as `apply_gradients`."""

    def __call__(
        self,
        cfg: Config,
        update_state: UpdateState,
        grads: object,
        loss_metrics: LossMetrics,
        ends_epoch: Bool[Tensor, ""],
        scalars: Scalars,
        /,
    ) -> tuple[UpdateState, MinibatchMetrics]: ...


def ravel_update_state(
    params: Params, opt_state: AdamState[Params]
) -> UpdateState:
    """The state before the first minibatch of an update."""
    flat_state = AdamState(
        step=opt_state.step,
        mu=tree.ravel(opt_state.mu),
        nu=tree.ravel(opt_state.nu),
    )
    return UpdateState(
        flat_params=tree.ravel(params),
        opt_state=flat_state,
        continue_update=torch.ones_like(opt_state.step, dtype=torch.bool),
        has_finite_moments=_has_finite_moments(flat_state),
    )


def _has_finite_moments(opt_state: AdamState[Tensor]) -> Bool[Tensor, ""]:
    mu, nu = opt_state.mu, opt_state.nu
    # One pass over memory each: a NaN is the largest and the smallest number, and compares as False.
    is_finite = (_max_norm(mu) < torch.inf) & (_max_norm(nu) < torch.inf)
    return is_finite & (nu.amin() >= 0)


def _max_norm(x: Tensor) -> F32[Tensor, ""]:
    norm = torch.linalg.vector_norm(x, torch.inf)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return cast(Tensor, norm)


def unravel_update_state(
    params_like: Params, update_state: UpdateState
) -> tuple[Params, AdamState[Params]]:
    """The inverse of `ravel_update_state`.

    Args:
      params_like: a tree with the structure and shapes of the parameters.

    Returns:
      Parameters and optimizer state as trees, whose leaves are views of the vectors.
    """
    step, flat_mu, flat_nu = update_state.opt_state
    params = tree.unravel(params_like, update_state.flat_params)
    mu = tree.unravel(params_like, flat_mu)
    nu = tree.unravel(params_like, flat_nu)
    return params, AdamState(step=step, mu=mu, nu=nu)


@reads_scalars_apart
def minibatch_loss(
    cfg: Config,
    world: object,
    params: object,
    batch: Batch[Obs],
    rows: I64[Tensor, "MB"],
    scalars: Scalars,
) -> tuple[F32[Tensor, ""], LossMetrics]:
    """The loss over some rows of the batch, and its metrics."""
    minibatch = select_rows(cfg, batch, rows)
    return loss_fn(cfg, world, params, minibatch, scalars)


def rows_of_environments(
    cfg: Config, environments: I64[Tensor, "... B"]
) -> I64[Tensor, "... TB"]:
    """Rows of a batch that are of the given environments, time-major as the batch: row t * n_envs + b."""
    step = torch.arange(cfg.ppo.n_steps, device=environments.device)
    rows = step[:, None] * cfg.ppo.n_envs + environments[..., None, :]
    return rows.flatten(-2)


def select_rows(
    cfg: Config, batch: Batch[Obs], rows: I64[Tensor, "MB"]
) -> Batch[Obs]:
    """Some rows of a batch; for a network with memory those of whole environments, by `rows_of_environments`."""
    if not isinstance(batch.sequence, Sequence):
        return tree.map(lambda x: x[rows], batch)

    done, memory = batch.sequence
    # the rows of the first step, which number the environments
    environments = rows[: rows.shape[0] // cfg.ppo.n_steps]
    selected = tree.map(lambda x: x[rows], batch._replace(sequence=()))
    return selected._replace(
        sequence=Sequence(
            done=done[rows],
            memory=tree.map(lambda x: x[environments], memory),
        )
    )


def split_rows(
    cfg: Config, rows: I64[Tensor, "MB"]
) -> I64[Tensor, "n_microbatches MB"]:
    """The rows of each microbatch; for a network with memory, whole environments."""
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
    """The gradient of the loss over some rows of the batch, and the metrics of the loss."""
    if isinstance(batch.sequence, Sequence) and keeps_loops():
        sequences = select_rows(cfg, batch, rows)
        return sequence_gradient(cfg, world, params, sequences, scalars)
    loss = partial(minibatch_loss, cfg, world)
    grads, (_, metrics) = grad_and_value(loss, has_aux=True)(
        params, batch, rows, scalars
    )
    return cast(Params, grads), cast(LossMetrics, metrics)


def sequence_gradient(
    cfg: Config,
    world: object,
    params: Params,
    batch: Batch[Obs],
    scalars: Scalars,
    scan: Scan = graph_scan,
) -> tuple[Params, LossMetrics]:
    """As `loss_gradient`, of a network with memory over a batch of whole environments, by two loops over the steps.

    The loss is differentiated in the memory before every step, as if each were given. `recurrence.backpropagate` adds
    what goes through the steps before. Automatic differentiation in place of the second loop would need the first one
    unrolled.

    Args:
      scan: the loop over steps.
    """
    agent = cfg.update_agent or cfg.agent
    assert isinstance(batch.sequence, Sequence)
    # As `loss_fn` reads them: a bad number is 0.
    rows, memory = tree.map(_zero_nonfinite, (batch.obs, batch.sequence.memory))
    n_steps = cfg.ppo.n_steps
    obs, done = tree.map(
        lambda x: x.view(n_steps, -1, *x.shape[1:]), (rows, batch.sequence.done)
    )
    memories = step_memories(agent, world, params, obs, done, memory, scan)

    def loss(
        params: Params, memory_leaves: list[Tensor]
    ) -> tuple[Tensor, LossMetrics]:
        sequence = Sequence(
            done.flatten(), memories.with_floating_leaves(memory_leaves)
        )
        return loss_fn(
            cfg, world, params, batch._replace(sequence=sequence), scalars
        )

    gradient = grad_and_value(loss, argnums=(0, 1), has_aux=True)
    (grads, memory_grads), (_, metrics) = gradient(
        params, memories.floating_leaves()
    )
    through_time = backpropagate(
        agent, world, params, obs, done, memories, memory_grads, scan
    )
    return tree.map(torch.add, grads, through_time), cast(LossMetrics, metrics)


def _zero_nonfinite(x: Tensor) -> Tensor:
    """The tensor with 0 for every NaN and infinity."""
    if not x.is_floating_point():
        return x
    return torch.where(x.isfinite(), x, 0.0)


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
    """The gradient of the loss over a minibatch, computed microbatch by microbatch.

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
    adam_update: AdamUpdateFn = optim.update,
) -> tuple[UpdateState, MinibatchMetrics]:
    """Make one step of Adam on clipped gradients.

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
        ppo.adam,
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
    if ppo.target_kl is not None:
        exceeds_kl = loss_metrics.approx_kl > ppo.target_kl
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


def minibatch_step(
    cfg: Config,
    world: object,
    params_like: object,
    batch: Batch[Obs],
    scalars: Scalars,
    update_state: UpdateState,
    minibatch: MinibatchIndices,
    accumulate_gradients: GradientFn = accumulate_gradients,
    apply_gradients: ApplyGradientsFn = apply_gradients,
) -> tuple[UpdateState, MinibatchMetrics]:
    """Forward, loss, backward, clipping and Adam on one minibatch.

    A training step calls `shards.minibatch_step`, which is this one where the batch is not in shards.

    Args:
      params_like: a tree with the structure and shapes of the parameters; its numbers are not read.
      accumulate_gradients: the gradient over the minibatch.
      apply_gradients: the step of the optimizer.

    Returns:
      The state for the next minibatch, and the metrics of this one.
    """
    params = tree.unravel(params_like, update_state.flat_params)
    grads, loss_metrics = accumulate_gradients(
        cfg, world, params, batch, minibatch.rows, scalars
    )
    return apply_gradients(
        cfg, update_state, grads, loss_metrics, minibatch.ends_epoch, scalars
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MinibatchParts:
    """The functions from which a runtime composes a `minibatch_step` that it cannot compile as a whole.

    minibatch_step          accumulate_gradients, then apply_gradients
    accumulate_gradients    the mean of the derivative of minibatch_loss over the microbatches
    """

    accumulate_gradients: GradientFn = accumulate_gradients
    apply_gradients: ApplyGradientsFn = apply_gradients
    minibatch_loss: LossFn = minibatch_loss


EAGER_MINIBATCH_PARTS = MinibatchParts()
