"""Verdicts on ground atoms, with proofs: proved, refuted, or unknown.

`prove_ground` gives the verdict; `failed_rules` tells what each rule lacks for an atom that is not proved.
`find_derivation` reads the last step of a derivation back from a least model, `find_ground_body` that of a given rule.
`from_model` builds a proof from a function that derives one goal at a time, along decreasing height; `from_trace`
replays a search's choices. Both work on a `Program`, the facts and rules as plain Python values. Nothing here recurses,
so proofs may be thousands of nodes deep.

`fact_heights` finds the heights of facts that are proved from other facts: a fact does not count in its own proof. At
height 1 the rules that derive the facts are found by open queries. A fact that they do not derive is removed and T_P
evaluated without it, one fact after the other; a bound on rows ends this work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from funcppo.core.types import I32, I64
from funcppo.kg.logic import derive, fixpoint
from funcppo.kg.logic.fixpoint import (
    LeastModel,
    StepCallback,
    Verdict,
    ignore_progress,
    matching_rows,
)
from funcppo.kg.logic.joins import (
    Inequality,
    RowBudget,
    RowBudgetExceeded,
    Rule,
    atom_variables,
    body_query,
    collect_answers,
    most_general_unifier,
    object_identity_constraints,
    relation_from_atoms,
    rules_from_kb,
    substitute_inequalities,
    substitute_rule,
    substitute_terms,
)
from funcppo.kg.logic.kb import (
    TAIL,
    KBSizes,
    KnowledgeBase,
    contains,
    is_binary,
    remove_fact,
    sort_and_index_atoms,
)
from funcppo.kg.logic.proof import Atom, Node, Proof, check_proof
from funcppo.kg.logic.row_index import (
    atom_tuples,
    int_list,
    rule_tuples,
    unique_rows_with_inverse,
)

Clause = tuple[Atom, ...]  # head first; a fact is a clause without a body
# The clause that resolves the leftmost goal: its kind, its id, and the probability of this choice under the policy;
# None if no policy made it.
Choice = tuple[Literal["rule", "fact"], int, float | None]
# A rule under the most general unifier of its head and an atom, and pairs of terms that must differ under object
# identity.
RuleInstance = tuple[Rule, list[Inequality]]
# rows of joins to decide which of some facts other facts prove
MAX_FACT_ROWS = 100_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Facts and rules as plain Python values."""

    facts: tuple[Atom, ...]  # by id
    fact_set: frozenset[Atom]  # the same facts
    rules: tuple[Clause, ...]  # by id; without padding atoms
    n_constants: int  # a term above is a variable


def make_program(
    facts: Iterable[Sequence[int]],
    rules: Iterable[Iterable[Sequence[int]]],
    n_constants: int,
) -> Program:
    """Build a program from nested lists, such as `kb.facts.tolist()` and `kb.rules.tolist()`."""
    atoms = tuple(tuple(fact) for fact in facts)
    clauses: list[Clause] = []
    for rule in rules:
        clauses.append(tuple(tuple(atom) for atom in rule if atom[0]))
    return Program(
        facts=atoms,
        fact_set=frozenset(atoms),
        rules=tuple(clauses),
        n_constants=n_constants,
    )


# -- proofs


def from_model(
    program: Program,
    derive_goal: Callable[[Atom], tuple[int, Iterable[Atom]]],
    root: Atom,
    *,
    leave_one_out: bool,
) -> Proof:
    """Build a proof of an atom from a model; each distinct subgoal is proved once.

    Args:
      derive_goal: the last step of a derivation of a goal that is no fact: the id of a rule, and a ground body of atoms
        of smaller height.
      root: the atom to prove.
      leave_one_out: derive the root even if it is a fact.

    Returns:
      The proof; its nodes are in breadth-first order of their goals, without probabilities.
    """
    positions = {root: 0}
    goals = [root]
    nodes: list[Node] = []
    for goal in goals:  # grows while it is traversed
        rule, body = None, []
        binding: dict[int, int] = {}
        if goal not in program.fact_set or (leave_one_out and goal == root):
            rule, found = derive_goal(goal)
            body = [tuple(int(term) for term in atom) for atom in found]
            for pattern, atom in zip(program.rules[rule], [goal, *body]):
                binding.update(zip(pattern[1:], atom[1:]))

        for atom in body:
            if atom not in positions:
                positions[atom] = len(goals)
                goals.append(atom)
        substitution = [
            (term, constant)
            for term, constant in sorted(binding.items())
            if term > program.n_constants
        ]
        nodes.append(
            Node(
                goal=goal,
                rule=None if rule is None else int(rule),
                substitution=tuple(substitution),
                probability=None,
                children=tuple(positions[atom] for atom in body),
            )
        )
    return Proof(nodes=tuple(nodes))


def from_trace(
    program: Program, root: Atom, choices: Iterable[Choice]
) -> Proof:
    """Build the proof that leftmost resolution reaches by the given choices; the root never counts as a fact.

    Each choice resolves the leftmost open goal with a rule or a fact; then every open goal that is a fact becomes a
    leaf. A variable that a later choice binds is bound in earlier nodes too.

    Args:
      root: the atom to prove; may hold variables.
      choices: in the order in which the prover made them, one for each rule applied and each fact chosen.

    Returns:
      The proof, with the probabilities of the choices; leaves that needed no choice have none.

    Raises:
      ValueError: naming the choice that does not apply, or saying what the choices leave open.
    """
    largest = (max(atom) for rule in program.rules for atom in rule)
    width = max(program.n_constants, *root, *largest)
    nodes = [_open_node(root)]
    open_goals = [0]  # positions of nodes, leftmost goal first
    with_variables = {0}  # positions of nodes that may hold variables
    for step, choice in enumerate(choices):
        if not open_goals:
            raise ValueError(
                f"choice {step}: no goal is left for {choice[0]} {choice[1]}"
            )
        at, others = open_goals[0], open_goals[1:]
        resolved, body, unifier = _resolve(
            program, root, nodes[at].goal, choice, step, width
        )

        # Complete the node of the goal, and add one for each atom of the body.
        children = tuple(range(len(nodes), len(nodes) + len(body)))
        nodes[at] = replace(resolved, children=children)
        nodes += [_open_node(atom) for atom in body]
        with_variables.update((at, *children))
        for i in sorted(with_variables):
            nodes[i] = _bind_node(nodes[i], unifier)
            bound = [*nodes[i].goal[1:], *(t for _, t in nodes[i].substitution)]
            if max(bound, default=0) <= program.n_constants:
                with_variables.remove(i)

        # The body takes the goal's place; facts are leaves at once.
        open_goals = [
            i
            for i in (*children, *others)
            if nodes[i].goal == root or nodes[i].goal not in program.fact_set
        ]

    if open_goals:
        raise ValueError(f"the choices leave {len(open_goals)} goals unproved")
    for i in sorted(with_variables):
        raise ValueError(
            f"the choices leave a variable of {list(nodes[i].goal)} unbound"
        )
    return Proof(nodes=tuple(nodes))


def _resolve(
    program: Program,
    root: Atom,
    goal: Atom,
    choice: Choice,
    step: int,
    width: int,
) -> tuple[Node, list[Atom], dict[int, int]]:
    """Resolve a goal by one choice: return its node (without children), the body of the clause, and the unifier.

    Args:
      width: the largest term of the program and of the root.
    """
    kind, index, probability = choice
    clause = _find_clause(program, kind, index, step)

    # Rename the variables of the clause to ids that neither the root nor a step before has.
    terms = {term for atom in clause for term in atom[1:]}
    variables = sorted(t for t in terms if t > program.n_constants)
    renaming = {v: v + (step + 1) * width for v in variables}
    head, *body = (_substitute(atom, renaming) for atom in clause)
    unifier = most_general_unifier(head, goal, program.n_constants)
    if unifier is None or (kind == "fact" and head == root):
        raise ValueError(
            f"choice {step}: {kind} {index} does not resolve {list(goal)}"
        )
    node = replace(
        _open_node(goal),
        rule=index if kind == "rule" else None,
        substitution=tuple(renaming.items()),
        probability=probability,
    )
    return node, body, unifier


def _open_node(goal: Atom) -> Node:
    """Return the node of a goal that no choice has resolved yet."""
    return Node(
        goal=goal, rule=None, substitution=(), probability=None, children=()
    )


def _find_clause(program: Program, kind: str, index: int, step: int) -> Clause:
    """Return the rule or fact of a choice, as a clause."""
    if kind == "rule" and 0 <= index < len(program.rules):
        return program.rules[index]
    if kind == "fact" and 0 <= index < len(program.facts):
        return (program.facts[index],)
    raise ValueError(f"choice {step}: there is no {kind} {index}")


def _substitute(atom: Atom, substitution: dict[int, int]) -> Atom:
    """Return the atom with its variables replaced."""
    return (atom[0], *substitute_terms(atom[1:], substitution))


def _bind_node(node: Node, substitution: dict[int, int]) -> Node:
    """Return the node with the variables of its goal and of its substitution's terms replaced."""
    variables = [variable for variable, _ in node.substitution]
    terms = [term for _, term in node.substitution]
    bound = substitute_terms(terms, substitution)
    return replace(
        node,
        goal=_substitute(node.goal, substitution),
        substitution=tuple(zip(variables, bound)),
    )


# -- derivations


def find_derivation(
    kb: KnowledgeBase, sizes: KBSizes, model: LeastModel, atom: Atom
) -> tuple[int, tuple[Atom, ...]]:
    """Find the first rule that derives an atom of the model from atoms of smaller heights, and its ground body.

    The rule is the first in file order with such a body; of its bodies, the one whose variables, in order of
    occurrence, have the smallest constants.

    Args:
      atom: padded to the width of the knowledge base.

    Returns:
      The rule's id, and its ground body.

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

    def atoms_below(goal: Atom) -> Tensor:
        rows = matching_rows(model.atoms, goal, sizes.n_constants)
        return model.atoms[rows[model.height[rows] < height]]

    start, stop = int_list(kb.rule_offsets[atom[0] : atom[0] + 2])
    for rule in rules_from_kb(
        kb, int_list(kb.rule_ids_by_predicate[start:stop])
    ):
        body = _smallest_body(
            rule, atom, atoms_below, sizes, model.object_identity
        )
        if body is not None:
            return rule.id, body
    raise ValueError(
        f"{list(atom)}: expected a rule that derives it, got none; the model belongs to other rules"
    )


def find_ground_body(
    kb: KnowledgeBase,
    sizes: KBSizes,
    atom: Atom,
    rule: int,
    object_identity: bool,
) -> tuple[Atom, ...] | None:
    """Find facts from which a given rule derives an atom: the rule's ground body, without the atom itself.

    Args:
      atom: padded to the width of the knowledge base.
      rule: id of the rule.
      object_identity: different variables of a rule bind different constants, none of which the rule names.

    Returns:
      The body with the smallest constants, as in `find_derivation`; None if there is none.
    """
    excluded = torch.tensor(atom, device=kb.facts.device)

    def other_facts(goal: Atom) -> Tensor:
        facts = kb.facts[matching_rows(kb.facts, goal, sizes.n_constants)]
        return facts[(facts != excluded).any(1)]

    (applied,) = rules_from_kb(kb, [rule])
    return _smallest_body(applied, atom, other_facts, sizes, object_identity)


def _smallest_body(
    rule: Rule,
    atom: Atom,
    find_atoms: Callable[[Atom], Tensor],
    sizes: KBSizes,
    object_identity: bool,
) -> tuple[Atom, ...] | None:
    """Return the smallest ground body by which a rule derives an atom; None if there is no such body.

    Args:
      find_atoms: the atoms that may stand in the body, of those that match an open atom.
    """
    n_constants = sizes.n_constants
    instance = _unify_head(rule, atom, n_constants, object_identity)
    if instance is None:
        return None
    rule, constraints = instance
    relations = [relation_from_atoms(find_atoms(goal)) for goal in rule.body]
    if not all(relation.size for relation in relations):
        return None

    # Without output variables, the query only decides whether there is a body at all.
    query = body_query(rule, relations, n_constants, constraints, ())
    if collect_answers(query) is None:
        return None

    # Bind one variable after another to its smallest constant: the result is the lexicographically smallest body.
    while True:
        variables = [
            v for goal in rule.body for v in atom_variables(goal, n_constants)
        ]
        if not variables:
            return rule.body
        query = body_query(
            rule, relations, n_constants, constraints, (variables[0],)
        )
        answers = collect_answers(query)
        assert answers is not None  # there is a body
        smallest = {variables[0]: int(answers.columns[0].min())}
        constraints = substitute_inequalities(constraints, smallest)
        rule = substitute_rule(rule, smallest)


def _unify_head(
    rule: Rule, atom: Atom, n_constants: int, object_identity: bool
) -> RuleInstance | None:
    """Return the rule under the unifier of its head and an atom, with its inequalities; None if they do not unify.

    Under object identity a head and an atom do not unify either if two variables get one constant, or a variable gets a
    constant that the rule names.
    """
    unifier = most_general_unifier(rule.head, atom, n_constants)
    if unifier is None:
        return None
    constraints = substitute_inequalities(
        object_identity_constraints(rule, n_constants, object_identity),
        unifier,
    )
    if any(left == right for left, right in constraints):
        return None
    return substitute_rule(rule, unifier), constraints


# -- fact proofs


class FactHeights(NamedTuple):
    """Smallest heights of proofs of facts from other facts."""

    height: I64[Tensor, "n"]  # -1 without a proof, or undecided
    n_undecided: int  # distinct facts for which a bound was reached first


def fact_heights(
    kb: KnowledgeBase,
    sizes: KBSizes,
    facts: I32[Tensor, "n W"],
    *,
    max_height: int | None,
    max_atoms: int,
    budget: RowBudget,
    object_identity: bool = False,
    memory_share: float = 1.0,
) -> FactHeights:
    """Compute, per fact, the smallest height of a proof from other facts.

    Args:
      facts: of the knowledge base, in any order; repetitions allowed.
      max_height: the greatest height of a proof; None for any.
      max_atoms: the most atoms of a model; see `fixpoint.least_model`.
      budget: bounds the rows that all joins make; a fact that is removed counts as a row for each of the others.
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      memory_share: of the largest chunks of questions whose groundings may be held at once.
    """
    facts, row_of_fact = unique_rows_with_inverse(facts)
    height = torch.full_like(facts[:, 0], -1, dtype=torch.int64)
    is_asked = is_binary(facts)
    asked = is_asked.nonzero().squeeze(1)
    if max_height == 0:
        return FactHeights(height[row_of_fact], 0)
    if len(asked):
        try:
            for row, _ in derive.iter_derivations(
                derive.plan_rules(kb, sizes, memory_share),
                kb,
                facts[asked].long(),
                TAIL,
                object_identity=object_identity,
                budget=budget,
            ):
                height = height.index_fill(0, asked[row], 1)
        except RowBudgetExceeded:
            return FactHeights(
                torch.full_like(height, -1)[row_of_fact], len(facts)
            )

    # The others need a greater height, or have other than two arguments.
    is_open = height < 0
    if max_height == 1:
        is_open = is_open & ~is_asked
    found = [
        _prove_one(
            kb, sizes, fact, max_height, max_atoms, object_identity, budget
        )
        for fact in atom_tuples(facts[is_open])
    ]
    heights = [-1 if one is None else one for one in found]
    height = height.masked_scatter(is_open, height.new_tensor(heights))
    return FactHeights(height[row_of_fact], found.count(None))


def _prove_one(
    kb: KnowledgeBase,
    sizes: KBSizes,
    fact: Atom,
    max_height: int | None,
    max_atoms: int,
    object_identity: bool,
    budget: RowBudget,
) -> int | None:
    """Return the smallest height of a proof of a fact from other facts: -1 without a proof, None if undecided."""
    try:
        budget.spend(sizes.n_facts)
    except RowBudgetExceeded:
        return None
    result = prove_ground(
        kb,
        sizes,
        fact,
        max_height=max_height,
        max_atoms=max_atoms,
        object_identity=object_identity,
        budget=budget,
    )
    if result.verdict == Verdict.UNKNOWN:
        return None
    return -1 if result.height is None else result.height


# -- the verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryResult:
    """Answer to a ground query: verdict, height and proof; a host-side value."""

    # whether the atom is derivable without counting as a fact itself
    verdict: Verdict
    is_fact: bool  # whether the knowledge base states the atom
    height: int | None  # of the proof; None without one
    # a proof of the smallest height, from other facts; None unless the verdict is PROVED
    proof: Proof | None
    # derived without the atom as a fact, up to the step that decided the verdict
    model: LeastModel


def prove_ground(
    kb: KnowledgeBase,
    sizes: KBSizes,
    atom: Atom,
    *,
    max_height: int | None,
    max_atoms: int,
    object_identity: bool = False,
    progress: StepCallback = ignore_progress,
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
      progress: is called before each step of T_P.
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

    verdict = Verdict.UNKNOWN if model.stop_reason else Verdict.REFUTED
    is_proved = height > 0
    return QueryResult(
        verdict=Verdict.PROVED if is_proved else verdict,
        is_fact=is_fact,
        height=height if is_proved else None,
        proof=_build_proof(kb, sizes, model, atom, height)
        if is_proved
        else None,
        model=model,
    )


def _add_if_derived_next(
    model: LeastModel, atom: Atom, rules: list[RuleInstance]
) -> LeastModel:
    """Return the model with the atom added if one of the rules derives it in the next step."""
    row = torch.tensor(
        [atom], dtype=model.atoms.dtype, device=model.atoms.device
    )
    is_present = int(fixpoint.atom_height(model, row)) >= 0
    if is_present or all(unsatisfied_prefix(model, rule) for rule in rules):
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
    """Build and check a proof of an atom of the model that is not a fact."""
    # Facts of other predicates cannot occur in the proof: skip them.
    predicates = kb.facts.new_tensor(sorted(model.predicates))
    facts = kb.facts[torch.isin(kb.facts[:, 0], predicates)]
    rules = rule_tuples(kb.rules)
    program = make_program(atom_tuples(facts), rules, sizes.n_constants)
    derive_goal = partial(find_derivation, kb, sizes, model)
    proof = from_model(program, derive_goal, atom, leave_one_out=False)
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


class FailedRules(NamedTuple):
    """Rules whose head matches an atom that they do not derive, each with the first goals that nothing satisfies."""

    # The first ones whose head matches: the id, and the first goals of the body that nothing satisfies.
    rules: list[tuple[int, tuple[Atom, ...]]]
    n_matching: int  # rules whose head matches the atom


def matching_rules(
    kb: KnowledgeBase,
    sizes: KBSizes,
    atom: Atom,
    *,
    object_identity: bool = False,
) -> list[RuleInstance]:
    """Return the rules whose head unifies with an atom, in file order, each under its most general unifier.

    Args:
      atom: padded to the width of the knowledge base; may hold variables.
      object_identity: leave out a rule whose unifier gives two of its variables one constant, or a variable a constant
        that the rule names.
    """
    instances: list[RuleInstance] = []
    for rule in rules_from_kb(kb):
        instance = _unify_head(rule, atom, sizes.n_constants, object_identity)
        if instance is not None:
            instances.append(instance)
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
    """Return the first rules that match an unproved atom, each with the first body goals that nothing satisfies.

    Args:
      model: without the atom, up to a step before the greatest height.
      atom: padded to the width of the knowledge base.
      n_rules: the most rules to list.
    """
    matching = matching_rules(kb, sizes, atom, object_identity=object_identity)
    rules = [
        (instance[0].id, unsatisfied_prefix(model, instance))
        for instance in matching[:n_rules]
    ]
    return FailedRules(rules, len(matching))


def unsatisfied_prefix(
    model: LeastModel, instance: RuleInstance
) -> tuple[Atom, ...]:
    """Return the shortest prefix of a rule's body that no atoms of a model satisfy; empty if they satisfy it all.

    Args:
      instance: one of those that `matching_rules` returns.

    Returns:
      The first atoms of the body; empty if the model satisfies the whole body.
    """
    rule, inequalities = instance
    n_constants = model.sizes.n_constants
    relations = [
        relation_from_atoms(
            model.atoms[matching_rows(model.atoms, goal, n_constants)]
        )
        for goal in rule.body
    ]
    for length in range(1, len(rule.body) + 1):
        prefix = replace(rule, body=rule.body[:length])
        # Only inequalities between variables that the prefix binds can fail yet.
        bound = {term for goal in prefix.body for term in goal[1:]}
        now = [
            (left, right)
            for left, right in inequalities
            if all(t in bound or t <= n_constants for t in (*left, *right))
        ]
        query = body_query(prefix, relations[:length], n_constants, now, ())
        if not relations[length - 1].size or collect_answers(query) is None:
            return prefix.body
    return ()
