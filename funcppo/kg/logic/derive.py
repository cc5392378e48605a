"""Which rules derive which answers of queries, and from how many groundings of their bodies.

A question asks for one argument of a binary predicate: `h(x, ?)` or `h(?, y)`. A rule fires for a candidate if one
application of it to the facts derives the atom with the candidate in the place that is asked for; a grounding is an
assignment of the rule's variables that makes its body true. `plan_firings` indexes facts and rules once;
`map_firing_chunks` computes something from the firings of many questions, as many at once as bounds on memory allow;
`derive_answers` lists the atoms that rules derive for some queries. Any number of threads gives the same firings.

Path rules. The body is a chain of binary atoms from one argument of the head to the other, through variables that occur
nowhere else: `h(x, y) :- a(x, z), b(w, z), c(w, y)`. Read from the argument that a question gives, it is a sequence of
steps, each along a predicate in one direction. The sequences of all rules form a trie, so that bodies with a common
beginning are walked once, and walks that meet are merged: they carry the number of ways to get there. Under object
identity a walk has to remember its way, and walks are merged where no body goes on. Most are in their last step, and
are merged before it: `h(x, y) :- a(x, z), b(z, w), c(w, y)` has as many ways to y as walks to w have merged, less those
whose z is y, which one look at c(w, z) for each of them tells.

Walks may carry a probability: that of a random walk, which at each atom takes one of the matching facts that the
question does not leave out, all with the same chance. It ends early where there is none and, under object identity,
where it comes back to an entity. Probabilities are whole numbers of `WALK_UNIT`: that of a walk is divided by the
number of those facts and rounded down, but not to 0, and those of walks that meet add up. So it is the same on any
device and in any order, and that of a firing is off by less than a unit for each atom of each of its groundings.

Other rules are conjunctive queries, and those that differ in their constants and the predicate of their head alone are
solved as one: these become variables, and a relation holds their values in each rule. If the body is a single atom, its
predicate becomes a variable too, of a relation of all facts, so that thousands of rules about hundreds of predicates
have a handful of shapes.
"""

from __future__ import annotations

import math
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from funcppo.core import host
from funcppo.core.deadline import NO_DEADLINE, Deadline
from funcppo.core.host import MAX_THREADS, map_in_threads
from funcppo.core.types import I32, I64, Bool
from funcppo.kg.logic import joins, row_index, triple_index
from funcppo.kg.logic.joins import (
    JOIN_OVERHEAD_ROWS,
    Atom,
    ConjunctiveQuery,
    Inequality,
    Literal,
    Relation,
    RowBudget,
    RowBudgetExceeded,
    Rule,
    Table,
    expand_ranges,
    find_rows,
    group_rows,
    make_literal,
    ragged_arange,
    relations_by_predicate,
    rules_from_kb,
    sum_by_group,
)
from funcppo.kg.logic.kb import KBSizes, KnowledgeBase, contains, find_postings
from funcppo.kg.logic.row_index import (
    int_list,
    sort_keys,
    unique_rows,
    unique_values,
)
from funcppo.kg.logic.triple_index import HEAD, TAIL

# What is unknown while a question is answered whose answer is a known fact: that fact, or all facts that link its
# two entities.
LeftOut = typing.Literal["fact", "pair"]
# Probabilities of walks are whole numbers of this: their sums are exact, and the same in any order.
WALK_UNIT = 2.0**-60


class Questions(NamedTuple):
    """Questions about one argument of a binary predicate, each once."""

    predicate: I64[Tensor, "Q"]
    side: I64[Tensor, "Q"]  # the argument that is asked for, HEAD or TAIL
    entity: I64[Tensor, "Q"]  # the other argument
    # the answer whose fact is left out of the facts; 0 to leave none out
    left_out: I64[Tensor, "Q"]


class Firings(NamedTuple):
    """Triples of a question, a candidate and a rule that derives it, each once."""

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
    """2 * predicate, plus 1 for the second argument."""
    return 2 * predicate + (side - HEAD)


def select_questions(
    questions: Questions, row: I64[Tensor, "n"] | slice
) -> Questions:
    """Some of the questions."""
    return Questions(*(column[row] for column in questions))


def select_firings(firings: Firings, row: Tensor) -> Firings:
    """Some of the firings.

    Args:
      row: their positions, or a mask.
    """
    walk = firings.walk
    return Firings(
        question=firings.question[row],
        candidate=firings.candidate[row],
        rule=firings.rule[row],
        n_groundings=firings.n_groundings[row],
        walk=walk[row] if len(walk) else walk,
    )


# -- chains

# A step is twice its predicate, and one more if it goes from the second argument of a fact to the first.
FORWARD, BACKWARD = 0, 1
# Neighbours are looked up in a table of offsets of all steps and entities, up to this many of 8 bytes, else in the
# index of the facts.
MAX_OFFSETS = 1 << 24


class Neighbours(Protocol):
    """The entities that one step leads to; those of a step and an entity stand together, ascending."""

    def find(
        self, step: I64[Tensor, "n"], here: I64[Tensor, "n"]
    ) -> row_index.Span:
        """Where the neighbours of some entities stand."""
        ...

    def entity(
        self, step: I64[Tensor, "n"], position: I64[Tensor, "n"]
    ) -> I64[Tensor, "n"]:
        """The neighbours at some positions, which are those of steps."""
        ...

    def is_neighbour(
        self,
        step: I64[Tensor, "n"],
        here: I64[Tensor, "n"],
        there: I64[Tensor, "n"],
    ) -> Bool[Tensor, "n"]:
        """Whether steps lead from some entities to others."""
        ...


class TabledNeighbours(NamedTuple):
    """Neighbours by code: step * base + entity."""

    base: int  # C + 1
    offsets: I64[Tensor, "K1"]
    entities: I64[Tensor, "2N"]
    keys: I64[Tensor, "2N"]  # code * base + entity, ascending

    def find(
        self, step: I64[Tensor, "n"], here: I64[Tensor, "n"]
    ) -> row_index.Span:
        """Where the neighbours of some entities stand."""
        code = step * self.base + here
        start = self.offsets[code]
        return row_index.Span(start, self.offsets[code + 1] - start)

    def entity(
        self, step: I64[Tensor, "n"], position: I64[Tensor, "n"]
    ) -> I64[Tensor, "n"]:
        """The neighbours at some positions."""
        return self.entities[position]

    def is_neighbour(
        self,
        step: I64[Tensor, "n"],
        here: I64[Tensor, "n"],
        there: I64[Tensor, "n"],
    ) -> Bool[Tensor, "n"]:
        """Whether steps lead from some entities to others."""
        key = (step * self.base + here) * self.base + there
        return row_index.binary_search(self.keys, key).found


class IndexedNeighbours(NamedTuple):
    """Neighbours by the index of the facts, without memory of their own."""

    kb: KnowledgeBase
    sizes: KBSizes

    def find(
        self, step: I64[Tensor, "n"], here: I64[Tensor, "n"]
    ) -> row_index.Span:
        """Where the neighbours of some entities stand: the postings of an argument."""
        return find_postings(self.kb, self.sizes, step & 1, step >> 1, here)

    def entity(
        self, step: I64[Tensor, "n"], position: I64[Tensor, "n"]
    ) -> I64[Tensor, "n"]:
        """The neighbours at some positions: the other argument of a fact."""
        fact = self.kb.argument_postings[position].long()
        return self.kb.facts[fact, TAIL - (step & 1)].long()

    def is_neighbour(
        self,
        step: I64[Tensor, "n"],
        here: I64[Tensor, "n"],
        there: I64[Tensor, "n"],
    ) -> Bool[Tensor, "n"]:
        """Whether steps lead from some entities to others."""
        is_backward = step & 1 == BACKWARD
        head = torch.where(is_backward, there, here)
        tail = torch.where(is_backward, here, there)
        atoms = torch.stack([step >> 1, head, tail], dim=1)
        padding = (0, self.sizes.atom_width - atoms.shape[1])
        atoms = torch.nn.functional.pad(atoms, padding)
        return contains(self.kb, self.sizes, atoms)


class ChainTrie(NamedTuple):
    """The bodies of path rules as sequences of steps, for one side."""

    # the node where the rules about each predicate start; 0 where there are none
    root: I64[Tensor, "P1"]
    child_offsets: I64[Tensor, "n1"]
    child_step: I64[Tensor, "c"]
    child: I64[Tensor, "c"]
    # the rules whose body ends at a node
    rule_offsets: I64[Tensor, "n1"]
    rule: I64[Tensor, "R"]


class ChainPlan(NamedTuple):
    """What walks read."""

    neighbours: Neighbours
    tries: dict[int, ChainTrie]  # by the side that is asked for


class Walks(NamedTuple):
    """Walks that have come to a node of the trie and an entity."""

    question: I64[Tensor, "n"]
    node: I64[Tensor, "n"]
    # the entities on the way that must not come again, if they are told apart, and the last one
    path: tuple[I64[Tensor, "n"], ...]
    n_ways: I64[Tensor, "n"]
    # in units of WALK_UNIT, at least 1; without entries where it is not asked for
    probability: I64[Tensor, "n"]


class _LongerWalks(NamedTuple):
    """Walks that are one step longer."""

    walks: Walks  # those from which some body may go on
    ended: Walks  # those at nodes where rules end, merged


class _Edges(NamedTuple):
    """Edges of the trie that walks go on along."""

    row: I64[Tensor, "m"]  # of the walk
    step: I64[Tensor, "m"]
    child: I64[Tensor, "m"]  # node that the edge leads to
    # the neighbours that the step leads to
    start: I64[Tensor, "m"]
    n_neighbours: I64[Tensor, "m"]


def chain_steps(rule: Rule, n_constants: int) -> tuple[int, ...] | None:
    """The steps of a path rule's body from the first argument of its head to the second; None for other rules."""
    head = binary_atom(rule.head)
    body = [binary_atom(atom) for atom in rule.body]
    if head is None:
        return None

    _, here, end = head
    visited = {here}
    steps: list[int] = []
    while body:
        leaving = [atom for atom in body if atom is None or here in atom[1:]]
        if len(leaving) != 1 or leaving[0] is None or here <= n_constants:
            return None

        # the next step is the only atom that leaves from here
        predicate, first, second = leaving[0]
        body.remove(leaving[0])
        direction, here = (
            (FORWARD, second) if first == here else (BACKWARD, first)
        )
        steps.append(2 * predicate + direction)

        if here in visited:
            return None
        visited.add(here)

    return tuple(steps) if steps and here == end > n_constants else None


def binary_atom(atom: tuple[int, ...]) -> tuple[int, int, int] | None:
    """The predicate and the arguments of an atom; None if these are not two."""
    if len(atom) <= TAIL or not atom[TAIL] or any(atom[TAIL + 1 :]):
        return None
    return atom[0], atom[HEAD], atom[TAIL]


def plan_chains(
    kb: KnowledgeBase,
    sizes: KBSizes,
    path_rules: Sequence[tuple[Rule, tuple[int, ...]]],
) -> ChainPlan:
    """Index the facts by step, and path rules by the steps of their bodies.

    Args:
      path_rules: each with its `chain_steps`.
    """
    # To the first argument a body is walked from its end.
    reverse = [
        (rule, tuple(step ^ 1 for step in reversed(steps)))
        for rule, steps in path_rules
    ]
    device = kb.facts.device
    tries = {
        HEAD: _build_trie(reverse, sizes, device),
        TAIL: _build_trie(path_rules, sizes, device),
    }
    return ChainPlan(_index_neighbours(kb, sizes), tries)


def _index_neighbours(kb: KnowledgeBase, sizes: KBSizes) -> Neighbours:
    """Index the binary facts by step and entity."""
    n_codes = 2 * (sizes.n_predicates + 1) * (sizes.n_constants + 1)
    if n_codes > MAX_OFFSETS:
        return IndexedNeighbours(kb, sizes)
    facts = triple_index.binary_atoms(kb.facts.long())
    predicate, head, tail = facts[:, 0], facts[:, HEAD], facts[:, TAIL]
    step = torch.cat([2 * predicate + FORWARD, 2 * predicate + BACKWARD])
    start, end = torch.cat([head, tail]), torch.cat([tail, head])
    base = sizes.n_constants + 1
    # The facts are in lexicographic order, so that neighbours are ascending.
    code, order = sort_keys(step * base + start)
    codes = torch.arange(n_codes + 1, device=code.device)
    entities = end[order]
    return TabledNeighbours(
        base,
        torch.searchsorted(code, codes),
        entities,
        keys=code * base + entities,
    )


def _build_trie(
    path_rules: Sequence[tuple[Rule, tuple[int, ...]]],
    sizes: KBSizes,
    device: torch.device,
) -> ChainTrie:
    """The trie of the steps of rules, which start at a node for each predicate of a head."""
    children: list[dict[int, int]] = [{}]
    ending: list[list[int]] = [[]]

    def add_node() -> int:
        children.append({})
        ending.append([])
        return len(children) - 1

    root = [0] * (sizes.n_predicates + 1)
    for rule, steps in path_rules:
        predicate = rule.head[0]
        node = root[predicate] = root[predicate] or add_node()
        for step in steps:
            if step not in children[node]:
                children[node][step] = add_node()
            node = children[node][step]
        ending[node].append(rule.id)

    def tensor(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return ChainTrie(
        root=tensor(root),
        child_offsets=row_index.offsets(tensor([len(c) for c in children])),
        child_step=tensor([step for c in children for step in c]),
        child=tensor([node for c in children for node in c.values()]),
        rule_offsets=row_index.offsets(tensor([len(ids) for ids in ending])),
        rule=tensor([rule for ids in ending for rule in ids]),
    )


def iter_chain_firings(
    plan: ChainPlan,
    sizes: KBSizes,
    questions: Questions,
    *,
    left_out: LeftOut,
    object_identity: bool,
    budget: RowBudget | None = None,
    with_walks: bool = False,
) -> Iterator[Firings]:
    """Yield the firings of path rules, on each side those of shorter bodies first.

    Args:
      with_walks: with the probabilities of random walks.

    Other arguments are those of `firings.iter_firings`.

    Raises:
      RowBudgetExceeded: the walks take more rows than the budget allows.
    """
    for side, trie in plan.tries.items():
        walker = _Walker(
            trie,
            plan.neighbours,
            questions,
            left_out,
            object_identity,
            sizes,
            budget,
        )
        root = trie.root[questions.predicate]
        row = ((questions.side == side) & (root > 0)).nonzero().squeeze(1)
        certain = torch.full_like(row, int(1 / WALK_UNIT))
        walks = Walks(
            row,
            root[row],
            (questions.entity[row],),
            n_ways=torch.ones_like(row),
            probability=certain if with_walks else certain[:0],
        )
        while len(walks.question):
            walks, ended = walker.walk_on(walks)
            firings = walker.firings(ended)
            if len(firings.rule):
                yield firings


@dataclass(frozen=True, slots=True)
class _Walker:
    """Walks from the entities of the questions about one side."""

    trie: ChainTrie
    neighbours: Neighbours
    questions: Questions
    left_out: LeftOut
    object_identity: bool
    sizes: KBSizes
    budget: RowBudget | None

    def walk_on(self, walks: Walks) -> _LongerWalks:
        """All walks that are one step longer."""
        if not self.object_identity:
            longer = self._merge_steps(walks, self._iter_edges(walks))
            return _LongerWalks(longer, self._select_ended(longer))

        # Probabilities are rounded down at each step, those of each walk alone: such walks are not merged before.
        is_apart = len(walks.probability) > 0
        edges = self._iter_edges(walks, goes_on=None if is_apart else True)
        pieces = [
            piece for part in edges for piece in self._iter_next(walks, part)
        ]
        longer = _concatenate(pieces or [_none(walks, len(walks.path) + 1)])
        ended = [self._merge(self._select_ended(longer))]
        if not is_apart:
            ended.append(self._last_steps(walks))
        return _LongerWalks(longer, _concatenate(ended))

    def _merge_steps(self, walks: Walks, chunks: Iterable[_Edges]) -> Walks:
        """The walks along some edges, merged."""
        pieces = [
            self._merge(piece)
            for edges in chunks
            for piece in self._iter_next(walks, edges)
        ]
        if len(pieces) == 1:
            return pieces[0]
        return self._merge(_concatenate(pieces or [_none(walks, 1)]))

    def _last_steps(self, walks: Walks) -> Walks:
        """The walks one step longer from which no body goes on, merged, of walks that are not."""
        merged = self._merge(walks)
        given = self.questions.entity[merged.question]
        merged = merged._replace(path=(given, *merged.path))
        last = self._iter_edges(merged, goes_on=False)
        parts = [self._merge_steps(merged, last)]
        for edges in self._iter_edges(walks, goes_on=False):
            parts += self._iter_returns(walks, edges)
        ended = self._merge(_concatenate(parts))
        return _select(ended, ended.n_ways > 0)

    def _iter_returns(self, walks: Walks, edges: _Edges) -> Iterator[Walks]:
        """Yield walks along edges to an entity between the first and the last one, their numbers of ways negative.

        None uses a fact that is left out, which has the first entity in it.
        """
        here = walks.path[-1][edges.row]
        for entity in walks.path[1:-1]:
            there = entity[edges.row]
            self._spend(len(there))
            is_back = self.neighbours.is_neighbour(edges.step, here, there)
            back = is_back.nonzero().squeeze(1)
            row = edges.row[back]
            yield Walks(
                walks.question[row],
                edges.child[back],
                (there[back],),
                -walks.n_ways[row],
                probability=row[:0],
            )

    def _select_ended(self, walks: Walks) -> Walks:
        """The walks at nodes where rules end."""
        offsets = self.trie.rule_offsets
        return _select(walks, offsets[walks.node + 1] > offsets[walks.node])

    def firings(self, ended: Walks) -> Firings:
        """The firings of the rules whose body ends where merged walks have come."""
        offsets = self.trie.rule_offsets
        start = offsets[ended.node]
        row, position = expand_ranges(start, offsets[ended.node + 1] - start)
        return Firings(
            ended.question[row],
            ended.path[-1][row],
            self.trie.rule[position],
            ended.n_ways[row],
            _select_or_none(ended.probability, row),
        )

    def _iter_edges(
        self, walks: Walks, goes_on: bool | None = None
    ) -> Iterator[_Edges]:
        """Yield the edges of the trie that walks go on along, where their entity has a neighbour.

        Args:
          goes_on: only edges to nodes from which some body goes on, or only the others; None for all.
        """
        offsets = self.trie.child_offsets
        start = offsets[walks.node]
        for row, position in ragged_arange(
            start, offsets[walks.node + 1] - start
        ):
            self._spend(len(row))
            child = self.trie.child[position]
            if goes_on is not None:
                is_inner = offsets[child + 1] > offsets[child]
                kept = (is_inner == goes_on).nonzero().squeeze(1)
                row, position, child = row[kept], position[kept], child[kept]
            step = self.trie.child_step[position]
            here = walks.path[-1][row]
            first, count = self.neighbours.find(step, here)
            found = count > 0
            edges = _Edges(row, step, child, first, count)
            if found.any():
                yield _Edges(*(column[found] for column in edges))

    def _iter_next(self, walks: Walks, edges: _Edges) -> Iterator[Walks]:
        """Yield the walks along some edges, not merged."""
        chance = walks.probability
        if len(chance):
            n_left = self._count_left(walks, edges).clamp_min(1)
            chance = (chance[edges.row] // n_left).clamp_min(1)
        for longer, edge in self._iter_longer(walks, edges):
            self._spend(len(edge))
            longer = longer._replace(probability=_select_or_none(chance, edge))

            # Under object identity no entity is visited twice.
            is_kept = ~self._uses_left_out(longer, edges.step[edge])
            if self.object_identity:
                for entity in longer.path[:-1]:
                    is_kept &= entity != longer.path[-1]
            yield _select(longer, is_kept)

    def _iter_longer(
        self, walks: Walks, edges: _Edges
    ) -> Iterator[tuple[Walks, I64[Tensor, "n"]]]:
        """Yield the walks along some edges, without probabilities, and the position of the edge of each."""
        for edge, position in ragged_arange(edges.start, edges.n_neighbours):
            row = edges.row[edge]
            there = self.neighbours.entity(edges.step[edge], position)
            yield (
                Walks(
                    walks.question[row],
                    edges.child[edge],
                    (*(entity[row] for entity in walks.path), there),
                    walks.n_ways[row],
                    probability=row[:0],
                ),
                edge,
            )

    def _count_left(self, walks: Walks, edges: _Edges) -> I64[Tensor, "m"]:
        """How many neighbours each edge has by facts that its question does not leave out."""
        # What is left out is between the entity of the question and its answer.
        question, here = walks.question[edges.row], walks.path[-1][edges.row]
        answer = self.questions.left_out[question]
        is_end = (here == self.questions.entity[question]) | (here == answer)
        at = (is_end & (answer > 0)).nonzero().squeeze(1)
        n_left = edges.n_neighbours
        if not len(at):
            return n_left

        some = _Edges(*(column[at] for column in edges))
        for longer, edge in self._iter_longer(walks, some):
            is_left_out = self._uses_left_out(longer, some.step[edge])
            n_left = n_left.index_add(0, at[edge], -is_left_out.long())
        return n_left

    def _uses_left_out(
        self, walks: Walks, step: I64[Tensor, "n"]
    ) -> Bool[Tensor, "n"]:
        """Whether the last step of each walk uses a fact that its question leaves out."""
        here, there = walks.path[-2:]
        return uses_left_out(
            self.questions, walks.question, step, here, there, self.left_out
        )

    def _merge(self, walks: Walks) -> Walks:
        """Walks that have come to the same node and entity as one, with the sums of their ways and probabilities."""
        columns = (walks.question, walks.node, walks.path[-1])
        sizes = (
            len(self.questions.entity),
            len(self.trie.rule_offsets),
            self.sizes.n_constants,
        )
        groups = group_rows(columns, max(sizes).bit_length())
        question, node, entity = (
            column.index_select(0, groups.first) for column in columns
        )
        probability = walks.probability
        if len(probability):
            probability = sum_by_group(groups, probability)
        return Walks(
            question,
            node,
            (entity,),
            sum_by_group(groups, walks.n_ways),
            probability,
        )

    def _spend(self, n_rows: int) -> None:
        """Count the rows of a join.

        Raises:
          RowBudgetExceeded: they are more than allowed.
        """
        if self.budget is not None:
            self.budget.spend_join(n_rows)


def uses_left_out(
    questions: Questions,
    question: I64[Tensor, "n"],
    step: I64[Tensor, "n"],
    here: I64[Tensor, "n"],
    there: I64[Tensor, "n"],
    left_out: LeftOut,
) -> Bool[Tensor, "n"]:
    """Whether steps from some entities to others use a fact that their question leaves out.

    Args:
      question: row of the question of each step.
    """
    given = questions.entity[question]
    answer = questions.left_out[question]
    onwards = (here == given) & (there == answer)
    backwards = (here == answer) & (there == given)
    if left_out == "pair":
        return onwards | backwards

    # The fact that is left out leads from the given entity to the answer: forward if the second argument is asked for.
    direction = torch.where(questions.side == TAIL, FORWARD, BACKWARD)
    along = (2 * questions.predicate + direction)[question]
    return (onwards & (step == along)) | (backwards & (step == along ^ 1))


def _select(walks: Walks, is_kept: Bool[Tensor, "n"]) -> Walks:
    """Some of the walks."""
    row = is_kept.nonzero().squeeze(1)
    return Walks(
        walks.question.index_select(0, row),
        walks.node.index_select(0, row),
        tuple(entity.index_select(0, row) for entity in walks.path),
        walks.n_ways.index_select(0, row),
        _select_or_none(walks.probability, row),
    )


def _none(walks: Walks, path_length: int) -> Walks:
    """No walks."""
    none = walks.node[:0]
    path = (none,) * path_length
    return Walks(none, none, path, none, none)


def _concatenate(pieces: Sequence[Walks]) -> Walks:
    """The walks of all pieces."""
    if len(pieces) == 1:
        return pieces[0]
    return Walks(
        torch.cat([piece.question for piece in pieces]),
        torch.cat([piece.node for piece in pieces]),
        tuple(torch.cat(part) for part in zip(*(p.path for p in pieces))),
        torch.cat([piece.n_ways for piece in pieces]),
        torch.cat([piece.probability for piece in pieces]),
    )


def _select_or_none(
    probability: I64[Tensor, "n"], row: Tensor
) -> I64[Tensor, "m"]:
    """Some of the probabilities; none where there are none."""
    return probability[row] if len(probability) else probability


# -- firings


@dataclass(frozen=True, slots=True)
class _QuestionGroup:
    """The questions about one side."""

    side: int
    row: Tensor  # of each question, in the order of the relation
    relation: Relation  # (predicate, entity, left out) of each question


@dataclass(frozen=True, slots=True)
class RuleGroup:
    """Rules of one shape: they differ in what a template has variables for."""

    template: Rule
    variables: tuple[int, ...]  # those of the template that rules differ in
    values: Relation  # what they stand for in each rule, in the same order
    rule: Tensor  # id of each rule, in the order of the relation
    predicates: frozenset[int]  # of the heads of all rules


@dataclass(frozen=True, slots=True)
class FiringPlan:
    """What questions are answered from."""

    sizes: KBSizes
    chains: ChainPlan
    facts: Relation  # (predicate, arguments) of bodies of a single atom
    relations: dict[int, Relation]  # of the facts that longer bodies name
    groups: tuple[RuleGroup, ...]  # the rules that are no path rules
    memory_share: float = 1.0  # of the largest chunks of questions
    with_walks: bool = False  # firings have the probabilities of random walks

    @property
    def n_ids(self) -> int:
        """The largest constant or predicate; terms of templates above are variables."""
        return _n_ids(self.sizes)


@host.paused_collection()
def plan_firings(
    kb: KnowledgeBase,
    sizes: KBSizes,
    memory_share: float = 1.0,
    *,
    with_walks: bool = False,
) -> FiringPlan:
    """Index the facts and group the rules: once for any number of questions.

    Args:
      memory_share: of the largest chunks of questions whose firings may be held at once.
      with_walks: the firings have the probabilities of random walks.
    """
    path_rules: list[tuple[Rule, tuple[int, ...]]] = []
    others: list[Rule] = []
    for rule in rules_from_kb(kb):
        steps = chain_steps(rule, sizes.n_constants)
        if steps is not None:
            path_rules.append((rule, steps))
        elif binary_atom(rule.head):  # others answer no question
            others.append(rule)

    in_single: set[int] = set()
    in_longer: set[int] = set()
    for rule in others:
        named = in_single if len(rule.body) == 1 else in_longer
        named.update(atom[0] for atom in rule.body)
    return FiringPlan(
        sizes,
        plan_chains(kb, sizes, path_rules),
        _facts_of(kb, in_single),
        relations_by_predicate(kb.facts, in_longer),
        tuple(_group_rules(others, sizes, kb.facts.device)),
        memory_share,
        with_walks,
    )


def _n_ids(sizes: KBSizes) -> int:
    """The largest constant or predicate."""
    return max(sizes.n_constants, sizes.n_predicates)


def _shift(sizes: KBSizes) -> int:
    """What is added to a variable, so that it is larger than all predicates too."""
    return _n_ids(sizes) - sizes.n_constants


def _facts_of(kb: KnowledgeBase, predicates: set[int]) -> Relation:
    """The facts of some predicates, which are in lexicographic order: their predicate and their arguments."""
    wanted = kb.facts.new_tensor(sorted(predicates))
    facts = kb.facts[torch.isin(kb.facts[:, 0], wanted)].long()
    columns = tuple(column.contiguous() for column in facts.unbind(1))
    return Relation(columns, len(facts))


def iter_firings(
    plan: FiringPlan,
    questions: Questions,
    *,
    left_out: LeftOut = "fact",
    object_identity: bool = False,
    budget: RowBudget | None = None,
) -> Iterator[Firings]:
    """Yield the firings of some rules after others, on one side after the other, each once.

    A grounding that uses a fact that its question leaves out does not count; this holds for all candidates alike.

    Args:
      questions: distinct.
      left_out: what a question with an answer to leave out leaves out; "pair" is every fact between the two entities.
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      budget: bounds the rows that the joins make; None for no bound.

    Raises:
      RowBudgetExceeded: the joins make more rows than the budget allows.
    """
    yield from iter_chain_firings(
        plan.chains,
        plan.sizes,
        questions,
        left_out=left_out,
        object_identity=object_identity,
        budget=budget,
        with_walks=plan.with_walks,
    )
    asked = set(int_list(unique_values(questions.predicate)))
    question_groups = _group_questions(questions, plan.sizes)
    for rules in plan.groups:
        if asked.isdisjoint(rules.predicates):
            continue
        body = body_literals(plan, rules.template)
        if body is None:
            continue
        query = ConjunctiveQuery(
            body,
            output_variables=(),
            inequalities=tuple(
                identity_constraints(rules) if object_identity else ()
            ),
            n_constants=plan.n_ids,
            budget=budget,
            is_counted=True,
        )
        for group in question_groups:
            for part in _fire(rules, query, group, left_out):
                none = part.rule.new_zeros(len(part.rule))
                yield part._replace(walk=none) if plan.with_walks else part


def body_literals(
    plan: FiringPlan, template: Rule
) -> tuple[Literal, ...] | None:
    """The literals of a template's body; None if no fact has one of its predicates."""
    literals: list[Literal] = []
    for predicate, *arguments in template.body:
        if predicate > plan.n_ids:
            relation = plan.facts
            terms = (predicate, *arguments)
        elif predicate in plan.relations:
            relation = plan.relations[predicate]
            terms = tuple(arguments)
        else:
            return None
        literals.append(make_literal(relation, terms, plan.n_ids))
    return tuple(literals)


def _group_questions(
    questions: Questions, sizes: KBSizes
) -> list[_QuestionGroup]:
    """The questions by side."""
    columns = (questions.predicate, questions.entity, questions.left_out)
    bits = [_n_ids(sizes).bit_length()] * len(columns)
    groups: list[_QuestionGroup] = []
    for side in (HEAD, TAIL):
        row = (questions.side == side).nonzero().squeeze(1)
        if not len(row):
            continue
        of_side = tuple(column[row] for column in columns)
        _, keys = row_index.encode_rows(of_side, bits)
        order = sort_keys(keys).order
        relation = Relation(tuple(c[order] for c in of_side), len(row))
        groups.append(_QuestionGroup(side, row[order], relation))
    return groups


def _group_rules(
    rules: Sequence[Rule], sizes: KBSizes, device: torch.device
) -> Iterator[RuleGroup]:
    """Yield the rules, those of one shape together; a repeated rule in a group of its own."""
    largest = max(
        [sizes.n_constants]
        + [t for r in rules for atom in (r.head, *r.body) for t in atom[1:]]
    )
    first_lifted = 1 + largest + _shift(sizes)
    groups: dict[tuple[Rule, int], dict[tuple[int, ...], int]] = {}
    for rule in rules:
        template, values = _lift(rule, sizes, first_lifted)
        repetition = 0
        while values in groups.get((template, repetition), {}):
            repetition += 1
        group = groups.setdefault((template, repetition), {})
        group[values] = rule.id

    for (template, _), members in groups.items():
        rows = sorted(members)
        columns = torch.tensor(rows, dtype=torch.int64, device=device)
        n_lifted = len(rows[0])
        yield RuleGroup(
            template=template,
            variables=tuple(range(first_lifted, first_lifted + n_lifted)),
            values=Relation(
                tuple(c.contiguous() for c in columns.unbind(1)), len(rows)
            ),
            rule=torch.tensor([members[row] for row in rows], device=device),
            predicates=frozenset(head for head, *_ in rows),
        )


def _lift(
    rule: Rule, sizes: KBSizes, first_lifted: int
) -> tuple[Rule, tuple[int, ...]]:
    """The template of a rule, and what its new variables stand for, the predicate of the head first.

    Args:
      first_lifted: the first of the new variables, which are the largest terms.
    """
    values: list[int] = []

    def lift(value: int) -> int:
        values.append(value)
        return first_lifted + len(values) - 1

    def lift_atom(atom: Atom, lifts_predicate: bool) -> Atom:
        terms = [lift(atom[0]) if lifts_predicate else atom[0]]
        for term in atom[1:]:
            if term > sizes.n_constants:
                terms.append(term + _shift(sizes))
            else:
                terms.append(lift(term) if term else 0)
        return tuple(terms)

    head = lift_atom(rule.head, True)
    is_single = len(rule.body) == 1
    body = tuple(lift_atom(atom, is_single) for atom in rule.body)
    return Rule(0, head, body), tuple(values)


def identity_constraints(rules: RuleGroup) -> list[Inequality]:
    """Inequalities that keep the variables of rules apart from each other and from the constants."""
    template = rules.template
    terms = sorted(
        {t for a in (template.head, *template.body) for t in a[1:] if t}
    )
    # Variables that stand for constants have the largest ids.
    return [
        ((first,), (second,))
        for i, second in enumerate(terms)
        for first in terms[:i]
        if first not in rules.variables
    ]


def _fire(
    rules: RuleGroup,
    query: ConjunctiveQuery,
    group: _QuestionGroup,
    left_out: LeftOut,
) -> Iterator[Firings]:
    """Yield the firings of some rules for the questions of a group."""
    n_ids = query.n_constants
    head = rules.template.head
    given = head[HEAD + TAIL - group.side]
    asked = head[group.side]

    # The answer that is left out is one more variable, which only the questions bind.
    unknown = 1 + rules.variables[-1]
    question = make_literal(group.relation, (head[0], given, unknown), n_ids)
    values = make_literal(rules.values, rules.variables, n_ids)
    output = {given, unknown, asked, *rules.variables}
    query = replace(
        query,
        literals=(question, values, *query.literals),
        # Rules of all predicates, joined first, would meet all questions.
        first=question if len(query.literals) == 1 else None,
        inequalities=(
            *query.inequalities,
            *unknown_facts(rules.template, group.side, unknown, left_out),
        ),
        output_variables=tuple(sorted(output)),
    )
    tables = list(joins.iter_answers(query))
    if tables:
        answers = joins.union(tables, query.constant_bits)
        yield _to_firings(rules, group, answers, (given, unknown, asked), n_ids)


def unknown_facts(
    template: Rule, side: int, unknown: int, left_out: LeftOut
) -> list[Inequality]:
    """Inequalities that keep the atoms of a body apart from the facts that are left out."""
    given = template.head[HEAD + TAIL - side]
    fact = (given, unknown) if side == TAIL else (unknown, given)
    inequalities: list[Inequality] = []
    for atom in template.body:
        arguments = tuple(term for term in atom[1:] if term)
        if len(arguments) != len(fact):
            continue
        if left_out == "pair":
            inequalities += [(fact, arguments), (fact[::-1], arguments)]
        else:
            inequalities.append(
                ((template.head[0], *fact), (atom[0], *arguments))
            )
    return inequalities


def _to_firings(
    rules: RuleGroup,
    group: _QuestionGroup,
    answers: Table,
    terms: tuple[int, int, int],
    n_ids: int,
) -> Firings:
    """The answers of some rules as firings.

    Args:
      terms: the variable of the given argument, of the answer that is left out, and of the argument that is asked for.
    """
    counts = answers.counts
    assert counts is not None  # the query is counted
    columns = dict(zip(answers.variables, answers.columns))
    given, unknown, candidate = (columns[term] for term in terms)
    values = tuple(columns[v] for v in rules.variables)
    rule, _ = find_rows(values, rules.values, n_ids)
    predicate = values[0]
    question, _ = find_rows((predicate, given, unknown), group.relation, n_ids)
    return Firings(
        question=group.row[question],
        candidate=candidate,
        rule=rules.rule[rule],
        n_groundings=counts,
        walk=counts[:0],
    )


# -- firing chunks

# firings to hold at once, about 300 bytes each
MAX_CHUNK_FIRINGS = 4_000_000
# rows that the joins of a chunk of questions make, about 40 bytes each for those that are held at once
MAX_CHUNK_JOIN_ROWS = 24_000_000
# links of the candidates of a chunk, about 60 bytes each while they are looked up
MAX_CHUNK_LINKS = 8_000_000
# a shorter time tells no speed
MIN_TIMED_SECONDS = 1e-3
# A GPU takes larger chunks, of some 10 GB, in the same time.
GPU_CHUNK_FACTOR = 8
# questions whose work tells how many questions fit a chunk
PILOT_QUESTIONS = 16
MAX_CHUNK_GROWTH = 32  # factor from one chunk of questions to the next
# Parts of a chunk, any of which a thread may take; the same for any number of threads, so that bounds on rows are too.
# Several times the threads: those computed at once then hold a part of a chunk, whatever the number of threads.
MAX_PARTS = 4 * MAX_THREADS
# rows of joins and firings that a part has, at least: some 50 ms, less is slower by two threads than by one
MIN_PART_ROWS = 500_000

Computed = TypeVar("Computed")


@dataclass(slots=True)
class FiringWork:
    """The work of listing firings, and what is left out because of it.

    Attributes:
      leaves_out: a question whose joins alone make more rows than a chunk may is left out: it has no firings.
      n_rows: the rows that joins have made, of chunks that were too large included.
      n_left_out: the questions left out so far.
      n_links: what the caller holds beside firings, links of candidates, counted by the caller.
      deadline: a chunk has no more questions than there is time for, at the speed of those before.
    """

    leaves_out: bool = False
    n_rows: int = 0
    n_left_out: int = 0
    n_links: int = 0
    deadline: Deadline = NO_DEADLINE


class FiringChunk(NamedTuple):
    """Some questions and all their firings, in the order of question, candidate and rule."""

    questions: Questions
    firings: Firings


def iter_firing_chunks(
    plan: FiringPlan,
    questions: Questions,
    *,
    left_out: LeftOut = "fact",
    object_identity: bool = False,
    work: FiringWork | None = None,
    budget: RowBudget | None = None,
) -> Iterator[FiringChunk]:
    """Yield the firings of some questions after others: see `map_firing_chunks`."""
    return map_firing_chunks(
        FiringChunk,
        plan,
        questions,
        left_out=left_out,
        object_identity=object_identity,
        work=work,
        budget=budget,
    )


def map_firing_chunks(
    compute: Callable[[Questions, Firings], Computed],
    plan: FiringPlan,
    questions: Questions,
    *,
    left_out: LeftOut = "fact",
    object_identity: bool = False,
    work: FiringWork | None = None,
    budget: RowBudget | None = None,
    n_threads: int | None = None,
) -> Iterator[Computed]:
    """Yield what is computed from the firings of some questions after others.

    A chunk whose joins make too many rows is halved, down to one question, which may make any number unless `work`
    leaves it out.

    Args:
      compute: of some questions and all their firings, in the order of question, candidate and rule; called by several
        threads.
      questions: distinct.
      left_out: see `firings.iter_firings`.
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      work: counts the work, and says what to do with a question that is too large.
      budget: bounds the rows of all chunks together; None for no bound.
      n_threads: that share a chunk on a CPU; None for those of `cores.count_threads`.

    Raises:
      RowBudgetExceeded: all chunks make more rows than the budget allows.
    """
    work = FiringWork() if work is None else work
    fire = _Firing(plan, left_out, object_identity, work, n_threads)
    done = _Done(began=work.deadline.clock(), n_links_before=work.n_links)
    factor = _chunk_factor(plan, questions)
    size = PILOT_QUESTIONS
    while done.n_questions < len(questions.entity):
        rows = slice(done.n_questions, done.n_questions + size)
        chunk = select_questions(questions, rows)
        # A GPU works on a whole chunk at once.
        is_shared = not questions.entity.is_cuda
        n_parts = done.count_parts(len(chunk.entity)) if is_shared else 1
        computed = _compute_chunk(fire, compute, chunk, n_parts)
        work.n_rows += computed.n_rows
        if budget is not None:
            budget.spend(computed.cost)
        if computed.parts is None:
            size = len(chunk.entity) // 2
            continue
        yield from computed.parts
        done.n_questions += len(chunk.entity)
        done.n_firings += computed.n_firings
        done.n_rows += computed.n_rows
        size = done.next_size(size, factor, work)


@dataclass(slots=True)
class _Done:
    """What was computed before a chunk of questions, which says how large that may be."""

    began: float  # on the clock of the deadline
    n_links_before: int
    n_questions: int = 0
    n_firings: int = 0
    n_rows: int = 0

    def count_parts(self, n_asked: int) -> int:
        """The parts of a chunk of so many questions, by the work of those before."""
        expected = n_asked * (self.n_firings + self.n_rows)
        expected //= max(1, self.n_questions)
        return max(1, min(MAX_PARTS, n_asked // 2, expected // MIN_PART_ROWS))

    def next_size(self, size: int, factor: float, work: FiringWork) -> int:
        """The questions of a chunk after one of so many.

        Args:
          factor: how many times the bounds of a chunk apply.
        """
        fitting = min(
            int(factor * self.n_questions * bound) // max(1, count)
            for bound, count in (
                (MAX_CHUNK_FIRINGS, self.n_firings),
                (MAX_CHUNK_LINKS, work.n_links - self.n_links_before),
                (MAX_CHUNK_JOIN_ROWS, self.n_rows),
            )
        )
        left = work.deadline.seconds_left
        if not math.isinf(left):
            seconds = work.deadline.clock() - self.began
            in_time = self.n_questions * left / max(seconds, MIN_TIMED_SECONDS)
            fitting = min(fitting, int(in_time))
        return max(1, min(fitting, size * MAX_CHUNK_GROWTH))


@dataclass(frozen=True, slots=True)
class _Firing:
    """How the firings of questions are computed."""

    plan: FiringPlan
    left_out: LeftOut
    object_identity: bool
    work: FiringWork
    n_threads: int | None


class _ComputedChunk(NamedTuple, Generic[Computed]):
    """What is computed from the questions of a chunk."""

    parts: list[Computed] | None  # None where joins make too many rows
    n_firings: int
    n_rows: int  # that joins made
    cost: int  # in rows of joins


def _compute_chunk(
    fire: _Firing,
    compute: Callable[[Questions, Firings], Computed],
    chunk: Questions,
    n_parts: int,
) -> _ComputedChunk[Computed]:
    """Compute something from the firings of a chunk, in parts of about as many questions.

    Args:
      n_parts: if several, each has two questions or more.
    """
    most = _max_chunk_rows(fire.plan, chunk, fire.work)
    bounds = [len(chunk.entity) * i // n_parts for i in range(n_parts + 1)]
    parts = [select_questions(chunk, slice(*ends)) for ends in pairwise(bounds)]
    # Parts that are computed at once make at most four times the rows of a chunk.
    of_part = min(most, 4 * most // min(n_parts, MAX_THREADS))
    budgets = [RowBudget(of_part, overhead=0) for _ in parts]

    def compute_part(
        job: tuple[Questions, RowBudget],
    ) -> tuple[Computed, int] | None:
        part, budget = job
        firings = _bounded_firings(fire, part, budget)
        if firings is None:
            return None
        return compute(part, firings), len(firings.rule)

    jobs = list(zip(parts, budgets, strict=True))
    computed = map_in_threads(compute_part, jobs, fire.n_threads)
    done = [part for part in computed if part is not None]
    n_rows = sum(budget.n_rows for budget in budgets)
    fits = len(done) == n_parts and (n_parts == 1 or n_rows <= most)
    return _ComputedChunk(
        parts=[part for part, _ in done] if fits else None,
        n_firings=sum(n for _, n in done),
        n_rows=n_rows,
        # The joins of the parts are those of the chunk.
        cost=n_rows + max(b.n_joins for b in budgets) * JOIN_OVERHEAD_ROWS,
    )


def _chunk_factor(plan: FiringPlan, questions: Questions) -> float:
    """How many times the bounds of a chunk apply where the questions are."""
    largest = GPU_CHUNK_FACTOR if questions.entity.is_cuda else 1
    return plan.memory_share * largest


def max_join_rows(plan: FiringPlan, questions: Questions) -> int:
    """The rows that the joins of a chunk may make."""
    return int(_chunk_factor(plan, questions) * MAX_CHUNK_JOIN_ROWS)


def _max_chunk_rows(
    plan: FiringPlan, questions: Questions, work: FiringWork
) -> int:
    """The rows that the joins of a chunk may make; any number for a question that is not to be left out."""
    is_bounded = work.leaves_out or len(questions.entity) > 1
    return max_join_rows(plan, questions) if is_bounded else sys.maxsize


def _bounded_firings(
    fire: _Firing, questions: Questions, budget: RowBudget
) -> Firings | None:
    """The firings for some questions; None if joins make too many rows, and there is more than one question."""
    try:
        return sorted_firings(
            fire.plan, questions, fire.left_out, fire.object_identity, budget
        )
    except RowBudgetExceeded:
        if len(questions.entity) > 1:
            return None
        fire.work.n_left_out += 1
        none = questions.entity[:0]
        return Firings(none, none, none, none, none)


def sorted_firings(
    plan: FiringPlan,
    questions: Questions,
    left_out: LeftOut,
    object_identity: bool,
    budget: RowBudget | None = None,
) -> Firings:
    """All firings for the questions, in the order of question, candidate and rule; see `firings.iter_firings`."""
    parts = iter_firings(
        plan,
        questions,
        left_out=left_out,
        object_identity=object_identity,
        budget=budget,
    )
    none = questions.entity[:0]
    empty = Firings(none, none, none, none, none)
    firings = Firings(*(torch.cat(columns) for columns in zip(empty, *parts)))
    key = firings.question, firings.candidate, firings.rule
    bounds = len(questions.entity), plan.sizes.n_constants, plan.sizes.n_rules
    _, code = row_index.encode_rows(key, [n.bit_length() for n in bounds])
    return select_firings(firings, row_index.sort_keys(code).order)


def open_questions(queries: I64[Tensor, "Q W"], side: int) -> Questions:
    """The distinct questions that some queries ask about one side, ascending by predicate and entity.

    Args:
      queries: atoms of two arguments.
    """
    rows = unique_rows(queries[:, [0, HEAD + TAIL - side]])
    predicate, given = rows.unbind(1)
    return Questions(
        predicate=predicate,
        side=torch.full_like(predicate, side),
        entity=given,
        left_out=torch.zeros_like(given),
    )


def derive_answers(
    plan: FiringPlan,
    queries: I64[Tensor, "Q W"],
    sides: Sequence[int],
    *,
    object_identity: bool = False,
) -> I32[Tensor, "n W"]:
    """All atoms with an entity in place of an argument of a query that one application of a rule derives.

    Args:
      queries: atoms of two arguments.
      sides: the arguments that are replaced, each in turn.
      object_identity: different variables of a rule bind different constants, none of which the rule names.

    Returns:
      The atoms, for each side those of its questions, each once; facts are among them.
    """
    parts = [queries[:0].to(torch.int32)]
    for side in sides:
        chunks = iter_firing_chunks(
            plan, open_questions(queries, side), object_identity=object_identity
        )
        parts += [_answers(chunk, plan.sizes) for chunk in chunks]
    return torch.cat(parts)


def _answers(chunk: FiringChunk, sizes: KBSizes) -> I32[Tensor, "n W"]:
    """The atoms that the rules derive for the questions of a chunk, each once."""
    firings = chunk.firings
    base = sizes.n_constants + 1
    is_first = row_index.first_of_run(
        firings.question * base + firings.candidate
    )
    return fired_atoms(
        chunk.questions,
        select_firings(firings, is_first),
        sizes,
    )


def fired_atoms(
    questions: Questions, firings: Firings, sizes: KBSizes
) -> I32[Tensor, "n W"]:
    """The atom that each firing derives."""
    return candidate_atoms(
        questions, firings.question, firings.candidate, sizes
    )


def candidate_atoms(
    questions: Questions,
    question: I64[Tensor, "n"],
    candidate: I64[Tensor, "n"],
    sizes: KBSizes,
) -> I32[Tensor, "n W"]:
    """The atom of each candidate.

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
