"""What an environment and a network are to the learner: the functions that a user supplies, and their types.

An environment is three pure functions and their settings, `Environment`:

    reset(cfg, world, key)                           -> state       one row for each key
    step_functional(cfg, world, state, action, key)  -> state, Timestep
    observe(cfg, world, state)                       -> observation

A network is two pure functions; an `Agent` is a network, its settings, and the distribution over actions that its
output stands for:

    init(cfg, key)                   -> params
    apply(cfg, world, params, obs)   -> output      a NamedTuple with the field `value`

`cfg` is static: a Python scalar, or a frozen dataclass of such. `world` is a tree of tensors that stay fixed while a
policy learns (`NoWorld()` if there are none). A tree of tensors is a tensor, or a NamedTuple, tuple or list of trees;
a NamedTuple names its parts. So are `state`, `params` and the observation, and all but `params` and `world` have the
leading axis B, one row for each environment. Shapes and dtypes stay the same from step to step.

An environment's `key` is `I64[Tensor, "B 2"]`, one key for each row, so that a row depends on its own key alone. Rows
are independent. A row that has finished stays as it is: reward 0, the same state, the same flags. Nothing resets
itself; rollouts do that (`envs.base.step_with_autoreset`).

All parameters of these functions are positional, so that an implementation names them freely.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias

from torch import Tensor
from typing_extensions import TypeVar

from funcppo.distributions import CATEGORICAL, Distribution
from funcppo.types import F32, I64, Bool, Obs, Params, ResetSample, State, World

# What is static about an environment or a network: hashable, as a Python scalar and
# a frozen dataclass of such are. A new value is a new graph.
Settings: TypeAlias = Any


class ActorCriticOutput(Protocol):
    """The output of a network, as far as the learner reads it; the rest is for the agent's `Distribution`."""

    @property
    def value(self) -> F32[Tensor, "B"]: ...


Output = TypeVar("Output", bound=ActorCriticOutput, infer_variance=True)


class Timestep(NamedTuple):
    """The transition just made. The observation that it leads to is `observe(state)`, before any reset."""

    reward: F32[Tensor, "B"]
    terminated: Bool[Tensor, "B"]  # the task is over: no reward can follow
    # Cut by a limit that is no part of the task, such as a time limit: rewards would have followed. The value of the
    # state that was reached stands for these, unless `PPOConfig.bootstrap_truncated` is off.
    truncated: Bool[Tensor, "B"]


class MaskedObservation(NamedTuple):
    """An observation that says which actions are legal; `nets.mlp` reads it, and so may a network of your own."""

    features: F32[Tensor, "B F"]
    action_mask: Bool[
        Tensor, "B S"
    ]  # the action is legal; some action of each row is


class NoWorld(NamedTuple):
    """The world of an environment that needs none."""


class ResetFn(Protocol[World, State]):
    """Returns the first state of an episode for each key."""

    def __call__(
        self, cfg: Settings, world: World, key: I64[Tensor, "B 2"], /
    ) -> State: ...


class StepFn(Protocol[World, State]):
    """Makes one transition in each row."""

    def __call__(
        self,
        cfg: Settings,
        world: World,
        state: State,
        action: Tensor,
        key: I64[Tensor, "B 2"],
        /,
    ) -> tuple[State, Timestep]: ...


class ObserveFn(Protocol[World, State, Obs]):
    """Returns what the policy sees of a state."""

    def __call__(self, cfg: Settings, world: World, state: State, /) -> Obs: ...


class SampleResetFn(Protocol[World, ResetSample]):
    """Samples the random part of a reset for each key."""

    def __call__(
        self, cfg: Settings, world: World, key: I64[Tensor, "B 2"], /
    ) -> ResetSample: ...


class ResetFromSampleFn(Protocol[World, ResetSample, State]):
    """Builds the first state of an episode from the random part of a reset."""

    def __call__(
        self, cfg: Settings, world: World, reset_sample: ResetSample, /
    ) -> State: ...


class StepWithAutoresetFn(Protocol[World, State, ResetSample]):
    """Makes one transition and resets the finished rows; returns the fields of an `AutoresetStep`."""

    def __call__(
        self,
        cfg: Settings,
        world: World,
        state: State,
        action: Tensor,
        key: I64[Tensor, "B 2"],
        reset_sample: ResetSample,
        /,
    ) -> tuple[State, Timestep, State]: ...


class RestartFn(Protocol[World, State]):
    """Replaces finished rows of a state by those of a state after a reset, and keeps what outlives an episode."""

    def __call__(
        self,
        cfg: Settings,
        world: World,
        state: State,
        finished: Bool[Tensor, "B"],
        reset_state: State,
        /,
    ) -> State: ...


class AutoresetStep(NamedTuple, Generic[State]):
    """A transition after which finished rows start again."""

    reached_state: State  # before any reset
    timestep: Timestep
    next_state: State  # to continue from: finished rows are reset


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSpec:
    """The sizes that a network is built for."""

    observation_size: int  # numbers in an observation of one row
    action_size: int  # discrete actions, or components of a continuous action
    continuous_actions: bool = False
    # of one row's observation, where it is no vector: (height, width, channels) of an image
    observation_shape: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row's observation."""
        return self.observation_shape or (self.observation_size,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment(Generic[World, State, Obs, ResetSample]):
    """An environment: its functions, their settings, and what is static about it."""

    cfg: Settings  # the first argument of each function
    reset: ResetFn[World, State]
    step_functional: StepFn[World, State]
    observe: ObserveFn[World, State, Obs]
    # False if `truncated` is never true: rollouts then spare the observations after each step. An environment that
    # truncates all the same is learnt as if it terminated there.
    truncates: bool = True

    # A reset in two parts, for states too large to hold one for every step of a rollout:
    # reset(key) == reset_from_sample(sample_reset(key)). None: the sample is the state itself.
    sample_reset: SampleResetFn[World, ResetSample] | None = None
    reset_from_sample: ResetFromSampleFn[World, ResetSample, State] | None = (
        None
    )

    # A step and a reset together, for an environment where the two share their costly part; see `envs.base`.
    step_with_autoreset: (
        StepWithAutoresetFn[World, State, ResetSample] | None
    ) = None

    # For a state of which something outlives an episode, such as running moments. None: nothing does.
    restart: RestartFn[World, State] | None = None

    # For networks that are built from it, such as `nets.mlp`. That one reads an observation of one tensor [B, F], or a
    # `MaskedObservation`.
    spec: EnvironmentSpec | None = None


class InitFn(Protocol[Params]):
    """Samples the parameters of a network."""

    def __call__(self, cfg: Settings, key: I64[Tensor, "2"], /) -> Params: ...


class ApplyFn(Protocol[World, Params, Obs, Output]):
    """Applies a network to the observations of B rows."""

    def __call__(
        self, cfg: Settings, world: World, params: Params, obs: Obs, /
    ) -> Output: ...


class WithinCapacityFn(Protocol[Obs]):
    """Returns which rows the network has room for; the output of the others means nothing."""

    def __call__(self, cfg: Settings, obs: Obs, /) -> Bool[Tensor, "B"]: ...


_DEFAULT_DISTRIBUTION: Distribution[Any] = CATEGORICAL


@dataclass(frozen=True, kw_only=True, slots=True)
class Agent(Generic[World, Params, Obs, Output]):
    """A network and how it acts: its functions, their settings, and the distribution that its output stands for."""

    cfg: Settings  # the first argument of each function
    init: InitFn[Params]
    apply: ApplyFn[World, Params, Obs, Output]
    # by default, that of an output that has `logits`
    distribution: Distribution[Output] = _DEFAULT_DISTRIBUTION
    # None: the network has room for all rows
    within_capacity: WithinCapacityFn[Obs] | None = None


# For code that serves all environments and all networks.
AnyEnvironment: TypeAlias = Environment[Any, Any, Any, Any]
AnyAgent: TypeAlias = Agent[Any, Any, Any, Any]


class NetworkFactory(Protocol):
    """Builds an agent for the sizes of an environment."""

    def __call__(self, spec: EnvironmentSpec, /) -> AnyAgent: ...


class GatherShards(Protocol):
    """Gathers tensors of the shards of all processes, `runtime.distributed.AllGather`."""

    def __call__(self, shards: Tensor, /) -> Tensor:
        """All shards [n_shards, ...], in their order, from those of this process [k, ...]."""
        ...
