"""Check that an environment keeps what `funcppo.interfaces` asks of one: `check`.

fp.check(env)
ValueError: step_functional: state.position: expected torch.float32 [4], got torch.float64 [4]
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnnecessaryIsInstance=false
# What a user's functions return is of any type until it is checked.

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from funcppo.core import random, tree
from funcppo.core.types import I64, Bool, check_tensor
from funcppo.envs import wrappers
from funcppo.envs.wrappers import evaluation_env
from funcppo.interfaces import (
    AnyEnvironment,
    EnvironmentSpec,
    MaskedObservation,
    NoWorld,
    Timestep,
    check_settings,
    features,
)

N_ROWS = 4
TOLERANCE = 1e-5  # between rows alone, vectorised, and among others


def check(
    env: AnyEnvironment,
    world: object = None,
    *,
    sample_action: Callable[[I64[Tensor, "2"], Any], Tensor] | None = None,
    n_steps: int = 64,
    seed: int = 0,
) -> None:
    """Check an environment on random steps of four rows; silent if it passes.

    A state, an observation and a timestep are trees of tensors with the leading axis B, and keep structure, shapes and
    dtypes. The functions write to no argument, repeat their results for the same key, run under `torch.vmap`, and treat
    each row alone. A finished row stays as it is, with reward 0. Rows that have finished begin further episodes.

    Of an environment that steps on the host (`fp.envs.gymnasium`) these are tried: `check_env` of Gymnasium, rewards
    that are finite and flags that are bools; and that equal seeds give equal episodes. Whether its functions are pure
    cannot be told: such steps are neither vectorised nor compiled.

    Args:
      env: the environment.
      world: the tensors that it reads and no step changes.
      sample_action: random actions [B, ...] for a key and an observation; None: by `env.spec` and the action mask.
      n_steps: how many steps to try.
      seed: of states and actions.

    Raises:
      TypeError: `env` is no environment, or a tensor is among its settings.
      ValueError: one line that names the function, and the tensor, that breaks a rule.
    """
    check_settings(wrappers.checked_env(env).cfg, "env.cfg")
    if sample_action is None:
        if env.spec is None:
            raise ValueError(
                "env.spec: expected an EnvironmentSpec to sample actions by, got None; or hand in sample_action"
            )
        sample_action = partial(_sample_action, env)
    world = NoWorld() if world is None else world

    keys = random.split(random.key(seed), n_steps + 1)
    if env.host is not None:
        env.host.check()
        _check_host(evaluation_env(env), world, sample_action, keys)
        return

    row_keys = random.split(keys[0], N_ROWS)
    state = _check_reset(env, world, row_keys)
    finished = torch.zeros(N_ROWS, dtype=torch.bool)
    for t, key in enumerate(keys[1:]):
        action_key, step_key = random.split(key).unbind()
        obs = _check_observe(env, world, state)
        action = sample_action(action_key, obs)
        arguments = (state, action, random.split(step_key, N_ROWS))
        state, done = _check_step(env, world, arguments, finished, t == 0)
        # A row begins another episode once it has been stepped when finished.
        state = _restart(env, world, state, finished, arguments[-1])
        finished = done & ~finished


def _restart(
    env: AnyEnvironment,
    world: object,
    state: Any,
    rows: Bool[Tensor, "B"],
    key: I64[Tensor, "B 2"],
) -> Any:
    """Reset some rows of the state, as a rollout does."""
    sample = wrappers.sample_reset(env, world, key)
    fresh = wrappers.start(env, world, sample)
    return wrappers.restart(env, world, state, rows, fresh)


def _sample_action(
    env: AnyEnvironment, key: I64[Tensor, "2"], obs: Any
) -> Tensor:
    """Sample standard normal actions, or legal discrete actions with equal probability."""
    spec = cast(Any, env.spec)
    shape = (N_ROWS, spec.action_size)
    if spec.continuous_actions:
        return random.normal(key, shape)
    logits = torch.zeros(shape)
    if isinstance(obs, MaskedObservation):
        logits = torch.where(obs.action_mask, logits, -torch.inf)
    if spec.action_sizes is None:
        return random.categorical(key, logits)
    parts = torch.split(logits, list(spec.action_sizes), -1)
    keys = random.split(key, len(parts)).unbind()
    return torch.stack([random.categorical(*x) for x in zip(keys, parts)], -1)


def _check_reset(
    env: AnyEnvironment, world: object, key: I64[Tensor, "B 2"]
) -> Any:
    """Check the reset of an environment; return the state after it."""
    reset = partial(env.reset, env.cfg)
    state = call_twice("reset", reset, world=world, key=key)
    _check_tree("reset: state", state)
    _check_vmap("reset", lambda k: reset(world, k), key)
    _check_rows(env, "reset", lambda e, k: e.reset(e.cfg, world, k), (key,))

    named = with_named_errors(env)
    if named.reset_from_sample is not None:
        sample = wrappers.sample_reset(named, world, key)
        _check_tree("sample_reset: sample", sample)
        in_parts = named.reset_from_sample(env.cfg, world, sample)
        name = "reset_from_sample of sample_reset"
        tree.check_layout(in_parts, state, f"{name}: state", FunctionError)
        _check_equal(name, in_parts, state, 0.0)
    return state


def _check_observe(env: AnyEnvironment, world: object, state: Any) -> Any:
    """Check the observation of a state; return it."""
    observe = partial(env.observe, env.cfg)
    name, spec = "observe: observation", env.spec
    obs = call_twice("observe", observe, world=world, state=state)
    _check_tree(name, obs)
    if spec is not None:
        check_observation(obs, spec, FunctionError)
    for path, leaf in tree.named_leaves(obs, name):
        # Integers are for a network that looks them up, or bytes of images.
        if spec and leaf.is_floating_point() and leaf.dtype != torch.float32:
            raise FunctionError(
                f"{path}: expected torch.float32 by env.spec, got {leaf.dtype}"
            )
        if not leaf.isfinite().all():
            value = leaf[~leaf.isfinite()].tolist()[0]
            raise FunctionError(f"{path}: expected finite numbers, got {value}")
    if isinstance(obs, MaskedObservation) and not obs.action_mask.any(-1).all():
        raise FunctionError(
            f"{name}.action_mask: expected a legal action in each row, got none"
        )
    return obs


def check_observation(
    obs: Any, spec: EnvironmentSpec, error: type[Exception] = TypeError
) -> None:
    """Check that an observation, and its mask of discrete actions, have the shapes that a spec states.

    Args:
      error: what is raised for a mask.

    Raises:
      TypeError: the mask is of another shape or dtype.
      ValueError: the rows of the observation are of another shape.
    """
    name = "observe: observation"
    if isinstance(obs, Tensor | MaskedObservation):
        check_rows(features(obs), spec.shape, name)
    if isinstance(obs, MaskedObservation) and not spec.continuous_actions:
        mask = obs.action_mask
        shape = (*mask.shape[:1], spec.action_size)
        check_tensor(mask, shape, torch.bool, f"{name}.action_mask", error)


def check_rows(x: Tensor, shape: tuple[int, ...], name: str) -> None:
    """Raise ValueError unless the rows of a tensor have the shape that `env.spec` states."""
    if tuple(x.shape[1:]) != shape:
        raise ValueError(
            f"{name}: expected rows of {list(shape)} by env.spec, got {list(x.shape[1:])}"
        )


def _check_step(
    env: AnyEnvironment,
    world: object,
    arguments: tuple[Any, Tensor, I64[Tensor, "B 2"]],
    finished: Bool[Tensor, "B"],
    is_first: bool,
) -> tuple[Any, Bool[Tensor, "B"]]:
    """Check a step; return the state after it, and which rows have finished."""
    name = "step_functional"
    step = partial(env.step_functional, env.cfg)
    observe = partial(env.observe, env.cfg, world)
    before, action, key = arguments
    result = call_twice(
        name, step, world=world, state=before, action=action, key=key
    )
    done = _check_result(env, before, result)
    state, timestep = result
    tree.check_layout(
        observe(state),
        observe(before),
        "observe: observation after a step",
        FunctionError,
    )

    # Rows that had finished before stay as they were, finished and without reward.
    rows = finished.nonzero().flatten()
    place = f"{name} of a finished row"
    _check_equal(place, _take(state, rows), _take(before, rows), 0.0)
    if timestep.reward[rows].any():
        raise FunctionError(
            f"{place}: Timestep.reward: expected 0, got {timestep.reward[rows].tolist()}"
        )
    if not done[rows].all():
        raise FunctionError(
            f"{place}: Timestep.terminated, Timestep.truncated: expected one of them to stay true, got false"
        )

    if is_first:  # tracing is slow, and does not depend on values
        _check_vmap(name, lambda *x: step(world, *x), *arguments)
        _check_vmap("observe", observe, before)
    _check_rows(
        env,
        name,
        lambda e, *x: e.step_functional(e.cfg, world, *x),
        arguments,
    )
    return state, done


def _check_result(
    env: AnyEnvironment, before: Any, result: Any
) -> Bool[Tensor, "B"]:
    """Check what a step returns; return which rows have finished."""
    rows = torch.Size([N_ROWS])
    wrappers.check_timestep(before, result, rows, FunctionError)
    reward, terminated, truncated = result[1]
    name = "step_functional: Timestep"
    check_tensor(reward, rows, torch.float32, f"{name}.reward", FunctionError)
    if not reward.isfinite().all():
        raise FunctionError(
            f"{name}.reward: expected finite numbers, got {reward.tolist()}"
        )
    if not env.truncates and truncated.any():
        raise FunctionError(
            f"{name}.truncated: expected false as env.truncates is, got true"
        )
    return terminated | truncated


def call_twice(
    name: str,
    fn: Callable[..., Any],
    tolerance: float = 0.0,
    bound_world: object = (),
    **arguments: Any,
) -> Any:
    """Call a function twice; check that it writes to no argument and repeats its result, and return the result.

    Args:
      bound_world: what the function reads beside its arguments.
      arguments: in the order of the function's, under the names that an error says.

    Raises:
      FunctionError: one line that names the function, and the tensor.
    """
    read = {"world": bound_world, **arguments}
    versions = _versions(read)
    with _naming(name):
        result = fn(*arguments.values())
    for path, version in _versions(read).items():
        if version != versions[path]:
            raise FunctionError(
                f"{name}: {path}: expected an argument that stays as it is, got one that is overwritten"
            )

    again = fn(*arguments.values())
    if tree.structure(again) == tree.structure(result) and all(
        isinstance(leaf, Tensor) for leaf in tree.leaves(result)
    ):
        what = "key" if "key" in arguments else "arguments"
        place = f"{name} a second time with the same {what}"
        _check_equal(place, again, result, tolerance)
    return result


def _versions(read: dict[str, Any]) -> dict[str, int]:
    """Count the writes to each tensor of named trees; inference tensors, which have no count, are omitted."""
    return {
        path: leaf._version
        for name, value in read.items()
        for path, leaf in tree.named_leaves(value, name)
        if isinstance(leaf, Tensor) and not leaf.is_inference()
    }


def _check_tree(name: str, value: Any) -> None:
    """Check that a value is a tree of tensors, each with the leading axis B."""
    try:
        tree.check_tree(value, name)
        tree.check_rows(value, N_ROWS, name)
    except (TypeError, ValueError) as error:
        raise FunctionError(str(error)) from None


class _Step(NamedTuple):
    """Result of a step, whose fields are named in errors."""

    state: Any
    Timestep: Any


def _check_equal(
    name: str, actual: Any, expected: Any, tolerance: float
) -> None:
    """Check that two trees of one structure are equal: integers exactly, other numbers within a tolerance."""
    if isinstance(expected, tuple) and isinstance(expected[-1], Timestep):
        expected, actual = _Step(*expected), _Step(*actual)
    leaves = zip(
        tree.paths(expected), tree.leaves(actual), tree.leaves(expected)
    )
    for path, a, b in leaves:
        place = f"{name}: {path}".removesuffix(": ")
        check_tensor(a, b.shape, b.dtype, place, FunctionError)
        bound = tolerance if b.is_floating_point() else 0.0
        is_far = ~torch.isclose(a, b, bound, bound, equal_nan=True)
        if is_far.any():
            index = tuple(is_far.nonzero()[0].tolist())
            raise FunctionError(
                f"{place}: expected {b[index].tolist()} at {list(index)}, got {a[index].tolist()}"
            )


class FunctionError(ValueError):
    """Error that names a function of an environment or network, or a tensor that it gets or returns."""


@contextmanager
def _naming(
    name: str,
    expected: str = "a result",
    kinds: tuple[type[Exception], ...] = (Exception,),
) -> Generator[None, None, None]:
    """Make what a function of a user's raises an error that names the function and what was expected."""
    try:
        yield
    except FunctionError:
        raise
    except kinds as error:
        raise FunctionError(
            f"{name}: expected {expected}, got {_describe(error)}"
        ) from error


def call_named(name: str, fn: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function and return its result; an AttributeError or TypeError becomes one that names the function.

    Raises:
      FunctionError: one line that names the function, in place of an AttributeError or a TypeError.
    """
    with _naming(name, kinds=(AttributeError, TypeError)):
        return fn(*arguments)


def with_named_errors(env: AnyEnvironment) -> AnyEnvironment:
    """Return the environment with its functions called by `call_named`; a host environment is returned unchanged."""
    if env.host is not None:
        return env
    named: dict[str, Any] = {
        field.name: partial(call_named, field.name, getattr(env, field.name))
        for field in fields(env)
        if callable(getattr(env, field.name))
    }
    return replace(env, **named)


def _describe(error: Exception) -> str:
    """Format the class of an exception and its first line; add that there is no world if one is read."""
    reason = str(error).strip().splitlines()
    line = f"{type(error).__name__}: {reason[0] if reason else ''}"
    if isinstance(getattr(error, "obj", None), NoWorld):
        line += "; no world was handed in"
    return line


def _check_vmap(name: str, fn: Callable[..., Any], *arguments: Any) -> None:
    """Check that a function of rows gives equal results under vmap, on two sets of rows."""
    twice = tree.map(lambda x: torch.stack([x, x.flip(0)]), arguments)
    mapped = call_vectorised(name, fn, *twice)
    one_by_one = [fn(*tree.map(lambda x, i=i: x[i], twice)) for i in range(2)]
    stacked = tree.map(lambda *x: torch.stack(x), *one_by_one)
    _check_equal(f"{name} under torch.vmap", mapped, stacked, TOLERANCE)


def call_vectorised(name: str, fn: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function under `torch.vmap`; return its result.

    Args:
      name: of the function, for the message.
      arguments: trees of tensors with a further first axis, which is mapped over.

    Raises:
      ValueError: one line that names the function, which cannot be mapped.
    """
    with _naming(name, "a function that torch.vmap can map"):
        return torch.vmap(fn)(*arguments)


def _take(value: Any, rows: I64[Tensor, "..."]) -> Any:
    return tree.map(lambda x: x[rows], value)


def _check_rows(
    env: AnyEnvironment,
    name: str,
    fn: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """Check that two rows give the same results alone and reordered as among all rows.

    Running moments that rows share are left as they are, by `evaluation_env`.
    """
    env = evaluation_env(env)
    if name == "reset" and env.restart is not None:
        return  # it begins the moments that rows share
    rows = torch.tensor([N_ROWS - 1, 0])
    among_all = _take(fn(env, *arguments), rows)
    alone = fn(env, *_take(arguments, rows))
    _check_equal(
        f"{name} of rows {rows.tolist()} alone", alone, among_all, TOLERANCE
    )


# Environments that step on the host


def _check_host(
    env: AnyEnvironment,
    world: object,
    sample_action: Callable[..., Tensor],
    keys: I64[Tensor, "T 2"],
) -> None:
    """Check the results of episodes on the host, and that they repeat with the same seeds and actions."""
    first, again = (
        _step_host(env, world, sample_action, keys) for _ in range(2)
    )
    for t, (a, b) in enumerate(zip(again, first), 1):
        place = f"step {t} a second time with the same seeds"
        _check_equal(place, a, b, TOLERANCE)


def _step_host(
    env: AnyEnvironment,
    world: object,
    sample_action: Callable[..., Tensor],
    keys: I64[Tensor, "T 2"],
) -> list[dict[str, Any]]:
    """Play steps of a host environment, resetting finished rows; return the results. The first key is for the reset."""
    row_keys = random.split(keys, N_ROWS)
    state = env.reset(env.cfg, world, row_keys[0])
    steps: list[dict[str, Any]] = []
    for key, step_key in zip(keys[1:], row_keys[1:]):
        obs = _check_observe(env, world, state)
        action = sample_action(key, obs)
        result = env.step_functional(env.cfg, world, state, action, step_key)
        finished = _check_result(env, state, result)
        steps.append({"obs": obs, "Timestep": result[1]})
        state = _restart(env, world, result[0], finished, step_key)
    return steps
