"""Seaquest of MinAtar: a submarine shoots fish and submarines, rescues divers, and comes up for air."""

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

MAX_OXYGEN = 200  # steps under water
MAX_DIVERS = 6  # on board
ENEMY_SPAWN_SPEED = 20  # steps between two enemies, at first
DIVER_SPAWN_SPEED = 30  # steps between two divers
MOVE_SPEED = 5  # steps that an enemy stays in a cell, at first
MIN_MOVE_SPEED = 2
DIVER_MOVE_INTERVAL = 5
SHOT_COOL_DOWN = 5  # steps between two shots of the player
ENEMY_SHOT_INTERVAL = 10  # steps
SUBMARINE_PROBABILITY = 1 / 3  # of an enemy; the others are fish
BOTTOM = SIZE - 1

# An enemy comes in each step at most, and crosses the grid in 3 steps a cell then.
N_ENEMIES = 3 * SIZE
N_DIVERS = 3  # one in 30 steps, for 60 steps
N_BULLETS = 2  # one in 5 steps, for 9 steps
NEVER = 2**62  # later than all births


class Swimmers(NamedTuple):
    """What crosses the grid: enemies, or divers; M slots in no order."""

    exists: Bool[Tensor, "B M"]
    x: I64[Tensor, "B M"]
    y: I64[Tensor, "B M"]
    moves_right: Bool[Tensor, "B M"]
    move_timer: I64[Tensor, "B M"]
    birth: I64[
        Tensor, "B M"
    ]  # the step; of several in a cell, it says who is met first


class Enemies(NamedTuple):
    """Fish and submarines."""

    swimmers: Swimmers
    is_submarine: Bool[Tensor, "B M"]
    shot_timer: I64[Tensor, "B M"]  # of submarines


class Player(NamedTuple):
    """The player's submarine."""

    x: I64[Tensor, "B"]
    y: I64[Tensor, "B"]
    faces_right: Bool[Tensor, "B"]
    oxygen: I64[Tensor, "B"]
    n_divers: I64[Tensor, "B"]  # on board; -1 after six were brought up
    is_up: Bool[Tensor, "B"]  # at the surface since the last step
    shot_timer: I64[Tensor, "B"]


class Bullets(NamedTuple):
    """Bullets of the player, the older one first."""

    exists: Bool[Tensor, "B 2"]
    x: I64[Tensor, "B 2"]
    y: I64[Tensor, "B 2"]
    moves_right: Bool[Tensor, "B 2"]


class EnemyBullets(NamedTuple):
    """Bullets of enemies, by the cells that they are in."""

    leftward: Bool[Tensor, "B 10 10"]
    rightward: Bool[Tensor, "B 10 10"]


class Timers(NamedTuple):
    """When enemies and divers come, and how fast, in steps."""

    time: I64[Tensor, "B"]
    enemy_spawn_speed: I64[Tensor, "B"]
    enemy_spawn: I64[Tensor, "B"]
    diver_spawn: I64[Tensor, "B"]
    move_speed: I64[Tensor, "B"]
    n_ramps: I64[Tensor, "B"]


class EnvState(NamedTuple):
    """State of each row."""

    player: Player
    bullets: Bullets
    enemies: Enemies
    enemy_bullets: EnemyBullets
    divers: Swimmers
    timers: Timers
    terminal: Bool[Tensor, "B"]


def _no_swimmers(zero: I64[Tensor, "B"], n: int) -> Swimmers:
    empty = zero.unsqueeze(-1).expand(-1, n)
    never = empty.to(torch.bool)
    return Swimmers(never, empty, empty, never, empty, empty)


def reset(cfg: GameConfig, world: NoWorld, key: I64[Tensor, "B 2"]) -> EnvState:
    """The player alone, at the surface."""
    zero = torch.zeros_like(key[:, 0])
    never = zero.to(torch.bool)
    swimmers = _no_swimmers(zero, N_ENEMIES)
    slots = zero.unsqueeze(-1).expand(-1, N_BULLETS)
    sea = never.view(-1, 1, 1).expand(-1, SIZE, SIZE)

    return EnvState(
        player=Player(
            x=zero + 5,
            y=zero,
            faces_right=never,
            oxygen=zero + MAX_OXYGEN,
            n_divers=zero,
            is_up=~never,
            shot_timer=zero,
        ),
        bullets=Bullets(
            slots.to(torch.bool), slots, slots, slots.to(torch.bool)
        ),
        enemies=Enemies(swimmers, swimmers.exists, swimmers.x),
        enemy_bullets=EnemyBullets(sea, sea),
        divers=_no_swimmers(zero, N_DIVERS),
        timers=Timers(
            time=zero,
            enemy_spawn_speed=zero + ENEMY_SPAWN_SPEED,
            enemy_spawn=zero + ENEMY_SPAWN_SPEED,
            diver_spawn=zero + DIVER_SPAWN_SPEED,
            move_speed=zero + MOVE_SPEED,
            n_ramps=zero,
        ),
        terminal=never,
    )


def step_functional(
    cfg: GameConfig,
    world: NoWorld,
    state: EnvState,
    action: I64[Tensor, "B"],
    key: I64[Tensor, "B 2"],
) -> tuple[EnvState, Timestep]:
    """Move everything; the reward is 1 for each enemy that is shot, and up to 10 for air where six divers come up."""
    return transition(cfg, state, action, random.uniform(key, (5,)))


def transition(
    cfg: GameConfig,
    state: EnvState,
    action: I64[Tensor, "B"],
    unit: F32[Tensor, "B 5"],
) -> tuple[EnvState, Timestep]:
    """The step, given uniform numbers: direction, kind and line of an enemy; direction and line of a diver."""
    timers = state.timers
    enemies = _spawn_enemy(state.enemies, timers, unit[:, :3])
    divers = _spawn_diver(state.divers, timers, unit[:, 3:])

    player, bullets = _act(cfg, state.player, state.bullets, action)
    bullets, enemies, n_shot = _move_bullets(bullets, enemies)
    divers, n_rescued = _move_divers(divers, player)
    player = player._replace(n_divers=player.n_divers + n_rescued)

    # Submarines move, then their bullets, then fish.
    is_submarine = enemies.is_submarine
    shooters = enemies.swimmers.exists & is_submarine
    submarines = _move_enemies(
        enemies.swimmers, is_submarine, bullets, player, timers.move_speed
    )
    enemy_bullets, shot_timer, is_hit = _move_enemy_bullets(
        state.enemy_bullets,
        enemies._replace(swimmers=submarines.swimmers),
        shooters,
        player,
    )
    fish = _move_enemies(
        submarines.swimmers,
        ~is_submarine,
        submarines.bullets,
        player,
        timers.move_speed,
    )

    is_lost = is_hit | submarines.is_player_met | fish.is_player_met
    is_lost = is_lost | (player.oxygen <= 0)
    player, timers, is_drowned, bonus = _breathe(cfg, player, timers)
    next_state = EnvState(
        player=player,
        bullets=fish.bullets,
        enemies=Enemies(fish.swimmers, is_submarine, shot_timer),
        enemy_bullets=enemy_bullets,
        divers=divers,
        timers=timers,
        terminal=is_lost | is_drowned,
    )
    n_shot = n_shot + submarines.n_shot + fish.n_shot
    return finish(state, next_state, n_shot + bonus)


# Arrivals


def _count_down(timer: Tensor, interval: Tensor | int) -> Tensor:
    """A timer of something that happens whenever it is 0."""
    started = torch.where(timer == 0, interval, timer)
    return (started - 1).clamp_min(0)


def _first_free(
    swimmers: Swimmers, arrives: Bool[Tensor, "B"]
) -> Bool[Tensor, "B M"]:
    """The slot of a newcomer, where there is one."""
    free = ~swimmers.exists
    is_first = free & (free.cumsum(-1) == 1)
    return is_first & arrives.unsqueeze(-1)


def _add(
    swimmers: Swimmers,
    is_new: Bool[Tensor, "B M"],
    direction: F32[Tensor, "B"],
    line: F32[Tensor, "B"],
    move_timer: Tensor,
    time: I64[Tensor, "B"],
) -> Swimmers:
    """Put a newcomer at the edge, by uniform numbers for its direction and its line."""
    moves_right = direction < 0.5
    x = torch.where(moves_right, 0, BOTTOM)
    y = 1 + (line * (SIZE - 2)).to(torch.int64)
    exists = torch.ones_like(moves_right)
    values = (exists, x, y, moves_right, move_timer, time)
    return Swimmers(
        *(
            torch.where(is_new, value.unsqueeze(-1), old)
            for value, old in zip(values, swimmers)
        )
    )


def _spawn_enemy(
    enemies: Enemies, timers: Timers, unit: F32[Tensor, "B 3"]
) -> Enemies:
    """A new enemy, unless one of its line swims the other way."""
    swimmers = enemies.swimmers
    moves_right = (unit[:, 0] < 0.5).unsqueeze(-1)
    line = 1 + (unit[:, 2] * (SIZE - 2)).to(torch.int64)
    opposes = swimmers.exists & (swimmers.y == line.unsqueeze(-1))
    opposes = opposes & (swimmers.moves_right != moves_right)
    arrives = (timers.enemy_spawn == 0) & ~opposes.any(-1)

    is_new = _first_free(swimmers, arrives)
    is_submarine = (unit[:, 1] < SUBMARINE_PROBABILITY).unsqueeze(-1)
    return Enemies(
        swimmers=_add(
            swimmers,
            is_new,
            unit[:, 0],
            unit[:, 2],
            timers.move_speed,
            timers.time,
        ),
        is_submarine=torch.where(is_new, is_submarine, enemies.is_submarine),
        shot_timer=torch.where(is_new, ENEMY_SHOT_INTERVAL, enemies.shot_timer),
    )


def _spawn_diver(
    divers: Swimmers, timers: Timers, unit: F32[Tensor, "B 2"]
) -> Swimmers:
    is_new = _first_free(divers, timers.diver_spawn == 0)
    move_timer = torch.full_like(timers.time, DIVER_MOVE_INTERVAL)
    return _add(divers, is_new, unit[:, 0], unit[:, 1], move_timer, timers.time)


# Moves


def _act(
    cfg: GameConfig,
    player: Player,
    bullets: Bullets,
    action: I64[Tensor, "B"],
) -> tuple[Player, Bullets]:
    """The player moved, or a bullet fired."""
    does = {letter: is_action(cfg, action, letter) for letter in "lurdf"}
    dx = does["r"].to(torch.int64) - does["l"].to(torch.int64)
    dy = does["d"].to(torch.int64) - does["u"].to(torch.int64)
    fires = does["f"] & (player.shot_timer == 0)

    # A second bullet is younger than the first.
    first = bullets.exists[:, 0]
    is_new = fires.unsqueeze(-1) & torch.stack([~first, first], -1)
    fired = Bullets(
        exists=bullets.exists | is_new,
        x=torch.where(is_new, player.x.unsqueeze(-1), bullets.x),
        y=torch.where(is_new, player.y.unsqueeze(-1), bullets.y),
        moves_right=torch.where(
            is_new, player.faces_right.unsqueeze(-1), bullets.moves_right
        ),
    )
    shot_timer = torch.where(fires, SHOT_COOL_DOWN, player.shot_timer)
    moved = player._replace(
        x=(player.x + dx).clamp(0, BOTTOM),
        y=(player.y + dy).clamp(0, BOTTOM - 1),
        faces_right=(player.faces_right | does["r"]) & ~does["l"],
        shot_timer=(shot_timer - 1).clamp_min(0),
    )
    return moved, fired


def _oldest(swimmers: Swimmers, rows: Bool[Tensor, "B M"]) -> Tensor:
    """Of the swimmers that `rows` names, the one born first."""
    birth = torch.where(rows, swimmers.birth, NEVER)
    return rows & (birth == birth.amin(-1, keepdim=True))


def _move_bullets(
    bullets: Bullets, enemies: Enemies
) -> tuple[Bullets, Enemies, I64[Tensor, "B"]]:
    """The bullets moved by a cell; each takes an enemy with it, a fish rather than a submarine. And how many."""
    x = bullets.x + torch.where(bullets.moves_right, 1, -1)
    is_inside = (x >= 0) & (x < SIZE)
    flies = bullets.exists & is_inside
    swimmers = enemies.swimmers
    left: list[Tensor] = []
    n_shot = torch.zeros_like(x[:, 0])
    for i in reversed(range(N_BULLETS)):
        is_met = swimmers.exists & flies[:, i : i + 1]
        is_met = is_met & (swimmers.x == x[:, i : i + 1])
        is_met = is_met & (swimmers.y == bullets.y[:, i : i + 1])
        fish = is_met & ~enemies.is_submarine
        has_fish = fish.any(-1, keepdim=True)
        shot = _oldest(swimmers, torch.where(has_fish, fish, is_met))
        swimmers = swimmers._replace(exists=swimmers.exists & ~shot)
        left.append(flies[:, i] & ~is_met.any(-1))
        n_shot = n_shot + is_met.any(-1).to(torch.int64)

    # The older one is first again, wherever it was.
    exists = torch.stack(left[::-1], -1)
    moved = bullets._replace(exists=exists, x=x)
    return _close_up(moved), enemies._replace(swimmers=swimmers), n_shot


def _close_up(bullets: Bullets) -> Bullets:
    """The bullets with the first slot filled, if there is one."""
    swaps = ~bullets.exists[:, :1]
    return Bullets(*(torch.where(swaps, x.flip(-1), x) for x in bullets))


def _swim(
    swimmers: Swimmers, moves: Bool[Tensor, "B M"]
) -> tuple[I64[Tensor, "B M"], Bool[Tensor, "B M"]]:
    """Where swimmers are once some have moved by a cell, and which are still on the grid."""
    x = swimmers.x + torch.where(swimmers.moves_right, 1, -1)
    x = torch.where(moves, x, swimmers.x)
    return x, (x >= 0) & (x < SIZE)


def _is_at(
    x: I64[Tensor, "B M"], swimmers: Swimmers, player: Player
) -> Bool[Tensor, "B M"]:
    is_column = x == player.x.unsqueeze(-1)
    return is_column & (swimmers.y == player.y.unsqueeze(-1))


def _move_divers(
    divers: Swimmers, player: Player
) -> tuple[Swimmers, I64[Tensor, "B"]]:
    """The divers moved where it is time to, and how many came on board."""
    moves = divers.exists & (divers.move_timer == 0)
    x, is_inside = _swim(divers, moves)
    meets = _is_at(divers.x, divers, player) | _is_at(x, divers, player)
    meets = meets & divers.exists

    # While there is room; the youngest first.
    is_younger = divers.birth.unsqueeze(-2) > divers.birth.unsqueeze(-1)
    n_before = (is_younger & meets.unsqueeze(-2)).sum(-1)
    n_free = (MAX_DIVERS - player.n_divers).unsqueeze(-1)
    boards = meets & (n_before < n_free)
    moved = divers._replace(
        exists=divers.exists & is_inside & ~boards,
        x=x,
        move_timer=torch.where(
            moves, DIVER_MOVE_INTERVAL, divers.move_timer - 1
        ),
    )
    return moved, boards.sum(-1)


class _EnemyMoves(NamedTuple):
    """What moving enemies comes to."""

    swimmers: Swimmers
    bullets: Bullets
    n_shot: I64[Tensor, "B"]
    is_player_met: Bool[Tensor, "B"]


def _move_enemies(
    swimmers: Swimmers,
    of_kind: Bool[Tensor, "B M"],
    bullets: Bullets,
    player: Player,
    move_speed: I64[Tensor, "B"],
) -> _EnemyMoves:
    """Enemies of a kind moved where it is time to, some of them into bullets."""
    active = swimmers.exists & of_kind
    moves = active & (swimmers.move_timer == 0)
    x, is_inside = _swim(swimmers, moves)
    meets_before = active & _is_at(swimmers.x, swimmers, player)
    meets_after = moves & _is_at(x, swimmers, player)

    # Of several that arrive in a cell with bullets, the youngest are shot; of several bullets, the oldest hit.
    arrives = moves & is_inside & ~meets_after
    at_bullet = x.unsqueeze(-1) == bullets.x.unsqueeze(-2)
    at_bullet = at_bullet & (
        swimmers.y.unsqueeze(-1) == bullets.y.unsqueeze(-2)
    )
    at_bullet = at_bullet & arrives.unsqueeze(-1) & bullets.exists.unsqueeze(-2)
    is_younger = swimmers.birth.unsqueeze(-2) > swimmers.birth.unsqueeze(-1)
    in_cell = x.unsqueeze(-2) == x.unsqueeze(-1)
    in_cell = in_cell & (swimmers.y.unsqueeze(-2) == swimmers.y.unsqueeze(-1))
    n_before = (is_younger & in_cell & arrives.unsqueeze(-2)).sum(-1)
    is_shot = arrives & (n_before < at_bullet.sum(-1))

    shares_cell = (at_bullet[..., 0] & at_bullet[..., 1]).any(-1)
    rank = torch.stack([torch.zeros_like(shares_cell), shares_cell], -1)
    hits = at_bullet.sum(-2) > rank.to(torch.int64)
    timer = torch.where(
        moves, move_speed.unsqueeze(-1), swimmers.move_timer - 1
    )
    return _EnemyMoves(
        swimmers=swimmers._replace(
            exists=swimmers.exists & is_inside & ~is_shot,
            x=x,
            move_timer=torch.where(active, timer, swimmers.move_timer),
        ),
        bullets=_close_up(bullets._replace(exists=bullets.exists & ~hits)),
        n_shot=is_shot.sum(-1),
        is_player_met=(meets_before | meets_after).any(-1),
    )


def _move_enemy_bullets(
    bullets: EnemyBullets,
    enemies: Enemies,
    shooters: Bool[Tensor, "B M"],
    player: Player,
) -> tuple[EnemyBullets, I64[Tensor, "B M"], Bool[Tensor, "B"]]:
    """New bullets of submarines, all bullets moved by a cell, the timers of shots, and where the player is hit.

    Args:
      enemies: where they are after their move.
      shooters: submarines of before it, those that were just shot included.
    """
    swimmers = enemies.swimmers
    shoots = shooters & (enemies.shot_timer == 0)
    timer = torch.where(shoots, ENEMY_SHOT_INTERVAL, enemies.shot_timer - 1)
    shot_timer = torch.where(shooters, timer, enemies.shot_timer)
    cells = at(swimmers.y, swimmers.x) & shoots.unsqueeze(-1).unsqueeze(-1)
    to_right = swimmers.moves_right.unsqueeze(-1).unsqueeze(-1)
    rightward = bullets.rightward | (cells & to_right).any(1)
    leftward = bullets.leftward | (cells & ~to_right).any(1)

    cell = at(player.y, player.x)
    edge = torch.zeros_like(leftward[:, :, :1])
    moved = EnemyBullets(
        leftward=torch.cat([leftward[:, :, 1:], edge], -1),
        rightward=torch.cat([edge, rightward[:, :, :-1]], -1),
    )
    flown = leftward | rightward | moved.leftward | moved.rightward
    return moved, shot_timer, (flown & cell).flatten(1).any(-1)


def _breathe(
    cfg: GameConfig, player: Player, timers: Timers
) -> tuple[Player, Timers, Bool[Tensor, "B"], I64[Tensor, "B"]]:
    """Player and timers after the step, where the player comes up without a diver, and the reward for six."""
    is_up = player.y == 0
    comes_up = is_up & ~player.is_up
    surfaces = comes_up & (player.n_divers != 0)
    is_full = surfaces & (player.n_divers == MAX_DIVERS)
    bonus = torch.where(is_full, player.oxygen * 10 // MAX_OXYGEN, 0)

    n_divers = torch.where(is_full, 0, player.n_divers)
    oxygen = torch.where(is_up, player.oxygen, player.oxygen - 1)
    after = player._replace(
        oxygen=torch.where(surfaces, MAX_OXYGEN, oxygen),
        n_divers=n_divers - surfaces.to(torch.int64),
        is_up=is_up & (player.is_up | surfaces),
    )
    timers = timers._replace(
        time=timers.time + 1,
        enemy_spawn=_count_down(timers.enemy_spawn, timers.enemy_spawn_speed),
        diver_spawn=_count_down(timers.diver_spawn, DIVER_SPAWN_SPEED),
    )
    if cfg.ramping:
        timers = _accelerate(timers, surfaces)
    return after, timers, comes_up & (player.n_divers == 0), bonus


def _accelerate(timers: Timers, surfaces: Bool[Tensor, "B"]) -> Timers:
    """Make enemies come faster after each visit of the surface, and move faster after every second one."""
    can_spawn_faster = timers.enemy_spawn_speed > 1
    can_move_faster = timers.move_speed > MIN_MOVE_SPEED
    ramps = surfaces & (can_spawn_faster | can_move_faster)
    is_odd = timers.n_ramps % 2 == 1
    moves_faster = ramps & can_move_faster & is_odd
    spawns_faster = ramps & can_spawn_faster
    return timers._replace(
        enemy_spawn_speed=timers.enemy_spawn_speed
        - spawns_faster.to(torch.int64),
        move_speed=timers.move_speed - moves_faster.to(torch.int64),
        n_ramps=timers.n_ramps + ramps.to(torch.int64),
    )


# Observation


def _cells(
    swimmers: Swimmers, rows: Bool[Tensor, "B M"], behind: bool = False
) -> Bool[Tensor, "B 10 10"]:
    """The cells that some swimmers are in, or those behind them."""
    back = torch.where(swimmers.moves_right, -1, 1)
    x = swimmers.x + back if behind else swimmers.x
    is_seen = (swimmers.exists & rows).unsqueeze(-1).unsqueeze(-1)
    return (at(swimmers.y, x) & is_seen).any(1)


def observe(
    cfg: GameConfig, world: NoWorld, state: EnvState
) -> F32[Tensor, "B 10 10 10"]:
    """Channels: front and back of the player, bullets, trails, enemies' bullets, fish, submarines, three of divers.

    The last three are the oxygen that is left, the divers on board, and those in the sea.
    """
    player, divers = state.player, state.divers
    enemies, is_submarine = state.enemies.swimmers, state.enemies.is_submarine
    everyone = torch.ones_like(is_submarine)
    all_divers = torch.ones_like(divers.exists)
    bullets = at(state.bullets.y, state.bullets.x)
    bullets = bullets & state.bullets.exists.unsqueeze(-1).unsqueeze(-1)

    cells = torch.arange(SIZE, device=player.x.device)
    n_lit = player.oxygen.clamp_min(0) * 10 // MAX_OXYGEN
    bottom = (cells == BOTTOM).view(1, -1, 1)
    oxygen = bottom & (cells < n_lit.view(-1, 1, 1))
    on_board = bottom & (cells >= BOTTOM - player.n_divers.view(-1, 1, 1))
    trails = _cells(enemies, everyone, behind=True)
    return image(
        at(player.y, player.x),
        at(player.y, player.x + torch.where(player.faces_right, -1, 1)),
        bullets.any(1),
        trails | _cells(divers, all_divers, behind=True),
        state.enemy_bullets.leftward | state.enemy_bullets.rightward,
        _cells(enemies, ~is_submarine),
        _cells(enemies, is_submarine),
        oxygen,
        on_board & (cells < BOTTOM),
        _cells(divers, all_divers),
    )


def seaquest(
    *,
    minimal_actions: bool = True,
    ramping: bool = True,
    sticky_probability: float = STICKY_PROBABILITY,
) -> AnyEnvironment:
    """Seaquest of MinAtar; observations are images of 10 x 10 cells and 10 channels.

    Args:
      minimal_actions: all six actions, as without.
      ramping: enemies come and move faster after each visit of the surface.
      sticky_probability: that the last action of the episode is repeated.
    """
    cfg = GameConfig(
        actions=ALL_ACTIONS,
        ramping=ramping,
        sticky_probability=sticky_probability,
    )
    return game(
        cfg, 10, reset=reset, step_functional=step_functional, observe=observe
    )
