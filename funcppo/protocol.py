"""The ranking protocol: which candidates a split asks for, what each scores, and what comes of it.

Only candidates that T_P derives need a score: an unprovable one scores 0 and ties at the bottom, so listing the
provable ones ranks exactly as scoring every entity would (for every score but `greedy`, which lists them all).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcppo import queries as asked
from funcppo import random, ranking
from funcppo.logic import fixpoint
from funcppo.logic import kb as kbase
from funcppo.logic.fixpoint import Model
from funcppo.logic.kb import Sizes
from funcppo.types import F32, I32, I64, Bool

ROUNDING = 2e-6  # nats: what other shapes, devices or compilers make of a float32 score
Scorer = Callable[[Tensor], Tensor]  # distinct atoms [L, W], in lexicographic order -> logarithms of scores [L]


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """How a split is ranked."""

    sides: tuple[int, ...] = (asked.HEAD, asked.TAIL)
    negatives: int | None = None  # corruptions drawn for each query and side; None ranks against the whole pool
    list_all: bool = False  # score unprovable candidates too
    seed: int = 0  # of the draws


class Known(NamedTuple):
    """What candidates are looked up in, the same for every query of a data set."""

    true: asked.Triples  # the atoms of all splits, which are filtered from the candidates
    derived: asked.Triples  # the atoms that T_P derives


class Asked(NamedTuple):
    """All candidates that one side of a split lists; N rows for all its queries together."""

    query: I64[Tensor, "N"]  # row of the split
    atom: I64[Tensor, "N W"]
    is_answer: Bool[Tensor, "N"]
    n_candidates: I64[Tensor, "Q"]  # listed or not
    provable: Bool[Tensor, "Q"]


class Ranking(NamedTuple):
    """Every query of every side, one side after the other."""

    split: I32[Tensor, "Q0 W"]  # what was asked
    counts: ranking.Counts
    side: I64[Tensor, "Q"]
    query: I64[Tensor, "Q"]  # row of the split
    relation: I64[Tensor, "Q"]
    provable: Bool[Tensor, "Q"]
    answer: I64[Tensor, "Q"]  # quantised score of the answer
    listed: I64[Tensor, "L"]  # quantised scores of all listed candidates
    listed_for: I64[Tensor, "L"]  # the row of this table that each is a candidate of
    is_answer: Bool[Tensor, "L"]
    near: Bool[Tensor, "L"]  # scores that rounding elsewhere could put on the next line of the grid
    atom: I64[Tensor, "N W"]  # the distinct atoms that were scored
    score: F32[Tensor, "N"]  # their logarithms


def known(sizes: Sizes, model: Model, true: I32[Tensor, "N W"], pool: I64[Tensor, "E"]) -> Known:
    """The index of the true and of the derivable atoms, by what is asked of them.

    Args:
      pool: the entities to rank against, ascending.
    """
    index = lambda atoms: asked.triples(atoms, sizes.n_constants, pool)
    return Known(true=index(true), derived=index(model.atoms))


def rank_split(
    protocol: Protocol,
    model: Model,
    known: Known,
    split: I32[Tensor, "Q W"],
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
    sides = [_candidates(protocol, model, known, split.long(), query_id, pool, side) for side in protocol.sides]
    listed, sizes = torch.cat([side.atom for side in sides]), model.sizes
    distinct, index = kbase.index_atoms(listed, sizes.n_predicates, sizes.n_constants)
    atoms, row = listed[distinct], kbase.locate(index, sizes, listed)
    score = scorer(atoms.to(torch.int32))
    value = ranking.quantise(score)[row]
    parts, answers, first = [], [], 0
    for side in sides:
        here = value[first : first + len(side.query)]
        first += len(side.query)
        parts.append(ranking.compare_listed(side.query, here, side.is_answer, side.n_candidates))
        unscored = torch.full_like(side.n_candidates, ranking.BOTTOM)
        answers.append(unscored.scatter(0, side.query[side.is_answer], here[side.is_answer]))
    each = torch.arange(len(split), device=split.device)
    return Ranking(
        split=split,
        counts=ranking.Counts(*(torch.cat(same) for same in zip(*parts))),
        side=torch.cat([torch.full_like(each, side) for side in protocol.sides]),
        query=each.repeat(len(sides)),
        relation=split[:, 0].long().repeat(len(sides)),
        provable=torch.cat([side.provable for side in sides]),
        answer=torch.cat(answers),
        listed=value,
        listed_for=torch.cat([side.query + i * len(split) for i, side in enumerate(sides)]),
        is_answer=torch.cat([side.is_answer for side in sides]),
        near=ranking.near_boundary(score, ROUNDING)[row],
        atom=atoms,
        score=score,
    )


def summarise(ranked: Ranking, predicates: list[str], *, with_auc: bool) -> dict[str, Any]:
    """The headline numbers under `expected` ties, and every policy, side and relation below them.

    Args:
      with_auc: also the area under the precision-recall curve over all candidates pooled; unprovable ones score 0.
    """
    result = headline(ranked.counts, ranked.side, ranked.relation, ranked.provable, predicates)
    return result | {"n_scored": len(ranked.atom)} | ({"auc_pr": auc_pr(ranked)} if with_auc else {})


def headline(
    counts: ranking.Counts,
    side: I64[Tensor, "Q"],
    relation: I64[Tensor, "Q"],
    provable: Bool[Tensor, "Q"],
    predicates: list[str],
) -> dict[str, Any]:
    """The same from the counts of each query alone."""
    harmonics = ranking.harmonic(int(counts.n_candidates.max()), counts.n_candidates.device)
    summary = ranking.summary(counts, side, relation, provable, harmonics, n_predicates=len(predicates))
    table = ranking.as_dict(summary, predicates)
    both = table["all"]["both"]
    result = {name: both[name]["expected"] for name in ("mrr", "hits@1", "hits@3", "hits@10")}
    result |= {"ties": both["n_tied"], "ceiling": both["ceiling"], "n_queries": both["n_queries"]}
    return result | {"n_candidates": int(counts.n_candidates.sum()), "by_group": table}


def auc_pr(ranked: Ranking) -> float:
    """Average precision of the answers over the candidates of all queries pooled; those not listed score 0."""
    return pooled_precision(ranked.listed, ranked.is_answer, int(ranked.counts.n_candidates.sum()), len(ranked.query))


def pooled_precision(
    listed: I64[Tensor, "L"], is_answer: Bool[Tensor, "L"], n_candidates: int, n_answers: int
) -> float:
    """Average precision over listed candidates and the others of `n_candidates`, which score 0.

    Args:
      n_answers: listed or not.
    """
    hidden = listed.new_full((n_candidates - len(listed),), ranking.BOTTOM)
    true = torch.arange(len(hidden), device=hidden.device) < n_answers - int(is_answer.sum())
    return float(ranking.average_precision(torch.cat([listed, hidden]), torch.cat([is_answer, true])))


def _candidates(
    protocol: Protocol, model: Model, known: Known, split: Tensor, query_id: Tensor, pool: Tensor, side: int
) -> Asked:
    """Those to score on one side; the answer is listed where it is provable, or where all are."""
    true, derived = known
    provable = asked.holds(derived, split, side)
    if protocol.negatives is None and not protocol.list_all:
        found = asked.provable_candidates(true, derived, split, side)
        total = asked.n_candidates(true, split, side, len(pool))
        return Asked(found.query, _with(split[found.query], side, found.entity), found.is_answer, total, provable)
    if protocol.negatives is None:
        entity, filled = _unfiltered(true, split, pool, side)
    else:
        key = random.key(protocol.seed, split.device)
        entity, filled = asked.sampled_candidates(key, true, pool, split, side, protocol.negatives, query_id)
    total = filled.sum(1) + 1
    entity, filled = torch.cat([split[:, side, None], entity], 1), torch.cat([filled[:, :1] | True, filled], 1)
    atom = _with(split[:, None].expand(-1, entity.shape[1], -1), side, entity)
    is_answer = torch.arange(entity.shape[1], device=split.device) == 0
    wanted = filled & (protocol.list_all | (fixpoint.contains(model, atom) >= 0))
    query, slot = wanted.nonzero(as_tuple=True)
    return Asked(query, atom[wanted], is_answer[slot], total, provable)


def _unfiltered(true: asked.Triples, split: Tensor, pool: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Every entity of the pool for every query, and which of them are candidates other than the answer."""
    entity = pool.expand(len(split), -1)
    atom = _with(split[:, None].expand(-1, len(pool), -1), side, entity)
    return entity, ~asked.holds(true, atom, side) & (entity != split[:, side, None])


def _with(atoms: Tensor, side: int, entity: Tensor) -> Tensor:
    """The atoms with one argument replaced."""
    here = torch.arange(atoms.shape[-1], device=atoms.device) == side
    return torch.where(here, entity[..., None], atoms)
