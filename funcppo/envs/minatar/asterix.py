"""Asterix of MinAtar: collect gold and avoid enemies, which cross the field ever faster."""

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

MINIMAL_ACTIONS = "nlurd"
N_SLOTS = 8  # entities at most, one a line
RAMP_INTERVAL = 100  # steps between two accelerations
SPAWN_SPEED = 10  # steps between two entities, at first
MOVE_INTERVAL = 5  # steps between two moves of the entities, at first
GOLD_PROBABILITY = 1 / 3


class Entities(NamedTuple):
    """What crosses the field. Slot i is in line i + 1."""

    exists: Bool[Tensor, "B 8"]
    x: I64[Tensor, "B 8"]
    moves_right: Bool[Tensor, "B 8"]
    is_gold: Bool[Tensor, "B 8"]


class Timers(NamedTuple):
    """When entities come and move, in steps."""

    spawn_speed: I64[Tensor, "B"]
    spawn: I64[Tensor, "B"]
    move_speed: I64[Tensor, "B"]
    move: I64[Tensor, "B"]
    ramp: I64[Tensor, "B"]
    ramp_index: I64[Tensor, "B"]


class EnvState(NamedTuple):
    """State of each row."""

    player_y: I64[Tensor, "B"]
    player_x: I64[Tensor, "B"]
    entities: Entities
    timers: Timers
    terminal: Bool[Tensor, "B"]


def reset(cfg: GameConfig, world: NoWorld, key: I64[Tensor, "B 2"]) -> EnvState:
    """The player in the middle of an empty field."""
    zero = torch.zeros_like(key[:, 0])
    empty = zero.unsqueeze(-1).expand(-1, N_SLOTS)
    never = empty.to(torch.bool)
    return EnvState(
        player_y=zero + 5,
        player_x=zero + 5,
        entities=Entities(never, empty, never, never),
        timers=Timers(
            spawn_speed=zero + SPAWN_SPEED,
            spawn=zero + SPAWN_SPEED,
            move_speed=zero + MOVE_INTERVAL,
            move=zero + MOVE_INTERVAL,
            ramp=zero + RAMP_INTERVAL,
            ramp_index=zero,
        ),
        terminal=zero.to(torch.bool),
    )


def step_functional(
    cfg: GameConfig,
    world: NoWorld,
    state: EnvState,
    action: I64[Tensor, "B"],
    key: I64[Tensor, "B 2"],
) -> tuple[EnvState, Timestep]:
    """Move the player and the entities; the reward is 1 for gold."""
    return transition(cfg, state, action, random.uniform(key, (3,)))


def transition(
    cfg: GameConfig,
    state: EnvState,
    action: I64[Tensor, "B"],
    unit: F32[Tensor, "B 3"],
) -> tuple[EnvState, Timestep]:
    """The step, given uniform numbers for the direction, the kind and the line of an entity that comes."""
    timers = state.timers
    spawns = timers.spawn == 0
    entities = _spawn(state.entities, spawns, unit)
    spawn_timer = torch.where(spawns, timers.spawn_speed, timers.spawn)

    offset = {
        letter: is_action(cfg, action, letter).to(torch.int64)
        for letter in "lrud"
    }
    player_x = state.player_x + offset["r"] - offset["l"]
    player_x = player_x.clamp(0, SIZE - 1)
    player_y = (state.player_y + offset["d"] - offset["u"]).clamp(1, SIZE - 2)

    # The player meets entities before they move and after it.
    entities, gold_before, dies_before = _meet(entities, player_y, player_x)
    moves = timers.move == 0
    entities = _move(entities, moves)
    entities, gold_after, dies_after = _meet(entities, player_y, player_x)
    move_timer = torch.where(moves, timers.move_speed, timers.move)

    timers = timers._replace(spawn=spawn_timer - 1, move=move_timer - 1)
    next_state = EnvState(
        player_y=player_y,
        player_x=player_x,
        entities=entities,
        timers=_accelerate(timers) if cfg.ramping else timers,
        terminal=dies_before | dies_after,
    )
    return finish(state, next_state, gold_before + gold_after)


def _spawn(
    entities: Entities, spawns: Bool[Tensor, "B"], unit: F32[Tensor, "B 3"]
) -> Entities:
    """Put an entity at the edge of a random free line, if there is one."""
    free = ~entities.exists
    n_free = free.sum(-1)
    chosen = 1 + (unit[:, 2] * n_free).to(torch.int64)
    is_chosen = free & (free.cumsum(-1) == chosen.unsqueeze(-1))
    is_new = is_chosen & spawns.unsqueeze(-1)

    moves_right = (unit[:, 0] < 0.5).unsqueeze(-1)
    is_gold = (unit[:, 1] < GOLD_PROBABILITY).unsqueeze(-1)
    return Entities(
        exists=entities.exists | is_new,
        x=torch.where(
            is_new, torch.where(moves_right, 0, SIZE - 1), entities.x
        ),
        moves_right=torch.where(is_new, moves_right, entities.moves_right),
        is_gold=torch.where(is_new, is_gold, entities.is_gold),
    )


def _move(entities: Entities, moves: Bool[Tensor, "B"]) -> Entities:
    """Move all entities by a cell; what leaves the field is gone."""
    x = entities.x + torch.where(entities.moves_right, 1, -1)
    x = torch.where(moves.unsqueeze(-1), x, entities.x)
    is_inside = (x >= 0) & (x < SIZE)
    return entities._replace(exists=entities.exists & is_inside, x=x)


def _meet(
    entities: Entities, player_y: I64[Tensor, "B"], player_x: I64[Tensor, "B"]
) -> tuple[Entities, I64[Tensor, "B"], Bool[Tensor, "B"]]:
    """The entities that are left, how much gold is collected, and where the player dies."""
    line = 1 + torch.arange(N_SLOTS, device=player_x.device)
    is_met = (
        entities.exists
        & (entities.x == player_x.unsqueeze(-1))
        & (line == player_y.unsqueeze(-1))
    )
    gold = is_met & entities.is_gold
    left = entities._replace(exists=entities.exists & ~gold)
    return left, gold.sum(-1), (is_met & ~entities.is_gold).any(-1)


def _accelerate(timers: Timers) -> Timers:
    """Shorten the intervals where it is time to."""
    can_ramp = (timers.spawn_speed > 1) | (timers.move_speed > 1)
    ramps = can_ramp & (timers.ramp < 0)
    is_odd = timers.ramp_index % 2 == 1
    faster_move = ramps & is_odd & (timers.move_speed > 1)
    faster_spawn = ramps & (timers.spawn_speed > 1)
    ramp = torch.where(can_ramp, timers.ramp - 1, timers.ramp)
    return timers._replace(
        spawn_speed=timers.spawn_speed - faster_spawn.to(torch.int64),
        move_speed=timers.move_speed - faster_move.to(torch.int64),
        ramp=torch.where(ramps, RAMP_INTERVAL, ramp),
        ramp_index=timers.ramp_index + ramps.to(torch.int64),
    )


def observe(
    cfg: GameConfig, world: NoWorld, state: EnvState
) -> F32[Tensor, "B 10 10 4"]:
    """Channels: player, enemies, trails, gold."""
    exists, x, moves_right, is_gold = state.entities
    line = (1 + torch.arange(N_SLOTS, device=x.device)).expand_as(x)
    cells = at(line, x) & exists.view(-1, N_SLOTS, 1, 1)
    trails = at(line, x - torch.where(moves_right, 1, -1))
    gold = is_gold.view(-1, N_SLOTS, 1, 1)
    return image(
        at(state.player_y, state.player_x),
        (cells & ~gold).any(1),
        (trails & exists.view(-1, N_SLOTS, 1, 1)).any(1),
        (cells & gold).any(1),
    )


def asterix(
    *,
    minimal_actions: bool = True,
    ramping: bool = True,
    sticky_probability: float = STICKY_PROBABILITY,
) -> AnyEnvironment:
    """Asterix of MinAtar; observations are images of 10 x 10 cells and 4 channels.

    Args:
      minimal_actions: nothing and the four moves; else all six actions.
      ramping: entities come and move ever faster.
      sticky_probability: that the last action of the episode is repeated.
    """
    cfg = GameConfig(
        actions=MINIMAL_ACTIONS if minimal_actions else ALL_ACTIONS,
        ramping=ramping,
        sticky_probability=sticky_probability,
    )
    return game(
        cfg, 4, reset=reset, step_functional=step_functional, observe=observe
    )
