"""What an environment is: three pure functions and their settings.

    reset(cfg, world, key)                           -> state       one row for each key
    step_functional(cfg, world, state, action, key)  -> state, Timestep
    observe(cfg, world, state)                       -> observation

`cfg` is a frozen dataclass of Python scalars. `world` is a NamedTuple of tensors that stay fixed while a policy learns
(`NoWorld()` where there are none). `state` is any NamedTuple of tensors with the leading axis B, the observation a
tensor or a NamedTuple of tensors with the leading axis B. `key` is `I64[Tensor, "B 2"]`, a key for each row, so that a
row's numbers depend on nothing but its own key. Rows are independent, and a row that has finished stays as it is:
reward 0, the same state, the same flags. Nothing restarts by itself; `advance` is called by rollouts only, which draw
the restarts of all their steps at once, before the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from funcppo import tree
from funcppo.types import F32, I64, Bool

State = TypeVar("State")


class Timestep(NamedTuple):
    """The transition just made. Its last observation is `observe(state)`, before any restart."""

    reward: F32[Tensor, "B"]
    terminated: Bool[Tensor, "B"]  # the task is over: no reward can follow
    truncated: Bool[Tensor, "B"]  # cut by a limit that is no part of the task: rewards would have followed


class NoWorld(NamedTuple):
    """The world of an environment that needs none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The three functions and what is static about them."""

    cfg: Any  # a frozen dataclass; handed to each function as its first argument
    reset: Callable[[Any, Any, Tensor], Any]
    step_functional: Callable[[Any, Any, Any, Tensor, Tensor], tuple[Any, Timestep]]
    observe: Callable[[Any, Any, Any], Any]
    truncates: bool  # whether `truncated` is ever true; if not, rollouts call the network once a step
    # A reset in two, for states too large to hold one for every step of a rollout: reset(key) == start(draw(key)).
    sample_reset: Callable[[Any, Any, Tensor], Any] | None = None  # cfg, world, key -> drawn; None: the state itself
    reset_from_sample: Callable[[Any, Any, Any], Any] | None = None  # cfg, world, drawn -> state
    step_with_autoreset: Callable[[Any, Any, Any, Tensor, Tensor, Any], tuple[Any, Timestep, Any]] | None = (
        None  # see `advance`
    )


def sample_reset(env: Environment, world: Any, key: I64[Tensor, "B 2"]) -> Any:
    """What restarts need of chance, one for each key: `advance` takes it."""
    return (env.sample_reset or env.reset)(env.cfg, world, key)


def step_with_autoreset(
    env: Environment, world: Any, state: Any, action: Tensor, key: I64[Tensor, "B 2"], reset_sample: Any
) -> tuple[Any, Timestep, Any]:
    """A step and the restart of the rows that it finished: the state reached, the transition, the state to go on from.

    An environment whose step and start share their costly part may do both at once, with the same result.

    Args:
      drawn: what `draw` returned.
    """
    if env.step_with_autoreset is not None:
        return env.step_with_autoreset(env.cfg, world, state, action, key, reset_sample)
    reached, timestep = env.step_functional(env.cfg, world, state, action, key)
    fresh = reset_sample if env.reset_from_sample is None else env.reset_from_sample(env.cfg, world, reset_sample)
    return reached, timestep, autoreset(reached, timestep, fresh)


def autoreset(state: State, timestep: Timestep, reset_state: State) -> State:
    """The state with every finished row replaced by a fresh one."""
    return tree.where(timestep.terminated | timestep.truncated, reset_state, state)
