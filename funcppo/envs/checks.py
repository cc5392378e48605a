"""Check that an environment keeps what `funcppo.interfaces` asks of one: `check`.

fp.check(env)
ValueError: step_functional: state.position: expected torch.float32 [4], got torch.float64 [4]
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnnecessaryIsInstance=false
# What a user's functions return is of any type until it is checked.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
    Environment,
    EnvironmentSpec,
    MaskedObservation,
    NoWorld,
    Timestep,
    check_settings,
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
    _check_functions(env)
    check_settings(env.cfg, "env.cfg")
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


def _check_functions(env: object) -> None:
    """Raise TypeError unless `env` is an Environment whose fields are functions."""
    if not isinstance(env, Environment):
        raise TypeError(
            f"env: expected an Environment, got {type(env).__name__}"
        )
    for name in ("reset", "step_functional", "observe"):
        if not callable(getattr(env, name)):
            raise TypeError(
                f"env.{name}: expected a function, got {type(getattr(env, name)).__name__}"
            )


def _restart(
    env: AnyEnvironment,
    world: object,
    state: Any,
    rows: Bool[Tensor, "B"],
    key: I64[Tensor, "B 2"],
) -> Any:
    """Reset some rows of the state, as a rollout does."""
    fresh = wrappers.sample_reset(env, world, key)
    if env.reset_from_sample is not None:
        fresh = env.reset_from_sample(env.cfg, world, fresh)
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
    _check_tree("reset", "state", state)
    _check_vmap("reset", lambda k: reset(world, k), key)
    _check_rows(env, "reset", lambda e, k: e.reset(e.cfg, world, k), (key,))

    if env.reset_from_sample is not None:
        named = with_named_errors(env)
        sample = wrappers.sample_reset(named, world, key)
        _check_tree("sample_reset", "sample", sample)
        assert named.reset_from_sample is not None
        in_parts = named.reset_from_sample(env.cfg, world, sample)
        _check_like("reset_from_sample", "state", in_parts, state)
        _check_equal("reset_from_sample of sample_reset", in_parts, state, 0.0)
    return state


def _check_observe(env: AnyEnvironment, world: object, state: Any) -> Any:
    """Check the observation of a state; return it."""
    observe = partial(env.observe, env.cfg)
    obs = call_twice("observe", observe, world=world, state=state)
    _check_tree("observe", "observation", obs)

    spec = env.spec
    has_mask = isinstance(obs, MaskedObservation)
    features = obs.features if has_mask else obs
    if spec is not None and isinstance(features, Tensor):
        _check_features(
            "observation.features" if has_mask else "observation",
            features,
            spec,
        )
    if has_mask and spec is not None and not spec.continuous_actions:
        check_tensor(
            obs.action_mask,
            (N_ROWS, spec.action_size),
            torch.bool,
            "observe: observation.action_mask",
            ValueError,
        )

    for name, leaf in tree.named_leaves(obs, "observation"):
        if not leaf.isfinite().all():
            value = leaf[~leaf.isfinite()].tolist()[0]
            raise ValueError(
                f"observe: {name}: expected finite numbers, got {value}"
            )

    if has_mask and not obs.action_mask.any(-1).all():
        raise ValueError(
            "observe: observation.action_mask: expected a legal action in each row, got none"
        )
    return obs


def _check_features(part: str, features: Tensor, spec: EnvironmentSpec) -> None:
    """Raise ValueError unless an observation tensor has the shape and dtype that the spec states."""
    if tuple(features.shape[1:]) != spec.shape:
        raise ValueError(
            f"observe: {part}: expected rows of {list(spec.shape)} by env.spec, got {list(features.shape[1:])}"
        )
    # Integers are for a network that looks them up, or bytes of images.
    if features.is_floating_point() and features.dtype != torch.float32:
        raise ValueError(
            f"observe: {part}: expected torch.float32 by env.spec, got {features.dtype}"
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
    before, action, key = arguments
    result: Any = call_twice(
        name, step, world=world, state=before, action=action, key=key
    )
    if not isinstance(result, tuple) or len(cast(Any, result)) != 2:
        raise ValueError(
            f"{name}: expected (state, fp.Timestep), got {type(cast(Any, result)).__name__}"
        )
    state, timestep = cast(tuple[Any, Any], result)
    _check_like(name, "state", state, before)
    _check_timestep(env, timestep)
    _check_like(
        "observe",
        "observation after a step",
        env.observe(env.cfg, world, state),
        env.observe(env.cfg, world, before),
    )
    _check_finished(before, state, timestep, finished)

    if is_first:  # tracing is slow, and does not depend on values
        _check_vmap(name, lambda *x: step(world, *x), *arguments)
        _check_vmap("observe", lambda s: env.observe(env.cfg, world, s), before)
    _check_rows(
        env,
        name,
        lambda e, *x: e.step_functional(e.cfg, world, *x),
        arguments,
    )
    return state, timestep.terminated | timestep.truncated


def _check_timestep(env: AnyEnvironment, timestep: Any) -> None:
    if not isinstance(timestep, Timestep):
        raise ValueError(
            f"step_functional: expected (state, fp.Timestep), got {type(timestep).__name__} for the latter"
        )
    dtypes = (torch.float32, torch.bool, torch.bool)
    for field, value, dtype in zip(Timestep._fields, timestep, dtypes):
        name = f"step_functional: Timestep.{field}"
        check_tensor(value, (N_ROWS,), dtype, name, ValueError)
    if not timestep.reward.isfinite().all():
        raise ValueError(
            f"step_functional: Timestep.reward: expected finite numbers, got {timestep.reward.tolist()}"
        )
    if not env.truncates and timestep.truncated.any():
        raise ValueError(
            "step_functional: Timestep.truncated: expected false as env.truncates is, got true"
        )


def _check_finished(
    before: Any,
    after: Any,
    timestep: Timestep,
    finished: Bool[Tensor, "B"],
) -> None:
    """Check that rows that had finished before the step stay as they were, finished and without reward."""
    if not finished.any():
        return
    rows = finished.nonzero().flatten()
    name = "step_functional of a finished row"
    _check_equal(name, _take(after, rows), _take(before, rows), 0.0)
    if timestep.reward[rows].any():
        raise ValueError(
            f"{name}: Timestep.reward: expected 0, got {timestep.reward[rows].tolist()}"
        )
    still = timestep.terminated | timestep.truncated
    if not still[rows].all():
        raise ValueError(
            f"{name}: Timestep.terminated, Timestep.truncated: expected one of them to stay true, got false"
        )


def call_twice(
    name: str,
    fn: Callable[..., Any],
    tolerance: float = 0.0,
    bound_world: object = (),
    **arguments: Any,
) -> Any:
    """Call a function twice; check that it writes to no argument and repeats its result, and return the result.

    Args:
      bound_world: what the function reads beside its arguments; not copied, for it may be large.
      arguments: in the order of the function's, under the names that an error says.

    Raises:
      ValueError: one line that names the function, and the tensor.
    """
    values = tree.map(torch.clone, tuple(arguments.values()))
    versions = _versions(bound_world)
    try:
        result = fn(*arguments.values())
    except FunctionError:
        raise
    except Exception as error:  # whatever a function of a user's raises
        raise ValueError(
            f"{name}: expected a result, got {_describe(error)}"
        ) from error
    for argument, value in zip(arguments, values):
        pairs = zip(
            tree.named_leaves(arguments[argument], argument), tree.leaves(value)
        )
        for (path, leaf), before in pairs:
            if not _is_equal(leaf, before, 0.0):
                raise _overwritten(name, path)
    for path, version in _versions(bound_world).items():
        if version != versions[path]:
            raise _overwritten(name, path)

    again = fn(*arguments.values())
    if tree.structure(again) == tree.structure(result) and all(
        isinstance(leaf, Tensor) for leaf in tree.leaves(result)
    ):
        what = "key" if "key" in arguments else "arguments"
        place = f"{name} a second time with the same {what}"
        _check_equal(place, again, result, tolerance)
    return result


def _overwritten(name: str, path: str) -> ValueError:
    """Build the error for a function that writes to an argument."""
    return ValueError(
        f"{name}: {path}: expected an argument that stays as it is, got one that is overwritten"
    )


def _versions(world: object) -> dict[str, int]:
    """Count the writes to each tensor of a world, by its name; inference tensors, which have no count, are omitted."""
    return {
        path: leaf._version
        for path, leaf in tree.named_leaves(world, "world")
        if isinstance(leaf, Tensor) and not leaf.is_inference()
    }


def _check_tree(name: str, part: str, value: Any) -> None:
    """Check that a value is a tree of tensors, each with the leading axis B."""
    try:
        tree.check_tree(value, f"{name}: {part}")
    except TypeError as error:
        raise ValueError(str(error)) from None
    for path, leaf in tree.named_leaves(value, part):
        if leaf.shape[:1] != (N_ROWS,):
            raise ValueError(
                f"{name}: {path}: expected the leading axis B = {N_ROWS}, got {leaf.dtype} {list(leaf.shape)}"
            )


def _check_like(name: str, part: str, value: Any, like: Any) -> None:
    """Check that a value has the structure, shapes and dtypes of another value, and the leading axis B."""
    _check_tree(name, part, value)
    check_layout(name, part, value, like)


def check_layout(name: str, part: str, value: Any, like: Any) -> None:
    """Check that a value has the structure, shapes and dtypes of another value.

    Args:
      name: of the function that is called, for the message.
      part: of what it is called with, or returns.

    Raises:
      ValueError: one line that names the first tensor that differs.
    """
    if tree.structure(value) != tree.structure(like):
        wanted, got = (", ".join(tree.paths(x)) for x in (like, value))
        expected = f"the tensors {wanted}"
        if wanted == got:
            kinds = map(type, (like, value))
            expected, got = (f"{x.__module__}.{x.__name__}" for x in kinds)
        raise ValueError(f"{name}: {part}: expected {expected}, got {got}")
    for (path, x), actual in zip(
        tree.named_leaves(like, part), tree.leaves(value)
    ):
        check_tensor(actual, x.shape, x.dtype, f"{name}: {path}", ValueError)


def _is_equal(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    return torch.allclose(a, b, tolerance, tolerance, equal_nan=True)


class _Step(NamedTuple):
    """Result of a step, whose fields are named in errors."""

    state: Any
    Timestep: Any


def _check_equal(
    name: str, actual: Any, expected: Any, tolerance: float
) -> None:
    is_step = isinstance(expected, tuple) and isinstance(expected[-1], Timestep)
    if is_step:
        expected, actual = _Step(*expected), _Step(*actual)
    leaves = zip(
        tree.paths(expected), tree.leaves(actual), tree.leaves(expected)
    )
    for path, a, b in leaves:
        if not _is_equal(a, b, tolerance):
            place = f"{name}: {path}".removesuffix(": ")
            check_tensor(a, b.shape, b.dtype, place, ValueError)
            is_close = torch.isclose(a, b, tolerance, tolerance, equal_nan=True)
            index = tuple((~is_close).nonzero()[0].tolist())
            raise ValueError(
                f"{place}: expected {b[index].tolist()} at {list(index)}, got {a[index].tolist()}"
            )


class FunctionError(ValueError):
    """Error of a function of an environment or network that takes other arguments or reads what it does not get."""


def call_named(name: str, fn: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function and return its result; an AttributeError or TypeError becomes one that names the function.

    Raises:
      FunctionError: one line that names the function, in place of an AttributeError or a TypeError.
    """
    try:
        return fn(*arguments)
    except (AttributeError, TypeError) as error:
        raise FunctionError(
            f"{name}: expected a result, got {_describe(error)}"
        ) from error


def with_named_errors(env: AnyEnvironment) -> AnyEnvironment:
    """Return the environment with its functions called by `call_named`; a host environment is returned unchanged."""
    if env.host is not None:
        return env
    functions = {
        name: getattr(env, name)
        for name in (
            "reset",
            "step_functional",
            "observe",
            "sample_reset",
            "reset_from_sample",
            "step_with_autoreset",
            "restart",
        )
    }

    named: dict[str, Any] = {
        name: partial(call_named, name, fn)
        for name, fn in functions.items()
        if fn is not None
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
    try:
        return torch.vmap(fn)(*arguments)
    except Exception as error:  # whatever a function of a user's raises
        raise ValueError(
            f"{name}: expected a function that torch.vmap can map, got {_describe(error)}"
        ) from None


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
        _check_equal(
            f"step {t} a second time with the same seeds", a, b, TOLERANCE
        )


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
        state, timestep = env.step_functional(
            env.cfg, world, state, action, step_key
        )
        _check_timestep(env, timestep)
        steps.append({"obs": obs, "Timestep": timestep})
        finished = timestep.terminated | timestep.truncated
        state = _restart(env, world, state, finished, step_key)
    return steps
