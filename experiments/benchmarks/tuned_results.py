"""What `funcppo mine` and `funcppo train` give with more rules, or more time, than their defaults take.

    python experiments/benchmarks/tuned_results.py --data DIR --only family

The options were set by what ranks valid better. The record is written after every run, and what it holds is not run
again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks import default_results
from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DATA, RESULTS


class Options(NamedTuple):
    """Options of the two programs."""

    mining: list[str]
    training: list[str]


SETTINGS = {
    "family": Options(["--votes-per-fact", "20"], []),
    "wn18rr": Options(
        [
            *("--constants", "--max-length", "5", "--votes-per-fact", "5"),
            *("--min-support", "2", "--min-confidence", "0.001"),
            *("--seconds", "900"),
        ],
        [
            *("--questions.seconds", "600", "--listwise.max-steps", "2000"),
            *("--questions.max-firings", "80000000"),
        ],
    ),
}


def main() -> None:
    """Run what the record does not hold yet."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "tuned_results.json"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=SETTINGS, action="append")
    args = parser.parse_args()

    record: dict[str, Any] = {"runs": []}
    if args.out.exists():
        record = json.loads(args.out.read_text())
    present = {(row["set"], row["seed"]) for row in record["runs"]}
    for name in args.only or SETTINGS:
        seeds = [s for s in range(args.seeds) if (name, s) not in present]
        if not seeds:
            continue
        target = str((args.data / name).resolve())
        options = SETTINGS[name]
        rules, mining = default_results.mine(target, options.mining)
        for seed in seeds:
            words = ["--rules", str(rules), *options.training]
            row = default_results.train(name, target, seed, words, mining)
            row["options"] = options._asdict()
            record["runs"].append(row)
            write_record(args.out, record)


if __name__ == "__main__":
    main()
