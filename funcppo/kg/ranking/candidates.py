"""Candidates of a ranking query: the entities that its answer is ranked against.

A query is a triple whose argument on one side, head or tail, is the answer. Its candidates are the answer and every
entity of the pool that completes it to no known triple, or a sample of these; known are the triples of all splits and
of facts.txt (the filtered setting).

`list_candidates` builds the table of the candidates that need a score. By every score but `greedy`, an unprovable
candidate scores 0; these candidates tie below all others, their number is known, and only the provable ones are listed.

Axes: Q queries of a batch, L listed candidates of all queries together, G corruptions of a query, E entities of the
pool, W atom width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core import random
from funcppo.core.types import I64, Bool
from funcppo.kg.logic import row_index, triple_index
from funcppo.kg.logic.triple_index import HEAD, TAIL, FilterIndex, TripleIndex


@dataclass(frozen=True, kw_only=True, slots=True)
class RankingProtocol:
    """Which candidates the answer of a query is ranked against."""

    # the arguments that are replaced, each a ranking of its own
    sides: tuple[int, ...] = (HEAD, TAIL)
    # corruptions sampled for each query and side; None ranks against the whole pool
    n_negatives: int | None = None
    # compute the scores of unprovable candidates too
    score_unprovable: bool = False
    seed: int = 0  # of the sampled corruptions


class ProvableCandidates(NamedTuple):
    """The provable candidates of a batch of queries, in ascending order of query and entity."""

    query_row: I64[Tensor, "L"]  # row of the query in the batch
    entity: I64[Tensor, "L"]  # the entity that replaces the answer
    is_answer: Bool[Tensor, "L"]  # the candidate is the answer itself
    # the answer of the query is among its provable candidates
    answer_provable: Bool[Tensor, "Q"]


class SampledCorruptions(NamedTuple):
    """Corruptions sampled for a batch of queries."""

    # distinct in a row, never the answer; 0 where the slot is empty
    entity: I64[Tensor, "Q G"]
    # the slot holds a corruption; false where a query has fewer than G
    mask: Bool[Tensor, "Q G"]


class CandidateTable(NamedTuple):
    """The candidates of a batch of queries on one side that need a score."""

    query_row: I64[Tensor, "L"]  # row of the query in the batch
    # the query with the candidate in place of the answer
    atom: I64[Tensor, "L W"]
    is_answer: Bool[Tensor, "L"]  # the candidate is the answer itself
    # candidates of the query, listed here or not
    n_candidates: I64[Tensor, "Q"]
    answer_provable: Bool[
        Tensor, "Q"
    ]  # T_P derives the answer, a fact from other facts


class _EntityTable(NamedTuple):
    """Entities of a batch of queries, as many columns for each."""

    entity: I64[Tensor, "Q G"]
    mask: Bool[Tensor, "Q G"]  # the entity is a candidate


class _Subset(NamedTuple):
    """A subset of 0 .. size - 1 for each row."""

    member: I64[Tensor, "Q G"]  # distinct where the mask is true
    # false in the last slots of a row with fewer than G members
    mask: Bool[Tensor, "Q G"]


def check_queries(
    queries: I64[Tensor, "Q W"],
    side: int,
    pool: I64[Tensor, "E"],
    n_constants: int,
) -> None:
    """Check that every query can be ranked against the pool.

    Raises:
      ValueError: a query, which the message names, has other than two arguments, is not ground, or has an answer
        outside the pool; or the pool is not ascending.
    """
    arguments, padding = queries[:, HEAD : TAIL + 1], queries[:, TAIL + 1 :]
    is_constant = (arguments >= 1) & (arguments <= n_constants)
    is_binary = (padding == 0).all(1) & (arguments.shape[1] == TAIL)
    _check_each(
        is_constant.all(1) & is_binary,
        queries,
        f"two arguments, constants from 1 to {n_constants}",
    )

    is_ascending = pool[1:] > pool[:-1]
    if not is_ascending.all():
        raise ValueError(
            "expected a pool of entities in ascending order, each once, got another order"
        )
    _check_each(
        row_index.binary_search(pool, queries[:, side].long()).found,
        queries,
        f"an answer among the {len(pool)} candidates",
    )


def list_candidates(
    protocol: RankingProtocol,
    filter_index: FilterIndex,
    queries: I64[Tensor, "Q W"],
    query_id: I64[Tensor, "Q"],
    pool: I64[Tensor, "E"],
    side: int,
) -> CandidateTable:
    """List the candidates of one side that need a score: the provable ones, or all if `protocol.score_unprovable`.

    The answer is one of the candidates, and is listed by the same rule.

    Args:
      query_id: see `sample_corruptions`.
      pool: the entities to rank against, ascending.
    """
    if protocol.n_negatives is None and not protocol.score_unprovable:
        return _provable_table(filter_index, queries, side, len(pool))

    true_triples = filter_index.true_triples
    if protocol.n_negatives is None:
        others = _all_corruptions(true_triples, queries, pool, side)
    else:
        key = random.key(protocol.seed, queries.device)
        # No query has more corruptions than the pool has entities, and a larger sample would take memory.
        n_corruptions = min(protocol.n_negatives, len(pool))
        others = sample_corruptions(
            key,
            true_triples,
            pool,
            queries,
            side,
            n_corruptions,
            query_id,
        )

    # The answer comes first, in column 0.
    answer = queries[:, side, None]
    entity = torch.cat([answer, others.entity], 1)
    is_listed = torch.nn.functional.pad(others.mask, (1, 0), value=True)
    atom = _corrupt(queries, side, entity)
    if not protocol.score_unprovable:
        is_listed = is_listed & triple_index.contains(
            filter_index.derivable_triples, atom, side
        )

    query_row, column = is_listed.nonzero(as_tuple=True)
    return CandidateTable(
        query_row=query_row,
        atom=atom[is_listed],
        is_answer=column == 0,
        n_candidates=others.mask.sum(1) + 1,
        answer_provable=triple_index.contains(
            filter_index.derivable_triples,
            queries,
            side,
        ),
    )


def count_candidates(
    true_triples: TripleIndex,
    queries: I64[Tensor, "Q W"],
    side: int,
    pool_size: int,
) -> I64[Tensor, "Q"]:
    """The number of candidates of each query, its answer included: the pool less the other true answers.

    Args:
      true_triples: the known triples, restricted to the pool.
      side: `HEAD` or `TAIL`.
      pool_size: number of entities of the pool, which holds every answer.
    """
    start, stop = triple_index.answer_range(true_triples, queries, side)
    answer_is_true = triple_index.contains(true_triples, queries, side)
    return pool_size - (stop - start) + answer_is_true.to(torch.int64)


def list_provable_candidates(
    true_triples: TripleIndex,
    derivable_triples: TripleIndex,
    queries: I64[Tensor, "Q W"],
    side: int,
) -> ProvableCandidates:
    """List the candidates whose triple is derivable: the only ones that need a score, since the others score 0.

    Args:
      true_triples: the known triples.
      derivable_triples: the derivable triples, restricted to the pool; with or without the facts, which are filtered.
      side: `HEAD` or `TAIL`.
    """
    answers = triple_index.list_answers(derivable_triples, queries, side)
    is_answer = answers.entity == queries[answers.query_row, side]
    is_candidate = is_answer | ~triple_index.contains_key(
        true_triples,
        answers.triple_key,
        side,
    )
    return ProvableCandidates(
        query_row=answers.query_row[is_candidate],
        entity=answers.entity[is_candidate],
        is_answer=is_answer[is_candidate],
        answer_provable=triple_index.contains(derivable_triples, queries, side),
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
    """Sample corruptions of each query: a uniform subset of its candidates other than the answer, in no special order.

    A query's sample depends on the key, the side and its id alone, not on the rest of the batch. There is no rejection
    sampling, and a query with fewer than `n_corruptions` gets them all: a random subset of 0, 1, ... says which of the
    allowed entities to take. The allowed entity number r, counted from 0, stands in the pool at

        r + #{j : position_j - j <= r},    position_0 < position_1 < ... of the entities that are not allowed

    For example, a pool of 6 without positions 1 and 4 has allowed positions 0, 2, 3, 5. position_j - j is 1 and 3; for
    r = 2 one of these is at most 2, and allowed entity number 2 stands at 2 + 1 = 3.

    Args:
      true_triples: the known triples, restricted to the pool.
      pool: entities to choose from, ascending; it holds every answer.
      query_id: a number below 2**32 that stays with the query, such as its row in its split.
    """
    device, n_queries, width = queries.device, len(queries), len(pool) + 1

    # Excluded entities of all queries in one ascending table, coded as query_row * width + position in the pool.
    excluded = _excluded_entities(true_triples, pool, queries, side)
    excluded_query = excluded // width
    n_excluded = torch.bincount(excluded_query, minlength=n_queries)
    first_excluded = n_excluded.cumsum(0) - n_excluded

    side_key = random.fold_in(key, side)
    query_key = random.fold_in(side_key, query_id)
    n_allowed = len(pool) - n_excluded
    allowed, mask = _sample_subset(query_key, n_allowed, n_corruptions)

    # position_j - j, coded in the same way: one binary search counts the excluded entities before each allowed one.
    index = torch.arange(len(excluded), device=device)
    j = index - first_excluded[excluded_query]
    query_row = torch.arange(n_queries, device=device)
    code = query_row[:, None] * width + allowed
    n_below = torch.searchsorted(excluded - j, code, right=True)
    n_skipped = n_below - first_excluded[:, None]

    position = torch.where(mask, allowed + n_skipped, 0)
    entity = torch.where(mask, pool[position], 0)
    return SampledCorruptions(entity=entity, mask=mask)


def _check_each(is_valid: Tensor, queries: Tensor, expected: str) -> None:
    """Check that all queries are valid.

    Raises:
      ValueError: one is not, which the message names.
    """
    if is_valid.all():
        return
    row = int((~is_valid).nonzero()[0])
    raise ValueError(
        f"expected {expected}, got query {row} {queries[row].tolist()}"
    )


def _provable_table(
    filter_index: FilterIndex,
    queries: I64[Tensor, "Q W"],
    side: int,
    pool_size: int,
) -> CandidateTable:
    """The provable candidates among the whole pool."""
    true_triples, derivable_triples = filter_index
    provable = list_provable_candidates(
        true_triples, derivable_triples, queries, side
    )
    query = queries[provable.query_row]
    return CandidateTable(
        query_row=provable.query_row,
        atom=_replace_argument(query, side, provable.entity),
        is_answer=provable.is_answer,
        n_candidates=count_candidates(true_triples, queries, side, pool_size),
        answer_provable=provable.answer_provable,
    )


def _all_corruptions(
    true_triples: TripleIndex,
    queries: I64[Tensor, "Q W"],
    pool: I64[Tensor, "E"],
    side: int,
) -> _EntityTable:
    """Every entity of the pool for every query, and which of them are candidates other than the answer."""
    entity = pool.expand(len(queries), -1)
    atom = _corrupt(queries, side, entity)
    is_true = triple_index.contains(true_triples, atom, side)
    answer = queries[:, side, None]
    is_answer = entity == answer
    return _EntityTable(entity=entity, mask=~is_true & ~is_answer)


def _corrupt(
    queries: I64[Tensor, "Q W"], side: int, entity: I64[Tensor, "Q G"]
) -> I64[Tensor, "Q G W"]:
    """Each query with each of its entities in place of the answer."""
    query = queries[:, None].expand(-1, entity.shape[1], -1)
    return _replace_argument(query, side, entity)


def _replace_argument(atoms: Tensor, side: int, entity: Tensor) -> Tensor:
    """The atoms with an entity in place of the argument `side`."""
    column = torch.arange(atoms.shape[-1], device=atoms.device)
    is_replaced = column == side
    return torch.where(is_replaced, entity[..., None], atoms)


def _sample_subset(
    key: I64[Tensor, "Q 2"], size: I64[Tensor, "Q"], n: int
) -> _Subset:
    """Sample a uniform subset of 0 .. size - 1 for each row, of n members or of all where there are fewer.

    Member i of n is a uniform t_i <= j_i = size - n + i, or j_i itself when t_i is a member already, that is when
    t_i = t_k for a k < i, or t_i = j_k for a k < i that had to give way itself: a chain, followed by doubling.

    For example, size 5 and n = 3 have j = 2, 3, 4. Of the draws t = 1, 1, 3 the second repeats the first and gives way
    to j_1 = 3; the third is 3 = j_1, a member since slot 1 gave way, and gives way to j_2 = 4. The subset is 1, 3, 4.

    Source: Floyd's algorithm in Bentley 1987, "A sample of brilliance", CACM 30(9).
    """
    slot = torch.arange(n, device=size.device)
    size = size[:, None]

    # In the docstring's terms: first is j_0, last is j_i, draw is t_i.
    first = size - n
    last = (first + slot).clamp_min(0)
    slot_key = random.fold_in(key[:, None], slot)
    draw = random.integer_from_key(slot_key, last + 1)

    # t_i gives way to an equal t_k of an earlier slot: a stable sort puts the earliest of equal draws first.
    value, order = torch.sort(draw, dim=1, stable=True)
    is_repeated = value[:, 1:] == value[:, :-1]
    is_repeated = torch.nn.functional.pad(is_repeated, (1, 0))
    is_taken = torch.zeros_like(is_repeated).scatter(1, order, is_repeated)

    # t_i = j_k gives way where slot k did. Each doubling joins the chains of k to those of i; a slot without such a k
    # points to itself.
    link = draw - first
    is_linked = (link >= 0) & (link < slot)
    link = torch.where(is_linked, link, slot)
    for _ in range(n.bit_length()):
        is_taken = is_taken | is_taken.gather(1, link)
        link = link.gather(1, link)

    # A row with fewer than n elements takes them all.
    member = torch.where(is_taken, last, draw)
    member = torch.where(size < n, slot, member)
    return _Subset(member=member, mask=slot < size)


def _excluded_entities(
    true_triples: TripleIndex,
    pool: I64[Tensor, "E"],
    queries: I64[Tensor, "Q W"],
    side: int,
) -> I64[Tensor, "X"]:
    """The entities that corrupt no query: its answer and its other true answers.

    Returns:
      [X], query_row * (E + 1) + position in the pool for each of them, ascending.
    """
    answers = triple_index.list_answers(true_triples, queries, side)

    # The answer of a query that is no known triple is not listed among the true ones.
    is_listed = triple_index.contains(true_triples, queries, side)
    unlisted = (~is_listed).nonzero()[:, 0]
    query_row = torch.cat([answers.query_row, unlisted])
    entity = torch.cat([answers.entity, queries[unlisted, side]])

    position = torch.searchsorted(pool, entity)
    code = query_row * (len(pool) + 1) + position
    return torch.sort(code).values
