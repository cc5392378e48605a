"""Breakout of MinAtar: break bricks with a ball that a paddle returns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core import random
from funcppo.core.types import F32, I64, Bool
from funcppo.envs.minatar.game import (
    ALL_ACTIONS,
    SIZE,
    STICKY_PROBABILITY,
    GameConfig,
    at,
    finish,
    game,
    image,
    is_action,
)
from funcppo.interfaces import AnyEnvironment, NoWorld, Timestep

MINIMAL_ACTIONS = "nlr"
BRICK_ROWS = (1, 4)  # the first, and the one after the last


class EnvState(NamedTuple):
    """State of each row."""

    ball_y: I64[Tensor, "B"]
    ball_x: I64[Tensor, "B"]
    direction: I64[
        Tensor, "B"
    ]  # 0 up left, 1 up right, 2 down right, 3 down left
    paddle: I64[Tensor, "B"]  # column
    bricks: Bool[Tensor, "B 10 10"]
    strike: Bool[Tensor, "B"]  # the ball hit a brick in the last step
    last_y: I64[Tensor, "B"]  # of the ball
    last_x: I64[Tensor, "B"]
    terminal: Bool[Tensor, "B"]


def _all_bricks(like: Tensor) -> Bool[Tensor, "1 10 10"]:
    rows = torch.arange(SIZE, device=like.device)
    is_filled = (rows >= BRICK_ROWS[0]) & (rows < BRICK_ROWS[1])
    return is_filled.view(1, SIZE, 1).expand(1, SIZE, SIZE)


def reset(cfg: GameConfig, world: NoWorld, key: I64[Tensor, "B 2"]) -> EnvState:
    """A full wall, and the ball below it at the left or the right."""
    from_right = random.uniform(key, ()) < 0.5
    zero = torch.zeros_like(key[:, 0])
    ball_x = torch.where(from_right, SIZE - 1, zero)
    return EnvState(
        ball_y=zero + 3,
        ball_x=ball_x,
        direction=torch.where(from_right, 3, zero + 2),
        paddle=zero + 4,
        bricks=_all_bricks(key).expand(key.shape[0], SIZE, SIZE),
        strike=zero.to(torch.bool),
        last_y=zero + 3,
        last_x=ball_x,
        terminal=zero.to(torch.bool),
    )


def step_functional(
    cfg: GameConfig,
    world: NoWorld,
    state: EnvState,
    action: I64[Tensor, "B"],
    key: I64[Tensor, "B 2"],
) -> tuple[EnvState, Timestep]:
    """Move the paddle and the ball; the reward is 1 for a brick.

    Args:
      key: unused: the step is deterministic.
    """
    left = is_action(cfg, action, "l").to(torch.int64)
    right = is_action(cfg, action, "r").to(torch.int64)
    paddle = (state.paddle + right - left).clamp(0, SIZE - 1)

    # The ball moves diagonally, and is reflected by the walls at the sides.
    is_rightward = (state.direction == 1) | (state.direction == 2)
    x = state.ball_x + torch.where(is_rightward, 1, -1)
    y = state.ball_y + torch.where(state.direction >= 2, 1, -1)
    is_outside = (x < 0) | (x >= SIZE)
    x = x.clamp(0, SIZE - 1)
    direction = torch.where(is_outside, state.direction ^ 1, state.direction)

    # One of three: the ceiling, a brick, the lowest row.
    hits_ceiling = y < 0
    y = y.clamp_min(0)
    cell = at(y, x)
    hits_brick = ~hits_ceiling & (state.bricks & cell).flatten(1).any(-1)
    at_bottom = ~hits_ceiling & ~hits_brick & (y == SIZE - 1)

    # A second brick in a row is passed through.
    breaks = hits_brick & ~state.strike
    bricks = state.bricks & ~(cell & breaks.view(-1, 1, 1))
    is_cleared = at_bottom & ~bricks.flatten(1).any(-1)
    bricks = bricks | (_all_bricks(x) & is_cleared.view(-1, 1, 1))

    is_met_straight = at_bottom & (state.ball_x == paddle)
    is_met_aslant = at_bottom & ~is_met_straight & (x == paddle)
    reverses_y = hits_ceiling | breaks | is_met_straight
    direction = torch.where(reverses_y, 3 - direction, direction)
    direction = torch.where(is_met_aslant, direction ^ 2, direction)
    stays = breaks | is_met_straight | is_met_aslant
    return finish(
        state,
        EnvState(
            ball_y=torch.where(stays, state.ball_y, y),
            ball_x=x,
            direction=direction,
            paddle=paddle,
            bricks=bricks,
            strike=hits_brick,
            last_y=state.ball_y,
            last_x=state.ball_x,
            terminal=at_bottom & ~is_met_straight & ~is_met_aslant,
        ),
        breaks,
    )


def observe(
    cfg: GameConfig, world: NoWorld, state: EnvState
) -> F32[Tensor, "B 10 10 4"]:
    """Channels: paddle, ball, trail of the ball, bricks."""
    bottom = torch.full_like(state.paddle, SIZE - 1)
    return image(
        at(bottom, state.paddle),
        at(state.ball_y, state.ball_x),
        at(state.last_y, state.last_x),
        state.bricks,
    )


def breakout(
    *,
    minimal_actions: bool = True,
    sticky_probability: float = STICKY_PROBABILITY,
) -> AnyEnvironment:
    """Breakout of MinAtar; observations are images of 10 x 10 cells and 4 channels.

    Args:
      minimal_actions: nothing, left, right; else all six actions.
      sticky_probability: that the last action of the episode is repeated.
    """
    cfg = GameConfig(
        actions=MINIMAL_ACTIONS if minimal_actions else ALL_ACTIONS,
        sticky_probability=sticky_probability,
    )
    return game(
        cfg, 4, reset=reset, step_functional=step_functional, observe=observe
    )
