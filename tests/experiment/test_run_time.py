"""The time of a run, divided over its phases."""

from __future__ import annotations

import math

from funcppo.experiment.run_time import RunTime

SHARES = (
    RunTime.MINING,
    RunTime.CHOICE,
    RunTime.VALID,
    RunTime.QUESTIONS,
    RunTime.FIT,
    RunTime.PPO,
    RunTime.TEST,
)


def test_phases_end_one_after_another_within_the_time():
    assert list(SHARES) == sorted(set(SHARES))
    assert SHARES[0] > 0 and SHARES[-1] < 1


def test_what_a_phase_leaves_later_ones_have():
    now = [5.0]
    run_time = RunTime(100.0, clock=lambda: now[0])
    assert run_time.until(0.4).seconds_left == 40.0
    now[0] += 10.0
    run_time.end_phase("mining")
    assert run_time.until(0.5).seconds_left == 40.0
    now[0] += 2.0
    run_time.end_phase("training")
    now[0] += 1.0
    run_time.end_phase("training")
    assert run_time.phases == {"mining": 10.0, "training": 3.0}


def test_work_that_the_user_has_set_does_not_count():
    now = [0.0]
    run_time = RunTime(100.0, clock=lambda: now[0])
    now[0] = 500.0
    run_time.end_phase("training", is_set=True)
    assert run_time.phases == {"training": 500.0}
    assert run_time.until(0.5).seconds_left == 50.0


def test_without_a_bound_nothing_ends():
    run_time = RunTime(None)
    assert run_time.until(RunTime.MINING).seconds_left == math.inf
