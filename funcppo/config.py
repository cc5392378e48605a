"""Every setting of the learner and every default, once. Python scalars only: a new value is a new graph.

What may change while training (learning rate, clip range, weights of the loss, discounts) starts from here and then
lives in `TrainState.scalars` as 0-d tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from funcppo.envs.base import Environment
    from funcppo.nets.base import Agent


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How a scalar moves over the updates, as a factor of its starting value."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_updates: int = 0  # updates over which the factor rises linearly to 1
    end_factor: float = 0.0  # factor after the last update; of no account when constant


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamConfig:
    """Adam; with a decoupled weight decay, AdamW."""

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-5
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = True  # decay the weights themselves (AdamW); otherwise it is added to the gradient


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOConfig:
    """Proximal policy optimisation. The defaults are those of Huang et al. 2022 for classic control."""

    n_envs: int = 4  # B
    n_steps: int = 128  # T, of one rollout
    n_updates: int = 976  # rollouts in a whole run: the horizon of the schedules
    n_epochs: int = 4  # passes over a rollout
    n_minibatches: int = 4  # of one epoch; must divide n_envs * n_steps
    n_microbatches: int = 1  # parts of a minibatch whose gradients are added up, for want of memory or cache; a divisor
    learning_rate: float = 2.5e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_eps: float = 0.2  # range of the probability ratio, and of the value where that is clipped
    value_coef: float = 0.5
    entropy_coef: float = 0.01
    max_grad_norm: float = 0.5
    learning_rate_schedule: Schedule = Schedule(kind="linear")
    clip_eps_schedule: Schedule = Schedule()
    entropy_coef_schedule: Schedule = Schedule()
    adam: AdamConfig = AdamConfig()
    advantage_ddof: int | None = 1  # normalise within a minibatch: 1 sample, 0 population deviation, None not at all
    value_loss: Literal["plain", "clipped_max", "clipped_only"] = "clipped_max"
    half_value_loss: bool = True  # value loss is half the squared error; otherwise the whole
    target_kl: float | None = None  # stop the update once the policy has moved further, in nats
    kl_stop: Literal["epoch", "minibatch"] = "epoch"  # after an epoch that ends beyond, or before such a minibatch
    bootstrap_truncated: bool = True  # a truncated episode is worth V of its last state; otherwise nothing

    def __post_init__(self) -> None:
        """Errors: ValueError naming the field."""
        for name in ("n_envs", "n_steps", "n_updates", "n_epochs", "n_minibatches", "n_microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: want 1 or more")
        if self.n_envs * self.n_steps % self.n_minibatches:
            raise ValueError(
                f"n_minibatches={self.n_minibatches}: want a divisor of n_envs * n_steps = {self.n_envs * self.n_steps}"
            )
        if (rows := self.n_envs * self.n_steps // self.n_minibatches) % self.n_microbatches:
            raise ValueError(f"n_microbatches={self.n_microbatches}: want a divisor of the {rows} rows of a minibatch")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A learning problem: the algorithm, the environment, the network."""

    ppo: PPOConfig
    env: Environment
    agent: Agent
    update_agent: Agent | None = None  # the agent as minibatches apply it, of the same params; None: as it acts
