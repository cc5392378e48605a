"""Combinations of the confidences of the rules that derive an atom, as scores that need no training.

A score is a number p from 0 to 1 and is returned as its log-odds, log(p / (1 - p)), in float64: they keep apart what is
near 0 and what is near 1, however many rules derive an atom. They are -inf for 0 and +inf for 1; atoms that a rule of
confidence 1 derives are certain, and equal, whatever other rules derive them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from funcppo.core.types import F32, F64, I32, Bool
from funcppo.kg.logic import fixpoint, row_index
from funcppo.kg.logic.fixpoint import Derivations, LeastModel
from funcppo.kg.logic.kb import KnowledgeBase, rule_confidence

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
    confidence = rule_confidences(kb)
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
    neg_log_wrong_of_rule = -torch.log1p(-(rule_confidences(kb) ** power))
    neg_log_wrong = torch.zeros(
        n_atoms, dtype=torch.float64, device=neg_log_wrong_of_rule.device
    )
    for part in derivations:
        neg_log_wrong = neg_log_wrong.scatter_add(
            0,
            part.atom_row,
            neg_log_wrong_of_rule[part.rule],
        )

    return _log_odds(neg_log_wrong, power)


def _log_odds(
    neg_log_wrong: F64[Tensor, "L"], power: float
) -> F64[Tensor, "L"]:
    """The log-odds of (1 - exp(-neg_log_wrong))^(1 / power)."""
    # Of the product alone; then of the root, 1 - p^(1 / power) = (1 - p) / power to 13 digits where p is near 1.
    log_odds = neg_log_wrong + torch.log(-torch.expm1(-neg_log_wrong))
    log_root = torch.nn.functional.logsigmoid(log_odds) / power
    log_complement = torch.where(
        log_odds > _NEAR_CERTAIN_LOG_ODDS,
        -log_odds - math.log(power),
        torch.log(-torch.expm1(log_root)),
    )
    return log_root - log_complement


def noisy_or_of_best(
    kb: KnowledgeBase,
    derivations: Iterable[Derivations],
    n_atoms: int,
    n_best: int,
    power: float = 1.0,
) -> F64[Tensor, "L"]:
    """The noisy-or of the most confident rules that derive each atom, as log-odds.

    Rules that derive an atom after many others add little but repeat what those say.

    Args:
      derivations: by some rules at a time, in any order.
      n_atoms: L, the length of the list that `Derivations.atom_row` refers to.
      n_best: how many rules count for an atom.
      power: as in `noisy_or`.

    Returns:
      [L]; -inf for an atom that no rule derives.

    Source: Betz et al. 2024, "PyClause: Simple and efficient rule handling for knowledge graphs" (noisy-or top-h).
    """
    confidence = rule_confidences(kb)
    by_confidence = torch.argsort(confidence, descending=True, stable=True)
    ids = torch.arange(len(confidence), device=confidence.device)
    place = torch.empty_like(by_confidence).scatter(0, by_confidence, ids)

    # The rules of a confidence above 0 of the first atom, of the second, ..., the most confident first.
    base = max(len(confidence), 1)
    keys = [place[:0]]
    for part in derivations:
        is_counted = confidence[part.rule] > 0
        row, rule = part.atom_row[is_counted], part.rule[is_counted]
        keys.append(row * base + place[rule])
    key = row_index.sort_values(torch.cat(keys))
    row = key // base
    number = torch.arange(len(key), device=key.device)
    is_best = number - torch.searchsorted(row, row) < n_best
    best = Derivations(row[is_best], by_confidence[key % base][is_best])
    return noisy_or(kb, [best], n_atoms, power)


def is_derived(
    model: LeastModel, max_height: int, atoms: I32[Tensor, "L W"]
) -> Bool[Tensor, "L"]:
    """Whether T_P derives each atom within `max_height` steps."""
    height = fixpoint.atom_height(model, atoms.long())
    return (height >= 0) & (height <= max_height)


def rule_confidences(kb: KnowledgeBase) -> F64[Tensor, "R"]:
    """`rule_confidence` in float64, in which 1 - confidence is exact too."""
    return rule_confidence(
        kb._replace(
            support=kb.support.to(torch.float64),
            body_pairs=kb.body_pairs.to(torch.float64),
        )
    )


def log_odds(log_probability: F32[Tensor, "..."]) -> F64[Tensor, "..."]:
    """log(p / (1 - p)) of probabilities p given by their logarithms, as exact as the leading digits of log p."""
    # Rounding can leave the logarithm of a sum of probabilities slightly above 0.
    log_p = log_probability.to(torch.float64).clamp_max(0.0)
    return log_p - torch.log(-torch.expm1(log_p))
