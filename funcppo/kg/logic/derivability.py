"""What T_P knows before a proof search starts: which rules derive the query, and which goals nothing derives.

A policy that should prefer precise rules must see which rules apply at all; otherwise it learns which ones apply often.
`build_derivability_index` computes the index; `rule_derives` and `dead_end_mask` look it up during the search.

Where all consequences of one step are too many to hold, the candidates of some queries are enough to rank with.
`answered_step` derives them by their questions, `restricted_step` by all rules, where a query is itself a fact, which
must not derive itself. Each atom that is held is held with every rule that derives it; of other atoms nothing is known.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.types import I32, I64, Bool
from funcppo.kg.logic import consequences, row_index
from funcppo.kg.logic.consequences import (
    CountCallback,
    Derivations,
    iter_consequences,
)
from funcppo.kg.logic.derive import (
    FiringPlan,
    fired_atoms,
    iter_firing_chunks,
    open_questions,
    plan_firings,
)
from funcppo.kg.logic.fixpoint import LeastModel, StopCode
from funcppo.kg.logic.joins import RowBudget, expand_ranges, ragged_arange
from funcppo.kg.logic.kb import (
    AtomIndex,
    KBSizes,
    KnowledgeBase,
    fact_id,
    find_atoms,
    find_postings,
    index_sorted_atoms,
    sort_and_index_atoms,
)
from funcppo.kg.logic.resolve import Goals, Successors
from funcppo.kg.logic.row_index import int_list, runs, unique_values
from funcppo.kg.logic.triple_index import HEAD, TAIL


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


# -- partial fixpoint


def restricted_step(
    kb: KnowledgeBase,
    sizes: KBSizes,
    queries: I64[Tensor, "Q W"],
    max_derivations: int,
    object_identity: bool = False,
    budget: RowBudget | None = None,
    progress: CountCallback | None = None,
) -> tuple[LeastModel, DerivabilityIndex] | None:
    """Derive the facts and the consequences of one step that some query may have as a candidate.

    A consequence is such a candidate if it agrees with a query in the predicate and in at least one argument.

    Args:
      queries: ground atoms; a ranking replaces one of their arguments.
      max_derivations: the most pairs of an atom and a rule that derives it to hold.
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      budget: bounds the rows that the joins make; None for no bound.
      progress: is called after each rule; None for no reports.

    Returns:
      The model of these atoms, of height 0 or 1 and never complete, and the index of the rules that derive each of them
      (leave-one-out); None instead of both if there are more than `max_derivations` pairs.

    Raises:
      RowBudgetExceeded: the joins make more rows than the budget allows.
    """
    start = time.perf_counter()
    is_queried = _queried_arguments(queries, sizes, kb.facts.device)
    atom_parts = [kb.facts[:0]]
    rule_parts = [kb.rule_ids_by_predicate[:0]]
    n_derivations = 0
    for part in iter_consequences(
        kb,
        sizes,
        leave_one_out=True,
        object_identity=object_identity,
        budget=budget,
        progress=progress,
    ):
        is_fact = part.fact >= 0
        codes = _argument_codes(part.atoms, sizes)
        is_candidate = is_queried[codes].any(0)
        selected = is_fact | is_candidate
        atom_parts.append(part.atoms[selected])
        rule_parts.append(part.rule[selected])
        n_derivations += len(rule_parts[-1])
        if n_derivations > max_derivations:
            return None

    model = partial_model(
        kb,
        sizes,
        torch.cat(atom_parts),
        object_identity=object_identity,
        start=start,
    )
    index = _index_derivations(
        model, torch.cat(atom_parts), torch.cat(rule_parts)
    )
    return model, index


def answered_step(
    kb: KnowledgeBase,
    sizes: KBSizes,
    queries: I64[Tensor, "Q W"],
    sides: Sequence[int],
    max_derivations: int,
    object_identity: bool = False,
    budget: RowBudget | None = None,
    plan: FiringPlan | None = None,
    progress: CountCallback | None = None,
) -> tuple[LeastModel, DerivabilityIndex] | None:
    """Derive what one step derives in answer to some queries, by their questions; the facts among the answers are held.

    It takes less than `restricted_step` where there are few queries. A fact may be derived from itself here.

    Args:
      queries: atoms of two arguments; a ranking replaces one of them.
      sides: the arguments that are replaced, each in turn.
      plan: what the rules fire from; None to make it.
      progress: receives how many questions are answered, and of how many; None for no reports.

    Other arguments, what is returned and what is raised are those of `restricted_step`.
    """
    if plan is None:
        plan = plan_firings(kb, sizes)
    atom_parts = [kb.facts[:0]]
    rule_parts = [kb.rule_ids_by_predicate[:0]]
    n_derivations = 0
    asked = [open_questions(queries, side) for side in sides]
    n_questions = sum(len(of_side.entity) for of_side in asked)
    n_answered = 0
    for of_side in asked:
        for questions, firings in iter_firing_chunks(
            plan, of_side, object_identity=object_identity, budget=budget
        ):
            n_answered += len(questions.entity)
            if progress is not None:
                progress(n_answered, n_questions)
            atom_parts.append(fired_atoms(questions, firings, sizes))
            rule_parts.append(firings.rule)
            n_derivations += len(firings.rule)
            if n_derivations > max_derivations:
                return None

    atoms = torch.cat(atom_parts)
    model = partial_model(
        kb,
        sizes,
        atoms,
        object_identity=object_identity,
        facts=answering_facts(kb, sizes, queries, sides),
    )
    return model, _index_derivations(model, atoms, torch.cat(rule_parts))


def _index_derivations(
    model: LeastModel, atoms: I32[Tensor, "n W"], rule: I64[Tensor, "n"]
) -> DerivabilityIndex:
    """The index of some pairs of an atom of a model and a rule that derives it; a pair may come twice."""
    row = find_atoms(model.atom_index, model.sizes, atoms)
    return DerivabilityIndex(
        atom_index=model.atom_index,
        height=model.height,
        derivation_keys=unique_values(row * model.sizes.n_rules + rule),
    )


def partial_model(
    kb: KnowledgeBase,
    sizes: KBSizes,
    derived: I32[Tensor, "n W"],
    *,
    object_identity: bool,
    facts: I32[Tensor, "m W"] | None = None,
    start: float | None = None,
) -> LeastModel:
    """The model of facts and of some atoms that one step derives; these in any order, perhaps more than once.

    Args:
      object_identity: with which they are derived.
      facts: those that the model holds; None for all.
      start: when their evaluation began, a time of the performance counter; None for now.
    """
    start = time.perf_counter() if start is None else start
    facts = kb.facts if facts is None else facts
    atoms = torch.cat([facts, derived])
    rows, _ = sort_and_index_atoms(atoms, sizes.n_predicates, sizes.n_constants)

    atoms = atoms[rows]
    is_derived = fact_id(kb, sizes, atoms) < 0
    return LeastModel(
        atoms=atoms,
        height=is_derived.to(torch.int32),
        atom_index=index_sorted_atoms(
            atoms, sizes.n_predicates, sizes.n_constants
        ),
        n_atoms_after_step=(len(facts), len(atoms)),
        complete=False,  # an atom that is absent may still be derivable
        reached_fixpoint=False,
        stop_reason="derived only as far as the queries ask",
        stop_code=StopCode.QUERIES_ONLY,
        seconds=time.perf_counter() - start,
        predicates=frozenset(range(1, sizes.n_predicates + 1)),
        object_identity=object_identity,
        sizes=sizes,
    )


# -- candidates of the queries


def answering_facts(
    kb: KnowledgeBase,
    sizes: KBSizes,
    queries: I64[Tensor, "Q W"],
    sides: Sequence[int],
) -> I32[Tensor, "n W"]:
    """The facts with the predicate of a query and the argument that it keeps, in lexicographic order.

    Args:
      queries: atoms of two arguments; a ranking replaces one of them.
      sides: the arguments that are replaced, each in turn.
    """
    found = [kb.argument_postings[:0]]
    for side in sides:
        questions = open_questions(queries, side)
        kept = torch.full_like(questions.side, HEAD + TAIL - side)
        span = find_postings(
            kb, sizes, kept - 1, questions.predicate, questions.entity
        )
        _, position = expand_ranges(span.start, span.length)
        found.append(kb.argument_postings[position])
    return kb.facts[unique_values(torch.cat(found)).long()]


def answering_atoms(
    atoms: I32[Tensor, "N W"],
    queries: I64[Tensor, "Q W"],
    sides: Sequence[int],
    sizes: KBSizes,
) -> I32[Tensor, "n W"]:
    """The atoms of a table with the predicate of a query and the argument that it keeps, in their order.

    Arguments are those of `answering_facts`.
    """
    base = sizes.n_constants + 1
    is_answer = torch.zeros_like(atoms[:, 0], dtype=torch.bool)
    for side in sides:
        given = HEAD + TAIL - side
        questions = open_questions(queries, side)
        code = atoms[:, 0].long() * base + atoms[:, given]
        is_answer |= torch.isin(
            code, questions.predicate * base + questions.entity
        )
    return atoms[is_answer]


def _queried_arguments(
    queries: I64[Tensor, "Q W"], sizes: KBSizes, device: torch.device
) -> Tensor:
    """A mask over all argument codes: true for those of the queries."""
    n_positions = sizes.atom_width - 1
    n_codes = n_positions * (sizes.n_predicates + 1) * (sizes.n_constants + 1)
    nothing = torch.zeros(n_codes, dtype=torch.bool, device=device)
    codes = _argument_codes(queries, sizes).view(-1)
    return nothing.index_fill(0, codes, True)


def _argument_codes(
    atoms: I32[Tensor, "n W"], sizes: KBSizes
) -> I64[Tensor, "J n"]:
    """One number for each argument of each atom, made of its position, the predicate and the constant."""
    predicate = atoms[:, 0]
    arguments = atoms[:, 1:].T
    position = torch.arange(len(arguments), device=atoms.device)[:, None]
    prefix = position * (sizes.n_predicates + 1) + predicate
    return prefix * (sizes.n_constants + 1) + arguments
