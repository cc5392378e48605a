"""Query answering: a ground atom is proved with a proof, refuted, or unknown.

`prove_ground` gives the verdict. For an atom that is not proved, `matching_rules` and `unsatisfied_prefix` tell what
each rule lacks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from funcppo.kg.logic import fixpoint, joins, proof_builder
from funcppo.kg.logic.derivations import Derivation, find_derivation
from funcppo.kg.logic.fixpoint import LeastModel, StepCallback, Verdict
from funcppo.kg.logic.joins import Inequality, RowBudget
from funcppo.kg.logic.kb import (
    KBSizes,
    KnowledgeBase,
    contains,
    remove_fact,
    sort_and_index_atoms,
)
from funcppo.kg.logic.proof import Proof, check_proof
from funcppo.kg.logic.relations import Relation
from funcppo.kg.logic.rules import (
    Atom,
    Rule,
    atom_variables,
    body_query,
    most_general_unifier,
    object_identity_constraints,
    relation_from_atoms,
    rules_from_kb,
    substitute_rule,
    substitute_terms,
)
from funcppo.kg.logic.typed_torch import atom_tuples, rule_tuples


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryResult:
    """The answer to a ground query; a value of the host."""

    # whether the atom is derivable without counting as a fact itself
    verdict: Verdict
    is_fact: bool  # whether the knowledge base states the atom
    height: int | None  # of the proof; None without one
    # a proof of the smallest height, from other facts; None unless the verdict is PROVED
    proof: Proof | None
    # derived without the atom as a fact, up to the step that decided the verdict
    model: LeastModel


class RuleInstance(NamedTuple):
    """A rule whose head unifies with an atom, under the most general unifier of the two."""

    rule: Rule
    # object identity: terms that must differ; none without object identity
    inequalities: tuple[Inequality, ...]


class FailedRule(NamedTuple):
    """A rule whose head matches an atom that it does not derive."""

    rule: int
    goals: tuple[Atom, ...]  # the first of its body that nothing satisfies


class FailedRules(NamedTuple):
    """Why no rule derives an atom."""

    rules: list[FailedRule]  # the first ones that match
    n_matching: int  # rules whose head matches the atom


# -- the verdict


def prove_ground(
    kb: KnowledgeBase,
    sizes: KBSizes,
    atom: Atom,
    *,
    max_height: int | None,
    max_atoms: int,
    object_identity: bool = False,
    progress: StepCallback | None = None,
    budget: RowBudget | None = None,
) -> QueryResult:
    """Prove or refute a ground atom, which does not count as a fact in its own proof.

    T_P is evaluated to 0, 1, 3, 7, ... steps, and no further than the atom needs; one more step is taken for the atom
    alone. So a query with a short proof costs little even where the fixpoint is out of reach.

    Args:
      atom: padded to the width of the knowledge base.
      max_height: the greatest height of a proof; None for any.
      max_atoms: the most atoms of a model; see `least_model`.
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      progress: is called before each step of T_P; None for no reports.
      budget: bounds the rows that the joins of all evaluations of T_P make; None for no bound.

    Returns:
      The verdict; for a proved atom with a checked proof of the smallest height.

    Raises:
      AssertionError: if the proof does not hold, which no input may cause.
    """
    query = torch.tensor(atom, device=kb.facts.device)
    is_fact = bool(contains(kb, sizes, query))
    kb, sizes = remove_fact(kb, sizes, query)
    rules: list[RuleInstance] = []
    if max_height != 0:
        rules = matching_rules(kb, sizes, atom, object_identity=object_identity)

    # The last step is taken for the atom alone, so models end one step before max_height.
    last_step = None if max_height is None else max(0, max_height - 1)
    n_steps = 0
    while True:
        limit = n_steps if last_step is None else min(n_steps, last_step)
        model = fixpoint.least_model(
            kb,
            sizes,
            max_height=limit,
            max_atoms=max_atoms,
            predicates={atom[0]},
            object_identity=object_identity,
            progress=progress,
            budget=budget,
        )
        model = _add_if_derived_next(model, atom, rules)
        height = int(fixpoint.atom_height(model, query))
        is_decided = height > 0 or model.reached_fixpoint or not rules
        if is_decided or model.stop_reason or limit == last_step:
            break
        n_steps = 2 * n_steps + 1

    if height > 0:
        proof = _build_proof(kb, sizes, model, atom, height)
        return QueryResult(
            verdict=Verdict.PROVED,
            is_fact=is_fact,
            height=height,
            proof=proof,
            model=model,
        )
    verdict = Verdict.UNKNOWN if model.stop_reason else Verdict.REFUTED
    return QueryResult(
        verdict=verdict,
        is_fact=is_fact,
        height=None,
        proof=None,
        model=model,
    )


def _add_if_derived_next(
    model: LeastModel, atom: Atom, rules: list[RuleInstance]
) -> LeastModel:
    """The model with the atom added if one of the rules derives it in the next step."""
    row = torch.tensor(
        [atom], dtype=model.atoms.dtype, device=model.atoms.device
    )
    is_present = int(fixpoint.atom_height(model, row)) >= 0
    if is_present or all(
        unsatisfied_prefix(model, instance) for instance in rules
    ):
        return model

    atoms = torch.cat([model.atoms, row])
    next_step = len(model.n_atoms_after_step)
    height = torch.cat([model.height, model.height.new_full((1,), next_step)])
    order, atom_index = sort_and_index_atoms(
        atoms.long(), model.sizes.n_predicates, model.sizes.n_constants
    )
    return replace(
        model,
        atoms=atoms[order],
        height=height[order],
        atom_index=atom_index,
    )


def _build_proof(
    kb: KnowledgeBase,
    sizes: KBSizes,
    model: LeastModel,
    atom: Atom,
    height: int,
) -> Proof:
    """A checked proof of an atom of the model that is not a fact."""

    def derive(goal: Atom) -> Derivation:
        return find_derivation(kb, sizes, model, goal)

    # Facts of other predicates cannot occur in the proof: skip them.
    is_used = torch.isin(
        kb.facts[:, 0],
        torch.tensor(sorted(model.predicates), device=kb.facts.device),
    )
    rules = rule_tuples(kb.rules)
    program = proof_builder.make_program(
        atom_tuples(kb.facts[is_used]), rules, sizes.n_constants
    )

    proof = proof_builder.from_model(program, derive, atom, leave_one_out=False)
    errors = check_proof(
        proof,
        program.fact_set,
        rules,
        n_constants=sizes.n_constants,
        max_height=height,
        leave_one_out=True,
        object_identity=model.object_identity,
    )
    assert not errors, errors
    return proof


# -- what the rules lack


def matching_rules(
    kb: KnowledgeBase,
    sizes: KBSizes,
    atom: Atom,
    *,
    object_identity: bool = False,
) -> list[RuleInstance]:
    """Find the rules whose head unifies with an atom, in file order.

    Args:
      atom: padded to the width of the knowledge base; may hold variables.
      object_identity: leave out a rule whose unifier gives two of its variables one constant, or a variable a constant
        that the rule names.

    Returns:
      Each rule under its most general unifier with the atom.
    """
    n_constants = sizes.n_constants
    instances: list[RuleInstance] = []
    for rule in rules_from_kb(kb):
        unifier = most_general_unifier(rule.head, atom, n_constants)
        if unifier is None:
            continue
        constraints = (
            object_identity_constraints(rule, n_constants)
            if object_identity
            else []
        )
        inequalities: list[Inequality] = []
        for left, right in constraints:
            left = substitute_terms(left, unifier)
            right = substitute_terms(right, unifier)
            inequalities.append((left, right))
        if all(left != right for left, right in inequalities):
            instance = substitute_rule(rule, unifier)
            instances.append(RuleInstance(instance, tuple(inequalities)))
    return instances


def failed_rules(
    kb: KnowledgeBase,
    sizes: KBSizes,
    model: LeastModel,
    atom: Atom,
    *,
    object_identity: bool,
    n_rules: int,
) -> FailedRules:
    """The first rules whose head matches an atom without a proof, each with the goals that nothing satisfies.

    Args:
      model: without the atom, up to a step before the greatest height.
      atom: padded to the width of the knowledge base.
      n_rules: the most rules to list.
    """
    matching = matching_rules(kb, sizes, atom, object_identity=object_identity)
    rules = [
        FailedRule(instance.rule.id, unsatisfied_prefix(model, instance))
        for instance in matching[:n_rules]
    ]
    return FailedRules(rules, len(matching))


def unsatisfied_prefix(
    model: LeastModel, instance: RuleInstance
) -> tuple[Atom, ...]:
    """Find the shortest prefix of a rule's body that no atoms of a model satisfy.

    Args:
      instance: what `matching_rules` returns.

    Returns:
      The first atoms of the body; empty if the model satisfies the whole body.
    """
    rule = instance.rule
    n_constants = model.sizes.n_constants
    relations: list[Relation] = []
    bound: set[int] = set()
    for length, goal in enumerate(rule.body, 1):
        relations.append(
            relation_from_atoms(fixpoint.matching_atoms(model, goal).atoms)
        )
        bound.update(atom_variables(goal, n_constants))

        # Only inequalities between variables that the prefix binds can fail yet.
        inequalities = [
            pair
            for pair in instance.inequalities
            if _inequality_variables(pair, n_constants) <= bound
        ]
        prefix = Rule(rule.id, rule.head, rule.body[:length])
        query = body_query(prefix, relations, n_constants, inequalities, ())
        if not relations[-1].size or not any(
            table.size for table in joins.iter_answers(query)
        ):
            return prefix.body
    return ()


def _inequality_variables(inequality: Inequality, n_constants: int) -> set[int]:
    """The variables of an inequality."""
    left, right = inequality
    return {term for term in (*left, *right) if term > n_constants}
