"""Rules and their counts: path rules from the pairs that bodies join, and rules with constants.

All bodies of a length are the bodies of the length before, extended by every label. Where that is more work than the
budget allows, only a part of the entities are sources: every body is then counted on a sample. Where even a small
sample is too much work, the bodies that promise the most are extended, and the others are left out and counted.
`plan_extensions` says what is done, `iter_extensions` does it, and `find_rules` takes the rules from the pairs that
bodies join. `count_path_rules` counts given rules from all sources.

Rules with constants are h(X, c) :- b(X, Z) and h(X, c) :- b(X, d), the same with either atom the other way round, and
those with X twice in the head, h(X, X) :- b(X, Z) and h(X, X) :- b(X, d). An edge from X is a *feature* of X: its label
and target for the second shape, its label alone for the first. Which features occur together is the product of the
sparse boolean matrix of entities and features with its transpose, computed here by a join over the entities, block by
block of heads, those with the most facts first.

Source: Meilicke et al. 2019, "Anytime bottom-up rule learning", section 3 (cyclic rules, acyclic rules AC1 and AC2);
Meilicke et al. 2024, "Anytime bottom-up rule learning for large-scale knowledge graph completion" (heads h(X, X)).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from funcppo.core.types import F32, F64, I64
from funcppo.kg.logic import row_index
from funcppo.kg.logic.row_index import (
    concatenate,
    count_to,
    expand_ranges,
    row_numbers,
    select_rows,
    true_rows,
)
from funcppo.kg.mining import paths
from funcppo.kg.mining.counts import (
    MAX_RULE_ATOMS,
    SAME_ENTITY,
    SMOOTHING_COUNT,
    Budget,
    FoundRules,
    MinedRules,
    above_thresholds,
    held_out_score,
    held_out_smoothed_confidence,
    keep,
    path_labels,
)
from funcppo.kg.mining.paths import (
    CHUNK_ROWS,
    EdgeIndex,
    FactHits,
    JoinedPairs,
    PathBlock,
    SourceRange,
    find_hits,
    match_facts,
)

# A single body may take this many rows; a larger one is counted on a sample of its sources.
MAX_BODY_ROWS = 2 * CHUNK_ROWS


class Bodies(NamedTuple):
    """Bodies of one length that have paths, by ascending code; counts are estimates where bodies were sampled."""

    code: I64[Tensor, "K"]
    n_pairs: F64[Tensor, "K"]
    walk_rows: F64[Tensor, "K"]  # rows that walking each from all sources takes
    extension_rows: F64[Tensor, "K"]  # rows of extending each by all labels


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtensionPlan:
    """Bodies to extend, and the share of the entities to start from."""

    bodies: Bodies  # those to extend, the most promising first
    n_left_out: int  # bodies that are not extended
    fraction: float  # share of the entities that are sources
    n_rows: float  # expected work


class BodySample(NamedTuple):
    """Pairs of entities that bodies join, counted from a share of all sources."""

    pairs: JoinedPairs
    fraction: float
    prefixes: Bodies  # of the bodies, by ascending code; none of one label


class RuleTable(NamedTuple):
    """Candidate rules, in the order of body and head."""

    body: I64[Tensor, "R"]  # row of the body
    predicate: I64[Tensor, "R"]  # of the head, from 0
    support: F64[Tensor, "R"]  # circular support included
    n_pairs: F64[Tensor, "R"]


# -- path rules among bodies


def facts_per_pair(edges: EdgeIndex) -> float:
    """Return the mean work of matching a joined pair of entities with the facts between them, in rows."""
    # Matching a pair with one of the facts between its entities takes 0.06 rows of work.
    return len(edges.fact) / 2 / max(edges.n_entity_ids, 1) ** 2 * 0.06


def iter_first_bodies(edges: EdgeIndex, budget: Budget) -> Iterator[BodySample]:
    """Yield samples of the bodies of one label, from all sources."""
    priority = torch.zeros(edges.n_entity_ids, device=edges.label.device)
    labels = count_to(edges.n_labels, edges.label)
    n_edges = torch.bincount(edges.label, minlength=edges.n_labels)
    cost = n_edges.double() * (1 + facts_per_pair(edges))
    for first, last in paths.pack(cost, CHUNK_ROWS):
        block = paths.walk(edges, labels[first:last], 1, SourceRange(priority))
        none = no_bodies(labels.device)
        yield BodySample(paths.joined_pairs(block), 1.0, none)
        budget.spend(float(cost[first:last].sum()))


def summarise_bodies(edges: EdgeIndex, sample: BodySample) -> Bodies:
    """Count the pairs of each body of a sample, and the work that walking and extending it takes."""
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
    """Return a table without bodies."""
    none = torch.zeros(0, dtype=torch.float64, device=device)
    return Bodies(none.long(), none, none, none)


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
    # A sample of a whole length has 64 sources at least, and one in 256.
    n_sources = max(int((torch.diff(edges.offsets) > 0).sum()), 1)
    least = max(64 / n_sources, 1 / 256)
    total = float(cost.sum())
    fraction = max(min(1.0, max_rows / max(total, 1.0)), min(1.0, least))

    promise = _promise(edges, bodies, length)
    order = row_index.best_first(promise)
    rows = torch.cumsum(cost[order] * fraction, 0)
    n_taken = len(order)
    if total * fraction > 1.01 * max_rows:
        n_taken = max(1, int((rows <= max_rows).sum()))
    chosen = select_rows(bodies, order[:n_taken])
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
    """Yield samples of the bodies that extend those of a plan; each body is in one sample.

    Args:
      length: number of labels of the bodies of the plan.
      priority: a random number in [0, 1) for each entity.
      budget: pays for the work.
    """
    for first, last in paths.pack(
        plan.bodies.walk_rows * plan.fraction, CHUNK_ROWS
    ):
        bodies = select_rows(plan.bodies, slice(first, last))
        walk_rows = bodies.walk_rows * plan.fraction
        # A body too large to walk at once is walked from fewer sources.
        share = min(1.0, MAX_BODY_ROWS / max(float(walk_rows.max()), 1.0))
        sources = SourceRange(priority, 0.0, plan.fraction * share)
        order = row_index.sort_keys(bodies.code).order
        prefixes = select_rows(bodies, order)
        block = paths.walk(edges, prefixes.code, length, sources)
        budget.spend(float(walk_rows.sum()) * share)
        for pairs, fraction in _extend_block(edges, block, sources, budget):
            yield BodySample(pairs, fraction, prefixes)


def find_candidates(
    edges: EdgeIndex,
    pairs: JoinedPairs,
    min_support: float,
    min_confidence: float,
) -> tuple[RuleTable, FactHits]:
    """Find the rules with bodies of a sample that have enough support and confidence, circular support included.

    Returns:
      The rules, and the pairs of the bodies that are facts.
    """
    hits = find_hits(edges, pairs)
    n_facts = torch.diff(edges.pairs.offsets)[hits.pair]
    size = (len(pairs.body_code), len(edges.pairs.keys))
    n_pairs = torch.bincount(pairs.body, minlength=size[0]).double()
    none = n_pairs[:0]
    parts = [RuleTable(hits.body[:0], hits.body[:0], none, none)]

    # The facts of each pair by predicate, summed up over the pairs of each body.
    for first, last in paths.pack_runs(hits.body, n_facts, MAX_BODY_ROWS):
        part = slice(first, last)
        left = paths.ones_matrix(hits.body[part], hits.pair[part], size)
        body, predicate, value = paths.multiply(left, edges.pair_predicates)
        support = value.double()
        total = n_pairs[body]
        enough = (support >= min_support) & (support >= min_confidence * total)
        table = RuleTable(body, predicate, support, total)
        parts.append(select_rows(table, enough))
    return concatenate(parts), hits


def pack_candidates(
    table: RuleTable, length: int
) -> Iterator[I64[Tensor, "r"]]:
    """Yield rows of candidates in parts that derive about MAX_BODY_ROWS facts each, the best rules first."""
    score = _best_score(table, length)
    order = row_index.best_first(score)
    for first, last in paths.pack(table.support[order], MAX_BODY_ROWS):
        yield order[first:last]


def find_rules(
    edges: EdgeIndex,
    sample: BodySample,
    length: int,
    candidates: tuple[RuleTable, FactHits],
    rows: I64[Tensor, "r"],
    thresholds: tuple[float, float],
    score_to_beat: F64[Tensor, "N"],
) -> FoundRules:
    """Return the candidates that are above the thresholds and may be the best rule of some fact.

    Counts are those of the sample.

    Args:
      length: number of labels of the bodies.
      candidates: the rules of the sample, and its pairs that are facts.
      rows: of the candidates to look at.
      thresholds: the least support and confidence.
      score_to_beat: of each fact, what the score of a rule must exceed to be among its best.
    """
    table, hits = candidates
    part = select_rows(table, rows)
    least = score_to_beat.new_full((edges.n_predicates,), torch.inf)
    least = least.scatter_reduce(0, edges.predicate, score_to_beat, "amin")
    is_promising = _best_score(part, length) > least[part.predicate]
    part = select_rows(table, row_index.sort_values(rows[is_promising]))
    key = part.body * edges.n_predicates + part.predicate
    rule, fact, entry = match_facts(edges, hits, key)

    # Only rules that may win some fact are counted further.
    wins = _best_score(part, length)[rule] > score_to_beat[fact]
    is_kept = torch.zeros_like(key, dtype=torch.bool)
    is_kept = is_kept.index_fill(0, rule[wins], True)
    row = true_rows(is_kept[rule])
    rule = (torch.cumsum(is_kept, 0) - 1)[rule[row]]
    facts = rule, fact[row], entry[row]
    found = _found_rules(
        edges, sample, length, select_rows(part, is_kept), facts
    )
    return above_thresholds(found, *thresholds)


def _best_score(table: RuleTable, length: int) -> Tensor:
    """Compute the score that each rule would have without circular support, an upper bound of its score."""
    return held_out_score(table.support, 0.0, table.n_pairs, length)


def _found_rules(
    edges: EdgeIndex,
    sample: BodySample,
    length: int,
    table: RuleTable,
    facts: paths.RuleFacts,
) -> FoundRules:
    """Return the rules of a table with their further counts; PCA pairs are counted unless sources were sampled."""
    pairs = sample.pairs
    rule, fact, entry = facts
    body_code = pairs.body_code[table.body]
    labels = path_labels(table.predicate, body_code, length, edges.n_labels)
    circular = paths.is_circular(
        edges, fact, labels[rule, 1 : 1 + length], pairs.n_paths[entry]
    )
    n_circular = torch.bincount(
        rule, circular.double(), minlength=len(table.body)
    )
    n_paths = torch.bincount(
        pairs.body, pairs.n_paths.double(), minlength=len(pairs.body_code)
    )
    pca_pairs = torch.full_like(table.support, torch.nan)
    if sample.fraction == 1:
        pca_pairs = _count_pca_pairs(edges, pairs, table)
    found = paths.make_rules(
        edges,
        labels,
        (table.support, n_circular, table.n_pairs, pca_pairs),
        cost=_walk_rows(
            edges, sample, body_code, n_paths[table.body] / sample.fraction
        ),
    )
    return FoundRules(found, fact[~circular], rule[~circular])


def _count_pca_pairs(
    edges: EdgeIndex, pairs: JoinedPairs, table: RuleTable
) -> Tensor:
    """Count, per rule, the pairs of its body whose source is a first argument of the head's predicate."""
    has_rule = torch.zeros_like(pairs.body_code, dtype=torch.bool)
    has_rule = has_rule.index_fill(0, table.body, True)
    row = true_rows(has_rule[pairs.body])
    key, number = row_index.unique_inverse(
        pairs.body[row] * edges.n_entity_ids + pairs.source[row]
    )
    return paths.sum_by_subject(
        edges,
        key // edges.n_entity_ids,
        key % edges.n_entity_ids,
        torch.bincount(number).double(),
        table.body * edges.n_predicates + table.predicate,
        len(pairs.body_code),
    )


def _walk_rows(
    edges: EdgeIndex, sample: BodySample, code: Tensor, n_paths: Tensor
) -> Tensor:
    """Return the rows that walking along each body of a sample takes: its paths and those of its prefixes."""
    prefixes = sample.prefixes
    if not len(prefixes.code):
        return n_paths
    row = torch.searchsorted(prefixes.code, code // edges.n_labels)
    return n_paths + prefixes.walk_rows[row]


def _promise(edges: EdgeIndex, bodies: Bodies, length: int) -> Tensor:
    """Compute, per body, an upper bound of the support of rules whose bodies begin with it, divided by its pairs.

    The support is at most the number of facts of some predicate whose first argument has the first label.
    """
    first_label = bodies.code // edges.n_labels ** (length - 1)
    key = edges.starts.keys
    source = key // edges.n_labels
    label = key % edges.n_labels
    has_label = paths.ones_matrix(
        source, label, (edges.n_entity_ids, edges.n_labels)
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
    _, label, n_both = paths.multiply(n_facts, has_label)
    none = torch.zeros(edges.n_labels, device=key.device)
    bound = none.scatter_reduce(0, label, n_both, "amax")
    return bound[first_label].double() / (bodies.n_pairs + SMOOTHING_COUNT)


def _extend_block(
    edges: EdgeIndex,
    block: PathBlock,
    sources: SourceRange,
    budget: Budget,
) -> Iterator[tuple[JoinedPairs, float]]:
    """Yield the pairs of a block's bodies extended by every label, and the share of the sources."""
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
    """Yield the pairs of a block's bodies extended by a few labels at a time, and the share of the sources."""
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


# -- counts of path rules


# sums over sources, per rule: support, body pairs and PCA pairs
RuleSums = tuple[Tensor, Tensor, Tensor]


def iter_counts(
    edges: EdgeIndex,
    labels: I64[Tensor, "R 6"],
    length: int,
    sources: SourceRange,
    budget: Budget,
) -> Iterator[tuple[RuleSums, paths.RuleFacts]]:
    """Yield counts of path rules over parts of a range of sources, with the facts that the rules derive there.

    Args:
      labels: as in `MinedRules`.
      length: number of body atoms.
      budget: pays for the walks.

    Yields:
      The sums, and pairs of a rule and a fact that it derives, circular ones too, with the number of paths.
    """
    body_code = labels[:, 1]
    for label in labels[:, 2 : 1 + length].unbind(1):
        body_code = body_code * edges.n_labels + label
    codes, body = row_index.unique_inverse(body_code)
    key, order = row_index.sort_keys(
        body * edges.n_predicates + labels[:, 0] // 2
    )
    # of each rule in the order of keys, and its body
    number, key_body = order.argsort(), key // edges.n_predicates
    for block in paths.walk_in_parts(
        edges, codes, length, sources, budget.spend
    ):
        # Number the bodies of the block as those of all rules are.
        code = torch.searchsorted(codes, block.body_code)
        block = block._replace(body_code=codes, row_body=code[block.row_body])
        hits = find_hits(edges, paths.joined_pairs(block))
        rule, fact, entry = match_facts(edges, hits, key)
        support = torch.bincount(rule, minlength=len(key)).double()
        n_pairs = torch.bincount(block.entry_body, minlength=len(codes))
        row_pairs = torch.bincount(
            block.entry_row, minlength=len(block.row_body)
        )
        pca_pairs = paths.sum_by_subject(
            edges,
            block.row_body,
            block.row_source,
            row_pairs.double(),
            key,
            len(codes),
        )
        body_pairs = n_pairs[key_body].double()
        sums = support[number], body_pairs[number], pca_pairs[number]
        yield sums, (order[rule], fact, block.n_paths[entry])


def count_path_rules(
    edges: EdgeIndex,
    rules: MinedRules,
    priority: F32[Tensor, "C1"],
    budget: Budget,
    share: float,
) -> Iterator[FoundRules]:
    """Yield path rules of at most three body atoms with exact counts, part by part, until the budget's share is spent.

    Args:
      rules: their counts are not read.
      priority: a random number in [0, 1) for each entity.
      budget: pays for the work.
    """
    for first, last in paths.pack(rules.cost, CHUNK_ROWS):
        lengths = rules.body_length[first:last]
        for length in torch.unique(lengths).tolist():
            rows = first + true_rows(lengths == length)
            some = select_rows(rules, rows)
            body = some.labels[:, 1 : 1 + length]
            zeros = torch.zeros_like(some.cost)
            parts = [(zeros, zeros, zeros, zeros, rows[:0], rows[:0])]
            for sums, (rule, fact, n_paths) in iter_counts(
                edges, some.labels, length, SourceRange(priority), budget
            ):
                if budget.is_exhausted(share):
                    return
                circular = paths.is_circular(edges, fact, body[rule], n_paths)
                n_circular = torch.bincount(
                    rule, circular.double(), minlength=len(rows)
                )
                facts = fact[~circular], rule[~circular]
                parts.append((*sums, n_circular, *facts))
            *sums, facts, numbers = zip(*parts)
            support, body_pairs, pca_pairs, n_circular = (
                torch.stack(column).sum(0) for column in sums
            )
            counts = support, n_circular, body_pairs, pca_pairs
            counted = paths.make_rules(edges, some.labels, counts, some.cost)
            yield FoundRules(counted, torch.cat(facts), torch.cat(numbers))


# -- rules with constants


class _Features(NamedTuple):
    """Features (edges) of entities, grouped by entity."""

    offsets: Tensor  # features of entity e: offsets[e] to offsets[e + 1]
    code: Tensor  # label * n_entity_ids + target; 0 for any target
    number: Tensor  # which distinct feature each is
    n_entities: Tensor  # how many entities have each distinct feature


class ConstantSearch(NamedTuple):
    """Heads and bodies to combine into rules with constants."""

    heads: I64[Tensor, "n"]  # edges, grouped by what they are a head of
    # what each edge is a head of: label and target, or a predicate whose two arguments are equal
    head_code: I64[Tensor, "n"]
    bodies: tuple[_Features, ...]  # labels alone, and with targets
    # how many bodies of either shape the source of each head edge has
    n_bodies: tuple[I64[Tensor, "n"], ...]

    @property
    def n_rows(self) -> float:
        """Return the number of rows that the search computes."""
        return float(sum(n.sum() for n in self.n_bodies))


def plan_search(edges: EdgeIndex, min_support: int) -> ConstantSearch:
    """Select the heads and bodies that enough entities have."""
    code = _edge_code(edges)
    label_code = edges.label * edges.n_entity_ids
    is_first = row_index.first_of_run(
        edges.source * edges.n_labels + edges.label
    )
    label_features = _frequent_features(
        edges.source[is_first], label_code[is_first], edges, min_support
    )
    edge_features = _frequent_features(edges.source, code, edges, min_support)

    # Heads: edges whose label and target are frequent, the most frequent first.
    is_loop = (edges.source == edges.target) & (edges.label % 2 == 0)
    loop = true_rows(is_loop)
    head = torch.cat([row_numbers(code), loop])
    head_code = torch.cat([code, _first_loop_code(edges) + edges.label[loop]])
    _, count = _count_values(head_code)
    row = row_index.sort_rows(true_rows(count >= min_support), head_code)
    row = row[row_index.best_first(count[row])]
    head = head[row]
    bodies = (label_features, edge_features)
    n_bodies = (
        row_index.spans(of.offsets, edges.source[head]).length for of in bodies
    )
    return ConstantSearch(head, head_code[row], bodies, tuple(n_bodies))


def find_constant_rules(
    edges: EdgeIndex, search: ConstantSearch, budget: Budget
) -> Iterator[FoundRules]:
    """Yield the rules of all heads and bodies, block by block; each rule is in one block."""
    code = search.head_code
    for bodies, n_bodies in zip(search.bodies, search.n_bodies):
        for first, last in paths.pack_runs(code, n_bodies, CHUNK_ROWS):
            block = search.heads[first:last]
            yield _rules_of_block(edges, bodies, block, code[first:last])
            budget.spend(float(n_bodies[first:last].sum()))


def count_pca_pairs(
    edges: EdgeIndex, rules: MinedRules, budget: Budget
) -> Iterator[tuple[slice, F64[Tensor, "r"]]]:
    """Yield the PCA pairs of rules with constants, part by part in their order, until the budget is spent.

    PCA pairs are pairs of the rule whose first argument has some fact of the head's predicate.
    """
    # The entities of every feature, by feature.
    is_first = row_index.first_of_run(
        edges.source * edges.n_labels + edges.label
    )
    label_code = edges.label * edges.n_entity_ids
    code, order = row_index.sort_keys(
        torch.cat([_edge_code(edges), label_code[is_first]])
    )
    entity = torch.cat([edges.source, edges.source[is_first]])[order]
    body_code = (
        rules.labels[:, 1] * edges.n_entity_ids + rules.end_constants[:, 1]
    )
    start = torch.searchsorted(code, body_code)
    count = rules.body_pairs.long()
    for first, last in paths.pack(rules.body_pairs, CHUNK_ROWS):
        if budget.is_exhausted():
            return
        part = slice(first, last)
        rule, position = expand_ranges(start[part], count[part])
        label = rules.labels[part, 0]
        key = entity[position] * edges.n_labels + label[rule]
        has_fact, _ = paths.find_keys(edges.starts, key)
        total = torch.bincount(rule[has_fact], minlength=last - first)

        # Of h(c, X) the first argument is c, which has a fact wherever one is derived.
        pairs = torch.where(label % 2 == 0, total, count[part]).double()
        budget.spend(float(rules.body_pairs[part].sum()))
        yield part, pairs


def _edge_code(edges: EdgeIndex) -> Tensor:
    """Return label and target of each edge as one integer."""
    return edges.label * edges.n_entity_ids + edges.target


def _first_loop_code(edges: EdgeIndex) -> int:
    """Return the least code of a head h(X, X), above the codes of labels and targets."""
    return edges.n_labels * edges.n_entity_ids


def _frequent_features(
    source: Tensor, code: Tensor, edges: EdgeIndex, min_support: int
) -> _Features:
    """Return the features that enough entities have, in the order of entities."""
    _, count = _count_values(code)
    is_frequent = count >= min_support
    source = source[is_frequent]
    code = code[is_frequent]
    number, _ = _count_values(code)
    entities = count_to(edges.n_entity_ids + 1, code)
    return _Features(
        torch.searchsorted(source, entities),
        code,
        number,
        torch.bincount(number),
    )


def _count_values(code: Tensor) -> tuple[Tensor, Tensor]:
    """Return, per element, the number of its distinct value and how often that value occurs."""
    number = row_index.unique_inverse(code).inverse
    return number, torch.bincount(number)[number]


def _rules_of_block(
    edges: EdgeIndex, bodies: _Features, head_edges: Tensor, head_code: Tensor
) -> FoundRules:
    """Build the rules of a block of heads, with all edges of each head."""
    of_edge = row_index.spans(bodies.offsets, edges.source[head_edges])
    row, feature = expand_ranges(*of_edge)
    edge = head_edges[row]

    # A rule does not derive its head from the same atom.
    code = head_code[row]
    differs = true_rows(code != bodies.code[feature])
    edge, feature, code = edge[differs], feature[differs], code[differs]
    head_number, _ = _count_values(code)
    has_twice = code >= _first_loop_code(edges)

    # Number the pairs of head and body; count their facts.
    pair = head_number * len(bodies.n_entities) + bodies.number[feature]
    rule = row_index.unique_inverse(pair).inverse
    support = torch.bincount(rule)
    is_circular = _is_circular(edges, edge, bodies.code[feature], has_twice)
    circular_support = torch.bincount(
        rule, is_circular.double(), minlength=len(support)
    )

    # Any pair of a rule tells its labels and constants.
    rows = row_numbers(rule)
    example = torch.zeros_like(support).scatter(0, rule, rows)
    head = edge[example]
    body_code = bodies.code[feature[example]]
    labels = torch.stack(
        [edges.label[head], body_code // edges.n_entity_ids], 1
    )
    head_end = edges.target[head].masked_fill(has_twice[example], SAME_ENTITY)
    constants = torch.stack([head_end, body_code % edges.n_entity_ids], 1)
    body_pairs = bodies.n_entities[bodies.number[feature[example]]].double()
    rules = paths.make_rules(
        edges,
        pad(labels, (0, MAX_RULE_ATOMS - 2), value=-1),
        (
            support.double(),
            circular_support,
            body_pairs,
            torch.full_like(body_pairs, torch.nan),
        ),
        cost=body_pairs,
        end_constants=constants,
    )
    derives = true_rows(~is_circular)
    return FoundRules(rules, edges.fact[edge[derives]], rule[derives])


def _is_circular(
    edges: EdgeIndex, edge: Tensor, code: Tensor, has_twice: Tensor
) -> Tensor:
    """Check, per row, whether the body holds through the head's own fact alone.

    A body h(X, Z) holds through h(X, c) alone where X has no other edge of the label. Walked the other way, the fact
    h(c, c) is an edge of its own: a body of that label and target, or with no other edge of that label, is it again.
    For a head h(X, X) the body h(X, c) is that fact where X is c.

    Args:
      has_twice: the head is h(X, X).
    """
    label = code // edges.n_entity_ids
    constant = code % edges.n_entity_ids
    source = edges.source[edge]
    is_loop = edges.target[edge] == source
    is_same_fact_reversed = is_loop & (label == edges.label[edge] ^ 1)
    is_same_fact = (label == edges.label[edge]) | is_same_fact_reversed

    row, start = paths.find_keys(edges.starts, source * edges.n_labels + label)
    n_edges = torch.diff(edges.starts.offsets)[start]
    is_only_edge = torch.zeros_like(is_loop)
    is_only_edge = is_only_edge.index_copy(0, row, n_edges == 1)
    may_be_it = is_same_fact_reversed | has_twice
    is_it_again = may_be_it & (constant == source)
    return is_same_fact & torch.where(constant == 0, is_only_edge, is_it_again)


# -- rules of long bodies

# Ends of the ranges of sources. The first one is for all rules, the others are for one batch after the other.
RANGE_ENDS = (1 / 64, 1 / 16, 1 / 4, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LongPathSearch:
    """Search that counts path rules of one length, too long to be found by extending bodies.

    The rules come with the facts that they derive from other facts (see `paths.iter_closed_rules`). With s of these,
    and w pairs of the body that are no facts of the head, the smoothed confidence of a rule of n atoms with one fact
    unknown is

        (s - 1) / (s - 1 + w + SMOOTHING_COUNT * n)

    The wrong pairs w are counted from one range of the sources after the other. What is counted so far bounds the score
    from above, and a rule that can no longer be among the best of any of its facts, or reach the minimum confidence, is
    dropped: no rule is lost by it. After the first range the rules are counted in batches, those with the best expected
    scores first, so that every batch raises what the next ones must exceed.
    """

    edges: EdgeIndex
    length: int  # number of body atoms
    priority: F32[Tensor, "C1"]  # a random number in [0, 1) for each entity
    thresholds: tuple[float, float]  # the least support and confidence
    budget: Budget
    share: float  # of the budget, at which the search ends

    def select_promising(
        self, closed: FoundRules, score_to_beat: F64[Tensor, "N"]
    ) -> FoundRules:
        """Return the rules that may still be above the thresholds and among the best of some fact.

        Args:
          score_to_beat: of each fact, what the score of a rule must exceed to be among its best.
        """
        above = above_thresholds(closed, *self.thresholds)
        score = held_out_smoothed_confidence(above.rules)
        least = torch.full_like(score, torch.inf)
        least = least.scatter_reduce(
            0, above.rule, score_to_beat[above.fact], "amin"
        )
        return keep(above, score > least)

    def count_range(
        self, closed: FoundRules, low: float, high: float
    ) -> FoundRules | None:
        """Return the rules with counts from one more range of sources added; None if the budget's share is spent."""
        rules = closed.rules
        total = torch.zeros_like(rules.cost).expand(3, -1)
        for sums, _ in iter_counts(
            self.edges,
            rules.labels,
            self.length,
            SourceRange(self.priority, low, high),
            self.budget,
        ):
            if self.budget.is_exhausted(self.share):
                return None
            total = total + torch.stack(sums)
        support, body_pairs, pca_pairs = total
        # What they derive from other facts stays.
        counted = rules._replace(
            support=rules.support + support,
            circular_support=rules.circular_support + support,
            body_pairs=rules.body_pairs + body_pairs,
            pca_pairs=rules.pca_pairs + pca_pairs,
        )
        return closed._replace(rules=counted)

    def iter_batches(self, closed: FoundRules) -> Iterator[FoundRules]:
        """Yield batches of rules that were counted from the first range, the most promising first."""
        rules = closed.rules
        n_wrong = (rules.body_pairs - rules.support) / RANGE_ENDS[0]
        expected = held_out_score(
            rules.n_derived, 0.0, rules.n_derived + n_wrong, self.length
        )
        order = row_index.best_first(expected)
        cost = expected_rows(closed)[order]
        # Bodies of a large batch share more of their prefixes.
        for first, last in paths.pack(cost, 64 * CHUNK_ROWS):
            in_batch = torch.zeros_like(cost, dtype=torch.bool)
            yield keep(closed, in_batch.index_fill(0, order[first:last], True))

    def find_rules(
        self, batch: FoundRules, score_to_beat: F64[Tensor, "N"]
    ) -> FoundRules | None:
        """Return the rules of a batch that are above the thresholds and may be among the best of some fact.

        Their counts are exact.

        Args:
          batch: rules with their counts from the first range of sources.
          score_to_beat: of each fact, what the score of a rule must exceed to be among its best.

        Returns:
          The rules; None if the share of the budget is spent before they are counted.
        """
        closed = batch
        for low, high in pairwise(RANGE_ENDS):
            promising = self.select_promising(closed, score_to_beat)
            counted = self.count_range(promising, low, high)
            if counted is None:
                return None
            closed = counted

        return above_thresholds(closed, *self.thresholds)


def expected_rows(closed: FoundRules) -> F64[Tensor, "R"]:
    """Estimate the body pairs of each rule from the first range of sources."""
    return (closed.rules.body_pairs + 1) / RANGE_ENDS[0]
