"""Does it pay to say how common an answer is? Each set's valid split says.

    python experiments/benchmarks/general_rules.py --data DIR --only nations --rules FILE --general FILE

AnyBURL's zero rule h(X, c) <= says that c is an answer to h(x, ?) whatever x is, and h(c, X) <= the same about h(?, x).
It has no body, so that it would derive its head for every entity. Here every constant that enough facts of h have makes
such a rule, whose confidence is the share of entities for which it is right, and ranking uses it in two ways:

- `last`: as the least confident rule, so that it orders the candidates that no other rule derives;
- `zero`: as one more rule.

The rules of `--general` were mined as those of `--rules`, with `--general-rules`: h(X, c) :- b(X, Z) in place of the
zero rule. They are rules as all others are (`general`).

Rows: the MRR of valid by `--rules`, the gain of each way with its standard error, queries paired, and the share of
answers that each way derives.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.rule_redundancy import (
    OBJECT_IDENTITY,
    gain,
    sample_queries,
)
from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DATA, RESULTS
from experiments.provenance import describe_machine
from funcppo.data import load
from funcppo.evaluation import evidence_ranking, scorers
from funcppo.logic.triple_index import HEAD, TAIL
from funcppo.prover import evidence
from funcppo.prover.config import ProverTaskConfig
from funcppo.prover.task import ProverTask, build_task
from funcppo.types import F64, Bool

SCORES = ("max-confidence", "noisy-or", "noisy-or@3")
# facts of a constant that make a rule, as `mine` asks for by default
MIN_SUPPORT = 5
SMOOTHING = 5.0
WAYS = ("without", "last", "zero")
# below the log-odds of every rule with a body
LAST_LOG_ODDS = -1000.0


def main() -> None:
    """Rank a set, and put its row into the record."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "general_rules.json"
    )
    parser.add_argument("--only", choices=OBJECT_IDENTITY, required=True)
    parser.add_argument("--rules", type=Path, required=True)
    parser.add_argument("--general", type=Path, required=True)
    parser.add_argument(
        "--queries",
        type=int,
        default=4000,
        metavar="N",
        help="the most queries of valid to rank, a random sample",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    row = run_set(
        args.only,
        str(args.data / args.only),
        args.rules,
        args.general,
        n_queries=args.queries,
    )
    record: dict[str, Any] = {"rows": []}
    if args.out.exists():
        record = json.loads(args.out.read_text())
    others = [other for other in record["rows"] if other["set"] != row["set"]]
    write_record(args.out, {"rows": [*others, row]})


def run_set(
    name: str, path: str, rules: Path, general: Path, *, n_queries: int
) -> dict[str, Any]:
    """The row of a data set.

    Args:
      rules: file of rules with a body.
      general: the same with the most general rules too.
      n_queries: the most queries of valid to rank.
    """
    ranks: list[Tensor] = []
    derived: list[float] = []
    n_rules: list[int] = []
    n_zero_rules = 0
    for file in (rules, general):
        dataset = load(path, rules=str(file))
        settings = ProverTaskConfig(
            max_height=1,
            smoothing=SMOOTHING,
            object_identity=OBJECT_IDENTITY[name],
        )
        task = build_task(dataset, settings, with_derivations=False)
        counts = count_answers(task)
        n_zero_rules = int((counts >= MIN_SUPPORT).sum())
        queries = sample_queries(dataset.valid, n_queries)
        known = known_answers(task, (dataset.valid, dataset.test))
        parts = []
        for side in (HEAD, TAIL):
            parts.append(rank_queries(task, counts, known, queries, side))
            print(f"{name}: {file}: side {side} ranked", flush=True)
        ranks.append(torch.cat([part for part, _ in parts], 2))
        shares = torch.cat([part for _, part in parts], 1).double().mean(1)
        derived += shares.tolist()
        n_rules.append(len(dataset.rules))

    # By both files without a zero rule, and by the first one with them.
    base = ranks[0]
    ways = dict(zip(WAYS, base.unbind(1))) | {"general": ranks[1][:, 0]}
    return {
        "set": name,
        "n_rules": n_rules[0],
        "n_general_rules": n_rules[1] - n_rules[0],
        "n_zero_rules": n_zero_rules,
        "rules_sha256": [_digest(file) for file in (rules, general)],
        "object_identity": OBJECT_IDENTITY[name],
        "n_valid": base.shape[2] // 2,
        "derived": {
            "without": derived[0],
            "zero": derived[1],
            "general": derived[2],
        },
        "valid": [
            {"score": score, "way": way} | gain(rank[s], base[s, 0])
            for s, score in enumerate(SCORES)
            for way, rank in ways.items()
        ],
        "machine": describe_machine("cpu"),
    }


def _digest(file: Path) -> str:
    """The first digits of a file's hash."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def count_answers(task: ProverTask) -> F64[Tensor, "2 P1 C1"]:
    """How many facts of each predicate have each constant as their head, and as their tail."""
    n = (task.sizes.n_predicates + 1, task.sizes.n_constants + 1)
    facts = task.kb.facts.long()
    facts = facts[(facts[:, 0] > 0) & (facts[:, 0] < n[0])]
    counts = torch.zeros((2, n[0] * n[1]), dtype=torch.float64)
    for row, side in enumerate((HEAD, TAIL)):
        key = facts[:, 0] * n[1] + facts[:, side]
        counts[row] = torch.bincount(key, minlength=n[0] * n[1])
    return counts.view(2, *n)


def confidence_without_body(
    counts: F64[Tensor, "2 P1 C1"], predicate: int, side: int
) -> F64[Tensor, "C1"]:
    """The confidence of the rule without a body about each answer to questions about a side; 0 for none."""
    support = counts[0 if side == HEAD else 1, predicate]
    n_entities = len(support) - 1
    confidence = support / (n_entities + SMOOTHING)
    return torch.where(support >= MIN_SUPPORT, confidence, 0.0)


def combine(
    score: str, way: str, log_odds: F64[Tensor, "n"], other: F64[Tensor, "n"]
) -> F64[Tensor, "n"]:
    """The log-odds of atoms by rules with a body and the one without.

    Args:
      log_odds: by the rules with a body; -inf for none.
      other: the confidence of the rule without a body; 0 for none.
    """
    if way == "without":
        return log_odds
    if way == "last":
        least = LAST_LOG_ODDS + torch.logit(other)
        return torch.where(log_odds.isneginf(), least, log_odds)
    if score == "max-confidence":
        return torch.maximum(log_odds, torch.logit(other))
    _, _, number = score.partition("@")
    power = float(number or 1)
    log_wrong = torch.log1p(-(torch.sigmoid(log_odds) ** power))
    log_wrong = log_wrong + torch.log1p(-(other**power))
    right = (-torch.expm1(log_wrong)) ** (1 / power)
    # Where the rules with a body are nearly certain, their log-odds say more than a float64 of their probability.
    return torch.maximum(log_odds, torch.logit(right.clamp_max(1 - 1e-15)))


class _Question(NamedTuple):
    """What of the candidates of a question is known: by rules with a body, and by those without."""

    log_odds: F64[Tensor, "S C1"]  # by score; -inf where no rule derives
    # confidence of the rule without a body; 0 for none
    other: F64[Tensor, "C1"]


def rank_queries(
    task: ProverTask,
    counts: F64[Tensor, "2 P1 C1"],
    known: dict[tuple[int, int, int], Tensor],
    queries: np.ndarray,
    side: int,
) -> tuple[F64[Tensor, "S W n"], Bool[Tensor, "2 n"]]:
    """Reciprocal ranks of some queries about one side, and whether their answers are derived.

    Args:
      known: the answers of each predicate, side and entity in all splits.

    Returns:
      The ranks by score and way; whether rules with a body, and any rules, derive the answer.
    """
    facts = evidence.index_facts(task.kb, task.sizes)
    atoms = torch.from_numpy(np.ascontiguousarray(queries))
    scores = [evidence_ranking.make_rule_score(task, n) for n in SCORES]
    by_question: dict[tuple[int, int], list[int]] = {}
    for i, query in enumerate(queries.tolist()):
        key = (query[0], query[HEAD + TAIL - side])
        by_question.setdefault(key, []).append(i)

    ranks = torch.zeros(
        (len(SCORES), len(WAYS), len(queries)), dtype=torch.float64
    )
    derived = torch.zeros((2, len(queries)), dtype=torch.bool)
    for chunk, part in evidence_ranking.query_evidence(
        task, facts, atoms, side
    ):
        values = torch.stack([score(part).double() for score in scores])
        ends = torch.searchsorted(
            part.question, torch.arange(len(chunk.entity) + 1)
        )
        for j, (first, last) in enumerate(itertools.pairwise(ends.tolist())):
            predicate, entity = int(chunk.predicate[j]), int(chunk.entity[j])
            question = _Question(
                torch.full(
                    (len(SCORES), counts.shape[2]),
                    -torch.inf,
                    dtype=torch.float64,
                ),
                confidence_without_body(counts, predicate, side),
            )
            question.log_odds[:, part.entity[first:last]] = values[
                :, first:last
            ]
            answers = known[predicate, side, entity]
            for i in by_question[predicate, entity]:
                answer = int(queries[i, side])
                ranks[:, :, i] = rank_answer(question, answers, answer)
                by_body = ~question.log_odds[0, answer].isneginf()
                by_none = question.other[answer] > 0
                derived[:, i] = torch.stack([by_body, by_body | by_none])
    return ranks, derived


def rank_answer(
    question: _Question, answers: Tensor, answer: int
) -> F64[Tensor, "S W"]:
    """The expected reciprocal rank of an answer, by score and way.

    Args:
      answers: all known ones; the others are no candidates.
    """
    is_candidate = torch.ones_like(question.other, dtype=torch.bool)
    is_candidate[0] = False
    is_candidate[answers] = False
    ranks = torch.zeros((len(SCORES), len(WAYS)), dtype=torch.float64)
    for s, score in enumerate(SCORES):
        for w, way in enumerate(WAYS):
            value = combine(score, way, question.log_odds[s], question.other)
            value = torch.round(value / scorers.SCORE_GRID_STEP)
            others = value[is_candidate]
            n_better = int((others > value[answer]).sum())
            n_equal = int((others == value[answer]).sum())
            places = n_better + 1 + torch.arange(n_equal + 1).double()
            ranks[s, w] = (1 / places).mean()
    return ranks


def known_answers(
    task: ProverTask, splits: Sequence[np.ndarray]
) -> dict[tuple[int, int, int], Tensor]:
    """The answers of each predicate, side and entity among the facts and in some splits."""
    found: dict[tuple[int, int, int], list[int]] = {}
    facts = evidence.binary_facts(task.kb)[:, :3].tolist()
    triples = [row for split in splits for row in split[:, :3].tolist()]
    for predicate, head, tail in [*facts, *triples]:
        found.setdefault((predicate, TAIL, head), []).append(tail)
        found.setdefault((predicate, HEAD, tail), []).append(head)
    return {key: torch.tensor(answers) for key, answers in found.items()}


if __name__ == "__main__":
    main()
