"""Bodies under a force, the classic tasks of control, and one task for the memory.

`cartpole`, `pendulum`, `acrobot`, `mountain_car` and `mountain_car_continuous` have the equations and constants of
Gymnasium's environments of these names. `recall` shows a cue in the first observation alone, so that a policy that acts
on the present observation is right once in `n_cues` episodes, whatever it does.

All have a time limit of their own, which truncates (`recall` terminates).

Source: Barto, Sutton & Anderson 1983, "Neuronlike adaptive elements that can solve difficult learning control
problems" (CartPole); Sutton 1996, "Generalization in reinforcement learning" (Acrobot); Moore 1990, "Efficient
memory-based learning for robot control" (MountainCar); Osband et al. 2020, "Behaviour suite for reinforcement
learning", arXiv:1908.03568 (recall).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from funcppo.core import random
from funcppo.core.settings import (
    FLOAT32_MAX,
    Range,
    Size,
    check_fields,
)
from funcppo.core.types import F32, I64, Bool
from funcppo.interfaces import (
    AnyEnvironment,
    Environment,
    EnvironmentSpec,
    NoWorld,
    Timestep,
)

GRAVITY = 9.8  # m / s^2, of CartPole and Acrobot


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeConfig:
    """Settings of an environment with a time limit alone."""

    max_steps: Size  # steps after which an episode is truncated

    __post_init__ = check_fields


class BodyState(NamedTuple):
    """State of a body in each row; each task defines the numbers of its motion."""

    motion: F32[Tensor, "B N"]
    steps: I64[Tensor, "B"]


def _transition(
    cfg: Any,
    state: BodyState,
    motion: F32[Tensor, "B N"],
    is_over: Callable[[Any, F32[Tensor, "B N"]], Bool[Tensor, "B"]],
    reward: Callable[[Tensor, Tensor], F32[Tensor, "B"]],
) -> tuple[BodyState, Timestep]:
    """Return the state and timestep after a motion; rows that had finished stay as they are.

    Args:
      is_over: whether a motion ends the episode.
      reward: of the rows that had not finished, and of those that end.
    """
    active = ~(is_over(cfg, state.motion) | (state.steps >= cfg.max_steps))
    next_state = BodyState(
        torch.where(active.unsqueeze(-1), motion, state.motion),
        torch.where(active, state.steps + 1, state.steps),
    )
    terminated = is_over(cfg, next_state.motion)
    return next_state, Timestep(
        reward=reward(active, terminated),
        terminated=terminated,
        truncated=(next_state.steps >= cfg.max_steps) & ~terminated,
    )


def _never(cfg: Any, motion: F32[Tensor, "B N"]) -> Bool[Tensor, "B"]:
    """Return false for each row: only the time limit ends an episode."""
    return torch.zeros_like(motion[:, 0], dtype=torch.bool)


def _at_rest(key: I64[Tensor, "B 2"], motion: F32[Tensor, "B N"]) -> BodyState:
    """Build the state of a first motion, at step 0."""
    return BodyState(motion, torch.zeros_like(key[:, 0]))


def _observe_motion(
    cfg: Any, world: NoWorld, state: BodyState
) -> F32[Tensor, "B N"]:
    """Return the motion itself as the observation."""
    return state.motion


def _runge_kutta(
    derivative: Callable[[Tensor], Tensor], motion: Tensor, time_step: float
) -> Tensor:
    """Compute the motion after one step of the classic fourth-order Runge-Kutta method."""
    half = time_step / 2
    k1 = derivative(motion)
    k2 = derivative(motion + half * k1)
    k3 = derivative(motion + half * k2)
    k4 = derivative(motion + time_step * k3)
    return motion + time_step / 6.0 * (k1 + 2 * k2 + 2 * k3 + k4)


def _environment(
    cfg: Any,
    reset: Callable[..., Any],
    step: Callable[..., Any],
    observe: Callable[..., Any],
    spec: EnvironmentSpec,
    truncates: bool = True,
) -> AnyEnvironment:
    return Environment(
        cfg=cfg,
        reset=reset,
        step_functional=step,
        observe=observe,
        truncates=truncates,
        spec=spec,
    )


# CartPole


def cartpole_reset(
    cfg: EpisodeConfig, world: NoWorld, key: I64[Tensor, "B 2"]
) -> BodyState:
    """Sample states near upright rest: every number is uniform on [-0.05, 0.05)."""
    return _at_rest(key, random.uniform(key, (4,), -0.05, 0.05))


def cartpole_step(
    cfg: EpisodeConfig,
    world: NoWorld,
    state: BodyState,
    action: I64[Tensor, "B"],
    key: I64[Tensor, "B 2"],
) -> tuple[BodyState, Timestep]:
    """Make one explicit Euler step; the reward is 1 for every step that begins upright.

    Args:
      state: its motion is position m, velocity m/s, angle rad, angular velocity rad/s.
      action: 0 pushes left, 1 right.
      key: unused: the step is deterministic.
    """
    force = torch.where(action == 1, 10.0, -10.0)  # N
    next_state, (reward, terminated, _) = _transition(
        cfg,
        state,
        _euler_step(state.motion, force),
        _has_fallen,
        lambda active, _: active.to(state.motion.dtype),
    )
    # As in Gymnasium, a pole that falls in the last step is truncated, too.
    truncated = next_state.steps >= cfg.max_steps
    return next_state, Timestep(reward, terminated, truncated)


def _euler_step(
    motion: F32[Tensor, "B 4"], force: F32[Tensor, "B"]
) -> F32[Tensor, "B 4"]:
    """Compute the motion after one time step under a force on the cart, in N."""
    x, velocity, angle, angular_velocity = motion.unbind(-1)
    cart_mass = 1.0  # kg
    pole_mass = 0.1  # kg
    half_length = 0.5  # m, of the pole
    time_step = 0.02  # s
    total_mass = cart_mass + pole_mass
    moment = pole_mass * half_length

    # Equations of Barto, Sutton & Anderson 1983, appendix, without friction.
    push = (
        force + moment * angular_velocity * angular_velocity * torch.sin(angle)
    ) / total_mass
    lever = half_length * (
        4.0 / 3.0 - pole_mass * torch.cos(angle) * torch.cos(angle) / total_mass
    )
    angular_acceleration = (
        GRAVITY * torch.sin(angle) - torch.cos(angle) * push
    ) / lever
    acceleration = (
        push - moment * angular_acceleration * torch.cos(angle) / total_mass
    )

    return torch.stack(
        [
            x + time_step * velocity,
            velocity + time_step * acceleration,
            angle + time_step * angular_velocity,
            angular_velocity + time_step * angular_acceleration,
        ],
        -1,
    )


def _has_fallen(
    cfg: EpisodeConfig, motion: F32[Tensor, "B 4"]
) -> Bool[Tensor, "B"]:
    """Return whether each cart is over 2.4 m from the middle, or its pole over 12 degrees from upright."""
    return (motion[:, 0].abs() > 2.4) | (
        motion[:, 2].abs() > 12 * 2 * math.pi / 360
    )


def cartpole(*, max_steps: int = 500) -> AnyEnvironment:
    """Build CartPole-v1: keep a pole on a cart upright.

    Args:
      max_steps: steps after which an episode is truncated.
    """
    return _environment(
        EpisodeConfig(max_steps=max_steps),
        cartpole_reset,
        cartpole_step,
        _observe_motion,
        EnvironmentSpec(observation_size=4, action_size=2),
    )


# Pendulum


@dataclass(frozen=True, kw_only=True, slots=True)
class PendulumConfig:
    """Settings of a pendulum."""

    # steps after which an episode is truncated; nothing else ends it
    max_steps: Size
    reward_scale: Annotated[float, Range(-FLOAT32_MAX, FLOAT32_MAX)]

    __post_init__ = check_fields


def pendulum_reset(
    cfg: PendulumConfig, world: NoWorld, key: I64[Tensor, "B 2"]
) -> BodyState:
    """Sample states at any angle, with an angular velocity uniform on [-1, 1)."""
    unit = random.uniform(key, (2,), -1.0, 1.0)
    motion = torch.stack([math.pi * unit[:, 0], unit[:, 1]], -1)
    return _at_rest(key, motion)


def pendulum_step(
    cfg: PendulumConfig,
    world: NoWorld,
    state: BodyState,
    action: F32[Tensor, "B 1"],
    key: I64[Tensor, "B 2"],
) -> tuple[BodyState, Timestep]:
    """Make one semi-implicit Euler step.

        reward = -(angle^2 + 0.1 angular_velocity^2 + 0.001 torque^2)

    of the state before the step, with the angle in [-pi, pi).

    Args:
      state: its motion is the angle, rad, 0 upright, and the angular velocity, rad / s.
      action: the torque in N m, clipped to +-2.
      key: unused: the step is deterministic.
    """
    gravity = 10.0  # m / s^2
    mass = 1.0  # kg
    length = 1.0  # m
    time_step = 0.05  # s
    angle, angular_velocity = state.motion.unbind(-1)
    torque = action.squeeze(-1).clamp(-2.0, 2.0)

    wrapped_angle = (angle + math.pi) % (2 * math.pi) - math.pi
    cost = wrapped_angle**2 + 0.1 * angular_velocity**2 + 0.001 * torque**2

    # The new velocity moves the angle: that is what makes the step semi-implicit.
    acceleration = (
        1.5 * gravity / length * torch.sin(angle)
        + 3.0 / (mass * length**2) * torque
    )
    next_velocity = (angular_velocity + time_step * acceleration).clamp(
        -8.0, 8.0
    )
    motion = torch.stack([angle + time_step * next_velocity, next_velocity], -1)

    return _transition(
        cfg,
        state,
        motion,
        _never,
        lambda active, _: torch.where(active, -cfg.reward_scale * cost, 0.0),
    )


def pendulum_observe(
    cfg: PendulumConfig, world: NoWorld, state: BodyState
) -> F32[Tensor, "B 3"]:
    """Return cosine and sine of the angle, and the angular velocity."""
    angle, angular_velocity = state.motion.unbind(-1)
    return torch.stack(
        [torch.cos(angle), torch.sin(angle), angular_velocity], -1
    )


def pendulum(
    *, max_steps: int = 200, reward_scale: float = 1.0
) -> AnyEnvironment:
    """Build Pendulum-v1: swing a pole up by a torque too weak to lift it at once.

    Args:
      max_steps: steps after which an episode is truncated.
      reward_scale: factor of the reward.
    """
    return _environment(
        PendulumConfig(max_steps=max_steps, reward_scale=reward_scale),
        pendulum_reset,
        pendulum_step,
        pendulum_observe,
        EnvironmentSpec(
            observation_size=3, action_size=1, continuous_actions=True
        ),
    )


# Acrobot


def acrobot_reset(
    cfg: EpisodeConfig, world: NoWorld, key: I64[Tensor, "B 2"]
) -> BodyState:
    """Sample states near hanging rest: every number is uniform on [-0.1, 0.1)."""
    return _at_rest(key, random.uniform(key, (4,), -0.1, 0.1))


def acrobot_step(
    cfg: EpisodeConfig,
    world: NoWorld,
    state: BodyState,
    action: I64[Tensor, "B"],
    key: I64[Tensor, "B 2"],
) -> tuple[BodyState, Timestep]:
    """Make one Runge-Kutta step of fourth order; the reward is -1 for every step that does not reach the goal.

    Args:
      state: its motion is the angle of the first link, 0 hanging down, and of the second relative to it, rad, and
        their angular velocities, rad / s.
      action: 0, 1, 2 apply a torque of -1, 0, 1 N m.
      key: unused: the step is deterministic.
    """
    torque = (action - 1).to(state.motion.dtype)
    motion = _runge_kutta(
        lambda motion: _derivative(motion, torque), state.motion, 0.2
    )
    return _transition(
        cfg,
        state,
        _bound(motion),
        _is_swung_up,
        lambda active, is_up: -(active & ~is_up).to(motion.dtype),
    )


def _derivative(
    motion: F32[Tensor, "B 4"], torque: F32[Tensor, "B"]
) -> F32[Tensor, "B 4"]:
    """Compute the time derivative of the motion."""
    mass = 1.0  # kg, of each link
    length = 1.0  # m, of the first link
    centre = 0.5  # m, from the upper end of a link to its centre of mass
    inertia = 1.0  # kg m^2
    angle1, angle2, velocity1, velocity2 = motion.unbind(-1)
    lever = mass * length * centre
    weight = mass * GRAVITY
    own_inertia = mass * centre**2 + inertia

    # Entries d1, d2 of the inertia matrix and forces phi1, phi2 of Sutton & Barto, section 11.3 (first edition).
    bend = lever * torch.cos(angle2)
    d1 = 2 * own_inertia + mass * length**2 + 2 * bend
    d2 = own_inertia + bend
    twist = lever * torch.sin(angle2)
    phi2 = weight * centre * torch.sin(angle1 + angle2)
    phi1 = (
        -twist * velocity2 * (velocity2 + 2 * velocity1)
        + weight * (centre + length) * torch.sin(angle1)
        + phi2
    )

    acceleration2 = (torque + d2 / d1 * phi1 - twist * velocity1**2 - phi2) / (
        own_inertia - d2 * d2 / d1
    )
    acceleration1 = -(d2 * acceleration2 + phi1) / d1
    return torch.stack([velocity1, velocity2, acceleration1, acceleration2], -1)


def _bound(motion: F32[Tensor, "B 4"]) -> F32[Tensor, "B 4"]:
    """Wrap angles to [-pi, pi] and clip angular velocities to their limits."""
    angles, velocities = motion[:, :2], motion[:, 2:]
    turn = 2 * math.pi
    turns_above = torch.ceil((angles - math.pi) / turn).clamp_min(0)
    turns_below = torch.ceil((-math.pi - angles) / turn).clamp_min(0)
    limit1 = 4 * math.pi  # rad / s
    limit2 = 9 * math.pi
    return torch.cat(
        [
            angles + turn * (turns_below - turns_above),
            velocities[:, :1].clamp(-limit1, limit1),
            velocities[:, 1:].clamp(-limit2, limit2),
        ],
        -1,
    )


def acrobot_observe(
    cfg: EpisodeConfig, world: NoWorld, state: BodyState
) -> F32[Tensor, "B 6"]:
    """Return cosine and sine of the first and of the second angle, and both angular velocities."""
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


def _is_swung_up(
    cfg: EpisodeConfig, motion: F32[Tensor, "B 4"]
) -> Bool[Tensor, "B"]:
    """Return whether the lower end is more than 1 m above the fixed end, for each row."""
    angle1, angle2 = motion[:, 0], motion[:, 1]
    height = -torch.cos(angle1) - torch.cos(angle1 + angle2)
    return height > 1.0


def acrobot(*, max_steps: int = 500) -> AnyEnvironment:
    """Build Acrobot-v1: swing the lower end of two links up to the length of one.

    Args:
      max_steps: steps after which an episode is truncated.
    """
    return _environment(
        EpisodeConfig(max_steps=max_steps),
        acrobot_reset,
        acrobot_step,
        acrobot_observe,
        EnvironmentSpec(observation_size=6, action_size=3),
    )


# MountainCar. Positions are in units of length, velocities in units of length a step.


@dataclass(frozen=True, kw_only=True, slots=True)
class MountainCarConfig:
    """Settings of a mountain car."""

    # steps after which an episode is truncated
    max_steps: Size
    # least velocity at which the goal counts as reached
    goal_velocity: Annotated[float, Range(-FLOAT32_MAX, FLOAT32_MAX)]
    goal_position: Annotated[float, Range(-1.2, 0.6)]

    __post_init__ = check_fields


def mountain_car_reset(
    cfg: MountainCarConfig, world: NoWorld, key: I64[Tensor, "B 2"]
) -> BodyState:
    """Sample states at rest near the bottom: positions are uniform on [-0.6, -0.4)."""
    position = random.uniform(key, (), -0.6, -0.4)
    motion = torch.stack([position, torch.zeros_like(position)], -1)
    return _at_rest(key, motion)


def mountain_car_step(
    cfg: MountainCarConfig,
    world: NoWorld,
    state: BodyState,
    action: I64[Tensor, "B"],
    key: I64[Tensor, "B 2"],
) -> tuple[BodyState, Timestep]:
    """Make one step; the reward is -1 for every step.

    Args:
      state: its motion is position and velocity.
      action: 0 drives left, 1 coasts, 2 drives right.
      key: unused: the step is deterministic.
    """
    force = 0.001 * (action - 1).to(state.motion.dtype)
    return _transition(
        cfg,
        state,
        _drive(state.motion, force),
        _is_at_goal,
        lambda active, _: -active.to(force.dtype),
    )


def mountain_car_continuous_step(
    cfg: MountainCarConfig,
    world: NoWorld,
    state: BodyState,
    action: F32[Tensor, "B 1"],
    key: I64[Tensor, "B 2"],
) -> tuple[BodyState, Timestep]:
    """Make one step; the reward is 100 at the goal, less 0.1 times the square of the action.

    Args:
      action: the force, clipped to [-1, 1]; its cost is that of the number before clipping.
      key: unused: the step is deterministic.
    """
    action = action.squeeze(-1)
    force = 0.0015 * action.clamp(-1.0, 1.0)

    def reward(active: Tensor, at_goal: Tensor) -> Tensor:
        gain = 100.0 * at_goal.to(force.dtype)
        return torch.where(active, gain - 0.1 * action**2, 0.0)

    motion = _drive(state.motion, force)
    return _transition(cfg, state, motion, _is_at_goal, reward)


def _drive(
    motion: F32[Tensor, "B 2"], force: F32[Tensor, "B"]
) -> F32[Tensor, "B 2"]:
    """Compute the motion of the car after one step under a force."""
    left_end, right_end = -1.2, 0.6
    position, velocity = motion.unbind(-1)
    velocity = velocity + force - 0.0025 * torch.cos(3 * position)
    velocity = velocity.clamp(-0.07, 0.07)
    position = (position + velocity).clamp(left_end, right_end)

    # The wall on the left stops the car.
    is_stopped = (position <= left_end) & (velocity < 0)
    velocity = torch.where(is_stopped, 0.0, velocity)
    return torch.stack([position, velocity], -1)


def _is_at_goal(
    cfg: MountainCarConfig, motion: F32[Tensor, "B 2"]
) -> Bool[Tensor, "B"]:
    position, velocity = motion.unbind(-1)
    return (position >= cfg.goal_position) & (velocity >= cfg.goal_velocity)


def mountain_car(
    *, max_steps: int = 200, goal_velocity: float = 0.0
) -> AnyEnvironment:
    """Build MountainCar-v0: drive out of a valley by full throttle, left or right.

    Args:
      max_steps: steps after which an episode is truncated.
      goal_velocity: least velocity at which the goal counts as reached.
    """
    return _environment(
        MountainCarConfig(
            max_steps=max_steps, goal_velocity=goal_velocity, goal_position=0.5
        ),
        mountain_car_reset,
        mountain_car_step,
        _observe_motion,
        EnvironmentSpec(observation_size=2, action_size=3),
    )


def mountain_car_continuous(
    *, max_steps: int = 999, goal_velocity: float = 0.0
) -> AnyEnvironment:
    """Build MountainCarContinuous-v0: drive out of a valley by a force that costs its square.

    Args:
      max_steps: steps after which an episode is truncated.
      goal_velocity: least velocity at which the goal counts as reached.
    """
    return _environment(
        MountainCarConfig(
            max_steps=max_steps, goal_velocity=goal_velocity, goal_position=0.45
        ),
        mountain_car_reset,
        mountain_car_continuous_step,
        _observe_motion,
        EnvironmentSpec(
            observation_size=2, action_size=1, continuous_actions=True
        ),
    )


# Recall


@dataclass(frozen=True, kw_only=True, slots=True)
class RecallConfig:
    """Episode length and number of cues of the recall task."""

    n_steps: Size  # of an episode; the last one counts
    n_cues: Size  # cues, and actions

    __post_init__ = check_fields


class RecallState(NamedTuple):
    """Cue and step of each row."""

    cue: I64[Tensor, "B"]
    step: I64[Tensor, "B"]  # steps made


def recall_reset(
    cfg: RecallConfig, world: NoWorld, key: I64[Tensor, "B 2"]
) -> RecallState:
    """Sample a cue for each row, all cues with the same probability."""
    cue = random.integer_from_key(key, cfg.n_cues)
    return RecallState(cue=cue, step=torch.zeros_like(cue))


def recall_step(
    cfg: RecallConfig,
    world: NoWorld,
    state: RecallState,
    action: I64[Tensor, "B"],
    key: I64[Tensor, "B 2"],
) -> tuple[RecallState, Timestep]:
    """Make one step; the last step's reward is 1 if the action is the cue, else -1. Earlier rewards are 0."""
    is_active = state.step < cfg.n_steps
    is_last = state.step == cfg.n_steps - 1
    payment = torch.where(action == state.cue, 1.0, -1.0)
    next_state = RecallState(cue=state.cue, step=state.step + is_active)
    terminated = next_state.step >= cfg.n_steps
    return next_state, Timestep(
        reward=torch.where(is_last, payment, 0.0),
        terminated=terminated,
        truncated=torch.zeros_like(terminated),
    )


def recall_observe(
    cfg: RecallConfig, world: NoWorld, state: RecallState
) -> F32[Tensor, "B F"]:
    """Return the cue one-hot in the first step (zeros later), and whether this step is the last."""
    cues = torch.arange(cfg.n_cues, device=state.cue.device)
    is_shown = (state.cue[:, None] == cues) & (state.step == 0)[:, None]
    is_last = (state.step == cfg.n_steps - 1)[:, None]
    return torch.cat([is_shown, is_last], 1).to(torch.float32)


def recall(n_steps: int = 8, n_cues: int = 2) -> AnyEnvironment:
    """Build an environment whose first observation shows what the last action must be.

    Args:
      n_steps: steps of an episode.
      n_cues: how many cues there are, each with an action of its own.
    """
    return _environment(
        RecallConfig(n_steps=n_steps, n_cues=n_cues),
        recall_reset,
        recall_step,
        recall_observe,
        EnvironmentSpec(observation_size=n_cues + 1, action_size=n_cues),
        truncates=False,
    )
