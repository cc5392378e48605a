"""What `funcppo mine` and `funcppo train` give with more rules, more time, or less evidence than their defaults take.

    python experiments/benchmarks/tuned_results.py --data DIR --only kinships+network
    python experiments/benchmarks/tuned_results.py --data DIR --only wn18rr --device cuda --jobs 3

The options were set by what ranks valid better; a name before a `+` is that of the data set. The record is written
after every run, and what it holds is not run again. `--rules` takes rules that `funcppo mine` has written with the
options of the set.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks import default_results
from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DATA, RESULTS
from experiments.provenance import describe_machine


class Options(NamedTuple):
    """Options of the two programs."""

    mining: list[str]
    training: list[str]


SETTINGS = {
    "fb15k-237": Options(
        ["--constants", "--seconds", "300"],
        [
            *("--questions.seconds", "60", "--listwise.max-steps", "1000"),
            *("--questions.max-firings", "80000000", "--seconds", "3600"),
        ],
    ),
    "kinships+network": Options(
        ["--votes-per-fact", "1"],
        [
            *("--questions.bellman-ford", "auto", "--seconds", "3600"),
            *("--bellman-ford.seconds", "3000"),
        ],
    ),
    "wn18rr": Options(
        [
            *("--constants", "--max-length", "5", "--votes-per-fact", "5"),
            *("--min-support", "2", "--min-confidence", "0.001"),
            *("--seconds", "900"),
        ],
        [
            *("--questions.seconds", "120", "--listwise.max-steps", "4000"),
            *("--questions.max-firings", "260000000"),
            *("--questions.degrees", "True"),
            *("--listwise.n-epochs", "5", "--listwise.max-gradients", "2e9"),
            *("--listwise.penalty.rule-weight", "1e-5"),
            *("--listwise.penalty.degree-weight", "1e-3"),
            *("--n-validation-queries", "3034", "--steps", "20480"),
            *("--prover.max-height", "1", "--prover.smoothing", "5"),
            *("--prover.object-identity", "False", "--seconds", "3600"),
        ],
    ),
}
SETTINGS["wn18rr+embeddings"] = Options(
    SETTINGS["wn18rr"].mining,
    [
        *SETTINGS["wn18rr"].training,
        *("--questions.walks", "True"),
        *("--questions.embedding", "True", "--embedding.rank", "256"),
        *("--embedding.batch-size", "2048", "--embedding.penalty", "0.1"),
        *("--embedding.seconds", "600"),
    ],
)
SETTINGS["fb15k-237+embeddings"] = Options(
    SETTINGS["fb15k-237"].mining,
    [
        *("--questions.seconds", "200", "--listwise.max-steps", "8000"),
        *("--questions.max-firings", "500000000", "--seconds", "3600"),
        *("--questions.degrees", "False", "--questions.walks", "True"),
        *("--listwise.n-epochs", "3", "--listwise.max-gradients", "1e11"),
        *("--listwise.penalty.rule-weight", "1e-5"),
        *("--listwise.penalty.link-weight", "1e-5"),
        *("--questions.embedding", "True", "--embedding.rank", "256"),
        *("--embedding.batch-size", "2048", "--embedding.n-epochs", "40"),
        *("--embedding.penalty", "0.05", "--embedding.seconds", "600"),
        *("--n-validation-queries", "17535", "--steps", "4096"),
        *("--prover.max-height", "1", "--prover.smoothing", "None"),
        *("--prover.object-identity", "False", "--rule-score", "noisy-or@2"),
    ],
)

SETTINGS["fb15k-237+embeddings+network"] = Options(
    SETTINGS["fb15k-237"].mining,
    [
        *SETTINGS["fb15k-237+embeddings"].training,
        *("--embedding.n-epochs", "20", "--listwise.n-epochs", "2"),
        *("--questions.bellman-ford", "True"),
        *("--bellman-ford.n-steps", "4500"),
        *("--bellman-ford.batch-size", "64"),
    ],
)
SETTINGS["fb15k-237+embeddings+network+no-links"] = Options(
    SETTINGS["fb15k-237"].mining,
    [
        *SETTINGS["fb15k-237+embeddings+network"].training,
        "--questions.no-links",
    ],
)
SETTINGS["fb15k-237+no-links"] = Options(
    [], ["--seconds", "900", "--questions.no-links"]
)
for name in ("kinships", "umls", "family", "wn18rr"):
    SETTINGS[f"{name}+no-links"] = Options([], ["--questions.no-links"])
SETTINGS["wn18rr+embeddings+network"] = Options(
    SETTINGS["wn18rr"].mining,
    [
        *SETTINGS["wn18rr+embeddings"].training,
        *("--questions.bellman-ford", "True", "--bellman-ford.n-layers", "5"),
        *("--bellman-ford.n-steps", "1200"),
        *("--bellman-ford.batch-size", "64"),
    ],
)


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
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=SETTINGS, required=True)
    parser.add_argument("--rules", type=Path)
    args = parser.parse_args()

    record: dict[str, Any] = {"runs": []}
    if args.out.exists():
        record = json.loads(args.out.read_text())
    present = {(row["set"], row["seed"]) for row in record["runs"]}
    seeds = [s for s in args.seeds if (args.only, s) not in present]
    if not seeds:
        return
    target = str((args.data / args.only.partition("+")[0]).resolve())
    options = SETTINGS[args.only]
    rules, mining = args.rules, None
    if rules is None:
        rules, mining = default_results.mine(target, options.mining)

    words = ["--rules", str(rules), "--device", args.device, *options.training]
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = [
            pool.submit(
                default_results.train, args.only, target, seed, words, mining
            )
            for seed in seeds
        ]
        for future in as_completed(runs):
            row = future.result()
            row |= {"options": options._asdict()}
            row["machine"] = describe_machine(args.device)
            row["rules_sha256"] = hashlib.sha256(rules.read_bytes()).hexdigest()
            record["runs"].append(row)
            write_record(args.out, record)


if __name__ == "__main__":
    main()
