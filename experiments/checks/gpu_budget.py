"""Claim: an evaluation keeps to a budget of GPU memory, and goes on where less is left than it chose its sizes for.

    python experiments/checks/gpu_budget.py --out experiments/results/gpu_budget-h200.json

A small prover is trained, and its test split ranked by `funcppo evaluate --device cuda --score success`: with the whole
GPU, with part of it from the start, and with a quarter of what the chosen sizes take once they are chosen, as if
another program had come. `torch.cuda.set_per_process_memory_fraction` enforces the budget: an allocation beyond it
fails.

A row has the budget, the peak of what PyTorch reserved, the sizes chosen, how often the slots were halved, and how many
ranks differ from those with the whole GPU, but for candidates that lie within rounding of the answer. Exits 1 when one
differs, a peak exceeds its budget, or the slots of the last row were not halved. On a CPU nothing is limited.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import Row, write_record
from experiments.provenance import describe_machine

GB = 10**9
BUDGETS = (None, 6 * GB, GB)  # bytes from the start; None for no limit
TIMEOUT_SECONDS = 300
TRAIN = (
    *("family_tree:200:0", "--strategy", "eager", "--steps", "64"),
    *("--ppo.n-envs", "8", "--ppo.n-steps", "4", "--ppo.n-minibatches", "2"),
    *("--prover.max-height", "2", "--learner", "proofs", "--score", "success"),
    *("--prover.embed-dim", "64", "--prover.hidden-dim", "256"),
    *("--n-validations", "1", "--n-validation-queries", "2"),
)
EVALUATE = ("--score", "success", "--no-proofs", "--queries")


def main() -> int:
    """The exit status: 0, or 1 when a claim does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--out", type=Path, help="record to write")
    # for the processes that this one starts
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        run_cell(args.cell[0], json.loads(args.cell[1]), args.device)

    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        run_program(
            ["train", *TRAIN, "--device", args.device, "--out", str(run)]
        )
        cells = [("start", budget) for budget in BUDGETS]
        cells.append(("after tuning", None))
        rows = [
            measure(run, kind, budget, args.device, args.queries)
            for kind, budget in cells
        ]

    baseline = rows[0]["ranks"]
    for row in rows:
        row["n_other_ranks"] = count_differences(baseline, row.pop("ranks"))
        print(row, flush=True)
    if args.out:
        machine = describe_machine(args.device)
        write_record(args.out, {"machine": machine, "rows": rows})
    return 0 if args.device == "cpu" else int(not all_hold(rows))


def all_hold(rows: list[Row]) -> bool:
    """Whether every row keeps to its budget and its ranks, and the last one had to halve its slots."""
    kept = all(row["peak_bytes"] <= row["budget_bytes"] for row in rows[1:])
    equal = all(row["n_other_ranks"] == 0 for row in rows)
    return kept and equal and rows[-1]["n_halvings"] > 0


def measure(
    run: Path, kind: str, budget: int | None, device: str, n_queries: int
) -> Row:
    """Rank in a process of its own; the row with the ranks."""
    details, result = run / "details.jsonl", run / "result.json"
    command = ["evaluate", run, *EVALUATE, n_queries, "--device", device]
    command += ["--details", details, "--overwrite", "--json", result]
    cell = json.dumps({"budget": budget, "command": [str(x) for x in command]})
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, __file__, "--device", device, "--cell", kind, cell],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"{kind} {budget}: {done.stderr}")
    summary = json.loads(result.read_text())
    lines = details.read_text().splitlines()
    return {
        "limited_from": kind,
        "budget_bytes": budget,
        "seconds": time.perf_counter() - start,
        "n_halvings": summary["n_halvings"],
        "mrr": summary["by_group"]["all"]["both"]["mrr"]["expected"],
        "ranks": [json.loads(line) for line in lines],
        **json.loads(done.stderr.splitlines()[-1]),
    }


def count_differences(
    ranks: list[dict[str, Any]], others: list[dict[str, Any]]
) -> int:
    """Lines that differ, but where candidates lie within rounding of the answer."""
    keys = ("n_better", "n_equal", "n_candidates")
    return sum(
        any(a[key] != b[key] for key in keys)
        for a, b in zip(ranks, others, strict=True)
        if not (a["near_boundary"] or b["near_boundary"])
    )


def run_cell(kind: str, cell: dict[str, Any], device: str) -> None:
    """Limit the memory, rank, and print the sizes and the peak as the last line of standard error; then exit."""
    import torch

    from funcppo.kg.ranking import autotune

    told: Row = {}
    if cell["budget"] is not None:
        limit(cell["budget"], device)
    tune = partial(tune_and_tell, autotune.tune_slots, kind, device, told)
    autotune.tune_slots = tune
    try:
        run_program(cell["command"])
    finally:
        on_gpu = device != "cpu"
        told["peak_bytes"] = torch.cuda.max_memory_reserved() if on_gpu else 0
        print(json.dumps(told), file=sys.stderr)
    sys.exit(0)


def tune_and_tell(
    tune_slots: Callable[..., Any],
    kind: str,
    device: str,
    told: Row,
    *args: Any,
) -> Any:
    """Choose the sizes, note them, and leave a quarter of the memory that they take, if that is the case to measure."""
    from funcppo.kg.ranking import autotune
    from funcppo.runtime import memory

    used_bytes = memory.used_bytes(device)
    tuned = tune_slots(*args)
    peak_bytes = autotune.select_trial(tuned.trials).peak_bytes
    told["slots"] = tuned.cfg.slots
    told["rows_per_step"] = tuned.cfg.rows_per_step
    told["tuned_peak_bytes"] = peak_bytes
    if kind == "after tuning":
        told["budget_bytes"] = used_bytes + (peak_bytes - used_bytes) // 4
        limit(told["budget_bytes"], device)
        memory.reset_peak(device)
    return tuned


def limit(budget: int, device: str) -> None:
    """Let allocations beyond a budget fail."""
    import torch

    if device != "cpu":
        _, total = torch.cuda.mem_get_info(device)
        torch.cuda.set_per_process_memory_fraction(budget / total, 0)


def run_program(arguments: list[str]) -> None:
    """Run `funcppo` in this process.

    Raises:
      RuntimeError: it fails.
    """
    from funcppo import cli

    before = sys.argv
    sys.argv = ["funcppo", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"funcppo {arguments[0]}: {end.code}") from None
    finally:
        sys.argv = before


if __name__ == "__main__":
    sys.exit(main())
