"""Generalised advantage estimation over time-major trajectories: `gae`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from funcppo.core.types import F32, Bool

if TYPE_CHECKING:
    from funcppo.config import Config
    from funcppo.losses import Scalars


class Steps(NamedTuple):
    """Rollout as an estimator of advantages reads it."""

    trajectory: Any  # `rollout.Transition` [T, B]
    # Where truncation is not bootstrapped, truncated steps are terminated, too.
    terminated: Bool[Tensor, "T B"]
    next_value: F32[Tensor, "T B"]  # of the state reached, before any reset


class Estimate(NamedTuple):
    """What a learner learns from at each step; a loss of the user's may read the extras."""

    advantage: F32[Tensor, "T B"]
    value_target: F32[Tensor, "T B"]
    extras: Any = ()  # a tree of tensors [T, B, ...]: `Batch.extras`


def estimate_gae(
    cfg: Config, world: object, params: object, steps: Steps, scalars: Scalars
) -> Estimate:
    """Estimate advantages by `gae`, as a learner does by default.

    Args:
      params: that the rollout was made with.

    Returns:
      Advantages and value targets, without extras.
    """
    advantage, value_target = gae(
        steps.trajectory.reward,
        steps.terminated,
        steps.trajectory.truncated,
        steps.trajectory.value,
        steps.next_value,
        gamma=scalars.gamma,
        gae_lambda=scalars.gae_lambda,
    )
    return Estimate(advantage, value_target)


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
    """Compute generalised advantage estimates and value targets, both [T, B] and detached.

        delta_t = r_t + gamma (1 - terminated_t) V(s_{t+1}) - V(s_t)
        A_t     = delta_t + gamma lambda (1 - terminated_t) (1 - truncated_t) A_{t+1},    A_T = 0

    Args:
      terminated: the episode ended: s_{t+1} is worth 0 and the sum stops.
      truncated: the time limit cut the episode: V(s_{t+1}) still counts, the sum stops.
      value: V(s_t) under the behaviour policy.
      next_value: V(s_{t+1}) of the state before any reset.
      gamma: discount of rewards.
      gae_lambda: decay of the sum over steps.

    Returns:
      advantage: the sum over t' >= t of (gamma lambda)^(t' - t) delta_t'.
      value_target: advantage + V(s_t).

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 11-16.
    """
    # Selected, not multiplied: 0 times a NaN of the next episode is NaN.
    delta = reward + torch.where(terminated, 0.0, gamma * next_value) - value
    discount = gamma * (~terminated).to(value.dtype)
    decay = gae_lambda * discount * (~truncated).to(value.dtype)
    advantage = discounted_sum(delta, decay).detach()
    return advantage, advantage + value.detach()


def next_values(
    value: F32[Tensor, "T B"],
    final_value: F32[Tensor, "T B"],
    last_value: F32[Tensor, "B"],
    truncated: Bool[Tensor, "T B"],
) -> F32[Tensor, "T B"]:
    """Return V(s_{t+1}) of each step [T, B]: the next row's value, or `final_value` where an episode was truncated.

    Where an episode terminated, the next row is of another episode; `gae` takes 0 there.

    Args:
      value: V(s_t) of the rollout.
      final_value: V of the last state of each truncated episode, at its last step.
      last_value: V of the state after the rollout.
    """
    value_of_next_row = torch.cat([value[1:], last_value.unsqueeze(0)])
    return torch.where(truncated, final_value, value_of_next_row)


def discounted_sum(
    x: F32[Tensor, "T B"], decay: F32[Tensor, "T B"]
) -> F32[Tensor, "T B"]:
    """Solve y_t = x_t + decay_t y_{t+1}, y_T = 0, by doubling: log2(T) steps instead of T.

    For example, x = 1, 2, 3, 4 and every decay 1/2. The first turn adds half of the next element: 2, 3.5, 5, 4, each
    of two terms, and decays are 1/4. The second adds a quarter of the element after next: 3.25, 4.5, 5, 4 = y.

    A decay of 0 lets nothing pass, a NaN or an infinity included.

    Source: Hillis & Steele 1986, "Data parallel algorithms"; Blelloch 1990 for linear recurrences.
    """
    length = x.shape[0]
    width = 1
    while width < length:
        # Invariant: x_t sums the terms t .. t + width - 1, and decay_t is the product of theirs.
        tail = torch.zeros_like(x[:width])
        later = torch.cat([x[width:], tail])
        x = x + torch.where(decay == 0, 0.0, decay * later)
        decay = decay * torch.cat([decay[width:], tail])
        width = 2 * width
    return x
