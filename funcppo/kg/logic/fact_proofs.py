"""The heights of facts that are proved from other facts: a fact does not count in its own proof.

At height 1 the rules that derive the facts are found by their questions. A fact that they do not derive is removed and
T_P evaluated without it, one fact after the other; a bound on rows ends this work.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.types import I32, I64, Bool
from funcppo.kg.logic import query_answering
from funcppo.kg.logic.firing_chunks import iter_firing_chunks
from funcppo.kg.logic.firings import FiringPlan, plan_firings
from funcppo.kg.logic.fixpoint import Verdict
from funcppo.kg.logic.joins import RowBudget, RowBudgetExceeded
from funcppo.kg.logic.kb import KBSizes, KnowledgeBase
from funcppo.kg.logic.question_types import Questions
from funcppo.kg.logic.rules import Atom
from funcppo.kg.logic.triple_index import HEAD, TAIL, is_binary
from funcppo.kg.logic.typed_torch import atom_tuples, unique_rows_with_inverse

# rows of joins to decide which of some facts other facts prove
MAX_FACT_ROWS = 100_000_000


class FactHeights(NamedTuple):
    """The smallest heights of proofs of some facts from other facts."""

    height: I64[Tensor, "n"]  # -1 without a proof, or undecided
    n_undecided: int  # distinct facts for which a bound was reached first


def fact_heights(
    kb: KnowledgeBase,
    sizes: KBSizes,
    facts: I32[Tensor, "n W"],
    *,
    max_height: int | None,
    max_atoms: int,
    budget: RowBudget,
    object_identity: bool = False,
    memory_share: float = 1.0,
) -> FactHeights:
    """Find the smallest height at which other facts prove each fact.

    Args:
      facts: of the knowledge base, in any order; repetitions allowed.
      max_height: the greatest height of a proof; None for any.
      max_atoms: the most atoms of a model; see `fixpoint.least_model`.
      budget: bounds the rows that all joins make; a fact that is removed counts as a row for each of the others.
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      memory_share: of the largest chunks of questions whose firings may be held at once.
    """
    facts, row_of_fact = unique_rows_with_inverse(facts)
    height = torch.full_like(facts[:, 0], -1, dtype=torch.int64)
    if max_height == 0:
        return FactHeights(height[row_of_fact], 0)
    is_asked = is_binary(facts)
    asked = is_asked.nonzero().squeeze(1)
    if len(asked):
        plan = plan_firings(kb, sizes, memory_share)
        try:
            is_derived = _derived_by_rules(
                plan, facts[asked].long(), object_identity, budget
            )
        except RowBudgetExceeded:
            return FactHeights(height[row_of_fact], len(facts))
        height = height.index_fill(0, asked[is_derived], 1)

    # The others need a greater height, or have other than two arguments.
    is_open = height < 0
    if max_height == 1:
        is_open = is_open & ~is_asked
    found = [
        _prove_one(
            kb, sizes, fact, max_height, max_atoms, object_identity, budget
        )
        for fact in atom_tuples(facts[is_open])
    ]
    heights = [-1 if one is None else one for one in found]
    height = height.masked_scatter(is_open, height.new_tensor(heights))
    return FactHeights(height[row_of_fact], found.count(None))


def _prove_one(
    kb: KnowledgeBase,
    sizes: KBSizes,
    fact: Atom,
    max_height: int | None,
    max_atoms: int,
    object_identity: bool,
    budget: RowBudget,
) -> int | None:
    """The height of a smallest proof of a fact from other facts, -1 if there is none; None if it is not decided."""
    try:
        budget.spend(sizes.n_facts)
    except RowBudgetExceeded:
        return None
    found = query_answering.prove_ground(
        kb,
        sizes,
        fact,
        max_height=max_height,
        max_atoms=max_atoms,
        object_identity=object_identity,
        budget=budget,
    )
    if found.verdict == Verdict.UNKNOWN:
        return None
    return -1 if found.height is None else found.height


def _derived_by_rules(
    plan: FiringPlan,
    facts: I64[Tensor, "n W"],
    object_identity: bool,
    budget: RowBudget,
) -> Bool[Tensor, "n"]:
    """Whether one application of a rule derives each fact of two arguments from other facts.

    Raises:
      RowBudgetExceeded: the joins make more rows than the budget allows.
    """
    # A fact is the answer that its question leaves out.
    questions = Questions(
        predicate=facts[:, 0],
        side=torch.full_like(facts[:, 0], TAIL),
        entity=facts[:, HEAD],
        left_out=facts[:, TAIL],
    )
    is_derived = [torch.zeros_like(facts[:0, 0], dtype=torch.bool)]
    for chunk, firings in iter_firing_chunks(
        plan, questions, object_identity=object_identity, budget=budget
    ):
        is_answer = firings.candidate == chunk.left_out[firings.question]
        row = torch.arange(len(chunk.entity), device=facts.device)
        is_derived.append(torch.isin(row, firings.question[is_answer]))
    return torch.cat(is_derived)
