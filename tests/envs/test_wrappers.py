"""Wrappers beside Gymnasium's, on the same trajectory."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import wrappers as reference

import funcppo as fp
from funcppo import rollout, train_step
from funcppo.core import random, tree
from funcppo.envs import wrappers
from tests.learning import WORLD, assert_trees_equal, refused

CARTPOLE = fp.envs.cartpole(max_steps=12)
PENDULUM = fp.envs.pendulum()


class Step(NamedTuple):
    before: object
    action: torch.Tensor
    reached: object
    timestep: fp.Timestep
    after: object


def actions(env, key, n):
    unit = random.uniform(key, (n,))
    if env.spec.continuous_actions:
        return 6 * unit[:, None] - 3
    return (unit * env.spec.action_size).long()


def play(env, seed, n, steps):
    """Random steps of n rows with restarts."""
    reset_key, *keys = random.split(random.key(seed), steps + 1)
    state, out = env.reset(env.cfg, WORLD, random.split(reset_key, n)), []
    for key in keys:
        action_key, step_key, sample_key = random.split(key, 3)
        action = actions(env, action_key, n)
        sample = wrappers.sample_reset(env, WORLD, random.split(sample_key, n))
        drawn = random.split(step_key, n), sample
        step = wrappers.step_with_autoreset(env, WORLD, state, action, *drawn)
        out.append(Step(state, action, *step))
        *_, state = step
    return out


def observe(env, state):
    return env.observe(env.cfg, WORLD, state)


class Replay(gymnasium.Env):
    """Row 0 of recorded steps as an environment of Gymnasium; actions are ignored."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, env, history, row=0):
        self.env, self.history, self.row, self.t = env, history, row, 0

    def obs(self, state):
        return observe(self.env, state)[self.row].double().numpy()

    def reset(self, *, seed=None, options=None):
        is_over = self.t == len(self.history)
        state = (
            self.history[-1].after if is_over else self.history[self.t].before
        )
        return self.obs(state), {}

    def step(self, action):
        step = self.history[self.t]
        self.t += 1
        values = [float(x[self.row]) for x in step.timestep]
        obs = self.obs(step.reached)
        return obs, values[0], bool(values[1]), bool(values[2]), {}


def replayed(wrapped, history):
    """What Gymnasium's wrapper returns: observations of each step, rewards, and observations to go on from."""
    obs, _ = wrapped.reset()
    out = []
    for _ in history:
        reached, reward, terminated, truncated, _ = wrapped.step(0)
        after = wrapped.reset()[0] if terminated or truncated else reached
        out.append((obs, reward, reached))
        obs = after
    return out


@pytest.mark.parametrize("row", [0, 2])
def test_observations_are_normalised_as_gymnasium_does(row):
    """Moments of each row alone, over several episodes; observations are float32."""
    env = wrappers.normalize_observation(CARTPOLE, shared=False)
    plain, history = play(CARTPOLE, 1, 3, 60), play(env, 1, 3, 60)
    assert sum(bool(s.timestep.truncated[row]) for s in plain) > 1
    theirs = reference.NormalizeObservation(Replay(CARTPOLE, plain, row))
    for step, (obs, _, reached) in zip(history, replayed(theirs, plain)):
        got = observe(env, step.before)[row], observe(env, step.reached)[row]
        np.testing.assert_allclose(got[0], obs, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got[1], reached, rtol=1e-5, atol=1e-6)
    moments = history[-1].after.moments
    np.testing.assert_allclose(moments.mean[row], theirs.obs_rms.mean)
    np.testing.assert_allclose(moments.variance[row], theirs.obs_rms.var)


def test_shared_moments_are_those_of_all_observations():
    env = wrappers.normalize_observation(CARTPOLE)
    history = play(env, 2, 5, 40)
    seen = [observe(CARTPOLE, history[0].before.inner)]
    for step in history:
        seen.append(observe(CARTPOLE, step.reached.inner))
        ended = step.timestep.terminated | step.timestep.truncated
        seen.append(observe(CARTPOLE, step.after.inner)[ended])
    seen = torch.cat(seen).double()
    moments = history[-1].after.moments
    # The prior has a weight of 1e-4 in a few hundred observations.
    mean, variance = seen.mean(0).expand(5, 4), seen.var(0, correction=0)
    close = partial(torch.testing.assert_close, atol=1e-6)
    close(moments.mean, mean, rtol=1e-5)
    close(moments.variance[0], variance, rtol=1e-3)


def test_rewards_are_normalised_as_gymnasium_does():
    pendulum = fp.envs.pendulum(max_steps=15)
    env = wrappers.normalize_reward(pendulum, gamma=0.9, shared=False)
    plain, history = play(pendulum, 3, 2, 50), play(env, 3, 2, 50)
    theirs = reference.NormalizeReward(Replay(pendulum, plain, 1), gamma=0.9)
    for step, (_, reward, _) in zip(history, replayed(theirs, plain)):
        got = float(step.timestep.reward[1])
        np.testing.assert_allclose(got, float(reward), rtol=1e-6)


def test_a_stack_holds_the_last_observations_as_gymnasiums():
    env = wrappers.frame_stack(CARTPOLE, 3)
    assert env.spec.shape == (12,)
    plain, history = play(CARTPOLE, 4, 2, 30), play(env, 4, 2, 30)
    replay = Replay(CARTPOLE, plain)
    theirs = reference.FrameStackObservation(replay, 3, padding_type="reset")
    for step, (obs, _, reached) in zip(history, replayed(theirs, plain)):
        assert np.array_equal(observe(env, step.before)[0], obs.ravel())
        assert np.array_equal(observe(env, step.reached)[0], reached.ravel())


def test_a_time_limit_cuts_what_has_not_ended():
    """CartPole falls after about 20 random steps; its own limit is out of reach."""
    env = wrappers.time_limit(fp.envs.cartpole(), 20)
    length, n_cut, n_fallen = torch.zeros(16), 0, 0
    for step in play(env, 5, 16, 80):
        length = length + 1
        _, terminated, truncated = step.timestep
        assert torch.equal(truncated, (length == 20) & ~terminated)
        n_cut, n_fallen = n_cut + truncated.sum(), n_fallen + terminated.sum()
        length = torch.where(terminated | truncated, 0, length)
    assert n_cut > 0 and n_fallen > 0


def test_sticky_actions_repeat_the_last_one():
    """The share of repeats of 0 to 1 actions; the first action of an episode is never replaced."""
    env = wrappers.sticky_actions(fp.envs.pendulum(max_steps=50), 0.25)
    repeats = chances = 0
    for step in play(env, 6, 64, 45):
        executed = step.reached.last_action
        had_acted = step.before.has_acted
        repeated = (executed != step.action).any(-1)
        assert not repeated[~had_acted].any()
        last_action = step.before.last_action
        assert torch.equal(executed[repeated], last_action[repeated])
        repeats, chances = repeats + repeated.sum(), chances + had_acted.sum()
    # A binomial of 2816 trials: five standard deviations are 0.04.
    assert float(repeats / chances) == pytest.approx(0.25, abs=0.04)


def test_statistics_outlive_an_episode():
    env = wrappers.episode_statistics(CARTPOLE)
    total, ends = torch.zeros(8), torch.zeros(8)
    last = torch.full((8,), torch.nan)
    for step in play(env, 7, 8, 40):
        total = total + step.timestep.reward
        done = step.timestep.terminated | step.timestep.truncated
        last, ends = torch.where(done, total, last), ends + done
        total = torch.where(done, 0.0, total)
        after = step.after
        assert torch.equal(
            after.last_return.nan_to_num(-1), last.nan_to_num(-1)
        )
        assert torch.equal(after.last_length, last.nan_to_num(0).long())
        assert torch.equal(after.episode_return, total)
        assert torch.equal(after.n_episodes, ends.long())
    assert (ends > 1).all()


def test_a_time_limit_outside_ends_the_episodes_that_statistics_count():
    """Every episode is cut after 3 steps; another wrapper lies between."""
    inside = wrappers.normalize_reward(wrappers.episode_statistics(CARTPOLE))
    env = wrappers.time_limit(inside, 3)
    state = play(env, 7, 8, 12)[-1].after.inner.inner
    assert (state.n_episodes == 4).all() and (state.last_length == 3).all()
    assert (state.last_return == 3).all() and (state.episode_length == 0).all()


def test_frames_of_images_are_stacked_along_their_channels():
    def observe_image(cfg, world, state):
        x = CARTPOLE.observe(cfg, world, state)[:, :1, None, None]
        return x.expand(-1, 3, 12, 12)

    shape = {"observation_size": 432, "observation_shape": (3, 12, 12)}
    spec = replace(CARTPOLE.spec, **shape)
    images = replace(CARTPOLE, observe=observe_image, spec=spec)
    env = wrappers.frame_stack(images, 2)
    assert env.spec.shape == (6, 12, 12)
    after = play(env, 0, 2, 3)[-1].after
    assert observe(env, after).shape == (2, 6, 12, 12)


def test_a_mask_of_actions_passes_frames_and_flattening():
    """Features are stacked and flattened; the mask is that of the last observation."""

    def observe_masked(cfg, world, state):
        features = CARTPOLE.observe(cfg, world, state)
        mask = torch.stack([features[:, 0] > 0, features[:, 0] < 9], -1)
        return fp.MaskedObservation(features.view(-1, 2, 2), mask)

    spec = replace(CARTPOLE.spec, observation_shape=(2, 2))
    masked = replace(CARTPOLE, observe=observe_masked, spec=spec)
    env = wrappers.flatten_observation(wrappers.frame_stack(masked, 2))
    fp.check(env)
    for step in play(env, seed=3, n=3, steps=5):
        obs = observe(env, step.reached)
        last = observe(masked, step.reached.inner.inner)
        assert torch.equal(obs.action_mask, last.action_mask)
        frames = obs.features.view(3, 2, 2, 2)
        assert torch.equal(frames[..., 1, :], last.features)
    fp.ppo(env=env, network=fp.nets.mlp(4)).init(random.key(0))


def nested(env, *wraps):
    """An environment in wrappers, the innermost first."""
    for wrap in wraps:
        env = wrap(env)
    return env


NESTED = nested(
    fp.envs.cartpole(),
    partial(wrappers.time_limit, max_steps=9),
    wrappers.episode_statistics,
    wrappers.sticky_actions,
    wrappers.normalize_observation,
    partial(wrappers.frame_stack, n_frames=2),
    wrappers.normalize_reward,
)


def test_a_stack_of_wrappers_keeps_what_each_remembers_through_a_restart():
    history = play(NESTED, 8, 4, 30)
    state = history[-1].after
    normalizer = state.inner.inner
    n_ends = normalizer.inner.inner.n_episodes.sum()
    assert n_ends >= 12
    # All first observations, all steps, all restarts.
    assert float(normalizer.moments.n[0]) == pytest.approx(4 + 120 + n_ends)
    assert float(state.moments.n[0]) == pytest.approx(120)
    # The first stack of an episode is made with the moments that the restart left.
    done = history[8].timestep.terminated | history[8].timestep.truncated
    first, second = observe(NESTED, history[8].after).chunk(2, -1)
    assert done.any() and torch.equal(first[done], second[done])


DISCRETE = "env.spec: expected continuous actions, got discrete ones"


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (lambda: wrappers.time_limit(CARTPOLE, 0), "max_steps: expected 1"),
        (lambda: wrappers.frame_stack(CARTPOLE, 0), "n_frames: expected 1"),
        (lambda: wrappers.sticky_actions(CARTPOLE, 1.5), "probability: expected 0 to 1"),
        (lambda: wrappers.rescale_action(fp.envs.pendulum(), 2.0, 1.0), "high: expected more than low"),
        (lambda: wrappers.rescale_action(CARTPOLE, -2.0, 2.0), DISCRETE),
        (lambda: wrappers.clip_action(CARTPOLE), DISCRETE),
        (lambda: wrappers.normalize_reward(CARTPOLE, gamma=2.0), "gamma: expected 0 to 1"),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_named(build, problem):
    refused(problem, build)


@pytest.mark.parametrize(
    ("make", "kept", "name"),
    [
        (lambda inner: wrappers.PlainState(inner), ("age",), "age"),
        (lambda inner: (inner,), (), "inner"),
    ],
)
def test_a_wrapper_without_the_fields_that_it_names_is_refused(
    make, kept, name
):
    keys = random.split(random.key(0), 2)
    begin = lambda cfg, world, inner: make(inner)
    env = wrappers.wrap(CARTPOLE, begin=begin, kept=kept)
    of = {"error": TypeError}
    problem = f"begin: expected .* field {name}, "
    refused(problem, env.reset, env.cfg, WORLD, keys, **of)
    problem = "kept: expected a tuple of"
    refused(problem, wrappers.wrap, CARTPOLE, kept="age", **of)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_observations_that_are_no_floats_are_normalised_and_clipped(dtype):
    """As the numbers that they are; of a row's 0 or 1, below."""

    def observe(cfg, world, state):
        return (CARTPOLE.observe(cfg, world, state) > 0).to(dtype)

    env = replace(CARTPOLE, observe=observe)
    for wrap in (wrappers.normalize_observation, wrappers.clip_observation):
        floats = replace(env, observe=lambda *x: observe(*x).float())
        both = wrap(env), wrap(floats)
        keys = random.split(random.key(0), 8)
        got, want = (
            x.observe(x.cfg, WORLD, x.reset(x.cfg, WORLD, keys)) for x in both
        )
        assert_trees_equal(got, want, rtol=0, atol=0)


@pytest.mark.parametrize(
    "env",
    [
        nested(
            fp.envs.make("CartPole-v1"), partial(wrappers.time_limit, max_steps=9), wrappers.sticky_actions,
            partial(wrappers.frame_stack, n_frames=2), wrappers.normalize_observation, wrappers.normalize_reward,
            wrappers.episode_statistics,
        ),
        wrappers.rescale_action(wrappers.clip_action(fp.envs.make("Pendulum-v1")), -2.0, 2.0),
        wrappers.flatten_observation(fp.envs.make("MinAtar/Breakout-v1")),
    ],
)  # fmt: skip
def test_a_rollout_step_is_one_graph(env):
    """PyTorch 2.11 has none where a state is returned that `_replace` made."""
    sizes = {"n_envs": 2, "n_steps": 2, "n_minibatches": 1}
    learner = fp.ppo(env=env, network=fp.nets.mlp(8), **sizes)
    state = learner.init(random.key(0))
    drawn = train_step.sample_randomness(learner.cfg, WORLD, state.key)
    inputs = tree.map(lambda x: x[0], drawn.random_inputs)
    first = rollout.RolloutState(state.env_state, state.episode_stats)
    args = learner.cfg, WORLD, state.params, first, inputs
    options = {"fullgraph": True, "backend": "eager"}
    with torch.no_grad():
        step = torch.compile(rollout.rollout_step, **options)
        actual, expected = step(*args), rollout.rollout_step(*args)
    for x, y in zip(tree.leaves(actual), tree.leaves(expected), strict=True):
        torch.testing.assert_close(x, y, equal_nan=True)


def test_clipping_bounds_observations_and_the_rewards_of_training():
    pendulum = fp.envs.pendulum()
    env = wrappers.clip_reward(pendulum, -1.0, 0.5)
    env = wrappers.clip_observation(env, -0.5, 0.5)
    plain = play(pendulum, 3, 8, 6)
    for step, want in zip(play(env, 3, 8, 6), plain):
        reward = want.timestep.reward
        assert torch.equal(step.timestep.reward, reward.clamp(-1.0, 0.5))
        obs = observe(pendulum, want.after)
        assert torch.equal(observe(env, step.after), obs.clamp(-0.5, 0.5))
    assert (plain[-1].timestep.reward < -1).any()
    evaluated = play(wrappers.evaluation_env(env), 3, 8, 6)[-1]
    assert torch.equal(evaluated.timestep.reward, plain[-1].timestep.reward)


@pytest.mark.parametrize(
    "wrap", [wrappers.clip_action, wrappers.rescale_action]
)
@pytest.mark.parametrize(
    ("low", "high"), [((-1.0, 0.0), np.array([1.0, 5.0])), (-1.0, 0.5)]
)
def test_actions_are_clipped_and_rescaled_to_bounds(low, high, wrap):
    rows = random.split(random.key(0), 3)
    spec = replace(PENDULUM.spec, action_size=2)
    paid_by_action = replace(
        PENDULUM,
        spec=spec,
        step_functional=lambda cfg, world, state, action, key: (
            state,
            fp.Timestep((action**3).sum(-1), state.steps < 0, state.steps < 0),
        ),
    )

    def step(env, action):
        state = env.reset(env.cfg, WORLD, rows)
        return env.step_functional(env.cfg, WORLD, state, action, rows)

    action = torch.tensor([[-3.0, -3.0], [0.5, 0.5], [1.0, -1.0]])
    lows, highs = (torch.tensor(x, dtype=torch.float32) for x in (low, high))
    want = action.clamp(lows, highs)
    if wrap is wrappers.rescale_action:
        want = lows + (action + 1) * 0.5 * (highs - lows)
    got, timestep = step(wrap(paid_by_action, low, high), action)
    expected = step(paid_by_action, want)
    assert_trees_equal((got.inner, timestep), expected, rtol=0, atol=0)
    for bounds in (((-1.0,) * 3, 1.0), ((1.0, 2.0), 2.0)):
        with pytest.raises(ValueError, match=r"low, high: exp|high: expected"):
            wrap(paid_by_action, *bounds)


class CountedState(NamedTuple):
    inner: object
    n_steps: torch.Tensor


def test_a_wrapper_of_the_users_is_learnt_with_and_compiled():
    """It observes the age of an episode, too, as the page on environments shows."""

    def begin(cfg, world, inner):
        obs = wrappers.inner_observe(cfg, world, inner)
        return CountedState(inner, torch.zeros_like(obs[:, 0]))

    def step(cfg, world, state, action, key):
        inner, timestep = wrappers.inner_step(cfg, world, state, action, key)
        done = timestep.terminated | timestep.truncated
        return CountedState(inner, state.n_steps + ~done), timestep

    def to_observation(cfg, state, obs):
        age = state.n_steps / cfg.settings
        return torch.cat([obs, age[:, None]], -1)

    spec = replace(CARTPOLE.spec, observation_size=5)
    parts = {
        "begin": begin,
        "step_functional": step,
        "to_observation": to_observation,
    }
    env = wrappers.wrap(CARTPOLE, settings=12.0, spec=spec, **parts)
    fp.check(env)
    learner = fp.ppo(env=env, network=fp.nets.mlp(8), n_steps=16)
    state = learner.init(random.key(0))
    fast = fp.compile(learner, state, backend="aot_eager")
    assert fast.record.strategy == "one-graph"
    after, _ = fast.step(state)
    expected, _ = learner.step(state)
    assert_trees_equal(after, expected, rtol=1e-5, atol=1e-5)
    assert fp.train_many(learner, 64, seeds=2).update == 1
