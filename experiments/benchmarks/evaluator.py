"""What an evaluation takes: memory against its budget, the share of active row-steps, candidates a second.

    python experiments/bench_evaluator.py --data DIR --out experiments/results/bench_evaluator.json

Family, its 41 rules, height 2, the score `success` with a beam of 64, 100 negatives a query and side: an untrained
policy (learning rate 0), each evaluation in a process of its own. `peak_bytes` is the largest resident size of that
process while it ranks, Python and PyTorch included. A budget below what the smallest search takes ends with exit
status 2 and a line that says how much is wanted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TRAIN = ["--prover.max-height", "2", "--score", "success", "--ppo.learning-rate", "0", "--steps", "2048"]
TRAIN += ["--n-validation-queries", "12", "--n-validations", "1"]
BUDGETS = ("100MB", "320MB", "400MB", "600MB")  # beside the default, which is three quarters of the machine
SHOWN = ("n_queries", "n_candidates", "n_scored", "mrr", "ceiling", "row_steps", "active_share", "pruned")
SHOWN += ("overflowed", "lost", "memory", "peak_bytes", "seconds")


def main() -> None:
    """Train once, evaluate under every budget, write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--queries", type=int, default=1000, help="queries ranked under a budget; all by default")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        funcppo("train", args.data / "family", "--out", run, *TRAIN, check=True)
        rows.append({"row": "default"} | evaluate(run, Path(folder)))
        for budget in BUDGETS:
            extra = ("--memory", budget, "--queries", str(args.queries))
            rows.append({"row": f"--memory {budget}"} | evaluate(run, Path(folder), *extra))
    args.out.write_text(json.dumps({"machine": machine(), "seed": 0, "rows": rows}, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


def evaluate(run: Path, folder: Path, *extra: str) -> dict[str, Any]:
    """One evaluation, or the line with which it is refused."""
    target = folder / "summary.json"
    done = funcppo("evaluate", run, "--negatives", "100", "--json", target, *extra)
    if done.returncode:
        return {"exit_status": done.returncode, "line": done.stderr.strip().splitlines()[-1]}
    found = json.loads(target.read_text())
    row = {name: found[name] for name in SHOWN if name in found}
    row["peak_over_budget"] = round(found["peak_bytes"] / found["memory"], 3)
    row["slots"] = next(line for line in done.stdout.splitlines() if " slots, " in line).removeprefix("note: ")
    return row


def funcppo(*args: Any, check: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a program of the command line."""
    command = [sys.executable, "-m", "funcppo", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=check)


def machine() -> dict[str, Any]:
    """Where the numbers come from."""
    import torch

    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())
    return {
        "cpu": f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s) used",
        "load": os.getloadavg()[0],  # of other work too
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": os.environ.get("FUNCPPO_COMMIT") or git,
    }


if __name__ == "__main__":
    main()
