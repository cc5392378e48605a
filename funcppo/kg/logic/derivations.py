"""The last step of a derivation, read back from a least model.

`find_derivation` finds a rule and a ground body for a derived atom, `find_ground_body` the body for a given rule. From
these a proof is built along decreasing height.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from funcppo.kg.logic import fixpoint, joins
from funcppo.kg.logic.fixpoint import FactTable, LeastModel
from funcppo.kg.logic.joins import Inequality
from funcppo.kg.logic.kb import KBSizes, KnowledgeBase
from funcppo.kg.logic.relations import Relation
from funcppo.kg.logic.rules import (
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
from funcppo.kg.logic.typed_torch import atom_tuples, int_list


class Derivation(NamedTuple):
    """The last step of a derivation; Python values."""

    rule: int  # id of the rule
    body: tuple[Atom, ...]  # its ground body


def find_derivation(
    kb: KnowledgeBase, sizes: KBSizes, model: LeastModel, atom: Atom
) -> Derivation:
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
    query = torch.tensor(atom, device=model.atoms.device)
    height = int(fixpoint.atom_height(model, query))
    if height < 1:
        problem = "a fact" if height == 0 else "none"
        raise ValueError(
            f"{list(atom)}: expected a derived atom of the model, got {problem}"
        )

    predicate = atom[0]
    start, stop = int_list(kb.rule_offsets[predicate : predicate + 2])
    for rule_id in int_list(kb.rule_ids_by_predicate[start:stop]):
        rule = _read_rule(kb, rule_id)
        body = _smallest_body(rule, atom, model, height)
        if body is not None:
            return Derivation(rule_id, body)
    raise ValueError(
        f"{list(atom)}: expected a rule that derives it, got none; the model belongs to other rules"
    )


def find_ground_body(
    kb: KnowledgeBase,
    sizes: KBSizes,
    model: LeastModel | FactTable,
    atom: Atom,
    rule: int,
    height: int,
) -> tuple[Atom, ...] | None:
    """Find the ground body by which a given rule derives an atom, without that atom in it.

    Args:
      atom: padded to the width of the knowledge base.
      rule: id of the rule.
      height: the body's atoms have smaller heights.

    Returns:
      The body with the smallest constants, as in `find_derivation`; None if there is none.
    """
    return _smallest_body(
        _read_rule(kb, rule), atom, model, height, excluded_atom=atom
    )


def _read_rule(kb: KnowledgeBase, rule_id: int) -> Rule:
    """One rule of a knowledge base."""
    atoms = atom_tuples(kb.rules[rule_id])
    head, *body = (atom for atom in atoms if atom[0])
    return Rule(rule_id, head, tuple(body))


def _smallest_body(
    rule: Rule,
    atom: Atom,
    model: LeastModel | FactTable,
    height: int,
    excluded_atom: Atom | None = None,
) -> tuple[Atom, ...] | None:
    """The smallest ground body of a rule that derives an atom from atoms of smaller heights; None if there is none."""
    n_constants = model.sizes.n_constants
    substitution = most_general_unifier(rule.head, atom, n_constants)
    if substitution is None:
        return None
    constraints: list[Inequality] = []
    if model.object_identity:
        constraints = object_identity_constraints(rule, n_constants)
        constraints = _substitute_constraints(constraints, substitution)
    instance = substitute_rule(rule, substitution)
    relations: list[Relation] = []
    for goal in instance.body:
        relations.append(_atoms_below(model, goal, height, excluded_atom))
    if not all(relation.size for relation in relations):
        return None

    # Without output variables, the query only decides whether there is a body at all.
    exists_query = body_query(instance, relations, n_constants, constraints, ())
    if not list(joins.iter_answers(exists_query)):
        return None

    # Bind one variable after another to its smallest constant: the result is the lexicographically smallest body.
    for variable in _body_variables(instance, n_constants):
        query = body_query(
            instance, relations, n_constants, constraints, (variable,)
        )
        columns = [table.columns[0] for table in joins.iter_answers(query)]
        smallest = min(int(column.min()) for column in columns)
        constraints = _substitute_constraints(constraints, {variable: smallest})
        instance = substitute_rule(instance, {variable: smallest})
    return instance.body


def _body_variables(rule: Rule, n_constants: int) -> list[int]:
    """The distinct variables of a rule's body in order of occurrence."""
    variables: dict[int, None] = {}
    for atom in rule.body:
        variables.update(dict.fromkeys(atom_variables(atom, n_constants)))
    return list(variables)


def _substitute_constraints(
    constraints: list[Inequality], substitution: dict[int, int]
) -> list[Inequality]:
    """The inequalities with their variables replaced."""
    substituted: list[Inequality] = []
    for left, right in constraints:
        left = substitute_terms(left, substitution)
        right = substitute_terms(right, substitution)
        substituted.append((left, right))
    return substituted


def _atoms_below(
    model: LeastModel | FactTable,
    atom: Atom,
    height: int,
    excluded_atom: Atom | None,
) -> Relation:
    """The atoms of smaller height that match an open atom, without the excluded one."""
    atoms, heights = fixpoint.matching_atoms(model, atom)
    is_included = heights < height
    if excluded_atom is not None:
        excluded = torch.tensor(excluded_atom, device=atoms.device)
        is_included = is_included & (atoms != excluded).any(1)
    return relation_from_atoms(atoms[is_included])
