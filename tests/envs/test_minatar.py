"""Episodes and single steps of the package `minatar`, and ours beside them."""

from functools import partial

import numpy as np
import pytest
import torch

from examples import seaquest
from examples.seaquest import Bullets, Enemies, Player, Swimmers
from examples.seaquest import SeaquestState as EnvState
from examples.seaquest import SeaquestTimers as Timers
from funcppo.core import random, tree
from funcppo.envs import make, minatar

LETTERS = "nlurdf"
ALL_ACTIONS = {"minimal_actions": False, "sticky_probability": 0.0}


class Recorded(np.random.RandomState):
    """A generator whose uniform numbers are kept, and whose integers are made of them."""

    def __init__(self, seed):
        super().__init__(seed)
        self.units = []

    def rand(self, *shape):
        value = super().rand(*shape)
        self.units.append(value)
        return value

    def randint(self, low, high=None, size=None):
        low, high = (0, low) if high is None else (low, high)
        unit = self.rand(*(() if size is None else (size,)))
        return (low + np.floor(unit * (high - low))).astype(int)


def reference_game(name, seed, **options):
    module = pytest.importorskip(
        f"minatar.environments.{name}",
        reason="the package minatar is not installed: pip install minatar",
    )
    env = module.Env(**options)
    env.random = Recorded(seed)
    env.reset()
    return env


def assert_plays_alike(name, ours, state, step, *, seed, n_steps, action):
    """Play an episode in both from equal states with equal draws.

    Args:
      state: our state that equals that of the reference after its reset.
      step: (state, action, draws of the reference) -> (state, timestep).
      action: (reference, t) -> number of the action, of all six.
    """
    env, rewards = reference_game(name, seed), 0.0
    state = state(env)
    for t in range(n_steps):
        seen = ours.observe(ours.cfg, None, state)[0].numpy()
        assert np.array_equal(seen, env.state()), f"step {t}"
        number = action(env, t)
        env.random.units.clear()
        reward, terminal = env.act(number)
        units = list(env.random.units)
        state, timestep = step(state, torch.tensor([number]), units)
        assert float(timestep.reward[0]) == reward, f"step {t}"
        assert bool(timestep.terminated[0]) == terminal, f"step {t}"
        rewards += reward
        if terminal:
            break
    return t, rewards


def scalar(value):
    return torch.tensor([[value]])


def number(value):
    return scalar(int(value))


def same(env, names):
    """Fields of our state that the reference calls alike."""
    return {name: scalar(getattr(env, name)) for name in names.split()}


def keys(n=1, seed=0):
    return random.split(random.key(seed), n)


def _observe(env, state):
    return env.observe(env.cfg, None, state).numpy()


def place_asterix(env, draws):
    """Any player, anything in any line, and timers of any difficulty, at 0 often."""
    env.player_x = int(draws.integers(10))
    env.player_y = int(draws.integers(1, 9))
    density = draws.choice([0.0, 0.5, 0.9, 1.0])
    for i in range(8):
        x = int(draws.integers(10))
        if draws.random() < 0.5:  # near the player
            x = min(max(env.player_x + int(draws.integers(-1, 2)), 0), 9)
        if draws.random() < density:
            right, gold = (bool(x) for x in draws.integers(0, 2, 2))
            env.entities[i] = [x, i + 1, right, gold]
    env.spawn_speed = int(draws.integers(1, 11))
    env.move_speed = int(draws.integers(1, 6))
    if draws.random() < 0.1:
        env.spawn_speed = env.move_speed = 1
    or_0 = lambda end: int(draws.choice([0, draws.integers(end)]))
    env.spawn_timer = or_0(env.spawn_speed + 1)
    env.move_timer = or_0(env.move_speed + 1)
    env.ramp_timer = int(draws.choice([-1, 0, draws.integers(101)]))
    env.ramp_index = int(draws.integers(20))


def asterix_state(env):
    rows = [
        (x is not None, *((x[0], x[2], x[3]) if x else (0, False, False)))
        for x in env.entities
    ]
    entities = (torch.tensor([column]) for column in zip(*rows))
    return minatar.AsterixState(
        entities=minatar.Entities(*entities),
        timers=minatar.AsterixTimers(
            spawn=scalar(env.spawn_timer),
            move=scalar(env.move_timer),
            ramp=scalar(env.ramp_timer),
            **same(env, "spawn_speed move_speed ramp_index"),
        ),
        **same(env, "player_y player_x terminal"),
    )


def seen_asterix(state):
    """All but what was in slots that are empty."""
    exists = state.entities.exists
    filled = lambda x: torch.where(exists, x, torch.zeros_like(x))
    return state._replace(entities=tree.map(filled, state.entities))


def step_asterix(game, state, action, units):
    unit = [[*map(float, u), 0.0, 0.0, 0.0][:3] for u in units]
    unit = torch.tensor(unit, dtype=torch.float64)
    return minatar.asterix_transition(game.cfg, state, action, unit)


def place_breakout(env, draws):
    """Any ball above the paddle's row, any paddle, and a wall of any bricks, full, sparse or empty."""
    env.ball_y, env.ball_x = int(draws.integers(9)), int(draws.integers(10))
    env.last_y, env.last_x = int(draws.integers(10)), int(draws.integers(10))
    env.ball_dir = int(draws.integers(4))
    env.pos = int(draws.integers(10))
    if draws.random() < 0.5:  # near the ball
        env.pos = int(np.clip(env.ball_x + draws.integers(-1, 2), 0, 9))
    density = draws.choice([0.0, 0.02, 0.5, 1.0])
    env.brick_map = (draws.random((10, 10)) < density).astype(float)
    if draws.random() < 0.5:  # where bricks are in a game
        env.brick_map[[0, *range(4, 10)]] = 0
    env.strike = bool(draws.random() < 0.5)
    if draws.random() < 0.3:
        env.ball_y = 8


def breakout_state(env):
    names = "ball_y ball_x strike last_y last_x terminal"
    return minatar.BreakoutState(
        direction=scalar(env.ball_dir),
        paddle=scalar(env.pos),
        bricks=torch.from_numpy(env.brick_map == 1).unsqueeze(0),
        **same(env, names),
    )


def step_without_draws(game, state, action, _):
    n = len(action)
    return game.step_functional(game.cfg, None, state, action, keys(n))


def step_freeway(game, state, action, units):
    """The reference draws speeds and signs where the player has crossed."""
    speed = np.ones((len(units), 8))
    for i, u in enumerate(units):
        if u:
            speed[i] = (1 + np.floor(5 * u[0])) * np.sign(u[1] - 0.5)
    speed = torch.from_numpy(speed).long()
    return minatar.freeway_transition(game.cfg, state, action, speed)


def place_freeway(env, draws):
    """Any player, at the first and the last lane often, any cars, at the player's column often, and any timers."""
    env.pos = int(draws.choice([0, 1, 9, draws.integers(10)]))
    env.move_timer = int(draws.choice([0, draws.integers(4)]))
    env.terminate_timer = int(draws.choice([0, 1, draws.integers(2501)]))
    for car in env.cars:
        car[0] = int(draws.choice([3, 4, 5, draws.integers(10)]))
        car[3] = int(draws.choice([-1, 1]) * draws.integers(1, 6))
        car[2] = int(draws.choice([0, draws.integers(abs(car[3]) + 1)]))


def freeway_state(env):
    x, _, timer, speed = (
        torch.tensor([[int(value) for value in column]])
        for column in zip(*env.cars)
    )
    return minatar.FreewayState(
        position=number(env.pos),
        car_x=x,
        car_timer=timer,
        car_speed=speed,
        move_timer=number(env.move_timer),
        time_left=number(env.terminate_timer),
        terminal=scalar(env.terminal),
    )


def test_speeds_are_as_likely_as_in_the_reference():
    speed = minatar.sample_speeds(keys(2000)).flatten()
    counts = torch.stack([(speed == s).sum() for s in range(-5, 6) if s])
    # 16,000 draws of ten values: a standard deviation is 38.
    assert ((counts - 1600).abs() < 5 * 38).all()


def place_invaders(env, draws):
    """Any cannon, any bullets, aliens anywhere but at least one, and timers of any difficulty, at 0 often."""

    def cells(*densities):
        return (draws.random((10, 10)) < draws.choice(densities)).astype(float)

    env.pos = int(draws.integers(10))
    env.f_bullet_map = cells(0.02, 0.2, 1.0)
    env.e_bullet_map = cells(0.0, 0.02, 0.2)
    env.alien_map = cells(0.0, 0.02, 0.3)
    if draws.random() < 0.7:  # above the row of the cannon
        env.alien_map[9] = 0
    env.alien_map[tuple(draws.integers(0, 9, 2))] = 1
    env.alien_dir = int(draws.choice([-1, 1]))
    env.enemy_move_interval = int(draws.integers(6, 13))
    env.alien_move_timer = int(draws.choice([0, draws.integers(13)]))
    env.alien_shot_timer = int(draws.choice([0, draws.integers(11)]))
    env.shot_timer = int(draws.choice([0, draws.integers(6)]))


def invaders_state(env):
    def cells(values):
        return torch.from_numpy(values == 1).unsqueeze(0)

    return minatar.SpaceInvadersState(
        position=number(env.pos),
        bullets=cells(env.f_bullet_map),
        alien_bullets=cells(env.e_bullet_map),
        aliens=cells(env.alien_map),
        direction=number(env.alien_dir),
        move_interval=number(env.enemy_move_interval),
        move_timer=number(env.alien_move_timer),
        alien_shot_timer=number(env.alien_shot_timer),
        shot_timer=number(env.shot_timer),
        terminal=scalar(env.terminal),
    )


INVADERS = place_invaders, invaders_state, step_without_draws
ASTERIX = place_asterix, asterix_state, step_asterix


@pytest.mark.parametrize(
    ("name", "functions", "ramping"),
    [
        ("asterix", ASTERIX, True),
        ("asterix", ASTERIX, False),
        ("breakout", (place_breakout, breakout_state, step_without_draws), True),
        ("freeway", (place_freeway, freeway_state, step_freeway), True),
        ("space_invaders", INVADERS, True),
        ("space_invaders", INVADERS, False),
    ],
)  # fmt: skip
def test_one_step_from_any_state_equals_the_reference(name, functions, ramping):
    """Take one step in both from each of 2,000 random states, of which some are terminal.

    The functions: `place` (reference, generator) sets the reference to a random state; one gives our state that equals
    that of a reference; and a step is (game, states, actions, draws of the reference in each) -> (states, timestep).
    """
    place, state_of, step = functions
    game = getattr(minatar, name)(
        **ALL_ACTIONS, **({} if ramping else {"ramping": False})
    )
    draws = np.random.default_rng(0)
    rows = []
    for seed in range(2000):
        env = reference_game(name, seed, ramping=ramping)
        place(env, draws)
        env.terminal = bool(draws.random() < 0.05)
        was_over, before, image = env.terminal, state_of(env), env.state()
        action = int(draws.integers(len(LETTERS)))
        env.random.units.clear()
        reward, terminal = env.act(action)
        units = list(env.random.units)
        after = state_of(env), env.state(), float(reward), terminal
        rows.append((was_over, before, image, action, units, *after))
    was_over, before, images, actions, units, want, *wanted = zip(*rows)
    images_after, rewards, terminals = wanted

    before, want = (
        tree.map(lambda *x: torch.cat(x), *s) for s in (before, want)
    )
    got, timestep = step(game, before, torch.tensor(actions), units)
    ours_and_theirs = {
        "observation before": (_observe(game, before), np.stack(images)),
        "observation": (_observe(game, got), np.stack(images_after)),
        "reward": (timestep.reward.numpy(), np.array(rewards, np.float32)),
        "terminated": (timestep.terminated.numpy(), np.array(terminals)),
    }
    if name == "asterix":
        got, want = seen_asterix(got), seen_asterix(want)
    for path, a, b in zip(tree.paths(got), tree.leaves(got), tree.leaves(want)):
        ours_and_theirs[path] = a.numpy(), b.numpy()
    for what, (a, b) in ours_and_theirs.items():
        differs = (a != b).reshape(len(rows), -1).any(1)
        row = int(differs.argmax())
        state = tree.map(lambda x, row=row: x[row], before)
        assert not differs.any(), (
            f"{what} of {differs.sum()} states differs, of the first after action "
            f"{LETTERS[actions[row]]!r} in {state}"
        )
    assert sum(rewards) > 100 and sum(terminals) - sum(was_over) > 100


def test_the_next_wave_is_faster_as_in_the_reference():
    """From a last alien above the cannon."""

    game = minatar.space_invaders(**ALL_ACTIONS)

    def last_alien(env):
        env.alien_map[:] = 0
        env.alien_map[3, 5] = 1
        aliens = torch.from_numpy(env.alien_map == 1).unsqueeze(0)
        first = game.reset(game.cfg, None, keys())
        return first._replace(aliens=aliens)

    _, reward = assert_plays_alike(
        "space_invaders", game, last_alien,
        partial(step_without_draws, game),
        seed=0, n_steps=60, action=lambda env, t: 5,
    )  # fmt: skip
    assert reward > 1  # shots at the second wave hit


SEAQUEST = seaquest.seaquest(sticky_probability=0.0)
NOTHING, LEFT, UP, RIGHT, DOWN, FIRE = range(6)


def first_sea(env):
    return SEAQUEST.reset(SEAQUEST.cfg, None, keys())


def step_seaquest(state, action, units):
    """The reference draws three numbers for an enemy, then two for a diver."""
    units = [float(x) for x in units]
    enemy = units[:3] if len(units) >= 3 else [0.0] * 3
    diver = units[-2:] if len(units) in (2, 5) else [0.0] * 2
    unit = torch.tensor([enemy + diver], dtype=torch.float64)
    return seaquest.seaquest_transition(SEAQUEST.cfg, state, action, unit)


def slots(rows, n, n_columns):
    """A list of the reference in slots: which are filled, and its columns."""
    table = np.zeros((n, n_columns), np.int64)
    for i, row in enumerate(rows):
        table[i] = [int(x) for x in row]
    exists = torch.arange(n) < len(rows)
    columns = torch.from_numpy(table).unsqueeze(0).unbind(-1)
    return exists.unsqueeze(0), columns


def swimmers(rows, n):
    exists, (x, y, right, timer) = slots([r[:4] for r in rows], n, 4)
    birth = torch.arange(n).unsqueeze(0)  # the order of the list
    return Swimmers(exists, x, y, right == 1, timer, birth)


def sea_of(env):
    """The state of the reference."""

    enemies = [*env.e_fish, *env.e_subs]
    n_fish = len(env.e_fish)
    index = torch.arange(seaquest.N_ENEMIES).unsqueeze(0)
    timers = [[0]] * n_fish + [[sub[4]] for sub in env.e_subs]
    _, (shot_timer,) = slots(timers, seaquest.N_ENEMIES, 1)
    exists, (x, y, right) = slots(env.f_bullets, seaquest.N_BULLETS, 3)
    flying = np.zeros((2, 10, 10), bool)
    for bullet in env.e_bullets:
        flying[int(bullet[2]), bullet[1], bullet[0]] = True
    left_and_right = torch.from_numpy(flying).unsqueeze(1)
    return EnvState(
        player=Player(
            x=number(env.sub_x),
            y=number(env.sub_y),
            faces_right=number(env.sub_or) == 1,
            oxygen=number(env.oxygen),
            n_divers=number(env.diver_count),
            is_up=number(env.surface) == 1,
            shot_timer=number(env.shot_timer),
        ),
        bullets=Bullets(exists, x, y, right == 1),
        enemies=Enemies(
            swimmers(enemies, seaquest.N_ENEMIES), index >= n_fish, shot_timer
        ),
        leftward=left_and_right[0],
        rightward=left_and_right[1],
        divers=swimmers(env.divers, seaquest.N_DIVERS),
        timers=Timers(
            time=scalar(1000),
            spawn_speed=number(env.e_spawn_speed),
            enemy_spawn=number(env.e_spawn_timer),
            diver_spawn=number(env.d_spawn_timer),
            move_speed=number(env.move_speed),
            ramp_index=number(env.ramp_index),
        ),
        terminal=number(env.terminal) == 1,
    )


def observed(state):
    return SEAQUEST.observe(SEAQUEST.cfg, None, state)[0].numpy()


def contents(state):
    """What is in the sea, in no order: enemies, divers and bullets of the player."""
    enemies = state.enemies
    is_submarine = enemies.is_submarine
    shot_timer = torch.where(is_submarine, enemies.shot_timer, 0)
    groups = [
        (*enemies.swimmers[:5], is_submarine, shot_timer),
        state.divers[:5],
        state.bullets,
    ]
    tables = [torch.stack([x[0].long() for x in g], -1) for g in groups]
    return [
        sorted(row[1:] for row in table.tolist() if row[0]) for table in tables
    ]


@pytest.mark.parametrize("seed", range(3))
def test_one_step_of_seaquest_from_any_state_equals_the_reference(seed):
    """Random players that cannot die, from the first difficulty to the last, with divers and air at random."""
    draws = np.random.default_rng(seed)
    env = reference_game("seaquest", seed)
    n_shot, n_ends, largest_reward = 0, 0, 0
    for t in range(600):
        if t == 200 * seed:
            env.e_spawn_speed, env.move_speed = 1, 2
        if t % 20 == 0:  # so that some swim into each other's cells
            env.move_speed = int(draws.integers(2, 6))
            del env.e_fish[6:], env.e_subs[3:]
        if draws.random() < 0.1:
            env.diver_count = int(draws.choice([-1, 0, 1, 5, 6, 6, 6]))
            env.oxygen = int(draws.integers(0, 201))
        # Half the time up, or else there is little to shoot.
        weights = [1, 3, 3, 3, 2, 6] if draws.random() < 0.5 else [1] * 6
        action = int(draws.choice(6, p=np.array(weights) / sum(weights)))

        before = sea_of(env)
        assert np.array_equal(observed(before), env.state()), f"step {t}"
        env.random.units.clear()
        reward, terminal = env.act(action)
        units = env.random.units
        after, timestep = step_seaquest(before, torch.tensor([action]), units)
        assert float(timestep.reward[0]) == reward, f"step {t}"
        assert bool(timestep.terminated[0]) == terminal, f"step {t}"
        assert np.array_equal(observed(after), env.state()), f"step {t}"
        want = sea_of(env)
        assert contents(after) == contents(want), f"step {t}"
        got, expected = (
            torch.cat([*sea.player, *sea.timers[1:]]) for sea in (after, want)
        )
        assert torch.equal(got, expected), f"step {t}"

        n_shot += reward > 0
        n_ends += terminal
        largest_reward = max(largest_reward, reward)
        env.terminal = False
    assert n_shot > 10 and n_ends > 10 and largest_reward > 2


def test_each_step_of_an_episode_equals_the_reference():
    """Players that stay under water, meet divers, and shoot; slots and births are ours throughout."""
    lengths, rewards = [], []
    for seed in range(3):
        draws = np.random.default_rng(seed)

        def play(env, t, draws=draws):
            if env.oxygen < 40 and env.diver_count > 0:
                return UP
            if draws.random() < 0.4:
                return FIRE
            up = UP if env.sub_y > 1 else DOWN
            return int(draws.choice([LEFT, RIGHT, DOWN, up]))

        length, reward = assert_plays_alike(
            "seaquest", SEAQUEST, first_sea, step_seaquest,
            seed=seed, n_steps=400, action=play,
        )  # fmt: skip
        lengths.append(length)
        rewards.append(reward)
    assert max(lengths) > 30 and sum(rewards) > 0


NAMES = ("Asterix", "Breakout", "Freeway", "SpaceInvaders")


@pytest.mark.parametrize("name", NAMES)
def test_both_action_sets_and_the_sticky_actions_are_the_references(name):
    minatar = pytest.importorskip(
        "minatar", reason="the package minatar is not installed"
    )
    module = {"SpaceInvaders": "space_invaders"}.get(name, name.lower())
    theirs = minatar.Environment(module)
    minimal, full = make(f"MinAtar/{name}-v1"), make(f"MinAtar/{name}-v0")
    letters = [theirs.env.action_map[i] for i in theirs.minimal_action_set()]
    assert minimal.cfg.env.cfg.actions == "".join(letters)
    assert full.cfg.env.cfg.actions == "".join(theirs.env.action_map)
    assert list(minimal.spec.shape) == theirs.state_shape()
    assert minimal.cfg.settings == theirs.sticky_action_prob
