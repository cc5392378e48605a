"""The best rules of each fact: every fact votes for the rules with the highest scores that derive it from other facts.

A rule without a vote is redundant: wherever it is right, another rule is, with no less confidence. Of two equal rules
the one that was found first gets the vote.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.types import F64, I64
from funcppo.kg.logic import sorting
from funcppo.kg.mining.mined_rules import (
    FoundRules,
    MinedRules,
    concatenate_rules,
    held_out_smoothed_confidence,
    no_rules,
    select_rules,
)

MIN_COMPACTED_RULES = 1 << 16  # rules without a vote are kept up to this many


class Votes(NamedTuple):
    """The votes of each fact so far, the best first; rules without a vote may still be among `rules`."""

    rules: MinedRules
    cost: F64[Tensor, "R"]  # rows that counting each rule again takes
    rule: I64[Tensor, "N V"]  # row of `rules`; -1 for none
    score: F64[Tensor, "N V"]  # 0 for none


def no_votes(n_facts: int, votes_per_fact: int, device: torch.device) -> Votes:
    """No fact has voted."""
    score = torch.zeros(
        (n_facts, votes_per_fact), dtype=torch.float64, device=device
    )
    rule = torch.full_like(score, -1, dtype=torch.int64)
    rules = no_rules(device)
    return Votes(rules, rules.support, rule, score)


def score_to_beat(votes: Votes) -> F64[Tensor, "N"]:
    """What a rule's score must exceed to get a vote of each fact."""
    return votes.score[:, -1]


def add_votes(votes: Votes, found: FoundRules) -> Votes:
    """The votes after some more rules, and the facts that these derive from others."""
    score = held_out_smoothed_confidence(found.rules)
    is_better = score[found.rule] > score_to_beat(votes)[found.fact]
    row = is_better.nonzero().squeeze(1)
    if not len(row):
        return votes
    changed, fact = sorting.unique_inverse(found.fact[row])
    n_before, n_votes = len(votes.cost), votes.rule.shape[1]

    # The former votes of these facts, then the new ones.
    numbers = torch.arange(len(changed), device=fact.device)
    fact = torch.cat([numbers.repeat_interleave(n_votes), fact])
    rule = torch.cat(
        [votes.rule[changed].flatten(), found.rule[row] + n_before]
    )
    scores = torch.cat([votes.score[changed].flatten(), score[found.rule[row]]])

    # By fact, then by descending score; stable, so that of equal rules the earlier one is first.
    order = torch.sort(scores, descending=True, stable=True).indices
    order = order[sorting.sort_keys(fact[order]).order]
    first = torch.searchsorted(fact[order], numbers)
    best = order[first[:, None] + torch.arange(n_votes, device=fact.device)]
    best_rule = rule[best]

    # Number the new rules that won consecutively.
    is_new = best_rule >= n_before
    elected = sorting.unique_values(best_rule[is_new]) - n_before
    number = n_before + torch.searchsorted(elected, best_rule - n_before)
    rules = [votes.rules, select_rules(found.rules, elected)]
    best_rule = torch.where(is_new, number, best_rule)
    grown = Votes(
        concatenate_rules(rules),
        torch.cat([votes.cost, found.cost[elected]]),
        votes.rule.index_copy(0, changed, best_rule),
        votes.score.index_copy(0, changed, scores[best]),
    )
    limit = max(MIN_COMPACTED_RULES, grown.rule.numel())
    return compact(grown) if len(grown.cost) > limit else grown


def rules_with_votes(votes: Votes) -> FoundRules:
    """The rules that have a vote, in the order in which they were found."""
    compacted = compact(votes)
    none = votes.rule[:0, 0]
    return FoundRules(compacted.rules, compacted.cost, none, none)


def compact(votes: Votes) -> Votes:
    """The votes without the rules that have none."""
    rule = sorting.unique_values(votes.rule.flatten())
    rule = rule[rule >= 0]
    number = torch.searchsorted(rule, votes.rule)
    return Votes(
        select_rules(votes.rules, rule),
        votes.cost[rule],
        torch.where(votes.rule >= 0, number, -1),
        votes.score,
    )


def replace_rules(
    votes: Votes, rows: I64[Tensor, "r"], rules: MinedRules
) -> Votes:
    """The votes with other counts of some rules."""
    columns = zip(votes.rules, rules)
    return votes._replace(
        rules=MinedRules(
            *(column.index_copy(0, rows, new) for column, new in columns)
        )
    )
