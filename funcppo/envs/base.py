"""What rollouts do with an environment: a step after which finished rows start again (`step_with_autoreset`).

`funcppo.interfaces` says what an environment is.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from funcppo import tree
from funcppo.interfaces import (
    AutoresetStep,
    Environment,
    EnvironmentSpec,
    NoWorld,
    Timestep,
)
from funcppo.types import (
    I64,
    Bool,
    Obs,
    ResetSample,
    State,
    World,
    check_tensor,
)

__all__ = [
    "AutoresetStep",
    "Environment",
    "EnvironmentSpec",
    "NoWorld",
    "Timestep",
    "restart",
    "sample_reset",
    "step_with_autoreset",
]


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
) -> AutoresetStep[State]:
    """Step every row, then reset the rows that the step finished.

    An environment whose step and reset share their costly part may do both at once, with the same result.

    Args:
      reset_sample: from `sample_reset`; used in finished rows only.

    Raises:
      TypeError: `step_functional` returns a flag or a state of another shape or dtype than it should.
    """
    if env.step_with_autoreset is not None:
        return AutoresetStep(
            *env.step_with_autoreset(
                env.cfg, world, state, action, key, reset_sample
            )
        )

    reached_state, timestep = env.step_functional(
        env.cfg, world, state, action, key
    )
    _check_step(state, reached_state, timestep, key.shape[:1])
    if env.reset_from_sample is not None:
        reset_state = env.reset_from_sample(env.cfg, world, reset_sample)
    else:
        reset_state = cast(Any, reset_sample)
    return AutoresetStep(
        reached_state,
        timestep,
        restart(
            env,
            world,
            reached_state,
            timestep.terminated | timestep.truncated,
            reset_state,
        ),
    )


def _check_step(
    state: State, reached_state: State, timestep: object, rows: torch.Size
) -> None:
    """Check the flags that a step returns, and that it keeps the shapes and dtypes of the state.

    Raises:
      TypeError: names the tensor, or says that there is no `Timestep`.
    """
    if not isinstance(timestep, Timestep):
        raise TypeError(
            f"step_functional: expected a state and a Timestep, got {type(timestep).__name__} in place of the second"
        )
    for name in ("terminated", "truncated"):
        flag = getattr(timestep, name)
        check_tensor(flag, rows, torch.bool, f"Timestep.{name}")

    leaves = zip(tree.leaves(state), tree.leaves(reached_state))
    for i, (before, after) in enumerate(leaves):
        if after.shape != before.shape or after.dtype != before.dtype:
            path = tree.paths(state)[i]
            check_tensor(
                after, before.shape, before.dtype, f"state.{path} after a step"
            )


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
