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
    warmup: int = 0  # updates over which the factor rises linearly to 1
    end: float = 0.0  # factor after the last update; of no account when constant


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamConfig:
    """Adam; with a decoupled weight decay, AdamW."""

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-5
    weight_decay: float = 0.0
    decoupled: bool = True  # decay the weights themselves (AdamW); otherwise it is added to the gradient


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
    learner: Agent | None = None  # the agent as minibatches apply it, of the same params; None: as it acts


@dataclass(frozen=True, kw_only=True, slots=True)
class ProverSettings:
    """What a data set does not fix about learning to prove its facts."""

    max_height: int | None = None  # rule applications on a branch of a proof; None chooses by the valid split
    max_depth: int = 20  # resolution steps of one search
    max_successors: int | None = None  # None: as many as a search can meet, so that none is dropped
    reward: Literal["proof", "signed", "balanced"] = "balanced"
    facts: Literal["auto", "chosen", "found"] = "auto"  # whether the policy picks facts too; auto: above height 1
    negatives: float = 1.0  # training negatives for each positive
    hard_fraction: float = 0.0  # share of them that the rules derive; many of those may be true
    embed_dim: int = 32
    hidden_dim: int = 64
    n_blocks: int = 0  # residual layers that the state passes
    budget: int = 5_000_000  # atoms of T_P held at most
    smoothing: float | None = None  # wrong pairs added to each rule's leave-one-out counts; None: its plain counts
    object_identity: bool = False  # different variables of a rule bind different constants

    def __post_init__(self) -> None:
        """Errors: ValueError naming the field."""
        for name in ("max_height", "max_depth", "max_successors", "embed_dim", "hidden_dim", "budget"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value}: want 1 or more")
        if self.n_blocks < 0:
            raise ValueError(f"n_blocks={self.n_blocks}: want 0 or more")
        if not 0.0 <= self.hard_fraction <= 1.0:
            raise ValueError(f"hard_fraction={self.hard_fraction}: want a share from 0 to 1")
        if self.negatives < 0.0:
            raise ValueError(f"negatives={self.negatives}: want 0 or more")
        if self.smoothing is not None and self.smoothing < 0.0:
            raise ValueError(f"smoothing={self.smoothing}: want 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class MineConfig:
    """Which rules are looked for in a graph, and how hard."""

    max_length: int = 3  # atoms of a body
    min_support: int = 5  # facts that a rule derives from other facts
    min_confidence: float = 0.01
    constants: bool = False  # also h(X, c) :- b(X, Z) and h(X, c) :- b(X, d)
    votes: int = 1  # a rule is kept when it is among this many best ones of some fact that it derives
    work: int = 200_000_000  # rows that one stage may make, about; what does not fit is sampled
    seconds: float | None = None  # stop looking after this time; what is found by then depends on the machine
    seed: int = 0  # of the samples

    def __post_init__(self) -> None:
        """Errors: ValueError naming the field."""
        if not 1 <= self.max_length <= 3:
            raise ValueError(f"max_length={self.max_length}: want 1, 2 or 3")
        for name in ("min_support", "votes", "work"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: want 1 or more")
        if not 0.0 <= self.min_confidence <= 1.0:
            raise ValueError(f"min_confidence={self.min_confidence}: want a number from 0 to 1")
        if self.seconds is not None and not self.seconds > 0.0:
            raise ValueError(f"seconds={self.seconds}: want more than 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One training run on a data set; what `config.json` in its folder holds."""

    dataset: str  # an embedded name, a folder or a program
    rules: str | None = None  # a rule file in place of the data set's own
    steps: int = 120_000  # environment steps; rounded up to whole rollouts
    seed: int = 0
    device: str = "cpu"
    strategy: str = "auto"  # how a training step is run; auto takes the fastest that works here
    precision: Literal["highest", "high", "bfloat16"] = "highest"  # of matrix products: float32, TF32, bfloat16
    score: Literal["auto", "success", "best-proof"] = "auto"  # auto takes the better of the two on valid
    validations: int = 12  # looks at the valid split while training; the params of the best one are kept
    valid_queries: int = 1000  # valid queries ranked at each, drawn evenly over relations
    patience: int = 5  # updates in a row with a loss or gradient that is not finite, after which the run stops
    prover: ProverSettings = ProverSettings()
    ppo: PPOConfig = PPOConfig(
        n_envs=256,
        n_steps=8,
        n_epochs=2,
        n_minibatches=4,
        learning_rate=1e-3,
        learning_rate_schedule=Schedule(kind="linear"),
        entropy_coef=0.3,  # of the entropy relative to the prior: how far what is learnt may move the confidences
        advantage_ddof=None,  # rewards are of order 1 already, and the weight above is in their unit
    )

    def __post_init__(self) -> None:
        """Errors: ValueError naming the field."""
        for name in ("steps", "validations", "valid_queries", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: want 1 or more")
