"""Combinations of the confidences of the rules that derive an atom, as scores that need no training.

A score is a number p from 0 to 1 and is returned as its log-odds, log(p / (1 - p)), in float64: they keep apart what is
near 0 and what is near 1, however many rules derive an atom. They are -inf for 0 and +inf for 1; atoms that a rule of
confidence 1 derives are certain, and equal, whatever other rules derive them.

Other facts: `log_likelihood_ratios` weighs whether a candidate has other facts of the asked relation on the asked side.

Of some relations an entity has one fact, of others many: who has a known birthplace has no second one, a country where
one city lies has others too. Two shares say how much that tells about a candidate of a question:

    a = (facts whose entity on that side has another fact of the relation there + 1) / (facts of the relation + 2)
    b = (sum_r c_r w_r + 1) / (sum_r c_r n_r + 2),    r a rule of the relation, of confidence c_r

n_r counts the atoms that rule r derives from the facts and that are no facts, w_r those of them whose entity has a fact
of the relation on that side. The evidence is a likelihood ratio, added to the log-odds of a score:

    log(a / b) if the candidate has another fact, log((1 - a) / (1 - b)) if it has none

All are counts over known facts. The candidate's own fact never counts, known or not, so that all candidates of a
question are treated alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.types import F32, F64, I32, I64, Bool
from funcppo.kg.logic import fixpoint, row_index
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.derive import make_label
from funcppo.kg.logic.fixpoint import (
    Consequences,
    CountCallback,
    Derivations,
    LeastModel,
    ignore_progress,
    iter_consequences,
)
from funcppo.kg.logic.joins import RowBudget
from funcppo.kg.logic.kb import (
    HEAD,
    TAIL,
    KBSizes,
    KnowledgeBase,
    rule_confidence,
)
from funcppo.kg.logic.row_index import int_list
from funcppo.kg.scores import evidence
from funcppo.kg.scores.evidence import Degrees

# above, the terms of second order in 1 - p are below 1e-13
_NEAR_CERTAIN_LOG_ODDS = 30.0


def max_confidence(
    kb: KnowledgeBase, derivations: Iterable[Derivations], n_atoms: int
) -> F64[Tensor, "L"]:
    """Compute the largest confidence of the rules that derive each atom, as log-odds.

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
    """Compute the noisy-or of the rules that derive each atom, as log-odds.

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
    """Compute the log-odds of (1 - exp(-neg_log_wrong))^(1 / power)."""
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
    """Compute the noisy-or of the `n_best` most confident rules that derive each atom, as log-odds.

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
    """Return whether T_P derives each atom within `max_height` steps."""
    height = fixpoint.atom_height(model, atoms.long())
    return (height >= 0) & (height <= max_height)


def rule_confidences(kb: KnowledgeBase) -> F64[Tensor, "R"]:
    """Compute `rule_confidence` in float64, so that 1 - confidence keeps its precision too."""
    return rule_confidence(
        kb._replace(
            support=kb.support.to(torch.float64),
            body_pairs=kb.body_pairs.to(torch.float64),
        )
    )


def log_odds(log_probability: F32[Tensor, "..."]) -> F64[Tensor, "..."]:
    """Compute log(p / (1 - p)) from log p, as exact as the leading digits of log p."""
    # Rounding can leave the logarithm of a sum of probabilities slightly above 0.
    log_p = log_probability.to(torch.float64).clamp_max(0.0)
    return log_p - torch.log(-torch.expm1(log_p))


class OtherFactCounts(NamedTuple):
    """Counts that the shares are computed from, by label (a predicate and a side, see `make_label`) and by rule."""

    degrees: Degrees
    n_facts: I64[Tensor, "B"]  # facts of each label
    # facts among them whose entity has another one in the label
    n_facts_with: I64[Tensor, "B"]
    # atoms that each rule derives and that are no facts; 0 for rules whose heads have not two arguments
    n_derived: I64[Tensor, "R"]
    # atoms among them whose head, and whose tail, has a fact of the relation there
    n_derived_with: I64[Tensor, "R 2"]


class OtherFactShares(NamedTuple):
    """Shares of facts, and of derived atoms, whose entity has another fact of the relation on that side, by label."""

    of_facts: F64[Tensor, "B"]
    of_derived: F64[Tensor, "B"]  # of what the rules derive beside the facts


def count_other_facts(
    kb: KnowledgeBase,
    sizes: KBSizes,
    *,
    object_identity: bool = False,
    budget: RowBudget | None = None,
    progress: CountCallback = ignore_progress,
) -> OtherFactCounts:
    """Count facts and derived atoms with other facts, one rule at a time so that only its atoms are in memory.

    Args:
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      budget: bounds the rows that the joins make; None for no bound.
      progress: is called after each rule that is applied.

    Raises:
      RowBudgetExceeded: the joins make more rows than the budget allows.
    """
    heads = kb.rules[kb.rule_ids_by_predicate, 0]
    is_binary = kbase.is_binary(heads)
    rule_ids = kb.rule_ids_by_predicate[is_binary]
    consequences = iter_consequences(
        kb,
        sizes,
        rule_ids=int_list(rule_ids),
        object_identity=object_identity,
        budget=budget,
        progress=progress,
    )
    of_rule = zip(int_list(heads[is_binary, 0]), consequences, strict=True)
    rows = [rule_ids.new_zeros((0, 3))]
    for predicate, group in groupby(of_rule, key=itemgetter(0)):
        has_fact = _has_fact(kb, sizes, predicate)
        rows += [_count_derived(part, has_fact) for _, part in group]
    table = rule_ids.new_zeros((sizes.n_rules, 3))
    table = table.index_add(0, rule_ids, torch.cat(rows))

    degrees = evidence.count_degrees(kb, sizes)
    label = degrees.key % evidence.n_labels(sizes)
    zero = label.new_zeros(evidence.n_labels(sizes))
    several = torch.where(degrees.n_facts > 1, degrees.n_facts, 0)
    return OtherFactCounts(
        degrees=degrees,
        n_facts=zero.index_add(0, label, degrees.n_facts),
        n_facts_with=zero.index_add(0, label, several),
        n_derived=table[:, 0],
        n_derived_with=table[:, 1:],
    )


def _has_fact(
    kb: KnowledgeBase, sizes: KBSizes, predicate: int
) -> Bool[Tensor, "2 C1"]:
    """Return whether each entity is the head, and whether it is the tail, of some fact of a relation."""
    start, stop = int_list(kb.fact_offsets[predicate : predicate + 2])
    arguments = kb.facts[start:stop, HEAD : TAIL + 1].long().T
    none = torch.zeros(
        (2, sizes.n_constants + 1), dtype=torch.bool, device=kb.facts.device
    )
    return none.scatter(1, arguments, True)


def _count_derived(
    part: Consequences, has_fact: Bool[Tensor, "2 C1"]
) -> I64[Tensor, "1 3"]:
    """Count a rule's derived atoms that are no facts, and those among them whose head, or tail, has a fact."""
    new = part.atoms[part.fact < 0].long()
    with_head = has_fact[0, new[:, HEAD]].sum()
    with_tail = has_fact[1, new[:, TAIL]].sum()
    n_new = torch.full_like(with_head, len(new))
    return torch.stack([n_new, with_head, with_tail])[None]


def other_fact_shares(
    kb: KnowledgeBase, counts: OtherFactCounts
) -> OtherFactShares:
    """Compute the shares a and b of each label.

    Args:
      kb: with the supports and body pairs that confidences are computed from.
    """
    confidence = rule_confidences(kb)
    predicate = kb.rules[:, 0, 0].long()
    zero = torch.zeros_like(counts.n_facts, dtype=torch.float64)
    n_all, n_with = zero, zero
    for place, side in enumerate((HEAD, TAIL)):
        label = make_label(predicate, side)
        with_fact = confidence * counts.n_derived_with[:, place]
        n_all = n_all.index_add(0, label, confidence * counts.n_derived)
        n_with = n_with.index_add(0, label, with_fact)
    # One with and one without are added to each, so that no share is 0 or 1.
    return OtherFactShares(
        of_facts=(counts.n_facts_with + 1) / (counts.n_facts.double() + 2),
        of_derived=(n_with + 1) / (n_all + 2),
    )


def log_likelihood_ratios(shares: OtherFactShares) -> F64[Tensor, "B 2"]:
    """Compute the log-likelihood ratio by label, for a candidate without (column 0) and with other facts (column 1)."""
    a, b = shares
    without = torch.log1p(-a) - torch.log1p(-b)
    return torch.stack([without, torch.log(a) - torch.log(b)], 1)


def count_other_facts_of(
    kb: KnowledgeBase,
    sizes: KBSizes,
    degrees: Degrees,
    atoms: I64[Tensor, "n W"],
    side: int,
) -> I64[Tensor, "n"]:
    """Count, for each atom, the facts other than itself that share its relation and its entity on a side."""
    label = make_label(atoms[:, 0], side)
    degree = evidence.find_degrees(degrees, sizes, atoms[:, side], label)
    return degree - kbase.contains(kb, sizes, atoms).long()
