"""The arm beside its Lagrangian, and the laws of mechanics."""

from __future__ import annotations

import math

import pytest
import torch

import funcppo as fp
from funcppo.envs import two_link_arm
from funcppo.envs.two_link_arm import (
    CENTRE,
    INERTIA,
    LENGTH,
    MASS,
    MAX_TORQUE,
    TIME_STEP,
    EnvState,
    ReacherConfig,
)
from tests.learning import WORLD, one_thread

pytestmark = pytest.mark.usefixtures(one_thread.__name__)


def keys(n, seed=0):
    return fp.random.split(fp.random.key(seed), n)


def states(n, seed=0):
    """Poses and velocities of up to 6 rad / s, in float64."""
    draws = torch.Generator().manual_seed(seed)
    angle = (torch.rand(n, 2, generator=draws, dtype=torch.float64) - 0.5) * 6
    velocity = (
        torch.rand(n, 2, generator=draws, dtype=torch.float64) - 0.5
    ) * 12
    target = torch.zeros(n, 2, dtype=torch.float64)
    return EnvState(angle, velocity, target, torch.zeros(n, dtype=torch.int64))


def centres(angle):
    """Positions of the two centres of mass."""
    first, both = angle[0], angle[0] + angle[1]
    elbow = LENGTH * torch.stack([torch.cos(first), torch.sin(first)])
    direction = torch.stack([torch.cos(both), torch.sin(both)])
    return torch.stack([elbow * CENTRE / LENGTH, elbow + CENTRE * direction])


def kinetic_and_potential(angle, velocity, gravity):
    """Of two rods: the motion of their centres, and their rotation."""
    _, motion = torch.func.jvp(centres, (angle,), (velocity,))
    spin = torch.stack([velocity[0], velocity[0] + velocity[1]])
    kinetic = 0.5 * MASS * (motion**2).sum() + 0.5 * INERTIA * (spin**2).sum()
    return kinetic, MASS * gravity * centres(angle)[:, 1].sum()


def lagrangian(angle, velocity, gravity):
    kinetic, potential = kinetic_and_potential(angle, velocity, gravity)
    return kinetic - potential


def acceleration_of_the_lagrangian(cfg, angle, velocity, torque):
    """q'' of d/dt (dL/dq') = dL/dq + torque - damping q', by derivatives of L."""

    def momentum(angle, velocity):
        return torch.func.grad(lagrangian, 1)(angle, velocity, cfg.gravity)

    inertia = torch.func.jacfwd(momentum, 1)(angle, velocity)
    _, drift = torch.func.jvp(
        lambda q: momentum(q, velocity), (angle,), (velocity,)
    )
    force = torch.func.grad(lagrangian, 0)(angle, velocity, cfg.gravity)
    net = force + torque - cfg.damping * velocity - drift
    return torch.linalg.solve(inertia, net)


@pytest.mark.parametrize("gravity", [0.0, 9.81])
def test_accelerations_are_those_of_the_lagrangian(gravity):
    cfg = ReacherConfig(gravity=gravity, damping=0.3)
    state = states(10)
    torque = states(10, seed=1).velocity
    got = two_link_arm.acceleration(cfg, state.angle, state.velocity, torque)
    want = torch.stack(
        [
            acceleration_of_the_lagrangian(cfg, *row)
            for row in zip(state.angle, state.velocity, torque)
        ]
    )
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_a_step_is_the_motion_under_a_constant_torque():
    """Beside 200 small steps of Heun's method; 1e-3 of a radian, as both have errors of the size of 1e-4."""
    cfg = ReacherConfig(gravity=2.0)
    state, action = states(20), states(20, seed=2).angle.clamp(-1, 1)
    after, _ = two_link_arm.step_functional(cfg, WORLD, state, action, keys(20))
    angle, velocity, n_steps = state.angle, state.velocity, 200
    dt = TIME_STEP / n_steps
    for _ in range(n_steps):
        a = two_link_arm.acceleration(cfg, angle, velocity, MAX_TORQUE * action)
        b = two_link_arm.acceleration(
            cfg, angle + dt * velocity, velocity + dt * a, MAX_TORQUE * action
        )
        angle = angle + dt * (velocity + dt / 2 * a)
        velocity = velocity + dt / 2 * (a + b)
    torch.testing.assert_close(after.angle, angle, rtol=0, atol=1e-3)
    assert not torch.allclose(after.angle, state.angle, rtol=0, atol=0.05)


@pytest.mark.parametrize("gravity", [0.0, 9.81])
def test_energy_is_kept_without_torque_and_damping_and_lost_with_damping(
    gravity,
):
    def energies(damping):
        cfg = ReacherConfig(gravity=gravity, damping=damping, max_steps=999)
        state, found = states(8), []
        for _ in range(60):
            pairs = [
                kinetic_and_potential(q, v, gravity)
                for q, v in zip(state.angle, state.velocity)
            ]
            found.append(torch.stack([k + p for k, p in pairs]))
            state, _ = two_link_arm.step_functional(
                cfg, WORLD, state, torch.zeros(8, 2), keys(8)
            )
        return torch.stack(found)

    # 3 s of motion of some joules: 0.05 J, and 1e-4 J without the fast motion that gravity makes
    kept = energies(0.0)
    error = float((kept - kept[0]).abs().max())
    assert error < (0.05 if gravity else 1e-4)
    lost = energies(0.5)
    assert (lost[-1] < lost[0]).all()


def test_the_arm_reaches_where_its_angles_say():
    angle = torch.tensor([[0.0, 0.0], [math.pi / 2, 0.0], [0.0, math.pi / 2]])
    want = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
    torch.testing.assert_close(
        two_link_arm.fingertip(angle), want, rtol=0, atol=1e-6
    )


def test_the_reward_is_the_distance_and_the_cost_of_the_action():
    cfg = ReacherConfig()
    state = states(1)._replace(
        velocity=torch.zeros(1, 2), angle=torch.zeros(1, 2)
    )
    state = state._replace(target=torch.tensor([[1.0, 0.0]]))
    for action, reward in [(0.0, 0.0), (0.001, -2e-7)]:
        _, timestep = two_link_arm.step_functional(
            cfg, WORLD, state, torch.full((1, 2), action), keys(1)
        )
        assert float(timestep.reward[0]) == pytest.approx(reward, abs=1e-5)
    clipped, strong = (
        two_link_arm.step_functional(
            cfg, WORLD, state, torch.full((1, 2), a), keys(1)
        )
        for a in (1.0, 9.0)
    )
    assert torch.equal(clipped[0].angle, strong[0].angle)
    distance = (two_link_arm.fingertip(strong[0].angle) - state.target).norm()
    assert float(strong[1].reward[0]) == pytest.approx(-float(distance) - 0.2)


def test_targets_are_uniform_on_the_disc_that_the_arm_reaches():
    """A quarter of them lies within half the reach; 10,000 draws, five deviations."""
    state = two_link_arm.reset(ReacherConfig(), WORLD, keys(10_000))
    radius = state.target.norm(dim=-1)
    assert float(radius.max()) <= 2 * LENGTH + 1e-6
    share = float((radius < LENGTH).float().mean())
    assert share == pytest.approx(0.25, abs=5 * math.sqrt(0.25 * 0.75 / 10_000))
    assert state.target.mean(0).abs().max() < 0.03


def test_the_environment_has_a_name_of_its_own():
    env = fp.envs.make("funcppo/Reacher-v0", max_steps=7)
    assert env.cfg.max_steps == 7 and env.spec.action_size == 2
    state = env.reset(env.cfg, None, keys(3))
    obs = env.observe(env.cfg, None, state)
    assert obs.shape == (3, env.spec.observation_size)


@pytest.mark.long
def test_ppo_learns_to_reach():
    """The greedy policy after 40 updates beside the one before the first; the seed is fixed."""
    ppo = fp.ppo(
        env=fp.envs.reacher(max_steps=50), network=fp.nets.mlp(32, 32),
        n_envs=128, n_steps=25, learning_rate=1e-2, gamma=0.9,
    )  # fmt: skip
    untrained = fp.evaluate_policy(ppo, ppo.init(fp.random.key(0)))
    result = fp.train(ppo, 40 * 128 * 25)
    trained = fp.evaluate_policy(ppo, result.state)
    assert trained.greedy.low > untrained.greedy.mean
