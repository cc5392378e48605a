"""What `fp.check` asks of an environment: ours keep it, and each fault is named."""

from typing import NamedTuple

import pytest
import torch

import funcppo as fp
from funcppo.envs import ENVIRONMENTS, wrappers
from tests.learning import refused


class State(NamedTuple):
    cell: torch.Tensor
    heat: torch.Tensor


def reset(cfg, world, key):
    return State(torch.zeros_like(key[:, 0]), fp.random.uniform(key, ()))


def step(cfg, world, state, action, key):
    active = state.cell < 3
    cell = torch.where(active, state.cell + action, state.cell)
    warm = state.heat + fp.random.uniform(key, ())
    heat = torch.where(active, warm, state.heat)
    done = cell >= 3
    timestep = fp.Timestep(active.float(), done, torch.zeros_like(done))
    return State(cell, heat), timestep


def observe(cfg, world, state):
    return state.heat.unsqueeze(-1)


SPEC = fp.EnvironmentSpec(observation_size=1, action_size=2)


def environment(**changes):
    fields = {"reset": reset, "step_functional": step, "observe": observe}
    fields |= {"cfg": None, "spec": SPEC, "truncates": False}
    return fp.Environment(**(fields | changes))


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_environments_of_the_package_pass(name):
    """With episodes that end, where their length is a setting."""
    has_limit = "MinAtar" not in name
    options = {"max_steps": 3} if has_limit else {}
    fp.check(fp.envs.make(name, **options), n_steps=8 if has_limit else 4)


def test_wrapped_environments_pass():
    env = wrappers.time_limit(fp.envs.pendulum(), 5)
    env = wrappers.sticky_actions(wrappers.clip_action(env))
    env = wrappers.normalize_observation(wrappers.episode_statistics(env))
    env = wrappers.normalize_reward(wrappers.frame_stack(env, 2))
    fp.check(env, n_steps=8)
    fp.check(environment())


def changed(change):
    """The step with its result changed."""
    return lambda *arguments: change(*step(*arguments))


def overwriting(cfg, world, state, action, key):
    state.heat.add_(1.0)
    return step(cfg, world, state, action, key)


def branching(cfg, world, state, action, key):
    if state.cell.sum() > 0:
        return step(cfg, world, state, action, key)
    return step(cfg, world, state, action, key)


def mixing(cfg, world, state, action, key):
    after, timestep = step(cfg, world, state, action, key)
    return after._replace(heat=after.heat - after.heat.mean()), timestep


BROKEN = {
    "dtype": (changed(lambda s, t: (s._replace(heat=s.heat.double()), t)),
        r"step_functional: state.heat: expected torch.float32 \[4\], got torch.float64 \[4\]"),
    "structure": (changed(lambda s, t: ((s.cell, s.heat), t)),
        "step_functional: state: expected a State of .*cell, .*heat, got a tuple of .*0, .*1"),
    "a Python number in the state": (changed(lambda s, t: (s._replace(heat=0.5), t)),
        r"step_functional: state.heat: expected torch.float32 \[4\], got float"),
    "a Python number in the timestep": (changed(lambda s, t: (s, t._replace(reward=1.0))),
        r"step_functional: Timestep.reward: expected torch.float32 \[4\], got float"),
    "a flag of numbers": (changed(lambda s, t: (s, t._replace(terminated=t.reward))),
        r"step_functional: Timestep.terminated: expected torch.bool \[4\], got torch.float32 \[4\]"),
    "no timestep": (changed(lambda s, t: (s, t.reward, t.terminated)),
        r"step_functional: expected \(state, fp.Timestep\), got State, Tensor, Tensor"),
    "an overwritten argument": (overwriting,
        "step_functional: state.heat: expected an argument that stays as it is, got one that is overwritten"),
    "a global generator": (changed(lambda s, t: (s._replace(heat=torch.rand(4)), t)),
        r"step_functional a second time with the same key: state.heat: expected [\d.]+ at \[0\], got [\d.]+$"),
    "an exception": (lambda c, w, s, a, k: step(c, w, s, a[:3], k),
        "step_functional: expected a result, got RuntimeError: The size of tensor"),
    "a branch on values": (branching,
        "step_functional: expected a function that torch.vmap can map, got RuntimeError: "),
    "rows that mix": (mixing,
        r"step_functional of rows \[3, 0\] alone: .*heat: expected"),
    "a finished row that moves": (lambda c, w, s, a, k: (s._replace(cell=s.cell + 1), step(c, w, s, a, k)[1]),
        "step_functional of a finished row: cell: expected"),
    "a finished row that is paid": (changed(lambda s, t: (s, t._replace(reward=torch.ones_like(t.reward)))),
        "step_functional of a finished row: Timestep.reward: expected 0"),
    "a truncation that was ruled out": (changed(lambda s, t: (s, t._replace(truncated=t.terminated))),
        "step_functional: Timestep.truncated: expected false"),
    "a reward that is not finite": (changed(lambda s, t: (s, t._replace(reward=t.reward / 0))),
        "step_functional: Timestep.reward: expected finite numbers"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_fault_of_a_step_is_named_in_one_line(name):
    step_functional, problem = BROKEN[name]
    refused(problem, fp.check, environment(step_functional=step_functional))


def starts(fn):
    return {"reset": lambda cfg, world, key: fn(key)}


def sees(fn):
    return {"observe": lambda cfg, world, state: fn(state.heat[:, None], state)}


def masked(x, n, legal=True):
    return fp.MaskedObservation(x, torch.full((4, n), legal))


IN_PARTS = {
    "sample_reset": lambda cfg, world, key: key,
    "reset_from_sample": lambda cfg, world, key: State(key[:, 0], fp.random.uniform(key, ())),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (starts(lambda key: {"cell": key[:, 0]}), "reset: state: expected a tensor.*, got dict"),
        (starts(lambda key: torch.zeros(7)), r"reset: state: expected 4 rows, got torch.float32 \[7\]"),
        (starts(lambda key: reset(0, 0, key)._replace(heat=torch.rand(4))), "reset a second time .*: heat: expected"),
        (sees(lambda x, _: x[:, 0]), r"observe: observation: expected rows of \[1\] by env.spec, got \[\]"),
        (sees(lambda x, _: masked(x, 2, False)), "observe: observation.action_mask: expected a legal action"),
        (sees(lambda x, _: masked(x, 3)), r"observe: observation.action_mask: .* \[4, 2\], got .*3\]"),
        (sees(lambda x, _: x.mul_(2).clone()), "observe: state.heat: expected an argument that stays as it is"),
        (sees(lambda x, s: x.double() if s.cell.any() else x), "observe: observation after a s.*: .*got torch.float64"),
        (sees(lambda x, _: x * torch.nan), "observe: observation: expected finite numbers, got nan"),
        ({"spec": None}, "env.spec: expected an EnvironmentSpec"),
        (IN_PARTS, "reset_from_sample of sample_reset: cell: expected"),
    ],
)  # fmt: skip
def test_a_fault_of_another_function_is_named(changes, problem):
    refused(problem, fp.check, environment(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        sees(lambda x, _: x.double()),
        sees(lambda x, _: x.half()),
        sees(lambda x, _: masked(x.double(), 2)),
    ],
)
def test_an_observation_that_no_network_reads_is_named(changes):
    """A network is built for the spec; without one it is the user's, which may read other numbers."""
    env = environment(**changes)
    problem = "observe: observation[a-z.]*: expected torch.float32 by env.spec, got torch.float"
    refused(problem, fp.check, env)
    ppo = fp.ppo(env=env, network=fp.nets.mlp(4))
    refused("network: expected", ppo.init, fp.random.key(0))
    bare, action = environment(**changes, spec=None), torch.ones(4).long()
    fp.check(bare, sample_action=lambda key, obs: action, n_steps=4)


def test_later_episodes_are_checked_too():
    """A reward that is no number in a cell where none of the first four episodes begins."""

    def reset_anywhere(cfg, world, key):
        cell = (fp.random.uniform(key, ()) * 16).long()
        return State(cell, torch.zeros(len(key)))

    def finish(cfg, world, state, action, key):
        active = state.heat == 0
        reward = torch.where(active & (state.cell == bad), torch.nan, 0.0)
        done = torch.ones_like(active)
        after = State(state.cell, torch.ones_like(state.heat))
        return after, fp.Timestep(reward, done, torch.zeros_like(done))

    env = environment(reset=reset_anywhere, step_functional=finish)
    keys = fp.random.split(fp.random.split(fp.random.key(0), 65)[0], 4)
    first = reset_anywhere(None, None, keys).cell
    bad = next(cell for cell in range(16) if cell not in first)
    fp.check(env, n_steps=1)
    problem = "step_functional: Timestep.reward: expected finite numbers, got"
    refused(problem, fp.check, env)
    refused("env: expected an Environment", fp.check, reset, error=TypeError)


# Names


def test_options_reach_the_environment():
    make = fp.envs.make
    assert make("CartPole-v1", max_steps=7).cfg.max_steps == 7
    refused("max_steps: expected 1 or more", make, "CartPole-v1", max_steps=0)
    options = {"steps": 3, "error": TypeError}
    refused("steps: expected .*max_steps", make, "CartPole-v1", **options)
    # An id of Gymnasium is a name too.
    env = make("gymnasium:CartPole-v1", n_envs=3, max_episode_steps=9)
    assert env.host.n_envs == 3 and env.spec.observation_size == 4


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("CartPole-v0", "CartPole-v1"),
        ("cartpole", "CartPole-v1"),
        ("acrobot-v1", "Acrobot-v1"),
        ("MinAtar/Breakout", "MinAtar/Breakout-v[01]"),
        ("MountainCarContinous-v0", "MountainCarContinuous-v0"),
        ("zzz", "there are CartPole-v1, Pendulum-v1.*"),
    ],
)
def test_an_unknown_name_is_answered_by_the_nearest_or_all(given, nearest):
    refused(f"{given}: .*{nearest}$", fp.envs.make, given)
