"""Walks along the facts of a graph, the pairs of entities that bodies join, and the facts that bodies derive.

A fact b(X, Y) is an edge from X to Y with label 2 (b - 1), and one from Y to X with label 2 (b - 1) + 1. A body is a
sequence of labels, written as a number in base `n_labels`. The pairs that a body joins are the entries of a product of
sparse boolean matrices. The products are computed with the numbers of paths as entries, for many bodies at once: a row
of the left matrix is a pair of a body and a source, and stands for the entities that the body reaches from there.

`walk` follows given bodies, `walk_in_parts` does so a part at a time, and `extend` adds every label to bodies that were
walked. What they compute is as large as the number of edges that they walk along, which is known before. They run on
the device of the facts.

`is_circular` tells the facts that a body derives from themselves alone: every path between their arguments walks along
the fact. Let f = h(x, y) be the fact. The paths x -> z -> w -> y of a body l1, l2, l3 are counted elsewhere; those that
walk along f are counted here by inclusion and exclusion over the sets of steps that take f: a step that does leads from
x to y, or back where its label is that of the other direction, and the steps between two that do are free.

Longer bodies are found from the facts that they derive, by meeting in the middle: half of a walk from x to y that does
not take the fact is made from x, half from y, and the halves are joined where they meet. The halves are as many as the
walks of half the length: far fewer, where the graph is sparse, than the pairs that bodies join. All that is found is
exact: the support without circular support of every rule of a head's predicate, and the facts that it derives so. A
head whose facts have too many half walks is left out, and counted. `plan_closing` says which are, and
`iter_closed_rules` finds the rules of the others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.types import F32, F64, I32, I64, Bool
from funcppo.kg.logic import row_index
from funcppo.kg.logic.row_index import (
    concatenate,
    count_to,
    expand_ranges,
    find_spans,
    row_numbers,
    select_rows,
    sort_rows,
    spans,
    true_rows,
)
from funcppo.kg.mining.counts import (
    Budget,
    FoundRules,
    MinedRules,
    keep,
    path_labels,
)

# approximate number of rows that are computed at once
CHUNK_ROWS = 1 << 20
# pairs of a fact and a body that derives it: of one head, at most
MAX_CLOSED_PAIRS = 1 << 23


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyIndex:
    """Index of the distinct values of an ascending tensor of keys."""

    keys: I64[Tensor, "D"]
    offsets: I64[Tensor, "D1"]  # rows of key i: offsets[i] to offsets[i + 1]
    # position of a key that ends in these bits; -1 for none
    slots: I32[Tensor, "slots"]
    is_direct: bool  # no two possible keys end in the same bits


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeIndex:
    """Both directions of each binary fact as edges, in the order of source, label and target, with lookup tables."""

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
        """Return the number of predicates."""
        return self.n_labels // 2


class SourceRange(NamedTuple):
    """Random sample of the entities: those with a priority from `low` to below `high`."""

    priority: F32[Tensor, "C1"]  # a random number in [0, 1) for each entity
    low: float = 0.0
    high: float = 1.0

    def contains(self, entity: I64[Tensor, "n"]) -> Bool[Tensor, "n"]:
        """Check, per entity, whether it is in the range."""
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
        """Return the body of each entry."""
        return self.row_body[self.entry_row]


class JoinedPairs(NamedTuple):
    """Pairs of entities (source, target) that each body joins, once per body, with the number of paths."""

    body_code: I64[Tensor, "K"]
    body: I64[Tensor, "m"]  # row of the body
    source: I64[Tensor, "m"]
    target: I64[Tensor, "m"]
    n_paths: F32[Tensor, "m"]  # whole numbers


def build_edge_index(
    facts: I64[Tensor, "N 3"], n_predicates: int, n_constants: int
) -> EdgeIndex:
    """Build the index of both directions of each fact.

    Args:
      facts: [predicate, first argument, second argument], distinct.
    """
    n_labels = 2 * n_predicates
    n_entity_ids = n_constants + 1
    predicate, first, second = facts.to(torch.int64).unbind(1)
    fact, source, label, target = _sorted_edges(predicate, first, second)

    starts = build_key_index(source * n_labels + label, n_entity_ids * n_labels)
    start_label = starts.keys % n_labels
    forward = starts.keys[starts.keys % 2 == 0]
    start_of_edge = torch.repeat_interleave(torch.diff(starts.offsets))
    end, edge_end = row_index.unique_inverse(label * n_entity_ids + target)

    # Sort facts by predicate first, then stably by pair.
    pair_facts = row_index.sort_keys(predicate).order
    pair_key = (first * n_entity_ids + second)[pair_facts]
    pair_key, by_pair = row_index.sort_keys(pair_key)
    pair_facts = pair_facts[by_pair]
    pairs = build_key_index(pair_key, n_entity_ids**2)
    labels = count_to(n_labels + 1, facts)
    label_order = row_index.sort_keys(start_label)
    entities = count_to(n_entity_ids + 1, facts)
    return EdgeIndex(
        source=source,
        label=label,
        target=target,
        fact=fact,
        offsets=torch.searchsorted(source, entities),
        starts=starts,
        starts_by_label=label_order.order,
        label_offsets=torch.searchsorted(label_order.key, labels),
        start_targets=ones_matrix(
            start_of_edge, target, (len(starts.keys), n_entity_ids)
        ),
        edge_key=start_of_edge * n_entity_ids + target,
        subjects=ones_matrix(
            forward // n_labels,
            forward % n_labels // 2,
            (n_entity_ids, n_predicates),
        ),
        end_label=end // n_entity_ids,
        end_target=end % n_entity_ids,
        edge_end=edge_end,
        predicate=predicate - 1,
        first_argument=first,
        second_argument=second,
        pairs=pairs,
        pair_facts=pair_facts,
        pair_predicates=ones_matrix(
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
    """Return fact, source, label and target of both directions of each fact, by source, label and target."""
    row = row_numbers(predicate)
    columns = (
        torch.cat([row, row]),
        torch.cat([first, second]),
        torch.cat([2 * predicate - 2, 2 * predicate - 1]),
        torch.cat([second, first]),
    )
    order = sort_rows(count_to(2 * len(row), row), *columns[1:])
    return select_rows(columns, order)


def build_key_index(sorted_keys: I64[Tensor, "n"], n_possible: int) -> KeyIndex:
    """Build the index of an ascending tensor of keys from 0 to below `n_possible`, as are the keys to look up."""
    is_first = row_index.first_of_run(sorted_keys)
    start = true_rows(is_first)
    keys = sorted_keys[start]
    # Keys of up to 22 bits are looked up without a search.
    n_slots = 1 << min(22, (n_possible - 1).bit_length())
    empty = keys.new_full((n_slots,), -1, dtype=torch.int32)
    position = torch.arange(len(keys), dtype=torch.int32, device=keys.device)
    return KeyIndex(
        keys=keys,
        offsets=torch.cat([start, start.new_tensor([len(sorted_keys)])]),
        slots=empty.scatter(0, keys & (n_slots - 1), position),
        is_direct=n_possible <= n_slots,
    )


def find_keys(
    index: KeyIndex, key: I64[Tensor, "n"]
) -> tuple[I64[Tensor, "m"], I64[Tensor, "m"]]:
    """Look keys up in an index.

    Returns:
      The rows of the keys that are found, ascending, and the position of each in the index.
    """
    slot = index.slots.index_select(0, key & (len(index.slots) - 1))
    row = true_rows(slot >= 0)
    if index.is_direct:
        return row, slot.index_select(0, row).long()
    candidate = key.index_select(0, row)
    position, found = row_index.binary_search(index.keys, candidate)
    return row[found], position[found]


def has_edge(
    edges: EdgeIndex,
    source: I64[Tensor, "n"],
    label: I64[Tensor, "n"],
    target: I64[Tensor, "n"],
) -> Bool[Tensor, "n"]:
    """Check, per row, whether an edge of the label leads from the source to the target."""
    row, start = find_keys(edges.starts, source * edges.n_labels + label)
    key = start * edges.n_entity_ids + target[row]
    none = torch.zeros_like(source, dtype=torch.bool)
    found = row_index.binary_search(edges.edge_key, key).found
    return none.index_copy(0, row, found)


def sparse_matrix(
    row: I64[Tensor, "m"],
    column: I64[Tensor, "m"],
    value: F32[Tensor, "m"],
    size: tuple[int, int],
) -> Tensor:
    """Build a sparse matrix from distinct entries that are in row order."""
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


def ones_matrix(row: Tensor, column: Tensor, size: tuple[int, int]) -> Tensor:
    """Build a sparse matrix whose entries are 1."""
    ones = torch.ones_like(row, dtype=torch.float32)
    return sparse_matrix(row, column, ones, size)


def multiply(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply two sparse matrices; return row, column and value of the product's entries, in row order."""
    with warnings.catch_warnings():
        # PyTorch calls compressed rows, which it uses here, a beta feature.
        warnings.filterwarnings("ignore", "Sparse CSR tensor support")
        product = torch.sparse.mm(left, right).coalesce()
    row, column = product.indices()
    return row, column, product.values()


def pack(cost: F64[Tensor, "n"], limit: float) -> Iterator[tuple[int, int]]:
    """Yield ranges (first, end) of items whose total cost is about the limit; an item that costs more is alone."""
    if not len(cost):
        return
    bucket = torch.cumsum(cost, 0) // limit
    is_cut = (torch.diff(bucket) > 0) | (cost[:-1] > limit)
    cut = (true_rows(is_cut) + 1).tolist()
    yield from zip([0, *cut], [*cut, len(cost)])


def pack_runs(
    group: I64[Tensor, "n"], cost: I64[Tensor, "n"], limit: float
) -> Iterator[tuple[int, int]]:
    """Yield ranges (first, end) as `pack` does, but cut only between runs of equal `group` values."""
    _, size = torch.unique_consecutive(group, return_counts=True)
    row_end = torch.cumsum(size, 0)
    total = torch.cumsum(cost.double(), 0)[row_end - 1]
    run_cost = torch.diff(total, prepend=torch.zeros_like(total[:1]))
    rows = [0, *row_end.tolist()]
    for first, last in pack(run_cost, limit):
        yield rows[first], rows[last]


# -- walks


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
    spend: Callable[[float], object],
) -> Iterator[PathBlock]:
    """Walk as `walk` does, in parts that take the memory of a few blocks of CHUNK_ROWS entries.

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
    """Return the distinct prefixes of bodies, by length: from those of one label to the bodies themselves."""
    codes = [body_code]
    for _ in range(length - 1):
        codes.append(torch.unique_consecutive(codes[-1] // edges.n_labels))
    return codes[::-1]


def _walk_further(
    edges: EdgeIndex,
    block: PathBlock,
    codes: Sequence[Tensor],
    spend: Callable[[float], object],
) -> Iterator[PathBlock]:
    """Extend a block label by label; yield blocks of the bodies in the last element of `codes`.

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

    # A part holds the bodies, then the rows, whose steps are a chunk.
    size = torch.bincount(block.entry_body, minlength=len(block.body_code))
    cost = size[prefix[is_known]].double()
    for first, last in pack(cost, CHUNK_ROWS):
        some = body_code[first:last]
        leads = _find_leads(edges, block, some)
        n_edges = torch.diff(edges.starts.offsets)[leads[2]]
        row_key = _row_key(block, leads)
        for begin, end in pack_runs(row_key, n_edges, CHUNK_ROWS):
            spend(float(n_edges[begin:end].sum()))
            part = select_rows(leads, slice(begin, end))
            longer = _without_empty(_follow(edges, block, some, part))
            yield from _walk_further(edges, longer, codes[1:], spend)


def _without_empty(block: PathBlock) -> PathBlock:
    """Return the block without the bodies that have no row."""
    body, row_body = torch.unique_consecutive(
        block.row_body, return_inverse=True
    )
    return block._replace(body_code=block.body_code[body], row_body=row_body)


def extend(
    edges: EdgeIndex, block: PathBlock, first_label: int, last_label: int
) -> JoinedPairs:
    """Extend each body of a block by each label from `first_label` to below `last_label`; return the joined pairs."""
    n_labels = edges.n_labels
    in_range = (edges.label >= first_label) & (edges.label < last_label)
    chosen = true_rows(in_range)
    right = ones_matrix(
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
    row, end, n_paths = multiply(left, right)

    # Number the bodies: all that are possible, or those that there are if that is fewer.
    body = block.row_body[row] * n_labels + edges.end_label[end]
    n_slots = len(block.body_code) * n_labels
    if n_slots <= 1 << 21:
        slot = count_to(n_slots, body)
    else:
        slot, body = row_index.unique_inverse(body)
    last = slot % n_labels
    return JoinedPairs(
        body_code=block.body_code[slot // n_labels] * n_labels + last,
        body=body,
        source=block.row_source[row],
        target=edges.end_target[end],
        n_paths=n_paths,
    )


def joined_pairs(block: PathBlock) -> JoinedPairs:
    """Return the pairs of entities that the bodies of a block join."""
    return JoinedPairs(
        body_code=block.body_code,
        body=block.entry_body,
        source=block.row_source[block.entry_row],
        target=block.target,
        n_paths=block.n_paths,
    )


def select_bodies(block: PathBlock, first: int, last: int) -> PathBlock:
    """Return the bodies of a block from `first` to below `last`."""
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
    """Return the rows of a block whose source is in a range."""
    is_kept = sources.contains(block.row_source)
    entry = true_rows(is_kept[block.entry_row])
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
    """Walk along bodies of one label from a range of sources."""
    body, position = expand_ranges(*spans(edges.label_offsets, labels))
    start = edges.starts_by_label[position]
    source = edges.starts.keys[start] // edges.n_labels
    in_range = true_rows(sources.contains(source))
    start = start[in_range]

    row, edge = expand_ranges(*spans(edges.starts.offsets, start))
    return PathBlock(
        body_code=labels,
        row_body=body[in_range],
        row_source=source[in_range],
        entry_row=row,
        target=edges.target[edge],
        n_paths=torch.ones_like(edge, dtype=torch.float32),
    )


# where bodies go on: the body, ascending, an entry of its prefix, and the start that it leads to
_Leads = tuple[I64[Tensor, "n"], I64[Tensor, "n"], I64[Tensor, "n"]]


def _find_leads(
    edges: EdgeIndex, block: PathBlock, body_code: Tensor
) -> _Leads:
    """Find the edges by which a block's entries continue to longer bodies: (body, entry, start) per lead."""
    prefix = torch.searchsorted(block.body_code, body_code // edges.n_labels)
    label = body_code % edges.n_labels

    # The entries of each body's prefix, and the starts that they lead to.
    numbers = count_to(len(block.body_code) + 1, label)
    offsets = torch.searchsorted(block.entry_body, numbers)
    body, entry = expand_ranges(*spans(offsets, prefix))
    row, start = find_keys(
        edges.starts, block.target[entry] * edges.n_labels + label[body]
    )
    return body[row], entry[row], start


def _row_key(block: PathBlock, leads: _Leads) -> Tensor:
    """Return one number for each lead's body and row of the block, ascending."""
    body, entry, _ = leads
    return body * len(block.row_body) + block.entry_row[entry]


def _follow(
    edges: EdgeIndex, block: PathBlock, body_code: Tensor, leads: _Leads
) -> PathBlock:
    """Walk one label further: to the bodies of `body_code`, whose prefixes are bodies of the block."""
    row_key, row = torch.unique_consecutive(
        _row_key(block, leads), return_inverse=True
    )
    n_rows = max(len(block.row_body), 1)
    left = sparse_matrix(
        row,
        leads[2],
        block.n_paths[leads[1]],
        (len(row_key), len(edges.starts.keys)),
    )
    entry_row, target, n_paths = multiply(left, edges.start_targets)
    return PathBlock(
        body_code=body_code,
        row_body=row_key // n_rows,
        row_source=block.row_source[row_key % n_rows],
        entry_row=entry_row,
        target=target,
        n_paths=n_paths,
    )


# -- the facts that rules derive


class FactHits(NamedTuple):
    """Entries of joined pairs whose two entities some fact links, by ascending body."""

    body: I64[Tensor, "n"]
    pair: I64[Tensor, "n"]  # row in `EdgeIndex.pairs`
    entry: I64[Tensor, "n"]


def find_hits(edges: EdgeIndex, pairs: JoinedPairs) -> FactHits:
    """Find the joined pairs whose two entities some fact links."""
    row, pair = find_keys(
        edges.pairs, pairs.source * edges.n_entity_ids + pairs.target
    )
    body, order = row_index.sort_keys(pairs.body[row])
    return FactHits(body, pair[order], row[order])


# pairs of a rule and a fact that it derives, those derived from themselves alone included, and the entry of the pair
RuleFacts = tuple[I64[Tensor, "n"], I64[Tensor, "n"], I64[Tensor, "n"]]


def match_facts(
    edges: EdgeIndex, hits: FactHits, rule_key: I64[Tensor, "R"]
) -> RuleFacts:
    """Match joined pairs with the facts that rules derive: (rule, fact, entry) of each match.

    Args:
      rule_key: body * n_predicates + predicate of each rule, distinct and ascending.
    """
    none = rule_key[:0]
    parts = [(none, none, none)]
    if len(hits.body) and len(rule_key):
        # Bodies without a rule are left out first.
        body = rule_key // edges.n_predicates
        has_rule = row_index.binary_search(body, hits.body).found
        row = true_rows(has_rule)
        first, n_facts = spans(edges.pairs.offsets, hits.pair[row])
        for begin, end in pack(n_facts.double(), CHUNK_ROWS):
            part = slice(begin, end)
            at, position = expand_ranges(first[part], n_facts[part])
            hit = row[part][at]
            fact = edges.pair_facts[position]
            key = hits.body[hit] * edges.n_predicates + edges.predicate[fact]
            rule, found = row_index.binary_search(rule_key, key)
            match = true_rows(found)
            parts.append((rule[match], fact[match], hits.entry[hit[match]]))

    return concatenate(parts)


def sum_by_subject(
    edges: EdgeIndex,
    body: Tensor,
    source: Tensor,
    value: Tensor,
    rule_key: Tensor,
    n_bodies: int,
) -> Tensor:
    """Sum values, per rule, over the body's sources that are first arguments of the head's predicate.

    Args:
      body, source, value: distinct pairs of a body, ascending, and a source, with the value of each.
      rule_key: body * n_predicates + predicate of each rule.
    """
    left = sparse_matrix(body, source, value, (n_bodies, edges.n_entity_ids))
    body, predicate, total = multiply(left, edges.subjects.double())
    key, order = row_index.sort_keys(body * edges.n_predicates + predicate)
    position, found = row_index.binary_search(key, rule_key)
    row = true_rows(found)
    zeros = value.new_zeros(len(rule_key))
    return zeros.index_copy(0, row, total[order[position[row]]])


def is_circular(
    edges: EdgeIndex,
    fact: I64[Tensor, "n"],
    body_labels: I64[Tensor, "n J"],
    n_paths: F32[Tensor, "n"],
) -> Bool[Tensor, "n"]:
    """Check, per fact, whether its body derives it from itself alone.

    Args:
      fact: facts whose arguments their bodies join.
      body_labels: labels of the body, at most three.
      n_paths: number of paths of the body between the arguments.
    """
    has_own_predicate = (
        body_labels // 2 == edges.predicate[fact][:, None]
    ).any(1)
    row = true_rows(has_own_predicate)
    n_along = _count_along(edges, fact[row], body_labels[row])
    circular = n_along == n_paths[row]
    none = torch.zeros_like(fact, dtype=torch.bool)
    return none.index_copy(0, row, circular)


def _count_along(
    edges: EdgeIndex, fact: Tensor, labels: Tensor
) -> F32[Tensor, "n"]:
    """Count the paths of each body between the arguments of its fact that walk along the fact in some step."""
    x, y = edges.first_argument[fact], edges.second_argument[fact]
    takes = labels // 2 == edges.predicate[fact][:, None]
    is_backward = labels % 2 == 1
    # Of each step that takes the fact, where it starts and ends; a path ends in y.
    start = torch.where(is_backward, y[:, None], x[:, None])
    end = torch.where(is_backward, x[:, None], y[:, None])
    start = torch.cat([start, y[:, None]], 1)

    n_steps = labels.shape[1]
    total = torch.zeros_like(x, dtype=torch.float32)
    for n_taken in range(1, n_steps + 1):
        for taken in combinations(range(n_steps), n_taken):
            n_paths = takes[:, taken].all(1).float()
            place, first = x, 0
            for step in (*taken, n_steps):
                free = labels[:, first:step]
                n_paths = _count_free(
                    edges, place, free, start[:, step], n_paths
                )
                place, first = end[:, min(step, n_steps - 1)], step + 1
            total = total - (-1.0) ** n_taken * n_paths
    return total


def _count_free(
    edges: EdgeIndex,
    source: Tensor,
    labels: Tensor,
    target: Tensor,
    n_before: Tensor,
) -> Tensor:
    """Count the paths of at most two labels from each source to its target, times the paths before.

    Two labels come before or after a step that takes the fact, where the target is the source.
    """
    n_labels = labels.shape[1]
    if n_labels == 0:
        return n_before * (source == target)
    if n_labels == 1:
        return n_before * has_edge(edges, source, labels[:, 0], target)
    is_asked = (source == target) & (n_before > 0)
    there, back = labels.unbind(1)
    return _count_round_trips(edges, source, there, back, is_asked)


def _count_round_trips(
    edges: EdgeIndex,
    entity: Tensor,
    there: Tensor,
    back: Tensor,
    is_asked: Tensor,
) -> Tensor:
    """Count the paths from each entity along label `there` and along `back` to itself; 0 where not asked."""
    asked = true_rows(is_asked)
    n_labels = edges.n_labels
    key = (entity * n_labels + there) * n_labels + back
    distinct, inverse = row_index.unique_inverse(key[asked])
    found, start = find_keys(edges.starts, distinct // n_labels)
    first, n_edges = spans(edges.starts.offsets, start)

    count = torch.zeros_like(distinct, dtype=torch.float32)
    for begin, end in pack(n_edges.double(), CHUNK_ROWS):
        row, edge = expand_ranges(first[begin:end], n_edges[begin:end])
        trip = found[begin:end][row]
        home = distinct[trip] // (n_labels * n_labels)
        returns = has_edge(
            edges, edges.target[edge], distinct[trip] % n_labels, home
        )
        count = count + torch.bincount(
            trip, returns.float(), minlength=len(count)
        )
    zeros = torch.zeros_like(entity, dtype=torch.float32)
    return zeros.index_copy(0, asked, count[inverse])


# -- bodies found from facts


def make_rules(
    edges: EdgeIndex,
    labels: I64[Tensor, "R 6"],
    counts: Sequence[F64[Tensor, "R"]],
    cost: F64[Tensor, "R"],
    end_constants: I64[Tensor, "R 2"] | None = None,
) -> MinedRules:
    """Build rules from counts.

    Args:
      counts: support, circular support, body pairs and PCA pairs, NaN where these were not counted.
      cost: rows that counting again takes.
      end_constants: None for path rules.
    """
    if end_constants is None:
        end_constants = torch.zeros_like(labels[:, :2])
    n_facts = torch.bincount(edges.predicate, minlength=edges.n_predicates)
    support, circular_support, body_pairs, pca_pairs = counts
    return MinedRules(
        labels=labels,
        end_constants=end_constants,
        support=support,
        circular_support=circular_support,
        body_pairs=body_pairs,
        pca_pairs=pca_pairs,
        head_facts=n_facts[labels[:, 0] // 2].double(),
        cost=cost,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosingPlan:
    """Head predicates whose facts long bodies are searched from, and which half of a walk is the longer one."""

    predicates: tuple[
        int, ...
    ]  # heads to look at, from 0, the least work first
    n_left_out: int  # heads that have facts, but too much work
    fact_rows: F64[Tensor, "N"]  # half walks of each fact
    # the longer half is made from the first argument
    is_forward: Bool[Tensor, "N"]
    n_rows: float  # expected work


def closing_rows(
    edges: EdgeIndex, length: int
) -> tuple[F64[Tensor, "N"], Bool[Tensor, "N"]]:
    """Count the half walks of each fact, and choose whether the longer half starts at the first argument.

    Half walks of a fact start at one of its arguments and have about half of a body's length.
    """
    n_short = length // 2
    n_walks = torch.ones(
        edges.n_entity_ids, dtype=torch.float64, device=edges.source.device
    )
    total = torch.zeros_like(n_walks)
    short = total
    for step in range(length - n_short):
        n_walks = torch.zeros_like(n_walks).index_add(
            0, edges.source, n_walks[edges.target]
        )
        total = total + n_walks
        if step + 1 == n_short:
            short = total
    x, y = edges.first_argument, edges.second_argument
    forward = total[x] + short[y]
    backward = short[x] + total[y]
    return torch.minimum(forward, backward), forward <= backward


def plan_closing(edges: EdgeIndex, length: int, max_rows: float) -> ClosingPlan:
    """Choose the head predicates to search, those of least work first, so that the work is within a limit.

    Args:
      length: number of labels of the bodies.
      max_rows: limit of the work.
    """
    fact_rows, is_forward = closing_rows(edges, length)
    n_predicates = edges.n_predicates
    rows = torch.bincount(edges.predicate, fact_rows, minlength=n_predicates)
    largest = torch.zeros_like(rows).scatter_reduce(
        0, edges.predicate, fact_rows, "amax"
    )
    has_facts = largest > 0
    possible = has_facts & (largest <= 2 * CHUNK_ROWS)
    # Bodies, and half walks of a fact, must be numbers of 62 bits.
    half = edges.n_labels ** (length - length // 2) * edges.n_entity_ids
    n_codes = max(edges.n_labels**length, half * 2 * CHUNK_ROWS)
    possible &= n_codes.bit_length() <= 62
    order = torch.sort(torch.where(possible, rows, torch.inf), stable=True)
    n_taken = int((torch.cumsum(order.values, 0) <= max_rows).sum())
    taken = order.indices[:n_taken]
    return ClosingPlan(
        predicates=tuple(taken.tolist()),
        n_left_out=int(has_facts.sum()) - n_taken,
        fact_rows=fact_rows,
        is_forward=is_forward,
        n_rows=float(rows[taken].sum()),
    )


def iter_closed_rules(
    edges: EdgeIndex,
    plan: ClosingPlan,
    length: int,
    min_support: int,
    budget: Budget,
    share: float,
) -> Iterator[FoundRules | None]:
    """Yield the rules of each head of a plan; None for a head with too many, or once the budget is spent.

    Their body pairs are not counted yet: of support they have none, and of circular support minus what they derive.

    Args:
      length: number of labels of the bodies.
      min_support: of the rules, circular support left out.
      budget: pays for the work.
      share: share of the budget at which the search stops.
    """
    for predicate in plan.predicates:
        pairs = _closing_pairs(edges, plan, predicate, length, budget, share)
        if pairs is None:
            yield None
            continue
        fact, code = pairs

        code, rule = row_index.unique_inverse(code)
        n_facts = torch.bincount(rule).double()
        zeros = torch.zeros_like(n_facts)
        labels = path_labels(
            torch.full_like(code, predicate), code, length, edges.n_labels
        )
        counts = zeros, -n_facts, zeros, zeros
        rules = make_rules(edges, labels, counts, zeros)
        found = FoundRules(rules, fact, rule)
        yield keep(found, n_facts >= min_support)


def _closing_pairs(
    edges: EdgeIndex,
    plan: ClosingPlan,
    predicate: int,
    length: int,
    budget: Budget,
    share: float,
) -> tuple[Tensor, Tensor] | None:
    """Return the distinct pairs (fact of a head, code of a body that derives it); None if they are too many.

    None too if the share of the budget is spent.
    """
    n_short = length // 2
    none = edges.predicate[:0]
    facts = [none]
    codes = [none]
    n_pairs = 0
    for n_forward in sorted({n_short, length - n_short}):
        is_forward = n_forward > n_short
        chosen = edges.predicate == predicate
        if length % 2:
            chosen &= plan.is_forward == is_forward
        rows = true_rows(chosen)
        for first, last in pack(plan.fact_rows[rows], CHUNK_ROWS):
            if budget.is_exhausted(share) or n_pairs > MAX_CLOSED_PAIRS:
                return None
            part = rows[first:last]
            budget.spend(float(plan.fact_rows[part].sum()))
            fact, code = _meet(edges, part, n_forward, length, budget)
            facts.append(part[fact])
            codes.append(code)
            n_pairs += len(fact)

    return torch.cat(facts), torch.cat(codes)


def _meet(
    edges: EdgeIndex,
    fact_row: Tensor,
    n_forward: int,
    length: int,
    budget: Budget,
) -> tuple[Tensor, Tensor]:
    """Join half walks from both arguments of facts; return distinct pairs (position of the fact, code of the body)."""
    n_backward = length - n_forward
    prefix_fact, prefix, middle = _half_walks(
        edges, fact_row, n_forward, is_forward=True
    )
    suffix_fact, suffix, start = _half_walks(
        edges, fact_row, n_backward, is_forward=False
    )
    key, order = row_index.sort_keys(suffix_fact * edges.n_entity_ids + start)
    forward_key = prefix_fact * edges.n_entity_ids + middle
    first, count = find_spans(key, forward_key)

    facts = [fact_row[:0]]
    codes = [fact_row[:0]]
    for begin, end in pack(count.double(), CHUNK_ROWS):
        row, position = expand_ranges(first[begin:end], count[begin:end])
        code = prefix[begin:end][row] * edges.n_labels**n_backward
        fact, code = _distinct_pairs(
            prefix_fact[begin:end][row],
            code + suffix[order[position]],
            len(fact_row),
        )
        facts.append(fact)
        codes.append(code)
        budget.spend(len(row))
    return _distinct_pairs(torch.cat(facts), torch.cat(codes), len(fact_row))


def _distinct_pairs(
    fact: Tensor, code: Tensor, n_facts: int
) -> tuple[Tensor, Tensor]:
    """Return the distinct pairs of two columns, the first of which is below `n_facts`."""
    codes, number = row_index.unique_inverse(code)
    key = row_index.unique_values(number * n_facts + fact)
    return key % n_facts, codes[key // n_facts]


def _half_walks(
    edges: EdgeIndex, fact_row: Tensor, n_steps: int, *, is_forward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk `n_steps` from one argument of each fact without using the fact; return the distinct walks.

    Returns:
      The position of the fact, the code of the labels towards its second argument, and the end.
    """
    n_labels, n_ids = edges.n_labels, edges.n_entity_ids
    argument = edges.first_argument if is_forward else edges.second_argument
    fact = row_numbers(fact_row)
    code, end = torch.zeros_like(fact), argument[fact_row]
    for step in range(n_steps):
        row, edge = expand_ranges(*spans(edges.offsets, end))
        is_other = edges.fact[edge] != fact_row[fact[row]]
        row, edge = row[is_other], edge[is_other]
        # A body walks the edges of its second half the other way, and the last step first.
        label, longer = edges.label[edge], code[row]
        longer = (
            longer * n_labels + label
            if is_forward
            else (label ^ 1) * n_labels**step + longer
        )
        n_codes = n_labels ** (step + 1)
        body = fact[row] * n_codes + longer
        key = row_index.unique_values(body * n_ids + edges.target[edge])
        fact, code, end = (
            key // n_ids // n_codes,
            key // n_ids % n_codes,
            key % n_ids,
        )
    return fact, code, end
