"""Closed path rules h(X, Y) :- b1(X, Z1), ..., bn(.., Y): which bodies to look at, and the rules that they make.

All bodies of a length are the bodies of the length before, extended by every label. Where that is more work than the
budget allows, only a part of the entities are sources: every body is then counted on a sample. Where even a small
sample is too much work, the bodies that promise the most are extended, and the others are left out and counted.

`plan_extensions` says what is done, `iter_extensions` does it, and `find_rules` takes the rules from the pairs that
bodies join.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.types import F32, F64, I64
from funcppo.kg.logic import sorting
from funcppo.kg.logic.joins import expand_ranges
from funcppo.kg.mining import circularity, paths
from funcppo.kg.mining.budget import Budget
from funcppo.kg.mining.mined_rules import (
    SMOOTHING_COUNT,
    FoundRules,
    MinedRules,
    Thresholds,
    above_thresholds,
    held_out_score,
    keep,
    path_labels,
)
from funcppo.kg.mining.paths import (
    CHUNK_ROWS,
    EdgeIndex,
    JoinedPairs,
    PathBlock,
    SourceRange,
)

# A single body may take this many rows; a larger one is counted on a sample of its sources.
MAX_BODY_ROWS = 2 * CHUNK_ROWS
# A sample of a whole length has at least this many sources, and this share of them.
MIN_SAMPLE_SOURCES = 64
MIN_SAMPLE_FRACTION = 1 / 256
# Work of matching a pair with one of the facts between its entities, in rows.
FACT_ROWS = 0.06


class Bodies(NamedTuple):
    """The bodies of one length that have paths, by ascending code; estimates where they were sampled."""

    code: I64[Tensor, "K"]
    n_pairs: F64[Tensor, "K"]
    walk_rows: F64[Tensor, "K"]  # rows that walking each from all sources takes
    extension_rows: F64[Tensor, "K"]  # rows of extending each by all labels


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtensionPlan:
    """Which bodies to extend, and from how many sources."""

    bodies: Bodies  # those to extend, the most promising first
    n_left_out: int  # bodies that are not extended
    fraction: float  # share of the entities that are sources
    n_rows: float  # expected work


class BodySample(NamedTuple):
    """Bodies counted from a share of all sources."""

    pairs: JoinedPairs
    fraction: float
    prefixes: Bodies  # of the bodies, by ascending code; none of one label


class FactHits(NamedTuple):
    """Entries of pairs whose entities some fact has, by ascending body."""

    body: I64[Tensor, "n"]
    pair: I64[Tensor, "n"]  # row in `EdgeIndex.pairs`
    entry: I64[Tensor, "n"]


class RuleFacts(NamedTuple):
    """The facts that rules derive, those derived from themselves alone included."""

    rule: I64[Tensor, "n"]
    fact: I64[Tensor, "n"]
    entry: I64[Tensor, "n"]  # of the pair


class RuleTable(NamedTuple):
    """Rules of bodies, in the order of body and head."""

    body: I64[Tensor, "R"]  # row of the body
    predicate: I64[Tensor, "R"]  # of the head, from 0
    support: F64[Tensor, "R"]  # circular support included
    n_pairs: F64[Tensor, "R"]


class Candidates(NamedTuple):
    """Rules of some bodies that have enough support, and the pairs that are facts."""

    table: RuleTable
    hits: FactHits


def facts_per_pair(edges: EdgeIndex) -> float:
    """The mean number of facts between two entities, in rows of work beside that of the pair."""
    return len(edges.fact) / 2 / max(edges.n_entity_ids, 1) ** 2 * FACT_ROWS


def iter_first_bodies(edges: EdgeIndex, budget: Budget) -> Iterator[BodySample]:
    """Yield the bodies of one label, counted from all sources."""
    priority = torch.zeros(edges.n_entity_ids, device=edges.label.device)
    labels = torch.arange(edges.n_labels, device=edges.label.device)
    n_edges = torch.bincount(edges.label, minlength=edges.n_labels)
    cost = n_edges.double() * (1 + facts_per_pair(edges))
    for first, last in paths.pack(cost, CHUNK_ROWS):
        block = paths.walk(edges, labels[first:last], 1, SourceRange(priority))
        none = no_bodies(labels.device)
        yield BodySample(paths.joined_pairs(block), 1.0, none)
        budget.spend(float(cost[first:last].sum()))


def summarise_bodies(edges: EdgeIndex, sample: BodySample) -> Bodies:
    """How many pairs the bodies of a sample have, and how much work they are."""
    pairs = sample.pairs
    n_bodies = len(pairs.body_code)
    degree = torch.diff(edges.offsets).double()
    columns = [
        torch.bincount(pairs.body, minlength=n_bodies).double(),
        torch.bincount(pairs.body, pairs.n_paths.double(), minlength=n_bodies),
        torch.bincount(pairs.body, degree[pairs.target], minlength=n_bodies),
    ]
    is_met = columns[0] > 0
    code = pairs.body_code[is_met]
    n_pairs, n_paths, extension = (
        column[is_met] / sample.fraction for column in columns
    )
    return Bodies(
        code, n_pairs, _walk_rows(edges, sample, code, n_paths), extension
    )


def no_bodies(device: torch.device) -> Bodies:
    """A table without a body."""
    none = torch.zeros(0, dtype=torch.float64, device=device)
    return Bodies(none.long(), none, none, none)


def concatenate_bodies(parts: Sequence[Bodies]) -> Bodies:
    """All bodies of some tables, which have none in common."""
    return Bodies(*(torch.cat(columns) for columns in zip(*parts)))


def plan_extensions(
    edges: EdgeIndex, bodies: Bodies, length: int, max_rows: float
) -> ExtensionPlan:
    """Choose the bodies to extend and the share of sources, so that the work is within a limit.

    Args:
      bodies: all bodies of a length.
      length: number of their labels.
      max_rows: limit of the work.
    """
    weight = 1 + facts_per_pair(edges)
    cost = bodies.walk_rows + bodies.extension_rows * weight
    n_sources = count_entities(edges)
    least = max(MIN_SAMPLE_SOURCES / n_sources, MIN_SAMPLE_FRACTION)
    total = float(cost.sum())
    fraction = max(min(1.0, max_rows / max(total, 1.0)), min(1.0, least))

    promise = _promise(edges, bodies, length)
    order = torch.sort(promise, descending=True, stable=True).indices
    rows = torch.cumsum(cost[order] * fraction, 0)
    n_taken = len(order)
    if total * fraction > 1.01 * max_rows:
        n_taken = max(1, int((rows <= max_rows).sum()))
    chosen = Bodies(*(column[order[:n_taken]] for column in bodies))
    return ExtensionPlan(
        bodies=chosen,
        n_left_out=len(order) - n_taken,
        fraction=fraction,
        n_rows=float(rows[n_taken - 1]) if n_taken else 0.0,
    )


def iter_extensions(
    edges: EdgeIndex,
    plan: ExtensionPlan,
    length: int,
    priority: F32[Tensor, "C1"],
    budget: Budget,
) -> Iterator[BodySample]:
    """Yield the bodies that extend those of a plan, each in one sample.

    Args:
      length: number of labels of the bodies of the plan.
      priority: a random number in [0, 1) for each entity.
      budget: pays for the work.
    """
    for first, last in paths.pack(
        plan.bodies.walk_rows * plan.fraction, CHUNK_ROWS
    ):
        bodies = Bodies(*(column[first:last] for column in plan.bodies))
        walk_rows = bodies.walk_rows * plan.fraction
        # A body too large to walk at once is walked from fewer sources.
        share = min(1.0, MAX_BODY_ROWS / max(float(walk_rows.max()), 1.0))
        sources = SourceRange(priority, 0.0, plan.fraction * share)
        order = sorting.sort_keys(bodies.code).order
        prefixes = Bodies(*(column[order] for column in bodies))
        block = paths.walk(edges, prefixes.code, length, sources)
        budget.spend(float(walk_rows.sum()) * share)
        for pairs, fraction in _extend_block(edges, block, sources, budget):
            yield BodySample(pairs, fraction, prefixes)


def find_candidates(
    edges: EdgeIndex, pairs: JoinedPairs, thresholds: Thresholds
) -> Candidates:
    """The rules of some bodies that have enough support and confidence, circular support included."""
    hits = find_hits(edges, pairs)
    n_facts = torch.diff(edges.pairs.offsets)[hits.pair]
    size = (len(pairs.body_code), len(edges.pairs.keys))
    n_pairs = torch.bincount(pairs.body, minlength=size[0]).double()
    none = n_pairs[:0]
    parts = [RuleTable(hits.body[:0], hits.body[:0], none, none)]
    ones = torch.ones_like(hits.pair, dtype=torch.float32)

    # The facts of each pair by predicate, summed up over the pairs of each body.
    for first, last in paths.pack_runs(hits.body, n_facts, MAX_BODY_ROWS):
        part = slice(first, last)
        left = paths.sparse_matrix(
            hits.body[part], hits.pair[part], ones[part], size
        )
        product = paths.multiply(left, edges.pair_predicates)
        support = product.value.double()
        total = n_pairs[product.row]
        enough = (support >= thresholds.min_support) & (
            support >= thresholds.min_confidence * total
        )
        columns = (product.row, product.column, support, total)
        parts.append(RuleTable(*(column[enough] for column in columns)))
    table = RuleTable(*(torch.cat(columns) for columns in zip(*parts)))
    return Candidates(table, hits)


def pack_candidates(
    table: RuleTable, length: int
) -> Iterator[I64[Tensor, "r"]]:
    """Yield rows of candidates in parts that derive about MAX_BODY_ROWS facts each, the best rules first."""
    score = _best_score(table, length)
    order = torch.sort(score, descending=True, stable=True).indices
    for first, last in paths.pack(table.support[order], MAX_BODY_ROWS):
        yield order[first:last]


def find_rules(
    edges: EdgeIndex,
    sample: BodySample,
    length: int,
    candidates: Candidates,
    rows: I64[Tensor, "r"],
    thresholds: Thresholds,
    score_to_beat: F64[Tensor, "N"],
) -> FoundRules:
    """Those among some candidates that are above the thresholds and may be the best rule of some fact.

    Counts are those of the sample.

    Args:
      length: number of labels of the bodies.
      candidates: the rules of the sample.
      rows: of the candidates to look at.
      score_to_beat: of each fact, what the score of a rule must exceed to be among its best.
    """
    table, hits = candidates
    part = RuleTable(*(column[rows] for column in table))
    least = _least_of_predicate(edges, score_to_beat)
    is_promising = _best_score(part, length) > least[part.predicate]
    rows = sorting.sort_values(rows[is_promising])
    part = RuleTable(*(column[rows] for column in table))
    facts = match_facts(
        edges, hits, part.body * edges.n_predicates + part.predicate
    )
    wins = _best_score(part, length)[facts.rule] > score_to_beat[facts.fact]
    is_kept = torch.zeros_like(rows, dtype=torch.bool)
    is_kept = is_kept.index_fill(0, facts.rule[wins], True)
    found = _found_rules(edges, sample, length, part, facts, is_kept)
    return above_thresholds(found, thresholds)


def count_entities(edges: EdgeIndex) -> int:
    """The number of entities that facts have."""
    return max(int((torch.diff(edges.offsets) > 0).sum()), 1)


def _best_score(table: RuleTable, length: int) -> Tensor:
    """The scores that rules have without circular support; with it they are at most as high."""
    return held_out_score(table.support, 0.0, table.n_pairs, length)


def find_hits(edges: EdgeIndex, pairs: JoinedPairs) -> FactHits:
    """The pairs whose entities some fact has."""
    found = paths.find_keys(
        edges.pairs, pairs.source * edges.n_entity_ids + pairs.target
    )
    body, order = sorting.sort_keys(pairs.body[found.row])
    return FactHits(body, found.position[order], found.row[order])


def match_facts(
    edges: EdgeIndex, hits: FactHits, rule_key: I64[Tensor, "R"]
) -> RuleFacts:
    """The facts that rules derive.

    Args:
      rule_key: body * n_predicates + predicate of each rule, distinct and ascending.
    """
    n_predicates = edges.n_predicates
    none = rule_key[:0]
    parts = [RuleFacts(none, none, none)]
    if len(hits.body) and len(rule_key):
        n_bodies = 1 + int(
            torch.maximum(hits.body[-1], rule_key[-1] // n_predicates)
        )
        has_rule = torch.zeros(n_bodies, dtype=torch.bool, device=none.device)
        has_rule = has_rule.index_fill(0, rule_key // n_predicates, True)

        row = has_rule[hits.body].nonzero().squeeze(1)
        first = edges.pairs.offsets[hits.pair[row]]
        n_facts = edges.pairs.offsets[hits.pair[row] + 1] - first

        for begin, end in paths.pack(n_facts.double(), CHUNK_ROWS):
            part = slice(begin, end)
            at, position = expand_ranges(first[part], n_facts[part])
            hit = row[part][at]
            fact = edges.pair_facts[position]
            key = hits.body[hit] * n_predicates + edges.predicate[fact]
            rule = torch.searchsorted(rule_key, key)
            rule = rule.clamp_max(len(rule_key) - 1)
            match = (rule_key[rule] == key).nonzero().squeeze(1)
            parts.append(
                RuleFacts(rule[match], fact[match], hits.entry[hit[match]])
            )

    return RuleFacts(*(torch.cat(columns) for columns in zip(*parts)))


def _found_rules(
    edges: EdgeIndex,
    sample: BodySample,
    length: int,
    table: RuleTable,
    facts: RuleFacts,
    is_kept: Tensor,
) -> FoundRules:
    """Those rules of a table that are kept, with their circular support."""
    pairs = sample.pairs
    row = is_kept[facts.rule].nonzero().squeeze(1)
    facts = RuleFacts(*(column[row] for column in facts))

    labels = path_labels(
        table.predicate, pairs.body_code[table.body], length, edges.n_labels
    )
    circular = circularity.is_circular(
        edges,
        facts.fact,
        labels[facts.rule, 1 : 1 + length],
        pairs.n_paths[facts.entry],
    )

    n_paths = torch.bincount(
        pairs.body, pairs.n_paths.double(), minlength=len(pairs.body_code)
    )
    n_facts = torch.bincount(edges.predicate, minlength=edges.n_predicates)
    zeros = torch.zeros_like(table.support)
    rules = MinedRules(
        labels=labels,
        end_constants=torch.zeros_like(labels[:, :2]),
        support=table.support,
        circular_support=torch.bincount(
            facts.rule, circular.double(), minlength=len(table.body)
        ),
        body_pairs=table.n_pairs,
        pca_pairs=zeros,
        head_facts=n_facts[table.predicate].double(),
        std_error=zeros,
        pca_std_error=zeros + torch.inf,
    )

    found = FoundRules(
        rules,
        cost=_walk_rows(
            edges,
            sample,
            pairs.body_code[table.body],
            n_paths[table.body] / sample.fraction,
        ),
        fact=facts.fact[~circular],
        rule=facts.rule[~circular],
    )
    return keep(found, is_kept)


def _walk_rows(
    edges: EdgeIndex, sample: BodySample, code: Tensor, n_paths: Tensor
) -> Tensor:
    """Rows that walking along each body of a sample takes: its paths and those of its prefixes."""
    prefixes = sample.prefixes
    if not len(prefixes.code):
        return n_paths
    row = torch.searchsorted(prefixes.code, code // edges.n_labels)
    return n_paths + prefixes.walk_rows[row]


def _least_of_predicate(edges: EdgeIndex, value: Tensor) -> Tensor:
    """The least value of the facts of each predicate."""
    none = torch.full(
        (edges.n_predicates,), torch.inf, dtype=value.dtype, device=value.device
    )
    return none.scatter_reduce(0, edges.predicate, value, "amin")


def _promise(edges: EdgeIndex, bodies: Bodies, length: int) -> Tensor:
    """An upper bound of the support of the rules whose bodies begin with each body, beside the number of its pairs.

    The support is at most the number of facts of some predicate whose first argument has the first label.
    """
    first_label = bodies.code // edges.n_labels ** (length - 1)
    key = edges.starts.keys
    source = key // edges.n_labels
    label = key % edges.n_labels
    has_label = paths.sparse_matrix(
        source,
        label,
        torch.ones_like(key, dtype=torch.float32),
        (edges.n_entity_ids, edges.n_labels),
    )

    # The number of facts of each predicate by first argument.
    order = edges.starts_by_label
    order = order[label[order] % 2 == 0]
    n_facts = paths.sparse_matrix(
        label[order] // 2,
        source[order],
        torch.diff(edges.starts.offsets)[order].float(),
        (edges.n_predicates, edges.n_entity_ids),
    )
    overlap = paths.multiply(n_facts, has_label)
    none = torch.zeros(edges.n_labels, device=key.device)
    bound = none.scatter_reduce(0, overlap.column, overlap.value, "amax")
    return bound[first_label].double() / (bodies.n_pairs + SMOOTHING_COUNT)


def _extend_block(
    edges: EdgeIndex,
    block: PathBlock,
    sources: SourceRange,
    budget: Budget,
) -> Iterator[tuple[JoinedPairs, float]]:
    """Yield the bodies of a block with every label added, and the share of the sources."""
    weight = 1 + facts_per_pair(edges)
    unit_rows = CHUNK_ROWS / weight
    degree = torch.diff(edges.offsets).double()
    cost = torch.bincount(
        block.entry_body,
        degree[block.target],
        minlength=len(block.body_code),
    )
    for first, last in paths.pack(cost, unit_rows):
        unit = paths.select_bodies(block, first, last)
        if float(cost[first:last].max()) <= unit_rows:
            pairs = paths.extend(edges, unit, 0, edges.n_labels)
            yield pairs, sources.high
            budget.spend(float(cost[first:last].sum()) * weight)
        else:
            yield from _extend_by_label(edges, unit, sources, budget)


def _extend_by_label(
    edges: EdgeIndex,
    block: PathBlock,
    sources: SourceRange,
    budget: Budget,
) -> Iterator[tuple[JoinedPairs, float]]:
    """Yield one body with every label added, some labels at a time, and the share of the sources."""
    weight = 1 + facts_per_pair(edges)
    n_rows = torch.bincount(block.target, minlength=edges.n_entity_ids)
    cost = torch.bincount(
        edges.label, n_rows[edges.source].double(), minlength=edges.n_labels
    )
    for first, last in paths.pack(cost, CHUNK_ROWS / weight):
        # A body too large to count at once is counted from fewer sources.
        largest = float(cost[first:last].max())
        share = min(1.0, MAX_BODY_ROWS / max(largest, 1.0))
        part = sources._replace(high=sources.high * share)
        thinned = paths.select_sources(block, part) if share < 1 else block
        pairs = paths.extend(edges, thinned, first, last)
        yield pairs, part.high
        budget.spend(float(cost[first:last].sum()) * share * weight)
