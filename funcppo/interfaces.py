"""What an environment and a network are to the learner: the functions that a user supplies, and their types.

An environment is three pure functions and their settings, `Environment`:

    reset(cfg, world, key)                           -> state       one row for each key
    step_functional(cfg, world, state, action, key)  -> state, Timestep
    observe(cfg, world, state)                       -> observation

A network is two pure functions; an `Agent` is a network, its settings, and the distribution over actions that its
output stands for:

    init(cfg, key)                   -> params
    apply(cfg, world, params, obs)   -> output      a NamedTuple with the field `value`

A network with memory has two functions in place of `apply`; the memory is a tree of tensors [B, ...]:

    initial_memory(cfg, n_rows, device)                        -> memory    at the start of an episode
    apply_recurrent(cfg, world, params, obs, memory)   -> output, memory    for one step

`cfg` is static: a Python scalar, or a frozen dataclass of such. `world` is a tree of tensors that stay fixed while a
policy learns (`NoWorld()` if there are none). A tree of tensors is a tensor, or a NamedTuple, tuple or list of trees;
a NamedTuple names its parts. So are `state`, `params` and the observation, and all but `params` and `world` have the
leading axis B, one row for each environment. Shapes and dtypes stay the same from step to step.

An environment's `key` is `I64[Tensor, "B 2"]`, one key for each row, so that a row depends on its own key alone. Rows
are independent. A row that has finished stays as it is: reward 0, the same state, the same flags. Nothing resets
itself; rollouts do that (`envs.wrappers.step_with_autoreset`).

All parameters of these functions are positional, so that an implementation names them freely.

Distributions over actions: CATEGORICAL, one of S actions; MULTI_CATEGORICAL, several actions at once;
DIAGONAL_GAUSSIAN, a vector of real numbers; SQUASHED_GAUSSIAN, a vector of numbers between -1 and 1. The logit of an
illegal action is -inf, or the smallest finite number: either way it has probability 0, is never sampled, and adds
nothing to entropy or gradients. Each row has at least one legal action.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, cast

import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor
from typing_extensions import TypeVar

from funcppo.core import random, tree
from funcppo.core.settings import (
    FieldError,
    NonNegativeInt,
    Size,
    check_fields,
    check_kind,
    check_value,
)
from funcppo.core.types import (
    F32,
    I64,
    Bool,
    Obs,
    Params,
    ResetSample,
    State,
    World,
)

ActionParams = TypeVar("ActionParams", infer_variance=True)

# Nodes and weights of the mean over a standard normal number, for the entropy
# of a squashed Gaussian.
_NODES, _WEIGHTS = hermegauss(8)
QUADRATURE = tuple(zip(_NODES.tolist(), (_WEIGHTS / _WEIGHTS.sum()).tolist()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution(Generic[ActionParams]):
    """Functions that read a network's output as a distribution over actions.

    Functions that their modules have by their names let later processes find the compiled training step on disk.
    """

    sample: Callable[[I64[Tensor, "2"], ActionParams], Tensor]
    """Returns an action of each row for a key and the output."""
    log_prob: Callable[[ActionParams, Tensor], F32[Tensor, "B"]]
    """Returns the log-probability, or log-density, of each row's action."""
    entropy: Callable[[ActionParams], F32[Tensor, "B"]]
    """Returns the entropy of each row's distribution, in nats."""
    mode: Callable[[ActionParams], Tensor]
    """Returns the most probable action of each row."""


class HasLogits(Protocol):
    """Output that describes one categorical distribution or several by its `logits`."""

    @property
    def logits(self) -> F32[Tensor, "B S"] | F32[Tensor, "B D S"]: ...


class HasMeanAndStd(Protocol):
    """Output that describes a normal distribution with independent components by mean and log standard deviation."""

    @property
    def mean(self) -> F32[Tensor, "B U"]: ...

    @property
    def log_std(self) -> F32[Tensor, "B U"]: ...


def _categorical_sample(
    key: I64[Tensor, "2"], output: HasLogits
) -> I64[Tensor, "B"]:
    return random.categorical(key, torch.log_softmax(output.logits, -1))


def _categorical_log_prob(
    output: HasLogits, action: I64[Tensor, "B"]
) -> F32[Tensor, "B"]:
    log_p = torch.log_softmax(output.logits, -1)
    return log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def _categorical_entropy(output: HasLogits) -> F32[Tensor, "B"]:
    log_p = torch.log_softmax(output.logits, -1)
    return -_mean_over_actions(log_p, log_p)


def _mean_over_actions(
    log_p: F32[Tensor, "... S"], x: F32[Tensor, "... S"]
) -> F32[Tensor, "..."]:
    """Compute the mean of x over actions with log-probabilities log_p; one of probability 0 adds nothing."""
    p = log_p.exp()
    # x is replaced before the product: 0 times -inf is NaN, in the gradient even where a mask leaves it out of the sum.
    return (p * torch.where(p > 0, x, 0.0)).sum(-1)


def _categorical_mode(output: HasLogits) -> I64[Tensor, "B"]:
    return output.logits.argmax(-1)


CATEGORICAL: Distribution[HasLogits] = Distribution(
    sample=_categorical_sample,
    log_prob=_categorical_log_prob,
    entropy=_categorical_entropy,
    mode=_categorical_mode,
)


def _multi_categorical_log_prob(
    output: HasLogits, action: I64[Tensor, "B D"]
) -> F32[Tensor, "B"]:
    return _categorical_log_prob(output, action).sum(-1)


def _multi_categorical_entropy(output: HasLogits) -> F32[Tensor, "B"]:
    return _categorical_entropy(output).sum(-1)


MULTI_CATEGORICAL: Distribution[HasLogits] = Distribution(
    sample=_categorical_sample,
    log_prob=_multi_categorical_log_prob,
    entropy=_multi_categorical_entropy,
    mode=_categorical_mode,
)


def negative_kl_to_prior(out: Any) -> F32[Tensor, "B"]:
    """Compute -KL(policy, prior) in nats for each row [B]: the entropy relative to the prior.

    As a bonus it draws the policy to the prior and not to uniform choices: with weight tau the best policy is
    proportional to prior * exp(Q / tau), where Q is the return of each action.

    Source: Todorov 2009, "Efficient computation of optimal actions", PNAS 106(28).
    """
    log_p = torch.log_softmax(out.logits, -1)
    log_prior = torch.log_softmax(out.prior_logits, -1)
    return -_mean_over_actions(log_p, log_p - log_prior)


KL_REGULARISED_CATEGORICAL: Distribution[Any] = Distribution(
    sample=_categorical_sample,
    log_prob=_categorical_log_prob,
    entropy=negative_kl_to_prior,
    mode=_categorical_mode,
)


def _gaussian_sample(
    key: I64[Tensor, "2"], output: HasMeanAndStd
) -> F32[Tensor, "B U"]:
    return output.mean + output.log_std.exp() * random.normal(
        key, tuple(output.mean.shape)
    )


def _gaussian_log_prob(
    output: HasMeanAndStd, action: F32[Tensor, "B U"]
) -> F32[Tensor, "B"]:
    z = (action - output.mean) * torch.exp(-output.log_std)
    return -(0.5 * z * z + output.log_std + 0.5 * math.log(2 * math.pi)).sum(-1)


def _gaussian_entropy(output: HasMeanAndStd) -> F32[Tensor, "B"]:
    return (output.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def _gaussian_mode(output: HasMeanAndStd) -> F32[Tensor, "B U"]:
    return output.mean


DIAGONAL_GAUSSIAN: Distribution[HasMeanAndStd] = Distribution(
    sample=_gaussian_sample,
    log_prob=_gaussian_log_prob,
    entropy=_gaussian_entropy,
    mode=_gaussian_mode,
)


# Source: Haarnoja et al. 2018, arXiv:1801.01290, appendix C.


def _squashed_sample(
    key: I64[Tensor, "2"], output: HasMeanAndStd
) -> F32[Tensor, "B U"]:
    return _squash(_gaussian_sample(key, output))


def _squashed_mode(output: HasMeanAndStd) -> F32[Tensor, "B U"]:
    """Return the squashed mean [B, U], which is the median; the density itself may have two modes, at the ends."""
    return _squash(output.mean)


def _squash(u: F32[Tensor, "B U"]) -> F32[Tensor, "B U"]:
    """Compute tanh(u), clamped to the largest number below 1 so that its inverse is finite."""
    largest = 1.0 - torch.finfo(u.dtype).eps / 2
    return torch.tanh(u).clamp(-largest, largest)


def _squashed_log_prob(
    output: HasMeanAndStd, action: F32[Tensor, "B U"]
) -> F32[Tensor, "B"]:
    """Compute log N(u) - sum log(1 - tanh(u)^2), u = artanh(action), for each row [B].

    It is exact for the action that was executed: 1 - action has no rounding error where it is small.
    """
    u = 0.5 * (torch.log1p(action) - torch.log1p(-action))
    return _gaussian_log_prob(output, u) - _log_tanh_slope(u).sum(-1)


def _squashed_entropy(output: HasMeanAndStd) -> F32[Tensor, "B"]:
    """Compute H(N) + sum E[log(1 - tanh(u)^2)] for each row [B], the mean by Gauss-Hermite quadrature.

    There is no closed form. The error is below 0.001 nats a component for deviations up to 1, and 0.1 up to e.
    """
    std = output.log_std.exp()
    mean_slope = torch.zeros_like(output.mean)
    for node, weight in QUADRATURE:
        slope = _log_tanh_slope(output.mean + node * std)
        mean_slope = mean_slope + weight * slope
    return _gaussian_entropy(output) + mean_slope.sum(-1)


def _log_tanh_slope(u: F32[Tensor, "B U"]) -> F32[Tensor, "B U"]:
    """Compute log(1 - tanh(u)^2) stably, as 2 (log 2 - |u| - log(1 + exp(-2 |u|)))."""
    size = u.abs()
    return 2.0 * (math.log(2.0) - size - torch.log1p(torch.exp(-2.0 * size)))


SQUASHED_GAUSSIAN: Distribution[HasMeanAndStd] = Distribution(
    sample=_squashed_sample,
    log_prob=_squashed_log_prob,
    entropy=_squashed_entropy,
    mode=_squashed_mode,
)


# What is static about an environment or a network: hashable, as a Python scalar and
# a frozen dataclass of such are. A new value is a new graph.
Settings: TypeAlias = Any


def check_settings(settings: object, name: str) -> None:
    """Check that settings contain no tensor at any depth.

    Args:
      name: of the settings, for an error.

    Raises:
      TypeError: one line that names the first field that is a tensor.
    """
    if isinstance(settings, Tensor):
        raise TypeError(
            f"{name}: expected a Python scalar or a frozen dataclass of such, got a tensor: "
            "tensors that a function reads are its world"
        )
    parts: dict[str, object] = {}
    names: Iterable[str] = getattr(settings, "_fields", ())  # of a NamedTuple
    if is_dataclass(settings) and not isinstance(settings, type):
        names = [field.name for field in fields(settings)]
    if names:
        parts = {f".{x}": getattr(settings, x) for x in names}
    elif isinstance(settings, Mapping):
        parts = {f"[{x!r}]": y for x, y in cast(Any, settings).items()}
    elif isinstance(settings, tuple | list):
        parts = {f"[{i}]": x for i, x in enumerate(cast(Any, settings))}
    for part, value in parts.items():
        check_settings(value, f"{name}{part}")


class ActorCriticOutput(Protocol):
    """Output of a network as far as the learner reads it; the agent's `Distribution` reads further fields."""

    @property
    def value(self) -> F32[Tensor, "B"]: ...


Output = TypeVar("Output", bound=ActorCriticOutput, infer_variance=True)
# What a network remembers of an episode: a tree of tensors [B, ...]; () for one without memory.
Memory: TypeAlias = Any


class Timestep(NamedTuple):
    """Reward and end flags of the transition just made; `observe(state)` is its next observation, before any reset."""

    reward: F32[Tensor, "B"]
    terminated: Bool[Tensor, "B"]  # the task is over: no reward can follow
    # Cut by a limit that is no part of the task, such as a time limit: rewards would have followed. The value of the
    # state that was reached stands for these, unless `PPOConfig.bootstrap_truncated` is off.
    truncated: Bool[Tensor, "B"]


class MaskedObservation(NamedTuple):
    """Observation with a mask of legal actions; `nets.mlp` reads it, and any other network may."""

    features: F32[Tensor, "B F"]  # or a tree of tensors
    # The action is legal; some action of each row is. Of several actions at once: side by side, some of each.
    action_mask: Bool[Tensor, "B S"]


def features(obs: Any) -> Tensor:
    """Return the numbers of an observation without its action mask; those of several tensors [B, ...] side by side.

    Raises:
      TypeError: it is neither a tensor nor a tuple or a `MaskedObservation` of such.
    """
    x = obs.features if isinstance(obs, MaskedObservation) else obs
    if isinstance(x, tuple):
        leaves = tree.leaves(cast(object, x))
        parts = [y.flatten(1).to(torch.float32) for y in leaves]
        return torch.cat(parts, -1)
    expected = (
        "observe: expected a tensor, a tuple of such or a MaskedObservation"
    )
    check_kind(x, Tensor, expected)
    return x


def numbers(obs: object) -> Tensor:
    """Return the features of an observation as floating-point numbers; integers as they are, bytes unscaled."""
    x = features(obs)
    return x if x.is_floating_point() else x.to(torch.float32)


def with_features(obs: Any, x: Tensor) -> Tensor | MaskedObservation:
    """Replace the features of an observation; keep its action mask if it has one."""
    is_masked = isinstance(obs, MaskedObservation)
    return MaskedObservation(x, obs.action_mask) if is_masked else x


class NoWorld(NamedTuple):
    """Empty world, for an environment that reads no tensors beside its state."""


def channel_axis(shape: tuple[int, ...]) -> int:
    """Return the axis of a row's observation that lists channels, or features: the last one.

    Of an image it is the first one where that is at most a quarter of each other axis, as in (3, 64, 64).
    """
    is_first = len(shape) == 3 and 4 * shape[0] <= min(shape[1:])
    return 0 if is_first else len(shape) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSpec:
    """Sizes and dtypes of observations and actions, from which a network is built."""

    observation_size: NonNegativeInt
    """Number of numbers in an observation of one row."""
    action_size: Size
    """Number of discrete actions (the sum of `action_sizes`), or of numbers of a continuous action."""
    continuous_actions: bool = False
    """Whether an action is F32 [B, U] in place of I64 [B]."""
    observation_shape: tuple[Size, ...] | None = None
    """Shape of one row's observation that is no vector, such as (height, width, channels) of an image."""
    action_sizes: tuple[Size, ...] | None = None
    """Sizes of several discrete actions that are taken at once; an action is then I64 [B, D]."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range, or action sizes that contradict the other fields."""
        check_fields(self)
        sizes = self.action_sizes
        if sizes is None:
            return
        if self.continuous_actions or sum(sizes) != self.action_size:
            expected = f"sizes of discrete actions with the sum action_size = {self.action_size}"
            raise FieldError("action_sizes", expected, sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one row's observation."""
        return self.observation_shape or (self.observation_size,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment(Generic[World, State, Obs, ResetSample]):
    """Environment: its pure functions, their settings, and static facts about it."""

    cfg: Settings
    """Settings: the first argument of each function."""
    reset: Callable[[Settings, World, I64[Tensor, "B 2"]], State]
    """Returns the first state of each row."""
    step_functional: Callable[
        [Settings, World, State, Tensor, I64[Tensor, "B 2"]],
        tuple[State, Timestep],
    ]
    """Returns the next state and the `Timestep` of an action."""
    observe: Callable[[Settings, World, State], Obs]
    """Returns the observation of a state."""
    truncates: bool = True
    """False if `truncated` is never true: rollouts then spare the observations after each step. An environment that
    truncates all the same is learnt as if it terminated there."""
    sample_reset: (
        Callable[[Settings, World, I64[Tensor, "B 2"]], ResetSample] | None
    ) = None
    """Returns the random part of a reset, where a state is too large to hold one for every step of a rollout:
    `reset(key) == reset_from_sample(sample_reset(key))`. None: the sample is the state itself."""
    reset_from_sample: (
        Callable[[Settings, World, ResetSample], State] | None
    ) = None
    """Returns the state of such a random part."""
    step_with_autoreset: (
        Callable[
            [Settings, World, State, Tensor, I64[Tensor, "B 2"], ResetSample],
            tuple[State, Timestep, State],
        ]
        | None
    ) = None
    """Returns the state before any reset, the `Timestep`, and the state in which finished rows are reset, where a step
    and a reset share their costly part."""
    restart: (
        Callable[[Settings, World, State, Bool[Tensor, "B"], State], State]
        | None
    ) = None
    """Returns the state in which finished rows have started again, where something outlives an episode, such as running
    moments. None: nothing does."""
    host: HostEnvironment | None = None
    """For an environment that steps on the host, outside of PyTorch. None: its functions are pure."""
    spec: EnvironmentSpec | None = None
    """Sizes for networks that are built for the environment, such as `fp.nets.mlp`."""


def do_nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostEnvironment:
    """Pure stand-in for an environment that steps on the host, used where its steps would have to be pure.

    A rollout calls it step by step; nothing compiles or captures it, and under `torch.vmap` it steps all rows at once.
    """

    # The same states and observations, with made-up transitions: what learns is compiled with it.
    stand_in: Environment[Any, Any, Any, Any]
    # The same environment in host objects of its own.
    evaluation: Environment[Any, Any, Any, Any]
    n_envs: int | None  # rows; None: as many as there are keys in a reset
    # Tries the host objects; a ValueError says what is wrong with them.
    check: Callable[[], None] = do_nothing
    # Ends the processes of an evaluation; the next one starts others.
    close: Callable[[], None] = do_nothing
    # Its state is in tensors. If not, it goes on from the last state that it returned, and refuses any other.
    is_pure: bool = False


def _apply_without_memory(
    cfg: Settings, world: object, params: object, obs: object, /
) -> Any:
    """Raise TypeError: the default `apply` of a network with memory; `rollout.apply_agent` applies such a network."""
    raise TypeError(
        "apply: expected a network without memory, got one with: use funcppo.rollout.apply_agent"
    )


_DEFAULT_DISTRIBUTION: Distribution[Any] = CATEGORICAL


@dataclass(frozen=True, kw_only=True, slots=True)
class Agent(Generic[World, Params, Obs, Output]):
    """Network and its way to act: its functions, their settings, and the action distribution that reads its output."""

    cfg: Settings
    """Settings: the first argument of each function."""
    init: Callable[[Settings, I64[Tensor, "2"]], Params]
    """Returns the first parameters."""
    apply: Callable[[Settings, World, Params, Obs], Output] = (
        _apply_without_memory
    )
    """Returns the output of the network for an observation."""
    distribution: Distribution[Output] = _DEFAULT_DISTRIBUTION
    """Distribution over actions that an output stands for. Default: that of an output that has `logits`."""
    within_capacity: Callable[[Settings, Obs], Bool[Tensor, "B"]] | None = None
    """Returns which rows the network has room for. None: all."""
    action_key_steps: Size | None = 1
    """Number of steps that draw their actions with the same key, for noise that lasts; a rollout begins with a new one.
    None: a whole rollout."""
    initial_memory: Callable[[Settings, int, torch.device], Memory] | None = (
        None
    )
    """Returns the memory at the beginning of an episode, of a network with memory."""
    apply_recurrent: (
        Callable[[Settings, World, Params, Obs, Memory], tuple[Output, Memory]]
        | None
    ) = None
    """Returns output and next memory, in place of `apply`."""
    encode: Callable[[Settings, World, Params, Obs], Any] | None = None
    """Encodes the observations of all steps of a sequence at once: the part of a network with memory that needs none.
    `apply_recurrent` receives its result in place of the observations. None: there is no such part."""
    remember: Callable[..., Memory] | None = None
    """Returns the memory [T, B, ...] before each of T steps, as steps of `apply_recurrent` do, from settings,
    parameters, encoded observations [T, B, ...], `done` [T, B] and the first memory; for compiled code on a GPU.
    None: a loop over the steps does."""
    remember_back: Callable[..., list[Tensor]] | None = None
    """Returns the gradient of a loss in the memory after each step from the arguments of `remember`, with all memories
    in place of the first one, and the gradient in each of their tensors, the others being given. None: a loop does."""

    def __post_init__(self) -> None:
        """Check that an agent has `apply`, or `initial_memory` and `apply_recurrent`, and a valid `action_key_steps`.

        Raises:
          TypeError: there is not either `apply`, or what a network with memory needs.
          ValueError: `action_key_steps` is no number of steps.
        """
        check_value("action_key_steps", Size | None, self.action_key_steps)
        has_apply = self.apply is not _apply_without_memory
        for name in ("initial_memory", "apply_recurrent"):
            if has_apply == (getattr(self, name) is not None):
                expected = "none beside apply" if has_apply else "a function"
                raise TypeError(
                    f"{name}: expected {expected}: an agent has either apply, or initial_memory and apply_recurrent"
                )


# For code that serves all environments and all networks.
AnyEnvironment: TypeAlias = Environment[Any, Any, Any, Any]
AnyAgent: TypeAlias = Agent[Any, Any, Any, Any]


# Builds an agent for the sizes of an environment.
NetworkFactory: TypeAlias = Callable[[EnvironmentSpec], AnyAgent]
# Returns the tensors of all shards [n_shards, ...], in their order, from those of
# this process [k, ...].
GatherShards: TypeAlias = Callable[[Tensor], Tensor]
