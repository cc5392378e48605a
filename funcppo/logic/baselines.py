"""Scores of atoms that need no training: the confidences of the rules that derive an atom, combined.

`max_confidence` and `noisy_or` read the derivations that `consequences.iter_derivations` yields; `exists` asks only
whether T_P derives an atom. A score is a number p from 0 to 1 and is returned as its log-odds, log(p / (1 - p)), in
float64: they keep apart what is near 0 and what is near 1, however many rules derive an atom. They are -inf for 0 and
+inf for 1; atoms that a rule of confidence 1 derives are certain, and equal, whatever other rules derive them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from funcppo.logic import fixpoint
from funcppo.logic.consequences import Derivations
from funcppo.logic.fixpoint import LeastModel
from funcppo.logic.kb import KnowledgeBase, rule_confidence
from funcppo.types import F64, I32

# above, the terms of second order in 1 - p are below 1e-13
_NEAR_CERTAIN_LOG_ODDS = 30.0


def max_confidence(
    kb: KnowledgeBase, derivations: Iterable[Derivations], n_atoms: int
) -> F64[Tensor, "L"]:
    """The largest confidence of a rule that derives each atom, as log-odds.

    Args:
      derivations: by some rules at a time, in any order.
      n_atoms: L, the length of the list that `Derivations.atom_row` refers to.

    Returns:
      [L]; -inf for an atom that no rule derives.
    """
    confidence = _rule_confidence(kb)
    best = torch.zeros(n_atoms, dtype=torch.float64, device=confidence.device)
    for part in derivations:
        best = best.scatter_reduce(
            0,
            part.atom_row,
            confidence[part.rule],
            "amax",
        )
    return torch.logit(best)


def noisy_or(
    kb: KnowledgeBase,
    derivations: Iterable[Derivations],
    n_atoms: int,
    power: float = 1.0,
) -> F64[Tensor, "L"]:
    """The noisy-or of the rules that derive each atom, as log-odds.

        (1 - prod_r (1 - confidence(r)^power))^(1 / power)

    At power 1 this is the probability that some rule is right, if rules were independent. Rules mined from one graph
    are not independent: a larger power makes several of them count less together, down to the largest confidence.

    Args:
      derivations: by some rules at a time, in any order.
      n_atoms: L, the length of the list that `Derivations.atom_row` refers to.

    Returns:
      [L]; -inf for an atom that no rule derives.
    """
    # -log prod_r (1 - confidence^power), a sum of positive numbers: its order of summation moves the last digits only.
    neg_log_wrong_of_rule = -torch.log1p(-(_rule_confidence(kb) ** power))
    neg_log_wrong = torch.zeros(
        n_atoms, dtype=torch.float64, device=neg_log_wrong_of_rule.device
    )
    for part in derivations:
        neg_log_wrong = neg_log_wrong.scatter_add(
            0,
            part.atom_row,
            neg_log_wrong_of_rule[part.rule],
        )

    # Of the product alone; then of the root, 1 - p^(1 / power) = (1 - p) / power to 13 digits where p is near 1.
    log_odds = neg_log_wrong + torch.log(-torch.expm1(-neg_log_wrong))
    log_root = torch.nn.functional.logsigmoid(log_odds) / power
    log_complement = torch.where(
        log_odds > _NEAR_CERTAIN_LOG_ODDS,
        -log_odds - math.log(power),
        torch.log(-torch.expm1(log_root)),
    )
    return log_root - log_complement


def exists(
    model: LeastModel, max_height: int, atoms: I32[Tensor, "L W"]
) -> F64[Tensor, "L"]:
    """Whether T_P derives the atom within `max_height` steps, as log-odds: +inf or -inf."""
    height = fixpoint.atom_height(model, atoms.long())
    is_derived = height >= 0
    is_low_enough = height <= max_height
    infinity = torch.full_like(height, torch.inf, dtype=torch.float64)
    return torch.where(is_derived & is_low_enough, infinity, -infinity)


def _rule_confidence(kb: KnowledgeBase) -> F64[Tensor, "R"]:
    """`rule_confidence` in float64, in which 1 - confidence is exact too."""
    return rule_confidence(
        kb._replace(
            support=kb.support.to(torch.float64),
            body_pairs=kb.body_pairs.to(torch.float64),
        )
    )
