"""What T_P knows before a search begins: which rules derive its root, and which goals nothing derives.

A policy that is to prefer precise rules must see which of them apply at all; otherwise it learns which apply often.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.logic import baselines, row_index
from funcppo.logic import kb as kbase
from funcppo.logic.baselines import Derivations
from funcppo.logic.fixpoint import LeastModel
from funcppo.logic.kb import KBSizes, KnowledgeBase
from funcppo.logic.resolve import Goals, Successors
from funcppo.types import I32, I64, Bool


class DerivabilityIndex(NamedTuple):
    """The atoms that T_P derives, and by which rules; without atoms, nothing is known beforehand."""

    atom_index: tuple[Tensor, ...]  # what `kb.locate` reads
    height: I32[Tensor, "M"]  # smallest height of each atom
    derivation_keys: I64[Tensor, "D"]  # row * R + rule, ascending, of each atom and rule that derives it at the root


def build_derivability_index(
    kb: KnowledgeBase, sizes: KBSizes, model: LeastModel, max_height: int, max_derivations: int
) -> DerivabilityIndex | None:
    """The outlook of searches to `max_height`, None when more than `budget` pairs of an atom and a rule are derived.

    At height 1 a rule whose only bodies hold the atom itself does not derive it (leave-one-out). Above, that atom may
    be proved again as a goal of the body.
    """
    parts, n_pairs = [], 0
    for found in baselines.iter_derivations(kb, sizes, model, max_height, model.atoms, leave_one_out=max_height == 1):
        parts.append(found.atom_row * sizes.n_rules + found.rule)
        n_pairs += len(found.atom_row)
        if n_pairs > max_derivations:
            return None
    derived = torch.cat([model.height[:0].to(torch.int64), *parts])
    return DerivabilityIndex(
        atom_index=model.atom_index, height=model.height, derivation_keys=torch.sort(derived).values
    )


def build_derivability_index_for_atoms(
    kb: KnowledgeBase, sizes: KBSizes, model: LeastModel, atoms: I32[Tensor, "L W"]
) -> DerivabilityIndex:
    """The outlook of searches to height 1 for these atoms alone, distinct and in lexicographic order."""
    found = baselines.collect_derivations(kb, sizes, model, 1, atoms)
    return DerivabilityIndex(
        atom_index=kbase.index_sorted_atoms(atoms, sizes.n_predicates, sizes.n_constants),
        height=torch.zeros_like(atoms[:, 0]),
        derivation_keys=torch.sort(found.atom_row * sizes.n_rules + found.rule).values,
    )


def empty_derivability_index(kb: KnowledgeBase, sizes: KBSizes) -> DerivabilityIndex:
    """The outlook that knows nothing."""
    none = kb.facts[:0]
    return DerivabilityIndex(
        atom_index=kbase.index_sorted_atoms(none, sizes.n_predicates, sizes.n_constants),
        height=none[:, 0],
        derivation_keys=none[:, 0].to(torch.int64),
    )


def iter_indexed_derivations(
    derivability_index: DerivabilityIndex, sizes: KBSizes, atoms: I32[Tensor, "L W"], max_chunk_derivations: int
) -> Iterator[Derivations]:
    """Which rules derive each atom, those of some atoms at a time; at height 1 as `baselines` counts them.

    Args:
      n_pairs: how many derivations are to be held at once, about: never more than this and those of one atom.
    """
    row = kbase.find_atoms(derivability_index.atom_index, sizes, atoms.to(torch.int64))
    first = torch.where(row >= 0, row, len(derivability_index.height)) * sizes.n_rules
    start, stop = (
        torch.searchsorted(derivability_index.derivation_keys, edge) for edge in (first, first + sizes.n_rules)
    )
    count = stop - start
    _, n_atoms = torch.unique_consecutive(count.cumsum(0) // max_chunk_derivations, return_counts=True)
    done = 0
    for n in n_atoms.tolist():
        few, low = count[done : done + n], start[done : done + n]
        atom = torch.repeat_interleave(torch.arange(n, device=row.device), few)
        within = torch.arange(len(atom), device=row.device) - (few.cumsum(0) - few)[atom]
        yield Derivations(done + atom, derivability_index.derivation_keys[low[atom] + within] % sizes.n_rules)
        done += n


def rule_derives(
    derivability_index: DerivabilityIndex, sizes: KBSizes, root: I32[Tensor, "B W"], rule: I32[Tensor, "B S"]
) -> Bool[Tensor, "B S"]:
    """Whether each rule derives the row's root; false for a fact (-1)."""
    row = kbase.find_atoms(derivability_index.atom_index, sizes, root.to(torch.int64))[:, None]
    return (
        (row >= 0)
        & (rule >= 0)
        & row_index.binary_search(derivability_index.derivation_keys, row * sizes.n_rules + rule)[1]
    )


def dead_end_mask(
    derivability_index: DerivabilityIndex,
    sizes: KBSizes,
    max_height: int,
    root: I32[Tensor, "B W"],
    goals: Goals,
    successors: Successors,
) -> Bool[Tensor, "B S"]:
    """Which successors T_P shows to lead to no proof; others may still lead to none.

    They are rules that do not derive the root, and goal lists with a ground goal that is not derivable from its height.
    """
    if not len(derivability_index.height):
        return torch.zeros_like(successors.mask)
    atoms, height = successors.goals
    row = kbase.find_atoms(derivability_index.atom_index, sizes, atoms.to(torch.int64))
    low_enough = (row >= 0) & (derivability_index.height[row.clamp_min(0)] + height <= max_height)
    ground = (atoms[..., 0] > 0) & (atoms[..., 1:] <= sizes.n_constants).all(-1)
    at_root = (goals.atoms[:, :1, 0] > 0) & (goals.height[:, :1] == 0)
    idle = at_root & (successors.rule >= 0) & ~rule_derives(derivability_index, sizes, root, successors.rule)
    return successors.mask & (idle | (ground & ~low_enough).any(-1))
