"""CartPole-v1: a pole on a cart, pushed left or right at every step.

Source: Barto, Sutton & Anderson 1983, "Neuronlike adaptive elements that can solve difficult learning control
problems", with the constants of Gymnasium's CartPole-v1.
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
CART_MASS = 1.0  # kg
POLE_MASS = 0.1  # kg
POLE_HALF_LENGTH = 0.5  # m, of the pole
PUSH_FORCE = 10.0  # N
TIME_STEP = 0.02  # s
X_LIMIT = 2.4  # m
ANGLE_LIMIT = 12 * 2 * math.pi / 360  # rad


MAX_EPISODE_STEPS = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class CartPoleConfig:
    """Settings."""

    # steps after which an episode is truncated
    max_steps: Size = MAX_EPISODE_STEPS

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class EnvState(NamedTuple):
    """State of the cart and the pole in each row."""

    # Position m, velocity m/s, angle rad, angular velocity rad/s.
    motion: F32[Tensor, "B 4"]
    steps: I64[Tensor, "B"]


def reset(
    cfg: CartPoleConfig, world: NoWorld, key: I64[Tensor, "B 2"]
) -> EnvState:
    """States near the upright rest: every number is uniform on [-0.05, 0.05)."""
    return EnvState(
        random.uniform(key, (4,), -0.05, 0.05), torch.zeros_like(key[:, 0])
    )


def step_functional(
    cfg: CartPoleConfig,
    world: NoWorld,
    state: EnvState,
    action: I64[Tensor, "B"],
    key: I64[Tensor, "B 2"],
) -> tuple[EnvState, Timestep]:
    """Make one explicit Euler step; the reward is 1 for every step that begins upright.

    Args:
      action: 0 pushes left, 1 right.
      key: unused: the step is deterministic.
    """
    active = ~(_has_fallen(state) | _is_timed_out(cfg, state))
    force = torch.where(action == 1, PUSH_FORCE, -PUSH_FORCE)
    next_state = EnvState(
        motion=torch.where(
            active.unsqueeze(-1), _euler_step(state.motion, force), state.motion
        ),
        steps=torch.where(active, state.steps + 1, state.steps),
    )
    timestep = Timestep(
        reward=active.to(state.motion.dtype),
        terminated=_has_fallen(next_state),
        truncated=_is_timed_out(cfg, next_state),
    )
    return next_state, timestep


def _euler_step(
    motion: F32[Tensor, "B 4"], force: F32[Tensor, "B"]
) -> F32[Tensor, "B 4"]:
    """The motion after one time step under a force on the cart, N."""
    x, velocity, angle, angular_velocity = motion.unbind(-1)
    total_mass = CART_MASS + POLE_MASS
    moment = POLE_MASS * POLE_HALF_LENGTH

    # Equations of Barto, Sutton & Anderson 1983, appendix, without friction.
    push = (
        force + moment * angular_velocity * angular_velocity * torch.sin(angle)
    ) / total_mass
    lever = POLE_HALF_LENGTH * (
        4.0 / 3.0 - POLE_MASS * torch.cos(angle) * torch.cos(angle) / total_mass
    )
    angular_acceleration = (
        GRAVITY * torch.sin(angle) - torch.cos(angle) * push
    ) / lever
    acceleration = (
        push - moment * angular_acceleration * torch.cos(angle) / total_mass
    )

    return torch.stack(
        [
            x + TIME_STEP * velocity,
            velocity + TIME_STEP * acceleration,
            angle + TIME_STEP * angular_velocity,
            angular_velocity + TIME_STEP * angular_acceleration,
        ],
        -1,
    )


def observe(
    cfg: CartPoleConfig, world: NoWorld, state: EnvState
) -> F32[Tensor, "B 4"]:
    """Position, velocity, angle, angular velocity."""
    return state.motion


def _has_fallen(state: EnvState) -> Bool[Tensor, "B"]:
    return (state.motion[:, 0].abs() > X_LIMIT) | (
        state.motion[:, 2].abs() > ANGLE_LIMIT
    )


def _is_timed_out(cfg: CartPoleConfig, state: EnvState) -> Bool[Tensor, "B"]:
    return state.steps >= cfg.max_steps


def environment(
    cfg: CartPoleConfig,
) -> Environment[NoWorld, EnvState, Tensor, EnvState]:
    """CartPole-v1 from its settings."""
    return Environment(
        cfg=cfg,
        reset=reset,
        step_functional=step_functional,
        observe=observe,
        truncates=True,
        spec=EnvironmentSpec(observation_size=4, action_size=2),
    )


def cartpole(
    *, max_steps: int = MAX_EPISODE_STEPS
) -> Environment[NoWorld, EnvState, Tensor, EnvState]:
    """CartPole-v1: keep a pole on a cart upright.

    Args:
      max_steps: steps after which an episode is truncated.
    """
    return environment(CartPoleConfig(max_steps=max_steps))
