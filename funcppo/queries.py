"""Which atoms are asked: filtered candidates of a ranking, and the queries that a policy is trained on.

A ranking query is a true triple and a side: `HEAD` replaces its first argument, `TAIL` its second. Its candidates are
the answer and every entity of the pool whose atom is not known to be true; the known atoms are those of *all* splits.

Axes here: Q queries, E entities of the pool, L candidates of all queries together, G draws a query.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funcppo import random
from funcppo.logic import kb as kb_
from funcppo.logic.kb import KnowledgeBase, Sizes
from funcppo.types import I64, Bool

HEAD, TAIL = 1, 2  # the argument that is replaced
TRIES = 8  # corruptions drawn for a negative before it counts as failed


class Triples(NamedTuple):
    """Distinct triples as ascending keys, for lookup by the two arguments of either side's question.

    A key is (predicate, given argument, asked argument), in base C + 1.
    """

    base: I64[Tensor, ""]  # C + 1
    head: I64[Tensor, "N"]  # keys (predicate, tail, head)
    tail: I64[Tensor, "N"]  # keys (predicate, head, tail)


class Candidates(NamedTuple):
    """The provable candidates of a batch of queries, in ascending order of query and entity."""

    query: I64[Tensor, "L"]  # row of the query
    entity: I64[Tensor, "L"]
    is_answer: Bool[Tensor, "L"]
    answer_provable: Bool[Tensor, "Q"]


class Sample(NamedTuple):
    """Corruptions drawn for a batch of queries."""

    entity: I64[Tensor, "Q G"]  # distinct in a row, never the answer; 0 where not filled
    filled: Bool[Tensor, "Q G"]  # false where a query has fewer corruptions than were asked for


class TrainingQueries(NamedTuple):
    """A batch of atoms to prove, with the answer key."""

    query: I64[Tensor, "B W"]
    label: Bool[Tensor, "B"]  # whether it is a train fact
    failed: Bool[Tensor, "B"]  # was to be a negative, but every corruption drawn was a train fact; count these


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


def triples(atoms: I64[Tensor, "N W"], n_constants: int, pool: I64[Tensor, "E"] | None = None) -> Triples:
    """The index of a table of ground atoms, in any order; atoms of other than two arguments answer no ranking query.

    Args:
      pool: keep on each side only triples whose asked argument is one of these entities; None keeps all.
    Errors: ValueError when the keys of so many predicates and constants exceed 63 bits.
    """
    atoms, base = atoms.to(torch.int64), n_constants + 1
    if (int(atoms[:, 0].max()) if len(atoms) else 0) * base * base + base * base >= 2**63:
        raise ValueError(f"{n_constants} constants: a triple does not fit a key of 63 bits")
    of_two = atoms[(atoms[:, 2] > 0) & (atoms[:, 3:] == 0).all(1)] if atoms.shape[1] > 2 else atoms.new_zeros((0, 3))
    key = lambda given, asked: (of_two[:, 0] * base + of_two[:, given]) * base + of_two[:, asked]
    kept = lambda asked: slice(None) if pool is None else torch.isin(of_two[:, asked], pool)
    return Triples(
        base=torch.tensor(base, device=atoms.device),
        head=torch.unique(key(TAIL, HEAD)[kept(HEAD)]),
        tail=torch.unique(key(HEAD, TAIL)[kept(TAIL)]),
    )


def holds(triples: Triples, atoms: I64[Tensor, "... W"], side: int) -> Bool[Tensor, "..."]:
    """Whether each atom is among the triples, and its argument `side` in the pool that they are restricted to."""
    return _among(_keys(triples, side), _pattern(triples, atoms, side) + atoms[..., side])


def n_candidates(known: Triples, queries: I64[Tensor, "Q W"], side: int, n_entities: int) -> I64[Tensor, "Q"]:
    """How many candidates each query has, its answer included: the pool less the other known answers.

    Args:
      known: the triples of all splits, restricted to the pool.
      side: `HEAD` or `TAIL`.
      n_entities: size of the pool, which holds every answer.
    """
    start, stop = _answers(known, queries, side)
    return n_entities - (stop - start) + holds(known, queries, side).to(torch.int64)


def provable_candidates(known: Triples, model: Triples, queries: I64[Tensor, "Q W"], side: int) -> Candidates:
    """The candidates whose atom is derivable: the only ones that need a score, since the others score 0.

    Args:
      known: the triples of all splits.
      model: the derivable atoms, restricted to the pool; facts included or not, for known atoms are filtered.
      side: `HEAD` or `TAIL`.
    """
    query, key = _list_answers(model, queries, side)
    entity = key % model.base
    is_answer = entity == queries[query, side]
    kept = is_answer | ~_among(_keys(known, side), key)
    return Candidates(
        query=query[kept],
        entity=entity[kept],
        is_answer=is_answer[kept],
        answer_provable=holds(model, queries, side),
    )


def sampled_candidates(
    key: I64[Tensor, "2"],
    known: Triples,
    pool: I64[Tensor, "E"],
    queries: I64[Tensor, "Q W"],
    side: int,
    n: int,
    query_id: I64[Tensor, "Q"],
) -> Sample:
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
    blocked = _blocked(known, pool, queries, side)
    n_blocked = torch.bincount(blocked // width, minlength=len(queries))
    first = n_blocked.cumsum(0) - n_blocked
    gap = blocked - (torch.arange(len(blocked), device=queries.device) - first[blocked // width])
    rank, filled = _subset(random.fold_in(random.fold_in(key, side), query_id), len(pool) - n_blocked, n)
    skipped = torch.searchsorted(gap, row[:, None] * width + rank, right=True) - first[:, None]
    position = torch.where(filled, rank + skipped, 0)
    return Sample(entity=torch.where(filled, pool[position], 0), filled=filled)


def draw_training_queries(
    key: I64[Tensor, "B 2"],
    kb: KnowledgeBase,
    sizes: Sizes,
    train: I64[Tensor, "N W"],
    hard: I64[Tensor, "H W"],
    positive_fraction: float,
    hard_fraction: float,
) -> TrainingQueries:
    """A query for each key: train facts, corruptions of them that are not, and atoms from a table of hard negatives.

    A corruption replaces one argument, drawn uniformly, of a train fact, drawn uniformly, by a uniform constant; the
    first of `TRIES` that is not a fact is taken, so it is uniform over such corruptions. A row without one becomes the
    positive that its first try is, and is flagged.

    Args:
      kb: its facts are what a negative must not be among; no other split is looked at.
      train: the facts to draw from, not empty.
      hard: provable atoms that are not facts; may be empty when `hard_fraction` is 0.
      positive_fraction: probability that a row is a positive.
      hard_fraction: probability that a negative comes from `hard`.
    Errors: ValueError when a table that is drawn from is empty.
    """
    if len(train) == 0 or (len(hard) == 0 and hard_fraction > 0):
        raise ValueError(
            f"want facts to draw queries from, got {len(train)} train facts and {len(hard)} hard negatives"
        )
    words = random.fold_in(key[:, None], torch.arange(4 + 3 * TRIES, device=key.device))
    positive = _unit(words[:, 0]) < positive_fraction
    negative, failed = _corruption(words[:, 4:].unflatten(1, (TRIES, 3)), kb, sizes, train)
    is_hard = ~positive & (_unit(words[:, 2]) < hard_fraction)
    if len(hard):
        drawn = hard[_below(words[:, 3], len(hard))].to(torch.int64)
        negative = torch.where(is_hard[:, None], drawn, negative)
    failed = failed & ~positive & ~is_hard
    fact = train[_below(words[:, 1], len(train))].to(torch.int64)
    query = torch.where(positive[:, None], fact, negative)
    return TrainingQueries(query=query, label=positive | failed, failed=failed)


def _corruption(words: Tensor, kb: KnowledgeBase, sizes: Sizes, train: Tensor) -> tuple[Tensor, Tensor]:
    """Of TRIES corruptions a row, the first that is no fact, or the first of all; and whether all are facts."""
    fact = train[_below(words[..., 0, :], len(train))].to(torch.int64)
    arity = (fact[..., 1:] > 0).sum(-1, keepdim=True)
    argument = 1 + _below(words[..., 1, :], arity[..., 0].clamp_min(1))[..., None]
    constant = 1 + _below(words[..., 2, :], sizes.n_constants)[..., None]
    column = torch.arange(fact.shape[-1], device=fact.device)
    corrupted = torch.where((column == argument) & (argument <= arity), constant, fact)
    is_fact = kb_.contains(kb, sizes, corrupted)
    chosen = (~is_fact).to(torch.int64).argmax(1)
    negative = corrupted.gather(1, chosen[:, None, None].expand(-1, 1, corrupted.shape[-1]))
    return negative[:, 0], is_fact.all(1)


def _unit(words: Tensor) -> Tensor:
    """Uniform on [0, 1) with 24 bits, from the two words of a key that is used for nothing else."""
    return (words[..., 0] >> 8).to(torch.float32) * 2.0**-24


def _below(words: Tensor, bound: Tensor | int) -> Tensor:
    """Uniform on 0 .. bound - 1 from 63 bits of such a key; no value is likelier by more than bound / 2**63."""
    return (((words[..., 0] & 0x7FFFFFFF) << 32) + words[..., 1]) % bound


def _subset(key: Tensor, size: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """A uniform subset of 0 .. size - 1 a row, of n members or all of them, and which of the n slots are filled.

    Member i of n is a uniform t_i <= j_i = size - n + i, or j_i itself when t_i is a member already, that is when
    t_i = t_k for a k < i, or t_i = j_k for a k < i that had to give way itself: a chain, followed by doubling.

    Source: Floyd's algorithm in Bentley 1987, "A sample of brilliance", CACM 30(9).
    """
    slot = torch.arange(n, device=size.device)
    last = (size[:, None] - n + slot).clamp_min(0)
    draw = _below(random.fold_in(key[:, None], slot), last + 1)
    value, order = torch.sort(draw, dim=1, stable=True)
    repeats = torch.nn.functional.pad(value[:, 1:] == value[:, :-1], (1, 0))
    taken = torch.zeros_like(repeats).scatter(1, order, repeats)
    before = draw - (size[:, None] - n)
    before = torch.where((before >= 0) & (before < slot), before, slot)
    for _ in range(n.bit_length()):
        taken, before = taken | taken.gather(1, before), before.gather(1, before)
    return torch.where(size[:, None] < n, slot, torch.where(taken, last, draw)), slot < size[:, None]


def _keys(triples: Triples, side: int) -> Tensor:
    return triples.head if side == HEAD else triples.tail


def _pattern(triples: Triples, queries: Tensor, side: int) -> Tensor:
    """The key of a query with its asked argument left 0."""
    predicate, given = queries[..., 0].to(torch.int64), queries[..., HEAD + TAIL - side]
    return (predicate * triples.base + given) * triples.base


def _among(keys: Tensor, key: Tensor) -> Tensor:
    at = torch.searchsorted(keys, key)
    return at < torch.searchsorted(keys, key, right=True)


def _answers(triples: Triples, queries: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Where the triples that answer each query start and stop in the keys of this side."""
    pattern = _pattern(triples, queries, side)
    keys = _keys(triples, side)
    return torch.searchsorted(keys, pattern), torch.searchsorted(keys, pattern + triples.base)


def _list_answers(triples: Triples, queries: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """The query's row and the key of every triple that answers a query."""
    start, stop = _answers(triples, queries, side)
    count = stop - start
    query = torch.repeat_interleave(torch.arange(len(queries), device=queries.device), count)
    within = torch.arange(len(query), device=queries.device) - (count.cumsum(0) - count)[query]
    return query, _keys(triples, side)[start[query] + within]


def _blocked(known: Triples, pool: Tensor, queries: Tensor, side: int) -> Tensor:
    """row * (E + 1) + position in the pool, ascending, of each query's answer and of its other known answers."""
    query, key = _list_answers(known, queries, side)
    unlisted = (~holds(known, queries, side)).nonzero()[:, 0]
    entity = torch.cat([key % known.base, queries[unlisted, side]])
    position = torch.searchsorted(pool, entity)
    return torch.sort(torch.cat([query, unlisted]) * (len(pool) + 1) + position)[0]
