"""What an evaluation takes: memory against its limit, the share of active row-steps, candidates a second.

    python experiments/benchmarks/evaluator.py --out experiments/results/evaluator.json

Family, its 41 rules, height 2, the score `success` with a beam of 64, 100 negatives a query and side: an untrained
policy (learning rate 0), each evaluation in a process of its own. `peak_bytes` is the largest resident size of that
process while it ranks, Python and PyTorch included. A limit below what the smallest search takes ends with exit
status 2 and a line that says how much is needed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import Row, write_record
from experiments.paths import DATA
from experiments.provenance import describe_machine

TRAINING_OPTIONS = (
    "--prover.max-height=2",
    "--score=success",
    "--ppo.learning-rate=0",
    "--steps=2048",
    "--n-validation-queries=12",
    "--n-validations=1",
)
MEMORY_LIMITS = (
    "100MB",
    "320MB",
    "400MB",
    "600MB",
)  # beside the default, three quarters of the machine
# Fields of a row by the names that they have in the summary.
RECORDED_FIELDS = {
    "n_queries": "n_queries",
    "n_candidates": "n_candidates",
    "n_scored": "n_scored",
    "mrr": "mrr",
    "ceiling": "ceiling",
    "row_steps": "row_steps",
    "active_fraction": "active_share",
    "n_pruned": "pruned",
    "n_overflowed": "overflowed",
    "n_missed": "n_missed",
    "memory_limit_bytes": "memory",
    "peak_bytes": "peak_bytes",
    "total_seconds": "seconds",
}


def main() -> None:
    """Train once, evaluate under every limit, write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=DATA,
        help="folder of the standard data sets",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="record to write"
    )
    parser.add_argument(
        "--queries",
        type=int,
        default=1000,
        help="queries ranked under a limit; all by default",
    )
    parser.add_argument(
        "--queries-default",
        type=int,
        help="queries ranked without a limit; all by default",
    )
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run = folder / "run"
        trained = funcppo(
            "train", args.data / "family", "--out", run, *TRAINING_OPTIONS
        )
        if trained.returncode:
            raise SystemExit(trained.stderr)
        options = (
            ()
            if args.queries_default is None
            else ("--queries", args.queries_default)
        )
        rows.append({"row": "default"} | evaluate(run, folder, *options))
        for limit in MEMORY_LIMITS:
            options = ("--memory", limit, "--queries", args.queries)
            rows.append(
                {"row": f"--memory {limit}"} | evaluate(run, folder, *options)
            )
    write_record(
        args.out, {"machine": describe_machine(), "seed": 0, "rows": rows}
    )
    print(json.dumps(rows, indent=1))


def evaluate(run: Path, folder: Path, *options: object) -> Row:
    """The row of one evaluation, or the line with which it is refused."""
    summary_file = folder / "summary.json"
    done = funcppo(
        "evaluate", run, "--negatives", "100", "--json", summary_file, *options
    )
    if done.returncode:
        return {
            "exit_status": done.returncode,
            "line": done.stderr.strip().splitlines()[-1],
        }
    summary = json.loads(summary_file.read_text())
    row = {
        field: summary[name]
        for name, field in RECORDED_FIELDS.items()
        if name in summary
    }
    row["peak_over_budget"] = round(
        summary["peak_bytes"] / summary["memory_limit_bytes"], 3
    )
    slots = [line for line in done.stdout.splitlines() if " slots, " in line]
    row["slots"] = slots[0].removeprefix("note: ")
    return row


def funcppo(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program of the command line."""
    command = [sys.executable, "-m", "funcppo", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


if __name__ == "__main__":
    main()
