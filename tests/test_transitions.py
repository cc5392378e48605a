"""Every public transition writes to no argument, keeps the structure of what it threads, and is one graph that equals
the eager function and is traced once.

A case names a function, its arguments made from a seed, and which output threads which argument.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch

import funcppo as fp
from funcppo import envs, losses, optim, rollout, train_step
from funcppo.advantages import gae
from funcppo.config import AdamConfig
from funcppo.core import random, tree
from funcppo.kg.search import beam
from funcppo.rollout import RolloutState
from funcppo.runtime.cache import call_key
from tests.kg.search.small_tasks import small_problem
from tests.kg.search.test_beam import setup
from tests.learning import (
    SMALL,
    WORLD,
    assert_trees_equal,
    cartpole_config,
    compiled,
    pendulum_config,
)
from tests.shapes import check_shapes_and_dtypes

CARTPOLE = cartpole_config(max_steps=5, **SMALL)
PENDULUM = pendulum_config(max_steps=5, **SMALL)


class Case(NamedTuple):
    """One transition. `threads` maps the position of an output to the position of the argument it replaces."""

    fn: Callable[..., Any]
    args: Callable[[int], tuple[Any, ...]]
    threads: dict[int, int]


@cache
def rolled(cfg: Any, seed: int) -> Any:
    """A state, what is drawn for a rollout, the actor after it, and the trajectory."""
    state = train_step.init(cfg, WORLD, random.key(seed))
    _, draws, _ = train_step.sample_randomness(cfg, WORLD, state.key)
    act = partial(rollout.rollout_step, cfg, WORLD, state.params)
    first = RolloutState(state.env_state, state.episode_stats)
    return state, draws, *tree.scan(act, first, draws)


def env_step(cfg: Any, seed: int) -> tuple[Any, ...]:
    _, draws, actor, trajectory = rolled(cfg, seed)
    acted = trajectory.action[-1], draws.step_key[0]
    return cfg.env.cfg, WORLD, actor.env_state, *acted


def act(cfg: Any, seed: int) -> tuple[Any, ...]:
    state, draws, actor, _ = rolled(cfg, seed)
    return cfg, WORLD, state.params, actor, tree.map(lambda x: x[0], draws)


def estimate(cfg: Any, seed: int) -> tuple[Any, ...]:
    state, _, actor, trajectory = rolled(cfg, seed)
    return cfg, WORLD, state.params, actor.env_state, trajectory, state.scalars


def learn(cfg: Any, seed: int) -> tuple[Any, ...]:
    state = rolled(cfg, seed)[0]
    got = train_step.collect(cfg, WORLD, state)
    learnt = got.update_state, tree.map(lambda x: x[0], got.minibatches)
    return cfg, WORLD, state.params, got.batch, got.scalars, *learnt


def advantages(seed: int) -> tuple[Any, ...]:
    traj = rolled(CARTPOLE, seed)[3]
    return traj.reward, traj.terminated, traj.truncated, traj.value, traj.value


def evaluate_loss(seed: int) -> tuple[Any, ...]:
    state = rolled(CARTPOLE, seed)[0]
    got = train_step.collect(CARTPOLE, WORLD, state)
    return CARTPOLE, WORLD, state.params, got.batch, got.scalars


def adam(seed: int) -> tuple[Any, ...]:
    state = train_step.init(CARTPOLE, WORLD, random.key(seed))
    moved = state.params, state.opt_state, state.params
    return AdamConfig(weight_decay=0.1), *moved, state.scalars.learning_rate


CASES = {
    "gae": Case(
        partial(gae, gamma=0.9, gae_lambda=0.9), advantages, {0: 3, 1: 3}
    ),
    "build_batch": Case(
        train_step.build_batch, partial(estimate, CARTPOLE), {}
    ),
    "sample_randomness": Case(
        train_step.sample_randomness,
        lambda seed: (CARTPOLE, WORLD, random.key(seed)),
        {0: 2},
    ),
    "loss_fn": Case(losses.loss_fn, evaluate_loss, {}),
    "adam": Case(optim.update, adam, {0: 3, 1: 2}),
    "train_step": Case(
        train_step.train_step,
        lambda seed: (CARTPOLE, WORLD, rolled(CARTPOLE, seed)[0]),
        {0: 2},
    ),
}
for env, cfg in (("cartpole", CARTPOLE), ("pendulum", PENDULUM)):
    for name, fn, args, place in (
        ("step", cfg.env.step_functional, env_step, 2),
        ("rollout_step", rollout.rollout_step, act, 3),
        ("minibatch_step", train_step.minibatch_step, learn, 5),
    ):
        CASES[f"{env} {name}"] = Case(fn, partial(args, cfg), {0: place})
# the parts of a training step are compiled, one by one
COMPILED = [name for name in CASES if name != "train_step"]


def tensors(tree_: Any) -> list[torch.Tensor]:
    return [x for x in tree.leaves(tree_) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("name", CASES)
def test_it_writes_to_no_argument_and_keeps_what_it_threads(name):
    """Structure, shapes and dtypes of what it threads are the same."""
    case = CASES[name]
    args = case.args(0)
    values = [x.clone() for x in tensors(args)]
    versions = [x._version for x in tensors(args)]
    out = case.fn(*args)
    assert [x._version for x in tensors(args)] == versions
    assert all(torch.equal(a, b) for a, b in zip(tensors(args), values))
    spec = lambda x: (tree.paths(x), [(t.shape, t.dtype) for t in tensors(x)])
    for output, argument in case.threads.items():
        assert spec(out[output]) == spec(args[argument])


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)]
)
def test_compiled_equals_eager_and_is_traced_once(name, backend):
    """Inductor fuses and reorders float32: 1e-5 relative, 1e-6 absolute."""
    case = CASES[name]
    fast = compiled(case.fn, backend=backend)
    with torch.no_grad():
        fast(*case.args(0))
        with torch.compiler.set_stance("fail_on_recompile"):
            for seed in range(3):
                got, want = (fn(*case.args(seed)) for fn in (fast, case.fn))
                assert_trees_equal(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cfg", [CARTPOLE, PENDULUM])
def test_records_have_the_axes_that_their_annotations_name(cfg):
    state, metrics = train_step.train_step(
        cfg, WORLD, train_step.init(cfg, WORLD, random.key(0))
    )
    for rows in (state.episode_stats, state.env_state):
        assert check_shapes_and_dtypes(rows)["B"] == 4
    batch = train_step.collect(cfg, WORLD, state).batch
    for record in (state, metrics, metrics.loss, metrics.rollout, batch):
        check_shapes_and_dtypes(record)
    check_shapes_and_dtypes(state.scalars)


def first_and_next_of_training(cfg, world, state):
    """Of a whole step, of a rollout's, and of an evaluation's."""
    keys = random.split(random.key(0), cfg.ppo.n_envs)
    alone = rollout.first_env_state(cfg.env, world, keys)
    yield alone, state.env_state
    yield state, train_step.train_step(cfg, world, state)[0]
    _, draws, _ = train_step.sample_randomness(cfg, world, state.key)
    actor = RolloutState(state.env_state, state.episode_stats)
    act = partial(rollout.rollout_step, cfg, world, state.params)
    yield actor, act(actor, tree.item(draws, 0))[0]


def first_and_next(name):
    """The first states of the transitions of an environment or a search, each with the one after it."""
    if name in envs.ENVIRONMENTS:
        network = fp.nets.cnn() if "MinAtar" in name else fp.nets.mlp(8)
        learner = fp.ppo(env=envs.make(name), network=network, **SMALL)
        cfg, world = learner.cfg, learner.world
        state = learner.init(random.key(0))
        yield from first_and_next_of_training(cfg, world, state)
    elif name == "prover":
        yield from first_and_next_of_training(*small_problem())
    else:
        cfg, world, params, atoms = setup(5, name, beam=6, chunk_size=48)
        chunk = torch.cat([atoms[:48], torch.zeros_like(atoms[:1])])
        state = beam.init_scheduler(cfg, chunk)
        yield state, beam.evaluate_step(cfg, world, params, chunk, state)


@pytest.mark.parametrize(
    "name", [*envs.ENVIRONMENTS, "prover", "success", "best-proof"]
)
def test_a_first_state_is_laid_out_as_later_ones_without_sharing(name):
    """Else a compiled step would be compiled for the first one alone."""
    with torch.no_grad():
        for first, later in first_and_next(name):
            leaves = [x for x in tree.leaves(first) if x.numel()]
            places = {x.untyped_storage().data_ptr() for x in leaves}
            assert len(places) == len(leaves)
            assert call_key((first,)) == call_key((later,))
