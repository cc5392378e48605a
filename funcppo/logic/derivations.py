"""The last step of a derivation, read back from a model: from these a proof is built along decreasing height."""

from __future__ import annotations

import torch

from funcppo.logic import fixpoint, joins
from funcppo.logic.fixpoint import LeastModel
from funcppo.logic.kb import KBSizes, KnowledgeBase
from funcppo.logic.relations import Relation
from funcppo.logic.rules import (
    Atom,
    Rule,
    atom_variables,
    body_query,
    most_general_unifier,
    object_identity_constraints,
    relation_from_atoms,
    substitute_rule,
    substitute_terms,
)


def find_derivation(kb: KnowledgeBase, sizes: KBSizes, model: LeastModel, atom: Atom) -> tuple[int, tuple[Atom, ...]]:
    """A rule that derives an atom of the model and its ground body, all of whose atoms have smaller heights.

    The first rule in file order that has such a body; of its bodies, the one whose variables, in order of occurrence,
    have the smallest constants.

    Errors: ValueError when the atom is a fact (it needs no rule) or is not in the model.
    """
    height = int(fixpoint.atom_height(model, torch.tensor(atom, device=model.atoms.device)))
    if height < 1:
        raise ValueError(f"{list(atom)}: want a derived atom of the model, got " + ("a fact", "none")[height])
    start, stop = kb.rule_offsets[atom[0]], kb.rule_offsets[atom[0] + 1]
    for i in kb.rule_ids_by_predicate[start:stop].tolist():
        head, *body = (tuple(row) for row in kb.rules[i].tolist() if row[0])
        rule = Rule(i, head, tuple(body))
        same = most_general_unifier(head, atom, sizes.n_constants)
        found = None if same is None else _ground(rule, same, model, height)
        if found is not None:
            return i, found.body
    raise ValueError(f"{list(atom)}: no rule derives it; the model belongs to other rules")


def find_ground_body(
    kb: KnowledgeBase, sizes: KBSizes, model: LeastModel, atom: Atom, rule: int, height: int
) -> tuple[Atom, ...] | None:
    """The ground body by which a given rule derives an atom, none of its atoms the atom itself; None if there is none.

    Args:
      height: the body's atoms have smaller ones.
    """
    head, *rest = (tuple(row) for row in kb.rules[rule].tolist() if row[0])
    same = most_general_unifier(head, atom, sizes.n_constants)
    found = None if same is None else _ground(Rule(rule, head, tuple(rest)), same, model, height, atom)
    return None if found is None else found.body


def _ground(
    rule: Rule, same: dict[int, int], model: LeastModel, height: int, left_out: Atom | None = None
) -> Rule | None:
    """The rule's smallest ground instance with a body of smaller heights, None if there is none."""
    n = model.sizes.n_constants
    pairs = object_identity_constraints(rule, n) if model.object_identity else []
    rule = substitute_rule(rule, same)
    relations = [_below(model, atom, height, left_out) for atom in rule.body]
    if not all(relation.size for relation in relations):
        return None
    names = tuple(dict.fromkeys(v for atom in rule.body for v in atom_variables(atom, n)))
    for name in (None, *names):  # None: is there an instance at all?
        unequal = [(substitute_terms(left, same), substitute_terms(right, same)) for left, right in pairs]
        tables = list(joins.iter_answers(body_query(rule, relations, n, unequal, () if name is None else (name,))))
        if not tables:
            return None
        if name is not None:
            same = {**same, name: min(int(table.columns[0].min()) for table in tables)}
            rule = substitute_rule(rule, same)
    return rule


def _below(model: LeastModel, atom: Atom, height: int, left_out: Atom | None) -> Relation:
    """The atoms of smaller height that an open atom matches, less one."""
    found, heights = fixpoint.matching_atoms(model, atom)
    kept = heights < height
    if left_out is not None:
        kept = kept & (found != torch.tensor(left_out, device=found.device)).any(1)
    return relation_from_atoms(found[kept])
