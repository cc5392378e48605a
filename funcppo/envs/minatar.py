"""The games of MinAtar: Asterix, Breakout, Freeway, Seaquest and Space Invaders, on a field of 10 x 10 cells.

From any state, one step equals that of the package `minatar` at equal random draws. A game is a state, `reset`, a step
and `observe`, an image with one channel for each kind of thing; what all games share comes first.

Source: Young & Tian 2019, "MinAtar: an Atari-inspired testbed for thorough and reproducible reinforcement learning
experiments", arXiv:1903.03176.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcppo.core import random, tree
from funcppo.core.settings import UnitInterval, check_fields
from funcppo.core.types import F32, I64, Bool
from funcppo.envs.wrappers import sticky_actions
from funcppo.interfaces import (
    AnyEnvironment,
    Environment,
    EnvironmentSpec,
    NoWorld,
    Timestep,
)

SIZE = 10  # cells of a side
ALL_ACTIONS = "nlurdf"  # nothing, left, up, right, down, fire
STICKY_PROBABILITY = 0.1  # MinAtar's


@dataclass(frozen=True, kw_only=True, slots=True)
class GameConfig:
    """Settings of a game."""

    # Letters of the actions, of `ALL_ACTIONS`; the number of an action is the place of its letter.
    actions: str = ALL_ACTIONS
    ramping: bool = True  # the game becomes faster with time, where it can
    # probability that the last action is repeated
    sticky_probability: UnitInterval = STICKY_PROBABILITY

    __post_init__ = check_fields


def is_action(
    cfg: GameConfig, action: I64[Tensor, "B"], letter: str
) -> Bool[Tensor, "B"]:
    """Return which rows take the action of a letter; none if the action set is without it."""
    return action == cfg.actions.find(letter)


def offset(
    cfg: GameConfig, action: I64[Tensor, "B"], backward: str, forward: str
) -> I64[Tensor, "B"]:
    """Return the number of cells by which each row moves along an axis: -1, 0 or 1."""
    moves = is_action(cfg, action, forward).to(torch.int64)
    return moves - is_action(cfg, action, backward).to(torch.int64)


def at(
    y: I64[Tensor, "B ..."], x: I64[Tensor, "B ..."]
) -> Bool[Tensor, "B ... 10 10"]:
    """Return maps that are true in one cell each; all false where the cell is off the grid."""
    cells = torch.arange(SIZE, device=x.device)
    is_row = y.unsqueeze(-1) == cells
    is_column = x.unsqueeze(-1) == cells
    return is_row.unsqueeze(-1) & is_column.unsqueeze(-2)


def show(
    y: I64[Tensor, "B M"], x: I64[Tensor, "B M"], is_seen: Bool[Tensor, "B M"]
) -> Bool[Tensor, "B 10 10"]:
    """Return the map [B, 10, 10] of the cells of those of M things that are seen."""
    return (at(y, x) & is_seen.unsqueeze(-1).unsqueeze(-1)).any(1)


def any_cell(cells: Bool[Tensor, "B 10 10"]) -> Bool[Tensor, "B"]:
    """Return whether each row's map is true anywhere."""
    return cells.flatten(1).any(-1)


def lanes(x: I64[Tensor, "B M"]) -> I64[Tensor, "B M"]:
    """Return the grid rows of M things, one in each row from the second on."""
    return (1 + torch.arange(x.shape[-1], device=x.device)).expand_as(x)


def walk(
    x: I64[Tensor, "B M"],
    moves_right: Bool[Tensor, "B M"],
    moves: Bool[Tensor, "B ..."],
) -> tuple[I64[Tensor, "B M"], Bool[Tensor, "B M"]]:
    """Move some things by a cell; return the new columns, and which things are still on the grid."""
    x = torch.where(moves, x + torch.where(moves_right, 1, -1), x)
    return x, (x >= 0) & (x < SIZE)


def put(things: Any, is_new: Bool[Tensor, "B M"], *values: Any) -> Any:
    """Put a newcomer in some slots of things; `values` are its fields in order, [B, 1] or numbers."""
    pairs = zip(values, things)
    return type(things)(
        *(torch.where(is_new, value, old) for value, old in pairs)
    )


def shorten(
    interval: I64[Tensor, "B"], ramps: Bool[Tensor, "B"], minimum: int
) -> I64[Tensor, "B"]:
    """Shorten the interval by a step in some rows, down to a minimum."""
    return interval - (ramps & (interval > minimum)).to(torch.int64)


def image(*channels: Bool[Tensor, "B 10 10"]) -> F32[Tensor, "B 10 10 F"]:
    """Return the observation [B, 10, 10, F]: one channel for each map, 1 where it is true."""
    return torch.stack(channels, -1).to(torch.float32)


def finish(state: Any, next_state: Any, reward: Tensor) -> tuple[Any, Timestep]:
    """Return the result of a step, with rows that had finished before unchanged. States have a field `terminal`."""
    active = ~state.terminal
    kept = tree.where(active, next_state, state)
    timestep = Timestep(
        reward=torch.where(active, reward, 0).to(torch.float32),
        terminated=kept.terminal,
        truncated=torch.zeros_like(kept.terminal),
    )
    return kept, timestep


def game(
    actions: str,
    n_channels: int,
    functions: tuple[Callable[..., Any], ...],
    sticky_probability: float,
    ramping: bool = True,
) -> AnyEnvironment:
    """Build a game, with sticky actions if their probability is above 0.

    Args:
      n_channels: of the observation.
      functions: `reset`, `step_functional` and `observe`.
    """
    cfg = GameConfig(
        actions=actions, ramping=ramping, sticky_probability=sticky_probability
    )
    reset, step_functional, observe = functions
    env: AnyEnvironment = Environment(
        cfg=cfg,
        reset=reset,
        step_functional=step_functional,
        observe=observe,
        truncates=False,
        spec=EnvironmentSpec(
            observation_size=SIZE * SIZE * n_channels,
            observation_shape=(SIZE, SIZE, n_channels),
            action_size=len(actions),
        ),
    )
    if sticky_probability == 0.0:
        return env
    return sticky_actions(env, sticky_probability)


# Asterix: collect gold and avoid enemies, which cross the field ever faster.


class Entities(NamedTuple):
    """Entities that cross the field; slot i is in line i + 1."""

    exists: Bool[Tensor, "B 8"]
    x: I64[Tensor, "B 8"]
    moves_right: Bool[Tensor, "B 8"]
    is_gold: Bool[Tensor, "B 8"]


class AsterixTimers(NamedTuple):
    """Timers of when entities come and move, in steps."""

    spawn_speed: I64[Tensor, "B"]
    spawn: I64[Tensor, "B"]
    move_speed: I64[Tensor, "B"]
    move: I64[Tensor, "B"]
    ramp: I64[Tensor, "B"]
    ramp_index: I64[Tensor, "B"]


class AsterixState(NamedTuple):
    """Player, entities and timers of each row."""

    player_y: I64[Tensor, "B"]
    player_x: I64[Tensor, "B"]
    entities: Entities
    timers: AsterixTimers
    terminal: Bool[Tensor, "B"]


def asterix_reset(
    cfg: GameConfig, world: NoWorld, key: I64[Tensor, "B 2"]
) -> AsterixState:
    """Build the state with the player in the middle of an empty field."""
    zero = torch.zeros_like(key[:, 0])
    empty = zero.unsqueeze(-1).expand(-1, 8)  # slots, one a line
    never = empty.to(torch.bool)
    return AsterixState(
        player_y=zero + 5,
        player_x=zero + 5,
        entities=Entities(never, empty, never, never),
        timers=AsterixTimers(
            spawn_speed=zero + 10,  # steps between two entities
            spawn=zero + 10,
            move_speed=zero + 5,  # steps between two moves of the entities
            move=zero + 5,
            ramp=zero + 100,  # steps between two accelerations
            ramp_index=zero,
        ),
        terminal=zero.to(torch.bool),
    )


def asterix_step(
    cfg: GameConfig,
    world: NoWorld,
    state: AsterixState,
    action: I64[Tensor, "B"],
    key: I64[Tensor, "B 2"],
) -> tuple[AsterixState, Timestep]:
    """Move the player and the entities; the reward is 1 for gold."""
    return asterix_transition(cfg, state, action, random.uniform(key, (3,)))


def asterix_transition(
    cfg: GameConfig,
    state: AsterixState,
    action: I64[Tensor, "B"],
    unit: F32[Tensor, "B 3"],
) -> tuple[AsterixState, Timestep]:
    """Make a step, given uniform numbers for direction, kind and line of an entity that comes."""
    timers = state.timers
    spawns = timers.spawn == 0
    entities = _spawn(state.entities, spawns, unit)
    spawn_timer = torch.where(spawns, timers.spawn_speed, timers.spawn)

    player_x = state.player_x + offset(cfg, action, "l", "r")
    player_x = player_x.clamp(0, SIZE - 1)
    player_y = state.player_y + offset(cfg, action, "u", "d")
    player_y = player_y.clamp(1, SIZE - 2)

    # The player meets entities before they move and after it.
    entities, gold_before, dies_before = _meet(entities, player_y, player_x)
    moves = timers.move == 0
    x, is_inside = walk(entities.x, entities.moves_right, moves.unsqueeze(-1))
    entities = entities._replace(exists=entities.exists & is_inside, x=x)
    entities, gold_after, dies_after = _meet(entities, player_y, player_x)
    move_timer = torch.where(moves, timers.move_speed, timers.move)

    timers = timers._replace(spawn=spawn_timer - 1, move=move_timer - 1)
    next_state = AsterixState(
        player_y=player_y,
        player_x=player_x,
        entities=entities,
        timers=_accelerate_asterix(timers) if cfg.ramping else timers,
        terminal=dies_before | dies_after,
    )
    return finish(state, next_state, gold_before + gold_after)


def _spawn(
    entities: Entities, spawns: Bool[Tensor, "B"], unit: F32[Tensor, "B 3"]
) -> Entities:
    """Put an entity at the edge of a random free line; nothing if no line is free."""
    free = ~entities.exists
    n_free = free.sum(-1)
    chosen = 1 + (unit[:, 2] * n_free).to(torch.int64)
    is_chosen = free & (free.cumsum(-1) == chosen.unsqueeze(-1))
    is_new = is_chosen & spawns.unsqueeze(-1)

    moves_right = (unit[:, 0] < 0.5).unsqueeze(-1)
    is_gold = (unit[:, 1] < 1 / 3).unsqueeze(-1)
    x = torch.where(moves_right, 0, SIZE - 1)
    return put(entities, is_new, True, x, moves_right, is_gold)


def _meet(
    entities: Entities, player_y: I64[Tensor, "B"], player_x: I64[Tensor, "B"]
) -> tuple[Entities, I64[Tensor, "B"], Bool[Tensor, "B"]]:
    """Return the entities left, the gold collected, and whether the player dies, for each row."""
    is_met = (
        entities.exists
        & (entities.x == player_x.unsqueeze(-1))
        & (lanes(entities.x) == player_y.unsqueeze(-1))
    )
    gold = is_met & entities.is_gold
    left = entities._replace(exists=entities.exists & ~gold)
    return left, gold.sum(-1), (is_met & ~entities.is_gold).any(-1)


def _accelerate_asterix(timers: AsterixTimers) -> AsterixTimers:
    """Shorten the intervals in rows whose ramp timer has run out."""
    can_ramp = (timers.spawn_speed > 1) | (timers.move_speed > 1)
    ramps = can_ramp & (timers.ramp < 0)
    is_odd = timers.ramp_index % 2 == 1
    ramp = torch.where(can_ramp, timers.ramp - 1, timers.ramp)
    return timers._replace(
        spawn_speed=shorten(timers.spawn_speed, ramps, 1),
        move_speed=shorten(timers.move_speed, ramps & is_odd, 1),
        ramp=torch.where(ramps, 100, ramp),
        ramp_index=timers.ramp_index + ramps.to(torch.int64),
    )


def asterix_observe(
    cfg: GameConfig, world: NoWorld, state: AsterixState
) -> F32[Tensor, "B 10 10 4"]:
    """Return the channels: player, enemies, trails, gold."""
    exists, x, moves_right, is_gold = state.entities
    line = lanes(x)
    return image(
        at(state.player_y, state.player_x),
        show(line, x, exists & ~is_gold),
        show(line, x - torch.where(moves_right, 1, -1), exists),
        show(line, x, exists & is_gold),
    )


def asterix(
    *,
    minimal_actions: bool = True,
    ramping: bool = True,
    sticky_probability: float = STICKY_PROBABILITY,
) -> AnyEnvironment:
    """Build Asterix of MinAtar; observations are images of 10 x 10 cells and 4 channels.

    Args:
      minimal_actions: nothing and the four moves; else all six actions.
      ramping: entities come and move ever faster.
      sticky_probability: that the last action of the episode is repeated.
    """
    return game(
        "nlurd" if minimal_actions else ALL_ACTIONS,
        4,
        (asterix_reset, asterix_step, asterix_observe),
        sticky_probability,
        ramping,
    )


# Breakout: a ball that a paddle returns breaks a wall of bricks.


class BreakoutState(NamedTuple):
    """Ball, paddle and bricks of each row."""

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
    is_filled = (rows >= 1) & (rows < 4)
    return is_filled.view(1, SIZE, 1).expand(1, SIZE, SIZE)


def breakout_reset(
    cfg: GameConfig, world: NoWorld, key: I64[Tensor, "B 2"]
) -> BreakoutState:
    """Build the state with a full wall, and the ball below it at the left or the right."""
    from_right = random.uniform(key, ()) < 0.5
    zero = torch.zeros_like(key[:, 0])
    ball_x = torch.where(from_right, SIZE - 1, zero)
    return BreakoutState(
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


def breakout_step(
    cfg: GameConfig,
    world: NoWorld,
    state: BreakoutState,
    action: I64[Tensor, "B"],
    key: I64[Tensor, "B 2"],
) -> tuple[BreakoutState, Timestep]:
    """Move the paddle and the ball; the reward is 1 for a brick.

    Args:
      key: unused: the step is deterministic.
    """
    paddle = state.paddle + offset(cfg, action, "l", "r")
    paddle = paddle.clamp(0, SIZE - 1)

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
    hits_brick = ~hits_ceiling & any_cell(state.bricks & cell)
    at_bottom = ~hits_ceiling & ~hits_brick & (y == SIZE - 1)

    # A second brick in a row is passed through.
    breaks = hits_brick & ~state.strike
    bricks = state.bricks & ~(cell & breaks.view(-1, 1, 1))
    is_cleared = at_bottom & ~any_cell(bricks)
    bricks = bricks | (_all_bricks(x) & is_cleared.view(-1, 1, 1))

    is_met_straight = at_bottom & (state.ball_x == paddle)
    is_met_aslant = at_bottom & ~is_met_straight & (x == paddle)
    reverses_y = hits_ceiling | breaks | is_met_straight
    direction = torch.where(reverses_y, 3 - direction, direction)
    direction = torch.where(is_met_aslant, direction ^ 2, direction)
    stays = breaks | is_met_straight | is_met_aslant
    return finish(
        state,
        BreakoutState(
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


def breakout_observe(
    cfg: GameConfig, world: NoWorld, state: BreakoutState
) -> F32[Tensor, "B 10 10 4"]:
    """Return the channels: paddle, ball, trail of the ball, bricks."""
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
    """Build Breakout of MinAtar; observations are images of 10 x 10 cells and 4 channels.

    Args:
      minimal_actions: nothing, left, right; else all six actions.
      sticky_probability: that the last action of the episode is repeated.
    """
    return game(
        "nlr" if minimal_actions else ALL_ACTIONS,
        4,
        (breakout_reset, breakout_step, breakout_observe),
        sticky_probability,
    )


# Freeway: a chicken crosses a road of eight cars.

START = SIZE - 1  # row of the player


class FreewayState(NamedTuple):
    """Player and cars of each row; car i drives in lane i + 1."""

    position: I64[Tensor, "B"]  # row of the player
    car_x: I64[Tensor, "B 8"]
    car_timer: I64[Tensor, "B 8"]  # steps until the car moves
    car_speed: I64[Tensor, "B 8"]  # steps between its moves; negative leftwards
    move_timer: I64[Tensor, "B"]  # steps until the player may move
    time_left: I64[Tensor, "B"]
    terminal: Bool[Tensor, "B"]


def sample_speeds(key: I64[Tensor, "B 2"]) -> I64[Tensor, "B 8"]:
    """Sample the cars' speeds [B, 8], signed by direction."""
    unit = random.uniform(key, (2, 8))
    # 1 to 5 steps between two moves
    magnitude = 1 + (unit[:, 0] * 5).to(torch.int64)
    return torch.where(unit[:, 1] < 0.5, -magnitude, magnitude)


def freeway_reset(
    cfg: GameConfig, world: NoWorld, key: I64[Tensor, "B 2"]
) -> FreewayState:
    """Build the state with the player below the lanes, and cars of random speeds at the left."""
    speed = sample_speeds(key)
    zero = torch.zeros_like(key[:, 0])
    return FreewayState(
        position=zero + START,
        car_x=torch.zeros_like(speed),
        car_timer=speed.abs(),
        car_speed=speed,
        move_timer=zero + 3,
        # The end of the game is a termination, as in MinAtar.
        time_left=zero + 2500,
        terminal=zero.to(torch.bool),
    )


def freeway_step(
    cfg: GameConfig,
    world: NoWorld,
    state: FreewayState,
    action: I64[Tensor, "B"],
    key: I64[Tensor, "B 2"],
) -> tuple[FreewayState, Timestep]:
    """Move the player and the cars; the reward is 1 for a crossing, after which the cars get new speeds."""
    return freeway_transition(cfg, state, action, sample_speeds(key))


def freeway_transition(
    cfg: GameConfig,
    state: FreewayState,
    action: I64[Tensor, "B"],
    new_speed: I64[Tensor, "B 8"],
) -> tuple[FreewayState, Timestep]:
    """Make a step, given the cars' speeds after a crossing."""
    is_ready = state.move_timer == 0
    step = torch.where(is_ready, offset(cfg, action, "u", "d"), 0)
    position = (state.position + step).clamp(0, START)
    move_timer = torch.where(step != 0, 3, state.move_timer)

    has_crossed = position == 0
    position = torch.where(has_crossed, START, position)
    rows = has_crossed.unsqueeze(-1)
    speed = torch.where(rows, new_speed, state.car_speed)
    timer = torch.where(rows, new_speed.abs(), state.car_timer)

    # A car hits the player before it moves or after it.
    moves = timer == 0
    car_x = torch.where(moves, state.car_x + speed.sign(), state.car_x) % SIZE
    is_met = (state.car_x == 4) | (car_x == 4)  # the column of the player
    is_hit = (is_met & (lanes(car_x) == position.unsqueeze(-1))).any(-1)

    time_left = state.time_left - 1
    next_state = FreewayState(
        position=torch.where(is_hit, START, position),
        car_x=car_x,
        car_timer=torch.where(moves, speed.abs(), timer - 1),
        car_speed=speed,
        move_timer=(move_timer - 1).clamp_min(0),
        time_left=time_left,
        terminal=time_left < 0,
    )
    return finish(state, next_state, has_crossed)


def freeway_observe(
    cfg: GameConfig, world: NoWorld, state: FreewayState
) -> F32[Tensor, "B 10 10 7"]:
    """Return the channels: player, cars, and the cell behind each car in one of five channels by its speed."""
    lane, x, speed = lanes(state.car_x), state.car_x, state.car_speed
    back_x = (x - speed.sign()) % SIZE
    trails = [show(lane, back_x, speed.abs() == s) for s in range(1, 6)]
    column = torch.full_like(state.position, 4)
    return image(at(state.position, column), at(lane, x).any(1), *trails)


def freeway(
    *,
    minimal_actions: bool = True,
    sticky_probability: float = STICKY_PROBABILITY,
) -> AnyEnvironment:
    """Build Freeway of MinAtar; observations are images of 10 x 10 cells and 7 channels.

    Args:
      minimal_actions: nothing, up, down; else all six actions.
      sticky_probability: that the last action of the episode is repeated.
    """
    return game(
        "nud" if minimal_actions else ALL_ACTIONS,
        7,
        (freeway_reset, freeway_step, freeway_observe),
        sticky_probability,
    )


# Seaquest: a submarine shoots, rescues divers, and must surface for air.

MAX_OXYGEN = 200  # steps under water
MAX_DIVERS = 6  # on board
SEAQUEST_BOTTOM = SIZE - 1

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


class SeaquestTimers(NamedTuple):
    """Timers of when enemies and divers come, and of their speeds, in steps."""

    time: I64[Tensor, "B"]
    enemy_spawn_speed: I64[Tensor, "B"]
    enemy_spawn: I64[Tensor, "B"]
    diver_spawn: I64[Tensor, "B"]
    move_speed: I64[Tensor, "B"]
    n_ramps: I64[Tensor, "B"]


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
    terminal: Bool[Tensor, "B"]


def _no_swimmers(zero: I64[Tensor, "B"], n: int) -> Swimmers:
    empty = zero.unsqueeze(-1).expand(-1, n)
    never = empty.to(torch.bool)
    return Swimmers(never, empty, empty, never, empty, empty)


def seaquest_reset(
    cfg: GameConfig, world: NoWorld, key: I64[Tensor, "B 2"]
) -> SeaquestState:
    """Build the state with the player alone, at the surface."""
    zero = torch.zeros_like(key[:, 0])
    never = zero.to(torch.bool)
    swimmers = _no_swimmers(zero, N_ENEMIES)
    slots = zero.unsqueeze(-1).expand(-1, N_BULLETS)
    sea = never.view(-1, 1, 1).expand(-1, SIZE, SIZE)

    return SeaquestState(
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
        leftward=sea,
        rightward=sea,
        divers=_no_swimmers(zero, N_DIVERS),
        timers=SeaquestTimers(
            time=zero,
            enemy_spawn_speed=zero + 20,  # steps between two enemies
            enemy_spawn=zero + 20,
            diver_spawn=zero + 30,
            move_speed=zero + 5,  # steps that an enemy stays in a cell
            n_ramps=zero,
        ),
        terminal=never,
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
    enemies = _spawn_enemy(state.enemies, timers, unit[:, :3])
    divers = _spawn_diver(state.divers, timers, unit[:, 3:])

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
    n_shot = n_shot + n_rammed + n_met
    return finish(state, next_state, n_shot + bonus)


# Seaquest: arrivals


def _count_down(timer: Tensor, interval: Tensor | int) -> Tensor:
    """Count a timer down by a step; at 0 it starts at the interval again."""
    started = torch.where(timer == 0, interval, timer)
    return (started - 1).clamp_min(0)


def _first_free(
    swimmers: Swimmers, arrives: Bool[Tensor, "B"]
) -> Bool[Tensor, "B M"]:
    """Return the first free slot as a mask [B, M], for rows in which a newcomer arrives."""
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
    """Put a newcomer at the edge, with direction and line from uniform numbers."""
    moves_right = (direction < 0.5).unsqueeze(-1)
    x = torch.where(moves_right, 0, SEAQUEST_BOTTOM)
    y = 1 + (line * (SIZE - 2)).to(torch.int64).unsqueeze(-1)
    born = (move_timer.unsqueeze(-1), time.unsqueeze(-1))
    return put(swimmers, is_new, True, x, y, moves_right, *born)


def _spawn_enemy(
    enemies: Enemies, timers: SeaquestTimers, unit: F32[Tensor, "B 3"]
) -> Enemies:
    """Add a new enemy when due, unless an enemy of its line swims the other way."""
    swimmers = enemies.swimmers
    moves_right = (unit[:, 0] < 0.5).unsqueeze(-1)
    line = 1 + (unit[:, 2] * (SIZE - 2)).to(torch.int64)
    opposes = swimmers.exists & (swimmers.y == line.unsqueeze(-1))
    opposes = opposes & (swimmers.moves_right != moves_right)
    arrives = (timers.enemy_spawn == 0) & ~opposes.any(-1)

    is_new = _first_free(swimmers, arrives)
    is_submarine = (unit[:, 1] < 1 / 3).unsqueeze(-1)
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
        shot_timer=torch.where(is_new, 10, enemies.shot_timer),
    )


def _spawn_diver(
    divers: Swimmers, timers: SeaquestTimers, unit: F32[Tensor, "B 2"]
) -> Swimmers:
    is_new = _first_free(divers, timers.diver_spawn == 0)
    move_timer = torch.full_like(timers.time, 5)
    return _add(divers, is_new, unit[:, 0], unit[:, 1], move_timer, timers.time)


# Seaquest: moves


def _act(
    cfg: GameConfig,
    player: Player,
    bullets: Bullets,
    action: I64[Tensor, "B"],
) -> tuple[Player, Bullets]:
    """Move the player or fire a bullet; return both."""
    fires = is_action(cfg, action, "f") & (player.shot_timer == 0)

    # A second bullet is younger than the first.
    first = bullets.exists[:, 0]
    is_new = fires.unsqueeze(-1) & torch.stack([~first, first], -1)
    place = (player.x, player.y, player.faces_right)
    fired = put(bullets, is_new, True, *(x.unsqueeze(-1) for x in place))

    dx = offset(cfg, action, "l", "r")
    x, y = player.x + dx, player.y + offset(cfg, action, "u", "d")
    shot_timer = torch.where(fires, 5, player.shot_timer)
    moved = player._replace(
        x=x.clamp(0, SEAQUEST_BOTTOM),
        y=y.clamp(0, SEAQUEST_BOTTOM - 1),
        faces_right=(player.faces_right | (dx > 0)) & (dx >= 0),
        shot_timer=(shot_timer - 1).clamp_min(0),
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
    x, is_inside = walk(bullets.x, bullets.moves_right, torch.ones_like(flies))
    flies = flies & is_inside
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
    """Move the bullet of the second slot to the first slot if that is empty."""
    swaps = ~bullets.exists[:, :1]
    return Bullets(*(torch.where(swaps, x.flip(-1), x) for x in bullets))


def _is_at(
    x: I64[Tensor, "B M"], swimmers: Swimmers, player: Player
) -> Bool[Tensor, "B M"]:
    is_column = x == player.x.unsqueeze(-1)
    return is_column & (swimmers.y == player.y.unsqueeze(-1))


def _move_divers(
    divers: Swimmers, player: Player
) -> tuple[Swimmers, I64[Tensor, "B"]]:
    """Move divers when due; return them and the number that came on board."""
    moves = divers.exists & (divers.move_timer == 0)
    x, is_inside = walk(divers.x, divers.moves_right, moves)
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
        move_timer=torch.where(moves, 5, divers.move_timer - 1),
    )
    return moved, boards.sum(-1)


def _move_enemies(
    swimmers: Swimmers,
    of_kind: Bool[Tensor, "B M"],
    bullets: Bullets,
    player: Player,
    move_speed: I64[Tensor, "B"],
) -> tuple[Swimmers, Bullets, I64[Tensor, "B"], Bool[Tensor, "B"]]:
    """Move enemies of one kind when due, some into bullets; return also how many were shot, and if the player was met.

    Returns:
      The enemies and bullets that are left, how many enemies were shot, and where the player is met.
    """
    active = swimmers.exists & of_kind
    moves = active & (swimmers.move_timer == 0)
    x, is_inside = walk(swimmers.x, swimmers.moves_right, moves)
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
    left = swimmers._replace(
        exists=swimmers.exists & is_inside & ~is_shot,
        x=x,
        move_timer=torch.where(active, timer, swimmers.move_timer),
    )
    bullets = _close_up(bullets._replace(exists=bullets.exists & ~hits))
    is_met = (meets_before | meets_after).any(-1)
    return left, bullets, is_shot.sum(-1), is_met


def _move_enemy_bullets(
    state: SeaquestState,
    enemies: Enemies,
    shooters: Bool[Tensor, "B M"],
    player: Player,
) -> tuple[Tensor, Tensor, I64[Tensor, "B M"], Bool[Tensor, "B"]]:
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

    edge = torch.zeros_like(leftward[:, :, :1])
    next_leftward = torch.cat([leftward[:, :, 1:], edge], -1)
    next_rightward = torch.cat([edge, rightward[:, :, :-1]], -1)
    flown = leftward | rightward | next_leftward | next_rightward
    is_hit = any_cell(flown & at(player.y, player.x))
    return next_leftward, next_rightward, shot_timer, is_hit


def _breathe(
    cfg: GameConfig, player: Player, timers: SeaquestTimers
) -> tuple[Player, SeaquestTimers, Bool[Tensor, "B"], I64[Tensor, "B"]]:
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
        n_divers=n_divers - surfaces.to(torch.int64),
        is_up=is_up & (player.is_up | surfaces),
    )
    timers = timers._replace(
        time=timers.time + 1,
        enemy_spawn=_count_down(timers.enemy_spawn, timers.enemy_spawn_speed),
        diver_spawn=_count_down(timers.diver_spawn, 30),
    )
    if cfg.ramping:
        timers = _accelerate_seaquest(timers, surfaces)
    return after, timers, comes_up & (player.n_divers == 0), bonus


def _accelerate_seaquest(
    timers: SeaquestTimers, surfaces: Bool[Tensor, "B"]
) -> SeaquestTimers:
    """Make enemies come sooner after each surfacing, and move faster after every second one."""
    can_ramp = (timers.enemy_spawn_speed > 1) | (timers.move_speed > 2)
    ramps = surfaces & can_ramp
    is_odd = timers.n_ramps % 2 == 1
    return timers._replace(
        enemy_spawn_speed=shorten(timers.enemy_spawn_speed, ramps, 1),
        move_speed=shorten(timers.move_speed, ramps & is_odd, 2),
        n_ramps=timers.n_ramps + ramps.to(torch.int64),
    )


# Seaquest: observation


def _trails(swimmers: Swimmers) -> Bool[Tensor, "B 10 10"]:
    """Return the map of the cells behind swimmers."""
    back = torch.where(swimmers.moves_right, -1, 1)
    return show(swimmers.y, swimmers.x + back, swimmers.exists)


def seaquest_observe(
    cfg: GameConfig, world: NoWorld, state: SeaquestState
) -> F32[Tensor, "B 10 10 10"]:
    """Return the ten channels [B, 10, 10, 10] of the image, 1 where a thing is. They are: front and back of the
    player, bullets, trails, enemies' bullets, fish, submarines, and three of divers.

    The last three are the oxygen that is left, the divers on board, and those in the sea.
    """
    player, divers, bullets = state.player, state.divers, state.bullets
    enemies, is_submarine = state.enemies.swimmers, state.enemies.is_submarine

    cells = torch.arange(SIZE, device=player.x.device)
    n_lit = player.oxygen.clamp_min(0) * 10 // MAX_OXYGEN
    bottom = (cells == SEAQUEST_BOTTOM).view(1, -1, 1)
    oxygen = bottom & (cells < n_lit.view(-1, 1, 1))
    on_board = bottom & (
        cells >= SEAQUEST_BOTTOM - player.n_divers.view(-1, 1, 1)
    )
    return image(
        at(player.y, player.x),
        at(player.y, player.x + torch.where(player.faces_right, -1, 1)),
        show(bullets.y, bullets.x, bullets.exists),
        _trails(enemies) | _trails(divers),
        state.leftward | state.rightward,
        show(enemies.y, enemies.x, enemies.exists & ~is_submarine),
        show(enemies.y, enemies.x, enemies.exists & is_submarine),
        oxygen,
        on_board & (cells < SEAQUEST_BOTTOM),
        show(divers.y, divers.x, divers.exists),
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
        10,
        (seaquest_reset, seaquest_step, seaquest_observe),
        sticky_probability,
        ramping,
    )


# Space Invaders: a cannon shoots aliens, which come closer ever faster.

SPACE_INVADERS_BOTTOM = SIZE - 1


class SpaceInvadersState(NamedTuple):
    """Cannon, bullets, aliens and timers of each row."""

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
    is_column = (cells >= 2) & (cells < 8)
    return ((cells < 4).unsqueeze(-1) & is_column).unsqueeze(0)


def space_invaders_reset(
    cfg: GameConfig, world: NoWorld, key: I64[Tensor, "B 2"]
) -> SpaceInvadersState:
    """Build the state with the cannon in the middle, and all aliens on their way to the left."""
    zero = torch.zeros_like(key[:, 0])
    empty = zero.to(torch.bool).view(-1, 1, 1).expand(-1, SIZE, SIZE)
    return SpaceInvadersState(
        position=zero + 5,
        bullets=empty,
        alien_bullets=empty,
        aliens=_all_aliens(key).expand_as(empty),
        direction=zero - 1,
        move_interval=zero + 12,
        move_timer=zero + 12,
        alien_shot_timer=zero + 10,
        shot_timer=zero,
        terminal=zero.to(torch.bool),
    )


def _where(
    rows: Bool[Tensor, "B"], a: Tensor, b: Tensor
) -> Bool[Tensor, "B 10 10"]:
    return torch.where(rows.view(-1, 1, 1), a, b)


def _shift(cells: Bool[Tensor, "B 10 10"], down: bool) -> Tensor:
    """Move a map by one row, down or up; what leaves the grid is lost."""
    edge = torch.zeros_like(cells[:, :1])
    if down:
        return torch.cat([edge, cells[:, :-1]], 1)
    return torch.cat([cells[:, 1:], edge], 1)


def space_invaders_step(
    cfg: GameConfig,
    world: NoWorld,
    state: SpaceInvadersState,
    action: I64[Tensor, "B"],
    key: I64[Tensor, "B 2"],
) -> tuple[SpaceInvadersState, Timestep]:
    """Move the cannon, bullets and aliens; the reward is 1 for each alien that is shot.

    Args:
      key: unused: the step is deterministic.
    """
    fires = is_action(cfg, action, "f") & (state.shot_timer == 0)
    position = state.position + offset(cfg, action, "l", "r")
    position = position.clamp(0, SPACE_INVADERS_BOTTOM)
    cannon = at(torch.full_like(position, SPACE_INVADERS_BOTTOM), position)

    bullets = _shift(
        state.bullets | (cannon & fires.view(-1, 1, 1)), down=False
    )
    alien_bullets = _shift(state.alien_bullets, down=True)
    is_hit = any_cell((alien_bullets | state.aliens) & cannon)
    advanced, is_reached = _advance(state, cannon)

    # The lowest alien of the nearest column shoots.
    shoots = state.alien_shot_timer == 0
    shot = _nearest_alien(advanced.aliens, position)
    alien_bullets = alien_bullets | (shot & shoots.view(-1, 1, 1))
    alien_shot_timer = torch.where(shoots, 10, state.alien_shot_timer)

    killed = advanced.aliens & bullets
    shot_timer = torch.where(fires, 5, state.shot_timer)
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
    state: SpaceInvadersState, cannon: Bool[Tensor, "B 10 10"]
) -> tuple[SpaceInvadersState, Bool[Tensor, "B"]]:
    """Move the aliens when due; return the state, and whether the aliens have won by the move, for each row."""
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
    lands = turns & aliens[:, SPACE_INVADERS_BOTTOM].any(-1)
    moved = _where(at_edge, aliens.roll(1, 1), sideways)
    aliens = _where(moves, moved, aliens)
    interval = torch.minimum(n_aliens, state.move_interval)
    advanced = state._replace(
        aliens=aliens,
        direction=torch.where(turns, -state.direction, state.direction),
        move_timer=torch.where(moves, interval, state.move_timer),
    )
    return advanced, lands | (moves & any_cell(aliens & cannon))


def _nearest_alien(
    aliens: Bool[Tensor, "B 10 10"], position: I64[Tensor, "B"]
) -> Bool[Tensor, "B 10 10"]:
    """Return the map of the lowest alien in the column nearest to the cannon; of two such columns the left one."""
    cells = torch.arange(SIZE, device=position.device)
    distance = (cells - position.unsqueeze(-1)).abs()
    order = 2 * distance + (cells > position.unsqueeze(-1)).to(torch.int64)
    has_alien = aliens.any(1)
    column = torch.where(has_alien, order, 10 * SIZE).argmin(-1)
    in_column = aliens & (cells == column.view(-1, 1, 1))
    row = torch.where(in_column.any(-1), cells, -1).amax(-1)
    return at(row, column)


def _next_wave(
    cfg: GameConfig, state: SpaceInvadersState
) -> SpaceInvadersState:
    """Bring back all aliens in rows where the last one was shot; with ramping they are faster."""
    is_cleared = ~any_cell(state.aliens)
    interval = shorten(state.move_interval, is_cleared, 6)
    return state._replace(
        aliens=_where(is_cleared, _all_aliens(state.aliens), state.aliens),
        move_interval=interval if cfg.ramping else state.move_interval,
    )


def space_invaders_observe(
    cfg: GameConfig, world: NoWorld, state: SpaceInvadersState
) -> F32[Tensor, "B 10 10 6"]:
    """Return the channels: cannon, aliens, aliens moving left, aliens moving right, player's and aliens' bullets."""
    bottom = torch.full_like(state.position, SPACE_INVADERS_BOTTOM)
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
    """Build Space Invaders of MinAtar; observations are images of 10 x 10 cells and 6 channels.

    Args:
      minimal_actions: nothing, left, right, fire; else all six actions.
      ramping: each wave of aliens moves faster.
      sticky_probability: that the last action of the episode is repeated.
    """
    return game(
        "nlrf" if minimal_actions else ALL_ACTIONS,
        6,
        (space_invaders_reset, space_invaders_step, space_invaders_observe),
        sticky_probability,
        ramping,
    )
