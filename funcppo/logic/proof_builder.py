"""Proofs rebuilt: from the model that T_P derives, and from the choices that a prover made.

Plain Python over `Program`, the facts and rules as tuples; nothing here recurses, so proofs may be thousands deep.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from funcppo.logic.proof import Atom, Node, Proof

Choice = tuple[str, int, float | None]  # "rule" or "fact", its id, the probability of choosing it


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Facts and rules as plain Python values."""

    facts: tuple[Atom, ...]
    fact_set: frozenset[Atom]  # the facts as a set
    rules: tuple[tuple[Atom, ...], ...]  # head first, no empty atoms
    n_constants: int  # ids above are variables


def make_program(facts: Sequence[Any], rules: Sequence[Any], n_constants: int) -> Program:
    """The program of nested lists, such as `kb.facts.tolist()` and `kb.rules.tolist()`."""
    atoms = tuple(tuple(fact) for fact in facts)
    clauses = tuple(tuple(tuple(atom) for atom in rule if atom[0]) for rule in rules)
    return Program(facts=atoms, fact_set=frozenset(atoms), rules=clauses, n_constants=n_constants)


# -- building


def from_model(
    program: Program, derive: Callable[[Atom], tuple[int, Iterable[Iterable[int]]]], root: Atom, *, leave_one_out: bool
) -> Proof:
    """The proof that a model holds of an atom, each distinct subgoal proved once.

    Args:
      derive: id of a rule and the ground body that derive an atom which is no fact, from atoms of smaller height.
      leave_one_out: the root, though a fact, is derived too and is no leaf.
    """
    position, order, nodes = {root: 0}, [root], []
    for goal in order:
        if goal in program.fact_set and not (leave_one_out and goal == root):
            nodes.append(Node(goal=goal, rule=None, substitution=(), probability=None, children=()))
            continue
        rule, body = derive(goal)
        body = [tuple(int(t) for t in atom) for atom in body]
        for atom in body:
            if position.setdefault(atom, len(order)) == len(order):
                order.append(atom)
        pairs = (
            pair for pattern, atom in zip(program.rules[rule], [goal, *body]) for pair in zip(pattern[1:], atom[1:])
        )
        binding = {variable: constant for variable, constant in pairs if variable > program.n_constants}
        nodes.append(
            Node(
                goal=goal,
                rule=int(rule),
                substitution=tuple(sorted(binding.items())),
                probability=None,
                children=tuple(position[atom] for atom in body),
            )
        )
    return Proof(nodes=tuple(nodes))


def from_trace(program: Program, root: Atom, choices: Iterable[Choice]) -> Proof:
    """The proof that leftmost resolution reaches by these choices, the root itself never being a fact.

    Each choice resolves the leftmost goal by a rule or a fact; then every goal that is a known fact is a leaf. What
    later choices bind is bound in earlier nodes too.

    Args:
      choices: in the order in which the prover made them, one for each rule applied and each fact chosen.
    Errors: ValueError naming the choice that does not apply, or saying that no proof is reached.
    """
    drafts, open_goals, binding = [_Draft(goal=root)], [0], {}
    fresh = itertools.count(max(program.n_constants, *root) + 1)
    for step, (kind, index, probability) in enumerate(choices):
        if not open_goals:
            raise ValueError(f"choice {step}: no goal is left for {kind} {index}")
        draft = drafts[open_goals[0]]
        names, (head, *body) = _apart(_clause(program, kind, index, step), program.n_constants, fresh)
        if (kind == "fact" and head == root) or not _unify(head, draft.goal, binding, program.n_constants):
            raise ValueError(f"choice {step}: {kind} {index} does not resolve {list(_bound(draft.goal, binding))}")
        draft.rule, draft.names = (index if kind == "rule" else None), names
        draft.probability, draft.children = probability, tuple(range(len(drafts), len(drafts) + len(body)))
        drafts += [_Draft(goal=atom) for atom in body]
        goals = [(i, _bound(drafts[i].goal, binding)) for i in (*draft.children, *open_goals[1:])]
        open_goals = [i for i, goal in goals if goal == root or goal not in program.fact_set]
    if open_goals:
        raise ValueError(f"the choices leave {len(open_goals)} goals unproved")
    return Proof(nodes=tuple(_finished(draft, binding, program.n_constants) for draft in drafts))


@dataclass(kw_only=True, slots=True)
class _Draft:
    """A node while a trace is replayed: its goal may hold variables that later choices bind."""

    goal: Atom
    rule: int | None = None
    names: dict[int, int] = field(default_factory=dict)  # variable of the rule -> variable of this trace
    probability: float | None = None
    children: tuple[int, ...] = ()


def _clause(program: Program, kind: str, index: int, step: int) -> tuple[Atom, ...]:
    table = {"rule": program.rules, "fact": program.facts}.get(kind, ())
    if not 0 <= index < len(table):
        raise ValueError(f"choice {step}: there is no {kind} {index}")
    return program.rules[index] if kind == "rule" else (program.facts[index],)


def _apart(clause: tuple[Atom, ...], n_constants: int, fresh: Iterator[int]) -> tuple[dict[int, int], tuple[Atom, ...]]:
    """The clause with variables that nothing else in the trace has, and the new name of each."""
    names = {t: next(fresh) for t in sorted({t for atom in clause for t in atom[1:] if t > n_constants})}
    return names, tuple((atom[0], *(names.get(t, t) for t in atom[1:])) for atom in clause)


def _unify(left: Atom, right: Atom, binding: dict[int, int], n_constants: int) -> bool:
    """Whether two atoms unify under the binding, which is extended to their most general unifier."""
    if left[0] != right[0]:
        return False
    for s, t in zip(left[1:], right[1:]):
        s, t = _walk(s, binding), _walk(t, binding)
        if s > n_constants and s != t:
            binding[s] = t
        elif t > n_constants and s != t:
            binding[t] = s
        elif s != t:
            return False
    return True


def _walk(term: int, binding: dict[int, int]) -> int:
    while term in binding:
        term = binding[term]
    return term


def _bound(atom: Atom, binding: dict[int, int]) -> Atom:
    return (atom[0], *(_walk(t, binding) for t in atom[1:]))


def _finished(draft: _Draft, binding: dict[int, int], n_constants: int) -> Node:
    goal = _bound(draft.goal, binding)
    if max(goal[1:], default=0) > n_constants:
        raise ValueError(f"the choices leave a variable of {list(goal)} unbound")
    return Node(
        goal=goal,
        rule=draft.rule,
        substitution=tuple(sorted((variable, _walk(name, binding)) for variable, name in draft.names.items())),
        probability=draft.probability,
        children=draft.children,
    )
