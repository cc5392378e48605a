"""Generalised advantage estimation over time-major trajectories."""

from __future__ import annotations

import torch
from torch import Tensor

from funcppo.types import F32, Bool


def gae(
    reward: F32[Tensor, "T B"],
    terminated: Bool[Tensor, "T B"],
    truncated: Bool[Tensor, "T B"],
    value: F32[Tensor, "T B"],
    next_value: F32[Tensor, "T B"],
    *,
    gamma: F32[Tensor, ""] | float,
    gae_lambda: F32[Tensor, ""] | float,
) -> tuple[F32[Tensor, "T B"], F32[Tensor, "T B"]]:
    """Advantages, and value targets = advantage + value; both detached.

        delta_t = r_t + gamma (1 - terminated_t) V(s_{t+1}) - V(s_t)
        A_t     = delta_t + gamma lambda (1 - terminated_t) (1 - truncated_t) A_{t+1},    A_T = 0

    Args:
      terminated: s_{t+1} is worth 0 and the sum stops.
      truncated: the sum stops, but V(s_{t+1}) counts.
      value: V(s_t) under the behaviour policy.
      next_value: V(s_{t+1}) of the state *before* any restart.
    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 11-16.
    """
    discount = gamma * (~terminated).to(value.dtype)
    delta = reward + discount * next_value - value
    advantage = discounted_sum(delta, gae_lambda * discount * (~truncated).to(value.dtype)).detach()
    return advantage, advantage + value.detach()


def next_values(
    value: F32[Tensor, "T B"],
    final_value: F32[Tensor, "T B"],
    last_value: F32[Tensor, "B"],
    truncated: Bool[Tensor, "T B"],
) -> F32[Tensor, "T B"]:
    """V(s_{t+1}) before any restart: the next row's value, but where an episode was cut the value of its last state."""
    return torch.where(truncated, final_value, torch.cat([value[1:], last_value.unsqueeze(0)]))


def discounted_sum(x: F32[Tensor, "T B"], decay: F32[Tensor, "T B"]) -> F32[Tensor, "T B"]:
    """y_t = x_t + decay_t y_{t+1}, y_T = 0, by doubling: log2(T) steps instead of T.

    After the step of width w, y_t sums x over t..t+2w-1 and decay_t is the product over the same span.

    Source: Hillis & Steele 1986, "Data parallel algorithms"; Blelloch 1990 for linear recurrences.
    """
    width, length = 1, x.shape[0]
    while width < length:
        tail = torch.zeros_like(x[:width])
        x = x + decay * torch.cat([x[width:], tail])
        decay = decay * torch.cat([decay[width:], tail])
        width = 2 * width
    return x
