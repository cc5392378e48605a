"""The time of a run, divided over its phases."""

from __future__ import annotations

import math

import pytest

from funcppo.kg.run.run_time import RunTime


def test_phases_end_one_after_another_within_the_time():
    shares = RunTime.SHARES
    assert list(shares) == sorted(set(shares))
    assert shares[0] > 0 and shares[-1] < 1


def test_what_a_phase_leaves_later_ones_have():
    now = [5.0]
    run_time = RunTime(100.0, clock=lambda: now[0])
    assert run_time.until(RunTime.MINING).seconds_left == 40.0
    now[0] += 10.0
    run_time.end_phase("mining")
    left = run_time.until(RunTime.CHOICE).seconds_left
    assert left == pytest.approx(100 * RunTime.CHOICE - 10)
    now[0] += 2.0
    run_time.end_phase("training")
    now[0] += 1.0
    run_time.end_phase("training")
    assert run_time.phases == {"mining": 10.0, "training": 3.0}
    peaks = run_time.peak_bytes
    assert 0 < peaks["mining"] <= peaks["training"]


def test_work_that_the_user_has_set_does_not_count():
    now = [0.0]
    run_time = RunTime(100.0, clock=lambda: now[0])
    now[0] = 500.0
    run_time.end_phase("training", is_set=True)
    assert run_time.phases == {"training": 500.0}
    left = run_time.until(RunTime.CHOICE).seconds_left
    assert left == pytest.approx(100 * RunTime.CHOICE)


def test_a_phase_that_begins_late_has_its_part_of_what_is_left():
    now = [0.0]
    run_time = RunTime(100.0, clock=lambda: now[0])
    now[0] = 70.0
    part = (RunTime.CHOICE - RunTime.MINING) / (1 - RunTime.MINING)
    left = run_time.until(RunTime.CHOICE).seconds_left
    assert left == pytest.approx(30 * part)
    # One that begins in time has all until its moment.
    now[0] = 100 * RunTime.MINING
    left = run_time.until(RunTime.CHOICE).seconds_left
    assert left == pytest.approx(100 * (RunTime.CHOICE - RunTime.MINING))
    now[0] = 200.0
    assert all(run_time.until(share).is_over for share in RunTime.SHARES)


def test_without_a_bound_nothing_ends():
    run_time = RunTime(None)
    assert run_time.until(RunTime.MINING).seconds_left == math.inf
