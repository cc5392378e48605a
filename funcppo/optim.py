"""Adam (`init`, `update`), gradient clipping and schedules as pure functions."""

from __future__ import annotations

import math
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from funcppo.config import AdamConfig, Schedule
from funcppo.core import tree
from funcppo.core.types import F32, I64, Params


class AdamScalars(NamedTuple):
    """Settings of Adam as `AdamConfig` names them, of which some are tensors."""

    b1: F32[Tensor, ""] | float
    b2: F32[Tensor, ""] | float
    eps: F32[Tensor, ""] | float
    weight_decay: F32[Tensor, ""] | float
    decoupled_weight_decay: bool


class AdamState(NamedTuple, Generic[Params]):
    """State of Adam: the step count, and two moments with the structure of the parameters."""

    step: F32[Tensor, ""]  # optimizer steps so far: minibatches applied
    mu: Params  # running mean of the gradient
    nu: Params  # running mean of its square


def init(params: Params) -> AdamState[Params]:
    """Build the Adam state before the first step, with zero moments."""
    like = tree.leaves(params)[0]
    step = torch.zeros((), dtype=like.dtype, device=like.device)
    return AdamState(
        step=step, mu=tree.zeros_like(params), nu=tree.zeros_like(params)
    )


def update(
    cfg: AdamConfig | AdamScalars,
    grads: Params,
    state: AdamState[Params],
    params: Params,
    learning_rate: F32[Tensor, ""] | float,
) -> tuple[Params, AdamState[Params]]:
    """Make one step of Adam or AdamW; return the new parameters and the new state.

        m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
        p = p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    A decoupled weight decay first shrinks p by the factor 1 - lr weight_decay; the other kind adds weight_decay p to g.

    Returns:
      The new parameters and the new state.

    Source: Kingma & Ba 2015, arXiv:1412.6980, algorithm 1; Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2.
    """
    decays = isinstance(cfg.weight_decay, Tensor) or cfg.weight_decay != 0
    if decays and cfg.decoupled_weight_decay:
        params = tree.map(
            lambda p: p * (1 - learning_rate * cfg.weight_decay), params
        )
    elif decays:
        grads = tree.map(lambda g, p: g + cfg.weight_decay * p, grads, params)

    step = state.step + 1
    mu = tree.map(lambda m, g: cfg.b1 * m + (1 - cfg.b1) * g, state.mu, grads)
    nu = tree.map(
        lambda v, g: cfg.b2 * v + (1 - cfg.b2) * g * g, state.nu, grads
    )

    mu_correction = _bias_correction(cfg.b1, step)
    nu_correction = _bias_correction(cfg.b2, step)

    def descend(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
        return p - learning_rate * (m / mu_correction) / (
            (v / nu_correction).sqrt() + cfg.eps
        )

    params = tree.map(descend, params, mu, nu)
    return params, AdamState(step=step, mu=mu, nu=nu)


def _bias_correction(
    decay: F32[Tensor, ""] | float, step: F32[Tensor, ""]
) -> F32[Tensor, ""]:
    """Compute 1 - decay^step by expm1; in float32 the plain difference loses 4 digits at decay 0.999 and step 1."""
    if isinstance(decay, Tensor):
        return -torch.expm1(step * decay.log())
    if decay == 0:
        return torch.ones_like(step)
    return -torch.expm1(step * math.log(decay))


def clip_by_global_norm(
    grads: Params, max_norm: F32[Tensor, ""] | float
) -> tuple[Params, F32[Tensor, ""]]:
    """Scale gradients so that their L2 norm over all leaves is at most `max_norm`; return them and the norm before.

    Equal to `torch.nn.utils.clip_grad_norm_`, the 1e-6 in its denominator included.

    Returns:
      The clipped gradients, and the norm before clipping.
    """
    norm = tree.global_norm(grads)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return tree.map(lambda g: g * scale, grads), norm


def schedule_factor(
    cfg: Schedule,
    update_index: I64[Tensor, ""],
    n_updates: int,
    end_factor: F32[Tensor, ""] | float | None = None,
) -> F32[Tensor, ""]:
    """Compute the factor of a scheduled scalar in update `update_index`, counted from 0.

    It rises as (update_index + 1) / (warmup_updates + 1) and is 1 from `warmup_updates` on. Then it falls to
    `end_factor` at `n_updates` along a line or half a cosine, or stays.
    """
    warmup = ((update_index + 1) / (cfg.warmup_updates + 1)).clamp(max=1.0)
    if cfg.kind == "constant":
        return warmup

    n_decay_updates = max(n_updates - cfg.warmup_updates, 1)
    progress = ((update_index - cfg.warmup_updates) / n_decay_updates).clamp(
        0.0, 1.0
    )
    decay = (
        1 - progress
        if cfg.kind == "linear"
        else 0.5 * (1 + torch.cos(math.pi * progress))
    )
    end = cfg.end_factor if end_factor is None else end_factor
    return warmup * (end + (1 - end) * decay)
