"""Part of T_P to height 1: the consequences of one step that given queries need, and a sample of the others.

Where all consequences of one step are too many to hold, the candidates of the queries are enough to rank with, and a
sample is enough to learn from. `restricted_step` derives both; `priority_sample` draws the sample. For a few queries
`answered_step` derives their candidates alone. Each atom that is
held is held with every rule that derives it; of other atoms nothing is known.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.types import F64, I32, I64
from funcppo.kg.logic.consequences import CountCallback, iter_consequences
from funcppo.kg.logic.derivability import DerivabilityIndex
from funcppo.kg.logic.derive import (
    FiringPlan,
    fired_atoms,
    iter_firing_chunks,
    open_questions,
    plan_firings,
)
from funcppo.kg.logic.fixpoint import LeastModel, StopCode
from funcppo.kg.logic.joins import RowBudget, expand_ranges
from funcppo.kg.logic.kb import (
    KBSizes,
    KnowledgeBase,
    fact_id,
    find_atoms,
    find_postings,
    index_sorted_atoms,
    rule_confidence,
    sort_and_index_atoms,
)
from funcppo.kg.logic.row_index import unique_values
from funcppo.kg.logic.triple_index import HEAD, TAIL

# odd; for `_hash_to_uniform`
_HASH_MULTIPLIERS = (0x2545F4914F6CDD1D, 0x1F83D9ABFB41BD6B)


def priority_sample(
    kb: KnowledgeBase,
    sizes: KBSizes,
    max_atoms: int,
    object_identity: bool = False,
    budget: RowBudget | None = None,
    progress: CountCallback | None = None,
) -> I32[Tensor, "n W"]:
    """Sample atoms that one step of T_P derives and that are not facts, always the same ones.

    An atom's chance is proportional to the largest confidence c of a rule that derives it, so that rules compete over
    many atoms: the sample holds the atoms with the smallest u / c, where u is a hash of the atom, uniform on [0, 1).

    Args:
      max_atoms: the size of the sample; fewer if fewer atoms are derived.
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      budget: bounds the rows that the joins make; None for no bound.
      progress: is called after each rule; None for no reports.

    Returns:
      The atoms in lexicographic order; none that only rules of confidence 0 derive.

    Raises:
      RowBudgetExceeded: the joins make more rows than the budget allows.

    Source: Duffield, Lund and Thorup 2007, "Priority sampling for estimation of arbitrary subset sums", JACM 54(6).
    """
    confidence = rule_confidence(kb).to(torch.float64)
    no_atoms = _RankedAtoms(kb.facts[:0], confidence[:0])
    sample: list[_RankedAtoms] = [no_atoms]
    n_held = 0
    max_rank = torch.inf
    for part in iter_consequences(
        kb,
        sizes,
        object_identity=object_identity,
        budget=budget,
        progress=progress,
    ):
        rank = _hash_to_uniform(part.atoms) / confidence[part.rule]
        is_candidate = (part.fact < 0) & (rank < max_rank)
        candidates = _RankedAtoms(
            atoms=part.atoms[is_candidate],
            rank=rank[is_candidate],
        )
        sample.append(candidates)
        n_held += len(candidates.rank)

        # Shrink the sample when it has doubled; from then on, larger ranks cannot enter it.
        if n_held > 2 * max_atoms:
            smallest = _smallest_ranks(sample, max_atoms, sizes)
            sample = [smallest]
            n_held = len(smallest.rank)
            if n_held == max_atoms > 0:
                max_rank = float(smallest.rank.max())

    return _smallest_ranks(sample, max_atoms, sizes).atoms


def restricted_step(
    kb: KnowledgeBase,
    sizes: KBSizes,
    queries: I64[Tensor, "Q W"],
    sample: I32[Tensor, "n W"],
    max_derivations: int,
    object_identity: bool = False,
    budget: RowBudget | None = None,
    progress: CountCallback | None = None,
) -> tuple[LeastModel, DerivabilityIndex] | None:
    """Derive the facts, the sample, and the consequences of one step that some query may have as a candidate.

    A consequence is such a candidate if it agrees with a query in the predicate and in at least one argument.

    Args:
      queries: ground atoms; a ranking replaces one of their arguments.
      sample: derived atoms, distinct, in lexicographic order.
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
    sample_index = index_sorted_atoms(
        sample, sizes.n_predicates, sizes.n_constants
    )

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
        is_sampled = find_atoms(sample_index, sizes, part.atoms) >= 0
        selected = is_fact | is_candidate | is_sampled
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


# -- priority sampling


class _RankedAtoms(NamedTuple):
    """Atoms and their priorities: the smaller the rank, the sooner an atom is in the sample."""

    atoms: Tensor
    rank: Tensor


def _smallest_ranks(
    parts: Sequence[_RankedAtoms], n: int, sizes: KBSizes
) -> _RankedAtoms:
    """The `n` distinct atoms of the smallest ranks, in lexicographic order; an atom has the smallest of its ranks."""
    atoms = torch.cat([part.atoms for part in parts])
    rank = torch.cat([part.rank for part in parts])

    # Sorted by rank, the first of equal atoms has their smallest rank, and the sort below keeps the first.
    rank, order = torch.sort(rank)
    atoms = atoms[order]
    row, _ = sort_and_index_atoms(atoms, sizes.n_predicates, sizes.n_constants)
    if len(row) > n:
        smallest = torch.topk(rank[row], n, largest=False, sorted=False).indices
        row = row[torch.sort(smallest).values]
    return _RankedAtoms(atoms[row], rank[row])


def _hash_to_uniform(atoms: I32[Tensor, "n W"]) -> F64[Tensor, "n"]:
    """A pseudo-random number on [0, 1) that depends on the atom alone."""
    first, second = _HASH_MULTIPLIERS
    word = torch.zeros_like(atoms[:, 0], dtype=torch.int64)
    for column in atoms.unbind(1):
        word = word ^ column
        word = word * first
        word = word ^ (word >> 32)
        word = word * second
    high_bits = (word >> 32) & 0x7FFFFFFF
    return high_bits * 2.0**-31
