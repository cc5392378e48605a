"""Filtered ranking of the queries of a split under a score.

`rank_split` ranks queries of a task and returns a `Ranking`: the rank counts of every query and every score behind
them. `list_split` lists their candidates once, and `rank_listed` ranks these by any number of scores. `candidates`
lists what an answer is ranked among, `rank_metrics.rank_counts_listed` counts the candidates that score higher or the
same, and `rank_metrics.ranks` makes a rank of these counts, by each rule for ties.
`summarise_ranking` turns all into MRR, Hits@k and the rest; `summarise_counts` does so from the counts alone.

Each distinct atom is scored once, whatever the number of queries that it is a candidate of, or once for each side where
its score depends on the side. Candidates that T_P does not derive score 0 and tie at the bottom, so scoring the
provable ones gives the same ranks as scoring every entity (for every score but `greedy`, whose protocol sets
`score_unprovable`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo.core.types import F64, I32, I64, Bool
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.kb import KBSizes
from funcppo.kg.logic.triple_index import HEAD, TAIL, FilterIndex
from funcppo.kg.ranking import rank_metrics, scoring
from funcppo.kg.ranking.candidates import (
    CandidateTable,
    RankingProtocol,
    check_queries,
    list_candidates,
)
from funcppo.kg.ranking.rank_metrics import Metrics, RankCounts
from funcppo.kg.scores.evidence import FactIndex
from funcppo.kg.scores.score import Score
from funcppo.kg.search.slot_scheduler import ProgressCallback, ignore_progress
from funcppo.kg.search.task import ProverTask, with_answers

# Error of the log-odds of a score in float32: its difference between batch shapes, devices and compilers.
LOG_ODDS_TOLERANCE = 4e-6
# queries whose candidates are counted for an estimate of the work
ESTIMATE_QUERIES = 100
# log-odds of distinct atoms as answers about a side
ScoreAtoms = Callable[[Tensor, int], Tensor]
HEADLINE_METRICS = ("mrr", "hits@1", "hits@3", "hits@10")


class Ranking(NamedTuple):
    """The rank counts of every query on every side, one side after the other, and the scores behind them.

    Axes: Q0 queries, Q rows (a query and a side), L listed candidates of all rows together, N distinct atoms.
    """

    queries: I32[Tensor, "Q0 W"]  # the queries that were ranked
    counts: RankCounts  # of each row
    side: I64[Tensor, "Q"]  # the argument that is replaced
    query_row: I64[Tensor, "Q"]  # row of the query in `queries`
    relation: I64[Tensor, "Q"]  # predicate id of the query
    answer_provable: Bool[
        Tensor, "Q"
    ]  # T_P derives the answer, a fact from other facts
    answer_score: I64[Tensor, "Q"]  # quantised score of the answer
    listed_score: I64[Tensor, "L"]  # quantised score of a listed candidate
    listed_row: I64[Tensor, "L"]  # the row that it is a candidate of, below Q
    is_answer: Bool[Tensor, "L"]  # it is the answer itself
    # on another machine its score could round to the next line of the grid
    near_boundary: Bool[Tensor, "L"]
    scored_atom: I64[Tensor, "N W"]  # the distinct atoms that were scored
    # the side that they were scored for; 0 where one score serves all sides
    scored_side: I64[Tensor, "N"]
    log_odds: F64[Tensor, "N"]  # log-odds of their scores


class RankedRows(NamedTuple):
    """What metrics are computed from: the rank counts of some queries on every side."""

    counts: RankCounts
    side: I64[Tensor, "Q"]
    relation: I64[Tensor, "Q"]
    answer_provable: Bool[Tensor, "Q"]
    n_scored: int  # atoms that were scored


class DistinctAtoms(NamedTuple):
    """The distinct atoms of a list."""

    atom: I64[Tensor, "N W"]
    # of each listed atom: its row among the distinct ones
    row: I64[Tensor, "L"]


class ListedQueries(NamedTuple):
    """Queries with their candidates, which any number of scores may rank."""

    queries: I32[Tensor, "Q0 W"]
    sides: tuple[int, ...]
    tables: tuple[CandidateTable, ...]  # of each side
    # of all sides together, or of each side
    distinct: tuple[DistinctAtoms, ...]
    by_side: bool  # they are of each side


class ScoredAtoms(NamedTuple):
    """Distinct atoms with their scores."""

    atom: I64[Tensor, "N W"]
    side: I64[Tensor, "N"]
    log_odds: F64[Tensor, "N"]
    # of each listed atom: its row among the distinct ones
    row: I64[Tensor, "L"]


class _SideRanks(NamedTuple):
    """The rank counts of one side's queries."""

    counts: RankCounts
    answer_score: I64[Tensor, "Q"]


def rank_split(
    task: ProverTask,
    split: np.ndarray,
    score: Score,
    ranking_protocol: RankingProtocol,
    query_id: np.ndarray | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> Ranking:
    """Rank queries of a task's split, filtered by the triples of all splits and of facts.txt.

    Args:
      split: the queries, atoms [Q, W]; see `check_split` for those that can be ranked.
      query_id: their rows in the split; None means the first ones.
      on_progress: called with the number of atoms that have a score, where evidence is collected for them.
    """
    listed = list_split(
        task,
        split,
        ranking_protocol,
        query_id,
        by_side=scoring.is_by_side(task, score),
    )
    score_atoms = partial(
        scoring.score_atoms, task, score, on_progress=on_progress
    )
    return rank_listed(listed, score_atoms)


def rank_by_questions(
    task: ProverTask,
    split: np.ndarray,
    facts: FactIndex,
    scores: Sequence[Score],
    ranking_protocol: RankingProtocol,
    on_progress: ProgressCallback = ignore_progress,
) -> Iterator[Ranking]:
    """Yield the rankings of queries by several scores, for which the evidence of their questions is collected once.

    Args:
      facts: what the evidence is collected from.
    """
    listed = list_split(task, split, ranking_protocol, by_side=True)
    values = {
        side: scoring.score_by_questions(
            task, facts, scores, distinct.atom.int(), side, on_progress
        )
        for side, distinct in zip(listed.sides, listed.distinct)
    }
    for i in range(len(scores)):
        column = {side: table[:, i] for side, table in values.items()}
        yield rank_listed(listed, partial(_take_column, column))


def _take_column(
    column: dict[int, F64[Tensor, "n"]], atoms: Tensor, side: int
) -> F64[Tensor, "n"]:
    """Values that were computed for the atoms of each side."""
    return column[side].contiguous()


def list_split(
    task: ProverTask,
    split: np.ndarray,
    ranking_protocol: RankingProtocol,
    query_id: np.ndarray | None = None,
    *,
    by_side: bool,
) -> ListedQueries:
    """List the candidates of queries of a task's split, for `rank_listed`.

    Args:
      by_side: an atom has a score for each side.

    Other arguments are those of `rank_split`.
    """
    if query_id is None:
        query_id = np.arange(len(split))
    device = task.entity_pool.device
    queries = torch.from_numpy(np.ascontiguousarray(split)).to(device)
    task = with_answers(task, queries, ranking_protocol.sides)
    return list_queries(
        ranking_protocol,
        task.sizes,
        task.filter_index,
        queries,
        torch.from_numpy(np.ascontiguousarray(query_id)).to(device),
        task.entity_pool,
        by_side=by_side,
    )


def count_candidates(
    task: ProverTask, split: np.ndarray, ranking_protocol: RankingProtocol
) -> int:
    """Count the distinct candidates that a ranking of a split scores."""
    listed = list_split(task, split, ranking_protocol, by_side=False)
    return len(listed.distinct[0].atom)


def estimate_candidates(
    task: ProverTask, split: np.ndarray, ranking_protocol: RankingProtocol
) -> int:
    """Estimate how many candidates a ranking of a split scores, from the candidates of a part of its queries."""
    if not len(split):
        return 0
    if ranking_protocol.score_unprovable:
        pool_size = ranking_protocol.n_negatives or len(task.entity_pool)
        return pool_size * len(split) * len(ranking_protocol.sides)
    sample = split[:: max(1, len(split) // ESTIMATE_QUERIES)]
    n_candidates = count_candidates(task, sample, ranking_protocol)
    return n_candidates * len(split) // len(sample)


def check_split(
    task: ProverTask, split: np.ndarray, ranking_protocol: RankingProtocol
) -> None:
    """Check that all queries of a split can be ranked.

    Raises:
      ValueError: a query, which the message names, is not binary or not ground, or the pool does not hold its answer.
    """
    queries = torch.from_numpy(np.ascontiguousarray(split))
    pool = task.entity_pool.cpu()
    for side in ranking_protocol.sides:
        check_queries(queries, side, pool, task.sizes.n_constants)


def list_queries(
    protocol: RankingProtocol,
    sizes: KBSizes,
    filter_index: FilterIndex,
    queries: I32[Tensor, "Q W"],
    query_id: I64[Tensor, "Q"],
    pool: I64[Tensor, "E"],
    *,
    by_side: bool,
) -> ListedQueries:
    """List the candidates of every query on every side of the protocol, for `rank_listed`.

    Args:
      queries: binary and ground, with answers in the pool; not checked here, see `check_queries`.
      query_id: the number by which the corruptions of a query are sampled, so that they do not depend on the batch.
      pool: the entities to rank against, ascending.
      by_side: an atom has a score for each side.
    """
    tables = [
        list_candidates(
            protocol,
            filter_index,
            queries.long(),
            query_id,
            pool,
            side,
        )
        for side in protocol.sides
    ]
    atoms = [table.atom for table in tables]
    if not by_side:
        atoms = [torch.cat(atoms)]
    return ListedQueries(
        queries=queries,
        sides=protocol.sides,
        tables=tuple(tables),
        distinct=tuple(_distinct_atoms(listed, sizes) for listed in atoms),
        by_side=by_side,
    )


def rank_listed(listed: ListedQueries, score_atoms: ScoreAtoms) -> Ranking:
    """Rank queries whose candidates are listed.

    Args:
      score_atoms: gives the log-odds of distinct atoms, in lexicographic order, as answers about a side; 0 for all.
    """
    queries, tables, sides = listed.queries, listed.tables, listed.sides
    scored = _score_listed(score_atoms, listed)

    n_queries, n_sides = len(queries), len(tables)
    query_row = torch.arange(n_queries, device=queries.device)
    relation = queries[:, 0].long()
    listed_row = torch.cat(
        [table.query_row + i * n_queries for i, table in enumerate(tables)]
    )

    # The scores of all sides are one table; each side's part of it gives the counts of its queries.
    listed_score = rank_metrics.quantise(scored.log_odds)[scored.row]
    parts = listed_score.split([len(table.query_row) for table in tables])
    side_ranks = [_rank_side(table, part) for table, part in zip(tables, parts)]

    near_boundary = rank_metrics.near_boundary(
        scored.log_odds, LOG_ODDS_TOLERANCE
    )
    return Ranking(
        queries=queries,
        counts=_concatenate_counts([ranks.counts for ranks in side_ranks]),
        side=torch.cat([torch.full_like(query_row, side) for side in sides]),
        query_row=query_row.repeat(n_sides),
        relation=relation.repeat(n_sides),
        answer_provable=torch.cat([table.answer_provable for table in tables]),
        answer_score=torch.cat([ranks.answer_score for ranks in side_ranks]),
        listed_score=listed_score,
        listed_row=listed_row,
        is_answer=torch.cat([table.is_answer for table in tables]),
        near_boundary=near_boundary[scored.row],
        scored_atom=scored.atom,
        scored_side=scored.side,
        log_odds=scored.log_odds,
    )


def summarise_ranking(
    ranked: Ranking, predicates: list[str], *, with_auc: bool
) -> Metrics:
    """Summarise a ranking: the headline numbers under `expected` ties, and every tie policy, side and relation.

    Args:
      predicates: names of predicates 1, 2, ... in order.
      with_auc: also compute the area under the precision-recall curve over the candidates of all queries pooled.
    """
    metrics = summarise_rows([ranked_rows(ranked)], predicates)
    if with_auc:
        metrics["auc_pr"] = auc_pr(ranked)
    return metrics


def ranked_rows(ranked: Ranking) -> RankedRows:
    """What metrics are computed from, without the scores."""
    return RankedRows(
        ranked.counts,
        ranked.side,
        ranked.relation,
        ranked.answer_provable,
        len(ranked.scored_atom),
    )


def summarise_rows(
    parts: Sequence[RankedRows], predicates: list[str]
) -> Metrics:
    """Summarise the rankings of parts of a split as `summarise_ranking` does that of a whole one.

    Args:
      parts: of distinct queries, at least one.
      predicates: names of predicates 1, 2, ... in order.
    """
    metrics = summarise_counts(
        _concatenate_counts([part.counts for part in parts]),
        torch.cat([part.side for part in parts]),
        torch.cat([part.relation for part in parts]),
        torch.cat([part.answer_provable for part in parts]),
        predicates,
    )
    metrics["n_scored"] = sum(part.n_scored for part in parts)
    return metrics


def summarise_counts(
    counts: RankCounts,
    side: I64[Tensor, "Q"],
    relation: I64[Tensor, "Q"],
    answer_provable: Bool[Tensor, "Q"],
    predicates: list[str],
) -> Metrics:
    """Summarise rank counts: as `summarise_ranking`, without what needs the scores."""
    harmonics = rank_metrics.harmonic_numbers(
        int(counts.n_candidates.max()),
        counts.n_candidates.device,
    )
    grouped = rank_metrics.compute_grouped_metrics(
        counts,
        side,
        relation,
        answer_provable,
        harmonics,
        n_predicates=len(predicates),
    )
    by_group = rank_metrics.grouped_metrics_to_dict(grouped, predicates)

    overall = by_group["all"]["both"]
    metrics = {name: overall[name]["expected"] for name in HEADLINE_METRICS}
    metrics["n_tied"] = overall["n_tied"]
    metrics["ceiling"] = overall["ceiling"]
    metrics["n_queries"] = overall["n_queries"]
    metrics["n_candidates"] = int(counts.n_candidates.sum())
    metrics["by_group"] = by_group
    return metrics


def auc_pr(ranked: Ranking) -> float:
    """Average precision of the answers over the candidates of all queries pooled; candidates not listed score 0."""
    return pooled_average_precision(
        ranked.listed_score,
        ranked.is_answer,
        int(ranked.counts.n_candidates.sum()),
        len(ranked.query_row),
    )


def pooled_average_precision(
    listed_score: I64[Tensor, "L"],
    is_answer: Bool[Tensor, "L"],
    n_candidates: int,
    n_answers: int,
) -> float:
    """Average precision over the listed candidates and the remaining ones, which score 0.

    Args:
      listed_score: quantised scores.
      n_candidates: listed or not.
      n_answers: listed or not.
    """
    n_unlisted = n_candidates - len(listed_score)
    n_unlisted_answers = n_answers - int(is_answer.sum())
    unlisted_score = listed_score.new_full(
        (n_unlisted,), rank_metrics.ZERO_SCORE
    )
    unlisted_is_answer = (
        torch.arange(n_unlisted, device=listed_score.device)
        < n_unlisted_answers
    )
    return float(
        rank_metrics.average_precision(
            torch.cat([listed_score, unlisted_score]),
            torch.cat([is_answer, unlisted_is_answer]),
        )
    )


def selection_metric(task: ProverTask) -> str:
    """The name of the metric on the valid split by which parameters are chosen."""
    return "auc_pr" if task.is_countries else "mrr"


def ranked_sides(task: ProverTask) -> tuple[int, ...]:
    """The sides that a task's queries are ranked on: both, or the tail alone under the Countries protocol."""
    return (TAIL,) if task.is_countries else (HEAD, TAIL)


def random_rows(n_rows: int, n: int) -> np.ndarray:
    """At most `n` of so many rows in a random order, int64.

    They are the same ones at every call, and the first of those of a larger `n`.
    """
    return np.random.default_rng(0).permutation(n_rows)[:n]


def stratified_sample(split: np.ndarray, n: int) -> np.ndarray:
    """Sample rows of at most `n` queries, spread evenly over relations; ascending, and the same ones at every call."""
    order = random_rows(len(split), len(split))

    # Position of each query among the queries of its relation, in random order.
    by_relation = np.lexsort((np.argsort(order), split[:, 0]))
    relation = split[by_relation, 0]
    first_of_relation = np.searchsorted(relation, relation)
    position_by_relation = np.arange(len(split)) - first_of_relation
    position = position_by_relation[np.argsort(by_relation)]

    # The first query of every relation comes before the second of any.
    by_position = np.lexsort((order, position))
    return np.sort(by_position[:n])


def _score_listed(
    score_atoms: ScoreAtoms, listed: ListedQueries
) -> ScoredAtoms:
    """Score the candidates of all sides: each distinct atom once, or once for each side."""
    sides = listed.sides if listed.by_side else (0,)
    parts = [
        _score_distinct(score_atoms, distinct, side)
        for distinct, side in zip(listed.distinct, sides, strict=True)
    ]
    n_before = np.cumsum([0, *(len(part.atom) for part in parts)]).tolist()
    return ScoredAtoms(
        atom=torch.cat([part.atom for part in parts]),
        side=torch.cat([part.side for part in parts]),
        log_odds=torch.cat([part.log_odds for part in parts]),
        row=torch.cat([part.row + n for part, n in zip(parts, n_before)]),
    )


def score_distinct_atoms(
    score_atoms: ScoreAtoms,
    listed_atom: I64[Tensor, "L W"],
    sizes: KBSizes,
    side: int,
) -> ScoredAtoms:
    """Score each distinct atom once."""
    distinct = _distinct_atoms(listed_atom, sizes)
    return _score_distinct(score_atoms, distinct, side)


def _distinct_atoms(
    listed_atom: I64[Tensor, "L W"], sizes: KBSizes
) -> DistinctAtoms:
    """The distinct atoms of a list, in lexicographic order."""
    distinct, atom_index = kbase.sort_and_index_atoms(
        listed_atom,
        sizes.n_predicates,
        sizes.n_constants,
    )
    row = kbase.find_atoms(atom_index, sizes, listed_atom)
    return DistinctAtoms(listed_atom[distinct], row)


def _score_distinct(
    score_atoms: ScoreAtoms, distinct: DistinctAtoms, side: int
) -> ScoredAtoms:
    """The scores of distinct atoms."""
    atom, row = distinct
    return ScoredAtoms(
        atom=atom,
        side=torch.full_like(atom[:, 0], side),
        log_odds=score_atoms(atom.to(torch.int32), side),
        row=row,
    )


def _rank_side(
    table: CandidateTable, listed_score: I64[Tensor, "L"]
) -> _SideRanks:
    """The rank counts of one side's queries, and the scores of their answers."""
    counts = rank_metrics.rank_counts_listed(
        table.query_row,
        listed_score,
        table.is_answer,
        table.n_candidates,
    )

    # An answer that is not listed scores 0.
    zero_scores = torch.full_like(table.n_candidates, rank_metrics.ZERO_SCORE)
    answer_score = zero_scores.scatter(
        0,
        table.query_row[table.is_answer],
        listed_score[table.is_answer],
    )
    return _SideRanks(counts=counts, answer_score=answer_score)


def _concatenate_counts(parts: list[RankCounts]) -> RankCounts:
    """The counts of all sides, one after the other."""
    return RankCounts(
        n_better=torch.cat([counts.n_better for counts in parts]),
        n_equal=torch.cat([counts.n_equal for counts in parts]),
        n_candidates=torch.cat([counts.n_candidates for counts in parts]),
    )
