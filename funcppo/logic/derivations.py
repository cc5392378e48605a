"""The last step of a derivation, read back from a least model.

`find_derivation` finds a rule and a ground body for a derived atom, `find_ground_body` the body for a given rule. From
these a proof is built along decreasing height.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from funcppo.logic import fixpoint, joins
from funcppo.logic.fixpoint import LeastModel
from funcppo.logic.joins import Inequality
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
from funcppo.logic.typed_torch import atom_tuples, int_list


class Derivation(NamedTuple):
    """The last step of a derivation; Python values."""

    rule: int  # id of the rule
    body: tuple[Atom, ...]  # its ground body


def find_derivation(kb: KnowledgeBase, sizes: KBSizes, model: LeastModel, atom: Atom) -> Derivation:
    """Find a rule that derives an atom of the model from atoms of smaller heights.

    It is the first rule in file order with such a body; of its bodies, the one whose variables, in order of occurrence,
    have the smallest constants.

    Args:
      atom: padded to the width of the knowledge base.

    Returns:
      rule: the rule's id.
      body: the rule's ground body.

    Raises:
      ValueError: if the atom is a fact (it needs no rule), is not in the model, or the model belongs to other rules.
    """
    height = int(fixpoint.atom_height(model, torch.tensor(atom, device=model.atoms.device)))
    if height < 1:
        problem = "a fact" if height == 0 else "none"
        raise ValueError(f"{list(atom)}: expected a derived atom of the model, got {problem}")

    start, stop = int_list(kb.rule_offsets[atom[0] : atom[0] + 2])
    for rule_id in int_list(kb.rule_ids_by_predicate[start:stop]):
        body = _smallest_body(_read_rule(kb, rule_id), atom, model, height)
        if body is not None:
            return Derivation(rule_id, body)
    raise ValueError(f"{list(atom)}: expected a rule that derives it, got none; the model belongs to other rules")


def find_ground_body(
    kb: KnowledgeBase, sizes: KBSizes, model: LeastModel, atom: Atom, rule: int, height: int
) -> tuple[Atom, ...] | None:
    """Find the ground body by which a given rule derives an atom, without that atom in it.

    Args:
      atom: padded to the width of the knowledge base.
      rule: id of the rule.
      height: the body's atoms have smaller heights.

    Returns:
      The body with the smallest constants, as in `find_derivation`; None if there is none.
    """
    return _smallest_body(_read_rule(kb, rule), atom, model, height, excluded_atom=atom)


def _read_rule(kb: KnowledgeBase, rule_id: int) -> Rule:
    """One rule of a knowledge base."""
    head, *body = (atom for atom in atom_tuples(kb.rules[rule_id]) if atom[0])
    return Rule(rule_id, head, tuple(body))


def _smallest_body(
    rule: Rule, atom: Atom, model: LeastModel, height: int, excluded_atom: Atom | None = None
) -> tuple[Atom, ...] | None:
    """The smallest ground body of a rule that derives an atom from atoms of smaller heights; None if there is none."""
    n_constants = model.sizes.n_constants
    substitution = most_general_unifier(rule.head, atom, n_constants)
    if substitution is None:
        return None
    rule_constraints = object_identity_constraints(rule, n_constants) if model.object_identity else []
    constraints = _substitute_constraints(rule_constraints, substitution)
    instance = substitute_rule(rule, substitution)
    relations = [_atoms_below(model, goal, height, excluded_atom) for goal in instance.body]
    if not all(relation.size for relation in relations):
        return None

    # Without output variables, the query only decides whether there is a body at all.
    if not list(joins.iter_answers(body_query(instance, relations, n_constants, constraints, ()))):
        return None

    # Bind one variable after another to its smallest constant: the result is the lexicographically smallest body.
    for variable in _body_variables(instance, n_constants):
        tables = joins.iter_answers(body_query(instance, relations, n_constants, constraints, (variable,)))
        smallest = min(int(table.columns[0].min()) for table in tables)
        constraints = _substitute_constraints(constraints, {variable: smallest})
        instance = substitute_rule(instance, {variable: smallest})
    return instance.body


def _body_variables(rule: Rule, n_constants: int) -> list[int]:
    """The distinct variables of a rule's body in order of occurrence."""
    variables: dict[int, None] = {}
    for atom in rule.body:
        variables.update(dict.fromkeys(atom_variables(atom, n_constants)))
    return list(variables)


def _substitute_constraints(constraints: list[Inequality], substitution: dict[int, int]) -> list[Inequality]:
    """The inequalities with their variables replaced."""
    return [
        (substitute_terms(left, substitution), substitute_terms(right, substitution)) for left, right in constraints
    ]


def _atoms_below(model: LeastModel, atom: Atom, height: int, excluded_atom: Atom | None) -> Relation:
    """The atoms of smaller height that match an open atom, without the excluded one."""
    atoms, heights = fixpoint.matching_atoms(model, atom)
    is_included = heights < height
    if excluded_atom is not None:
        is_included = is_included & (atoms != torch.tensor(excluded_atom, device=atoms.device)).any(1)
    return relation_from_atoms(atoms[is_included])
