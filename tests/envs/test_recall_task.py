"""The cue is shown once, and paid for once."""

from __future__ import annotations

import torch

import funcppo as fp
from funcppo.core import random
from tests.learning import WORLD


def test_an_episode_by_hand():
    """Three rows of an episode of 3 steps: right at the end, wrong at the end, right before and wrong at the end."""
    env = fp.envs.recall(n_steps=3, n_cues=2)
    keys = random.split(random.key(0), 3)
    state = env.reset(env.cfg, WORLD, keys)._replace(
        cue=torch.tensor([0, 1, 1])
    )
    observed, rewards = [], []
    for action in ([1, 1, 1], [1, 1, 1], [0, 0, 0]):
        observed.append(env.observe(env.cfg, WORLD, state).tolist())
        state, step = env.step_functional(
            env.cfg, WORLD, state, torch.tensor(action), keys
        )
        rewards.append(step.reward.tolist())
    assert observed == [
        [[1, 0, 0], [0, 1, 0], [0, 1, 0]],
        [[0, 0, 0]] * 3,
        [[0, 0, 1]] * 3,
    ]
    assert rewards == [[0, 0, 0], [0, 0, 0], [1, -1, -1]]
    assert step.terminated.all() and not step.truncated.any()


def test_it_keeps_the_laws_of_an_environment():
    fp.check(fp.envs.recall(), n_steps=10)
    fp.check(fp.envs.recall(n_steps=1, n_cues=5), n_steps=3)


def test_every_cue_is_as_likely():
    """Of 6,000 resets each of three within five standard errors of a third."""
    env = fp.envs.recall(n_cues=3)
    state = env.reset(env.cfg, WORLD, random.split(random.key(0), 6000))
    share = torch.bincount(state.cue, minlength=3) / 6000
    assert (share - 1 / 3).abs().max() < 5 * (2 / 9 / 6000) ** 0.5
