"""Walks along the facts of a graph, and the pairs of entities that bodies join.

A fact b(X, Y) is an edge from X to Y with label 2 (b - 1), and one from Y to X with label 2 (b - 1) + 1. A body is a
sequence of labels, written as a number in base `n_labels`. The pairs that a body joins are the entries of a product of
sparse boolean matrices. The products are computed with the numbers of paths as entries, for many bodies at once: a row
of the left matrix is a pair of a body and a source, and stands for the entities that the body reaches from there.

`walk` follows given bodies, `walk_in_parts` does so a part at a time, and `extend` adds every label to bodies that were
walked. What they compute is as large as the number of edges that they walk along, which is known before. They run on
the device of the facts.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from funcppo.core.types import F32, F64, I32, I64, Bool
from funcppo.kg.logic import row_index
from funcppo.kg.logic.joins import expand_ranges

SLOT_BITS = 22  # of a key that are looked up without a search, at most
# bodies that may be numbered without looking which of them have paths
MAX_BODY_SLOTS = 1 << 21
# approximate number of rows that are computed at once
CHUNK_ROWS = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyIndex:
    """The distinct values of an ascending tensor of keys."""

    keys: I64[Tensor, "D"]
    offsets: I64[Tensor, "D1"]  # rows of key i: offsets[i] to offsets[i + 1]
    # position of a key that ends in these bits; -1 for none
    slots: I32[Tensor, "slots"]
    is_direct: bool  # no two possible keys end in the same bits


class KeyMatches(NamedTuple):
    """Which of the keys looked up are in an index."""

    row: I64[Tensor, "n"]  # those found, ascending
    position: I64[Tensor, "n"]  # of their key in the index


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeIndex:
    """Both directions of each fact with two arguments, in the order of source, label and target."""

    source: I64[Tensor, "L"]
    label: I64[Tensor, "L"]
    target: I64[Tensor, "L"]
    fact: I64[Tensor, "L"]  # row of the fact that the edge walks along
    offsets: I64[Tensor, "C2"]  # edges from entity e: offsets[e] to e + 1
    # A *start* is a source with a label; its edges go to different targets.
    starts: KeyIndex  # source * n_labels + label
    starts_by_label: I64[Tensor, "S"]  # in the order of label and source
    label_offsets: I64[Tensor, "L1"]  # into `starts_by_label`
    start_targets: Tensor  # sparse [starts, entities]: 1 for each edge
    # start * n_entity_ids + target, ascending
    edge_key: I64[Tensor, "L"]
    # sparse [entities, predicates]: 1 for each first argument
    subjects: Tensor
    # An *end* is a label with a target.
    end_label: I64[Tensor, "M"]
    end_target: I64[Tensor, "M"]
    edge_end: I64[Tensor, "L"]  # of each edge
    # Facts by their pair of arguments.
    predicate: I64[Tensor, "N"]  # of each fact, from 0
    first_argument: I64[Tensor, "N"]
    second_argument: I64[Tensor, "N"]
    pairs: KeyIndex  # first * n_entity_ids + second
    # facts in the order of `pairs` and predicate
    pair_facts: I64[Tensor, "N"]
    pair_predicates: Tensor  # sparse [pairs, predicates]: 1 for each fact
    n_labels: int
    n_entity_ids: int  # C + 1

    @property
    def n_predicates(self) -> int:
        """Number of predicates."""
        return self.n_labels // 2


class SourceRange(NamedTuple):
    """The entities with a priority from `low` to below `high`: a random sample of all."""

    priority: F32[Tensor, "C1"]  # a random number in [0, 1) for each entity
    low: float = 0.0
    high: float = 1.0

    def contains(self, entity: I64[Tensor, "n"]) -> Bool[Tensor, "n"]:
        """Whether each entity is in the range."""
        priority = self.priority[entity]
        return (priority >= self.low) & (priority < self.high)


class PathBlock(NamedTuple):
    """Bodies walked from some sources: a row for each body and source, an entry for each target of a row."""

    body_code: I64[Tensor, "K"]
    row_body: I64[Tensor, "n"]  # ascending
    row_source: I64[Tensor, "n"]
    entry_row: I64[Tensor, "m"]  # ascending
    target: I64[Tensor, "m"]
    n_paths: F32[Tensor, "m"]  # whole numbers

    @property
    def entry_body(self) -> I64[Tensor, "m"]:
        """The body of each entry."""
        return self.row_body[self.entry_row]


class SpendCallback(Protocol):
    """Receives a number of rows that were computed."""

    def __call__(self, n_rows: float, /) -> object: ...


class _Extensions(NamedTuple):
    """Where bodies go on: an entry of the body's prefix, and the start that it leads to."""

    body: I64[Tensor, "n"]  # ascending
    entry: I64[Tensor, "n"]  # ascending for each body
    start: I64[Tensor, "n"]


class JoinedPairs(NamedTuple):
    """The pairs of entities that bodies join, each once a body."""

    body_code: I64[Tensor, "K"]
    body: I64[Tensor, "m"]  # row of the body
    source: I64[Tensor, "m"]
    target: I64[Tensor, "m"]
    n_paths: F32[Tensor, "m"]  # whole numbers


def build_edge_index(
    facts: I64[Tensor, "N 3"], n_predicates: int, n_constants: int
) -> EdgeIndex:
    """Index both directions of each fact.

    Args:
      facts: [predicate, first argument, second argument], distinct.
    """
    n_labels = 2 * n_predicates
    n_entity_ids = n_constants + 1
    predicate, first, second = facts.to(torch.int64).unbind(1)
    fact, source, label, target = _sorted_edges(predicate, first, second)

    starts = build_key_index(source * n_labels + label, n_entity_ids * n_labels)
    start_label = starts.keys % n_labels
    start_of_edge = torch.repeat_interleave(torch.diff(starts.offsets))
    end, edge_end = row_index.unique_inverse(label * n_entity_ids + target)

    # Sort facts by predicate first, then stably by pair.
    pair_facts = row_index.sort_keys(predicate).order
    pair_key = (first * n_entity_ids + second)[pair_facts]
    pair_key, by_pair = row_index.sort_keys(pair_key)
    pair_facts = pair_facts[by_pair]
    pairs = build_key_index(pair_key, n_entity_ids**2)
    labels = torch.arange(n_labels + 1, device=facts.device)
    label_order = row_index.sort_keys(start_label)
    entities = torch.arange(n_entity_ids + 1, device=facts.device)
    return EdgeIndex(
        source=source,
        label=label,
        target=target,
        fact=fact,
        offsets=torch.searchsorted(source, entities),
        starts=starts,
        starts_by_label=label_order.order,
        label_offsets=torch.searchsorted(label_order.key, labels),
        start_targets=_ones_matrix(
            start_of_edge, target, (len(starts.keys), n_entity_ids)
        ),
        edge_key=start_of_edge * n_entity_ids + target,
        subjects=_subject_matrix(starts.keys, n_labels, n_entity_ids),
        end_label=end // n_entity_ids,
        end_target=end % n_entity_ids,
        edge_end=edge_end,
        predicate=predicate - 1,
        first_argument=first,
        second_argument=second,
        pairs=pairs,
        pair_facts=pair_facts,
        pair_predicates=_ones_matrix(
            torch.repeat_interleave(torch.diff(pairs.offsets)),
            predicate[pair_facts] - 1,
            (len(pairs.keys), n_predicates),
        ),
        n_labels=n_labels,
        n_entity_ids=n_entity_ids,
    )


def _sorted_edges(
    predicate: Tensor, first: Tensor, second: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fact, source, label and target of both directions of each fact, by source, label and target."""
    row = torch.arange(len(predicate), device=predicate.device)
    columns = (
        torch.cat([row, row]),
        torch.cat([first, second]),
        torch.cat([2 * predicate - 2, 2 * predicate - 1]),
        torch.cat([second, first]),
    )
    order = torch.arange(2 * len(row), device=row.device)
    for key in (columns[3], columns[2], columns[1]):
        order = order[row_index.sort_keys(key[order]).order]
    fact, source, label, target = (column[order] for column in columns)
    return fact, source, label, target


def _subject_matrix(
    start_key: Tensor, n_labels: int, n_entity_ids: int
) -> Tensor:
    """[entities, predicates]: which entities are first arguments of which predicates."""
    is_forward = (start_key % 2 == 0).nonzero().squeeze(1)
    forward = start_key[is_forward]
    return _ones_matrix(
        forward // n_labels,
        forward % n_labels // 2,
        (n_entity_ids, n_labels // 2),
    )


def build_key_index(sorted_keys: I64[Tensor, "n"], n_possible: int) -> KeyIndex:
    """Index the runs of an ascending tensor of keys from 0 to below `n_possible`, as are the keys to look up."""
    is_first = row_index.first_of_run(sorted_keys)
    start = is_first.nonzero().squeeze(1)
    keys = sorted_keys[start]
    n_slots = 1 << min(SLOT_BITS, (n_possible - 1).bit_length())
    empty = torch.full((n_slots,), -1, dtype=torch.int32, device=keys.device)
    position = torch.arange(len(keys), dtype=torch.int32, device=keys.device)
    return KeyIndex(
        keys=keys,
        offsets=torch.cat([start, start.new_tensor([len(sorted_keys)])]),
        slots=empty.scatter(0, keys & (n_slots - 1), position),
        is_direct=n_possible <= n_slots,
    )


def find_keys(index: KeyIndex, key: I64[Tensor, "n"]) -> KeyMatches:
    """Look keys up: by their last bits, and those that this leaves by a search if keys are longer."""
    slot = index.slots.index_select(0, key & (len(index.slots) - 1))
    row = (slot >= 0).nonzero().squeeze(1)
    if index.is_direct:
        return KeyMatches(row, slot.index_select(0, row).long())
    candidate = key.index_select(0, row)
    position = torch.searchsorted(index.keys, candidate)
    position = position.clamp_max(max(len(index.keys) - 1, 0))
    found = index.keys.index_select(0, position) == candidate
    return KeyMatches(row[found], position[found])


def has_edge(
    edges: EdgeIndex,
    source: I64[Tensor, "n"],
    label: I64[Tensor, "n"],
    target: I64[Tensor, "n"],
) -> Bool[Tensor, "n"]:
    """Whether there is an edge of the label from each source to its target."""
    start = find_keys(edges.starts, source * edges.n_labels + label)
    key = start.position * edges.n_entity_ids + target[start.row]
    position = torch.searchsorted(edges.edge_key, key)
    position = position.clamp_max(max(len(edges.edge_key) - 1, 0))
    found = edges.edge_key[position] == key
    none = torch.zeros_like(source, dtype=torch.bool)
    return none.index_copy(0, start.row, found)


def sparse_matrix(
    row: I64[Tensor, "m"],
    column: I64[Tensor, "m"],
    value: F32[Tensor, "m"],
    size: tuple[int, int],
) -> Tensor:
    """A sparse matrix of distinct entries in the order of rows."""
    with warnings.catch_warnings():
        # PyTorch 2.11 warns of it even where it is asked for, as here.
        warnings.filterwarnings(
            "ignore", "Sparse invariant checks are implicitly disabled"
        )
        return torch.sparse_coo_tensor(
            torch.stack([row, column]),
            value,
            size,
            is_coalesced=True,
            check_invariants=False,
        )


def _ones_matrix(row: Tensor, column: Tensor, size: tuple[int, int]) -> Tensor:
    """A sparse matrix whose entries are 1."""
    ones = torch.ones_like(row, dtype=torch.float32)
    return sparse_matrix(row, column, ones, size)


class Entries(NamedTuple):
    """The entries of a sparse matrix, in the order of rows."""

    row: I64[Tensor, "m"]
    column: I64[Tensor, "m"]
    value: F32[Tensor, "m"]


def multiply(left: Tensor, right: Tensor) -> Entries:
    """The product of two sparse matrices."""
    with warnings.catch_warnings():
        # PyTorch calls compressed rows, which it uses here, a beta feature.
        warnings.filterwarnings("ignore", "Sparse CSR tensor support")
        product = torch.sparse.mm(left, right).coalesce()
    row, column = product.indices()
    return Entries(row, column, product.values())


def pack(cost: F64[Tensor, "n"], limit: float) -> Iterator[tuple[int, int]]:
    """Yield ranges of items whose cost adds up to about the limit; an item that costs more is alone."""
    if not len(cost):
        return
    bucket = torch.cumsum(cost, 0) // limit
    is_cut = (torch.diff(bucket) > 0) | (cost[:-1] > limit)
    cut = (is_cut.nonzero().squeeze(1) + 1).tolist()
    yield from zip([0, *cut], [*cut, len(cost)])


def pack_runs(
    group: I64[Tensor, "n"], cost: I64[Tensor, "n"], limit: float
) -> Iterator[tuple[int, int]]:
    """Like `pack`, but cut only between the runs of a group."""
    _, size = torch.unique_consecutive(group, return_counts=True)
    row_end = torch.cumsum(size, 0)
    total = torch.cumsum(cost.double(), 0)[row_end - 1]
    run_cost = torch.diff(total, prepend=torch.zeros_like(total[:1]))
    rows = [0, *row_end.tolist()]
    for first, last in pack(run_cost, limit):
        yield rows[first], rows[last]


def walk(
    edges: EdgeIndex,
    body_code: I64[Tensor, "K"],
    length: int,
    sources: SourceRange,
) -> PathBlock:
    """Walk along bodies of one length from a range of sources.

    Args:
      body_code: distinct, ascending.

    Returns:
      The block of these bodies; a body without a path has no row.
    """
    first, *longer = _prefixes(edges, body_code, length)
    block = _first_steps(edges, first, sources)
    for code in longer:
        block = _follow(edges, block, code, _find_leads(edges, block, code))
    return block


def walk_in_parts(
    edges: EdgeIndex,
    body_code: I64[Tensor, "K"],
    length: int,
    sources: SourceRange,
    spend: SpendCallback,
) -> Iterator[PathBlock]:
    """Walk as `walk` does, with the memory of a few blocks of CHUNK_ROWS entries.

    Args:
      body_code: distinct, ascending.
      spend: called with the rows of each step after the first.

    Yields:
      Blocks with some of the bodies from some of the sources. Each body and source with a path is in one of them.
    """
    first, *longer = _prefixes(edges, body_code, length)
    block = _first_steps(edges, first, sources)
    yield from _walk_further(edges, block, longer, spend)


def _prefixes(edges: EdgeIndex, body_code: Tensor, length: int) -> list[Tensor]:
    """The distinct prefixes of bodies, from those of one label to the bodies themselves."""
    codes = [body_code]
    for _ in range(length - 1):
        codes.append(torch.unique_consecutive(codes[-1] // edges.n_labels))
    return codes[::-1]


def _walk_further(
    edges: EdgeIndex,
    block: PathBlock,
    codes: Sequence[Tensor],
    spend: SpendCallback,
) -> Iterator[PathBlock]:
    """Yield the blocks of the last of some codes, each one label longer than those before.

    Args:
      block: holds prefixes of the first of them.
    """
    if not codes:
        yield block
        return
    body_code = codes[0]
    prefix, is_known = row_index.binary_search(
        block.body_code, body_code // edges.n_labels
    )
    body_code = body_code[is_known]
    size = torch.bincount(block.entry_body, minlength=len(block.body_code))
    cost = size[prefix[is_known]].double()
    for first, last in pack(cost, CHUNK_ROWS):
        some = body_code[first:last]
        leads = _find_leads(edges, block, some)
        n_edges = torch.diff(edges.starts.offsets)[leads.start]
        row_key = _row_key(block, leads)
        for begin, end in pack_runs(row_key, n_edges, CHUNK_ROWS):
            part = _Extensions(*(column[begin:end] for column in leads))
            spend(float(n_edges[begin:end].sum()))
            longer = _without_empty(_follow(edges, block, some, part))
            yield from _walk_further(edges, longer, codes[1:], spend)


def _without_empty(block: PathBlock) -> PathBlock:
    """The bodies of a block that have a row."""
    body, row_body = torch.unique_consecutive(
        block.row_body, return_inverse=True
    )
    return block._replace(body_code=block.body_code[body], row_body=row_body)


def extend(
    edges: EdgeIndex, block: PathBlock, first_label: int, last_label: int
) -> JoinedPairs:
    """Extend each body of a block by each label from `first_label` to below `last_label`."""
    n_labels = edges.n_labels
    in_range = (edges.label >= first_label) & (edges.label < last_label)
    chosen = in_range.nonzero().squeeze(1)
    right = _ones_matrix(
        edges.source[chosen],
        edges.edge_end[chosen],
        (edges.n_entity_ids, len(edges.end_label)),
    )
    left = sparse_matrix(
        block.entry_row,
        block.target,
        block.n_paths,
        (len(block.row_body), edges.n_entity_ids),
    )
    product = multiply(left, right)

    # Number the bodies: all that are possible, or those that there are if that is fewer.
    prefix = block.row_body[product.row]
    body = prefix * n_labels + edges.end_label[product.column]
    n_slots = len(block.body_code) * n_labels
    if n_slots <= MAX_BODY_SLOTS:
        slot = torch.arange(n_slots, device=body.device)
    else:
        slot, body = row_index.unique_inverse(body)
    last = slot % n_labels
    return JoinedPairs(
        body_code=block.body_code[slot // n_labels] * n_labels + last,
        body=body,
        source=block.row_source[product.row],
        target=edges.end_target[product.column],
        n_paths=product.value,
    )


def joined_pairs(block: PathBlock) -> JoinedPairs:
    """The pairs of the bodies of a block."""
    return JoinedPairs(
        body_code=block.body_code,
        body=block.entry_body,
        source=block.row_source[block.entry_row],
        target=block.target,
        n_paths=block.n_paths,
    )


def select_bodies(block: PathBlock, first: int, last: int) -> PathBlock:
    """The bodies of a block from `first` to below `last`."""
    ends = block.row_body.new_tensor([first, last])
    row = torch.searchsorted(block.row_body, ends)
    first_row, last_row = row.tolist()
    entry = torch.searchsorted(block.entry_row, row)
    first_entry, last_entry = entry.tolist()
    rows = slice(first_row, last_row)
    entries = slice(first_entry, last_entry)
    return PathBlock(
        body_code=block.body_code[first:last],
        row_body=block.row_body[rows] - first,
        row_source=block.row_source[rows],
        entry_row=block.entry_row[entries] - first_row,
        target=block.target[entries],
        n_paths=block.n_paths[entries],
    )


def select_sources(block: PathBlock, sources: SourceRange) -> PathBlock:
    """The rows of a block with a source in a range."""
    is_kept = sources.contains(block.row_source)
    entry = is_kept[block.entry_row].nonzero().squeeze(1)
    new_row = torch.cumsum(is_kept, 0) - 1
    return PathBlock(
        body_code=block.body_code,
        row_body=block.row_body[is_kept],
        row_source=block.row_source[is_kept],
        entry_row=new_row[block.entry_row[entry]],
        target=block.target[entry],
        n_paths=block.n_paths[entry],
    )


def _first_steps(
    edges: EdgeIndex, labels: Tensor, sources: SourceRange
) -> PathBlock:
    """The bodies of one label."""
    first = edges.label_offsets[labels]
    body, position = expand_ranges(
        first, edges.label_offsets[labels + 1] - first
    )
    start = edges.starts_by_label[position]
    source = edges.starts.keys[start] // edges.n_labels
    in_range = sources.contains(source).nonzero().squeeze(1)
    start = start[in_range]

    offsets = edges.starts.offsets
    row, edge = expand_ranges(
        offsets[start], offsets[start + 1] - offsets[start]
    )
    return PathBlock(
        body_code=labels,
        row_body=body[in_range],
        row_source=source[in_range],
        entry_row=row,
        target=edges.target[edge],
        n_paths=torch.ones_like(edge, dtype=torch.float32),
    )


def _find_leads(
    edges: EdgeIndex, block: PathBlock, body_code: Tensor
) -> _Extensions:
    """Where bodies go on whose prefixes are bodies of a block."""
    prefix = torch.searchsorted(block.body_code, body_code // edges.n_labels)
    label = body_code % edges.n_labels

    # The entries of each body's prefix, and the starts that they lead to.
    numbers = torch.arange(len(block.body_code) + 1, device=label.device)
    offsets = torch.searchsorted(block.entry_body, numbers)
    body, entry = expand_ranges(
        offsets[prefix], offsets[prefix + 1] - offsets[prefix]
    )
    found = find_keys(
        edges.starts, block.target[entry] * edges.n_labels + label[body]
    )
    return _Extensions(body[found.row], entry[found.row], found.position)


def _row_key(block: PathBlock, leads: _Extensions) -> Tensor:
    """A number for each body and source: its body times the rows of the block, and its row."""
    return leads.body * len(block.row_body) + block.entry_row[leads.entry]


def _follow(
    edges: EdgeIndex, block: PathBlock, body_code: Tensor, leads: _Extensions
) -> PathBlock:
    """One label further: the bodies of `body_code`, whose prefixes are bodies of the block."""
    row_key, row = torch.unique_consecutive(
        _row_key(block, leads), return_inverse=True
    )
    left = sparse_matrix(
        row,
        leads.start,
        block.n_paths[leads.entry],
        (len(row_key), len(edges.starts.keys)),
    )
    product = multiply(left, edges.start_targets)
    return PathBlock(
        body_code=body_code,
        row_body=row_key // max(len(block.row_body), 1),
        row_source=block.row_source[row_key % max(len(block.row_body), 1)],
        entry_row=product.row,
        target=product.column,
        n_paths=product.value,
    )
