"""The work of bench_cartpole.py in plain JAX: a whole PPO iteration on CartPole in one jitted call.

The same steps, settings and constants as funcppo's, read from its config: rollout with restarts, a value for the last
state of every truncated episode, GAE, epochs x minibatches of the clipped loss, Adam. Written as JAX is written: loops
are `lax.scan`, the state is donated, learners are `vmap`. Needs jax beside what funcppo needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
from jax import lax, tree  # pyright: ignore[reportMissingImports]

from funcppo.config import PPOConfig
from funcppo.envs.classic_control import cartpole

MAX_STEPS = cartpole.CartPoleConfig().max_steps
SIZES = (4, 64, 64)  # of an observation and the hidden layers


class Learner(NamedTuple):
    """Params, and Adam's moments and count."""

    params: Any  # of actor and critic, each a list of (weight, bias)
    mu: Any
    nu: Any
    step: Any


class State(NamedTuple):
    """What an iteration threads."""

    learner: Learner
    motion: Any  # [B 4]
    steps: Any  # [B], of the episode that each row is in
    key: Any
    update: Any


class Batch(NamedTuple):
    """Transitions, [T B] or [N]."""

    obs: Any
    action: Any
    log_prob: Any
    value: Any
    advantage: Any
    target: Any


def jitted(ppo: PPOConfig, learners: int) -> tuple[State, Callable[[State], tuple[State, Any]]]:
    """A fresh state and the iteration from it; with learners, of as many at once."""
    keys = jax.random.split(jax.random.key(0), max(learners, 1))
    make, step = partial(init, ppo), partial(iteration, ppo)
    if learners:
        return jax.vmap(make)(keys), jax.jit(jax.vmap(step), donate_argnums=0)
    return make(keys[0]), jax.jit(step, donate_argnums=0)


def init(ppo: PPOConfig, key: Any) -> State:
    """The state before the first iteration."""
    actor_key, critic_key, env_key, key = jax.random.split(key, 4)
    params = layers(actor_key, 2, 0.01), layers(critic_key, 1, 1.0)
    learner = Learner(params, tree.map(jnp.zeros_like, params), tree.map(jnp.zeros_like, params), jnp.zeros(()))
    steps = jnp.zeros(ppo.n_envs, jnp.int32)
    return State(learner, reset(env_key, ppo.n_envs), steps, key, update=jnp.zeros((), jnp.int32))


def layers(key: Any, n_out: int, gain: float) -> list[tuple[Any, Any]]:
    """Orthogonal weights, gain sqrt(2) but for the last; zero biases."""
    sizes, gains, keys = [*SIZES, n_out], [math.sqrt(2.0)] * 2 + [gain], jax.random.split(key, len(SIZES))
    weight = lambda g, k, *shape: jax.nn.initializers.orthogonal(g)(k, shape)
    return [(weight(g, k, m, n), jnp.zeros(n)) for g, k, m, n in zip(gains, keys, sizes, sizes[1:])]


def apply(net: list[tuple[Any, Any]], x: Any) -> Any:
    """What one of the two networks says."""
    for weight, bias in net[:-1]:
        x = jnp.tanh(x @ weight + bias)
    return x @ net[-1][0] + net[-1][1]


def reset(key: Any, n: int) -> Any:
    """Motion of `n` fresh rows."""
    return jax.random.uniform(key, (n, 4), minval=-0.05, maxval=0.05)


def env_step(motion: Any, action: Any) -> tuple[Any, Any]:
    """The motion one Euler step later, and which poles have fallen."""
    _, velocity, angle, spin = motion.T
    total, moment = cartpole.CART_MASS + cartpole.POLE_MASS, cartpole.POLE_MASS * cartpole.POLE_HALF_LENGTH
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    push = (jnp.where(action == 1, cartpole.PUSH_FORCE, -cartpole.PUSH_FORCE) + moment * spin * spin * sin) / total
    lever = cartpole.POLE_HALF_LENGTH * (4.0 / 3.0 - cartpole.POLE_MASS * cos * cos / total)
    spin_rate = (cartpole.GRAVITY * sin - cos * push) / lever
    rates = jnp.stack([velocity, push - moment * spin_rate * cos / total, spin, spin_rate], -1)
    after = motion + cartpole.TIME_STEP * rates
    return after, (jnp.abs(after[:, 0]) > cartpole.X_LIMIT) | (jnp.abs(after[:, 2]) > cartpole.ANGLE_LIMIT)


def rollout_step(params: Any, carry: tuple[Any, Any], key: Any) -> tuple[tuple[Any, Any], Any]:
    """Act, step, and restart the rows that finished."""
    (obs, steps), (actor, critic), (action_key, reset_key) = carry, params, jax.random.split(key)
    log_probs = jax.nn.log_softmax(apply(actor, obs))
    action = jax.random.categorical(action_key, log_probs)
    reached, terminated = env_step(obs, action)
    length = steps + 1
    truncated = length >= MAX_STEPS
    done = terminated | truncated
    carry = jnp.where(done[:, None], reset(reset_key, len(steps)), reached), jnp.where(done, 0, length)
    acted = Batch(obs, action, chosen(log_probs, action), apply(critic, obs)[:, 0], advantage=(), target=())
    return carry, (acted, reached, terminated, truncated, length)


def chosen(log_probs: Any, action: Any) -> Any:
    """The log-probability of each row's action."""
    return jnp.sum(log_probs * jax.nn.one_hot(action, 2), -1)


def gae(ppo: PPOConfig, value: Any, next_value: Any, terminated: Any, truncated: Any) -> Any:
    """Advantages [T B] of rewards that are all 1."""
    delta = 1.0 + ppo.gamma * ~terminated * next_value - value
    decay = ppo.gamma * ppo.gae_lambda * ~(terminated | truncated)
    add = lambda total, x: (x[0] + x[1] * total,) * 2
    return lax.scan(add, jnp.zeros_like(value[0]), (delta, decay), reverse=True, unroll=16)[1]


def loss_fn(ppo: PPOConfig, params: Any, batch: Batch) -> Any:
    """The clipped surrogate, the larger of two value errors, and entropy."""
    log_probs, value = jax.nn.log_softmax(apply(params[0], batch.obs)), apply(params[1], batch.obs)[:, 0]
    ratio = jnp.exp(chosen(log_probs, batch.action) - batch.log_prob)
    advantage = (batch.advantage - batch.advantage.mean()) / (batch.advantage.std(ddof=1) + 1e-8)
    clipped = jnp.clip(ratio, 1 - ppo.clip_eps, 1 + ppo.clip_eps)
    policy = -jnp.minimum(ratio * advantage, clipped * advantage).mean()
    near = batch.value + jnp.clip(value - batch.value, -ppo.clip_eps, ppo.clip_eps)
    error = 0.5 * jnp.maximum((value - batch.target) ** 2, (near - batch.target) ** 2).mean()
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, -1).mean()
    return policy + ppo.value_coef * error - ppo.entropy_coef * entropy


def minibatch_step(ppo: PPOConfig, batch: Batch, rate: Any, learner: Learner, rows: Any) -> tuple[Learner, None]:
    """One step of Adam along the clipped gradient."""
    grads = jax.grad(partial(loss_fn, ppo))(learner.params, tree.map(lambda x: x[rows], batch))
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in tree.leaves(grads)))
    grads = tree.map(lambda g: g * jnp.minimum(1.0, ppo.max_grad_norm / (norm + 1e-6)), grads)
    b1, b2, step = ppo.adam.b1, ppo.adam.b2, learner.step + 1
    mu = tree.map(lambda m, g: b1 * m + (1 - b1) * g, learner.mu, grads)
    nu = tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, learner.nu, grads)
    c1, c2 = (-jnp.expm1(step * math.log(b)) for b in (b1, b2))
    move = lambda p, m, v: p - rate * (m / c1) / (jnp.sqrt(v / c2) + ppo.adam.eps)
    return Learner(tree.map(move, learner.params, mu, nu), mu, nu, step), None


def iteration(ppo: PPOConfig, state: State) -> tuple[State, Any]:
    """One PPO update; beside the state, how many episodes ended in it and the sum of their returns."""
    n, (key, rollout_key, order_key) = ppo.n_envs * ppo.n_steps, jax.random.split(state.key, 3)
    params = state.learner.params
    act, keys = partial(rollout_step, params), jax.random.split(rollout_key, ppo.n_steps)
    (motion, steps), (acted, reached, terminated, truncated, length) = lax.scan(act, (state.motion, state.steps), keys)
    following = jnp.concatenate([acted.value[1:], apply(params[1], motion)[None, :, 0]])
    next_value = jnp.where(truncated, apply(params[1], reached)[..., 0], following)
    advantage = gae(ppo, acted.value, next_value, terminated, truncated)
    batch = acted._replace(advantage=advantage, value_target=advantage + acted.value)
    batch = tree.map(lambda x: x.reshape(n, *x.shape[2:]), batch)
    order = jax.vmap(lambda k: jax.random.permutation(k, n))(jax.random.split(order_key, ppo.n_epochs))
    rate = ppo.learning_rate * jnp.maximum(0.0, 1 - state.update / ppo.n_updates)
    learn = partial(minibatch_step, ppo, batch, rate)
    learner, _ = lax.scan(learn, state.learner, order.reshape(ppo.n_epochs * ppo.n_minibatches, -1))
    done = terminated | truncated
    return State(learner, motion, steps, key, state.update + 1), (done.sum(), jnp.where(done, length, 0).sum())
