"""Firings in tables of fixed size: the same as those of `firings`, without a shape that depends on the data.

`list_firings` is a pure function that compiles to one graph. A question whose rows do not fit is marked, and has no
firings; those of all others are complete. `plan_fixed_firings` says once what is the same for all questions, and
`choose_capacities` how many rows a batch of them needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.types import F64, I64, Bool
from funcppo.kg.logic import chains, fixed_joins, fixed_rows
from funcppo.kg.logic.chains import ChainTrie, Neighbours, TabledNeighbours
from funcppo.kg.logic.firings import FiringPlan
from funcppo.kg.logic.fixed_joins import JoinView, RuleJoin
from funcppo.kg.logic.fixed_rows import Stages
from funcppo.kg.logic.joins import expand_ranges
from funcppo.kg.logic.kb import KBSizes
from funcppo.kg.logic.question_types import (
    WALK_UNIT,
    Firings,
    LeftOut,
    Questions,
    select_questions,
)
from funcppo.kg.logic.sorting import KEY_BITS, unique_values
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.logic.typed_torch import int_list

# rows of a stage while capacities are chosen
MAX_STAGE_ROWS = 1 << 22
# what a row of a stage takes, with all that is computed of it, in bytes
ROW_BYTES = 150
MAX_BATCH_QUESTIONS = 1024
# share of the sampled questions that are to fit
FITTING_SHARE = 0.95
# standard deviations by which the rows of a batch may exceed their mean
CAPACITY_DEVIATIONS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedShapes:
    """What is static; a new value compiles a new graph.

    Attributes:
      n_levels: steps of the longest path rule.
      joins: of the rules that are no path rules, by shape and side.
      n_questions: of a batch; fewer are padded with questions about predicate 0.
      capacities: rows of each stage; a number for as many as there are, up to that, which cannot be compiled.
    """

    sizes: KBSizes
    left_out: LeftOut
    object_identity: bool
    with_walks: bool
    n_levels: int
    joins: tuple[RuleJoin, ...]
    n_questions: int = 1
    capacities: tuple[int, ...] | int = MAX_STAGE_ROWS


class NeighbourTable(NamedTuple):
    """The tensors of `chains.TabledNeighbours`, none of them empty."""

    offsets: I64[Tensor, "K1"]
    entities: I64[Tensor, "2N"]
    keys: I64[Tensor, "2N"]


class FixedWorld(NamedTuple):
    """What firings are listed from."""

    neighbours: NeighbourTable
    trie: ChainTrie  # of both sides; roots by side and predicate
    views: tuple[tuple[JoinView, ...], ...]  # of each join


class FixedPlan(NamedTuple):
    """The arguments of `list_firings` that are the same for all questions."""

    cfg: FixedShapes
    world: FixedWorld


class FixedFirings(NamedTuple):
    """Firings in a table of fixed size."""

    # in the order of question, candidate and rule; then empty places, of the question Q
    firings: Firings
    n_firings: I64[Tensor, ""]  # those that are no empty places
    overflow: Bool[
        Tensor, "Q"
    ]  # questions whose rows did not fit: they have no firings here
    demand: I64[
        Tensor, "S Q"
    ]  # rows of each question at each stage, up to that which it did not fit


class _Walks(NamedTuple):
    """Walks as in `chains.Walks`, in a table of fixed size."""

    question: I64[Tensor, "n"]  # Q at an empty place
    node: I64[Tensor, "n"]
    path: tuple[I64[Tensor, "n"], ...]
    n_ways: I64[Tensor, "n"]
    probability: I64[Tensor, "n"]  # without entries where it is not asked for


def plan_fixed_firings(
    plan: FiringPlan, *, left_out: LeftOut, object_identity: bool
) -> FixedPlan:
    """The plan in fixed shapes; see `firings.iter_firings`.

    Raises:
      ValueError: the graph is too large for it.
    """
    trie = _both_sides(plan.chains.tries[HEAD], plan.chains.tries[TAIL])
    joins = list(fixed_joins.iter_rule_joins(plan, left_out, object_identity))
    cfg = FixedShapes(
        sizes=plan.sizes,
        left_out=left_out,
        object_identity=object_identity,
        with_walks=plan.with_walks,
        n_levels=_depth(trie),
        joins=tuple(join for join, _ in joins),
    )
    world = FixedWorld(
        _table(plan.chains.neighbours), trie, tuple(views for _, views in joins)
    )
    return FixedPlan(cfg, world)


def choose_capacities(
    plan: FixedPlan, sample: Questions, max_bytes: int
) -> FixedShapes:
    """The static settings with a number of questions and rows for them that fit the memory.

    Args:
      sample: questions like those to come, at least one.
      max_bytes: of all stages together.

    Raises:
      ValueError: the memory does not suffice for a single question, or ids are too large to sort rows by.
    """
    demand = _fitting_demand(plan, sample)
    n_questions = MAX_BATCH_QUESTIONS
    rows = _rows_needed(demand, n_questions)
    while sum(rows) * ROW_BYTES > max_bytes and n_questions > 1:
        n_questions //= 2
        rows = _rows_needed(demand, n_questions)
    if sum(rows) * ROW_BYTES > max_bytes:
        raise ValueError(
            f"fixed shapes: expected memory for {sum(rows):,} rows of"
            f" {ROW_BYTES} bytes, got {max_bytes:,} bytes"
        )
    _check_bits(plan.cfg, plan.world.trie, n_questions)
    return replace(plan.cfg, n_questions=n_questions, capacities=rows)


def _fitting_demand(plan: FixedPlan, sample: Questions) -> F64[Tensor, "S n"]:
    """The rows of each stage for the sampled questions that are to fit, those with the fewest rows."""
    # One after the other: their rows together may be many.
    demands = [
        list_firings(
            plan.cfg, plan.world, select_questions(sample, slice(i, i + 1))
        ).demand
        for i in range(len(sample.entity))
    ]
    demand = torch.cat(demands, dim=1)
    n_fitting = max(1, int(FITTING_SHARE * len(sample.entity)))
    return demand[:, demand.sum(0).argsort()[:n_fitting]].double()


def _rows_needed(
    demand: F64[Tensor, "S n"], n_questions: int
) -> tuple[int, ...]:
    """The rows of each stage that a number of such questions need."""
    room = CAPACITY_DEVIATIONS * math.sqrt(n_questions)
    deviation = demand.std(1, correction=0)
    rows = n_questions * demand.mean(1) + room * deviation
    rows = rows.maximum(demand.amax(1)).clamp_min(1)
    return tuple(int_list(rows.ceil().long()))


def _check_bits(cfg: FixedShapes, trie: ChainTrie, n_questions: int) -> None:
    """Check that a row fits a key of 63 bits.

    Raises:
      ValueError: it does not.
    """
    largest = max(len(trie.child_offsets), cfg.sizes.n_rules)
    bits = sum(_bits(n_questions, largest, cfg.sizes.n_constants))
    if bits > KEY_BITS:
        raise ValueError(
            f"fixed shapes: expected ids of at most {KEY_BITS} bits, got {bits}"
        )


def _table(neighbours: Neighbours) -> NeighbourTable:
    """The neighbours of a graph that has a table of them.

    Raises:
      ValueError: it has none.
    """
    if not isinstance(neighbours, TabledNeighbours):
        raise ValueError(
            "fixed shapes: expected at most"
            f" {chains.MAX_OFFSETS:,} pairs of a predicate and an entity"
        )
    if len(neighbours.entities):
        _, offsets, entities, keys = neighbours
        return NeighbourTable(offsets, entities, keys)
    return NeighbourTable(
        neighbours.offsets,
        neighbours.entities.new_zeros(1),
        neighbours.keys.new_full((1,), -1),
    )


def _both_sides(head: ChainTrie, tail: ChainTrie) -> ChainTrie:
    """Two tries as one: the nodes of the second follow those of the first."""
    n_nodes = len(head.child_offsets) - 1
    tail_root = torch.where(tail.root > 0, tail.root + n_nodes, 0)
    pad = torch.nn.functional.pad  # so that no table is empty
    return ChainTrie(
        root=torch.cat([head.root, tail_root]),
        child_offsets=_join_offsets(head.child_offsets, tail.child_offsets),
        child_step=pad(torch.cat([head.child_step, tail.child_step]), (0, 1)),
        child=pad(torch.cat([head.child, tail.child + n_nodes]), (0, 1)),
        rule_offsets=_join_offsets(head.rule_offsets, tail.rule_offsets),
        rule=pad(torch.cat([head.rule, tail.rule]), (0, 1)),
    )


def _join_offsets(
    first: I64[Tensor, "n1"], second: I64[Tensor, "m1"]
) -> I64[Tensor, "nm1"]:
    """The offsets of some runs and others that follow them."""
    return torch.cat([first, first[-1] + second[1:]])


def _depth(trie: ChainTrie) -> int:
    """The steps of the longest path."""
    level = unique_values(trie.root[trie.root > 0])
    depth = -1
    while len(level):
        start = trie.child_offsets[level]
        count = trie.child_offsets[level + 1] - start
        level = trie.child[expand_ranges(start, count).position]
        depth += 1
    return max(depth, 0)


def list_firings(
    cfg: FixedShapes, world: FixedWorld, questions: Questions
) -> FixedFirings:
    """All firings for the questions that fit.

    Args:
      questions: distinct; one about predicate 0 has no firings.
    """
    n_questions = len(questions.entity)
    stages = fixed_rows.no_stages(n_questions, questions.entity.device)
    # one more, which empty places belong to
    questions = Questions(
        *(torch.nn.functional.pad(column, (0, 1)) for column in questions)
    )
    stages, parts = _chain_firings(cfg, world, questions, stages)
    for join, views in zip(cfg.joins, world.views, strict=True):
        stages, fired = fixed_joins.join_rules(
            join, views, questions, stages, cfg.capacities
        )
        none = fired.walk.new_zeros(len(fired.question))
        parts.append(fired._replace(walk=none) if cfg.with_walks else fired)
    parts.append(_empty_place(n_questions, questions.entity, cfg.with_walks))

    # Those of questions that did not fit are incomplete.
    firings = Firings(*(torch.cat(columns) for columns in zip(*parts)))
    question = torch.where(
        stages.overflow[firings.question], n_questions, firings.question
    )
    columns, totals = fixed_rows.merge(
        (question, firings.candidate, firings.rule),
        _bits(n_questions, cfg.sizes.n_constants, cfg.sizes.n_rules),
        [firings.n_groundings, firings.walk][: 1 + cfg.with_walks],
        n_questions,
    )
    question, candidate, rule = columns
    walk = totals[1] if cfg.with_walks else firings.walk
    return FixedFirings(
        Firings(question, candidate, rule, totals[0], walk),
        n_firings=(question < n_questions).sum(),
        overflow=stages.overflow[:n_questions],
        demand=torch.cat(
            [
                questions.entity.new_zeros(0, n_questions),
                *(demand[None, :n_questions] for demand in stages.demands),
            ]
        ),
    )


def _empty_place(
    n_questions: int, ids: I64[Tensor, "n"], with_walks: bool
) -> Firings:
    """A table of one empty place."""
    zero = ids.new_zeros(1)
    walk = zero if with_walks else zero[:0]
    return Firings(zero + n_questions, zero, zero, zero, walk)


def _bits(*largest: int) -> list[int]:
    """The bits of columns whose largest values are these."""
    return [value.bit_length() for value in largest]


def _chain_firings(
    cfg: FixedShapes, world: FixedWorld, questions: Questions, stages: Stages
) -> tuple[Stages, list[Firings]]:
    """The firings of path rules, level by level; one question and candidate may have a rule more than once."""
    n_questions = len(stages.overflow) - 1
    root_row = (questions.side - HEAD) * (cfg.sizes.n_predicates + 1)
    root = world.trie.root[root_row.clamp_min(0) + questions.predicate]
    row = torch.arange(n_questions + 1, device=root.device)
    certain = torch.full_like(row, int(1 / WALK_UNIT))
    walks = _Walks(
        torch.where(root > 0, row, n_questions),
        root,
        (questions.entity,),
        n_ways=torch.ones_like(row),
        probability=certain if cfg.with_walks else certain[:0],
    )

    parts: list[Firings] = []
    for level in range(cfg.n_levels):
        stages, walks = _walk_on(cfg, world, questions, stages, walks)
        # Under object identity walks remember their way. After the last level all firings are merged.
        if not cfg.object_identity and level < cfg.n_levels - 1:
            walks = _merge(cfg, world.trie, walks, n_questions)
        stages, fired = _fire(cfg, world.trie, stages, walks)
        parts.append(fired)
    return stages, parts


def _walk_on(
    cfg: FixedShapes,
    world: FixedWorld,
    questions: Questions,
    stages: Stages,
    walks: _Walks,
) -> tuple[Stages, _Walks]:
    """All walks that are one step longer."""
    trie = world.trie
    n_questions = len(stages.overflow) - 1
    neighbours = TabledNeighbours(cfg.sizes.n_constants + 1, *world.neighbours)
    # edges of the trie
    first = trie.child_offsets[walks.node]
    n_children = trie.child_offsets[walks.node + 1] - first
    stages, edges = fixed_rows.expand(
        stages, cfg.capacities, walks.question, first, n_children
    )
    step = trie.child_step[edges.position]
    here = walks.path[-1][edges.row]
    start, n_neighbours = neighbours.find(step, here)
    chance = walks.probability
    if cfg.with_walks:
        n_left = n_neighbours - _count_left_out(
            cfg, neighbours, questions, edges.question, step, here
        )
        chance = (chance[edges.row] // n_left.clamp_min(1)).clamp_min(1)

    # their neighbours
    stages, longer = fixed_rows.expand(
        stages, cfg.capacities, edges.question, start, n_neighbours
    )
    row, edge_step = edges.row[longer.row], step[longer.row]
    path = tuple(entity[row] for entity in walks.path)
    there = neighbours.entity(edge_step, longer.position)
    is_kept = ~chains.uses_left_out(
        questions, longer.question, edge_step, path[-1], there, cfg.left_out
    )
    if cfg.object_identity:
        for entity in path:
            is_kept = is_kept & (entity != there)
    return stages, _Walks(
        torch.where(is_kept, longer.question, n_questions),
        trie.child[edges.position][longer.row],
        (*path, there) if cfg.object_identity else (there,),
        walks.n_ways[row],
        chance[longer.row] if cfg.with_walks else chance,
    )


def _count_left_out(
    cfg: FixedShapes,
    neighbours: Neighbours,
    questions: Questions,
    question: I64[Tensor, "m"],
    step: I64[Tensor, "m"],
    here: I64[Tensor, "m"],
) -> I64[Tensor, "m"]:
    """How many neighbours of some entities are such by a fact that the question leaves out: one at most."""
    given = questions.entity[question]
    answer = questions.left_out[question]
    there = torch.where(here == given, answer, given)
    is_left_out = chains.uses_left_out(
        questions, question, step, here, there, cfg.left_out
    )
    return (is_left_out & neighbours.is_neighbour(step, here, there)).long()


def _merge(
    cfg: FixedShapes, trie: ChainTrie, walks: _Walks, n_questions: int
) -> _Walks:
    """Walks that have come to the same node and entity as one."""
    n_nodes = len(trie.child_offsets)
    columns, totals = fixed_rows.merge(
        (walks.question, walks.node, walks.path[-1]),
        _bits(n_questions, n_nodes, cfg.sizes.n_constants),
        [walks.n_ways, walks.probability][: 1 + cfg.with_walks],
        n_questions,
    )
    question, node, entity = columns
    probability = totals[1] if cfg.with_walks else walks.probability
    return _Walks(question, node, (entity,), totals[0], probability)


def _fire(
    cfg: FixedShapes, trie: ChainTrie, stages: Stages, walks: _Walks
) -> tuple[Stages, Firings]:
    """The firings of the rules whose body ends where walks have come."""
    start = trie.rule_offsets[walks.node]
    stages, ended = fixed_rows.expand(
        stages,
        cfg.capacities,
        walks.question,
        start,
        trie.rule_offsets[walks.node + 1] - start,
    )
    walk = walks.probability
    return stages, Firings(
        ended.question,
        walks.path[-1][ended.row],
        trie.rule[ended.position],
        walks.n_ways[ended.row],
        walk[ended.row] if cfg.with_walks else walk,
    )
