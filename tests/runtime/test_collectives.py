"""Collectives of two processes: in order, traced in one graph, and refused where they would return nonsense.

Processes agree on what they compile and record, before the first collective of it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from funcppo.runtime import capture, collectives, distributed
from funcppo.runtime.collectives import (
    AllGather,
    PeerFailedError,
    alone,
    attempt_together,
    backend_options,
)
from funcppo.runtime.compile import compile_function
from tests.cli.processes import run_processes, waiting_ends_with

# of no processes: a call that is refused reaches none
ALL_GATHER = AllGather(world_size=2, group_name="none")


# The compiler asks for the GPU, which a process that is forked cannot have.
needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a forked process cannot use a GPU"
)


def in_processes(n, folder, program):
    """What a program of a group returns in each of some processes, as JSON."""

    def main():
        torch.set_num_threads(1)
        processes = distributed.join({}, hide_gpus=False)
        print(json.dumps(program(collectives.connect(processes, {}))))

    ended = run_processes(n, folder, main=main)
    assert [x.status for x in ended] == [0] * n, ended
    return [json.loads(x.out) for x in ended]


def rows_of(group):
    return 10.0 * group.rank + torch.arange(4.0).view(2, 2)


def test_rows_come_in_the_order_of_ranks(tmp_path):
    def gather(group):
        table = group.all_gather(rows_of(group).T)
        kinds = [torch.bool, torch.int64, torch.bfloat16]
        like = [group.all_gather(rows_of(group).to(x)) for x in kinds]
        assert [x.dtype for x in like] == kinds
        return table.tolist()

    expected = [[0.0, 2.0], [1.0, 3.0], [10.0, 12.0], [11.0, 13.0]]
    assert in_processes(2, tmp_path, gather) == [expected] * 2


class Pair(NamedTuple):
    """Two tensors."""

    number: Tensor
    flags: Tensor


def test_all_receive_the_tensors_and_the_decision_of_rank_0(tmp_path):
    def share(group):
        own = Pair(torch.tensor(group.rank), torch.full((2,), group.is_main))
        got = group.broadcast(own)
        assert int(own.number) == group.rank  # written to no argument
        agreed = [group.agree(group.rank == i) for i in range(2)]
        return [int(got.number), got.flags.tolist(), agreed]

    expected = [0, [True, True], [True, False]]
    assert in_processes(2, tmp_path, share) == [expected] * 2


def test_all_hear_of_the_first_failure_and_its_rank(tmp_path):
    def agree(group):
        return [
            group.first_failure("it", "no" if group.rank == i else "")
            for i in range(3)
        ]

    assert (
        in_processes(2, tmp_path, agree)
        == [["rank 0: no", "rank 1: no", ""]] * 2
    )


@needs_no_gpu
def test_a_gather_is_traced_in_one_graph(tmp_path):
    """No break; the code of both processes is equal, and the result that of eager calls."""

    def compiled(group):
        graphs = []

        def backend(graph, _):
            graphs.append(graph.code)
            return graph.forward

        step = lambda x: group.all_gather(x * 2).sum(0)
        fast = torch.compile(step, fullgraph=True, backend=backend)
        x = rows_of(group)
        assert torch.equal(fast(x), step(x))
        return graphs

    first, second = in_processes(2, tmp_path, compiled)
    assert len(first) == 1 and first == second
    assert "all_gather_into_tensor" in first[0]


def sum_of_gathered(x):
    return ALL_GATHER(x).sum()


@pytest.mark.parametrize(
    "transformed",
    [
        torch.vmap(sum_of_gathered),
        torch.func.grad(sum_of_gathered),
        torch.func.grad(lambda x: torch.vmap(sum_of_gathered)(x).sum()),
        torch.vmap(torch.func.grad(sum_of_gathered)),
    ],
    ids=["vmap", "grad", "grad of vmap", "vmap of grad"],
)
def test_a_gather_under_a_transformation_is_refused(transformed):
    with pytest.raises(
        RuntimeError,
        match=r"^all_gather: expected a call outside of torch.vmap and torch.func.grad",
    ):
        transformed(torch.ones(2, 2))


@needs_no_gpu
@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_a_compiled_gather_under_a_transformation_is_refused(
    tmp_path, transform
):
    def compiled(group):
        def step(x):
            return transform(lambda row: group.all_gather(row).sum())(x)

        fast = torch.compile(step, fullgraph=True, backend="eager")
        try:
            fast(torch.ones(2, 2))
        except RuntimeError as error:
            return str(error)
        return "no error"

    for message in in_processes(2, tmp_path, compiled):
        assert "expected a call outside of torch.vmap" in message


def test_facts_that_differ_are_an_error_of_all(tmp_path):
    def main():
        processes = distributed.join({}, hide_gpus=False)
        facts = {"n_envs": 8 + processes.rank}
        with pytest.raises(ValueError, match="rank 1: expected n_envs 8, as"):
            collectives.connect(processes, facts)

    ended = run_processes(2, tmp_path, main=main)
    assert [x.status for x in ended] == [0, 0], ended


@pytest.mark.parametrize("is_open", [True, False])
def test_nothing_is_printed_where_processes_connect(
    tmp_path, monkeypatch, is_open
):
    """Gloo of PyTorch 2.10 prints past Python; without standard output its number may be that of a socket."""
    init_process_group = torch.distributed.init_process_group
    report = "connected\n"

    def init_and_print(*args, **kwargs):
        init_process_group(*args, **kwargs)
        os.write(1, report.encode())

    def main():
        if not is_open:
            sys.__stdout__ = None
        processes = distributed.join({}, hide_gpus=False)
        print(collectives.connect(processes, {}).rank)

    monkeypatch.setattr(torch.distributed, "init_process_group", init_and_print)
    ended = run_processes(2, tmp_path, main=main)
    assert [x.status for x in ended] == [0, 0], ended
    if is_open:
        assert [x.out for x in ended] == ["0\n", "1\n"]
    else:
        assert all(report in x.out for x in ended)


def test_a_process_uses_the_gpu_of_its_number_if_there_is_one(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for rank in range(3):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        collectives.choose_gpu()
    assert chosen == [0, 1]


def test_gathers_of_equal_groups_are_equal():
    """Settings of one graph, which a cache finds again."""
    again = AllGather(world_size=2, group_name="none")
    assert again == ALL_GATHER and hash(ALL_GATHER) == hash(again)


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
        collectives.settle()
        try:
            collectives.settle()
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
            collectives.settle()

    ended = run_processes(2, tmp_path, main=program, prepare=prepare)
    assert all(x.status for x in ended)
    text = ended[0].err.strip().splitlines()[-1]
    assert "expected progress within 0.5 s, got none: " in text
    assert ", one-graph; rank 1: preparing" in text
