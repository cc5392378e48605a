"""Rules as conjunctive queries: from the tensors of a KnowledgeBase to what `joins` solves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from funcppo.logic.joins import ConjunctiveQuery, Inequality
from funcppo.logic.kb import KnowledgeBase
from funcppo.logic.relations import Columns, Relation, Table, make_literal
from funcppo.types import I32

Atom = tuple[int, ...]  # predicate, argument, ...


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, atoms padded to the width of the knowledge base."""

    id: int
    head: Atom
    body: tuple[Atom, ...]


def rules_from_kb(kb: KnowledgeBase) -> list[Rule]:
    """The rules of a knowledge base in file order."""
    tables = [[tuple(atom) for atom in rule if atom[0]] for rule in kb.rules.tolist()]
    return [Rule(i, rule[0], tuple(rule[1:])) for i, rule in enumerate(tables)]


def relations_by_predicate(atoms: I32[Tensor, "N W"], predicates: Collection[int] | None = None) -> dict[int, Relation]:
    """The argument columns of each predicate that has an atom, from a table of distinct sorted atoms."""
    present, counts = torch.unique_consecutive(atoms[:, 0], return_counts=True)
    parts = torch.split(atoms, counts.tolist())
    wanted = set(present.tolist()) if predicates is None else predicates
    return {p: relation_from_atoms(part) for p, part in zip(present.tolist(), parts) if p in wanted}


def relation_from_atoms(atoms: I32[Tensor, "N W"]) -> Relation:
    """The argument columns of distinct sorted atoms of one predicate."""
    return Relation(tuple(column.to(torch.int64).contiguous() for column in atoms[:, 1:].unbind(1)), len(atoms))


def body_query(
    rule: Rule,
    relations: Sequence[Relation],
    n_constants: int,
    inequalities: Sequence[Inequality],
    output_variables: tuple[int, ...] | None = None,
) -> ConjunctiveQuery:
    """The query over a rule's body, its atoms read from one relation each.

    Args:
      wanted: variables of the answer; None for those of the head.
    """
    literals = tuple(make_literal(relation, atom[1:], n_constants) for relation, atom in zip(relations, rule.body))
    return ConjunctiveQuery(
        literals,
        atom_variables(rule.head, n_constants) if output_variables is None else output_variables,
        tuple(inequalities),
        n_constants,
    )


def head_columns(rule: Rule, table: Table, device: torch.device) -> Columns:
    """The argument columns of the head for every row of an answer."""
    column = dict(zip(table.variables, table.columns))
    constant = {t: torch.full((table.size,), t, device=device) for t in rule.head[1:] if t not in column}
    return tuple((column | constant)[t] for t in rule.head[1:])


def object_identity_constraints(rule: Rule, n_constants: int) -> list[Inequality]:
    """Object identity: no two variables of a rule bind one constant."""
    names = sorted({v for atom in (rule.head, *rule.body) for v in atom_variables(atom, n_constants)})
    return [((a,), (b,)) for i, a in enumerate(names) for b in names[i + 1 :]]


def atom_variables(atom: Atom, n_constants: int) -> tuple[int, ...]:
    """The distinct variables of an atom in order of occurrence."""
    return tuple(dict.fromkeys(t for t in atom[1:] if t > n_constants))


def most_general_unifier(left: Atom, right: Atom, n_constants: int) -> dict[int, int] | None:
    """What to put for each variable so that two atoms are equal, None when nothing does."""
    if left[0] != right[0]:
        return None
    same: dict[int, int] = {}
    for a, b in zip(left[1:], right[1:]):
        a, b = same.get(a, a), same.get(b, b)
        if a == b:
            continue
        gone, kept = max(a, b), min(a, b)
        if gone <= n_constants:
            return None
        same = {v: kept if t == gone else t for v, t in same.items()} | {gone: kept}
    return same


def substitute_rule(rule: Rule, substitution: dict[int, int]) -> Rule:
    """The rule with its variables replaced."""
    head, *body = ((atom[0], *substitute_terms(atom[1:], substitution)) for atom in (rule.head, *rule.body))
    return Rule(rule.id, head, tuple(body))


def substitute_terms(terms: Sequence[int], substitution: dict[int, int]) -> tuple[int, ...]:
    """The terms with their variables replaced."""
    return tuple(substitution.get(t, t) for t in terms)
