"""Threads share work in order; nothing searches for cycles in a pause."""

import gc
import math
import threading

import pytest

from funcppo.core import host
from funcppo.core.host import NO_DEADLINE, Deadline


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("3", 3), ("0", 1), ("100", 8), ("", 5), ("2,4", 5), (None, 5)],
)
def test_threads_are_those_set_or_of_the_cores(monkeypatch, setting, expected):
    monkeypatch.setattr(host, "AVAILABLE_CORES", 5)
    if setting is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", setting)
    assert host.count_threads() == expected


def test_results_come_in_order_and_parts_run_side_by_side():
    both_run = threading.Barrier(2)
    callers = set()

    def compute(part):
        callers.add(threading.get_ident())
        both_run.wait(timeout=600)
        return part * 10

    assert list(host.map_in_threads(compute, [3, 1], 2)) == [30, 10]
    assert len(callers) == 2 and threading.get_ident() not in callers


def test_a_pause_ends_as_it_began_also_by_an_error():
    with pytest.raises(KeyError), host.paused_collection():
        with host.paused_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_a_deadline_is_over_at_its_moment():
    now = [10.0]
    deadline = Deadline(at=14.0, clock=lambda: now[0])
    assert deadline.seconds_left == 4.0 and not deadline.is_over
    half = deadline.share(0.5)
    assert half.at == 12.0 and half.seconds_left == 2.0
    assert deadline.at_most(1.0).at == 11.0
    assert deadline.at_most(9.0).at == 14.0
    now[0] = 14.0
    assert deadline.is_over and deadline.seconds_left == 0.0
    now[0] = 20.0
    assert deadline.seconds_left == 0.0 and deadline.share(0.5).is_over


def test_without_a_deadline_nothing_is_over():
    assert NO_DEADLINE.seconds_left == math.inf
    assert NO_DEADLINE.share(0.1) is NO_DEADLINE
    assert not NO_DEADLINE.is_over
