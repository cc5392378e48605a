"""A difference is found and named; names, times and the order of fields are none."""

from __future__ import annotations

import json

import numpy as np
import pytest

from experiments.checks import check_unchanged


def test_equal_values_have_no_difference():
    assert check_unchanged.compare([], []) == ""
    assert check_unchanged.compare(["1", "2.5"], ["1", "2.5"]) == ""


def test_the_first_difference_is_named_and_all_are_counted():
    before, after = ["1", "2", "3", "4"], ["1", "5", "3", "6"]
    assert (
        check_unchanged.compare(before, after)
        == "2 of 4 values differ, first 1: 2 before, 5 now"
    )


def test_another_number_of_values_is_a_difference():
    assert (
        check_unchanged.compare(["1"], ["1", "1"]) == "1 values before, 2 now"
    )


def test_numbers_leave_out_names_texts_flags_and_times():
    value = {
        "mrr": 0.5,
        "seconds": 3.0,
        "phase_seconds": {"reading": 1.5},
        "name": "x",
        "ok": True,
        "none": None,
        "deep": [{"format": 2, "n": 7}, 1e-3],
    }
    assert [*check_unchanged.numbers(value)] == ["0.5", "7", "0.001"]


def test_numbers_tell_the_last_bit_and_a_whole_number_from_a_float():
    assert [*check_unchanged.numbers([0.1 + 0.2, 0.3, 1, 1.0])] == [
        "0.30000000000000004",
        "0.3",
        "1",
        "1.0",
    ]


def test_a_renaming_is_no_difference_and_a_value_in_another_line_is_one(
    tmp_path,
):
    before, after = tmp_path / "before.jsonl", tmp_path / "after.jsonl"
    before.write_text(
        '{"better": 1, "rank": {"mean": 2.5}}\n{"better": 3, "rank": {"mean": 4.5}}\n'
    )
    after.write_text(
        '{"rank": {"average": 2.5}, "n_better": 1}\n{"rank": {"average": 4.5}, "n_better": 3}\n'
    )
    values = check_unchanged.json_lines(before)
    assert (
        values == ["1", "2.5", "3", "4.5"]
        and check_unchanged.json_lines(after) == values
    )
    after.write_text(
        "".join(reversed(after.read_text().splitlines(keepends=True)))
    )
    assert check_unchanged.json_lines(after) != values


def test_tensors_are_compared_by_type_shape_and_bytes(tmp_path):
    def of(**arrays) -> list[str]:
        np.savez(
            tmp_path / "checkpoint.npz", __meta__=np.array("said"), **arrays
        )
        return check_unchanged.tensors(tmp_path / "checkpoint.npz")

    values = of(x=np.zeros((2, 3), np.float32))
    assert len(values) == 1 and values[0].startswith("float32 (2, 3) ")
    assert of(renamed=np.zeros((2, 3), np.float32)) == values
    for other in (
        np.zeros((3, 2), np.float32),
        np.zeros((2, 3)),
        np.full((2, 3), -0.0, np.float32),
    ):
        assert of(x=other) != values


def test_a_run_that_differs_is_a_row_and_an_exit_status(
    tmp_path, monkeypatch, capsys
):
    """The runs are replaced by ones that tell the two checkouts apart."""
    monkeypatch.setattr(
        check_unchanged,
        "RUNS",
        {
            "same": lambda checkout, folder: ["1", "2"],
            "other": lambda checkout, folder: [
                "1",
                str(checkout == check_unchanged.ROOT),
            ],
        },
    )
    out = tmp_path / "unchanged.json"
    argv = ["check_unchanged.py", "--baseline", "HEAD", "--out", str(out)]
    monkeypatch.setattr("sys.argv", argv)
    assert check_unchanged.main() == 1
    rows = {row["run"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["same"]["difference"] == "" and rows["same"]["values"] == 2
    assert (
        rows["other"]["difference"]
        == "1 of 2 values differ, first 1: False before, True now"
    )
    assert "same: 2 values, equal" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", [*argv, "--only", "same"])
    assert check_unchanged.main() == 0


def test_a_process_that_fails_ends_the_check(tmp_path):
    assert check_unchanged.call(tmp_path, "-c", "print(3)") == "3\n"
    assert (
        check_unchanged.call(tmp_path, "-c", "exit(1)", statuses=(0, 1)) == ""
    )
    with pytest.raises(SystemExit, match="exit 1"):
        check_unchanged.call(tmp_path, "-c", "raise ValueError('no')")
