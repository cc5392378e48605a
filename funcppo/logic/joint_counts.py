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

from funcppo.logic import joins, row_index, sorting
from funcppo.logic.consequences import Consequences, iter_consequences
from funcppo.logic.kb import KBSizes, KnowledgeBase
from funcppo.logic.typed_torch import int_list
from funcppo.types import F64, I64, Bool

# derivations to count, about 50 bytes each for those of one relation; of more, those of a sample of the atoms
MAX_COUNTED_DERIVATIONS = 1 << 26


class JointCounts(NamedTuple):
    """Counts of rules and of pairs of rules that derive an atom together."""

    n_derived: F64[Tensor, "R"]  # atoms that each rule derives
    # first * R + second, first < second, ascending; pairs without a common atom are left out
    pair: I64[Tensor, "n"]
    n_both: F64[Tensor, "n"]  # atoms that both rules derive
    n_facts: F64[Tensor, "n"]  # facts among these


class SharedAtoms(NamedTuple):
    """Counts of atoms that both rules of a pair derive."""

    n_both: F64[Tensor, "n"]
    n_facts: F64[Tensor, "n"]  # facts among these


class _Pairs(NamedTuple):
    """Pairs of rules, as in `JointCounts`, and what they derive."""

    pair: I64[Tensor, "n"]
    n_both: I64[Tensor, "n"]
    n_facts: I64[Tensor, "n"]


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
) -> JointCounts:
    """Count what the pairs of rules with one head predicate derive from the facts.

    The counts are exact unless the rules derive more than `max_derivations` atoms, each counted once for each rule.
    Then they are those of a hash sample of the atoms, the same for all rules, times the inverse of its share.

    Args:
      kb: with the body pairs of each rule.
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      leave_one_out: omit a fact that a rule derives only from bodies that contain the fact itself.
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
    )
    of_rule = zip(int_list(predicates[rule_ids]), consequences, strict=True)
    n_derived = torch.zeros_like(predicates, dtype=torch.int64)
    none = n_derived[:0]
    parts = [_Pairs(none, none, none)]
    for _, group in groupby(of_rule, key=itemgetter(0)):
        derived = _sort_derived([part for _, part in group], sizes, n_strata)
        n_derived = n_derived + torch.bincount(
            derived.rule, minlength=sizes.n_rules
        )
        parts.append(_count_pairs(derived, sizes.n_rules))

    pairs = _merge(parts)
    scale = float(n_strata)
    return JointCounts(
        n_derived=n_derived * scale,
        pair=pairs.pair,
        n_both=pairs.n_both * scale,
        n_facts=pairs.n_facts * scale,
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


def _sort_derived(
    parts: Sequence[Consequences], sizes: KBSizes, n_strata: int
) -> _Derived:
    """The derivations of some rules of one relation, of a sample of the atoms.

    Args:
      parts: rules ascending.
      n_strata: a power of two, the inverse of the share of the atoms in the sample.
    """
    bits = [sizes.n_constants.bit_length()] * (sizes.atom_width - 1)
    sampled: list[Consequences] = []
    for part in parts:
        stratum = _hash_atoms(part.atoms) & (n_strata - 1)
        is_sampled = stratum == 0
        sampled.append(Consequences(*(column[is_sampled] for column in part)))

    atoms = torch.cat([part.atoms for part in sampled]).long()
    _, atom = row_index.encode_rows(tuple(atoms[:, 1:].unbind(1)), bits)
    key, order = sorting.sort_keys(atom)
    rule = torch.cat([part.rule for part in sampled])
    fact = torch.cat([part.fact for part in sampled])
    return _Derived(key, rule[order], fact[order] >= 0)


def _hash_atoms(atoms: Tensor) -> I64[Tensor, "n"]:
    """A hash of the arguments of each atom."""
    mixed = torch.zeros_like(atoms[:, 0], dtype=torch.int64)
    for column in atoms[:, 1:].long().unbind(1):
        mixed = (mixed + column) * row_index.HASH_MULTIPLIER
        mixed = mixed ^ (mixed >> 32)
    return mixed


def _count_pairs(derived: _Derived, n_rules: int) -> _Pairs:
    """The pairs of rules that derive an atom together."""
    number = torch.arange(len(derived.atom), device=derived.atom.device)
    is_first = sorting.first_of_run(derived.atom)
    start = torch.cummax(torch.where(is_first, number, 0), 0).values
    merged = [_Pairs(number[:0], number[:0], number[:0])]
    n_pending, n_distinct = 0, 0
    for part in _iter_pairs(derived, start, number - start, n_rules):
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
    """Yield the pairs of each derivation with the earlier ones of its atom, some derivations after others.

    Args:
      start: where the derivations of the atom begin.
      n_earlier: how many there are before each one.
    """
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
