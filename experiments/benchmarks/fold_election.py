"""Does it pay to elect the rules of a training question without its fact? Rules mined on all facts or on other folds.

    python experiments/benchmarks/fold_election.py --data DIR --only kinships

The miner elects a rule because it predicts known facts. A training question leaves its fact out of the counts of all
rules, but the rules that derive it were elected with it. Here the facts are divided into folds, and the default miner
runs once on all facts and once without each fold. A question whose fact is in a fold is answered by those rules alone
that were mined without the fold, too. Rows: the listwise fit with all rules, and with elected rules; both rank valid
and test by all rules. The epoch of a fit is chosen by MRR on valid; the gain has its standard error, queries paired.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks import question_results
from experiments.benchmarks.embedding_prior import rank
from experiments.benchmarks.question_results import Problem, say
from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DATA, RESULTS
from experiments.provenance import describe_machine
from funcppo.data import Dataset, load
from funcppo.experiment import question_run, question_training
from funcppo.experiment.question_training import TrainingQuestions
from funcppo.logic import row_index
from funcppo.logic.question_types import Questions
from funcppo.logic.triple_index import HEAD
from funcppo.prover import aggregation, link_embedding
from funcppo.prover.evidence import Evidence
from funcppo.prover.question_config import QuestionConfig

SETS = ("kinships", "nations", "umls", "family")
Clause = tuple[tuple[int, ...], ...]


def main() -> None:
    """Mine, fit and rank a set, and put its rows into the record."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "fold_election.json"
    )
    parser.add_argument("--only", choices=SETS, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folds", type=int, default=4)
    args = parser.parse_args()
    rows = run_set(args, args.only)
    record: dict[str, Any] = {"rows": []}
    if args.out.exists():
        record = json.loads(args.out.read_text())
    others = [row for row in record["rows"] if row["set"] != args.only]
    write_record(args.out, {"rows": others + rows})


def run_set(args: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """The rows of a data set."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        dataset, is_elected = mine_folds(
            args.data / name, Path(folder), args.folds
        )
    shares = is_elected.float().mean(1).tolist()
    say(start, f"{name}: {len(dataset.rules):,} rules; folds elect {shares}")
    problem = question_results.prepare(dataset, "cpu")
    test = question_results.collect_evidence(
        problem.task, problem.facts, dataset.test
    )
    left_out = (
        "fact"
        if question_run.share_of_linked(problem.task, dataset.valid) > 0
        else "pair"
    )

    rows: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        collected = question_training.collect_questions(
            problem.task,
            problem.facts,
            QuestionConfig(left_out=left_out),
            seed,
            uses_degrees=False,
        )
        variants = {
            "all rules": collected,
            "elected rules": with_elected(collected, is_elected),
        }
        ranks = {
            label: fit(problem, variant, test, seed)
            for label, variant in variants.items()
        }
        for label, (valid, tested) in ranks.items():
            gain = valid - ranks["all rules"][0]
            row = {
                "set": name,
                "seed": seed,
                "rules": label,
                "n_rules": len(dataset.rules),
                "n_folds": args.folds,
                "elected_share": shares,
                "n_questions": len(variants[label].world.question),
                "valid_mrr": float(valid.mean()),
                "valid_gain": float(gain.mean()),
                "valid_gain_error": float(gain.std()) / len(gain) ** 0.5,
                "test_mrr": float(tested.mean()),
                "machine": describe_machine("cpu"),
            }
            rows.append(row)
            say(start, json.dumps({k: row[k] for k in list(row)[:-1]}))
    return rows


def mine_folds(
    path: Path, folder: Path, n_folds: int
) -> tuple[Dataset, Tensor]:
    """The data set with the rules of all its facts, and which of them are mined without each fold, [F, R]."""
    mine(path, folder / "rules.tsv")
    dataset = load(str(path), rules=str(folder / "rules.tsv"))
    clauses = read_clauses(dataset)
    fold = fold_of(dataset, torch.from_numpy(dataset.train).long(), n_folds)
    elected: list[list[bool]] = []
    for i in range(n_folds):
        part = folder / str(i)
        part.mkdir()
        write_triples(dataset, dataset.train[(fold != i).numpy()], part)
        mine(part, folder / f"{i}.tsv")
        found = set(
            read_clauses(load(str(path), rules=str(folder / f"{i}.tsv")))
        )
        elected.append([clause in found for clause in clauses])
    return dataset, torch.tensor(elected)


def mine(path: Path, out: Path) -> None:
    """Run the miner at its defaults."""
    words = [sys.executable, "-m", "funcppo", "mine", str(path)]
    subprocess.run([*words, "--out", str(out)], check=True, stdout=sys.stderr)


def write_triples(dataset: Dataset, atoms: np.ndarray, folder: Path) -> None:
    """Write facts as the train split of a data set."""
    lines = [
        f"{dataset.entities[h - 1]}\t{dataset.predicates[r - 1]}\t{dataset.entities[t - 1]}\n"
        for r, h, t in atoms.tolist()
    ]
    (folder / "train.txt").write_text("".join(lines))


def read_clauses(dataset: Dataset) -> list[Clause]:
    """The rules as tuples, without padding; the miner numbers variables as they occur."""
    return [
        tuple(tuple(atom) for atom in rule if atom[0])
        for rule in dataset.rules.tolist()
    ]


def fold_of(dataset: Dataset, atoms: Tensor, n_folds: int) -> Tensor:
    """The fold of each fact, the same for both of its questions."""
    predicate, head, tail = atoms.unbind(1)
    asked = Questions(predicate, torch.full_like(head, HEAD), tail, head)
    return link_embedding.fold_of(asked, n_folds, "fact")


def with_elected(
    collected: TrainingQuestions, is_elected: Tensor
) -> TrainingQuestions:
    """The questions with those firings alone whose rule was mined without the fold of the question's fact."""
    listed = collected.world.evidence
    questions = Questions(
        listed.label // 2,
        listed.label % 2 + HEAD,
        listed.given,
        listed.left_out,
    )
    fold = link_embedding.fold_of(questions, len(is_elected), "fact")
    row = torch.repeat_interleave(torch.diff(listed.firing_offsets))
    is_kept = is_elected[fold[listed.question[row]], listed.rule]
    kept = keep_firings(listed, row, is_kept)
    answered = collected.world.question
    answered = answered[kept.answer[answered] >= 0]
    return collected._replace(
        world=collected.world._replace(
            evidence=kept,
            question=answered,
            prior_score=torch.zeros_like(kept.base_score),
        ),
        policy=replace(
            collected.policy, capacity=aggregation.capacity(kept, answered)
        ),
    )


def keep_firings(listed: Evidence, row: Tensor, is_kept: Tensor) -> Evidence:
    """Some of the firings, and the candidates that have one, with their links."""
    n_firings = torch.bincount(row[is_kept], minlength=len(listed.entity))
    is_listed = n_firings > 0
    n_links = torch.diff(listed.link_offsets)
    link_row = torch.repeat_interleave(n_links)
    per_question = torch.bincount(
        listed.question[is_listed], minlength=len(listed.label)
    )
    new_row = is_listed.cumsum(0) - 1
    answer = listed.answer.clamp_min(0)
    has_answer = (listed.answer >= 0) & is_listed[answer]
    firings = ("rule", "is_left_out", "n_groundings", "fan_out")
    firings += ("n_all_groundings",)
    candidates = ("question", "entity", "own_degree", "log_listed")
    candidates += ("base_score", "prior")
    return listed._replace(
        **{name: getattr(listed, name)[is_kept] for name in firings},
        **{name: getattr(listed, name)[is_listed] for name in candidates},
        candidate_offsets=row_index.offsets(per_question),
        answer=torch.where(has_answer, new_row[answer], -1),
        firing_offsets=row_index.offsets(n_firings[is_listed]),
        link_offsets=row_index.offsets(n_links[is_listed]),
        link_label=listed.link_label[is_listed[link_row]],
    )


def fit(
    problem: Problem,
    collected: TrainingQuestions,
    test: dict[int, Any],
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Reciprocal ranks of valid and of test by the epoch that ranks valid best."""
    fitted, _, _ = question_results.fit(problem, collected, seed, "")
    return (
        rank(problem, problem.valid_queries, problem.valid, fitted.score),
        rank(problem, problem.task.dataset.test, test, fitted.score),
    )


if __name__ == "__main__":
    main()
