"""Verdicts on ground atoms, with proofs: proved, refuted, or unknown.

`prove_ground` gives the verdict. For an atom that is not proved, `matching_rules` and `unsatisfied_prefix` tell what
each rule lacks. `find_derivation` reads the last step of a derivation back from a least model, `find_ground_body` that
of a given rule. `from_model` builds a proof from a function that derives one goal at a time, along decreasing height;
`from_trace` replays a search's choices. Both work on a `Program`, the facts and rules as plain Python values. Nothing
here recurses, so proofs may be thousands of nodes deep.

`fact_heights` finds the heights of facts that are proved from other facts: a fact does not count in its own proof. At
height 1 the rules that derive the facts are found by their questions. A fact that they do not derive is removed and T_P
evaluated without it, one fact after the other; a bound on rows ends this work.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from funcppo.core.types import I32, I64, Bool
from funcppo.kg.logic import fixpoint, joins
from funcppo.kg.logic.derive import (
    FiringPlan,
    Questions,
    iter_firing_chunks,
    plan_firings,
)
from funcppo.kg.logic.fixpoint import (
    FactTable,
    LeastModel,
    StepCallback,
    Verdict,
)
from funcppo.kg.logic.joins import (
    Inequality,
    Relation,
    RowBudget,
    RowBudgetExceeded,
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
from funcppo.kg.logic.kb import (
    KBSizes,
    KnowledgeBase,
    contains,
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
from funcppo.kg.logic.triple_index import HEAD, TAIL, is_binary

Clause = tuple[Atom, ...]  # head first; a fact is a clause without a body


class Choice(NamedTuple):
    """One choice of a prover: the clause that resolves the leftmost goal."""

    kind: Literal["rule", "fact"]
    id: int  # of the rule or the fact
    # of the choice under the policy; None if no policy made it
    probability: float | None


class DeriveGoal(Protocol):
    """Function that finds the last step of a derivation."""

    def __call__(self, goal: Atom, /) -> tuple[int, Iterable[Iterable[int]]]:
        """The id of a rule and a ground body that derive a goal which is no fact, from atoms of smaller height."""
        ...


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
    """The program of nested lists, such as `kb.facts.tolist()` and `kb.rules.tolist()`."""
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


# -- from a model


def from_model(
    program: Program,
    derive: DeriveGoal,
    root: Atom,
    *,
    leave_one_out: bool,
) -> Proof:
    """Build the proof that a model holds of an atom; each distinct subgoal is proved once.

    Args:
      derive: finds the last step of a derivation of a goal.
      root: the atom to prove.
      leave_one_out: derive the root even if it is a fact.

    Returns:
      The proof; its nodes are in breadth-first order of their goals, without probabilities.
    """
    goals = [root]
    positions = {root: 0}
    nodes: list[Node] = []
    for goal in goals:  # grows while it is traversed
        must_derive = leave_one_out and goal == root
        if goal in program.fact_set and not must_derive:
            nodes.append(
                Node(
                    goal=goal,
                    rule=None,
                    substitution=(),
                    probability=None,
                    children=(),
                )
            )
            continue

        rule, ground_body = derive(goal)
        body: list[Atom] = []
        for atom in ground_body:
            body.append(tuple(int(term) for term in atom))
        for atom in body:
            if atom not in positions:
                positions[atom] = len(goals)
                goals.append(atom)
        nodes.append(
            Node(
                goal=goal,
                rule=int(rule),
                substitution=_match_clause(
                    program.rules[rule],
                    [goal, *body],
                    program.n_constants,
                ),
                probability=None,
                children=tuple(positions[atom] for atom in body),
            )
        )
    return Proof(nodes=tuple(nodes))


def _match_clause(
    clause: Clause, instance: Sequence[Atom], n_constants: int
) -> tuple[tuple[int, int], ...]:
    """The constants of a clause's variables in a ground instance, in order of the variables."""
    binding: dict[int, int] = {}
    for pattern, atom in zip(clause, instance):
        for term, constant in zip(pattern[1:], atom[1:]):
            if term > n_constants:
                binding[term] = constant
    return tuple(sorted(binding.items()))


# -- from a trace


def from_trace(
    program: Program, root: Atom, choices: Iterable[Choice]
) -> Proof:
    """Build the proof that leftmost resolution reaches by some choices; the root never counts as a fact.

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
    n_constants = program.n_constants
    drafts = [_DraftNode(goal=root)]
    open_goals = [0]  # positions of drafts, leftmost goal first
    binding: dict[int, int] = {}
    fresh_variables = itertools.count(max(n_constants, *root) + 1)
    for step, (kind, index, probability) in enumerate(choices):
        if not open_goals:
            raise ValueError(
                f"choice {step}: no goal is left for {kind} {index}"
            )
        draft = drafts[open_goals[0]]
        clause = _find_clause(program, kind, index, step)
        renamed = _standardize_apart(clause, n_constants, fresh_variables)
        head, *body = renamed.clause
        if (kind == "fact" and head == root) or not _unify(
            head, draft.goal, binding, n_constants
        ):
            goal = list(_substitute(draft.goal, binding))
            raise ValueError(
                f"choice {step}: {kind} {index} does not resolve {goal}"
            )

        # Complete the node of the goal, and add one for each atom of the body.
        draft.rule = index if kind == "rule" else None
        draft.renaming = renamed.renaming
        draft.probability = probability
        draft.children = tuple(range(len(drafts), len(drafts) + len(body)))
        drafts += [_DraftNode(goal=atom) for atom in body]

        # The body takes the goal's place; facts are leaves at once.
        candidates = [*draft.children, *open_goals[1:]]
        open_goals = [
            i
            for i in candidates
            if not _is_leaf(program, drafts[i], binding, root)
        ]

    if open_goals:
        raise ValueError(f"the choices leave {len(open_goals)} goals unproved")
    return Proof(
        nodes=tuple(
            _finish_node(draft, binding, n_constants) for draft in drafts
        )
    )


@dataclass(kw_only=True, slots=True)
class _DraftNode:
    """A node of a trace that is being replayed: its goal may hold variables that later choices bind."""

    goal: Atom
    rule: int | None = None
    # variable of the rule -> variable of the trace
    renaming: dict[int, int] = field(default_factory=dict[int, int])
    probability: float | None = None
    children: tuple[int, ...] = ()


def _find_clause(program: Program, kind: str, index: int, step: int) -> Clause:
    """The rule or fact of a choice, as a clause."""
    if kind == "rule" and 0 <= index < len(program.rules):
        return program.rules[index]
    if kind == "fact" and 0 <= index < len(program.facts):
        return (program.facts[index],)
    raise ValueError(f"choice {step}: there is no {kind} {index}")


def _is_leaf(
    program: Program, draft: _DraftNode, binding: dict[int, int], root: Atom
) -> bool:
    """Whether the goal of a draft is a fact other than the root."""
    goal = _substitute(draft.goal, binding)
    return goal != root and goal in program.fact_set


class _RenamedClause(NamedTuple):
    """A clause that shares no variable with the rest of a trace."""

    clause: Clause
    # variable of the original clause -> variable of the trace
    renaming: dict[int, int]


def _standardize_apart(
    clause: Clause, n_constants: int, fresh_variables: Iterator[int]
) -> _RenamedClause:
    """Rename the variables of a clause to fresh ones."""
    variables: set[int] = set()
    for atom in clause:
        variables.update(term for term in atom[1:] if term > n_constants)
    renaming = {
        variable: next(fresh_variables) for variable in sorted(variables)
    }

    atoms: list[Atom] = []
    for predicate, *terms in clause:
        renamed_terms = [renaming.get(term, term) for term in terms]
        atoms.append((predicate, *renamed_terms))
    return _RenamedClause(tuple(atoms), renaming)


def _unify(
    left: Atom, right: Atom, binding: dict[int, int], n_constants: int
) -> bool:
    """Whether two atoms unify under a binding, which is extended in place to their most general unifier."""
    if left[0] != right[0]:
        return False
    for left_term, right_term in zip(left[1:], right[1:]):
        a = _dereference(left_term, binding)
        b = _dereference(right_term, binding)
        if a == b:
            continue
        if a > n_constants:
            binding[a] = b
        elif b > n_constants:
            binding[b] = a
        else:
            return False
    return True


def _dereference(term: int, binding: dict[int, int]) -> int:
    """What a term stands for: the end of its chain of bindings."""
    while term in binding:
        term = binding[term]
    return term


def _substitute(atom: Atom, binding: dict[int, int]) -> Atom:
    """The atom with what its terms stand for."""
    predicate, *terms = atom
    return (predicate, *(_dereference(term, binding) for term in terms))


def _finish_node(
    draft: _DraftNode, binding: dict[int, int], n_constants: int
) -> Node:
    """The node of a draft, once all choices are made."""
    goal = _substitute(draft.goal, binding)
    if max(goal[1:], default=0) > n_constants:
        raise ValueError(
            f"the choices leave a variable of {list(goal)} unbound"
        )
    substitution: list[tuple[int, int]] = []
    for variable, renamed in draft.renaming.items():
        substitution.append((variable, _dereference(renamed, binding)))
    return Node(
        goal=goal,
        rule=draft.rule,
        substitution=tuple(sorted(substitution)),
        probability=draft.probability,
        children=draft.children,
    )


# -- derivations


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


# -- fact proofs

# rows of joins to decide which of some facts other facts prove
MAX_FACT_ROWS = 100_000_000


class FactHeights(NamedTuple):
    """The smallest heights of proofs of some facts from other facts."""

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
    """Find the smallest height at which other facts prove each fact.

    Args:
      facts: of the knowledge base, in any order; repetitions allowed.
      max_height: the greatest height of a proof; None for any.
      max_atoms: the most atoms of a model; see `fixpoint.least_model`.
      budget: bounds the rows that all joins make; a fact that is removed counts as a row for each of the others.
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      memory_share: of the largest chunks of questions whose firings may be held at once.
    """
    facts, row_of_fact = unique_rows_with_inverse(facts)
    height = torch.full_like(facts[:, 0], -1, dtype=torch.int64)
    if max_height == 0:
        return FactHeights(height[row_of_fact], 0)
    is_asked = is_binary(facts)
    asked = is_asked.nonzero().squeeze(1)
    if len(asked):
        plan = plan_firings(kb, sizes, memory_share)
        try:
            is_derived = _derived_by_rules(
                plan, facts[asked].long(), object_identity, budget
            )
        except RowBudgetExceeded:
            return FactHeights(height[row_of_fact], len(facts))
        height = height.index_fill(0, asked[is_derived], 1)

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
    """The height of a smallest proof of a fact from other facts, -1 if there is none; None if it is not decided."""
    try:
        budget.spend(sizes.n_facts)
    except RowBudgetExceeded:
        return None
    found = prove_ground(
        kb,
        sizes,
        fact,
        max_height=max_height,
        max_atoms=max_atoms,
        object_identity=object_identity,
        budget=budget,
    )
    if found.verdict == Verdict.UNKNOWN:
        return None
    return -1 if found.height is None else found.height


def _derived_by_rules(
    plan: FiringPlan,
    facts: I64[Tensor, "n W"],
    object_identity: bool,
    budget: RowBudget,
) -> Bool[Tensor, "n"]:
    """Whether one application of a rule derives each fact of two arguments from other facts.

    Raises:
      RowBudgetExceeded: the joins make more rows than the budget allows.
    """
    # A fact is the answer that its question leaves out.
    questions = Questions(
        predicate=facts[:, 0],
        side=torch.full_like(facts[:, 0], TAIL),
        entity=facts[:, HEAD],
        left_out=facts[:, TAIL],
    )
    is_derived = [torch.zeros_like(facts[:0, 0], dtype=torch.bool)]
    for chunk, firings in iter_firing_chunks(
        plan, questions, object_identity=object_identity, budget=budget
    ):
        is_answer = firings.candidate == chunk.left_out[firings.question]
        row = torch.arange(len(chunk.entity), device=facts.device)
        is_derived.append(torch.isin(row, firings.question[is_answer]))
    return torch.cat(is_derived)


# -- query answering


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
    program = make_program(
        atom_tuples(kb.facts[is_used]), rules, sizes.n_constants
    )

    proof = from_model(program, derive, atom, leave_one_out=False)
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
