"""Why a candidate has its `noisy-or-joint`: the rules that derive it, each with what counts of it beside better ones.

The score is the noisy-or of the shares, 1 - prod_i (1 - share_i).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.json_io import Json
from funcppo.core.types import I64
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.writers import format_rule
from funcppo.kg.logic.typed_torch import unique_rows_with_inverse
from funcppo.kg.ranking import scorers
from funcppo.kg.scores import joint_counts
from funcppo.kg.scores.joint_counts import JointCounts
from funcppo.kg.search.task import ProverTask


class RuleShare(NamedTuple):
    """A rule that derives a candidate, and what counts of it."""

    rule: int
    confidence: float
    share: float  # at most the confidence
    # the better rule beside which it counts least; None if its whole confidence counts
    beside: int | None
    # atoms that both derive, and facts among them; None without such a rule
    n_both: int | None
    n_both_facts: int | None


def explain_answers(
    task: ProverTask,
    name: str,
    joint: JointCounts,
    atoms: I64[Tensor, "n W"],
    side: int,
) -> list[tuple[RuleShare, ...]]:
    """The rules of each of some atoms as an answer about a side, the most confident first.

    Args:
      name: of the score.
      joint: what pairs of the rules derive.
      atoms: ground and of two arguments, in any order.
    """
    device = task.kb.facts.device
    distinct, place = unique_rows_with_inverse(atoms.long())
    found = scorers.joint_shares(
        task, name, joint, side, distinct.to(device, torch.int32)
    )
    is_less = found.beside >= 0
    shared = joint_counts.find_shared(
        joint, found.rule, torch.where(is_less, found.beside, found.rule)
    )

    rules: list[list[RuleShare]] = [[] for _ in distinct]
    columns = (
        found.atom_row,
        found.rule,
        found.confidence,
        -torch.expm1(-found.neg_log_wrong),
        found.beside,
        shared.n_both,
        shared.n_facts,
    )
    for row, rule, confidence, share, beside, both, facts in zip(
        *(column.tolist() for column in columns)
    ):
        has_better = beside >= 0
        rules[row].append(
            RuleShare(
                rule=rule,
                confidence=confidence,
                share=share,
                beside=beside if has_better else None,
                n_both=int(both) if has_better else None,
                n_both_facts=int(facts) if has_better else None,
            )
        )
    return [tuple(rules[row]) for row in place.tolist()]


def noisy_or(shares: Sequence[RuleShare]) -> float:
    """The score that the shares of an answer make."""
    return 1.0 - math.prod(1.0 - rule.share for rule in shares)


def to_lines(dataset: Dataset, shares: Sequence[RuleShare]) -> list[str]:
    """The rules of an answer as lines of text."""
    rules = "1 rule" if len(shares) == 1 else f"{len(shares)} rules"
    lines = [f"noisy-or {noisy_or(shares):.4f} of what counts of {rules}:"]
    for rule in shares:
        text = format_rule(dataset, dataset.rules[rule.rule])
        lines.append(
            f"  {rule.share:.4f} of confidence {rule.confidence:.4f}  by rule {rule.rule}: {text}"
        )
        if rule.beside is not None:
            lines.append(
                f"          beside rule {rule.beside}; atoms that both derive: {rule.n_both:,}, "
                f"facts among them: {rule.n_both_facts:,}"
            )
    return lines


def to_json(dataset: Dataset, shares: Sequence[RuleShare]) -> list[Json]:
    """The rules of an answer as JSON values."""
    return [
        rule._asdict()
        | {"rule_text": format_rule(dataset, dataset.rules[rule.rule])}
        for rule in shares
    ]
