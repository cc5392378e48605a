"""Does it pay to count for each pair of rules what they derive together? Valid, and test with what valid chose.

    python experiments/benchmarks/rule_redundancy.py --data DIR --only wn18rr --rules FILE

Noisy-or takes rules as independent; `noisy-or-joint` counts a rule for what it adds to the better ones. Both rank with
some constants that are added to the body pairs of each rule; counts leave out circular support, and rules are applied
at height 1. Rows: the MRR of valid, and the gain over the best score that takes rules as independent, or the largest,
with its standard error, queries paired. Test is ranked by that score and by the best `noisy-or-joint`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.relation_smoothing import with_constant
from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DATA, RESULTS
from experiments.provenance import describe_machine
from funcppo.data import load
from funcppo.evaluation import rank_metrics, ranking, scorers
from funcppo.evaluation.candidates import RankingProtocol
from funcppo.evaluation.ranking import ExactScorer, ScorerBySide
from funcppo.evaluation.scorers import RuleScore
from funcppo.logic.consequences import Derivations
from funcppo.logic.joint_counts import JointCounts
from funcppo.logic.kb import KnowledgeBase
from funcppo.logic.triple_index import HEAD, TAIL
from funcppo.prover.config import ProverTaskConfig
from funcppo.prover.task import ProverTask, build_task, with_answers

OBJECT_IDENTITY = {
    "nations": True,
    "kinships": True,
    "umls": True,
    "family": True,
    "wn18rr": True,
    "fb15k-237": False,
}
CONSTANTS = (1.0, 5.0)
PLAIN_SCORES = (
    "max-plus",
    "noisy-or",
    "noisy-or@2",
    "noisy-or@3",
    "noisy-or-top-5",
    "noisy-or-top-10",
)
JOINT_SCORES = (
    "noisy-or-joint@100",
    "noisy-or-joint",
    "noisy-or-joint-top-20",
)


# queries whose derivations are held at once
CHUNK_QUERIES = 500


class Trial(NamedTuple):
    """A score and the constant of its confidences."""

    score: str
    constant: float


def main() -> None:
    """Rank a set, and put its rows into the record."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "rule_redundancy.json"
    )
    parser.add_argument("--only", choices=OBJECT_IDENTITY, required=True)
    parser.add_argument("--rules", type=Path, required=True)
    parser.add_argument(
        "--label",
        help="of the row, for rules mined in another way; the set by default",
    )
    parser.add_argument(
        "--queries",
        type=int,
        default=4000,
        metavar="N",
        help="the most queries of a split to rank, a random sample",
    )
    parser.add_argument(
        "--constants",
        type=float,
        nargs="+",
        default=CONSTANTS,
        help="added to the body pairs of each rule",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes that rank side by side"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    row = run_set(
        args.only,
        str(args.data / args.only),
        args.rules,
        n_queries=args.queries,
        constants=args.constants,
        n_jobs=args.jobs,
    )
    record: dict[str, Any] = {"rows": []}
    if args.out.exists():
        record = json.loads(args.out.read_text())
    row["set"] = args.label or args.only
    others = [other for other in record["rows"] if other["set"] != row["set"]]
    write_record(args.out, {"rows": [*others, row]})


def run_set(
    name: str,
    path: str,
    rules: Path,
    *,
    n_queries: int,
    constants: Sequence[float],
    n_jobs: int,
) -> dict[str, Any]:
    """The row of a data set.

    Args:
      n_queries: the most queries of a split to rank.
      constants: that are added to the body pairs of each rule.
      n_jobs: processes that rank side by side.
    """
    dataset = load(path, rules=str(rules))
    settings = ProverTaskConfig(
        max_height=1, smoothing=0.0, object_identity=OBJECT_IDENTITY[name]
    )
    # Those of WN18RR and FB15k-237 are too many to hold.
    task = build_task(dataset, settings, with_derivations=False)
    start = time.perf_counter()
    joint = scorers.count_joint(task, scorers.NOISY_OR_JOINT)
    assert joint is not None, "the score needs it"
    seconds = time.perf_counter() - start

    valid, test = (
        sample_queries(split, n_queries)
        for split in (dataset.valid, dataset.test)
    )
    scores = PLAIN_SCORES + JOINT_SCORES
    trials = [Trial(s, c) for c in constants for s in scores]
    ranks = rank_trials(task, joint, trials, valid, n_jobs)
    plain, best = (
        max(
            (trial for trial in ranks if trial.score in names),
            key=lambda trial: float(ranks[trial].mean()),
        )
        for names in (PLAIN_SCORES, JOINT_SCORES)
    )
    of_test = rank_trials(task, joint, [plain, best], test, n_jobs)
    return {
        "set": name,
        "n_rules": len(dataset.rules),
        "rules_sha256": hashlib.sha256(rules.read_bytes()).hexdigest()[:16],
        "object_identity": settings.object_identity,
        "machine": describe_machine("cpu"),
        "pairs": len(joint.pair),
        "count_seconds": round(seconds, 1),
        "n_valid": len(valid),
        "n_test": len(test),
        "valid": [
            trial._asdict() | gain(rank, ranks[plain])
            for trial, rank in ranks.items()
        ],
        "plain": plain._asdict(),
        "joint": best._asdict(),
        "test": gain(of_test[best], of_test[plain])
        | {"plain_mrr": float(of_test[plain].mean())},
    }


def sample_queries(split: np.ndarray, n_queries: int) -> np.ndarray:
    """Some queries of a split, the same ones at every call."""
    order = np.random.default_rng(0).permutation(len(split))
    return split[np.sort(order[:n_queries])]


def gain(ranks: Tensor, reference: Tensor) -> dict[str, float]:
    """The mean of some reciprocal ranks, and what it gains over others, with the standard error."""
    difference = ranks - reference
    return {
        "mrr": float(ranks.mean()),
        "gain": float(difference.mean()),
        "gain_error": float(difference.std()) / len(difference) ** 0.5,
    }


def rank_trials(
    task: ProverTask,
    joint: JointCounts,
    trials: Sequence[Trial],
    queries: np.ndarray,
    n_jobs: int = 1,
) -> dict[Trial, Tensor]:
    """Reciprocal ranks of queries by each trial, both sides.

    Args:
      task: with a smoothing of 0, and the counts of other facts where a score reads them.
      n_jobs: processes, forks of this one, that rank side by side.
    """
    chunks = [
        queries[start : start + CHUNK_QUERIES]
        for start in range(0, len(queries), CHUNK_QUERIES)
    ]
    ranker = _Ranker(task, joint, trials)
    parts: list[np.ndarray] = []
    with multiprocessing.get_context("fork").Pool(
        n_jobs, _set_ranker, (ranker,)
    ) as pool:
        for part in pool.imap(_rank_chunk, chunks):
            parts.append(part)
            print(f"{len(parts)} of {len(chunks)} chunks", flush=True)
    ranks = torch.from_numpy(np.concatenate(parts, axis=1))
    return dict(zip(trials, ranks, strict=True))


class _Ranker:
    """Ranks some queries by all trials."""

    def __init__(
        self, task: ProverTask, joint: JointCounts, trials: Sequence[Trial]
    ) -> None:
        self._task = task
        # Trials of one score with and without an ending share it.
        bases = [scorers.split_endings(trial.score)[0] for trial in trials]
        scores = {base: scorers.rule_score(base, joint) for base in bases}
        constants = {trial.constant for trial in trials}
        tasks = {c: with_constant(task, c) for c in constants}
        self._trials = [
            (trial.score, scores[base], tasks[trial.constant])
            for trial, base in zip(trials, bases)
        ]

    def rank(self, queries: np.ndarray) -> np.ndarray:
        """Reciprocal ranks, a row for each trial."""
        protocol = RankingProtocol()
        answered = with_answers(
            self._task, torch.from_numpy(queries), protocol.sides
        )
        derivations = _Derivations(self._task)
        rows: list[Tensor] = []
        for name, score, task in self._trials:
            head, tail = (
                partial(derivations.score, score, task.kb, side)
                for side in (HEAD, TAIL)
            )
            scorer = ScorerBySide(head=head, tail=tail)
            if scorers.has_other_facts(name):
                scorer = scorers.add_other_facts(task, scorer)
            if name == scorers.MAX_PLUS:
                scorer = ScorerBySide(ExactScorer(head), ExactScorer(tail))
            ranked = ranking.rank_split(answered, queries, scorer, protocol)
            rows.append(rank_metrics.expected_reciprocal_ranks(ranked.counts))
        return torch.stack(rows).numpy()


_rankers: list[_Ranker] = []  # of a process that ranks for another


def _set_ranker(ranker: _Ranker) -> None:
    """Begin a process that ranks."""
    _rankers[:] = [ranker]


def _rank_chunk(queries: np.ndarray) -> np.ndarray:
    """Rank some queries in such a process."""
    return _rankers[0].rank(queries)


class _Derivations:
    """The rules that derive the last atoms of each side, held for many scores."""

    def __init__(self, task: ProverTask) -> None:
        self._task = task
        self._last: dict[int, list[Derivations]] = {}
        self._scores: dict[int, tuple[RuleScore, KnowledgeBase, Tensor]] = {}

    def score(
        self,
        score: RuleScore,
        kb: KnowledgeBase,
        side: int,
        atoms: Tensor,
        /,
    ) -> Tensor:
        """The scores of the atoms of a side, the same ones at every call."""
        if side not in self._last:
            found = (
                scorers.iter_answer_derivations(self._task, side, atoms)
                if scorers.derives_by_question(self._task)
                else scorers.iter_task_derivations(self._task, atoms)
            )
            self._last |= {side: list(found)}
        last_score, last_kb, values = self._scores.get(side, (None, None, None))
        if last_score is not score or last_kb is not kb or values is None:
            values = score(kb, self._last[side], len(atoms))
            self._scores |= {side: (score, kb, values)}
        return values


if __name__ == "__main__":
    main()
