"""Does a policy gain by rules that are known to mislead? `funcppo train` with them, beside the rows without.

    python experiments/benchmarks/misleading_rules.py --data DIR --only nations

Rules are mined as by default, and with `--misleading-rules 10`: the ten of each relation that are right most clearly
less often than chance. The rows without are those of `default_results.json`; what is compared is how the policy ranks
valid.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks import default_results
from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DATA, RESULTS

SETS = ("nations", "kinships", "umls")
N_MISLEADING = 10


def main() -> None:
    """Run the seeds that the record does not hold yet."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "misleading_rules.json"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=SETS, required=True)
    args = parser.parse_args()
    record: dict[str, Any] = {"runs": []}
    if args.out.exists():
        record = json.loads(args.out.read_text())

    target = str((args.data / args.only).resolve())
    rules, mining = default_results.mine(
        target, ["--misleading-rules", str(N_MISLEADING)]
    )
    present = {(row["set"], row["seed"]) for row in record["runs"]}
    for seed in range(args.seeds):
        if (args.only, seed) in present:
            continue
        options = ["--rules", str(rules)]
        row = default_results.train(args.only, target, seed, options, mining)
        record["runs"].append(row | {"n_misleading": N_MISLEADING})
        write_record(args.out, record)


if __name__ == "__main__":
    main()
