"""How many atoms two rules derive together, and how many of these are facts.

Rules that derive the same atoms are no independent evidence. `count_joint` counts every pair of rules of a relation,
and `baselines.noisy_or_joint` reads the counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.types import F64, I64, Bool
from funcppo.kg.logic import joins, row_index, sorting
from funcppo.kg.logic.consequences import (
    Consequences,
    CountCallback,
    iter_consequences,
)
from funcppo.kg.logic.kb import KBSizes, KnowledgeBase
from funcppo.kg.logic.typed_torch import int_list

# derivations to count, about 50 bytes each for those of one relation; of more, those of a sample of the atoms
MAX_COUNTED_DERIVATIONS = 1 << 26
# pairs of derivations of one atom, in all atoms of a relation, some minutes of work; of more, those of a sample too
MAX_COUNTED_PAIRS = 1 << 30


class JointCounts(NamedTuple):
    """Counts of rules and of pairs of rules that derive an atom together."""

    n_derived: F64[Tensor, "R"]  # atoms that each rule derives
    # first * R + second, first < second, ascending; pairs without a common atom are left out
    pair: I64[Tensor, "n"]
    n_both: F64[Tensor, "n"]  # atoms that both rules derive
    n_facts: F64[Tensor, "n"]  # facts among these
    # of the relation of which the smallest part of the atoms is counted, the inverse of that part; 1: all are counted
    n_strata: int


class SharedAtoms(NamedTuple):
    """Counts of atoms that both rules of a pair derive."""

    n_both: F64[Tensor, "n"]
    n_facts: F64[Tensor, "n"]  # facts among these


class _Pairs(NamedTuple):
    """Pairs of rules, as in `JointCounts`, and what they derive."""

    pair: I64[Tensor, "n"]
    n_both: I64[Tensor, "n"]
    n_facts: I64[Tensor, "n"]


class _RelationCounts(NamedTuple):
    """The counts of the rules of one relation, on a part of the atoms."""

    n_derived: I64[Tensor, "R"]  # 0 for rules of other relations
    pairs: _Pairs
    n_strata: int  # the inverse of that part


class _Derived(NamedTuple):
    """Derivations of the atoms of one relation, ascending by atom and rule."""

    atom: I64[Tensor, "n"]
    rule: I64[Tensor, "n"]
    is_fact: Bool[Tensor, "n"]


def count_joint(
    kb: KnowledgeBase,
    sizes: KBSizes,
    *,
    object_identity: bool = False,
    leave_one_out: bool = False,
    max_derivations: int = MAX_COUNTED_DERIVATIONS,
    progress: CountCallback | None = None,
) -> JointCounts:
    """Count what the pairs of rules with one head predicate derive from the facts.

    The counts are exact unless the rules derive more than `max_derivations` atoms, each counted once for each rule, or
    those of one relation have more than `MAX_COUNTED_PAIRS` pairs of derivations of one atom. Then they are those of a
    hash sample of the atoms, the same for all rules of a relation, times the inverse of its share.

    Args:
      kb: with the body pairs of each rule.
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      leave_one_out: omit a fact that a rule derives only from bodies that contain the fact itself.
      progress: is called after each rule that is applied; None for no reports.
    """
    n_strata = count_strata(kb, max_derivations)
    predicates = kb.rules[:, 0, 0]
    rule_ids = int_list(torch.argsort(predicates, stable=True))
    consequences = iter_consequences(
        kb,
        sizes,
        rule_ids=rule_ids,
        object_identity=object_identity,
        leave_one_out=leave_one_out,
        progress=progress,
    )
    of_rule = zip(int_list(predicates[rule_ids]), consequences, strict=True)
    relations = [
        _count_relation(
            [_sample(part, n_strata) for _, part in group], sizes, n_strata
        )
        for _, group in groupby(of_rule, key=itemgetter(0))
    ]
    return _scale(relations, sizes.n_rules, kb.facts.device)


def _count_relation(
    parts: list[Consequences], sizes: KBSizes, n_strata: int
) -> _RelationCounts:
    """Count what the rules of one relation derive, on a part of the atoms with few enough pairs.

    Args:
      parts: rules ascending.
      n_strata: a power of two, the inverse of the share of the atoms that are in the parts.
    """
    derived = _sort_derived(parts, sizes)
    start, n_earlier = _earlier_derivations(derived)
    while int(n_earlier.sum()) > MAX_COUNTED_PAIRS:
        n_strata *= 2
        parts = [_sample(part, n_strata) for part in parts]
        derived = _sort_derived(parts, sizes)
        start, n_earlier = _earlier_derivations(derived)
    return _RelationCounts(
        torch.bincount(derived.rule, minlength=sizes.n_rules),
        _count_pairs(derived, start, n_earlier, sizes.n_rules),
        n_strata,
    )


def _scale(
    relations: Sequence[_RelationCounts], n_rules: int, device: torch.device
) -> JointCounts:
    """The counts of all relations, each times the inverse of its part of the atoms."""
    n_derived = torch.zeros(n_rules, dtype=torch.float64, device=device)
    none = n_derived[:0]
    pair, n_both, n_facts = [none.long()], [none], [none]
    for relation in relations:
        scale = float(relation.n_strata)
        n_derived += relation.n_derived * scale
        pair.append(relation.pairs.pair)
        n_both.append(relation.pairs.n_both * scale)
        n_facts.append(relation.pairs.n_facts * scale)

    ascending, order = torch.sort(torch.cat(pair))
    return JointCounts(
        n_derived=n_derived,
        pair=ascending,
        n_both=torch.cat(n_both)[order],
        n_facts=torch.cat(n_facts)[order],
        n_strata=max([1, *(relation.n_strata for relation in relations)]),
    )


def count_strata(kb: KnowledgeBase, max_derivations: int) -> int:
    """The parts of the atoms, a power of two, of which one is counted so that the rules derive no more of its atoms."""
    n_strata = 1
    n_derived = float(kb.body_pairs.double().sum())
    while n_derived > max_derivations * n_strata:
        n_strata *= 2
    return n_strata


def find_shared(
    joint: JointCounts, one: I64[Tensor, "n"], other: I64[Tensor, "n"]
) -> SharedAtoms:
    """The counts of pairs of different rules, 0 for those that derive no atom together."""
    first, second = torch.minimum(one, other), torch.maximum(one, other)
    wanted = first * len(joint.n_derived) + second
    if not len(joint.pair):
        zero = torch.zeros_like(wanted, dtype=torch.float64)
        return SharedAtoms(zero, zero)
    position = torch.searchsorted(joint.pair, wanted)
    position = position.clamp_max(len(joint.pair) - 1)
    is_there = joint.pair[position] == wanted
    return SharedAtoms(
        torch.where(is_there, joint.n_both[position], 0.0),
        torch.where(is_there, joint.n_facts[position], 0.0),
    )


def _sample(part: Consequences, n_strata: int) -> Consequences:
    """The consequences of a rule that are in a hash sample of the atoms.

    Args:
      n_strata: a power of two, the inverse of the share of the atoms in the sample.
    """
    if n_strata == 1:
        return part
    is_sampled = _hash_atoms(part.atoms) & (n_strata - 1) == 0
    return Consequences(*(column[is_sampled] for column in part))


def _sort_derived(parts: Sequence[Consequences], sizes: KBSizes) -> _Derived:
    """The derivations of some rules of one relation, which are ascending."""
    bits = [sizes.n_constants.bit_length()] * (sizes.atom_width - 1)
    atoms = torch.cat([part.atoms for part in parts]).long()
    _, atom = row_index.encode_rows(tuple(atoms[:, 1:].unbind(1)), bits)
    key, order = sorting.sort_keys(atom)
    rule = torch.cat([part.rule for part in parts])
    fact = torch.cat([part.fact for part in parts])
    return _Derived(key, rule[order], fact[order] >= 0)


def _earlier_derivations(
    derived: _Derived,
) -> tuple[I64[Tensor, "n"], I64[Tensor, "n"]]:
    """Where the derivations of the atom of each derivation begin, and how many there are before it."""
    number = torch.arange(len(derived.atom), device=derived.atom.device)
    is_first = sorting.first_of_run(derived.atom)
    start = torch.cummax(torch.where(is_first, number, 0), 0).values
    return start, number - start


def _hash_atoms(atoms: Tensor) -> I64[Tensor, "n"]:
    """A hash of the arguments of each atom."""
    mixed = torch.zeros_like(atoms[:, 0], dtype=torch.int64)
    for column in atoms[:, 1:].long().unbind(1):
        mixed = (mixed + column) * row_index.HASH_MULTIPLIER
        mixed = mixed ^ (mixed >> 32)
    return mixed


def _count_pairs(
    derived: _Derived,
    start: I64[Tensor, "n"],
    n_earlier: I64[Tensor, "n"],
    n_rules: int,
) -> _Pairs:
    """The pairs of rules that derive an atom together.

    Args:
      start: where the derivations of the atom begin.
      n_earlier: how many there are before each one.
    """
    none = start[:0]
    merged = [_Pairs(none, none, none)]
    n_pending, n_distinct = 0, 0
    for part in _iter_pairs(derived, start, n_earlier, n_rules):
        merged.append(part)
        n_pending += len(part.pair)
        if n_pending > max(joins.MAX_CHUNK_ROWS, n_distinct):
            merged = [_merge(merged)]
            n_pending, n_distinct = 0, len(merged[0].pair)
    return _merge(merged)


def _iter_pairs(
    derived: _Derived,
    start: I64[Tensor, "n"],
    n_earlier: I64[Tensor, "n"],
    n_rules: int,
) -> Iterator[_Pairs]:
    """Yield the pairs of each derivation with the earlier ones of its atom, some derivations after others."""
    if not len(start):
        return
    for row, earlier in joins.ragged_arange(start, n_earlier):
        yield _add_up(
            _Pairs(
                derived.rule[earlier] * n_rules + derived.rule[row],
                torch.ones_like(row),
                derived.is_fact[row].long(),
            )
        )


def _merge(parts: Sequence[_Pairs]) -> _Pairs:
    """The sums of the counts of equal pairs."""
    return _add_up(_Pairs(*(torch.cat(columns) for columns in zip(*parts))))


def _add_up(pairs: _Pairs) -> _Pairs:
    """The sums of the counts of equal pairs."""
    distinct, inverse = sorting.unique_inverse(pairs.pair)
    zero = torch.zeros_like(distinct)
    return _Pairs(
        distinct,
        zero.index_add(0, inverse, pairs.n_both),
        zero.index_add(0, inverse, pairs.n_facts),
    )
