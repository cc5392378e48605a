"""Seaquest of MinAtar, an environment of your own with many parts: `python examples/seaquest.py`.

A submarine shoots, rescues divers, and must surface for air. From any state, one step equals that of the package
`minatar` at equal random draws. `funcppo.envs.minatar` has what its games share.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import funcppo as fp
from funcppo.core import random
from funcppo.core.types import F32, I64, Bool
from funcppo.envs.minatar import (
    ALL_ACTIONS,
    LAST,
    SIZE,
    STICKY_PROBABILITY,
    GameConfig,
    accelerate,
    any_cell,
    block,
    count_down,
    direction,
    edge,
    fill,
    finish,
    first_free,
    game,
    image,
    is_action,
    offset,
    put,
    reload,
    shift,
    show,
    start,
    steer,
    walk,
)
from funcppo.interfaces import AnyEnvironment, NoWorld, Timestep
from funcppo.trainer import print_progress

MAX_OXYGEN = 200  # steps under water
MAX_DIVERS = 6  # on board

# An enemy comes in each step at most, and crosses the grid in 3 steps a cell then.
N_ENEMIES = 3 * SIZE
N_DIVERS = 3  # one in 30 steps, for 60 steps
N_BULLETS = 2  # one in 5 steps, for 9 steps


class Swimmers(NamedTuple):
    """Enemies or divers that cross the grid, in M slots without order."""

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
    """Player's submarine."""

    x: I64[Tensor, "B 1"]
    y: I64[Tensor, "B 1"]
    faces_right: Bool[Tensor, "B 1"]
    oxygen: I64[Tensor, "B 1"]
    n_divers: I64[Tensor, "B 1"]  # on board; -1 after six were brought up
    is_up: Bool[Tensor, "B 1"]  # at the surface since the last step
    shot_timer: I64[Tensor, "B 1"]


class Bullets(NamedTuple):
    """Bullets of the player, the older one first."""

    exists: Bool[Tensor, "B 2"]
    x: I64[Tensor, "B 2"]
    y: I64[Tensor, "B 2"]
    moves_right: Bool[Tensor, "B 2"]


class SeaquestTimers(NamedTuple):
    """Timers of when enemies and divers come, and of their speeds, in steps."""

    time: I64[Tensor, "B 1"]
    spawn_speed: I64[Tensor, "B 1"]
    enemy_spawn: I64[Tensor, "B 1"]
    diver_spawn: I64[Tensor, "B 1"]
    move_speed: I64[Tensor, "B 1"]
    ramp_index: I64[Tensor, "B 1"]


class SeaquestState(NamedTuple):
    """Player, swimmers, bullets and timers of each row."""

    player: Player
    bullets: Bullets
    enemies: Enemies
    # bullets of enemies, by the cells that they are in
    leftward: Bool[Tensor, "B 10 10"]
    rightward: Bool[Tensor, "B 10 10"]
    divers: Swimmers
    timers: SeaquestTimers
    terminal: Bool[Tensor, "B 1"]


def seaquest_reset(
    cfg: GameConfig, world: NoWorld, key: I64[Tensor, "B 2"]
) -> SeaquestState:
    """Build the state with the player alone, at the surface."""
    slot = {"exists": False, "x": 0, "y": 0, "moves_right": False}
    swimmer = slot | {"move_timer": 0, "birth": 0}
    swimmers = start(key, Swimmers, N_ENEMIES, **swimmer)
    sea = fill(key, False, SIZE, SIZE)
    player = start(
        key,
        Player,
        x=5,
        y=0,
        faces_right=False,
        oxygen=MAX_OXYGEN,
        n_divers=0,
        is_up=True,
        shot_timer=0,
    )
    timers = start(
        key,
        SeaquestTimers,
        time=0,
        spawn_speed=20,  # steps between two enemies
        enemy_spawn=20,
        diver_spawn=30,
        move_speed=5,  # steps that an enemy stays in a cell
        ramp_index=0,
    )

    return SeaquestState(
        player=player,
        bullets=start(key, Bullets, N_BULLETS, **slot),
        enemies=Enemies(swimmers, swimmers.exists, swimmers.x),
        leftward=sea,
        rightward=sea,
        divers=start(key, Swimmers, N_DIVERS, **swimmer),
        timers=timers,
        terminal=fill(key, False),
    )


def seaquest_step(
    cfg: GameConfig,
    world: NoWorld,
    state: SeaquestState,
    action: I64[Tensor, "B"],
    key: I64[Tensor, "B 2"],
) -> tuple[SeaquestState, Timestep]:
    """Move everything; return the state and the timestep.
    The reward is 1 for each enemy shot, and up to 10 for the oxygen left on surfacing with six divers.
    """
    return seaquest_transition(cfg, state, action, random.uniform(key, (5,)))


def seaquest_transition(
    cfg: GameConfig,
    state: SeaquestState,
    action: I64[Tensor, "B"],
    unit: F32[Tensor, "B 5"],
) -> tuple[SeaquestState, Timestep]:
    """Make a step, given uniform numbers for an enemy's direction, kind and line, and a diver's direction and line."""
    timers = state.timers
    from_left, kind, line, diver_from_left, diver_line = unit.unsqueeze(
        -1
    ).unbind(1)
    enemies = _spawn_enemy(state.enemies, timers, from_left, kind, line)
    divers = _add(
        state.divers,
        timers.diver_spawn == 0,
        diver_from_left,
        diver_line,
        5,
        timers.time,
    )[0]

    player, bullets = _act(cfg, state.player, state.bullets, action)
    bullets, enemies, n_shot = _move_bullets(bullets, enemies)
    divers, n_rescued = _move_divers(divers, player)
    player = player._replace(n_divers=player.n_divers + n_rescued)

    # Submarines move, then their bullets, then fish.
    is_submarine = enemies.is_submarine
    shooters = enemies.swimmers.exists & is_submarine
    speed = timers.move_speed
    swimmers, bullets, n_rammed, meets_submarine = _move_enemies(
        enemies.swimmers, is_submarine, bullets, player, speed
    )
    leftward, rightward, shot_timer, is_hit = _move_enemy_bullets(
        state, enemies._replace(swimmers=swimmers), shooters, player
    )
    swimmers, bullets, n_met, meets_fish = _move_enemies(
        swimmers, ~is_submarine, bullets, player, speed
    )

    is_lost = is_hit | meets_submarine | meets_fish | (player.oxygen <= 0)
    player, timers, is_drowned, bonus = _breathe(cfg, player, timers)
    next_state = SeaquestState(
        player=player,
        bullets=bullets,
        enemies=Enemies(swimmers, is_submarine, shot_timer),
        leftward=leftward,
        rightward=rightward,
        divers=divers,
        timers=timers,
        terminal=is_lost | is_drowned,
    )
    return finish(state, next_state, n_shot + n_rammed + n_met + bonus)


# Arrivals


def _add(
    swimmers: Swimmers,
    arrives: Bool[Tensor, "B 1"],
    from_left: F32[Tensor, "B 1"],
    line: F32[Tensor, "B 1"],
    move_timer: Tensor | int,
    time: I64[Tensor, "B 1"],
) -> tuple[Swimmers, Bool[Tensor, "B M"]]:
    """Put a newcomer at the edge, with direction and line from uniform numbers; return its slot, too."""
    x, moves_right = edge(from_left)
    is_new = first_free(swimmers.exists) & arrives
    born = (x, _line(line), moves_right, move_timer, time)
    return put(swimmers, is_new, True, *born), is_new


def _line(unit: F32[Tensor, "B 1"]) -> I64[Tensor, "B 1"]:
    return 1 + (unit * (SIZE - 2)).to(torch.int64)


def _spawn_enemy(
    enemies: Enemies,
    timers: SeaquestTimers,
    from_left: F32[Tensor, "B 1"],
    kind: F32[Tensor, "B 1"],
    line: F32[Tensor, "B 1"],
) -> Enemies:
    """Add a new enemy when due, unless an enemy of its line swims the other way."""
    swimmers = enemies.swimmers
    opposes = swimmers.exists & (swimmers.y == _line(line))
    opposes = opposes & (swimmers.moves_right != (from_left < 0.5))
    arrives = (timers.enemy_spawn == 0) & ~opposes.any(-1, True)
    swimmers, is_new = _add(
        swimmers, arrives, from_left, line, timers.move_speed, timers.time
    )
    return Enemies(
        swimmers=swimmers,
        is_submarine=torch.where(is_new, kind < 1 / 3, enemies.is_submarine),
        shot_timer=torch.where(is_new, 10, enemies.shot_timer),
    )


# Moves


def _act(
    cfg: GameConfig,
    player: Player,
    bullets: Bullets,
    action: I64[Tensor, "B"],
) -> tuple[Player, Bullets]:
    """Move the player or fire a bullet; return both."""
    fires = is_action(cfg, action, "f") & (player.shot_timer == 0)

    # A second bullet is younger than the first.
    first = bullets.exists[:, :1]
    is_new = fires & torch.cat([~first, first], -1)
    place = (player.x, player.y, player.faces_right)
    fired = put(bullets, is_new, True, *place)

    dx = offset(cfg, action, "lr")
    moved = player._replace(
        x=(player.x + dx).clamp(0, LAST),
        y=steer(cfg, action, player.y, "ud", 0, LAST - 1),
        faces_right=(player.faces_right | (dx > 0)) & (dx >= 0),
        shot_timer=reload(player.shot_timer, fires),
    )
    return moved, fired


def _oldest(swimmers: Swimmers, rows: Bool[Tensor, "B M"]) -> Tensor:
    """Return the mask of the first-born swimmer among those of `rows`."""
    birth = torch.where(rows, swimmers.birth, 2**62)  # later than all
    return rows & (birth == birth.amin(-1, keepdim=True))


def _move_bullets(
    bullets: Bullets, enemies: Enemies
) -> tuple[Bullets, Enemies, I64[Tensor, "B"]]:
    """Move the bullets by a cell; each removes an enemy that it meets, fish first. Also return the number removed."""
    flies = bullets.exists
    x, is_inside = walk(bullets.x, bullets.moves_right, flies)
    moving = (flies & is_inside, x, bullets.y)
    swimmers = enemies.swimmers
    left: list[Tensor] = []
    n_shot = torch.zeros_like(x[:, 0])
    for i in reversed(range(N_BULLETS)):
        exists, x_i, y_i = (value[:, i : i + 1] for value in moving)
        is_met = swimmers.exists & exists
        is_met = is_met & (swimmers.x == x_i) & (swimmers.y == y_i)
        fish = is_met & ~enemies.is_submarine
        has_fish = fish.any(-1, True)
        shot = _oldest(swimmers, torch.where(has_fish, fish, is_met))
        swimmers = swimmers._replace(exists=swimmers.exists & ~shot)
        left = [exists & ~is_met.any(-1, True), *left]
        n_shot = n_shot + is_met.any(-1)

    # The older one is first again, wherever it was.
    moved = bullets._replace(exists=torch.cat(left, -1), x=x)
    return _close_up(moved), enemies._replace(swimmers=swimmers), n_shot


def _close_up(bullets: Bullets) -> Bullets:
    """Move the bullet of the second slot to the first slot if that is empty."""
    swaps = ~bullets.exists[:, :1]
    return Bullets(*(torch.where(swaps, x.flip(-1), x) for x in bullets))


def _is_at(
    x: I64[Tensor, "B M"], swimmers: Swimmers, player: Player
) -> Bool[Tensor, "B M"]:
    return (x == player.x) & (swimmers.y == player.y)


def _are_together(
    x: I64[Tensor, "B M"],
    y: I64[Tensor, "B M"],
    other_x: I64[Tensor, "B K"],
    other_y: I64[Tensor, "B K"],
) -> Bool[Tensor, "B M K"]:
    """Return which of M things are in one cell with which of K others."""
    is_column = x.unsqueeze(-1) == other_x.unsqueeze(-2)
    return is_column & (y.unsqueeze(-1) == other_y.unsqueeze(-2))


def _count_younger(
    swimmers: Swimmers, others: Bool[Tensor, "B M M"]
) -> I64[Tensor, "B M"]:
    """Return how many of its others are younger than each swimmer."""
    birth = swimmers.birth
    is_younger = birth.unsqueeze(-2) > birth.unsqueeze(-1)
    return (is_younger & others).sum(-1)


def _move_divers(
    divers: Swimmers, player: Player
) -> tuple[Swimmers, I64[Tensor, "B 1"]]:
    """Move divers when due; return them and the number that came on board."""
    moves = divers.exists & (divers.move_timer == 0)
    x, is_inside = walk(divers.x, divers.moves_right, moves)
    meets = _is_at(divers.x, divers, player) | _is_at(x, divers, player)
    meets = meets & divers.exists

    # While there is room; the youngest first.
    n_before = _count_younger(divers, meets.unsqueeze(-2))
    boards = meets & (n_before < MAX_DIVERS - player.n_divers)
    moved = divers._replace(
        exists=divers.exists & is_inside & ~boards,
        x=x,
        move_timer=torch.where(moves, 5, divers.move_timer - 1),
    )
    return moved, boards.sum(-1, True)


def _move_enemies(
    swimmers: Swimmers,
    of_kind: Bool[Tensor, "B M"],
    bullets: Bullets,
    player: Player,
    move_speed: I64[Tensor, "B 1"],
) -> tuple[Swimmers, Bullets, I64[Tensor, "B"], Bool[Tensor, "B 1"]]:
    """Move enemies of one kind when due, some into bullets; return also how many were shot, and if the player was met.

    Returns:
      The enemies and bullets that are left, how many enemies were shot, and where the player is met.
    """
    active = swimmers.exists & of_kind
    moves = active & (swimmers.move_timer == 0)
    x, is_inside = walk(swimmers.x, swimmers.moves_right, moves)
    meets_after = moves & _is_at(x, swimmers, player)
    meets = (active & _is_at(swimmers.x, swimmers, player)) | meets_after

    # Of several that arrive in a cell with bullets, the youngest are shot; of several bullets, the oldest hit.
    y = swimmers.y
    arrives = moves & is_inside & ~meets_after
    at_bullet = _are_together(x, y, bullets.x, bullets.y)
    at_bullet = at_bullet & arrives.unsqueeze(-1) & bullets.exists.unsqueeze(-2)
    rivals = _are_together(x, y, x, y) & arrives.unsqueeze(-2)
    n_before = _count_younger(swimmers, rivals)
    is_shot = arrives & (n_before < at_bullet.sum(-1))

    shares_cell = (at_bullet[..., 0] & at_bullet[..., 1]).any(-1, True)
    rank = torch.cat([torch.zeros_like(shares_cell), shares_cell], -1)
    hits = at_bullet.sum(-2) > rank
    timer = torch.where(moves, move_speed, swimmers.move_timer - 1)
    left = swimmers._replace(
        exists=swimmers.exists & is_inside & ~is_shot,
        x=x,
        move_timer=torch.where(active, timer, swimmers.move_timer),
    )
    bullets = _close_up(bullets._replace(exists=bullets.exists & ~hits))
    return left, bullets, is_shot.sum(-1), meets.any(-1, True)


def _move_enemy_bullets(
    state: SeaquestState,
    enemies: Enemies,
    shooters: Bool[Tensor, "B M"],
    player: Player,
) -> tuple[Tensor, Tensor, I64[Tensor, "B M"], Bool[Tensor, "B 1"]]:
    """Fire submarines' bullets and move all by a cell; return them, the shot timers, and where the player is hit.

    Args:
      enemies: where they are after their move.
      shooters: submarines of before it, those that were just shot included.
    """
    swimmers = enemies.swimmers
    shoots = shooters & (enemies.shot_timer == 0)
    timer = torch.where(shoots, 10, enemies.shot_timer - 1)
    shot_timer = torch.where(shooters, timer, enemies.shot_timer)
    y, x, to_right = swimmers.y, swimmers.x, swimmers.moves_right
    leftward = state.leftward | show(y, x, shoots & ~to_right)
    rightward = state.rightward | show(y, x, shoots & to_right)

    next_leftward = shift(leftward, -1, 2)
    next_rightward = shift(rightward, 1, 2)
    flown = leftward | rightward | next_leftward | next_rightward
    is_hit = any_cell(flown & show(player.y, player.x))
    return next_leftward, next_rightward, shot_timer, is_hit


def _breathe(
    cfg: GameConfig, player: Player, timers: SeaquestTimers
) -> tuple[Player, SeaquestTimers, Bool[Tensor, "B 1"], I64[Tensor, "B"]]:
    """Return player and timers after the step, where the player surfaces without a diver, and the reward for six."""
    is_up = player.y == 0
    comes_up = is_up & ~player.is_up
    surfaces = comes_up & (player.n_divers != 0)
    is_full = surfaces & (player.n_divers == MAX_DIVERS)
    bonus = torch.where(is_full, player.oxygen * 10 // MAX_OXYGEN, 0)

    n_divers = torch.where(is_full, 0, player.n_divers)
    oxygen = torch.where(is_up, player.oxygen, player.oxygen - 1)
    after = player._replace(
        oxygen=torch.where(surfaces, MAX_OXYGEN, oxygen),
        n_divers=torch.where(surfaces, n_divers - 1, n_divers),
        is_up=is_up & (player.is_up | surfaces),
    )
    timers = timers._replace(
        time=timers.time + 1,
        enemy_spawn=count_down(timers.enemy_spawn, timers.spawn_speed),
        diver_spawn=count_down(timers.diver_spawn, 30),
    )
    # Enemies come sooner after each surfacing.
    if cfg.ramping:
        timers = accelerate(timers, surfaces, 2)
    return after, timers, comes_up & ~surfaces, bonus.flatten()


# Observation


def seaquest_observe(
    cfg: GameConfig, world: NoWorld, state: SeaquestState
) -> F32[Tensor, "B 10 10 10"]:
    """Return the ten channels [B, 10, 10, 10] of the image, 1 where a thing is. They are: front and back of the
    player, bullets, trails, enemies' bullets, fish, submarines, and three of divers.

    The last three are the oxygen that is left, the divers on board, and those in the sea.
    """
    player, divers, bullets = state.player, state.divers, state.bullets
    enemies, is_submarine = state.enemies.swimmers, state.enemies.is_submarine

    def show_swimmers(swimmers: Swimmers, of_kind: Tensor) -> Tensor:
        return show(swimmers.y, swimmers.x, swimmers.exists & of_kind)

    def show_trails(swimmers: Swimmers) -> Tensor:
        back = swimmers.x - direction(swimmers.moves_right)
        return show(swimmers.y, back, swimmers.exists)

    cells = torch.arange(SIZE, device=player.x.device)
    bottom = block(cells, (LAST, SIZE), (0, SIZE))
    n_lit = player.oxygen.clamp_min(0) * 10 // MAX_OXYGEN
    on_board = (cells >= LAST - player.n_divers) & (cells < LAST)
    return image(
        show(player.y, player.x),
        show(player.y, player.x - direction(player.faces_right)),
        show(bullets.y, bullets.x, bullets.exists),
        show_trails(enemies) | show_trails(divers),
        state.leftward | state.rightward,
        show_swimmers(enemies, ~is_submarine),
        show_swimmers(enemies, is_submarine),
        bottom & (cells < n_lit).unsqueeze(1),
        bottom & on_board.unsqueeze(1),
        show_swimmers(divers, divers.exists),
    )


def seaquest(
    *,
    minimal_actions: bool = True,
    ramping: bool = True,
    sticky_probability: float = STICKY_PROBABILITY,
) -> AnyEnvironment:
    """Build Seaquest of MinAtar; observations are images of 10 x 10 cells and 10 channels.

    Args:
      minimal_actions: all six actions, as without.
      ramping: enemies come and move faster after each visit of the surface.
      sticky_probability: that the last action of the episode is repeated.
    """
    return game(
        ALL_ACTIONS,
        minimal_actions,
        10,
        (seaquest_reset, seaquest_step, seaquest_observe),
        sticky_probability,
        ramping,
    )


def main() -> None:
    """Train for three updates, and print the mean return of the episodes that have ended."""
    network = fp.nets.cnn(then=fp.nets.mlp(64, activation="relu"))
    learner = fp.ppo(env=seaquest(), network=network, n_envs=16)
    fp.train(learner, 3 * 16 * 128, callbacks=[print_progress])


if __name__ == "__main__":
    main()
