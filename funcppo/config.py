"""Every setting of the learner with its default: `PPOConfig`, and the whole learning problem, `Config`.

Settings are Python scalars, and a compiled training step is specialised to them. What may change while training
(learning rate, clip range, weights of the loss, discounts) starts from here and then lives in `TrainState.scalars` as
0-d tensors.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from funcppo.core.settings import (
    DecayRate,
    FieldError,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Size,
    UnitInterval,
    check_fields,
)

# It imports torch, which the command line's help does without.
if TYPE_CHECKING:
    from collections.abc import Callable

    from funcppo.interfaces import AnyAgent, AnyEnvironment, GatherShards

# fields of `PPOConfig` from which `losses.Scalars` are made, and that say how those change
SCALAR_FIELDS = (
    "n_updates",
    "learning_rate",
    "gamma",
    "gae_lambda",
    "clip_eps",
    "value_coef",
    "entropy_coef",
    "max_grad_norm",
    "learning_rate_schedule",
    "clip_eps_schedule",
    "entropy_coef_schedule",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Schedule of a scalar over the updates, as a factor of its initial value."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the schedule, as a factor of the initial value."""
    warmup_updates: NonNegativeInt = 0
    """Number of updates before the factor is 1; it rises to that linearly."""
    end_factor: NonNegativeFloat = 0.0
    """Factor after the last update; ignored if the kind is constant."""

    __post_init__ = check_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamConfig:
    """Settings of Adam, or of AdamW if the weight decay is decoupled."""

    b1: DecayRate = 0.9
    """Decay rate of the first-moment estimate."""
    b2: DecayRate = 0.999
    """Decay rate of the second-moment estimate."""
    eps: NonNegativeFloat = 1e-5
    """Term added to the denominator for numerical stability."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight-decay coefficient; 0 for none."""
    decoupled_weight_decay: bool = True
    """Decay the weights directly (AdamW) instead of adding the decay to the gradient. Default: on."""

    __post_init__ = check_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOConfig:
    """Settings of proximal policy optimisation. The defaults are those of Huang et al. 2022 for classic control."""

    n_envs: Size = 4
    """Number of parallel environments."""
    n_steps: Size = 128
    """Number of steps per environment in one rollout."""
    n_updates: PositiveInt = 976
    """Number of rollouts in a whole run; the length of the schedules. `funcppo train` sets it from --steps."""
    n_epochs: Size = 4
    """Number of passes over each rollout."""
    n_minibatches: Size = 4
    """Number of minibatches per epoch; must divide n_envs * n_steps."""
    n_microbatches: Size = 1
    """Gradient-accumulation steps per minibatch; must divide the minibatch size."""
    n_shards: Size = 1
    """Number of shards: equal shares of the environments, each with keys and row orders of its own, whose gradients are
    summed in their order. The result does not depend on how many processes hold them. Must divide n_envs, and
    n_minibatches * n_microbatches the rows of a shard."""
    learning_rate: NonNegativeFloat = 2.5e-4
    """Initial learning rate of Adam."""
    gamma: UnitInterval = 0.99
    """Discount factor, 0 to 1."""
    gae_lambda: UnitInterval = 0.95
    """Decay lambda, 0 to 1, of generalised advantage estimation (GAE)."""
    clip_eps: NonNegativeFloat = 0.2
    """Clip range of the probability ratio, and of the change in value where value_loss is clipped."""
    value_clip_eps: NonNegativeFloat | None = None
    """Clip range of the change in value, in the unit of returns and without a schedule. Default: that of the ratio."""
    value_coef: NonNegativeFloat = 0.5
    """Weight of the value loss."""
    entropy_coef: NonNegativeFloat = 0.01
    """Weight of the entropy bonus. For the prover the entropy is relative to the rule confidences: -KL(policy, prior),
    in nats."""
    max_grad_norm: PositiveFloat = 0.5
    """Maximum global L2 norm of the gradient; larger gradients are scaled down."""
    learning_rate_schedule: Schedule = Schedule(kind="linear")
    """Schedule of the learning rate."""
    clip_eps_schedule: Schedule = Schedule()
    """Schedule of the clip range."""
    entropy_coef_schedule: Schedule = Schedule()
    """Schedule of the entropy weight."""
    adam: AdamConfig = AdamConfig()
    """Settings of the Adam optimiser."""
    advantage_ddof: Literal[0, 1] | None = 1
    """Normalise advantages within each minibatch by the standard deviation with this ddof: 1 sample, 0 population.
    None: no normalisation."""
    value_loss: Literal["plain", "clipped_max", "clipped_only"] = "clipped_max"
    """Form of the value loss. plain: squared error; clipped_only: squared error of the clipped value; clipped_max: the
    larger of the two."""
    half_value_loss: bool = True
    """Multiply the value loss by 1/2. Default: on."""
    target_kl: PositiveFloat | None = None
    """Stop an update when the approximate KL divergence from the old policy exceeds this, in nats. What follows in the
    update is computed and discarded, so that a stop saves no time. Default: never."""
    kl_stop: Literal["epoch", "minibatch"] = "epoch"
    """Which estimates target_kl is compared with; each is of one minibatch, before its step. epoch: that of the last
    minibatch of each epoch, which is applied, and the later epochs are not; minibatch: that of every minibatch, and the
    first beyond target_kl is not applied, nor are the later ones."""
    bootstrap_truncated: bool = True
    """Bootstrap with V(s_T) when an episode is truncated; if off, truncation counts as termination. Default: on."""

    def __post_init__(self) -> None:
        """Check the ranges of all fields, and that batches divide evenly into minibatches, microbatches and shards.

        Raises:
          ValueError: names the field.
        """
        check_fields(self)
        batch_size = self.n_envs * self.n_steps
        minibatch_size = batch_size // self.n_minibatches
        microbatch_size = minibatch_size // self.n_microbatches
        for name, number, what in (
            ("n_shards", self.n_envs, "n_envs ="),
            ("n_minibatches", batch_size, "n_envs * n_steps ="),
            ("n_microbatches", minibatch_size, "the rows of a minibatch,"),
            ("n_shards", microbatch_size, "the rows of a microbatch,"),
        ):
            divisor = getattr(self, name)
            if number % divisor:
                raise FieldError(name, f"a divisor of {what} {number}", divisor)
        # The deviation of one advantage is 0 (ddof 0) or not defined (ddof 1).
        if minibatch_size == 1 and self.advantage_ddof is not None:
            raise FieldError(
                "n_minibatches",
                "at least 2 rows a minibatch to normalise advantages over, or advantage_ddof None",
                self.n_minibatches,
            )

    def with_value(self, path: str, value: object) -> PPOConfig:
        """Return the settings with another value of one, such as gamma or adam.b1.

        Raises:
          FieldError: the value is out of range.
        """
        group, _, name = path.rpartition(".")
        if group:
            nested: Any = getattr(self, group)
            value = dataclasses.replace(nested, **{name: value})
        return dataclasses.replace(self, **{group or name: cast(Any, value)})

    @property
    def n_envs_per_shard(self) -> int:
        """Return the number of environments of one shard."""
        return self.n_envs // self.n_shards


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Complete settings of a learning problem: PPO, the environment and the agent."""

    ppo: PPOConfig
    """The algorithm's settings."""
    env: AnyEnvironment
    """The environment."""
    agent: AnyAgent
    """The network, and the distribution that it acts by."""
    update_agent: AnyAgent | None = None
    """The agent that the update applies to the same params, e.g. of a smaller capacity. None: `agent`."""
    loss: Callable[..., Any] | None = None
    """Loss of a minibatch. None: `losses.loss_fn`."""
    advantages: Callable[..., Any] | None = None
    """Estimator of advantages and value targets. None: `advantages.estimate_gae`."""
    gather_shards: GatherShards | None = None
    """Gathers the shards of all processes. None: this process holds them all."""

    def __post_init__(self) -> None:
        """Check that the sizes suit the environment and the network: one shard with memory or host environments.

        Raises:
          ValueError: names the field.
        """
        has_memory = self.agent.initial_memory is not None
        if self.ppo.n_shards > 1 and (has_memory or self.env.host is not None):
            reason = "where the network has memory or the environments step on the host"
            raise FieldError("n_shards", f"1 {reason}", self.ppo.n_shards)
        if not has_memory:
            return
        # Each minibatch and microbatch holds whole environments.
        n_envs = self.ppo.n_envs
        for name in ("n_minibatches", "n_microbatches"):
            n = getattr(self.ppo, name)
            if n_envs % n:
                expected = f"a divisor of the {n_envs} environments, because the network has memory"
                raise FieldError(name, expected, n)
            n_envs //= n

    def without_scalars(self) -> Config:
        """Return the config with every field of `SCALAR_FIELDS` at its default."""
        defaults = PPOConfig()
        scalars = {name: getattr(defaults, name) for name in SCALAR_FIELDS}
        ppo = dataclasses.replace(self.ppo, **scalars)
        return dataclasses.replace(self, ppo=ppo)
