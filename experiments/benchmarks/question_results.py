"""What learning from question episodes gives: untrained, listwise alone, PPO alone, and both.

    python experiments/benchmarks/question_results.py --data DIR --only kinships

`--rules` takes rules that `funcppo mine` wrote at its defaults. The power of the odds that all methods start from,
whether degrees are weighed, the epoch of the listwise fit and the update of PPO are chosen by MRR on valid; test is
ranked once, after all choices. A data set without a pair of valid that train links leaves all facts between the two
entities of a question out. The row `no links` is the listwise fit without the facts that link a candidate to the
question's entity: in some benchmarks no pair is linked twice, which these facts give away.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DATA, RESULTS
from experiments.provenance import describe_machine
from funcppo.config import PPOConfig
from funcppo.core import random, tree
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.loaders import load
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.ranking import evidence_ranking, ranking
from funcppo.kg.ranking.evidence_ranking import EvidenceScore, QuestionEvidence
from funcppo.kg.run import choices, question_run, question_training
from funcppo.kg.run.question_training import TrainingQuestions
from funcppo.kg.scores import evidence, questions
from funcppo.kg.scores.evidence import FactIndex
from funcppo.kg.scores.question_config import ListwiseConfig, QuestionConfig
from funcppo.kg.scores.questions import Params
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.search.task import ProverTask, build_task

SETS = ("kinships", "nations", "umls", "family", "wn18rr", "fb15k-237")
SIDES = (HEAD, TAIL)
MAX_VALID_QUERIES = 2000
LISTWISE = ListwiseConfig()
PPO = PPOConfig(
    n_envs=512,
    n_steps=1,
    n_updates=100,
    n_epochs=4,
    n_minibatches=4,
    learning_rate=1e-2,
    entropy_coef=0.0,
    value_loss="plain",
)
# A warm start is refined with smaller steps.
REFINING = replace(PPO, learning_rate=1e-3)
UPDATES_PER_VALIDATION = 20


class Problem(NamedTuple):
    """A data set, ready to be trained and ranked."""

    task: ProverTask
    facts: FactIndex
    valid_queries: np.ndarray
    valid: dict[int, list[QuestionEvidence]]  # by side
    device: str


class ListwiseFit(NamedTuple):
    """A method's outcome, chosen on valid."""

    method: str
    seed: int
    valid_mrr: float
    seconds: float
    chosen: str
    score: EvidenceScore


def main() -> None:
    """Train and rank the sets that are asked for, and add their rows to the record."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "question_results.json"
    )
    parser.add_argument("--only", choices=SETS, action="append")
    parser.add_argument("--rules", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-questions", type=int, default=50_000)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    for name in args.only or SETS:
        rows = run_set(args, name)
        record: dict[str, Any] = {"rows": []}
        if args.out.exists():
            record = json.loads(args.out.read_text())
        others = [row for row in record["rows"] if row["set"] != name]
        write_record(args.out, {"rows": others + rows})


def run_set(args: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """The rows of one data set."""
    start = time.perf_counter()
    dataset = load(str(args.data / name), rules=str(args.rules))
    problem = prepare(dataset, args.device)
    say(start, f"{name}: {len(dataset.rules):,} rules, task and valid ready")
    linked = question_run.share_of_linked(problem.task, dataset.valid)
    left_out = "fact" if linked > 0 else "pair"

    untrained = ListwiseFit(
        "noisy-or@3",
        0,
        valid_mrr(problem, evidence_ranking.base_score),
        0.0,
        "",
        evidence_ranking.base_score,
    )
    fitted = [untrained]
    say(start, f"noisy-or@3 {untrained.valid_mrr:.4f}")
    for seed in range(args.seeds):
        cfg = QuestionConfig(
            left_out=left_out, max_questions=args.max_questions
        )
        for outcome in fit_seed(problem, cfg, seed, start):
            fitted.append(outcome)
            say(
                start,
                f"seed {seed}: {outcome.method} {outcome.valid_mrr:.4f} ({outcome.chosen})",
            )

    test = rank_test(problem, dataset, [outcome.score for outcome in fitted])
    say(start, f"test {[round(scores['mrr'], 4) for scores in test]}")
    rules = hashlib.sha256(args.rules.read_bytes()).hexdigest()[:16]
    return [
        {
            "set": name,
            "method": outcome.method,
            "seed": outcome.seed,
            "valid_mrr": outcome.valid_mrr,
            "test": scores,
            "seconds": round(outcome.seconds, 1),
            "chosen": outcome.chosen,
            "left_out": left_out,
            "object_identity": problem.task.cfg.object_identity,
            "valid_pairs_linked": linked,
            "n_rules": len(dataset.rules),
            "rules_sha256": rules,
            "machine": describe_machine(args.device),
        }
        for outcome, scores in zip(fitted, test)
    ]


def say(start: float, line: str) -> None:
    """Print a line with the seconds so far."""
    print(f"{time.perf_counter() - start:7.1f} s  {line}", flush=True)


def prepare(dataset: Dataset, device: str) -> Problem:
    """Build the task at height 1 with the object identity that ranks valid better; collect the evidence of valid."""
    open_settings = ProverTaskConfig(
        max_height=1, smoothing=5.0, object_identity="auto"
    )
    choice = choices.choose_settings(dataset, open_settings, "noisy-or@3")
    task = build_task(dataset, choice.settings)
    facts = evidence.index_facts(task.kb, task.sizes)
    order = np.random.default_rng(0).permutation(len(dataset.valid))
    queries = dataset.valid[np.sort(order[:MAX_VALID_QUERIES])]
    return Problem(
        task=task,
        facts=facts,
        valid_queries=queries,
        valid=collect_evidence(task, facts, queries),
        device=device,
    )


def collect_evidence(
    task: ProverTask, facts: FactIndex, queries: np.ndarray
) -> dict[int, list[QuestionEvidence]]:
    """The evidence of queries by side."""
    atoms = torch.from_numpy(np.ascontiguousarray(queries))
    return {
        side: list(evidence_ranking.query_evidence(task, facts, atoms, side))
        for side in SIDES
    }


def fit_seed(
    problem: Problem, cfg: QuestionConfig, seed: int, start: float
) -> list[ListwiseFit]:
    """All methods of one seed."""
    clock = time.perf_counter()
    by_degrees = [
        question_training.collect_questions(
            problem.task, problem.facts, cfg, seed, uses_degrees=False
        )
    ]
    say(start, f"seed {seed}: {by_degrees[0].notes[0]}")
    collecting = time.perf_counter() - clock
    first = by_degrees[0]._replace(
        world=tree.map(lambda x: x.to(problem.device), by_degrees[0].world)
    )
    powers = {
        power: with_options(first, odds_power=power)
        for power in question_run.ODDS_POWERS
    }
    power = max(powers, key=lambda p: initial_mrr(problem, powers[p]))
    first = powers[power]
    variants = {
        "": first,
        "degrees weighed": with_options(first, uses_degrees=True),
    }
    listwise = [
        fit(problem, collected, seed, label)
        for label, collected in variants.items()
    ]
    best = max(listwise, key=lambda outcome: outcome[0].valid_mrr)
    outcome, params, collected = best
    no_links, _, _ = fit(
        problem, with_options(collected, uses_links=False), seed, "no links"
    )
    initial = questions.init(collected.policy, random.key(0, problem.device))
    untrained = make_score(collected, initial)
    rows = [
        ListwiseFit(
            "initial weights",
            seed,
            valid_mrr(problem, untrained),
            0.0,
            f"learning rate 0, power {power:g}",
            untrained,
        ),
        outcome,
        no_links._replace(method="no links"),
        refine(problem, collected, initial, PPO, seed, "PPO"),
        refine(
            problem,
            collected,
            params,
            REFINING,
            seed,
            "listwise, then PPO",
        ),
    ]
    return [row._replace(seconds=row.seconds + collecting) for row in rows]


def with_options(
    collected: TrainingQuestions, **options: float
) -> TrainingQuestions:
    """The same questions with other evidence weighed, or other initial weights."""
    aggregation = replace(collected.policy.aggregation, **options)
    return collected._replace(
        policy=replace(collected.policy, aggregation=aggregation)
    )


def initial_mrr(problem: Problem, collected: TrainingQuestions) -> float:
    """MRR on valid before training."""
    initial = questions.init(collected.policy, random.key(0, problem.device))
    return valid_mrr(problem, make_score(collected, initial))


def fit(
    problem: Problem, collected: TrainingQuestions, seed: int, label: str
) -> tuple[ListwiseFit, Params, TrainingQuestions]:
    """The listwise fit: the epoch that ranks valid best."""
    clock = time.perf_counter()
    params = questions.init(collected.policy, random.key(0, problem.device))
    best: tuple[float, int, Params] = (-1.0, 0, params)
    epochs = question_training.fit_listwise(
        collected.policy, collected.world, params, LISTWISE, seed
    )
    for epoch, params in enumerate(epochs, 1):
        mrr = valid_mrr(problem, make_score(collected, params))
        if mrr > best[0]:
            best = (mrr, epoch, params)
    mrr, epoch, params = best
    chosen = ", ".join(filter(None, [f"epoch {epoch}", label]))
    seconds = time.perf_counter() - clock
    outcome = ListwiseFit(
        "listwise", seed, mrr, seconds, chosen, make_score(collected, params)
    )
    return outcome, params, collected


def refine(
    problem: Problem,
    collected: TrainingQuestions,
    params: Params,
    ppo: PPOConfig,
    seed: int,
    method: str,
) -> ListwiseFit:
    """PPO from given params on: the update that ranks valid best, none included."""
    clock = time.perf_counter()
    best = (valid_mrr(problem, make_score(collected, params)), 0, params)
    updates = question_training.refine_with_ppo(
        collected.policy, collected.world, params, ppo, seed
    )
    for update, (params, _) in enumerate(updates, 1):
        if update % UPDATES_PER_VALIDATION:
            continue
        mrr = valid_mrr(problem, make_score(collected, params))
        if mrr > best[0]:
            best = (mrr, update, params)
    mrr, update, params = best
    seconds = time.perf_counter() - clock
    score = make_score(collected, params)
    return ListwiseFit(method, seed, mrr, seconds, f"update {update}", score)


def make_score(collected: TrainingQuestions, params: Params) -> EvidenceScore:
    """The score of params on the host, where ranking is."""
    world, score = tree.map(
        lambda x: x.cpu(), (collected.world.aggregation, params.score)
    )
    return evidence_ranking.make_learned_score(
        collected.policy.aggregation, world, score
    )


def valid_mrr(problem: Problem, score: EvidenceScore) -> float:
    """MRR on the sample of valid, both sides."""
    return rank(problem, problem.valid_queries, problem.valid, score)["mrr"]


def rank(
    problem: Problem,
    queries: np.ndarray,
    parts: dict[int, list[QuestionEvidence]],
    score: EvidenceScore,
) -> dict[str, float]:
    """The headline numbers of queries by a score of their evidence."""
    scorer = evidence_ranking.make_scorer_of(problem.task, parts, score)
    ranked = ranking.rank_split(
        problem.task, queries, scorer, ranking.RankingProtocol(sides=SIDES)
    )
    metrics = ranking.summarise_ranking(
        ranked, problem.task.dataset.predicates, with_auc=False
    )
    names = (*ranking.HEADLINE_METRICS, "ceiling")
    return {name: float(metrics[name]) for name in names}


def rank_test(
    problem: Problem, dataset: Dataset, scores: list[EvidenceScore]
) -> list[dict[str, float]]:
    """The headline numbers of each score on test, both sides."""
    parts = collect_evidence(problem.task, problem.facts, dataset.test)
    return [rank(problem, dataset.test, parts, score) for score in scores]


if __name__ == "__main__":
    main()
