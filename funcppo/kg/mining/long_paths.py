"""Path rules longer than those found by extending bodies: which of them may be kept, and their exact counts.

The rules come with the facts that they derive from other facts (see `closing`). With s of these, and w pairs of the
body that are no facts of the head, the smoothed confidence of a rule of n atoms with one fact unknown is

    (s - 1) / (s - 1 + w + SMOOTHING_COUNT * n)

The wrong pairs w are counted from one range of the sources after the other. What is counted so far bounds the score
from above, and a rule that can no longer be among the best of any of its facts, or reach the minimum confidence, is
dropped: no rule is lost by it. After the first range the rules are counted in batches, those with the best expected
scores first, so that every batch raises what the next ones must exceed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.types import F32, F64, I64, Bool
from funcppo.kg.logic import row_index
from funcppo.kg.mining import closing, path_rules, paths
from funcppo.kg.mining.mined_rules import (
    Budget,
    FoundRules,
    MinedRules,
    Thresholds,
    above_thresholds,
    held_out_score,
    path_labels,
)
from funcppo.kg.mining.paths import (
    CHUNK_ROWS,
    EdgeIndex,
    PathBlock,
    SourceRange,
)

# Ends of the ranges of sources. The first one is for all rules, the others are for one batch after the other.
RANGE_ENDS = (1 / 64, 1 / 16, 1 / 4, 1.0)
# Expected pairs of a batch: bodies of a large batch share more of their prefixes.
BATCH_ROWS = 64 * CHUNK_ROWS


class PairCounts(NamedTuple):
    """Counts of rules from some sources."""

    support: F64[Tensor, "R"]  # circular support included
    body_pairs: F64[Tensor, "R"]
    pca_pairs: F64[Tensor, "R"]


class CountedRules(NamedTuple):
    """Rules, and their counts so far."""

    closed: closing.ClosedRules
    counts: PairCounts


@dataclass(frozen=True, kw_only=True, slots=True)
class LongPathSearch:
    """What counting the rules of one length reads."""

    edges: EdgeIndex
    length: int  # number of body atoms
    priority: F32[Tensor, "C1"]  # a random number in [0, 1) for each entity
    thresholds: Thresholds
    budget: Budget
    share: float  # of the budget, at which the search ends

    def select_promising(
        self, rules: CountedRules, score_to_beat: F64[Tensor, "N"]
    ) -> CountedRules:
        """The rules that may still be above the thresholds and among the best of some fact.

        Args:
          score_to_beat: of each fact, what the score of a rule must exceed to be among its best.
        """
        closed, counts = rules
        n_wrong = counts.body_pairs - counts.support
        n_pairs = closed.support + n_wrong
        least = torch.full_like(closed.support, torch.inf)
        least = least.scatter_reduce(
            0, closed.rule, score_to_beat[closed.fact], "amin"
        )
        is_kept = (
            (closed.support >= self.thresholds.min_support)
            & (closed.support >= self.thresholds.min_confidence * n_pairs)
            & (self._score(rules) > least)
        )
        return _select(rules, is_kept)

    def count_first(self, rules: CountedRules) -> CountedRules | None:
        """The rules with their counts from the first range of the sources; None if the share of the budget is spent."""
        return self._count_range(rules, 0.0, RANGE_ENDS[0])

    def iter_batches(self, rules: CountedRules) -> Iterator[CountedRules]:
        """Yield batches of rules that were counted from the first range, the most promising first."""
        expected = self._score(rules, RANGE_ENDS[0])
        order = torch.sort(expected, descending=True, stable=True).indices
        cost = expected_rows(rules)[order]
        for first, last in paths.pack(cost, BATCH_ROWS):
            in_batch = torch.zeros_like(cost, dtype=torch.bool)
            yield _select(
                rules, in_batch.index_fill(0, order[first:last], True)
            )

    def find_rules(
        self, batch: CountedRules, score_to_beat: F64[Tensor, "N"]
    ) -> FoundRules | None:
        """Those of a batch that are above the thresholds and may be among the best of some fact, counted exactly.

        Args:
          batch: rules with their counts from the first range of sources.
          score_to_beat: of each fact, what the score of a rule must exceed to be among its best.

        Returns:
          The rules; None if the share of the budget is spent before they are counted.
        """
        rules = batch
        for low, high in pairwise(RANGE_ENDS):
            promising = self.select_promising(rules, score_to_beat)
            counted = self._count_range(promising, low, high)
            if counted is None:
                return None
            rules = counted
        return above_thresholds(self._found_rules(rules), self.thresholds)

    def _score(self, rules: CountedRules, fraction: float = 1.0) -> Tensor:
        """The score of each rule if the sources counted are a fraction of all: at most, if 1."""
        support = rules.closed.support
        n_wrong = (rules.counts.body_pairs - rules.counts.support) / fraction
        return held_out_score(support, 0.0, support + n_wrong, self.length)

    def _count_range(
        self, rules: CountedRules, low: float, high: float
    ) -> CountedRules | None:
        """The rules with the counts from one more range of the sources; None if the share of the budget is spent."""
        closed = rules.closed
        body_code, body = row_index.unique_inverse(closed.body_code)
        key, order = row_index.sort_keys(
            body * self.edges.n_predicates + closed.predicate
        )
        none = torch.zeros_like(closed.support)
        counts = PairCounts(none, none, none)
        for block in paths.walk_in_parts(
            self.edges,
            body_code,
            self.length,
            SourceRange(self.priority, low, high),
            self.budget.spend,
        ):
            if self.budget.is_exhausted(self.share):
                return None
            # Number the bodies of the block as those of all rules are.
            code = torch.searchsorted(body_code, block.body_code)
            block = block._replace(
                body_code=body_code, row_body=code[block.row_body]
            )
            part = _count_block(self.edges, block, key)
            counts = PairCounts(*(a + b for a, b in zip(counts, part)))

        position = path_rules.inverse(order)
        columns = zip(rules.counts, counts)
        return CountedRules(
            closed, PairCounts(*(a + b[position] for a, b in columns))
        )

    def _found_rules(self, rules: CountedRules) -> FoundRules:
        """Rules that were counted from all sources."""
        closed, counts = rules
        edges = self.edges
        labels = path_labels(
            closed.predicate, closed.body_code, self.length, edges.n_labels
        )
        zeros = torch.zeros_like(closed.support)
        mined = MinedRules(
            labels=labels,
            end_constants=torch.zeros_like(labels[:, :2]),
            support=counts.support,
            circular_support=counts.support - closed.support,
            body_pairs=counts.body_pairs,
            pca_pairs=counts.pca_pairs,
            head_facts=path_rules.head_facts(edges, labels),
            std_error=zeros,
            pca_std_error=zeros,
        )
        return FoundRules(mined, zeros, closed.fact, closed.rule)


def without_counts(closed: closing.ClosedRules) -> CountedRules:
    """Rules without counts of pairs."""
    none = torch.zeros_like(closed.support)
    return CountedRules(closed, PairCounts(none, none, none))


def concatenate_rules(parts: Sequence[CountedRules]) -> CountedRules:
    """All rules of some tables."""
    counts = zip(*(part.counts for part in parts))
    return CountedRules(
        closing.concatenate_closed([part.closed for part in parts]),
        PairCounts(*(torch.cat(columns) for columns in counts)),
    )


def _select(rules: CountedRules, is_kept: Bool[Tensor, "R"]) -> CountedRules:
    """Some of the rules."""
    return CountedRules(
        closing.select_closed(rules.closed, is_kept),
        PairCounts(*(column[is_kept] for column in rules.counts)),
    )


def expected_rows(rules: CountedRules) -> F64[Tensor, "R"]:
    """The pairs of the body of each rule, as the first range of the sources has them."""
    return (rules.counts.body_pairs + 1) / RANGE_ENDS[0]


def _count_block(
    edges: EdgeIndex, block: PathBlock, rule_key: I64[Tensor, "R"]
) -> PairCounts:
    """The counts of rules over the sources of a block.

    Args:
      rule_key: body * n_predicates + predicate of each rule, ascending.
    """
    hits = path_rules.find_hits(edges, paths.joined_pairs(block))
    facts = path_rules.match_facts(edges, hits, rule_key)
    n_bodies = len(block.body_code)
    n_pairs = torch.bincount(block.entry_body, minlength=n_bodies).double()
    row_pairs = torch.bincount(
        block.entry_row, minlength=len(block.row_body)
    ).double()
    return PairCounts(
        support=torch.bincount(facts.rule, minlength=len(rule_key)).double(),
        body_pairs=n_pairs[rule_key // edges.n_predicates],
        pca_pairs=path_rules.sum_by_subject(edges, block, row_pairs, rule_key),
    )
