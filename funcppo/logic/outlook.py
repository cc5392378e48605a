"""What T_P knows before a search begins: which rules derive its root, and which goals nothing derives.

A policy that is to prefer precise rules must see which of them apply at all; otherwise it learns which apply often.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.logic import baselines, keys
from funcppo.logic import kb as kbase
from funcppo.logic.baselines import Derivations
from funcppo.logic.fixpoint import Model
from funcppo.logic.kb import KnowledgeBase, Sizes
from funcppo.logic.resolve import Goals, Successors
from funcppo.types import I32, I64, Bool


class Outlook(NamedTuple):
    """The atoms that T_P derives, and by which rules; without atoms, nothing is known beforehand."""

    atoms: tuple[Tensor, ...]  # what `kb.locate` reads
    height: I32[Tensor, "M"]  # smallest height of each atom
    derived: I64[Tensor, "D"]  # row * R + rule, ascending, of each atom and rule that derives it at the root


def build(kb: KnowledgeBase, sizes: Sizes, model: Model, max_height: int, budget: int) -> Outlook | None:
    """The outlook of searches to `max_height`, None when more than `budget` pairs of an atom and a rule are derived.

    At height 1 a rule whose only bodies hold the atom itself does not derive it (leave-one-out). Above, that atom may
    be proved again as a goal of the body.
    """
    parts, n_pairs = [], 0
    for found in baselines.each_derivation(kb, sizes, model, max_height, model.atoms, leave_one_out=max_height == 1):
        parts.append(found.atom * sizes.n_rules + found.rule)
        n_pairs += len(found.atom)
        if n_pairs > budget:
            return None
    derived = torch.cat([model.height[:0].to(torch.int64), *parts])
    return Outlook(atoms=model.index, height=model.height, derived=torch.sort(derived).values)


def of_atoms(kb: KnowledgeBase, sizes: Sizes, model: Model, atoms: I32[Tensor, "L W"]) -> Outlook:
    """The outlook of searches to height 1 for these atoms alone, distinct and in lexicographic order."""
    found = baselines.derivations(kb, sizes, model, 1, atoms)
    return Outlook(
        atoms=kbase.index_sorted(atoms, sizes.n_predicates, sizes.n_constants),
        height=torch.zeros_like(atoms[:, 0]),
        derived=torch.sort(found.atom * sizes.n_rules + found.rule).values,
    )


def nothing(kb: KnowledgeBase, sizes: Sizes) -> Outlook:
    """The outlook that knows nothing."""
    none = kb.facts[:0]
    return Outlook(
        atoms=kbase.index_sorted(none, sizes.n_predicates, sizes.n_constants),
        height=none[:, 0],
        derived=none[:, 0].to(torch.int64),
    )


def each_derivation(outlook: Outlook, sizes: Sizes, atoms: I32[Tensor, "L W"], n_pairs: int) -> Iterator[Derivations]:
    """Which rules derive each atom, those of some atoms at a time; at height 1 as `baselines` counts them.

    Args:
      n_pairs: how many derivations are to be held at once, about: never more than this and those of one atom.
    """
    row = kbase.locate(outlook.atoms, sizes, atoms.to(torch.int64))
    first = torch.where(row >= 0, row, len(outlook.height)) * sizes.n_rules
    start, stop = (torch.searchsorted(outlook.derived, edge) for edge in (first, first + sizes.n_rules))
    count = stop - start
    _, n_atoms = torch.unique_consecutive(count.cumsum(0) // n_pairs, return_counts=True)
    done = 0
    for n in n_atoms.tolist():
        few, low = count[done : done + n], start[done : done + n]
        atom = torch.repeat_interleave(torch.arange(n, device=row.device), few)
        within = torch.arange(len(atom), device=row.device) - (few.cumsum(0) - few)[atom]
        yield Derivations(done + atom, outlook.derived[low[atom] + within] % sizes.n_rules)
        done += n


def derives(outlook: Outlook, sizes: Sizes, root: I32[Tensor, "B W"], rule: I32[Tensor, "B S"]) -> Bool[Tensor, "B S"]:
    """Whether each rule derives the row's root; false for a fact (-1)."""
    row = kbase.locate(outlook.atoms, sizes, root.to(torch.int64))[:, None]
    return (row >= 0) & (rule >= 0) & keys.find(outlook.derived, row * sizes.n_rules + rule)[1]


def hopeless(
    outlook: Outlook, sizes: Sizes, max_height: int, root: I32[Tensor, "B W"], goals: Goals, successors: Successors
) -> Bool[Tensor, "B S"]:
    """Which successors T_P shows to lead to no proof; others may still lead to none.

    They are rules that do not derive the root, and goal lists with a ground goal that is not derivable from its height.
    """
    if not len(outlook.height):
        return torch.zeros_like(successors.mask)
    atoms, height = successors.goals
    row = kbase.locate(outlook.atoms, sizes, atoms.to(torch.int64))
    low_enough = (row >= 0) & (outlook.height[row.clamp_min(0)] + height <= max_height)
    ground = (atoms[..., 0] > 0) & (atoms[..., 1:] <= sizes.n_constants).all(-1)
    at_root = (goals.atoms[:, :1, 0] > 0) & (goals.height[:, :1] == 0)
    idle = at_root & (successors.rule >= 0) & ~derives(outlook, sizes, root, successors.rule)
    return successors.mask & (idle | (ground & ~low_enough).any(-1))
