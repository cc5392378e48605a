"""Counts of given path rules: from all sources, or from a random sample of them with standard errors.

The rules were chosen by other counts. So that the choice does not bias the counts that are written, a rule that was
chosen by a sample is counted here again: from all sources if the work allows it, else from a sample that does not
depend on the first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.types import F32, F64, I64
from funcppo.kg.logic import row_index, sorting
from funcppo.kg.mining import circularity, path_rules, paths
from funcppo.kg.mining.budget import Budget
from funcppo.kg.mining.mined_rules import FoundRules, MinedRules
from funcppo.kg.mining.paths import (
    CHUNK_ROWS,
    EdgeIndex,
    PathBlock,
    SourceRange,
)


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
    body_code, body = sorting.unique_inverse(code)
    block = paths.walk(edges, body_code, length, sources)

    key, order = sorting.sort_keys(
        body * edges.n_predicates + labels[:, 0] // 2
    )
    hits = path_rules.find_hits(edges, paths.joined_pairs(block))
    facts = path_rules.match_facts(edges, hits, key)
    facts = facts._replace(rule=order[facts.rule])
    circular = circularity.is_circular(
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
    key, number = sorting.unique_inverse(pairs[0] * n_columns + pairs[1])
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
    key, order = sorting.sort_keys(
        total.row * edges.n_predicates + total.column
    )
    position, found = row_index.binary_search(key, rule_key)
    row = found.nonzero().squeeze(1)
    zeros = torch.zeros(len(rule_key), dtype=value.dtype, device=value.device)
    return zeros.index_copy(0, row, total.value[order[position[row]]])
