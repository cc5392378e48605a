"""Each body moves as Gymnasium's; the cue of `recall` is shown once and paid once."""

import math
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import funcppo as fp
from funcppo.core import random, tree
from funcppo.envs import classic
from funcppo.envs.classic import BodyState
from funcppo.envs.wrappers import restart, sample_reset, step_with_autoreset
from tests.learning import WORLD, assert_trees_equal

BY_GYMNASIUM = {
    "CartPole-v1": classic.cartpole,
    "Pendulum-v1": classic.pendulum,
    "Acrobot-v1": classic.acrobot,
    "MountainCar-v0": classic.mountain_car,
    "MountainCarContinuous-v0": classic.mountain_car_continuous,
}


def keys(n, seed=0):
    return random.split(random.key(seed), n)


def step_both(name, motion, action, dtype=torch.float64):
    """Ours and Gymnasium's after one step from a state: state, observation, reward, whether terminated."""
    env = BY_GYMNASIUM[name]()
    theirs = gymnasium.make(name).unwrapped
    theirs.reset()
    theirs.state = np.array(motion)
    theirs_obs, theirs_reward, theirs_end, _, _ = theirs.step(action)

    steps = torch.zeros(1, dtype=torch.int64)
    state = BodyState(torch.tensor([motion], dtype=dtype), steps)
    is_real = isinstance(action, np.ndarray)
    taken = torch.tensor(np.array([action]), dtype=dtype if is_real else None)
    after, timestep = env.step_functional(env.cfg, WORLD, state, taken, None)
    obs = env.observe(env.cfg, WORLD, after)[0].double().numpy()
    np.testing.assert_allclose(obs, theirs_obs, atol=3e-6)  # float32 there
    return (
        after.motion[0].double().numpy(),
        np.array(theirs.state),
        (float(timestep.reward[0]), bool(timestep.terminated[0])),
        (theirs_reward, theirs_end),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_of_cartpole_and_of_pendulum_equals_gymnasiums(dtype):
    """50 states over the whole range, and torques beyond the limit; 1e-6, in float64 1e-12."""
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    rng = np.random.default_rng(0)
    for _ in range(50):
        torque = torch.tensor(rng.uniform(-3, 3, 1)).to(dtype)
        for name, span, action in (
            ("CartPole-v1", [2.4, 3.0, 0.2094, 3.0], int(rng.integers(2))),
            ("Pendulum-v1", [20.0, 8.0], torque.double().numpy()),
        ):
            motion = rng.uniform(-1, 1, len(span)) * span
            motion = torch.tensor(motion).to(dtype).double().tolist()
            both = step_both(name, motion, action, dtype)
            ours, theirs, result, expected = both
            np.testing.assert_allclose(ours, theirs, tolerance, tolerance)
            # An angle of three turns loses digits when it is wrapped.
            near = pytest.approx(expected, 10 * tolerance, 10 * tolerance)
            assert result == near


@given(
    st.tuples(
        *[st.floats(-math.pi, math.pi)] * 2,
        st.floats(-4 * math.pi, 4 * math.pi),
        st.floats(-9 * math.pi, 9 * math.pi),
    ),
    st.integers(0, 2),
)
@example((math.pi, -math.pi, 4 * math.pi, -9 * math.pi), 0)
@example((3.0, 0.1, 1.0, 0.0), 2)  # at the goal after the step
def test_a_step_of_acrobot_equals_gymnasiums(motion, action):
    """In float64, 1e-9: the sums of a Runge-Kutta step differ in their order."""
    if -math.cos(motion[0]) - math.cos(motion[0] + motion[1]) > 1.0:
        return  # a finished row stays as it is
    ours, theirs, result, expected = step_both("Acrobot-v1", motion, action)
    # An angle at the seam may be wrapped to either side.
    turns = (ours[:2] - theirs[:2]) / (2 * math.pi)
    np.testing.assert_allclose(turns, np.round(turns), atol=1e-9)
    np.testing.assert_allclose(ours[2:], theirs[2:], rtol=1e-9, atol=1e-9)
    height = -math.cos(theirs[0]) - math.cos(theirs[0] + theirs[1])
    if abs(height - 1.0) > 1e-9:
        assert result == expected


@given(
    st.floats(-1.2, 0.6),
    st.floats(-0.07, 0.07),
    st.integers(0, 2),
    st.floats(-2, 2),
)
@example(-1.2, -0.07, 0, -2.0)  # against the wall
@example(0.49, 0.07, 2, 1.0)  # to the goal
@example(0.44, 0.07, 2, 1.0)
def test_a_step_of_mountain_cars_is_theirs(position, velocity, action, force):
    """Gymnasium rounds the state of the continuous one to float32."""
    for name, taken, atol, goal in (
        ("MountainCar-v0", action, 1e-14, 0.5),
        ("MountainCarContinuous-v0", np.array([force]), 1e-7, 0.45),
    ):
        if position >= goal and velocity >= 0:
            continue
        motion = position, velocity
        ours, theirs, result, expected = step_both(name, motion, taken)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)
        assert result == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", BY_GYMNASIUM)
def test_the_limits_and_sizes_are_gymnasiums(name):
    env, theirs = BY_GYMNASIUM[name](), gymnasium.make(name)
    assert env.cfg.max_steps == gymnasium.spec(name).max_episode_steps
    obs = env.observe(env.cfg, WORLD, env.reset(env.cfg, WORLD, keys(3)))
    assert obs.shape == (3, *theirs.observation_space.shape)
    assert env.spec.observation_size == obs.shape[1]
    actions = theirs.action_space
    n_actions = actions.shape[0] if env.spec.continuous_actions else actions.n
    assert env.spec.action_size == n_actions
    assert BY_GYMNASIUM[name](max_steps=7).cfg.max_steps == 7


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("CartPole-v1", [-0.05] * 4, [0.05] * 4),
        ("Pendulum-v1", [-math.pi, -1.0], [math.pi, 1.0]),
        ("Acrobot-v1", [-0.1] * 4, [0.1] * 4),
        ("MountainCar-v0", [-0.6, 0.0], [-0.4, 0.0]),
    ],
)
def test_resets_are_uniform_where_gymnasium_puts_them(name, low, high):
    """4,000 draws: the mean and the mean distance from it within 5 % of the width."""
    env = BY_GYMNASIUM[name]()
    motion = env.reset(env.cfg, WORLD, keys(4000, 5)).motion
    low, high = torch.tensor(low), torch.tensor(high)
    assert (motion >= low - 1e-6).all() and (motion <= high + 1e-6).all()
    width = high - low
    middle = (low + high) / 2
    assert ((motion.mean(0) - middle).abs() <= 0.05 * width).all()
    distance = (motion - middle).abs().mean(0)
    assert ((distance - width / 4).abs() <= 0.05 * width).all()


def test_the_velocity_of_the_goal_of_mountain_car_is_a_setting():
    env = classic.mountain_car(goal_velocity=0.05)
    for motion, is_reached in (([0.5, 0.02], False), ([0.45, 0.065], True)):
        steps, action = torch.zeros(1, dtype=torch.int64), torch.tensor([2])
        state = BodyState(torch.tensor([motion]), steps)
        _, timestep = env.step_functional(env.cfg, WORLD, state, action, None)
        assert bool(timestep.terminated) == is_reached


# Episodes


@pytest.mark.parametrize("name", BY_GYMNASIUM)
def test_an_episode_is_cut_at_the_limit_and_not_before_it(name):
    env = BY_GYMNASIUM[name](max_steps=7)
    state = env.reset(env.cfg, WORLD, keys(64))
    is_continuous = env.spec.continuous_actions
    action = torch.zeros(64, 1) if is_continuous else torch.zeros(64).long()
    for t in range(7):
        state, timestep = env.step_functional(
            env.cfg, WORLD, state, action, None
        )
        assert torch.equal(timestep.truncated, state.steps >= 7)
        assert timestep.truncated.any() == (t == 6)


def test_a_step_with_a_reset_in_two_parts_equals_one_with_whole_states():
    """The sample is the state there, and the halves of a state here; only finished rows are reset."""
    env = classic.cartpole(max_steps=7)
    in_parts = replace(
        env,
        sample_reset=lambda cfg, world, key: tree.map(
            lambda x: x / 2, env.reset(cfg, world, key)
        ),
        reset_from_sample=lambda cfg, world, sample: tree.map(
            lambda x: 2 * x, sample
        ),
    )
    state = env.reset(env.cfg, WORLD, keys(4))
    state = state._replace(steps=torch.tensor([6, 0, 6, 0]))
    action = torch.zeros(4, dtype=torch.int64)
    before, steps = (WORLD, state, action, keys(4)), []
    for e in (env, in_parts):
        sample = sample_reset(e, WORLD, keys(4, 1))
        steps.append(step_with_autoreset(e, *before, sample))
    assert_trees_equal(steps[1][0], steps[0][0], rtol=0, atol=0)
    assert_trees_equal(steps[1][2].motion, steps[0][2].motion, rtol=0, atol=0)
    reached, timestep, after = steps[0]
    assert timestep.truncated.tolist() == [True, False] * 2
    fresh = env.reset(env.cfg, WORLD, keys(4, 1))
    want = restart(env, WORLD, reached, timestep.truncated, fresh)
    assert_trees_equal(after, want, rtol=0, atol=0)
    assert torch.equal(after.motion[::2], fresh.motion[::2])
    assert after.steps.tolist() == [0, 1, 0, 1]


# Recall


def test_an_episode_of_recall_by_hand():
    """Three rows of an episode of 3 steps: right at the end, wrong at the end, right before and wrong at the end."""
    env = fp.envs.recall(n_steps=3, n_cues=2)
    state = env.reset(env.cfg, WORLD, keys(3))
    state = state._replace(cue=torch.tensor([0, 1, 1]))
    observed, rewards = [], []
    for action in ([1, 1, 1], [1, 1, 1], [0, 0, 0]):
        observed.append(env.observe(env.cfg, WORLD, state).tolist())
        state, step = env.step_functional(
            env.cfg, WORLD, state, torch.tensor(action), keys(3)
        )
        rewards.append(step.reward.tolist())
    first = [[1, 0, 0], [0, 1, 0], [0, 1, 0]]
    assert observed == [first, [[0, 0, 0]] * 3, [[0, 0, 1]] * 3]
    assert rewards == [[0, 0, 0], [0, 0, 0], [1, -1, -1]]
    assert step.terminated.all() and not step.truncated.any()
