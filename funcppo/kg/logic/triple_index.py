"""Lookup of triples by the two sides of a ranking query.

A ranking query is a triple and a side: `HEAD` replaces its first argument, `TAIL` its second. `TripleIndex` answers two
questions for many queries at once: which entities complete a query to a triple of the index (`list_answers`), and
whether a triple is in the index (`contains`). `FilterIndex` holds the two indices that filtered ranking needs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.types import I32, I64, Bool
from funcppo.kg.logic.fixpoint import LeastModel
from funcppo.kg.logic.joins import expand_ranges
from funcppo.kg.logic.kb import KBSizes, find_atoms
from funcppo.kg.logic.row_index import binary_search, unique_values

HEAD, TAIL = 1, 2  # sides of a query: the argument that is replaced
SIDE_NAMES = {HEAD: "head", TAIL: "tail"}
MAX_KEY_BITS = 63  # bits of a non-negative int64
# Keys that a CPU looks up in one call, in half a second: a signal waits for its end.
MAX_SEARCHED_AT_ONCE = 1 << 22


class TripleIndex(NamedTuple):
    """Distinct triples as ascending integer keys, one table of keys for each side.

    The key of a triple for a side is (predicate, given argument, replaced argument) in base C + 1, so that all answers
    to one query are neighbours.
    """

    base: I64[Tensor, ""]  # C + 1
    head_query_keys: I64[Tensor, "N"]  # keys (predicate, tail, head)
    tail_query_keys: I64[Tensor, "N"]  # keys (predicate, head, tail)


class FilterIndex(NamedTuple):
    """The triples that candidates are looked up in, the same for every query of a data set."""

    # the known triples, of all splits and of facts.txt, which are filtered from the candidates
    true_triples: TripleIndex
    # the triples that T_P derives, without facts that no other facts prove if they are asked
    derivable_triples: TripleIndex


class AnswerRange(NamedTuple):
    """Positions of each query's answers in the keys of a side: start, and one past the last."""

    start: I64[Tensor, "Q"]
    stop: I64[Tensor, "Q"]


class Answers(NamedTuple):
    """The answers to a batch of queries, in ascending order of query and entity."""

    query_row: I64[Tensor, "L"]  # row of the query in the batch
    triple_key: I64[Tensor, "L"]  # key of the answering triple
    entity: I64[Tensor, "L"]  # its replaced argument


def build_triple_index(
    atoms: I64[Tensor, "N W"],
    n_constants: int,
    pool: I64[Tensor, "E"] | None = None,
) -> TripleIndex:
    """Build the index of the binary atoms of a table of ground atoms.

    Args:
      atoms: in any order, repetitions allowed. Atoms of other than two arguments answer no ranking query and are left
        out.
      pool: index on each side only triples whose replaced argument is one of these entities, which ascend; None indexes
        all.

    Raises:
      ValueError: the keys of so many predicates and constants exceed 63 bits.
    """
    atoms = atoms.to(torch.int64)
    base = n_constants + 1
    n_predicates = int(atoms[:, 0].max()) if len(atoms) else 0
    if (n_predicates + 1) * base * base >= 2**MAX_KEY_BITS:
        raise ValueError(
            f"expected triples whose keys fit {MAX_KEY_BITS} bits, "
            f"got {n_predicates} predicates and {n_constants} constants"
        )

    triples = binary_atoms(atoms)
    return TripleIndex(
        base=torch.tensor(base, device=atoms.device),
        head_query_keys=_sorted_keys(triples, base, HEAD, pool),
        tail_query_keys=_sorted_keys(triples, base, TAIL, pool),
    )


def build_filter_index(
    sizes: KBSizes,
    model: LeastModel,
    true_atoms: I32[Tensor, "N W"],
    pool: I64[Tensor, "E"],
    unproved_facts: I32[Tensor, "n W"] | None = None,
) -> FilterIndex:
    """Build the indices of the true and of the derivable triples.

    Args:
      true_atoms: the known atoms, of all splits and of facts.txt.
      pool: the entities to rank against, ascending.
      unproved_facts: facts that are not derivable when they are asked, since no other facts prove them; None for none.
    """
    derivable = model.atoms
    if unproved_facts is not None and len(unproved_facts):
        row = find_atoms(model.atom_index, sizes, unproved_facts.long())
        is_kept = torch.ones_like(model.height, dtype=torch.bool)
        derivable = derivable[is_kept.index_fill(0, row[row >= 0], False)]
    return FilterIndex(
        true_triples=build_triple_index(true_atoms, sizes.n_constants, pool),
        derivable_triples=build_triple_index(
            derivable, sizes.n_constants, pool
        ),
    )


def contains(
    index: TripleIndex, atoms: I64[Tensor, "... W"], side: int
) -> Bool[Tensor, "..."]:
    """Whether each atom is in the index of a side: a triple whose replaced argument is in the index's pool."""
    return contains_key(
        index, _query_key(index, atoms, side) + atoms[..., side], side
    )


def contains_key(
    index: TripleIndex, triple_key: I64[Tensor, "..."], side: int
) -> Bool[Tensor, "..."]:
    """Whether each key of a triple is in the index of a side."""
    keys = _side_keys(index, side)
    if triple_key.is_cuda or triple_key.numel() <= MAX_SEARCHED_AT_ONCE:
        return _is_among(keys, triple_key)
    parts = torch.split(triple_key.flatten(), MAX_SEARCHED_AT_ONCE)
    found = [_is_among(keys, part) for part in parts]
    return torch.cat(found).view(triple_key.shape)


def _is_among(
    keys: I64[Tensor, "N"], wanted: I64[Tensor, "..."]
) -> Bool[Tensor, "..."]:
    """Whether each value is one of some ascending ones."""
    first = torch.searchsorted(keys, wanted)
    return first < torch.searchsorted(keys, wanted, right=True)


def answer_range(
    index: TripleIndex, queries: I64[Tensor, "Q W"], side: int
) -> AnswerRange:
    """Find where the answers to each query start and stop in the keys of a side."""
    keys = _side_keys(index, side)
    query_key = _query_key(index, queries, side)
    return AnswerRange(
        start=torch.searchsorted(keys, query_key),
        stop=torch.searchsorted(keys, query_key + index.base),
    )


def list_answers(
    index: TripleIndex, queries: I64[Tensor, "Q W"], side: int
) -> Answers:
    """List every triple of the index that answers a query."""
    start, stop = answer_range(index, queries, side)
    query_row, position = expand_ranges(start, stop - start)
    triple_key = _side_keys(index, side)[position]
    return Answers(
        query_row=query_row,
        triple_key=triple_key,
        entity=triple_key % index.base,
    )


def binary_atoms(atoms: Tensor) -> Tensor:
    """The atoms of exactly two arguments."""
    if atoms.shape[1] <= TAIL:
        return atoms.new_zeros((0, TAIL + 1))
    return atoms[is_binary(atoms)]


def is_binary(atoms: Tensor) -> Tensor:
    """Whether each atom has exactly two arguments."""
    if atoms.shape[1] <= TAIL:
        return torch.zeros_like(atoms[:, 0], dtype=torch.bool)
    has_second_argument = atoms[:, TAIL] > 0
    has_no_third_argument = (atoms[:, TAIL + 1 :] == 0).all(1)
    return has_second_argument & has_no_third_argument


def _sorted_keys(
    triples: Tensor, base: int, side: int, pool: Tensor | None
) -> Tensor:
    """The ascending, distinct keys of triples for a side, of those whose replaced argument is in the pool."""
    given, replaced = triples[:, _given_argument(side)], triples[:, side]
    keys = (triples[:, 0] * base + given) * base + replaced
    if pool is not None:
        keys = keys[binary_search(pool, replaced.contiguous()).found]
    return unique_values(keys)


def _given_argument(side: int) -> int:
    """The argument that a query of a side keeps."""
    return TAIL if side == HEAD else HEAD


def _side_keys(index: TripleIndex, side: int) -> Tensor:
    """The keys of a side."""
    return index.head_query_keys if side == HEAD else index.tail_query_keys


def _query_key(index: TripleIndex, queries: Tensor, side: int) -> Tensor:
    """The key of each query with 0 as its replaced argument: all answers lie within `base` above it."""
    predicate = queries[..., 0].to(torch.int64)
    given = queries[..., _given_argument(side)]
    return (predicate * index.base + given) * index.base
