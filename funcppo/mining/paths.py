"""Paths through a graph of binary facts: which of them close a fact, and which pairs of entities they join.

An *edge* walks along a fact, from its first argument to its second or back. Its *label* is 2(p - 1) for predicate p
walked forwards and 2(p - 1) + 1 walked backwards, so `label ^ 1` is the way back. The *body* of a path rule is a row of
labels [b1, ..., bn], the path X -b1-> Z1 -b2-> ... -bn-> Y. The pairs that a body joins are the entries of a product
of sparse boolean matrices; here they are computed by joins over hashed and sorted keys, for all bodies at once.

`find_closed_paths` starts from facts and finds bodies; `iter_body_pairs` starts from bodies and finds pairs. Both run
on the device of the facts, in a loop on the host: the sizes depend on the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.logic import row_index
from funcppo.logic.joins import RowPairs, ragged_arange
from funcppo.logic.row_index import HashTable, Span
from funcppo.types import F32, I64, Bool

# approximate number of rows that one block of facts or sources makes
BLOCK_ROWS = 1 << 22
# sources of the first block of `iter_body_pairs`, before their cost is known
FIRST_BLOCK_SOURCES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeIndex:
    """Both directions of each fact with two arguments, in the order of source, label and target."""

    label: I64[Tensor, "L"]
    target: I64[Tensor, "L"]
    fact: I64[Tensor, "L"]  # row of the fact that the edge walks along
    # edges from entity e: offsets[e] to offsets[e + 1]
    offsets: I64[Tensor, "C2"]
    label_spans: HashTable  # source * n_labels + label -> span of such edges
    # source * n_entity_ids + target -> span in `pair_order`
    pair_spans: HashTable
    # rows of the edges in the order of source, target and label
    pair_order: I64[Tensor, "L"]
    first_argument: I64[Tensor, "N"]  # of each fact
    second_argument: I64[Tensor, "N"]  # of each fact
    n_labels: int
    n_entity_ids: int  # C + 1


class ClosedPaths(NamedTuple):
    """Pairs of a fact and a body that joins its two arguments, each once, in that order."""

    fact: I64[Tensor, "n"]
    body_labels: I64[Tensor, "n J"]
    # every such path walks along the fact itself
    is_circular: Bool[Tensor, "n"]


class BodyPairs(NamedTuple):
    """The pairs of entities that bodies join, each once a body, in the order of body, source and target."""

    body: I64[Tensor, "n"]  # row of the body
    source: I64[Tensor, "n"]
    target: I64[Tensor, "n"]


class PairChunk(NamedTuple):
    """All pairs of some sources, the next ones in the order of their priority."""

    pairs: BodyPairs
    # all sources of a smaller priority have been looked at; 1.0 after the last
    next_priority: float


class EdgeMatches(NamedTuple):
    """Pairs of a row and an edge that belongs to it."""

    row: Tensor
    edge: Tensor


def build_edge_index(
    facts: I64[Tensor, "N 3"], n_predicates: int, n_constants: int
) -> EdgeIndex:
    """Index both directions of each fact [predicate, first argument, second argument]."""
    n_labels = 2 * n_predicates
    n_entity_ids = n_constants + 1
    predicate, first, second = facts.to(torch.int64).unbind(1)
    row = torch.arange(len(facts), device=facts.device)
    label = torch.cat([2 * predicate - 2, 2 * predicate - 1])
    source = torch.cat([first, second])
    target = torch.cat([second, first])
    fact = torch.cat([row, row])

    # Sort by target first, then stably by source and label.
    order = torch.sort(target, stable=True).indices
    order = order[
        torch.sort((source * n_labels + label)[order], stable=True).indices
    ]
    source = source[order]
    label = label[order]
    target = target[order]

    pair, pair_order = torch.sort(source * n_entity_ids + target, stable=True)
    label_runs = row_index.run_length_encode(source * n_labels + label)
    return EdgeIndex(
        label=label,
        target=target,
        fact=fact[order],
        offsets=torch.searchsorted(
            source, torch.arange(n_entity_ids + 1, device=facts.device)
        ),
        label_spans=row_index.build_hash_table(label_runs),
        pair_spans=row_index.build_hash_table(
            row_index.run_length_encode(pair)
        ),
        pair_order=pair_order,
        first_argument=first,
        second_argument=second,
        n_labels=n_labels,
        n_entity_ids=n_entity_ids,
    )


def closed_path_cost(edges: EdgeIndex, length: int) -> I64[Tensor, "N"]:
    """The number of rows that `find_closed_paths` looks at for each fact."""
    degree = torch.diff(edges.offsets)
    first = degree[edges.first_argument]
    second = degree[edges.second_argument]
    if length == 1:
        return torch.ones_like(first)
    if length == 2:
        return torch.minimum(first, second)
    return first * second


def split_by_cost(
    edges: EdgeIndex, facts: I64[Tensor, "n"], length: int
) -> Sequence[Tensor]:
    """The facts, cut where the cost of their paths adds up to about BLOCK_ROWS."""
    if not len(facts):
        return ()
    cost = closed_path_cost(edges, length)[facts]
    block = torch.cumsum(cost, 0) // BLOCK_ROWS
    cut = torch.diff(block).nonzero().squeeze(1) + 1
    return torch.tensor_split(facts, cut.cpu())


def find_closed_paths(
    edges: EdgeIndex, facts: I64[Tensor, "n"], length: int
) -> ClosedPaths:
    """Find the bodies of one to three labels that join the arguments of each fact.

    A path of two edges is walked from the end that has fewer; a path of three meets in its middle edge.

    Args:
      facts: rows of the facts to close.
      length: number of labels, 1 to 3.

    Returns:
      Each fact with each body once, and whether every such path walks along the fact itself.
    """
    no_paths = ClosedPaths(
        facts[:0], facts[:0].view(0, 1).expand(0, length), facts[:0].bool()
    )
    if not len(facts):
        return no_paths
    chunks = [no_paths]
    for chunk in _FIND_CLOSED[length](edges, facts):
        chunks.append(_distinct_paths(edges, chunk))
    return _distinct_paths(
        edges, ClosedPaths(*(torch.cat(columns) for columns in zip(*chunks)))
    )


def iter_body_pairs(
    edges: EdgeIndex,
    bodies: I64[Tensor, "K J"],
    sources: I64[Tensor, "S"],
    sampling_fraction: F32[Tensor, "K"],
    priority: F32[Tensor, "C1"],
) -> Iterator[PairChunk]:
    """Yield the pairs that each body joins from its sample of the sources.

    All pairs of a source come together, and the sources in their order, so that an early end leaves a sample.

    Args:
      bodies: distinct, in lexicographic order.
      sources: distinct, by ascending priority.
      sampling_fraction: a body looks at the sources whose priority is below it; 1 takes all.
      priority: a random number in [0, 1) for each entity.
    """
    if not len(bodies):
        return
    levels = _build_trie(bodies, sampling_fraction)
    first = 0
    size = FIRST_BLOCK_SOURCES
    while first < len(sources):
        block = sources[first : first + size]
        pairs = BodyPairs(torch.zeros_like(block), block, block)
        n_rows = 0
        for level in levels:
            pairs, n_walked = _walk_level(edges, level, pairs, priority)
            n_rows += n_walked
        first += size
        yield PairChunk(
            pairs,
            float(priority[sources[first]]) if first < len(sources) else 1.0,
        )

        # Grow the block up to the rows that one may make, by the cost of the last one.
        size = max(1, min(size * 2, size * BLOCK_ROWS // max(n_rows, 1)))


def outgoing_edges(
    edges: EdgeIndex, entity: I64[Tensor, "n"], label: I64[Tensor, "n"]
) -> Span:
    """The span of the edges of each label from each entity."""
    span, _ = row_index.hash_lookup(
        edges.label_spans, entity * edges.n_labels + label
    )
    return row_index.decode_span(span)


def edges_between(
    edges: EdgeIndex, source: Tensor, target: Tensor
) -> Iterator[EdgeMatches]:
    """Yield every edge from a row's source to its target, in chunks."""
    span, found = row_index.hash_lookup(
        edges.pair_spans, source * edges.n_entity_ids + target
    )
    hit = found.nonzero().squeeze(1)
    if not len(hit):
        return
    for row, position in ragged_arange(*row_index.decode_span(span[hit])):
        yield EdgeMatches(hit[row], edges.pair_order[position])


def _find_closed_1(edges: EdgeIndex, facts: Tensor) -> Iterator[ClosedPaths]:
    """Paths of one edge between the arguments of each fact."""
    for row, edge in edges_between(
        edges, edges.first_argument[facts], edges.second_argument[facts]
    ):
        fact = facts[row]
        yield ClosedPaths(
            fact, edges.label[edge, None], edges.fact[edge] == fact
        )


def _find_closed_2(edges: EdgeIndex, facts: Tensor) -> Iterator[ClosedPaths]:
    """Paths of two edges between the arguments of each fact, walked from the argument that has fewer edges."""
    first = edges.first_argument[facts]
    second = edges.second_argument[facts]
    degree = torch.diff(edges.offsets)
    is_reversed = degree[first] > degree[second]
    near = torch.where(is_reversed, second, first)
    far = torch.where(is_reversed, first, second)
    for row, near_edge in ragged_arange(edges.offsets[near], degree[near]):
        for match, far_edge in edges_between(
            edges, edges.target[near_edge], far[row]
        ):
            fact = facts[row[match]]
            edge = near_edge[match]

            # A path walked from its end has its labels reversed and turned.
            reverse = is_reversed[row[match]]
            near_label = edges.label[edge]
            far_label = edges.label[far_edge]
            first_label = torch.where(reverse, far_label ^ 1, near_label)
            second_label = torch.where(reverse, near_label ^ 1, far_label)
            is_circular = (edges.fact[edge] == fact) | (
                edges.fact[far_edge] == fact
            )
            yield ClosedPaths(
                fact, torch.stack([first_label, second_label], 1), is_circular
            )


def _find_closed_3(edges: EdgeIndex, facts: Tensor) -> Iterator[ClosedPaths]:
    """Paths of three edges between the arguments of each fact: an edge from either end, joined by a middle one."""
    first = edges.first_argument[facts]
    second = edges.second_argument[facts]
    degree = torch.diff(edges.offsets)
    for row, number in ragged_arange(
        torch.zeros_like(first), degree[first] * degree[second]
    ):
        # Decode the number of a pair into an edge of either end.
        width = degree[second[row]]
        first_edge = edges.offsets[first[row]] + number // width
        last_edge = edges.offsets[second[row]] + number % width
        for match, middle in edges_between(
            edges, edges.target[first_edge], edges.target[last_edge]
        ):
            fact = facts[row[match]]
            path = (first_edge[match], middle, last_edge[match])
            labels = [
                edges.label[path[0]],
                edges.label[path[1]],
                edges.label[path[2]] ^ 1,
            ]
            is_circular = torch.stack(
                [edges.fact[edge] == fact for edge in path]
            ).any(0)
            yield ClosedPaths(fact, torch.stack(labels, 1), is_circular)


_FIND_CLOSED = {1: _find_closed_1, 2: _find_closed_2, 3: _find_closed_3}


def _distinct_paths(edges: EdgeIndex, paths: ClosedPaths) -> ClosedPaths:
    """Each fact and body once, circular only if all its paths are."""
    label_columns = paths.body_labels.unbind(1)
    columns = (paths.fact, *label_columns, paths.is_circular.to(torch.int64))
    fact_bits = len(edges.first_argument).bit_length()
    bits = [fact_bits, *[edges.n_labels.bit_length()] * len(label_columns), 1]

    # The circular flag is the last bit, so the first row of a fact and body is not circular if any is not.
    key, order = torch.sort(row_index.encode_rows(columns, bits).key)
    first = order[row_index.first_of_run(key >> 1)]
    return ClosedPaths(*(column.index_select(0, first) for column in paths))


class _TrieLevel(NamedTuple):
    """One level of the trie of bodies: the children of each node of the level above."""

    offsets: Tensor  # children of node i: offsets[i] to offsets[i + 1]
    label: Tensor  # of each child
    sampling_fraction: Tensor  # the largest of the bodies below each child


def _build_trie(bodies: Tensor, sampling_fraction: Tensor) -> list[_TrieLevel]:
    """The trie of bodies, so that bodies share the walks of their common prefixes."""
    levels: list[_TrieLevel] = []
    parent = torch.zeros(len(bodies), dtype=torch.int64, device=bodies.device)
    for label in bodies.unbind(1):
        # A new node starts where the parent or the label changes.
        parent_changes = torch.diff(parent, prepend=parent[:1]) != 0
        label_changes = torch.diff(label, prepend=label[:1]) != 0
        node = torch.cumsum(parent_changes | label_changes, 0)
        first = torch.searchsorted(
            node, torch.arange(int(node[-1]) + 1, device=bodies.device)
        )

        parents = torch.arange(int(parent[-1]) + 2, device=bodies.device)
        offsets = torch.searchsorted(parent[first], parents)
        zeros = torch.zeros(len(first), device=bodies.device)
        largest = zeros.scatter_reduce(0, node, sampling_fraction, "amax")
        levels.append(_TrieLevel(offsets, label[first], largest))
        parent = node
    return levels


def _walk_level(
    edges: EdgeIndex, level: _TrieLevel, pairs: BodyPairs, priority: Tensor
) -> tuple[BodyPairs, int]:
    """The pairs one edge further, and how many rows were walked."""
    if not pairs.body.numel():
        return pairs, 0
    entity_bits = edges.n_entity_ids.bit_length()
    bits = [len(level.label).bit_length(), entity_bits, entity_bits]
    chunks: list[tuple[Tensor, ...]] = []
    n_rows = 0
    for row, child in _children(level, pairs, priority):
        span = outgoing_edges(edges, pairs.target[row], level.label[child])
        for at, edge in ragged_arange(*span):
            columns = (child[at], pairs.source[row[at]], edges.target[edge])
            chunks.append(row_index.unique_rows(columns, bits))
            n_rows += len(at)

    if not chunks:
        none = pairs.body[:0]
        return BodyPairs(none, none, none), n_rows
    if len(chunks) > 1:
        merged = tuple(torch.cat(columns) for columns in zip(*chunks))
        chunks = [row_index.unique_rows(merged, bits)]
    return BodyPairs(*chunks[0]), n_rows


def _children(
    level: _TrieLevel, pairs: BodyPairs, priority: Tensor
) -> Iterator[RowPairs]:
    """Yield each pair with each child of its node that samples the pair's source."""
    start = level.offsets[pairs.body]
    for row, child in ragged_arange(
        start, level.offsets[pairs.body + 1] - start
    ):
        is_sampled = (
            priority[pairs.source[row]] < level.sampling_fraction[child]
        )
        sampled = is_sampled.nonzero().squeeze(1)
        if len(sampled):
            yield RowPairs(row[sampled], child[sampled])
