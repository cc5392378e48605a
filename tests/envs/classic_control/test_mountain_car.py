"""Both mountain cars beside Gymnasium's."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from funcppo.core import random
from funcppo.envs.classic_control import mountain_car
from tests.learning import WORLD

DISCRETE = mountain_car.mountain_car()
CONTINUOUS = mountain_car.mountain_car_continuous()
REFERENCE = gymnasium.make("MountainCar-v0").unwrapped
CONTINUOUS_REFERENCE = gymnasium.make("MountainCarContinuous-v0").unwrapped

positions = st.floats(-1.2, 0.6)
velocities = st.floats(-0.07, 0.07)


def step(env, position, velocity, action):
    motion = torch.tensor([[position, velocity]], dtype=torch.float64)
    state = mountain_car.EnvState(motion, torch.zeros(1, dtype=torch.int64))
    return env.step_functional(env.cfg, WORLD, state, action, None)


def is_at_goal(env, position, velocity):
    return position >= env.cfg.goal_position and velocity >= 0


@settings(max_examples=100)
@given(positions, velocities, st.integers(0, 2))
@example(-1.2, -0.07, 0)  # against the wall
@example(0.49, 0.07, 2)  # to the goal
def test_one_step_equals_gymnasium_from_any_state(position, velocity, action):
    if is_at_goal(DISCRETE, position, velocity):
        return
    REFERENCE.state = (position, velocity)
    _, reward, terminated, _, _ = REFERENCE.step(action)
    after, timestep = step(DISCRETE, position, velocity, torch.tensor([action]))
    np.testing.assert_allclose(
        after.motion[0].numpy(), REFERENCE.state, rtol=0, atol=1e-14
    )
    assert float(timestep.reward[0]) == reward
    assert bool(timestep.terminated[0]) == terminated


@settings(max_examples=100)
@given(positions, velocities, st.floats(-2, 2))
@example(-1.2, -0.07, -2.0)
@example(0.44, 0.07, 1.0)
def test_one_continuous_step_equals_gymnasium_from_any_state(
    position, velocity, action
):
    if is_at_goal(CONTINUOUS, position, velocity):
        return
    CONTINUOUS_REFERENCE.state = (position, velocity)
    _, reward, terminated, _, _ = CONTINUOUS_REFERENCE.step(np.array([action]))
    after, timestep = step(
        CONTINUOUS,
        position,
        velocity,
        torch.tensor([[action]], dtype=torch.float64),
    )
    np.testing.assert_allclose(  # Gymnasium rounds the state to float32
        after.motion[0].numpy(), CONTINUOUS_REFERENCE.state, rtol=0, atol=1e-7
    )
    assert float(timestep.reward[0]) == pytest.approx(reward, abs=1e-12)
    assert bool(timestep.terminated[0]) == terminated


@pytest.mark.parametrize(
    ("env", "name"),
    [(DISCRETE, "MountainCar-v0"), (CONTINUOUS, "MountainCarContinuous-v0")],
)
def test_the_limits_and_sizes_are_gymnasiums(env, name):
    theirs = gymnasium.make(name)
    assert env.cfg.max_steps == gymnasium.spec(name).max_episode_steps
    assert env.spec.observation_size == theirs.observation_space.shape[0]
    assert env.cfg.goal_position == theirs.unwrapped.goal_position
    actions = theirs.action_space
    n_actions = actions.shape[0] if env.spec.continuous_actions else actions.n
    assert env.spec.action_size == n_actions


def test_resets_lie_where_gymnasium_puts_them():
    keys = random.split(random.key(5), 4000)
    motion = DISCRETE.reset(DISCRETE.cfg, WORLD, keys).motion
    position, velocity = motion.unbind(-1)
    assert not velocity.any()
    assert float(position.min()) >= -0.6 and float(position.max()) < -0.4
    assert float(position.mean()) == pytest.approx(-0.5, abs=0.003)


def test_the_velocity_of_the_goal_is_a_setting():
    env = mountain_car.mountain_car(goal_velocity=0.05)
    reached = torch.tensor([2])
    assert not step(env, 0.5, 0.02, reached)[1].terminated
    assert step(env, 0.45, 0.065, reached)[1].terminated
