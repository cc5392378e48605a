"""Acrobot-v1: swing up a chain of two links by a torque at the joint between them.

Source: Sutton 1996, "Generalization in reinforcement learning: successful examples using sparse coarse coding", with
the equations of Sutton & Barto's book and the constants of Gymnasium's Acrobot-v1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core import random
from funcppo.core.settings import Size, check_fields
from funcppo.core.types import F32, I64, Bool
from funcppo.interfaces import Environment, EnvironmentSpec, NoWorld, Timestep

GRAVITY = 9.8  # m / s^2
LINK_MASS = 1.0  # kg, of each link
LINK_LENGTH = 1.0  # m, of the first link
LINK_CENTRE = 0.5  # m, from the upper end of a link to its centre of mass
LINK_INERTIA = 1.0  # kg m^2
TIME_STEP = 0.2  # s
MAX_ANGULAR_VELOCITIES = (4 * math.pi, 9 * math.pi)  # rad / s
GOAL_HEIGHT = 1.0  # m, of the lower end above the fixed one


MAX_EPISODE_STEPS = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class AcrobotConfig:
    """Settings."""

    # steps after which an episode is truncated
    max_steps: Size = MAX_EPISODE_STEPS

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class EnvState(NamedTuple):
    """State of both links in each row."""

    # Angle of the first link, 0 hanging down, and of the second relative to it, rad; their angular velocities, rad / s.
    motion: F32[Tensor, "B 4"]
    steps: I64[Tensor, "B"]


def reset(
    cfg: AcrobotConfig, world: NoWorld, key: I64[Tensor, "B 2"]
) -> EnvState:
    """States near the hanging rest: every number is uniform on [-0.1, 0.1)."""
    return EnvState(
        random.uniform(key, (4,), -0.1, 0.1), torch.zeros_like(key[:, 0])
    )


def step_functional(
    cfg: AcrobotConfig,
    world: NoWorld,
    state: EnvState,
    action: I64[Tensor, "B"],
    key: I64[Tensor, "B 2"],
) -> tuple[EnvState, Timestep]:
    """Make one Runge-Kutta step of fourth order; the reward is -1 for every step that does not reach the goal.

    Args:
      action: 0, 1, 2 apply a torque of -1, 0, 1 N m.
      key: unused: the step is deterministic.
    """
    active = ~(_is_at_goal(state) | _is_timed_out(cfg, state))
    torque = (action - 1).to(state.motion.dtype)
    motion = _bound(_runge_kutta_step(state.motion, torque))
    next_state = EnvState(
        motion=torch.where(active.unsqueeze(-1), motion, state.motion),
        steps=torch.where(active, state.steps + 1, state.steps),
    )

    terminated = _is_at_goal(next_state)
    timestep = Timestep(
        reward=-(active & ~terminated).to(state.motion.dtype),
        terminated=terminated,
        truncated=_is_timed_out(cfg, next_state) & ~terminated,
    )
    return next_state, timestep


def _runge_kutta_step(
    motion: F32[Tensor, "B 4"], torque: F32[Tensor, "B"]
) -> F32[Tensor, "B 4"]:
    """The motion after one time step under a constant torque, N m."""
    half = TIME_STEP / 2
    k1 = _derivative(motion, torque)
    k2 = _derivative(motion + half * k1, torque)
    k3 = _derivative(motion + half * k2, torque)
    k4 = _derivative(motion + TIME_STEP * k3, torque)
    return motion + TIME_STEP / 6.0 * (k1 + 2 * k2 + 2 * k3 + k4)


def _derivative(
    motion: F32[Tensor, "B 4"], torque: F32[Tensor, "B"]
) -> F32[Tensor, "B 4"]:
    """The time derivative of the motion."""
    angle1, angle2, velocity1, velocity2 = motion.unbind(-1)
    lever = LINK_MASS * LINK_LENGTH * LINK_CENTRE
    weight = LINK_MASS * GRAVITY
    own_inertia = LINK_MASS * LINK_CENTRE**2 + LINK_INERTIA

    # Entries d1, d2 of the inertia matrix and forces phi1, phi2 of Sutton & Barto, section 11.3 (first edition).
    bend = lever * torch.cos(angle2)
    d1 = 2 * own_inertia + LINK_MASS * LINK_LENGTH**2 + 2 * bend
    d2 = own_inertia + bend
    twist = lever * torch.sin(angle2)
    phi2 = weight * LINK_CENTRE * torch.sin(angle1 + angle2)
    phi1 = (
        -twist * velocity2 * (velocity2 + 2 * velocity1)
        + weight * (LINK_CENTRE + LINK_LENGTH) * torch.sin(angle1)
        + phi2
    )

    acceleration2 = (torque + d2 / d1 * phi1 - twist * velocity1**2 - phi2) / (
        own_inertia - d2 * d2 / d1
    )
    acceleration1 = -(d2 * acceleration2 + phi1) / d1
    return torch.stack([velocity1, velocity2, acceleration1, acceleration2], -1)


def _bound(motion: F32[Tensor, "B 4"]) -> F32[Tensor, "B 4"]:
    """Angles wrapped to [-pi, pi], angular velocities clipped to their limits."""
    angles, velocities = motion[:, :2], motion[:, 2:]
    turn = 2 * math.pi
    turns_above = torch.ceil((angles - math.pi) / turn).clamp_min(0)
    turns_below = torch.ceil((-math.pi - angles) / turn).clamp_min(0)
    limit1, limit2 = MAX_ANGULAR_VELOCITIES
    return torch.cat(
        [
            angles + turn * (turns_below - turns_above),
            velocities[:, :1].clamp(-limit1, limit1),
            velocities[:, 1:].clamp(-limit2, limit2),
        ],
        -1,
    )


def observe(
    cfg: AcrobotConfig, world: NoWorld, state: EnvState
) -> F32[Tensor, "B 6"]:
    """Cosine and sine of the first angle, of the second angle, both angular velocities."""
    angle1, angle2, velocity1, velocity2 = state.motion.unbind(-1)
    return torch.stack(
        [
            torch.cos(angle1),
            torch.sin(angle1),
            torch.cos(angle2),
            torch.sin(angle2),
            velocity1,
            velocity2,
        ],
        -1,
    )


def _is_at_goal(state: EnvState) -> Bool[Tensor, "B"]:
    angle1, angle2 = state.motion[:, 0], state.motion[:, 1]
    height = -torch.cos(angle1) - torch.cos(angle1 + angle2)
    return height > GOAL_HEIGHT


def _is_timed_out(cfg: AcrobotConfig, state: EnvState) -> Bool[Tensor, "B"]:
    return state.steps >= cfg.max_steps


def acrobot(
    *, max_steps: int = MAX_EPISODE_STEPS
) -> Environment[NoWorld, EnvState, Tensor, EnvState]:
    """Acrobot-v1: swing the lower end of two links up to the length of one.

    Args:
      max_steps: steps after which an episode is truncated.
    """
    return Environment(
        cfg=AcrobotConfig(max_steps=max_steps),
        reset=reset,
        step_functional=step_functional,
        observe=observe,
        truncates=True,
        spec=EnvironmentSpec(observation_size=6, action_size=3),
    )
