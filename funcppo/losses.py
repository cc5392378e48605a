"""The clipped surrogate objective of PPO and its parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcppo.config import Config, PPOConfig
from funcppo.types import F32, Bool


class Scalars(NamedTuple):
    """What may change from update to update without a new graph."""

    learning_rate: F32[Tensor, ""]
    clip_eps: F32[Tensor, ""]
    value_coef: F32[Tensor, ""]
    entropy_coef: F32[Tensor, ""]
    max_grad_norm: F32[Tensor, ""]
    gamma: F32[Tensor, ""]
    gae_lambda: F32[Tensor, ""]


class Batch(NamedTuple):
    """Transitions to learn from; `N` of them."""

    obs: Any
    action: Tensor
    log_prob: F32[Tensor, "N"]  # under the behaviour policy
    value: F32[Tensor, "N"]  # under the behaviour policy
    advantage: F32[Tensor, "N"]
    value_target: F32[Tensor, "N"]  # of the value


class LossMetrics(NamedTuple):
    """What one evaluation of the loss shows."""

    loss: F32[Tensor, ""]
    policy_loss: F32[Tensor, ""]
    value_loss: F32[Tensor, ""]
    entropy: F32[Tensor, ""]  # nats
    approx_kl: F32[Tensor, ""]  # KL(behaviour, current), nats
    clip_fraction: F32[Tensor, ""]  # share of ratios outside the clip range
    dropped_fraction: Any  # share of the rows that the agent had no room for; () where it has room for any


def loss_fn(
    cfg: Config, world: Any, params: Any, batch: Batch, scalars: Scalars
) -> tuple[F32[Tensor, ""], LossMetrics]:
    """policy loss - entropy_coef * entropy + value_coef * value loss, each a mean over the rows that the agent fits.

    The KL estimate is the mean of (ratio - 1) - log ratio.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 9; KL estimator: Schulman 2020, "Approximating KL divergence".
    """
    ppo, agent = cfg.ppo, cfg.update_agent or cfg.agent
    out = agent.apply(agent.cfg, world, params, batch.obs)
    fits = agent.within_capacity(agent.cfg, batch.obs) if agent.within_capacity else None
    mean = torch.mean if fits is None else partial(masked_mean, fits)
    log_ratio = agent.distribution.log_prob(out, batch.action) - batch.log_prob
    ratio = log_ratio.exp()
    policy = policy_loss(ratio, normalize_advantages(ppo, batch.advantage), scalars.clip_eps, mean)
    value = value_loss(ppo, out.value, batch.value, batch.value_target, scalars.clip_eps, mean)
    entropy = mean(agent.distribution.entropy(out))
    loss = policy - scalars.entropy_coef * entropy + scalars.value_coef * value
    metrics = LossMetrics(
        loss=loss,
        policy_loss=policy,
        value_loss=value,
        entropy=entropy,
        approx_kl=mean(ratio - 1 - log_ratio),
        clip_fraction=mean(((ratio - 1).abs() > scalars.clip_eps).to(ratio.dtype)),
        dropped_fraction=() if fits is None else (~fits).to(ratio.dtype).mean(),
    )
    return loss, metrics


def masked_mean(mask: Bool[Tensor, "N"], x: F32[Tensor, "N"]) -> F32[Tensor, ""]:
    """The mean over the rows of the mask, 0 over none."""
    return torch.where(mask, x, 0.0).sum() / mask.to(x.dtype).sum().clamp_min(1.0)


def policy_loss(
    ratio: F32[Tensor, "N"],
    advantage: F32[Tensor, "N"],
    clip_eps: F32[Tensor, ""],
    mean: Callable[[Tensor], Tensor] = torch.mean,
) -> F32[Tensor, ""]:
    """-E[min(r A, clip(r, 1 - eps, 1 + eps) A)], r = pi(a|s) / pi_old(a|s).

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7.
    """
    clipped = torch.clamp(ratio, 1 - clip_eps, 1 + clip_eps)
    return -mean(torch.minimum(ratio * advantage, clipped * advantage))


def value_loss(
    cfg: PPOConfig,
    value: F32[Tensor, "N"],
    old_value: F32[Tensor, "N"],
    target: F32[Tensor, "N"],
    clip_eps: F32[Tensor, ""],
    mean: Callable[[Tensor], Tensor] = torch.mean,
) -> F32[Tensor, ""]:
    """Mean squared error of the value, or half of it.

    plain: of the value itself. clipped_only: of the value kept within clip_eps of the old one. clipped_max: the larger
    of the two for each sample.
    """
    clipped = old_value + torch.clamp(value - old_value, -clip_eps, clip_eps)
    plain_error, clipped_error = (value - target) ** 2, (clipped - target) ** 2
    if cfg.value_loss == "plain":
        error = plain_error
    elif cfg.value_loss == "clipped_only":
        error = clipped_error
    else:
        error = torch.maximum(plain_error, clipped_error)
    return (0.5 if cfg.half_value_loss else 1.0) * mean(error)


def normalize_advantages(cfg: PPOConfig, advantage: F32[Tensor, "N"]) -> F32[Tensor, "N"]:
    """(A - mean) / (deviation + 1e-8) over the batch; unchanged where `advantage_ddof` is None."""
    if cfg.advantage_ddof is None:
        return advantage
    return (advantage - advantage.mean()) / (advantage.std(correction=cfg.advantage_ddof) + 1e-8)
