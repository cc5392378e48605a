"""The ranks of the test split of a run by all its scores, and of each candidate its probability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo.evaluation import rank_metrics, ranking
from funcppo.evaluation.ranking import (
    RankedRows,
    Ranking,
    RankingProtocol,
    ranked_sides,
    stratified_sample,
)
from funcppo.experiment import validation
from funcppo.experiment.run import EVIDENCE_SCORE, Run
from funcppo.prover.task import PhaseCallback
from funcppo.report import tables
from funcppo.report.tables import Bins, ScoreRanks
from funcppo.types import F64, I64, Bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedSplit:
    """Ranked queries; a row is a query and a side, all queries of a side after each other."""

    queries: I64[Tensor, "Q0 W"]
    """The queries."""
    side: I64[np.ndarray, "Q"]
    """The argument that is asked for."""
    query_row: I64[np.ndarray, "Q"]
    """Row of the query in `queries`."""
    provable: Bool[np.ndarray, "Q"]
    """Whether the rules derive the answer."""
    ranked: dict[str, ScoreRanks]
    """By name of the score, the trained policy last; empty without queries."""
    n_better: I64[np.ndarray, "Q"]
    """Candidates that score more than the answer under the trained policy."""
    n_candidates: I64[np.ndarray, "Q"]
    """All candidates."""
    answer_score: I64[np.ndarray, "Q"]
    """Quantised score of the answer under the trained policy."""
    bins: Bins
    """Candidates by their probability under the trained policy."""


def rank_test(
    run: Run, max_ranked: int | None, on_phase: PhaseCallback
) -> RankedSplit:
    """Rank the test split of a run against all entities, as the end of its training does.

    Args:
      max_ranked: the most queries, spread over relations; None for as many as the end of training ranks.

    Raises:
      ValueError: a query cannot be ranked (see `ranking.check_split`).
    """
    test = run.task.dataset.test
    rows = (
        validation.test_rows(run)
        if max_ranked is None
        else stratified_sample(test, max_ranked)
    )
    queries = test[rows]
    if not len(queries):
        return _no_queries(torch.from_numpy(queries))

    protocol = RankingProtocol(sides=ranked_sides(run.task))
    trained = list(validation.policies(run))[-1]
    parts: dict[str, list[RankedRows]] = {}
    scores: dict[str, list[_Scores]] = {}
    auc: dict[str, float] = {}
    for name, ranked in validation.iter_rankings(
        run, queries, protocol, (run.run_config.rule_score,), on_phase
    ):
        parts.setdefault(name, []).append(ranking.ranked_rows(ranked))
        scores.setdefault(name, []).append(
            _scores(run, ranked, with_bins=name == trained)
        )
        if run.task.is_countries:  # which are ranked in one part
            auc[name] = ranking.auc_pr(ranked)

    whole = {name: _concatenate(of_name) for name, of_name in scores.items()}
    last = whole[trained]
    side = _column(parts[trained], "side")
    # The rows of each part are ordered by side and query, and so shall all be.
    order = np.lexsort((last.query_row, side))
    return RankedSplit(
        queries=last.queries,
        side=side[order],
        query_row=last.query_row[order],
        provable=_column(parts[trained], "answer_provable")[order],
        ranked={
            name: ScoreRanks(
                rank=whole[name].rank[order],
                reciprocal_rank=whole[name].reciprocal[order],
                metrics=validation.summarise_parts(run, of_name, auc.get(name)),
            )
            for name, of_name in parts.items()
        },
        n_better=last.n_better[order],
        n_candidates=last.n_candidates[order],
        answer_score=last.answer_score[order],
        bins=last.bins,
    )


class _Scores(NamedTuple):
    """What is kept of the ranking of a part."""

    queries: I64[Tensor, "Q0 W"]
    query_row: I64[np.ndarray, "Q"]
    rank: F64[np.ndarray, "Q"]
    reciprocal: F64[np.ndarray, "Q"]
    n_better: I64[np.ndarray, "Q"]
    n_candidates: I64[np.ndarray, "Q"]
    answer_score: I64[np.ndarray, "Q"]
    bins: Bins


def _scores(run: Run, ranked: Ranking, *, with_bins: bool) -> _Scores:
    """What is kept of the ranking of a part.

    Args:
      with_bins: whether candidates are counted by their probability.
    """
    probability = np.zeros(0)
    is_answer = np.zeros(0, dtype=bool)
    if with_bins:
        is_evidence = run.score == EVIDENCE_SCORE
        probability = probabilities(ranked, among_candidates=is_evidence)
        is_answer = ranked.is_answer.numpy(force=True)
    counts = ranked.counts
    reciprocal = rank_metrics.expected_reciprocal_ranks(counts)
    return _Scores(
        queries=ranked.queries.long().cpu(),
        query_row=ranked.query_row.numpy(force=True),
        rank=rank_metrics.ranks(counts)[:, -1].numpy(force=True),
        reciprocal=reciprocal.numpy(force=True),
        n_better=counts.n_better.numpy(force=True),
        n_candidates=counts.n_candidates.numpy(force=True),
        answer_score=ranked.answer_score.numpy(force=True),
        bins=tables.bin_probabilities(probability, is_answer),
    )


def _concatenate(parts: Sequence[_Scores]) -> _Scores:
    """The parts one after the other; candidates are added up."""
    sizes = np.cumsum([0, *(len(part.queries) for part in parts)])

    def concatenate(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    return _Scores(
        queries=torch.cat([part.queries for part in parts]),
        query_row=np.concatenate(
            [part.query_row + n for part, n in zip(parts, sizes)]
        ),
        rank=concatenate("rank"),
        reciprocal=concatenate("reciprocal"),
        n_better=concatenate("n_better"),
        n_candidates=concatenate("n_candidates"),
        answer_score=concatenate("answer_score"),
        bins=Bins(
            *(
                np.sum(column, axis=0)
                for column in zip(*(p.bins for p in parts))
            )
        ),
    )


def _column(parts: Sequence[RankedRows], name: str) -> np.ndarray:
    """A column of the rows of all parts."""
    columns = [getattr(part, name).numpy(force=True) for part in parts]
    return np.concatenate(columns)


def probabilities(
    ranked: Ranking, *, among_candidates: bool
) -> F64[np.ndarray, "L"]:
    """The probability of each listed candidate.

    Args:
      among_candidates: scores are logits, and the probabilities of the candidates of a row add up to 1; otherwise a
        score is a probability itself.
    """
    is_finite = (ranked.listed_score > rank_metrics.ZERO_SCORE) & (
        ranked.listed_score < rank_metrics.CERTAIN_SCORE
    )
    logits = ranked.listed_score.double() * rank_metrics.SCORE_GRID_STEP
    if not among_candidates:
        certain = (ranked.listed_score > 0).double()
        values = torch.where(is_finite, torch.sigmoid(logits), certain)
        return values.numpy(force=True)

    # A candidate without evidence has the logit -inf.
    logits = torch.where(is_finite, logits, -torch.inf)
    row, size = ranked.listed_row, len(ranked.query_row)
    largest = logits.new_full((size,), -torch.inf)
    largest = largest.scatter_reduce(0, row, logits, "amax")[row]
    weight = torch.exp(logits - torch.where(is_finite, largest, 0.0))
    total = torch.zeros_like(weight[:1]).expand(size)
    total = total.scatter_add(0, row, weight)[row]
    return (weight / total.clamp_min(1e-300)).numpy(force=True)


def _no_queries(queries: Tensor) -> RankedSplit:
    """The ranks of no queries."""
    nothing = np.zeros(0, dtype=np.int64)
    return RankedSplit(
        queries=queries.long(),
        side=nothing,
        query_row=nothing,
        provable=nothing.astype(bool),
        ranked={},
        n_better=nothing,
        n_candidates=nothing,
        answer_score=nothing,
        bins=tables.bin_probabilities(
            nothing.astype(np.float64), nothing.astype(bool)
        ),
    )
