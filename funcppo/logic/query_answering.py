"""A query put to T_P: proved with a proof, refuted with what each rule lacks, or unknown."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.logic import fixpoint, joins, proof, proof_builder
from funcppo.logic import kb as kbase
from funcppo.logic.derivations import find_derivation
from funcppo.logic.fixpoint import LeastModel, StepCallback, Verdict
from funcppo.logic.joins import Inequality
from funcppo.logic.kb import KBSizes, KnowledgeBase
from funcppo.logic.proof import Proof
from funcppo.logic.relations import Relation, make_literal
from funcppo.logic.rules import (
    Atom,
    Rule,
    atom_variables,
    body_query,
    head_columns,
    most_general_unifier,
    object_identity_constraints,
    relation_from_atoms,
    relations_by_predicate,
    rules_from_kb,
    substitute_rule,
    substitute_terms,
)
from funcppo.types import I64, Bool


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryResult:
    """What is known of a ground atom; a value of the host."""

    verdict: Verdict  # on its derivation, in which it never counts as a fact
    is_fact: bool  # it is stated
    height: int | None  # of the proof
    proof: Proof | None  # of the smallest height, from other facts
    model: LeastModel  # without the atom as a fact, up to where its verdict is certain


def prove_ground(
    kb: KnowledgeBase,
    sizes: KBSizes,
    atom: Atom,
    *,
    max_height: int | None,
    max_atoms: int,
    object_identity: bool = False,
    progress: StepCallback | None = None,
) -> QueryResult:
    """The verdict on a ground atom, and a checked proof of the smallest height if it has one.

    T_P is taken 0, 1, 3, 7, ... steps and no further than the atom needs; the step after them is taken for the atom
    alone. So what is derived at once costs little although the fixpoint may be out of reach.

    Args:
      atom: padded to the width of the knowledge base.
      max_height: as for `least_model`, as are the others.
    Errors: AssertionError when the proof does not hold, which no input may cause.
    """
    root = torch.tensor(atom, device=kb.facts.device)
    is_fact = bool(kbase.contains(kb, sizes, root))
    kb, sizes = kbase.remove_fact(kb, sizes, root)
    rules = [] if max_height == 0 else matching_rules(kb, sizes, atom, object_identity=object_identity)
    last = None if max_height is None else max(0, max_height - 1)
    steps = 0
    while True:
        limit = steps if last is None else min(steps, last)
        model = fixpoint.least_model(
            kb,
            sizes,
            max_height=limit,
            max_atoms=max_atoms,
            predicates={atom[0]},
            object_identity=object_identity,
            progress=progress,
        )
        model = _with_next(model, atom, rules)
        height = int(fixpoint.atom_height(model, root))
        if height > 0 or model.reached_fixpoint or model.stop_reason or limit == last or not rules:
            break
        steps = 2 * steps + 1
    verdict = Verdict.PROVED if height > 0 else Verdict.UNKNOWN if model.stop_reason else Verdict.REFUTED
    return QueryResult(
        verdict=verdict,
        is_fact=is_fact,
        height=height if height > 0 else None,
        proof=_proof(kb, sizes, model, atom, height) if height > 0 else None,
        model=model,
    )


def _with_next(model: LeastModel, atom: Atom, rules: list[RuleInstance]) -> LeastModel:
    """The model with the atom in it if one of the rules derives it in one step more."""
    row = torch.tensor([atom], dtype=model.atoms.dtype, device=model.atoms.device)
    if int(fixpoint.atom_height(model, row)) >= 0 or all(unsatisfied_prefix(model, found) for found in rules):
        return model
    order, index = kbase.sort_and_index_atoms(
        torch.cat([model.atoms, row]).long(), model.sizes.n_predicates, model.sizes.n_constants
    )
    height = torch.cat([model.height, model.height.new_full((1,), len(model.n_atoms_after_step))])
    return replace(model, atoms=torch.cat([model.atoms, row])[order], height=height[order], atom_index=index)


def _proof(kb: KnowledgeBase, sizes: KBSizes, model: LeastModel, atom: Atom, height: int) -> Proof:
    """The proof that the model holds of an atom, which is no fact of the knowledge base."""
    used = torch.isin(kb.facts[:, 0], torch.tensor(sorted(model.predicates), device=kb.facts.device))
    program = proof_builder.make_program(kb.facts[used].tolist(), kb.rules.tolist(), sizes.n_constants)
    found = proof_builder.from_model(
        program, lambda goal: find_derivation(kb, sizes, model, goal), atom, leave_one_out=False
    )
    errors = proof.check_proof(
        found,
        program.fact_set,
        kb.rules.tolist(),
        n_constants=sizes.n_constants,
        max_height=height,
        leave_one_out=True,
        object_identity=model.object_identity,
    )
    assert not errors, errors
    return found


def derived_in_next_step(kb: KnowledgeBase, model: LeastModel, atoms: I64[Tensor, "n W"]) -> Bool[Tensor, "n"]:
    """Which of these atoms a rule derives from the model: the step of T_P after it, taken for them alone.

    A body is joined with the atoms asked for, so no more is held than they need.
    """
    n, device = model.sizes.n_constants, atoms.device
    asked = relations_by_predicate(torch.unique(atoms, dim=0))
    rules = [rule for rule in rules_from_kb(kb) if rule.head[0] in asked]
    known = relations_by_predicate(model.atoms, {atom[0] for rule in rules for atom in rule.body})
    found = [atoms[:0].long()]
    for rule in rules:
        if all(atom[0] in known for atom in rule.body):
            unequal = object_identity_constraints(rule, n) if model.object_identity else []
            query = body_query(rule, [known[atom[0]] for atom in rule.body], n, unequal)
            head = make_literal(asked[rule.head[0]], rule.head[1:], n)
            for table in joins.iter_answers(replace(query, literals=(head, *query.literals))):
                columns = head_columns(rule, table, device)
                found.append(torch.stack([torch.full_like(columns[0], rule.head[0]), *columns], dim=1))
    _, index = kbase.sort_and_index_atoms(torch.cat(found), model.sizes.n_predicates, n)
    return kbase.find_atoms(index, model.sizes, atoms) >= 0


class RuleInstance(NamedTuple):
    """A rule as an atom makes it that its head unifies with."""

    rule: Rule
    inequalities: tuple[
        Inequality, ...
    ]  # its variables, or what they stand for, that must differ; none unless asked for


def matching_rules(
    kb: KnowledgeBase, sizes: KBSizes, atom: Atom, *, object_identity: bool = False
) -> list[RuleInstance]:
    """The rules whose head unifies with an atom; with object identity, without giving two variables one constant."""
    found = []
    for rule in rules_from_kb(kb):
        same = most_general_unifier(rule.head, atom, sizes.n_constants)
        if same is not None:
            pairs = object_identity_constraints(rule, sizes.n_constants) if object_identity else []
            unequal = tuple((substitute_terms(left, same), substitute_terms(right, same)) for left, right in pairs)
            if all(left != right for left, right in unequal):
                found.append(RuleInstance(substitute_rule(rule, same), unequal))
    return found


def unsatisfied_prefix(model: LeastModel, instance: RuleInstance) -> tuple[Atom, ...]:
    """The shortest beginning of a rule's body that no atoms of the model satisfy; empty when they satisfy the whole."""
    rule, n = instance.rule, model.sizes.n_constants
    relations: list[Relation] = []
    bound: set[int] = set()
    for size, goal in enumerate(rule.body, 1):
        relations.append(relation_from_atoms(fixpoint.matching_atoms(model, goal)[0]))
        bound.update(atom_variables(goal, n))
        unequal = [pair for pair in instance.inequalities if {t for part in pair for t in part if t > n} <= bound]
        query = body_query(Rule(rule.id, rule.head, rule.body[:size]), relations, n, unequal, ())
        if not relations[-1].size or not any(table.size for table in joins.iter_answers(query)):
            return rule.body[:size]
    return ()
