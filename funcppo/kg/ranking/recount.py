"""A slow recount of supports, candidates, scores, ranks and proofs, over Python sets and dictionaries.

It is written to be read, and it shares no code with `kg.logic` or the ranking: no tensors, no joins, no index but
a dictionary. An atom is a tuple (predicate, constant...) without padding. A rule is a tuple of atoms, the head first; a
term above `n_constants` is a variable. `funcppo check` compares what it finds with what the rest of the package says.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from funcppo.kg.logic.proof import Proof

Atom = tuple[int, ...]
Rule = tuple[Atom, ...]
Binding = dict[int, int]  # of variables to constants

GRID_STEP = 1e-4  # log-odds; scores are compared after rounding to multiples
# above, exp(-x) leaves the range of a float
_LARGE_EXPONENT = 500.0


class RecountLimitError(Exception):
    """The recount reached its deadline, or more atoms than it may hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Logic:
    """Rules and what a substitution of their variables must keep."""

    rules: tuple[Rule, ...]
    n_constants: int
    # different variables of a rule bind different constants, none of which the rule names
    object_identity: bool


class _Step(NamedTuple):
    """An atom of a body that is a path."""

    atom: Atom
    start: int  # the variable that it leads from
    end: int  # the variable that it leads to


class RankCounts(NamedTuple):
    """What the rank of an answer follows from."""

    n_better: int
    n_equal: int  # the answer excluded
    n_candidates: int  # the answer included


class RankBounds(NamedTuple):
    """The counts that rounding errors allow."""

    n_better: range
    n_not_worse: range  # better and equal candidates together


class Atoms:
    """Ground atoms, and a list of them for each predicate and for each argument of a predicate."""

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
        """The shortest list that holds every atom that matches a goal; variables in the goal match anything."""
        lists: list[Sequence[Atom]] = [self._lists.get((goal[0],), ())]
        for place, term in enumerate(goal[1:]):
            if term <= self._n_constants:
                lists.append(self._lists.get((goal[0], place, term), ()))
        return min(lists, key=len)


# -- rules


def read_atoms(rows: Iterable[Iterable[int]]) -> list[Atom]:
    """The atoms of a table that is padded with 0; rows of padding are left out."""
    atoms = [tuple(term for term in row if term) for row in rows]
    return [atom for atom in atoms if atom]


def substitute(atom: Atom, binding: Mapping[int, int]) -> Atom:
    """The atom with its bound variables replaced."""
    return (atom[0], *(binding.get(term, term) for term in atom[1:]))


def match(pattern: Atom, atom: Atom, n_constants: int) -> Binding | None:
    """What the variables of a pattern must be for it to equal a ground atom; None if it cannot."""
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


def keeps_identity(rule: Rule, binding: Binding, n_constants: int) -> bool:
    """Whether all variables bind different constants, none of which the rule names."""
    named = {term for atom in rule for term in atom[1:] if term <= n_constants}
    bound = set(binding.values())
    return len(bound) == len(binding) and not bound & named


def derive(
    logic: Logic,
    rule: Rule,
    atoms: Atoms,
    deadline: float,
    *,
    leave_one_out: bool,
    binding: Binding | None = None,
) -> set[Atom]:
    """The heads of the instances of a rule whose bodies are among the atoms, by backtracking.

    Args:
      deadline: in seconds of `time.monotonic`.
      leave_one_out: a body that contains the head does not count.
      binding: what variables of the head must be; None for any.

    Raises:
      OutOfTime: the deadline is reached.
    """
    heads: set[Atom] = set()

    def extend(goals: Sequence[Atom], binding: Binding) -> None:
        if time.monotonic() > deadline:
            raise RecountLimitError
        head = substitute(rule[0], binding)
        if head in heads:
            return  # other bodies add nothing
        if not goals:
            body = [substitute(atom, binding) for atom in rule[1:]]
            is_circular = leave_one_out and head in body
            is_allowed = not logic.object_identity or keeps_identity(
                rule, binding, logic.n_constants
            )
            if is_allowed and not is_circular:
                heads.add(head)
            return

        # The goal with the fewest possible matches comes first.
        instances = [substitute(goal, binding) for goal in goals]
        lists = [atoms.shortest_list(goal) for goal in instances]
        first = min(range(len(goals)), key=lambda i: len(lists[i]))
        others = [goal for i, goal in enumerate(goals) if i != first]
        for atom in lists[first]:
            found = match(instances[first], atom, logic.n_constants)
            if found is not None:
                extend(others, binding | found)

    extend(rule[1:], binding or {})
    return heads


def count_rule(
    logic: Logic,
    rule: Rule,
    facts: Atoms,
    deadline: float,
    *,
    leave_one_out: bool,
) -> tuple[int, int]:
    """The distinct heads of a rule that are facts, and all its distinct heads.

    Raises:
      OutOfTime: the deadline is reached.
    """
    heads = derive(logic, rule, facts, deadline, leave_one_out=leave_one_out)
    return len(heads & facts.all), len(heads)


def apply_steps(
    logic: Logic, facts: Atoms, n_steps: int, max_atoms: int, deadline: float
) -> Atoms:
    """What `n_steps` of T_P derive from the facts, these included.

    Raises:
      OutOfTime: the deadline is reached, or there are more than `max_atoms` atoms.
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
    """Whether T_P derives a fact in `max_height` steps from the other facts.

    Raises:
      OutOfTime: the deadline is reached, or there are more than `max_atoms` atoms.
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
    """The entities that the rules derive in place of an argument of a query, each with the rules that do.

    A body that contains the derived atom itself does not count.

    Args:
      atoms: what bodies are made of.
      query: ground, of two arguments.
      side: 1 to replace the first argument, 2 the second.

    Raises:
      OutOfTime: the deadline is reached.
    """
    derivers: dict[int, list[int]] = {}
    kept = 3 - side
    for i, rule in enumerate(logic.rules):
        head = rule[0]
        if head[0] != query[0] or len(head) != len(query):
            continue
        binding = match(
            (head[0], head[kept]), (query[0], query[kept]), logic.n_constants
        )
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
) -> dict[int, int]:
    """How many substitutions of a rule derive each entity in place of an argument of a query from facts.

    Args:
      side: 1 to replace the first argument, 2 the second.
      left_out: facts that do not count.

    Raises:
      OutOfTime: the deadline is reached.
    """
    head = rule[0]
    kept = 3 - side
    if head[0] != query[0] or len(head) != len(query):
        return {}
    start = match(
        (head[0], head[kept]), (query[0], query[kept]), logic.n_constants
    )
    if start is None:
        return {}
    counts: dict[int, int] = {}

    def extend(goals: Sequence[Atom], binding: Binding) -> None:
        if time.monotonic() > deadline:
            raise RecountLimitError
        if not goals:
            if not logic.object_identity or keeps_identity(
                rule, binding, logic.n_constants
            ):
                entity = substitute(head, binding)[side]
                counts[entity] = counts.get(entity, 0) + 1
            return
        goal = substitute(goals[0], binding)
        for atom in facts.shortest_list(goal):
            found = match(goal, atom, logic.n_constants)
            if found is not None and atom not in left_out:
                extend(goals[1:], binding | found)

    extend(rule[1:], start)
    return counts


def walk_probabilities(
    logic: Logic,
    rule: Rule,
    facts: Atoms,
    query: Atom,
    side: int,
    left_out: AbstractSet[Atom],
    deadline: float,
) -> dict[int, Fraction] | None:
    """The probability that a random walk along a rule's body ends in each entity; None if the body is no path.

    The walk starts at the argument of the query that is not replaced. At each atom it takes one of the matching facts
    that are not left out, all with the same probability. It ends early where there is none and, under object identity,
    where it comes back to an entity.

    Arguments are those of `count_groundings`.

    Raises:
      OutOfTime: the deadline is reached.
    """
    kept = 3 - side
    path = _order_path(rule, kept, logic.n_constants)
    if path is None or rule[0][0] != query[0]:
        return None
    chances: dict[int, Fraction] = {}

    def walk_on(
        steps: Sequence[_Step], way: list[int], chance: Fraction
    ) -> None:
        if time.monotonic() > deadline:
            raise RecountLimitError
        if not steps:
            chances[way[-1]] = chances.get(way[-1], Fraction(0)) + chance
            return
        goal = substitute(steps[0].atom, {steps[0].start: way[-1]})
        ends: list[int] = []
        for atom in facts.shortest_list(goal):
            found = match(goal, atom, logic.n_constants)
            if found is not None and atom not in left_out:
                ends.append(found[steps[0].end])
        for end in ends:
            if not (logic.object_identity and end in way):
                walk_on(steps[1:], [*way, end], chance / len(ends))

    walk_on(path, [query[kept]], Fraction(1))
    return chances


def _order_path(rule: Rule, kept: int, n_constants: int) -> list[_Step] | None:
    """The atoms of a body in the order in which they lead from one argument of the head to the other.

    Args:
      kept: the argument to start from.

    Returns:
      None if they do not: each variable but these two stands in two atoms, and there is no constant.
    """
    head, *others = rule
    if len(head) != 3 or any(len(atom) != 3 for atom in others):
        return None
    here = head[kept]
    visited = {here}
    path: list[_Step] = []
    while others:
        leaving = [atom for atom in others if here in atom[1:]]
        if len(leaving) != 1:
            return None
        (atom,) = leaving
        others.remove(atom)
        end = atom[2] if atom[1] == here else atom[1]
        if end in visited:
            return None
        path.append(_Step(atom, here, end))
        visited.add(end)
        here = end
    is_path = here == head[3 - kept] and min(visited) > n_constants
    return path if path and is_path else None


def list_candidates(
    query: Atom, side: int, pool: Iterable[int], known: AbstractSet[Atom]
) -> list[Atom]:
    """The query with each entity of the pool in place of an argument, unless that is another known triple."""
    candidates: list[Atom] = []
    for entity in pool:
        atom = (*query[:side], entity, *query[side + 1 :])
        if atom == query or atom not in known:
            candidates.append(atom)
    return candidates


def rule_score(name: str, confidences: Sequence[float]) -> float:
    """The log-odds of a score of the rules that derive an atom; -inf without a rule.

    Args:
      name: `max-confidence`, `noisy-or` or `noisy-or@P`, (1 - prod_r (1 - confidence(r)^P))^(1 / P), or either with
        `-top-N` after noisy-or: the N largest confidences alone.
    """
    best = max(confidences, default=0.0)
    if best in (0.0, 1.0):
        return math.inf if best else -math.inf
    if name == "max-confidence":
        return math.log(best) - math.log1p(-best)

    kind, _, number = name.partition("@")
    n_best = kind.removeprefix("noisy-or").removeprefix("-top-")
    if n_best:
        confidences = sorted(confidences, reverse=True)[: int(n_best)]

    # The product is exp(-exponent): it is far too small for a float where many rules agree.
    power = float(number or 1)
    exponent = math.fsum(-math.log1p(-(c**power)) for c in confidences)
    if exponent > _LARGE_EXPONENT:
        return exponent + math.log(power)
    log_score = _log_complement(exponent) / power
    return log_score - _log_complement(-log_score)


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherFactShares:
    """How many of two kinds of atoms of a relation have another fact of it on one side, one of each kind added."""

    of_facts: float
    of_derived: float

    def log_odds(self, n_facts: int) -> float:
        """What a candidate's number of other facts adds to its log-odds: the log of a likelihood ratio."""
        a, b = self.of_facts, self.of_derived
        return math.log(a / b) if n_facts else math.log((1 - a) / (1 - b))


def count_entities(facts: Iterable[Atom]) -> Counter[tuple[int, int, int]]:
    """How many facts of two arguments each entity has by relation and side: 1 as head, 2 as tail."""
    return Counter(
        (fact[0], side, fact[side])
        for fact in facts
        if len(fact) == 3
        for side in (1, 2)
    )


def share_of_facts_with_others(
    facts: Iterable[Atom],
    n_facts: Mapping[tuple[int, int, int], int],
    relation: int,
    side: int,
) -> float:
    """The share of a relation's facts whose entity on a side is there in another fact of the relation.

    Args:
      n_facts: what `count_entities` returns.
    """
    own = [fact for fact in facts if fact[0] == relation]
    n_with = sum(n_facts[relation, side, fact[side]] > 1 for fact in own)
    return (n_with + 1) / (len(own) + 2)


def share_of_derived_with_others(
    derived: Iterable[tuple[float, AbstractSet[Atom]]],
    facts: AbstractSet[Atom],
    n_facts: Mapping[tuple[int, int, int], int],
    side: int,
) -> float:
    """The share of what rules derive beside the facts whose entity on a side is there in a fact of the relation.

    Args:
      derived: what each rule derives, with its confidence, by which its atoms count.
      n_facts: what `count_entities` returns.
    """
    n_all, n_with = 0.0, 0.0
    for confidence, heads in derived:
        new = heads - facts
        n_all += confidence * len(new)
        n_with += confidence * sum(
            n_facts.get((atom[0], side, atom[side]), 0) > 0 for atom in new
        )
    return (n_with + 1) / (n_all + 2)


def _log_complement(exponent: float) -> float:
    """log(1 - exp(-exponent)) of a positive exponent, to the last digits at both ends."""
    if exponent > 1.0:
        return math.log1p(-math.exp(-exponent))
    return math.log(-math.expm1(-exponent))


def count_ranks(answer: Atom, log_odds: Mapping[Atom, float]) -> RankCounts:
    """How many candidates score better than the answer and how many the same, on the grid of scores.

    Args:
      log_odds: of the score of each candidate, the answer among them.
    """
    lines = {atom: grid_line(score) for atom, score in log_odds.items()}
    of_answer = lines[answer]
    n_equal = sum(line == of_answer for line in lines.values()) - 1
    n_better = sum(line > of_answer for line in lines.values())
    return RankCounts(n_better, n_equal, len(lines))


def bound_ranks(
    answer: Atom, log_odds: Mapping[Atom, float], tolerance: float
) -> RankBounds:
    """The counts that are possible if each score has an error of up to `tolerance` in its log-odds."""
    low = {a: grid_line(x - tolerance) for a, x in log_odds.items()}
    high = {a: grid_line(x + tolerance) for a, x in log_odds.items()}
    others = [atom for atom in log_odds if atom != answer]
    surely_better = sum(low[atom] > high[answer] for atom in others)
    perhaps_better = sum(high[atom] > low[answer] for atom in others)
    surely_not_worse = sum(low[atom] >= high[answer] for atom in others)
    perhaps_not_worse = sum(high[atom] >= low[answer] for atom in others)
    return RankBounds(
        range(surely_better, perhaps_better + 1),
        range(surely_not_worse, perhaps_not_worse + 1),
    )


def expected_reciprocal_rank(counts: RankCounts) -> float:
    """The mean of 1 / rank over all orders of the candidates that tie with the answer."""
    first = counts.n_better + 1
    ranks = range(first, first + counts.n_equal + 1)
    return math.fsum(1 / rank for rank in ranks) / len(ranks)


def grid_line(log_odds: float) -> float:
    """The line of the grid that a score is rounded to."""
    return round(log_odds / GRID_STEP) if math.isfinite(log_odds) else log_odds


# -- proofs


def proof_errors(
    logic: Logic, proof: Proof, facts: AbstractSet[Atom], max_height: int
) -> list[str]:
    """What is wrong with a proof; empty if it holds.

    Every leaf is a fact other than the root, every other node an instance of its rule over its children, and the root
    has a height of at most `max_height`, counted from the leaves up; a node that supports itself has no height.
    """
    if not _is_well_formed(logic, proof):
        return ["it names a rule or a child that is not there"]
    root = read_atoms([proof.nodes[0].goal])[0]
    heights: dict[int, int] = {}
    errors: list[str] = []
    for position, node in enumerate(proof.nodes):
        goal, *body = read_atoms(
            [node.goal, *(proof.nodes[child].goal for child in node.children)]
        )
        if node.rule is None:
            heights |= {position: 0}
            if goal not in facts or goal == root:
                errors.append(f"node {position}: not a fact of the data")
        elif not _is_instance(
            logic, logic.rules[node.rule], (goal, *body), node.substitution
        ):
            errors.append(f"node {position}: no instance of its rule")

    # A node gets its height once all its children have theirs.
    for position in _bottom_up(proof, heights):
        children = proof.nodes[position].children
        below = max((heights[child] for child in children), default=0)
        heights.setdefault(position, below + 1)
    if 0 not in heights:
        errors.append("the root supports itself")
    elif heights[0] > max_height:
        errors.append(f"height {heights[0]}, expected at most {max_height}")
    return errors


def _is_well_formed(logic: Logic, proof: Proof) -> bool:
    """Whether every rule and every child that a node names is there."""
    rules, positions = range(len(logic.rules)), range(len(proof.nodes))
    return all(
        (node.rule is None or node.rule in rules)
        and all(child in positions for child in node.children)
        for node in proof.nodes
    )


def _is_instance(
    logic: Logic,
    rule: Rule,
    atoms: Sequence[Atom],
    substitution: Sequence[tuple[int, int]],
) -> bool:
    """Whether ground atoms are a rule under a substitution of exactly its variables, allowed by object identity."""
    binding = dict(substitution)
    variables = {
        term for atom in rule for term in atom[1:] if term > logic.n_constants
    }
    return (
        set(binding) == variables
        and len(rule) == len(atoms)
        and all(substitute(a, binding) == b for a, b in zip(rule, atoms))
        and (
            not logic.object_identity
            or keeps_identity(rule, binding, logic.n_constants)
        )
    )


def _bottom_up(proof: Proof, done: Mapping[int, int]) -> Iterator[int]:
    """The positions of nodes whose children are all done, until no more come; the caller adds each to `done`."""
    is_growing = True
    while is_growing:
        is_growing = False
        for position in reversed(range(len(proof.nodes))):
            children = proof.nodes[position].children
            if position not in done and all(c in done for c in children):
                is_growing = True
                yield position
