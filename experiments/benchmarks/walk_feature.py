"""Whether the probability of a random walk says more than the share of groundings.

    python experiments/benchmarks/walk_feature.py --data DIR --only kinships --rules FILE

A walk starts at the entity of a question and follows the body of a path rule: at each atom it takes one of the matching
facts, all with the same probability, and it ends where there is none (`logic.chains`). Its probability is that of
ending in the candidate. The share is the probability that a grounding, all of the question and the rule having
the same, ends in the candidate. A rule that is no path rule has its share in place of a walk.

Rows: the listwise fit with the share; with the logarithm of the probability of the walk in its place, which the package
weighs with `--questions.walks`; and with both. The epoch is chosen by MRR on valid, which is all that is ranked: no
test is read. The gain over the first row has its standard error, queries paired. `--rules` takes rules that
`funcppo mine` wrote at its defaults.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks import embedding_prior, question_results
from experiments.benchmarks.question_results import Problem, say
from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DATA, RESULTS
from experiments.provenance import describe_machine
from funcppo.data import load
from funcppo.experiment import question_run, question_training
from funcppo.experiment.question_training import TrainingQuestions
from funcppo.logic.question_types import LeftOut
from funcppo.prover import aggregation, evidence
from funcppo.prover.aggregation import (
    AggregationConfig,
    AggregationWorld,
    Batch,
    Params,
)
from funcppo.prover.question_config import QuestionConfig
from funcppo.types import F32

SETS = ("kinships", "nations", "umls", "family", "wn18rr")
METHODS = ("share", "walk", "share and walk")
MAX_QUESTIONS = 50_000


class Fit(NamedTuple):
    """Reciprocal ranks of valid, both sides of each query, and the epoch that they are of."""

    valid: Tensor
    chosen: str


def main() -> None:
    """Fit and rank a set, and add its rows to the record."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "walk_feature.json"
    )
    parser.add_argument("--only", choices=SETS, required=True)
    parser.add_argument("--rules", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    start = time.perf_counter()
    dataset = load(str(args.data / args.only), rules=str(args.rules))
    problem = with_walks(question_results.prepare(dataset, "cpu"))
    linked = question_run.share_of_linked(problem.task, dataset.valid)
    left_out: LeftOut = "fact" if linked > 0 else "pair"
    fits: dict[str, list[Fit]] = {method: [] for method in METHODS}
    for seed in range(args.seeds):
        collected = collect(problem, left_out, seed)
        say(start, f"{args.only}, seed {seed}: {collected.notes[0]}")
        for method in METHODS:
            outcome = fit(problem, collected, method, seed)
            fits[method].append(outcome)
            mrr = float(outcome.valid.mean())
            say(start, f"{method}: {mrr:.4f} ({outcome.chosen})")

    rules = hashlib.sha256(args.rules.read_bytes()).hexdigest()[:16]
    common = {
        "set": args.only,
        "n_rules": len(dataset.rules),
        "rules_sha256": rules,
        "left_out": left_out,
        "object_identity": problem.task.cfg.object_identity,
        "machine": describe_machine("cpu"),
    }
    record: dict[str, Any] = {"rows": []}
    if args.out.exists():
        record = json.loads(args.out.read_text())
    others = [row for row in record["rows"] if row["set"] != args.only]
    rows = [
        common | describe(method, outcomes, fits["share"])
        for method, outcomes in fits.items()
    ]
    write_record(args.out, {"rows": others + rows})


def with_walks(problem: Problem) -> Problem:
    """The problem with the probabilities of walks in its evidence."""
    task = problem.task
    facts = evidence.index_facts(task.kb, task.sizes, with_walks=True)
    valid = question_results.collect_evidence(
        task, facts, problem.valid_queries
    )
    return problem._replace(facts=facts, valid=valid)


def describe(
    method: str, fits: Sequence[Fit], first: Sequence[Fit]
) -> dict[str, Any]:
    """The numbers of a row; the gain of a query is its mean over the seeds.

    Args:
      first: the fits with the share, of the same seeds.
    """
    gain = torch.stack(
        [one.valid - other.valid for one, other in zip(fits, first)]
    ).mean(0)
    return {
        "method": method,
        "valid_mrr": [float(one.valid.mean()) for one in fits],
        "valid_gain": float(gain.mean()),
        "valid_gain_error": float(gain.std()) / len(gain) ** 0.5,
        "n_valid": len(gain),
        "chosen": [one.chosen for one in fits],
    }


def collect(
    problem: Problem, left_out: LeftOut, seed: int
) -> TrainingQuestions:
    """The training questions, with what ranks valid best before a walk is weighed.

    As in `question_results` these are the power of the odds before the fit, and whether degrees are weighed after it.
    """
    # A number of questions, because seconds would make the record depend on the machine.
    cfg = QuestionConfig(left_out=left_out, max_questions=MAX_QUESTIONS)
    collected = question_training.collect_questions(
        problem.task, problem.facts, cfg, seed, uses_degrees=False
    )
    by_power = [
        question_results.with_options(collected, odds_power=power)
        for power in question_run.ODDS_POWERS
    ]
    best = max(by_power, key=lambda x: question_results.initial_mrr(problem, x))
    variants = [
        question_results.with_options(best, uses_degrees=uses_degrees)
        for uses_degrees in (False, True)
    ]
    return max(
        variants,
        key=lambda x: float(fit(problem, x, "share", seed).valid.mean()),
    )


def fit(
    problem: Problem,
    collected: TrainingQuestions,
    method: str,
    seed: int,
) -> Fit:
    """The listwise fit at the epoch that ranks valid best."""
    collected = question_results.with_options(
        collected, uses_walks=method == "walk"
    )
    uses_degrees = collected.policy.aggregation.uses_degrees
    with weighing(method):
        fitted, _, _ = question_results.fit(
            problem, collected, seed, "degrees weighed" if uses_degrees else ""
        )
        ranks = embedding_prior.rank(
            problem, problem.valid_queries, problem.valid, fitted.score
        )
    return Fit(ranks, fitted.chosen)


# -- the score with both


@contextmanager
def weighing(method: str) -> Iterator[None]:
    """Have the score weigh a seventh feature, the logarithm of the probability of a walk, where the method has both."""
    if method != "share and walk":
        yield
        return
    weigh_six = aggregation.firing_amounts

    def weigh_seven(
        cfg: AggregationConfig,
        world: AggregationWorld,
        params: Params,
        batch: Batch,
    ) -> F32[Tensor, "N"]:
        weight = params.feature_weight
        amount = weigh_six(
            cfg,
            world,
            params._replace(feature_weight=weight[..., :-1]),
            batch,
        )
        by_walk = replace(cfg, uses_walks=True)
        walk = aggregation.share_or_walk(by_walk, batch)
        label = batch.label[batch.firing_row]
        weight = weight[label, world.shape[batch.rule], -1]
        return amount * (weight * walk.log() / aggregation.LOG_SCALE).exp()

    with (
        mock.patch.object(aggregation, "firing_amounts", weigh_seven),
        mock.patch.object(
            aggregation, "N_FEATURES", aggregation.N_FEATURES + 1
        ),
    ):
        yield


if __name__ == "__main__":
    main()
