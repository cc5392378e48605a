"""The ranks of the test split of a run by all its scores, and of each candidate its probability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo.core.types import F64, I64, Bool
from funcppo.kg.ranking import calibration, rank_metrics, ranking
from funcppo.kg.ranking.calibration import Bins
from funcppo.kg.ranking.ranking import (
    RankedRows,
    Ranking,
    RankingProtocol,
    ranked_sides,
    stratified_sample,
)
from funcppo.kg.run import validation
from funcppo.kg.run.run import Run
from funcppo.kg.search.task import PhaseCallback
from funcppo.kg.show.report.tables import ScoreRanks


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
    bins: dict[str, Bins]
    """Candidates by their probability, see `validation.policy_bins`; empty without queries."""


def rank_test(
    run: Run,
    max_ranked: int | None,
    on_phase: PhaseCallback,
    temperature: float | None = None,
) -> RankedSplit:
    """Rank the test split of a run against all entities, as the end of its training does.

    Args:
      max_ranked: the most queries, spread over relations; None for as many as the end of training ranks.
      temperature: of the trained policy's probabilities; None for none.

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
    bins: dict[str, list[Bins]] = {}
    auc: dict[str, float] = {}
    for name, ranked in validation.iter_rankings(
        run, queries, protocol, (run.run_config.rule_score,), on_phase
    ):
        parts.setdefault(name, []).append(ranking.ranked_rows(ranked))
        scores.setdefault(name, []).append(_scores(ranked))
        counted = validation.policy_bins(run, name, ranked, temperature)
        for state, of_state in counted.items():
            bins.setdefault(state, []).append(of_state)
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
        bins={
            state: calibration.add_bins(counted)
            for state, counted in bins.items()
        },
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


def _scores(ranked: Ranking) -> _Scores:
    """What is kept of the ranking of a part."""
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
    )


def _concatenate(parts: Sequence[_Scores]) -> _Scores:
    """The parts one after the other."""
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
    )


def _column(parts: Sequence[RankedRows], name: str) -> np.ndarray:
    """A column of the rows of all parts."""
    columns = [getattr(part, name).numpy(force=True) for part in parts]
    return np.concatenate(columns)


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
        bins={},
    )
