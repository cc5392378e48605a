"""Breakout of MinAtar in plain JAX, as `funcppo.envs.minatar.breakout` computes it, sticky actions included."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

from experiments.benchmarks.jax_games import at, game, vector
from funcppo.envs.minatar.breakout import BRICK_ROWS, MINIMAL_ACTIONS
from funcppo.envs.minatar.game import SIZE

Array = Any


class State(NamedTuple):
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
    is_filled = (lines >= BRICK_ROWS[0]) & (lines < BRICK_ROWS[1])
    return jnp.broadcast_to(is_filled[None, :, None], (n, SIZE, SIZE))


def reset(key: Array, n: int) -> State:
    """A full wall, and the ball below it at the left or the right."""
    from_right = jax.random.uniform(key, (n,)) < 0.5
    x = jnp.where(from_right, SIZE - 1, 0)
    three = jnp.full(n, 3)
    return State(
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


def step(
    state: State, action: Array, key: Array = None
) -> tuple[State, Array, Array]:
    """Move the paddle and the ball; the reward is 1 for a brick. The key is not used."""
    left = action == MINIMAL_ACTIONS.index("l")
    right = action == MINIMAL_ACTIONS.index("r")
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
    after = State(
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


def observe(state: State) -> Array:
    """Paddle, ball, trail of the ball, bricks, as one vector a row."""
    bottom = jnp.full_like(state.paddle, SIZE - 1)
    return vector(
        at(bottom, state.paddle),
        at(state.ball_y, state.ball_x),
        at(state.last_y, state.last_x),
        state.bricks,
    )


BREAKOUT = game(reset, step, observe, MINIMAL_ACTIONS, 4)
