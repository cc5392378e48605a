"""The monitor counts what happened, once, and says why."""

import logging

import torch

from funcppo.runtime.capture import capture
from funcppo.runtime.monitor import CUDAGRAPH_SKIP_LOGGER, Monitor


def test_compiling_is_counted_and_compiling_again_has_a_reason_and_one_warning():
    fn = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    with Monitor() as monitor:
        fn(torch.zeros(3))
        monitor.end_warmup()
        fn(torch.ones(3))
        assert (monitor.compiles, monitor.warning()) == (1, None)
        fn(torch.zeros(4))
        warning = monitor.warning()
        assert monitor.compiles == 2 and len(monitor.recompile_reasons) == 1
        for text in ("compiled again 1 times", "size mismatch"):
            assert warning and text in warning
        fn(torch.zeros(5))
        assert monitor.warning() is None
    fn(torch.zeros(6))
    assert monitor.compiles == 3


def test_a_leaf_that_moves_is_named():
    state = (torch.zeros(2), torch.zeros(2))
    monitor = Monitor()
    monitor.watch_addresses(state)
    assert monitor.moved_leaves(state) == []
    assert monitor.moved_leaves((state[0], state[1].clone())) == ["1"]


def test_the_reason_for_a_skipped_graph_is_stored():
    log = logging.getLogger(CUDAGRAPH_SKIP_LOGGER)
    with Monitor() as monitor:
        log.warning("skipping cudagraphs due to mutated inputs (3 instances)")
    log.warning("after the end")
    assert monitor.cudagraph_skip_reasons == [
        "skipping cudagraphs due to mutated inputs (3 instances)"
    ]


def test_times_and_the_fallback_are_reported():
    with Monitor() as monitor:
        captured = capture(lambda s: (s + 1, s), torch.zeros(3))
        monitor.record_capture(captured)
        for _ in range(3):
            with monitor.timer("replay"):
                captured.step()
    if torch.cuda.is_available():  # the timer's events end on the GPU
        torch.cuda.synchronize()
    report = monitor.report()
    assert report["replay_ms"] >= 0.0 and monitor.median_ms("stage") is None
    assert report["fallback_reason"] == "no CUDA tensor in the state"
    assert report["cudagraph_recordings"] == report["cudagraph_skips"] == 0
