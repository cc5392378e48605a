"""Scores of atoms that need no training: the confidences of the rules that derive an atom, combined.

`max_confidence` and `noisy_or` read the derivations that `consequences.iter_derivations` yields; `exists` asks only
whether T_P derives an atom. All scores are logarithms of numbers from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from funcppo.logic import fixpoint
from funcppo.logic.consequences import Derivations
from funcppo.logic.fixpoint import LeastModel
from funcppo.logic.kb import KnowledgeBase, rule_confidence
from funcppo.types import F32, I32


def max_confidence(
    kb: KnowledgeBase, derivations: Iterable[Derivations], n_atoms: int
) -> F32[Tensor, "L"]:
    """The largest confidence of a rule that derives each atom, as log max_r confidence(r).

    Args:
      derivations: by some rules at a time, in any order.
      n_atoms: L, the length of the list that `Derivations.atom_row` refers to.

    Returns:
      [L]; -inf for an atom that no rule derives.
    """
    confidence = rule_confidence(kb)
    best = torch.zeros(n_atoms, device=kb.support.device)
    for part in derivations:
        best = best.scatter_reduce(
            0,
            part.atom_row,
            confidence[part.rule],
            "amax",
        )
    return best.log()


def noisy_or(
    kb: KnowledgeBase,
    derivations: Iterable[Derivations],
    n_atoms: int,
    power: float = 1.0,
) -> F32[Tensor, "L"]:
    """The noisy-or of the rules that derive each atom.

        log (1 - prod_r (1 - confidence(r)^power)) / power

    At power 1 this is the probability that some rule is right, if rules were independent. Rules mined from one graph
    are not independent: a larger power makes several of them count less together, down to the largest confidence.

    Args:
      derivations: by some rules at a time, in any order.
      n_atoms: L, the length of the list that `Derivations.atom_row` refers to.

    Returns:
      [L]; -inf for an atom that no rule derives.
    """
    # Sums of logarithms in float64: a product of many factors near 1 would lose its distance from 1.
    confidence = rule_confidence(kb).to(torch.float64)
    log_wrong = torch.log1p(-(confidence**power))
    log_all_wrong = torch.zeros(
        n_atoms,
        dtype=torch.float64,
        device=log_wrong.device,
    )
    for part in derivations:
        log_all_wrong = log_all_wrong.scatter_add(
            0,
            part.atom_row,
            log_wrong[part.rule],
        )

    log_some_right = torch.log(-torch.expm1(log_all_wrong))
    return (log_some_right / power).to(torch.float32)


def exists(
    model: LeastModel, max_height: int, atoms: I32[Tensor, "L W"]
) -> F32[Tensor, "L"]:
    """0 where T_P derives the atom within `max_height` steps, -inf elsewhere."""
    height = fixpoint.atom_height(model, atoms.long())
    is_derived = height >= 0
    is_low_enough = height <= max_height
    return torch.where(is_derived & is_low_enough, 0.0, -torch.inf)
