"""Answers to queries from the goals that they lead to, with proofs, and verdicts: proved, refuted, or unknown.

`solve` asks each goal with the arguments that are known and keeps its answers (tabling), so that recursion ends and the
work is what the query reaches. The known arguments of one body atom are passed on to the next, as magic sets do, facts
before goals. Rows of a body are sets of tuples: a goal that trickles costs microseconds, and a large step is one
comprehension. T_P (`fixpoint`) is for what is asked of all atoms.

`prove_ground` gives the verdict on a ground atom; `failed_rules` tells what each rule lacks for an atom that is not
proved. `find_ground_body` gives the facts from which a given rule derives an atom. `from_model` builds a proof from a
function that derives one goal at a time, along decreasing height; `from_trace` replays a search's choices. Both work
on a `Program`, the facts and rules as plain Python values. Nothing here recurses, so proofs may be thousands of nodes
deep.

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
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice, repeat
from operator import itemgetter
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from funcppo.core.host import Deadline, paused_collection
from funcppo.core.types import I32, I64
from funcppo.kg.logic import derive, fixpoint
from funcppo.kg.logic.fixpoint import (
    StepCallback,
    StopCode,
    Verdict,
    ignore_progress,
)
from funcppo.kg.logic.joins import (
    RowBudget,
    RowBudgetExceeded,
    Rule,
    TimeBudgetExceeded,
    atom_variables,
    most_general_unifier,
    object_identity_constraints,
    rules_from_kb,
    substitute_rule,
    substitute_terms,
)
from funcppo.kg.logic.kb import (
    TAIL,
    KBSizes,
    KnowledgeBase,
    contains,
    find_postings,
    is_binary,
)
from funcppo.kg.logic.proof import Atom, Node, Proof, check_proof
from funcppo.kg.logic.row_index import (
    Span,
    atom_tuples,
    expand_ranges,
    int_list,
    rule_tuples,
    unique_rows_with_inverse,
    unique_values,
)

Clause = tuple[Atom, ...]  # head first; a fact is a clause without a body
# The clause that resolves the leftmost goal: its kind, its id, and the probability of this choice under the policy;
# None if no policy made it.
Choice = tuple[Literal["rule", "fact"], int, float | None]
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


# -- plans: in which order a body is solved

Row = tuple[int, ...]
Picker = Callable[[Row], Row]
# two terms, and which pairs of constants pass
Test = tuple[Callable[[int, int], bool], int, int]


class _Step(NamedTuple):
    """An atom of a body, joined with rows of the terms that are known before it."""

    atom: Atom  # of the rule
    predicate: int
    bound: Row  # argument positions whose terms are known
    arity: int
    key: Picker  # the known arguments, of a row
    kept: Picker  # what later steps need of a row
    # what later steps need of the other arguments; None: all of it
    extend: Callable[[Iterable[Row]], set[Row]] | None
    tests: tuple[Test, ...]  # on positions in the new row
    rest: Picker | None  # what is needed once the tests are passed; None: all


class _Plan(NamedTuple):
    """How a body is solved: from a row of given terms, step by step, to the output terms."""

    constants: Row  # of the rule, behind the given terms in the first row
    tests: tuple[Test, ...]  # on the first row
    steps: tuple[_Step, ...]
    layouts: tuple[Row, ...]  # the terms of a row before each step


def _picker(positions: Sequence[int], width: int) -> Picker:
    """Return a function that selects positions of a row of a width."""
    positions = tuple(positions)
    if positions == tuple(range(width)):
        return lambda row: row
    if not positions:
        return lambda row: ()
    if len(positions) == 1:
        (only,) = positions
        return lambda row: (row[only],)
    return cast("Picker", itemgetter(*positions))


def _pick_terms(layout: Row, terms: Iterable[int]) -> Picker:
    """Return a function that selects terms of a row with a layout."""
    return _picker([layout.index(term) for term in terms], len(layout))


def _arguments(atom: Atom) -> Row:
    """Return the arguments of an atom, without padding."""
    return tuple(term for term in atom[1:] if term)


def _extender(
    terms: Row, wanted: Sequence[int]
) -> Callable[[Iterable[Row]], set[Row]] | None:
    """Return a function from tuples that match some terms to the wanted terms of each; None for all as they are."""
    repeated = [
        (i, terms.index(term))
        for i, term in enumerate(terms)
        if terms.index(term) < i
    ]
    if not repeated and tuple(wanted) == terms:
        return None
    pick = _pick_terms(terms, wanted)
    if not repeated:
        return lambda rows: set(map(pick, rows))
    return lambda rows: {
        pick(row) for row in rows if all(row[i] == row[j] for i, j in repeated)
    }


def _place_tests(tests: Iterable[Test], layout: Row) -> tuple[Test, ...]:
    """Return tests on terms as tests on the positions of a row."""
    return tuple(
        (passes, layout.index(left), layout.index(right))
        for passes, left, right in tests
    )


def _passing(rows: Iterable[Row], tests: Sequence[Test]) -> set[Row]:
    """Return the rows that pass every test."""
    return {
        row
        for row in rows
        if all(passes(row[i], row[j]) for passes, i, j in tests)
    }


def _plan_body(
    body: Sequence[Atom],
    given: Sequence[int],
    output: Sequence[int],
    tests: Sequence[Test],
    n_constants: int,
    rank: Callable[[Atom, AbstractSet[int]], tuple[int, int]],
) -> _Plan:
    """Plan how to solve a body.

    Args:
      given: the variables whose constants are known first.
      output: the terms to know in the end.
      tests: on terms of the body, of `given` and of `output`; each is made once its terms are known.
      rank: of an atom given the known terms; the atom that ranks least is solved next.
    """
    mentioned = [*output, *(t for test in tests for t in test[1:])]
    for atom in body:
        mentioned += _arguments(atom)
    constants = tuple(sorted({t for t in mentioned if t <= n_constants}))
    layout = (*given, *constants)
    now, later = _split_tests(tests, layout)
    plan_tests = _place_tests(now, layout)

    steps: list[_Step] = []
    layouts: list[Row] = []
    remaining = list(body)
    while remaining:
        known: set[int] = set(layout)
        atom = min(remaining, key=lambda atom: rank(atom, known))
        remaining.remove(atom)
        new = [t for t in dict.fromkeys(_arguments(atom)) if t not in known]
        now, later = _split_tests(later, (*layout, *new))
        needed = {*output, *(t for test in later for t in test[1:])}
        needed.update(t for other in remaining for t in _arguments(other))
        layouts.append(layout)
        step, layout = _plan_step(atom, layout, new, needed, now)
        steps.append(step)
    return _Plan(constants, plan_tests, tuple(steps), (*layouts, layout))


def _split_tests(
    tests: Sequence[Test], known: Sequence[int]
) -> tuple[list[Test], list[Test]]:
    """Return the tests whose terms are known, and the others."""
    is_now = [left in known and right in known for _, left, right in tests]
    now = [test for test, ready in zip(tests, is_now) if ready]
    return now, [test for test, ready in zip(tests, is_now) if not ready]


def _plan_step(
    atom: Atom,
    layout: Row,
    new: Sequence[int],
    needed: AbstractSet[int],
    tests: Sequence[Test],
) -> tuple[_Step, Row]:
    """Plan one step; return it and the layout of the rows after it."""
    arguments = _arguments(atom)
    tested = needed | {t for test in tests for t in test[1:]}
    kept = tuple(t for t in layout if t in tested)
    wanted = tuple(t for t in new if t in tested)
    combined = kept + wanted
    after = tuple(t for t in combined if t in needed)

    # Arguments that are known make the key of a goal; the others are its answer.
    bound = tuple(i for i, t in enumerate(arguments) if t in layout)
    free = tuple(t for t in arguments if t not in layout)
    step = _Step(
        atom=atom,
        predicate=atom[0],
        bound=bound,
        arity=len(arguments),
        key=_pick_terms(layout, [arguments[i] for i in bound]),
        kept=_pick_terms(layout, kept),
        extend=_extender(free, wanted),
        tests=_place_tests(tests, combined),
        rest=None if after == combined else _pick_terms(combined, after),
    )
    return step, after


# rows that a step makes between two looks at its bounds
_ROWS_AT_ONCE = 1 << 18
# parts of rows, and what is added to each of them
Pair = tuple[Collection[Row], Collection[Row]]


def _combine(
    step: _Step, pairs: Sequence[Pair], budget: RowBudget, max_held: int
) -> set[Row]:
    """Return the rows of a step: for each pair, each part of a row with each end that was found for it.

    Raises:
      RowBudgetExceeded: more than `max_held` are to be held at once, or the budget ends.
    """
    ends = list(accumulate(len(parts) * len(found) for parts, found in pairs))
    new: set[Row] = set()
    first = before = 0
    while first < len(pairs):
        # At least one pair, and otherwise no more rows than are made at once.
        last = max(first + 1, bisect_right(ends, before + _ROWS_AT_ONCE))
        budget.spend(ends[last - 1] - before)
        chunk = pairs[first:last]
        if ends[last - 1] - before > _ROWS_AT_ONCE:
            new |= _combine_large(step, *chunk[0], budget.deadline)
        else:
            rows = {
                r + end for part, found in chunk for r in part for end in found
            }
            new = _after(step, rows) | new if new else _after(step, rows)
        first, before = last, ends[last - 1]
        if len(new) > max_held:
            raise fixpoint.MaxAtomsExceeded
    return new


def _combine_large(
    step: _Step,
    parts: Collection[Row],
    found: Collection[Row],
    deadline: Deadline,
) -> set[Row]:
    """Return the rows of a step of one pair, in portions between which the time is looked at."""
    new: set[Row] = set()
    n_at_once = max(1, _ROWS_AT_ONCE // len(found))
    remaining = iter(parts)
    while portion := list(islice(remaining, n_at_once)):
        if deadline.is_over:
            raise TimeBudgetExceeded("more time than was left")
        new |= _after(step, {row + end for row in portion for end in found})
    return new


def _join(
    step: _Step,
    rows: set[Row],
    found: Mapping[Row, Collection[Row]],
    budget: RowBudget,
    max_held: int,
) -> set[Row]:
    """Return the rows of a step: what is kept of each row with each part that was found for its key."""
    pairs = [
        ((kept,), found[key])
        for key, kept in set(zip(map(step.key, rows), map(step.kept, rows)))
        if key in found
    ]
    return _combine(step, pairs, budget, max_held)


def _after(step: _Step, rows: set[Row]) -> set[Row]:
    """Return what a step leaves of its rows: those that pass its tests, as far as later steps need them."""
    if step.tests:
        rows = _passing(rows, step.tests)
    return rows if step.rest is None else set(map(step.rest, rows))


# -- facts

# facts of a predicate that are indexed whole; larger ones are looked up in the tables of the knowledge base
_MAX_INDEXED_FACTS = 1 << 16


class Clauses:
    """Facts and rules of a knowledge base, read as goals ask for them and kept; several proofs may share them."""

    def __init__(self, kb: KnowledgeBase, sizes: KBSizes) -> None:
        self.kb, self.sizes = kb, sizes
        self._fact_offsets = int_list(kb.fact_offsets)
        self._rule_offsets = int_list(kb.rule_offsets)
        self._indices: dict[tuple[int, Row], dict[Row, list[Row]]] = {}
        self._rules: dict[int, list[Rule]] = {}

    def rules_of(self, predicate: int) -> list[Rule]:
        """Return the rules whose head has a predicate, in file order."""
        if predicate not in self._rules:
            span = slice(*self._rule_offsets[predicate : predicate + 2])
            ids = int_list(self.kb.rule_ids_by_predicate[span])
            self._rules[predicate] = rules_from_kb(self.kb, ids)
        return self._rules[predicate]

    def find(
        self, predicate: int, arity: int, bound: Row, keys: Collection[Row]
    ) -> Mapping[Row, Sequence[Row]]:
        """Return the other arguments of the facts with each key, the arguments at the bound positions."""
        index = self._indices.get((predicate, bound))
        if index is not None:
            return index
        first, last = self._fact_offsets[predicate : predicate + 2]
        few = max(_MAX_INDEXED_FACTS, 4 * len(keys))
        if not bound or last - first <= few:
            index = _group_facts(self.kb.facts[first:last], arity, bound)
            self._indices[predicate, bound] = index
            return index
        return _group_facts(
            self._matching(predicate, bound, keys), arity, bound
        )

    def count(self, predicate: int, place: int, argument: int) -> int:
        """Return how many facts of a large predicate have an argument at a place; 0 for few facts or no argument."""
        first, last = self._fact_offsets[predicate : predicate + 2]
        if not argument or last - first <= _MAX_INDEXED_FACTS:
            return 0
        columns = self.kb.fact_offsets.new_tensor(
            [[place], [predicate], [argument]], dtype=torch.int64
        )
        return int(find_postings(self.kb, self.sizes, *columns).length)

    def _matching(
        self, predicate: int, bound: Row, keys: Collection[Row]
    ) -> Tensor:
        """Return the facts that have one of the keys, found by the argument that matches the fewest."""
        kb = self.kb
        wanted = torch.tensor(list(keys), device=kb.facts.device)
        spans: list[Span] = []
        for i, place in enumerate(bound):
            argument = unique_values(wanted[:, i])
            span = find_postings(
                kb,
                self.sizes,
                torch.full_like(argument, place),
                torch.full_like(argument, predicate),
                argument,
            )
            spans.append(span)
        fewest = min(spans, key=lambda span: int(span.length.sum()))
        _, position = expand_ranges(*fewest)
        facts = kb.facts[kb.argument_postings[position].long()]
        for i, place in enumerate(bound):
            facts = facts[torch.isin(facts[:, place + 1], wanted[:, i])]
        return facts


def _group_facts(facts: Tensor, arity: int, bound: Row) -> dict[Row, list[Row]]:
    """Return the free arguments of facts of one predicate by their bound arguments."""
    index: dict[Row, list[Row]] = {}
    free = [i for i in range(arity) if i not in bound]
    columns = [int_list(facts[:, 1 + i]) for i in range(arity)]
    n = len(facts)
    keys = zip(*(columns[i] for i in bound)) if bound else repeat((), n)
    rows = zip(*(columns[i] for i in free)) if free else repeat((), n)
    for key, row in zip(keys, rows):
        index.setdefault(key, []).append(row)
    return index


# -- tables of goals


class _Site:
    """A place in a rule's body that waits for answers: the rows that wait, by goal, and what they have received."""

    def __init__(self, body: _Body, position: int, group: _Group) -> None:
        self.body, self.position, self.group = body, position, group
        self.step = body.plan.steps[position]
        self.rows: dict[Row, set[Row]] = {}
        # what later steps need of the answers, each once; unused where that is all of them
        self.received: dict[Row, set[Row]] = {}

    def receive(self, key: Row, answers: Sequence[Row]) -> Collection[Row]:
        """Return what later steps need of new answers to a goal and did not receive before."""
        if self.step.extend is None:
            return answers
        received = self.received.setdefault(key, set())
        new = self.step.extend(answers) - received
        received |= new
        return new

    def received_so_far(self, key: Row) -> Collection[Row]:
        """Return what later steps need of the answers that a goal has given out."""
        if self.step.extend is not None:
            return self.received[key]
        group = self.group
        n_seen, answers = group.n_seen[key], group.order[key]
        return answers if n_seen == len(answers) else answers[:n_seen]


class _Body:
    """The body of a rule, solved for the goals of a group; rows wait before each of its steps."""

    def __init__(
        self,
        group: _Group,
        rule: Rule,
        tests: Sequence[Test],
        tables: _Tables,
        first_key: Row,
    ) -> None:
        self.group, self.rule, self.tests = group, rule, tests
        # plans that find the values of one variable when those before it are known
        self.searches: dict[int | None, _Plan] = {}
        n_constants = tables.n_constants
        head = _arguments(rule.head)
        self.head_key = tuple(head[i] for i in group.bound)
        values = dict(zip(self.head_key, first_key))
        self.plan = _plan_body(
            list(dict.fromkeys(rule.body)),
            [term for term in values if term > n_constants],
            head,
            tests,
            n_constants,
            partial(tables.rank, values=values),
        )
        self.pending: list[set[Row]] = [set() for _ in self.plan.layouts]
        self.reached = -1  # the last step that some row reached
        self.goal_keys = [
            _pick_terms(layout, self.head_key) for layout in self.plan.layouts
        ]
        free = [t for i, t in enumerate(head) if i not in group.bound]
        self.answer = _pick_terms(self.plan.layouts[-1], free)
        self.sites: list[_Site | None] = [None] * len(self.plan.steps)
        self.key_of_kept = self._last_step_key(free)

    def _last_step_key(self, free: Sequence[int]) -> Picker | None:
        """Return how the head's goal follows from what the last step keeps, if its answers are those of the head."""
        if not self.plan.steps:
            return None
        step, (*_, before, after) = self.plan.steps[-1], self.plan.layouts
        n_kept = len(after) - len(free)
        kept = after[:n_kept]
        is_same = step.extend is None and step.rest is None and not step.tests
        if not is_same or after[n_kept:] != tuple(free):
            return None
        if not set(self.head_key) <= set(kept) or set(free) & set(before):
            return None
        return _pick_terms(kept, self.head_key)

    def start(self, key: Row, n_constants: int) -> Row | None:
        """Return the first row for a goal; None if the head does not match it."""
        binding: dict[int, int] = {}
        for term, constant in zip(self.head_key, key):
            if term <= n_constants:
                binding[term] = term
            if binding.setdefault(term, constant) != constant:
                return None
        given = (c for t, c in binding.items() if t > n_constants)
        row = (*given, *self.plan.constants)
        return row if _passing([row], self.plan.tests) else None


class _Group:
    """Goals of one predicate with the same arguments known, and their answers: the other arguments."""

    def __init__(self, predicate: int, arity: int, bound: Row) -> None:
        self.predicate, self.arity, self.bound = predicate, arity, bound
        # by goal: the round in which each answer was found, the answers in this order, and how many are given out
        self.answers: dict[Row, dict[Row, int]] = {}
        self.order: dict[Row, list[Row]] = {}
        self.n_seen: dict[Row, int] = {}
        # rule applications between the root and the goal, at least
        self.depth: dict[Row, int] = {}
        self.expanded: set[Row] = set()  # goals that rules were applied to
        self.bodies: list[_Body] = []
        self.sites: list[_Site] = []
        free = [i for i in range(arity) if i not in bound]
        order = [*bound, *free]
        self.arguments = _picker([order.index(i) for i in range(arity)], arity)


Goal = tuple[_Group, Row]


class _Tables:
    """Goals that a root goal leads to, and their answers, found in rounds.

    A round gives the answers of the round before to the places in rule bodies that wait for them, and applies the rules
    to the goals that are new: each answer meets each waiting row once. An answer of round r has a proof of height at
    most r. Where all goals are there from the start, rounds are the steps of T_P and r is the least height.
    """

    def __init__(
        self,
        clauses: Clauses,
        query: Atom,
        *,
        max_height: float | None,
        max_atoms: int,
        object_identity: bool,
        budget: RowBudget,
        stops_at_root: bool,
        progress: StepCallback = ignore_progress,
        rules_of: Callable[[int], list[Rule]] | None = None,
    ) -> None:
        self.clauses, self.query = clauses, query
        self.stops_at_root = stops_at_root
        self.n_constants = clauses.sizes.n_constants
        self.max_atoms, self.object_identity = max_atoms, object_identity
        self.budget, self.progress = budget, progress
        # goals of this depth and more are answered by facts alone
        self.limit = math.inf if max_height is None else max_height
        self.groups: dict[tuple[int, Row], _Group] = {}
        self.fresh: dict[Goal, None] = {}  # to expand in the next round
        self.changed: dict[Goal, None] = {}  # with answers not given out
        # the goals that the rules of a goal led to; None where depths do not matter
        self.children: dict[Goal, set[Goal]] | None = None
        if stops_at_root or max_height is not None:
            self.children = {}
        self.n_atoms = self.n_goals = 0
        self.rules_of = rules_of or clauses.rules_of

        arguments = _arguments(query)
        bound = tuple(
            i for i, term in enumerate(arguments) if term <= self.n_constants
        )
        root = self.group(query[0], len(arguments), bound)
        self.root = root, tuple(arguments[i] for i in bound)
        self.open(*self.root, 0)
        self.n_atoms_after_round = [self.n_atoms]

    @property
    def round(self) -> int:
        """Return the number of rounds that began."""
        return len(self.n_atoms_after_round) - 1

    def find_facts(
        self, predicate: int, arity: int, bound: Row, keys: Collection[Row]
    ) -> Mapping[Row, Collection[Row]]:
        """Return what `Clauses.find` does, without the root: a ground query is no fact while it is proved."""
        found = self.clauses.find(predicate, arity, bound, keys)
        if predicate != self.query[0] or not self.stops_at_root:
            return found
        root = _arguments(self.query)
        own_key = tuple(root[i] for i in bound)
        own = tuple(t for i, t in enumerate(root) if i not in bound)
        if own_key not in keys or own not in found.get(own_key, ()):
            return found
        others = {key: found[key] for key in keys if key in found}
        others[own_key] = [row for row in others[own_key] if row != own]
        return others

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
            if t in known or t <= self.n_constants
        ]
        is_goal = int(bool(self.rules_of(atom[0])))
        if len(places) == len(arguments):
            return 2 * is_goal, 0
        if not places:
            return 4 + is_goal, 0
        constants = {t: t for t in arguments if t <= self.n_constants}
        constants |= values or {}
        n_matching = [
            self.clauses.count(atom[0], i, constants.get(arguments[i], 0))
            for i in places
        ]
        return 2 * is_goal + 1, min(n_matching)

    def group(self, predicate: int, arity: int, bound: Row) -> _Group:
        """Return the group of goals with a predicate and known arguments."""
        group = self.groups.get((predicate, bound))
        if group is None:
            group = _Group(predicate, arity, bound)
            self.groups[predicate, bound] = group
        return group

    def bodies(self, group: _Group, key: Row) -> list[_Body]:
        """Return the bodies of the rules for a group, planned for the first of its goals."""
        rules = self.rules_of(group.predicate)
        if len(group.bodies) < len(rules):
            for rule in rules:
                tests = _identity_tests(
                    rule, self.n_constants, self.object_identity
                )
                group.bodies.append(_Body(group, rule, tests, self, key))
        return group.bodies

    def open(self, group: _Group, key: Row, depth: int) -> None:
        """Add a goal with the facts that answer it, or note that it is needed at a smaller depth."""
        if key not in group.answers:
            found = self.find_facts(
                group.predicate, group.arity, group.bound, (key,)
            ).get(key, ())
            group.answers[key] = dict.fromkeys(found, 0)
            group.order[key] = list(found)
            group.n_seen[key] = len(found)
            group.depth[key] = depth
            self.n_goals += 1
            self.n_atoms += len(found)
            if self.rules_of(group.predicate) and depth < self.limit:
                self.fresh[group, key] = None
        elif depth < group.depth[key]:
            self._raise_goal((group, key), depth)

    def _raise_goal(self, goal: Goal, depth: int) -> None:
        """Lower the depth of a goal, and those of the goals that it leads to."""
        stack = [(goal, depth)]
        while stack:
            (group, key), depth = stack.pop()
            if depth >= group.depth[key]:
                continue
            group.depth[key] = depth
            if depth < self.limit:
                if key not in group.expanded:
                    self.fresh[group, key] = None
                if group.n_seen[key] < len(group.order[key]):
                    self.changed[group, key] = None
            children = (self.children or {}).get((group, key), ())
            stack += [(child, depth + 1) for child in children]

    def run(self) -> bool:
        """Run rounds until there is nothing left to do; return whether nothing was left out.

        Raises:
          RowBudgetExceeded: a bound ends the work; what was found so far stays.
        """
        group, key = self.root
        while self.fresh or self.changed:
            if self.round >= self.limit and self.children is None:
                return False
            self.progress(self.round, self.n_atoms, 0, 0)
            self.budget.spend(0)
            self.n_atoms_after_round.append(self.n_atoms)
            self._run_round()
            self.n_atoms_after_round[-1] = self.n_atoms
            if self.stops_at_root and group.answers[key]:
                if self.children is None:
                    return True
                # A smaller proof needs only goals that are less deep.
                self.limit = min(self.limit, self.round)
        return all(
            len(group.expanded) == len(group.answers)
            for group in self.groups.values()
            if self.rules_of(group.predicate)
        )

    def _run_round(self) -> None:
        """Give out the answers of the round before, apply rules to new goals, and solve the bodies that have rows."""
        active: dict[_Body, None] = {}
        for site, pairs in self._take_answers().items():
            site.body.pending[site.position + 1] |= self._answer(site, pairs)
            active[site.body] = None
        fresh, self.fresh = self.fresh, {}
        for group, key in fresh:
            if group.depth[key] < self.limit and key not in group.expanded:
                group.expanded.add(key)
                for body in self.bodies(group, key):
                    row = body.start(key, self.n_constants)
                    if row is not None:
                        body.pending[0].add(row)
                        active[body] = None
        for body in active:
            self._solve(body)

    def _take_answers(self) -> dict[_Site, list[Pair]]:
        """Return, by site, the rows that wait with what they get of the answers of the round before."""
        given: dict[_Site, list[Pair]] = {}
        changed, self.changed = self.changed, {}
        for group, key in changed:
            if group.depth[key] >= self.limit:
                continue
            answers = group.order[key][group.n_seen[key] :]
            group.n_seen[key] = len(group.order[key])
            for site in group.sites:
                if rows := site.rows.get(key):
                    pair = rows, site.receive(key, answers)
                    given.setdefault(site, []).append(pair)
        return given

    def _solve(self, body: _Body) -> None:
        """Take the waiting rows of a body through its steps, and add the answers that come out."""
        for position, step in enumerate(body.plan.steps):
            rows, body.pending[position] = body.pending[position], set()
            if rows:
                body.reached = max(body.reached, position)
                site = body.sites[position]
                if site is None and self.rules_of(step.predicate):
                    site = self._make_site(body, position)
                body.pending[position + 1] |= (
                    self._join_facts(step, rows)
                    if site is None
                    else self._join_goals(site, rows)
                )

        rows, body.pending[-1] = body.pending[-1], set()
        if rows:
            self._add_answers(body, rows)

    def _make_site(self, body: _Body, position: int) -> _Site:
        """Return a new site at a step that asks goals."""
        step = body.plan.steps[position]
        group = self.group(step.predicate, step.arity, step.bound)
        site = _Site(body, position, group)
        group.sites.append(site)
        body.sites[position] = site
        return site

    def _join_facts(self, step: _Step, rows: set[Row]) -> set[Row]:
        """Return the rows after a step that only facts answer."""
        keys = set(map(step.key, rows))
        found = self.find_facts(step.predicate, step.arity, step.bound, keys)
        if step.extend is not None:
            found = {k: step.extend(found[k]) for k in keys if k in found}
        return _join(step, rows, found, self.budget, self.max_atoms)

    def _join_goals(self, site: _Site, rows: set[Row]) -> set[Row]:
        """Ask the goals of some rows at a site; return the rows after the step, by the answers given out so far."""
        step, group = site.step, site.group
        if self.children is not None:
            self._open_children(site, rows)
        pairs: list[Pair] = []
        for key, kept in _group_rows(step, rows).items():
            known = site.rows.get(key)
            if known is None:
                if self.children is None:
                    self.open(group, key, 0)
                answers = group.order[key][: group.n_seen[key]]
                found = site.receive(key, answers)
                site.rows[key] = kept
            else:
                kept = kept - known
                known |= kept
                found = site.received_so_far(key)
            if found and kept:
                pairs.append((kept, found))
        return self._answer(site, pairs)

    def _answer(self, site: _Site, pairs: Sequence[Pair]) -> set[Row]:
        """Return the rows after a site that got answers; none where they are the answers of the rule's own goals."""
        body = site.body
        if body.key_of_kept is None or site.position + 1 < len(body.sites):
            return _combine(site.step, pairs, self.budget, self.max_atoms)
        for kept, found in pairs:
            answers = set(found)
            for row in kept:
                self.budget.spend(len(answers))
                self._add(body.group, body.key_of_kept(row), answers)
        return set()

    def _add(self, group: _Group, key: Row, answers: set[Row]) -> None:
        """Add answers to a goal."""
        known = group.answers[key]
        new = answers.difference(known)
        if new:
            known.update(dict.fromkeys(new, self.round))
            group.order[key] += new
            self.changed[group, key] = None
            self.n_atoms += len(new)
            if self.n_atoms + self.n_goals > self.max_atoms:
                raise fixpoint.MaxAtomsExceeded

    def _open_children(self, site: _Site, rows: set[Row]) -> None:
        """Open the goals of some rows, one deeper than the goals that the rows are of."""
        children = self.children
        assert children is not None
        parent, key_of = site.body.group, site.step.key
        parent_key = site.body.goal_keys[site.position]
        for row in rows:
            key, above = key_of(row), parent_key(row)
            children.setdefault((parent, above), set()).add((site.group, key))
            self.open(site.group, key, parent.depth[above] + 1)

    def _add_answers(self, body: _Body, rows: set[Row]) -> None:
        """Add what the rows of a solved body answer to their goals."""
        key_of, answer_of = body.goal_keys[-1], body.answer
        answers: dict[Row, set[Row]] = {}
        for row in rows:
            answers.setdefault(key_of(row), set()).add(answer_of(row))
        for key, found in answers.items():
            self._add(body.group, key, found)

    def root_answers(self) -> dict[Atom, int]:
        """Return the answers to the query, padded, with the round of each."""
        group, key = self.root
        padding = (0,) * (len(self.query) - 1 - group.arity)
        found: dict[Atom, int] = {}
        for answer, n in group.answers[key].items():
            atom = (self.query[0], *group.arguments(key + answer), *padding)
            # A variable of the query that occurs twice has one constant.
            unifier = most_general_unifier(self.query, atom, self.n_constants)
            if unifier is not None:
                found[atom] = n
        return found

    def needs_heights(self) -> bool:
        """Return whether the rounds of the root's answers may be greater than their heights."""
        group, key = self.root
        last = max(group.answers[key].values(), default=0)
        return (
            last > 1
            and sum(len(group.expanded) for group in self.groups.values()) > 1
        )

    def again(self) -> _Tables:
        """Return new tables with all these goals from the start, so that rounds are heights."""
        tables = _Tables(
            self.clauses,
            self.query,
            max_height=self.limit,
            max_atoms=self.max_atoms,
            object_identity=self.object_identity,
            budget=self.budget,
            progress=self.progress,
            stops_at_root=self.stops_at_root,
        )
        tables.children = None
        for (predicate, bound), group in self.groups.items():
            other = tables.group(predicate, group.arity, bound)
            for key, depth in group.depth.items():
                tables.open(other, key, depth)
        tables.n_atoms_after_round = [tables.n_atoms]
        return tables

    # -- derivations

    def locate(self, atom: Atom) -> tuple[int, _Group | None]:
        """Return the first round that gives an atom, and the group of a goal that it answers then.

        A predicate without rules has no group. The round of an atom that is not held is the largest number.
        """
        if not self.rules_of(atom[0]):
            return 0, None
        first: tuple[int, _Group | None] = sys.maxsize, None
        arguments = _arguments(atom)
        for (predicate, bound), group in self.groups.items():
            if predicate == atom[0]:
                key = tuple(arguments[i] for i in bound)
                rest = (t for i, t in enumerate(arguments) if i not in bound)
                answers = group.answers.get(key, {})
                found = answers.get(tuple(rest), sys.maxsize)
                if found < first[0]:
                    first = found, group
        return first

    def derive(self, atom: Atom) -> tuple[int, tuple[Atom, ...]] | None:
        """Return a rule that derives a held atom, and its ground body; None for a fact.

        The rule is the first in file order whose body holds in an earlier round; of its bodies, the one whose
        variables, in order of occurrence, have the smallest constants.
        """
        found, group = self.locate(atom)
        if group is None or found == 0:
            return None
        for body in group.bodies:
            ground = self._smallest_body(body, atom, found)
            if ground is not None:
                return body.rule.id, ground
        raise AssertionError(f"{list(atom)}: held without a derivation")

    def _smallest_body(
        self, body: _Body, atom: Atom, before: int
    ) -> tuple[Atom, ...] | None:
        """Return the smallest ground body of a rule for an atom, of answers before a round; None without one."""
        binding = most_general_unifier(body.rule.head, atom, self.n_constants)
        if binding is None:
            return None
        # Bind one variable after another to its smallest constant: each time a query for the values of that one.
        binding = dict(binding)
        open_variables = [
            v
            for v in _body_variables(body.rule, self.n_constants)
            if v not in binding
        ]
        for variable in open_variables or [None]:
            values = self._values(body, binding, variable, before)
            if not values:
                return None
            if variable is not None:
                (binding[variable],) = min(values)
        return substitute_rule(body.rule, binding).body

    def _values(
        self,
        body: _Body,
        binding: dict[int, int],
        variable: int | None,
        before: int,
    ) -> set[Row]:
        """Return the values of a variable in the bodies of a rule under a binding, of answers before a round."""
        plan = body.searches.get(variable)
        order = [step.atom for step in body.plan.steps]
        if plan is None:
            output = () if variable is None else (variable,)
            plan = body.searches[variable] = _plan_body(
                order,
                tuple(binding),
                output,
                body.tests,
                self.n_constants,
                lambda atom, _: (order.index(atom), 0),
            )

        rows = {(*binding.values(), *plan.constants)}
        rows = _passing(rows, plan.tests)
        for step, site in zip(plan.steps, body.sites):
            keys = set(map(step.key, rows))
            if not self.rules_of(step.predicate):
                found = self.find_facts(
                    step.predicate, step.arity, step.bound, keys
                )
            elif site is None:  # no row came so far
                return set()
            else:
                found = _answers_before(site.group, step, keys, before)
            if step.extend is not None:
                found = {k: step.extend(found[k]) for k in keys if k in found}
            rows = _join(step, rows, found, RowBudget(sys.maxsize), sys.maxsize)
        return rows


def _answers_before(
    group: _Group, step: _Step, keys: Iterable[Row], before: int
) -> dict[Row, list[Row]]:
    """Return the answers of a group's goals, of earlier rounds, that agree with the known arguments of a step."""
    known = {place: i for i, place in enumerate(step.bound)}
    free = [i for i in range(group.arity) if i not in group.bound]

    # More may be known than the goal was asked with.
    agree = [(j, known[i]) for j, i in enumerate(free) if i in known]
    pick = _picker([j for j, i in enumerate(free) if i not in known], len(free))
    found: dict[Row, list[Row]] = {}
    for key in keys:
        answers = group.answers.get(tuple(key[known[i]] for i in group.bound))
        if not answers:
            continue
        if len(agree) == len(free):
            answer = tuple(key[i] for _, i in agree)
            if answers.get(answer, before) < before:
                found[key] = [()]
            continue
        found[key] = [
            pick(answer)
            for answer, n in answers.items()
            if n < before and all(answer[j] == key[i] for j, i in agree)
        ]
    return found


def _body_variables(rule: Rule, n_constants: int) -> list[int]:
    """Return the variables of a body in order of occurrence."""
    return list(
        dict.fromkeys(
            v for atom in rule.body for v in atom_variables(atom, n_constants)
        )
    )


def _group_rows(step: _Step, rows: Iterable[Row]) -> dict[Row, set[Row]]:
    """Return what is kept of the rows of a step, by the arguments that they know."""
    waiting: dict[Row, set[Row]] = {}
    key_of, kept_of = step.key, step.kept
    for row in rows:
        key = key_of(row)
        if key in waiting:
            waiting[key].add(kept_of(row))
        else:
            waiting[key] = {kept_of(row)}
    return waiting


def _identity_tests(
    rule: Rule, n_constants: int, object_identity: bool
) -> list[Test]:
    """Return the tests that keep the variables of a rule apart, from each other and from its constants."""
    pairs = object_identity_constraints(rule, n_constants, object_identity)
    return [(operator.ne, left[0], right[0]) for left, right in pairs]


# -- the verdict


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


def solve(
    kb: KnowledgeBase,
    sizes: KBSizes,
    query: Atom,
    *,
    max_height: int | None,
    max_atoms: int,
    object_identity: bool = False,
    progress: StepCallback = ignore_progress,
    budget: RowBudget | None = None,
    clauses: Clauses | None = None,
) -> Answers:
    """Find the answers to a query from the facts and goals that it leads to; a ground query is no fact meanwhile.

    Args:
      query: padded to the width of the knowledge base; a term above the constants is a variable.
      max_height: the greatest height of a proof; None for any.
      max_atoms: the most goals and answers to hold.
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      progress: is called before each round.
      budget: bounds the rows that the joins make; None for no bound.
      clauses: of the knowledge base, for many queries; None to read them for this one.

    Returns:
      All answers; if a limit was reached, those before it. For a ground query the evaluation ends with its proof.
    """
    start = time.perf_counter()
    is_ground = max(query[1:], default=0) <= sizes.n_constants
    tables = _Tables(
        clauses or Clauses(kb, sizes),
        query,
        max_height=max_height,
        max_atoms=max_atoms,
        object_identity=object_identity,
        budget=budget or RowBudget(sys.maxsize),
        progress=progress,
        stops_at_root=is_ground,
    )
    stop: RowBudgetExceeded | None = None
    is_whole = has_heights = False

    # All goals first; then their answers by height.
    try:
        with paused_collection():
            is_whole = tables.run()
        has_heights = not tables.needs_heights()
        if not has_heights:
            leveled = tables.again()
            with paused_collection():
                leveled.run()
            tables, has_heights = leveled, True
    except RowBudgetExceeded as error:
        stop = error
        tables.n_atoms_after_round[-2:] = [tables.n_atoms]
    counts = tables.n_atoms_after_round
    code, reason = fixpoint.describe_stop(stop, counts, max_atoms)
    found = tables.root_answers()
    if has_heights and max_height is not None:
        found = {a: n for a, n in found.items() if n <= max_height}
    return Answers(
        heights={
            atom: height if has_heights or not height else None
            for atom, height in found.items()
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
    clauses: Clauses | None = None,
) -> QueryResult:
    """Prove or refute a ground atom, which does not count as a fact in its own proof; arguments are those of `solve`.

    Returns:
      The verdict; for a proved atom with a checked proof of the smallest height.

    Raises:
      AssertionError: if the proof does not hold, which no input may cause.
    """
    found = solve(
        kb,
        sizes,
        atom,
        max_height=max_height,
        max_atoms=max_atoms,
        object_identity=object_identity,
        progress=progress,
        budget=budget,
        clauses=clauses,
    )
    proof, height = None, None
    if found.heights:
        proof, height = _build_proof(kb, sizes, found.tables, atom)
        # Before a limit the proof may be higher than need be.
        if max_height is not None and height > max_height:
            proof, height = None, None
    verdict = Verdict.REFUTED if found.complete else Verdict.UNKNOWN
    query = torch.tensor(atom, device=kb.facts.device)
    return QueryResult(
        verdict=verdict if proof is None else Verdict.PROVED,
        is_fact=bool(contains(kb, sizes, query)),
        height=height,
        proof=proof,
        answers=found,
    )


def _build_proof(
    kb: KnowledgeBase, sizes: KBSizes, tables: _Tables, atom: Atom
) -> tuple[Proof, int]:
    """Build and check a proof of an atom that the tables hold and that is not a fact; return it with its height."""
    derivations: dict[Atom, tuple[int, tuple[Atom, ...]]] = {}
    leaves: set[Atom] = set()
    goals = [atom]
    for goal in goals:  # grows while it is traversed
        derivation = tables.derive(goal)
        if derivation is None:
            leaves.add(goal)
        elif goal not in derivations:
            derivations[goal] = derivation
            goals += derivation[1]

    rules = rule_tuples(kb.rules)
    program = make_program(leaves, rules, sizes.n_constants)
    proof = from_model(
        program, derivations.__getitem__, atom, leave_one_out=False
    )
    asked = torch.tensor(sorted(leaves) or [atom], device=kb.facts.device)
    facts = atom_tuples(asked[contains(kb, sizes, asked)])
    height = proof_height(proof)
    errors = check_proof(
        proof,
        frozenset(facts),
        rules,
        n_constants=sizes.n_constants,
        max_height=height,
        leave_one_out=True,
        object_identity=tables.object_identity,
    )
    assert not errors, errors
    return proof, height


def proof_height(proof: Proof) -> int:
    """Return the most rule applications on one branch of a proof."""
    heights: dict[int, int] = {}
    stack = [0]
    while stack:
        node = proof.nodes[stack[-1]]
        waiting = [child for child in node.children if child not in heights]
        if waiting:
            stack += waiting
            continue
        below = [heights[child] for child in node.children]
        is_fact = node.rule is None
        heights[stack.pop()] = 0 if is_fact else 1 + max(below, default=0)
    return heights[0]


def find_ground_body(
    clauses: Clauses, atom: Atom, rule: int, object_identity: bool
) -> tuple[Atom, ...] | None:
    """Find facts from which a given rule derives an atom: the rule's ground body, without the atom itself.

    Args:
      clauses: facts and rules, for many atoms.
      atom: padded to the width of the knowledge base.
      rule: id of the rule.
      object_identity: different variables of a rule bind different constants, none of which the rule names.

    Returns:
      The body with the smallest constants, in order of occurrence; None if there is none.
    """
    (applied,) = rules_from_kb(clauses.kb, [rule])
    if applied.head[0] != atom[0]:
        return None
    tables = _Tables(
        clauses,
        atom,
        max_height=1,
        max_atoms=sys.maxsize,
        object_identity=object_identity,
        budget=RowBudget(sys.maxsize),
        stops_at_root=True,
        rules_of=lambda predicate: [applied] if predicate == atom[0] else [],
    )
    tables.run()
    if not tables.root_answers():
        return None
    _, body = tables.derive(atom) or (rule, ())
    return body


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
    arguments = _arguments(atom)
    tables = found.tables
    group = tables.group(atom[0], len(arguments), tuple(range(len(arguments))))
    matching = [
        body
        for body in tables.bodies(group, arguments)
        if body.start(arguments, tables.n_constants) is not None
    ]

    rules: list[tuple[int, tuple[Atom, ...]]] = []
    for body in matching[:n_rules]:
        unifier = most_general_unifier(body.rule.head, atom, tables.n_constants)
        tried = {step.atom for step in body.plan.steps[: body.reached + 1]}
        goals = substitute_rule(
            replace(
                body.rule, body=tuple(a for a in body.rule.body if a in tried)
            ),
            unifier or {},
        ).body
        rules.append((body.rule.id, goals))
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
      budget: bounds the rows that all joins make.
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
            n_undecided = int((height < 0).sum())
            return FactHeights(height[row_of_fact], n_undecided)

    # The others need a greater height, or have other than two arguments.
    is_open = height < 0
    if max_height == 1:
        is_open = is_open & ~is_asked
    clauses = Clauses(kb, sizes)
    found: list[int | None] = []
    for fact in atom_tuples(facts[is_open]):
        answers = solve(
            kb,
            sizes,
            fact,
            max_height=max_height,
            max_atoms=max_atoms,
            object_identity=object_identity,
            budget=budget,
            clauses=clauses,
        )
        absent = -1 if answers.complete else None
        found.append(answers.heights.get(fact, absent))
    heights = [-1 if one is None else one for one in found]
    height = height.masked_scatter(is_open, height.new_tensor(heights))
    return FactHeights(height[row_of_fact], found.count(None))
