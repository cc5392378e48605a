"""The interface of Gymnasium, tried on one of its environments: `check_environment`."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Gymnasium is optional, and what a user's environment returns is of any type until it is checked.

from __future__ import annotations

import importlib
import math
import numbers
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

RESET_RESULT = ("observation", "info")
STEP_RESULT = ("observation", "reward", "terminated", "truncated", "info")


def check_environment(
    name: str,
    make_env: Callable[[], Any],
    n_steps: int,
    seed: int,
    mask_size: int | None = None,
) -> None:
    """Run an environment by random actions, then Gymnasium's own checks; silent if it keeps its interface.

    Observations are of their space, rewards are finite numbers, flags are bools, and a time limit truncates. Then
    `check_env` of Gymnasium tries seeds, options of a reset, and whether what is returned is overwritten later; what it
    recommends beyond that, by warnings, is left out. It is left out where actions are masked: it makes illegal ones.

    Args:
      name: begins each line.
      n_steps: how many steps to try.
      mask_size: actions of `info["action_mask"]`, if it is observed.

    Raises:
      ValueError: one line that names the method and what it returned.
    """
    env = make_env()
    try:
        n_episodes = _check_episodes(name, env, mask_size, n_steps, seed)
        if mask_size is None:
            _run_gymnasium_checks(name, env)
        if not n_episodes and _time_limit(env) is None:
            warnings.warn(
                f"{name}: no episode ended in {n_steps} random steps, and there is no time limit: "
                "an evaluation gives an episode up after 10,000 steps only; hand in max_episode_steps",
                stacklevel=4,
            )
    finally:
        env.close()


def describe_wrong_result(name: str, make_env: Callable[[], Any]) -> str | None:
    """What a reset or a step returns in place of its two or five values, on one line; None if it returns these.

    Both are those of the environment in its wrappers, which unpack what it returns.
    """
    env = make_env().unwrapped
    try:
        result = env.reset(seed=0)
        place, parts = "reset", RESET_RESULT
        if _has_length(result, len(RESET_RESULT)):
            result = env.step(env.action_space.sample())
            place, parts = "step", STEP_RESULT
    except Exception:  # of the environment's own
        return None
    finally:
        env.close()
    if _has_length(result, len(parts)):
        return None
    return f"{name}: {place}: {_expected_result(parts, result)}"


def _run_gymnasium_checks(name: str, env: Any) -> None:
    checker = importlib.import_module("gymnasium.utils.env_checker")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            checker.check_env(
                env, skip_render_check=True, skip_close_check=True
            )
        except Exception as error:  # whatever an environment raises
            line = " ".join(str(error).split())
            raise ValueError(
                f"{name}: expected an environment that gymnasium.utils.env_checker.check_env accepts, "
                f"got {type(error).__name__}: {line}"
            ) from error


def _check_episodes(
    name: str, env: Any, mask_size: int | None, n_steps: int, seed: int
) -> int:
    """Check what random steps return; the number of episodes that ended."""
    rng = np.random.default_rng(seed)
    env.action_space.seed(seed)
    info = _check_reset(name, env, seed)
    n_episodes = length = 0
    for _ in range(n_steps):
        length += 1
        action = env.action_space.sample()
        if mask_size is not None:
            action = _sample_legal(name, env.action_space, info, mask_size, rng)
        is_over, info = _check_step(name, env, action, length)
        if is_over:
            info = _check_reset(name, env, None)
            n_episodes, length = n_episodes + 1, 0
    return n_episodes


def _sample_legal(
    name: str, space: Any, info: Any, mask_size: int, rng: np.random.Generator
) -> Any:
    """A random action among those that `info` calls legal."""
    mask = np.asarray(info.get("action_mask", ())).reshape(-1)
    if mask.shape != (mask_size,):
        raise ValueError(
            f"{name}: info: action_mask: expected {mask_size} numbers, got {mask.size}"
        )
    sizes = np.atleast_1d(getattr(space, "nvec", mask_size)).reshape(-1)
    parts = np.split(mask != 0, np.cumsum(sizes)[:-1])
    if not all(part.any() for part in parts):
        raise ValueError(
            f"{name}: info: action_mask: expected a legal action, got none"
        )
    chosen = [rng.choice(np.flatnonzero(part)) for part in parts]
    return np.reshape(chosen, space.shape) + space.start


def _check_reset(name: str, env: Any, seed: int | None) -> Any:
    """The info of a reset."""
    result = _call(f"{name}: reset", env.reset, seed=seed)
    if not _has_length(result, len(RESET_RESULT)):
        raise ValueError(
            f"{name}: reset: {_expected_result(RESET_RESULT, result)}"
        )
    _check_observation(f"{name}: reset", env.observation_space, result[0])
    return result[1]


def _check_step(
    name: str, env: Any, action: Any, length: int
) -> tuple[bool, Any]:
    """Whether a step, which makes the episode so long, ends it, and its info."""
    place = f"{name}: step"
    result = _call(place, env.step, action)
    if not _has_length(result, len(STEP_RESULT)):
        raise ValueError(f"{place}: {_expected_result(STEP_RESULT, result)}")
    obs, reward, terminated, truncated, info = result
    _check_observation(place, env.observation_space, obs)
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise ValueError(
            f"{place}: reward: expected a finite number, got {_describe(reward)}"
        )

    flags = {"terminated": terminated, "truncated": truncated}
    for flag, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise ValueError(
                f"{place}: {flag}: expected a bool, got {_describe(value)}"
            )
    limit = _time_limit(env)
    if limit is not None and length >= limit and not truncated:
        raise ValueError(
            f"{place}: truncated: expected true after max_episode_steps = {limit} steps, got false"
        )
    return bool(terminated or truncated), info


def _has_length(result: Any, length: int) -> bool:
    return isinstance(result, tuple) and len(result) == length


def _expected_result(parts: tuple[str, ...], result: Any) -> str:
    return f"expected ({', '.join(parts)}), got {_describe(result)}"


def _check_observation(place: str, space: Any, obs: Any) -> None:
    if not space.contains(obs):
        raise ValueError(
            f"{place}: observation: expected one of {space}, got {_describe(obs)}"
        )


def _time_limit(env: Any) -> int | None:
    """The steps after which a `TimeLimit` of Gymnasium ends an episode; None without one."""
    name = "_max_episode_steps"
    return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else None


def _call(place: str, method: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    try:
        return method(*args, **kw)
    except Exception as error:  # whatever an environment raises
        line = " ".join(str(error).split())
        raise ValueError(
            f"{place}: expected a result, got {type(error).__name__}: {line}"
        ) from error


def _describe(value: Any) -> str:
    """Dtype and shape of an array, and its range; the type and value of anything else, on one line."""
    if isinstance(value, np.ndarray):
        text = f"{value.dtype} {list(value.shape)}"
        is_number = value.size and value.dtype.kind in "fiu"
        return (
            f"{text} of {value.min()} to {value.max()}" if is_number else text
        )
    return f"{type(value).__name__} {' '.join(repr(value).split())}"
