"""Ranks from scores: four tie policies, MRR, Hits@k and the area under the precision-recall curve.

A rank needs three integers only: how many candidates score better than the answer, how many score the same, and how
many there are. They add up over chunks in any order, so ranks are bit-equal however the candidates were cut.

Axes here: Q queries, E candidates of a query, L listed candidates of all queries together, and the tie policies
in the order of `POLICIES`. Means are float64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcppo.types import F32, I64, Bool

TIE_POLICIES = ("optimistic", "pessimistic", "realistic", "expected")  # the headline is the last
HITS_AT = (1, 3, 10)
SIDE_GROUPS = ("both", "head", "tail")  # side 1 asks for the first argument, side 2 for the second
SCORE_GRID_STEP = 1e-4  # nats; scores closer than this are one score
ZERO_SCORE = torch.iinfo(torch.int64).min + 1  # the score 0, whose logarithm is -inf
INVALID_SCORE = torch.iinfo(torch.int64).min  # NaN or +inf: ranked below everything, for the caller to report


class RankCounts(NamedTuple):
    """What a query's rank is computed from; the answer itself is a candidate, neither better nor equal."""

    n_better: I64[Tensor, "Q"]  # candidates that score more than the answer
    n_equal: I64[Tensor, "Q"]  # other candidates that score the same
    n_candidates: I64[Tensor, "Q"]  # all of them, the answer included


class GroupedMetrics(NamedTuple):
    """Means over groups of queries: row 0 is every relation, column 0 both sides; NaN where a group is empty."""

    mrr: F32[Tensor, "P1 3 4"]  # by tie policy
    hits: F32[Tensor, "P1 3 3 4"]  # at HITS_AT, by tie policy
    n_queries: F32[Tensor, "P1 3"]
    n_tied: F32[Tensor, "P1 3"]  # queries whose answer shares its score
    mean_candidates: F32[Tensor, "P1 3"]  # mean number of candidates
    ceiling: F32[Tensor, "P1 3"]  # share of queries whose answer is provable


def quantise(log_score: F32[Tensor, "..."]) -> I64[Tensor, "..."]:
    """The number of the nearest line of the 1e-4 grid, ties to even; order and equality are exact from here on.

    A score of 0, whose logarithm is -inf, is `BOTTOM`; NaN and +inf are `NOT_A_SCORE`.

    Args:
      score_log: natural logarithm of a score.
    """
    finite = torch.isfinite(log_score)
    line = torch.round(torch.where(finite, log_score, 0.0).to(torch.float64) / SCORE_GRID_STEP).to(torch.int64)
    return torch.where(finite, line, torch.where(log_score == -torch.inf, ZERO_SCORE, INVALID_SCORE))


def near_boundary(log_score: F32[Tensor, "..."], tolerance: float) -> Bool[Tensor, "..."]:
    """Whether an error of `tolerance` nats could move a score to the next line: such queries are counted."""
    x = log_score.to(torch.float64) / SCORE_GRID_STEP
    return (x - torch.floor(x) - 0.5).abs() <= tolerance / SCORE_GRID_STEP


def rank_counts_dense(
    answer: I64[Tensor, "Q"], other: I64[Tensor, "Q E"], is_candidate: Bool[Tensor, "Q E"]
) -> RankCounts:
    """Counts of a dense table of quantised scores.

    Args:
      other: scores of the answer's competitors, the answer itself not among them.
      valid: which entries are candidates at all (filtered ones are not).
    """
    better, equal = is_candidate & (other > answer[:, None]), is_candidate & (other == answer[:, None])
    return RankCounts(n_better=better.sum(1), n_equal=equal.sum(1), n_candidates=is_candidate.sum(1) + 1)


def rank_counts_listed(
    query_row: I64[Tensor, "L"], score: I64[Tensor, "L"], is_answer: Bool[Tensor, "L"], n_candidates: I64[Tensor, "Q"]
) -> RankCounts:
    """Counts of listed candidates, in any order; every candidate not listed scores 0 and ties at the bottom.

    Args:
      query: row of the query that each candidate belongs to.
      score: quantised.
      is_answer: at most one a query; an answer not listed scores 0 too.
      n_candidates: all candidates of each query, listed or not, its answer included.
    """
    n_queries = len(n_candidates)
    spare = torch.full((n_queries + 1,), ZERO_SCORE, dtype=torch.int64, device=score.device)
    answer = spare.scatter(0, torch.where(is_answer, query_row, n_queries), torch.where(is_answer, score, ZERO_SCORE))[
        :-1
    ]
    count = lambda mask: torch.zeros_like(n_candidates).scatter_add(0, query_row, (mask & ~is_answer).to(torch.int64))
    unlisted = n_candidates - 1 - count(torch.ones_like(is_answer))
    return RankCounts(
        n_better=count(score > answer[query_row]) + torch.where(answer < ZERO_SCORE, unlisted, 0),
        n_equal=count(score == answer[query_row]) + torch.where(answer == ZERO_SCORE, unlisted, 0),
        n_candidates=n_candidates,
    )


def ranks(counts: RankCounts) -> F32[Tensor, "Q 4"]:
    """The rank, from 1, by tie policy; `expected` is the mean rank under a random order, which is `realistic`."""
    first = counts.n_better.to(torch.float64) + 1
    last = first + counts.n_equal
    middle = (first + last) / 2
    return torch.stack([first, last, middle, middle], dim=1)


def harmonic_numbers(n: int, device: torch.device | str = "cpu") -> F32[Tensor, "N1"]:
    """The harmonic numbers H(0) .. H(n), H(n) = 1 + 1/2 + ... + 1/n, in float64; summed on the CPU for every device."""
    terms = 1.0 / torch.arange(1, n + 1, dtype=torch.float64)
    return torch.cat([torch.zeros(1, dtype=torch.float64), terms.cumsum(0)]).to(device)


def reciprocal_ranks(counts: RankCounts, harmonics: F32[Tensor, "N1"]) -> F32[Tensor, "Q 4"]:
    """1 / rank by tie policy; for `expected` its exact expectation when ties are ordered at random:

        E[1/rank] = (H(b + e + 1) - H(b)) / (e + 1),    b better, e equal

    Args:
      harmonics: H(0) .. H(n) with n at least the largest `n_candidates`.
    """
    b, e = counts.n_better, counts.n_equal
    expected = (harmonics[b + e + 1] - harmonics[b]) / (e + 1)
    return torch.cat([1 / ranks(counts)[:, :3], expected[:, None]], dim=1)


def hits_at_k(counts: RankCounts, k: int) -> F32[Tensor, "Q 4"]:
    """Whether the rank is at most k, by tie policy; for `expected` the probability of it:

    P[rank <= k] = min(max(k - b, 0), e + 1) / (e + 1),    b better, e equal
    """
    b, e = counts.n_better.to(torch.float64), counts.n_equal.to(torch.float64)
    expected = ((k - b) / (e + 1)).clamp(0.0, 1.0)
    return torch.cat([(ranks(counts)[:, :3] <= k).to(torch.float64), expected[:, None]], dim=1)


def compute_grouped_metrics(
    counts: RankCounts,
    side: I64[Tensor, "Q"],
    relation: I64[Tensor, "Q"],
    answer_provable: Bool[Tensor, "Q"],
    harmonics: F32[Tensor, "N1"],
    n_predicates: int,
) -> GroupedMetrics:
    """MRR, Hits@1, 3 and 10 under the four tie policies, over all queries, by relation and by side.

    Args:
      side: 1 where the head was asked for, 2 where the tail was.
      relation: predicate ids, from 1 to `n_predicates`.
      provable: whether the answer is provable at all.
    """
    at_k = torch.stack([hits_at_k(counts, k) for k in HITS_AT], dim=1)
    parts = (
        reciprocal_ranks(counts, harmonics),
        at_k.flatten(1),
        torch.ones_like(answer_provable)[:, None],
        (counts.n_equal > 0)[:, None],
        counts.n_candidates[:, None],
        answer_provable[:, None],
    )
    sums = _group_sums(torch.cat([p.to(torch.float64) for p in parts], dim=1), side, relation, n_predicates)
    n_queries, n_tied = sums[..., 16], sums[..., 17]
    mean = sums / n_queries[..., None]
    return GroupedMetrics(
        mrr=mean[..., :4],
        hits=mean[..., 4:16].unflatten(-1, (3, 4)),
        n_queries=n_queries,
        n_tied=n_tied,
        mean_candidates=mean[..., 18],
        ceiling=mean[..., 19],
    )


def grouped_metrics_to_dict(grouped: GroupedMetrics, relation_names: list[str]) -> dict[str, Any]:
    """A summary for JSON, without empty groups: {"all": {"both": {...}, "head": ..., "tail": ...}, "relations": {...}}.

    Args:
      relation_names: of predicates 1, 2, ... in order.
    """
    fields = {name: value.tolist() for name, value in grouped._asdict().items()}
    rows = [_sides(fields, row) for row in range(len(relation_names) + 1)]
    return {"all": rows[0], "relations": {name: r for name, r in zip(relation_names, rows[1:]) if r}}


def average_precision(score: I64[Tensor, "L"], label: Bool[Tensor, "L"]) -> F32[Tensor, ""]:
    """The area under the precision-recall curve as a step function, candidates of one score being one threshold:

        AP = sum_g (R_g - R_{g-1}) P_g,    g over distinct scores, best first

    It is what `sklearn.metrics.average_precision_score` computes and what the published Countries results report, over
    the candidates of all queries pooled. The trapezoid under the same points interpolates between them, which no
    classifier attains (Davis & Goadrich 2006, ICML). NaN without a true candidate.
    """
    score, order = torch.sort(score, stable=True)
    true = label[order].to(torch.float64)
    first = torch.searchsorted(score, score)  # of the candidates that score the same
    precision = (true.sum() - true.cumsum(0) + true)[first] / (len(true) - first)
    return (true * precision).sum() / true.sum()


def _group_sums(values: Tensor, side: Tensor, relation: Tensor, n_predicates: int) -> Tensor:
    """Sums of the rows of `values`, [P + 1, 3, ...]: row 0 over relations, column 0 over sides."""
    cells = torch.zeros((n_predicates * 2, values.shape[1]), dtype=values.dtype, device=values.device)
    cells = cells.index_add(0, (relation - 1) * 2 + side - 1, values).unflatten(0, (n_predicates, 2))
    by_side = torch.cat([cells.sum(1, keepdim=True), cells], dim=1)
    return torch.cat([by_side.sum(0, keepdim=True), by_side], dim=0)


def _sides(fields: dict[str, Any], row: int) -> dict[str, Any]:
    return {name: _group(fields, row, s) for s, name in enumerate(SIDE_GROUPS) if fields["n_queries"][row][s]}


def _group(fields: dict[str, Any], row: int, side: int) -> dict[str, Any]:
    value = {name: table[row][side] for name, table in fields.items()}
    ranked = {"mrr": value["mrr"]} | {f"hits@{k}": h for k, h in zip(HITS_AT, value["hits"])}
    counted = {name: int(value[name]) for name in ("n_queries", "n_tied")}
    means = {name: value[name] for name in ("mean_candidates", "ceiling")}
    return {name: dict(zip(TIE_POLICIES, by_policy)) for name, by_policy in ranked.items()} | counted | means
