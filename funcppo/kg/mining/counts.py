"""Rules with their counts, the scores that follow from them, and the rules that facts vote for.

With pairs(r) the distinct heads that rule r derives from the facts,

    body_pairs = |pairs(r)|                     support = |pairs(r) and facts|
    confidence = support / body_pairs           head coverage = support / facts of the head's predicate
    circular   = facts among them that r derives only from bodies which hold the fact itself
    leave-one-out confidence = (support - circular) / (body_pairs - circular)
    PCA confidence = support / |{(x, y) in pairs(r) : the head's predicate has a fact (x, y')}|
    smoothed confidence = (support - circular) / (body_pairs - circular + SMOOTHING_COUNT * body atoms)

A longer body is one of many more, and the best of many looks better than it is: where an atom more makes B times as
many bodies, log B wrong pairs more bound the confidence of a rule that was never wrong; SMOOTHING_COUNT is log 150.

Every fact votes for the rules with the highest scores that derive it from other facts. A rule without a vote is
redundant: wherever it is right, another rule is, with no less confidence. Of two equal rules the one that was found
first gets the vote.

Sources: Galárraga et al. 2013, AMIE; Lajus et al. 2020, AMIE 3 (head coverage, PCA confidence); Meilicke et al. 2019,
AnyBURL (smoothing by a number of unseen wrong predictions).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from funcppo.core.host import Clock
from funcppo.core.types import F64, I64, Bool
from funcppo.kg.logic import row_index
from funcppo.kg.logic.row_index import (
    best_first,
    concatenate,
    count_to,
    select_rows,
    sort_rows,
    true_rows,
)
from funcppo.kg.mining import MAX_PATH_LENGTH

# Receives what is being done, and how much of it is done; both numbers are 0 where that is not known.
ProgressCallback = Callable[[str, float, float], object]
# wrong pairs added to the counts of a rule for each atom of its body
SMOOTHING_COUNT = 5.0
# in place of the constant that a head ends in: it ends where it begins, h(X, X)
SAME_ENTITY = -1
MAX_RULE_ATOMS = MAX_PATH_LENGTH + 1  # atoms of the longest rule, head included


def ignore_progress(stage: str, done: float, total: float) -> None:
    """Ignore the arguments: the default progress callback."""


@dataclass(kw_only=True, slots=True)
class Budget:
    """Limits on the work and the time of one search, and how much of them is spent."""

    max_rows: int
    """Rows that may be computed."""
    seconds: float
    """Time that may pass."""
    progress: ProgressCallback = ignore_progress
    """Called with what is being done."""
    clock: Clock = time.perf_counter
    """Measures the time."""
    rows: float = 0.0
    """Rows computed so far."""
    was_late: bool = False
    """Whether time, and not work, ended some part."""
    _start: float = field(init=False)
    _stage: str = ""
    _stage_start: float = 0.0
    _stage_rows: float = 0.0

    def __post_init__(self) -> None:
        """Start the clock."""
        self._start = self.clock()

    @property
    def elapsed(self) -> float:
        """Return the seconds since the start."""
        return self.clock() - self._start

    def start_stage(self, name: str, expected_rows: float) -> None:
        """Report the next stage and the work that it is expected to take."""
        self._stage = name
        self._stage_start = self.rows
        self._stage_rows = expected_rows
        self.progress(name, 0.0, expected_rows)

    def spend(self, n_rows: float) -> None:
        """Add rows of work that was done."""
        self.rows += n_rows
        done = self.rows - self._stage_start
        total = max(self._stage_rows, done)
        self.progress(self._stage, done, total)

    def rows_left(self, share: float = 1.0) -> float:
        """Return how many rows may be computed until this share of the work is spent; at least 0."""
        return max(0.0, share * self.max_rows - self.rows)

    @property
    def spent_share(self) -> float:
        """Return the larger of the spent shares of work and time; the first half of the time is free."""
        return max(self.rows / self.max_rows, self._time_share)

    def is_late(self, share: float = 1.0) -> bool:
        """Check whether this share of the time is spent; if so, record that time ended some part."""
        late = self._time_share >= share
        self.was_late |= late
        return late

    def is_exhausted(self, share: float = 1.0) -> bool:
        """Check whether this share of the work or of the time is spent."""
        return self.is_late(share) or self.rows >= share * self.max_rows

    @property
    def _time_share(self) -> float:
        # Work is planned for half of the time; only a slow machine needs more.
        return 2 * self.elapsed / self.seconds - 1


class MinedRules(NamedTuple):
    """Rules and their counts, one row per rule."""

    # label of the head, from X, and labels of the body's edges, from X; -1 for none
    labels: I64[Tensor, "R 6"]
    # constants that the head (or `SAME_ENTITY`) and a body of one edge end in; 0 for a variable
    end_constants: I64[Tensor, "R 2"]
    support: F64[Tensor, "R"]
    circular_support: F64[Tensor, "R"]
    body_pairs: F64[Tensor, "R"]
    pca_pairs: F64[Tensor, "R"]  # NaN where they were not counted
    head_facts: F64[Tensor, "R"]
    cost: F64[Tensor, "R"]  # rows that counting the rule again takes

    @property
    def n_derived(self) -> F64[Tensor, "R"]:
        """Return the number of facts that each rule derives from other facts."""
        return self.support - self.circular_support

    @property
    def n_other_pairs(self) -> F64[Tensor, "R"]:
        """Return the number of each rule's body pairs without circular support."""
        return self.body_pairs - self.circular_support

    @property
    def body_length(self) -> I64[Tensor, "R"]:
        """Return the number of body atoms of each rule."""
        return (self.labels[:, 1:] >= 0).sum(1)


class FoundRules(NamedTuple):
    """Rules, and the facts that they derive from other facts."""

    rules: MinedRules
    fact: I64[Tensor, "n"]  # pairs of a fact and a rule that derives it
    rule: I64[Tensor, "n"]


def concatenate_found(parts: Sequence[FoundRules]) -> FoundRules:
    """Return the rules of all parts, at least one, and the facts that they derive, in one table."""
    sizes = torch.tensor([len(part.rules.cost) for part in parts])
    first = (torch.cumsum(sizes, 0) - sizes).tolist()
    return FoundRules(
        concatenate([part.rules for part in parts]),
        torch.cat([part.fact for part in parts]),
        torch.cat([part.rule + n for part, n in zip(parts, first)]),
    )


def keep(found: FoundRules, is_kept: Bool[Tensor, "R"]) -> FoundRules:
    """Return the rules where the mask is true, and the facts that they derive."""
    row = true_rows(is_kept[found.rule])
    new_number = torch.cumsum(is_kept, 0) - 1
    return FoundRules(
        select_rows(found.rules, is_kept),
        found.fact[row],
        new_number[found.rule[row]],
    )


def above_thresholds(
    found: FoundRules, min_support: float, min_confidence: float
) -> FoundRules:
    """Return the rules of enough support and confidence, circular support left out."""
    rules = found.rules
    return keep(
        found,
        (rules.n_derived >= min_support)
        & (leave_one_out_confidence(rules) >= min_confidence),
    )


def path_labels(
    predicate: I64[Tensor, "R"],
    body_code: I64[Tensor, "R"],
    length: int,
    n_labels: int,
) -> I64[Tensor, "R 6"]:
    """Return the labels of path rules, given head predicates (from 0) and codes of bodies of one length."""
    columns = [
        body_code // n_labels**power % n_labels
        for power in reversed(range(length))
    ]
    labels = torch.stack([2 * predicate, *columns], 1)
    return pad(labels, (0, MAX_RULE_ATOMS - 1 - length), value=-1)


def held_out_score(
    support: F64[Tensor, "R"],
    circular_support: F64[Tensor, "R"] | float,
    body_pairs: F64[Tensor, "R"],
    length: I64[Tensor, "R"] | int,
) -> F64[Tensor, "R"]:
    """Compute the smoothed confidence of each rule as if one fact that it derives from other facts were unknown."""
    right = support - circular_support - 1
    pairs = body_pairs - circular_support - 1
    return right / (pairs + SMOOTHING_COUNT * length)


def confidence(rules: MinedRules) -> F64[Tensor, "R"]:
    """Compute the confidence of each rule, support / body_pairs."""
    return rules.support / rules.body_pairs.clamp_min(1)


def leave_one_out_confidence(rules: MinedRules) -> F64[Tensor, "R"]:
    """Compute, per rule, (support - circular) / (body_pairs - circular)."""
    return rules.n_derived / rules.n_other_pairs.clamp_min(1)


def smoothed_confidence(rules: MinedRules) -> F64[Tensor, "R"]:
    """Compute the smoothed confidence of each rule."""
    n_pairs = rules.n_other_pairs + SMOOTHING_COUNT * rules.body_length
    return rules.n_derived / n_pairs


def held_out_smoothed_confidence(rules: MinedRules) -> F64[Tensor, "R"]:
    """Compute the smoothed confidence of each rule as if one fact that it derives were unknown."""
    return held_out_score(
        rules.support,
        rules.circular_support,
        rules.body_pairs,
        rules.body_length,
    ).clamp_min(0)


def rule_atoms(rules: MinedRules, n_constants: int) -> I64[Tensor, "R 6 3"]:
    """Return head and body of each rule as ids; variables are numbered from C + 1 by first occurrence."""
    x = torch.full_like(rules.support, n_constants + 1, dtype=torch.int64)
    y = x + 1
    length = rules.body_length

    # The head ends in Y or a constant. A path body ends in Y, a body beside a constant in its own constant or in Y.
    head_constant, body_constant = rules.end_constants.unbind(1)
    has_constant = head_constant != 0
    head_end = torch.where(has_constant, head_constant, y)
    head_end = torch.where(head_constant == SAME_ENTITY, x, head_end)
    constant_body_end = torch.where(body_constant > 0, body_constant, y)
    body_end = torch.where(has_constant, constant_body_end, head_end)

    atoms = [_edge_atom(rules.labels[:, 0], x, head_end)]
    for j in range(1, rules.labels.shape[1]):
        source = x if j == 1 else x + j
        target = torch.where(length == j, body_end, x + j + 1)
        atoms.append(_edge_atom(rules.labels[:, j], source, target))
    return torch.stack(atoms, 1)


def _edge_atom(label: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Return the atom that an edge from source to target stands for; all 0 for label -1."""
    is_backward = label % 2 == 1
    predicate = torch.div(label, 2, rounding_mode="floor") + 1
    first = torch.where(is_backward, target, source)
    second = torch.where(is_backward, source, target)
    atom = torch.stack([predicate, first, second], 1)
    return torch.where(label[:, None] >= 0, atom, 0)


# -- votes


class Votes(NamedTuple):
    """Best rules of each fact so far, best first; `rules` may hold rules without a vote too."""

    rules: MinedRules
    rule: I64[Tensor, "N V"]  # row of `rules`; -1 for none
    score: F64[Tensor, "N V"]  # 0 for none


def no_votes(n_facts: int, votes_per_fact: int, device: torch.device) -> Votes:
    """Return the table in which no fact has voted."""
    score = torch.zeros(
        (n_facts, votes_per_fact), dtype=torch.float64, device=device
    )
    rule = torch.full_like(score, -1, dtype=torch.int64)
    return Votes(no_rules(device), rule, score)


def no_rules(device: torch.device) -> MinedRules:
    """Return a table without rules."""
    count = torch.zeros(0, dtype=torch.float64, device=device)
    labels = torch.zeros((0, MAX_RULE_ATOMS), dtype=torch.int64, device=device)
    columns = [count] * (len(MinedRules._fields) - 2)
    return MinedRules(labels, labels[:, :2], *columns)


def score_to_beat(votes: Votes) -> F64[Tensor, "N"]:
    """Return, per fact, the score that a rule must exceed to get a vote."""
    return votes.score[:, -1]


def add_votes(votes: Votes, found: FoundRules) -> Votes:
    """Update the votes with more rules and the facts that they derive from other facts."""
    score = held_out_smoothed_confidence(found.rules)
    is_better = score[found.rule] > score_to_beat(votes)[found.fact]
    row = true_rows(is_better)
    if not len(row):
        return votes
    changed, fact = row_index.unique_inverse(found.fact[row])
    n_before, n_votes = len(votes.rules.cost), votes.rule.shape[1]

    # The former votes of these facts, then the new ones.
    numbers = count_to(len(changed), fact)
    fact = torch.cat([numbers.repeat_interleave(n_votes), fact])
    rule = torch.cat(
        [votes.rule[changed].flatten(), found.rule[row] + n_before]
    )
    scores = torch.cat([votes.score[changed].flatten(), score[found.rule[row]]])

    # By fact, then by descending score; stable, so that of equal rules the earlier one is first.
    order = sort_rows(best_first(scores), fact)
    first = torch.searchsorted(fact[order], numbers)
    best = order[first[:, None] + count_to(n_votes, fact)]
    grown = Votes(
        concatenate([votes.rules, found.rules]),
        votes.rule.index_copy(0, changed, rule[best]),
        votes.score.index_copy(0, changed, scores[best]),
    )
    # Some rules without a vote are kept: each time that they are dropped all are copied.
    limit = max(1 << 16, grown.rule.numel())
    return compact(grown) if len(grown.rules.cost) > limit else grown


def compact(votes: Votes) -> Votes:
    """Return the votes without the rules that have none; the others stay in the order in which they were found."""
    rule = row_index.unique_values(votes.rule.flatten())
    rule = rule[rule >= 0]
    number = torch.searchsorted(rule, votes.rule)
    return Votes(
        select_rows(votes.rules, rule),
        torch.where(votes.rule >= 0, number, -1),
        votes.score,
    )
