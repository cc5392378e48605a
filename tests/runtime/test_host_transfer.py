"""Copies arrive in order, and a thread that pins and allocates memory breaks no capture."""

from __future__ import annotations

import re
import threading

import pytest
import torch

from funcppo.core import tree
from funcppo.runtime.capture import capture
from funcppo.runtime.memory import (
    AsyncReadback,
    StagingBuffers,
    prefetch,
    to_device,
    to_host,
)
from tests.learning import devices, on_gpu


@devices
def test_each_step_reads_the_values_put_before_it(device):
    """A running sum of twenty batches, no host wait between them."""
    staging = StagingBuffers(torch.zeros(1000), device)
    staging.put(torch.zeros(1000))
    staging.wait_copied()
    captured = capture(
        lambda s: (s + staging.data.sum(), s), torch.zeros((), device=device)
    )
    for i in range(20):
        staging.put(torch.full((1000,), float(i)))
        staging.wait_copied()
        captured.step()
        staging.mark_consumed()
    assert float(captured.state) == 1000 * sum(range(20))


@devices
def test_a_leaf_that_does_not_fit_raises_and_is_named(device):
    staging = StagingBuffers((torch.zeros(3), torch.zeros(2)), device)
    with pytest.raises(
        ValueError,
        match=re.escape("1: expected torch.float32 [2], got torch.float32 [3]"),
    ):
        staging.put((torch.zeros(3), torch.zeros(3)))


class Loader(threading.Thread):
    """A pinned-memory loader: allocates, pins and waits for the device, again and again."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stop, self.error, self.rounds = threading.Event(), "", 0

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                torch.empty((1 << 20) + self.rounds % 3).pin_memory().cuda(
                    non_blocking=True
                )
                torch.cuda.current_stream().synchronize()
                self.rounds += 1
        except RuntimeError as error:
            self.error = str(error)


def capture_beside_a_loader(mode: str) -> tuple[str, str]:
    """The errors of a capture of 2000 additions and of a loader that runs meanwhile; both empty when all went well."""
    loader, x, broke = Loader(), torch.zeros(8, device="cuda"), ""
    graph = torch.cuda.CUDAGraph()
    loader.start()
    while loader.rounds < 3 and not loader.error:
        pass
    try:
        with torch.cuda.graph(graph, capture_error_mode=mode):
            for _ in range(2000):
                x = x + 1
    except RuntimeError as error:
        broke = str(error)
    loader.stop.set()
    loader.join()
    return broke, loader.error


@on_gpu
def test_a_loader_thread_breaks_a_global_capture_and_not_ours():
    """The classic failure, and the mode that is immune to it."""
    classic = capture_beside_a_loader("global")
    assert any("captur" in error for error in classic), classic
    assert capture_beside_a_loader("thread_local") == ("", "")
    loader = Loader()
    loader.start()
    captured = capture(
        lambda s: (s + 1, s), torch.zeros(8, device="cuda"), strict=True
    )
    captured.step()
    loader.stop.set()
    loader.join()
    assert loader.error == "" and float(captured.state[0]) == 1.0


@devices
@pytest.mark.parametrize(("n", "size"), [(0, 4), (3, 4), (4, 4), (1001, 7)])
def test_prefetched_chunks_are_the_rows_in_order(n, size, device):
    rows = torch.arange(3 * n, dtype=torch.int32).view(n, 3)
    parts = [part.clone() for part in prefetch(rows, size, device)]
    assert all(
        part.device.type == device and len(part) <= size for part in parts
    )
    assert torch.equal(torch.cat(parts).cpu(), rows)


@on_gpu
def test_a_step_that_prefetches_is_no_graph_and_says_why():
    rows = torch.zeros(8, 3)

    def step(x):
        return x + sum(part.sum() for part in prefetch(rows, 4, "cuda")), ()

    captured = capture(step, torch.zeros(3, device="cuda"))
    assert captured.replay_mode == "none"
    assert "prefetch: expected a call between" in captured.fallback_reason


@devices
def test_a_readback_returns_this_value_on_a_cpu_and_the_previous_one_on_a_gpu(
    device,
):
    readback, seen = AsyncReadback(), []
    for i in range(5):
        numbers = readback(torch.tensor([i, 10 * i], device=device))
        seen.append(numbers if numbers is None else numbers.tolist())
    now = [[i, 10 * i] for i in range(5)]
    assert seen == (now if device == "cpu" else [None, *now[:-1]])


@devices
def test_a_tree_goes_to_the_device_and_back(device):
    there = (torch.arange(6).view(2, 3), (torch.tensor([True, False]),))
    moved = to_device(there, device)
    back = to_host(moved)
    for a, b, c in zip(
        tree.leaves(there), tree.leaves(moved), tree.leaves(back)
    ):
        assert b.device.type == device and c.device.type == "cpu"
        assert torch.equal(a, c) and a.dtype == c.dtype


@on_gpu
def test_a_step_that_stages_data_itself_is_no_graph_and_says_why():
    staging = StagingBuffers(torch.zeros(3), "cuda")

    def step(x):
        staging.put(torch.ones(3))
        return x + 1, ()

    captured = capture(step, torch.zeros(3, device="cuda"))
    assert captured.replay_mode == "none"
    assert "StagingBuffers.put: expected a call" in captured.fallback_reason
