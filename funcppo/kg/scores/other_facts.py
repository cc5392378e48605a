"""Whether a candidate has other facts of the asked relation on the asked side, as evidence for it or against it.

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

from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.types import F64, I64, Bool
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.derive import make_label
from funcppo.kg.logic.fixpoint import (
    Consequences,
    CountCallback,
    ignore_progress,
    iter_consequences,
)
from funcppo.kg.logic.joins import RowBudget
from funcppo.kg.logic.kb import HEAD, TAIL, KBSizes, KnowledgeBase
from funcppo.kg.logic.row_index import int_list
from funcppo.kg.scores import evidence
from funcppo.kg.scores.evidence import Degrees
from funcppo.kg.scores.rules import rule_confidences


class OtherFactCounts(NamedTuple):
    """What the shares follow from; labels are a predicate and a side, see `make_label`."""

    degrees: Degrees
    n_facts: I64[Tensor, "B"]  # facts of each label
    # facts among them whose entity has another one in the label
    n_facts_with: I64[Tensor, "B"]
    # atoms that each rule derives and that are no facts; 0 for rules whose heads have not two arguments
    n_derived: I64[Tensor, "R"]
    # atoms among them whose head, and whose tail, has a fact of the relation there
    n_derived_with: I64[Tensor, "R 2"]


class OtherFactShares(NamedTuple):
    """How many have another fact of the relation on a side, by label."""

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
    """Count facts and what the rules derive, one rule after another, so that only one rule's atoms are in memory.

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
    """Whether each entity is the head, and whether it is the tail, of some fact of a relation."""
    start, stop = int_list(kb.fact_offsets[predicate : predicate + 2])
    arguments = kb.facts[start:stop, HEAD : TAIL + 1].long().T
    none = torch.zeros(
        (2, sizes.n_constants + 1), dtype=torch.bool, device=kb.facts.device
    )
    return none.scatter(1, arguments, True)


def _count_derived(
    part: Consequences, has_fact: Bool[Tensor, "2 C1"]
) -> I64[Tensor, "1 3"]:
    """The atoms of a rule that are no facts, and those among them whose head, and whose tail, has a fact."""
    new = part.atoms[part.fact < 0].long()
    with_head = has_fact[0, new[:, HEAD]].sum()
    with_tail = has_fact[1, new[:, TAIL]].sum()
    n_new = torch.full_like(with_head, len(new))
    return torch.stack([n_new, with_head, with_tail])[None]


def other_fact_shares(
    kb: KnowledgeBase, counts: OtherFactCounts
) -> OtherFactShares:
    """The shares a and b of each label.

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
    """The evidence of a candidate by label, if it has no other fact and if it has some."""
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
    """How many facts of its relation other than itself each atom's entity on a side has there."""
    label = make_label(atoms[:, 0], side)
    degree = evidence.find_degrees(degrees, sizes, atoms[:, side], label)
    return degree - kbase.contains(kb, sizes, atoms).long()
