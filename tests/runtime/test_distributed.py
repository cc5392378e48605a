"""Processes of one program; here threads that share a store."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from torch.distributed import HashStore

from funcppo.runtime import distributed
from funcppo.runtime.distributed import PeerError, Processes, StalledError
from tests.cli.processes import run_processes


def run_ranks(n, function, **settings):
    """What a function returns or raises for each rank, all at once."""
    store = HashStore()
    results = [None] * n

    def run(rank):
        processes = Processes(store=store, rank=rank, world_size=n, **settings)
        try:
            results[rank] = function(processes)
        except (ValueError, RuntimeError) as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("n", [1, 2, 3])
def test_results_come_in_the_order_of_the_tasks_whoever_is_fast(n):
    def work(processes):
        def square(task):
            # later tasks are ready before earlier ones
            time.sleep(0.002 * (7 - task))
            return f"{task * task}".encode()

        return list(processes.iter_results("square", 7, square))

    results = run_ranks(n, work)
    assert results[0] == [b"0", b"1", b"4", b"9", b"16", b"25", b"36"]
    assert results[1:] == [[]] * (n - 1)


def test_every_task_is_done_once():
    done = []

    def work(processes):
        def note(task):
            done.append(task)
            return b""

        return list(processes.iter_results("note", 20, note))

    assert run_ranks(3, work)[0] == [b""] * 20
    assert sorted(done) == list(range(20))


def test_a_process_without_tasks_waits_for_rank_0_as_long_as_it_works():
    """It gives up where rank 0 hangs, as nobody else could tell."""
    is_taken, is_hanging = threading.Event(), threading.Event()

    def work(processes):
        def hang_on_rank_0(task):
            if processes.is_main:
                is_taken.set()
                is_hanging.wait()
            is_taken.wait()
            return b""

        try:
            return list(processes.iter_results("task", 4, hang_on_rank_0))
        finally:
            is_hanging.set()

    _, other = run_ranks(2, work, stall_seconds=0.5)
    assert isinstance(other, StalledError)
    assert "rank 0: 0 done, at task" in str(other)
    assert "rank 1: 3 done, no task left" in str(other)


def test_rank_0_may_leave_before_the_last_result():
    """The others do not wait for it then."""

    def work(processes):
        results = processes.iter_results("task", 8, lambda task: b"x")
        found = []
        for result in results:
            found.append(result)
            if len(found) == 2:
                break
        results.close()
        return found

    # the time is against a hang
    assert run_ranks(3, work, stall_seconds=60.0) == [[b"x"] * 2, [], []]


def test_a_result_may_be_larger_than_a_value_of_the_store(monkeypatch):
    monkeypatch.setattr(distributed, "MAX_VALUE_BYTES", 3)
    blocks = [b"", b"abc", b"abcd", bytes(range(256))]

    def work(processes):
        return list(processes.iter_results("block", 4, lambda i: blocks[i]))

    assert run_ranks(2, work)[0] == blocks


def test_all_receive_what_rank_0_shares():
    results = run_ranks(
        3, lambda x: x.share("sizes", {"slots": 8} if x.is_main else None)
    )
    assert results == [{"slots": 8}] * 3


def test_all_hear_who_holds_other_facts():
    def check(processes):
        torch = "2.11.0" if processes.rank == 1 else "2.13.0"
        processes.check_equal("join", {"PyTorch": torch})

    for error in run_ranks(3, check):
        assert isinstance(error, ValueError)
        assert str(error) == (
            "rank 1: expected PyTorch 2.13.0, as rank 0 has, got 2.11.0"
        )


def test_the_model_of_the_gpu_is_a_fact(monkeypatch):
    names = {"cuda": "model A", "cuda:1": "model B"}
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    assert distributed.gpu_facts("cuda:1") == {"GPU": "model B"}
    assert distributed.gpu_facts("cuda") == {"GPU": "model A"}
    assert distributed.gpu_facts("cpu") == {"GPU": "none"}


def test_equal_facts_pass():
    check = {"GPU": "H200", "seed": 0}
    assert run_ranks(2, lambda x: x.check_equal("join", check)) == [None] * 2


def test_all_receive_the_values_of_all_in_the_order_of_ranks():
    results = run_ranks(3, lambda x: x.exchange("sizes", [x.rank]))
    assert results == [[[0], [1], [2]]] * 3


class Clock:
    """Time that passes when somebody sleeps, by a part of the deadline of 1 s."""

    def __init__(self, on_sleep):
        self.now = 0.0
        self.on_sleep = on_sleep

    def monotonic(self):
        return self.now

    def sleep(self, _):
        self.now += 0.6
        self.on_sleep(self.now)


def test_who_waits_too_long_hears_how_far_each_is(monkeypatch):
    clock = Clock(on_sleep=lambda now: None)
    monkeypatch.setattr(distributed, "time", clock)
    store = HashStore()
    main, peer = (
        Processes(store=store, rank=i, world_size=3, stall_seconds=1.0)
        for i in range(2)
    )
    peer.report("3 done, at window 5 of 9")
    main.report("4 done, no window left")
    with pytest.raises(StalledError) as error:
        main.check_equal("facts", {})
    assert str(error.value) == (
        "expected progress within 1 s, got none: rank 0: 4 done, no window left; "
        "rank 1: 3 done, at window 5 of 9; rank 2: not joined"
    )
    assert clock.now < 3


def test_progress_of_others_moves_the_deadline(monkeypatch):
    store = HashStore()
    main, peer = (
        Processes(store=store, rank=i, world_size=2, stall_seconds=1.0)
        for i in range(2)
    )

    def go_on(now):
        peer.report(f"at {now}")
        if now > 5:
            peer._put("facts/1", b"{}")

    clock = Clock(go_on)
    monkeypatch.setattr(distributed, "time", clock)
    main.check_equal("facts", {})
    assert clock.now > 5


def test_who_waits_hears_the_error_of_another(monkeypatch):
    monkeypatch.setattr(distributed, "TELL_SECONDS", 600.0)

    def fail(processes):
        if processes.rank == 1:
            return processes.fail("the disk is full")
        try:
            return processes.check_equal("facts", {})
        except PeerError as error:
            processes.fail(str(error))
            return str(error)

    assert run_ranks(2, fail) == ["rank 1: the disk is full", True]


def test_an_error_that_rank_0_does_not_print_is_left_to_its_process(
    monkeypatch,
):
    monkeypatch.setattr(distributed, "TELL_SECONDS", 0.05)
    lonely = Processes(store=HashStore(), rank=1, world_size=2)
    assert not lonely.fail("the disk is full")


@pytest.mark.parametrize(
    "visible, local_rank, expected",
    [
        (None, 0, "0"),
        (None, 3, "3"),
        ("4,6", 1, "6"),
        ("4,6", 2, ""),
        ("", 0, ""),
    ],
)
def test_a_process_sees_the_gpu_of_its_number(
    monkeypatch, visible, local_rank, expected
):
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


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf"])
def test_a_deadline_is_a_number_of_seconds(monkeypatch, text):
    monkeypatch.setenv(distributed.STALL_VARIABLE, text)
    with pytest.raises(ValueError, match="FUNCPPO_STALL_SECONDS: expected"):
        distributed._stall_seconds()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_results_may_come_in_every_process_and_leave_the_store_empty(n):
    def work(processes):
        blocks = list(
            processes.iter_results(
                "square", 7, lambda i: f"{i * i}".encode(), everywhere=True
            )
        )
        processes.exchange("end", None)
        left = [f"square/{i}/part/0" for i in range(7)]
        return blocks, any(processes.store.check([key]) for key in left)

    expected = [b"0", b"1", b"4", b"9", b"16", b"25", b"36"]
    assert run_ranks(n, work) == [(expected, False)] * n


def test_a_post_is_replaced_by_the_next(monkeypatch):
    monkeypatch.setattr(distributed, "MAX_VALUE_BYTES", 3)
    (result,) = run_ranks(
        1,
        lambda x: (
            x.read_post("best"),
            x.post("best", b"abcde"),
            x.read_post("best"),
            x.post("best", b"fghij"),
            x.read_post("best"),
        ),
    )
    assert result == (None, None, b"abcde", None, b"fghij")


class WatchClock:
    """Time that passes when the test says so; each look of the watch at the others reads it once."""

    def __init__(self):
        self.now = 0.0
        self.n_readings = 0

    def monotonic(self):
        now = self.now
        self.n_readings += 1
        return now

    def wait_for_looks(self, n):
        """Wait for some looks, the first of which may have begun before."""
        last = self.n_readings + n
        end = time.monotonic() + 60
        while self.n_readings < last:
            assert time.monotonic() < end, "the watch does not look"
            time.sleep(0.001)


@pytest.mark.parametrize("n_silent", [0, 1])
def test_progress_of_another_moves_the_deadline_of_a_collective(
    n_silent, monkeypatch
):
    """Each step takes two thirds of the time; a silent one after them is too long."""
    clock, ends, has_ended = WatchClock(), [], threading.Event()

    def end(status):
        ends.append(status)
        main.stall_seconds = 600.0  # this process goes on
        has_ended.set()

    monkeypatch.setattr(distributed, "time", clock)
    monkeypatch.setattr(distributed, "WATCH_SECONDS", 0.001)
    monkeypatch.setattr(os, "_exit", end)
    store = HashStore()
    main, peer = (
        Processes(store=store, rank=i, world_size=2, stall_seconds=0.3)
        for i in range(2)
    )
    with main.deadline("slow"):
        for i in range(6):
            peer.report(f"step {i}")
            clock.wait_for_looks(2)
            clock.now += 0.2
        if n_silent:
            clock.now += 0.2
            has_ended.wait(60)
    assert ends == [distributed.EXIT_STALLED] * n_silent


def test_what_ends_before_its_deadline_is_left_alone(monkeypatch):
    monkeypatch.setattr(distributed, "WATCH_SECONDS", 0.001)
    lonely = Processes(store=HashStore(), rank=0, world_size=1)
    with lonely.deadline("fast"):
        watch = thread_of("_watch")
    watch.join(60)
    assert not watch.is_alive()


def thread_of(function):
    """The thread that was started last to run a function."""
    threads = [x for x in threading.enumerate() if function in x.name]
    return max(threads, key=lambda x: int(x.name.split("-")[1].split()[0]))


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


def test_an_error_that_follows_from_that_of_another_names_the_other():
    """As of Gloo, which loses the connection to a process that has ended."""
    is_told = threading.Event()

    def work(processes):
        with processes.collective("in update 3"):
            if processes.rank == 1:
                raise ValueError("planted")
            is_told.wait()
            raise RuntimeError("connection closed")

    store = HashStore()
    main, peer = (
        Processes(store=store, rank=i, world_size=2) for i in range(2)
    )
    with pytest.raises(ValueError, match=r"^planted$"):
        work(peer)
    is_told.set()
    with pytest.raises(
        PeerError, match=r"^rank 1: in update 3: ValueError: planted$"
    ):
        work(main)
