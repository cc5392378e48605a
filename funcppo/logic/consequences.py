"""One application of each rule to the facts: what it derives, and how often it is right.

Atoms are counted once a rule, however many bodies derive them: with `heads(r)` the distinct heads of rule r over the
facts,

    body_pairs(r) = |heads(r)|,    support(r) = |heads(r) and facts|,    confidence = support / body_pairs

which is the standard confidence of AMIE and AnyBURL, without the closed-world correction.

Source: Galárraga et al. 2013, "AMIE: association rule mining under incomplete evidence", section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.logic import joins, row_index
from funcppo.logic.joins import Inequality
from funcppo.logic.kb import KBSizes, KnowledgeBase
from funcppo.logic.relations import Columns, Relation, find_rows, make_literal
from funcppo.logic.rules import (
    Rule,
    body_query,
    head_columns,
    most_general_unifier,
    object_identity_constraints,
    relations_by_predicate,
    rules_from_kb,
    substitute_rule,
)
from funcppo.types import I32, I64


class Consequences(NamedTuple):
    """Pairs of a derived atom and the rule that derives it, each once, in the order of the rules."""

    atoms: I32[Tensor, "n W"]
    rule: I64[Tensor, "n"]
    fact: I64[Tensor, "n"]  # the atom's row among the facts, -1 where it is not one


def iter_consequences(
    kb: KnowledgeBase,
    sizes: KBSizes,
    *,
    rule_ids: Iterable[int] | None = None,
    leave_one_out: bool = False,
    object_identity: bool = False,
) -> Iterator[Consequences]:
    """The consequences of one rule after another, so that no more than one rule's are held.

    Args:
      rules: ids of rules, in the order wanted; None for all.
      leave_one_out: leave out a known fact that the rule derives only from bodies that hold the fact itself.
      object_identity: different variables of a rule bind different constants.
    """
    relations = relations_by_predicate(kb.facts)
    table = rules_from_kb(kb)
    for rule in table if rule_ids is None else [table[i] for i in rule_ids]:
        unequal = object_identity_constraints(rule, sizes.n_constants) if object_identity else []
        columns = _heads(rule, relations, sizes, unequal, kb.facts.device)
        if leave_one_out:
            circular = _circular(rule, relations, sizes, unequal, kb.facts.device)
            kept = ~find_rows(columns, Relation(circular, circular[0].numel()), sizes.n_constants)[1]
            columns = tuple(column[kept] for column in columns)
        name = torch.full_like(columns[0], rule.head[0])
        yield Consequences(
            atoms=torch.stack([column.to(torch.int32) for column in (name, *columns)], dim=1),
            rule=torch.full_like(columns[0], rule.id),
            fact=_fact_ids(rule.head[0], columns, relations, kb, sizes),
        )


def collect_consequences(
    kb: KnowledgeBase,
    sizes: KBSizes,
    *,
    rule_ids: Iterable[int] | None = None,
    leave_one_out: bool = False,
    object_identity: bool = False,
) -> Consequences:
    """The consequences of all the rules in one table; arguments as for `each_consequence`."""
    parts = iter_consequences(
        kb, sizes, rule_ids=rule_ids, leave_one_out=leave_one_out, object_identity=object_identity
    )
    empty = Consequences(kb.facts[:0], kb.rule_ids_by_predicate[:0], kb.rule_ids_by_predicate[:0])
    return Consequences(*(torch.cat(same) for same in zip(empty, *parts)))


def with_confidence(
    kb: KnowledgeBase, sizes: KBSizes, *, object_identity: bool = False, smoothing: float | None = None
) -> KnowledgeBase:
    """The knowledge base with `support` and `body_pairs` counted from its facts.

    Args:
      smoothing: None for plain counts; else facts that a rule derives only from bodies which hold the fact itself are
        not counted, and this many wrong pairs are added, so that few examples are trusted less (as the miner ranks).
    """
    found = iter_consequences(kb, sizes, leave_one_out=smoothing is not None, object_identity=object_identity)
    pairs = [(int((part.fact >= 0).sum()), len(part.fact)) for part in found]
    counts = torch.tensor(pairs, dtype=kb.support.dtype, device=kb.support.device).reshape(-1, 2)
    return kb._replace(support=counts[:, 0].contiguous(), body_pairs=counts[:, 1] + (smoothing or 0.0))


def _fact_ids(
    predicate: int, columns: Columns, relations: dict[int, Relation], kb: KnowledgeBase, sizes: KBSizes
) -> Tensor:
    """The rows of a predicate's atoms among the facts, -1 where they are not there."""
    if predicate not in relations:
        return torch.full_like(columns[0], -1)
    row, found = find_rows(columns, relations[predicate], sizes.n_constants)
    return torch.where(found, kb.fact_offsets[predicate] + row, -1)


def _heads(
    rule: Rule, relations: dict[int, Relation], sizes: KBSizes, unequal: list[Inequality], device: torch.device
) -> Columns:
    """The argument columns of a rule's distinct heads, each once."""
    empty = tuple(torch.empty(0, dtype=torch.int64, device=device) for _ in rule.head[1:])
    if any(atom[0] not in relations for atom in rule.body):
        return empty
    query = body_query(rule, [relations[atom[0]] for atom in rule.body], sizes.n_constants, unequal)
    tables = list(joins.iter_answers(query))
    return head_columns(rule, joins.union(tables, query.constant_bits), device) if tables else empty


def _circular(
    rule: Rule, relations: dict[int, Relation], sizes: KBSizes, unequal: list[Inequality], device: torch.device
) -> Columns:
    """The heads of a rule that are facts and that none of its bodies derives without that fact."""
    n, bits = sizes.n_constants, [sizes.n_constants.bit_length()] * (sizes.atom_width - 1)
    itself = [atom for atom in rule.body if atom[0] == rule.head[0]]
    parts = [
        _heads(substitute_rule(rule, same), relations, sizes, [], device)
        for same in (most_general_unifier(rule.head, atom, n) for atom in itself)
        if same is not None
    ]
    empty = torch.empty(0, dtype=torch.int64, device=device)
    suspects = row_index.unique_rows(tuple(torch.cat(same) for same in zip((empty,) * len(bits), *parts)), bits)
    if not suspects[0].numel():
        return suspects
    guard = Relation(suspects, suspects[0].numel())
    query = body_query(rule, [relations[atom[0]] for atom in rule.body], n, unequal)
    head = make_literal(guard, rule.head[1:], n)
    query = replace(
        query,
        literals=(head, *query.literals),
        inequalities=(*unequal, *((rule.head[1:], atom[1:]) for atom in itself)),
    )
    sound = [head_columns(rule, table, device) for table in joins.iter_answers(query)]
    sound = row_index.unique_rows(tuple(torch.cat(same) for same in zip((empty,) * len(bits), *sound)), bits)
    kept = ~find_rows(suspects, Relation(sound, sound[0].numel()), n)[1]
    return tuple(column[kept] for column in suspects)
