"""Ranks and ranking metrics from scores: four tie policies, MRR, Hits@k, area under the precision-recall curve.

A score is a probability p, and scores are compared by their log-odds log(p / (1 - p)): near 0 these are log p, near 1
they are -log(1 - p), so that they tell scores apart at both ends. They are quantised first (`quantise`), so that ties
are exact and do not depend on the order in which a machine adds numbers. A rank then follows from three integers
(`RankCounts`): how many candidates score better than the answer, how many score the same, and how many there are. They
add up over chunks in any order, so ranks are bit-equal however the candidates were divided. `group_metrics`
averages over relations and sides.

Axes: Q queries, L listed candidates of all queries together, N1 = N + 1, P1 = P + 1, and tie policies in the order of
`TIE_POLICIES`. Means are float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.files import Json
from funcppo.core.types import F32, F64, I64, Bool
from funcppo.kg.logic.kb import SIDE_NAMES

# nested names and numbers, as they are written to JSON
Metrics = Json

# how equal scores are ranked; the headline is the last
TIE_POLICIES = (
    "optimistic",
    "pessimistic",
    "realistic",
    "expected",
)
HITS_AT = (1, 3, 10)
SIDE_GROUPS = ("both", *SIDE_NAMES.values())
# log-odds; scores are compared after rounding to multiples of this
SCORE_GRID_STEP = 1e-4
# quantised score 1, whose log-odds are +inf: the largest integer that every reader of JSON holds
CERTAIN_SCORE = 2**53 - 1
# quantised score 0, whose log-odds are -inf, and quantised NaN, which ranks below everything: both are float64 too
ZERO_SCORE = -(2**63) + 1024
INVALID_SCORE = -(2**63)


class RankCounts(NamedTuple):
    """Numbers of better, equal and all candidates of each query; the answer is a candidate, but not an equal one."""

    n_better: I64[Tensor, "Q"]  # candidates that score more than the answer
    n_equal: I64[Tensor, "Q"]  # other candidates that score the same
    n_candidates: I64[Tensor, "Q"]  # all candidates, the answer included


def quantise(log_odds: F64[Tensor, "..."]) -> I64[Tensor, "..."]:
    """Round scores, given by their log-odds, to the grid on which they are compared.

    Returns:
      The number of the line; `ZERO_SCORE` and `CERTAIN_SCORE` for scores of 0 and 1, whose log-odds are infinite;
      `INVALID_SCORE` for NaN.
    """
    line = torch.round(log_odds.to(torch.float64) / SCORE_GRID_STEP)
    special = float(INVALID_SCORE), float(CERTAIN_SCORE), float(ZERO_SCORE)
    return line.nan_to_num(*special).to(torch.int64)


def log_score(quantised_score: int) -> float:
    """Return the natural logarithm of a nonzero quantised score, rounded to four decimals."""
    logit = quantised_score * SCORE_GRID_STEP
    log_p = min(logit, 0.0) - math.log1p(math.exp(-abs(logit)))
    return round(log_p, 4) + 0.0  # no -0.0


def probability(quantised_score: int) -> float:
    """Return the probability that a quantised score stands for."""
    if quantised_score <= ZERO_SCORE:
        return 0.0
    logit = quantised_score * SCORE_GRID_STEP
    smaller = 1.0 / (1.0 + math.exp(min(abs(logit), 700.0)))
    return smaller if logit < 0 else 1.0 - smaller


def near_boundary(
    log_odds: F64[Tensor, "..."], tolerance: float
) -> Bool[Tensor, "..."]:
    """Return whether an error of `tolerance` in its log-odds could move a score to the next line of the grid."""
    line = log_odds.to(torch.float64) / SCORE_GRID_STEP
    distance_to_half = (line - torch.floor(line) - 0.5).abs()
    return distance_to_half <= tolerance / SCORE_GRID_STEP


def rank_counts_listed(
    query_row: I64[Tensor, "L"],
    score: I64[Tensor, "L"],
    is_answer: Bool[Tensor, "L"],
    n_candidates: I64[Tensor, "Q"],
) -> tuple[RankCounts, I64[Tensor, "Q"]]:
    """Count better and equal candidates of each query from the listed ones; return the counts and the answers' scores.

    Listed candidates come in any order; each of the others scores 0 and ties at the bottom.

    Args:
      query_row: row of the query that each candidate belongs to.
      score: quantised.
      is_answer: at most one a query; an answer that is not listed scores 0 too.
      n_candidates: all candidates of each query, listed or not, its answer included.
    """
    n_queries = len(n_candidates)

    # Candidates other than the answer are scattered to a spare row, which is cut off.
    zero_scores = score.new_full(
        (n_queries + 1,), ZERO_SCORE, dtype=torch.int64
    )
    answer_row = torch.where(is_answer, query_row, n_queries)
    answer_score = torch.where(is_answer, score, ZERO_SCORE)
    answer_score = zero_scores.scatter(0, answer_row, answer_score)[:-1]

    is_other = ~is_answer
    is_better = is_other & (score > answer_score[query_row])
    is_equal = is_other & (score == answer_score[query_row])
    n_better = _count_by_query(is_better, query_row, n_queries)
    n_equal = _count_by_query(is_equal, query_row, n_queries)

    # An unlisted candidate beats only an invalid answer and ties with an answer that scores 0.
    n_unlisted = (
        n_candidates - 1 - _count_by_query(is_other, query_row, n_queries)
    )
    n_better = n_better + torch.where(answer_score < ZERO_SCORE, n_unlisted, 0)
    n_equal = n_equal + torch.where(answer_score == ZERO_SCORE, n_unlisted, 0)
    return RankCounts(n_better, n_equal, n_candidates), answer_score


def ranks(counts: RankCounts) -> F64[Tensor, "Q 4"]:
    """Compute the rank of each query's answer, from 1, under each tie policy.

    The mean rank under a random order is the middle one, so `realistic` and `expected` are equal here; they differ in
    `reciprocal_ranks` and `hits_at_k`.
    """
    first = counts.n_better.to(torch.float64) + 1
    last = first + counts.n_equal
    middle = (first + last) / 2
    return torch.stack([first, last, middle, middle], dim=1)


def harmonic_numbers(
    n: int, device: torch.device | str = "cpu"
) -> F64[Tensor, "N1"]:
    """Compute the harmonic numbers H(0) .. H(n) in float64, summed on the CPU for every device.

    H(n) = 1 + 1/2 + ... + 1/n
    """
    terms = 1.0 / torch.arange(1, n + 1, dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    return torch.cat([zero, terms.cumsum(0)]).to(device)


def reciprocal_ranks(
    counts: RankCounts, harmonics: F64[Tensor, "N1"]
) -> F64[Tensor, "Q 4"]:
    """Compute 1 / rank under each tie policy; for `expected` its exact expectation when ties are ordered at random.

        E[1/rank] = (H(b + e + 1) - H(b)) / (e + 1),    b better, e equal

    Args:
      harmonics: H(0) .. H(n) with n at least the largest `n_candidates`.
    """
    b, e = counts.n_better, counts.n_equal
    sum_over_ties = harmonics[b + e + 1] - harmonics[b]
    expected = sum_over_ties / (e + 1)
    single_ranks = ranks(counts)[:, :3]
    return torch.cat([1 / single_ranks, expected[:, None]], dim=1)


def expected_reciprocal_ranks(counts: RankCounts) -> F64[Tensor, "Q"]:
    """Compute the expectation of 1 / rank of each query when ties are ordered at random."""
    most = int(counts.n_candidates.max()) if len(counts.n_candidates) else 0
    harmonics = harmonic_numbers(most, counts.n_candidates.device)
    return reciprocal_ranks(counts, harmonics)[:, -1]


def hits_at_k(counts: RankCounts, k: int) -> F64[Tensor, "Q 4"]:
    """Return 1 where the rank is at most k, else 0, under each tie policy; for `expected` the probability of a hit.

    P[rank <= k] = min(max(k - b, 0), e + 1) / (e + 1),    b better, e equal
    """
    b = counts.n_better.to(torch.float64)
    e = counts.n_equal.to(torch.float64)
    expected = ((k - b) / (e + 1)).clamp(0.0, 1.0)
    single_ranks = ranks(counts)[:, :3]
    is_hit = (single_ranks <= k).to(torch.float64)
    return torch.cat([is_hit, expected[:, None]], dim=1)


def group_metrics(
    counts: RankCounts,
    side: I64[Tensor, "Q"],
    relation: I64[Tensor, "Q"],
    answer_provable: Bool[Tensor, "Q"],
    relation_names: Sequence[str],
) -> Metrics:
    """Compute MRR, Hits@1, 3 and 10 under all tie policies, over all queries and by relation and side, as JSON values.

    Args:
      side: `HEAD` or `TAIL`.
      relation: predicate ids, from 1.
      answer_provable: T_P derives the answer.
      relation_names: names of predicates 1, 2, ... in order.

    Returns:
      {"all": {"both": {...}, "head": {...}, "tail": {...}}, "relations": {name: {"both": {...}, ...}}}, where a group
      is {"mrr": {tie policy: value}, "hits@1": ..., "n_queries": ..., "n_tied": ..., "mean_candidates": ...,
      "ceiling": ..., "proved": the share of the expected hits among the first 10 whose answer is provable}; empty
      groups are left out.
    """
    harmonics = harmonic_numbers(
        int(counts.n_candidates.max()), counts.n_candidates.device
    )
    columns = (
        reciprocal_ranks(counts, harmonics),
        *(hits_at_k(counts, k) for k in HITS_AT),
        (hits_at_k(counts, 10)[:, -1] * answer_provable)[:, None],
        torch.ones_like(answer_provable)[:, None],
        (counts.n_equal > 0)[:, None],
        counts.n_candidates[:, None],
        answer_provable[:, None],
    )
    values = torch.cat([column.to(torch.float64) for column in columns], 1)
    sums = _sum_by_group(values, side, relation, len(relation_names)).tolist()
    overall, *by_relation = [
        {
            name: _group_to_dict(group)
            for name, group in zip(SIDE_GROUPS, groups)
            if group[-4]  # queries
        }
        for groups in sums
    ]
    relations = dict(zip(relation_names, by_relation))
    return {
        "all": overall,
        "relations": {
            name: sides for name, sides in relations.items() if sides
        },
    }


def average_precision(
    score: I64[Tensor, "L"], label: Bool[Tensor, "L"]
) -> F32[Tensor, ""]:
    """Compute the area under the precision-recall curve as a step function; each distinct score is one threshold.

        AP = sum_g (R_g - R_{g-1}) P_g,    g over distinct scores, best first

    It is what `sklearn.metrics.average_precision_score` computes and what the published Countries results report, over
    the candidates of all queries pooled. The trapezoid under the same points interpolates between them, which no
    classifier attains. NaN without a true candidate.

    Source: Davis & Goadrich 2006, ICML.
    """
    score, order = torch.sort(score, stable=True)
    is_true = label[order].to(torch.float64)
    n_true = is_true.sum()

    # Recall steps once a score: every candidate has the precision at the first position of its score, which counts the
    # candidates at that position and above.
    first = torch.searchsorted(score, score)
    n_true_from = n_true - is_true.cumsum(0) + is_true
    n_from = len(is_true) - first
    precision = n_true_from[first] / n_from
    return (is_true * precision).sum() / n_true


def _count_by_query(mask: Tensor, query_row: Tensor, n_queries: int) -> Tensor:
    """Count the candidates of each query that the mask selects."""
    zeros = mask.new_zeros(n_queries, dtype=torch.int64)
    return zeros.scatter_add(0, query_row, mask.to(torch.int64))


def _sum_by_group(
    values: Tensor, side: Tensor, relation: Tensor, n_predicates: int
) -> Tensor:
    """Sum the rows of `values` over groups, [P + 1, 3, ...]: row 0 is all relations, column 0 both sides."""
    n_sides = len(SIDE_NAMES)
    cell = (relation - 1) * n_sides + side - 1
    zeros = values.new_zeros((n_predicates * n_sides, values.shape[1]))
    sums = zeros.index_add(0, cell, values)
    by_relation_and_side = sums.unflatten(0, (n_predicates, n_sides))

    both_sides = by_relation_and_side.sum(1, keepdim=True)
    by_relation = torch.cat([both_sides, by_relation_and_side], dim=1)
    all_relations = by_relation.sum(0, keepdim=True)
    return torch.cat([all_relations, by_relation], dim=0)


def _group_to_dict(sums: list[float]) -> Metrics:
    """Divide the sums over a group's queries into its metrics, as JSON values."""
    *by_policy, n_proved_hits, n_queries, n_tied, n_candidates, n_provable = (
        sums
    )
    n_policies = len(TIE_POLICIES)
    names = ["mrr", *(f"hits@{k}" for k in HITS_AT)]
    group: Metrics = {}
    for i, name in enumerate(names):
        values = by_policy[n_policies * i : n_policies * (i + 1)]
        means = [value / n_queries for value in values]
        group[name] = dict(zip(TIE_POLICIES, means))
    return group | {
        "n_queries": int(n_queries),
        "n_tied": int(n_tied),
        "mean_candidates": n_candidates / n_queries,
        "ceiling": n_provable / n_queries,
        "proved": n_proved_hits / max(by_policy[-1], 1e-300),
    }
