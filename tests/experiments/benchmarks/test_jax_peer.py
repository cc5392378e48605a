"""The JAX peer of the CartPole benchmark does the same work: its step, advantages and loss are ours, and it learns."""

import numpy as np
import pytest
import torch

from funcppo import losses
from funcppo.advantages import gae, next_values
from funcppo.config import Config, PPOConfig
from funcppo.core import random, tree
from funcppo.envs.base import NoWorld
from funcppo.envs.classic_control import cartpole
from funcppo.nets import feedforward as mlp
from funcppo.nets.base import Dense

jax = pytest.importorskip("jax")
from experiments.benchmarks import jax_peer  # noqa: E402

PPO = PPOConfig(n_envs=4, n_steps=128)


@pytest.fixture(autouse=True)
def single_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


def draw(seed, *shape):
    return torch.from_numpy(
        np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)
    )


def arrays(x):
    return jax.tree.map(lambda leaf: leaf.numpy(), x)


def ours(params):
    """Our params of JAX's."""
    actor, critic = jax.tree.map(
        lambda x: torch.from_numpy(np.array(x)), params
    )
    pairs = [
        [torch.stack(both) for both in zip(a, c)]
        for a, c in zip(actor[:-1], critic[:-1])
    ]
    hidden = tuple(Dense(weight, bias.unsqueeze(1)) for weight, bias in pairs)
    return mlp.Params(
        hidden=hidden,
        heads=mlp.stack_heads(Dense(*actor[-1]), Dense(*critic[-1])),
    )


def test_a_step_of_the_environment_is_ours():
    motion = draw(0, 256, 4) * torch.tensor(
        [2.4, 2.0, cartpole.ANGLE_LIMIT, 2.0]
    )
    action, steps = (
        (draw(1, 256) > 0).long(),
        torch.zeros(256, dtype=torch.int64),
    )
    keys = random.split(random.key(0), 256)
    state = cartpole.EnvState(motion, steps)
    want, timestep = cartpole.step_functional(
        cartpole.CartPoleConfig(), NoWorld(), state, action, keys
    )
    got, fallen = jax_peer.env_step(motion.numpy(), action.numpy())
    assert 0 < timestep.terminated.sum() < 256
    np.testing.assert_allclose(got, want.motion.numpy(), atol=1e-5)
    np.testing.assert_array_equal(fallen, timestep.terminated.numpy())


def test_advantages_are_ours():
    value, final, last = draw(0, 40, 4), draw(1, 40, 4), draw(2, 4)
    terminated, truncated = draw(3, 40, 4) > 0.8, draw(4, 40, 4) > 0.8
    following = next_values(value, final, last, truncated)
    discounts = {"gamma": PPO.gamma, "gae_lambda": PPO.gae_lambda}
    want, _ = gae(
        torch.ones_like(value),
        terminated,
        truncated,
        value,
        following,
        **discounts,
    )
    got = jax_peer.gae(PPO, *arrays((value, following, terminated, truncated)))
    np.testing.assert_allclose(got, want.numpy(), atol=1e-5)


def test_the_gradient_of_the_loss_is_ours():
    params = jax_peer.init(PPO, jax.random.key(0)).learner.params
    params = jax.tree.map(
        lambda x: x + 0.5 * draw(6, *x.shape).numpy(), params
    )  # at first the entropy has no slope
    obs, action = draw(0, 64, 4), (draw(1, 64) > 0).long()
    log_prob, value, advantage, target = (
        -0.7 + 0.3 * draw(2, 64),
        draw(3, 64),
        draw(4, 64),
        2 * draw(5, 64),
    )
    batch = losses.Batch(obs, action, log_prob, value, advantage, target)
    env, agent = (
        cartpole.environment(cartpole.CartPoleConfig()),
        mlp.agent(mlp.MLPConfig(n_obs=4, n_actions=2)),
    )
    cfg = Config(ppo=PPO, env=env, agent=agent)
    scalars = losses.Scalars(
        *(torch.tensor(getattr(PPO, name)) for name in losses.Scalars._fields)
    )
    loss = lambda params: losses.loss_fn(cfg, NoWorld(), params, batch, scalars)
    want, _ = torch.func.grad(loss, has_aux=True)(ours(params))
    theirs = jax_peer.Batch(*arrays(tuple(batch)[:6]))
    got = ours(
        jax.grad(lambda params: jax_peer.loss_fn(PPO, params, theirs))(params)
    )
    for a, b in zip(tree.leaves(got), tree.leaves(want)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_returns_rise():
    state, iteration = jax_peer.make_learner(PPO, 0)
    shown = []
    for _ in range(40):
        state, (episodes, total) = iteration(state)
        shown.append((int(episodes), int(total)))
    first, last = (np.sum(part, 0) for part in (shown[:5], shown[-10:]))
    assert last[1] / last[0] > 2 * first[1] / first[0] > 2 * 15
