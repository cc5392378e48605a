"""MountainCar-v0 and MountainCarContinuous-v0: drive out of a valley with an engine too weak for its slope.

Source: Moore 1990, "Efficient memory-based learning for robot control", with the equations and constants of Gymnasium's
MountainCar-v0 and MountainCarContinuous-v0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from funcppo.core import random
from funcppo.core.settings import FLOAT32_MAX, Range, Size, check_fields
from funcppo.core.types import F32, I64, Bool
from funcppo.interfaces import Environment, EnvironmentSpec, NoWorld, Timestep

# Positions are in units of length, velocities in units of length a step.
MIN_POSITION = -1.2
MAX_POSITION = 0.6
MAX_SPEED = 0.07
GRAVITY = 0.0025
FORCE = 0.001  # of a discrete action
POWER = 0.0015  # of a continuous action
GOAL_POSITION = 0.5
CONTINUOUS_GOAL_POSITION = 0.45
GOAL_REWARD = 100.0  # of the continuous task
ACTION_COST = 0.1  # of the continuous task


MAX_EPISODE_STEPS = 200
CONTINUOUS_MAX_EPISODE_STEPS = 999
GOAL_VELOCITY = 0.0  # Gymnasium's


@dataclass(frozen=True, kw_only=True, slots=True)
class MountainCarConfig:
    """Settings."""

    # steps after which an episode is truncated
    max_steps: Size = MAX_EPISODE_STEPS
    # least velocity at which the goal counts as reached
    goal_velocity: Annotated[float, Range(-FLOAT32_MAX, FLOAT32_MAX)] = (
        GOAL_VELOCITY
    )
    goal_position: Annotated[float, Range(MIN_POSITION, MAX_POSITION)] = (
        GOAL_POSITION
    )

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class EnvState(NamedTuple):
    """State of the car in each row."""

    motion: F32[Tensor, "B 2"]  # position, velocity
    steps: I64[Tensor, "B"]


def reset(
    cfg: MountainCarConfig, world: NoWorld, key: I64[Tensor, "B 2"]
) -> EnvState:
    """States at rest near the bottom: positions are uniform on [-0.6, -0.4)."""
    position = random.uniform(key, (), -0.6, -0.4)
    motion = torch.stack([position, torch.zeros_like(position)], -1)
    return EnvState(motion, torch.zeros_like(key[:, 0]))


def step_functional(
    cfg: MountainCarConfig,
    world: NoWorld,
    state: EnvState,
    action: I64[Tensor, "B"],
    key: I64[Tensor, "B 2"],
) -> tuple[EnvState, Timestep]:
    """Make one step; the reward is -1 for every step.

    Args:
      action: 0 drives left, 1 coasts, 2 drives right.
      key: unused: the step is deterministic.
    """
    force = FORCE * (action - 1).to(state.motion.dtype)
    active, next_state, at_goal = _drive(cfg, state, force)
    reward = -active.to(state.motion.dtype)
    return next_state, _timestep(cfg, next_state, reward, at_goal)


def step_continuous(
    cfg: MountainCarConfig,
    world: NoWorld,
    state: EnvState,
    action: F32[Tensor, "B 1"],
    key: I64[Tensor, "B 2"],
) -> tuple[EnvState, Timestep]:
    """Make one step; the reward is 100 at the goal, less 0.1 times the square of the action.

    Args:
      action: the force, clipped to [-1, 1]; its cost is that of the number before clipping.
      key: unused: the step is deterministic.
    """
    action = action.squeeze(-1)
    force = POWER * action.clamp(-1.0, 1.0)
    active, next_state, at_goal = _drive(cfg, state, force)

    gain = GOAL_REWARD * at_goal.to(state.motion.dtype)
    reward = torch.where(active, gain - ACTION_COST * action**2, 0.0)
    return next_state, _timestep(cfg, next_state, reward, at_goal)


def _drive(
    cfg: MountainCarConfig, state: EnvState, force: F32[Tensor, "B"]
) -> tuple[Bool[Tensor, "B"], EnvState, Bool[Tensor, "B"]]:
    """Which rows had not finished, the state after a step under a force, and which rows are at the goal then."""
    active = ~(_is_at_goal(cfg, state) | (state.steps >= cfg.max_steps))
    position, velocity = state.motion.unbind(-1)
    velocity = velocity + force - GRAVITY * torch.cos(3 * position)
    velocity = velocity.clamp(-MAX_SPEED, MAX_SPEED)
    position = (position + velocity).clamp(MIN_POSITION, MAX_POSITION)

    # The wall on the left stops the car.
    is_stopped = (position <= MIN_POSITION) & (velocity < 0)
    velocity = torch.where(is_stopped, 0.0, velocity)

    motion = torch.stack([position, velocity], -1)
    next_state = EnvState(
        motion=torch.where(active.unsqueeze(-1), motion, state.motion),
        steps=torch.where(active, state.steps + 1, state.steps),
    )
    return active, next_state, _is_at_goal(cfg, next_state)


def _timestep(
    cfg: MountainCarConfig,
    next_state: EnvState,
    reward: F32[Tensor, "B"],
    at_goal: Bool[Tensor, "B"],
) -> Timestep:
    is_timed_out = next_state.steps >= cfg.max_steps
    return Timestep(reward, at_goal, is_timed_out & ~at_goal)


def _is_at_goal(cfg: MountainCarConfig, state: EnvState) -> Bool[Tensor, "B"]:
    position, velocity = state.motion.unbind(-1)
    return (position >= cfg.goal_position) & (velocity >= cfg.goal_velocity)


def observe(
    cfg: MountainCarConfig, world: NoWorld, state: EnvState
) -> F32[Tensor, "B 2"]:
    """Position and velocity."""
    return state.motion


def mountain_car(
    *,
    max_steps: int = MAX_EPISODE_STEPS,
    goal_velocity: float = GOAL_VELOCITY,
) -> Environment[NoWorld, EnvState, Tensor, EnvState]:
    """MountainCar-v0: drive out of a valley by full throttle, left or right.

    Args:
      max_steps: steps after which an episode is truncated.
      goal_velocity: least velocity at which the goal counts as reached.
    """
    cfg = MountainCarConfig(max_steps=max_steps, goal_velocity=goal_velocity)
    return Environment(
        cfg=cfg,
        reset=reset,
        step_functional=step_functional,
        observe=observe,
        truncates=True,
        spec=EnvironmentSpec(observation_size=2, action_size=3),
    )


def mountain_car_continuous(
    *,
    max_steps: int = CONTINUOUS_MAX_EPISODE_STEPS,
    goal_velocity: float = GOAL_VELOCITY,
) -> Environment[NoWorld, EnvState, Tensor, EnvState]:
    """MountainCarContinuous-v0: drive out of a valley by a force that costs its square.

    Args:
      max_steps: steps after which an episode is truncated.
      goal_velocity: least velocity at which the goal counts as reached.
    """
    cfg = MountainCarConfig(
        max_steps=max_steps,
        goal_velocity=goal_velocity,
        goal_position=CONTINUOUS_GOAL_POSITION,
    )
    return Environment(
        cfg=cfg,
        reset=reset,
        step_functional=step_continuous,
        observe=observe,
        truncates=True,
        spec=EnvironmentSpec(
            observation_size=2, action_size=1, continuous_actions=True
        ),
    )
