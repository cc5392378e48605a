"""Environments of JAX behind a bridge, beside the same environments stepped by JAX."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

import funcppo as fp
from funcppo.envs import wrappers
from tests.learning import WORLD, assert_trees_equal, on_gpu

jax = pytest.importorskip("jax")
jnp = jax.numpy

SMALL = {"n_envs": 4, "n_steps": 8, "n_minibatches": 2, "n_updates": 4}
NETWORK = fp.nets.mlp(8)


class Space(NamedTuple):
    shape: tuple[int, ...]
    n: int | None = None


class Walk(NamedTuple):
    place: object
    steps: object  # a Python number at first
    key: object  # uint32 [2]


class Gymnax:
    """A walk with steps of its own, in the interface of gymnax."""

    default_params = 3.0

    def action_space(self, params):
        return Space((), 2)

    def reset_env(self, key, params):
        state = Walk(jax.random.uniform(key), 0, key)
        return self.observe(state), state

    def step_env(self, key, state, action, params):
        first = jax.random.uniform(state.key, maxval=0.1)
        place = state.place + 2.0 * action - 1 + first + jax.random.uniform(key)
        state = Walk(place, state.steps + 1, state.key)
        done = jnp.abs(place) > params
        return self.observe(state), state, place, done, {}

    def is_truncated(self, state, params):
        return state.steps >= 6

    def observe(self, state):
        return jnp.stack([state.place, state.steps / 6])


class BraxState(NamedTuple):
    obs: object
    reward: object
    done: object
    info: dict


class Brax:
    """The sum of its actions, in the interface of Brax with a time limit."""

    action_size = 2

    def reset(self, key):
        info = {"truncation": jnp.zeros(()), "steps": jnp.zeros(())}
        place = jax.random.uniform(key, (3,))
        return BraxState(place, jnp.zeros(()), jnp.zeros(()), info)

    def step(self, state, action):
        steps = state.info["steps"] + 1
        obs = state.obs + action.sum()
        late = (steps >= 5) * 1.0
        done = jnp.maximum(late, (obs[0] > 4) * 1.0)
        info = {"truncation": late, "steps": steps}
        return BraxState(obs, action.sum(), done, info)


def rows(n, seed=0):
    return fp.random.split(fp.random.key(seed), n)


def of_jax(tensor):
    """An array of JAX with the numbers of a tensor; a key is uint32."""
    array = tensor.numpy()
    return jnp.asarray(
        array.astype(np.uint32) if array.dtype == np.int64 else array
    )


def test_steps_are_those_of_jax_until_a_row_has_finished():
    theirs, params = Gymnax(), 3.0
    env = fp.envs.jax(theirs)
    state = env.reset(env.cfg, WORLD, rows(4))
    _, inner = jax.vmap(lambda k: theirs.reset_env(k, params))(of_jax(rows(4)))
    finished = np.zeros(4, bool)
    step = jax.jit(jax.vmap(lambda k, s, a: theirs.step_env(k, s, a, params)))
    for t in range(9):
        action, key = torch.tensor([0, 1, t % 2, 1]), rows(4, t)
        before = state
        state, timestep = env.step_functional(
            env.cfg, WORLD, state, action, key
        )
        obs, inner, reward, done, _ = step(of_jax(key), inner, of_jax(action))
        live = ~finished
        got = env.observe(env.cfg, WORLD, state).numpy()
        np.testing.assert_allclose(got[live], obs[live], rtol=1e-6)
        np.testing.assert_allclose(
            timestep.reward.numpy()[live], reward[live], rtol=1e-6
        )
        late = np.array(inner.steps >= 6) & ~np.array(done)
        assert (timestep.terminated.numpy() == np.array(done))[live].all()
        assert (timestep.truncated.numpy() == late)[live].all()
        assert (timestep.reward.numpy()[finished] == 0).all()
        for a, b in zip(fp.tree.leaves(state), fp.tree.leaves(before)):
            assert torch.equal(a[finished], b[finished])
        finished = finished | np.array(done) | late
    assert finished.all() and timestep.truncated.any()
    assert timestep.terminated.any()


@pytest.mark.parametrize("kind", [Gymnax, Brax])
def test_a_learner_learns_resumes_and_trains_side_by_side(kind, tmp_path):
    """A state is whole: a run continues from its checkpoint to the bit."""
    env = wrappers.normalize_observation(fp.envs.jax(kind()))
    fp.check(env, n_steps=4)
    ppo = fp.ppo(env=env, network=NETWORK, **SMALL)
    whole = fp.train(ppo, 128, evaluate_every=2, n_episodes=3)
    assert whole.evaluations[-1].greedy.n_unfinished == 0
    path = tmp_path / "run.npz"
    stop = lambda progress: progress.update == 2
    fp.train(ppo, 128, checkpoint=path, callbacks=[stop])
    resumed = fp.train(ppo, 128, checkpoint=path)
    assert resumed.notes == ()
    assert_trees_equal(resumed.state, whole.state, rtol=0, atol=0)
    assert fp.train(ppo, 32, state=whole.state).update == 1

    many = fp.train_many(ppo, 128, seeds=2, evaluate_every=2, n_episodes=3)
    first = fp.tree.item(many.state, 0)
    assert_trees_equal(first, whole.state, rtol=1e-4, atol=1e-5)
    fast = fp.compile(ppo, whole.state, backend="aot_eager")
    assert fast.record.failures[0].code == "host_environment"
    compiled = fp.tree.map(torch.clone, fast.step(whole.state)[0].params)
    assert_trees_equal(
        compiled, ppo.step(whole.state)[0].params, rtol=1e-4, atol=1e-5
    )


@on_gpu
def test_learning_is_a_cuda_graph_beside_steps_of_xla():
    """Tensors stay on the GPU, and three updates equal the eager ones."""
    ppo = fp.ppo(env=fp.envs.jax(Gymnax()), network=NETWORK, **SMALL)
    state = ppo.init(fp.random.key(0, "cuda"))
    fast = fp.compile(ppo, state, backend="aot_eager")
    assert fast.record.replay_mode == "cuda-graph"
    eager = compiled = state
    for _ in range(3):
        eager, _ = ppo.step(eager)
        compiled, _ = fast.step(compiled)
    assert {x.device.type for x in fp.tree.leaves(compiled)} == {"cuda"}
    assert_trees_equal(compiled, eager, rtol=1e-4, atol=1e-5)


def test_actions_have_the_shape_of_their_space():
    env = fp.envs.jax(Brax())
    assert env.spec.continuous_actions and env.spec.action_size == 2
    assert fp.envs.jax(Gymnax()).spec.action_size == 2
    with pytest.raises(TypeError, match=r"^env: expected reset_env .*, got in"):
        fp.envs.jax(3)
