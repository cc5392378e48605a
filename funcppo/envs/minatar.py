"""The games of MinAtar: Asterix, Breakout, Freeway and Space Invaders, on a field of 10 x 10 cells.

From any state, one step equals that of the package `minatar` at equal random draws. A game is a state, `reset`, a step
and `observe`, an image with one channel for each kind of thing; what all games share comes first. The fifth game,
Seaquest, is `examples/seaquest.py`.

Source: Young & Tian 2019, "MinAtar: an Atari-inspired testbed for thorough and reproducible reinforcement learning
experiments", arXiv:1903.03176.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

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
LAST = SIZE - 1
ALL_ACTIONS = "nlurdf"  # nothing, left, up, right, down, fire
STICKY_PROBABILITY = 0.1  # MinAtar's

Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True, slots=True)
class GameConfig:
    """Settings of a game."""

    # Letters of the actions, of `ALL_ACTIONS`; the number of an action is the place of its letter.
    actions: str = ALL_ACTIONS
    ramping: bool = True  # the game becomes faster with time, where it can
    # probability that the last action is repeated
    sticky_probability: UnitInterval = STICKY_PROBABILITY

    __post_init__ = check_fields


def fill(key: I64[Tensor, "B 2"], number: int, *shape: int) -> Tensor:
    """Return a tensor [B, ...] full of one number or flag for each key, [B, 1] by default."""
    sizes = shape or (1,)
    dtype = torch.bool if isinstance(number, bool) else torch.int64
    rows = torch.full_like(key[:, 0], number, dtype=dtype)
    return rows.view(-1, *[1] * len(sizes)).expand(-1, *sizes)


def start(
    key: I64[Tensor, "B 2"], record: type[Record], *shape: int, **numbers: int
) -> Record:
    """Build a record of tensors that are each full of one number."""
    fields = {name: fill(key, x, *shape) for name, x in numbers.items()}
    return record(**fields)


def is_action(
    cfg: GameConfig, action: I64[Tensor, "B"], letter: str
) -> Bool[Tensor, "B 1"]:
    """Return which rows take the action of a letter; none if the action set is without it."""
    return (action == cfg.actions.find(letter)).unsqueeze(-1)


def offset(
    cfg: GameConfig, action: I64[Tensor, "B"], letters: str
) -> I64[Tensor, "B 1"]:
    """Return by how many cells each row moves along an axis, whose letters are back and forth: -1, 0 or 1."""
    back, forth = (is_action(cfg, action, x).to(torch.int64) for x in letters)
    return forth - back


def steer(
    cfg: GameConfig,
    action: I64[Tensor, "B"],
    x: I64[Tensor, "B 1"],
    letters: str,
    first: int = 0,
    last: int = SIZE - 1,
) -> I64[Tensor, "B 1"]:
    """Move a coordinate as the actions say, from the first cell to the last at most."""
    return (x + offset(cfg, action, letters)).clamp(first, last)


def show(
    y: I64[Tensor, "B M"],
    x: I64[Tensor, "B M"],
    is_seen: Bool[Tensor, "B M"] | None = None,
) -> Bool[Tensor, "B 10 10"]:
    """Return the map of the cells of those of M things that are seen, by default all; none off the grid."""
    cells = torch.arange(SIZE, device=x.device)
    is_row = y.unsqueeze(-1) == cells
    is_column = x.unsqueeze(-1) == cells
    if is_seen is not None:
        is_row = is_row & is_seen.unsqueeze(-1)
    return (is_row.unsqueeze(-1) & is_column.unsqueeze(-2)).any(1)


def show_below(x: I64[Tensor, "B 1"]) -> Bool[Tensor, "B 10 10"]:
    """Return the map of a cell in the lowest row."""
    return show(torch.full_like(x, LAST), x)


def any_cell(cells: Bool[Tensor, "B 10 10"]) -> Bool[Tensor, "B 1"]:
    """Return whether each row's map is true anywhere."""
    return cells.flatten(1).any(-1, True)


def block(
    like: Tensor, rows: tuple[int, int], columns: tuple[int, int]
) -> Bool[Tensor, "1 10 10"]:
    """Return the map of the cells in a range of rows and of columns, without their ends."""
    cells = torch.arange(SIZE, device=like.device)
    is_row, is_column = (
        (cells >= first) & (cells < end) for first, end in (rows, columns)
    )
    return (is_row.unsqueeze(-1) & is_column).unsqueeze(0)


def shift(
    cells: Bool[Tensor, "B 10 10"], by: int, axis: int
) -> Bool[Tensor, "B 10 10"]:
    """Move a map by a cell along an axis; what leaves the grid is lost."""
    edge = torch.zeros_like(cells.narrow(axis, 0, 1))
    if by > 0:
        return torch.cat([edge, cells.narrow(axis, 0, LAST)], axis)
    return torch.cat([cells.narrow(axis, 1, LAST), edge], axis)


def lanes(x: I64[Tensor, "B M"]) -> I64[Tensor, "B M"]:
    """Return the grid rows of M things, one in each row from the second on."""
    return (1 + torch.arange(x.shape[-1], device=x.device)).expand_as(x)


def direction(moves_right: Bool[Tensor, "B M"]) -> I64[Tensor, "B M"]:
    """Return 1 for what moves right, -1 for what moves left."""
    return torch.where(moves_right, 1, -1)


def walk(
    x: I64[Tensor, "B M"],
    moves_right: Bool[Tensor, "B M"],
    moves: Bool[Tensor, "B M"],
) -> tuple[I64[Tensor, "B M"], Bool[Tensor, "B M"]]:
    """Move some things by a cell; return the new columns, and which things are still on the grid."""
    x = torch.where(moves, x + direction(moves_right), x)
    return x, (x >= 0) & (x < SIZE)


def edge(unit: F32[Tensor, "B 1"]) -> tuple[Tensor, Bool[Tensor, "B 1"]]:
    """Return the column where a newcomer starts, and whether it moves right, given a uniform number."""
    moves_right = unit < 0.5
    return torch.where(moves_right, 0, LAST), moves_right


def put(things: Any, is_new: Bool[Tensor, "B M"], *values: Any) -> Any:
    """Put a newcomer in some slots of things; `values` are its fields in order, [B, 1] or numbers."""
    pairs = zip(values, things)
    return type(things)(
        *(torch.where(is_new, value, old) for value, old in pairs)
    )


def first_free(
    exists: Bool[Tensor, "B M"], place: Tensor | int = 1
) -> Bool[Tensor, "B M"]:
    """Return the mask of the empty slot at a place among the empty ones, counted from 1."""
    return ~exists & ((~exists).cumsum(-1) == place)


def count_down(
    timer: I64[Tensor, "B 1"], interval: Tensor | int
) -> I64[Tensor, "B 1"]:
    """Count a timer down by a step; at 0 it starts at the interval again."""
    return torch.where(timer == 0, interval, timer) - 1


def reload(
    timer: I64[Tensor, "B 1"], fires: Bool[Tensor, "B 1"]
) -> I64[Tensor, "B 1"]:
    """Return the steps until the player may shoot again."""
    return (torch.where(fires, 5, timer) - 1).clamp_min(0)


def shorten(
    interval: I64[Tensor, "B 1"], ramps: Bool[Tensor, "B 1"], minimum: int
) -> I64[Tensor, "B 1"]:
    """Shorten the interval by a step in some rows, down to a minimum."""
    return torch.where(ramps & (interval > minimum), interval - 1, interval)


def can_ramp(timers: Any, minimum: int) -> Bool[Tensor, "B 1"]:
    """Return whether things can come or move faster yet."""
    return (timers.spawn_speed > 1) | (timers.move_speed > minimum)


def accelerate(timers: Any, is_due: Bool[Tensor, "B 1"], minimum: int) -> Any:
    """Make things come sooner in some rows, and move faster every second time, down to a minimum of steps."""
    ramps = is_due & can_ramp(timers, minimum)
    is_odd = timers.ramp_index % 2 == 1
    return timers._replace(
        spawn_speed=shorten(timers.spawn_speed, ramps, 1),
        move_speed=shorten(timers.move_speed, ramps & is_odd, minimum),
        ramp_index=timers.ramp_index + ramps,
    )


def image(*channels: Bool[Tensor, "B 10 10"]) -> F32[Tensor, "B 10 10 F"]:
    """Return the observation [B, 10, 10, F]: one channel for each map, 1 where it is true."""
    return torch.stack(channels, -1).to(torch.float32)


def finish(state: Any, next_state: Any, reward: Tensor) -> tuple[Any, Timestep]:
    """Return the result of a step, with rows that had finished before unchanged. States have a field `terminal`."""
    active = ~state.terminal
    kept = tree.where(active, next_state, state)
    terminated = kept.terminal.flatten()
    reward = torch.where(active.flatten(), reward.flatten(), 0)
    return kept, Timestep(
        reward=reward.to(torch.float32),
        terminated=terminated,
        truncated=torch.zeros_like(terminated),
    )


def game(
    letters: str,
    minimal_actions: bool,
    n_channels: int,
    functions: tuple[Callable[..., Any], ...],
    sticky_probability: float,
    ramping: bool = True,
) -> AnyEnvironment:
    """Build a game, with sticky actions if their probability is above 0.

    Args:
      letters: of the actions that do something.
      minimal_actions: only these; else all.
      n_channels: of the observation.
      functions: `reset`, `step_functional` and `observe`.
    """
    cfg = GameConfig(
        actions=letters if minimal_actions else ALL_ACTIONS,
        ramping=ramping,
        sticky_probability=sticky_probability,
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
            action_size=len(cfg.actions),
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

    spawn_speed: I64[Tensor, "B 1"]
    spawn: I64[Tensor, "B 1"]
    move_speed: I64[Tensor, "B 1"]
    move: I64[Tensor, "B 1"]
    ramp: I64[Tensor, "B 1"]
    ramp_index: I64[Tensor, "B 1"]


class AsterixState(NamedTuple):
    """Player, entities and timers of each row."""

    player_y: I64[Tensor, "B 1"]
    player_x: I64[Tensor, "B 1"]
    entities: Entities
    timers: AsterixTimers
    terminal: Bool[Tensor, "B 1"]


def asterix_reset(
    cfg: GameConfig, world: NoWorld, key: I64[Tensor, "B 2"]
) -> AsterixState:
    """Build the state with the player in the middle of an empty field."""
    entities = start(
        key, Entities, 8, exists=False, x=0, moves_right=False, is_gold=False
    )
    timers = start(
        key,
        AsterixTimers,
        spawn_speed=10,  # steps between two entities
        spawn=10,
        move_speed=5,  # steps between two moves of the entities
        move=5,
        ramp=100,  # steps between two accelerations
        ramp_index=0,
    )

    return AsterixState(
        player_y=fill(key, 5),
        player_x=fill(key, 5),
        entities=entities,
        timers=timers,
        terminal=fill(key, False),
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
    entities = _spawn(state.entities, timers.spawn == 0, unit)
    player_x = steer(cfg, action, state.player_x, "lr")
    player_y = steer(cfg, action, state.player_y, "ud", 1, LAST - 1)

    # The player meets entities before they move and after it.
    entities, gold_before, dies_before = _meet(entities, player_y, player_x)
    x, is_inside = walk(entities.x, entities.moves_right, timers.move == 0)
    entities = entities._replace(exists=entities.exists & is_inside, x=x)
    entities, gold_after, dies_after = _meet(entities, player_y, player_x)

    timers = timers._replace(
        spawn=count_down(timers.spawn, timers.spawn_speed),
        move=count_down(timers.move, timers.move_speed),
    )
    next_state = AsterixState(
        player_y=player_y,
        player_x=player_x,
        entities=entities,
        timers=_accelerate_asterix(timers) if cfg.ramping else timers,
        terminal=dies_before | dies_after,
    )
    return finish(state, next_state, gold_before + gold_after)


def _spawn(
    entities: Entities, spawns: Bool[Tensor, "B 1"], unit: F32[Tensor, "B 3"]
) -> Entities:
    """Put an entity at the edge of a random free line; nothing if no line is free."""
    from_left, is_gold, line = unit.unsqueeze(-1).unbind(1)
    n_free = (~entities.exists).sum(-1, True)
    place = 1 + (line * n_free).to(torch.int64)
    is_new = first_free(entities.exists, place) & spawns
    return put(entities, is_new, True, *edge(from_left), is_gold < 1 / 3)


def _meet(
    entities: Entities,
    player_y: I64[Tensor, "B 1"],
    player_x: I64[Tensor, "B 1"],
) -> tuple[Entities, I64[Tensor, "B"], Bool[Tensor, "B 1"]]:
    """Return the entities left, the gold collected, and whether the player dies, for each row."""
    is_met = entities.exists & (entities.x == player_x)
    is_met = is_met & (lanes(entities.x) == player_y)
    gold = is_met & entities.is_gold
    left = entities._replace(exists=entities.exists & ~gold)
    return left, gold.sum(-1), (is_met & ~entities.is_gold).any(-1, True)


def _accelerate_asterix(timers: AsterixTimers) -> AsterixTimers:
    """Shorten the intervals in rows whose ramp timer has run out."""
    is_due = timers.ramp < 0
    counts = can_ramp(timers, 1)
    ramp = torch.where(is_due, 100, timers.ramp - 1)
    timers = timers._replace(ramp=torch.where(counts, ramp, timers.ramp))
    return accelerate(timers, is_due, 1)


def asterix_observe(
    cfg: GameConfig, world: NoWorld, state: AsterixState
) -> F32[Tensor, "B 10 10 4"]:
    """Return the channels: player, enemies, trails, gold."""
    exists, x, moves_right, is_gold = state.entities
    line = lanes(x)
    return image(
        show(state.player_y, state.player_x),
        show(line, x, exists & ~is_gold),
        show(line, x - direction(moves_right), exists),
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
        "nlurd",
        minimal_actions,
        4,
        (asterix_reset, asterix_step, asterix_observe),
        sticky_probability,
        ramping,
    )


# Breakout: a ball that a paddle returns breaks a wall of bricks.


BRICKS = (1, 4), (0, SIZE)  # their rows and columns


class BreakoutState(NamedTuple):
    """Ball, paddle and bricks of each row."""

    ball_y: I64[Tensor, "B 1"]
    ball_x: I64[Tensor, "B 1"]
    direction: I64[
        Tensor, "B"
    ]  # 0 up left, 1 up right, 2 down right, 3 down left
    paddle: I64[Tensor, "B 1"]  # column
    bricks: Bool[Tensor, "B 10 10"]
    strike: Bool[Tensor, "B 1"]  # the ball hit a brick in the last step
    last_y: I64[Tensor, "B 1"]  # of the ball
    last_x: I64[Tensor, "B 1"]
    terminal: Bool[Tensor, "B 1"]


def breakout_reset(
    cfg: GameConfig, world: NoWorld, key: I64[Tensor, "B 2"]
) -> BreakoutState:
    """Build the state with a full wall, and the ball below it at the left or the right."""
    from_right = random.uniform(key, (1,)) < 0.5
    ball_y = fill(key, 3)
    ball_x = torch.where(from_right, LAST, 0)
    never = fill(key, False)
    return BreakoutState(
        ball_y=ball_y,
        ball_x=ball_x,
        direction=torch.where(from_right, 3, 2),
        paddle=fill(key, 4),
        bricks=block(key, *BRICKS).expand(len(key), SIZE, SIZE),
        strike=never,
        last_y=ball_y,
        last_x=ball_x,
        terminal=never,
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
    paddle = steer(cfg, action, state.paddle, "lr")

    # The ball moves diagonally, and is reflected by the walls at the sides.
    way = state.direction
    x = state.ball_x + direction((way == 1) | (way == 2))
    y = state.ball_y + direction(way >= 2)
    is_outside = (x < 0) | (x >= SIZE)
    x = x.clamp(0, LAST)
    way = torch.where(is_outside, way ^ 1, way)

    # One of three: the ceiling, a brick, the lowest row.
    hits_ceiling = y < 0
    y = y.clamp_min(0)
    cell = show(y, x)
    hits_brick = ~hits_ceiling & any_cell(state.bricks & cell)
    at_bottom = ~hits_ceiling & ~hits_brick & (y == LAST)

    # A second brick in a row is passed through.
    breaks = hits_brick & ~state.strike
    bricks = state.bricks & ~(cell & breaks.unsqueeze(-1))
    is_cleared = at_bottom & ~any_cell(bricks)
    bricks = bricks | (block(x, *BRICKS) & is_cleared.unsqueeze(-1))

    is_met_straight = at_bottom & (state.ball_x == paddle)
    is_met_aslant = at_bottom & ~is_met_straight & (x == paddle)
    reverses_y = hits_ceiling | breaks | is_met_straight
    way = torch.where(reverses_y, 3 - way, way)
    way = torch.where(is_met_aslant, way ^ 2, way)
    is_met = is_met_straight | is_met_aslant
    next_state = BreakoutState(
        ball_y=torch.where(breaks | is_met, state.ball_y, y),
        ball_x=x,
        direction=way,
        paddle=paddle,
        bricks=bricks,
        strike=hits_brick,
        last_y=state.ball_y,
        last_x=state.ball_x,
        terminal=at_bottom & ~is_met,
    )
    return finish(state, next_state, breaks)


def breakout_observe(
    cfg: GameConfig, world: NoWorld, state: BreakoutState
) -> F32[Tensor, "B 10 10 4"]:
    """Return the channels: paddle, ball, trail of the ball, bricks."""
    return image(
        show_below(state.paddle),
        show(state.ball_y, state.ball_x),
        show(state.last_y, state.last_x),
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
        "nlr",
        minimal_actions,
        4,
        (breakout_reset, breakout_step, breakout_observe),
        sticky_probability,
    )


# Freeway: a chicken crosses a road of eight cars.


class FreewayState(NamedTuple):
    """Player and cars of each row; car i drives in lane i + 1."""

    position: I64[Tensor, "B 1"]  # row of the player
    car_x: I64[Tensor, "B 8"]
    car_timer: I64[Tensor, "B 8"]  # steps until the car moves
    car_speed: I64[Tensor, "B 8"]  # steps between its moves; negative leftwards
    move_timer: I64[Tensor, "B 1"]  # steps until the player may move
    time_left: I64[Tensor, "B 1"]
    terminal: Bool[Tensor, "B 1"]


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
    return FreewayState(
        position=fill(key, LAST),
        car_x=torch.zeros_like(speed),
        car_timer=speed.abs(),
        car_speed=speed,
        move_timer=fill(key, 3),
        # The end of the game is a termination, as in MinAtar.
        time_left=fill(key, 2500),
        terminal=fill(key, False),
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
    step = torch.where(state.move_timer == 0, offset(cfg, action, "ud"), 0)
    position = (state.position + step).clamp(0, LAST)
    move_timer = torch.where(step != 0, 3, state.move_timer)

    has_crossed = position == 0
    position = torch.where(has_crossed, LAST, position)
    speed = torch.where(has_crossed, new_speed, state.car_speed)
    timer = torch.where(has_crossed, new_speed.abs(), state.car_timer)

    # A car hits the player before it moves or after it.
    moves = timer == 0
    car_x = torch.where(moves, state.car_x + speed.sign(), state.car_x) % SIZE
    is_met = (state.car_x == 4) | (car_x == 4)  # the column of the player
    is_hit = (is_met & (lanes(car_x) == position)).any(-1, True)

    time_left = state.time_left - 1
    next_state = FreewayState(
        position=torch.where(is_hit, LAST, position),
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
    x, speed = state.car_x, state.car_speed
    lane, back_x = lanes(x), (x - speed.sign()) % SIZE
    trails = [show(lane, back_x, speed.abs() == s) for s in range(1, 6)]
    player = show(state.position, torch.full_like(state.position, 4))
    return image(player, show(lane, x), *trails)


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
        "nud",
        minimal_actions,
        7,
        (freeway_reset, freeway_step, freeway_observe),
        sticky_probability,
    )


# Space Invaders: a cannon shoots aliens, which come closer ever faster.

ALIENS = (0, 4), (2, 8)  # their rows and columns


class SpaceInvadersState(NamedTuple):
    """Cannon, bullets, aliens and timers of each row."""

    position: I64[Tensor, "B 1"]  # column of the cannon
    bullets: Bool[Tensor, "B 10 10"]  # of the player
    alien_bullets: Bool[Tensor, "B 10 10"]
    aliens: Bool[Tensor, "B 10 10"]
    direction: I64[Tensor, "B 1"]  # of the aliens, -1 or 1
    move_interval: I64[Tensor, "B 1"]
    move_timer: I64[Tensor, "B 1"]
    alien_shot_timer: I64[Tensor, "B 1"]
    shot_timer: I64[Tensor, "B 1"]
    terminal: Bool[Tensor, "B 1"]


def space_invaders_reset(
    cfg: GameConfig, world: NoWorld, key: I64[Tensor, "B 2"]
) -> SpaceInvadersState:
    """Build the state with the cannon in the middle, and all aliens on their way to the left."""
    empty = fill(key, False, SIZE, SIZE)
    return SpaceInvadersState(
        position=fill(key, 5),
        bullets=empty,
        alien_bullets=empty,
        aliens=block(key, *ALIENS).expand_as(empty),
        direction=fill(key, -1),
        move_interval=fill(key, 12),
        move_timer=fill(key, 12),
        alien_shot_timer=fill(key, 10),
        shot_timer=fill(key, 0),
        terminal=fill(key, False),
    )


def _where(
    rows: Bool[Tensor, "B 1"], a: Tensor, b: Tensor
) -> Bool[Tensor, "B 10 10"]:
    return torch.where(rows.unsqueeze(-1), a, b)


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
    position = steer(cfg, action, state.position, "lr")
    cannon = show_below(position)

    bullets = shift(state.bullets | (cannon & fires.unsqueeze(-1)), -1, 1)
    alien_bullets = shift(state.alien_bullets, 1, 1)
    is_hit = any_cell((alien_bullets | state.aliens) & cannon)
    advanced, is_reached = _advance(state, cannon)

    # The lowest alien of the nearest column shoots.
    shoots = state.alien_shot_timer == 0
    shot = _nearest_alien(advanced.aliens, position)

    killed = advanced.aliens & bullets
    next_state = advanced._replace(
        position=position,
        bullets=bullets & ~killed,
        alien_bullets=alien_bullets | (shot & shoots.unsqueeze(-1)),
        aliens=advanced.aliens & ~killed,
        move_timer=advanced.move_timer - 1,
        alien_shot_timer=count_down(state.alien_shot_timer, 10),
        shot_timer=reload(state.shot_timer, fires),
        terminal=is_hit | is_reached,
    )
    reward = killed.flatten(1).sum(-1)
    return finish(state, _next_wave(cfg, next_state), reward)


def _advance(
    state: SpaceInvadersState, cannon: Bool[Tensor, "B 10 10"]
) -> tuple[SpaceInvadersState, Bool[Tensor, "B 1"]]:
    """Move the aliens when due; return the state, and whether the aliens have won by the move, for each row."""
    moves = state.move_timer == 0
    aliens = state.aliens
    n_aliens = aliens.flatten(1).sum(-1, True)
    to_left = state.direction < 0
    at_edge = torch.where(
        to_left, aliens[:, :, :1].any(1), aliens[:, :, LAST:].any(1)
    )

    # At the edge they turn and come down by a row.
    sideways = _where(to_left, aliens.roll(-1, 2), aliens.roll(1, 2))
    turns = moves & at_edge
    lands = turns & aliens[:, LAST].any(-1, True)
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
    aliens: Bool[Tensor, "B 10 10"], position: I64[Tensor, "B 1"]
) -> Bool[Tensor, "B 10 10"]:
    """Return the map of the lowest alien in the column nearest to the cannon; of two such columns the left one."""
    cells = torch.arange(SIZE, device=position.device)
    order = 2 * (cells - position).abs() + (cells > position)
    column = torch.where(aliens.any(1), order, 10 * SIZE).argmin(-1, True)
    in_column = aliens & (cells == column).unsqueeze(1)
    row = torch.where(in_column.any(-1), cells, -1).amax(-1, True)
    return show(row, column)


def _next_wave(
    cfg: GameConfig, state: SpaceInvadersState
) -> SpaceInvadersState:
    """Bring back all aliens in rows where the last one was shot; with ramping they are faster."""
    is_cleared = ~any_cell(state.aliens)
    interval = shorten(state.move_interval, is_cleared, 6)
    all_aliens = block(state.aliens, *ALIENS)
    return state._replace(
        aliens=_where(is_cleared, all_aliens, state.aliens),
        move_interval=interval if cfg.ramping else state.move_interval,
    )


def space_invaders_observe(
    cfg: GameConfig, world: NoWorld, state: SpaceInvadersState
) -> F32[Tensor, "B 10 10 6"]:
    """Return the channels: cannon, aliens, aliens moving left, aliens moving right, player's and aliens' bullets."""
    is_leftward = (state.direction < 0).unsqueeze(-1)
    return image(
        show_below(state.position),
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
        "nlrf",
        minimal_actions,
        6,
        (space_invaders_reset, space_invaders_step, space_invaders_observe),
        sticky_probability,
        ramping,
    )
