"""How CUDAGraph Trees (`mode="reduce-overhead"`) fail: the symptom, what the monitor says, and the cure.

funcppo replays whole iterations by `capture`; these are for who meets the alternative. Every case needs a GPU.
"""

from __future__ import annotations

import pytest
import torch

from funcppo.runtime.monitor import Monitor
from tests.runtime.test_capture import on_gpu

pytestmark = on_gpu


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tree_compiled(fn):
    return torch.compile(fn, mode="reduce-overhead", fullgraph=True)


def run(fn, inputs) -> Monitor:
    """Call a compiled function on one input after another, a step each."""
    with Monitor() as monitor:
        for x in inputs:
            torch.compiler.cudagraph_mark_step_begin()
            fn(x)
    return monitor


def scaled(weight):
    return tree_compiled(lambda x: (x * weight).sin() + 1)


def test_an_input_that_is_mutated_is_skipped_with_the_reason_until_it_is_returned_instead():
    def in_place(x):
        x.add_(1)
        return x * 2

    bad = run(
        tree_compiled(in_place),
        [torch.zeros(8, device="cuda") for _ in range(4)],
    )
    assert (
        bad.cudagraph_recordings == 0
        and "mutated inputs" in bad.cudagraph_skip_reasons[0]
    )
    good = run(
        tree_compiled(lambda x: (x + 1, (x + 1) * 2)),
        [torch.zeros(8, device="cuda")] * 4,
    )
    assert good.cudagraph_recordings == 1 and not good.cudagraph_skip_reasons


def test_a_host_operator_is_skipped_with_the_reason_until_it_is_moved():
    host = torch.arange(8.0)
    # which leaves such operators out of the graph
    with torch._inductor.config.patch(graph_partition=False):
        bad = run(
            tree_compiled(lambda x: (x * 2, host * 2)),
            [torch.zeros(8, device="cuda")] * 4,
        )
    assert (
        bad.cudagraph_recordings == 0
        and "cpu" in bad.cudagraph_skip_reasons[0].lower()
    )
    device = host.cuda()
    assert (
        run(
            tree_compiled(lambda x: (x * 2, device * 2)),
            [torch.zeros(8, device="cuda")] * 4,
        ).cudagraph_recordings
        == 1
    )


def test_weights_that_move_are_recorded_again_until_they_stay():
    """Parameters are static inputs: each new home is a new recording."""
    net = torch.nn.Linear(8, 8, device="cuda")
    x = torch.zeros(2, 8, device="cuda")
    step = tree_compiled(net)
    with Monitor() as moving, torch.no_grad():
        for _ in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            step(x)
            moving.watch_addresses(tuple(net.parameters()))
            net.weight.data = net.weight.data.clone()
            assert moving.moved_leaves(tuple(net.parameters())) == ["0"]
    torch._dynamo.reset()
    step = tree_compiled(net)
    with Monitor() as staying, torch.no_grad():
        for _ in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            step(x)
            net.weight.copy_(net.weight * 0.9)
    assert moving.cudagraph_recordings > staying.cudagraph_recordings == 1


def test_an_output_kept_over_a_step_is_lost_until_it_is_cloned():
    step = tree_compiled(lambda x: x * 2)
    kept = None
    for i in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        before, kept = kept, step(torch.full((4,), float(i), device="cuda"))
    try:
        lost = float(before[0]) != 4.0
    except RuntimeError as error:
        lost = "overwritten" in str(error)
    assert lost
    kept_clones = []
    for i in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        kept_clones.append(
            step(torch.full((4,), float(i), device="cuda")).clone()
        )
    assert [float(x[0]) for x in kept_clones] == [0.0, 2.0, 4.0, 6.0]


def test_a_batch_of_another_size_is_compiled_and_recorded_again_until_it_is_padded():
    step = torch.compile(lambda x: x * 2, mode="reduce-overhead", dynamic=False)
    sizes = run(
        step, [torch.zeros(n, device="cuda") for n in (8, 8, 8, 5, 5, 5)]
    )
    assert sizes.cudagraph_recordings == 2 and sizes.compiles == 2
    padded = run(step, [torch.zeros(8, device="cuda") for _ in range(6)])
    assert padded.compiles == 0


def test_gradients_set_to_none_move_and_gradients_set_to_zero_stay():
    net = torch.nn.Linear(8, 8, device="cuda")
    homes: dict[bool, set[int]] = {}
    for to_none in (True, False):
        homes[to_none], held = set(), []
        for _ in range(4):
            net(torch.ones(2, 8, device="cuda")).sum().backward()
            homes[to_none].add(net.weight.grad.data_ptr())
            # something else takes the memory that was let go
            held.append(torch.empty_like(net.weight))
            net.zero_grad(set_to_none=to_none)
            held.append(torch.empty_like(net.weight))
    assert len(homes[False]) == 1 < len(homes[True])


def test_two_paths_through_one_function_are_recorded_once_each():
    left, right = tree_compiled(lambda x: x * 2), tree_compiled(lambda x: x * 3)

    def call(x, turn):
        y = (x + 1).sin()
        return left(y) if turn else right(y)

    with Monitor() as monitor:
        for i in range(10):
            torch.compiler.cudagraph_mark_step_begin()
            call(torch.zeros(8, device="cuda"), i % 2 == 0)
    assert (
        monitor.cudagraph_recordings == 2
        and monitor.cudagraph_rerecordings == 0
    )
