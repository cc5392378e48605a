"""What rollouts do with an environment: a step after which finished rows start again (`step_with_autoreset`).

`funcppo.interfaces` says what an environment is.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from funcppo.core import tree
from funcppo.core.types import (
    I64,
    Bool,
    Obs,
    ResetSample,
    State,
    World,
    check_tensor,
)
from funcppo.interfaces import Environment, Timestep


def sample_reset(
    env: Environment[World, State, Obs, ResetSample],
    world: World,
    key: I64[Tensor, "B 2"],
) -> ResetSample:
    """Sample the random part of a reset for each key; the whole state if the environment does not tell them apart."""
    if env.sample_reset is not None:
        return env.sample_reset(env.cfg, world, key)
    return cast(ResetSample, env.reset(env.cfg, world, key))


def step_with_autoreset(
    env: Environment[World, State, Obs, ResetSample],
    world: World,
    state: State,
    action: Tensor,
    key: I64[Tensor, "B 2"],
    reset_sample: ResetSample,
) -> tuple[State, Timestep, State]:
    """Step every row, then reset the rows that the step finished.

    An environment whose step and reset share their costly part may do both at once, with the same result.

    Args:
      reset_sample: from `sample_reset`; used in finished rows only.

    Returns:
      The state before any reset, the timestep, and the state to continue from.

    Raises:
      TypeError: `step_functional` returns a flag or a state of another shape or dtype than it should.
    """
    if env.step_with_autoreset is not None:
        return env.step_with_autoreset(
            env.cfg, world, state, action, key, reset_sample
        )

    result = env.step_functional(env.cfg, world, state, action, key)
    _check_step(state, result, key.shape[:1])
    reached_state, timestep = result
    if env.reset_from_sample is not None:
        reset_state = env.reset_from_sample(env.cfg, world, reset_sample)
    else:
        reset_state = cast(Any, reset_sample)
    finished = timestep.terminated | timestep.truncated
    next_state = restart(env, world, reached_state, finished, reset_state)
    return reached_state, timestep, next_state


def _check_step(state: object, result: object, rows: torch.Size) -> None:
    """Check the flags that a step returns, and that it keeps structure, shapes and dtypes of the state.

    Only what is static is looked at, so that a compiled step checks nothing.

    Raises:
      TypeError: names the tensor, or says that there is no `Timestep`.
    """
    name = "step_functional"
    if not isinstance(result, tuple) or len(cast(Any, result)) != 2:
        raise TypeError(
            f"{name}: expected a state and a Timestep, got {type(cast(Any, result)).__name__}"
        )
    reached_state, timestep = cast(tuple[Any, Any], result)
    if not isinstance(timestep, Timestep):
        raise TypeError(
            f"{name}: expected a state and a Timestep, got {type(timestep).__name__} in place of the second"
        )
    for flag in ("terminated", "truncated"):
        value = getattr(timestep, flag)
        check_tensor(value, rows, torch.bool, f"{name}: Timestep.{flag}")

    before, after = tree.leaves(state), tree.leaves(reached_state)
    if type(reached_state) is not type(state) or len(after) != len(before):
        raise TypeError(
            f"{name}: state: expected a {type(state).__name__} of {len(before)} tensors, "
            f"got a {type(reached_state).__name__} of {len(after)}"
        )
    pairs = zip(tree.named_leaves(state, "state"), after)
    for (path, x), y in pairs:
        check_tensor(y, x.shape, x.dtype, f"{name}: {path}")


def restart(
    env: Environment[World, State, Obs, ResetSample],
    world: World,
    state: State,
    finished: Bool[Tensor, "B"],
    reset_state: State,
) -> State:
    """The state with every finished row replaced by that of `reset_state`, except for what outlives an episode."""
    if env.restart is not None:
        return env.restart(env.cfg, world, state, finished, reset_state)
    return tree.where(finished, reset_state, state)
