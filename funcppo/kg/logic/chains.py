"""Firings of path rules, all at once: walks from the question's entity along the bodies that rules share.

The body of a path rule is a chain of binary atoms from one argument of its head to the other, through variables that
occur nowhere else: `h(x, y) :- a(x, z), b(w, z), c(w, y)`. Read from the argument that a question gives, it is a
sequence of steps, each along a predicate in one direction. The sequences of all rules form a trie, so that bodies with
a common beginning are walked once, and walks that meet are merged: they carry the number of ways to get there.

Under object identity a walk has to remember its way, and walks are merged where no body goes on. Most are in their last
step, and are merged before it: `h(x, y) :- a(x, z), b(z, w), c(w, y)` has as many ways to y as walks to w have merged,
less those whose z is y, which one look at c(w, z) for each of them tells.

They may carry a probability too: that of a random walk, which at each atom takes one of the matching facts that the
question does not leave out, all with the same chance. It ends early where there is none and, under object identity,
where it comes back to an entity. Probabilities are whole numbers of `WALK_UNIT`: that of a walk is divided by the
number of those facts and rounded down, but not to 0, and those of walks that meet add up. So it is the same on any
device and in any order, and that of a firing is off by less than a unit for each atom of each of its groundings.

`plan_chains` builds the tries of both sides, `iter_chain_firings` walks them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from funcppo.core.types import I64, Bool
from funcppo.kg.logic import row_index, triple_index
from funcppo.kg.logic.joins import RowBudget, expand_ranges, ragged_arange
from funcppo.kg.logic.kb import KBSizes, KnowledgeBase, contains, find_postings
from funcppo.kg.logic.question_types import (
    WALK_UNIT,
    Firings,
    LeftOut,
    Questions,
)
from funcppo.kg.logic.relations import group_rows, sum_by_group
from funcppo.kg.logic.rules import Rule
from funcppo.kg.logic.sorting import sort_keys
from funcppo.kg.logic.triple_index import HEAD, TAIL

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
