"""Building proofs: from a least model, and from the choices that a prover made.

`from_model` builds a proof from a function that derives one goal at a time; `from_trace` replays a search's choices.
Both work on a `Program`, the facts and rules as plain Python values. Nothing here recurses, so proofs may be thousands
of nodes deep.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from funcppo.kg.logic.proof import Atom, Node, Proof

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
