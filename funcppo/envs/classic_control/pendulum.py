"""Pendulum-v1: swing a pole up by a torque too weak to lift it at once.

Source: the equations and constants of Gymnasium's Pendulum-v1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from funcppo.core import random
from funcppo.core.settings import FLOAT32_MAX, Range, Size, check_fields
from funcppo.core.types import F32, I64
from funcppo.interfaces import Environment, EnvironmentSpec, NoWorld, Timestep

GRAVITY = 10.0  # m / s^2
MASS = 1.0  # kg
LENGTH = 1.0  # m
TIME_STEP = 0.05  # s
MAX_ANGULAR_VELOCITY = 8.0  # rad / s
MAX_TORQUE = 2.0  # N m


MAX_EPISODE_STEPS = 200
REWARD_SCALE = 1.0  # Gymnasium's


@dataclass(frozen=True, kw_only=True, slots=True)
class PendulumConfig:
    """Settings."""

    # steps after which an episode is truncated; nothing else ends it
    max_steps: Size = MAX_EPISODE_STEPS
    reward_scale: Annotated[float, Range(-FLOAT32_MAX, FLOAT32_MAX)] = (
        REWARD_SCALE  # factor of the reward
    )

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class EnvState(NamedTuple):
    """State of the pole in each row."""

    motion: F32[Tensor, "B 2"]  # angle rad, 0 upright; angular velocity rad / s
    steps: I64[Tensor, "B"]


def reset(
    cfg: PendulumConfig, world: NoWorld, key: I64[Tensor, "B 2"]
) -> EnvState:
    """States of any angle, with an angular velocity uniform on [-1, 1)."""
    unit = random.uniform(key, (2,), -1.0, 1.0)
    motion = torch.stack([math.pi * unit[:, 0], unit[:, 1]], -1)
    return EnvState(motion, torch.zeros_like(key[:, 0]))


def step_functional(
    cfg: PendulumConfig,
    world: NoWorld,
    state: EnvState,
    action: F32[Tensor, "B 1"],
    key: I64[Tensor, "B 2"],
) -> tuple[EnvState, Timestep]:
    """Make one semi-implicit Euler step.

        reward = -(angle^2 + 0.1 angular_velocity^2 + 0.001 torque^2)

    of the state before the step, with the angle in [-pi, pi).

    Args:
      action: the torque in N m, clipped to its limit.
      key: unused: the step is deterministic.
    """
    active = state.steps < cfg.max_steps
    angle, angular_velocity = state.motion.unbind(-1)
    torque = action.squeeze(-1).clamp(-MAX_TORQUE, MAX_TORQUE)

    wrapped_angle = (angle + math.pi) % (2 * math.pi) - math.pi
    cost = wrapped_angle**2 + 0.1 * angular_velocity**2 + 0.001 * torque**2

    # The new velocity moves the angle: that is what makes the step semi-implicit.
    acceleration = (
        1.5 * GRAVITY / LENGTH * torch.sin(angle)
        + 3.0 / (MASS * LENGTH**2) * torque
    )
    next_velocity = (angular_velocity + TIME_STEP * acceleration).clamp(
        -MAX_ANGULAR_VELOCITY, MAX_ANGULAR_VELOCITY
    )
    motion = torch.stack([angle + TIME_STEP * next_velocity, next_velocity], -1)

    next_state = EnvState(
        motion=torch.where(active.unsqueeze(-1), motion, state.motion),
        steps=torch.where(active, state.steps + 1, state.steps),
    )
    truncated = next_state.steps >= cfg.max_steps
    timestep = Timestep(
        reward=torch.where(active, -cfg.reward_scale * cost, 0.0),
        terminated=torch.zeros_like(truncated),
        truncated=truncated,
    )
    return next_state, timestep


def observe(
    cfg: PendulumConfig, world: NoWorld, state: EnvState
) -> F32[Tensor, "B 3"]:
    """Cosine and sine of the angle, angular velocity."""
    angle, angular_velocity = state.motion.unbind(-1)
    return torch.stack(
        [torch.cos(angle), torch.sin(angle), angular_velocity], -1
    )


def environment(
    cfg: PendulumConfig,
) -> Environment[NoWorld, EnvState, Tensor, EnvState]:
    """Pendulum-v1 from its settings."""
    return Environment(
        cfg=cfg,
        reset=reset,
        step_functional=step_functional,
        observe=observe,
        truncates=True,
        spec=EnvironmentSpec(
            observation_size=3, action_size=1, continuous_actions=True
        ),
    )


def pendulum(
    *, max_steps: int = MAX_EPISODE_STEPS, reward_scale: float = REWARD_SCALE
) -> Environment[NoWorld, EnvState, Tensor, EnvState]:
    """Pendulum-v1: swing a pole up by a torque too weak to lift it at once.

    Args:
      max_steps: steps after which an episode is truncated.
      reward_scale: factor of the reward.
    """
    return environment(
        PendulumConfig(max_steps=max_steps, reward_scale=reward_scale)
    )
