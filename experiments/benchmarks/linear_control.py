"""A control: two weights a rule and side, fitted by cross-entropy, in place of all that `funcppo train` learns.

    python experiments/benchmarks/linear_control.py --data DIR

Rules are mined at the defaults. The score of a candidate is linear: for each rule that derives it a weight, and another
one times log(1 + its number of groundings). The loss is the cross-entropy of the answer among the candidates that rules
derive, on a sample of train's questions, whose own fact no grounding uses. Adam, no penalty; the epoch that ranks valid
best is ranked on test, once. Candidates that no rule derives come last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.default_results import mine
from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DATA, RESULTS
from experiments.provenance import current_commit, describe_machine
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.loaders import load
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.firing_chunks import iter_firing_chunks
from funcppo.kg.logic.firings import FiringPlan, plan_firings
from funcppo.kg.logic.question_types import Questions, select_questions
from funcppo.kg.logic.triple_index import HEAD
from funcppo.kg.ranking import rank_metrics
from funcppo.kg.scores.evidence import training_questions

SETS = ("kinships", "nations", "umls", "family")
MAX_FIRINGS = 40_000_000  # of the training questions
N_EPOCHS = 20
BATCH_SIZE = 256  # questions
LEARNING_RATE = 0.01
SEEDS = (0, 1, 2)


class Listed(NamedTuple):
    """The candidates of some questions, and the rules that derive them."""

    n_candidates: (
        Tensor  # [Q] of each question, those that no rule derives included
    )
    question: Tensor  # [L] of each candidate that some rule derives
    is_answer: Tensor  # [L]
    candidate: Tensor  # [N] of each firing
    weight: Tensor  # [N] index of the weight of its rule on its side
    log_count: Tensor  # [N] log(1 + number of groundings)


def main() -> None:
    """Fit what the record does not hold yet."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "linear_control.json"
    )
    parser.add_argument("--only", nargs="+", choices=SETS, default=SETS)
    args = parser.parse_args()

    record: dict[str, Any] = {"sets": {}}
    if args.out.exists():
        record = json.loads(args.out.read_text())
    for name in args.only:
        if name in record["sets"]:
            continue
        target = args.data / name
        rules, _ = mine(str(target.resolve()), [])
        record["sets"][name] = measure(load(target, str(rules)))
        record["machine"] = describe_machine()
        write_record(args.out, record)
        print(name, json.dumps(record["sets"][name]), flush=True)


def measure(dataset: Dataset) -> dict[str, Any]:
    """The row of a data set."""
    kb, sizes = kbase.from_dataset(dataset)
    plan = plan_firings(kb, sizes)
    # Answers of valid and test are no known answers while a fit is made: it would learn which candidates they are.
    facts, all_facts = (
        _answer_keys(torch.cat(list(map(_atoms, parts))), sizes.n_constants)
        for parts in ([dataset.facts], [dataset.facts, *_held_out(dataset)])
    )
    valid, test = (
        list_candidates(plan, training_questions(_atoms(split)), all_facts)
        for split in _held_out(dataset)
    )
    runs: list[dict[str, float]] = []
    for seed in SEEDS:
        start = time.perf_counter()
        generator = torch.Generator().manual_seed(seed)
        questions = training_questions(_atoms(dataset.train))
        order = torch.randperm(len(questions.entity), generator=generator)
        train = list_candidates(
            plan, select_questions(questions, order), facts, MAX_FIRINGS
        )
        best, weights = fit(train, valid, 2 * (sizes.n_rules + 1), generator)
        runs.append(
            {
                "valid": best,
                "test": mean_reciprocal_rank(test, weights),
                "questions": len(train.n_candidates),
                "seconds": round(time.perf_counter() - start, 1),
            }
        )
    return {
        "rules": sizes.n_rules,
        "runs": runs,
        "commit": current_commit(),
    }


def _atoms(rows: Any) -> Tensor:
    return torch.from_numpy(rows).long()


def _held_out(dataset: Dataset) -> tuple[Any, Any]:
    return dataset.valid, dataset.test


def _answer_keys(atoms: Tensor, n_constants: int) -> Tensor:
    """A number for each answer of each question, ascending."""
    both = training_questions(atoms)
    return _keys(both, both.left_out, n_constants).unique()


def _keys(questions: Questions, answer: Tensor, n_constants: int) -> Tensor:
    label = 2 * questions.predicate + (questions.side - HEAD)
    base = n_constants + 1
    return (label * base + questions.entity) * base + answer


def list_candidates(
    plan: FiringPlan,
    questions: Questions,
    known: Tensor,
    max_firings: float = float("inf"),
) -> Listed:
    """The candidates of the first questions that have so many firings.

    Args:
      known: answers that are no candidates, but for a question's own, as `_answer_keys` numbers them.
    """
    n_constants = plan.sizes.n_constants
    label = 2 * questions.predicate + (questions.side - HEAD)
    open_key = (label * (n_constants + 1) + questions.entity) * (
        n_constants + 1
    )
    bounds = torch.stack([open_key, open_key + n_constants + 1])
    first, last = torch.searchsorted(known, bounds)
    parts: list[Listed] = []
    n_questions = n_listed = n_firings = 0
    for asked, firings in iter_firing_chunks(
        plan, questions, object_identity=True
    ):
        if n_firings > max_firings:
            break
        key = firings.question * (n_constants + 1) + firings.candidate
        of_listed, candidate = key.unique(return_inverse=True)
        question = of_listed // (n_constants + 1)
        entity = of_listed % (n_constants + 1)
        rows = select_questions(asked, question)
        is_answer = entity == asked.left_out[question]
        answer_key = _keys(rows, entity, n_constants)
        place = torch.searchsorted(known, answer_key).clamp_max(len(known) - 1)
        is_kept = is_answer | (known[place] != answer_key)
        position = is_kept.cumsum(0) - 1
        kept = is_kept[candidate]
        side = asked.side[firings.question][kept] - HEAD
        span = slice(n_questions, n_questions + len(asked.entity))
        parts.append(
            Listed(
                n_candidates=n_constants - (last - first)[span] + 1,
                question=question[is_kept] + n_questions,
                is_answer=is_answer[is_kept],
                candidate=position[candidate][kept] + n_listed,
                weight=2 * firings.rule[kept] + side,
                log_count=firings.n_groundings[kept].float().log1p(),
            )
        )
        n_questions += len(asked.entity)
        n_listed += int(is_kept.sum())
        n_firings += len(kept)
    return Listed(*(torch.cat(columns) for columns in zip(*parts)))


def score(listed: Listed, weights: Tensor) -> Tensor:
    """The score of each candidate; `weights` [2, W] are those of a rule and of its counts."""
    present, of_count = weights
    of_firing = (
        present[listed.weight] + of_count[listed.weight] * listed.log_count
    )
    zero = torch.zeros(len(listed.question))
    return zero.index_add(0, listed.candidate, of_firing)


def mean_reciprocal_rank(listed: Listed, weights: Tensor) -> float:
    """Its expectation under a random order of ties."""
    counts = rank_metrics.rank_counts_listed(
        listed.question,
        rank_metrics.quantise(score(listed, weights).double()),
        listed.is_answer,
        listed.n_candidates,
    )
    ranks = rank_metrics.expected_reciprocal_ranks(counts)
    return round(float(ranks.mean()), 6)


def fit(
    train: Listed, valid: Listed, n_weights: int, generator: torch.Generator
) -> tuple[float, Tensor]:
    """The best mean reciprocal rank on valid after an epoch, and the weights that give it."""
    weights = torch.zeros(2, n_weights, requires_grad=True)
    adam = torch.optim.Adam([weights], lr=LEARNING_RATE)
    n_questions = len(train.n_candidates)
    listed_from = _starts(train.question, n_questions)
    fired_from = _starts(train.candidate, len(train.question))
    best = (-1.0, weights.detach().clone())
    n_batches = -(-n_questions // BATCH_SIZE)
    for _ in range(N_EPOCHS):
        for i in torch.randperm(n_batches, generator=generator).tolist():
            last = min((i + 1) * BATCH_SIZE, n_questions)
            rows = slice(*listed_from[[i * BATCH_SIZE, last]].tolist())
            if rows.start == rows.stop:
                continue
            firings = slice(*fired_from[[rows.start, rows.stop]].tolist())
            batch = Listed(
                n_candidates=train.n_candidates,
                question=train.question[rows] - i * BATCH_SIZE,
                is_answer=train.is_answer[rows],
                candidate=train.candidate[firings] - rows.start,
                weight=train.weight[firings],
                log_count=train.log_count[firings],
            )
            adam.zero_grad()
            cross_entropy(batch, weights, last - i * BATCH_SIZE).backward()
            adam.step()
        with torch.no_grad():
            mrr = mean_reciprocal_rank(valid, weights)
        if mrr > best[0]:
            best = mrr, weights.detach().clone()
    return best


def _starts(group: Tensor, n_groups: int) -> Tensor:
    """Where each group begins, of ascending numbers, and the end."""
    return torch.searchsorted(group, torch.arange(n_groups + 1))


def cross_entropy(batch: Listed, weights: Tensor, n_questions: int) -> Tensor:
    """Its mean over the questions whose answer some rule derives."""
    scores = score(batch, weights)
    largest = torch.full((n_questions,), -torch.inf).scatter_reduce(
        0, batch.question, scores.detach(), "amax"
    )
    shifted = (scores - largest[batch.question]).exp()
    total = torch.zeros(n_questions).index_add(0, batch.question, shifted)
    log_total = total.clamp_min(1e-30).log() + largest
    answers = batch.is_answer.nonzero().squeeze(1)
    losses = log_total[batch.question[answers]] - scores[answers]
    return losses.sum() / max(1, len(answers))


if __name__ == "__main__":
    main()
