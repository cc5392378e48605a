"""Which rules derive which answers of queries, and from how many groundings of their bodies.

A query, a row of `Questions`, asks for one argument of a binary predicate: `h(x, ?)` or `h(?, y)`. A rule derives a
candidate if one application of it to the facts derives the atom with the candidate as the missing argument; a grounding
is an assignment of the rule's variables that makes its body true. `plan_rules` indexes facts and rules once.
`map_groundings` computes something from the groundings of many queries, as many at once as bounds on memory allow;
`iter_groundings` yields them as they are, and `iter_derivations` tells which rules derive each atom of a list. Any
number of threads gives the same groundings.

Path rules. The body is a chain of binary atoms from one argument of the head to the other, through variables that occur
nowhere else: `h(x, y) :- a(x, z), b(w, z), c(w, y)`. Read from the argument that a query gives, it is a sequence of
steps, each along a predicate in one direction. The sequences of all rules form a trie, so that bodies with a common
beginning are walked once, and walks that meet are merged: they carry the number of ways to get there. Under object
identity a walk has to remember its way, and walks are merged where a body ends.

Walks may carry a probability: that of a random walk, which at each atom takes one of the matching facts that the
query does not leave out, all with the same chance. It ends early where there is none and, under object identity,
where it comes back to an entity. Probabilities are whole numbers of `WALK_UNIT`: that of a walk is divided by the
number of those facts and rounded down, but not to 0, and those of walks that meet add up. So it is the same on any
device and in any order, and that of a grounding is off by less than a unit for each of its atoms.

Other rules are conjunctive queries, and those that differ in their constants and the predicate of their head alone are
solved as one: these become variables, and a relation holds their values in each rule. If the body is a single atom, its
predicate becomes a variable too, of a relation of all facts, so that thousands of rules about hundreds of predicates
have a handful of shapes.

A `DerivabilityIndex` tells a proof search which rules derive the query, and which goals nothing derives: a policy that
should prefer precise rules must see which rules apply at all, otherwise it learns which ones apply often.
"""

from __future__ import annotations

import math
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from funcppo.core import host, tree
from funcppo.core.host import MAX_THREADS, NO_DEADLINE, Deadline, map_in_threads
from funcppo.core.types import I32, I64, Bool
from funcppo.kg.logic import fixpoint, joins, row_index
from funcppo.kg.logic.fixpoint import (
    CountCallback,
    Derivations,
    LeastModel,
    ignore_progress,
    partial_model,
)
from funcppo.kg.logic.joins import (
    JOIN_OVERHEAD_ROWS,
    UNBOUNDED,
    Atom,
    ConjunctiveQuery,
    Inequality,
    Literal,
    Relation,
    RowBudget,
    RowBudgetExceeded,
    Rule,
    Table,
    find_rows,
    make_literal,
    ragged_arange,
    relations_by_predicate,
    rules_from_kb,
    sum_equal_rows,
)
from funcppo.kg.logic.kb import (
    HEAD,
    TAIL,
    AtomIndex,
    KBSizes,
    KnowledgeBase,
    contains,
    find_atoms,
    find_postings,
    index_sorted_atoms,
    other_side,
)
from funcppo.kg.logic.resolve import Goals, Successors
from funcppo.kg.logic.row_index import (
    TableT,
    concatenate,
    count_to,
    expand_ranges,
    int_list,
    select_rows,
    sort_keys,
    spans,
    true_rows,
    unique_rows,
    unique_rows_with_inverse,
    unique_values,
)

# What is unknown while a question is answered whose answer is a known fact: that fact, or all facts that link its
# two entities.
LeftOut = typing.Literal["fact", "pair"]
# Probabilities of walks are whole numbers of this: their sums are exact, and the same in any order.
WALK_UNIT = 2.0**-60
# Groundings to hold at once, about 300 bytes each, and rows that the joins of a chunk of questions make, about 40 bytes
# each for those held at once.
MAX_CHUNK_GROUNDINGS = 4_000_000
MAX_CHUNK_JOIN_ROWS = 24_000_000
# rows and groundings that a part of a chunk has, at least: some 50 ms, less is slower by two threads than by one
MIN_PART_ROWS = 500_000
# A GPU takes larger chunks, of some 10 GB, in the same time.
GPU_CHUNK_FACTOR = 8
# questions whose work tells how many questions fit a chunk
PILOT_QUESTIONS = 16


class Questions(NamedTuple):
    """Distinct queries for one argument of a binary predicate, `p(x, ?)` or `p(?, y)`, one column per field."""

    predicate: I64[Tensor, "Q"]
    side: I64[Tensor, "Q"]  # the argument that is asked for, HEAD or TAIL
    entity: I64[Tensor, "Q"]  # the other argument
    # the answer whose fact is left out of the facts; 0 to leave none out
    left_out: I64[Tensor, "Q"]

    @property
    def label(self) -> I64[Tensor, "Q"]:
        """Return the label of each query: its predicate and the argument that is asked for."""
        return make_label(self.predicate, self.side)


class Groundings(NamedTuple):
    """Distinct triples of query, candidate answer and rule that derives it, with the number of body groundings."""

    question: I64[Tensor, "n"]  # row of the question
    candidate: I64[Tensor, "n"]  # the entity in the place that is asked for
    rule: I64[Tensor, "n"]  # id of the rule
    n_groundings: I64[Tensor, "n"]  # of the rule's body, at least 1
    # The probability of a random walk from the question's entity to the candidate, a number of WALK_UNIT; 0 where the
    # body is no path. Without entries where it is not asked for.
    walk: I64[Tensor, "n"]


def make_label(
    predicate: I64[Tensor, "n"], side: I64[Tensor, "n"] | int
) -> I64[Tensor, "n"]:
    """Return the label of each (predicate, side) pair: 2 * predicate, plus 1 for side TAIL."""
    return 2 * predicate + (side - HEAD)


def open_questions(queries: I64[Tensor, "Q W"], side: int) -> Questions:
    """Return the distinct queries for the `side` argument of some atoms, ascending by predicate and entity.

    Args:
      queries: atoms of two arguments.
    """
    rows = unique_rows(queries[:, [0, other_side(side)]])
    predicate, given = rows.unbind(1)
    side_column = torch.full_like(predicate, side)
    return Questions(predicate, side_column, given, torch.zeros_like(given))


def own_questions(facts: I64[Tensor, "n W"], side: int) -> Questions:
    """Return, per binary fact, the query for its `side` argument that leaves the fact itself out."""
    predicate = facts[:, 0]
    return Questions(
        predicate=predicate,
        side=torch.full_like(predicate, side),
        entity=facts[:, other_side(side)],
        left_out=facts[:, side],
    )


def candidate_atoms(
    questions: Questions,
    question: I64[Tensor, "n"],
    candidate: I64[Tensor, "n"],
    sizes: KBSizes,
) -> I32[Tensor, "n W"]:
    """Return the atom of each candidate: its query with the candidate as the missing argument.

    Args:
      question: the row of the question that each one is a candidate of.
    """
    given = questions.entity[question]
    is_head = questions.side[question] == HEAD
    columns = (
        questions.predicate[question],
        torch.where(is_head, candidate, given),
        torch.where(is_head, given, candidate),
    )
    atoms = torch.stack(columns, dim=1).to(torch.int32)
    return torch.nn.functional.pad(atoms, (0, sizes.atom_width - len(columns)))


def derived_atoms(
    questions: Questions, groundings: Groundings, sizes: KBSizes
) -> I32[Tensor, "n W"]:
    """Return the atom that each row of `groundings` derives."""
    return candidate_atoms(
        questions, groundings.question, groundings.candidate, sizes
    )


# -- path rules

# A step is twice its predicate, and one more if it goes from the second argument of a fact to the first.
FORWARD, BACKWARD = 0, 1


class Neighbours(NamedTuple):
    """Index of the facts as a graph: the entities that one step (predicate, direction) leads to from an entity."""

    kb: KnowledgeBase
    sizes: KBSizes
    # by step * (C + 1) + entity: where postings start; without entries where the table would be large
    offsets: I64[Tensor, "K1"]
    entities: I64[Tensor, "2N"]  # of the postings that offsets are of

    def find(
        self, step: I64[Tensor, "n"], here: I64[Tensor, "n"]
    ) -> row_index.Span:
        """Return, per (step, entity), the span of its neighbours in this index."""
        if not len(self.offsets):
            return find_postings(self.kb, self.sizes, step & 1, step >> 1, here)
        code = step * (self.sizes.n_constants + 1) + here
        return spans(self.offsets, code)

    def entity(
        self, step: I64[Tensor, "n"], position: I64[Tensor, "n"]
    ) -> I64[Tensor, "n"]:
        """Return the neighbour at each position of the index; `step` is the step that the position belongs to."""
        if len(self.offsets):
            return self.entities[position]
        fact = self.kb.argument_postings[position].long()
        return self.kb.facts[fact, TAIL - (step & 1)].long()


class StepTrie(NamedTuple):
    """Trie of path rules for one side: their bodies as sequences of steps from the given argument to the answer."""

    # the node where the rules about each predicate start; 0 where there are none
    root: I64[Tensor, "P1"]
    child_offsets: I64[Tensor, "n1"]
    child_step: I64[Tensor, "c"]
    child: I64[Tensor, "c"]
    # the rules whose body ends at a node
    rule_offsets: I64[Tensor, "n1"]
    rule: I64[Tensor, "R"]


class Walks(NamedTuple):
    """Partial groundings of path rules: each walk has reached a node of the trie and an entity, for one query."""

    question: I64[Tensor, "n"]
    node: I64[Tensor, "n"]
    n_ways: I64[Tensor, "n"]
    # in units of WALK_UNIT, at least 1; without entries where it is not asked for
    probability: I64[Tensor, "n"]
    # the entities on the way that must not come again, if they are told apart, and the last one
    path: tuple[I64[Tensor, "n"], ...]

    def select(self, row: I64[Tensor, "m"]) -> Walks:
        """Return the walks in the given rows."""
        return _select_filled(self, row)


def _select_filled(table: TableT, row: I64[Tensor, "m"]) -> TableT:
    """Return the given rows of a table of columns; one without entries stays empty."""
    return tree.map(lambda x: x.index_select(0, row) if len(x) else x, table)


class _Edges(NamedTuple):
    """Edges of the trie by which walks can be extended, one row per (walk, edge)."""

    row: I64[Tensor, "m"]  # of the walk
    step: I64[Tensor, "m"]
    child: I64[Tensor, "m"]  # node that the edge leads to
    # the neighbours that the step leads to
    start: I64[Tensor, "m"]
    n_neighbours: I64[Tensor, "m"]


def path_steps(rule: Rule, n_constants: int) -> tuple[int, ...] | None:
    """Return the steps of a path rule's body from the head's first argument to its second; None for other rules."""
    if not _is_binary_atom(rule.head):
        return None
    here, end = rule.head[HEAD], rule.head[TAIL]
    body = list(rule.body)
    visited = {here}
    steps: list[int] = []
    while body:
        # The next step is the only atom that leaves from here.
        leaving = [atom for atom in body if here in atom[1:]]
        if len(leaving) != 1 or here <= n_constants:
            return None
        (atom,) = leaving
        if not _is_binary_atom(atom):
            return None
        body.remove(atom)
        is_forward = atom[HEAD] == here
        steps.append(2 * atom[0] + (FORWARD if is_forward else BACKWARD))
        here = atom[TAIL] if is_forward else atom[HEAD]
        if here in visited:
            return None
        visited.add(here)

    return tuple(steps) if steps and here == end > n_constants else None


def _is_binary_atom(atom: Atom) -> bool:
    """Check whether an atom has exactly two arguments."""
    return len(atom) > TAIL and bool(atom[TAIL]) and not any(atom[TAIL + 1 :])


def _index_neighbours(kb: KnowledgeBase, sizes: KBSizes) -> Neighbours:
    """Build the index of facts by step and entity; without tables of its own if they would be large."""
    n_codes = 2 * (sizes.n_predicates + 1) * (sizes.n_constants + 1)
    none = kb.rule_offsets[:0]
    # A table of more than 128 MB is not worth its memory: the index of the facts is read.
    if n_codes > 1 << 24 or sizes.atom_width <= TAIL:
        return Neighbours(kb, sizes, none, none)

    facts = kb.facts[kb.facts[:, TAIL] > 0].long()
    step = torch.cat([2 * facts[:, 0] + FORWARD, 2 * facts[:, 0] + BACKWARD])
    start = torch.cat([facts[:, HEAD], facts[:, TAIL]])
    end = torch.cat([facts[:, TAIL], facts[:, HEAD]])
    # The facts are in lexicographic order, so that neighbours are ascending.
    code, order = sort_keys(step * (sizes.n_constants + 1) + start)
    codes = count_to(n_codes + 1, code)
    offsets = torch.searchsorted(code, codes)
    return Neighbours(kb, sizes, offsets, end[order])


def _build_trie(
    path_rules: Sequence[tuple[Rule, tuple[int, ...]]],
    sizes: KBSizes,
    device: torch.device,
) -> StepTrie:
    """Build the trie of path rules: one root per head predicate, then the steps of each rule's body."""
    children: list[dict[int, int]] = [{}]
    ending: list[list[int]] = [[]]

    def child_of(node: int, step: int) -> int:
        if step not in children[node]:
            children[node][step] = len(children)
            children.append({})
            ending.append([])
        return children[node][step]

    # The children of node 0, one for each predicate, are the roots.
    for rule, steps in path_rules:
        node = child_of(0, rule.head[0])
        for step in steps:
            node = child_of(node, step)
        ending[node].append(rule.id)
    roots, children[0] = children[0], {}

    def tensor(values: Iterable[int]) -> Tensor:
        return torch.tensor([*values], dtype=torch.int64, device=device)

    return StepTrie(
        root=tensor(roots.get(p, 0) for p in range(sizes.n_predicates + 1)),
        child_offsets=row_index.offsets(tensor(map(len, children))),
        child_step=tensor(step for steps in children for step in steps),
        child=tensor(node for steps in children for node in steps.values()),
        rule_offsets=row_index.offsets(tensor(map(len, ending))),
        rule=tensor(rule for rules in ending for rule in rules),
    )


@dataclass(frozen=True, slots=True)
class _Walker:
    """Solver of path rules for the queries for one side: extends walks step by step through the trie."""

    trie: StepTrie
    neighbours: Neighbours
    questions: Questions
    left_out: LeftOut
    object_identity: bool
    budget: RowBudget

    def iter_groundings(
        self, side: int, with_walks: bool
    ) -> Iterator[Groundings]:
        """Yield the groundings of path rules, in order of increasing body length.

        Raises:
          RowBudgetExceeded: the walks take more rows than the budget allows.
        """
        questions, offsets = self.questions, self.trie.rule_offsets
        root = self.trie.root[questions.predicate]
        row = true_rows((questions.side == side) & (root > 0))
        certain = torch.full_like(row, int(1 / WALK_UNIT))
        walks = Walks(
            row,
            root[row],
            n_ways=torch.ones_like(row),
            probability=certain if with_walks else certain[:0],
            path=(questions.entity[row],),
        )

        # Every rule whose body ends where merged walks have come has a grounding.
        while len(walks.question):
            walks, ended = self._walk_on(walks)
            row, position = expand_ranges(*spans(offsets, ended.node))
            ended = ended.select(row)
            if len(row):
                yield Groundings(
                    ended.question,
                    ended.path[-1],
                    self.trie.rule[position],
                    ended.n_ways,
                    ended.probability,
                )

    def _walk_on(self, walks: Walks) -> tuple[Walks, Walks]:
        """Extend all walks by one step; return the longer walks, and, merged, those at nodes where a body ends."""
        pieces = [
            piece
            for edges in self._iter_edges(walks)
            for piece in self._iter_next(walks, edges)
        ]
        if not self.object_identity:
            pieces = [self._merge(piece) for piece in pieces]
        if not pieces:
            none = tree.map(lambda x: x[:0], walks)
            pieces = [none._replace(path=(*none.path, none.node))]
        longer = pieces[0]
        if len(pieces) > 1:
            longer = tree.map(lambda *parts: torch.cat(parts), *pieces)
        if self.object_identity:
            return longer, self._merge(self._select_ended(longer))
        longer = longer if len(pieces) == 1 else self._merge(longer)
        return longer, self._select_ended(longer)

    def _select_ended(self, walks: Walks) -> Walks:
        """Return the walks at nodes of the trie where the body of a rule ends."""
        n_rules = spans(self.trie.rule_offsets, walks.node).length
        return walks.select(true_rows(n_rules > 0))

    def _iter_edges(self, walks: Walks) -> Iterator[_Edges]:
        """Yield, in chunks, the trie edges of each walk whose step leads from the walk's entity to a neighbour."""
        for row, position in ragged_arange(
            *spans(self.trie.child_offsets, walks.node)
        ):
            self.budget.spend_join(len(row))
            child = self.trie.child[position]
            step = self.trie.child_step[position]
            first, count = self.neighbours.find(step, walks.path[-1][row])
            found = count > 0
            edges = _Edges(row, step, child, first, count)
            if found.any():
                yield select_rows(edges, found)

    def _iter_next(self, walks: Walks, edges: _Edges) -> Iterator[Walks]:
        """Yield, in chunks, the walks extended along the given edges, not merged, without disallowed ones.

        A walk is dropped if its last step uses a left-out fact or, under object identity, visits an entity twice.
        """
        chance = walks.probability
        if len(chance):
            n_left = self._count_left(walks, edges).clamp_min(1)
            chance = (chance[edges.row] // n_left).clamp_min(1)
        for longer, edge in self._iter_longer(walks, edges):
            self.budget.spend_join(len(edge))
            if len(chance):
                longer = longer._replace(probability=chance[edge])

            # Under object identity no entity is visited twice.
            is_kept = ~self._uses_left_out(longer, edges.step[edge])
            if self.object_identity:
                for entity in longer.path[:-1]:
                    is_kept &= entity != longer.path[-1]
            yield longer.select(true_rows(is_kept))

    def _iter_longer(
        self, walks: Walks, edges: _Edges
    ) -> Iterator[tuple[Walks, I64[Tensor, "n"]]]:
        """Yield, in chunks, the walks extended along the given edges, and the position of each walk's edge.

        The walks carry no probabilities.
        """
        without = walks._replace(probability=walks.probability[:0])
        for edge, position in ragged_arange(edges.start, edges.n_neighbours):
            there = self.neighbours.entity(edges.step[edge], position)
            longer = without.select(edges.row[edge])
            yield (
                longer._replace(
                    node=edges.child[edge], path=(*longer.path, there)
                ),
                edge,
            )

    def _count_left(self, walks: Walks, edges: _Edges) -> I64[Tensor, "m"]:
        """Count, per edge, the neighbours it leads to by facts that the query does not leave out."""
        # What is left out is between the entity of the question and its answer.
        question, here = walks.question[edges.row], walks.path[-1][edges.row]
        answer = self.questions.left_out[question]
        is_end = (here == self.questions.entity[question]) | (here == answer)
        at = true_rows(is_end & (answer > 0))
        n_left = edges.n_neighbours
        if len(at):
            some = select_rows(edges, at)
            for longer, edge in self._iter_longer(walks, some):
                is_left_out = self._uses_left_out(longer, some.step[edge])
                n_left = n_left.index_add(0, at[edge], -is_left_out.long())
        return n_left

    def _uses_left_out(
        self, walks: Walks, step: I64[Tensor, "n"]
    ) -> Bool[Tensor, "n"]:
        """Check, per walk, whether its last step uses a fact that its query leaves out."""
        here, there = walks.path[-2:]
        asked = select_rows(self.questions, walks.question)
        onwards = (here == asked.entity) & (there == asked.left_out)
        backwards = (here == asked.left_out) & (there == asked.entity)
        if self.left_out == "pair":
            return onwards | backwards

        # The fact that is left out leads from the given entity to the answer: forward if the second argument is asked.
        direction = torch.where(asked.side == TAIL, FORWARD, BACKWARD)
        along = 2 * asked.predicate + direction
        return (onwards & (step == along)) | (backwards & (step == along ^ 1))

    def _merge(self, walks: Walks) -> Walks:
        """Merge walks at the same node and entity of one query; sum their numbers of ways and probabilities."""
        n_rows, n_nodes = (
            len(self.questions.entity),
            len(self.trie.rule_offsets),
        )
        largest = max(n_rows, n_nodes, self.neighbours.sizes.n_constants)
        summed = [walks.n_ways]
        if len(walks.probability):
            summed.append(walks.probability)
        (question, node, entity), (n_ways, *probability) = sum_equal_rows(
            (walks.question, walks.node, walks.path[-1]),
            largest.bit_length(),
            *summed,
        )
        chance = probability[0] if probability else walks.probability
        return Walks(question, node, n_ways, chance, (entity,))


# -- all rules


@dataclass(frozen=True, slots=True)
class RuleGroup:
    """Rules that are equal up to constants and predicates, which are variables of a common template."""

    template: Rule
    variables: tuple[int, ...]  # those of the template that rules differ in
    values: Relation  # what they stand for in each rule, in the same order
    rule: Tensor  # id of each rule, in the order of the relation
    predicates: frozenset[int]  # of the heads of all rules


@dataclass(frozen=True, slots=True)
class RulePlan:
    """Facts and rules indexed for answering queries; `plan_rules` builds it."""

    sizes: KBSizes
    neighbours: Neighbours
    tries: dict[int, StepTrie]  # of path rules, by the side that is asked for
    facts: Relation  # (predicate, arguments) of bodies of a single atom
    relations: dict[int, Relation]  # of the facts that longer bodies name
    groups: tuple[RuleGroup, ...]  # the rules that are no path rules
    memory_share: float = 1.0  # of the largest chunks of questions
    with_walks: bool = False  # groundings have probabilities of random walks

    @property
    def n_ids(self) -> int:
        """Return the largest constant or predicate id; larger terms of templates are variables."""
        return _n_ids(self.sizes)


@host.paused_collection()
def plan_rules(
    kb: KnowledgeBase,
    sizes: KBSizes,
    memory_share: float = 1.0,
    *,
    with_walks: bool = False,
) -> RulePlan:
    """Index the facts and group the rules for answering any number of queries.

    Args:
      memory_share: of the largest chunks of questions whose groundings may be held at once.
      with_walks: the groundings have the probabilities of random walks.
    """
    forward: list[tuple[Rule, tuple[int, ...]]] = []
    others: list[Rule] = []
    for rule in rules_from_kb(kb):
        steps = path_steps(rule, sizes.n_constants)
        if steps is not None:
            forward.append((rule, steps))
        elif _is_binary_atom(rule.head):  # others answer no question
            others.append(rule)
    # To the first argument a body is walked from its end.
    backward = [
        (rule, tuple(step ^ 1 for step in reversed(steps)))
        for rule, steps in forward
    ]
    device = kb.facts.device

    # A relation of its own for each predicate, and one of all facts for bodies of a single atom.
    in_single = {rule.body[0][0] for rule in others if len(rule.body) == 1}
    in_longer = {
        atom[0] for rule in others if len(rule.body) > 1 for atom in rule.body
    }
    wanted = kb.facts.new_tensor(sorted(in_single))
    facts = kb.facts[torch.isin(kb.facts[:, 0], wanted)].long()
    columns = tuple(column.contiguous() for column in facts.unbind(1))
    return RulePlan(
        sizes,
        _index_neighbours(kb, sizes),
        {
            HEAD: _build_trie(backward, sizes, device),
            TAIL: _build_trie(forward, sizes, device),
        },
        Relation(columns),
        relations_by_predicate(kb.facts, in_longer),
        tuple(_group_rules(others, sizes, device)),
        memory_share,
        with_walks,
    )


def _n_ids(sizes: KBSizes) -> int:
    """Return the largest constant or predicate id."""
    return max(sizes.n_constants, sizes.n_predicates)


def _group_rules(
    rules: Sequence[Rule], sizes: KBSizes, device: torch.device
) -> Iterator[RuleGroup]:
    """Yield groups of rules that share a template; a repeated rule goes into a group of its own."""
    # Variables are shifted, so that they are larger than all predicates too.
    largest = max(
        [sizes.n_constants]
        + [t for r in rules for atom in (r.head, *r.body) for t in atom[1:]]
    )
    first_lifted = 1 + largest + _n_ids(sizes) - sizes.n_constants
    groups: dict[tuple[Rule, int], dict[tuple[int, ...], int]] = {}
    for rule in rules:
        template, values = _lift(rule, sizes, first_lifted)
        repetition = 0
        while values in groups.get((template, repetition), {}):
            repetition += 1
        groups.setdefault((template, repetition), {})[values] = rule.id

    for (template, _), members in groups.items():
        rows = sorted(members)
        columns = torch.tensor(rows, device=device).T.contiguous()
        yield RuleGroup(
            template=template,
            variables=tuple(first_lifted + i for i in range(len(columns))),
            values=Relation(columns.unbind(0)),
            rule=torch.tensor([members[row] for row in rows], device=device),
            predicates=frozenset(head for head, *_ in rows),
        )


def _lift(
    rule: Rule, sizes: KBSizes, first_lifted: int
) -> tuple[Rule, tuple[int, ...]]:
    """Return the template of a rule and the ids that its new variables stand for, head predicate first.

    Args:
      first_lifted: the first of the new variables, which are the largest terms.
    """
    shift = _n_ids(sizes) - sizes.n_constants
    values: list[int] = []

    def lift(value: int) -> int:
        values.append(value)
        return first_lifted + len(values) - 1

    def lift_atom(atom: Atom, lifts_predicate: bool) -> Atom:
        terms = [lift(atom[0]) if lifts_predicate else atom[0]]
        for term in atom[1:]:
            if term > sizes.n_constants:
                terms.append(term + shift)
            else:
                terms.append(lift(term) if term else 0)
        return tuple(terms)

    head = lift_atom(rule.head, True)
    is_single = len(rule.body) == 1
    body = tuple(lift_atom(atom, is_single) for atom in rule.body)
    return Rule(0, head, body), tuple(values)


def _iter_all_groundings(
    plan: RulePlan,
    questions: Questions,
    left_out: LeftOut,
    object_identity: bool,
    budget: RowBudget,
) -> Iterator[Groundings]:
    """Yield the groundings of all rules in several tables; each grounding is in one of them.

    Arguments and errors are those of `list_groundings`.
    """
    for side, trie in plan.tries.items():
        walker = _Walker(
            trie, plan.neighbours, questions, left_out, object_identity, budget
        )
        yield from walker.iter_groundings(side, plan.with_walks)

    asked = set(int_list(unique_values(questions.predicate)))
    by_side = [_group_questions(questions, side, plan) for side in (HEAD, TAIL)]
    for rules in plan.groups:
        body = _body_literals(plan, rules.template)
        if body is None or asked.isdisjoint(rules.predicates):
            continue
        for side, (row, relation) in zip((HEAD, TAIL), by_side):
            if not len(row):
                continue
            query = _question_query(
                plan, rules, body, (side, relation), left_out, object_identity
            )
            answers = joins.collect_answers(replace(query, budget=budget))
            if answers is not None:
                found = _to_groundings(plan, rules, (side, relation), answers)
                yield found._replace(question=row[found.question])


def _to_groundings(
    plan: RulePlan,
    rules: RuleGroup,
    asked: tuple[int, Relation],
    answers: Table,
) -> Groundings:
    """Convert the answers of a group's conjunctive query to `Groundings`.

    Args:
      asked: the side that is asked for, and the relation of the questions about it, whose rows are told.
    """
    side, relation = asked
    head = rules.template.head
    columns = dict(zip(answers.variables, answers.columns))
    values = tuple(columns[v] for v in rules.variables)
    given, unknown = columns[head[other_side(side)]], columns[_unknown(rules)]
    rule, _ = find_rows(values, rules.values, plan.n_ids)
    question, _ = find_rows((values[0], given, unknown), relation, plan.n_ids)
    count = answers.counts
    assert count is not None  # the query is counted
    walk = torch.zeros_like(count) if plan.with_walks else count[:0]
    return Groundings(
        question, columns[head[side]], rules.rule[rule], count, walk
    )


def _group_questions(
    questions: Questions, side: int, plan: RulePlan
) -> tuple[I64[Tensor, "q"], Relation]:
    """Return the rows of the queries for `side`, and a sorted relation (predicate, entity, left out) of them."""
    row = true_rows(questions.side == side)
    columns = (questions.predicate, questions.entity, questions.left_out)
    of_side = select_rows(columns, row)
    bits = [plan.n_ids.bit_length()] * len(columns)
    order = sort_keys(row_index.encode_rows(of_side, bits).key).order
    relation = Relation(select_rows(of_side, order))
    return row[order], relation


def _body_literals(
    plan: RulePlan, template: Rule
) -> tuple[Literal, ...] | None:
    """Return the literals of a template's body; None if one of its predicates has no facts."""
    literals: list[Literal] = []
    for atom in template.body:
        relation, terms = plan.facts, atom
        if atom[0] <= plan.n_ids:
            terms = atom[1:]
            if atom[0] not in plan.relations:
                return None
            relation = plan.relations[atom[0]]
        literals.append(make_literal(relation, terms, plan.n_ids))
    return tuple(literals)


def _unknown(rules: RuleGroup) -> int:
    """Return the variable for the left-out answer of a query, which only the query's own literal binds."""
    return 1 + rules.variables[-1]


def _question_query(
    plan: RulePlan,
    rules: RuleGroup,
    body: tuple[Literal, ...],
    asked: tuple[int, Relation],
    left_out: LeftOut,
    object_identity: bool,
) -> ConjunctiveQuery:
    """Build the counted conjunctive query that finds the groundings of a group of rules for many queries.

    Args:
      asked: the side that is asked for, and the relation of the questions about it.
    """
    side, relation = asked
    template, variables = rules.template, rules.variables
    given, candidate = template.head[other_side(side)], template.head[side]
    unknown = _unknown(rules)
    question = make_literal(
        relation, (template.head[0], given, unknown), plan.n_ids
    )
    inequalities = _unknown_facts(template, side, unknown, left_out)
    if object_identity:
        # Variables that stand for constants have the largest ids.
        atoms = (template.head, *template.body)
        terms = {term for atom in atoms for term in atom[1:] if term}
        inequalities += [
            ((first,), (second,))
            for first, second in combinations(sorted(terms), 2)
            if first not in variables
        ]
    return ConjunctiveQuery(
        (question, make_literal(rules.values, variables, plan.n_ids), *body),
        tuple(sorted({given, unknown, candidate, *variables})),
        tuple(inequalities),
        n_constants=plan.n_ids,
        is_counted=True,
        # Rules of all predicates, joined first, would meet all questions.
        first=question if len(body) == 1 else None,
    )


def _unknown_facts(
    template: Rule, side: int, unknown: int, left_out: LeftOut
) -> list[Inequality]:
    """Return inequalities that keep body atoms from being facts that the query leaves out."""
    given = template.head[other_side(side)]
    fact = (given, unknown) if side == TAIL else (unknown, given)
    inequalities: list[Inequality] = []
    for atom in template.body:
        arguments = tuple(term for term in atom[1:] if term)
        if len(arguments) != len(fact):
            continue
        if left_out == "pair":
            inequalities += [(fact, arguments), (fact[::-1], arguments)]
        else:
            left = (template.head[0], *fact)
            inequalities.append((left, (atom[0], *arguments)))
    return inequalities


def list_groundings(
    plan: RulePlan,
    questions: Questions,
    left_out: LeftOut = "fact",
    object_identity: bool = False,
    budget: RowBudget = UNBOUNDED,
) -> Groundings:
    """Return all groundings for the queries, in the order of query, candidate and rule.

    A grounding that uses a fact that its query leaves out does not count; this holds for all candidates alike.

    Args:
      questions: distinct.
      left_out: what a question with an answer to leave out leaves out; "pair" is every fact between the two entities.
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      budget: bounds the rows that the joins make.

    Raises:
      RowBudgetExceeded: the joins make more rows than the budget allows.
    """
    parts = _iter_all_groundings(
        plan, questions, left_out, object_identity, budget
    )
    found = concatenate([_no_groundings(questions), *parts])
    key = found.question, found.candidate, found.rule
    sizes = plan.sizes
    bounds = len(questions.entity), sizes.n_constants, sizes.n_rules
    code = row_index.encode_rows(key, [n.bit_length() for n in bounds]).key
    return _select_filled(found, sort_keys(code).order)


def _no_groundings(questions: Questions) -> Groundings:
    """Return a table of groundings without rows."""
    none = questions.entity[:0]
    return Groundings(none, none, none, none, none)


# -- many questions

Computed = TypeVar("Computed")


@dataclass(slots=True)
class GroundingWork:
    """Work done while listing groundings, and the policy for queries that are too large.

    Attributes:
      leaves_out: a query whose joins alone make more rows than a chunk may is left out: it has no groundings.
      n_rows: the rows that joins have made, of chunks that were too large included.
      n_left_out: the queries left out so far.
      n_links: what the caller holds beside groundings, links of candidates, counted by the caller.
      deadline: a chunk has no more queries than there is time for, at the speed of the chunks before.
    """

    leaves_out: bool = False
    n_rows: int = 0
    n_left_out: int = 0
    n_links: int = 0
    deadline: Deadline = NO_DEADLINE


def iter_groundings(
    plan: RulePlan,
    questions: Questions,
    *,
    object_identity: bool = False,
    budget: RowBudget = UNBOUNDED,
) -> Iterator[tuple[Questions, Groundings]]:
    """Yield chunks of queries, each with all groundings for them; see `map_groundings`."""
    return map_groundings(
        lambda chunk, found: (chunk, found),
        plan,
        questions,
        object_identity=object_identity,
        budget=budget,
    )


def map_groundings(
    compute: Callable[[Questions, Groundings], Computed],
    plan: RulePlan,
    questions: Questions,
    *,
    left_out: LeftOut = "fact",
    object_identity: bool = False,
    work: GroundingWork | None = None,
    budget: RowBudget = UNBOUNDED,
    n_threads: int | None = None,
) -> Iterator[Computed]:
    """Yield `compute(queries, groundings)` for one chunk of queries after another.

    A chunk whose joins make too many rows is halved, down to one query, which may make any number unless `work`
    leaves it out.

    Args:
      compute: of some questions and all their groundings, in the order of question, candidate and rule; called by
        several threads.
      questions: distinct.
      left_out: see `list_groundings`.
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      work: counts the work, and says what to do with a question that is too large.
      budget: bounds the rows of all chunks together.
      n_threads: that share a chunk on a CPU; None for those of `host.count_threads`.

    Raises:
      RowBudgetExceeded: all chunks make more rows than the budget allows.
    """
    work = GroundingWork() if work is None else work

    def compute_part(
        job: tuple[Questions, RowBudget],
    ) -> tuple[Computed, int] | None:
        part, rows = job
        try:
            found = list_groundings(plan, part, left_out, object_identity, rows)
        except RowBudgetExceeded:
            if len(part.entity) > 1:
                return None
            work.n_left_out += 1
            found = _no_groundings(part)
        return compute(part, found), len(found.rule)

    factor = GPU_CHUNK_FACTOR if questions.entity.is_cuda else 1
    most = int(plan.memory_share * factor * MAX_CHUNK_JOIN_ROWS)
    pace = _Pace(most, work, work.deadline.clock(), work.n_links)
    while pace.n_questions < len(questions.entity):
        jobs, max_rows = pace.split(questions)
        computed = map_in_threads(compute_part, jobs, n_threads)
        done = [part for part in computed if part is not None]
        n_rows = sum(rows.n_rows for _, rows in jobs)
        # The joins of the parts are those of the chunk.
        n_joins = max(rows.n_joins for _, rows in jobs)
        budget.spend(n_rows + n_joins * JOIN_OVERHEAD_ROWS)
        fits = len(done) == len(jobs) and (len(jobs) == 1 or n_rows <= max_rows)
        if fits:
            for part, _ in done:
                yield part
        pace.go_on(
            fits,
            sum(len(part.entity) for part, _ in jobs),
            sum(n for _, n in done),
            n_rows,
        )


@dataclass(slots=True)
class _Pace:
    """Pacing of chunks: how many queries to answer at once, by the work of the chunks before."""

    max_rows: int  # that the joins of a chunk may make
    work: GroundingWork
    began: float  # on the clock of the deadline
    n_links_before: int
    size: int = PILOT_QUESTIONS  # of the next chunk
    n_questions: int = 0
    n_groundings: int = 0
    n_rows: int = 0

    def split(
        self, questions: Questions
    ) -> tuple[list[tuple[Questions, RowBudget]], int]:
        """Return the parts of the next chunk with a row budget each, and the rows that all may make together.

        Their number does not depend on that of threads, so that bounds on rows do not either. It is several times the
        threads: those computed at once then hold a part of a chunk.
        """
        rows = slice(self.n_questions, self.n_questions + self.size)
        chunk = select_rows(questions, rows)
        n_asked = len(chunk.entity)
        max_rows = self.max_rows
        if n_asked == 1 and not self.work.leaves_out:
            max_rows = sys.maxsize
        n_parts = 1
        if not chunk.entity.is_cuda and self.n_questions:
            expected = n_asked * (self.n_groundings + self.n_rows)
            n_parts = expected // self.n_questions // MIN_PART_ROWS
            n_parts = max(1, min(4 * MAX_THREADS, n_asked // 2, n_parts))
        # Parts that are computed at once make at most four times the rows of a chunk.
        of_part = min(max_rows, 4 * max_rows // min(n_parts, MAX_THREADS))
        bounds = [n_asked * i // n_parts for i in range(n_parts + 1)]
        jobs = [
            (
                select_rows(chunk, slice(*ends)),
                RowBudget(of_part, overhead=0),
            )
            for ends in pairwise(bounds)
        ]
        return jobs, max_rows

    def go_on(
        self, fits: bool, n_asked: int, n_groundings: int, n_rows: int
    ) -> None:
        """Record a finished chunk and choose the size of the next; after one too large, retry with half of it."""
        self.work.n_rows += n_rows
        if not fits:
            self.size = n_asked // 2
            return
        self.n_questions += n_asked
        self.n_groundings += n_groundings
        self.n_rows += n_rows
        factor = self.max_rows / MAX_CHUNK_JOIN_ROWS
        n_links = self.work.n_links - self.n_links_before
        fitting = min(
            int(factor * self.n_questions * bound) // max(1, count)
            for bound, count in (
                (MAX_CHUNK_GROUNDINGS, self.n_groundings),
                # about 60 bytes each while they are looked up
                (2 * MAX_CHUNK_GROUNDINGS, n_links),
                (MAX_CHUNK_JOIN_ROWS, self.n_rows),
            )
        )
        left = self.work.deadline.seconds_left
        if not math.isinf(left):
            # A time below a millisecond tells no speed.
            seconds = max(self.work.deadline.clock() - self.began, 1e-3)
            fitting = min(fitting, int(self.n_questions * left / seconds))
        self.size = max(1, min(fitting, self.size * 32))


# -- atoms that rules derive


def iter_derivations(
    plan: RulePlan,
    kb: KnowledgeBase,
    atoms: I64[Tensor, "L W"],
    side: int,
    *,
    object_identity: bool = False,
    budget: RowBudget = UNBOUNDED,
) -> Iterator[Derivations]:
    """Yield (atom, rule) pairs: the rules that derive each atom in one step, a fact from other facts only.

    Args:
      atoms: of two arguments, distinct, in lexicographic order.
      side: the argument that their questions ask for.
    """
    sizes = plan.sizes
    index = index_sorted_atoms(atoms, sizes)
    is_fact = contains(kb, sizes, atoms)
    others = open_questions(atoms[~is_fact], side)
    for derived, rule in _iter_answers(
        plan, atoms[is_fact], [others], side, object_identity, budget
    ):
        row = find_atoms(index, sizes, derived)
        yield Derivations(row[row >= 0], rule[row >= 0])


def _iter_answers(
    plan: RulePlan,
    facts: I64[Tensor, "F W"],
    asked: Sequence[Questions],
    side: int,
    object_identity: bool,
    budget: RowBudget,
    progress: CountCallback = ignore_progress,
) -> Iterator[tuple[I32[Tensor, "n W"], I64[Tensor, "n"]]]:
    """Yield, chunk by chunk of questions, the atoms derived in answer and the ids of their rules.

    Args:
      facts: distinct, in lexicographic order; each is derived from other facts only, by a question of its own.
      asked: the questions for all other answers.
      side: the argument that the facts' own questions ask for.
    """
    sizes = plan.sizes
    index = index_sorted_atoms(facts, sizes)
    asked = [*asked, own_questions(facts, side)]
    n_questions = sum(len(questions.entity) for questions in asked)
    n_answered = 0
    for questions in asked:
        for chunk, found in iter_groundings(
            plan, questions, object_identity=object_identity, budget=budget
        ):
            n_answered += len(chunk.entity)
            progress(n_answered, n_questions)
            derived = derived_atoms(chunk, found, sizes)
            left_out = chunk.left_out[found.question]
            is_own = find_atoms(index, sizes, derived) >= 0
            kept = torch.where(
                left_out > 0, found.candidate == left_out, ~is_own
            )
            yield derived[kept], found.rule[kept]


def derived_in_next_step(
    kb: KnowledgeBase,
    model: LeastModel,
    atoms: I64[Tensor, "n W"],
    budget: RowBudget = UNBOUNDED,
) -> Bool[Tensor, "n"]:
    """Check, per atom, whether a rule derives it from the model: one more step of T_P for these atoms alone.

    Args:
      kb: the knowledge base whose rules apply; the model is one of it.
      atoms: of two arguments, in any order.
      budget: bounds the rows that the joins make.

    Raises:
      RowBudgetExceeded: the joins make more rows than the budget allows.
    """
    held, sizes = fixpoint.with_facts(kb, model.sizes, model.atoms)
    distinct, row = unique_rows_with_inverse(atoms)
    is_derived = torch.zeros_like(distinct[:, 0], dtype=torch.bool)
    for found, _ in iter_derivations(
        plan_rules(held, sizes),
        held,
        distinct,
        TAIL,
        object_identity=model.object_identity,
        budget=budget,
    ):
        is_derived = is_derived.index_fill(0, found, True)
    return is_derived[row]


def derive_answers(
    plan: RulePlan,
    queries: I64[Tensor, "Q W"],
    sides: Sequence[int],
    *,
    object_identity: bool = False,
) -> I32[Tensor, "n W"]:
    """Return the distinct atoms that one rule application derives in answer to queries, facts included.

    Args:
      queries: atoms of two arguments.
      sides: the arguments that are replaced, each in turn.
      object_identity: different variables of a rule bind different constants, none of which the rule names.

    Returns:
      The atoms, for each side those of its questions, each once; facts are among them.
    """
    base = plan.sizes.n_constants + 1
    parts = [queries[:0].to(torch.int32)]
    for side in sides:
        for chunk, found in iter_groundings(
            plan, open_questions(queries, side), object_identity=object_identity
        ):
            is_first = row_index.first_of_run(
                found.question * base + found.candidate
            )
            question, candidate = select_rows(found[:2], is_first)
            parts.append(
                candidate_atoms(chunk, question, candidate, plan.sizes)
            )
    return torch.cat(parts)


def answering_facts(
    kb: KnowledgeBase,
    sizes: KBSizes,
    queries: I64[Tensor, "Q W"],
    sides: Sequence[int],
) -> I32[Tensor, "n W"]:
    """Return the facts that share a query's predicate and kept argument, in lexicographic order.

    Args:
      queries: atoms of two arguments; a ranking replaces one of them.
      sides: the arguments that are replaced, each in turn.
    """
    found = [kb.argument_postings[:0]]
    for side in sides:
        questions = open_questions(queries, side)
        kept = torch.full_like(questions.side, other_side(side))
        span = find_postings(
            kb, sizes, kept - 1, questions.predicate, questions.entity
        )
        _, position = expand_ranges(span.start, span.length)
        found.append(kb.argument_postings[position])
    return kb.facts[unique_values(torch.cat(found)).long()]


# -- what a search knows


class DerivabilityIndex(NamedTuple):
    """Index of the atoms that T_P derives and of the rules that derive each; empty, it excludes nothing."""

    atom_index: AtomIndex  # index of the derivable atoms for `kb.find_atoms`
    height: I32[Tensor, "M"]  # smallest height of each atom
    # row of the atom * R + id of a rule that derives it as a root; ascending
    derivation_keys: I64[Tensor, "D"]


def index_derivations(
    sizes: KBSizes,
    atom_index: AtomIndex,
    height: I32[Tensor, "M"],
    parts: Iterable[Derivations],
) -> DerivabilityIndex:
    """Build the index of atoms, their heights and the rules that derive them; repeated pairs are merged."""
    keys = [height[:0].to(torch.int64)]
    keys += [row * sizes.n_rules + rule for row, rule in parts]
    return DerivabilityIndex(atom_index, height, unique_values(torch.cat(keys)))


def empty_derivability_index(
    kb: KnowledgeBase, sizes: KBSizes
) -> DerivabilityIndex:
    """Build the index without atoms, with which `dead_end_mask` is false everywhere."""
    none = kb.facts[:0]
    index = index_sorted_atoms(none, sizes)
    return DerivabilityIndex(index, none[:, 0], none[:, 0].long())


def index_atoms(
    kb: KnowledgeBase,
    sizes: KBSizes,
    model: LeastModel,
    atoms: I32[Tensor, "L W"],
) -> DerivabilityIndex:
    """Build the index of distinct sorted atoms for searches to height 1, with the rules that derive each."""
    atom_index = index_sorted_atoms(atoms, sizes)
    parts = fixpoint.iter_derivations(kb, sizes, model, 1, atoms)
    return index_derivations(
        sizes, atom_index, torch.zeros_like(atoms[:, 0]), parts
    )


def build_derivability_index(
    kb: KnowledgeBase,
    sizes: KBSizes,
    model: LeastModel,
    max_height: int,
    max_derivations: int = sys.maxsize,
    budget: RowBudget = UNBOUNDED,
    progress: CountCallback = ignore_progress,
) -> DerivabilityIndex | None:
    """Build the index of all atoms of a model for searches up to a height.

    At height 1, a rule whose only bodies hold the atom itself does not derive it (leave-one-out). Above, it may: that
    atom can be proved again as a goal of the body.

    Args:
      model: what T_P derives in `max_height` steps.
      max_height: the greatest height of a search.
      max_derivations: the most pairs of an atom and a rule to hold.
      budget: bounds the rows that the joins make.
      progress: is called after each rule.

    Returns:
      The index; None if there are more than `max_derivations` pairs.

    Raises:
      RowBudgetExceeded: the joins make more rows than the budget allows.
    """
    parts = fixpoint.iter_derivations(
        kb,
        sizes,
        model,
        max_height,
        model.atoms,
        leave_one_out=max_height == 1,
        budget=budget,
        progress=progress,
    )
    held = _hold(parts, max_derivations)
    if held is None:
        return None
    return index_derivations(sizes, model.atom_index, model.height, held)


def _hold(parts: Iterable[TableT], most: int) -> list[TableT] | None:
    """Return all parts, pairs with a rule; None if they have more than `most` rules."""
    held: list[TableT] = []
    n_rules = 0
    for part in parts:
        held.append(part)
        n_rules += len(part[1])
        if n_rules > most:
            return None
    return held


def answered_step(
    plan: RulePlan,
    kb: KnowledgeBase,
    queries: I64[Tensor, "Q W"],
    sides: Sequence[int],
    max_derivations: int,
    object_identity: bool = False,
    budget: RowBudget = UNBOUNDED,
    progress: CountCallback = ignore_progress,
) -> tuple[LeastModel, DerivabilityIndex] | None:
    """Derive the answers to some queries in one step of T_P; return their model and derivability index.

    The model holds the facts among the answers too.

    A query that is a fact is derived from other facts alone; another fact may be derived from itself.

    Args:
      queries: atoms of two arguments; a ranking replaces one of them.
      sides: the arguments that are replaced, each in turn.
      max_derivations: the most pairs of an atom and a rule that derives it to hold.
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      budget: bounds the rows that the joins make.
      progress: receives how many questions are answered, and of how many.

    Returns:
      The model of these atoms, of height 0 or 1 and never complete, and the index of the rules that derive each of
      them; None instead of both if there are more than `max_derivations` pairs.

    Raises:
      RowBudgetExceeded: the joins make more rows than the budget allows.
    """
    sizes = plan.sizes
    facts = unique_rows(queries[contains(kb, sizes, queries)])
    asked = [open_questions(queries, side) for side in sides]
    pairs = _iter_answers(
        plan, facts, asked, sides[0], object_identity, budget, progress
    )
    held = _hold(pairs, max_derivations)
    if held is None:
        return None

    none = kb.facts[:0], kb.rule_ids_by_predicate[:0]
    derived, rule = concatenate([none, *held])
    model = partial_model(
        kb,
        sizes,
        derived,
        object_identity=object_identity,
        facts=answering_facts(kb, sizes, queries, sides),
    )
    row = find_atoms(model.atom_index, sizes, derived)
    found = Derivations(row, rule)
    index = index_derivations(sizes, model.atom_index, model.height, [found])
    return model, index


def iter_indexed_derivations(
    derivability_index: DerivabilityIndex,
    sizes: KBSizes,
    atoms: I32[Tensor, "L W"],
) -> Iterator[Derivations]:
    """Yield (atom, rule) pairs from the index, in order of the atoms, in chunks.

    Args:
      atoms: in any order; an atom that is not in the index has no derivation.
    """
    # The derivations of an atom are a span of the sorted keys.
    keys = derivability_index.derivation_keys
    row = find_atoms(derivability_index.atom_index, sizes, atoms)
    row_after_last = len(derivability_index.height)
    row = torch.where(row >= 0, row, row_after_last)  # whose span is empty
    start = torch.searchsorted(keys, row * sizes.n_rules)
    stop = torch.searchsorted(keys, row * sizes.n_rules + sizes.n_rules)
    for atom, position in ragged_arange(start, stop - start):
        yield Derivations(atom, keys[position] % sizes.n_rules)


def rule_derives(
    derivability_index: DerivabilityIndex,
    sizes: KBSizes,
    root: I32[Tensor, "B W"],
    rule: I32[Tensor, "B S"],
) -> Bool[Tensor, "B S"]:
    """Check, per row and slot, whether the rule derives the row's root query; false for a fact (-1)."""
    row = find_atoms(
        derivability_index.atom_index, sizes, root.to(torch.int64)
    )[:, None]
    key = row * sizes.n_rules + rule
    keys = derivability_index.derivation_keys
    is_derivation = row_index.binary_search(keys, key).found
    return (row >= 0) & (rule >= 0) & is_derivation


def dead_end_mask(
    derivability_index: DerivabilityIndex,
    sizes: KBSizes,
    max_height: int,
    root: I32[Tensor, "B W"],
    goals: Goals,
    successors: Successors,
) -> Bool[Tensor, "B S"]:
    """Mark the successors that T_P shows to lead to no proof; unmarked ones may still lead to none.

    A dead end is a rule that does not derive the root, or a goal list with a ground goal that T_P does not derive in
    the height that is left for it.

    Args:
      max_height: the height limit of the search, for which the index was built.
      root: the query of each row.
      goals: [B, A], the goal list of each row.
      successors: [B, S], its successors.

    Returns:
      [B, S]; false where `successors.mask` is false.
    """
    if not len(derivability_index.height):
        return torch.zeros_like(successors.mask)

    # Rules for the root itself.
    leftmost_predicate = goals.atoms[:, :1, 0]
    leftmost_height = goals.height[:, :1]
    is_root = (leftmost_predicate > 0) & (leftmost_height == 0)
    is_rule = successors.rule >= 0
    derives = rule_derives(derivability_index, sizes, root, successors.rule)
    useless_rule = is_root & is_rule & ~derives

    # Ground goals: the goal's height and the height of its smallest proof must fit into max_height.
    atoms, height = successors.goals
    row = find_atoms(
        derivability_index.atom_index,
        sizes,
        atoms.to(torch.int64),
    )
    proof_height = derivability_index.height[row.clamp_min(0)]
    is_provable = (row >= 0) & (proof_height + height <= max_height)
    is_goal = atoms[..., 0] > 0
    is_ground = is_goal & (atoms[..., 1:] <= sizes.n_constants).all(-1)
    unprovable_goal = (is_ground & ~is_provable).any(-1)
    return successors.mask & (useless_rule | unprovable_goal)
