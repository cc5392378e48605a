"""Scores that need no training: how sure the rules are of an atom that they derive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.logic import fixpoint
from funcppo.logic import kb as kbase
from funcppo.logic.consequences import iter_consequences
from funcppo.logic.fixpoint import LeastModel
from funcppo.logic.kb import KBSizes, KnowledgeBase
from funcppo.types import F32, I32, I64


class Derivations(NamedTuple):
    """Pairs of a listed atom and a rule that derives it in one application, each once."""

    atom_row: I64[Tensor, "n"]  # row of the list
    rule: I64[Tensor, "n"]


def iter_derivations(
    kb: KnowledgeBase,
    sizes: KBSizes,
    model: LeastModel,
    max_height: int,
    atoms: I32[Tensor, "L W"],
    leave_one_out: bool = True,
) -> Iterator[Derivations]:
    """Which atoms one rule after another derives, the bodies taken from what is derivable one step lower.

    Args:
      model: holds at least `max_height - 1` steps of T_P, with or without object identity.
      atoms: distinct, in lexicographic order.
      leave_one_out: an atom counts as derived only by bodies that do not hold it.
    """
    below = kb
    if max_height > 1:
        below = _with_facts(kb, sizes, model.atoms[model.height < max_height])
    _, index = kbase.sort_and_index_atoms(atoms.long(), sizes.n_predicates, sizes.n_constants)
    wanted = set(torch.unique(atoms[:, 0]).tolist())
    rules = [i for i, p in enumerate(kb.rules[:, 0, 0].tolist()) if p in wanted]
    identity = model.object_identity
    for part in iter_consequences(below, sizes, rule_ids=rules, leave_one_out=leave_one_out, object_identity=identity):
        row = kbase.find_atoms(index, sizes, part.atoms.long())
        yield Derivations(row[row >= 0], part.rule[row >= 0])


def collect_derivations(
    kb: KnowledgeBase, sizes: KBSizes, model: LeastModel, max_height: int, atoms: I32[Tensor, "L W"]
) -> Derivations:
    """The derivations by all rules in one table, leaving one out; arguments as for `each_derivation`."""
    parts = iter_derivations(kb, sizes, model, max_height, atoms)
    none = torch.zeros(0, dtype=torch.int64, device=atoms.device)
    return Derivations(*(torch.cat(same) for same in zip(Derivations(none, none), *parts)))


def max_confidence(kb: KnowledgeBase, derivations: Iterable[Derivations], n_atoms: int) -> F32[Tensor, "L"]:
    """log max_r confidence(r) over the rules that derive each atom."""
    confidence, best = kbase.rule_confidence(kb), torch.zeros(n_atoms, device=kb.support.device)
    for part in derivations:
        best = best.scatter_reduce(0, part.atom_row, confidence[part.rule], "amax")
    return best.log()


def noisy_or(
    kb: KnowledgeBase, derivations: Iterable[Derivations], n_atoms: int, power: float = 1.0
) -> F32[Tensor, "L"]:
    """log (1 - prod_r (1 - confidence(r)^power)) / power over the rules that derive each atom.

    At power 1 it is noisy-or: some rule is right, were they independent. Rules mined from one graph are not; the larger
    the power, the less several of them count together, down to the largest confidence alone.
    """
    none_right = torch.log1p(-(kbase.rule_confidence(kb).to(torch.float64) ** power))
    total = torch.zeros(n_atoms, dtype=torch.float64, device=none_right.device)
    for part in derivations:
        total = total.scatter_add(0, part.atom_row, none_right[part.rule])
    return (torch.log(-torch.expm1(total)) / power).to(torch.float32)


def exists(model: LeastModel, max_height: int, atoms: I32[Tensor, "L W"]) -> F32[Tensor, "L"]:
    """0 where T_P derives the atom within `max_height` steps, -inf elsewhere."""
    height = fixpoint.atom_height(model, atoms.long())
    return torch.where((height >= 0) & (height <= max_height), 0.0, -torch.inf)


def _with_facts(kb: KnowledgeBase, sizes: KBSizes, facts: Tensor) -> KnowledgeBase:
    wider, _ = kbase.build(
        facts.cpu().numpy(),
        kb.rules.cpu().numpy(),
        n_constants=sizes.n_constants,
        n_predicates=sizes.n_predicates,
        device=facts.device,
    )
    return wider
