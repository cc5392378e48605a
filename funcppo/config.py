"""Every setting of the learner with its default: `PPOConfig`, and the whole learning problem, `Config`.

Settings are Python scalars, and a compiled training step is specialised to them. What may change while training
(learning rate, clip range, weights of the loss, discounts) starts from here and then lives in `TrainState.scalars` as
0-d tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if (
    TYPE_CHECKING
):  # it imports torch, which the command line's help does without
    from funcppo.interfaces import Agent, Environment


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How a scalar changes over the updates, as a factor of its initial value."""

    kind: Literal["constant", "linear", "cosine"] = (
        "constant"  # shape of the decay after the warm-up
    )
    warmup_updates: int = 0  # updates over which the factor rises linearly to 1
    end_factor: float = (
        0.0  # factor after the last update; ignored if the kind is constant
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamConfig:
    """Settings of Adam; with a decoupled weight decay, of AdamW."""

    b1: float = 0.9  # decay rate of the running mean of the gradient
    b2: float = 0.999  # decay rate of the running mean of its square
    eps: float = 1e-5  # added to the denominator
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = True  # decay the weights themselves (AdamW); otherwise add the decay to the gradient


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOConfig:
    """Settings of proximal policy optimisation. The defaults are those of Huang et al. 2022 for classic control."""

    n_envs: int = 4  # Number of parallel environments.
    n_steps: int = 128  # Steps of each environment in one rollout.
    n_updates: int = (
        976  # Rollouts in a whole run: the horizon of the schedules.
    )
    n_epochs: int = 4  # Passes over each rollout.
    n_minibatches: int = (
        4  # Minibatches of one epoch; must divide n_envs * n_steps.
    )
    n_microbatches: int = 1  # Gradient-accumulation steps per minibatch; must divide the minibatch size.
    learning_rate: float = 2.5e-4  # Initial learning rate of Adam.
    gamma: float = 0.99  # Discount of rewards.
    gae_lambda: float = 0.95  # Decay of advantage estimates over steps.
    clip_eps: float = 0.2  # Clip range of the probability ratio, and of the value if its loss is clipped.
    value_coef: float = 0.5  # Weight of the value loss.
    entropy_coef: float = 0.01  # Weight of the entropy bonus.
    max_grad_norm: float = (
        0.5  # Gradients with a larger L2 norm are scaled down to it.
    )
    learning_rate_schedule: Schedule = Schedule(kind="linear")
    clip_eps_schedule: Schedule = Schedule()
    entropy_coef_schedule: Schedule = Schedule()
    adam: AdamConfig = AdamConfig()
    # Normalise advantages in each minibatch by the deviation with this many degrees of freedom taken off: 1 sample,
    # 0 population. None: do not normalise.
    advantage_ddof: int | None = 1
    # Squared error of the value: "plain"; "clipped_only", of the value within clip_eps of the old one; "clipped_max",
    # the larger of the two.
    value_loss: Literal["plain", "clipped_max", "clipped_only"] = "clipped_max"
    half_value_loss: bool = (
        True  # The value loss is half the squared error; otherwise the whole.
    )
    target_kl: float | None = (
        None  # Stop an update once KL(old policy, new policy) exceeds this, in nats.
    )
    # "epoch": stop after the epoch whose KL exceeds target_kl; "minibatch": skip the first minibatch that exceeds it,
    # and the rest.
    kl_stop: Literal["epoch", "minibatch"] = "epoch"
    bootstrap_truncated: bool = True  # Bootstrap with V(s_T) on truncation; if false, treat truncation as termination.

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
          ValueError: names the field.
        """
        for name in (
            "n_envs",
            "n_steps",
            "n_updates",
            "n_epochs",
            "n_minibatches",
            "n_microbatches",
        ):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}: expected 1 or more, got {value}")

        batch_size = self.n_envs * self.n_steps
        if batch_size % self.n_minibatches:
            raise ValueError(
                f"n_minibatches: expected a divisor of n_envs * n_steps = {batch_size}, got {self.n_minibatches}"
            )
        minibatch_size = batch_size // self.n_minibatches
        if minibatch_size % self.n_microbatches:
            raise ValueError(
                f"n_microbatches: expected a divisor of the {minibatch_size} rows of a minibatch, "
                f"got {self.n_microbatches}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A learning problem: the algorithm, the environment, the network."""

    ppo: PPOConfig
    env: Environment[Any, Any, Any, Any]
    agent: Agent[Any, Any, Any, Any]
    # The network as the update applies it, with the same params, e.g. with a smaller capacity. None: `agent`.
    update_agent: Agent[Any, Any, Any, Any] | None = None
