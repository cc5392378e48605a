"""Environments of Gymnasium behind a bridge, beside the same environments stepped by hand."""

import itertools
import multiprocessing
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch

import funcppo as fp
from funcppo.envs import wrappers
from tests.learning import WORLD, assert_trees_equal, on_gpu, refused

SMALL = {"n_steps": 8, "n_epochs": 2, "n_minibatches": 2, "n_updates": 4}
NETWORK = fp.nets.mlp(8)


class Counter(gym.Env):
    """Counts its steps up to 3, where it ends; observes a space of the test's."""

    observation_space = gym.spaces.Box(0, 9, (2,))
    action_space = gym.spaces.Discrete(2, start=5)
    n_calls = 0  # of all counters

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        type(self).n_calls += 1
        self.count = 0
        return self.observe(), {}

    def step(self, action):
        assert action in self.action_space
        type(self).n_calls += 1
        self.count += 1
        return self.observe(), float(action), self.count >= 3, False, {}

    def observe(self):
        return np.array([self.count, 0], np.float32)


class Walk(gym.Env):
    """Walks from 0 by random steps of its own until it is beyond 3, or for 8 steps."""

    observation_space = gym.spaces.Box(-9, 9, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.steps = 0.0, 0
        return self.observe(), {}

    def step(self, action):
        self.place += (2 * action - 1) * float(self.np_random.uniform(1, 2))
        self.steps += 1
        is_over = abs(self.place) > 3
        is_late = self.steps >= 8 and not is_over
        return self.observe(), self.place, is_over, is_late, {}

    def observe(self):
        return np.array([self.place, self.steps], np.float32)


class Begun(Walk):
    """A walk whose first episode is over."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            super().reset(seed=seed)
        return super().reset()


def with_space(base_class=Counter, **spaces):
    return type("Spaces", (base_class,), spaces)


def keys(n, seed=0):
    return fp.random.split(fp.random.key(seed), n)


def start(env, n):
    return env.reset(env.cfg, None, keys(n))


def step(env, state, action):
    return env.step_functional(env.cfg, None, state, action, keys(len(action)))


def by_hand(make_env, key, actions):
    """Steps of single environments, each reset when its episode ends: (final observation, reward, flags, next)."""
    envs = [make_env() for _ in key]
    seeds = (fp.random.bits(key, ()) >> 1).tolist()
    first = [env.reset(seed=seed)[0] for env, seed in zip(envs, seeds)]
    steps = []
    for row_actions in actions:
        rows = []
        for env, action in zip(envs, row_actions):
            obs, reward, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
            next_obs = env.reset()[0] if done else obs
            rows.append((obs, reward, terminated, truncated, next_obs))
        steps.append([np.array(column) for column in zip(*rows)])
    return np.array(first), steps


@pytest.mark.parametrize(
    ("name", "max_steps", "mode"),
    [
        ("CartPole-v1", 20, "sync"),
        ("CartPole-v1", 20, "async"),
        ("Acrobot-v1", 15, "sync"),
        ("Pendulum-v1", 10, "sync"),
        ("MountainCarContinuous-v0", 9, "sync"),
    ],
)
def test_each_step_is_that_of_the_environment_itself(name, max_steps, mode):
    """With the last observation of each episode, truncated ones included, and no step between two episodes."""
    n_rows, n_steps = 3, 60
    options = {"max_episode_steps": max_steps}
    env = fp.envs.gymnasium(name, vectorization_mode=mode, **options)
    draws = np.random.default_rng(0)
    if env.spec.continuous_actions:
        actions = draws.normal(size=(n_steps, n_rows, 1)).astype(np.float32)
    else:
        actions = draws.integers(env.spec.action_size, size=(n_steps, n_rows))

    bounds = gym.make(name).action_space
    low, high = getattr(bounds, "low", 0), getattr(bounds, "high", 99)
    first, steps = by_hand(
        partial(gym.make, name, **options), keys(n_rows), np.clip(actions, low, high)
    )  # fmt: skip
    state = start(env, n_rows)
    assert np.array_equal(state.obs, first.astype(np.float32))
    n_ends = np.zeros(2)
    for row_actions, wanted in zip(actions, steps):
        reached, timestep, state = wrappers.step_with_autoreset(
            env, None, state, torch.from_numpy(row_actions), keys(n_rows), keys(n_rows)
        )  # fmt: skip
        got = (reached.obs, *timestep, state.obs)
        for ours, theirs in zip(got, wanted):
            assert np.array_equal(ours, theirs.astype(ours.numpy().dtype))
        n_ends += [timestep.terminated.sum(), timestep.truncated.sum()]
    assert n_ends[1] > 0 and (n_ends[0] > 0) == (name == "CartPole-v1")


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_no_environment_is_stepped_past_its_end(end):
    """Some raise an error then; the row stays, whatever its environment does meanwhile."""

    class Strict(Counter):
        def step(self, action):
            assert self.count < 3, "stepped past its end"
            obs, reward, is_over, _, info = super().step(action)
            is_terminated = is_over and end == "terminated"
            return obs, reward, is_terminated, is_over != is_terminated, info

    env = fp.envs.gymnasium(Strict)
    state = start(env, 2)
    action = torch.zeros(2, dtype=torch.int64)
    for count in (1.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0):
        state, timestep = step(env, state, action)
        assert state.obs[:, 0].tolist() == [count] * 2
        assert getattr(timestep, end).tolist() == [count == 3.0] * 2


# Spaces


def test_a_discrete_observation_is_one_hot():
    env = fp.envs.gymnasium("FrozenLake-v1", is_slippery=False)
    assert env.spec.observation_size == 16 and env.spec.action_size == 4
    state, _ = step(env, start(env, 2), torch.tensor([1, 2]))  # down, right
    obs = env.observe(env.cfg, None, state)
    assert obs.dtype == torch.float32 and obs.sum(-1).tolist() == [1.0, 1.0]
    assert obs.argmax(-1).tolist() == [4, 1]


class Pixels(Counter):
    observation_space = gym.spaces.Box(0, 255, (4, 5, 3), np.uint8)

    def observe(self):
        return np.full((4, 5, 3), 20 + 20 * self.count, np.uint8)


class Board(Pixels):
    """Bytes that are no pixels."""

    observation_space = gym.spaces.Box(0, 2, (4, 5, 3), np.uint8)

    def observe(self):
        return np.full((4, 5, 3), 2, np.uint8)


@pytest.mark.parametrize("scale_images", [True, False])
@pytest.mark.parametrize("network", [fp.nets.mlp(8), fp.nets.gru(8)])
def test_bytes_are_images_by_their_bounds_and_read(scale_images, network):
    flat = fp.envs.wrappers.flatten_observation
    board = fp.envs.gymnasium(Board, scale_images=scale_images)
    image = fp.envs.gymnasium(Pixels, scale_images=scale_images)
    vectors = lambda: gym.wrappers.ReshapeObservation(Pixels(), (60,))
    bytes_ = fp.envs.gymnasium(vectors, scale_images=scale_images)
    for env, value in ((board, 2), (image, 40)):
        state, _ = step(env, start(env, 2), torch.zeros(2, dtype=torch.int64))
        obs = env.observe(env.cfg, WORLD, state)
        is_image = env is image
        assert (state.obs.dtype == torch.uint8) == is_image
        is_scaled = scale_images and is_image
        is_kept = is_image and not scale_images
        assert obs.dtype == (torch.uint8 if is_kept else torch.float32)
        want = torch.full((2, 4, 5, 3), value / 255 if is_scaled else value)
        assert torch.equal(obs, want.to(obs.dtype))
        assert env.spec.shape == (4, 5, 3)
    for env in (flat(board), flat(image), bytes_):
        ppo = fp.ppo(env=env, network=network, n_steps=4, n_minibatches=2)
        state, metrics = ppo.step(ppo.init(fp.random.key(0)))
        assert metrics.loss.loss.isfinite() and int(state.update) == 1


BOX = gym.spaces.Box(0, 9, (2,))


@pytest.mark.parametrize(
    ("spaces", "problem"),
    [
        ({"observation_space": gym.spaces.Dict(a=BOX, b=gym.spaces.Text(3))}, "observations of Box, .*, got Text"),
        ({"observation_space": gym.spaces.Sequence(BOX)}, "observations of Box, .*, got Sequence"),
        ({"action_space": gym.spaces.Tuple([gym.spaces.Discrete(2), BOX])},
         "actions of a Discrete, .*, or several of one kind, got Tuple"),
        ({"action_space": gym.spaces.Box(0, 5, (2,), np.int64)},
         "actions of a Discrete, MultiDiscrete or MultiBinary .*, got Box.*int64"),
    ],
)  # fmt: skip
def test_other_spaces_are_refused_in_one_line(spaces, problem):
    made = with_space(**spaces)
    refused(f"Spaces: expected {problem}", fp.envs.gymnasium, made)


class Arm(gym.Env):
    """Pays the sum of its actions."""

    observation_space = gym.spaces.Box(0, 9, ())
    action_space = gym.spaces.Box(-2, 2, (2, 2))

    def reset(self, *, seed=None, options=None):
        return np.float32(1.0), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return np.float32(2.0), float(action.sum()), False, False, {}


def test_a_box_of_any_shape_is_an_action_and_is_clipped_to_its_bounds():
    env = fp.envs.gymnasium(Arm)
    assert env.spec.action_size == 4 and env.spec.continuous_actions
    assert env.spec.shape == (1,)
    action = torch.tensor([[1.0, 9.0, -0.5, 0.0]])
    state, timestep = step(env, start(env, 1), action)
    assert timestep.reward.tolist() == [2.5] and state.obs.tolist() == [[2.0]]

    # Floats within spaces are clipped each to its bounds.
    made = []

    class Pair(Arm):
        action_space = gym.spaces.Tuple(
            [BOX, gym.spaces.Box(-1, 1, (1,), np.float64)]
        )

        def step(self, action):
            made.append(action)
            is_legal = action in self.action_space
            return np.float32(0), 0.0, is_legal, False, {}

    env = fp.envs.gymnasium(Pair)
    action = torch.tensor([[-1.0, 3.0, 2.0]])
    _, timestep = step(env, start(env, 1), action)
    assert timestep.terminated.all()
    assert [x.tolist() for x in made[0]] == [[0.0, 3.0], [1.0]]


@pytest.mark.parametrize(
    ("space", "sizes", "rewards"),
    [
        (gym.spaces.MultiBinary(3), (2,) * 3, [3.0, 1.0]),
        (gym.spaces.MultiBinary((2, 2)), (2,) * 4, [4.0, 1.0]),
        (gym.spaces.MultiDiscrete([2, 3], start=[1, 10]), (2, 3), [14.0, 12.0]),
    ],
)
def test_several_discrete_actions_are_taken_at_once(space, sizes, rewards):
    """Bits are several actions of two. Ones and the last of the last in a row; a one and zeros in the other."""
    env = fp.envs.gymnasium(with_space(Arm, action_space=space))
    assert env.spec.action_sizes == sizes and env.spec.action_size == sum(sizes)
    action = torch.ones(2, len(sizes), dtype=torch.int64)
    action[0, -1], action[1, 1:] = sizes[-1] - 1, 0
    _, timestep = step(env, start(env, 2), action)
    assert timestep.reward.tolist() == rewards
    ppo = fp.ppo(env=env, network=NETWORK, n_envs=2, **SMALL)
    state, _ = ppo.step(ppo.init(fp.random.key(0)))
    assert int(state.update) == 1


class Parts(Counter):
    """Observes, and acts on, spaces within spaces."""

    observation_space = gym.spaces.Dict(
        a=gym.spaces.Tuple([BOX, gym.spaces.Discrete(5, start=1)]),
        b=gym.spaces.MultiDiscrete([4, 2]),
        c=gym.spaces.Box(0, 255, (2, 1, 1), np.uint8),
    )
    action_space = gym.spaces.Dict(
        jump=gym.spaces.Discrete(2, start=3),
        move=gym.spaces.Tuple(
            [gym.spaces.MultiDiscrete([3, 2]), gym.spaces.MultiBinary(2)]
        ),
    )

    def observe(self):
        t = self.count
        place = np.array([t, 9], np.float32), np.int64(1 + t)
        image = np.full((2, 1, 1), 51 * t, np.uint8)
        return {"a": place, "b": np.array([t, t % 2]), "c": image}

    def step(self, action):
        assert action in self.action_space
        legs, arms = action["move"]
        self.action = [action["jump"] - 3, *legs, *arms]
        self.count += 1
        reward = float(np.dot(self.action, [1, 10, 100, 1000, 10000]))
        return self.observe(), reward, self.count >= 3, False, {}


def test_spaces_within_spaces_are_tuples_of_tensors_side_by_side():
    env = fp.envs.gymnasium(Parts)
    assert env.spec.action_sizes == (2, 3, 2, 2, 2)
    assert env.spec.observation_size == 2 + 5 + 6 + 2
    action = torch.tensor([[1, 2, 0, 1, 0], [0, 0, 1, 0, 1]])
    state, timestep = step(env, start(env, 2), action)
    assert timestep.reward.tolist() == [1021.0, 10100.0]
    place, one_hot, several, image = env.observe(env.cfg, None, state)
    assert place.tolist() == [[1.0, 9.0]] * 2
    assert one_hot.argmax(-1).tolist() == [1, 1]
    assert several[0].tolist() == [0, 1, 0, 0, 0, 1]
    assert image.flatten(1).tolist() == [[pytest.approx(0.2)] * 2] * 2

    fp.check(env, n_steps=8)
    scaled = wrappers.normalize_observation(env)
    for network in (NETWORK, fp.nets.gru(4)):
        ppo = fp.ppo(env=scaled, network=network, n_envs=2, **SMALL)
        state, metrics = ppo.step(ppo.init(fp.random.key(0)))
        assert metrics.loss.loss.isfinite()


# Vector environments


class Pool:
    """A vector environment of counters as envpool makes them: rows have numbers, and come in any order."""

    observation_space, action_space = BOX, gym.spaces.Discrete(2)

    def __init__(self, n):
        self.envs = [Walk() for _ in range(n)]
        self.all_env_ids = np.arange(n)
        self.is_over = np.zeros(n, bool)

    def reset(self, env_id=None):
        if env_id is None:
            for env, seed in zip(self.envs, SEEDS):
                env.reset(seed=seed)
            env_id = self.all_env_ids
        self.is_over[env_id] = False
        rows = env_id[::-1]
        obs = [self.envs[i].reset()[0] for i in rows]
        return np.stack(obs), {"env_id": rows}

    def step(self, actions):
        assert not self.is_over.any()
        made = [env.step(a) for env, a in zip(self.envs, actions)][::-1]
        obs, reward, terminated, truncated, _ = map(np.array, zip(*made))
        self.is_over = (terminated | truncated)[::-1]
        rows = self.all_env_ids[::-1]
        return obs, reward, terminated, truncated, {"env_id": rows}

    def close(self):
        pass


SEEDS = (fp.random.bits(keys(3), ()) >> 1).tolist()


def synchronous(mode):
    mode = gym.vector.AutoresetMode[mode]
    return lambda n: gym.vector.SyncVectorEnv([Begun] * n, autoreset_mode=mode)


class OneArray(gym.vector.SyncVectorEnv):
    """Tells all last observations in one array."""

    def __init__(self, n):
        mode = gym.vector.AutoresetMode.SAME_STEP
        super().__init__([Begun] * n, autoreset_mode=mode)

    def step(self, actions):
        *made, infos = super().step(actions)
        last = infos.pop("final_obs", None)
        if last is not None:
            blank = np.zeros(2, np.float32)
            rows = [blank if x is None else x for x in last]
            infos["final_observation"] = np.stack(rows)
        return *made, infos


VECTOR_ENVIRONMENTS = {
    "disabled": synchronous("DISABLED"),
    "same step": synchronous("SAME_STEP"),
    "same step, one array": OneArray,
    "next step": synchronous("NEXT_STEP"),
    "envpool": Pool,
}


def episodes(make, n_steps=40, n_rows=3):
    """Transitions of each row that a rollout would learn from, by actions that depend on observations alone."""
    env = fp.envs.gymnasium(make)
    state = env.reset(env.cfg, None, keys(n_rows))
    rows = [[] for _ in range(n_rows)]
    for _ in range(n_steps):
        before = env.observe(env.cfg, None, state)
        action = (before[:, 1].to(torch.int64) // 2) % 2
        reached, timestep, state = wrappers.step_with_autoreset(
            env, None, state, action, keys(n_rows), keys(n_rows)
        )
        after = env.observe(env.cfg, None, reached)
        for i, row in enumerate(rows):
            if not timestep.reward[i].isnan():
                values = (before[i], *(x[i] for x in timestep), after[i])
                row.append([x.tolist() for x in values])
    return rows


@pytest.mark.parametrize("kind", VECTOR_ENVIRONMENTS)
def test_a_vector_environment_makes_the_transitions_of_its_rows(kind):
    """However its rows begin again, each transition is of one episode, with its last observation."""
    made = episodes(VECTOR_ENVIRONMENTS[kind])
    for row, want in zip(made, episodes(Begun)):
        n = min(len(row), len(want))
        assert n > 28 and row[:n] == want[:n]
        assert sum(x[2] or x[3] for x in want[:n]) > 3


def test_steps_that_only_reset_a_row_are_counted_and_not_learnt_from():
    env = fp.envs.gymnasium(VECTOR_ENVIRONMENTS["next step"], n_envs=2)
    for network in (NETWORK, fp.nets.gru(4)):
        ppo = fp.ppo(env=env, network=network, **SMALL | {"n_steps": 32})
        with pytest.warns(UserWarning, match="that only reset a row"):
            result = fp.train(ppo, 128, evaluate_every=2, n_episodes=3)
        assert "left out" in result.notes[0] and len(result.notes) == 1
        assert result.evaluations[0].greedy.mean_length <= 8
    _, metrics = ppo.step(ppo.init(fp.random.key(1)))
    rollout = metrics.rollout
    # a step for each episode, of those that ended before the last
    assert 0 <= rollout.n_episodes - rollout.n_nonfinite_rewards <= 2
    assert rollout.episode_return_sum.isfinite()
    assert rollout.explained_variance.isfinite()


def test_an_id_has_its_own_vector_environment():
    of = {"vectorization_mode": "vector_entry_point"}
    env = fp.envs.gymnasium("CartPole-v1", n_envs=4, **of)
    ppo = fp.ppo(env=env, network=NETWORK, **SMALL)
    assert int(ppo.step(ppo.init(fp.random.key(0)))[0].update) == 1
    refused("FrozenLake-v1: .*vector", fp.envs.gymnasium, "FrozenLake-v1", **of)
    made = lambda: gym.make_vec("CartPole-v1", num_envs=4)
    ppo = fp.ppo(env=fp.envs.gymnasium(made), network=NETWORK, **SMALL)
    state, _ = ppo.step(ppo.init(fp.random.key(0)))
    problem = "env: .* as it is asked for, 3"
    refused(problem, fp.evaluate_policy, ppo, state, n_episodes=3)


# What the bridge refuses


class Alternating(Counter):
    """Ends at an illegal action, by an error; what is legal changes with each step, and after the last nothing is."""

    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), self.info()

    def step(self, action):
        assert self.info()["action_mask"][action]
        self.count += 1
        is_over = self.count >= 3
        info = {"action_mask": np.zeros(3, np.int8)} if is_over else self.info()
        return self.observe(), float(action), is_over, False, info

    def info(self):
        return {"action_mask": np.array(np.arange(3) != self.count, np.int8)}


def test_masked_actions_are_observed_and_no_illegal_one_is_made():
    env = fp.envs.gymnasium(Alternating, n_envs=3, action_mask=True)
    fp.check(env, n_steps=16)
    state = start(env, 3)
    observed = env.observe(env.cfg, None, state)
    assert observed.action_mask.tolist() == [[False, True, True]] * 3
    state, _ = step(env, state, torch.tensor([1, 2, 1]))
    assert state.action_mask.tolist() == [[True, False, True]] * 3

    # An illegal action would be an error of the environment.
    ppo = fp.ppo(env=env, network=NETWORK, n_steps=24, n_updates=4)
    result = fp.train(ppo, 4 * 3 * 24)
    assert result.update == 4
    assert fp.evaluate_policy(ppo, result.state, n_episodes=3).greedy.mean > 0


def test_a_mask_of_several_actions_may_be_a_tuple():
    class Keys(Alternating):
        action_space = gym.spaces.MultiDiscrete([3, 2])

        def step(self, action):
            first, second = self.info()["action_mask"]
            assert first[action[0]] and second[action[1]]
            self.count += 1
            return self.observe(), 1.0, self.count >= 3, False, self.info()

        def info(self):
            mask = super().info()["action_mask"]
            return {"action_mask": (mask, np.array([0, 1], np.int8))}

    env = fp.envs.gymnasium(Keys, n_envs=2, action_mask=True)
    ppo = fp.ppo(env=env, network=NETWORK, **SMALL)
    assert int(ppo.step(ppo.init(fp.random.key(0)))[0].update) == 1


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        ({}, "expected a mask in its info, row 0 has none"),
        ({"action_mask": [1, 0]}, "expected 3 numbers, got 2"),
        ({"action_mask": [0, 0, 0]}, "expected a legal action, row 0 has none"),
        ({"action_mask": {"a": [1, 0, 1]}}, "expected numbers, or a tuple of .*, got a dict"),
    ],
)  # fmt: skip
def test_a_mask_that_is_missing_or_wrong_is_named(monkeypatch, info, problem):
    array = lambda x: x if isinstance(x, dict) else np.array(x)
    told = {name: array(x) for name, x in info.items()}
    monkeypatch.setattr(Alternating, "info", lambda self: told)
    env = fp.envs.gymnasium(Alternating, action_mask=True)
    refused(f"Alternating: action_mask: {problem}$", start, env, 2)
    refused("Alternating: .*action_mask", fp.check, env, n_steps=4)


def test_an_environment_that_cannot_be_made_is_named():
    make = fp.envs.gymnasium
    refused("CartPole-v77: .*version", make, "CartPole-v77")
    problem, error = "env: expected an id, or a function", TypeError
    options = {"is_slippery": True, "error": error}
    refused(f"{problem} without", make, Counter, **options)
    made = gym.make("CartPole-v1")
    refused(f"{problem} .*, got a TimeLimit", make, made, error=error)


def test_a_state_that_is_not_the_latest_is_refused():
    env = fp.envs.gymnasium(Counter)
    ppo = fp.ppo(env=env, network=NETWORK, n_envs=2, **SMALL)
    first = ppo.init(fp.random.key(0))
    second, _ = ppo.step(first)
    refused("state: expected the one that the", ppo.step, first)
    third, _ = ppo.step(second)

    # As the line says, from a saved state with environments of its own.
    fresh = ppo.init(fp.random.key(1))
    again = third._replace(
        env_state=fresh.env_state, episode_stats=fresh.episode_stats
    )
    assert int(ppo.step(again)[0].update) == 3


def test_several_seeds_at_once_are_those_of_single_runs():
    env = wrappers.normalize_observation(fp.envs.gymnasium(Walk, n_envs=2))
    ppo = fp.ppo(env=env, network=NETWORK, **SMALL)
    options = {"evaluate_every": 2, "n_episodes": 3}
    several = fp.train_many(ppo, 64, seeds=(4, 5), **options)
    for i, seed in enumerate((4, 5)):
        one = fp.train(ppo, 64, seed=seed, **options)
        assert_trees_equal(
            fp.tree.item(several.state.params, i), one.state.params, rtol=1e-5, atol=1e-6
        )  # fmt: skip
        assert [x[i] for x in several.evaluations] == list(one.evaluations)
    options = {"seeds": 2, "strategy": "one-graph"}
    problem = "strategy: .* on the host, got"
    refused(problem, fp.train_many, ppo, 64, **options)


def test_the_processes_of_an_evaluation_end_with_it():
    env = fp.envs.gymnasium(Walk, n_envs=2, vectorization_mode="async")
    ppo = fp.ppo(env=env, network=NETWORK, **SMALL)
    n_processes = []

    def count(progress):
        n_processes.append(len(multiprocessing.active_children()))

    fp.train(ppo, 32, evaluate_every=1, n_episodes=3, callbacks=[count])
    assert n_processes == [2, 2]


# Learning


@on_gpu
def test_learning_is_a_cuda_graph_and_equals_the_eager_step():
    """Three updates; actions go to the host and observations come back in each step."""
    results = []
    for is_compiled in (False, True):
        env = fp.envs.gymnasium("CartPole-v1", n_envs=4, max_episode_steps=9)
        ppo = stepper = fp.ppo(env=env, network=NETWORK, **SMALL)
        state = ppo.init(fp.random.key(0, "cuda"))
        if is_compiled:
            stepper = fp.compile(ppo, state, backend="aot_eager")
        for _ in range(3):
            state, metrics = stepper.step(state)
        results.append((state.params, state.env_state, metrics.rollout))
        if is_compiled:
            assert stepper.record.replay_mode == "cuda-graph"
            assert stepper.captured.n_graphs == 1
    assert_trees_equal(*results, rtol=1e-4, atol=1e-5)


def test_a_continued_run_begins_new_episodes_and_says_so(tmp_path):
    path = tmp_path / "run.npz"

    def train(total_steps):
        env = wrappers.normalize_observation(
            fp.envs.gymnasium("CartPole-v1", n_envs=2)
        )
        ppo = fp.ppo(env=env, network=NETWORK, **SMALL | {"n_updates": 4})
        stop = lambda progress: progress.n_steps >= total_steps
        return fp.train(ppo, 64, callbacks=[stop], checkpoint=path)

    first = train(32)
    assert first.update == 2 and first.notes == ()
    saved = path.read_bytes()
    results = []
    for _ in range(2):
        path.write_bytes(saved)
        with pytest.warns(UserWarning, match="new episodes begin"):
            results.append(train(64))
    assert results[0].update == 4 and "on the host" in results[0].notes[0]
    # the moments go on: resets and steps of the first part, a reset, and steps of the second
    count = float(results[0].state.env_state.moments.n[0])
    assert count >= 2 + 32 + 2 + 32
    assert_trees_equal(results[0].state, results[1].state, rtol=0, atol=0)


# Checks


COUNTER = itertools.count()


class GlobalGenerator(Walk):
    def observe(self):
        return np.array([self.place, np.random.rand()], np.float32)


class Unseeded(Walk):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None)


class Reused(Walk):
    buffer = np.zeros(2, np.float32)

    def observe(self):
        self.buffer[:] = self.place, self.steps
        return self.buffer


def dividing():
    env = Walk()
    env.step = lambda action: 1 / 0
    return env


@pytest.mark.parametrize(
    ("make_env", "problem"),
    [
        (dividing, "ZeroDivisionError: division by zero"),
        (Unseeded, "AssertionError: .*seed"),
        (Reused, "AssertionError: .* share an object"),
        (GlobalGenerator, "AssertionError: "),
    ],
)
def test_what_breaks_the_interface_is_named_in_one_line(make_env, problem):
    env = fp.envs.gymnasium(make_env)
    line = f"{make_env.__name__}: expected .*check_env accepts, got .*{problem}"
    refused(line, fp.check, env, n_steps=8)


# Through the bridge


def test_bridged_environments_pass():
    fp.check(fp.envs.gymnasium(Walk))
    env = fp.envs.gymnasium("FrozenLake-v1", n_envs=8)
    fp.check(wrappers.sticky_actions(wrappers.time_limit(env, 5)), n_steps=16)
    env = wrappers.normalize_observation(fp.envs.gymnasium(Walk))
    fp.check(wrappers.normalize_reward(env), n_steps=16)


def test_steps_that_differ_the_second_time_are_named():
    """What `check_env` cannot see, because the first step of an episode is the same."""

    class Drifting(Walk):
        def observe(self):
            drift = next(COUNTER) if self.steps == 2 else 0
            return np.array([self.place, 9 * np.sin(drift)], np.float32)

    problem = "step 3 a second time with the same seeds: obs"
    refused(problem, fp.check, fp.envs.gymnasium(Drifting), n_steps=8)
