"""A call that replays a CUDA graph equals the call: of a step, and of a loop body.

The cases on a GPU skip where there is none; on a CPU the function is called instead of the graph, over its buffers.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch

from funcppo.config import Config, PPOConfig
from funcppo.core import random, tree
from funcppo.kg.graph import loaders
from funcppo.kg.search import task as prover_task
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.runtime.capture import CaptureError
from funcppo.runtime.graphed import (
    GraphedScan,
    GraphedStep,
    capture_loop_bodies,
)
from funcppo.train_step import EAGER_PARTS, init, train_step, vmap_parts
from tests.learning import WORLD, assert_trees_equal, cartpole_config
from tests.runtime.test_capture import Pair, devices, on_gpu, pair


@devices
def test_a_graphed_step_equals_the_step_whatever_its_arguments(device):
    """Params, inputs and states change between calls and within a run of them; one recording serves a cfg."""

    def step(cfg, world, params, table, state):
        traced.append(cfg)
        return Pair(state.a * params + world[0], state.b + table * cfg)

    traced, world = [], (torch.arange(3.0, device=device),)
    graphed = GraphedStep(step)
    for cfg, weight, entry in ((2, 0.5, 1.0), (2, 0.25, 3.0), (3, 0.5, 1.0)):
        params, table = (
            torch.full((3,), x, device=device) for x in (weight, entry)
        )
        state, want = pair(device), pair(device)
        for i in range(4):
            table = table + 1 if i == 2 else table
            state, want = (
                graphed(cfg, world, params, table, state),
                step(cfg, world, params, table, want),
            )
            assert_trees_equal(state, want, rtol=0, atol=0)
    assert graphed.fallback_reasons() == (
        [] if device == "cuda" else ["no CUDA tensor in the state"]
    )
    if device == "cuda":
        # called by the test; warmed up and recorded
        assert traced.count(3) == 4 + 2


def body(
    cfg: int,
    world: tuple[torch.Tensor],
    weight: torch.Tensor,
    carry: Pair,
    x: torch.Tensor,
):
    """The leaves change places, and the old ones are shown."""
    return Pair(carry.b * weight + cfg * x, carry.a + world[0]), (
        carry.a,
        (carry.b * x).sum(),
    )


@devices
def test_a_graphed_scan_equals_the_scan(device):
    """Whatever it is called with; one recording serves a cfg and shapes, and what was returned stays as it was."""
    graphed_scan, world, kept = (
        GraphedScan(),
        (torch.arange(3.0, device=device),),
        [],
    )
    for cfg, weight, n in ((2, 0.5, 4), (2, 0.25, 4), (3, 0.5, 4), (2, 0.5, 5)):
        fn = partial(body, cfg, world, torch.full((3,), weight, device=device))
        xs = torch.arange(1.0, 1.0 + n, device=device) * weight
        start = pair(device)
        kept.append(
            (graphed_scan(fn, start, xs), tree.scan(fn, pair(device), xs))
        )
        assert_trees_equal(start, pair(device), rtol=0, atol=0)
    for got, want in kept:
        assert_trees_equal(got, want, rtol=0, atol=0)
    assert len(graphed_scan.captures()) == 3
    assert graphed_scan.fallback_reasons() == (
        [] if device == "cuda" else ["no CUDA tensor in the state"]
    )


@devices
def test_a_loop_that_was_interrupted_starts_again(device):
    graphed_scan, world = GraphedScan(), (torch.arange(3.0, device=device),)
    fn, xs = (
        partial(body, 2, world, torch.ones(3, device=device)),
        torch.arange(4.0, device=device),
    )
    graphed_scan(fn, pair(device), xs)
    loop = graphed_scan.captures()[0]
    loop.load(
        loop.state._replace(step_index=torch.zeros_like(loop.state.step_index))
    )
    loop.step()
    assert_trees_equal(
        graphed_scan(fn, pair(device), xs),
        tree.scan(fn, pair(device), xs),
        rtol=0,
        atol=0,
    )


def test_strict_raises_if_no_loop_body_can_be_captured():
    with pytest.raises(CaptureError, match=r"^no CUDA tensor in the state$"):
        GraphedScan(strict=True)(
            partial(body, 2, (torch.ones(3),), torch.ones(3)),
            pair("cpu"),
            torch.ones(2),
        )


PPO = PPOConfig(n_envs=4, n_steps=6, n_updates=10, n_epochs=2, n_minibatches=2)


@cache
def cartpole(device: str) -> tuple[Config, Any]:
    return cartpole_config(
        max_steps=5,
        n_envs=4,
        n_steps=6,
        n_updates=10,
        n_epochs=2,
        n_minibatches=2,
    ), WORLD


@cache
def prover(device: str) -> tuple[Config, Any]:
    """Countries S1 to height 2; the policy picks facts too."""
    ready = prover_task.build_task(
        loaders.load("countries_s1", None),
        ProverTaskConfig(max_height=2, max_depth=4),
        device,
    )
    return prover_task.build_config(ready, PPO), prover_task.training_world(
        ready
    )


@devices
@pytest.mark.parametrize("problem", [cartpole, prover])
def test_iterations_by_loop_bodies_equal_the_iterations(problem, device):
    """Bit for bit."""
    cfg, world = problem(device)
    want = init(cfg, world, random.key(0, device))
    captured = capture_loop_bodies(
        partial(train_step, cfg, world), EAGER_PARTS, want
    )
    for _ in range(3):
        want, shown = train_step(cfg, world, want)
        assert_trees_equal(captured.step(), shown, rtol=0, atol=0)
        assert_trees_equal(captured.state, want, rtol=0, atol=0)
    assert (captured.replay_mode, captured.n_graphs) == (
        ("cuda-graph-per-loop-body", 2) if device == "cuda" else ("none", 0)
    )


@devices
def test_iterations_of_learners_under_vmap_by_loop_bodies_equal_the_iterations(
    device,
):
    cfg, world = cartpole(device)
    want = tree.map(
        torch.clone,
        torch.vmap(partial(init, cfg, world))(
            random.split(random.key(0, device), 3)
        ),
    )
    captured = capture_loop_bodies(
        partial(train_step, cfg, world), vmap_parts(EAGER_PARTS), want
    )
    for _ in range(2):
        want, shown = train_step(cfg, world, want, vmap_parts(EAGER_PARTS))
        assert_trees_equal(captured.step(), shown, rtol=0, atol=0)
    assert_trees_equal(captured.state, want, rtol=0, atol=0)


@on_gpu
@pytest.mark.parametrize("problem", [cartpole, prover])
def test_an_iteration_by_loop_bodies_is_a_launch_a_step_and_never_waits(
    problem,
):
    cfg, world = problem("cuda")
    captured = capture_loop_bodies(
        partial(train_step, cfg, world),
        EAGER_PARTS,
        init(cfg, world, random.key(0, "cuda")),
        strict=True,
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile() as profile:
            captured.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    calls = [
        event.name
        for event in profile.events()
        if event.name.startswith("cuda")
    ]
    assert (
        calls.count("cudaGraphLaunch")
        == cfg.ppo.n_steps + cfg.ppo.n_epochs * cfg.ppo.n_minibatches
    )
    assert not {
        "cudaStreamSynchronize",
        "cudaEventSynchronize",
        "cudaMemcpy",
    } & set(calls), calls
    # Between the loops; the random bits are some 150 kernels a draw where nothing is compiled.
    assert 0 < sum("LaunchKernel" in name for name in calls) < 2000
