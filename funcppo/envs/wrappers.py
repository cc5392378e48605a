"""Wrappers: functions from an environment to an environment, with their memory in its state.

    env = wrappers.normalize_observation(wrappers.time_limit(env, 100))

A wrapped environment is pure, keeps finished rows as they are, and can be wrapped again. What outlives an episode, such
as running moments, stays in the state through restarts (`Environment.restart`). For evaluation, `evaluation_env` keeps
the moments as they are and pays rewards unscaled.

Source: the wrappers of Gymnasium 1.0 with the same names, where one exists.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from funcppo.core import random, tree
from funcppo.core.settings import (
    FLOAT32_MAX,
    PositiveFloat,
    Range,
    Size,
    UnitInterval,
    check_fields,
)
from funcppo.core.types import F64, I64, Bool
from funcppo.envs import base
from funcppo.interfaces import (
    AnyEnvironment,
    Environment,
    EnvironmentSpec,
    MaskedObservation,
    Timestep,
)

EPSILON = 1e-8  # Gymnasium's, added to variances
GAMMA = 0.99  # Gymnasium's
INITIAL_COUNT = 1e-4  # Gymnasium's, of observations before the first one


class BeginFn(Protocol):
    """Builds a wrapper's state of an episode from the state of the environment in it after a reset."""

    def __call__(self, cfg: Wrapped, world: Any, inner: Any, /) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrapped:
    """The settings of a wrapped environment."""

    env: AnyEnvironment  # what is wrapped
    begin: BeginFn
    settings: Any = None  # of the wrapper


class PlainState(NamedTuple):
    """The state of a wrapper that remembers nothing."""

    inner: Any


def _wrap(
    env: AnyEnvironment, begin: BeginFn, settings: Any = None, **changes: Any
) -> AnyEnvironment:
    """`env` in a wrapper; `changes` are fields of the result beside those of a wrapper that does nothing.

    Raises:
      TypeError: what is wrapped is no environment.
    """
    _spec(env)
    fields: dict[str, Any] = {
        "cfg": Wrapped(env=env, begin=begin, settings=settings),
        "reset": _reset,
        "step_functional": _step,
        "observe": _observe,
        "restart": _restart,
        # The sample is that of the environment inside, so that rollouts hold no state of the wrapper for each step.
        "sample_reset": _sample_reset,
        "reset_from_sample": _reset_from_sample,
        "step_with_autoreset": None,
    }
    return dataclasses.replace(env, **(fields | changes))


def _spec(env: AnyEnvironment) -> EnvironmentSpec | None:
    """What an environment states of itself.

    Raises:
      TypeError: it is no environment, such as one of Gymnasium's without a bridge.
    """
    if not isinstance(cast(object, env), Environment):
        raise TypeError(
            f"env: expected an Environment, got {type(env).__name__}"
        )
    return env.spec


def _begin_plain(cfg: Wrapped, world: Any, inner: Any) -> PlainState:
    return PlainState(inner)


def _reset(cfg: Wrapped, world: Any, key: I64[Tensor, "B 2"]) -> Any:
    return cfg.begin(cfg, world, cfg.env.reset(cfg.env.cfg, world, key))


def _sample_reset(cfg: Wrapped, world: Any, key: I64[Tensor, "B 2"]) -> Any:
    return base.sample_reset(cfg.env, world, key)


def _reset_from_sample(cfg: Wrapped, world: Any, sample: Any) -> Any:
    inner = sample
    if cfg.env.reset_from_sample is not None:
        inner = cfg.env.reset_from_sample(cfg.env.cfg, world, sample)
    return cfg.begin(cfg, world, inner)


def _inner_step(
    cfg: Wrapped, world: Any, state: Any, action: Tensor, key: Tensor
) -> tuple[Any, Timestep]:
    """A step of the environment inside."""
    return cfg.env.step_functional(cfg.env.cfg, world, state.inner, action, key)


def _inner_observe(cfg: Wrapped, world: Any, inner: Any) -> Any:
    return cfg.env.observe(cfg.env.cfg, world, inner)


def _step(
    cfg: Wrapped, world: Any, state: Any, action: Tensor, key: Tensor
) -> tuple[Any, Timestep]:
    inner, timestep = _inner_step(cfg, world, state, action, key)
    return state._replace(inner=inner), timestep


def _observe(cfg: Wrapped, world: Any, state: Any) -> Any:
    return _inner_observe(cfg, world, state.inner)


def _restart_inner(
    cfg: Wrapped, world: Any, state: Any, finished: Tensor, reset_state: Any
) -> Any:
    return base.restart(
        cfg.env, world, state.inner, finished, reset_state.inner
    )


def _restart(
    cfg: Wrapped, world: Any, state: Any, finished: Tensor, reset_state: Any
) -> Any:
    """Finished rows begin again, with what the environment inside keeps of them."""
    inner = _restart_inner(cfg, world, state, finished, reset_state)
    # `reset_state` was built from an inner state that had nothing to keep.
    begun = cfg.begin(cfg, world, inner)
    return _with(tree.where(finished, begun, state), inner=inner)


def _with(state: Any, **changes: Any) -> Any:
    """A wrapper's state with other fields.

    `_replace` would do, but PyTorch 2.11 compiles no function that returns its result, as a rollout step does.
    """
    return type(state)(**(dict(zip(state._fields, state)) | changes))


def _is_finished(timestep: Timestep) -> Bool[Tensor, "B"]:
    return timestep.terminated | timestep.truncated


def evaluation_env(env: AnyEnvironment) -> AnyEnvironment:
    """The environment for evaluation: running moments stay as they are, and rewards are not normalised.

    One that steps on the host does so in other host objects.
    """
    cfg = env.cfg
    if not isinstance(cfg, Wrapped):
        return env if env.host is None else env.host.evaluation
    settings = cfg.settings
    if isinstance(settings, MomentsConfig):
        settings = dataclasses.replace(settings, evaluation=True)
    inner = evaluation_env(cfg.env)
    cfg = dataclasses.replace(cfg, env=inner, settings=settings)
    return dataclasses.replace(env, cfg=cfg, host=inner.host)


def stand_in_env(env: AnyEnvironment) -> AnyEnvironment:
    """The environment with its stand-in (`HostEnvironment`) in place of what steps on the host, so that it is pure."""
    cfg = env.cfg
    if not isinstance(cfg, Wrapped):
        return env if env.host is None else env.host.stand_in
    inner = stand_in_env(cfg.env)
    cfg = dataclasses.replace(cfg, env=inner)
    return dataclasses.replace(env, cfg=cfg, host=None)


# Time limit


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLimitConfig:
    """Settings of a time limit."""

    max_steps: Size  # steps after which an episode is truncated

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class TimeLimitState(NamedTuple):
    """The state inside, and the age and end of each row's episode."""

    inner: Any
    steps: I64[Tensor, "B"]
    terminated: Bool[Tensor, "B"]
    truncated: Bool[Tensor, "B"]


def time_limit(env: AnyEnvironment, max_steps: int) -> AnyEnvironment:
    """Truncate episodes after `max_steps` steps.

    A limit of the environment itself stays in force.
    """
    cfg = TimeLimitConfig(max_steps=max_steps)
    return _wrap(
        env,
        _begin_time_limit,
        cfg,
        step_functional=_step_time_limit,
        truncates=True,
    )


def _begin_time_limit(cfg: Wrapped, world: Any, inner: Any) -> TimeLimitState:
    n_rows = tree.leaves(inner)[0].shape[:1]
    device = tree.leaves(inner)[0].device
    never = torch.zeros(n_rows, dtype=torch.bool, device=device)
    steps = torch.zeros(n_rows, dtype=torch.int64, device=device)
    return TimeLimitState(inner, steps, never, never)


def _step_time_limit(
    cfg: Wrapped,
    world: Any,
    state: TimeLimitState,
    action: Tensor,
    key: Tensor,
) -> tuple[TimeLimitState, Timestep]:
    active = ~(state.terminated | state.truncated)
    stepped, timestep = _inner_step(cfg, world, state, action, key)
    steps = torch.where(active, state.steps + 1, state.steps)
    is_late = (steps >= cfg.settings.max_steps) & ~timestep.terminated

    # The environment inside knows nothing of this limit: a row cut by it is stepped, and the step discarded.
    next_state = TimeLimitState(
        inner=tree.where(active, stepped, state.inner),
        steps=steps,
        terminated=torch.where(active, timestep.terminated, state.terminated),
        truncated=torch.where(
            active, timestep.truncated | is_late, state.truncated
        ),
    )
    reward = torch.where(active, timestep.reward, 0.0)
    return next_state, Timestep(
        reward, next_state.terminated, next_state.truncated
    )


# Running moments


class Moments(NamedTuple):
    """Running mean and variance of the numbers [...] of each row; equal in all rows where these share them."""

    mean: F64[Tensor, "B ..."]
    variance: F64[Tensor, "B ..."]
    n: F64[Tensor, "B"]  # how many numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentsConfig:
    """Settings of a normalisation by running moments."""

    # Whether all rows share their moments; else each has its own, as Gymnasium's wrappers of one environment.
    shared: bool = True
    epsilon: PositiveFloat = EPSILON  # added to the variance
    gamma: UnitInterval = GAMMA  # discount of the returns that scale rewards
    evaluation: bool = False  # moments stay, rewards are not scaled

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


def _initial_moments(x: Tensor) -> Moments:
    """Mean 0 and variance 1, of a weight that the first number outweighs."""
    mean = torch.zeros_like(x, dtype=torch.float64)
    count = torch.full(
        x.shape[:1], INITIAL_COUNT, dtype=torch.float64, device=x.device
    )
    return Moments(mean, torch.ones_like(mean), count)


def _update_moments(
    cfg: MomentsConfig,
    moments: Moments,
    x: Tensor,
    is_counted: Bool[Tensor, "B"],
) -> Moments:
    """Moments with the counted rows of `x` added.

    Source: Chan, Golub & LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """
    x = x.to(torch.float64)
    weight = is_counted.to(torch.float64).view(-1, *[1] * (x.ndim - 1))
    if cfg.shared:
        n_added = weight.sum(0, keepdim=True)
        mean = (weight * x).sum(0, keepdim=True) / n_added.clamp_min(1.0)
        square_sum = (weight * (x - mean) ** 2).sum(0, keepdim=True)
    else:
        n_added, mean, square_sum = weight, x, torch.zeros_like(x)

    count = moments.n.view(-1, *[1] * (x.ndim - 1))
    total = count + n_added
    delta = torch.where(n_added > 0, mean - moments.mean, 0.0)
    new_sum = (
        moments.variance * count
        + square_sum
        + delta**2 * count * n_added / total
    )
    return Moments(
        mean=moments.mean + delta * n_added / total,
        variance=new_sum / total,
        n=total.flatten(),
    )


class NormalizeObservationState(NamedTuple):
    """The state inside, the moments of observations, and which rows have finished."""

    inner: Any
    moments: Moments
    finished: Bool[Tensor, "B"]


def normalize_observation(
    env: AnyEnvironment, *, shared: bool = True, epsilon: float = EPSILON
) -> AnyEnvironment:
    """Shift and scale observations to mean 0 and variance 1, by running moments over all observations so far.

    Each observation counts once: that of a reset and that of each step, the last of an episode included.

    Args:
      env: observes one tensor, or a `MaskedObservation`, whose features are normalised.
      shared: all rows share their moments; else each row has its own.
      epsilon: added to the variance.
    """
    return _wrap(
        env,
        _begin_normalize_observation,
        MomentsConfig(shared=shared, epsilon=epsilon),
        step_functional=_step_normalize_observation,
        observe=_observe_normalized,
        restart=_restart_normalize_observation,
    )


def _features(obs: Any) -> Tensor:
    """The numbers of an observation, without the mask.

    Raises:
      TypeError: it is neither a tensor nor a `MaskedObservation`.
    """
    features = obs.features if isinstance(obs, MaskedObservation) else obs
    if not isinstance(features, Tensor):
        raise TypeError(
            f"observe: expected a tensor or a MaskedObservation, got {type(obs).__name__}"
        )
    return features


def _with_features(obs: Any, features: Tensor) -> Tensor | MaskedObservation:
    """An observation with other features: beside its mask, if it has one."""
    if isinstance(obs, MaskedObservation):
        return obs._replace(features=features)
    return features


def _begin_normalize_observation(
    cfg: Wrapped, world: Any, inner: Any
) -> NormalizeObservationState:
    x = _features(_inner_observe(cfg, world, inner))
    never = torch.zeros(x.shape[:1], dtype=torch.bool, device=x.device)
    moments = _update_moments(cfg.settings, _initial_moments(x), x, ~never)
    return NormalizeObservationState(inner, moments, never)


def _count_observation(
    cfg: Wrapped,
    world: Any,
    state: NormalizeObservationState,
    inner: Any,
    is_counted: Bool[Tensor, "B"],
) -> Moments:
    if cfg.settings.evaluation:
        return state.moments
    x = _features(_inner_observe(cfg, world, inner))
    return _update_moments(cfg.settings, state.moments, x, is_counted)


def _step_normalize_observation(
    cfg: Wrapped,
    world: Any,
    state: NormalizeObservationState,
    action: Tensor,
    key: Tensor,
) -> tuple[NormalizeObservationState, Timestep]:
    inner, timestep = _inner_step(cfg, world, state, action, key)
    moments = _count_observation(cfg, world, state, inner, ~state.finished)
    next_state = NormalizeObservationState(
        inner, moments, _is_finished(timestep)
    )
    return next_state, timestep


def _restart_normalize_observation(
    cfg: Wrapped,
    world: Any,
    state: NormalizeObservationState,
    finished: Tensor,
    reset_state: NormalizeObservationState,
) -> NormalizeObservationState:
    inner = _restart_inner(cfg, world, state, finished, reset_state)
    moments = _count_observation(cfg, world, state, inner, finished)
    return NormalizeObservationState(inner, moments, state.finished & ~finished)


def _observe_normalized(
    cfg: Wrapped, world: Any, state: NormalizeObservationState
) -> Tensor | MaskedObservation:
    obs = _inner_observe(cfg, world, state.inner)
    x = _features(obs)
    mean, variance, _ = state.moments
    deviation = torch.sqrt(variance + cfg.settings.epsilon)
    dtype = x.dtype if x.dtype.is_floating_point else torch.float32
    return _with_features(obs, ((x - mean) / deviation).to(dtype))


class NormalizeRewardState(NamedTuple):
    """The state inside, the discounted return so far, its moments, and which rows have finished."""

    inner: Any
    discounted_return: F64[Tensor, "B"]
    moments: Moments
    finished: Bool[Tensor, "B"]


def normalize_reward(
    env: AnyEnvironment,
    *,
    gamma: float = GAMMA,
    shared: bool = True,
    epsilon: float = EPSILON,
) -> AnyEnvironment:
    """Divide rewards by the running deviation of the discounted return.

    As in Gymnasium, the return runs on where an episode is truncated.

    Args:
      gamma: discount of the return.
      shared: all rows share their moments; else each row has its own.
      epsilon: added to the variance.
    """
    return _wrap(
        env,
        _begin_normalize_reward,
        MomentsConfig(shared=shared, epsilon=epsilon, gamma=gamma),
        step_functional=_step_normalize_reward,
        restart=_restart_normalize_reward,
    )


def _begin_normalize_reward(
    cfg: Wrapped, world: Any, inner: Any
) -> NormalizeRewardState:
    first = tree.leaves(inner)[0]
    zero = torch.zeros(
        first.shape[:1], dtype=torch.float64, device=first.device
    )
    return NormalizeRewardState(
        inner, zero, _initial_moments(zero), zero.to(torch.bool)
    )


def _step_normalize_reward(
    cfg: Wrapped,
    world: Any,
    state: NormalizeRewardState,
    action: Tensor,
    key: Tensor,
) -> tuple[NormalizeRewardState, Timestep]:
    inner, timestep = _inner_step(cfg, world, state, action, key)
    if cfg.settings.evaluation:
        return state._replace(inner=inner), timestep

    active = ~state.finished
    continues = (~timestep.terminated).to(torch.float64)
    discounted = state.discounted_return * cfg.settings.gamma * continues
    discounted_return = torch.where(
        active, discounted + timestep.reward, state.discounted_return
    )
    moments = _update_moments(
        cfg.settings, state.moments, discounted_return, active
    )
    deviation = torch.sqrt(moments.variance + cfg.settings.epsilon)
    reward = (timestep.reward / deviation).to(timestep.reward.dtype)

    next_state = NormalizeRewardState(
        inner, discounted_return, moments, _is_finished(timestep)
    )
    return next_state, timestep._replace(reward=reward)


def _restart_normalize_reward(
    cfg: Wrapped,
    world: Any,
    state: NormalizeRewardState,
    finished: Tensor,
    reset_state: NormalizeRewardState,
) -> NormalizeRewardState:
    inner = _restart_inner(cfg, world, state, finished, reset_state)
    return _with(state, inner=inner, finished=state.finished & ~finished)


# Frame stack


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameStackConfig:
    """Settings of a frame stack."""

    n_frames: Size  # observations in a stack

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class FrameStackState(NamedTuple):
    """The state inside, the last observations, oldest first, and which rows have finished."""

    inner: Any
    frames: Tensor  # [B, n_frames, ...]
    finished: Bool[Tensor, "B"]
    action_mask: Any = ()  # of the last observation, if it has one


def frame_stack(env: AnyEnvironment, n_frames: int) -> AnyEnvironment:
    """Observe the last `n_frames` observations, oldest first, side by side along the last axis.

    An episode begins with as many copies of its first observation.

    Args:
      env: observes one tensor [B, ..., F], and the result [B, ..., n_frames * F]; or a `MaskedObservation`, whose
        features are stacked, beside the mask of the last one.
    """
    settings = FrameStackConfig(n_frames=n_frames)
    spec = _spec(env)
    if spec is not None:
        *axes, n_features = spec.shape
        spec = dataclasses.replace(
            spec,
            observation_size=n_frames * spec.observation_size,
            observation_shape=(*axes, n_frames * n_features),
        )
    return _wrap(
        env,
        _begin_frame_stack,
        settings,
        step_functional=_step_frame_stack,
        observe=_observe_frame_stack,
        spec=spec,
    )


def _begin_frame_stack(cfg: Wrapped, world: Any, inner: Any) -> FrameStackState:
    obs = _inner_observe(cfg, world, inner)
    x = _features(obs)
    frames = torch.stack([x] * cfg.settings.n_frames, 1)
    finished = torch.zeros(x.shape[:1], dtype=torch.bool, device=x.device)
    return FrameStackState(inner, frames, finished, _action_mask(obs))


def _step_frame_stack(
    cfg: Wrapped,
    world: Any,
    state: FrameStackState,
    action: Tensor,
    key: Tensor,
) -> tuple[FrameStackState, Timestep]:
    inner, timestep = _inner_step(cfg, world, state, action, key)
    obs = _inner_observe(cfg, world, inner)
    shifted = torch.cat([state.frames[:, 1:], _features(obs).unsqueeze(1)], 1)
    next_state = FrameStackState(
        inner=inner,
        frames=tree.where(~state.finished, shifted, state.frames),
        finished=_is_finished(timestep),
        action_mask=_action_mask(obs),
    )
    return next_state, timestep


def _action_mask(obs: Any) -> Any:
    """The mask of an observation; () if it has none."""
    return obs.action_mask if isinstance(obs, MaskedObservation) else ()


def _observe_frame_stack(
    cfg: Wrapped, world: Any, state: FrameStackState
) -> Tensor | MaskedObservation:
    stacked = torch.cat(state.frames.unbind(1), -1)
    if isinstance(state.action_mask, Tensor):
        return MaskedObservation(stacked, state.action_mask)
    return stacked


# Actions


@dataclass(frozen=True, kw_only=True, slots=True)
class StickyActionsConfig:
    """Settings of sticky actions."""

    probability: UnitInterval  # that the last action is repeated

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class StickyActionsState(NamedTuple):
    """The state inside, and the action that was executed last."""

    inner: Any
    last_action: Tensor
    has_acted: Bool[Tensor, "B"]  # in this episode


def sticky_actions(
    env: AnyEnvironment, probability: float = 0.25
) -> AnyEnvironment:
    """Execute the last action again with some probability, in place of the one that was chosen.

    Args:
      env: with a `spec`.

    Raises:
      ValueError: the environment has no `spec`.

    Source: Machado et al. 2018, arXiv:1709.06009.
    """
    if _spec(env) is None:
        raise ValueError(
            "env.spec: expected an EnvironmentSpec for the shape of actions, got None"
        )
    return _wrap(
        env,
        _begin_sticky_actions,
        StickyActionsConfig(probability=probability),
        step_functional=_step_sticky_actions,
    )


def _begin_sticky_actions(
    cfg: Wrapped, world: Any, inner: Any
) -> StickyActionsState:
    first, spec = tree.leaves(inner)[0], cfg.env.spec
    never = torch.zeros(first.shape[:1], dtype=torch.bool, device=first.device)
    action = never.to(torch.int64)
    if spec is not None and spec.continuous_actions:
        components = never.unsqueeze(-1).expand(-1, spec.action_size)
        action = components.to(torch.float32)
    elif spec is not None and spec.action_sizes is not None:
        action = action.unsqueeze(-1).expand(-1, len(spec.action_sizes))
    return StickyActionsState(inner, action, never)


def _step_sticky_actions(
    cfg: Wrapped,
    world: Any,
    state: StickyActionsState,
    action: Tensor,
    key: Tensor,
) -> tuple[StickyActionsState, Timestep]:
    key, sticky_key = random.split(key).unbind(-2)
    is_sticky = random.uniform(sticky_key, ()) < cfg.settings.probability
    executed = tree.where(
        is_sticky & state.has_acted, state.last_action, action
    )
    inner, timestep = _inner_step(cfg, world, state, executed, key)

    finished = _is_finished(timestep)
    next_state = StickyActionsState(inner, executed, ~finished)
    # A row that had finished stays as it is; one that has just finished begins again before it acts.
    kept = state._replace(inner=inner, has_acted=~finished)
    return tree.where(finished, kept, next_state), timestep


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionRangeConfig:
    """Settings of clipped or rescaled actions."""

    low: Annotated[float, Range(-FLOAT32_MAX, FLOAT32_MAX)]
    high: Annotated[float, Range(-FLOAT32_MAX, FLOAT32_MAX)]

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)
        if self.low >= self.high:
            raise ValueError(
                f"high: expected more than low = {self.low}, got {self.high}"
            )


def _check_continuous(env: AnyEnvironment) -> None:
    """Raise ValueError if the environment states discrete actions."""
    spec = _spec(env)
    if spec is not None and not spec.continuous_actions:
        raise ValueError(
            "env.spec: expected continuous actions, got discrete ones"
        )


def clip_action(
    env: AnyEnvironment, low: float = -1.0, high: float = 1.0
) -> AnyEnvironment:
    """Clip each component of a continuous action to [low, high].

    Raises:
      ValueError: actions are discrete, which would be other ones then.
    """
    _check_continuous(env)
    cfg = ActionRangeConfig(low=low, high=high)
    return _wrap(env, _begin_plain, cfg, step_functional=_step_clip_action)


def _step_clip_action(
    cfg: Wrapped, world: Any, state: PlainState, action: Tensor, key: Tensor
) -> tuple[PlainState, Timestep]:
    action = action.clamp(cfg.settings.low, cfg.settings.high)
    return _step(cfg, world, state, action, key)


def rescale_action(
    env: AnyEnvironment, low: float, high: float
) -> AnyEnvironment:
    """Map each component of a continuous action from [-1, 1] to [low, high].

    Raises:
      ValueError: actions are discrete, which would be other ones then.
    """
    _check_continuous(env)
    cfg = ActionRangeConfig(low=low, high=high)
    return _wrap(env, _begin_plain, cfg, step_functional=_step_rescale_action)


def _step_rescale_action(
    cfg: Wrapped, world: Any, state: PlainState, action: Tensor, key: Tensor
) -> tuple[PlainState, Timestep]:
    low, high = cfg.settings.low, cfg.settings.high
    action = low + (action + 1.0) * (0.5 * (high - low))
    return _step(cfg, world, state, action, key)


# Observations and statistics


def flatten_observation(env: AnyEnvironment) -> AnyEnvironment:
    """Observe [B, F] float32 numbers in place of one tensor [B, ...], such as an image; a mask of actions is kept."""
    spec = _spec(env)
    if spec is not None:
        spec = dataclasses.replace(
            spec,
            observation_size=math.prod(spec.shape),
            observation_shape=None,
        )
    return _wrap(env, _begin_plain, observe=_observe_flat, spec=spec)


def _observe_flat(cfg: Wrapped, world: Any, state: PlainState) -> Any:
    obs = _observe(cfg, world, state)
    return _with_features(obs, _features(obs).flatten(1).to(torch.float32))


class EpisodeStatisticsState(NamedTuple):
    """The state inside, and statistics of the episode that each row is in and of the last that it finished."""

    inner: Any
    episode_return: Tensor  # [B], undiscounted sum of rewards so far
    episode_length: I64[Tensor, "B"]  # steps so far
    last_return: Tensor  # [B]; NaN before the first end
    last_length: I64[Tensor, "B"]  # 0 before the first end
    n_episodes: I64[Tensor, "B"]  # that have ended
    finished: Bool[Tensor, "B"]


def episode_statistics(env: AnyEnvironment) -> AnyEnvironment:
    """Keep the return and the length of the last episode of each row in the state, through restarts.

    Inside `normalize_reward` they are those of the rewards before normalisation.
    """
    return _wrap(
        env,
        _begin_episode_statistics,
        step_functional=_step_episode_statistics,
        restart=_restart_episode_statistics,
    )


def _begin_episode_statistics(
    cfg: Wrapped, world: Any, inner: Any
) -> EpisodeStatisticsState:
    first = tree.leaves(inner)[0]
    zero = torch.zeros(first.shape[:1], device=first.device)
    count = zero.to(torch.int64)
    return EpisodeStatisticsState(
        inner=inner,
        episode_return=zero,
        episode_length=count,
        last_return=torch.full_like(zero, torch.nan),
        last_length=count,
        n_episodes=count,
        finished=zero.to(torch.bool),
    )


def _step_episode_statistics(
    cfg: Wrapped,
    world: Any,
    state: EpisodeStatisticsState,
    action: Tensor,
    key: Tensor,
) -> tuple[EpisodeStatisticsState, Timestep]:
    inner, timestep = _inner_step(cfg, world, state, action, key)
    active = ~state.finished
    episode_return = state.episode_return + timestep.reward
    episode_length = state.episode_length + active.to(torch.int64)

    finished = _is_finished(timestep)
    ends = finished & active
    next_state = EpisodeStatisticsState(
        inner=inner,
        episode_return=episode_return,
        episode_length=episode_length,
        last_return=torch.where(ends, episode_return, state.last_return),
        last_length=torch.where(ends, episode_length, state.last_length),
        n_episodes=state.n_episodes + ends.to(torch.int64),
        finished=finished,
    )
    return next_state, timestep


def _restart_episode_statistics(
    cfg: Wrapped,
    world: Any,
    state: EpisodeStatisticsState,
    finished: Tensor,
    reset_state: EpisodeStatisticsState,
) -> EpisodeStatisticsState:
    return _with(
        state,
        inner=_restart_inner(cfg, world, state, finished, reset_state),
        episode_return=torch.where(finished, 0.0, state.episode_return),
        episode_length=torch.where(finished, 0, state.episode_length),
        finished=state.finished & ~finished,
    )
