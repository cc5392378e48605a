"""Pendulum-v1: swing a pole up by a torque too weak to lift it at once.

Source: the equations and constants of Gymnasium's Pendulum-v1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcppo import random
from funcppo.envs.base import Environment, Timestep
from funcppo.types import F32, I64

GRAVITY = 10.0  # m / s^2
MASS = 1.0  # kg
LENGTH = 1.0  # m
TIME_STEP = 0.05  # s a step
MAX_ANGULAR_VELOCITY = 8.0  # rad / s
MAX_TORQUE = 2.0  # N m


@dataclass(frozen=True, kw_only=True, slots=True)
class PendulumConfig:
    """Static settings."""

    max_steps: int = 200  # steps, after which a row is truncated; nothing else ends an episode
    reward_scale: float = 1.0  # factor of the reward; 1 is Gymnasium's


class EnvState(NamedTuple):
    """One pole a row."""

    motion: F32[Tensor, "B 2"]  # angle rad, 0 upright; angular velocity rad / s
    steps: I64[Tensor, "B"]


def reset(cfg: PendulumConfig, world: Any, key: I64[Tensor, "B 2"]) -> EnvState:
    """Any angle, with an angular velocity uniform on [-1, 1)."""
    unit = random.uniform(key, (2,), -1.0, 1.0)
    return EnvState(torch.stack([math.pi * unit[:, 0], unit[:, 1]], -1), torch.zeros_like(key[:, 0]))


def step_functional(
    cfg: PendulumConfig, world: Any, state: EnvState, action: F32[Tensor, "B 1"], key: I64[Tensor, "B 2"]
) -> tuple[EnvState, Timestep]:
    """One semi-implicit Euler step under a torque in N m, clipped to its limit.

    reward = -(angle^2 + 0.1 spin^2 + 0.001 torque^2), of the state before the step, the angle in [-pi, pi)
    """
    active = state.steps < cfg.max_steps
    angle, spin = state.motion.unbind(-1)
    torque = action.squeeze(-1).clamp(-MAX_TORQUE, MAX_TORQUE)
    folded = (angle + math.pi) % (2 * math.pi) - math.pi
    cost = folded**2 + 0.1 * spin**2 + 0.001 * torque**2
    acceleration = 1.5 * GRAVITY / LENGTH * torch.sin(angle) + 3.0 / (MASS * LENGTH**2) * torque
    new_spin = (spin + TIME_STEP * acceleration).clamp(-MAX_ANGULAR_VELOCITY, MAX_ANGULAR_VELOCITY)
    motion = torch.stack([angle + TIME_STEP * new_spin, new_spin], -1)
    after = EnvState(
        motion=torch.where(active.unsqueeze(-1), motion, state.motion),
        steps=torch.where(active, state.steps + 1, state.steps),
    )
    reward = torch.where(active, -cfg.reward_scale * cost, 0.0)
    truncated = after.steps >= cfg.max_steps
    return after, Timestep(reward=reward, terminated=torch.zeros_like(truncated), truncated=truncated)


def observe(cfg: PendulumConfig, world: Any, state: EnvState) -> F32[Tensor, "B 3"]:
    """Cosine and sine of the angle, angular velocity."""
    angle, spin = state.motion.unbind(-1)
    return torch.stack([torch.cos(angle), torch.sin(angle), spin], -1)


def environment(cfg: PendulumConfig) -> Environment:
    """Pendulum-v1."""
    return Environment(cfg=cfg, reset=reset, step_functional=step_functional, observe=observe, truncates=True)
