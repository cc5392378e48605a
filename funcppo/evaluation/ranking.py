"""The ranking protocol: which candidates a split asks for, what each scores, and what comes of it.

Only candidates that T_P derives need a score: an unprovable one scores 0 and ties at the bottom, so listing the
provable ones ranks exactly as scoring every entity would (for every score but `greedy`, which lists them all).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo import random
from funcppo.evaluation import candidates, rank_metrics
from funcppo.logic import fixpoint, triple_index
from funcppo.logic import kb as kbase
from funcppo.logic.fixpoint import LeastModel
from funcppo.logic.triple_index import FilterIndex
from funcppo.prover.task import ProverTask
from funcppo.types import F32, I32, I64, Bool

if TYPE_CHECKING:
    pass

SCORE_TOLERANCE_NATS = 2e-6  # nats: what other shapes, devices or compilers make of a float32 score
Scorer = Callable[[Tensor], Tensor]  # distinct atoms [L, W], in lexicographic order -> logarithms of scores [L]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankingProtocol:
    """How a split is ranked."""

    sides: tuple[int, ...] = (triple_index.HEAD, triple_index.TAIL)
    n_negatives: int | None = None  # corruptions drawn for each query and side; None ranks against the whole pool
    score_unprovable: bool = False  # score unprovable candidates too
    seed: int = 0  # of the draws


class CandidateTable(NamedTuple):
    """All candidates that one side of a split lists; N rows for all its queries together."""

    query_row: I64[Tensor, "N"]  # row of the split
    atom: I64[Tensor, "N W"]
    is_answer: Bool[Tensor, "N"]
    n_candidates: I64[Tensor, "Q"]  # listed or not
    answer_provable: Bool[Tensor, "Q"]


class Ranking(NamedTuple):
    """Every query of every side, one side after the other."""

    queries: I32[Tensor, "Q0 W"]  # what was asked
    counts: rank_metrics.RankCounts
    side: I64[Tensor, "Q"]
    query_row: I64[Tensor, "Q"]  # row of the split
    relation: I64[Tensor, "Q"]
    answer_provable: Bool[Tensor, "Q"]
    answer_score: I64[Tensor, "Q"]  # quantised score of the answer
    listed_score: I64[Tensor, "L"]  # quantised scores of all listed candidates
    listed_row: I64[Tensor, "L"]  # the row of this table that each is a candidate of
    is_answer: Bool[Tensor, "L"]
    near_boundary: Bool[Tensor, "L"]  # scores that rounding elsewhere could put on the next line of the grid
    scored_atom: I64[Tensor, "N W"]  # the distinct atoms that were scored
    log_score: F32[Tensor, "N"]  # their logarithms


def rank_queries(
    protocol: RankingProtocol,
    model: LeastModel,
    filter_index: FilterIndex,
    queries: I32[Tensor, "Q W"],
    query_id: I64[Tensor, "Q"],
    pool: I64[Tensor, "E"],
    scorer: Scorer,
) -> Ranking:
    """The rank of every query on every side.

    Args:
      query_id: what the corruptions of a query are drawn by, so that they do not depend on what else is ranked.
      pool: the entities to rank against, ascending.
    Errors: ValueError for a query that cannot be ranked.
    """
    sides = [
        _candidates(protocol, model, filter_index, queries.long(), query_id, pool, side) for side in protocol.sides
    ]
    listed, sizes = torch.cat([side.atom for side in sides]), model.sizes
    distinct, index = kbase.sort_and_index_atoms(listed, sizes.n_predicates, sizes.n_constants)
    atoms, row = listed[distinct], kbase.find_atoms(index, sizes, listed)
    score = scorer(atoms.to(torch.int32))
    value = rank_metrics.quantise(score)[row]
    parts, answers, first = [], [], 0
    for side in sides:
        here = value[first : first + len(side.query_row)]
        first += len(side.query_row)
        parts.append(rank_metrics.rank_counts_listed(side.query_row, here, side.is_answer, side.n_candidates))
        unscored = torch.full_like(side.n_candidates, rank_metrics.ZERO_SCORE)
        answers.append(unscored.scatter(0, side.query_row[side.is_answer], here[side.is_answer]))
    each = torch.arange(len(queries), device=queries.device)
    return Ranking(
        queries=queries,
        counts=rank_metrics.RankCounts(*(torch.cat(same) for same in zip(*parts))),
        side=torch.cat([torch.full_like(each, side) for side in protocol.sides]),
        query_row=each.repeat(len(sides)),
        relation=queries[:, 0].long().repeat(len(sides)),
        answer_provable=torch.cat([side.answer_provable for side in sides]),
        answer_score=torch.cat(answers),
        listed_score=value,
        listed_row=torch.cat([side.query_row + i * len(queries) for i, side in enumerate(sides)]),
        is_answer=torch.cat([side.is_answer for side in sides]),
        near_boundary=rank_metrics.near_boundary(score, SCORE_TOLERANCE_NATS)[row],
        scored_atom=atoms,
        log_score=score,
    )


def summarise_ranking(ranked: Ranking, predicates: list[str], *, with_auc: bool) -> dict[str, Any]:
    """The headline numbers under `expected` ties, and every policy, side and relation below them.

    Args:
      with_auc: also the area under the precision-recall curve over all candidates pooled; unprovable ones score 0.
    """
    result = summarise_counts(ranked.counts, ranked.side, ranked.relation, ranked.answer_provable, predicates)
    return result | {"n_scored": len(ranked.scored_atom)} | ({"auc_pr": auc_pr(ranked)} if with_auc else {})


def summarise_counts(
    counts: rank_metrics.RankCounts,
    side: I64[Tensor, "Q"],
    relation: I64[Tensor, "Q"],
    answer_provable: Bool[Tensor, "Q"],
    predicates: list[str],
) -> dict[str, Any]:
    """The same from the counts of each query alone."""
    harmonics = rank_metrics.harmonic_numbers(int(counts.n_candidates.max()), counts.n_candidates.device)
    summary = rank_metrics.compute_grouped_metrics(
        counts, side, relation, answer_provable, harmonics, n_predicates=len(predicates)
    )
    table = rank_metrics.grouped_metrics_to_dict(summary, predicates)
    both = table["all"]["both"]
    result = {name: both[name]["expected"] for name in ("mrr", "hits@1", "hits@3", "hits@10")}
    result |= {"ties": both["n_tied"], "ceiling": both["ceiling"], "n_queries": both["n_queries"]}
    return result | {"n_candidates": int(counts.n_candidates.sum()), "by_group": table}


def auc_pr(ranked: Ranking) -> float:
    """Average precision of the answers over the candidates of all queries pooled; those not listed score 0."""
    return pooled_average_precision(
        ranked.listed_score, ranked.is_answer, int(ranked.counts.n_candidates.sum()), len(ranked.query_row)
    )


def pooled_average_precision(
    listed_score: I64[Tensor, "L"], is_answer: Bool[Tensor, "L"], n_candidates: int, n_answers: int
) -> float:
    """Average precision over listed candidates and the others of `n_candidates`, which score 0.

    Args:
      n_answers: listed or not.
    """
    hidden = listed_score.new_full((n_candidates - len(listed_score),), rank_metrics.ZERO_SCORE)
    true = torch.arange(len(hidden), device=hidden.device) < n_answers - int(is_answer.sum())
    return float(rank_metrics.average_precision(torch.cat([listed_score, hidden]), torch.cat([is_answer, true])))


def _candidates(
    protocol: RankingProtocol,
    model: LeastModel,
    known: FilterIndex,
    split: Tensor,
    query_id: Tensor,
    pool: Tensor,
    side: int,
) -> CandidateTable:
    """Those to score on one side; the answer is listed where it is provable, or where all are."""
    true, derived = known
    provable = triple_index.contains(derived, split, side)
    if protocol.n_negatives is None and not protocol.score_unprovable:
        found = candidates.list_provable_candidates(true, derived, split, side)
        total = candidates.count_candidates(true, split, side, len(pool))
        return CandidateTable(
            found.query_row, _with(split[found.query_row], side, found.entity), found.is_answer, total, provable
        )
    if protocol.n_negatives is None:
        entity, filled = _unfiltered(true, split, pool, side)
    else:
        key = random.key(protocol.seed, split.device)
        entity, filled = candidates.sample_corruptions(key, true, pool, split, side, protocol.n_negatives, query_id)
    total = filled.sum(1) + 1
    entity, filled = torch.cat([split[:, side, None], entity], 1), torch.cat([filled[:, :1] | True, filled], 1)
    atom = _with(split[:, None].expand(-1, entity.shape[1], -1), side, entity)
    is_answer = torch.arange(entity.shape[1], device=split.device) == 0
    wanted = filled & (protocol.score_unprovable | (fixpoint.atom_height(model, atom) >= 0))
    query, slot = wanted.nonzero(as_tuple=True)
    return CandidateTable(query, atom[wanted], is_answer[slot], total, provable)


def _unfiltered(true: triple_index.TripleIndex, split: Tensor, pool: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Every entity of the pool for every query, and which of them are candidates other than the answer."""
    entity = pool.expand(len(split), -1)
    atom = _with(split[:, None].expand(-1, len(pool), -1), side, entity)
    return entity, ~triple_index.contains(true, atom, side) & (entity != split[:, side, None])


def _with(atoms: Tensor, side: int, entity: Tensor) -> Tensor:
    """The atoms with one argument replaced."""
    here = torch.arange(atoms.shape[-1], device=atoms.device) == side
    return torch.where(here, entity[..., None], atoms)


def rank_split(
    task: ProverTask,
    split: np.ndarray,
    scorer: Scorer,
    ranking_protocol: RankingProtocol,
    query_id: np.ndarray | None = None,
) -> Ranking:
    """The ranking of some queries under a protocol, filtered by all splits.

    Args:
      query_id: the rows of the split that these are; None: the first ones.
    """
    device = task.entity_pool.device
    ids = np.arange(len(split)) if query_id is None else query_id
    rows, ids = (torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in (split, ids))
    return rank_queries(ranking_protocol, task.least_model, task.filter_index, rows, ids, task.entity_pool, scorer)


def selection_metric(task: ProverTask) -> str:
    """The number by which params are chosen on valid."""
    return "auc_pr" if task.is_countries else "mrr"


def ranked_sides(task: ProverTask) -> tuple[int, ...]:
    """Both sides; of the Countries protocol the tail alone."""
    return (triple_index.TAIL,) if task.is_countries else (triple_index.HEAD, triple_index.TAIL)


def stratified_sample(split: np.ndarray, n: int) -> np.ndarray:
    """Rows of at most `n` queries, as many of each relation as there are, ascending; always the same ones."""
    order = np.random.default_rng(0).permutation(len(split))
    place = np.zeros(len(split), dtype=np.int64)  # how many of its relation come before each
    for relation in np.unique(split[:, 0]):
        mine = order[split[order, 0] == relation]
        place[mine] = np.arange(len(mine))
    return np.sort(np.lexsort((order, place))[:n])
