"""Freeway of MinAtar: cross eight lanes of traffic, again and again."""

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

MINIMAL_ACTIONS = "nud"
PLAYER_SPEED = 3  # steps between two moves
TIME_LIMIT = 2500  # steps; the end of the game is a termination, as in MinAtar
N_CARS = 8
MAX_CAR_TIMER = 5  # steps between two moves of the slowest car
START = SIZE - 1  # row of the player
PLAYER_COLUMN = 4


class EnvState(NamedTuple):
    """State of each row. Car i drives in lane i + 1."""

    position: I64[Tensor, "B"]  # row of the player
    car_x: I64[Tensor, "B 8"]
    car_timer: I64[Tensor, "B 8"]  # steps until the car moves
    car_speed: I64[Tensor, "B 8"]  # steps between its moves; negative leftwards
    move_timer: I64[Tensor, "B"]  # steps until the player may move
    time_left: I64[Tensor, "B"]
    terminal: Bool[Tensor, "B"]


def sample_speeds(key: I64[Tensor, "B 2"]) -> I64[Tensor, "B 8"]:
    """Random speeds and directions of the cars."""
    unit = random.uniform(key, (2, N_CARS))
    magnitude = 1 + (unit[:, 0] * MAX_CAR_TIMER).to(torch.int64)
    return torch.where(unit[:, 1] < 0.5, -magnitude, magnitude)


def reset(cfg: GameConfig, world: NoWorld, key: I64[Tensor, "B 2"]) -> EnvState:
    """The player below the lanes, and cars of random speeds at the left."""
    speed = sample_speeds(key)
    zero = torch.zeros_like(key[:, 0])
    return EnvState(
        position=zero + START,
        car_x=torch.zeros_like(speed),
        car_timer=speed.abs(),
        car_speed=speed,
        move_timer=zero + PLAYER_SPEED,
        time_left=zero + TIME_LIMIT,
        terminal=zero.to(torch.bool),
    )


def step_functional(
    cfg: GameConfig,
    world: NoWorld,
    state: EnvState,
    action: I64[Tensor, "B"],
    key: I64[Tensor, "B 2"],
) -> tuple[EnvState, Timestep]:
    """Move the player and the cars; the reward is 1 for a crossing, after which cars have other speeds."""
    return transition(cfg, state, action, sample_speeds(key))


def transition(
    cfg: GameConfig,
    state: EnvState,
    action: I64[Tensor, "B"],
    new_speed: I64[Tensor, "B 8"],
) -> tuple[EnvState, Timestep]:
    """The step, given the speeds after a crossing."""
    is_ready = state.move_timer == 0
    up = is_ready & is_action(cfg, action, "u")
    down = is_ready & is_action(cfg, action, "d")
    offset = down.to(torch.int64) - up.to(torch.int64)
    position = (state.position + offset).clamp(0, START)
    move_timer = torch.where(up | down, PLAYER_SPEED, state.move_timer)

    has_crossed = position == 0
    position = torch.where(has_crossed, START, position)
    rows = has_crossed.unsqueeze(-1)
    speed = torch.where(rows, new_speed, state.car_speed)
    timer = torch.where(rows, new_speed.abs(), state.car_timer)

    # A car hits the player before it moves or after it.
    moves = timer == 0
    car_x = torch.where(moves, state.car_x + speed.sign(), state.car_x) % SIZE
    lane = 1 + torch.arange(N_CARS, device=car_x.device)
    is_met = (state.car_x == PLAYER_COLUMN) | (car_x == PLAYER_COLUMN)
    is_hit = (is_met & (lane == position.unsqueeze(-1))).any(-1)

    time_left = state.time_left - 1
    next_state = EnvState(
        position=torch.where(is_hit, START, position),
        car_x=car_x,
        car_timer=torch.where(moves, speed.abs(), timer - 1),
        car_speed=speed,
        move_timer=(move_timer - 1).clamp_min(0),
        time_left=time_left,
        terminal=time_left < 0,
    )
    return finish(state, next_state, has_crossed)


def observe(
    cfg: GameConfig, world: NoWorld, state: EnvState
) -> F32[Tensor, "B 10 10 7"]:
    """Channels: player, cars, and behind each car one for each of the five speeds."""
    lane = (1 + torch.arange(N_CARS, device=state.car_x.device)).expand_as(
        state.car_x
    )
    back_x = (state.car_x - state.car_speed.sign()) % SIZE
    trail = at(lane, back_x)
    speed = state.car_speed.abs().view(-1, N_CARS, 1, 1)
    trails = [
        (trail & (speed == s)).any(1) for s in range(1, MAX_CAR_TIMER + 1)
    ]
    column = torch.full_like(state.position, PLAYER_COLUMN)
    return image(
        at(state.position, column), at(lane, state.car_x).any(1), *trails
    )


def freeway(
    *,
    minimal_actions: bool = True,
    sticky_probability: float = STICKY_PROBABILITY,
) -> AnyEnvironment:
    """Freeway of MinAtar; observations are images of 10 x 10 cells and 7 channels.

    Args:
      minimal_actions: nothing, up, down; else all six actions.
      sticky_probability: that the last action of the episode is repeated.
    """
    cfg = GameConfig(
        actions=MINIMAL_ACTIONS if minimal_actions else ALL_ACTIONS,
        sticky_probability=sticky_probability,
    )
    return game(
        cfg, 7, reset=reset, step_functional=step_functional, observe=observe
    )
