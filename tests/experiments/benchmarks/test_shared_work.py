"""Work that several processes share is timed, and compared with that of the fewest."""

import argparse

from experiments.benchmarks import shared_work


def test_a_row_has_the_bytes_and_the_seconds_of_both_works():
    args = argparse.Namespace(
        device="cpu",
        data="countries_s3",
        graph="countries_s3",
        queries=4,
        max_rows=100_000,
        limit=300.0,
    )
    rows = [shared_work.run(args, work, 1) for work in shared_work.WORK]
    for row in rows:
        assert "error" not in row, row["error"]
        assert row["bytes"] > 0
        assert 0 < row["work_seconds"] < row["seconds"]


def test_rows_are_compared_with_the_fewest_processes():
    rows = [
        {
            "work": "mine",
            "processes": n,
            "sha256": digest,
            "seconds": 12.0 / n,
            "work_seconds": 6.0 / n,
        }
        for n, digest in ((2, "b"), (1, "a"), (4, "a"))
    ]
    assert shared_work.compare(rows, rows[2]) == {
        "is_equal": True,
        "speed_up": 4.0,
        "work_speed_up": 4.0,
    }
    assert not shared_work.compare(rows, rows[0])["is_equal"]
    failed = {"work": "mine", "processes": 8, "error": "killed"}
    assert shared_work.compare([*rows, failed], failed) == {"is_equal": False}
