"""The immediate-consequence operator T_P: its least model, what one application of a rule derives, and rule counts.

    T_P(I) = facts + { head s : head :- body is a rule, every atom of body s is in I }

The height of an atom is the smallest h with the atom in T_P^h(facts); a fact has height 0. `least_model` evaluates T_P
semi-naively: step h joins only those bodies that hold an atom of height h - 1. `atom_height` reads it.

Rules are Horn clauses: those with a negation or a comparison are for `prove`.

`iter_consequences` lists what each rule derives from the facts, `iter_derivations` the rules that derive each atom of a
list. `count_rules` counts how often each rule is right. With `heads(r)` the distinct heads of rule r over the facts,

    body_pairs(r) = |heads(r)|,    support(r) = |heads(r) and facts|,    confidence = support / body_pairs

which is the standard confidence of AMIE and AnyBURL, not AMIE's PCA confidence. An atom counts once for each
rule, however many bodies of that rule derive it.

Source: van Emden and Kowalski 1976, "The semantics of predicate logic as a programming language"; Bancilhon and
Ramakrishnan 1986, "An amateur's introduction to recursive query processing strategies" (semi-naive evaluation);
Galárraga et al. 2013, "AMIE: association rule mining under incomplete evidence", section 3.2.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo.core.host import NO_DEADLINE, Deadline
from funcppo.core.types import F64, I32, I64
from funcppo.kg.logic import joins, row_index
from funcppo.kg.logic.joins import (
    UNBOUNDED,
    Columns,
    ConjunctiveQuery,
    Inequality,
    Literal,
    Relation,
    RowBudget,
    RowBudgetExceeded,
    Rule,
    Table,
    TimeBudgetExceeded,
    atom_variables,
    collect_answers,
    find_rows,
    make_literal,
    most_general_unifier,
    object_identity_constraints,
    relations_by_predicate,
    rules_from_kb,
    substitute_rule,
    substitute_terms,
)
from funcppo.kg.logic.kb import (
    AtomIndex,
    FilterIndex,
    KBSizes,
    KnowledgeBase,
    build,
    build_triple_index,
    fact_id,
    find_atoms,
    index_sorted_atoms,
    sort_and_index_atoms,
)
from funcppo.kg.logic.row_index import (
    concatenate,
    int_list,
    select_rows,
    true_rows,
    unique_values,
)

# Receives the last completed step (0: the facts), the atoms after it, and how many rules of the next step are applied,
# of how many.
StepCallback = Callable[[int, int, int, int], object]
# Receives how many rules are applied, and of how many.
CountCallback = Callable[[int, int], object]


def ignore_progress(*numbers: int) -> None:
    """Ignore the numbers: the default progress callback."""


# by predicate; a predicate without atoms has no relation
Relations = dict[int, Relation]


@enum.unique
class StopCode(enum.StrEnum):
    """Reason why a model is not complete; codes are never renamed."""

    MAX_ATOMS = "max_atoms"  # the next step exceeds the atoms to hold
    MAX_ROWS = "max_rows"  # the joins of the next step make too many rows
    TIME_LIMIT = "time_limit"
    QUERIES_ONLY = "queries_only"  # it holds only what some queries ask for


@dataclass(frozen=True, kw_only=True, slots=True)
class LeastModel:
    """Atoms that T_P derives, with their heights; a host-side value, never an argument of a compiled function."""

    atoms: I32[Tensor, "n W"]  # distinct, in lexicographic order
    # the first step that derives the atom, 0 for a fact
    height: I32[Tensor, "n"]
    atom_index: AtomIndex  # index of `atoms` for `kb.find_atoms`
    # number of atoms after step 0 (the facts), 1, 2, ..., all of them complete
    n_atoms_after_step: tuple[int, ...]
    reached_fixpoint: bool  # whether one more step would derive nothing
    # one line that says why the model is not complete; empty if it is
    stop_reason: str
    stop_code: StopCode | None  # the same as a code; None if it is complete
    seconds: float  # wall-clock time of the evaluation
    # whether different variables of a rule bind different constants, none of which the rule names
    object_identity: bool
    sizes: KBSizes  # of the knowledge base that the model was derived from

    @property
    def complete(self) -> bool:
        """Return whether the evaluation reached the fixpoint or the height that was asked for."""
        return not self.stop_reason


class Verdict(enum.IntEnum):
    """Truth value of a query."""

    REFUTED = 0  # there is no proof
    PROVED = 1
    # absent, and a limit was reached
    UNKNOWN = 2


class Consequences(NamedTuple):
    """Distinct atoms that one application of a rule derives from the facts."""

    atoms: I32[Tensor, "n W"]
    rule: I64[Tensor, "n"]  # id of the rule
    # id of the atom among the facts, -1 if it is not a fact
    fact: I64[Tensor, "n"]


class RuleCounts(NamedTuple):
    """Counts of the atoms that each rule derives from the facts."""

    support: I64[Tensor, "R"]  # derived heads that are facts
    body_pairs: I64[Tensor, "R"]  # derived heads
    # facts of the support that the rule derives only from bodies that contain the fact itself
    circular_support: I64[Tensor, "R"]


class Derivations(NamedTuple):
    """Pairs of an atom of a list and a rule that derives it in one application, each pair once."""

    atom_row: I64[Tensor, "n"]  # position of the atom in the list
    rule: I64[Tensor, "n"]  # id of the rule


# -- evaluation


def least_model(
    kb: KnowledgeBase,
    sizes: KBSizes,
    *,
    max_height: int | None,
    max_atoms: int,
    object_identity: bool = False,
    progress: StepCallback = ignore_progress,
    budget: RowBudget = UNBOUNDED,
) -> LeastModel:
    """Compute the least model of `max_height` steps of T_P, or its fixpoint, with the smallest height of every atom.

    Args:
      max_height: steps of T_P; None for the fixpoint.
      max_atoms: the most atoms to hold, facts included. A step that would exceed it is dropped as a whole, so the model
        stays exact up to the step before, and `stop_reason` says so.
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      progress: is called before each step and after each of its rules.
      budget: bounds the rows that the joins make; a step that would exceed it is dropped as a whole too.

    Returns:
      The model; if it is not complete, its atoms are exactly those of the steps in `n_atoms_after_step`.
    """
    start = time.perf_counter()
    rules, atoms = rules_from_kb(kb), kb.facts
    height = torch.zeros_like(atoms[:, 0])
    atom_index = index_sorted_atoms(atoms, sizes)

    previous: Relations = {}
    known = delta = relations_by_predicate(atoms)
    counts = [len(atoms)]
    stop: RowBudgetExceeded | None = None
    new: Tensor | None = None
    while (new is None or len(new)) and len(counts) - 1 != max_height:
        parts = _iter_step_atoms(
            rules,
            (previous, delta, known),
            kb,
            sizes,
            object_identity,
            budget,
            partial(progress, len(counts) - 1, counts[-1]),
        )
        try:
            new = _distinct_atoms(
                (x[find_atoms(atom_index, sizes, x) < 0] for x in parts),
                atoms[:0],
                sizes,
                max_atoms - counts[-1],
            )
        except RowBudgetExceeded as error:
            stop = error
            break
        if len(new):
            atoms = torch.cat([atoms, new])
            order, atom_index = sort_and_index_atoms(atoms, sizes)
            steps = torch.full_like(new[:, 0], len(counts))
            atoms, height = atoms[order], torch.cat([height, steps])[order]
            previous, delta = known, relations_by_predicate(new)
            known = relations_by_predicate(atoms)
            counts.append(len(atoms))

    code, reason = describe_stop(stop, counts, max_atoms)

    return LeastModel(
        atoms=atoms,
        height=height,
        atom_index=atom_index,
        n_atoms_after_step=tuple(counts),
        reached_fixpoint=new is not None and not len(new),
        stop_reason=reason,
        stop_code=code,
        seconds=time.perf_counter() - start,
        object_identity=object_identity,
        sizes=sizes,
    )


class MaxAtomsExceeded(RowBudgetExceeded):
    """Error raised when a step derives more atoms than may be held."""


def describe_stop(
    stop: RowBudgetExceeded | None, counts: Sequence[int], max_atoms: int
) -> tuple[StopCode | None, str]:
    """Return why the evaluation stopped before the next step, as a code and a line; (None, "") if it did not."""
    if stop is None:
        return None, ""

    code, obstacle = StopCode.MAX_ROWS, f"takes {stop}"
    if isinstance(stop, TimeBudgetExceeded):
        code = StopCode.TIME_LIMIT
    elif isinstance(stop, MaxAtomsExceeded):
        code, obstacle = StopCode.MAX_ATOMS, f"exceeds max_atoms {max_atoms}"
    return (
        code,
        f"stopped at {counts[-1]} atoms: step {len(counts)} {obstacle}, unknown beyond",
    )


def _iter_step_atoms(
    rules: Sequence[Rule],
    steps: tuple[Relations, Relations, Relations],
    kb: KnowledgeBase,
    sizes: KBSizes,
    object_identity: bool,
    budget: RowBudget,
    report: CountCallback,
) -> Iterator[I32[Tensor, "n W"]]:
    """Yield the heads of the rule bodies that hold an atom of the last step of T_P.

    A body is found once: by the query for its first atom of the last step. Atoms left of it are older, atoms right
    of it are of any step.

    Args:
      rules: all those with heads that are evaluated.
      steps: the atoms before the last step, those that it added, and all of them.
    """
    previous, *_ = steps
    # In the first step every rule applies, without a body too.
    active = [
        rule
        for rule in rules
        if not previous or any(atom[0] in steps[1] for atom in rule.body)
    ]
    report(0, len(active))
    for n_done, rule in enumerate(active, 1):
        inequalities = object_identity_constraints(
            rule, sizes.n_constants, object_identity
        )
        for relations in _iter_bodies(rule, steps):
            heads = derive_heads(
                rule, relations, kb, sizes, inequalities, budget
            )
            if heads is not None:
                yield _atoms_of(rule.head[0], heads.columns)
        report(n_done, len(active))


def _iter_bodies(
    rule: Rule, steps: tuple[Relations, Relations, Relations]
) -> Iterator[list[Relation | None]]:
    """Yield relations for the body's atoms, so that each body with an atom of the last step is found once."""
    previous, delta, known = steps
    n_body = len(rule.body)
    for i in range(max(n_body, 1)):
        sources = [*[previous] * i, delta, *[known] * n_body]
        yield [source.get(atom[0]) for atom, source in zip(rule.body, sources)]


def derive_heads(
    rule: Rule,
    relations: Sequence[Relation | None],
    kb: KnowledgeBase,
    sizes: KBSizes,
    inequalities: Sequence[Inequality],
    budget: RowBudget = UNBOUNDED,
    among: Literal | None = None,
) -> Table | None:
    """Return the arguments of the distinct heads that a rule derives, as a table; None if it derives none.

    Args:
      relations: one for each atom of the body; None for one without atoms. Where they have values, the table has the
        largest product of those of a body in place of counts.
      inequalities: pairs of term tuples that must differ.
      budget: bounds the rows that the joins make.
      among: a condition on the rule's variables, such as the heads to look for; None for none.
    """
    literals = [] if among is None else [among]
    for relation, atom in zip(relations, rule.body):
        if relation is None:
            return None
        literals.append(make_literal(relation, atom[1:], sizes.n_constants))
    answers = collect_answers(
        ConjunctiveQuery(
            tuple(literals),
            atom_variables(rule.head, sizes.n_constants),
            tuple(inequalities),
            sizes.n_constants,
            budget,
            is_counted=any(x.relation.values is not None for x in literals),
        )
    )
    if answers is None:
        return None

    columns = dict(zip(answers.variables, answers.columns))
    for term in rule.head[1:]:
        if term not in columns:
            constant = torch.full((answers.size,), term, device=kb.facts.device)
            columns[term] = constant
    terms = rule.head[1:]
    return Table(
        terms, tuple(columns[t] for t in terms), answers.size, answers.counts
    )


def _distinct_atoms(
    parts: Iterable[Tensor], none: Tensor, sizes: KBSizes, max_atoms: int
) -> I32[Tensor, "n W"]:
    """Return the distinct atoms of several tables, in lexicographic order.

    Raises:
      RowBudgetExceeded: there are more than `max_atoms`, or the joins make too many rows.
    """
    held, n_pending = none, 0
    pending: list[Tensor] = []
    for part in chain(parts, [None]):
        if part is not None:
            pending.append(part)
            n_pending += len(part)

            # Merge when the pending rows outgrow the distinct ones: memory stays bounded, sorting stays rare.
            if n_pending <= max(joins.MAX_CHUNK_ROWS, len(held)):
                continue
        held = torch.cat([held, *pending])
        order, _ = sort_and_index_atoms(held, sizes)
        held, pending, n_pending = held[order], [], 0
        if len(held) > max_atoms:
            raise MaxAtomsExceeded
    return held


def _distinct_rows(parts: Sequence[Columns], sizes: KBSizes) -> Columns:
    """Return the distinct rows of several tables of arguments, in lexicographic order."""
    columns = concatenate(parts)
    bits = sizes.n_constants.bit_length()
    return row_index.unique_columns(columns, [bits] * len(columns))


def _atoms_of(predicate: int, columns: Columns) -> I32[Tensor, "n W"]:
    """Build the atoms of a predicate from their argument columns."""
    predicates = torch.full_like(columns[0], predicate)
    rows = [column.to(torch.int32) for column in (predicates, *columns)]
    return torch.stack(rows, dim=1)


def partial_model(
    kb: KnowledgeBase,
    sizes: KBSizes,
    derived: I32[Tensor, "n W"],
    *,
    object_identity: bool,
    facts: I32[Tensor, "m W"] | None = None,
) -> LeastModel:
    """Build an incomplete model from facts and atoms that one step derives.

    The derived atoms may come in any order and more than once.

    Args:
      object_identity: with which they are derived.
      facts: those that the model holds; None for all.
    """
    facts = kb.facts if facts is None else facts
    atoms = torch.cat([facts, derived])
    rows, atom_index = sort_and_index_atoms(atoms, sizes)
    atoms = atoms[rows]
    return LeastModel(
        atoms=atoms,
        height=(fact_id(kb, sizes, atoms) < 0).to(torch.int32),
        atom_index=atom_index,
        n_atoms_after_step=(len(facts), len(atoms)),
        reached_fixpoint=False,
        # An atom that is absent may still be derivable.
        stop_reason="derived only as far as the queries ask",
        stop_code=StopCode.QUERIES_ONLY,
        seconds=0.0,
        object_identity=object_identity,
        sizes=sizes,
    )


# -- reading a model


def atom_height(
    model: LeastModel, atoms: I64[Tensor, "... W"]
) -> I64[Tensor, "..."]:
    """Return the height of each atom; -1 for an atom that is not in the model."""
    row = find_atoms(model.atom_index, model.sizes, atoms)
    if not len(model.height):
        return row
    height = model.height[row.clamp_min(0)]
    return torch.where(row >= 0, height.to(torch.int64), -1)


def best_products(
    kb: KnowledgeBase,
    sizes: KBSizes,
    model: LeastModel,
    weight: F64[Tensor, "R"],
    max_height: int,
) -> F64[Tensor, "n"]:
    """Return the largest product of the weights of the rules in a proof of each atom of a model; 0 without a proof.

        v_0 = 1 for a fact, else 0,    v_h(head) = max of w_r prod v_{h - 1}(atom of the body) over rules r and bodies

    A rule counts as often as a proof applies it. The proof of a fact is from other facts: its last body does not
    contain it.

    Args:
      weight: of each rule, from 0 to 1.
      max_height: of a proof.

    Source: Goodman 1999, "Semiring parsing" (the Viterbi semiring).
    """
    rules, is_fact = rules_from_kb(kb), model.height == 0

    # Each step joins the bodies with an atom whose value the last one raised.
    best = torch.zeros_like(model.height, dtype=torch.float64)
    value, is_new = is_fact.double(), is_fact
    for _ in range(max_height):
        parts = (value > 0) & ~is_new, is_new, value > 0
        first, second, third = (
            relations_by_predicate(model.atoms[part], values=value[part])
            for part in parts
        )
        for rule in rules:
            apart = object_identity_constraints(
                rule, sizes.n_constants, model.object_identity
            )
            apart += _differing_atoms(rule)
            for relations in _iter_bodies(rule, (first, second, third)):
                heads = derive_heads(rule, relations, kb, sizes, apart)
                if heads is None:
                    continue
                atoms = _atoms_of(rule.head[0], heads.columns).long()
                row = find_atoms(model.atom_index, model.sizes, atoms)
                # A rule without a body has no counts. What is not held gets 0 at some row.
                product = (row >= 0) * weight[rule.id]
                if heads.counts is not None:
                    product = product * heads.counts
                best = best.scatter_reduce(0, row.clamp_min(0), product, "amax")
        after = torch.where(is_fact, 1.0, best)
        value, is_new = after, after > value
        if not is_new.any():
            break
    return best


def _differing_atoms(rule: Rule) -> list[Inequality]:
    """Return inequalities that keep the atoms of a rule's body from being its head."""
    return [
        (rule.head[1:], atom[1:])
        for atom in rule.body
        if atom[0] == rule.head[0]
    ]


def build_filter_index(
    sizes: KBSizes,
    model: LeastModel,
    true_atoms: I32[Tensor, "N W"],
    pool: I64[Tensor, "E"],
    unproved_facts: I32[Tensor, "n W"] | None = None,
) -> FilterIndex:
    """Build the indices of the true and of the derivable triples, for filtered ranking.

    Args:
      true_atoms: the known atoms, of all splits and of facts.txt.
      pool: the entities to rank against, ascending.
      unproved_facts: facts that are not derivable when they are asked, since no other facts prove them; None for none.
    """
    derivable = model.atoms
    if unproved_facts is not None and len(unproved_facts):
        row = find_atoms(model.atom_index, sizes, unproved_facts.long())
        is_kept = torch.ones_like(model.height, dtype=torch.bool)
        derivable = derivable[is_kept.index_fill(0, row[row >= 0], False)]
    return FilterIndex(
        true_triples=build_triple_index(true_atoms, sizes.n_constants, pool),
        derivable_triples=build_triple_index(
            derivable, sizes.n_constants, pool
        ),
    )


# -- consequences of each rule


def iter_consequences(
    kb: KnowledgeBase,
    sizes: KBSizes,
    *,
    rule_ids: Sequence[int] | None = None,
    leave_one_out: bool = False,
    object_identity: bool = False,
    budget: RowBudget = UNBOUNDED,
    progress: CountCallback = ignore_progress,
) -> Iterator[Consequences]:
    """Yield, rule by rule, the distinct atoms that one application of the rule derives from the facts.

    Args:
      rule_ids: the rules to apply, in order; None for all, in file order.
      leave_one_out: omit a fact that the rule derives only from bodies that contain the fact itself.
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      budget: bounds the rows that the joins make.
      progress: is called after each rule.

    Raises:
      RowBudgetExceeded: the joins make more rows than the budget allows.
    """
    rules = rules_from_kb(kb, rule_ids)
    relations = _relations_of(kb, rules)
    for n_applied, rule in enumerate(rules, 1):
        inequalities = object_identity_constraints(
            rule, sizes.n_constants, object_identity
        )
        arguments = kb, sizes, relations, rule, inequalities, budget
        columns, fact = _apply_rule(*arguments)
        if leave_one_out:
            circular = _circular_heads(*arguments)
            _, is_circular = find_rows(
                columns, Relation(circular), sizes.n_constants
            )
            columns = select_rows(columns, ~is_circular)
            fact = fact[~is_circular]

        yield Consequences(
            atoms=_atoms_of(rule.head[0], columns),
            rule=torch.full_like(columns[0], rule.id),
            fact=fact,
        )
        progress(n_applied, len(rules))


def _relations_of(kb: KnowledgeBase, rules: Sequence[Rule]) -> Relations:
    """Return the relations of the facts whose predicates occur in some rules."""
    return relations_by_predicate(
        kb.facts,
        {atom[0] for rule in rules for atom in (rule.head, *rule.body)},
    )


def _apply_rule(
    kb: KnowledgeBase,
    sizes: KBSizes,
    relations: Relations,
    rule: Rule,
    inequalities: Sequence[Inequality],
    budget: RowBudget,
    among: Literal | None = None,
) -> tuple[Columns, I64[Tensor, "n"]]:
    """Return the distinct heads that a rule derives from the facts, and the fact id of each (-1 for no fact)."""
    body = [relations.get(atom[0]) for atom in rule.body]
    heads = derive_heads(rule, body, kb, sizes, inequalities, budget, among)
    columns = (kb.rule_ids_by_predicate[:0],) * (len(rule.head) - 1)
    if heads is not None:
        columns = heads.columns
    fact = torch.full_like(columns[0], -1)
    facts = relations.get(rule.head[0])
    if facts is not None:
        row, is_fact = find_rows(columns, facts, sizes.n_constants)
        first = kb.fact_offsets[rule.head[0]]
        fact = torch.where(is_fact, first + row, fact)
    return columns, fact


def _circular_heads(
    kb: KnowledgeBase,
    sizes: KBSizes,
    relations: Relations,
    rule: Rule,
    inequalities: Sequence[Inequality],
    budget: RowBudget,
    among: Literal | None = None,
) -> Columns:
    """Return the heads of a rule that are facts and that it derives only from bodies that contain the head itself."""
    body = [relations.get(atom[0]) for atom in rule.body]
    same_predicate = [atom for atom in rule.body if atom[0] == rule.head[0]]

    # Suspects: heads of bodies that contain the head. They are facts, as all atoms of a body are.
    none = kb.rule_ids_by_predicate[:0]
    suspects: list[Columns] = [(none,) * (len(rule.head) - 1)]
    for atom in same_predicate:
        unifier = most_general_unifier(rule.head, atom, sizes.n_constants)
        if unifier is not None:
            # Under object identity most rules have no such body.
            instance = substitute_rule(rule, unifier)
            apart = [
                (substitute_terms(one, unifier), substitute_terms(two, unifier))
                for one, two in inequalities
            ]
            limited = _substitute_literal(among, unifier, sizes.n_constants)
            heads = derive_heads(
                instance, body, kb, sizes, apart, budget, limited
            )
            suspects += [] if heads is None else [heads.columns]
    suspect = _distinct_rows(suspects, sizes)
    if not len(suspect[0]):
        return suspect

    # Join the suspects with the bodies in which no atom equals the head: what is left has a derivation without itself.
    apart = [*inequalities, *_differing_atoms(rule)]
    wanted = make_literal(Relation(suspect), rule.head[1:], sizes.n_constants)
    others = derive_heads(rule, body, kb, sizes, apart, budget, wanted)
    if others is None:
        return suspect
    derivable = Relation(_distinct_rows([others.columns], sizes))
    is_circular = ~find_rows(suspect, derivable, sizes.n_constants).found
    return select_rows(suspect, is_circular)


def _substitute_literal(
    literal: Literal | None, substitution: dict[int, int], n_constants: int
) -> Literal | None:
    """Return a literal with its variables replaced."""
    if literal is None:
        return None
    terms = substitute_terms(literal.terms, substitution)
    return make_literal(literal.relation, terms, n_constants)


def iter_derivations(
    kb: KnowledgeBase,
    sizes: KBSizes,
    model: LeastModel,
    max_height: int,
    atoms: I32[Tensor, "L W"],
    leave_one_out: bool = True,
    budget: RowBudget = UNBOUNDED,
    progress: CountCallback = ignore_progress,
) -> Iterator[Derivations]:
    """Yield (atom, rule) pairs, rule by rule: the listed atoms that a rule derives in step `max_height` of T_P.

    The atoms of a body are those that T_P derives in `max_height - 1` steps.

    Args:
      model: holds at least `max_height - 1` steps of T_P; its object identity applies to the rules.
      atoms: the list; distinct, in lexicographic order.
      leave_one_out: omit an atom that the rule derives only from bodies that contain the atom itself.
      budget: bounds the rows that the joins make.
      progress: is called after each rule.

    Raises:
      RowBudgetExceeded: the joins make more rows than the budget allows.
    """
    # Above height 1, bodies may hold derived atoms: apply the rules to a knowledge base in which those are facts.
    body_kb = kb
    if max_height > 1:
        below = model.atoms[model.height < max_height]
        body_kb, _ = with_facts(kb, sizes, below)

    atom_index = index_sorted_atoms(atoms, sizes)
    wanted = set(int_list(unique_values(atoms[:, 0])))
    heads = enumerate(int_list(kb.rules[:, 0, 0]))
    for part in iter_consequences(
        body_kb,
        sizes,
        rule_ids=[i for i, predicate in heads if predicate in wanted],
        leave_one_out=leave_one_out,
        object_identity=model.object_identity,
        budget=budget,
        progress=progress,
    ):
        row = find_atoms(atom_index, sizes, part.atoms.long())
        is_listed = row >= 0
        yield Derivations(row[is_listed], part.rule[is_listed])


def with_facts(
    kb: KnowledgeBase, sizes: KBSizes, facts: I32[Tensor, "n W"]
) -> tuple[KnowledgeBase, KBSizes]:
    """Build the knowledge base of the same rules over other facts."""
    return build(
        facts.cpu().numpy(),
        kb.rules.cpu().numpy(),
        n_constants=sizes.n_constants,
        n_predicates=sizes.n_predicates,
        device=kb.facts.device,
    )


# -- counts of each rule


def count_rules(
    kb: KnowledgeBase,
    sizes: KBSizes,
    *,
    object_identity: bool = False,
    known: I64[Tensor, "R 3"] | None = None,
    budget: RowBudget = UNBOUNDED,
    sampled_rules: set[int] | None = None,
    deadline: Deadline = NO_DEADLINE,
    progress: CountCallback = ignore_progress,
) -> RuleCounts:
    """Count, per rule, the atoms it derives, those that are facts, and those that it derives only from themselves.

    Args:
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      known: counts without object identity that are not made again, columns as in `RuleCounts`; rows of -1 are.
      budget: bounds the rows that the joins make.
      sampled_rules: receives the rules whose joins make too many rows: they are counted from a sample. None: they are
        an error.
      deadline: of the samples; a rule for which there is no time counts as without derivations.
      progress: is called after each rule that is counted.

    Raises:
      RowBudgetExceeded: the joins make more rows than the budget allows.
    """
    table = torch.full((sizes.n_rules, 3), -1, dtype=torch.int64)
    if known is not None and not object_identity:
        table = known.cpu()
    unknown = int_list(true_rows(table[:, 0] < 0))

    rules = rules_from_kb(kb, unknown)
    relations = _relations_of(kb, rules)
    counted: list[tuple[int, ...]] = []
    for rule in rules:
        arguments = kb, sizes, relations, rule, object_identity
        try:
            counts = _count_rule(*arguments, budget)
        except RowBudgetExceeded:
            if sampled_rules is None:
                raise
            sampled_rules.add(rule.id)
            part = deadline.share(1 / (len(rules) - len(counted)))
            counts = _sample_counts(*arguments, part)
        counted.append(counts)
        progress(sizes.n_rules - len(rules) + len(counted), sizes.n_rules)
    table = table.index_copy(
        0,
        torch.tensor(unknown, dtype=torch.int64),
        torch.tensor(counted, dtype=torch.int64).view(-1, 3),
    )
    return RuleCounts(*table.to(kb.support.device).unbind(1))


def _count_rule(
    kb: KnowledgeBase,
    sizes: KBSizes,
    relations: Relations,
    rule: Rule,
    object_identity: bool,
    budget: RowBudget,
    among: Literal | None = None,
) -> tuple[int, int, int]:
    """Count the support, the body pairs and the circular support of one rule, of the heads that meet a condition."""
    inequalities = object_identity_constraints(
        rule, sizes.n_constants, object_identity
    )
    arguments = kb, sizes, relations, rule, inequalities, budget, among
    columns, fact = _apply_rule(*arguments)
    n_circular = len(_circular_heads(*arguments)[0])
    return int((fact >= 0).sum()), len(columns[0]), n_circular


# rows of joins for the sample that stands for a rule that makes too many, about three seconds
MAX_SAMPLE_ROWS = 30_000_000


def _sample_counts(
    kb: KnowledgeBase,
    sizes: KBSizes,
    relations: Relations,
    rule: Rule,
    object_identity: bool,
    deadline: Deadline,
) -> tuple[int, int, int]:
    """Estimate the counts of a rule from the heads with a random sample of constants as their first variable.

    The sample has as many constants as fit `MAX_SAMPLE_ROWS` and half of the time left, and the counts are scaled by
    their share. They are 0 if one constant does not fit.
    """
    variables = atom_variables(rule.head, sizes.n_constants)
    if not variables or any(a[0] not in relations for a in rule.body):
        budget = RowBudget(MAX_SAMPLE_ROWS, deadline=deadline)
        return _count_rule(kb, sizes, relations, rule, object_identity, budget)

    # Constants that an atom of the body has in the place of the variable.
    variable = variables[0]
    atom = next(atom for atom in rule.body if variable in atom[1:])
    column = relations[atom[0]].columns[atom.index(variable, 1) - 1]
    constants = unique_values(column)
    drawn_order = np.random.default_rng(rule.id).permutation(len(constants))
    order = constants.new_tensor(drawn_order)

    n_drawn = min(4096, len(order))
    while n_drawn:
        drawn = constants[order[:n_drawn].sort().values]
        among = make_literal(Relation((drawn,)), (variable,), sizes.n_constants)
        # A smaller sample has what a larger one leaves.
        budget = RowBudget(MAX_SAMPLE_ROWS, deadline=deadline.share(0.5))
        try:
            counts = _count_rule(
                kb, sizes, relations, rule, object_identity, budget, among
            )
        except RowBudgetExceeded:
            n_drawn //= 4
            continue
        scale = len(order) / n_drawn
        support, pairs, circular = (round(scale * n) for n in counts)
        return support, pairs, circular
    return 0, 0, 0


def check_sampled_rows(
    kb: KnowledgeBase,
    sizes: KBSizes,
    max_rows: int,
    *,
    object_identity: bool = False,
    deadline: Deadline = NO_DEADLINE,
) -> None:
    """Check, by a random sample of rules, that applying all of them likely makes no more rows than allowed.

    With fewer than 1,024 rules nothing is checked: a sample of so few would not tell.

    Args:
      max_rows: of all rules, with object identity those of their circular heads included.
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      deadline: ends the check.

    Raises:
      RowBudgetExceeded: the sample makes more than its share, or the time is over.
    """
    # Fewer than 64 rules do not tell what all make.
    n_sampled = sizes.n_rules // 16
    if n_sampled < 64:
        return

    drawn = np.random.default_rng(0).permutation(sizes.n_rules)[:n_sampled]
    share = max_rows * n_sampled // sizes.n_rules
    try:
        for _ in iter_consequences(
            kb,
            sizes,
            rule_ids=sorted(drawn.tolist()),
            leave_one_out=object_identity,
            object_identity=object_identity,
            budget=RowBudget(share, deadline=deadline),
        ):
            pass
    except TimeBudgetExceeded:
        raise
    except RowBudgetExceeded:
        raise RowBudgetExceeded(
            f"more than {max_rows:,} rows of joins, by a random sample of {n_sampled:,} of {sizes.n_rules:,} rules"
        ) from None


def with_confidence(
    kb: KnowledgeBase,
    counts: RuleCounts,
    smoothing: float | None = None,
) -> KnowledgeBase:
    """Return the knowledge base with the `support` and `body_pairs` from which confidences are computed.

    Args:
      counts: of its rules.
      smoothing: None for plain counts. Otherwise a fact that a rule derives only from bodies that contain the fact
        itself does not count, and this number is added to the body pairs, so that few examples give less confidence
        (the miner ranks rules in this way).
    """
    support, body_pairs, circular = counts
    if smoothing is not None:
        support, body_pairs = support - circular, body_pairs - circular
    return kb._replace(
        support=support.to(kb.support.dtype),
        body_pairs=body_pairs.to(kb.support.dtype) + (smoothing or 0.0),
    )
