"""Claim: all tests pass without a GPU, with one and with two.

    python experiments/checks/gpu_tests.py --gpus "" 0 0,1 --out FILE

Runs the tests once for each list of GPUs, side by side, with CUDA_VISIBLE_DEVICES set to it; the interpreter has what
the extra `test` brings. Each row: how many tests passed, those that failed, how often each reason to skip was given,
and the tests that passed where all earlier rows skipped them, which are those that need a GPU, or two.

Exits 1 where a test failed. The record is `experiments/results/gpu_tests-h100.json`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import Row, write_record
from experiments.checks.pytest_outcomes import TESTS, Outcome, run_tests
from experiments.provenance import describe_machine


def main() -> int:
    """The exit status: 0, or 1 where a test failed."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", nargs="+", default=["", "0"])
    parser.add_argument("--tests", nargs="+", type=Path, default=[TESTS])
    parser.add_argument("--workers", type=int, default=2, help="for each list")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    def run(gpus: str) -> list[Outcome]:
        env = {"CUDA_VISIBLE_DEVICES": gpus}
        return [*run_tests(sys.executable, args.tests, args.workers, env)]

    with ThreadPoolExecutor(len(args.gpus)) as pool:
        outcomes = list(pool.map(run, args.gpus))
    rows = summarise(args.gpus, outcomes)
    for row in rows:
        print(row)
    machine = describe_machine("cuda" if any(args.gpus) else "cpu")
    write_record(args.out, {"machine": machine, "rows": rows})
    return int(any(row["failed"] for row in rows))


def summarise(gpus: list[str], runs: list[list[Outcome]]) -> list[Row]:
    """A row for each run of the tests."""
    rows: list[Row] = []
    skipped_before: set[str] = set()
    for listed, run in zip(gpus, runs, strict=True):
        passed = {x.name for x in run if x.outcome == "passed"}
        skipped = [x for x in run if x.outcome == "skipped"]
        row: Row = {
            "n_gpus": len(listed.split(",")) if listed else 0,
            "n_passed": len(passed),
            "failed": {x.name: x.reason for x in run if x.outcome == "failed"},
            "n_skipped": len(skipped),
            "reasons_to_skip": dict(Counter(x.reason for x in skipped)),
            "skipped_before": sorted(passed & skipped_before),
        }
        rows.append(row)
        skipped_before |= {x.name for x in skipped}
        skipped_before -= passed
    return rows


if __name__ == "__main__":
    sys.exit(main())
