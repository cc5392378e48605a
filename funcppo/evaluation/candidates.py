"""TODO."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funcppo import random
from funcppo.logic.triple_index import TripleIndex, _among, _answers, _keys, _list_answers, contains
from funcppo.random import integer_from_key
from funcppo.types import I64, Bool


class ProvableCandidates(NamedTuple):
    """The provable candidates of a batch of queries, in ascending order of query and entity."""

    query_row: I64[Tensor, "L"]  # row of the query
    entity: I64[Tensor, "L"]
    is_answer: Bool[Tensor, "L"]
    answer_provable: Bool[Tensor, "Q"]


class SampledCorruptions(NamedTuple):
    """Corruptions drawn for a batch of queries."""

    entity: I64[Tensor, "Q G"]  # distinct in a row, never the answer; 0 where not filled
    mask: Bool[Tensor, "Q G"]  # false where a query has fewer corruptions than were asked for


def check_queries(queries: I64[Tensor, "Q W"], side: int, pool: I64[Tensor, "E"], n_constants: int) -> None:
    """Nothing, when every query can be ranked against the pool.

    Errors: ValueError naming the query, when its predicate has other than two arguments, it is not ground, or its
      answer is not in the pool; and when the pool is not ascending.
    """
    pair, rest = queries[:, 1:3], queries[:, 3:]
    bad = (pair < 1).any(1) | (pair > n_constants).any(1) | (rest != 0).any(1) | (pair.shape[1] < 2)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise ValueError(f"query {row} {queries[row].tolist()}: want two arguments, constants from 1 to {n_constants}")
    if (pool[1:] <= pool[:-1]).any():
        raise ValueError("pool: want entities in ascending order, each once")
    missing = ~torch.isin(queries[:, side], pool)
    if missing.any():
        row = int(missing.nonzero()[0])
        raise ValueError(f"query {row} {queries[row].tolist()}: want its answer among the {len(pool)} candidates")


def count_candidates(
    true_triples: TripleIndex, queries: I64[Tensor, "Q W"], side: int, pool_size: int
) -> I64[Tensor, "Q"]:
    """How many candidates each query has, its answer included: the pool less the other known answers.

    Args:
      known: the triples of all splits, restricted to the pool.
      side: `HEAD` or `TAIL`.
      n_entities: size of the pool, which holds every answer.
    """
    start, stop = _answers(true_triples, queries, side)
    return pool_size - (stop - start) + contains(true_triples, queries, side).to(torch.int64)


def list_provable_candidates(
    true_triples: TripleIndex, derivable_triples: TripleIndex, queries: I64[Tensor, "Q W"], side: int
) -> ProvableCandidates:
    """The candidates whose atom is derivable: the only ones that need a score, since the others score 0.

    Args:
      known: the triples of all splits.
      model: the derivable atoms, restricted to the pool; facts included or not, for known atoms are filtered.
      side: `HEAD` or `TAIL`.
    """
    query, key = _list_answers(derivable_triples, queries, side)
    entity = key % derivable_triples.base
    is_answer = entity == queries[query, side]
    kept = is_answer | ~_among(_keys(true_triples, side), key)
    return ProvableCandidates(
        query_row=query[kept],
        entity=entity[kept],
        is_answer=is_answer[kept],
        answer_provable=contains(derivable_triples, queries, side),
    )


def sample_corruptions(
    key: I64[Tensor, "2"],
    true_triples: TripleIndex,
    pool: I64[Tensor, "E"],
    queries: I64[Tensor, "Q W"],
    side: int,
    n_corruptions: int,
    query_id: I64[Tensor, "Q"],
) -> SampledCorruptions:
    """`n` corruptions a query: a uniform subset of its candidates other than the answer, in no particular order.

    A query's draw depends on the key, the side and its id alone, not on the rest of the batch. No draw is rejected, and
    a query with fewer than `n` corruptions gets them all: the r-th entity that is allowed stands in the pool at

        r + #{j : position_j - j <= r},    position_0 < position_1 < ... of the entities that are not

    Args:
      known: the triples of all splits, restricted to the pool.
      pool: entities to choose from, ascending; it holds every answer.
      query_id: a number below 2**32 that stays with the query, such as its row in its split.
    """
    row = torch.arange(len(queries), device=queries.device)
    width = len(pool) + 1
    blocked = _blocked(true_triples, pool, queries, side)
    n_blocked = torch.bincount(blocked // width, minlength=len(queries))
    first = n_blocked.cumsum(0) - n_blocked
    gap = blocked - (torch.arange(len(blocked), device=queries.device) - first[blocked // width])
    rank, filled = _subset(random.fold_in(random.fold_in(key, side), query_id), len(pool) - n_blocked, n_corruptions)
    skipped = torch.searchsorted(gap, row[:, None] * width + rank, right=True) - first[:, None]
    position = torch.where(filled, rank + skipped, 0)
    return SampledCorruptions(entity=torch.where(filled, pool[position], 0), mask=filled)


def _subset(key: Tensor, size: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """A uniform subset of 0 .. size - 1 a row, of n members or all of them, and which of the n slots are filled.

    Member i of n is a uniform t_i <= j_i = size - n + i, or j_i itself when t_i is a member already, that is when
    t_i = t_k for a k < i, or t_i = j_k for a k < i that had to give way itself: a chain, followed by doubling.

    Source: Floyd's algorithm in Bentley 1987, "A sample of brilliance", CACM 30(9).
    """
    slot = torch.arange(n, device=size.device)
    last = (size[:, None] - n + slot).clamp_min(0)
    draw = integer_from_key(random.fold_in(key[:, None], slot), last + 1)
    value, order = torch.sort(draw, dim=1, stable=True)
    repeats = torch.nn.functional.pad(value[:, 1:] == value[:, :-1], (1, 0))
    taken = torch.zeros_like(repeats).scatter(1, order, repeats)
    before = draw - (size[:, None] - n)
    before = torch.where((before >= 0) & (before < slot), before, slot)
    for _ in range(n.bit_length()):
        taken, before = taken | taken.gather(1, before), before.gather(1, before)
    return torch.where(size[:, None] < n, slot, torch.where(taken, last, draw)), slot < size[:, None]


def _blocked(known: TripleIndex, pool: Tensor, queries: Tensor, side: int) -> Tensor:
    """row * (E + 1) + position in the pool, ascending, of each query's answer and of its other known answers."""
    query, key = _list_answers(known, queries, side)
    unlisted = (~contains(known, queries, side)).nonzero()[:, 0]
    entity = torch.cat([key % known.base, queries[unlisted, side]])
    position = torch.searchsorted(pool, entity)
    return torch.sort(torch.cat([query, unlisted]) * (len(pool) + 1) + position)[0]
