"""Whether the probability of a random walk says more than the share of groundings.

    python experiments/benchmarks/walk_feature.py --data DIR --only kinships --rules FILE

A walk starts at the entity of a question and follows the body of a path rule: at each atom it picks one of the matching
facts, all with the same probability, and it ends where there is none. Its probability is that of ending in the
candidate. The fact of a training question is left out of it, as of all other evidence. The share is the probability
that a grounding, all of the question and the rule having the same, ends in the candidate. A rule that is no path rule
has its share in place of a walk, and a walk may visit an entity twice, also where the rules' variables are kept apart.

Rows: the listwise fit with the share, as the package has it; with the logarithm of the probability of the walk in its
place; and with both. The epoch is chosen by MRR on valid, which is all that is ranked: no test is read. The gain over
the first row has its standard error, queries paired. `--rules` takes rules that `funcppo mine` wrote at its defaults.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from funcppo.logic import chains
from funcppo.logic.chains import BACKWARD, FORWARD, Neighbours
from funcppo.logic.joins import expand_ranges
from funcppo.logic.kb import KBSizes, KnowledgeBase
from funcppo.logic.question_types import LeftOut
from funcppo.logic.rules import rules_from_kb
from funcppo.logic.triple_index import HEAD, TAIL
from funcppo.prover import aggregation
from funcppo.prover.aggregation import AggregationWorld, Batch, Params
from funcppo.prover.evidence import Evidence
from funcppo.prover.question_config import QuestionConfig
from funcppo.types import F32, F64, I64

SETS = ("kinships", "nations", "umls", "family", "wn18rr")
METHODS = ("share", "walk", "share and walk")
MAX_QUESTIONS = 50_000


class Fit(NamedTuple):
    """Reciprocal ranks of valid, both sides of each query, and the epoch that they are of."""

    valid: Tensor
    chosen: str


class Ends(NamedTuple):
    """Where walks have come, ascending by row and entity once merged."""

    row: I64[Tensor, "n"]  # what the walk started from
    entity: I64[Tensor, "n"]
    probability: F64[Tensor, "n"]


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
    problem = question_results.prepare(dataset, "cpu")
    linked = question_run.share_of_linked(problem.task, dataset.valid)
    left_out: LeftOut = "fact" if linked > 0 else "pair"
    fits: dict[str, list[Fit]] = {method: [] for method in METHODS}
    for seed in range(args.seeds):
        collected = collect(problem, left_out, seed)
        say(start, f"{args.only}, seed {seed}: {collected.notes[0]}")
        for method in METHODS:
            with weighing(method):
                outcome = fit(problem, collected, left_out, method, seed)
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
        key=lambda x: float(
            fit(problem, x, left_out, "share", seed).valid.mean()
        ),
    )


def fit(
    problem: Problem,
    collected: TrainingQuestions,
    left_out: LeftOut,
    method: str,
    seed: int,
) -> Fit:
    """The listwise fit at the epoch that ranks valid best."""
    kb, sizes = problem.task.kb, problem.task.sizes
    world = collected.world
    listed = add_walks(kb, sizes, world.evidence, left_out, method)
    collected = collected._replace(world=world._replace(evidence=listed))
    valid = {
        side: [
            part._replace(
                evidence=add_walks(kb, sizes, part.evidence, left_out, method)
            )
            for part in parts
        ]
        for side, parts in problem.valid.items()
    }
    problem = problem._replace(valid=valid)
    uses_degrees = collected.policy.aggregation.uses_degrees
    fitted, _, _ = question_results.fit(
        problem, collected, seed, "degrees weighed" if uses_degrees else ""
    )
    ranks = embedding_prior.rank(
        problem, problem.valid_queries, valid, fitted.score
    )
    return Fit(ranks, fitted.chosen)


# -- the probability of a walk


def add_walks(
    kb: KnowledgeBase,
    sizes: KBSizes,
    listed: Evidence,
    left_out: LeftOut,
    method: str,
) -> Evidence:
    """Evidence whose total of groundings gives a firing the share that the method weighs.

    The feature of the score is n_groundings / n_all_groundings. For a walk the denominator is such that this is its
    probability. With both, there are two columns.
    """
    if method == "share":
        return listed
    n_all = listed.n_all_groundings.float()
    walk = walk_probability(kb, sizes, listed, left_out)
    by_walk = (listed.n_groundings / walk).float()
    by_walk = torch.where(walk > 0, by_walk, n_all)
    if method == "share and walk":
        by_walk = torch.stack([n_all, by_walk], 1)
    return listed._replace(n_all_groundings=by_walk)


def walk_probability(
    kb: KnowledgeBase, sizes: KBSizes, listed: Evidence, left_out: LeftOut
) -> F64[Tensor, "N"]:
    """The probability that a walk along each rule's body ends in the candidate of its firing; 0 if it is no path."""
    neighbours = chains.plan_chains(kb, sizes, ()).neighbours
    candidate = torch.repeat_interleave(listed.firing_offsets.diff())
    question = listed.question[candidate]
    entity = listed.entity[candidate]
    side = listed.label[question] % 2 + HEAD
    by_rule = torch.argsort(listed.rule, stable=True)
    counts = torch.bincount(listed.rule, minlength=sizes.n_rules + 1)
    groups = by_rule.split(counts.tolist())

    walk = torch.zeros(len(listed.rule), dtype=torch.float64)
    for rule in rules_from_kb(kb):
        steps = chains.chain_steps(rule, sizes.n_constants)
        if steps is None:
            continue
        to_head = tuple(step ^ 1 for step in reversed(steps))
        for asked, path in ((TAIL, steps), (HEAD, to_head)):
            firing = groups[rule.id]
            firing = firing[side[firing] == asked]
            row, place = torch.unique(question[firing], return_inverse=True)
            ends = walk_from(
                neighbours,
                path,
                listed.given[row],
                listed.left_out[row],
                fact_step(rule.head[0], asked) if left_out == "fact" else None,
            )
            walk[firing] = look_up(ends, place, entity[firing])
    return walk


def fact_step(predicate: int, asked: int) -> int:
    """The step from the question's entity to its answer along the fact that is asked for."""
    return 2 * predicate + (FORWARD if asked == TAIL else BACKWARD)


def walk_from(
    neighbours: Neighbours,
    steps: tuple[int, ...],
    given: I64[Tensor, "n"],
    answer: I64[Tensor, "n"],
    along: int | None,
) -> Ends:
    """The probability that a walk from each entity ends in each other one.

    Args:
      answer: what is left out is between it and the given entity; 0 for nothing.
      along: the step of the fact that is left out; None for all facts of the pair.
    """
    rows = torch.arange(len(given))
    here = Ends(rows, given, torch.ones(len(given), dtype=torch.float64))
    for step in steps:
        start, count = neighbours.find(
            torch.full_like(here.entity, step), here.entity
        )
        way, position = expand_ranges(start, count)
        there = neighbours.entity(torch.full_like(way, step), position)

        # Those along what is left out are no neighbours.
        row, entity = here.row[way], here.entity[way]
        onwards = (entity == given[row]) & (there == answer[row])
        backwards = (entity == answer[row]) & (there == given[row])
        is_left_out = (onwards & (along in (None, step))) | (
            backwards & (along in (None, step ^ 1))
        )
        way, there = way[~is_left_out], there[~is_left_out]
        count = torch.bincount(way, minlength=len(count))
        probability = here.probability[way] / count[way]
        here = merge(Ends(here.row[way], there, probability))
    return here


def merge(ends: Ends) -> Ends:
    """Walks of a row that have come to the same entity as one."""
    pairs = torch.stack([ends.row, ends.entity], 1)
    pairs, place = torch.unique(pairs, dim=0, return_inverse=True)
    none = torch.zeros(len(pairs), dtype=torch.float64)
    row, entity = pairs.unbind(1)
    return Ends(row, entity, none.index_add(0, place, ends.probability))


def look_up(
    ends: Ends, row: I64[Tensor, "n"], entity: I64[Tensor, "n"]
) -> F64[Tensor, "n"]:
    """The probabilities of pairs of a row and an entity, all of which there are."""
    base = 1 + int(ends.entity.max()) if len(ends.entity) else 1
    wanted = row * base + entity
    position = torch.searchsorted(ends.row * base + ends.entity, wanted)
    assert torch.equal(ends.entity[position], entity), "a rule fires at an end"
    return ends.probability[position]


# -- the score with both


@contextmanager
def weighing(method: str) -> Iterator[None]:
    """Have the score weigh a seventh feature, the logarithm of the probability of a walk, where the method has both."""
    if method != "share and walk":
        yield
        return
    weigh_six = aggregation.firing_amounts

    def weigh_seven(
        world: AggregationWorld, params: Params, batch: Batch
    ) -> F32[Tensor, "N"]:
        by_share, by_walk = batch.n_all_groundings.unbind(1)
        weight = params.feature_weight
        amount = weigh_six(
            world,
            params._replace(feature_weight=weight[..., :-1]),
            batch._replace(n_all_groundings=by_share),
        )
        n_groundings = batch.n_groundings.clamp_min(1).float()
        walk = n_groundings / by_walk.clamp_min(1)
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
