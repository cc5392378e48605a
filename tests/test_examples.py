"""The example of an environment and a network of one's own works as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from experiments.plug_in import Corridor, apply_table, config, main

from experiments import plug_in
from funcppo import random
from funcppo.runtime.compile import select_strategy
from funcppo.train_step import EAGER_PARTS, collect, init, train_step
from tests.learning import WORLD, assert_trees_equal, one_thread

pytestmark = pytest.mark.usefixtures(one_thread.__name__)


def test_the_example_learns_to_walk_straight_to_the_goal():
    """From a random walk to 8 - 1.5 = 6.5 steps, the distance of the mean starting cell."""
    lengths = main()
    assert lengths[0] > 15 and lengths[-1] < 8


def test_environment_and_network_take_at_most_40_lines():
    """From the first class to the configuration, blank lines apart."""
    lines = Path(plug_in.__file__).read_text().splitlines()
    first, last = (
        next(i for i, line in enumerate(lines) if line.startswith(mark))
        for mark in ("@data", "def main")
    )
    assert len([line for line in lines[first:last] if line.strip()]) <= 40


def test_the_example_is_one_graph():
    cfg = config(Corridor(n_cells=5, max_steps=9))
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


def test_the_example_never_walks_into_the_wall():
    cfg = config(Corridor(n_cells=5, max_steps=9))
    out = apply_table(
        cfg.agent.cfg,
        WORLD,
        cfg.agent.init(cfg.agent.cfg, random.key(0)),
        torch.zeros(500, dtype=torch.int64),
    )
    assert cfg.agent.distribution.sample(random.key(1), out).all()
