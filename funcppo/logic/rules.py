"""Rules as conjunctive queries: from the tensors of a KnowledgeBase to what `joins` solves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from funcppo.logic.joins import Columns, Literal, Query, Relation, Table, Unequal
from funcppo.logic.kb import KnowledgeBase
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
    return {
        p: Relation(tuple(column.to(torch.int64) for column in part[:, 1:].unbind(1)), len(part))
        for p, part in zip(present.tolist(), parts)
        if predicates is None or p in predicates
    }


def query_of(rule: Rule, relations: Sequence[Relation], n_constants: int, unequal: Sequence[Unequal]) -> Query:
    """The query for the distinct heads of a rule, its body atoms read from one relation each."""
    literals = tuple(
        Literal(relation, atom[1:], frozenset(t for t in atom[1:] if t > n_constants))
        for relation, atom in zip(relations, rule.body)
    )
    return Query(literals, variables(rule.head, n_constants), tuple(unequal), n_constants)


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
