"""Adam, gradient clipping and schedules as pure functions."""

from __future__ import annotations

import math
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from funcppo import tree
from funcppo.config import AdamConfig, Schedule
from funcppo.types import F32, I64

Params = TypeVar("Params")


class AdamState(NamedTuple, Generic[Params]):
    """Moments have the structure of params."""

    step: F32[Tensor, ""]  # updates so far
    mu: Params  # running mean of the gradient
    nu: Params  # running mean of its square


def init(params: Params) -> AdamState[Params]:
    """No update made yet."""
    like = tree.leaves(params)[0]
    step = torch.zeros((), dtype=like.dtype, device=like.device)
    return AdamState(step=step, mu=tree.zeros_like(params), nu=tree.zeros_like(params))


def update(
    cfg: AdamConfig, grads: Params, state: AdamState[Params], params: Params, learning_rate: F32[Tensor, ""] | float
) -> tuple[Params, AdamState[Params]]:
    """The new params and the new state after one step.

        m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
        p = p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    Decoupled decay first shrinks p by the factor 1 - lr weight_decay, the other kind adds weight_decay p to g.

    Source: Kingma & Ba 2015, arXiv:1412.6980, algorithm 1; Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2.
    """
    step = state.step + 1
    if cfg.weight_decay and cfg.decoupled_weight_decay:
        params = tree.map(lambda p: p * (1 - learning_rate * cfg.weight_decay), params)
    elif cfg.weight_decay:
        grads = tree.map(lambda g, p: g + cfg.weight_decay * p, grads, params)
    mu = tree.map(lambda m, g: cfg.b1 * m + (1 - cfg.b1) * g, state.mu, grads)
    nu = tree.map(lambda v, g: cfg.b2 * v + (1 - cfg.b2) * g * g, state.nu, grads)
    # 1 - b**t in float32 loses 4 digits at b = 0.999, t = 1; expm1 keeps them.
    c1, c2 = (-torch.expm1(step * math.log(b)) if b else torch.ones_like(step) for b in (cfg.b1, cfg.b2))
    params = tree.map(lambda p, m, v: p - learning_rate * (m / c1) / ((v / c2).sqrt() + cfg.eps), params, mu, nu)
    return params, AdamState(step=step, mu=mu, nu=nu)


def clip_by_global_norm(grads: Params, max_norm: F32[Tensor, ""] | float) -> tuple[Params, F32[Tensor, ""]]:
    """The tree scaled so that its L2 norm is at most `max_norm`, and the norm before.

    Equal to torch.nn.utils.clip_grad_norm_, the 1e-6 in its denominator included.
    """
    norm = tree.global_norm(grads)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return tree.map(lambda g: g * scale, grads), norm


def schedule_factor(cfg: Schedule, update_index: I64[Tensor, ""], n_updates: int) -> F32[Tensor, ""]:
    """The factor for update number `update`, counted from 0.

    It rises as (update + 1) / (warmup + 1) to 1 at `warmup`, then falls to `end` at `n_updates` along a line or half
    a cosine, or stays.
    """
    rise = ((update_index + 1) / (cfg.warmup_updates + 1)).clamp(max=1.0)
    if cfg.kind == "constant":
        return rise
    progress = ((update_index - cfg.warmup_updates) / max(n_updates - cfg.warmup_updates, 1)).clamp(0.0, 1.0)
    left = 1 - progress if cfg.kind == "linear" else 0.5 * (1 + torch.cos(math.pi * progress))
    return rise * (cfg.end_factor + (1 - cfg.end_factor) * left)
