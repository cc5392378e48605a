"""Space Invaders of MinAtar: shoot aliens that come down and shoot back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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

MINIMAL_ACTIONS = "nlrf"
SHOT_COOL_DOWN = 5  # steps between two shots of the player
MOVE_INTERVAL = 12  # steps between two moves of the aliens, at first
MIN_MOVE_INTERVAL = 6
ALIEN_SHOT_INTERVAL = 10  # steps
ALIEN_ROWS, ALIEN_COLUMNS = 4, (2, 8)
BOTTOM = SIZE - 1


class EnvState(NamedTuple):
    """State of each row."""

    position: I64[Tensor, "B"]  # column of the cannon
    bullets: Bool[Tensor, "B 10 10"]  # of the player
    alien_bullets: Bool[Tensor, "B 10 10"]
    aliens: Bool[Tensor, "B 10 10"]
    direction: I64[Tensor, "B"]  # of the aliens, -1 or 1
    move_interval: I64[Tensor, "B"]
    move_timer: I64[Tensor, "B"]
    alien_shot_timer: I64[Tensor, "B"]
    shot_timer: I64[Tensor, "B"]
    terminal: Bool[Tensor, "B"]


def _all_aliens(like: Tensor) -> Bool[Tensor, "1 10 10"]:
    cells = torch.arange(SIZE, device=like.device)
    is_column = (cells >= ALIEN_COLUMNS[0]) & (cells < ALIEN_COLUMNS[1])
    is_row = cells < ALIEN_ROWS
    return (is_row.unsqueeze(-1) & is_column).unsqueeze(0)


def reset(cfg: GameConfig, world: NoWorld, key: I64[Tensor, "B 2"]) -> EnvState:
    """The cannon in the middle, and all aliens on their way to the left."""
    zero = torch.zeros_like(key[:, 0])
    empty = zero.to(torch.bool).view(-1, 1, 1).expand(-1, SIZE, SIZE)
    return EnvState(
        position=zero + 5,
        bullets=empty,
        alien_bullets=empty,
        aliens=_all_aliens(key).expand_as(empty),
        direction=zero - 1,
        move_interval=zero + MOVE_INTERVAL,
        move_timer=zero + MOVE_INTERVAL,
        alien_shot_timer=zero + ALIEN_SHOT_INTERVAL,
        shot_timer=zero,
        terminal=zero.to(torch.bool),
    )


def _any(cells: Bool[Tensor, "B 10 10"]) -> Bool[Tensor, "B"]:
    return cells.flatten(1).any(-1)


def _where(
    rows: Bool[Tensor, "B"], a: Tensor, b: Tensor
) -> Bool[Tensor, "B 10 10"]:
    return torch.where(rows.view(-1, 1, 1), a, b)


def _shift(cells: Bool[Tensor, "B 10 10"], down: bool) -> Tensor:
    """The map moved by one row; what leaves the grid is gone."""
    edge = torch.zeros_like(cells[:, :1])
    if down:
        return torch.cat([edge, cells[:, :-1]], 1)
    return torch.cat([cells[:, 1:], edge], 1)


def step_functional(
    cfg: GameConfig,
    world: NoWorld,
    state: EnvState,
    action: I64[Tensor, "B"],
    key: I64[Tensor, "B 2"],
) -> tuple[EnvState, Timestep]:
    """Move the cannon, bullets and aliens; the reward is 1 for each alien that is shot.

    Args:
      key: unused: the step is deterministic.
    """
    fires = is_action(cfg, action, "f") & (state.shot_timer == 0)
    left = is_action(cfg, action, "l").to(torch.int64)
    right = is_action(cfg, action, "r").to(torch.int64)
    position = (state.position + right - left).clamp(0, BOTTOM)
    cannon = at(torch.full_like(position, BOTTOM), position)

    bullets = _shift(
        state.bullets | (cannon & fires.view(-1, 1, 1)), down=False
    )
    alien_bullets = _shift(state.alien_bullets, down=True)
    is_hit = _any((alien_bullets | state.aliens) & cannon)
    advanced, is_reached = _advance(state, cannon)

    # The lowest alien of the nearest column shoots.
    shoots = state.alien_shot_timer == 0
    shot = _nearest_alien(advanced.aliens, position)
    alien_bullets = alien_bullets | (shot & shoots.view(-1, 1, 1))
    alien_shot_timer = torch.where(
        shoots, ALIEN_SHOT_INTERVAL, state.alien_shot_timer
    )

    killed = advanced.aliens & bullets
    shot_timer = torch.where(fires, SHOT_COOL_DOWN, state.shot_timer)
    next_state = advanced._replace(
        position=position,
        bullets=bullets & ~killed,
        alien_bullets=alien_bullets,
        aliens=advanced.aliens & ~killed,
        move_timer=advanced.move_timer - 1,
        alien_shot_timer=alien_shot_timer - 1,
        shot_timer=(shot_timer - 1).clamp_min(0),
        terminal=is_hit | is_reached,
    )
    reward = killed.flatten(1).sum(-1)
    return finish(state, _next_wave(cfg, next_state), reward)


def _advance(
    state: EnvState, cannon: Bool[Tensor, "B 10 10"]
) -> tuple[EnvState, Bool[Tensor, "B"]]:
    """The state with the aliens moved where it is time to, and where they have won by it."""
    moves = state.move_timer == 0
    aliens = state.aliens
    n_aliens = aliens.flatten(1).sum(-1)
    at_edge = torch.where(
        state.direction < 0, aliens[:, :, 0].any(-1), aliens[:, :, 9].any(-1)
    )

    # At the edge they turn and come down by a row.
    sideways = _where(
        state.direction < 0, aliens.roll(-1, 2), aliens.roll(1, 2)
    )
    turns = moves & at_edge
    lands = turns & aliens[:, BOTTOM].any(-1)
    moved = _where(at_edge, aliens.roll(1, 1), sideways)
    aliens = _where(moves, moved, aliens)
    interval = torch.minimum(n_aliens, state.move_interval)
    advanced = state._replace(
        aliens=aliens,
        direction=torch.where(turns, -state.direction, state.direction),
        move_timer=torch.where(moves, interval, state.move_timer),
    )
    return advanced, lands | (moves & _any(aliens & cannon))


def _nearest_alien(
    aliens: Bool[Tensor, "B 10 10"], position: I64[Tensor, "B"]
) -> Bool[Tensor, "B 10 10"]:
    """The cell of the lowest alien in the column next to the cannon; of two columns the left one."""
    cells = torch.arange(SIZE, device=position.device)
    distance = (cells - position.unsqueeze(-1)).abs()
    order = 2 * distance + (cells > position.unsqueeze(-1)).to(torch.int64)
    has_alien = aliens.any(1)
    column = torch.where(has_alien, order, 10 * SIZE).argmin(-1)
    in_column = aliens & (cells == column.view(-1, 1, 1))
    row = torch.where(in_column.any(-1), cells, -1).amax(-1)
    return at(row, column)


def _next_wave(cfg: GameConfig, state: EnvState) -> EnvState:
    """The state with all aliens again, and faster, where the last one was shot."""
    is_cleared = ~_any(state.aliens)
    is_faster = is_cleared & (state.move_interval > MIN_MOVE_INTERVAL)
    interval = state.move_interval - is_faster.to(torch.int64)
    return state._replace(
        aliens=_where(is_cleared, _all_aliens(state.aliens), state.aliens),
        move_interval=interval if cfg.ramping else state.move_interval,
    )


def observe(
    cfg: GameConfig, world: NoWorld, state: EnvState
) -> F32[Tensor, "B 10 10 6"]:
    """Channels: cannon, aliens, aliens moving left, aliens moving right, bullets of the player, bullets of aliens."""
    bottom = torch.full_like(state.position, BOTTOM)
    is_leftward = (state.direction < 0).view(-1, 1, 1)
    return image(
        at(bottom, state.position),
        state.aliens,
        state.aliens & is_leftward,
        state.aliens & ~is_leftward,
        state.bullets,
        state.alien_bullets,
    )


def space_invaders(
    *,
    minimal_actions: bool = True,
    ramping: bool = True,
    sticky_probability: float = STICKY_PROBABILITY,
) -> AnyEnvironment:
    """Space Invaders of MinAtar; observations are images of 10 x 10 cells and 6 channels.

    Args:
      minimal_actions: nothing, left, right, fire; else all six actions.
      ramping: each wave of aliens moves faster.
      sticky_probability: that the last action of the episode is repeated.
    """
    cfg = GameConfig(
        actions=MINIMAL_ACTIONS if minimal_actions else ALL_ACTIONS,
        ramping=ramping,
        sticky_probability=sticky_probability,
    )
    return game(
        cfg, 6, reset=reset, step_functional=step_functional, observe=observe
    )
