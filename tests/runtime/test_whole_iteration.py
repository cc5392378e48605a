"""A whole iteration in one graph is the iteration."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from examples import custom_env
from funcppo.core import random, tree
from funcppo.runtime.compile import compile_function
from funcppo.runtime.whole_iteration import UNCHECKED_OPTIONS, compile_iteration
from funcppo.train_step import EAGER_PARTS, init, train_step
from tests.learning import WORLD, assert_trees_equal


def test_what_is_compiled_unchecked_follows_its_arguments_and_no_module(
    monkeypatch,
):
    """Another shape and another setting are seen, another function in a module is not."""
    step = compile_function(
        lambda gain, x: gain * tree.scan(lambda c, x: (c + x, x), x[0], x)[0],
        **UNCHECKED_OPTIONS,
    )
    x = torch.ones(3, 2)
    assert (
        step(1.0, x).tolist() == [4, 4]
        and step(2.0, x).tolist() == [8, 8]
        and step(1.0, x[:2]).tolist() == [3, 3]
    )
    monkeypatch.setattr(tree, "scan", lambda fn, carry, xs: (carry, xs))
    assert step(1.0, x).tolist() == [4, 4]


@pytest.mark.parametrize("n_microbatches", [1, 3])
def test_a_whole_iteration_is_one_graph_and_equals_eager(n_microbatches):
    """Three updates; the second and third compile nothing. Microbatches are a loop within the loop of minibatches."""
    cfg = custom_env.learner.cfg
    ppo = replace(
        cfg.ppo,
        n_envs=4,
        n_steps=3,
        n_epochs=2,
        n_minibatches=2,
        n_microbatches=n_microbatches,
    )
    cfg = replace(cfg, ppo=ppo)
    torch._dynamo.utils.counters.clear()
    step = compile_iteration(train_step, EAGER_PARTS, backend="aot_eager")
    got = want = init(cfg, WORLD, random.key(0))
    with torch.no_grad():
        got, shown = step(cfg, WORLD, got)
        want, expected = train_step(cfg, WORLD, want)
        with torch.compiler.set_stance("fail_on_recompile"):
            for _ in range(2):
                got, shown = step(cfg, WORLD, got)
                want, expected = train_step(cfg, WORLD, want)
    assert_trees_equal(got, want, rtol=1e-5, atol=1e-6)
    assert_trees_equal(shown.loss, expected.loss, rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
