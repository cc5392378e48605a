"""Closed path rules h(X, Y) :- b1(X, Z1), ..., bn(.., Y): which bodies to look at, the rules, and their counts.

All bodies of a length are the bodies of the length before, extended by every label. Where that is more work than the
budget allows, only a part of the entities are sources: every body is then counted on a sample. Where even a small
sample is too much work, the bodies that promise the most are extended, and the others are left out and counted.
`plan_extensions` says what is done, `iter_extensions` does it, and `find_rules` takes the rules from the pairs that
bodies join.

Rules that were chosen by a sample are counted again, so that the choice does not bias the counts that are written: from
all sources if the work allows it (`count_exactly`), else from a sample that does not depend on the first (`estimate`),
with standard errors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.types import F32, F64, I64
from funcppo.kg.logic import row_index
from funcppo.kg.logic.joins import expand_ranges
from funcppo.kg.mining import closing, paths
from funcppo.kg.mining.mined_rules import (
    SMOOTHING_COUNT,
    Budget,
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
        order = row_index.sort_keys(bodies.code).order
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
    rows = row_index.sort_values(rows[is_promising])
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
    body, order = row_index.sort_keys(pairs.body[found.row])
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
    circular = closing.is_circular(
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


# -- counting


class RuleSums(NamedTuple):
    """Sums over the sources that were looked at."""

    support: F64[Tensor, "R"]
    circular_support: F64[Tensor, "R"]
    body_pairs: F64[Tensor, "R"]
    pca_pairs: F64[Tensor, "R"]
    support_squares: F64[Tensor, "R"]  # of the support of each source
    support_by_pairs: F64[Tensor, "R"]  # support of each source times its pairs
    pair_squares: F64[Tensor, "R"]  # of the pairs of each source
    pca_squares: F64[Tensor, "R"]


class CountedRules(NamedTuple):
    """Sums of some rules, and the facts that they derive from others."""

    sums: RuleSums
    fact: I64[Tensor, "n"]
    rule: I64[Tensor, "n"]


class CountedPart(NamedTuple):
    """Some of the rules, counted."""

    rows: I64[Tensor, "r"]  # rows of these rules in the table of all
    rules: MinedRules
    fact: I64[Tensor, "n"]  # pairs of a fact and one of these rules
    rule: I64[Tensor, "n"]


def count_rules(
    edges: EdgeIndex,
    labels: I64[Tensor, "R 6"],
    length: int,
    sources: SourceRange,
) -> CountedRules:
    """Count path rules of one length from a range of sources, at once.

    Args:
      labels: as in `MinedRules`.
      length: number of body atoms.
    """
    body_labels = labels[:, 1 : 1 + length]
    code = _body_code(body_labels, edges.n_labels)
    body_code, body = row_index.unique_inverse(code)
    block = paths.walk(edges, body_code, length, sources)

    key, order = row_index.sort_keys(
        body * edges.n_predicates + labels[:, 0] // 2
    )
    hits = find_hits(edges, paths.joined_pairs(block))
    facts = match_facts(edges, hits, key)
    facts = facts._replace(rule=order[facts.rule])
    circular = closing.is_circular(
        edges, facts.fact, body_labels[facts.rule], block.n_paths[facts.entry]
    )

    # The support of each source, beside its pairs.
    row_pairs = torch.bincount(
        block.entry_row, minlength=len(block.row_body)
    ).double()
    rule_and_row = torch.stack([facts.rule, block.entry_row[facts.entry]])
    (rule, row), support = _count_pairs(rule_and_row, len(row_pairs))

    def add_up(number: Tensor, value: Tensor) -> Tensor:
        return torch.bincount(number, value.double(), minlength=len(labels))

    sums = RuleSums(
        support=add_up(rule, support),
        circular_support=add_up(facts.rule, circular),
        body_pairs=_sum_by_body(block, row_pairs)[body],
        pca_pairs=sum_by_subject(edges, block, row_pairs, key)[inverse(order)],
        support_squares=add_up(rule, support**2),
        support_by_pairs=add_up(rule, support * row_pairs[row]),
        pair_squares=_sum_by_body(block, row_pairs**2)[body],
        pca_squares=sum_by_subject(edges, block, row_pairs**2, key)[
            inverse(order)
        ],
    )
    derives = (~circular).nonzero().squeeze(1)
    return CountedRules(sums, facts.fact[derives], facts.rule[derives])


class CountTask(NamedTuple):
    """Path rules of one length to count from the sources of some priorities."""

    labels: I64[Tensor, "r 6"]
    length: int  # number of body atoms
    low: float
    high: float


class _TaskGroup(NamedTuple):
    """Rules that are counted from one range of the sources after the other."""

    rows: I64[Tensor, "r"]  # in the table of all
    tasks: list[CountTask]


def count_exactly(
    edges: EdgeIndex,
    found: FoundRules,
    priority: F32[Tensor, "C1"],
    budget: Budget,
    share: float,
) -> Iterator[CountedPart]:
    """Yield the counts of path rules from all sources, part by part in their order, until the budget is spent.

    A rule that costs more than a chunk is counted from one range of the sources after the other.

    Args:
      found: rules with what they cost; their counts are not read.
      priority: a random number in [0, 1) for each entity, by which ranges of the sources are chosen.
      budget: pays for the work.
      share: share of the budget at which counting stops.
    """
    groups = _group_tasks(found, found.cost, 1.0)
    for rows, whole in _count_groups(
        edges,
        groups,
        found.cost,
        priority,
        budget,
        lambda: budget.is_exhausted(share),
    ):
        rules = _exact_rules(edges, found.rules.labels[rows], whole.sums)
        yield CountedPart(rows, rules, whole.fact, whole.rule)


def _group_tasks(
    found: FoundRules, cost: F64[Tensor, "R"], high: float
) -> list[_TaskGroup]:
    """Rules to count from the sources of a priority below `high`, in ranges none of which costs more than a chunk."""
    groups: list[_TaskGroup] = []
    for first, last in paths.pack(cost, CHUNK_ROWS):
        n_ranges = max(1, math.ceil(float(cost[first:last].max()) / CHUNK_ROWS))
        ends = [*(high * i / n_ranges for i in range(n_ranges)), high]
        for rows, length in _rows_by_length(found, first, last):
            labels = found.rules.labels[rows]
            tasks = [
                CountTask(labels, length, low, end)
                for low, end in itertools.pairwise(ends)
            ]
            groups.append(_TaskGroup(rows, tasks))
    return groups


def _count_groups(
    edges: EdgeIndex,
    groups: Sequence[_TaskGroup],
    cost: F64[Tensor, "R"],
    priority: F32[Tensor, "C1"],
    budget: Budget,
    is_over: Callable[[], bool],
) -> Iterator[tuple[I64[Tensor, "n"], CountedRules]]:
    """Yield the rows of each group and the sums over its tasks, until the work is over."""
    for group in groups:
        parts: list[CountedRules] = []
        for labels, length, low, high in group.tasks:
            if is_over():
                return
            sources = SourceRange(priority, low, high)
            parts.append(count_rules(edges, labels, length, sources))
            budget.spend(float(cost[group.rows].sum()) / len(group.tasks))
        yield group.rows, _add_up(parts)


def estimate(
    edges: EdgeIndex,
    found: FoundRules,
    priority: F32[Tensor, "C1"],
    budget: Budget,
    max_rows: float,
) -> Iterator[CountedPart]:
    """Yield estimated counts of path rules from one sample of the sources, part by part, until the time is over.

    A rule that costs more than a chunk is counted from one range of the sample after the other.

    Args:
      found: rules with what they cost; their counts are not read.
      priority: a random number in [0, 1) for each entity, independent of what the rules were chosen by.
      budget: pays for the work.
      max_rows: limit of the work; 0 for none.
    """
    fraction = min(1.0, max_rows / max(float(found.cost.sum()), 1.0))
    sources = SourceRange(priority, 0.0, fraction)
    cost = found.cost * fraction
    groups = _group_tasks(found, cost, fraction)
    for rows, whole in _count_groups(
        edges, groups, cost, priority, budget, budget.is_late
    ):
        labels = found.rules.labels[rows]
        rules = estimate_rules(edges, labels, sources, whole.sums)
        yield CountedPart(rows, rules, whole.fact, whole.rule)


def estimate_rules(
    edges: EdgeIndex,
    labels: I64[Tensor, "R 6"],
    sources: SourceRange,
    sums: RuleSums,
) -> MinedRules:
    """The counts of rules, estimated from a sample of n of the N sources of each body.

        count = N / n * sum
        var(confidence) = (1 - n / N) n / (n - 1) * sum((support_i - confidence pairs_i)^2) / pairs^2

    A sample whose sources do not differ says nothing of the others. The variance is therefore at least that of the
    share of successes among independent pairs, with a success and a failure more than were seen.

    Source: Cochran 1977, "Sampling techniques", section 2.11 (ratio estimates).
    """
    start_source = edges.starts.keys // edges.n_labels
    start_label = edges.starts.keys % edges.n_labels
    in_range = sources.contains(start_source).double()
    n_sampled = torch.bincount(start_label, in_range, minlength=edges.n_labels)[
        labels[:, 1]
    ]
    n_sources = torch.diff(edges.label_offsets)[labels[:, 1]].double()
    unseen = 1 - n_sampled / n_sources.clamp_min(1)
    scale = n_sources / n_sampled.clamp_min(1)

    def ratio_error(pairs: Tensor, squares: Tensor) -> Tensor:
        ratio = sums.support / pairs.clamp_min(1)
        residuals = (
            sums.support_squares
            - 2 * ratio * sums.support_by_pairs
            + ratio**2 * squares
        ).clamp_min(0)
        sampling = n_sampled / (n_sampled - 1) * residuals
        seen = (sums.support + 1) / (pairs + 2)
        least = seen * (1 - seen) / (pairs + 2)
        variance = torch.maximum(sampling / pairs.clamp_min(1) ** 2, least)
        is_unknown = (pairs == 0) | (n_sampled < 2)
        error = torch.sqrt(unseen * variance)
        return torch.where(is_unknown & (unseen > 0), torch.inf, error)

    return MinedRules(
        labels=labels,
        end_constants=torch.zeros_like(labels[:, :2]),
        support=sums.support * scale,
        circular_support=sums.circular_support * scale,
        body_pairs=sums.body_pairs * scale,
        pca_pairs=sums.pca_pairs * scale,
        head_facts=head_facts(edges, labels),
        std_error=ratio_error(sums.body_pairs, sums.pair_squares),
        pca_std_error=ratio_error(sums.pca_pairs, sums.pca_squares),
    )


def _exact_rules(
    edges: EdgeIndex, labels: Tensor, sums: RuleSums
) -> MinedRules:
    """Rules that were counted from all sources."""
    zeros = torch.zeros_like(sums.support)
    return MinedRules(
        labels=labels,
        end_constants=torch.zeros_like(labels[:, :2]),
        support=sums.support,
        circular_support=sums.circular_support,
        body_pairs=sums.body_pairs,
        pca_pairs=sums.pca_pairs,
        head_facts=head_facts(edges, labels),
        std_error=zeros,
        pca_std_error=zeros,
    )


def head_facts(edges: EdgeIndex, labels: Tensor) -> Tensor:
    """The number of facts of each rule's head."""
    n_facts = torch.bincount(edges.predicate, minlength=edges.n_predicates)
    return n_facts[labels[:, 0] // 2].double()


def _body_code(body_labels: Tensor, n_labels: int) -> Tensor:
    """The labels of each body as digits of a number."""
    code = body_labels[:, 0]
    for label in body_labels[:, 1:].unbind(1):
        code = code * n_labels + label
    return code


def _rows_by_length(
    found: FoundRules, first: int, last: int
) -> Iterator[tuple[Tensor, int]]:
    """Yield the rules of a range, by the length of their bodies."""
    length = (found.rules.labels[first:last, 1:] >= 0).sum(1)
    for n in torch.unique(length).tolist():
        yield first + (length == n).nonzero().squeeze(1), n


def _add_up(parts: list[CountedRules]) -> CountedRules:
    """The counts of rules over several ranges of sources."""
    sums = zip(*(part.sums for part in parts))
    return CountedRules(
        RuleSums(*(torch.stack(columns).sum(0) for columns in sums)),
        torch.cat([part.fact for part in parts]),
        torch.cat([part.rule for part in parts]),
    )


def inverse(order: Tensor) -> Tensor:
    """The position of each item in an order."""
    number = torch.arange(len(order), device=order.device)
    return torch.zeros_like(order).scatter(0, order, number)


def _count_pairs(
    pairs: Tensor, n_columns: int
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The distinct pairs of two rows of numbers, the second below `n_columns`, and how often each occurs."""
    n_columns = max(n_columns, 1)
    key, number = row_index.unique_inverse(pairs[0] * n_columns + pairs[1])
    count = torch.bincount(number)
    return (key // n_columns, key % n_columns), count.double()


def _sum_by_body(block: PathBlock, value: Tensor) -> Tensor:
    """The sum of a value over the rows of each body."""
    return torch.bincount(block.row_body, value, minlength=len(block.body_code))


def sum_by_subject(
    edges: EdgeIndex, block: PathBlock, value: Tensor, rule_key: Tensor
) -> Tensor:
    """The sum of a value over those sources of each rule's body that are first arguments of its head's predicate.

    Args:
      value: of each row of the block.
      rule_key: body * n_predicates + predicate of each rule.
    """
    left = paths.sparse_matrix(
        block.row_body,
        block.row_source,
        value,
        (len(block.body_code), edges.n_entity_ids),
    )
    total = paths.multiply(left, edges.subjects.double())
    key, order = row_index.sort_keys(
        total.row * edges.n_predicates + total.column
    )
    position, found = row_index.binary_search(key, rule_key)
    row = found.nonzero().squeeze(1)
    zeros = torch.zeros(len(rule_key), dtype=value.dtype, device=value.device)
    return zeros.index_copy(0, row, total.value[order[position[row]]])
