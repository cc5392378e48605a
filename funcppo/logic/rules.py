"""Rules as conjunctive queries: from the tensors of a KnowledgeBase to what `joins` solves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from funcppo.logic.joins import Query, Unequal
from funcppo.logic.kb import KnowledgeBase
from funcppo.logic.relations import Columns, Relation, Table, literal_of
from funcppo.types import I32

Atom = tuple[int, ...]  # predicate, argument, ...


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, atoms padded to the width of the knowledge base."""

    id: int
    head: Atom
    body: tuple[Atom, ...]


def rules_of(kb: KnowledgeBase) -> list[Rule]:
    """The rules of a knowledge base in file order."""
    tables = [[tuple(atom) for atom in rule if atom[0]] for rule in kb.rules.tolist()]
    return [Rule(i, rule[0], tuple(rule[1:])) for i, rule in enumerate(tables)]


def relations_of(atoms: I32[Tensor, "N W"], predicates: Collection[int] | None = None) -> dict[int, Relation]:
    """The argument columns of each predicate that has an atom, from a table of distinct sorted atoms."""
    present, counts = torch.unique_consecutive(atoms[:, 0], return_counts=True)
    parts = torch.split(atoms, counts.tolist())
    wanted = set(present.tolist()) if predicates is None else predicates
    return {p: relation_of(part) for p, part in zip(present.tolist(), parts) if p in wanted}


def relation_of(atoms: I32[Tensor, "N W"]) -> Relation:
    """The argument columns of distinct sorted atoms of one predicate."""
    return Relation(tuple(column.to(torch.int64).contiguous() for column in atoms[:, 1:].unbind(1)), len(atoms))


def query_of(
    rule: Rule,
    relations: Sequence[Relation],
    n_constants: int,
    unequal: Sequence[Unequal],
    wanted: tuple[int, ...] | None = None,
) -> Query:
    """The query over a rule's body, its atoms read from one relation each.

    Args:
      wanted: variables of the answer; None for those of the head.
    """
    literals = tuple(literal_of(relation, atom[1:], n_constants) for relation, atom in zip(relations, rule.body))
    return Query(literals, variables(rule.head, n_constants) if wanted is None else wanted, tuple(unequal), n_constants)


def head_columns(rule: Rule, table: Table, device: torch.device) -> Columns:
    """The argument columns of the head for every row of an answer."""
    column = dict(zip(table.names, table.columns))
    constant = {t: torch.full((table.size,), t, device=device) for t in rule.head[1:] if t not in column}
    return tuple((column | constant)[t] for t in rule.head[1:])


def different_variables(rule: Rule, n_constants: int) -> list[Unequal]:
    """Object identity: no two variables of a rule bind one constant."""
    names = sorted({v for atom in (rule.head, *rule.body) for v in variables(atom, n_constants)})
    return [((a,), (b,)) for i, a in enumerate(names) for b in names[i + 1 :]]


def variables(atom: Atom, n_constants: int) -> tuple[int, ...]:
    """The distinct variables of an atom in order of occurrence."""
    return tuple(dict.fromkeys(t for t in atom[1:] if t > n_constants))


def unifier(left: Atom, right: Atom, n_constants: int) -> dict[int, int] | None:
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


def substitute(rule: Rule, same: dict[int, int]) -> Rule:
    """The rule with its variables replaced."""
    head, *body = ((atom[0], *put(atom[1:], same)) for atom in (rule.head, *rule.body))
    return Rule(rule.id, head, tuple(body))


def put(terms: Sequence[int], same: dict[int, int]) -> tuple[int, ...]:
    """The terms with their variables replaced."""
    return tuple(same.get(t, t) for t in terms)
