"""Claim: all tests pass without a GPU, with one and with two.

    python experiments/checks/gpu_tests.py --gpus "" 0 0,1 --out FILE

Runs each file of tests once for each list of GPUs, several side by side, with CUDA_VISIBLE_DEVICES set to the list; the
interpreter has what the extra `test` brings. Each row: how many tests passed, those that failed, how often each reason
to skip was given, and the tests that passed where all earlier rows skipped them, which need a GPU, or two.

Exits 1 where a test failed. The record is `experiments/results/gpu_tests-h200.json`.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import Row, write_record
from experiments.checks.pytest_outcomes import TESTS, Outcome, run_tests
from experiments.paths import make_parser
from experiments.provenance import describe_machine


def main() -> int:
    """The exit status: 0, or 1 where a test failed."""
    parser = make_parser(__doc__)
    parser.add_argument("--gpus", nargs="+", default=["", "0"])
    parser.add_argument("--tests", nargs="+", type=Path, default=[TESTS])
    parser.add_argument("--jobs", type=int, default=2, help="files at once")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    listed = (file for path in args.tests for file in _files(path))
    files = list(dict.fromkeys(listed))
    # Tests with GPUs take longest.
    jobs = [(gpus, file) for gpus in reversed(args.gpus) for file in files]
    runs: dict[str, list[Outcome]] = {gpus: [] for gpus in args.gpus}
    record: dict[str, Any] = {
        "machine": describe_machine("cuda" if any(args.gpus) else "cpu")
    }
    with ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(_run_file, *job): job for job in jobs}
        for n_ended, future in enumerate(as_completed(running), 1):
            gpus, _ = running[future]
            runs[gpus] += future.result()
            record["n_files_left"] = len(jobs) - n_ended
            record["rows"] = summarise(runs)
            write_record(args.out, record)
    for row in record["rows"]:
        print(row)
    return int(any(row["failed"] for row in record["rows"]))


def _files(path: Path) -> list[Path]:
    """The files of tests of a folder, or a file."""
    path = path.resolve()
    return sorted(path.rglob("test_*.py")) if path.is_dir() else [path]


def _run_file(gpus: str, file: Path) -> list[Outcome]:
    """The outcomes of a file with a list of GPUs; a failure where it could not be run."""
    start = time.perf_counter()
    env = {"CUDA_VISIBLE_DEVICES": gpus}
    try:
        outcomes = list(run_tests(sys.executable, [file], 0, env))
    except RuntimeError as error:
        outcomes = [Outcome(file.stem, "failed", str(error))]
    counts = Counter(x.outcome for x in outcomes)
    seconds = time.perf_counter() - start
    print(
        f"GPUs {gpus or 'none'}: {file.name}: {dict(counts)}, {seconds:.0f} s"
    )
    return outcomes


def summarise(runs: dict[str, list[Outcome]]) -> list[Row]:
    """A row for the tests with each list of GPUs."""
    rows: list[Row] = []
    skipped_before: set[str] = set()
    for gpus, run in runs.items():
        passed = {x.name for x in run if x.outcome == "passed"}
        skipped = [x for x in run if x.outcome == "skipped"]
        row: Row = {
            "n_gpus": len(gpus.split(",")) if gpus else 0,
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
