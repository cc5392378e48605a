"""Acrobot beside Gymnasium's."""

from __future__ import annotations

import math

import gymnasium
import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from funcppo.core import random
from funcppo.envs.classic_control import acrobot
from tests.learning import WORLD

ENV = acrobot.acrobot()
REFERENCE = gymnasium.make("Acrobot-v1").unwrapped
REFERENCE.reset()

angles = st.floats(-math.pi, math.pi)
states = st.tuples(
    angles,
    angles,
    st.floats(-4 * math.pi, 4 * math.pi),
    st.floats(-9 * math.pi, 9 * math.pi),
)


@settings(max_examples=100)
@given(states, st.integers(0, 2))
@example((math.pi, -math.pi, 4 * math.pi, -9 * math.pi), 0)
@example((3.0, 0.1, 1.0, 0.0), 2)  # at the goal after the step
def test_one_step_equals_gymnasium_from_any_state(motion, action):
    """In float64, 1e-9: the sums of a Runge-Kutta step differ in their order."""
    state = acrobot.EnvState(
        torch.tensor([motion], dtype=torch.float64),
        torch.zeros(1, dtype=torch.int64),
    )
    REFERENCE.state = np.array(motion)
    if REFERENCE._terminal():  # a finished row stays as it is
        return
    obs, reward, terminated, _, _ = REFERENCE.step(action)
    after, timestep = ENV.step_functional(
        ENV.cfg, WORLD, state, torch.tensor([action]), None
    )

    ours, theirs = after.motion[0].numpy(), REFERENCE.state
    # An angle at the seam may be wrapped to either side.
    turns = (ours[:2] - theirs[:2]) / (2 * math.pi)
    np.testing.assert_allclose(turns, np.round(turns), atol=1e-9)
    np.testing.assert_allclose(ours[2:], theirs[2:], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(
        ENV.observe(ENV.cfg, WORLD, after)[0].numpy(), obs, atol=2e-6
    )
    height = -math.cos(theirs[0]) - math.cos(theirs[0] + theirs[1])
    if abs(height - 1.0) > 1e-9:
        assert bool(timestep.terminated[0]) == terminated
        assert float(timestep.reward[0]) == reward


def test_the_limits_and_sizes_are_gymnasiums():
    theirs = gymnasium.spec("Acrobot-v1")
    assert ENV.cfg.max_steps == theirs.max_episode_steps
    assert ENV.spec.observation_size == REFERENCE.observation_space.shape[0]
    assert ENV.spec.action_size == REFERENCE.action_space.n


def test_resets_lie_where_gymnasium_puts_them():
    keys = random.split(random.key(5), 4000)
    motion = ENV.reset(ENV.cfg, WORLD, keys).motion.abs()
    assert float(motion.max()) <= 0.1
    assert abs(float(motion.mean()) - 0.05) < 0.001
