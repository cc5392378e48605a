"""A slow recount of supports, candidates, scores and ranks, over Python sets and dictionaries.

It is written to be read, and it shares no code with `kg.logic` or the ranking: no tensors, no joins, no index but
a dictionary. An atom is a tuple (predicate, constant...) without padding. A rule is a tuple of atoms, the head first; a
term above `n_constants` is a variable. `funcppo check` compares what it finds with what the rest of the package says.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

Atom = tuple[int, ...]
Rule = tuple[Atom, ...]
Binding = dict[int, int]  # of variables to constants

GRID_STEP = 1e-4  # log-odds; scores are compared after rounding to multiples


class RecountLimitError(Exception):
    """Raised where the recount reaches its deadline or more atoms than it may hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Logic:
    """Rules, and whether substitutions must keep object identity."""

    rules: tuple[Rule, ...]
    n_constants: int
    # different variables of a rule bind different constants, none of which the rule names
    object_identity: bool


class Atoms:
    """Set of ground atoms with an index by predicate and by constant at each argument position."""

    def __init__(self, atoms: Iterable[Atom], n_constants: int) -> None:
        self.all = frozenset(atoms)
        self._n_constants = n_constants
        self._lists: dict[tuple[int, ...], list[Atom]] = {}
        for atom in sorted(self.all):
            self._lists.setdefault((atom[0],), []).append(atom)
            for place, constant in enumerate(atom[1:]):
                key = (atom[0], place, constant)
                self._lists.setdefault(key, []).append(atom)

    def shortest_list(self, goal: Atom) -> Sequence[Atom]:
        """Return the shortest indexed list that holds every atom matching a goal, whose variables match anything."""
        lists: list[Sequence[Atom]] = [self._lists.get((goal[0],), ())]
        for place, term in enumerate(goal[1:]):
            if term <= self._n_constants:
                lists.append(self._lists.get((goal[0], place, term), ()))
        return min(lists, key=len)


# -- rules


def read_atoms(rows: Iterable[Iterable[int]]) -> list[Atom]:
    """Return the atoms of a table padded with 0 as tuples without padding; rows of padding are left out."""
    atoms = [tuple(term for term in row if term) for row in rows]
    return [atom for atom in atoms if atom]


def substitute(atom: Atom, binding: Mapping[int, int]) -> Atom:
    """Return the atom with its bound variables replaced by their constants."""
    return (atom[0], *(binding.get(term, term) for term in atom[1:]))


def match(pattern: Atom, atom: Atom, n_constants: int) -> Binding | None:
    """Return the binding under which a pattern equals a ground atom; None if no binding does."""
    if pattern[0] != atom[0] or len(pattern) != len(atom):
        return None
    binding: Binding = {}
    for term, constant in zip(pattern[1:], atom[1:]):
        expected = binding.get(term, constant) if term > n_constants else term
        if expected != constant:
            return None
        if term > n_constants:
            binding |= {term: constant}
    return binding


def substitutions(
    logic: Logic,
    rule: Rule,
    atoms: Atoms,
    deadline: float,
    *,
    binding: Binding | None = None,
    left_out: AbstractSet[Atom] = frozenset(),
    is_done: Callable[[Binding], bool] = lambda _: False,
) -> Iterator[Binding]:
    """Yield the substitutions of a rule that make every body atom a member of `atoms`, by backtracking.

    Args:
      deadline: in seconds of `time.monotonic`.
      binding: what some variables must be; None for any.
      left_out: atoms that do not count.
      is_done: whether substitutions that extend a partial one are not wanted.

    Raises:
      RecountLimitError: the deadline is reached.
    """

    def extend(goals: Sequence[Atom], binding: Binding) -> Iterator[Binding]:
        if time.monotonic() > deadline:
            raise RecountLimitError
        if is_done(binding):
            return
        if not goals:
            # Object identity: all constants differ, and the rule names none of them.
            bound = {*binding.values()}
            is_apart = len(bound) == len(binding) and not bound & named
            if is_apart or not logic.object_identity:
                yield binding
            return

        # The goal with the fewest possible matches comes first.
        instances = [substitute(goal, binding) for goal in goals]
        lists = [atoms.shortest_list(goal) for goal in instances]
        first = min(range(len(goals)), key=lambda i: len(lists[i]))
        others = [goal for i, goal in enumerate(goals) if i != first]
        for atom in lists[first]:
            found = match(instances[first], atom, logic.n_constants)
            if found is not None and atom not in left_out:
                yield from extend(others, binding | found)

    terms = {term for atom in rule for term in atom[1:]}
    named = {term for term in terms if term <= logic.n_constants}
    yield from extend(rule[1:], binding or {})


def derive(
    logic: Logic,
    rule: Rule,
    atoms: Atoms,
    deadline: float,
    *,
    leave_one_out: bool,
    binding: Binding | None = None,
) -> set[Atom]:
    """Return the heads of all instances of a rule whose body atoms are all members of `atoms`.

    Args:
      leave_one_out: a body that contains the head does not count.
      binding: what variables of the head must be; None for any.

    Raises:
      RecountLimitError: the deadline is reached.
    """
    heads: set[Atom] = set()
    for found in substitutions(
        logic,
        rule,
        atoms,
        deadline,
        binding=binding,
        # other bodies add nothing
        is_done=lambda partial: substitute(rule[0], partial) in heads,
    ):
        head, *body = (substitute(atom, found) for atom in rule)
        if not (leave_one_out and head in body):
            heads.add(head)
    return heads


def apply_steps(
    logic: Logic, facts: Atoms, n_steps: int, max_atoms: int, deadline: float
) -> Atoms:
    """Return the facts together with all that `n_steps` of T_P derive from them.

    Raises:
      RecountLimitError: the deadline is reached, or there are more than `max_atoms` atoms.
    """
    atoms = facts
    for _ in range(n_steps):
        derived = set(atoms.all)
        for rule in logic.rules:
            derived |= derive(logic, rule, atoms, deadline, leave_one_out=False)
            if len(derived) > max_atoms:
                raise RecountLimitError
        atoms = Atoms(derived, logic.n_constants)
    return atoms


def is_proved(
    logic: Logic,
    facts: Atoms,
    fact: Atom,
    max_height: int,
    max_atoms: int,
    deadline: float,
) -> bool:
    """Return whether T_P derives a fact in `max_height` steps from the facts without it.

    Raises:
      RecountLimitError: the deadline is reached, or there are more than `max_atoms` atoms.
    """
    others = Atoms(facts.all - {fact}, logic.n_constants)
    atoms = apply_steps(logic, others, max_height - 1, max_atoms, deadline)
    return any(
        derive(logic, rule, atoms, deadline, leave_one_out=False, binding=found)
        for rule in logic.rules
        if (found := match(rule[0], fact, logic.n_constants)) is not None
    )


# -- ranks


def find_derivers(
    logic: Logic, atoms: Atoms, query: Atom, side: int, deadline: float
) -> dict[int, list[int]]:
    """Return, for each entity that some rule derives as the query's argument `side`, the rules that derive it.

    A body that contains the derived atom itself does not count.

    Args:
      atoms: what bodies are made of.
      query: ground, of two arguments.
      side: 1 to replace the first argument, 2 the second.

    Raises:
      RecountLimitError: the deadline is reached.
    """
    derivers: dict[int, list[int]] = {}
    for i, rule in enumerate(logic.rules):
        binding = _bind_head(logic, rule[0], query, side)
        if binding is None:
            continue
        heads = derive(
            logic, rule, atoms, deadline, leave_one_out=True, binding=binding
        )
        for atom in sorted(heads):
            derivers.setdefault(atom[side], []).append(i)
    return derivers


def count_groundings(
    logic: Logic,
    rule: Rule,
    facts: Atoms,
    query: Atom,
    side: int,
    left_out: AbstractSet[Atom],
    deadline: float,
) -> Counter[int]:
    """Count, for each entity, the substitutions under which the rule derives the query with it as argument `side`.

    Args:
      side: 1 to replace the first argument, 2 the second.
      left_out: facts that do not count.

    Raises:
      RecountLimitError: the deadline is reached.
    """
    binding = _bind_head(logic, rule[0], query, side)
    if binding is None:
        return Counter()
    return Counter(
        substitute(rule[0], found)[side]
        for found in substitutions(
            logic, rule, facts, deadline, binding=binding, left_out=left_out
        )
    )


def _bind_head(
    logic: Logic, head: Atom, query: Atom, side: int
) -> Binding | None:
    """Bind a rule's head to the query with argument `side` left open; None if they do not match."""
    if len(head) != len(query):
        return None
    kept = 3 - side
    return match(
        (head[0], head[kept]), (query[0], query[kept]), logic.n_constants
    )


def list_candidates(
    query: Atom, side: int, pool: Iterable[int], known: AbstractSet[Atom]
) -> list[Atom]:
    """List the query with each entity of the pool as argument `side`, except for known triples other than the query."""
    candidates: list[Atom] = []
    for entity in pool:
        atom = (*query[:side], entity, *query[side + 1 :])
        if atom == query or atom not in known:
            candidates.append(atom)
    return candidates


def bound_ranks(
    answer: Atom, log_odds: Mapping[Atom, float], tolerance: float
) -> tuple[range, range]:
    """Bound the numbers of candidates better than, and no worse than, the answer if scores err by up to `tolerance`.

    The answer is not counted.

    Args:
      log_odds: of the score of each candidate, the answer among them.
    """
    low = {a: grid_line(x - tolerance) for a, x in log_odds.items()}
    high = {a: grid_line(x + tolerance) for a, x in log_odds.items()}
    others = [atom for atom in log_odds if atom != answer]
    surely_better = sum(low[atom] > high[answer] for atom in others)
    perhaps_better = sum(high[atom] > low[answer] for atom in others)
    surely_not_worse = sum(low[atom] >= high[answer] for atom in others)
    perhaps_not_worse = sum(high[atom] >= low[answer] for atom in others)
    return (
        range(surely_better, perhaps_better + 1),
        range(surely_not_worse, perhaps_not_worse + 1),
    )


def expected_reciprocal_rank(n_better: int, n_equal: int) -> float:
    """Compute the mean of 1 / rank over all orders of the candidates that tie with the answer."""
    ranks = range(n_better + 1, n_better + n_equal + 2)
    return math.fsum(1 / rank for rank in ranks) / len(ranks)


def grid_line(log_odds: float) -> float:
    """Return the number of the grid line that a score is rounded to; an infinite score is returned as it is."""
    return round(log_odds / GRID_STEP) if math.isfinite(log_odds) else log_odds
