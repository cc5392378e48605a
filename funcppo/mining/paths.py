"""Paths through a graph of binary facts: which of them close a fact, and which pairs they join.

A *step* walks along a fact, from its first argument to its second or back; its *label* is 2(p - 1) for predicate p
walked forwards and 2(p - 1) + 1 walked backwards, so `label ^ 1` is the way back. A *body* is a row of labels
[b1, ..., bn]: the path X -b1-> Z1 -b2-> ... -bn-> Y. The pairs that a body joins are the entries of a product of
sparse boolean matrices, taken here by joins over hashed and sorted keys, for all bodies at once.

Runs on the device of the facts, in a loop on the host: the sizes depend on the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.logic import row_index
from funcppo.logic.joins import ragged_arange
from funcppo.logic.row_index import HashTable
from funcppo.types import F32, I64, Bool

BLOCK_ROWS = 1 << 22  # rows that a block of facts or sources is to make, about


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeIndex:
    """The facts of two arguments walked both ways, in the order of source, label and target; a value of the host."""

    label: I64[Tensor, "L"]
    target: I64[Tensor, "L"]
    fact: I64[Tensor, "L"]  # row of the fact that the step walks along
    offsets: I64[Tensor, "C2"]  # steps from entity e: start[e] to start[e + 1]
    label_spans: HashTable  # source * n_labels + label -> start and number of such steps
    pair_spans: HashTable  # source * base + target -> start and number in `by_pair`
    pair_order: I64[Tensor, "L"]  # rows of the steps in the order of source, target and label
    first_argument: I64[Tensor, "N"]  # the arguments of each fact
    second_argument: I64[Tensor, "N"]
    n_labels: int
    n_entity_ids: int  # C + 1


class ClosedPaths(NamedTuple):
    """Pairs of a fact and a body that joins its two arguments, each once, in that order."""

    fact: I64[Tensor, "n"]
    body_labels: I64[Tensor, "n J"]
    is_circular: Bool[Tensor, "n"]  # every such path walks along the fact itself


class BodyPairs(NamedTuple):
    """The pairs that bodies join, each once a body, in the order of body, source and target."""

    body: I64[Tensor, "n"]  # row of the bodies asked for
    source: I64[Tensor, "n"]
    target: I64[Tensor, "n"]


def build_edge_index(facts: I64[Tensor, "N 3"], n_predicates: int, n_constants: int) -> EdgeIndex:
    """Both directions of each fact [predicate, first, second]."""
    predicate, first, second = facts.to(torch.int64).unbind(1)
    row = torch.arange(len(facts), device=facts.device)
    label = torch.cat([2 * predicate - 2, 2 * predicate - 1])
    source, target, fact = torch.cat([first, second]), torch.cat([second, first]), torch.cat([row, row])
    n_labels, base = 2 * n_predicates, n_constants + 1
    order = torch.sort(target, stable=True).indices
    order = order[torch.sort((source * n_labels + label)[order], stable=True).indices]
    source, label, target, fact = source[order], label[order], target[order], fact[order]
    pair, by_pair = torch.sort(source * base + target, stable=True)
    return EdgeIndex(
        label=label,
        target=target,
        fact=fact,
        offsets=torch.searchsorted(source, torch.arange(base + 1, device=facts.device)),
        label_spans=row_index.build_hash_table(row_index.run_length_encode(source * n_labels + label)),
        pair_spans=row_index.build_hash_table(row_index.run_length_encode(pair)),
        pair_order=by_pair,
        first_argument=first,
        second_argument=second,
        n_labels=n_labels,
        n_entity_ids=base,
    )


def closed_path_cost(edges: EdgeIndex, length: int) -> I64[Tensor, "N"]:
    """How many rows `closed` looks at for each fact."""
    degree = torch.diff(edges.offsets)
    first, second = degree[edges.first_argument], degree[edges.second_argument]
    return torch.ones_like(first) if length == 1 else torch.minimum(first, second) if length == 2 else first * second


def split_by_cost(edges: EdgeIndex, facts: I64[Tensor, "n"], length: int) -> Sequence[Tensor]:
    """The facts cut where their closing cost adds up to about BLOCK."""
    cut = torch.diff(torch.cumsum(closed_path_cost(edges, length)[facts], 0) // BLOCK_ROWS).nonzero().squeeze(1) + 1
    return torch.tensor_split(facts, cut.cpu()) if len(facts) else ()


def find_closed_paths(edges: EdgeIndex, facts: I64[Tensor, "n"], length: int) -> ClosedPaths:
    """The bodies of one to three labels that join the arguments of each fact.

    A path of two steps is walked from the end that has fewer, a path of three meets in its middle step.
    """
    none = ClosedPaths(facts[:0], facts[:0].view(0, 1).expand(0, length), facts[:0].bool())
    if not len(facts):
        return none
    pieces = [none, *(_distinct_closed(edges, piece) for piece in _CLOSED[length](edges, facts))]
    return _distinct_closed(edges, ClosedPaths(*(torch.cat(same) for same in zip(*pieces))))


def iter_body_pairs(
    edges: EdgeIndex,
    bodies: I64[Tensor, "K J"],
    sources: I64[Tensor, "S"],
    sampling_fraction: F32[Tensor, "K"],
    priority: F32[Tensor, "C1"],
) -> Iterator[tuple[BodyPairs, float]]:
    """The pairs that each body joins from those of the sources that it draws, and the draw that all of them are below.

    All pairs of a source come together, and the sources in their order.

    Args:
      bodies: distinct, in lexicographic order.
      sources: distinct, in the order of their draw.
      share: a body draws the sources whose `draw` is below it; 1 draws all.
      draw: a number in [0, 1) for each entity.
    """
    if not len(bodies):
        return
    levels, low, size = _trie(bodies, sampling_fraction), 0, 64
    while low < len(sources):
        some = sources[low : low + size]
        table, rows = BodyPairs(torch.zeros_like(some), some, some), 0
        for level in levels:
            table, walked = _walk(edges, level, table, priority)
            rows += walked
        low += size
        yield table, float(priority[sources[low]]) if low < len(sources) else 1.0
        size = max(1, min(size * 2, size * BLOCK_ROWS // max(rows, 1)))


def outgoing_edges(edges: EdgeIndex, entity: I64[Tensor, "n"], label: I64[Tensor, "n"]) -> tuple[Tensor, Tensor]:
    """Where the steps of each label from each entity start, and how many there are."""
    span, _ = row_index.hash_lookup(edges.label_spans, entity * edges.n_labels + label)
    return span >> row_index.ROW_COUNT_BITS, span & ((1 << row_index.ROW_COUNT_BITS) - 1)


def edges_between(edges: EdgeIndex, source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs (row, step) of every step from a row's source to its target, in pieces."""
    span, found = row_index.hash_lookup(edges.pair_spans, source * edges.n_entity_ids + target)
    hit = found.nonzero().squeeze(1)
    span = span[hit]
    for row, at in (
        ragged_arange(span >> row_index.ROW_COUNT_BITS, span & ((1 << row_index.ROW_COUNT_BITS) - 1))
        if len(hit)
        else ()
    ):
        yield hit[row], edges.pair_order[at]


def _closed_1(steps: EdgeIndex, facts: Tensor) -> Iterator[ClosedPaths]:
    for row, step in edges_between(steps, steps.first_argument[facts], steps.second_argument[facts]):
        fact = facts[row]
        yield ClosedPaths(fact, steps.label[step, None], steps.fact[step] == fact)


def _closed_2(steps: EdgeIndex, facts: Tensor) -> Iterator[ClosedPaths]:
    first, second = steps.first_argument[facts], steps.second_argument[facts]
    degree = torch.diff(steps.offsets)
    back = degree[first] > degree[second]
    near, far = torch.where(back, second, first), torch.where(back, first, second)
    for row, one in ragged_arange(steps.offsets[near], degree[near]):
        for at, two in edges_between(steps, steps.target[one], far[row]):
            fact, there, here = facts[row[at]], one[at], back[row[at]]
            a, b = steps.label[there], steps.label[two]
            body = torch.stack([torch.where(here, b ^ 1, a), torch.where(here, a ^ 1, b)], 1)
            yield ClosedPaths(fact, body, (steps.fact[there] == fact) | (steps.fact[two] == fact))


def _closed_3(steps: EdgeIndex, facts: Tensor) -> Iterator[ClosedPaths]:
    first, second = steps.first_argument[facts], steps.second_argument[facts]
    degree = torch.diff(steps.offsets)
    for row, i in ragged_arange(torch.zeros_like(first), degree[first] * degree[second]):
        width = degree[second[row]]
        one, three = steps.offsets[first[row]] + i // width, steps.offsets[second[row]] + i % width
        for at, two in edges_between(steps, steps.target[one], steps.target[three]):
            fact, a, c = facts[row[at]], one[at], three[at]
            body = torch.stack([steps.label[a], steps.label[two], steps.label[c] ^ 1], 1)
            around = torch.stack([steps.fact[step] == fact for step in (a, two, c)]).any(0)
            yield ClosedPaths(fact, body, around)


_CLOSED = {1: _closed_1, 2: _closed_2, 3: _closed_3}


def _distinct_closed(steps: EdgeIndex, found: ClosedPaths) -> ClosedPaths:
    """Each fact and body once, circular only if all its rows are."""
    columns = (found.fact, *found.body_labels.unbind(1), found.is_circular.to(torch.int64))
    bits = [len(steps.first_argument).bit_length(), *[steps.n_labels.bit_length()] * found.body_labels.shape[1], 1]
    key, order = torch.sort(row_index.encode_rows(columns, bits)[1])
    first = order[torch.diff(key >> 1, prepend=key.new_tensor([-1])).nonzero().squeeze(1)]
    return ClosedPaths(*(column.index_select(0, first) for column in found))


class _Level(NamedTuple):
    """One level of the trie of bodies: the children of each node of the level above."""

    start: Tensor  # children of node i: start[i] to start[i + 1]
    label: Tensor  # of each child
    share: Tensor  # the largest of the bodies below each child


def _trie(bodies: Tensor, share: Tensor) -> list[_Level]:
    levels, parent = [], torch.zeros(len(bodies), dtype=torch.int64, device=bodies.device)
    for label in bodies.unbind(1):
        new = (torch.diff(parent, prepend=parent[:1]) != 0) | (torch.diff(label, prepend=label[:1]) != 0)
        node = torch.cumsum(new, 0)
        first = torch.searchsorted(node, torch.arange(int(node[-1]) + 1, device=bodies.device))
        edges = torch.arange(int(parent[-1]) + 2, device=bodies.device)
        most = torch.zeros(len(first), device=bodies.device).scatter_reduce(0, node, share, "amax")
        levels.append(_Level(torch.searchsorted(parent[first], edges), label[first], most))
        parent = node
    return levels


def _walk(steps: EdgeIndex, level: _Level, table: BodyPairs, draw: Tensor) -> tuple[BodyPairs, int]:
    """The ends one step further, and how many rows were walked."""
    if not table.body.numel():
        return table, 0
    held, rows, low = [], 0, level.start[table.body]
    for row, child in ragged_arange(low, level.start[table.body + 1] - low):
        kept = (draw[table.source[row]] < level.share[child]).nonzero().squeeze(1)
        row, child = row[kept], child[kept]
        if not len(row):
            continue
        start, count = outgoing_edges(steps, table.target[row], level.label[child])
        for at, step in ragged_arange(start, count):
            part = (child[at], table.source[row[at]], steps.target[step])
            held.append(row_index.unique_rows(part, _bits(steps, len(level.label))))
            rows += len(at)
    if len(held) > 1:
        held = [row_index.unique_rows(tuple(torch.cat(same) for same in zip(*held)), _bits(steps, len(level.label)))]
    return BodyPairs(*held[0]) if held else BodyPairs(*(table.body[:0],) * 3), rows


def _bits(steps: EdgeIndex, n: int) -> list[int]:
    return [n.bit_length(), steps.n_entity_ids.bit_length(), steps.n_entity_ids.bit_length()]
