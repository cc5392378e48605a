"""A query put to T_P: proved with a proof, refuted with what each rule lacks, or unknown."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.logic import fixpoint, joins, proof, replay
from funcppo.logic import kb as kbase
from funcppo.logic.derivations import derivation
from funcppo.logic.fixpoint import Model, Progress, Verdict
from funcppo.logic.joins import Unequal
from funcppo.logic.kb import KnowledgeBase, Sizes
from funcppo.logic.proof import Proof
from funcppo.logic.relations import Relation, literal_of
from funcppo.logic.rules import (
    Atom,
    Rule,
    different_variables,
    head_columns,
    put,
    query_of,
    relation_of,
    relations_of,
    rules_of,
    substitute,
    unifier,
    variables,
)
from funcppo.types import I64, Bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What is known of a ground atom; a value of the host."""

    verdict: Verdict  # on its derivation, in which it never counts as a fact
    is_fact: bool  # it is stated
    height: int | None  # of the proof
    proof: Proof | None  # of the smallest height, from other facts
    model: Model  # without the atom as a fact, up to where its verdict is certain


def ask(
    kb: KnowledgeBase,
    sizes: Sizes,
    atom: Atom,
    *,
    max_height: int | None,
    budget: int,
    object_identity: bool = False,
    progress: Progress | None = None,
) -> Outcome:
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
    kb, sizes = kbase.without(kb, sizes, root)
    rules = [] if max_height == 0 else matching_rules(kb, sizes, atom, object_identity=object_identity)
    last = None if max_height is None else max(0, max_height - 1)
    steps = 0
    while True:
        limit = steps if last is None else min(steps, last)
        model = fixpoint.least_model(
            kb,
            sizes,
            max_height=limit,
            budget=budget,
            predicates={atom[0]},
            object_identity=object_identity,
            progress=progress,
        )
        model = _with_next(model, atom, rules)
        height = int(fixpoint.contains(model, root))
        if height > 0 or model.fixpoint or model.stopped or limit == last or not rules:
            break
        steps = 2 * steps + 1
    verdict = Verdict.PROVED if height > 0 else Verdict.UNKNOWN if model.stopped else Verdict.REFUTED
    return Outcome(
        verdict=verdict,
        is_fact=is_fact,
        height=height if height > 0 else None,
        proof=_proof(kb, sizes, model, atom, height) if height > 0 else None,
        model=model,
    )


def _with_next(model: Model, atom: Atom, rules: list[Instance]) -> Model:
    """The model with the atom in it if one of the rules derives it in one step more."""
    row = torch.tensor([atom], dtype=model.atoms.dtype, device=model.atoms.device)
    if int(fixpoint.contains(model, row)) >= 0 or all(unsatisfied(model, found) for found in rules):
        return model
    order, index = kbase.index_atoms(
        torch.cat([model.atoms, row]).long(), model.sizes.n_predicates, model.sizes.n_constants
    )
    height = torch.cat([model.height, model.height.new_full((1,), len(model.counts))])
    return replace(model, atoms=torch.cat([model.atoms, row])[order], height=height[order], index=index)


def _proof(kb: KnowledgeBase, sizes: Sizes, model: Model, atom: Atom, height: int) -> Proof:
    """The proof that the model holds of an atom, which is no fact of the knowledge base."""
    used = torch.isin(kb.facts[:, 0], torch.tensor(sorted(model.predicates), device=kb.facts.device))
    program = replay.program(kb.facts[used].tolist(), kb.rules.tolist(), sizes.n_constants)
    found = replay.from_model(program, lambda goal: derivation(kb, sizes, model, goal), atom, leave_one_out=False)
    errors = proof.check(
        found,
        program.known,
        kb.rules.tolist(),
        n_constants=sizes.n_constants,
        max_height=height,
        leave_one_out=True,
        object_identity=model.object_identity,
    )
    assert not errors, errors
    return found


def derived_next(kb: KnowledgeBase, model: Model, atoms: I64[Tensor, "n W"]) -> Bool[Tensor, "n"]:
    """Which of these atoms a rule derives from the model: the step of T_P after it, taken for them alone.

    A body is joined with the atoms asked for, so no more is held than they need.
    """
    n, device = model.sizes.n_constants, atoms.device
    asked = relations_of(torch.unique(atoms, dim=0))
    rules = [rule for rule in rules_of(kb) if rule.head[0] in asked]
    known = relations_of(model.atoms, {atom[0] for rule in rules for atom in rule.body})
    found = [atoms[:0].long()]
    for rule in rules:
        if all(atom[0] in known for atom in rule.body):
            unequal = different_variables(rule, n) if model.object_identity else []
            query = query_of(rule, [known[atom[0]] for atom in rule.body], n, unequal)
            head = literal_of(asked[rule.head[0]], rule.head[1:], n)
            for table in joins.solve(replace(query, literals=(head, *query.literals))):
                columns = head_columns(rule, table, device)
                found.append(torch.stack([torch.full_like(columns[0], rule.head[0]), *columns], dim=1))
    _, index = kbase.index_atoms(torch.cat(found), model.sizes.n_predicates, n)
    return kbase.locate(index, model.sizes, atoms) >= 0


class Instance(NamedTuple):
    """A rule as an atom makes it that its head unifies with."""

    rule: Rule
    unequal: tuple[Unequal, ...]  # its variables, or what they stand for, that must differ; none unless asked for


def matching_rules(kb: KnowledgeBase, sizes: Sizes, atom: Atom, *, object_identity: bool = False) -> list[Instance]:
    """The rules whose head unifies with an atom; with object identity, without giving two variables one constant."""
    found = []
    for rule in rules_of(kb):
        same = unifier(rule.head, atom, sizes.n_constants)
        if same is not None:
            pairs = different_variables(rule, sizes.n_constants) if object_identity else []
            unequal = tuple((put(left, same), put(right, same)) for left, right in pairs)
            if all(left != right for left, right in unequal):
                found.append(Instance(substitute(rule, same), unequal))
    return found


def unsatisfied(model: Model, found: Instance) -> tuple[Atom, ...]:
    """The shortest beginning of a rule's body that no atoms of the model satisfy; empty when they satisfy the whole."""
    rule, n = found.rule, model.sizes.n_constants
    relations: list[Relation] = []
    bound: set[int] = set()
    for size, goal in enumerate(rule.body, 1):
        relations.append(relation_of(fixpoint.answers(model, goal)[0]))
        bound.update(variables(goal, n))
        unequal = [pair for pair in found.unequal if {t for part in pair for t in part if t > n} <= bound]
        query = query_of(Rule(rule.id, rule.head, rule.body[:size]), relations, n, unequal, ())
        if not relations[-1].size or not any(table.size for table in joins.solve(query)):
            return rule.body[:size]
    return ()
