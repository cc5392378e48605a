"""Processes that agree on what they compile and record, before the first collective of it."""

from __future__ import annotations

import time

import pytest
import torch

from funcppo.runtime import agreement, capture
from funcppo.runtime.agreement import (
    PeerFailedError,
    alone,
    attempt_together,
    backend_options,
)
from funcppo.runtime.compile import compile_function
from tests.cli.processes import run_processes, waiting_ends_with
from tests.runtime.test_collectives import in_processes, needs_no_gpu


def test_the_first_failure_ends_an_attempt():
    """No agreement follows it, whatever the process does."""
    told = []

    def agree(what, failure=""):
        told.append((what, failure))
        return "rank 1: no" if len(told) == 2 else failure

    with (
        pytest.raises(PeerFailedError, match=r"^rank 1: no$"),
        attempt_together(agree, "it"),
    ):
        agreement.settle()
        try:
            agreement.settle()
        except PeerFailedError:
            raise RuntimeError("as a compiler tells it") from None
    assert told == [("it", ""), ("it", "")]


def test_a_failure_is_told_once_and_raised():
    told = []

    def agree(what, failure=""):
        told.append(failure)
        return failure

    with pytest.raises(KeyError), attempt_together(agree, "it"):
        raise KeyError("x")
    assert told == ["KeyError: 'x'"]


def test_a_process_alone_compiles_by_the_backend_itself():
    with attempt_together(alone, "it"):
        options = backend_options("inductor", {"a": 1})
    assert options == {"backend": "inductor", "options": {"a": 1}}


def test_code_of_inductor_is_agreed_on_before_it_runs():
    """Found by a failure elsewhere: it ends the call with its reason, and success leaves the function as it is."""
    told = []

    def agree(what, failure=""):
        told.append(what)
        return "rank 1: no" if what == "second" else failure

    x = torch.arange(3.0)
    with attempt_together(agree, "first"):
        double = compile_function(lambda x: 2 * x, use_custom_passes=False)
        assert double(x).tolist() == [0, 2, 4]
    assert told == ["first", "first"]

    with (
        pytest.raises(PeerFailedError, match=r"^rank 1: no$"),
        attempt_together(agree, "second"),
    ):
        compile_function(lambda x: 3 * x, use_custom_passes=False)(x)
    assert told[2:] == ["second"]


@needs_no_gpu
def test_a_compilation_that_fails_in_one_process_leaves_none_waiting(
    tmp_path, monkeypatch
):
    """Of two functions with collectives one cannot be compiled by rank 1: all give the attempt up, and go on."""

    # against a hang
    monkeypatch.setenv("FUNCPPO_STALL_SECONDS", "120")

    def program(group):
        def compile_graph(name, graph, inputs):
            if group.rank == 1 and name == "second":
                raise RuntimeError("planted")
            return graph.forward

        def function(name):
            torch._dynamo.reset()
            backend = lambda graph, inputs: compile_graph(name, graph, inputs)
            torch._dynamo.register_backend(backend, name=name)
            return compile_function(
                lambda x: group.all_gather(x).sum(0), backend=name
            )

        x = torch.ones(2, 2)
        reason = ""
        try:
            with attempt_together(group.first_failure, "it"):
                function("first")(x)
                function("second")(x)
        except PeerFailedError as error:
            reason = str(error)
        except Exception as error:
            reason = f"own: {'planted' in str(error)}"
        # the collectives of both are in step again
        return reason, group.all_gather(x).sum().item()

    first, second = in_processes(2, tmp_path, program)
    assert first[0].startswith("rank 1: ") and "planted" in first[0]
    assert second[0] == "own: True"
    assert first[1] == second[1] == 8.0


@needs_no_gpu
@pytest.mark.parametrize("broken", [0, 1, None])
def test_all_record_a_graph_or_none(tmp_path, broken):
    """A recording that fails in one process; a CPU has none, so that recording itself is a stand-in."""

    def program(group):
        def record(fn, buffers):
            if group.rank == broken:
                raise capture.CaptureError("planted")
            return capture.CapturedStep(
                state=buffers,
                step=lambda: None,
                replay_mode="cuda-graph",
                fallback_reason="",
                fallback_code=None,
                n_graphs=1,
                capture_ms=0.0,
                fn=fn,
            )

        capture._reason_against_graph = lambda leaves: ("", None)
        capture._capture_cuda_graph = record
        captured = capture.capture(
            lambda x: (x + 1, x), torch.zeros(2), agree=group.first_failure
        )
        return captured.replay_mode, captured.fallback_reason

    got = in_processes(2, tmp_path, program)
    if broken is None:
        assert got == [["cuda-graph", ""]] * 2
        return
    reasons = [f"rank {broken}: planted"] * 2
    reasons[broken] = "planted"
    assert got == [["none", reason] for reason in reasons]


def test_a_compilation_that_hangs_ends_all_with_how_far_each_is(tmp_path):
    from funcppo.runtime import collectives, distributed

    waits = tmp_path / "waits"
    report = distributed.Processes.report

    def prepare(rank):
        def report_and_hurry(processes, text):
            report(processes, text)
            if text.endswith("one-graph"):
                while not processes._progress()[1].endswith("preparing"):
                    time.sleep(0.01)
                waits.touch()

        distributed.Processes.report = report_and_hurry
        waiting_ends_with(waits)

    def program():
        processes = distributed.join({}, hide_gpus=False)
        group = collectives.connect(processes, {})
        with (
            processes.deadline("preparing"),
            attempt_together(group.first_failure, "one-graph"),
        ):
            if group.rank == 1:
                time.sleep(120)
            agreement.settle()

    ended = run_processes(2, tmp_path, main=program, prepare=prepare)
    assert all(x.status for x in ended)
    text = ended[0].err.strip().splitlines()[-1]
    assert "expected progress within 0.5 s, got none: " in text
    assert ", one-graph; rank 1: preparing" in text
