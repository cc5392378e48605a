"""TODO."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.logic.fixpoint import LeastModel
from funcppo.logic.kb import KBSizes
from funcppo.types import I32, I64, Bool

HEAD, TAIL = 1, 2  # the argument that is replaced


class TripleIndex(NamedTuple):
    """Distinct triples as ascending keys, for lookup by the two arguments of either side's question.

    A key is (predicate, given argument, asked argument), in base C + 1.
    """

    base: I64[Tensor, ""]  # C + 1
    head_query_keys: I64[Tensor, "N"]  # keys (predicate, tail, head)
    tail_query_keys: I64[Tensor, "N"]  # keys (predicate, head, tail)


def build_triple_index(
    atoms: I64[Tensor, "N W"], n_constants: int, pool: I64[Tensor, "E"] | None = None
) -> TripleIndex:
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
    return TripleIndex(
        base=torch.tensor(base, device=atoms.device),
        head_query_keys=torch.unique(key(TAIL, HEAD)[kept(HEAD)]),
        tail_query_keys=torch.unique(key(HEAD, TAIL)[kept(TAIL)]),
    )


def contains(index: TripleIndex, atoms: I64[Tensor, "... W"], side: int) -> Bool[Tensor, "..."]:
    """Whether each atom is among the triples, and its argument `side` in the pool that they are restricted to."""
    return _among(_keys(index, side), _pattern(index, atoms, side) + atoms[..., side])


def _keys(triples: TripleIndex, side: int) -> Tensor:
    return triples.head_query_keys if side == HEAD else triples.tail_query_keys


def _pattern(triples: TripleIndex, queries: Tensor, side: int) -> Tensor:
    """The key of a query with its asked argument left 0."""
    predicate, given = queries[..., 0].to(torch.int64), queries[..., HEAD + TAIL - side]
    return (predicate * triples.base + given) * triples.base


def _among(keys: Tensor, key: Tensor) -> Tensor:
    at = torch.searchsorted(keys, key)
    return at < torch.searchsorted(keys, key, right=True)


def _answers(triples: TripleIndex, queries: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Where the triples that answer each query start and stop in the keys of this side."""
    pattern = _pattern(triples, queries, side)
    keys = _keys(triples, side)
    return torch.searchsorted(keys, pattern), torch.searchsorted(keys, pattern + triples.base)


def _list_answers(triples: TripleIndex, queries: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """The query's row and the key of every triple that answers a query."""
    start, stop = _answers(triples, queries, side)
    count = stop - start
    query = torch.repeat_interleave(torch.arange(len(queries), device=queries.device), count)
    within = torch.arange(len(query), device=queries.device) - (count.cumsum(0) - count)[query]
    return query, _keys(triples, side)[start[query] + within]


class FilterIndex(NamedTuple):
    """What candidates are looked up in, the same for every query of a data set."""

    true_triples: TripleIndex  # the atoms of all splits, which are filtered from the candidates
    derivable_triples: TripleIndex  # the atoms that T_P derives


def build_filter_index(
    sizes: KBSizes, model: LeastModel, true_atoms: I32[Tensor, "N W"], pool: I64[Tensor, "E"]
) -> FilterIndex:
    """The index of the true and of the derivable atoms, by what is asked of them.

    Args:
      pool: the entities to rank against, ascending.
    """
    index = lambda atoms: build_triple_index(atoms, sizes.n_constants, pool)
    return FilterIndex(true_triples=index(true_atoms), derivable_triples=index(model.atoms))
