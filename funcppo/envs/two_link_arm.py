"""A planar arm of two links that reaches for a target: `reacher`.

The arm moves by its equations of motion, with the angles q (of the first link, and of the second one relative to it):

    M(q) q'' + C(q, q') q' + damping q' + g(q) = torque

This is no copy of the Reacher of MuJoCo: the links are uniform rods, and contacts there are none.

Source: Spong, Hutchinson & Vidyasagar 2006, "Robot modeling and control", section 7.4: the planar elbow manipulator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core import random
from funcppo.core.settings import NonNegativeFloat, Size, check_fields
from funcppo.core.types import F32, I64
from funcppo.interfaces import Environment, EnvironmentSpec, NoWorld, Timestep

LENGTH = 0.5  # m, of each link
MASS = 1.0  # kg, of each link
CENTRE = LENGTH / 2  # m, from a joint to the centre of mass
INERTIA = MASS * LENGTH**2 / 12  # kg m^2, of a rod about its centre
MAX_TORQUE = 1.0  # N m, of each joint
TIME_STEP = 0.05  # s, between two actions
N_SUBSTEPS = 4  # of the integrator in a step
CONTROL_COST = 0.1  # of a squared action

MAX_EPISODE_STEPS = 100
DAMPING = 0.1  # N m s / rad
GRAVITY = 0.0  # m / s^2: the arm lies on a table


@dataclass(frozen=True, kw_only=True, slots=True)
class ReacherConfig:
    """Settings."""

    # steps after which an episode is truncated; nothing else ends it
    max_steps: Size = MAX_EPISODE_STEPS
    damping: NonNegativeFloat = DAMPING  # N m s / rad, of each joint
    gravity: NonNegativeFloat = GRAVITY  # m / s^2, along -y

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class EnvState(NamedTuple):
    """State of the arm in each row."""

    angle: F32[Tensor, "B 2"]  # rad; both 0: stretched along x
    velocity: F32[Tensor, "B 2"]  # rad / s
    target: F32[Tensor, "B 2"]  # m
    steps: I64[Tensor, "B"]


def reset(
    cfg: ReacherConfig, world: NoWorld, key: I64[Tensor, "B 2"]
) -> EnvState:
    """The arm at rest in any pose, and a target uniform on the disc that it can reach."""
    unit = random.uniform(key, (4,))
    radius = 2 * LENGTH * torch.sqrt(unit[:, 2])
    bearing = 2 * math.pi * unit[:, 3]
    target = torch.stack(
        [radius * torch.cos(bearing), radius * torch.sin(bearing)], -1
    )
    angle = 2 * math.pi * unit[:, :2] - math.pi
    return EnvState(
        angle, torch.zeros_like(angle), target, torch.zeros_like(key[:, 0])
    )


def acceleration(
    cfg: ReacherConfig,
    angle: F32[Tensor, "B 2"],
    velocity: F32[Tensor, "B 2"],
    torque: F32[Tensor, "B 2"],
) -> F32[Tensor, "B 2"]:
    """Angular accelerations, of the equations of motion solved for q''."""
    first, second = angle.unbind(-1)
    first_velocity, second_velocity = velocity.unbind(-1)

    # The inertia matrix M.
    coupling = MASS * LENGTH * CENTRE * torch.cos(second)
    inertia_22 = MASS * CENTRE**2 + INERTIA
    inertia_12 = inertia_22 + coupling
    inertia_11 = (
        inertia_22 + INERTIA + MASS * (CENTRE**2 + LENGTH**2) + 2 * coupling
    )

    # Coriolis and centrifugal terms C q'.
    h = -MASS * LENGTH * CENTRE * torch.sin(second)
    coriolis_1 = h * second_velocity * (2 * first_velocity + second_velocity)
    coriolis_2 = -h * first_velocity**2

    second_weight = MASS * CENTRE * cfg.gravity * torch.cos(first + second)
    first_weight = (
        MASS * (CENTRE + LENGTH) * cfg.gravity * torch.cos(first)
        + second_weight
    )
    net = torque - cfg.damping * velocity
    force_1 = net[..., 0] - coriolis_1 - first_weight
    force_2 = net[..., 1] - coriolis_2 - second_weight

    determinant = inertia_11 * inertia_22 - inertia_12**2
    return torch.stack(
        [
            (inertia_22 * force_1 - inertia_12 * force_2) / determinant,
            (inertia_11 * force_2 - inertia_12 * force_1) / determinant,
        ],
        -1,
    )


def _integrate(
    cfg: ReacherConfig, angle: Tensor, velocity: Tensor, torque: Tensor
) -> tuple[Tensor, Tensor]:
    """One step of the classic Runge-Kutta method of order 4, under a constant torque."""
    dt = TIME_STEP / N_SUBSTEPS
    v1 = velocity
    a1 = acceleration(cfg, angle, v1, torque)
    v2 = velocity + dt / 2 * a1
    a2 = acceleration(cfg, angle + dt / 2 * v1, v2, torque)
    v3 = velocity + dt / 2 * a2
    a3 = acceleration(cfg, angle + dt / 2 * v2, v3, torque)
    v4 = velocity + dt * a3
    a4 = acceleration(cfg, angle + dt * v3, v4, torque)
    return (
        angle + dt / 6 * (v1 + 2 * v2 + 2 * v3 + v4),
        velocity + dt / 6 * (a1 + 2 * a2 + 2 * a3 + a4),
    )


def fingertip(angle: F32[Tensor, "B 2"]) -> F32[Tensor, "B 2"]:
    """Where the end of the arm is, in m."""
    first, both = angle[:, 0], angle.sum(-1)
    return LENGTH * torch.stack(
        [
            torch.cos(first) + torch.cos(both),
            torch.sin(first) + torch.sin(both),
        ],
        -1,
    )


def step_functional(
    cfg: ReacherConfig,
    world: NoWorld,
    state: EnvState,
    action: F32[Tensor, "B 2"],
    key: I64[Tensor, "B 2"],
) -> tuple[EnvState, Timestep]:
    """Move the arm for a time step.

        reward = -|fingertip - target| - 0.1 |action|^2

    of the state that is reached.

    Args:
      action: the torque of each joint as a share of its limit, clipped to [-1, 1].
      key: unused: the step is deterministic.
    """
    active = state.steps < cfg.max_steps
    action = action.clamp(-1.0, 1.0)
    angle, velocity = state.angle, state.velocity
    for _ in range(N_SUBSTEPS):
        angle, velocity = _integrate(cfg, angle, velocity, MAX_TORQUE * action)

    rows = active.unsqueeze(-1)
    next_state = EnvState(
        angle=torch.where(rows, angle, state.angle),
        velocity=torch.where(rows, velocity, state.velocity),
        target=state.target,
        steps=torch.where(active, state.steps + 1, state.steps),
    )
    offset = fingertip(next_state.angle) - state.target
    distance = (offset**2).sum(-1).sqrt()
    cost = distance + CONTROL_COST * (action**2).sum(-1)
    truncated = next_state.steps >= cfg.max_steps
    return next_state, Timestep(
        reward=torch.where(active, -cost, 0.0),
        terminated=torch.zeros_like(truncated),
        truncated=truncated,
    )


def observe(
    cfg: ReacherConfig, world: NoWorld, state: EnvState
) -> F32[Tensor, "B 10"]:
    """Cosines and sines of the angles, angular velocities, target, and fingertip relative to it."""
    return torch.cat(
        [
            torch.cos(state.angle),
            torch.sin(state.angle),
            state.velocity,
            state.target,
            fingertip(state.angle) - state.target,
        ],
        -1,
    )


def reacher(
    *,
    max_steps: int = MAX_EPISODE_STEPS,
    damping: float = DAMPING,
    gravity: float = GRAVITY,
) -> Environment[NoWorld, EnvState, Tensor, EnvState]:
    """A planar arm of two links that reaches for a target.

    Args:
      max_steps: steps after which an episode is truncated.
      damping: N m s / rad, of each joint.
      gravity: m / s^2; 0 for an arm that lies on a table.
    """
    return Environment(
        cfg=ReacherConfig(
            max_steps=max_steps, damping=damping, gravity=gravity
        ),
        reset=reset,
        step_functional=step_functional,
        observe=observe,
        truncates=True,
        spec=EnvironmentSpec(
            observation_size=10, action_size=2, continuous_actions=True
        ),
    )
