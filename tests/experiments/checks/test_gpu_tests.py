"""A row for each list of GPUs: what passed, what failed and why, and what earlier rows could not run."""

from __future__ import annotations

import os
import sys

from experiments.checks.gpu_tests import summarise
from experiments.checks.pytest_outcomes import Outcome, run_tests
from experiments.paths import DATA


def test_a_test_that_needs_a_gpu_is_named_in_the_row_of_the_first_one():
    always = Outcome("always", "passed", "")
    rows = summarise(
        {
            "": [always, _skipped("one"), _skipped("two")],
            "0": [always, _passed("one"), _skipped("two")],
            "0,1": [always, _passed("one"), _passed("two")],
        }
    )
    assert [row["n_gpus"] for row in rows] == [0, 1, 2]
    assert [row["n_passed"] for row in rows] == [1, 2, 3]
    assert [row["skipped_before"] for row in rows] == [[], ["one"], ["two"]]
    assert [row["reasons_to_skip"] for row in rows] == [
        {"no such GPU": 2},
        {"no such GPU": 1},
        {},
    ]


def test_a_failure_is_named_with_its_reason_and_is_no_pass():
    rows = summarise(
        {"": [_skipped("one")], "0": [Outcome("one", "failed", "1 != 2")]}
    )
    assert rows[1]["failed"] == {"one": "1 != 2"}
    assert rows[1]["skipped_before"] == []


def test_the_reason_to_skip_a_test_does_not_say_where_the_data_are(tmp_path):
    reason = f"{DATA / 'oracles' / 'x.npz'} is absent"
    file = tmp_path / "test_data.py"
    file.write_text(f"import pytest\ndef test_it(): pytest.skip({reason!r})")
    (outcome,) = run_tests(sys.executable, [file], 0)
    assert outcome.outcome == "skipped"
    assert outcome.reason == f"oracles{os.sep}x.npz is absent"


def _passed(name: str) -> Outcome:
    return Outcome(name, "passed", "")


def _skipped(name: str) -> Outcome:
    return Outcome(name, "skipped", "no such GPU")
