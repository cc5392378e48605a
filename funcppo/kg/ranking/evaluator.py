"""Evaluation of a split query by query, with a record for each query and side.

`evaluate_queries` ranks a second's work at a time and yields the records of each query as they are made, so that a long
evaluation can show its progress, be interrupted and be resumed (`result_log` writes, reads and summarises the records).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from funcppo.core.types import I64
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.rules import format_atom, proof_names
from funcppo.kg.logic import proof
from funcppo.kg.logic.proof import Proof
from funcppo.kg.logic.triple_index import SIDE_NAMES
from funcppo.kg.ranking import explain, rank_metrics, ranking, scoring
from funcppo.kg.ranking.candidates import RankingProtocol
from funcppo.kg.ranking.rank_metrics import ZERO_SCORE
from funcppo.kg.ranking.ranking import Ranking
from funcppo.kg.ranking.result_log import Record
from funcppo.kg.scores.score import Score
from funcppo.kg.search.task import ProverTask

# Queries are ranked in chunks: scoring many candidates at once is fast, and what is ranked together is lost together
# when the process is killed.
TARGET_CHUNK_SECONDS = 1.0
# listed candidates of a chunk, which bound its memory
MAX_CHUNK_CANDIDATES = 1 << 20
MAX_CHUNK_GROWTH = 4  # factor from one chunk to the next
# queries of a chunk whose answers are proved together, before the first of their records is yielded
PROOF_QUERIES = 256
# Where processes share a split, they take windows of it: candidates of one, and windows of a split at least.
WINDOW_CANDIDATES = 1 << 15
# the same where queries derive their own answers: a window makes as many joins whether it has few queries or many
QUESTION_WINDOW_CANDIDATES = 1 << 19
MIN_WINDOWS = 64
# tie policies under which a query has one rank
RANK_POLICIES = rank_metrics.TIE_POLICIES[:3]


class ProofFinder(Protocol):
    """Finds proofs of answers that were proved."""

    def __call__(self, atoms: I64[Tensor, "n W"], /) -> list[Proof | None]:
        """A proof of each atom; None where no proof is to be recorded."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluator:
    """How queries are ranked and what is recorded of them."""

    task: ProverTask
    protocol: RankingProtocol
    score: Score
    # finds the proofs of proved answers; None where records hold no proofs and no terms of scores
    prove: ProofFinder | None
    # records hold the scores of all candidates that were scored
    all_scores: bool

    @property
    def min_chunk_queries(self) -> int:
        """The fewest queries that are ranked together: to collect their evidence has a cost of its own."""
        return scoring.MIN_CHUNK_QUERIES if self.score.facts else 1


def evaluate_queries(
    evaluator: Evaluator, split: np.ndarray, rows: np.ndarray
) -> Iterator[list[Record]]:
    """Rank queries of a split and yield the records of one query at a time, a record for each side.

    Records do not depend on what is ranked together: corruptions are sampled by the query's row, scores depend on the
    atom and the side alone.

    Args:
      split: atoms [n, W].
      rows: rows of the split to rank.

    Raises:
      ValueError: before the first query is ranked, if a query cannot be ranked (see `ranking.check_split`).
    """
    ranking.check_split(evaluator.task, split[rows], evaluator.protocol)
    start, size = 0, evaluator.min_chunk_queries
    while start < len(rows):
        start_time = time.perf_counter()
        chunk = rows[start : start + size]
        ranked = ranking.rank_split(
            evaluator.task,
            split[chunk],
            evaluator.score,
            evaluator.protocol,
            chunk,
        )
        seconds = time.perf_counter() - start_time
        yield from _iter_records(evaluator, ranked, chunk)

        start += size
        size = _next_chunk_size(size, seconds, len(ranked.listed_score))
        size = max(size, evaluator.min_chunk_queries)


def plan_windows(
    evaluator: Evaluator, split: np.ndarray, rows: np.ndarray
) -> list[np.ndarray]:
    """Cut queries of a split into windows that are ranked together, whoever ranks them.

    The windows depend on the queries and their candidates alone, not on the number of processes or their speed.

    Args:
      split: atoms [n, W].
      rows: rows of the split to rank.

    Raises:
      ValueError: a query cannot be ranked (see `ranking.check_split`).
    """
    ranking.check_split(evaluator.task, split[rows], evaluator.protocol)
    n_candidates = ranking.estimate_candidates(
        evaluator.task, split[rows], evaluator.protocol
    )
    per_query = max(n_candidates // max(len(rows), 1), 1)
    for_sharing = -(-len(rows) // MIN_WINDOWS)
    most = WINDOW_CANDIDATES
    if evaluator.task.answers_plan is not None:
        most = QUESTION_WINDOW_CANDIDATES
    size = max(1, min(most // per_query, for_sharing))
    size = max(size, evaluator.min_chunk_queries)
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def rank_window(
    evaluator: Evaluator, split: np.ndarray, rows: np.ndarray
) -> list[list[Record]]:
    """The records of queries that are ranked together, as `evaluate_queries` yields them.

    Args:
      split: atoms [n, W].
      rows: rows of the split, one of the windows of `plan_windows`.
    """
    ranked = ranking.rank_split(
        evaluator.task,
        split[rows],
        evaluator.score,
        evaluator.protocol,
        rows,
    )
    return list(_iter_records(evaluator, ranked, rows))


def _next_chunk_size(size: int, seconds: float, n_listed: int) -> int:
    """The size of the next chunk, after one of `size` queries: as long as the target, within the candidate limit.

    Args:
      n_listed: candidates that the last chunk listed.
    """
    for_target_time = size * TARGET_CHUNK_SECONDS / max(seconds, 1e-3)
    for_max_candidates = size * MAX_CHUNK_CANDIDATES / max(n_listed, 1)
    return max(
        1,
        int(min(size * MAX_CHUNK_GROWTH, for_target_time, for_max_candidates)),
    )


def _iter_records(
    evaluator: Evaluator, ranked: Ranking, rows: np.ndarray
) -> Iterator[list[Record]]:
    """Yield the records of each query in the order of `rows`, one for each side."""
    by_query = _records_without_proofs(evaluator, ranked, rows)
    order = np.argsort(rows, kind="stable").tolist()
    for start in range(0, len(order), PROOF_QUERIES):
        queries = order[start : start + PROOF_QUERIES]
        answers = ranked.queries[queries]
        records = [by_query[query] for query in queries]
        records = _with_other_facts(evaluator, records, answers)
        yield from _with_proofs(evaluator, records, answers)


def _records_without_proofs(
    evaluator: Evaluator, ranked: Ranking, rows: np.ndarray
) -> list[list[Record]]:
    """The records of each query, one for each side."""
    near_boundary = set(ranked.listed_row[ranked.near_boundary].tolist())
    ranks = _ranks_by_policy(ranked)
    expected_reciprocal = rank_metrics.expected_reciprocal_ranks(
        ranked.counts
    ).tolist()
    other_scores = _other_scores(ranked)
    with_scores = evaluator.all_scores or evaluator.task.is_countries

    records: list[list[Record]] = [[] for _ in rows]
    for i, query in enumerate(ranked.query_row.tolist()):
        record: Record = {"query_row": int(rows[query])}
        record |= _answer_record(evaluator, ranked, i)
        record["rank"] = ranks[i]
        record["reciprocal_rank"] = expected_reciprocal[i]
        is_scored = record["quantised_score"] is not None
        record["n_scored"] = len(other_scores[i]) + is_scored
        record["near_boundary"] = i in near_boundary
        if with_scores:
            record["other_quantised_scores"] = other_scores[i]
        records[query].append(record)
    return records


def _with_proofs(
    evaluator: Evaluator,
    records: list[list[Record]],
    answers: I64[Tensor, "Q W"],
) -> Iterator[list[Record]]:
    """The records of queries with a proof of each answer, which its sides have in common, where it was proved."""
    is_proved = [
        any(record["status"] == "proved" for record in sides)
        for sides in records
    ]
    proved_answers = answers[is_proved]
    proofs = iter([None] * len(proved_answers))
    if evaluator.prove is not None and len(proved_answers):
        proofs = iter(evaluator.prove(proved_answers))
    for sides, proved in zip(records, is_proved):
        found = next(proofs) if proved else None
        fields = found and _proof_to_dict(evaluator.task.dataset, found)
        yield [
            {**side, "proof": fields if side["status"] == "proved" else None}
            for side in sides
        ]


def _with_other_facts(
    evaluator: Evaluator,
    records: list[list[Record]],
    answers: I64[Tensor, "Q W"],
) -> list[list[Record]]:
    """The records of queries with what other facts add to each proved answer, by a score that reads them; else null."""
    task, score = evaluator.task, evaluator.score
    if "other-facts" not in score.needs or evaluator.prove is None:
        return records
    by_side: list[list[Record]] = []
    for place, side in enumerate(evaluator.protocol.sides):
        of_side = [{**sides[place], "other_facts": None} for sides in records]
        is_proved = [record["status"] == "proved" for record in of_side]
        proved = answers[is_proved]
        terms = explain.explain_atoms(task, score, proved, side)
        found = iter(zip(proved.tolist(), terms, strict=True))
        for record, p in zip(of_side, is_proved):
            if p:
                atom, (term,) = next(found)
                record["other_facts"] = explain.other_facts_json(
                    task.dataset, atom, side, term
                )
        by_side.append(of_side)
    return [list(sides) for sides in zip(*by_side)]


def _answer_record(evaluator: Evaluator, ranked: Ranking, i: int) -> Record:
    """The part of a record that describes the answer of row i, its score and its rank counts."""
    dataset = evaluator.task.dataset
    atom = ranked.queries[ranked.query_row[i]].numpy(force=True)
    quantised_score, log_score = None, None
    if ranked.answer_score[i] > ZERO_SCORE:
        quantised_score = int(ranked.answer_score[i])
        log_score = rank_metrics.log_score(quantised_score)

    answer_provable = bool(ranked.answer_provable[i])
    return {
        "side": SIDE_NAMES[int(ranked.side[i])],
        "relation": dataset.predicates[int(atom[0]) - 1],
        "atom": format_atom(dataset, atom),
        "n_better": int(ranked.counts.n_better[i]),
        "n_equal": int(ranked.counts.n_equal[i]),
        "n_candidates": int(ranked.counts.n_candidates[i]),
        "answer_provable": answer_provable,
        "status": _answer_status(
            answer_provable, log_score, evaluator.score.proof_threshold
        ),
        "log_score": log_score,
        "quantised_score": quantised_score,
    }


def _answer_status(
    answer_provable: bool, log_score: float | None, proof_threshold: float
) -> str:
    """The status of an answer: refuted, proved, or missed if it is provable but the search did not find a proof."""
    if not answer_provable:
        return "refuted"
    if log_score is not None and log_score > proof_threshold:
        return "proved"
    return "missed"


def _ranks_by_policy(ranked: Ranking) -> list[dict[str, float]]:
    """The rank of each row under the tie policies that have one."""
    ranks = rank_metrics.ranks(ranked.counts)[:, : len(RANK_POLICIES)].tolist()
    return [dict(zip(RANK_POLICIES, row)) for row in ranks]


def _other_scores(ranked: Ranking) -> list[list[int | None]]:
    """The quantised scores of each row's listed candidates other than the answer, best first; None for a score of 0."""
    scores: list[list[int]] = [[] for _ in range(len(ranked.query_row))]
    is_other = ~ranked.is_answer
    for row, score in zip(
        ranked.listed_row[is_other].tolist(),
        ranked.listed_score[is_other].tolist(),
    ):
        scores[row].append(score)
    return [
        [_none_if_zero(score) for score in sorted(row_scores, reverse=True)]
        for row_scores in scores
    ]


def _none_if_zero(score: int) -> int | None:
    """A quantised score for JSON, None for a score of 0."""
    return score if score > ZERO_SCORE else None


def _proof_to_dict(dataset: Dataset, answer_proof: Proof) -> dict[str, object]:
    """A proof as JSON values, with the names of the data set."""
    return json.loads(proof.to_json(answer_proof, *proof_names(dataset)))
