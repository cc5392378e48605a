"""CartPole-v1: a pole on a cart, pushed left or right at every step.

Source: Barto, Sutton & Anderson 1983, "Neuronlike adaptive elements that can solve difficult learning control
problems", with the constants of Gymnasium's CartPole-v1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcppo import random
from funcppo.envs.base import Environment, Timestep
from funcppo.types import F32, I64, Bool

GRAVITY = 9.8  # m / s^2
CART_MASS = 1.0  # kg
POLE_MASS = 0.1  # kg
POLE_HALF_LENGTH = 0.5  # m, of the pole
PUSH_FORCE = 10.0  # N
TIME_STEP = 0.02  # s a step
X_LIMIT = 2.4  # m
ANGLE_LIMIT = 12 * 2 * math.pi / 360  # rad


@dataclass(frozen=True, kw_only=True, slots=True)
class CartPoleConfig:
    """Static settings."""

    max_steps: int = 500  # steps, after which a row is truncated


class EnvState(NamedTuple):
    """One cart a row."""

    motion: F32[Tensor, "B 4"]  # position m, velocity m/s, angle rad, angular velocity rad/s
    steps: I64[Tensor, "B"]


def reset(cfg: CartPoleConfig, world: Any, key: I64[Tensor, "B 2"]) -> EnvState:
    """Near the upright rest, every number uniform on [-0.05, 0.05)."""
    return EnvState(random.uniform(key, (4,), -0.05, 0.05), torch.zeros_like(key[:, 0]))


def step_functional(
    cfg: CartPoleConfig, world: Any, state: EnvState, action: I64[Tensor, "B"], key: I64[Tensor, "B 2"]
) -> tuple[EnvState, Timestep]:
    """One explicit Euler step; reward 1 for every step begun upright. `action` 0 pushes left, 1 right."""
    active = ~(_fallen(state) | _timed_out(cfg, state))
    x, velocity, angle, spin = state.motion.unbind(-1)
    force = torch.where(action == 1, PUSH_FORCE, -PUSH_FORCE)
    total, moment = CART_MASS + POLE_MASS, POLE_MASS * POLE_HALF_LENGTH
    push = (force + moment * spin * spin * torch.sin(angle)) / total
    lever = POLE_HALF_LENGTH * (4.0 / 3.0 - POLE_MASS * torch.cos(angle) * torch.cos(angle) / total)
    spin_rate = (GRAVITY * torch.sin(angle) - torch.cos(angle) * push) / lever
    acceleration = push - moment * spin_rate * torch.cos(angle) / total
    motion = torch.stack(
        [
            x + TIME_STEP * velocity,
            velocity + TIME_STEP * acceleration,
            angle + TIME_STEP * spin,
            spin + TIME_STEP * spin_rate,
        ],
        -1,
    )
    after = EnvState(
        motion=torch.where(active.unsqueeze(-1), motion, state.motion),
        steps=torch.where(active, state.steps + 1, state.steps),
    )
    reward = active.to(state.motion.dtype)
    return after, Timestep(reward=reward, terminated=_fallen(after), truncated=_timed_out(cfg, after))


def observe(cfg: CartPoleConfig, world: Any, state: EnvState) -> F32[Tensor, "B 4"]:
    """Position, velocity, angle, angular velocity."""
    return state.motion


def _fallen(state: EnvState) -> Bool[Tensor, "B"]:
    return (state.motion[:, 0].abs() > X_LIMIT) | (state.motion[:, 2].abs() > ANGLE_LIMIT)


def _timed_out(cfg: CartPoleConfig, state: EnvState) -> Bool[Tensor, "B"]:
    return state.steps >= cfg.max_steps


def environment(cfg: CartPoleConfig) -> Environment:
    """CartPole-v1."""
    return Environment(cfg=cfg, reset=reset, step_functional=step_functional, observe=observe, truncates=True)
