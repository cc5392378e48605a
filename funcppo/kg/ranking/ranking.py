"""Filtered ranking of the queries of a split under a score.

A query is a triple whose argument on one side, head or tail, is the answer. Its candidates are the answer and every
entity of the pool that completes it to no known triple, or a sample of these; known are the triples of all splits and
of facts.txt (the filtered setting).

`rank_split` ranks queries of a task and returns a `Ranking`: the rank counts of every query and every score behind
them. `list_split` lists their candidates once, and `rank_listed` ranks these by any number of scores.
`rank_metrics.rank_counts_listed` counts the candidates that score higher than the answer or the same, and
`rank_metrics.ranks` makes a rank of these counts, by each rule for ties.
`summarise_ranking` turns all into MRR, Hits@k and the rest; `summarise_counts` does so from the counts alone.

Each distinct atom is scored once, whatever the number of queries that it is a candidate of, or once for each side where
its score depends on the side. Only candidates that T_P derives are listed, unless the protocol sets
`score_unprovable`. The others score 0 and tie at the bottom; where a score `ranks_all` entities, they are counted
against the answer, chunk by chunk of the questions.

Axes: Q queries of a batch, L listed candidates of all queries together, G corruptions of a query, E entities of the
pool, W atom width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo.core.types import F64, I32, I64, Bool
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.rules import format_atom
from funcppo.kg.logic import derive
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.kb import (
    HEAD,
    TAIL,
    FilterIndex,
    KBSizes,
    TripleIndex,
    other_side,
)
from funcppo.kg.logic.row_index import (
    concatenate,
    count_to,
    row_numbers,
    select_rows,
    unique_rows_with_inverse,
    unique_values,
)
from funcppo.kg.ranking import rank_metrics, scoring
from funcppo.kg.ranking.rank_metrics import Metrics, RankCounts
from funcppo.kg.scores.score import Score
from funcppo.kg.search.beam import ProgressCallback, ignore_progress
from funcppo.kg.search.task import ProverTask, with_answers

# Error of the log-odds of a score in float32: its difference between batch shapes, devices and compilers.
LOG_ODDS_TOLERANCE = 4e-6
# scores of entities, of eight bytes, that are held at once
MAX_CHUNK_SCORES = 1 << 22
# queries whose candidates are counted for an estimate of the work
ESTIMATE_QUERIES = 100
# log-odds of distinct atoms as answers about a side
ScoreAtoms = Callable[[Tensor, int], Tensor]
HEADLINE_METRICS = ("mrr", "hits@1", "hits@3", "hits@10")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankingProtocol:
    """Sides to rank on, and the candidates that an answer is ranked against."""

    # the arguments that are replaced, each a ranking of its own
    sides: tuple[int, ...] = (HEAD, TAIL)
    # corruptions sampled for each query and side; None ranks against the whole pool
    n_negatives: int | None = None
    # compute the scores of unprovable candidates too
    score_unprovable: bool = False
    seed: int = 0  # of the sampled corruptions
    n_best: int = 0  # candidates of each query to return, of all entities


class CandidateTable(NamedTuple):
    """Candidates of a batch of queries on one side that need a score."""

    query_row: I64[Tensor, "L"]  # row of the query in the batch
    # the query with the candidate in place of the answer
    atom: I64[Tensor, "L W"]
    is_answer: Bool[Tensor, "L"]  # the candidate is the answer itself
    # candidates of the query, listed here or not
    n_candidates: I64[Tensor, "Q"]
    answer_provable: Bool[
        Tensor, "Q"
    ]  # T_P derives the answer, a fact from other facts


class Ranking(NamedTuple):
    """Rank counts of every query on every side, one side after the other, and the scores behind them.

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
    # entities and quantised scores of the best candidates, as far as asked for
    best: I64[Tensor, "Q k 2"]
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
    """Rank counts of queries on every side, from which metrics are computed."""

    counts: RankCounts
    side: I64[Tensor, "Q"]
    relation: I64[Tensor, "Q"]
    answer_provable: Bool[Tensor, "Q"]
    n_scored: int  # atoms that were scored


class ListedQueries(NamedTuple):
    """Queries with their candidates on every side, which any number of scores may rank."""

    queries: I32[Tensor, "Q0 W"]
    sides: tuple[int, ...]
    tables: tuple[CandidateTable, ...]  # of each side
    # the distinct atoms of all sides together, or of each side, and of each listed atom its row among them
    distinct: tuple[tuple[I64[Tensor, "N W"], I64[Tensor, "L"]], ...]
    by_side: bool  # they are of each side
    true_triples: TripleIndex  # which are no candidates
    pool: I64[Tensor, "E"]  # the entities to rank against
    n_best: int  # candidates to return


def rank_split(
    task: ProverTask,
    split: np.ndarray,
    score: Score,
    ranking_protocol: RankingProtocol | None = None,
    query_id: np.ndarray | None = None,
    on_progress: ProgressCallback = ignore_progress,
) -> Ranking:
    """Rank queries of a task's split; candidates that are triples of any split or of facts.txt are filtered out.

    Args:
      split: the queries, atoms [Q, W]; see `check_split` for those that can be ranked.
      ranking_protocol: None to rank the task's sides against all entities.
      query_id: their rows in the split; None means the first ones.
      on_progress: called with the number of questions that are answered, where evidence is collected for them.
    """
    ranking_protocol = ranking_protocol or RankingProtocol(
        sides=ranked_sides(task)
    )
    # The area under the curve reads the scores of all candidates.
    has_few = ranking_protocol.n_negatives is not None or task.is_countries
    if score.ranks_all and has_few:
        ranking_protocol = replace(ranking_protocol, score_unprovable=True)
    answers: dict[int, scoring.AnswerScores] = {}
    ranked_task = task
    if score.facts is not None and task.answers_plan is not None:
        # The evidence of a question lists its answers too.
        queries = torch.from_numpy(np.ascontiguousarray(split))
        sides = ranking_protocol.sides
        answers = {
            side: scoring.score_answers(task, score, queries, side, on_progress)
            for side in sides
        }
        derived = torch.cat([x.atom for x in answers.values()])
        ranked_task = with_answers(task, queries, sides, derived)
    listed = list_split(
        ranked_task,
        split,
        ranking_protocol,
        query_id,
        by_side=scoring.is_by_side(task, score),
    )

    def score_atoms(atoms: Tensor, side: int) -> Tensor:
        return scoring.score_atoms(
            task, score, atoms, side, on_progress, answers.get(side)
        )

    return rank_listed(listed, score_atoms, score)


def list_split(
    task: ProverTask,
    split: np.ndarray,
    ranking_protocol: RankingProtocol,
    query_id: np.ndarray | None = None,
    *,
    by_side: bool,
) -> ListedQueries:
    """List the candidates of the queries of a task's split, for `rank_listed`.

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
    return len(listed.distinct[0][0])


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
    """Check that all queries of a split can be ranked; raises as `check_queries` does."""
    pool = task.entity_pool.numpy(force=True)
    check_queries(task.dataset, split, pool, ranking_protocol.sides)


def check_queries(
    dataset: Dataset, split: np.ndarray, pool: np.ndarray, sides: Sequence[int]
) -> None:
    """Check that all queries of a split can be ranked on some sides against the entities of a pool.

    Raises:
      ValueError: a query, which the message names, has other than two arguments, or the pool does not hold its answer.
    """
    is_binary = (split > 0)[:, : TAIL + 1].all(1) & ~split[:, TAIL + 1 :].any(1)
    is_in_pool = np.isin(split[:, list(sides)], pool).all(1)
    for is_valid, expected in (
        (is_binary, "two arguments"),
        (is_in_pool, f"an answer among the {len(pool)} candidates"),
    ):
        if not is_valid.all():
            row = int((~is_valid).argmax())
            atom = format_atom(dataset, split[row])
            raise ValueError(f"expected {expected}, got query {row}, {atom}")


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
      queries: binary and ground, with answers in the pool; not checked here, see `check_split`.
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
        true_triples=filter_index.true_triples,
        pool=pool,
        n_best=protocol.n_best,
    )


def rank_listed(
    listed: ListedQueries, score_atoms: ScoreAtoms, score: Score | None = None
) -> Ranking:
    """Rank the listed queries by one score; return the rank counts and the scores behind them.

    Args:
      score_atoms: gives the log-odds of distinct atoms, in lexicographic order, as answers about a side; 0 for all.
      score: the score of the atoms, whose `log_odds_of_all` ranks the candidates that are not listed if it `ranks_all`;
        None to tie them at the bottom.
    """
    queries, tables, sides = listed.queries, listed.tables, listed.sides
    scored_sides = sides if listed.by_side else (0,)
    atoms = [atom for atom, _ in listed.distinct]
    log_odds = torch.cat(
        [
            score_atoms(atom.to(torch.int32), side)
            for atom, side in zip(atoms, scored_sides, strict=True)
        ]
    )
    # of each listed atom its row among the distinct ones of all sides
    n_before = np.cumsum([0, *map(len, atoms)]).tolist()
    row = torch.cat([row + n for (_, row), n in zip(listed.distinct, n_before)])

    # Each side's part of the scores gives the counts of its queries.
    listed_score = rank_metrics.quantise(log_odds)[row]
    parts = listed_score.split([len(table.query_row) for table in tables])
    counts, answer_scores, best = zip(
        *(
            _rank_side(listed, table, side, part, score)
            for table, part, side in zip(tables, parts, sides)
        )
    )
    n_queries, n_sides = len(queries), len(tables)
    query_row = count_to(n_queries, queries)
    near_boundary = rank_metrics.near_boundary(log_odds, LOG_ODDS_TOLERANCE)
    return Ranking(
        queries=queries,
        counts=concatenate(counts),
        side=_repeat(sides, [query_row] * n_sides),
        query_row=query_row.repeat(n_sides),
        relation=queries[:, 0].long().repeat(n_sides),
        answer_provable=torch.cat([table.answer_provable for table in tables]),
        answer_score=torch.cat(answer_scores),
        best=torch.cat(best),
        listed_score=listed_score,
        listed_row=torch.cat(
            [table.query_row + i * n_queries for i, table in enumerate(tables)]
        ),
        is_answer=torch.cat([table.is_answer for table in tables]),
        near_boundary=near_boundary[row],
        scored_atom=torch.cat(atoms),
        scored_side=_repeat(scored_sides, [atom[:, 0] for atom in atoms]),
        log_odds=log_odds,
    )


def _rank_side(
    listed: ListedQueries,
    table: CandidateTable,
    side: int,
    listed_score: I64[Tensor, "L"],
    score: Score | None,
) -> tuple[RankCounts, I64[Tensor, "Q"], I64[Tensor, "Q k 2"]]:
    """Rank the answers of a side; return the counts, the scores of the answers, and the best candidates.

    Candidates that are not listed tie at the bottom, unless the score ranks them: then a chunk of the questions at a
    time is ranked among all entities, and also where the best candidates are asked for.

    Args:
      listed_score: quantised, of the candidates of the table.
    """
    n_listed = torch.bincount(table.query_row, minlength=len(listed.queries))
    is_all_listed = torch.equal(n_listed, table.n_candidates)
    if score is not None and (is_all_listed or not score.ranks_all):
        score = None
    if score is not None or listed.n_best:
        return _rank_among_all(listed, table, side, listed_score, score)
    counts, answer_score = rank_metrics.rank_counts_listed(
        table.query_row, listed_score, table.is_answer, table.n_candidates
    )
    return counts, answer_score, counts[0].new_zeros(len(n_listed), 0, 2)


def _rank_among_all(
    listed: ListedQueries,
    table: CandidateTable,
    side: int,
    listed_score: I64[Tensor, "L"],
    score: Score | None,
) -> tuple[RankCounts, I64[Tensor, "Q"], I64[Tensor, "Q k 2"]]:
    """Rank the answers of a side among all entities, as `_rank_side` does.

    Args:
      score: of the candidates that are not listed; None where they score 0.
    """
    queries = listed.queries.long()
    questions = derive.open_questions(queries, side)
    _, row = unique_rows_with_inverse(queries[:, [0, other_side(side)]])
    order = torch.argsort(row, stable=True)
    place = torch.argsort(order)[table.query_row]
    n_entities = int(listed.true_triples.base) - 1
    parts: list[tuple[Tensor, ...]] = []
    size = max(1, MAX_CHUNK_SCORES // len(listed.pool))
    for start in range(0, max(len(order), 1), size):
        rows = order[start : start + size]

        # Scores of all entities, as if no rule derived them.
        line = torch.full(
            (len(rows), n_entities), rank_metrics.ZERO_SCORE, device=rows.device
        )
        if score is not None and len(rows):
            first, last = int(row[rows[0]]), int(row[rows[-1]])
            asked = select_rows(questions, slice(first, last + 1))
            values = score.log_odds_of_all(asked).to(rows.device)
            line = rank_metrics.quantise(values)[row[rows] - first]

        # What is listed has its own score.
        is_here = (place >= start) & (place < start + size)
        cell = place[is_here] - start, table.atom[is_here, side] - 1
        line = line.index_put(cell, listed_score[is_here])
        parts.append(_rank_entities(listed, queries[rows], side, line))
    n_better, n_equal, own, best = select_rows(
        concatenate(parts), torch.argsort(order)
    )
    counts = RankCounts(n_better, n_equal, table.n_candidates)
    return counts, own, best


def _rank_entities(
    listed: ListedQueries,
    queries: I64[Tensor, "Q W"],
    side: int,
    line: I64[Tensor, "Q E"],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rank the answers of some queries by the quantised scores of all entities.

    Returns:
      The numbers of better and of equal candidates, the scores of the answers, and the best candidates.
    """
    row = torch.arange(len(queries), device=line.device)
    answer, pool = queries[:, side], listed.pool
    own = line[row, answer - 1]
    among = line if len(pool) == line.shape[1] else line[:, pool - 1]

    # Known answers are taken from what is counted, and the answer itself.
    known = kbase.list_answers(listed.true_triples, queries, side)
    is_other = known.entity != answer[known.query_row]
    is_counted = torch.isin(answer, pool)
    row = torch.cat([known.query_row[is_other], row[is_counted]])
    entity = torch.cat([known.entity[is_other], answer[is_counted]])
    taken = line[row, entity - 1]
    n_better, n_equal = (
        compare(among, own[:, None]).sum(1)
        - torch.bincount(row[compare(taken, own[row])], minlength=len(own))
        for compare in (torch.gt, torch.eq)
    )

    best = own.new_zeros(len(own), 0, 2)
    if listed.n_best:
        is_candidate = other_candidates(
            listed.true_triples, listed.pool, queries, side
        ).scatter(1, answer[:, None] - 1, True)
        line = torch.where(is_candidate, line, rank_metrics.INVALID_SCORE)
        values, entity = line.topk(min(listed.n_best, line.shape[1]))
        best = torch.stack([entity + 1, values], 2)
    return n_better, n_equal, own, best


def _repeat(sides: Sequence[int], like: Sequence[Tensor]) -> I64[Tensor, "n"]:
    """Concatenate each side's number, repeated as often as its tensor is long."""
    return torch.cat([torch.full_like(x, s) for s, x in zip(sides, like)])


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
    """Return the rank counts of a ranking without its scores."""
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
    """Summarise the rankings of parts of a split, as `summarise_ranking` does for a whole split.

    Args:
      parts: of distinct queries, at least one.
      predicates: names of predicates 1, 2, ... in order.
    """
    counts = concatenate([part.counts for part in parts])
    side, relation, is_provable = map(torch.cat, list(zip(*parts))[1:4])
    by_group = rank_metrics.group_metrics(
        counts, side, relation, is_provable, predicates
    )
    overall = by_group["all"]["both"]
    metrics = {name: overall[name]["expected"] for name in HEADLINE_METRICS}
    for name in ("n_tied", "ceiling", "proved", "n_queries"):
        metrics[name] = overall[name]
    metrics["n_candidates"] = int(counts.n_candidates.sum())
    n_scored = sum(part.n_scored for part in parts)
    return metrics | {"by_group": by_group, "n_scored": n_scored}


def auc_pr(ranked: Ranking) -> float:
    """Compute the average precision of the answers over all queries' candidates pooled; unlisted candidates score 0."""
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
    """Compute the average precision over listed candidates and unlisted ones, which score 0.

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
    unlisted_is_answer = count_to(n_unlisted, listed_score) < n_unlisted_answers
    return float(
        rank_metrics.average_precision(
            torch.cat([listed_score, unlisted_score]),
            torch.cat([is_answer, unlisted_is_answer]),
        )
    )


def selection_metric(task: ProverTask) -> str:
    """Return the name of the metric on the valid split by which parameters are chosen."""
    if task.is_guide:
        return "1 / (1 + log2 steps)"
    return "auc_pr" if task.is_countries else "mrr"


def ranked_sides(task: ProverTask) -> tuple[int, ...]:
    """Return the sides that a task's queries are ranked on."""
    return asked_sides(task.is_countries)


def asked_sides(is_countries: bool) -> tuple[int, ...]:
    """Return the sides that queries are ranked on: both, or the tail alone under the Countries protocol."""
    return (TAIL,) if is_countries else (HEAD, TAIL)


def random_rows(n_rows: int, n: int) -> np.ndarray:
    """Return at most `n` of the rows 0 .. n_rows - 1 in a random order, int64.

    Every call returns the same rows, and they are the first of those for a larger `n`.
    """
    return np.random.default_rng(0).permutation(n_rows)[:n]


def stratified_sample(split: np.ndarray, n: int) -> np.ndarray:
    """Sample at most `n` rows of a split, spread evenly over relations; ascending, and the same rows at every call."""
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


def score_distinct_atoms(
    score_atoms: ScoreAtoms,
    listed_atom: I64[Tensor, "L W"],
    sizes: KBSizes,
    side: int,
) -> F64[Tensor, "L"]:
    """Compute the log-odds of atoms in any order, scoring each distinct atom once."""
    atom, row = _distinct_atoms(listed_atom, sizes)
    return score_atoms(atom.to(torch.int32), side)[row]


def _distinct_atoms(
    listed_atom: I64[Tensor, "L W"], sizes: KBSizes
) -> tuple[I64[Tensor, "N W"], I64[Tensor, "L"]]:
    """Return the distinct atoms of a list in lexicographic order, and each listed atom's row among them."""
    distinct, atom_index = kbase.sort_and_index_atoms(listed_atom, sizes)
    row = kbase.find_atoms(atom_index, sizes, listed_atom)
    return listed_atom[distinct], row


# -- candidates


def list_candidates(
    protocol: RankingProtocol,
    filter_index: FilterIndex,
    queries: I64[Tensor, "Q W"],
    query_id: I64[Tensor, "Q"],
    pool: I64[Tensor, "E"],
    side: int,
) -> CandidateTable:
    """List the candidates on one side that need a score: the provable ones, or all if `protocol.score_unprovable`.

    The answer is one of the candidates, and is listed by the same rule.

    Args:
      query_id: the number by which the corruptions of a query are sampled.
      pool: the entities to rank against, ascending.
    """
    true_triples, derivable_triples = filter_index
    if protocol.n_negatives is None and not protocol.score_unprovable:
        # Those whose triple is derivable: all others score 0.
        answers = kbase.list_answers(derivable_triples, queries, side)
        is_answer = answers.entity == queries[answers.query_row, side]
        is_true = kbase.contains_key(true_triples, answers.triple_key, side)
        kept = is_answer | ~is_true
        query_row, entity = answers.query_row[kept], answers.entity[kept]
        # The pool without the other true answers.
        start, stop = kbase.answer_range(true_triples, queries, side)
        is_known = kbase.contains_triple(true_triples, queries, side)
        n_candidates = len(pool) - (stop - start) + is_known.long()
    else:
        if protocol.n_negatives is None:
            is_other = other_candidates(true_triples, pool, queries, side)
            query_row, column = is_other.nonzero().T
            entity = column + 1
        else:
            query_row, entity = sample_corruptions(
                protocol, true_triples, pool, queries, side, query_id
            )
        query_row = torch.cat([row_numbers(queries), query_row])
        entity = torch.cat([queries[:, side], entity])
        n_candidates = torch.bincount(query_row, minlength=len(queries))
    atom = queries[query_row]
    atom[:, side] = entity
    if protocol.n_negatives is not None and not protocol.score_unprovable:
        is_derivable = kbase.contains_triple(derivable_triples, atom, side)
        query_row, atom = query_row[is_derivable], atom[is_derivable]
    return CandidateTable(
        query_row=query_row,
        atom=atom,
        is_answer=atom[:, side] == queries[query_row, side],
        n_candidates=n_candidates,
        answer_provable=kbase.contains_triple(derivable_triples, queries, side),
    )


def other_candidates(
    true_triples: TripleIndex,
    pool: I64[Tensor, "E"],
    queries: I64[Tensor, "Q W"],
    side: int,
) -> Bool[Tensor, "Q C"]:
    """Return which entities are candidates of each query, its answer left out.

    Args:
      true_triples: the known triples, restricted to the pool.
      pool: entities to choose from.
    """
    known = kbase.list_answers(true_triples, queries, side)
    device, n_queries = queries.device, len(queries)
    shape = n_queries, int(true_triples.base) - 1
    is_other = torch.zeros(shape, dtype=torch.bool, device=device)
    is_other = is_other.index_fill(1, pool - 1, True)
    row = [known.query_row, torch.arange(n_queries, device=device)]
    entity = torch.cat([known.entity, queries[:, side]])
    taken = torch.zeros((), dtype=torch.bool, device=device)
    return is_other.index_put((torch.cat(row), entity - 1), taken)


def sample_corruptions(
    protocol: RankingProtocol,
    true_triples: TripleIndex,
    pool: I64[Tensor, "E"],
    queries: I64[Tensor, "Q W"],
    side: int,
    query_id: I64[Tensor, "Q"],
) -> tuple[I64[Tensor, "n"], I64[Tensor, "n"]]:
    """Sample corruptions of each query: a uniform subset of its candidates other than the answer, or all if too few.

    A query's sample depends on the seed, the side and its id alone, not on the rest of the batch. The allowed entity
    number r, counted from 0, stands in the pool at

        r + #{j : position_j - j <= r},    position_0 < position_1 < ... of the entities that are not allowed

    For example, a pool of 6 without positions 1 and 4 has allowed positions 0, 2, 3, 5. position_j - j is 1 and 3; for
    r = 2 one of these is at most 2, and allowed entity number 2 stands at 2 + 1 = 3.

    Args:
      true_triples: the known triples, restricted to the pool.
      pool: entities to choose from, ascending; it holds every answer.
      query_id: a number that stays with the query, such as its row in its split.

    Returns:
      The row of the query, ascending, and the entity of each corruption.
    """
    known = kbase.list_answers(true_triples, queries, side)
    row = row_numbers(queries)
    position = torch.searchsorted(
        pool, torch.cat([known.entity, queries[:, side]])
    )
    code = torch.cat([known.query_row, row]) * len(pool) + position
    excluded = unique_values(code).numpy(force=True)
    starts = np.searchsorted(excluded, np.arange(1, len(row)) * len(pool))
    found: list[np.ndarray] = []
    for number, part in zip(query_id.tolist(), np.split(excluded, starts)):
        n_allowed = len(pool) - len(part)
        generator = np.random.default_rng([protocol.seed, side, number])
        n = min(protocol.n_negatives or 0, n_allowed)
        chosen = generator.choice(n_allowed, n, replace=False)
        limits = part % len(pool) - np.arange(len(part))
        found.append(chosen + np.searchsorted(limits, chosen, "right"))
    count = torch.tensor([len(x) for x in found], device=row.device)
    place = torch.from_numpy(np.concatenate(found)).to(pool.device)
    return row.repeat_interleave(count), pool[place]
