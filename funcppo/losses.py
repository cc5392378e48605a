"""The clipped surrogate objective of PPO (`loss_fn`) and its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from funcppo.config import Config, PPOConfig
from funcppo.core import tree
from funcppo.core.types import F32, Bool, Obs, check_pair, check_tensor
from funcppo.interfaces import AnyAgent, Memory
from funcppo.rollout import apply_sequence

Setting = TypeVar("Setting")


class Scalars(NamedTuple):
    """Hyperparameters that may change between updates without a new graph; named as in `PPOConfig`.

    Those with a default are () where the settings hold, and numbers where learners differ in them
    (`trainer.train_many`).
    """

    learning_rate: F32[Tensor, ""]
    clip_eps: F32[Tensor, ""]
    value_coef: F32[Tensor, ""]
    entropy_coef: F32[Tensor, ""]
    max_grad_norm: F32[Tensor, ""]
    gamma: F32[Tensor, ""]
    gae_lambda: F32[Tensor, ""]
    value_clip_eps: F32[Tensor, ""] | tuple[()] = ()
    target_kl: F32[Tensor, ""] | tuple[()] = ()
    adam_b1: F32[Tensor, ""] | tuple[()] = ()
    adam_b2: F32[Tensor, ""] | tuple[()] = ()
    adam_eps: F32[Tensor, ""] | tuple[()] = ()
    adam_weight_decay: F32[Tensor, ""] | tuple[()] = ()
    learning_rate_schedule_end_factor: F32[Tensor, ""] | tuple[()] = ()
    clip_eps_schedule_end_factor: F32[Tensor, ""] | tuple[()] = ()
    entropy_coef_schedule_end_factor: F32[Tensor, ""] | tuple[()] = ()


# those that every state has
SCALARS = tuple(x for x in Scalars._fields if x not in Scalars._field_defaults)


class Sequence(NamedTuple):
    """Episode ends and initial memory, which a network with memory needs beside time-major transitions [T * B]."""

    done: Bool[Tensor, "TB"]  # an episode ends with the transition
    memory: Memory  # [B, ...], before the first step


class Batch(NamedTuple, Generic[Obs]):
    """Transitions to learn from, of a whole rollout or of one minibatch."""

    obs: Obs  # what the action was chosen on
    action: Tensor
    log_prob: F32[Tensor, "TB"]  # of the action, under the behaviour policy
    value: F32[Tensor, "TB"]  # under the behaviour policy
    advantage: F32[Tensor, "TB"]
    value_target: F32[Tensor, "TB"]
    # () for a network without memory
    sequence: Sequence | tuple[()] = ()
    # what `Config.advantages` returns beside advantages, for `Config.loss`: a tree of tensors [TB, ...]
    extras: Any = ()


class LossMetrics(NamedTuple):
    """Loss of one minibatch, its terms, and measures of how far the policy has moved."""

    loss: F32[Tensor, ""]
    policy_loss: F32[Tensor, ""]
    value_loss: F32[Tensor, ""]
    entropy: F32[Tensor, ""]  # nats
    approx_kl: F32[Tensor, ""]  # KL(behaviour, current), nats
    clip_fraction: F32[Tensor, ""]  # fraction of ratios outside the clip range
    # Fraction of rows dropped because they exceed the network's capacity; () if capacity is unlimited.
    dropped_fraction: F32[Tensor, ""] | tuple[()]
    # Fraction of rows left out because they hold a NaN or an infinity.
    nonfinite_fraction: F32[Tensor, ""]
    # Measures of a loss of the user's: a NamedTuple of numbers, which are logged under their names.
    extra: Any = ()


# A mean over the rows of a batch, or over some of them.
MeanFn: TypeAlias = Callable[[F32[Tensor, "TB"]], F32[Tensor, ""]]


def loss_fn(
    cfg: Config,
    world: object,
    params: object,
    batch: Batch[Obs],
    scalars: Scalars,
) -> tuple[F32[Tensor, ""], LossMetrics]:
    """Compute the PPO loss, policy loss - entropy_coef * entropy + value_coef * value loss, and its metrics.

    Each part, and each metric, is a mean over the rows that are finite (`finite_rows`) and within the network's
    capacity. Advantages are normalised over all finite rows before: the capacity limits what the network computes, and
    advantages are known without it. The KL estimate is the mean of (ratio - 1) - log ratio.

    Returns:
      The loss, and its metrics.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 9; KL estimator: Schulman 2020, "Approximating KL divergence".
    """
    rows = evaluate_batch(cfg, world, params, batch)
    policy_term = policy_loss(
        rows.ratio, rows.batch.advantage, scalars.clip_eps, rows.mean
    )
    return total_loss(cfg, rows, policy_term, scalars)


# Computes the loss of a minibatch and its metrics, as `loss_fn`.
LossFn: TypeAlias = Callable[..., tuple[F32[Tensor, ""], LossMetrics]]


def minibatch_loss_fn(
    cfg: Config,
    world: object,
    params: object,
    batch: Batch[Obs],
    scalars: Scalars,
) -> tuple[F32[Tensor, ""], LossMetrics]:
    """Compute the loss of a learner, `Config.loss` or `loss_fn`, and its metrics."""
    if cfg.loss is None:
        return loss_fn(cfg, world, params, batch, scalars)
    result = cfg.loss(cfg, world, params, batch, scalars)
    # What is compiled is called eagerly, too.
    if not tree.is_traced():
        _check_loss(result, batch.value.dtype)
    loss, metrics = result
    # Built anew: Dynamo of PyTorch 2.11 cannot return what `_replace` makes.
    return loss, LossMetrics(loss, *metrics[1:])


def _check_loss(result: tuple[Tensor, LossMetrics], dtype: torch.dtype) -> None:
    """Check what a loss of the user's returns.

    Raises:
      TypeError: it is no loss with its metrics, or names a number of another shape or dtype.
    """
    expected = "loss: expected (loss, fp.losses.LossMetrics)"
    check_pair(result, LossMetrics, expected)
    numbers = result[1]._replace(loss=result[0])
    for path, number in tree.named_leaves(numbers, "loss: LossMetrics"):
        check_tensor(number, (), dtype, path)


class BatchOutput(NamedTuple):
    """Output of the network for the rows of a batch, and which of them count."""

    batch: Batch[Any]  # advantages are normalised, bad rows are 0
    output: Any  # of the network
    log_ratio: F32[Tensor, "TB"]  # log pi(a|s) - log pi_old(a|s)
    ratio: F32[Tensor, "TB"]
    is_finite: Bool[Tensor, "TB"]
    is_counted: Bool[Tensor, "TB"]  # finite, and within the capacity
    # () if capacity is unlimited
    is_within_capacity: Bool[Tensor, "TB"] | tuple[()]

    def mean(self, x: F32[Tensor, "TB"]) -> F32[Tensor, ""]:
        """Return the mean over the rows that count."""
        return masked_mean(self.is_counted, x)


def evaluate_batch(
    cfg: Config, world: object, params: object, batch: Batch[Obs]
) -> BatchOutput:
    """Normalise the advantages of a minibatch and apply the network to its rows: the first half of a loss."""
    # Microbatches hold the advantages of a minibatch that is normalised as a whole, by `accumulate_gradients`.
    if cfg.ppo.n_microbatches == 1:
        advantage = normalize_advantages(cfg.ppo, batch.advantage)
        batch = batch._replace(advantage=advantage)
    is_finite = finite_rows(batch)
    # A mask alone does not stop a NaN: the derivative of what it leaves out is 0 * NaN.
    batch = _without_bad_rows(is_finite, batch)

    agent = cfg.update_agent or cfg.agent
    output = _apply_to_batch(cfg, agent, world, params, batch)

    # A network of limited capacity has no output for some rows: they count in no mean of the loss.
    is_within_capacity: Bool[Tensor, "TB"] | tuple[()] = ()
    is_counted = is_finite
    if agent.within_capacity is not None:
        is_within_capacity = agent.within_capacity(agent.cfg, batch.obs)
        is_counted = is_finite & is_within_capacity
    log_ratio = (
        agent.distribution.log_prob(output, batch.action) - batch.log_prob
    )
    return BatchOutput(
        batch,
        output,
        log_ratio,
        log_ratio.exp(),
        is_finite,
        is_counted,
        is_within_capacity,
    )


def total_loss(
    cfg: Config,
    rows: BatchOutput,
    policy_term: F32[Tensor, ""],
    scalars: Scalars,
    extra: Any = (),
) -> tuple[F32[Tensor, ""], LossMetrics]:
    """Add the entropy bonus and the value loss to a policy loss: the second half of a loss.

    Args:
      extra: measures to log, a NamedTuple of numbers.

    Returns:
      The loss, and its metrics.
    """
    batch, mean = rows.batch, rows.mean
    agent = cfg.update_agent or cfg.agent
    value_term = value_loss(
        cfg.ppo,
        rows.output.value,
        batch.value,
        batch.value_target,
        scalars.clip_eps,
        mean,
        given(scalars.value_clip_eps, cfg.ppo.value_clip_eps),
    )
    entropy = mean(agent.distribution.entropy(rows.output))
    loss = (
        policy_term
        - scalars.entropy_coef * entropy
        + scalars.value_coef * value_term
    )

    ratio = rows.ratio
    is_clipped = (ratio - 1).abs() > scalars.clip_eps
    metrics = LossMetrics(
        loss=loss,
        policy_loss=policy_term,
        value_loss=value_term,
        entropy=entropy,
        approx_kl=mean(ratio - 1 - rows.log_ratio),
        clip_fraction=mean(is_clipped.to(ratio.dtype)),
        dropped_fraction=(~rows.is_within_capacity).to(ratio.dtype).mean()
        if isinstance(rows.is_within_capacity, Tensor)
        else (),
        nonfinite_fraction=(~rows.is_finite).to(ratio.dtype).mean(),
        extra=extra,
    )
    return loss, metrics


def given(scalar: Tensor | tuple[()], setting: Setting) -> Tensor | Setting:
    """Return a scalar of `Scalars` that learners differ in, or else the setting that holds for all."""
    return scalar if isinstance(scalar, Tensor) else setting


def finite_rows(batch: Batch[Obs]) -> Bool[Tensor, "TB"]:
    """Return the mask [TB] of rows whose log probability, value, advantage and value target are all finite.

    The log probability of an observation that is not finite is NaN: see `train_step.build_batch`.
    """
    return (
        torch.isfinite(batch.log_prob)
        & torch.isfinite(batch.value)
        & torch.isfinite(batch.advantage)
        & torch.isfinite(batch.value_target)
    )


def _without_bad_rows(
    is_finite: Bool[Tensor, "TB"], batch: Batch[Obs]
) -> Batch[Obs]:
    """Zero the floating-point numbers of rows that are not finite; in sequences, zero each non-finite number.

    What a network with memory has seen and remembers stays, as later rows depend on it; only its own bad numbers are 0.
    """

    def select(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        return torch.where(is_finite.view(-1, *[1] * (x.ndim - 1)), x, 0.0)

    if not isinstance(batch.sequence, Sequence):
        return tree.map(select, batch)
    rows = tree.map(select, batch._replace(obs=(), sequence=()))
    return rows._replace(
        obs=tree.map(zero_if_bad, batch.obs),
        sequence=tree.map(zero_if_bad, batch.sequence),
    )


def zero_if_bad(x: Tensor) -> Tensor:
    """Replace every NaN and infinity of a tensor by 0."""
    return torch.where(x.isfinite(), x, 0) if x.is_floating_point() else x


def _apply_to_batch(
    cfg: Config,
    agent: AnyAgent,
    world: object,
    params: object,
    batch: Batch[Obs],
) -> Any:
    """Apply the network to every row; a network with memory replays the steps from the initial memory.

    Gradients flow back through all steps of an episode that the rollout holds.
    """
    if not isinstance(batch.sequence, Sequence):
        return agent.apply(agent.cfg, world, params, batch.obs)

    done, memory = batch.sequence
    obs, done = tree.map(
        lambda x: x.view(cfg.ppo.n_steps, -1, *x.shape[1:]), (batch.obs, done)
    )
    return apply_sequence(agent, world, params, obs, done, memory)


def masked_mean(
    mask: Bool[Tensor, "TB"], x: F32[Tensor, "TB"]
) -> F32[Tensor, ""]:
    """Compute the mean over the rows of the mask; 0 if the mask is empty."""
    return torch.where(mask, x, 0.0).sum() / mask.to(x.dtype).sum().clamp_min(
        1.0
    )


def policy_loss(
    ratio: F32[Tensor, "TB"],
    advantage: F32[Tensor, "TB"],
    clip_eps: F32[Tensor, ""],
    mean: MeanFn = torch.mean,
) -> F32[Tensor, ""]:
    """Compute the clipped surrogate loss, -E[min(r A, clip(r, 1 - eps, 1 + eps) A)].

    Args:
      ratio: r = pi(a|s) / pi_old(a|s).
      advantage: A.
      clip_eps: eps.
      mean: E.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7.
    """
    clipped_ratio = torch.clamp(ratio, 1 - clip_eps, 1 + clip_eps)
    return -mean(torch.minimum(ratio * advantage, clipped_ratio * advantage))


def value_loss(
    cfg: PPOConfig,
    value: F32[Tensor, "TB"],
    old_value: F32[Tensor, "TB"],
    target: F32[Tensor, "TB"],
    clip_eps: F32[Tensor, ""],
    mean: MeanFn = torch.mean,
    value_clip_eps: F32[Tensor, ""] | float | None = None,
) -> F32[Tensor, ""]:
    """Compute the mean squared error of the value, or half of it; `cfg.value_loss` selects the kind of error.

    plain: of the value itself. clipped_only: of the value clipped to within a range of the old one. clipped_max: the
    larger of the two in each row.

    Args:
      old_value: under the behaviour policy.
      clip_eps: the range, unless there is one of its own.
      value_clip_eps: the range of its own; None: there is none.
    """
    limit: Any = clip_eps if value_clip_eps is None else value_clip_eps
    error = (value - target) ** 2
    if cfg.value_loss != "plain":
        change = torch.clamp(value - old_value, -limit, limit)
        clipped = (old_value + change - target) ** 2
        is_max = cfg.value_loss == "clipped_max"
        error = torch.maximum(error, clipped) if is_max else clipped
    return (0.5 if cfg.half_value_loss else 1.0) * mean(error)


def normalize_advantages(
    cfg: PPOConfig, advantage: F32[Tensor, "TB"]
) -> F32[Tensor, "TB"]:
    """Compute (A - mean) / (deviation + 1e-8) over all finite rows.
    Unchanged if `advantage_ddof` is None or there are several shards.

    The deviation of a single row is 0. Those of a shard are unchanged: `minibatch.minibatch_step` has normalised them
    over the minibatch of all shards.
    """
    if cfg.advantage_ddof is None or cfg.n_shards > 1:
        return advantage
    is_finite = torch.isfinite(advantage)
    n_rows = advantage.shape[0]
    n_finite = is_finite.to(advantage.dtype).sum().clamp_min(1.0)

    # One pass over the rows, the others as zeros: their squares about the mean
    # of all, less what the zeros and the other centre add to them.
    finite = torch.where(is_finite, advantage, 0.0)
    variance, mean_of_all = finite.var(correction=0), finite.mean()
    mean = mean_of_all * (n_rows / n_finite)
    square_sum = (
        n_rows * variance
        - (n_rows - n_finite) * mean_of_all**2
        - n_finite * (mean - mean_of_all) ** 2
    ).clamp_min(0.0)
    return standardize(
        advantage, n_finite, mean, square_sum, cfg.advantage_ddof
    )


def standardize(
    advantage: F32[Tensor, "TB"],
    n: F32[Tensor, ""],
    mean: F32[Tensor, ""],
    square_sum: F32[Tensor, ""],
    ddof: int,
) -> F32[Tensor, "TB"]:
    """Compute (A - mean) / (deviation + 1e-8) by the moments of n advantages."""
    deviation = (square_sum / (n - ddof).clamp_min(1.0)).sqrt()
    return (advantage - mean) / (deviation + 1e-8)
