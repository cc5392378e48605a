"""A commit is slower where all its repeats are slower than all of the baseline's."""

from __future__ import annotations

import json

import pytest

from experiments import paths
from experiments.checks import check_speed
from experiments.paths import ROOT


def rows(before, after):
    times = [("a", time) for time in before] + [("b", time) for time in after]
    return [
        {"commit": commit, "benchmark": "x", "cpu_ms": time}
        for commit, time in times
    ]


@pytest.mark.parametrize(
    ("before", "after", "is_slower"),
    [
        ([1.0, 3.0], [2.9, 9.0], False),  # one repeat within the spread
        ([1.0, 3.0], [3.1, 3.2], True),
        ([1.0, 3.0], [0.5, 0.6], False),
    ],
)
def test_slower_is_beyond_the_spread_of_the_baseline(before, after, is_slower):
    found = check_speed.is_slower(rows(before, after), "x", "a")
    assert found == is_slower


def test_other_benchmarks_do_not_count():
    others = [row | {"benchmark": "y"} for row in rows([], [9.0])]
    assert not check_speed.is_slower([*rows([1.0], [1.0]), *others], "x", "a")


def test_the_program_for_any_commit_prints_milliseconds(monkeypatch):
    program = check_speed.CARTPOLE.replace(
        f"range({check_speed.N_UPDATES} + 1)", "range(2)"
    ).replace(f"[{check_speed.N_UPDATES} // 2]", "[0]")
    monkeypatch.setattr(check_speed, "CARTPOLE", program)
    assert check_speed.cartpole_milliseconds(ROOT) > 0


def test_the_redesign_is_not_slower():
    record = json.loads((paths.RESULTS / "redesign-cpu.json").read_text())
    for benchmark in ("cartpole", "ranking"):
        assert not check_speed.is_slower(
            record["rows"], benchmark, record["baseline"]
        )
