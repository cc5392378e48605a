"""Asterix, Freeway and Space Invaders of MinAtar in plain JAX, as `funcppo.envs.minatar` computes them.

The states are those of the games there, flat, with the last action, which a step may repeat. Each game has a
`transition` whose random numbers are arguments, by which it is compared with ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

from experiments.benchmarks.jax_peer import Task
from funcppo.envs.minatar import asterix, freeway, space_invaders
from funcppo.envs.minatar.game import SIZE, STICKY_PROBABILITY

Array = Any
# a step of a game: of its state, actions and a key
Play = Callable[[Any, Array, Array], tuple[Any, Array, Array]]


def at(y: Array, x: Array) -> Array:
    """Maps that are true in one cell; in none where it is off the grid."""
    cells = jnp.arange(SIZE)
    return (y[..., None] == cells)[..., None] & (x[..., None] == cells)[
        ..., None, :
    ]


def rows(x: Array) -> Array:
    """Numbers of rows [B] beside maps [B 10 10]."""
    return x[:, None, None]


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


# -- Asterix


class Asterix(NamedTuple):
    """State of each row: that of `asterix.EnvState`."""

    player_y: Array
    player_x: Array
    exists: Array  # [B 8], and so on
    x: Array
    moves_right: Array
    is_gold: Array
    spawn_speed: Array
    spawn: Array
    move_speed: Array
    move: Array
    ramp: Array
    ramp_index: Array
    action: Array  # -1: none yet


def reset_asterix(key: Array, n: int) -> Asterix:
    """The player in the middle of an empty field."""
    never = jnp.zeros((n, asterix.N_SLOTS), bool)
    return Asterix(
        player_y=jnp.full(n, 5),
        player_x=jnp.full(n, 5),
        exists=never,
        x=jnp.zeros((n, asterix.N_SLOTS), int),
        moves_right=never,
        is_gold=never,
        spawn_speed=jnp.full(n, asterix.SPAWN_SPEED),
        spawn=jnp.full(n, asterix.SPAWN_SPEED),
        move_speed=jnp.full(n, asterix.MOVE_INTERVAL),
        move=jnp.full(n, asterix.MOVE_INTERVAL),
        ramp=jnp.full(n, asterix.RAMP_INTERVAL),
        ramp_index=jnp.zeros(n, int),
        action=jnp.full(n, -1),
    )


def play_asterix(
    state: Asterix, action: Array, key: Array
) -> tuple[Asterix, Array, Array]:
    """Move the player and the entities; the reward is 1 for gold."""
    return transition_asterix(
        state, action, jax.random.uniform(key, (len(action), 3))
    )


def transition_asterix(
    state: Asterix, action: Array, unit: Array
) -> tuple[Asterix, Array, Array]:
    """The step, given uniform numbers [B 3] for the direction, the kind and the line of an entity that comes."""
    spawns = state.spawn == 0
    spawned = _spawn(state, spawns, unit)
    spawn_timer = jnp.where(spawns, state.spawn_speed, state.spawn)

    offset = {
        letter: (action == asterix.MINIMAL_ACTIONS.index(letter)).astype(int)
        for letter in "lrud"
    }
    across = state.player_x + offset["r"] - offset["l"]
    down = state.player_y + offset["d"] - offset["u"]
    player_x, player_y = jnp.clip(across, 0, SIZE - 1), jnp.clip(down, 1, 8)

    before, gold_before, dies_before = _meet(spawned, player_y, player_x)
    moves = state.move == 0
    moved = _move(before, moves)
    after, gold_after, dies_after = _meet(moved, player_y, player_x)
    move_timer = jnp.where(moves, state.move_speed, state.move)

    timed = after._replace(
        player_y=player_y,
        player_x=player_x,
        spawn=spawn_timer - 1,
        move=move_timer - 1,
        action=action,
    )
    reward = (gold_before + gold_after).astype(jnp.float32)
    return _accelerate(timed), reward, dies_before | dies_after


def _spawn(state: Asterix, spawns: Array, unit: Array) -> Asterix:
    """Put an entity at the edge of a random free line, if there is one."""
    free = ~state.exists
    chosen = 1 + (unit[:, 2] * free.sum(-1)).astype(int)
    is_chosen = free & (free.cumsum(-1) == chosen[:, None])
    is_new = is_chosen & spawns[:, None]
    moves_right = (unit[:, 0] < 0.5)[:, None]
    is_gold = (unit[:, 1] < asterix.GOLD_PROBABILITY)[:, None]
    start = jnp.where(moves_right, 0, SIZE - 1)
    return state._replace(
        exists=state.exists | is_new,
        x=jnp.where(is_new, start, state.x),
        moves_right=jnp.where(is_new, moves_right, state.moves_right),
        is_gold=jnp.where(is_new, is_gold, state.is_gold),
    )


def _move(state: Asterix, moves: Array) -> Asterix:
    """Move all entities by a cell; what leaves the field is gone."""
    x = state.x + jnp.where(state.moves_right, 1, -1)
    x = jnp.where(moves[:, None], x, state.x)
    is_inside = (x >= 0) & (x < SIZE)
    return state._replace(exists=state.exists & is_inside, x=x)


def _meet(
    state: Asterix, player_y: Array, player_x: Array
) -> tuple[Asterix, Array, Array]:
    """The entities that are left, how much gold is collected, and where the player dies."""
    line = 1 + jnp.arange(asterix.N_SLOTS)
    is_met = state.exists & (state.x == player_x[:, None])
    is_met &= line == player_y[:, None]
    gold = is_met & state.is_gold
    left = state._replace(exists=state.exists & ~gold)
    return left, gold.sum(-1), (is_met & ~state.is_gold).any(-1)


def _accelerate(state: Asterix) -> Asterix:
    """Shorten the intervals where it is time to."""
    can_ramp = (state.spawn_speed > 1) | (state.move_speed > 1)
    ramps = can_ramp & (state.ramp < 0)
    is_odd = state.ramp_index % 2 == 1
    faster_move = ramps & is_odd & (state.move_speed > 1)
    faster_spawn = ramps & (state.spawn_speed > 1)
    ramp = jnp.where(can_ramp, state.ramp - 1, state.ramp)
    return state._replace(
        spawn_speed=state.spawn_speed - faster_spawn,
        move_speed=state.move_speed - faster_move,
        ramp=jnp.where(ramps, asterix.RAMP_INTERVAL, ramp),
        ramp_index=state.ramp_index + ramps,
    )


def observe_asterix(state: Asterix) -> Array:
    """Player, enemies, trails, gold, as one vector a row."""
    line = jnp.broadcast_to(1 + jnp.arange(asterix.N_SLOTS), state.x.shape)
    exists, gold = state.exists[..., None, None], state.is_gold[..., None, None]
    cells = at(line, state.x) & exists
    trails = at(line, state.x - jnp.where(state.moves_right, 1, -1)) & exists
    return vector(
        at(state.player_y, state.player_x),
        (cells & ~gold).any(1),
        trails.any(1),
        (cells & gold).any(1),
    )


# -- Freeway


class Freeway(NamedTuple):
    """State of each row: that of `freeway.EnvState`."""

    position: Array
    car_x: Array  # [B 8], and so on
    car_timer: Array
    car_speed: Array
    move_timer: Array
    time_left: Array
    action: Array  # -1: none yet


def sample_speeds(key: Array, n: int) -> Array:
    """Random speeds and directions of the cars [B 8]."""
    unit = jax.random.uniform(key, (n, 2, freeway.N_CARS))
    magnitude = 1 + (unit[:, 0] * freeway.MAX_CAR_TIMER).astype(int)
    return jnp.where(unit[:, 1] < 0.5, -magnitude, magnitude)


def reset_freeway(key: Array, n: int) -> Freeway:
    """The player below the lanes, and cars of random speeds at the left."""
    speed = sample_speeds(key, n)
    return Freeway(
        position=jnp.full(n, freeway.START),
        car_x=jnp.zeros_like(speed),
        car_timer=jnp.abs(speed),
        car_speed=speed,
        move_timer=jnp.full(n, freeway.PLAYER_SPEED),
        time_left=jnp.full(n, freeway.TIME_LIMIT),
        action=jnp.full(n, -1),
    )


def play_freeway(
    state: Freeway, action: Array, key: Array
) -> tuple[Freeway, Array, Array]:
    """Move the player and the cars; the reward is 1 for a crossing, after which cars have other speeds."""
    return transition_freeway(state, action, sample_speeds(key, len(action)))


def transition_freeway(
    state: Freeway, action: Array, new_speed: Array
) -> tuple[Freeway, Array, Array]:
    """The step, given the speeds after a crossing."""
    is_ready = state.move_timer == 0
    up = is_ready & (action == freeway.MINIMAL_ACTIONS.index("u"))
    down = is_ready & (action == freeway.MINIMAL_ACTIONS.index("d"))
    moved = state.position + down.astype(int) - up.astype(int)
    position = jnp.clip(moved, 0, freeway.START)
    move_timer = jnp.where(up | down, freeway.PLAYER_SPEED, state.move_timer)

    has_crossed = position == 0
    position = jnp.where(has_crossed, freeway.START, position)
    speed = jnp.where(has_crossed[:, None], new_speed, state.car_speed)
    timer = jnp.where(has_crossed[:, None], jnp.abs(new_speed), state.car_timer)

    # A car hits the player before it moves or after it.
    moves = timer == 0
    car_x = jnp.where(moves, state.car_x + jnp.sign(speed), state.car_x) % SIZE
    column = freeway.PLAYER_COLUMN
    is_met = (state.car_x == column) | (car_x == column)
    lane = 1 + jnp.arange(freeway.N_CARS)
    is_hit = (is_met & (lane == position[:, None])).any(-1)

    time_left = state.time_left - 1
    after = Freeway(
        position=jnp.where(is_hit, freeway.START, position),
        car_x=car_x,
        car_timer=jnp.where(moves, jnp.abs(speed), timer - 1),
        car_speed=speed,
        move_timer=jnp.maximum(move_timer - 1, 0),
        time_left=time_left,
        action=action,
    )
    return after, has_crossed.astype(jnp.float32), time_left < 0


def observe_freeway(state: Freeway) -> Array:
    """Player, cars, and behind each car one map for each of the five speeds, as one vector a row."""
    lane = jnp.broadcast_to(1 + jnp.arange(freeway.N_CARS), state.car_x.shape)
    trail = at(lane, (state.car_x - jnp.sign(state.car_speed)) % SIZE)
    speed = jnp.abs(state.car_speed)[..., None, None]
    speeds = range(1, freeway.MAX_CAR_TIMER + 1)
    trails = [(trail & (speed == s)).any(1) for s in speeds]
    column = jnp.full_like(state.position, freeway.PLAYER_COLUMN)
    cars = at(lane, state.car_x).any(1)
    return vector(at(state.position, column), cars, *trails)


# -- Space Invaders


class SpaceInvaders(NamedTuple):
    """State of each row: that of `space_invaders.EnvState`."""

    position: Array
    bullets: Array  # [B 10 10], and so on
    alien_bullets: Array
    aliens: Array
    direction: Array
    move_interval: Array
    move_timer: Array
    alien_shot_timer: Array
    shot_timer: Array
    action: Array  # -1: none yet


def all_aliens(n: int) -> Array:
    """The aliens of a new wave in each row."""
    cells = jnp.arange(SIZE)
    first, end = space_invaders.ALIEN_COLUMNS
    wave = (cells < space_invaders.ALIEN_ROWS)[:, None]
    wave &= (cells >= first) & (cells < end)
    return jnp.broadcast_to(wave, (n, SIZE, SIZE))


def reset_space_invaders(key: Array, n: int) -> SpaceInvaders:
    """The cannon in the middle, and all aliens on their way to the left."""
    empty = jnp.zeros((n, SIZE, SIZE), bool)
    interval = jnp.full(n, space_invaders.MOVE_INTERVAL)
    return SpaceInvaders(
        position=jnp.full(n, 5),
        bullets=empty,
        alien_bullets=empty,
        aliens=all_aliens(n),
        direction=jnp.full(n, -1),
        move_interval=interval,
        move_timer=interval,
        alien_shot_timer=jnp.full(n, space_invaders.ALIEN_SHOT_INTERVAL),
        shot_timer=jnp.zeros(n, int),
        action=jnp.full(n, -1),
    )


def play_space_invaders(
    state: SpaceInvaders, action: Array, key: Array
) -> tuple[SpaceInvaders, Array, Array]:
    """Move the cannon, bullets and aliens; the reward is 1 for each alien that is shot. The key is not used."""
    actions = space_invaders.MINIMAL_ACTIONS
    fires = (action == actions.index("f")) & (state.shot_timer == 0)
    left = (action == actions.index("l")).astype(int)
    right = (action == actions.index("r")).astype(int)
    position = jnp.clip(state.position + right - left, 0, SIZE - 1)
    cannon = at(jnp.full_like(position, SIZE - 1), position)

    edge = jnp.zeros_like(cannon[:, :1])
    shot = state.bullets | (cannon & rows(fires))
    bullets = jnp.concatenate([shot[:, 1:], edge], 1)
    alien_bullets = jnp.concatenate([edge, state.alien_bullets[:, :-1]], 1)
    is_hit = ((alien_bullets | state.aliens) & cannon).any((1, 2))
    advanced, is_reached = _advance(state, cannon)

    # The lowest alien of the nearest column shoots.
    shoots = state.alien_shot_timer == 0
    alien_bullets |= _nearest_alien(advanced.aliens, position) & rows(shoots)
    interval = space_invaders.ALIEN_SHOT_INTERVAL
    alien_shot_timer = jnp.where(shoots, interval, state.alien_shot_timer)

    killed = advanced.aliens & bullets
    cool_down = space_invaders.SHOT_COOL_DOWN
    shot_timer = jnp.where(fires, cool_down, state.shot_timer)
    after = advanced._replace(
        position=position,
        bullets=bullets & ~killed,
        alien_bullets=alien_bullets,
        aliens=advanced.aliens & ~killed,
        move_timer=advanced.move_timer - 1,
        alien_shot_timer=alien_shot_timer - 1,
        shot_timer=jnp.maximum(shot_timer - 1, 0),
        action=action,
    )
    reward = killed.sum((1, 2)).astype(jnp.float32)
    return _next_wave(after), reward, is_hit | is_reached


def _advance(
    state: SpaceInvaders, cannon: Array
) -> tuple[SpaceInvaders, Array]:
    """The state with the aliens moved where it is time to, and where they have won by it."""
    moves = state.move_timer == 0
    aliens, is_leftward = state.aliens, state.direction < 0
    at_edge = jnp.where(
        is_leftward, aliens[:, :, 0].any(-1), aliens[:, :, SIZE - 1].any(-1)
    )

    # At the edge they turn and come down by a row.
    left, right = jnp.roll(aliens, -1, 2), jnp.roll(aliens, 1, 2)
    sideways = jnp.where(rows(is_leftward), left, right)
    turns = moves & at_edge
    lands = turns & aliens[:, SIZE - 1].any(-1)
    moved = jnp.where(rows(at_edge), jnp.roll(aliens, 1, 1), sideways)
    aliens = jnp.where(rows(moves), moved, aliens)
    interval = jnp.minimum(state.aliens.sum((1, 2)), state.move_interval)
    advanced = state._replace(
        aliens=aliens,
        direction=jnp.where(turns, -state.direction, state.direction),
        move_timer=jnp.where(moves, interval, state.move_timer),
    )
    return advanced, lands | (moves & (aliens & cannon).any((1, 2)))


def _nearest_alien(aliens: Array, position: Array) -> Array:
    """The cell of the lowest alien in the column next to the cannon; of two columns the left one."""
    cells = jnp.arange(SIZE)
    from_cannon = cells - position[:, None]
    order = 2 * jnp.abs(from_cannon) + (from_cannon > 0)
    column = jnp.where(aliens.any(1), order, 10 * SIZE).argmin(-1)
    in_column = aliens & (cells == rows(column))
    row = jnp.where(in_column.any(-1), cells, -1).max(-1)
    return at(row, column)


def _next_wave(state: SpaceInvaders) -> SpaceInvaders:
    """The state with all aliens again, and faster, where the last one was shot."""
    is_cleared = ~state.aliens.any((1, 2))
    slowest = space_invaders.MIN_MOVE_INTERVAL
    is_faster = is_cleared & (state.move_interval > slowest)
    wave = all_aliens(len(is_cleared))
    return state._replace(
        aliens=jnp.where(rows(is_cleared), wave, state.aliens),
        move_interval=state.move_interval - is_faster,
    )


def observe_space_invaders(state: SpaceInvaders) -> Array:
    """Cannon, aliens, those moving left, those moving right, bullets of either side, as one vector a row."""
    bottom = jnp.full_like(state.position, SIZE - 1)
    is_leftward = rows(state.direction < 0)
    return vector(
        at(bottom, state.position),
        state.aliens,
        state.aliens & is_leftward,
        state.aliens & ~is_leftward,
        state.bullets,
        state.alien_bullets,
    )


def game(reset: Any, play: Play, observe: Any, actions: str, n: int) -> Task:
    """A game with sticky actions, and `n` channels of its images."""
    return Task(
        reset=reset,
        step=sticky(play),
        observe=observe,
        n_obs=SIZE * SIZE * n,
        n_actions=len(actions),
        activation=jax.nn.relu,
    )


ASTERIX = game(
    reset_asterix, play_asterix, observe_asterix, asterix.MINIMAL_ACTIONS, 4
)
FREEWAY = game(
    reset_freeway, play_freeway, observe_freeway, freeway.MINIMAL_ACTIONS, 7
)
SPACE_INVADERS = game(
    reset_space_invaders,
    play_space_invaders,
    observe_space_invaders,
    space_invaders.MINIMAL_ACTIONS,
    6,
)
