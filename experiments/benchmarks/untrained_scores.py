"""The scores that need no training, of every set that `main_results.py` trains on.

    python experiments/benchmarks/untrained_scores.py

Rules, counts and height are those of the trained runs (mined rules are mined again), and so are queries and candidates.
The record is written after each set; sets that it holds are kept unless --again names them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments import tables
from experiments.benchmarks import main_results
from experiments.benchmarks.mining_results import SETS as MINED_SETS
from experiments.benchmarks.mining_results import rank
from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DATA, RESULTS
from experiments.provenance import current_commit, describe_machine
from funcppo.kg.graph.loaders import load
from funcppo.kg.search.config import ProverTaskConfig


def main() -> None:
    """Measure what the record does not hold yet."""
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
        "--out",
        type=Path,
        default=RESULTS / "untrained_scores.json",
        help="record to complete",
    )
    parser.add_argument(
        "--mined",
        type=Path,
        default=Path("runs/mined"),
        help="folder that caches mined rules",
    )
    parser.add_argument("--only", choices=main_results.SETS, action="append")
    parser.add_argument(
        "--again",
        choices=main_results.SETS,
        action="append",
        default=[],
        help="measure again",
    )
    args = parser.parse_args()
    record: dict[str, Any] = {"sets": {}}
    if args.out.exists():
        record = json.loads(args.out.read_text())
    runs = tables.load_record("main_results")["runs"]
    for name in args.only or main_results.SETS:
        if name in args.again or name not in record["sets"]:
            height = tables.runs_of(runs, name)[0]["height"]
            row = measure(name, height, args.data, args.mined)
            record["sets"][name] = row
            record["machine"] = describe_machine()
            write_record(args.out, record)
            print(name, json.dumps(row["test"]), flush=True)


def measure(name: str, height: int, data: Path, mined: Path) -> dict[str, Any]:
    """The row of one set."""
    start = time.perf_counter()
    dataset_name = name.split(",")[0]
    words = main_results.SETS[name].settings
    settings = ProverTaskConfig(max_height=height)
    rules = None
    if "--rules" in words:
        rules = words[words.index("--rules") + 1]
        if rules == "{mined}":
            rules = main_results.mine_rules(data, dataset_name, mined)
            settings = replace(MINED_SETS[dataset_name].task, max_height=height)
        rules = rules.format(data=data)

    dataset = load(data / dataset_name, rules)
    options = main_results.EVALUATION_OPTIONS.get(name, [])
    numbers = dict(zip(options[::2], map(int, options[1::2])))
    row = rank(
        dataset,
        settings,
        scores=(f"exists@{height}", "max-confidence", "noisy-or"),
        splits=("test",),
        n_negatives=numbers.get("--negatives"),
        n_queries=numbers.get("--queries"),
    )
    return row | {
        "rules": len(dataset.rules),
        "commit": current_commit(),
        "seconds": round(time.perf_counter() - start, 1),
    }


if __name__ == "__main__":
    main()
