"""Rules as conjunctive queries: from the tensors of a KnowledgeBase to what `joins` solves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from funcppo.core.types import I32
from funcppo.kg.logic.joins import ConjunctiveQuery, Inequality, RowBudget
from funcppo.kg.logic.kb import KnowledgeBase
from funcppo.kg.logic.relations import Columns, Relation, Table, make_literal
from funcppo.kg.logic.typed_torch import int_list, rule_tuples, runs

Atom = tuple[int, ...]  # predicate, argument, ...


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, atoms padded to the width of the knowledge base."""

    id: int
    head: Atom
    body: tuple[Atom, ...]


def rules_from_kb(
    kb: KnowledgeBase, rule_ids: Sequence[int] | None = None
) -> list[Rule]:
    """Some rules of a knowledge base, in the order of their ids given; by default all, in file order."""
    table = kb.rules
    if rule_ids is None:
        rule_ids = range(len(table))
    else:
        table = table[torch.tensor(rule_ids, dtype=torch.int64)]
    rules: list[Rule] = []
    for i, atoms in zip(rule_ids, rule_tuples(table)):
        head, *body = (atom for atom in atoms if atom[0])
        rules.append(Rule(i, head, tuple(body)))
    return rules


def relations_by_predicate(
    atoms: I32[Tensor, "N W"], predicates: Collection[int] | None = None
) -> dict[int, Relation]:
    """The relation of each predicate that has an atom.

    Args:
      atoms: distinct, in lexicographic order.
      predicates: those wanted; None for all.
    """
    if predicates is not None and not predicates:
        return {}
    present, counts = runs(atoms[:, 0])
    parts = torch.split(atoms, int_list(counts))
    return {
        predicate: relation_from_atoms(part)
        for predicate, part in zip(int_list(present), parts)
        if predicates is None or predicate in predicates
    }


def relation_from_atoms(atoms: I32[Tensor, "N W"]) -> Relation:
    """The relation of distinct sorted atoms of one predicate: their argument columns."""
    columns = tuple(
        column.to(torch.int64).contiguous() for column in atoms[:, 1:].unbind(1)
    )
    return Relation(columns, len(atoms))


def body_query(
    rule: Rule,
    relations: Sequence[Relation],
    n_constants: int,
    inequalities: Sequence[Inequality],
    output_variables: tuple[int, ...] | None = None,
    budget: RowBudget | None = None,
) -> ConjunctiveQuery:
    """The query over a rule's body, each atom read from a relation of its own.

    Args:
      relations: one for each atom of the body.
      inequalities: pairs of term tuples that must differ.
      output_variables: variables of the answer; None for those of the head.
      budget: bounds the rows that the joins make; None for no bound.
    """
    literals = tuple(
        make_literal(relation, atom[1:], n_constants)
        for relation, atom in zip(relations, rule.body)
    )
    if output_variables is None:
        output_variables = atom_variables(rule.head, n_constants)
    return ConjunctiveQuery(
        literals, output_variables, tuple(inequalities), n_constants, budget
    )


def head_columns(rule: Rule, table: Table, device: torch.device) -> Columns:
    """The argument columns of the head for every row of an answer."""
    columns = dict(zip(table.variables, table.columns))
    for term in rule.head[1:]:
        if term not in columns:
            columns[term] = torch.full((table.size,), term, device=device)
    return tuple(columns[term] for term in rule.head[1:])


def object_identity_constraints(
    rule: Rule, n_constants: int
) -> list[Inequality]:
    """Inequalities that keep the variables of a rule apart from each other and from the constants that it names.

    Source: Meilicke et al. 2019, "Anytime bottom-up rule learning", section 3: AnyBURL counts bodies in this way.
    """
    terms: set[int] = set()
    for atom in (rule.head, *rule.body):
        terms.update(term for term in atom[1:] if term > 0)

    # Variables have larger ids than constants, so the second of a pair of ascending terms is a variable if one is.
    ordered = sorted(terms)
    constraints: list[Inequality] = []
    for i, second in enumerate(ordered):
        if second > n_constants:
            constraints += [((first,), (second,)) for first in ordered[:i]]
    return constraints


def atom_variables(atom: Atom, n_constants: int) -> tuple[int, ...]:
    """The distinct variables of an atom in order of occurrence."""
    return tuple(dict.fromkeys(t for t in atom[1:] if t > n_constants))


def most_general_unifier(
    left: Atom, right: Atom, n_constants: int
) -> dict[int, int] | None:
    """The most general unifier of two atoms, from variables to terms; None if they do not unify."""
    if left[0] != right[0]:
        return None
    substitution: dict[int, int] = {}
    for a, b in zip(left[1:], right[1:]):
        a = substitution.get(a, a)
        b = substitution.get(b, b)
        if a == b:
            continue

        # Variables have the larger ids: replace the larger of the two, in earlier bindings too.
        variable = max(a, b)
        term = min(a, b)
        if variable <= n_constants:
            return None
        substitution = {
            v: term if t == variable else t for v, t in substitution.items()
        }
        substitution[variable] = term
    return substitution


def substitute_rule(rule: Rule, substitution: dict[int, int]) -> Rule:
    """The rule with its variables replaced."""
    head, *body = (
        (atom[0], *substitute_terms(atom[1:], substitution))
        for atom in (rule.head, *rule.body)
    )
    return Rule(rule.id, head, tuple(body))


def substitute_terms(
    terms: Sequence[int], substitution: dict[int, int]
) -> tuple[int, ...]:
    """The terms with their variables replaced."""
    return tuple(substitution.get(t, t) for t in terms)
