"""The work of cartpole.py and time_to_score.py in plain JAX: a whole PPO iteration in one jitted call.

The same steps, settings and constants as funcppo's, read from its config: rollout with resets, a value for the last
state of every truncated episode, GAE, epochs x minibatches of the clipped loss, Adam. Written as JAX is written: loops
are `lax.scan`, the state is donated, learners are `vmap`. Needs jax beside what funcppo needs.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
from jax import lax, tree  # pyright: ignore[reportMissingImports]

from funcppo.config import PPOConfig
from funcppo.envs.minatar import SIZE, STICKY_PROBABILITY

Array = Any
Network = list[tuple[Array, Array]]  # weight and bias of each layer

HIDDEN_SIZES = (64, 64)
GAE_UNROLL = 16


class Task(NamedTuple):
    """An environment of B rows, and the network for it."""

    reset: Callable[[Array, int], Any]  # (key, B) -> state
    # (state, action, key) -> state, reward, terminated
    step: Callable[[Any, Array, Array], tuple[Any, Array, Array]]
    observe: Callable[[Any], Array]  # state -> [B, n_obs]
    n_obs: int
    n_actions: int
    max_steps: int | None = None  # after which an episode is truncated
    activation: Callable[[Array], Array] = jnp.tanh


class Learner(NamedTuple):
    """Params, and Adam's moments and step count."""

    params: tuple[Network, Network]  # actor, critic
    mu: tuple[Network, Network]
    nu: tuple[Network, Network]
    step: Array


class State(NamedTuple):
    """What an iteration threads."""

    learner: Learner
    env_state: Any
    steps: Array  # [B], taken in the episode that each row is in
    episode_return: Array  # [B], of it so far
    key: Array
    update: Array


class Batch(NamedTuple):
    """Transitions, [T B] or [N]."""

    obs: Array
    action: Array
    log_prob: Array
    value: Array
    advantage: Array
    value_target: Array


def make_learner(
    ppo: PPOConfig, n_learners: int, task: Task, seed: int = 0
) -> tuple[State, Callable[[State], tuple[State, Any]]]:
    """A fresh state and the jitted iteration from it; of `n_learners` at once under vmap, or of one where that is 0."""
    keys = jax.random.split(jax.random.key(seed), max(n_learners, 1))
    init_state = partial(init, ppo, task=task)
    step = partial(iteration, ppo, task=task)
    if n_learners:
        return jax.vmap(init_state)(keys), jax.jit(
            jax.vmap(step), donate_argnums=0
        )
    return init_state(keys[0]), jax.jit(step, donate_argnums=0)


def init(ppo: PPOConfig, key: Array, task: Task) -> State:
    """The state before the first iteration."""
    actor_key, critic_key, env_key, key = jax.random.split(key, 4)
    params = (
        init_network(actor_key, task.n_obs, task.n_actions, 0.01),
        init_network(critic_key, task.n_obs, 1, 1.0),
    )
    learner = Learner(
        params,
        tree.map(jnp.zeros_like, params),
        tree.map(jnp.zeros_like, params),
        jnp.zeros(()),
    )
    return State(
        learner,
        # copied, since a buffer that stands in two places cannot be donated
        tree.map(jnp.copy, task.reset(env_key, ppo.n_envs)),
        steps=jnp.zeros(ppo.n_envs, jnp.int32),
        episode_return=jnp.zeros(ppo.n_envs),
        key=key,
        update=jnp.zeros((), jnp.int32),
    )


def init_network(
    key: Array, n_obs: int, n_out: int, output_gain: float
) -> Network:
    """Orthogonal weights with gain sqrt(2), the last layer's with `output_gain`; zero biases."""
    sizes = [n_obs, *HIDDEN_SIZES, n_out]
    gains = [math.sqrt(2.0)] * len(HIDDEN_SIZES) + [output_gain]
    keys = jax.random.split(key, len(gains))
    network = []
    for layer_key, gain, n_in, n in zip(keys, gains, sizes[:-1], sizes[1:]):
        weight = jax.nn.initializers.orthogonal(gain)(layer_key, (n_in, n))
        network.append((weight, jnp.zeros(n)))
    return network


def apply(
    network: Network, x: Array, activation: Callable[[Array], Array] = jnp.tanh
) -> Array:
    """The output of the actor or the critic."""
    for weight, bias in network[:-1]:
        x = activation(x @ weight + bias)
    return x @ network[-1][0] + network[-1][1]


def reset(key: Array, n: int) -> Array:
    """Motion of `n` fresh rows."""
    return jax.random.uniform(key, (n, 4), minval=-0.05, maxval=0.05)


def step_cartpole(
    motion: Array, action: Array, key: Array
) -> tuple[Array, Array, Array]:
    """The motion one Euler step later, a reward of 1 for each row, and which poles have fallen."""
    _, velocity, angle, spin = motion.T
    total_mass = 1.0 + 0.1  # kg, of the cart and the pole
    moment = 0.1 * 0.5  # kg m
    cos, sin = jnp.cos(angle), jnp.sin(angle)

    force = jnp.where(action == 1, 10.0, -10.0)
    push = (force + moment * spin * spin * sin) / total_mass
    lever = 0.5 * (4.0 / 3.0 - 0.1 * cos * cos / total_mass)
    spin_rate = (9.8 * sin - cos * push) / lever
    rates = jnp.stack(
        [
            velocity,
            push - moment * spin_rate * cos / total_mass,
            spin,
            spin_rate,
        ],
        -1,
    )

    after = motion + 0.02 * rates
    fallen = (jnp.abs(after[:, 0]) > 2.4) | (
        jnp.abs(after[:, 2]) > 12 * 2 * jnp.pi / 360
    )
    return after, jnp.ones_like(after[:, 0]), fallen


CARTPOLE = Task(
    reset=reset,
    step=step_cartpole,
    observe=lambda motion: motion,
    n_obs=4,
    n_actions=2,
    max_steps=500,
)


class Reached(NamedTuple):
    """What a step reaches, before any reset."""

    obs: Array
    reward: Array
    terminated: Array
    truncated: Array
    episode_return: Array


def rollout_step(
    task: Task,
    params: tuple[Network, Network],
    carry: tuple[Any, Array, Array],
    key: Array,
) -> tuple[Any, tuple[Batch, Reached]]:
    """Act, step, and reset the rows that finished."""
    env_state, steps, episode_return = carry
    obs = task.observe(env_state)
    actor, critic = params
    action_key, step_key, reset_key = jax.random.split(key, 3)
    log_probs = jax.nn.log_softmax(apply(actor, obs, task.activation))
    action = jax.random.categorical(action_key, log_probs)
    transition = Batch(
        obs=obs,
        action=action,
        log_prob=log_prob_of(log_probs, action),
        value=apply(critic, obs, task.activation)[:, 0],
        advantage=(),
        value_target=(),
    )

    env_state, reward, terminated = task.step(env_state, action, step_key)
    length = steps + 1
    truncated = jnp.zeros_like(terminated)
    if task.max_steps is not None:
        truncated = length >= task.max_steps
    done = terminated | truncated
    reached = Reached(
        task.observe(env_state),
        reward,
        terminated,
        truncated,
        episode_return + reward,
    )
    fresh = task.reset(reset_key, len(steps))

    def reset_finished(old: Array, new: Array) -> Array:
        return jnp.where(done.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    carry = (
        tree.map(reset_finished, env_state, fresh),
        jnp.where(done, 0, length),
        jnp.where(done, 0.0, reached.episode_return),
    )
    return carry, (transition, reached)


def log_prob_of(log_probs: Array, action: Array) -> Array:
    """The log-probability of each row's action."""
    chosen = jax.nn.one_hot(action, log_probs.shape[-1])
    return jnp.sum(log_probs * chosen, -1)


def gae(
    ppo: PPOConfig,
    value: Array,
    next_value: Array,
    terminated: Array,
    truncated: Array,
    reward: Array | float = 1.0,
) -> Array:
    """Generalised advantage estimates [T B]."""
    delta = reward + ppo.gamma * ~terminated * next_value - value
    decay = ppo.gamma * ppo.gae_lambda * ~(terminated | truncated)

    def accumulate(
        advantage: Array, x: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        advantage = x[0] + x[1] * advantage
        return advantage, advantage

    first = jnp.zeros_like(value[0])
    return lax.scan(
        accumulate, first, (delta, decay), reverse=True, unroll=GAE_UNROLL
    )[1]


def loss_fn(
    ppo: PPOConfig,
    params: tuple[Network, Network],
    batch: Batch,
    activation: Callable[[Array], Array] = jnp.tanh,
) -> Array:
    """The clipped surrogate, the larger of two value errors, and entropy."""
    log_probs = jax.nn.log_softmax(apply(params[0], batch.obs, activation))
    value = apply(params[1], batch.obs, activation)[:, 0]

    ratio = jnp.exp(log_prob_of(log_probs, batch.action) - batch.log_prob)
    advantage = (batch.advantage - batch.advantage.mean()) / (
        batch.advantage.std(ddof=ppo.advantage_ddof) + 1e-8
    )
    clipped_ratio = jnp.clip(ratio, 1 - ppo.clip_eps, 1 + ppo.clip_eps)
    policy_loss = -jnp.minimum(
        ratio * advantage, clipped_ratio * advantage
    ).mean()

    clipped_value = batch.value + jnp.clip(
        value - batch.value, -ppo.clip_eps, ppo.clip_eps
    )
    squared_error = jnp.maximum(
        (value - batch.value_target) ** 2,
        (clipped_value - batch.value_target) ** 2,
    )
    value_loss = 0.5 * squared_error.mean()

    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, -1).mean()
    return (
        policy_loss + ppo.value_coef * value_loss - ppo.entropy_coef * entropy
    )


def minibatch_step(
    ppo: PPOConfig,
    activation: Callable[[Array], Array],
    batch: Batch,
    learning_rate: Array,
    learner: Learner,
    rows: Array,
) -> tuple[Learner, None]:
    """One step of Adam along the clipped gradient."""
    minibatch = tree.map(lambda x: x[rows], batch)
    loss = partial(loss_fn, ppo, activation=activation)
    grads = jax.grad(loss)(learner.params, minibatch)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in tree.leaves(grads)))
    grads = tree.map(
        lambda g: g * jnp.minimum(1.0, ppo.max_grad_norm / (norm + 1e-6)), grads
    )

    b1, b2 = ppo.adam.b1, ppo.adam.b2
    step = learner.step + 1
    mu = tree.map(lambda m, g: b1 * m + (1 - b1) * g, learner.mu, grads)
    nu = tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, learner.nu, grads)
    correction1, correction2 = (
        -jnp.expm1(step * math.log(b)) for b in (b1, b2)
    )

    def update(p: Array, m: Array, v: Array) -> Array:
        return p - learning_rate * (m / correction1) / (
            jnp.sqrt(v / correction2) + ppo.adam.eps
        )

    return Learner(tree.map(update, learner.params, mu, nu), mu, nu, step), None


def iteration(
    ppo: PPOConfig, state: State, task: Task
) -> tuple[State, tuple[Array, Array]]:
    """One PPO update; beside the state, how many episodes ended in it and the sum of their returns."""
    key, rollout_key, order_key = jax.random.split(state.key, 3)
    params = state.learner.params
    critic = partial(apply, params[1], activation=task.activation)

    # Rollout.
    keys = jax.random.split(rollout_key, ppo.n_steps)
    act = partial(rollout_step, task, params)
    first = (state.env_state, state.steps, state.episode_return)
    (env_state, steps, episode_return), trajectory = lax.scan(act, first, keys)
    transitions, reached = trajectory

    # Advantages: the value of the state reached before any reset, where the time limit cut the episode.
    last_value = critic(task.observe(env_state))[None, :, 0]
    next_value = jnp.concatenate([transitions.value[1:], last_value])
    done = reached.terminated | reached.truncated
    is_end = done
    if ppo.bootstrap_truncated:
        is_end = reached.terminated
        next_value = jnp.where(
            reached.truncated, critic(reached.obs)[..., 0], next_value
        )
    advantage = gae(
        ppo, transitions.value, next_value, is_end, done, reached.reward
    )
    n_rows = ppo.n_envs * ppo.n_steps
    batch = transitions._replace(
        advantage=advantage, value_target=advantage + transitions.value
    )
    batch = tree.map(lambda x: x.reshape(n_rows, *x.shape[2:]), batch)

    # Update.
    order = jax.vmap(lambda k: jax.random.permutation(k, n_rows))(
        jax.random.split(order_key, ppo.n_epochs)
    )
    learning_rate = ppo.learning_rate * jnp.maximum(
        0.0, 1 - state.update / ppo.n_updates
    )
    update = partial(minibatch_step, ppo, task.activation, batch, learning_rate)
    learner, _ = lax.scan(
        update,
        state.learner,
        order.reshape(ppo.n_epochs * ppo.n_minibatches, -1),
    )

    after = State(
        learner, env_state, steps, episode_return, key, state.update + 1
    )
    ended_return = jnp.where(done, reached.episode_return, 0.0)
    return after, (done.sum(), ended_return.sum())


# Breakout of MinAtar

# a step of a game: of its state, actions and a key
Play = Callable[[Any, Array, Array], tuple[Any, Array, Array]]


def at(y: Array, x: Array) -> Array:
    """Maps that are true in one cell; in none where it is off the grid."""
    cells = jnp.arange(SIZE)
    return (y[..., None] == cells)[..., None] & (x[..., None] == cells)[
        ..., None, :
    ]


def vector(*channels: Array) -> Array:
    """Maps as one vector a row."""
    return (
        jnp.stack(channels, -1)
        .astype(jnp.float32)
        .reshape(len(channels[0]), -1)
    )


def sticky(play: Play) -> Play:
    """A step that may repeat the last action of the episode."""

    def step(state: Any, action: Array, key: Array) -> tuple[Any, Array, Array]:
        sticky_key, key = jax.random.split(key)
        drawn = jax.random.uniform(sticky_key, action.shape)
        is_kept = (drawn < STICKY_PROBABILITY) & (state.action >= 0)
        return play(state, jnp.where(is_kept, state.action, action), key)

    return step


class Breakout(NamedTuple):
    """State of each row: that of `breakout.EnvState`, and the last action."""

    ball_y: Array
    ball_x: Array
    direction: Array  # 0 up left, 1 up right, 2 down right, 3 down left
    paddle: Array
    bricks: Array  # [B 10 10]
    strike: Array
    last_y: Array
    last_x: Array
    action: Array  # -1: none yet


def all_bricks(n: int) -> Array:
    """A full wall in each row."""
    lines = jnp.arange(SIZE)
    is_filled = (lines >= 1) & (lines < 4)
    return jnp.broadcast_to(is_filled[None, :, None], (n, SIZE, SIZE))


def reset_breakout(key: Array, n: int) -> Breakout:
    """A full wall, and the ball below it at the left or the right."""
    from_right = jax.random.uniform(key, (n,)) < 0.5
    x = jnp.where(from_right, SIZE - 1, 0)
    three = jnp.full(n, 3)
    return Breakout(
        ball_y=three,
        ball_x=x,
        direction=jnp.where(from_right, 3, 2),
        paddle=jnp.full(n, 4),
        bricks=all_bricks(n),
        strike=jnp.zeros(n, bool),
        last_y=three,
        last_x=x,
        action=jnp.full(n, -1),
    )


def play_breakout(
    state: Breakout, action: Array, key: Array = None
) -> tuple[Breakout, Array, Array]:
    """Move the paddle and the ball; the reward is 1 for a brick. The key is not used."""
    left = action == 1  # of nothing, left, right
    right = action == 2
    moved = state.paddle + right.astype(int) - left.astype(int)
    paddle = jnp.clip(moved, 0, SIZE - 1)

    is_rightward = (state.direction == 1) | (state.direction == 2)
    x = state.ball_x + jnp.where(is_rightward, 1, -1)
    y = state.ball_y + jnp.where(state.direction >= 2, 1, -1)
    is_outside = (x < 0) | (x >= SIZE)
    x = jnp.clip(x, 0, SIZE - 1)
    direction = jnp.where(is_outside, state.direction ^ 1, state.direction)

    # One of three: the ceiling, a brick, the lowest row.
    hits_ceiling = y < 0
    y = jnp.maximum(y, 0)
    cell = at(y, x)
    hits_brick = ~hits_ceiling & (state.bricks & cell).any((1, 2))
    at_bottom = ~hits_ceiling & ~hits_brick & (y == SIZE - 1)

    # A second brick in a row is passed through.
    breaks = hits_brick & ~state.strike
    bricks = state.bricks & ~(cell & breaks[:, None, None])
    is_cleared = at_bottom & ~bricks.any((1, 2))
    bricks = bricks | (all_bricks(len(x)) & is_cleared[:, None, None])

    is_met_straight = at_bottom & (state.ball_x == paddle)
    is_met_aslant = at_bottom & ~is_met_straight & (x == paddle)
    reverses_y = hits_ceiling | breaks | is_met_straight
    direction = jnp.where(reverses_y, 3 - direction, direction)
    direction = jnp.where(is_met_aslant, direction ^ 2, direction)
    stays = breaks | is_met_straight | is_met_aslant
    after = Breakout(
        ball_y=jnp.where(stays, state.ball_y, y),
        ball_x=x,
        direction=direction,
        paddle=paddle,
        bricks=bricks,
        strike=hits_brick,
        last_y=state.ball_y,
        last_x=state.ball_x,
        action=action,
    )
    terminated = at_bottom & ~is_met_straight & ~is_met_aslant
    return after, breaks.astype(jnp.float32), terminated


def observe_breakout(state: Breakout) -> Array:
    """Paddle, ball, trail of the ball, bricks, as one vector a row."""
    bottom = jnp.full_like(state.paddle, SIZE - 1)
    return vector(
        at(bottom, state.paddle),
        at(state.ball_y, state.ball_x),
        at(state.last_y, state.last_x),
        state.bricks,
    )


BREAKOUT = Task(
    reset=reset_breakout,
    step=sticky(play_breakout),
    observe=observe_breakout,
    n_obs=4 * SIZE * SIZE,
    n_actions=3,
    activation=jax.nn.relu,
)
