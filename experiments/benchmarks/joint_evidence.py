"""Does a policy that learns from questions gain by what pairs of rules derive together? Each set's valid split says.

    python experiments/benchmarks/joint_evidence.py --data DIR --only nations --rules FILE

The score adds up what each rule says as if rules were independent. Here the log-odds of a rule's confidence, from which
its weight is made, are those of its share in `noisy-or-joint`: what it adds to the better rules that derive the same
candidate, of the 10 best ones. Fan-out, groundings and links are weighed as before. Rows: MRR of valid by the initial
weights and by the listwise fit, whose epoch, power of the odds and use of degrees valid chooses, without an embedding.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks import question_results
from experiments.benchmarks.question_results import Problem
from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DATA, RESULTS
from experiments.provenance import describe_machine
from funcppo.data import load
from funcppo.experiment import question_run, question_training
from funcppo.logic import baselines, joint_counts
from funcppo.logic.consequences import Derivations
from funcppo.logic.joint_counts import JointCounts
from funcppo.logic.kb import KnowledgeBase
from funcppo.prover import aggregation, evidence
from funcppo.prover.aggregation import (
    MAX_CONFIDENCE,
    MIN_CONFIDENCE,
    AggregationConfig,
    AggregationWorld,
    Batch,
    Params,
)
from funcppo.prover.evidence import Evidence
from funcppo.prover.question_config import QuestionConfig
from funcppo.types import F32

SETS = ("nations", "kinships", "umls", "family")
N_BEST = 10
PRIOR_PAIRS = 500.0


def main() -> None:
    """Fit a set both ways, and put its rows into the record."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "joint_evidence.json"
    )
    parser.add_argument("--only", choices=SETS, required=True)
    parser.add_argument("--rules", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = run_set(
        args.only, str(args.data / args.only), args.rules, args.seeds
    )
    record: dict[str, Any] = {"rows": []}
    if args.out.exists():
        record = json.loads(args.out.read_text())
    others = [row for row in record["rows"] if row["set"] != args.only]
    write_record(args.out, {"rows": others + rows})


def run_set(
    name: str, path: str, rules: Path, n_seeds: int
) -> list[dict[str, Any]]:
    """The rows of a data set, one for each seed and way."""
    dataset = load(path, rules=str(rules))
    rows: list[dict[str, Any]] = []
    for is_joint in (False, True):
        with contextlib.ExitStack() as stack:
            if is_joint:
                stack.enter_context(joint_features())
            problem = question_results.prepare(dataset, "cpu")
            linked = question_run.share_of_linked(problem.task, dataset.valid)
            cfg = QuestionConfig(
                left_out="fact" if linked > 0 else "pair", max_questions=50_000
            )
            for seed in range(n_seeds):
                fitted = fit_seed(problem, cfg, seed)
                print(f"{name}, joint {is_joint}, {fitted}", flush=True)
                rows.append(
                    {
                        "set": name,
                        "n_rules": len(dataset.rules),
                        "rules_sha256": hashlib.sha256(
                            rules.read_bytes()
                        ).hexdigest()[:16],
                        "is_joint": is_joint,
                        "seed": seed,
                        "machine": describe_machine("cpu"),
                    }
                    | fitted
                )
    return rows


def fit_seed(
    problem: Problem, cfg: QuestionConfig, seed: int
) -> dict[str, Any]:
    """MRR of valid by the initial weights and by the listwise fit of a seed."""
    start = time.perf_counter()
    collected = question_training.collect_questions(
        problem.task, problem.facts, cfg, seed, uses_degrees=False
    )
    powers = {
        power: question_results.with_options(collected, odds_power=power)
        for power in question_run.ODDS_POWERS
    }
    initial = {
        power: question_results.initial_mrr(problem, variant)
        for power, variant in powers.items()
    }
    power = max(initial, key=lambda p: initial[p])
    variants = {
        "": powers[power],
        "degrees weighed": question_results.with_options(
            powers[power], uses_degrees=True
        ),
    }
    outcomes = [
        question_results.fit(problem, variant, seed, label)[0]
        for label, variant in variants.items()
    ]
    best = max(outcomes, key=lambda outcome: outcome.valid_mrr)
    return {
        "initial": initial[power],
        "listwise": best.valid_mrr,
        "chosen": f"power {power:g}, {best.chosen}",
        "seconds": round(time.perf_counter() - start, 1),
    }


@contextlib.contextmanager
def joint_features() -> Iterator[None]:
    """Weigh each rule by its share in `noisy-or-joint` in place of its confidence.

    What that changes of the log-odds is put into the field of evidence that holds random walks, which are not weighed.
    """
    iter_evidence = evidence.iter_evidence
    firing_amounts = aggregation.firing_amounts
    counted: list[tuple[KnowledgeBase, JointCounts]] = []

    def iter_joint_evidence(
        kb: KnowledgeBase, sizes: Any, facts: Any, *args: Any
    ) -> Iterator[Evidence]:
        if not counted or counted[-1][0] is not kb:
            joint = joint_counts.count_joint(
                kb,
                sizes,
                object_identity=args[2].object_identity,
                leave_one_out=True,
            )
            counted.append((kb, joint))
        for part in iter_evidence(kb, sizes, facts, *args):
            yield part._replace(walk=_joint_change(kb, part, counted[-1][1]))

    def joint_amounts(
        cfg: AggregationConfig,
        world: AggregationWorld,
        params: Params,
        batch: Batch,
    ) -> Tensor:
        # The weight of the log-odds times the change is a factor of what the firing adds.
        label = batch.label[batch.firing_row]
        weight = params.feature_weight[label, world.shape[batch.rule], 0]
        amount = firing_amounts(cfg, world, params, batch)
        return amount * torch.exp(weight * batch.walk)

    with (
        mock.patch.object(evidence, "iter_evidence", iter_joint_evidence),
        mock.patch.object(aggregation, "firing_amounts", joint_amounts),
    ):
        yield


def _joint_change(
    kb: KnowledgeBase, part: Evidence, joint: JointCounts
) -> F32[Tensor, "N"]:
    """The log-odds of the share of each firing in `noisy-or-joint` less those of the rule's confidence."""
    row = torch.repeat_interleave(part.firing_offsets.diff())
    shares = baselines.joint_shares(
        kb,
        [Derivations(row, part.rule)],
        len(part.entity),
        joint,
        N_BEST,
        PRIOR_PAIRS,
    )
    n_rules = len(kb.support)
    key, order = (row * n_rules + part.rule).sort()
    position = torch.searchsorted(key, shares.atom_row * n_rules + shares.rule)
    # Rules beyond the best ones add nothing.
    share = torch.zeros(len(row), dtype=torch.float64)
    share[order[position]] = -torch.expm1(-shares.neg_log_wrong)

    confidence = kb.support.double() / kb.body_pairs.double().clamp_min(1.0)
    change = _log_odds(share) - _log_odds(confidence[part.rule])
    return change.float()


def _log_odds(value: Tensor) -> Tensor:
    """The log-odds of probabilities, clipped as the features of rules are."""
    return torch.logit(value.clamp(MIN_CONFIDENCE, MAX_CONFIDENCE))


if __name__ == "__main__":
    main()
