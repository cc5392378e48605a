"""What T_P knows before a proof search starts: which rules derive the query, and which goals nothing derives.

A policy that should prefer precise rules must see which rules apply at all; otherwise it learns which ones apply often.
`build_derivability_index` computes the index; `rule_derives` and `dead_end_mask` look it up during the search.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.types import I32, I64, Bool
from funcppo.kg.logic import consequences, row_index
from funcppo.kg.logic.consequences import CountCallback, Derivations
from funcppo.kg.logic.fixpoint import LeastModel
from funcppo.kg.logic.joins import RowBudget, ragged_arange
from funcppo.kg.logic.kb import (
    AtomIndex,
    KBSizes,
    KnowledgeBase,
    find_atoms,
    index_sorted_atoms,
)
from funcppo.kg.logic.resolve import Goals, Successors
from funcppo.kg.logic.row_index import int_list, runs


class DerivabilityIndex(NamedTuple):
    """The atoms that T_P derives, and the rules that derive each. Without atoms, it excludes nothing."""

    atom_index: AtomIndex  # index of the derivable atoms for `kb.find_atoms`
    height: I32[Tensor, "M"]  # smallest height of each atom
    # row of the atom * R + id of a rule that derives it as a root; ascending
    derivation_keys: I64[Tensor, "D"]


# -- building


def build_derivability_index(
    kb: KnowledgeBase,
    sizes: KBSizes,
    model: LeastModel,
    max_height: int,
    max_derivations: int,
    budget: RowBudget | None = None,
    progress: CountCallback | None = None,
) -> DerivabilityIndex | None:
    """Index all atoms of a model for searches up to a height.

    At height 1, a rule whose only bodies hold the atom itself does not derive it (leave-one-out). Above, it may: that
    atom can be proved again as a goal of the body.

    Args:
      model: what T_P derives in `max_height` steps.
      max_height: the greatest height of a search.
      max_derivations: the most pairs of an atom and a rule to hold.
      budget: bounds the rows that the joins make; None for no bound.
      progress: is called after each rule; None for no reports.

    Returns:
      The index; None if there are more than `max_derivations` pairs.

    Raises:
      RowBudgetExceeded: the joins make more rows than the budget allows.
    """
    parts = consequences.iter_derivations(
        kb,
        sizes,
        model,
        max_height,
        model.atoms,
        leave_one_out=max_height == 1,
        budget=budget,
        progress=progress,
    )
    keys = [model.height[:0].to(torch.int64)]
    n_derivations = 0
    for part in parts:
        keys.append(part.atom_row * sizes.n_rules + part.rule)
        n_derivations += len(part.atom_row)
        if n_derivations > max_derivations:
            return None

    return DerivabilityIndex(
        atom_index=model.atom_index,
        height=model.height,
        derivation_keys=row_index.sort_values(torch.cat(keys)),
    )


def build_derivability_index_for_atoms(
    kb: KnowledgeBase,
    sizes: KBSizes,
    model: LeastModel,
    atoms: I32[Tensor, "L W"],
) -> DerivabilityIndex:
    """Index some atoms for searches to height 1; the atoms are distinct and in lexicographic order."""
    derivations = consequences.collect_derivations(kb, sizes, model, 1, atoms)
    keys = derivations.atom_row * sizes.n_rules + derivations.rule
    return DerivabilityIndex(
        atom_index=index_sorted_atoms(
            atoms, sizes.n_predicates, sizes.n_constants
        ),
        height=torch.zeros_like(atoms[:, 0]),
        derivation_keys=row_index.sort_values(keys),
    )


def empty_derivability_index(
    kb: KnowledgeBase, sizes: KBSizes
) -> DerivabilityIndex:
    """The index without atoms, with which `dead_end_mask` is false everywhere."""
    no_atoms = kb.facts[:0]
    return DerivabilityIndex(
        atom_index=index_sorted_atoms(
            no_atoms, sizes.n_predicates, sizes.n_constants
        ),
        height=no_atoms[:, 0],
        derivation_keys=no_atoms[:, 0].to(torch.int64),
    )


# -- reading


def iter_indexed_derivations(
    derivability_index: DerivabilityIndex,
    sizes: KBSizes,
    atoms: I32[Tensor, "L W"],
    max_chunk_derivations: int,
) -> Iterator[Derivations]:
    """Yield the rules that derive each atom, in order of the atoms, some atoms at a time.

    Args:
      atoms: in any order; an atom that is not in the index has no derivation.
      max_chunk_derivations: about how many derivations to yield at once: never more than these and those of one atom.
    """
    # The derivations of an atom are a span of the sorted keys.
    keys = derivability_index.derivation_keys
    row = find_atoms(
        derivability_index.atom_index, sizes, atoms.to(torch.int64)
    )
    row_after_last = len(derivability_index.height)
    row = torch.where(row >= 0, row, row_after_last)  # whose span is empty
    start = torch.searchsorted(keys, row * sizes.n_rules)
    stop = torch.searchsorted(keys, row * sizes.n_rules + sizes.n_rules)
    count = stop - start

    # A chunk holds the atoms whose cumulative count lies in the same multiple of the limit.
    chunk_of_atom = count.cumsum(0) // max_chunk_derivations
    _, chunk_lengths = runs(chunk_of_atom)
    first_atom = 0
    for n_atoms in int_list(chunk_lengths):
        chunk = slice(first_atom, first_atom + n_atoms)
        for atom, position in ragged_arange(start[chunk], count[chunk]):
            rule = keys[position] % sizes.n_rules
            yield Derivations(first_atom + atom, rule)
        first_atom += n_atoms


def rule_derives(
    derivability_index: DerivabilityIndex,
    sizes: KBSizes,
    root: I32[Tensor, "B W"],
    rule: I32[Tensor, "B S"],
) -> Bool[Tensor, "B S"]:
    """Whether each rule derives the root of its row; false for a fact (-1)."""
    row = find_atoms(
        derivability_index.atom_index,
        sizes,
        root.to(torch.int64),
    )
    row = row[:, None]
    key = row * sizes.n_rules + rule
    _, is_derivation = row_index.binary_search(
        derivability_index.derivation_keys,
        key,
    )
    return (row >= 0) & (rule >= 0) & is_derivation


def dead_end_mask(
    derivability_index: DerivabilityIndex,
    sizes: KBSizes,
    max_height: int,
    root: I32[Tensor, "B W"],
    goals: Goals,
    successors: Successors,
) -> Bool[Tensor, "B S"]:
    """Whether T_P shows that a successor leads to no proof; others may still lead to none.

    A dead end is a rule that does not derive the root, or a goal list with a ground goal that T_P does not derive in
    the height that is left for it.

    Args:
      max_height: the height limit of the search, for which the index was built.
      root: the query of each row.
      goals: [B, A], the goal list of each row.
      successors: [B, S], its successors.

    Returns:
      [B, S]; false where `successors.mask` is false.
    """
    if not len(derivability_index.height):
        return torch.zeros_like(successors.mask)

    # Rules for the root itself.
    leftmost_predicate = goals.atoms[:, :1, 0]
    leftmost_height = goals.height[:, :1]
    is_root = (leftmost_predicate > 0) & (leftmost_height == 0)
    is_rule = successors.rule >= 0
    derives = rule_derives(derivability_index, sizes, root, successors.rule)
    useless_rule = is_root & is_rule & ~derives

    # Ground goals: the goal's height and the height of its smallest proof must fit into max_height.
    atoms, height = successors.goals
    row = find_atoms(
        derivability_index.atom_index,
        sizes,
        atoms.to(torch.int64),
    )
    proof_height = derivability_index.height[row.clamp_min(0)]
    is_provable = (row >= 0) & (proof_height + height <= max_height)
    is_goal = atoms[..., 0] > 0
    is_ground = is_goal & (atoms[..., 1:] <= sizes.n_constants).all(-1)
    unprovable_goal = (is_ground & ~is_provable).any(-1)
    return successors.mask & (useless_rule | unprovable_goal)
