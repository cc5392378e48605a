"""What holds for every network: updates vectorise over learners, and each part of one is a single graph."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import funcppo as fp
from funcppo.core import random, tree
from funcppo.train_step import EAGER_PARTS, collect, train_step, vmap_parts
from tests.learning import WORLD, assert_trees_equal, compiled, double
from tests.nets.bars import BARS
from tests.nets.guessing import guessing

OPTIONS = {
    "n_envs": 4,
    "n_steps": 3,
    "n_updates": 4,
    "n_epochs": 2,
    "n_minibatches": 2,
    "learning_rate": 1e-2,
}
LEARNERS = {
    "masked": (guessing("masked"), fp.nets.mlp(4, shared_trunk=True)),
    "squashed": (
        guessing("continuous"),
        fp.nets.mlp(4, squash=True, log_std="state"),
    ),
    "lstm": (fp.envs.cartpole(max_steps=2), fp.nets.lstm(4, hidden=(4,))),
    "gsde": (
        guessing("continuous"),
        fp.nets.gsde(4, noise_steps=2, orthogonal=False),
    ),
    "images and gru": (BARS, fp.nets.cnn((2, 2, 1), then=fp.nets.gru(4))),
}


def learner(name):
    env, network = LEARNERS[name]
    return fp.ppo(env=env, network=network, **OPTIONS)


@pytest.mark.parametrize("name", LEARNERS)
def test_learners_under_vmap_equal_their_single_runs(name):
    """Two learners, float64, 1e-10 after two updates."""
    cfg = learner(name).cfg
    states = [
        double(fp.train_step.init(cfg, WORLD, random.key(seed)))
        for seed in range(2)
    ]
    mapped = vectors = tree.map(lambda *x: torch.stack(x), *states)
    for _ in range(2):
        mapped, _ = torch.vmap(partial(train_step, cfg, WORLD))(mapped)
        vectors, _ = train_step(cfg, WORLD, vectors, vmap_parts(EAGER_PARTS))
        states = [train_step(cfg, WORLD, state)[0] for state in states]
    want = tree.map(lambda *x: torch.stack(x), *states)
    assert_trees_equal(mapped, want, rtol=0, atol=1e-10)
    assert_trees_equal(vectors, want, rtol=0, atol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize("name", ["squashed", "gsde", "images and gru"])
def test_rollout_step_and_minibatch_step_are_one_graph_that_equals_eager(name):
    cfg = learner(name).cfg
    state = fp.train_step.init(cfg, WORLD, random.key(0))
    collected = collect(cfg, WORLD, state)
    inputs = EAGER_PARTS.sample_randomness(cfg, WORLD, state.key).random_inputs
    calls = {
        "rollout_step": (
            state.params,
            collected.rollout_state,
            tree.map(lambda x: x[0], inputs),
        ),
        "minibatch_step": (
            state.params,
            collected.batch,
            collected.scalars,
            collected.update_state,
            tree.map(lambda x: x[0], collected.minibatches),
        ),
    }
    for part, arguments in calls.items():
        eager = getattr(EAGER_PARTS, part)
        graph = compiled(eager, backend="aot_eager")
        assert_trees_equal(
            graph(cfg, WORLD, *arguments),
            eager(cfg, WORLD, *arguments),
            rtol=1e-5,
            atol=1e-6,
        )
