"""Processes of one program: threads that share a store, and, for collectives, processes of their own.

Processes agree on what they compile and record, before the first collective of it.
"""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from funcppo.runtime import capture, distributed
from funcppo.runtime.compile import compile_function
from tests.cli.processes import run_processes


def run_ranks(n, function, **settings):
    """What a function returns or raises for each rank, all at once."""
    settings |= {"store": HashStore(), "world_size": n}

    def run(rank):
        try:
            return function(distributed.Processes(rank=rank, **settings))
        except (ValueError, RuntimeError) as error:
            return error

    with ThreadPoolExecutor(n) as threads:
        return list(threads.map(run, range(n)))


@pytest.mark.parametrize("n", [1, 3])
def test_results_come_in_the_order_of_the_tasks_whoever_is_fast(n):
    def work(processes):
        def square(task):
            # later tasks are ready before earlier ones
            time.sleep(0.002 * (7 - task))
            return f"{task * task}".encode()

        blocks = list(processes.iter_results("square", 7, square))
        left = [f"square/{i}/part/0" for i in range(7)]
        return blocks, any(processes.store.check([key]) for key in left)

    results = run_ranks(n, work)
    expected = [b"0", b"1", b"4", b"9", b"16", b"25", b"36"]
    assert results[0] == (expected, False)
    assert [blocks for blocks, _ in results[1:]] == [[]] * (n - 1)


def test_all_hear_who_holds_other_facts():
    def check(processes):
        torch = "2.11.0" if processes.rank == 1 else "2.13.0"
        processes.check_equal({"PyTorch": torch})

    for error in run_ranks(3, check):
        assert isinstance(error, ValueError)
        problem = "expected PyTorch 2.13.0, as rank 0 has, got 2.11.0"
        assert str(error) == f"rank 1: {problem}"


def test_who_waits_too_long_hears_how_far_each_is():
    store = HashStore()
    main, peer = (
        distributed.Processes(
            store=store, rank=i, world_size=3, stall_seconds=0.3
        )
        for i in range(2)
    )
    peer.report("3 done, at window 5 of 9")
    main.report("4 done, no window left")
    with pytest.raises(distributed.StalledError) as error:
        main.exchange("facts", {})
    ranks = ["4 done, no window left", "3 done, at window 5 of 9", "not joined"]
    said = "; ".join(f"rank {i}: {line}" for i, line in enumerate(ranks))
    assert (
        str(error.value) == f"expected progress within 0.3 s, got none: {said}"
    )


def test_who_waits_hears_the_error_of_another(monkeypatch):
    monkeypatch.setattr(distributed, "TELL_SECONDS", 600.0)

    def fail(processes):
        if processes.rank == 1:
            return processes.fail("the disk is full")
        try:
            return processes.exchange("facts", {})
        except distributed.PeerError as error:
            processes.fail(str(error))
            return str(error)

    assert run_ranks(2, fail) == ["rank 1: the disk is full", True]


@pytest.mark.parametrize(
    "visible, local_rank, expected",
    [(None, 0, "0"), (None, 3, "3"), ("4,6", 1, "6"), ("4,6", 2, ""), ("", 0, "")],
)  # fmt: skip
def test_a_process_sees_its_gpu(monkeypatch, visible, local_rank, expected):
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    distributed._choose_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


def test_a_process_that_no_launcher_started_joins_nobody(monkeypatch):
    for name in distributed.LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert distributed.join({}) is None
    assert distributed.current_processes() is None
    assert distributed.launched_size() == distributed.launched_rank() == 0
    assert distributed.local_size() == 1


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_ends_those_that_wait_for_it(failing, tmp_path):
    """Long before their deadline; and rank 0 prints it, once."""

    def program():
        if failing == 0:  # and ends without a word
            distributed.TELL_SECONDS = 0.2
        processes = distributed.join({}, hide_gpus=False)
        with processes.collective("in update 3"):
            if processes.rank == failing:
                raise RuntimeError("no memory\nmore lines")
            time.sleep(100)

    ended = run_processes(2, tmp_path, main=program)
    other = ended[1 - failing]
    assert other.status == distributed.EXIT_PEER_FAILED
    line = "funcppo: rank 1: in update 3: RuntimeError: no memory\n"
    assert other.err == (line if failing == 1 else "")


# ---- Collectives.

# of no processes: a call that is refused reaches none
ALL_GATHER = distributed.AllGather(world_size=2, group_name="none")


# The compiler asks for the GPU, which a process that is forked cannot have.
needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a forked process cannot use a GPU"
)


def in_processes(n, folder, program):
    """What a program of a group returns in each of some processes, as JSON."""

    def main():
        torch.set_num_threads(1)
        processes = distributed.join({}, hide_gpus=False)
        print(json.dumps(program(distributed.connect(processes, {}))))

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
    problem = r"expected a call outside of torch.vmap and torch.func.grad"
    with pytest.raises(RuntimeError, match=f"^all_gather: {problem}"):
        transformed(torch.ones(2, 2))


@needs_no_gpu
def test_a_failing_compilation_leaves_none_waiting(tmp_path, monkeypatch):
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
            gathered = lambda x: group.all_gather(x).sum(0)
            return compile_function(gathered, backend=name)

        x = torch.ones(2, 2)
        reason = ""
        try:
            with distributed.attempt_together(group.first_failure, "it"):
                function("first")(x)
                function("second")(x)
        except distributed.PeerFailedError as error:
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
            fields = {"replay_mode": "cuda-graph", "n_graphs": 1, "fn": fn}
            return capture.CapturedStep(
                state=buffers, step=lambda: None, **fields
            )

        capture._reason_against_graph = lambda leaves: None
        capture._capture_cuda_graph = record
        step, agree = lambda x: (x + 1, x), group.first_failure
        captured = capture.capture(step, torch.zeros(2), agree=agree)
        return captured.replay_mode, captured.fallback_reason

    got = in_processes(2, tmp_path, program)
    if broken is None:
        assert got == [["cuda-graph", ""]] * 2
        return
    reasons = [f"rank {broken}: planted"] * 2
    reasons[broken] = "planted"
    assert got == [["none", reason] for reason in reasons]


def raised(fn):
    try:
        fn()
    except AssertionError as error:
        return error
    raise RuntimeError("nothing was raised")


def test_a_line_says_what_an_error_says_or_where_it_was_raised():
    def fail(*text):
        if text:
            raise AssertionError(*text)
        raise AssertionError

    assert distributed.error_line(raised(lambda: fail("two\n lines"))) == "two"
    of_backend = lambda: fail("backend='b' raised:\nValueError: no")
    line = distributed.error_line(raised(of_backend))
    assert line == "backend='b' raised: ValueError: no"
    line = distributed.error_line(raised(fail))
    assert line.startswith("test_distributed.py, line ")
    assert line.endswith(": raise AssertionError")
    place = 'File "/a/b/net.py", line 3, in f'
    of_dynamo = f"\nfrom user code:\n   {place}\n    g()"
    line = distributed.error_line(raised(lambda: fail(of_dynamo)))
    assert line.startswith("test_distributed.py, line ")
    assert line.endswith(', from user code: File "net.py", line 3, in f g()')
    assert distributed.error_line(ValueError()) == ""
