"""Does it pay to add to a rule score whether a candidate has other facts of the asked relation? Valid, and then test.

    python experiments/benchmarks/other_facts.py --data DIR --only wn18rr --rules FILE

The scores are those that rank valid best in `rule_redundancy.py`: one that takes rules as independent, and a
`noisy-or-joint`, each without and with `-other-facts`. Rows: the MRR of a sample of valid, and the gain of each score
by other facts, with its standard error, queries paired. Where the score that ranks valid best has gained more than two
standard errors, all of test is ranked with it and without other facts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments import tables
from experiments.benchmarks.rule_redundancy import (
    OBJECT_IDENTITY,
    Trial,
    gain,
    rank_trials,
    sample_queries,
)
from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DATA, RESULTS
from experiments.provenance import describe_machine
from funcppo.data import load
from funcppo.evaluation import scorers
from funcppo.prover.config import ProverTaskConfig
from funcppo.prover.task import build_task, with_other_facts

# standard errors that valid must gain before test is ranked
MIN_GAIN_ERRORS = 2.0


def main() -> None:
    """Rank a set, and put its row into the record."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "other_facts.json"
    )
    parser.add_argument("--only", choices=OBJECT_IDENTITY, required=True)
    parser.add_argument("--rules", type=Path, required=True)
    parser.add_argument(
        "--label",
        help="of the row, and of that of `rule_redundancy` with its scores; the set by default",
    )
    parser.add_argument(
        "--queries",
        type=int,
        default=5000,
        metavar="N",
        help="the most queries of valid to rank, a random sample",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes that rank side by side"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    label = args.label or args.only
    rows = tables.load_record("rule_redundancy")["rows"]
    (redundancy,) = (row for row in rows if row["set"] == label)
    trials = [Trial(**redundancy[kind]) for kind in ("plain", "joint")]
    row = run_set(
        args.only,
        str(args.data / args.only),
        args.rules,
        [trial for trial in trials if trial.score != scorers.MAX_PLUS],
        n_queries=args.queries,
        n_jobs=args.jobs,
    )
    row["set"] = label
    record: dict[str, Any] = {"rows": []}
    if args.out.exists():
        record = json.loads(args.out.read_text())
    others = [other for other in record["rows"] if other["set"] != label]
    write_record(args.out, {"rows": [*others, row]})


def run_set(
    name: str,
    path: str,
    rules: Path,
    trials: list[Trial],
    *,
    n_queries: int,
    n_jobs: int,
) -> dict[str, Any]:
    """The row of a data set.

    Args:
      trials: without other facts, each of which is ranked with them too.
      n_queries: the most queries of valid to rank.
      n_jobs: processes that rank side by side.
    """
    dataset = load(path, rules=str(rules))
    settings = ProverTaskConfig(
        max_height=1, smoothing=0.0, object_identity=OBJECT_IDENTITY[name]
    )
    # Those of WN18RR and FB15k-237 are too many to hold.
    task = build_task(dataset, settings, with_derivations=False)
    start = time.perf_counter()
    task = with_other_facts(task)
    seconds = time.perf_counter() - start
    joint = scorers.count_joint(task, scorers.NOISY_OR_JOINT)
    assert joint is not None, "the score needs it"

    variants = {
        trial: trial._replace(score=trial.score + scorers.OTHER_FACTS)
        for trial in trials
    }

    def rank(some: list[Trial], queries: np.ndarray) -> dict[Trial, Tensor]:
        both = [one for trial in some for one in (trial, variants[trial])]
        return rank_trials(task, joint, both, queries, n_jobs)

    valid = sample_queries(dataset.valid, n_queries)
    ranks = rank(trials, valid)
    of_valid = {
        trial: gain(ranks[variants[trial]], ranks[trial]) for trial in trials
    }
    best = max(trials, key=lambda trial: of_valid[trial]["mrr"])
    found = of_valid[best]
    test = None
    if found["gain"] > MIN_GAIN_ERRORS * found["gain_error"]:
        ranks = rank([best], dataset.test)
        test = gain(ranks[variants[best]], ranks[best])
        test |= {"n_queries": len(dataset.test)}
    return {
        "n_rules": len(dataset.rules),
        "rules_sha256": hashlib.sha256(rules.read_bytes()).hexdigest()[:16],
        "object_identity": settings.object_identity,
        "machine": describe_machine("cpu"),
        "count_seconds": round(seconds, 1),
        "n_valid": len(valid),
        "valid": [
            trial._asdict() | summary for trial, summary in of_valid.items()
        ],
        "best": best._asdict(),
        "test": test,
    }


if __name__ == "__main__":
    main()
