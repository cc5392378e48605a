"""The budget of a search: rows and seconds are counted, and each ends it."""

from __future__ import annotations

from funcppo.kg.mining.mined_rules import Budget


class FakeClock:
    """A clock that is set by hand."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_rows_are_counted_and_end_the_work():
    budget = Budget(max_rows=100, seconds=10.0, clock=FakeClock())
    assert budget.rows_left() == 100 and not budget.is_exhausted()
    budget.spend(60)
    assert budget.rows_left() == 40 and budget.rows_left(0.5) == 0
    assert budget.is_exhausted(0.5) and not budget.is_exhausted(0.7)
    budget.spend(40)
    assert budget.is_exhausted() and not budget.was_late


def test_the_time_ends_the_work_and_is_told_apart_from_it():
    clock = FakeClock()
    budget = Budget(max_rows=100, seconds=10.0, clock=clock)
    clock.now += 5.0
    assert budget.elapsed == 5.0 and budget.spent_share == 0.0
    clock.now += 4.0  # of the second half of the time, four fifths
    assert budget.spent_share == 0.8
    assert not budget.is_exhausted(0.9) and not budget.was_late
    assert budget.is_exhausted(0.75) and budget.was_late
    clock.now += 1.0
    assert budget.is_late()


def test_a_stage_reports_its_own_work_and_never_more_than_all_of_it():
    calls = []
    budget = Budget(
        max_rows=100,
        seconds=10.0,
        progress=lambda *call: calls.append(call),
        clock=FakeClock(),
    )
    budget.start_stage("one", 10)
    budget.spend(4)
    budget.spend(8)
    budget.start_stage("two", 20)
    budget.spend(5)
    assert calls == [
        ("one", 0, 10),
        ("one", 4, 10),
        ("one", 12, 12),
        ("two", 0, 20),
        ("two", 5, 20),
    ]
