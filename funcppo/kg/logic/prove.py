"""Answers to queries from the goals that they lead to, with proofs, and verdicts: proved, refuted, or unknown.

`solve` asks each goal with the arguments that are known and keeps its answers (tabling), so that recursion ends and the
work is what the query reaches. The known arguments of one body atom are passed on to the next, as magic sets do, facts
before goals. Rows of a body are sets of tuples: a goal that trickles costs microseconds, and a large step is one
comprehension. T_P (`fixpoint`) is for what is asked of all atoms.

`prove_ground` gives the verdict on a ground atom; `failed_rules` tells what each rule lacks for an atom that is not
proved. `proof_by_rule` gives the proof of an atom by a given rule and facts. `assemble` builds a proof from a function
that derives one goal at a time; `from_trace` replays a search's choices. Nothing here recurses, so proofs may be
thousands of nodes deep.

`fact_heights` finds the heights of facts that are proved from other facts: a fact does not count in its own proof. At
height 1 the rules that derive the facts are found by open queries. The others are proved one after the other; a bound
on rows ends this work.

Sources: Tamaki and Sato 1986, "OLD resolution with tabulation"; Beeri and Ramakrishnan 1991, "On the power of magic".
"""

from __future__ import annotations

import math
import operator
import sys
import time
from collections import defaultdict, deque
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property, partial
from heapq import heappop, heappush
from itertools import chain, compress, count, islice, repeat
from operator import itemgetter
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from funcppo.core.host import paused_collection
from funcppo.core.types import I32, I64
from funcppo.kg.graph.dataset import OPERATORS
from funcppo.kg.logic import derive, fixpoint
from funcppo.kg.logic.fixpoint import (
    StepCallback,
    StopCode,
    Verdict,
    ignore_progress,
)
from funcppo.kg.logic.joins import (
    UNBOUNDED,
    RowBudget,
    RowBudgetExceeded,
    Rule,
    TimeBudgetExceeded,
    most_general_unifier,
    object_identity_constraints,
    rules_from_kb,
    substitute_atom,
)
from funcppo.kg.logic.kb import (
    TAIL,
    KBSizes,
    KnowledgeBase,
    contains,
    find_postings,
    is_binary,
    rule_confidence,
)
from funcppo.kg.logic.proof import (
    Atom,
    Conditions,
    Node,
    Proof,
    check_proof,
    proof_height,
)
from funcppo.kg.logic.row_index import (
    Span,
    atom_tuples,
    expand_ranges,
    int_list,
    rule_tuples,
    true_rows,
    unique_rows_with_inverse,
)

# The clause that resolves the leftmost goal: its kind, its id, and the probability of this choice under the policy;
# None if no policy made it.
Choice = tuple[Literal["rule", "fact"], int, float | None]
# the last step of a derivation: the id of a rule, None for a fact; its body; and the probability of this choice
LastStep = tuple[int | None, Iterable[Atom], float | None]
FACT: LastStep = None, (), None
# rows of joins to decide which of some facts other facts prove
MAX_FACT_ROWS = 100_000_000


# -- proofs


def assemble(
    rules: Sequence[Sequence[Atom]],
    n_constants: int,
    root: Atom,
    derive: Callable[[Atom], LastStep],
    *,
    is_tree: bool = False,
    bind: Callable[[Atom], Atom] = lambda atom: atom,
) -> Proof:
    """Build a proof of an atom from the last step of the derivation of each goal.

    Args:
      rules: head first, by id; atoms with predicate 0 are padding.
      n_constants: a term above is a variable.
      root: the atom to prove.
      derive: the last step of a derivation of a goal.
      is_tree: each goal is proved anew, leftmost first; otherwise each distinct goal is proved once, breadth first.
      bind: replaces the variables of a goal by what they stand for in the end.
    """
    goals = [root]
    positions = {root: 0}
    open_ = deque([0])
    steps: dict[int, tuple[int | None, float | None, tuple[int, ...]]] = {}

    while open_:
        position = open_.pop() if is_tree else open_.popleft()
        rule, body, probability = derive(goals[position])
        n_before = len(goals)
        children: list[int] = []
        for atom in body:
            place = len(goals)
            if not is_tree:
                place = positions.setdefault(atom, place)
            children.append(place)
            if place == len(goals):
                goals.append(atom)
        new = range(n_before, len(goals))
        open_.extend(reversed(new) if is_tree else new)
        steps[position] = rule, probability, tuple(children)

    goals = [bind(goal) for goal in goals]
    nodes = [
        _make_node(rules, n_constants, goal, steps[position], goals)
        for position, goal in enumerate(goals)
    ]
    return Proof(nodes=tuple(nodes))


def _make_node(
    rules: Sequence[Sequence[Atom]],
    n_constants: int,
    goal: Atom,
    step: tuple[int | None, float | None, tuple[int, ...]],
    goals: Sequence[Atom],
) -> Node:
    """Return the node of a goal: its rule, with the constants of the rule's variables, its probability and children."""
    rule, probability, children = step
    binding: dict[int, int] = {}
    if rule is not None:
        atoms = (goal, *(goals[child] for child in children))
        for pattern, atom in zip(rules[rule], atoms):
            binding.update(zip(pattern[1:], atom[1:]))
    pairs = (pair for pair in binding.items() if pair[0] > n_constants)
    return Node(goal, rule, tuple(sorted(pairs)), probability, children)


def from_trace(
    clauses: Clauses, root: Atom, choices: Iterable[Choice]
) -> Proof:
    """Build the proof that leftmost resolution reaches by the given choices; the root never counts as a fact.

    A choice resolves the leftmost goal that is not a fact.

    Args:
      root: the atom to prove; may hold variables.
      choices: in the order in which the prover made them, one for each rule applied and each fact chosen.

    Returns:
      The proof, with the probabilities of the choices; leaves that needed no choice have none.
    """
    n_constants, rules = clauses.sizes.n_constants, clauses.rules
    width = max(n_constants, *root, *(max(a) for r in rules for a in r))
    binding: dict[int, int] = {}
    left = enumerate(choices, 1)

    def derive(goal: Atom) -> LastStep:
        """Return the next choice as the last step for a goal, unless the goal is a fact."""
        goal = _bind(binding, goal)
        if goal != root and clauses.facts_among([goal]):
            return FACT
        step, (kind, index, probability) = next(left)
        is_rule = kind == "rule"
        fact = clauses.kb.facts[index : index + 1]
        clause = rules[index] if is_rule else atom_tuples(fact)

        # Rename the variables of the clause to ids that neither the root nor a step before has.
        terms = {term for atom in clause for term in atom[1:]}
        renaming = {v: v + step * width for v in terms if v > n_constants}
        head, *body = (substitute_atom(atom, renaming) for atom in clause)
        binding.update(most_general_unifier(head, goal, n_constants) or {})
        return index if is_rule else None, body, probability

    bind = partial(_bind, binding)
    return assemble(rules, n_constants, root, derive, is_tree=True, bind=bind)


def _bind(binding: Mapping[int, int], atom: Atom) -> Atom:
    """Return an atom with its variables replaced, by bindings that were made one after another."""
    terms = list(atom[1:])
    for i in range(len(terms)):
        while terms[i] in binding:
            terms[i] = binding[terms[i]]
    return (atom[0], *terms)


# -- plans: in which order a body is solved

Row = tuple[int, ...]
# terms that are compared and hashed: one term alone stands for itself, others make a row
Packed = int | Row
Picker = Callable[[Row], Row]
Packer = Callable[[Row], Packed]
# from rows of a layout to the wanted terms of those that pass
Projection = Callable[[Any], Any]
# terms, and the test that their constants must pass
Condition = tuple[Row, Callable[..., object]]
Rank = Callable[[Atom, AbstractSet[int]], tuple[int, int]]


class _Step(NamedTuple):
    """An atom of a body, joined with rows of the terms that are known before it."""

    atom: Atom  # of the rule
    bound: Row  # argument positions whose terms are known
    arity: int
    key: Packer  # the known arguments, of a row
    kept: Picker  # what later steps need of a row
    # from packed other arguments to what later steps need of them
    extend: Callable[[Collection[Packed]], Collection[Row]]
    is_whole: bool  # whether they need all of them, once
    terms: Row  # of a joined row: what is kept, then what is new
    n_kept: int
    finish: Projection  # what is left of the joined rows


class _Plan(NamedTuple):
    """How a body is solved: from a row of given terms, step by step, to the output terms."""

    constants: Row  # of the rule, behind the given terms in the first row
    check: Projection  # of the first row
    steps: tuple[_Step, ...]
    layouts: tuple[Row, ...]  # the terms of a row before each step, and at last


def _arguments(atom: Atom) -> Row:
    """Return the arguments of an atom, without padding."""
    return tuple(term for term in atom[1:] if term)


def _picker(layout: Row, terms: Sequence[int]) -> Picker:
    """Return a function that selects terms of a row with a layout."""
    positions = [layout.index(term) for term in terms]
    first = positions[0] if positions else 0
    last = first + len(positions)
    if positions == [*range(first, last)]:
        return cast("Picker", itemgetter(slice(first, last)))
    return cast("Picker", itemgetter(*positions))


def _packer(layout: Row, terms: Sequence[int]) -> Packer:
    """Return a function that packs terms of a row with a layout."""
    if not terms:
        return _picker(layout, ())
    return itemgetter(*map(layout.index, terms))


def _unpack(packed: Packed) -> Row:
    """Return packed terms as a row."""
    return packed if isinstance(packed, tuple) else (packed,)


def _extension(
    free: Row, new: Row
) -> Callable[[Collection[Packed]], Collection[Row]]:
    """Return the projection of packed terms to rows of the new ones among them."""
    project = _projection(free, new)
    if len(free) != 1:
        return project
    return lambda packed: project([*zip(packed)])


def _keep_all(rows: Any) -> Any:
    """Return rows as they are: the projection to all terms."""
    return rows


def _projection(
    terms: Row, wanted: Row, conditions: Sequence[Condition] = ()
) -> Projection:
    """Return the projection of rows to wanted terms; a term that occurs twice must have one constant.

    Args:
      conditions: those that rows must satisfy.
    """
    same = [
        (i, terms.index(term))
        for i, term in enumerate(terms)
        if terms.index(term) < i
    ]
    tests = [(_picker(terms, part), test) for part, test in conditions]
    if terms == wanted and not tests and not same:
        return _keep_all
    pick = _picker(terms, wanted)
    if not tests and not same:
        return lambda rows: set(map(pick, rows))
    return lambda rows: {
        pick(row)
        for row in rows
        if all(row[i] == row[j] for i, j in same)
        and all(test(*part(row)) for part, test in tests)
    }


def _plan_body(
    body: Iterable[Atom],
    given: Iterable[int],
    output: Row,
    conditions: Sequence[Condition],
    n_constants: int,
    rank: Rank,
) -> _Plan:
    """Plan how to solve a body.

    Args:
      given: the variables whose constants are known first.
      output: the terms to know in the end.
      conditions: each is tested once its terms are known.
      rank: of an atom given the known terms; the atom that ranks least is solved next.
    """
    remaining = list(dict.fromkeys(body))
    tested = chain(*(part for part, _ in conditions))
    terms = {*output, *tested, *chain(*map(_arguments, remaining))}
    constants = tuple(sorted(t for t in terms if t <= n_constants))
    layout = (*given, *constants)
    known = set(layout)
    now = [c for c in conditions if known.issuperset(c[0])]
    check = _projection(layout, layout, now)

    steps: list[_Step] = []
    layouts = [layout]
    while remaining:
        atom = min(remaining, key=lambda atom: rank(atom, known))
        remaining.remove(atom)
        before, known = known, known.union(_arguments(atom))
        open_ = [c for c in conditions if not before.issuperset(c[0])]
        now = [c for c in open_ if known.issuperset(c[0])]
        later = chain(
            *(part for part, _ in open_ if not known.issuperset(part))
        )
        needed = {*output, *later, *chain(*map(_arguments, remaining))}
        step, layout = _plan_step(atom, layout, needed, now)
        steps.append(step)
        layouts.append(layout)
    return _Plan(constants, check, tuple(steps), tuple(layouts))


def _plan_step(
    atom: Atom,
    layout: Row,
    needed: set[int],
    conditions: Sequence[Condition],
) -> tuple[_Step, Row]:
    """Plan one step; return it and the layout of the rows after it."""
    # Arguments that are known make the key of a goal; the others are its answer.
    arguments = _arguments(atom)
    bound = tuple(i for i, t in enumerate(arguments) if t in layout)
    free = tuple(t for t in arguments if t not in layout)
    held = needed.union(*(part for part, _ in conditions))
    kept = tuple(t for t in layout if t in held)
    new = tuple(t for t in dict.fromkeys(free) if t in held)
    after = tuple(t for t in kept + new if t in needed)
    step = _Step(
        atom=atom,
        bound=bound,
        arity=len(arguments),
        key=_packer(layout, [arguments[i] for i in bound]),
        kept=_picker(layout, kept),
        extend=_extension(free, new),
        is_whole=free == new,
        terms=kept + new,
        n_kept=len(kept),
        finish=_projection(kept + new, after, conditions),
    )
    return step, after


# rows that a step makes between two looks at its bounds
_ROWS_AT_ONCE = 1 << 18
# parts of rows, and what is added to each of them
Pair = tuple[Collection[Row], Collection[Row]]


def _join(
    step: _Step,
    pairs: Sequence[Pair],
    budget: RowBudget,
    max_held: int = sys.maxsize,
) -> set[Row]:
    """Return the rows after a step: for each pair, each part of a row with each end that was found for it.

    Raises:
      RowBudgetExceeded: more than `max_held` are to be held at once, or the budget ends.
    """
    new: set[Row] = set()
    first = n_made = 0
    if any(len(parts) * len(ends) > _ROWS_AT_ONCE for parts, ends in pairs):
        pairs = [((part,), ends) for parts, ends in pairs for part in parts]
    for last, (parts, ends) in enumerate(pairs, 1):
        n_made += len(parts) * len(ends)
        if n_made > _ROWS_AT_ONCE or last == len(pairs):
            rows = {
                part + end
                for parts, ends in pairs[first:last]
                for part in parts
                for end in ends
            }
            budget.spend(n_made)
            new |= step.finish(rows)
            first, n_made = last, 0
            if len(new) > max_held:
                raise fixpoint.MaxAtomsExceeded
    return new


# -- facts and rules

# facts of a predicate that are indexed whole; larger ones are looked up in the tables of the knowledge base
_MAX_INDEXED_FACTS = 1 << 16
# the other arguments of atoms, by the arguments at known positions
Found = Mapping[Packed, Collection[Packed]]
Finder = Callable[[_Step, Collection[Packed]], Found]


class Clauses:
    """Facts and rules of a knowledge base, read as goals ask for them and kept; several proofs may share them."""

    def __init__(
        self,
        kb: KnowledgeBase,
        sizes: KBSizes,
        max_indexed: int = _MAX_INDEXED_FACTS,
        comparisons: Mapping[int, Callable[[int, int], bool]] | None = None,
    ) -> None:
        """Set the knowledge base and, for rules with comparisons, the `comparison_tests` of its names."""
        self.kb, self.sizes, self.max_indexed = kb, sizes, max_indexed
        self.comparisons = comparisons or {}
        self._fact_offsets = int_list(kb.fact_offsets)
        self._rule_offsets = int_list(kb.rule_offsets)
        self._indices: dict[tuple[int, Row], dict[Packed, list[Packed]]] = {}
        self._rules: dict[int, list[Rule]] = {}
        # goals of negations, by object identity and by how many negations are above them; what bounds their evaluation
        self._negated: dict[tuple[bool, int], _Tables] = {}
        self.limits = Limits()
        # how a body is searched for the values of some variables
        self._searches: dict[
            tuple[int, frozenset[int], Row, bool], tuple[_Plan, Picker]
        ] = {}
        self._variables: dict[int, Row] = {}  # of rules, by id

    @cached_property
    def rules(self) -> list[list[Atom]]:
        """Return the atoms of each rule by id, head first, without padding."""
        table = rule_tuples(self.kb.rules)
        return [[atom for atom in rule if atom[0]] for rule in table]

    def rules_of(self, predicate: int) -> list[Rule]:
        """Return the rules whose head has a predicate, in file order."""
        if predicate not in self._rules:
            span = slice(*self._rule_offsets[predicate : predicate + 2])
            ids = int_list(self.kb.rule_ids_by_predicate[span])
            self._rules[predicate] = rules_from_kb(
                self.kb, ids, with_conditions=True
            )
        return self._rules[predicate]

    def facts_among(self, atoms: Collection[Atom]) -> set[Atom]:
        """Return the atoms that the knowledge base states."""
        rows = torch.tensor([*atoms], device=self.kb.facts.device)
        if not len(rows):
            return set()
        return {*compress(atoms, int_list(contains(self.kb, self.sizes, rows)))}

    def find(
        self,
        predicate: int,
        arity: int,
        bound: Row,
        keys: Collection[Packed],
        left_out: Atom | None,
    ) -> Found:
        """Return the other arguments of the facts with each key, the arguments at the bound positions.

        Args:
          left_out: an atom that does not count as a fact.
        """
        index = self._indices.get((predicate, bound))
        if index is None:
            first, last = self._fact_offsets[predicate : predicate + 2]
            few = max(self.max_indexed, 4 * len(keys))
            is_small = not bound or last - first <= few
            facts = self.kb.facts[first:last]
            if not is_small:
                facts = self._matching(predicate, bound, keys)
            index = _group_facts(facts, arity, bound)
            if is_small:
                self._indices[predicate, bound] = index
        if left_out is None or predicate != left_out[0]:
            return index

        key, rest = _splitter(arity, bound)(_arguments(left_out))
        found = {k: index[k] for k in keys if k in index}
        if key in found:
            found[key] = [row for row in found[key] if row != rest]
        return found

    def matching(self, atom: Atom) -> list[Row]:
        """Return the constants of an atom's variables, one for each place, in the facts that match."""
        arity, bound, key = self.split(atom)
        found = self.find(atom[0], arity, bound, (key,), None)
        return [*map(_unpack, found.get(key, ()))]

    def split(self, atom: Atom) -> tuple[int, Row, Packed]:
        """Return an atom's number of arguments, the places of its constants, and these, packed."""
        arguments = _arguments(atom)
        n = self.sizes.n_constants
        bound = tuple(i for i, term in enumerate(arguments) if term <= n)
        key, _ = _splitter(len(arguments), bound)(arguments)
        return len(arguments), bound, key

    def rank(
        self,
        atom: Atom,
        known: AbstractSet[int],
        values: Mapping[int, int] | None = None,
    ) -> tuple[int, int]:
        """Rank an atom by how much is known of it: facts before goals, and what matches the fewest facts first.

        Args:
          values: constants of variables, as far as they are known.
        """
        arguments = _arguments(atom)
        places = [
            i
            for i, t in enumerate(arguments)
            if t in known or t <= self.sizes.n_constants
        ]
        is_goal = int(bool(self.rules_of(atom[0])))
        if len(places) == len(arguments):
            return 2 * is_goal, 0
        if not places:
            return 4 + is_goal, 0

        first, last = self._fact_offsets[atom[0] : atom[0] + 2]
        if last - first <= _MAX_INDEXED_FACTS:
            return 2 * is_goal + 1, 0
        constants = [
            (values or {}).get(arguments[i], arguments[i]) for i in places
        ]
        counts = [
            int(self._postings(atom[0], i, [constant]).length)
            for i, constant in zip(places, constants)
        ]
        return 2 * is_goal + 1, min(counts)

    def _postings(
        self, predicate: int, place: int, arguments: Sequence[int]
    ) -> Span:
        """Return the postings of the facts of a predicate that have each argument at a place."""
        argument = self.kb.rule_offsets.new_tensor(arguments)
        columns = (
            torch.full_like(argument, place),
            torch.full_like(argument, predicate),
        )
        return find_postings(self.kb, self.sizes, *columns, argument)

    def _matching(
        self, predicate: int, bound: Row, keys: Collection[Packed]
    ) -> Tensor:
        """Return the facts that have one of the keys, found by the argument that matches the fewest."""
        columns = [sorted(set(column)) for column in zip(*map(_unpack, keys))]
        spans = [
            self._postings(predicate, place, column)
            for place, column in zip(bound, columns)
        ]
        fewest = min(spans, key=lambda span: int(span.length.sum()))
        _, position = expand_ranges(*fewest)
        facts = self.kb.facts[self.kb.argument_postings[position].long()]
        for place, column in zip(bound, columns):
            wanted = facts.new_tensor(column)
            facts = facts[torch.isin(facts[:, place + 1], wanted)]
        return facts

    def bodies(
        self,
        rule: Rule,
        atom: Atom,
        object_identity: bool,
        find: Finder,
        budget: RowBudget,
    ) -> Iterator[tuple[Atom, ...]]:
        """Yield the ground bodies by which a rule derives an atom, by ascending constants in order of occurrence.

        Args:
          find: the atoms that may be in the body.
        """
        binding = most_general_unifier(rule.head, atom, self.sizes.n_constants)
        if binding is None:
            return
        # Bind one variable after another to a constant: each time a query for the values of that one.
        variables = [v for v in self._body_variables(rule) if v not in binding]
        steps = [(v,) for v in variables] or [()]
        open_ = [(0, binding)]
        while open_:
            n_bound, binding = open_.pop()
            if n_bound == len(steps):
                atoms = rule.body + rule.conditions
                yield tuple(substitute_atom(atom, binding) for atom in atoms)
                continue
            output = steps[n_bound]
            values = self._search(
                rule, binding, output, object_identity, find, budget
            )
            open_ += [
                (n_bound + 1, binding | dict(zip(output, row)))
                for row in sorted(values, reverse=True)
            ]

    def conditions(
        self, rule: Rule, object_identity: bool, n_negations: int
    ) -> list[Condition]:
        """Return what a rule's terms must satisfy: its conditions, and object identity.

        Args:
          n_negations: how many negations are above the goals of the rule.
        """
        pairs = object_identity_constraints(
            rule, self.sizes.n_constants, object_identity
        )
        conditions: list[Condition] = [
            ((left[0], right[0]), operator.ne) for left, right in pairs
        ]
        key = object_identity, n_negations + 1
        for atom in rule.conditions:
            if atom[0] in OPERATORS:
                test = self.comparisons[atom[0]]
            else:
                places = tuple(i for i, term in enumerate(atom[1:]) if term)
                test = partial(self._is_absent, key, -atom[0], places)
            conditions.append((_arguments(atom), test))
        return conditions

    def checker(
        self, object_identity: bool, budget: RowBudget
    ) -> Callable[[Atom], bool]:
        """Return a test of ground conditions that reads facts and rules, and none of the tables."""

        def facts_of(predicate: int) -> list[Atom]:
            """Return the facts of a predicate."""
            span = self._fact_offsets[predicate : predicate + 2]
            return atom_tuples(self.kb.facts[slice(*span)])

        return Conditions(
            facts_of,
            self.rules,
            self.comparisons,
            self.sizes.n_constants,
            object_identity,
            partial(budget.spend, 0),
        ).hold

    def _is_absent(
        self,
        table_key: tuple[bool, int],
        predicate: int,
        places: Row,
        *constants: int,
    ) -> bool:
        """Return whether no fact and no rule gives an atom of a predicate with some constants at some places.

        Raises:
          RowBudgetExceeded: a bound ends the work.
        """
        key = constants[0] if len(constants) == 1 else constants
        tables = self._negated.get(table_key)
        group = tables and tables.groups.get((predicate, places))
        goal = group and group.goals.get(key)
        if not goal:
            goal = self._solve_negated(table_key, predicate, places, constants)
        return not (goal and goal.answers)

    def _solve_negated(
        self,
        table_key: tuple[bool, int],
        predicate: int,
        places: Row,
        constants: Row,
    ) -> _Goal | None:
        """Return a goal with all its answers; None for a predicate without facts and rules."""
        object_identity, n_negations = table_key
        if n_negations > 64:
            raise RowBudgetExceeded("more than 64 negations, one in another")
        first, last = self._fact_offsets[predicate : predicate + 2]
        some = [rule.head for rule in self.rules_of(predicate)[:1]]
        some += atom_tuples(self.kb.facts[first : min(first + 1, last)])
        if not some:
            return None

        # The others are variables of the goal.
        known = dict(zip(places, constants))
        atom = tuple(
            term and known.get(i, self.sizes.n_constants + 1)
            for i, term in enumerate(some[0], -1)
        )
        atom = (predicate, *atom[1:])
        limits = replace(
            self.limits, max_height=None, object_identity=object_identity
        )
        tables = self._negated.get(table_key)
        if tables is None:
            tables = _Tables(self, atom, limits, n_negations)
            self._negated[table_key] = tables
        tables.limits = limits
        arity, bound, key = self.split(atom)
        goal = tables.open(tables.group(predicate, arity, bound), key, 0)
        try:
            tables.run()
        except RowBudgetExceeded:
            self._negated.clear()
            raise
        return goal

    def _body_variables(self, rule: Rule) -> Row:
        """Return the variables of a rule's body in order of occurrence."""
        if rule.id not in self._variables:
            terms = chain(*map(_arguments, rule.body))
            n = self.sizes.n_constants
            variables = dict.fromkeys(term for term in terms if term > n)
            self._variables[rule.id] = (*variables,)
        return self._variables[rule.id]

    def _search(
        self,
        rule: Rule,
        binding: Mapping[int, int],
        output: Row,
        object_identity: bool,
        find: Finder,
        budget: RowBudget,
    ) -> set[Row]:
        """Return the values of some variables with which a rule's body holds."""
        key = rule.id, frozenset(binding), output, object_identity
        if key not in self._searches:
            plan = _plan_body(
                rule.body,
                binding,
                output,
                self.conditions(rule, object_identity, 0),
                self.sizes.n_constants,
                self.rank,
            )
            self._searches[key] = plan, _picker(plan.layouts[-1], output)
        plan, pick = self._searches[key]
        # The plan takes the given terms in the order in which they were bound at first.
        given = tuple(binding[term] for term in plan.layouts[0][: len(binding)])
        rows = plan.check({(*given, *plan.constants)})
        for step in plan.steps:
            if not rows:
                break
            found = find(step, set(map(step.key, rows)))
            rows = _join(step, _pair_facts(step, rows, found), budget)
        return {*map(pick, rows)}


def _pair_facts(step: _Step, rows: set[Row], found: Found) -> list[Pair]:
    """Return what is kept of rows with what was found for their keys."""
    kept_by_key: dict[Packed, set[Row]] = defaultdict(set)
    for key, kept in zip(map(step.key, rows), map(step.kept, rows)):
        kept_by_key[key].add(kept)
    return [
        (kept, step.extend(found[key]))
        for key, kept in kept_by_key.items()
        if key in found
    ]


def _splitter(arity: int, bound: Row) -> Callable[[Row], tuple[Packed, Packed]]:
    """Return a function that splits arguments into the bound ones and the others, both packed."""
    places = tuple(range(arity))
    pack_bound = _packer(places, bound)
    pack_others = _packer(places, [i for i in places if i not in bound])
    return lambda row: (pack_bound(row), pack_others(row))


def _group_facts(
    facts: Tensor, arity: int, bound: Row
) -> dict[Packed, list[Packed]]:
    """Return the free arguments of facts of one predicate by their bound arguments, both packed."""
    index: dict[Packed, list[Packed]] = defaultdict(list)
    columns = [int_list(facts[:, 1 + i]) for i in range(arity)]
    n_facts = len(facts)

    def packed(places: Sequence[int]) -> Iterable[Packed]:
        if len(places) == 1:
            return columns[places[0]]
        chosen = [columns[i] for i in places]
        return zip(*chosen) if chosen else repeat((), n_facts)

    free = [i for i in range(arity) if i not in bound]
    for key, rest in zip(packed(bound), packed(free)):
        index[key].append(rest)
    return dict(index)


# -- tables of goals


class _Group:
    """Goals of one predicate with the same arguments known, and the bodies of their rules."""

    def __init__(self, predicate: int, arity: int, bound: Row) -> None:
        self.predicate, self.arity, self.bound = predicate, arity, bound
        self.goals: dict[Packed, _Goal] = {}
        self.bodies: list[_Body] = []
        free = [i for i in range(arity) if i not in bound]
        self.arguments = _picker((*bound, *free), range(arity))

    def rows(self, goal: _Goal) -> Iterator[tuple[Row, Packed]]:
        """Yield the arguments of each atom that answers a goal, and the answer."""
        key = _unpack(goal.key)
        for answer in goal.answers:
            yield self.arguments(key + _unpack(answer)), answer


_NONE: set[Packed] = set()  # stays empty


class _Goal:
    """A predicate with its known arguments, and its answers: the other arguments."""

    __slots__ = (
        "answers",
        "children",
        "copies",
        "depth",
        "given",
        "group",
        "key",
        "new",
        "waiting",
    )

    def __init__(
        self,
        group: _Group,
        key: Packed,
        depth: int,
        facts: Collection[Packed],
    ) -> None:
        self.group, self.key = group, key
        # rule applications between the root and the goal, at least
        self.depth = depth
        # with the round in which each was found
        self.answers: dict[Packed, int] = dict.fromkeys(facts, 0)
        # those that all that waits has received, and the others
        self.given, self.new = {*facts}, _NONE
        # the goals whose answers all answers of this goal are
        self.copies: dict[_Goal, None] = {}
        # what is kept of the rows that wait, and what later steps need of the answers, each once
        self.waiting: dict[_Site, tuple[set[Row], set[Row]]] = {}
        self.children: set[_Goal] = set()  # the goals that its rules led to


class _Site:
    """A place in a rule's body that waits for answers to goals of a group."""

    def __init__(
        self, body: _Body, position: int, step: _Step, group: _Group
    ) -> None:
        self.body, self.position = body, position
        self.step, self.group = step, group


class _Body:
    """The body of a rule, solved for the goals of a group; rows wait before each of its steps."""

    def __init__(
        self, group: _Group, rule: Rule, tables: _Tables, first_key: Packed
    ) -> None:
        self.group, self.rule = group, rule
        clauses = tables.clauses
        n_constants = clauses.sizes.n_constants
        head = _arguments(rule.head)
        self.head_key = tuple(head[i] for i in group.bound)
        free = [t for i, t in enumerate(head) if i not in group.bound]
        values = dict(zip(self.head_key, _unpack(first_key)))
        self.plan = _plan_body(
            rule.body,
            [term for term in values if term > n_constants],
            head,
            clauses.conditions(
                rule, tables.object_identity, tables.n_negations
            ),
            n_constants,
            partial(clauses.rank, values=values),
        )
        self.rows: list[set[Row]] = [set() for _ in self.plan.layouts]
        self.reached = -1  # the last step that some row reached
        self.goal_keys = [
            _packer(layout, self.head_key) for layout in self.plan.layouts
        ]
        self.answer = _packer(self.plan.layouts[-1], free)

        # Steps that rules answer wait for answers.
        self.sites: list[_Site | None] = []
        for position, step in enumerate(self.plan.steps):
            site = None
            if clauses.rules_of(step.atom[0]):
                asked = tables.group(step.atom[0], step.arity, step.bound)
                site = _Site(self, position, step, asked)
            self.sites.append(site)

        # Where the answers of the last goal are the body's answers, goals exchange them without rows.
        last = self.plan.steps[-1] if any(self.sites[-1:]) else None
        self.copies_last = (
            last is not None
            and last.is_whole
            and last.finish is _keep_all
            and [*last.terms[last.n_kept :]] == free
        )

    def start(self, key: Row, n_constants: int) -> set[Row]:
        """Return the first row for a goal; none if the head does not match it."""
        binding = dict(zip(self.head_key, key))
        for term, constant in zip(self.head_key, key):
            if constant != (binding[term] if term > n_constants else term):
                return set()
        given = (c for t, c in binding.items() if t > n_constants)
        return self.plan.check({(*given, *self.plan.constants)})


class _Tables:
    """Goals that a root goal leads to, and their answers, found in rounds.

    A round gives answers that are new to the places in rule bodies that wait for them, or applies the rules to the
    goals that are new: each answer meets each waiting row once. An answer of round r has a proof of height at most r.
    New goals come first, and new answers when the goals have doubled, those of the deepest goals before others: so
    answers travel in large sets, and a proof is found before the work has doubled. Where all goals are there from the
    start, a round gives all new answers; rounds are then the steps of T_P, and r is the least height.
    """

    def __init__(
        self,
        clauses: Clauses,
        query: Atom,
        limits: Limits,
        n_negations: int = 0,
    ) -> None:
        self.clauses, self.query, self.limits = clauses, query, limits
        self.n_constants = clauses.sizes.n_constants
        # how many negations are above the goals
        self.object_identity, self.n_negations = (
            limits.object_identity,
            n_negations,
        )
        most = -1 if n_negations else self.n_constants
        is_ground = max(query[1:], default=0) <= most
        # a ground query is no fact while it is proved
        self.left_out = query if is_ground else None
        # goals of this depth and more are answered by facts alone
        self.limit = limits.most_height
        # whether goals are opened, whether they end with a proof, and whether the depth of a goal is to be the least
        self.opens_goals = True
        self.ends_with_proof = is_ground
        self.has_least_depths = is_ground or limits.max_height is not None
        self.groups: dict[tuple[int, Row], _Group] = {}
        self.fresh: list[_Goal] = []  # no rule is applied to them yet
        # goals with new answers by depth; all at 0 where no goals are opened
        self.changed: dict[int, list[_Goal]] = defaultdict(list)
        self.round = self.depth = 0  # the last one, and of its goals
        self.n_atoms = self.n_goals = self.n_expanded = 0
        self.n_goals_at_turn = 0  # with which new answers come before new goals
        # the arguments of atoms that answer goals, by predicate, with the first round that gives each; an index of them
        self.held: dict[int, dict[Row, int]] = {}
        self._held_by: dict[
            tuple[int, Row], dict[Packed, list[tuple[Packed, int]]]
        ] = {}

        arity, bound, key = clauses.split(query)
        self.root = self.open(self.group(query[0], arity, bound), key, 0)
        self.n_atoms_after_round = [self.n_atoms]

    def group(self, predicate: int, arity: int, bound: Row) -> _Group:
        """Return the group of goals with a predicate and known arguments."""
        group = self.groups.get((predicate, bound))
        if group is None:
            group = _Group(predicate, arity, bound)
            self.groups[predicate, bound] = group
        return group

    def bodies(self, goal: _Goal) -> list[_Body]:
        """Return the bodies of the rules for a goal, planned for the first goal of its group."""
        group = goal.group
        if not group.bodies:
            group.bodies = [
                _Body(group, rule, self, goal.key)
                for rule in self.clauses.rules_of(group.predicate)
            ]
        return group.bodies

    def open(self, group: _Group, key: Packed, depth: int) -> _Goal:
        """Return a goal, with the facts that answer it; note that it is needed at a depth."""
        goal = group.goals.get(key)
        if goal is None:
            found = self.clauses.find(
                group.predicate, group.arity, group.bound, (key,), self.left_out
            ).get(key, ())
            goal = _Goal(group, key, depth, found)
            group.goals[key] = goal
            self.n_goals += 1
            self.n_atoms += len(found)
            if self.clauses.rules_of(group.predicate):
                self.fresh.append(goal)
        elif self.has_least_depths and depth < goal.depth:
            stack = [(goal, depth)]
            while stack:
                raised, depth = stack.pop()
                if depth < raised.depth:
                    raised.depth = depth
                    stack += [(child, depth + 1) for child in raised.children]
        return goal

    def run(self, finds_goals: bool = False) -> bool:
        """Run rounds until there is nothing left to do; return whether nothing was left out.

        Args:
          finds_goals: end as soon as no answer can lead to another goal.

        Raises:
          RowBudgetExceeded: a bound ends the work; what was found so far stays.
        """
        if not self.n_negations:
            self.clauses.limits = self.limits
        is_bounded = False
        while True:
            if finds_goals and self._has_all_goals():
                return True
            fresh, changed = self._next_goals()
            if not fresh and not changed:
                return not self.fresh
            if self.round >= self.limit and not self.opens_goals:
                return False
            self.limits.progress(self.round, self.n_atoms, 0, 0)
            self.limits.budget.spend(0)
            self.round += 1
            self.n_atoms_after_round.append(self.n_atoms)
            self._run_round(fresh, changed)
            self.n_atoms_after_round[-1] = self.n_atoms
            if self.ends_with_proof and self.root.answers:
                if not self.opens_goals:
                    self.limit = min(self.limit, self.round)
                    return True
                # A smaller proof needs only goals that are less deep.
                if self.fresh and not is_bounded:
                    height = proof_height(self.build_proof(self.query))
                    self.limit = min(self.limit, height)
                    is_bounded = True

    def _has_all_goals(self) -> bool:
        """Return whether answers lead to no other goal: all bodies end with the only goal that they have."""
        bodies = (group.bodies for group in self.groups.values())
        has_inner = any(any(body.sites[:-1]) for body in chain(*bodies))
        return not self.fresh and not has_inner

    def _next_goals(self) -> tuple[list[_Goal], list[_Goal]]:
        """Take the goals of the next round: those to apply rules to, within the limit, and those with new answers."""
        is_turn = not self.fresh or self.n_goals >= self.n_goals_at_turn
        if self.opens_goals and self.changed and is_turn:
            return [], self._take_deepest()
        fresh, limit = self.fresh, self.limit
        self.fresh = [goal for goal in fresh if goal.depth >= limit]
        if self.fresh:
            fresh = [goal for goal in fresh if goal.depth < limit]
        if not self.opens_goals or not fresh:
            return fresh, self._take_deepest()
        if not self.changed:
            self.n_goals_at_turn = 2 * self.n_goals
        self.depth = fresh[0].depth
        return fresh, []

    def _take_deepest(self) -> list[_Goal]:
        """Take the deepest goals with new answers."""
        self.depth = max(self.changed, default=0)
        return self.changed.pop(self.depth, [])

    def _run_round(self, fresh: list[_Goal], changed: list[_Goal]) -> None:
        """Give out new answers of goals, apply rules to new goals, and solve the bodies that have rows."""
        given = self._give_out(changed)
        for site, pairs in given.items():
            self._advance(site.body, site.position, pairs)
        active = dict.fromkeys(site.body for site in given)

        self.n_expanded += len(fresh)
        for goal in fresh:
            key = _unpack(goal.key)
            for body in self.bodies(goal):
                rows = body.start(key, self.n_constants)
                if rows:
                    body.rows[0] |= rows
                    active[body] = None
        for body in active:
            self._solve(body)

    def _give_out(self, changed: list[_Goal]) -> dict[_Site, list[Pair]]:
        """Add the new answers of goals to those that copy them; return the rows that wait for them with their ends."""
        # Answers of this round are not given out in it.
        taken: list[tuple[_Goal, set[Packed]]] = []
        for goal in changed:
            taken.append((goal, goal.new))
            goal.given |= goal.new
            goal.new = _NONE

        given: dict[_Site, list[Pair]] = defaultdict(list)
        n_rows = 0
        for goal, answers in taken:
            n_rows += len(goal.copies) * len(answers)
            for copy in goal.copies:
                if new := answers.difference(copy.answers):
                    self._add(copy, new)
            if n_rows > _ROWS_AT_ONCE:
                self.limits.budget.spend(n_rows)
                n_rows = 0
            for site, (rows, received) in goal.waiting.items():
                ends = site.step.extend(answers)
                if not site.step.is_whole:
                    ends = {*ends} - received
                    received |= ends
                given[site].append((rows, ends))
        self.limits.budget.spend(n_rows)
        return given

    def _solve(self, body: _Body) -> None:
        """Take the waiting rows of a body through its steps, and add the answers that come out."""
        for position, step in enumerate(body.plan.steps):
            rows, body.rows[position] = body.rows[position], set()
            if not rows:
                continue
            body.reached = max(body.reached, position)
            site = body.sites[position]
            if site is None:
                found = self._find_facts(step, set(map(step.key, rows)))
                pairs = _pair_facts(step, rows, found)
            elif body.copies_last and position + 1 == len(body.sites):
                self._copy_answers(site, rows)
                continue
            else:
                pairs = self._ask_goals(site, rows)
            self._advance(body, position, pairs)

        rows, body.rows[-1] = body.rows[-1], set()
        answers: dict[Packed, set[Packed]] = defaultdict(set)
        for row in rows:
            answers[body.goal_keys[-1](row)].add(body.answer(row))
        for key, found in answers.items():
            goal = body.group.goals[key]
            if new := found.difference(goal.answers):
                self._add(goal, new)

    def _find_facts(self, step: _Step, keys: Collection[Packed]) -> Found:
        """Return the facts that a step asks for."""
        return self.clauses.find(
            step.atom[0], step.arity, step.bound, keys, self.left_out
        )

    def _open_goals(
        self, site: _Site, rows: set[Row]
    ) -> Iterator[tuple[_Goal, _Goal]]:
        """Open the goals that some rows ask for; yield each with a goal that the rows are of."""
        goals = site.body.group.goals
        parent_key = site.body.goal_keys[site.position]
        pairs = set(zip(map(site.step.key, rows), map(parent_key, rows)))
        for key, above in pairs:
            parent = goals[above]
            depth = self.depth
            if self.has_least_depths:
                depth = parent.depth
            goal = self.open(site.group, key, depth + 1)
            if self.has_least_depths:
                parent.children.add(goal)
            yield goal, parent

    def _copy_answers(self, site: _Site, rows: set[Row]) -> None:
        """Make all answers of the goals that some rows ask for answers of the goals that the rows are of."""
        n_rows = 0
        for goal, parent in self._open_goals(site, rows):
            if goal is not parent and parent not in goal.copies:
                goal.copies[parent] = None
                n_rows += len(goal.given)
                if new := goal.given.difference(parent.answers):
                    self._add(parent, new)
                if n_rows > _ROWS_AT_ONCE:
                    self.limits.budget.spend(n_rows)
                    n_rows = 0
        self.limits.budget.spend(n_rows)

    def _ask_goals(self, site: _Site, rows: set[Row]) -> list[Pair]:
        """Ask the goals of some rows; return what is kept of the rows with the answers given out so far."""
        for _ in self._open_goals(site, rows):
            pass
        step = site.step
        asked: dict[Packed, set[Row]] = defaultdict(set)
        for row in rows:
            asked[step.key(row)].add(step.kept(row))

        pairs: list[Pair] = []
        for key, kept in asked.items():
            goal = site.group.goals[key]
            if site not in goal.waiting:
                ends = () if step.is_whole else step.extend(goal.given)
                goal.waiting[site] = set(), {*ends}
            waiting, received = goal.waiting[site]
            kept -= waiting
            waiting |= kept
            ends: Collection[Row] = received
            if step.is_whole:
                ends = step.extend(goal.given)
            pairs.append((kept, ends))
        return pairs

    def _advance(
        self, body: _Body, position: int, pairs: Sequence[Pair]
    ) -> None:
        """Take rows past a step: what is kept of them, with what was found for them."""
        step, limits = body.plan.steps[position], self.limits
        body.rows[position + 1] |= _join(
            step, pairs, limits.budget, limits.max_atoms
        )

    def _add(self, goal: _Goal, new: set[Packed]) -> None:
        """Add answers that a goal does not have."""
        if len(new) == 1:
            goal.answers[next(iter(new))] = self.round
        else:
            goal.answers.update(dict.fromkeys(new, self.round))
        if goal.new:
            goal.new |= new
        else:
            goal.new = new
            self.changed[goal.depth if self.opens_goals else 0].append(goal)
        self.n_atoms += len(new)
        if self.n_atoms + self.n_goals > self.limits.max_atoms:
            raise fixpoint.MaxAtomsExceeded

    def root_answers(self) -> dict[Atom, int]:
        """Return the answers to the query, padded, with the round of each."""
        group = self.root.group
        padding = (0,) * (len(self.query) - 1 - group.arity)
        variables = [t for t in self.query[1:] if t > self.n_constants]
        is_repeated = len({*variables}) < len(variables)
        found: dict[Atom, int] = {}
        for arguments, answer in group.rows(self.root):
            atom = (self.query[0], *arguments, *padding)
            # A variable of the query that occurs twice has one constant.
            if (
                not is_repeated
                or most_general_unifier(self.query, atom, self.n_constants)
                is not None
            ):
                found[atom] = self.root.answers[answer]
        return found

    def count_goals(self) -> int:
        """Return the number of goals that rules may answer within the limit on depth."""
        return sum(
            goal.depth < self.limit
            for group in self.groups.values()
            if self.clauses.rules_of(group.predicate)
            for goal in group.goals.values()
        )

    def needs_heights(self) -> bool:
        """Return whether the rounds of the root's answers may be greater than their heights."""
        last = max(self.root.answers.values(), default=0)
        return last > 1 and self.n_expanded > 1

    def again(self) -> _Tables:
        """Return new tables with all these goals from the start, so that rounds are heights."""
        tables = _Tables(self.clauses, self.query, self.limits)
        tables.limit = self.limit
        for (predicate, bound), group in self.groups.items():
            other = tables.group(predicate, group.arity, bound)
            for key, goal in group.goals.items():
                tables.open(other, key, goal.depth)
        tables.opens_goals = False
        tables.n_atoms_after_round = [tables.n_atoms]
        return tables

    # -- derivations

    def collect_held(self) -> None:
        """Collect the atoms that answer goals, with the first round that gives each."""
        self.held, self._held_by = defaultdict(dict), {}
        for group in self.groups.values():
            first = self.held[group.predicate]
            for goal in group.goals.values():
                for row, answer in group.rows(goal):
                    n = goal.answers[answer]
                    first[row] = min(n, first.get(row, n))

    def build_proof(self, atom: Atom) -> Proof:
        """Build a proof of an atom that answers a goal from answers of earlier and earlier rounds.

        Raises:
          RowBudgetExceeded: the time is over.
        """
        self.collect_held()
        budget = RowBudget(deadline=self.limits.budget.deadline)
        # A condition that was not tested yet is tested now.
        self.clauses.limits = Limits(budget=budget)
        try:
            derive = partial(self.derive, budget)
            return assemble(self.clauses.rules, self.n_constants, atom, derive)
        finally:
            self.clauses.limits = self.limits

    def derive(self, budget: RowBudget, atom: Atom) -> LastStep:
        """Return the last step of a derivation of a held atom.

        The rule is the first in file order whose body holds in an earlier round.
        """
        budget.spend(0)
        before = self.held.get(atom[0], {}).get(_arguments(atom), 0)
        if not before:
            return FACT
        find = partial(self.find_before, before)
        for rule in self.clauses.rules_of(atom[0]):
            for body in self.clauses.bodies(
                rule, atom, self.object_identity, find, budget
            ):
                return rule.id, body, None
        raise AssertionError(f"{list(atom)}: held without a derivation")

    def is_fact(self, atom: Atom) -> bool:
        """Return whether a held atom, or one that no rule derives, is a fact."""
        is_derived = self.held.get(atom[0], {}).get(_arguments(atom))
        return not is_derived

    def find_before(
        self, before: float, step: _Step, keys: Collection[Packed]
    ) -> Found:
        """Return the facts, or the held atoms of rounds before one, that a step asks for."""
        predicate = step.atom[0]
        if not self.clauses.rules_of(predicate):
            return self._find_facts(step, keys)
        index = self._held_by.get((predicate, step.bound))
        if index is None:
            index = self._held_by[predicate, step.bound] = defaultdict(list)
            split = _splitter(step.arity, step.bound)
            for row, n in self.held.get(predicate, {}).items():
                key, rest = split(row)
                index[key].append((rest, n))
        return {
            key: [rest for rest, n in index[key] if n < before]
            for key in keys
            if key in index
        }


# -- the verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What counts as a proof, and what bounds the search for one."""

    max_height: int | None = None  # of a proof; None for any
    max_atoms: int = sys.maxsize  # the most goals and answers to hold
    # different variables of a rule bind different constants, none of which the rule names
    object_identity: bool = False
    # bounds the rows that the joins make, and the time
    budget: RowBudget = UNBOUNDED
    progress: StepCallback = ignore_progress  # is called before each round

    @property
    def most_height(self) -> float:
        """Return the maximum height of a proof, infinite for any."""
        return math.inf if self.max_height is None else self.max_height


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """What a goal-directed evaluation found for a query; a host-side value."""

    # answers to the query, padded, each with the least height of a proof; None where a limit came before it
    heights: dict[Atom, int | None]
    # atoms that answer the query or a goal that it leads to, after round 0 (the facts), 1, 2, ...
    n_atoms_after_step: tuple[int, ...]
    reached_fixpoint: bool  # whether a greater height would derive no more
    # one line that says why answers may be missing; empty if none are
    stop_reason: str
    stop_code: StopCode | None  # the same as a code; None if none are
    seconds: float  # wall-clock time of the evaluation
    tables: _Tables  # the goals and their answers

    @property
    def complete(self) -> bool:
        """Return whether these are all answers within the height."""
        return not self.stop_reason


def solve(clauses: Clauses, query: Atom, limits: Limits) -> Answers:
    """Find the answers to a query from the facts and goals that it leads to; a ground query is no fact meanwhile.

    Args:
      query: padded to the width of the knowledge base; a term above the constants is a variable.

    Returns:
      All answers; if a limit was reached, those before it. For a ground query the evaluation ends with its proof.
    """
    start = time.perf_counter()
    tables = leveled = _Tables(clauses, query, limits)
    stop, is_whole, has_heights = None, False, False
    try:
        with paused_collection():
            # All goals first; then their answers by height.
            if limits.max_height is None:
                is_whole = tables.run(finds_goals=not tables.ends_with_proof)
                has_heights = not (tables.changed or tables.needs_heights())
                if not has_heights:
                    leveled = tables.again()
                    leveled.run()
                    tables, has_heights = leveled, True
            # Within a height, goals come from answers within it: again, until there are no new ones.
            n_known, tables.opens_goals = 1, False
            while not has_heights:
                is_whole = tables.run()
                has_heights = tables.count_goals() <= n_known
                if not has_heights:
                    n_known, tables = tables.count_goals(), tables.again()
    except RowBudgetExceeded as error:
        stop = error
        # The answers of the first run may be all, or few where it found goals.
        tables = max(tables, leveled, key=lambda x: x.n_atoms)
        tables.n_atoms_after_round[-2:] = [tables.n_atoms]
    counts = tables.n_atoms_after_round
    code, reason = fixpoint.describe_stop(stop, counts, limits.max_atoms)
    return Answers(
        heights={
            atom: height if has_heights or not height else None
            for atom, height in tables.root_answers().items()
            if height <= limits.most_height or not has_heights
        },
        n_atoms_after_step=tuple(counts),
        reached_fixpoint=is_whole,
        stop_reason=reason,
        stop_code=code,
        seconds=time.perf_counter() - start,
        tables=tables,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryResult:
    """Answer to a ground query: verdict, height and proof; a host-side value."""

    # whether the atom is derivable without counting as a fact itself
    verdict: Verdict
    is_fact: bool  # whether the knowledge base states the atom
    height: int | None  # of the proof; None without one
    # from other facts, of the smallest height unless a limit was reached; None unless the verdict is PROVED
    proof: Proof | None
    answers: Answers  # of the evaluation that decided the verdict


def prove_ground(clauses: Clauses, atom: Atom, limits: Limits) -> QueryResult:
    """Prove or refute a ground atom, which does not count as a fact in its own proof; arguments are those of `solve`.

    Returns:
      The verdict; for a proved atom with a checked proof of the smallest height. UNKNOWN if the time ends before the
      proof is built and checked, for which a fifth of it is kept.

    Raises:
      AssertionError: if the proof does not hold, which no input may cause.
    """
    budget, identity = limits.budget, limits.object_identity
    search = replace(budget, deadline=budget.deadline.share(0.8))
    found = solve(clauses, atom, replace(limits, budget=search))
    proof, height = None, None
    if found.heights:
        found.tables.limits = limits
        try:
            with paused_collection():
                proof = found.tables.build_proof(atom)
                checked(clauses, proof, identity, budget=budget)
                height = proof_height(proof)
        except TimeBudgetExceeded as error:
            proof = None
            found = replace(
                found,
                stop_reason=f"the proof that is found takes {error} to build",
                stop_code=StopCode.TIME_LIMIT,
            )
        # Before a limit the proof may be higher than need be.
        if height is not None and height > limits.most_height:
            proof, height = None, None
    verdict = Verdict.REFUTED if found.complete else Verdict.UNKNOWN
    return QueryResult(
        verdict=verdict if proof is None else Verdict.PROVED,
        is_fact=bool(clauses.facts_among([atom])),
        height=height,
        proof=proof,
        answers=found,
    )


def checked(
    clauses: Clauses,
    proof: Proof,
    object_identity: bool,
    max_height: int | None = None,
    budget: RowBudget = UNBOUNDED,
) -> Proof:
    """Return a proof, which is not of a fact, after it is checked, its conditions without the tables.

    Args:
      budget: whose deadline bounds the check.

    Raises:
      AssertionError: it does not hold, which no input may cause.
      TimeBudgetExceeded: the time is over.
    """
    leaves = {node.goal for node in proof.nodes if node.rule is None}
    holds = clauses.checker(
        object_identity, RowBudget(deadline=budget.deadline)
    )
    errors = check_proof(
        proof,
        clauses.facts_among(leaves),
        clauses.rules,
        n_constants=clauses.sizes.n_constants,
        max_height=max_height,
        leave_one_out=True,
        object_identity=object_identity,
        holds=holds,
    )
    assert not errors, errors
    return proof


def proof_by_rule(
    clauses: Clauses,
    atom: Atom,
    rule: int,
    object_identity: bool,
    probability: float | None = None,
) -> Proof | None:
    """Return the checked proof of an atom by one application of a rule to other facts; None if it does not derive it.

    Args:
      clauses: facts and rules, for many atoms.
      atom: padded to the width of the knowledge base.
      rule: id of the rule; of its bodies the one with the smallest constants is taken, in order of occurrence.
      probability: of this choice.
    """
    (applied,) = rules_from_kb(clauses.kb, [rule])

    def find(step: _Step, keys: Collection[Packed]) -> Found:
        return clauses.find(step.atom[0], step.arity, step.bound, keys, atom)

    for body in clauses.bodies(applied, atom, object_identity, find, UNBOUNDED):
        ways = [(0, rule, body)]
        proof = _build_tree(
            clauses, atom, ways, {rule: probability}, atom.__ne__
        )
        return checked(clauses, proof, object_identity)
    return None


# -- the most probable proofs

# cost of a derivation with the least proofs of its body, rule, and body
_Way = tuple[float, int, tuple[Atom, ...]]
# A cost is an integer, so that sums are exact: applications of a rule, above them -log(confidence) in units of 2^-40,
# above it applications of rules of confidence 0.
_COST_BITS = 32
_LOG_BITS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class BestProofs:
    """The most probable proofs of an atom, best first; a host-side value."""

    # the nodes of rules have their confidences as probabilities
    proofs: tuple[Proof, ...]
    probabilities: tuple[float, ...]  # the product of these, of each proof
    # one line that says why there may be others that belong to the first ones; empty if there are none
    stop_reason: str


def best_proofs(
    clauses: Clauses,
    atom: Atom,
    limits: Limits,
    k: int,
    confidences: Callable[[Collection[int]], Mapping[int, float]],
) -> BestProofs:
    """Find the k most probable proofs of a ground atom from other facts, each different in a rule or a fact.

    The probability of a proof is the product of the confidences of the rules that it applies, each as often as it is
    applied; of proofs with equal ones, that with fewer applications comes first. A proof is a tree: no goal is needed
    for its own proof, and a goal that is a fact has no other proof.

    Args:
      atom: padded to the width of the knowledge base.
      confidences: of rules, by id.

    Raises:
      AssertionError: a proof does not hold, which no input may cause.

    Source: Knuth 1977, "A generalization of Dijkstra's algorithm", for the least costs, by which Huang and Chiang 2005,
    "Better k-best parsing", take alternatives as they are needed.
    """
    tables = _Tables(clauses, atom, limits)
    tables.ends_with_proof = False
    confidence: Mapping[int, float] = {}
    proofs: list[Proof] = []
    probabilities: list[float] = []
    reason = ""

    # What the atom leads to first; then its proofs, one by one.
    try:
        with paused_collection():
            tables.run()
            tables.collect_held()
            bodies = _collect_bodies(tables, atom)
            rules = {rule for ways in bodies.values() for rule, _ in ways}
            confidence = confidences(rules)
            cost = {rule: _rule_cost(confidence[rule]) for rule in rules}
            ways = _rank_ways(bodies, cost)
            for chosen in islice(_iter_proofs(tables, ways), k):
                proof = _build_tree(
                    clauses, atom, chosen, confidence, tables.is_fact
                )
                identity = limits.object_identity
                checked(clauses, proof, identity, budget=limits.budget)
                proofs.append(proof)
                probabilities.append(
                    math.prod(confidence[rule] for _, rule, _ in chosen)
                )
    except RowBudgetExceeded as error:
        obstacle = str(error) or f"more than {limits.max_atoms:,} to hold"
        reason = f"stopped after {len(proofs)} proofs: {obstacle}"
    return BestProofs(
        proofs=tuple(proofs),
        probabilities=tuple(probabilities),
        stop_reason=reason,
    )


def count_confidences(
    clauses: Clauses, is_program: bool, limits: Limits
) -> Callable[[Collection[int]], dict[int, float]]:
    """Return a function that counts the confidences of rules in the facts, as `best_proofs` wants them.

    Args:
      clauses: the counts of their rules are made where they have none.
      is_program: the rules are the clauses of a program: their confidence is 1.
    """

    def confidences(rules: Collection[int]) -> dict[int, float]:
        kb, sizes = clauses.kb, clauses.sizes
        if is_program:
            return dict.fromkeys(rules, 1.0)
        if not kb.body_pairs.any():
            known = torch.zeros((sizes.n_rules, 3), dtype=torch.int64)
            known[[*rules]] = -1
            counts = fixpoint.count_rules(
                kb,
                sizes,
                object_identity=limits.object_identity,
                known=known,
                budget=limits.budget,
            )
            kb = fixpoint.with_confidence(kb, counts)
        support, body_pairs = kb.support.double(), kb.body_pairs.double()
        counted = kb._replace(support=support, body_pairs=body_pairs)
        values = rule_confidence(counted)
        return {rule: float(values[rule]) for rule in rules}

    return confidences


def _rule_cost(confidence: float) -> int:
    """Return the cost of one application of a rule."""
    if confidence <= 0:
        return (1 << _COST_BITS + _LOG_BITS) + 1
    return (round(-math.log(confidence) * 2**40) << _COST_BITS) + 1


def _collect_bodies(
    tables: _Tables, root: Atom
) -> dict[Atom, list[tuple[int, tuple[Atom, ...]]]]:
    """Return the rules that derive each atom which the root leads to, each with its ground body; none for a fact."""
    clauses, limits = tables.clauses, tables.limits
    find = partial(tables.find_before, math.inf)
    bodies: dict[Atom, list[tuple[int, tuple[Atom, ...]]]] = {root: []}
    goals = [root]
    n_bodies = 0
    for goal in goals:  # grows while it is traversed
        for rule in clauses.rules_of(goal[0]):
            for body in clauses.bodies(
                rule, goal, limits.object_identity, find, limits.budget
            ):
                bodies[goal].append((rule.id, body))
                new = [atom for atom in {*body} if atom not in bodies]
                bodies |= {atom: [] for atom in new}
                goals += [atom for atom in new if not tables.is_fact(atom)]
        n_bodies += len(bodies[goal])
        if n_bodies > limits.max_atoms:
            raise fixpoint.MaxAtomsExceeded
    return bodies


def _rank_ways(
    bodies: Mapping[Atom, Sequence[tuple[int, tuple[Atom, ...]]]],
    cost: Mapping[int, int],
) -> dict[Atom, list[_Way]]:
    """Return the ways to derive each atom, the cheapest first; costs fall until no way gets cheaper (Bellman-Ford)."""
    users: dict[Atom, set[Atom]] = defaultdict(set)
    for goal, found in bodies.items():
        for atom in chain(*(body for _, body in found)):
            users[atom].add(goal)
    least = {goal: math.inf if found else 0 for goal, found in bodies.items()}
    ways: dict[Atom, list[_Way]] = {}
    active = {*bodies}
    while active:
        changed: list[Atom] = []
        for goal in active:
            ways[goal] = sorted(
                (cost[rule] + sum(least[atom] for atom in body), rule, body)
                for rule, body in bodies[goal]
            )
            if ways[goal] and ways[goal][0][0] < least[goal]:
                least[goal] = ways[goal][0][0]
                changed.append(goal)
        active = {user for goal in changed for user in users[goal]}
    return ways


def _iter_proofs(
    tables: _Tables, ways: Mapping[Atom, Sequence[_Way]]
) -> Iterator[list[_Way]]:
    """Yield the proofs of the root by ascending cost: the way of each goal that is no fact, leftmost goal first.

    A partial proof costs what its ways and the least proofs of its open goals do. The cheapest one is taken, and its
    leftmost goal replaced: by the next way of the same goal, and below the chosen way.
    """
    heap: list[tuple[float, int, int, _Way, Any]] = []
    number, most = count(), tables.limits.max_height

    def push(base: float, n: int, chosen: Any, goals: Any, left: Any) -> None:
        """Add the partial proof with the next way of its leftmost goal; of equal ones the longest is taken first."""
        way = next(left, None)
        if way:
            state = base, n, chosen, goals, left
            heappush(heap, (base + way[0], -n, next(number), way, state))

    root: Any = tables.query, None, 0
    push(0, 0, None, (root, None), _possible_ways(ways, root, most))
    while heap:
        tables.limits.budget.spend(1)
        if len(heap) > tables.limits.max_atoms:
            raise fixpoint.MaxAtomsExceeded
        total, _, _, way, state = heappop(heap)
        push(*state)

        # The goals of the way's body take the place of its goal.
        _, n, chosen, ((goal, above, depth), goals), _ = state
        for atom in reversed([atom for atom in way[2] if ways[atom]]):
            goals = (atom, (goal, above), depth + 1), goals
        if goals:
            possible = _possible_ways(ways, goals[0], most)
            total -= ways[goals[0][0]][0][0]  # the least cost of the next goal
            push(total, n + 1, (way, chosen), goals, possible)
        else:
            yield [*iter_links((way, chosen))][::-1]


def _possible_ways(
    ways: Mapping[Atom, Sequence[_Way]], leaf: Any, max_height: int | None
) -> Iterator[_Way]:
    """Yield the ways of an open goal that need no goal above it; none at the greatest height."""
    goal, above, depth = leaf
    if depth == max_height:
        return
    line = {goal, *iter_links(above)}
    for way in ways[goal]:
        if line.isdisjoint(way[2]):
            yield way


def iter_links(link: Any) -> Iterator[Any]:
    """Yield the values of a linked list."""
    while link:
        value, link = link
        yield value


def _build_tree(
    clauses: Clauses,
    root: Atom,
    ways: Iterable[_Way],
    probability: Mapping[int, float | None],
    is_fact: Callable[[Atom], bool],
) -> Proof:
    """Build the proof of a root whose goals, leftmost first, are derived in the given ways."""
    left = iter(ways)

    def derive(goal: Atom) -> LastStep:
        """Return the next way to derive a goal, unless it is a fact."""
        if is_fact(goal):
            return FACT
        _, rule, body = next(left)
        return rule, body, probability[rule]

    n_constants = clauses.sizes.n_constants
    return assemble(clauses.rules, n_constants, root, derive, is_tree=True)


# -- what the rules lack


class FailedRules(NamedTuple):
    """Rules whose head matches an atom that they do not derive, each with goals that nothing satisfies together."""

    # The first ones whose head matches: the id, and goals of the body.
    rules: list[tuple[int, tuple[Atom, ...]]]
    n_matching: int  # rules whose head matches the atom


def failed_rules(found: Answers, atom: Atom, n_rules: int) -> FailedRules:
    """Return the first rules that match an unproved atom, each with body goals that nothing satisfies together.

    The goals are those that were solved until no row was left, in order of the body.

    Args:
      found: for the atom.
      n_rules: the most rules to list.
    """
    tables = found.tables
    key = _unpack(tables.root.key)
    matching = [
        body
        for body in tables.bodies(tables.root)
        if body.rule.conditions or body.start(key, tables.n_constants)
    ]
    rules: list[tuple[int, tuple[Atom, ...]]] = []
    for body in matching[:n_rules]:
        unifier = most_general_unifier(body.rule.head, atom, tables.n_constants)
        tried = {step.atom for step in body.plan.steps[: body.reached + 1]}
        goals = [a for a in body.rule.body if a in tried]
        goals += body.rule.conditions
        unified = tuple(substitute_atom(goal, unifier or {}) for goal in goals)
        rules.append((body.rule.id, unified))
    return FailedRules(rules, len(matching))


# -- fact proofs


class FactHeights(NamedTuple):
    """Smallest heights of proofs of facts from other facts."""

    height: I64[Tensor, "n"]  # -1 without a proof, or undecided
    n_undecided: int  # distinct facts for which a bound was reached first


def fact_heights(
    kb: KnowledgeBase,
    sizes: KBSizes,
    facts: I32[Tensor, "n W"],
    limits: Limits,
    memory_share: float = 1.0,
) -> FactHeights:
    """Compute, per fact, the smallest height of a proof from other facts.

    Args:
      facts: of the knowledge base, in any order; repetitions allowed.
      memory_share: of the largest chunks of questions whose groundings may be held at once.
    """
    facts, row_of_fact = unique_rows_with_inverse(facts)
    height = torch.full_like(facts[:, 0], -1, dtype=torch.int64)
    if limits.max_height == 0:
        return FactHeights(height[row_of_fact], 0)

    # At height 1, facts of two arguments by questions.
    is_asked = is_binary(facts)
    asked = true_rows(is_asked)
    try:
        if len(asked):
            for row, _ in derive.iter_derivations(
                derive.plan_rules(kb, sizes, memory_share),
                kb,
                facts[asked].long(),
                TAIL,
                object_identity=limits.object_identity,
                budget=limits.budget,
            ):
                height = height.index_fill(0, asked[row], 1)
    except RowBudgetExceeded:
        return FactHeights(height[row_of_fact], int((height < 0).sum()))

    # The others one by one.
    is_open = height < 0
    if limits.max_height == 1:
        is_open = is_open & ~is_asked
    clauses = Clauses(kb, sizes)
    found: list[int] = []
    n_undecided = 0
    for fact in atom_tuples(facts[is_open]):
        answers = solve(clauses, fact, limits)
        known = answers.heights.get(fact)
        n_undecided += known is None and not answers.complete
        found.append(-1 if known is None else known)
    height = height.masked_scatter(is_open, height.new_tensor(found))
    return FactHeights(height[row_of_fact], n_undecided)
