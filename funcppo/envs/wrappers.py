"""What rollouts do with an environment: a step after which finished rows start again (`step_with_autoreset`).

`funcppo.interfaces` says what an environment is.

Wrappers: functions from an environment to an environment, with their memory in its state.

    env = wrappers.normalize_observation(wrappers.time_limit(env, 100))

A wrapped environment is pure, keeps finished rows as they are, and can be wrapped again. What outlives an episode, such
as running moments, stays in the state through restarts (`Environment.restart`). For evaluation, `evaluation_env` keeps
the moments as they are and pays rewards unscaled.

Source: the wrappers of Gymnasium 1.0 with the same names, where one exists.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, cast

import torch
from torch import Tensor

from funcppo.core import random, tree
from funcppo.core.settings import (
    FLOAT32_MAX,
    FiniteFloat,
    PositiveFloat,
    Range,
    Size,
    UnitInterval,
    check_fields,
    check_kind,
    check_value,
)
from funcppo.core.types import (
    F64,
    I64,
    Bool,
    Obs,
    ResetSample,
    State,
    World,
    check_pair,
    check_tensor,
)
from funcppo.interfaces import (
    AnyEnvironment,
    Environment,
    EnvironmentSpec,
    MaskedObservation,
    Timestep,
    channel_axis,
    features,
    numbers,
    with_features,
)


def sample_reset(
    env: Environment[World, State, Obs, ResetSample],
    world: World,
    key: I64[Tensor, "B 2"],
) -> ResetSample:
    """Sample the random part of a reset for each key; the whole state if the environment has no separate part."""
    if env.sample_reset is not None:
        return env.sample_reset(env.cfg, world, key)
    return cast(ResetSample, env.reset(env.cfg, world, key))


def start(
    env: Environment[World, State, Obs, ResetSample],
    world: World,
    sample: ResetSample,
) -> State:
    """Return the first state of each row, given the random part of its reset."""
    if env.reset_from_sample is None:
        return cast(Any, sample)
    return env.reset_from_sample(env.cfg, world, sample)


def step_with_autoreset(
    env: Environment[World, State, Obs, ResetSample],
    world: World,
    state: State,
    action: Tensor,
    key: I64[Tensor, "B 2"],
    reset_sample: ResetSample,
) -> tuple[State, Timestep, State]:
    """Step every row, then reset rows that finished; return the state reached, the timestep and the next state.

    An environment whose step and reset share their costly part may do both at once, with the same result.

    Args:
      reset_sample: from `sample_reset`; used in finished rows only.

    Returns:
      The state before any reset, the timestep, and the state to continue from.
    """
    if env.step_with_autoreset is not None:
        return env.step_with_autoreset(
            env.cfg, world, state, action, key, reset_sample
        )

    reached_state, timestep = env.step_functional(
        env.cfg, world, state, action, key
    )
    finished = timestep.terminated | timestep.truncated
    reset_state = start(env, world, reset_sample)
    next_state = restart(env, world, reached_state, finished, reset_state)
    return reached_state, timestep, next_state


def check_timestep(
    state: object,
    result: object,
    rows: torch.Size,
    error: type[Exception] = TypeError,
) -> None:
    """Check the flags of a step, and that the state keeps its structure, shapes and dtypes.

    Args:
      state: before the step.
      error: what is raised.

    Raises:
      TypeError: names the tensor, or says that there is no `Timestep`.
    """
    name = "step_functional"
    check_pair(
        result, Timestep, f"{name}: expected (state, fp.Timestep)", error
    )
    reached, timestep = cast(tuple[object, Timestep], result)
    for flag in ("terminated", "truncated"):
        value = getattr(timestep, flag)
        check_tensor(value, rows, torch.bool, f"{name}: Timestep.{flag}", error)
    tree.check_layout(reached, state, f"{name}: state", error)


def restart(
    env: Environment[World, State, Obs, ResetSample],
    world: World,
    state: State,
    finished: Bool[Tensor, "B"],
    reset_state: State,
) -> State:
    """Replace finished rows of the state by those of `reset_state`, except what outlives an episode."""
    if env.restart is not None:
        return env.restart(env.cfg, world, state, finished, reset_state)
    return tree.where(finished, reset_state, state)


EPSILON = 1e-8  # Gymnasium's, added to variances


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrapped:
    """Settings of a wrapped environment, as each function of its wrapper receives them."""

    env: AnyEnvironment
    """What is wrapped."""
    settings: Any
    """Settings of the wrapper; a field `evaluation` is true where a policy is evaluated."""
    begin: Callable[[Wrapped, Any, Any], Any]
    """Returns the wrapper's state at the start of an episode, with the state of the environment in it as `inner`."""
    kept: tuple[str, ...]
    """Fields of the wrapper's state that outlive an episode."""
    to_observation: Callable[[Wrapped, Any, Any], Any] | None
    """Returns what is observed, given the wrapper's state and the observation of the environment in it."""
    to_action: Callable[[Wrapped, Tensor], Tensor] | None
    """Returns the action of the environment in it."""
    advance: Callable[[Wrapped, Any, Any, Any, Timestep], Any] | None
    """Returns the wrapper's state and the timestep after a step, given its state before, and the state and the timestep
    of the environment in it."""


class PlainState(NamedTuple):
    """State of a wrapper that remembers nothing."""

    inner: Any


def wrap(
    env: AnyEnvironment,
    *,
    settings: Any = None,
    begin: Callable[[Wrapped, Any, Any], Any] | None = None,
    kept: tuple[str, ...] = (),
    to_observation: Callable[[Wrapped, Any, Any], Any] | None = None,
    to_action: Callable[[Wrapped, Tensor], Tensor] | None = None,
    advance: Callable[[Wrapped, Any, Any, Any, Timestep], Any] | None = None,
    **changes: Any,
) -> AnyEnvironment:
    """Wrap an environment; what is not given stays as it is in the environment.

    Args:
      settings, begin, kept, to_observation, to_action, advance: fields of `Wrapped`; a wrapper without `begin` has the
        state `PlainState`.
      changes: fields of `Environment`, such as `spec` or a `step_functional` that calls `inner_step`.

    Returns:
      The wrapped environment, whose state has the field `inner`.

    Raises:
      TypeError: what is wrapped is no environment, or a name is a text in place of a tuple.
    """
    check_kind(kept, tuple, "kept: expected a tuple of names")
    cfg = Wrapped(
        env=checked_env(env),
        settings=settings,
        begin=begin or _begin_plain,
        kept=kept,
        to_observation=to_observation,
        to_action=to_action,
        advance=advance,
    )
    fields: dict[str, Any] = {
        "cfg": cfg,
        "reset": _reset,
        "step_functional": _step,
        "observe": observe,
        "restart": _restart,
        # The sample is that of the environment inside, so that rollouts hold no state of the wrapper for each step.
        "sample_reset": _sample_reset,
        "reset_from_sample": _reset_from_sample,
        "step_with_autoreset": None,
    }
    return dataclasses.replace(env, **(fields | changes))


def checked_env(env: AnyEnvironment) -> AnyEnvironment:
    """Return an environment, or raise TypeError for anything else.

    Raises:
      TypeError: it is no environment, such as one of Gymnasium's without a bridge.
    """
    check_kind(env, Environment, "env: expected an Environment")
    return env


def _begin(cfg: Wrapped, world: object, inner: object) -> Any:
    """Return the state of a wrapper at the start of an episode.

    Raises:
      TypeError: it is no NamedTuple with the fields inner and `Wrapped.kept`.
    """
    state = cfg.begin(cfg, world, inner)
    names: tuple[str, ...] = getattr(state, "_fields", ())
    for name in ("inner", *cfg.kept):
        if name not in names:
            raise TypeError(
                f"begin: expected a NamedTuple with the field {name}, got {type(state).__name__} of {', '.join(names)}"
            )
    return state


def _begin_plain(cfg: Wrapped, world: object, inner: Any) -> PlainState:
    return PlainState(inner)


def _reset(cfg: Wrapped, world: object, key: I64[Tensor, "B 2"]) -> Any:
    return _begin(cfg, world, cfg.env.reset(cfg.env.cfg, world, key))


def _sample_reset(cfg: Wrapped, world: object, key: I64[Tensor, "B 2"]) -> Any:
    return sample_reset(cfg.env, world, key)


def _reset_from_sample(cfg: Wrapped, world: object, sample: Any) -> Any:
    return _begin(cfg, world, start(cfg.env, world, sample))


def inner_step(
    cfg: Wrapped, world: object, state: Any, action: Tensor, key: Tensor
) -> tuple[Any, Timestep]:
    """Make a step of the wrapped environment; return its state and the timestep."""
    if cfg.to_action is not None:
        action = cfg.to_action(cfg, action)
    return cfg.env.step_functional(cfg.env.cfg, world, state.inner, action, key)


def inner_observe(cfg: Wrapped, world: object, inner: Any) -> Any:
    """Return the observation of the wrapped environment, given its state."""
    return cfg.env.observe(cfg.env.cfg, world, inner)


def _step(
    cfg: Wrapped, world: object, state: Any, action: Tensor, key: Tensor
) -> tuple[Any, Timestep]:
    inner, timestep = inner_step(cfg, world, state, action, key)
    if cfg.advance is None:
        return state._replace(inner=inner), timestep
    return cfg.advance(cfg, world, state, inner, timestep)


def observe(cfg: Wrapped, world: object, state: Any) -> Any:
    """Return what a wrapper observes by `Wrapped.to_observation`."""
    obs = inner_observe(cfg, world, state.inner)
    if cfg.to_observation is None:
        return obs
    return cfg.to_observation(cfg, state, obs)


def _restart_inner(
    cfg: Wrapped, world: object, state: Any, finished: Tensor, reset_state: Any
) -> Any:
    return restart(cfg.env, world, state.inner, finished, reset_state.inner)


def _restart(
    cfg: Wrapped, world: object, state: Any, finished: Tensor, reset_state: Any
) -> Any:
    """Reset finished rows, except for the fields that the wrapper or the wrapped environment keeps."""
    inner = _restart_inner(cfg, world, state, finished, reset_state)
    # `reset_state` was built from an inner state that had nothing to keep.
    begun = tree.where(finished, cfg.begin(cfg, world, inner), state)
    kept = {name: getattr(state, name) for name in cfg.kept}
    # By `_replace` PyTorch 2.11 compiles no function that returns its result, as a rollout step does.
    fields = dict(zip(state._fields, begun)) | kept
    return type(state)(**(fields | {"inner": inner}))


def _fill(inner: Any, value: float, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor of one equal number for each row of a state."""
    first = tree.leaves(inner)[0]
    return torch.full(first.shape[:1], value, dtype=dtype, device=first.device)


def _is_finished(timestep: Timestep) -> Bool[Tensor, "B"]:
    return timestep.terminated | timestep.truncated


def evaluation_env(env: AnyEnvironment) -> AnyEnvironment:
    """Return the environment for evaluation: running moments are frozen, and rewards are not normalised.

    One that steps on the host does so in other host objects.
    """
    return _with_host_part(env, "evaluation")


def stand_in_env(env: AnyEnvironment) -> AnyEnvironment:
    """Return the environment made pure: a host environment inside is replaced by its stand-in (`HostEnvironment`)."""
    return _with_host_part(env, "stand_in")


def _with_host_part(env: AnyEnvironment, part: str) -> AnyEnvironment:
    """Replace a host environment inside by a part of it; of an evaluation, change the wrappers' settings, too."""
    cfg = env.cfg
    if not isinstance(cfg, Wrapped):
        return getattr(env.host, part, env)
    settings = cfg.settings
    if hasattr(settings, part):
        settings = dataclasses.replace(settings, **{part: True})
    inner = _with_host_part(cfg.env, part)
    cfg = dataclasses.replace(cfg, env=inner, settings=settings)
    return dataclasses.replace(env, cfg=cfg, host=inner.host)


# Time limit


class TimeLimitState(NamedTuple):
    """Wrapped state, with the age and end flag of each row's episode."""

    inner: Any
    steps: I64[Tensor, "B"]
    terminated: Bool[Tensor, "B"]
    truncated: Bool[Tensor, "B"]


def time_limit(env: AnyEnvironment, max_steps: int) -> AnyEnvironment:
    """Truncate episodes after `max_steps` steps; return the wrapped environment.

    A limit of the environment itself stays in force.
    """
    check_value("max_steps", Size, max_steps)
    return wrap(
        env,
        begin=_begin_time_limit,
        settings=max_steps,
        step_functional=_step_time_limit,
        truncates=True,
    )


def _begin_time_limit(
    cfg: Wrapped, world: object, inner: Any
) -> TimeLimitState:
    never = _fill(inner, False, torch.bool)
    return TimeLimitState(inner, _fill(inner, 0, torch.int64), never, never)


def _step_time_limit(
    cfg: Wrapped,
    world: object,
    state: TimeLimitState,
    action: Tensor,
    key: Tensor,
) -> tuple[TimeLimitState, Timestep]:
    active = ~(state.terminated | state.truncated)
    stepped, timestep = inner_step(cfg, world, state, action, key)
    steps = torch.where(active, state.steps + 1, state.steps)
    is_late = (steps >= cfg.settings) & ~timestep.terminated

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
    """Running mean and variance of the numbers [...] of each row; equal in all rows if rows share them."""

    mean: F64[Tensor, "B ..."]
    variance: F64[Tensor, "B ..."]
    n: F64[Tensor, "B"]  # how many numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentsConfig:
    """Settings of a normalisation by running moments."""

    # Whether all rows share their moments; else each has its own, as Gymnasium's wrappers of one environment.
    shared: bool = True
    epsilon: PositiveFloat = EPSILON  # added to the variance
    gamma: UnitInterval = 0.99  # discount of the returns that scale rewards
    evaluation: bool = False  # moments stay, rewards are not scaled

    __post_init__ = check_fields


def _initial_moments(x: Tensor) -> Moments:
    """Build moments of mean 0 and variance 1 with Gymnasium's small weight, which the first number outweighs."""
    mean = torch.zeros_like(x, dtype=torch.float64)
    return Moments(mean, torch.ones_like(mean), _fill(x, 1e-4, torch.float64))


def _update_moments(
    cfg: MomentsConfig,
    moments: Moments,
    x: Tensor,
    is_counted: Bool[Tensor, "B"],
) -> Moments:
    """Add the counted rows of `x` to the moments.

    Source: Chan, Golub & LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """

    def add_up(values: Tensor) -> Tensor:
        return values.sum(0, keepdim=True) if cfg.shared else values

    # A number that is not finite would stay in the moments for good.
    is_counted = is_counted & x.isfinite().view(len(x), -1).all(1)
    axes = [1] * (x.ndim - 1)
    is_row = is_counted.view(-1, *axes)
    x = torch.where(is_row, x.to(torch.float64), 0.0)
    weight = is_row.to(torch.float64)
    n_added = add_up(weight)
    mean = add_up(weight * x) / n_added.clamp_min(1.0)
    square_sum = add_up(weight * (x - mean) ** 2)

    count = moments.n.view(-1, *axes)
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
    """Wrapped state, moments of observations, and which rows have finished."""

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
    return wrap(
        env,
        begin=_begin_normalize_observation,
        settings=MomentsConfig(shared=shared, epsilon=epsilon),
        advance=_advance_normalize_observation,
        to_observation=_normalize,
        restart=_restart_normalize_observation,
    )


def _begin_normalize_observation(
    cfg: Wrapped, world: object, inner: Any
) -> NormalizeObservationState:
    x = features(inner_observe(cfg, world, inner))
    never = _fill(x, False, torch.bool)
    moments = _update_moments(cfg.settings, _initial_moments(x), x, ~never)
    return NormalizeObservationState(inner, moments, never)


def _count_observation(
    cfg: Wrapped,
    world: object,
    state: NormalizeObservationState,
    inner: Any,
    is_counted: Bool[Tensor, "B"],
) -> Moments:
    if cfg.settings.evaluation:
        return state.moments
    x = features(inner_observe(cfg, world, inner))
    return _update_moments(cfg.settings, state.moments, x, is_counted)


def _advance_normalize_observation(
    cfg: Wrapped,
    world: object,
    state: NormalizeObservationState,
    inner: Any,
    timestep: Timestep,
) -> tuple[NormalizeObservationState, Timestep]:
    moments = _count_observation(cfg, world, state, inner, ~state.finished)
    next_state = NormalizeObservationState(
        inner, moments, _is_finished(timestep)
    )
    return next_state, timestep


def _restart_normalize_observation(
    cfg: Wrapped,
    world: object,
    state: NormalizeObservationState,
    finished: Tensor,
    reset_state: NormalizeObservationState,
) -> NormalizeObservationState:
    inner = _restart_inner(cfg, world, state, finished, reset_state)
    moments = _count_observation(cfg, world, state, inner, finished)
    return NormalizeObservationState(inner, moments, state.finished & ~finished)


def _normalize(
    cfg: Wrapped, state: NormalizeObservationState, obs: Any
) -> Tensor | MaskedObservation:
    x = numbers(obs)
    mean, variance, _ = state.moments
    deviation = torch.sqrt(variance + cfg.settings.epsilon)
    return with_features(obs, ((x - mean) / deviation).to(x.dtype))


class NormalizeRewardState(NamedTuple):
    """Wrapped state, discounted return so far, its moments, and which rows have finished."""

    inner: Any
    discounted_return: F64[Tensor, "B"]
    moments: Moments
    finished: Bool[Tensor, "B"]


def normalize_reward(
    env: AnyEnvironment,
    *,
    gamma: float = 0.99,
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
    return wrap(
        env,
        begin=_begin_normalize_reward,
        settings=MomentsConfig(shared=shared, epsilon=epsilon, gamma=gamma),
        kept=("discounted_return", "moments"),
        advance=_advance_normalize_reward,
    )


def _begin_normalize_reward(
    cfg: Wrapped, world: object, inner: Any
) -> NormalizeRewardState:
    zero = _fill(inner, 0.0, torch.float64)
    return NormalizeRewardState(
        inner, zero, _initial_moments(zero), zero.to(torch.bool)
    )


def _advance_normalize_reward(
    cfg: Wrapped,
    world: object,
    state: NormalizeRewardState,
    inner: Any,
    timestep: Timestep,
) -> tuple[NormalizeRewardState, Timestep]:
    if cfg.settings.evaluation:
        return state._replace(inner=inner), timestep

    active = ~state.finished
    continues = (~timestep.terminated).to(torch.float64)
    discounted = state.discounted_return * cfg.settings.gamma * continues
    reached = discounted + timestep.reward
    discounted_return = torch.where(
        active & reached.isfinite(), reached, state.discounted_return
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


# Frame stack


class FrameStackState(NamedTuple):
    """Wrapped state, last observations, oldest first, and which rows have finished."""

    inner: Any
    frames: Tensor  # [B, n_frames, ...]
    finished: Bool[Tensor, "B"]


def frame_stack(env: AnyEnvironment, n_frames: int) -> AnyEnvironment:
    """Observe the last `n_frames` observations, oldest first, side by side along the last axis, or that of the channels
    of images (`interfaces.channel_axis`).

    An episode begins with as many copies of its first observation.

    Args:
      env: observes one tensor [B, ..., F], and the result [B, ..., n_frames * F]; or a `MaskedObservation`, whose
        features are stacked, beside the mask of the last one.
    """
    check_value("n_frames", Size, n_frames)
    spec = checked_env(env).spec
    if spec is not None:
        axis = channel_axis(spec.shape)
        shape = [
            n * n_frames if i == axis else n for i, n in enumerate(spec.shape)
        ]
        spec = dataclasses.replace(
            spec,
            observation_size=n_frames * spec.observation_size,
            observation_shape=tuple(shape),
        )
    return wrap(
        env,
        begin=_begin_frame_stack,
        settings=n_frames,
        advance=_advance_frame_stack,
        observe=_observe_frame_stack,
        spec=spec,
    )


def _begin_frame_stack(
    cfg: Wrapped, world: object, inner: Any
) -> FrameStackState:
    x = features(inner_observe(cfg, world, inner))
    frames = torch.stack([x] * cfg.settings, 1)
    return FrameStackState(inner, frames, _fill(x, False, torch.bool))


def _advance_frame_stack(
    cfg: Wrapped,
    world: object,
    state: FrameStackState,
    inner: Any,
    timestep: Timestep,
) -> tuple[FrameStackState, Timestep]:
    x = features(inner_observe(cfg, world, inner))
    shifted = torch.cat([state.frames[:, 1:], x.unsqueeze(1)], 1)
    frames = tree.where(~state.finished, shifted, state.frames)
    return FrameStackState(inner, frames, _is_finished(timestep)), timestep


def _observe_frame_stack(
    cfg: Wrapped, world: object, state: FrameStackState
) -> Tensor | MaskedObservation:
    obs = inner_observe(cfg, world, state.inner)
    frames = state.frames.unbind(1)
    axis = 1 + channel_axis(tuple(frames[0].shape[1:]))
    return with_features(obs, torch.cat(frames, axis))


# Actions


class StickyActionsState(NamedTuple):
    """Wrapped state, and the action that was executed last."""

    inner: Any
    last_action: Tensor
    has_acted: Bool[Tensor, "B"]  # in this episode


def sticky_actions(
    env: AnyEnvironment, probability: float = 0.25
) -> AnyEnvironment:
    """Repeat the last executed action with some probability in place of the chosen one; return the environment.

    Args:
      env: with a `spec`.

    Raises:
      ValueError: the environment has no `spec`.

    Source: Machado et al. 2018, arXiv:1709.06009.
    """
    if checked_env(env).spec is None:
        raise ValueError(
            "env.spec: expected an EnvironmentSpec for the shape of actions, got None"
        )
    check_value("probability", UnitInterval, probability)
    return wrap(
        env,
        begin=_begin_sticky_actions,
        settings=probability,
        step_functional=_step_sticky_actions,
    )


def _begin_sticky_actions(
    cfg: Wrapped, world: object, inner: Any
) -> StickyActionsState:
    spec = cast(EnvironmentSpec, cfg.env.spec)
    never = _fill(inner, False, torch.bool)
    shape, dtype = [len(never)], torch.int64
    if spec.continuous_actions:
        shape, dtype = [*shape, spec.action_size], torch.float32
    elif spec.action_sizes is not None:
        shape.append(len(spec.action_sizes))
    action = torch.zeros(shape, dtype=dtype, device=never.device)
    return StickyActionsState(inner, action, never)


def _step_sticky_actions(
    cfg: Wrapped,
    world: object,
    state: StickyActionsState,
    action: Tensor,
    key: Tensor,
) -> tuple[StickyActionsState, Timestep]:
    key, sticky_key = random.split(key).unbind(-2)
    is_sticky = random.uniform(sticky_key, ()) < cfg.settings
    executed = tree.where(
        is_sticky & state.has_acted, state.last_action, action
    )
    inner, timestep = inner_step(cfg, world, state, executed, key)

    finished = _is_finished(timestep)
    next_state = StickyActionsState(inner, executed, ~finished)
    # A row that had finished stays as it is; one that has just finished begins again before it acts.
    kept = state._replace(inner=inner, has_acted=~finished)
    return tree.where(finished, kept, next_state), timestep


# One number for all components, or one for each.
Bound = float | Iterable[float]


def clip_action(
    env: AnyEnvironment, low: Bound = -1.0, high: Bound = 1.0
) -> AnyEnvironment:
    """Clip a continuous action to [low, high], bounds of all components or of each.

    Raises:
      ValueError: actions are discrete, which would be other ones then; or a bound is out of range.
    """
    return wrap(env, settings=_read_bounds(env, low, high), to_action=_clip)


def rescale_action(
    env: AnyEnvironment, low: Bound, high: Bound
) -> AnyEnvironment:
    """Map a continuous action from [-1, 1] to [low, high], bounds of all components or of each.

    Raises:
      ValueError: actions are discrete, which would be other ones then; or a bound is out of range.
    """
    return wrap(env, settings=_read_bounds(env, low, high), to_action=_rescale)


def _read_bounds(
    env: AnyEnvironment, low: Bound, high: Bound
) -> tuple[tuple[float, float], ...]:
    """Return (low, high) of each component of a continuous action, or of all as one."""
    spec = checked_env(env).spec
    if spec is not None and not spec.continuous_actions:
        raise ValueError(
            "env.spec: expected continuous actions, got discrete ones"
        )
    given = [[*x] if isinstance(x, Iterable) else [x] for x in (low, high)]
    n = max(map(len, given))
    n_actions = n if spec is None else spec.action_size
    if any(len(x) not in (1, n_actions) for x in given):
        raise ValueError(
            f"low, high: expected a number, or one for each component of an action, got {low!r} and {high!r}"
        )
    lows, highs = (x * (n // len(x)) for x in given)
    return tuple(map(_read_range, lows, highs))


def _read_range(low: float, high: float) -> tuple[float, float]:
    """Check a range of numbers, and return it."""
    number = Annotated[float, Range(-FLOAT32_MAX, FLOAT32_MAX)]
    check_value("low", number, low)
    check_value("high", number, high)
    if low >= high:
        raise ValueError(f"high: expected more than low = {low}, got {high}")
    return low, high


def _map_components(
    cfg: Wrapped, action: Tensor, fn: Callable[[Tensor, float, float], Tensor]
) -> Tensor:
    """Map the components of an action, each by its range."""
    if len(cfg.settings) == 1:
        return fn(action, *cfg.settings[0])
    parts = zip(action.unbind(-1), cfg.settings)
    return torch.stack([fn(x, *bounds) for x, bounds in parts], -1)


def _clip(cfg: Wrapped, action: Tensor) -> Tensor:
    return _map_components(cfg, action, torch.clamp)


def _rescale(cfg: Wrapped, action: Tensor) -> Tensor:
    return _map_components(cfg, action, _to_range)


def _to_range(x: Tensor, low: float, high: float) -> Tensor:
    return low + (x + 1.0) * (0.5 * (high - low))


# Observations and statistics


def flatten_observation(env: AnyEnvironment) -> AnyEnvironment:
    """Observe [B, F] float32 numbers in place of a tensor [B, ...] such as an image; an action mask is kept."""
    spec = checked_env(env).spec
    if spec is not None:
        spec = dataclasses.replace(
            spec,
            observation_size=math.prod(spec.shape),
            observation_shape=None,
        )
    return wrap(env, to_observation=_flatten, spec=spec)


def _flatten(cfg: Wrapped, state: PlainState, obs: Any) -> Any:
    return with_features(obs, numbers(obs).flatten(1))


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipConfig:
    """Range that rewards are clipped to."""

    low: FiniteFloat
    high: FiniteFloat
    evaluation: bool = False  # rewards stay


def clip_observation(
    env: AnyEnvironment, low: float = -10.0, high: float = 10.0
) -> AnyEnvironment:
    """Clip the numbers of an observation to [low, high], e.g. outside of `normalize_observation`."""
    return wrap(
        env,
        settings=_read_range(low, high),
        to_observation=_clip_observation,
    )


def _clip_observation(cfg: Wrapped, state: PlainState, obs: Any) -> Any:
    return with_features(obs, numbers(obs).clamp(*cfg.settings))


def clip_reward(
    env: AnyEnvironment, low: float = -10.0, high: float = 10.0
) -> AnyEnvironment:
    """Clip rewards to [low, high]; an evaluation pays them as they are."""
    low, high = _read_range(low, high)
    return wrap(
        env,
        settings=ClipConfig(low=low, high=high),
        advance=_advance_clip_reward,
    )


def _advance_clip_reward(
    cfg: Wrapped,
    world: object,
    state: PlainState,
    inner: Any,
    timestep: Timestep,
) -> tuple[PlainState, Timestep]:
    next_state = PlainState(inner)
    if cfg.settings.evaluation:
        return next_state, timestep
    clipped = timestep.reward.clamp(cfg.settings.low, cfg.settings.high)
    return next_state, timestep._replace(reward=clipped)


class EpisodeStatisticsState(NamedTuple):
    """Wrapped state, with statistics of each row's current episode and of its last finished one."""

    inner: Any
    episode_return: Tensor  # [B], undiscounted sum of rewards so far
    episode_length: I64[Tensor, "B"]  # steps so far
    last_return: Tensor  # [B]; NaN before the first end
    last_length: I64[Tensor, "B"]  # 0 before the first end
    n_episodes: I64[Tensor, "B"]  # that have ended
    finished: Bool[Tensor, "B"]


def episode_statistics(env: AnyEnvironment) -> AnyEnvironment:
    """Keep return and length of each row's last finished episode in the state, also through restarts.

    Inside `normalize_reward` they are those of the rewards before normalisation.
    """
    return wrap(
        env,
        begin=_begin_episode_statistics,
        kept=("last_return", "last_length", "n_episodes"),
        advance=_advance_episode_statistics,
        restart=_restart_episode_statistics,
    )


def _begin_episode_statistics(
    cfg: Wrapped, world: object, inner: Any
) -> EpisodeStatisticsState:
    zero, count = _fill(inner, 0.0), _fill(inner, 0, torch.int64)
    return EpisodeStatisticsState(
        inner=inner,
        episode_return=zero,
        episode_length=count,
        last_return=torch.full_like(zero, torch.nan),
        last_length=count,
        n_episodes=count,
        finished=zero.to(torch.bool),
    )


def _advance_episode_statistics(
    cfg: Wrapped,
    world: object,
    state: EpisodeStatisticsState,
    inner: Any,
    timestep: Timestep,
) -> tuple[EpisodeStatisticsState, Timestep]:
    active = ~state.finished
    next_state = _end_episodes(
        state,
        inner,
        state.episode_return + timestep.reward,
        state.episode_length + active.to(torch.int64),
        _is_finished(timestep),
    )
    return next_state, timestep


def _end_episodes(
    state: EpisodeStatisticsState,
    inner: Any,
    episode_return: Tensor,
    episode_length: I64[Tensor, "B"],
    finished: Bool[Tensor, "B"],
) -> EpisodeStatisticsState:
    """Count the episodes of rows that have just finished."""
    ends = finished & ~state.finished
    return EpisodeStatisticsState(
        inner=inner,
        episode_return=episode_return,
        episode_length=episode_length,
        last_return=torch.where(ends, episode_return, state.last_return),
        last_length=torch.where(ends, episode_length, state.last_length),
        n_episodes=state.n_episodes + ends.to(torch.int64),
        finished=finished,
    )


def _restart_episode_statistics(
    cfg: Wrapped,
    world: object,
    state: EpisodeStatisticsState,
    finished: Tensor,
    reset_state: Any,
) -> Any:
    """Reset finished rows; a wrapper outside may have ended an episode, such as a time limit."""
    inner, episode_return, length, *_ = state
    ends = state.finished | (finished & (length > 0))
    ended = _end_episodes(state, inner, episode_return, length, ends)
    return _restart(cfg, world, ended, finished, reset_state)
