"""Does it pay to smooth the confidence of a rule towards that of its relation's rules? Valid, without training.

    python experiments/benchmarks/relation_smoothing.py --data DIR --only kinships --rules FILE

With a constant c a confidence is support / (pairs + c), where few examples count little. By relation it is
(support + m * p) / (pairs + m), where p is the support over the pairs of all rules with the head's relation. Rows: the
MRR of valid by a rule score, and what it gains over the default constant, with its standard error, queries paired.
Counts leave out circular support, and rules are applied at height 1 with the object identity that ranks valid better.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DATA, RESULTS
from experiments.provenance import describe_machine
from funcppo.data import load
from funcppo.evaluation import (
    rank_metrics,
    ranking,
    scorers,
    settings_choice,
)
from funcppo.evaluation.candidates import RankingProtocol
from funcppo.prover.config import ProverTaskConfig
from funcppo.prover.task import ProverTask, build_task

SETS = ("nations", "kinships", "umls", "family")
SCORES = ("max-confidence", "noisy-or@3")
REFERENCE = 5.0  # the default constant
CONSTANTS = (0.0, 1.0, REFERENCE, 20.0)
STRENGTHS = (1.0, 5.0, 20.0)
OPEN = ProverTaskConfig(max_height=1, smoothing=REFERENCE)


def main() -> None:
    """Rank valid of a set, and put its rows into the record."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "relation_smoothing.json"
    )
    parser.add_argument("--only", choices=SETS, required=True)
    parser.add_argument("--rules", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = run_set(args.only, str(args.data / args.only), args.rules)
    record: dict[str, Any] = {"rows": []}
    if args.out.exists():
        record = json.loads(args.out.read_text())
    others = [row for row in record["rows"] if row["set"] != args.only]
    write_record(args.out, {"rows": others + rows})


def run_set(name: str, path: str, rules: Path) -> list[dict[str, Any]]:
    """The rows of a data set."""
    dataset = load(path, rules=str(rules))
    choice = settings_choice.choose_settings(
        dataset, replace(OPEN, object_identity="auto"), "noisy-or@3"
    )
    # Without a constant of its own: supports and pairs are the counts.
    task = build_task(dataset, replace(choice.settings, smoothing=0.0))
    common = {
        "set": name,
        "n_rules": len(dataset.rules),
        "rules_sha256": hashlib.sha256(rules.read_bytes()).hexdigest()[:16],
        "object_identity": task.cfg.object_identity,
        "machine": describe_machine("cpu"),
    }
    rows: list[dict[str, Any]] = []
    for score in SCORES:
        base = reciprocal_ranks(with_constant(task, REFERENCE), score)
        variants = [("constant", c, with_constant(task, c)) for c in CONSTANTS]
        variants += [("relation", m, with_relation(task, m)) for m in STRENGTHS]
        for kind, strength, variant in variants:
            ranks = reciprocal_ranks(variant, score)
            gain = ranks - base
            row = common | {
                "score": score,
                "kind": kind,
                "strength": strength,
                "valid_mrr": float(ranks.mean()),
                "valid_gain": float(gain.mean()),
                "valid_gain_error": float(gain.std()) / len(gain) ** 0.5,
            }
            rows.append(row)
            print(
                f"{name}, {score}, {kind} {strength:g}: {row['valid_mrr']:.4f}",
                flush=True,
            )
    return rows


def with_constant(task: ProverTask, constant: float) -> ProverTask:
    """The task with a constant that is added to the pairs of each rule."""
    kb = task.kb._replace(body_pairs=task.kb.body_pairs + constant)
    return replace(task, kb=kb)


def with_relation(task: ProverTask, strength: float) -> ProverTask:
    """The task whose rules have so many more pairs, as right as all pairs of their relation are."""
    kb = task.kb
    relation = kb.rules[:, 0, 0].long()
    zero = torch.zeros(task.sizes.n_predicates + 1)
    support = zero.index_add(0, relation, kb.support)
    pairs = zero.index_add(0, relation, kb.body_pairs)
    share = (support / pairs.clamp_min(1.0))[relation]
    return replace(
        task,
        kb=kb._replace(
            support=kb.support + strength * share,
            body_pairs=kb.body_pairs + strength,
        ),
    )


def reciprocal_ranks(task: ProverTask, score: str) -> Tensor:
    """Reciprocal ranks of valid, both sides."""
    ranked = ranking.rank_split(
        task,
        task.dataset.valid,
        scorers.make_untrained_scorer(task, score),
        RankingProtocol(),
    )
    return rank_metrics.expected_reciprocal_ranks(ranked.counts)


if __name__ == "__main__":
    main()
