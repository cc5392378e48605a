"""A split ranked part by part: what a long evaluation needs to show how far it is, to stop and to go on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from funcppo.data import format_atom, format_rule
from funcppo.evaluation import rank_metrics, ranking, result_log
from funcppo.evaluation import ranking as ranking_
from funcppo.evaluation.rank_metrics import SCORE_GRID_STEP, ZERO_SCORE
from funcppo.evaluation.ranking import Ranking, RankingProtocol
from funcppo.evaluation.result_log import Record
from funcppo.logic import proof
from funcppo.logic.proof import Proof
from funcppo.prover.task import ProverTask

FIRST_CHUNK_QUERIES, TARGET_CHUNK_SECONDS = 256, 10.0  # queries of the first part, and how long a part is to take
MAX_CHUNK_CANDIDATES = 1 << 20  # candidates that a part may list, so that listing them takes little memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluator:
    """How queries are judged; a value of the host."""

    task: ProverTask
    protocol: RankingProtocol
    scorer: ranking_.Scorer
    prove: Callable[[Tensor], Proof | None]  # of an answer that was proved; None where no proof is to be shown
    proof_threshold: float  # a score up to here is of no proof
    all_scores: bool  # records hold the scores of all candidates that were scored


def evaluate_chunks(evaluator: Evaluator, split: np.ndarray, rows: np.ndarray) -> Iterator[list[Record]]:
    """The records of some queries of a split, a part at a time.

    What a record says does not depend on the parts: corruptions are keyed by row, scores by atom.

    Args:
      rows: of the split.
    """
    first, size = 0, FIRST_CHUNK_QUERIES
    while first < len(rows):
        start = time.perf_counter()
        part = rows[first : first + size]
        ranked = ranking.rank_split(evaluator.task, split[part], evaluator.scorer, evaluator.protocol, part)
        yield _records(evaluator, ranked, part)
        seconds = max(time.perf_counter() - start, 1e-3)
        most = size * MAX_CHUNK_CANDIDATES / max(len(ranked.listed_score), 1)
        first, size = first + size, max(1, int(min(size * 4, size * TARGET_CHUNK_SECONDS / seconds, most)))


def _records(judge: Evaluator, ranked: Ranking, rows: np.ndarray) -> list[Record]:
    """A record a query and side, both sides of a query together."""
    proofs: dict[int, Proof | None] = {}
    found, near = [], set(ranked.listed_row[ranked.near_boundary].tolist())
    ranks = _ranks(ranked)
    for at, others in enumerate(_others(ranked)):
        query = int(ranked.query_row[at])
        record = {"query": int(rows[query])} | _record(judge, ranked, at) | {"rank": ranks[at]}
        if record["status"] == "proved" and query not in proofs:
            proofs[query] = judge.prove(ranked.queries[query])
        record |= {"scored": len(others) + (record["line"] is not None), "near_grid": at in near}
        record |= {"others": others} if judge.all_scores or judge.task.is_countries else {}
        proved = proofs.get(query) if record["status"] == "proved" else None
        found.append(record | {"proof": _shown(judge.task, proved)})
    return sorted(found, key=lambda record: record["query"])


def _record(judge: Evaluator, ranked: Ranking, at: int) -> Record:
    """What is known of the answer to one query on one side."""
    dataset = judge.task.dataset
    atom = ranked.queries[ranked.query_row[at]].numpy(force=True)
    better, equal, candidates = (int(column[at]) for column in ranked.counts)
    line = int(ranked.answer_score[at]) if ranked.answer_score[at] > ZERO_SCORE else None
    score = None if line is None else round(line * SCORE_GRID_STEP, 4)
    provable = bool(ranked.answer_provable[at])
    proved = provable and score is not None and score > judge.proof_threshold
    return {
        "side": result_log.SIDE_NAMES[int(ranked.side[at])],
        "relation": dataset.predicates[int(atom[0]) - 1],
        "atom": format_atom(dataset, atom),
        "better": better,
        "equal": equal,
        "candidates": candidates,
        "provable": provable,
        "status": "proved" if proved else "lost" if provable else "refuted",
        "log_score": score,
        "line": line,  # of the grid on which scores are compared
    }


def _ranks(ranked: Ranking) -> list[dict[str, float]]:
    """The rank under the three policies that have one, and what `expected` counts: the mean of 1 / rank."""
    harmonics = rank_metrics.harmonic_numbers(int(ranked.counts.n_candidates.max()), ranked.side.device)
    rank, reciprocal = rank_metrics.ranks(ranked.counts), rank_metrics.reciprocal_ranks(ranked.counts, harmonics)
    rows = torch.cat([rank[:, :3], reciprocal[:, 3:]], 1).tolist()
    return [dict(zip(("optimistic", "pessimistic", "realistic", "reciprocal"), row)) for row in rows]


def _others(ranked: Ranking) -> list[list[int | None]]:
    """The grid lines of the candidates that were scored beside each answer, best first, None for a score of 0."""
    found: list[list[int]] = [[] for _ in range(len(ranked.query_row))]
    other = ~ranked.is_answer
    for row, line in zip(ranked.listed_row[other].tolist(), ranked.listed_score[other].tolist()):
        found[row].append(line)
    return [[line if line > ZERO_SCORE else None for line in sorted(lines, reverse=True)] for lines in found]


def _shown(ready: ProverTask, found: Proof | None) -> dict | None:
    if found is None:
        return None
    dataset = ready.dataset
    names = (
        (lambda goal: format_atom(dataset, np.array(goal))),
        (lambda rule: format_rule(dataset, dataset.rules[rule])),
    )
    return json.loads(proof.to_json(found, *names))
