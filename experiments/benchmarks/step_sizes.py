"""Question: what is compiling a training step worth for a small, a middling and a large network?

    python experiments/benchmarks/step_sizes.py --out experiments/results/step_sizes-h200.json
    python experiments/benchmarks/step_sizes.py --sizes large --limit 900 --rounds 5 --out FILE  # on a CPU

The cells of `full_step_matrix.py` that INVESTIGATION.md recommends, each size in turns with eager training (see
experiments/matrix/pool.py): microseconds a step with quartiles, speed-up, seconds of compiling, and on a GPU the most
memory held. A cell whose parameters are not those of the oracle is not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import write_record
from experiments.matrix import pool, problem
from experiments.provenance import describe_machine

WAYS = (
    "0/loss compiled, eager backward, fused Adam/inductor",
    "A/written back outside/inductor",
    "B/gradients copied into p.grad/inductor",
    "C/torch's functional Adam/inductor",
)
N_TOGETHER = 4  # processes that examine a cell each
MODES = ("default", "reduce-overhead", "manual graph")


def main() -> None:
    """Measure every size and write the record after each."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--sizes", nargs="+", choices=problem.SIZES, default=[*problem.SIZES]
    )
    parser.add_argument("--limit", type=float, default=240.0, help="seconds")
    parser.add_argument("--rounds", type=int, default=11, help="of timing")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[dict[str, Any]] = []
    for size in args.sizes:
        os.environ["MATRIX_SIZE"] = size
        for row in measured(device, args.limit, args.rounds):
            rows.append({"size": size, **problem.SIZES[size]._asdict(), **row})
        record = {"machine": describe_machine(device), "rows": rows}
        write_record(args.out, record)


def measured(device: str, limit: float, rounds: int) -> list[dict[str, Any]]:
    """A row for each cell, examined one after another and timed in turns."""
    names = [pool.BASELINE]
    if device == "cuda":
        names.append(pool.BASELINE.replace("/default", "/manual graph"))
    modes = MODES if device == "cuda" else MODES[:1]
    names += [f"{way}/{mode}" for way in WAYS for mode in modes]

    rows: list[dict[str, Any]] = []

    def keep(name: str, row: dict[str, Any]) -> None:
        rows.append({"cell": name, **row})
        print(json.dumps(rows[-1]), flush=True)

    plan = pool.Plan(
        device, limit, N_TOGETHER, len(names), lambda name: True, rounds
    )
    pool.run(names, plan, keep)
    return rows


if __name__ == "__main__":
    main()
