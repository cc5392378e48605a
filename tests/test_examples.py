"""The examples run as they stand, learn what they say, and stay short."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import funcppo as fp
from examples import custom_env
from funcppo import random
from funcppo.runtime.compile import select_strategy
from funcppo.train_step import EAGER_PARTS, collect, init, train_step
from tests.learning import WORLD, assert_trees_equal

FOLDER = Path(__file__).parents[1] / "examples"


def printed_numbers(name: str) -> list[float]:
    """The last number of each line that an example prints."""
    command = [sys.executable, str(FOLDER / name)]
    output = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout
    return [float(line.split()[-1]) for line in output.splitlines()]


@pytest.mark.parametrize(
    "name", sorted(path.name for path in FOLDER.glob("*.py"))
)
def test_an_example_has_fewer_than_60_lines_and_says_what_it_is(name):
    text = (FOLDER / name).read_text()
    assert len(text.splitlines()) < 60
    assert re.match(r'"""[A-Z]', text)


def test_cartpole_learns_to_balance():
    """From about 22 steps an episode, untrained, to more than 200."""
    returns = printed_numbers("cartpole.py")
    assert len(returns) == 6 and returns[-1] > 200


def test_your_own_environment_is_learnt():
    """From a random walk to 8 - 1.5 = 6.5 steps, the distance of the mean starting cell."""
    lengths = printed_numbers("custom_env.py")
    assert len(lengths) == 20 and lengths[0] > 15 and lengths[-1] < 8


def test_your_own_environment_and_network_are_one_graph():
    cfg = custom_env.learner.cfg
    state = init(cfg, WORLD, random.key(0))
    parts, record = select_strategy(
        collect, EAGER_PARTS, cfg, WORLD, state, backend="aot_eager"
    )
    assert record.strategy == "one-graph" and not record.failures
    assert_trees_equal(
        train_step(cfg, WORLD, state, parts),
        train_step(cfg, WORLD, state),
        rtol=1e-5,
        atol=1e-5,
    )


def test_your_own_mask_keeps_actions_from_the_wall():
    agent = custom_env.learner.cfg.agent
    output = agent.apply(
        agent.cfg,
        WORLD,
        agent.init(agent.cfg, random.key(0)),
        torch.zeros(500, dtype=torch.int64),
    )
    assert agent.distribution.sample(random.key(1), output).all()
    assert isinstance(output, fp.PolicyValue)
