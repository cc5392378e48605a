"""The CUDA graphs of CUDAGraph Trees: a compiled function is recorded once, and no result is overwritten."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch

from funcppo.core import random
from funcppo.runtime.capture import (
    CUDAGRAPH_OPTIONS,
    TreeFunction,
    are_trees_demanded,
    capture,
    cudagraph_trees_only,
)
from funcppo.runtime.compile import select_strategy, with_capture
from funcppo.runtime.monitor import Monitor
from funcppo.train_step import EAGER_PARTS, collect, init, train_step
from tests.learning import WORLD, assert_trees_equal, cartpole_config
from tests.runtime.test_capture import Pair, on_gpu, pair

CFG = cartpole_config(
    max_steps=5, n_envs=4, n_steps=8, n_updates=10, n_epochs=2, n_minibatches=2
)


@cache
def state(device: str = "cpu"):
    return init(CFG, WORLD, random.key(0, device))


def test_a_result_outlives_the_next_call_and_each_call_begins_a_step(
    monkeypatch,
):
    """In place of PyTorch's function one that, as a graph does, overwrites what it has returned."""
    buffers = pair("cpu")
    asked, events = [], []

    def compile_over_buffers(fn, **options):
        asked.append(options)

        def compiled(x):
            events.append("call")
            buffers.a.copy_(fn(x))
            return buffers

        return compiled

    monkeypatch.setattr(torch, "compile", compile_over_buffers)
    monkeypatch.setattr(
        torch.compiler,
        "cudagraph_mark_step_begin",
        lambda: events.append("step"),
    )
    double = TreeFunction(lambda x: 2 * x, {"size_asserts": False})
    first, second = double(torch.ones(3)), double(torch.full((3,), 5.0))
    assert type(first) is Pair
    assert first.a.tolist() == [2.0] * 3 and second.a.tolist() == [10.0] * 3
    assert events == ["step", "call"] * 2
    (options,) = asked
    assert options["fullgraph"] and options["dynamic"] is False
    assert options["options"] == {"size_asserts": False} | CUDAGRAPH_OPTIONS


def test_the_demand_ends_with_its_block():
    assert not are_trees_demanded()
    with cudagraph_trees_only():
        with cudagraph_trees_only():
            assert are_trees_demanded()
        assert are_trees_demanded()
        captured = capture(lambda s: (s, ()), pair("cpu"))
        assert captured.fallback_reason == "no CUDA tensor in the state"
        assert captured.replay_mode == "none"
    assert not are_trees_demanded()


def test_a_strategy_that_compiles_nothing_is_refused(monkeypatch):
    select = partial(select_strategy, collect, EAGER_PARTS, CFG, WORLD, state())
    message = r"^strategy: expected one that compiles, for CUDAGraph Trees"
    with cudagraph_trees_only():
        with pytest.raises(ValueError, match=message + ", got 'eager'$"):
            select("eager")
        monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
        with pytest.raises(
            ValueError, match=message + ", but TORCH_COMPILE_DISABLE"
        ):
            select("auto")


@on_gpu
def test_a_training_step_replays_one_graph_for_each_compiled_function():
    """Four functions; 1e-5 of parameters that move by up to 1e-3. The second update records nothing."""
    torch._dynamo.reset()
    want = state("cuda")
    with cudagraph_trees_only(), Monitor() as monitor:
        parts, record = select_strategy(
            collect, EAGER_PARTS, CFG, WORLD, want, "one-graph"
        )
        captured = capture(
            partial(train_step, CFG, WORLD, parts=parts), state("cuda")
        )
        record = with_capture(record, captured)
        recordings = []
        for _ in range(3):
            captured.step()
            recordings.append(monitor.cudagraph_recordings)
    assert record.replay_mode == "cuda-graph-trees" and not record.failures
    # One of them may be compiled for the first state and again for later ones.
    assert recordings[0] in (4, 5), monitor.report()
    assert recordings == [recordings[0]] * 3, monitor.report()
    assert monitor.cudagraph_skip_reasons == []
    assert monitor.cudagraph_rerecordings == 0

    for _ in range(3):
        want, _ = train_step(CFG, WORLD, want)
    got = captured.state
    assert_trees_equal(got.params, want.params, rtol=0, atol=1e-5)
