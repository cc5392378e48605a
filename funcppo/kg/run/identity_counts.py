"""Counts of mined rules under object identity, by which AnyBURL and PyClause count and apply rules.

Different variables of a rule bind different constants there, none of which the rule names. The miner counts without:
its counts are of walks, whose entities may repeat. `count_mined_rules` counts mined rules again, whatever their length,
for files that are read by those tools.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.rule_tables import RuleStatistics
from funcppo.kg.logic import consequences, kb
from funcppo.kg.logic.joins import RowBudget, RowBudgetExceeded

# predictions of a rule that may be held at once, some 100 bytes each
MAX_PREDICTIONS = 7_000_000


class CountedCallback(Protocol):
    """Receives how many rules are counted, and of how many."""

    def __call__(self, done: int, total: int, /) -> object: ...


class IdentityCounts(NamedTuple):
    """Rules with their counts under object identity."""

    dataset: Dataset  # its rules are those that predict something
    statistics: RuleStatistics  # a row for each rule
    is_kept: np.ndarray  # bool [R], which of the rules these are
    notes: tuple[str, ...]  # what was left out or not counted, a line each
    interrupt: KeyboardInterrupt | None  # what ended the count early


def count_mined_rules(
    dataset: Dataset,
    statistics: RuleStatistics,
    budget: RowBudget,
    report: CountedCallback = lambda done, total: None,
) -> IdentityCounts:
    """Count what rules predict, and how much of it is right, under object identity.

    Rules of few predictions come first. Those that the budget does not suffice for keep their counts without object
    identity; those that are right nowhere under it are left out. Notes count both.

    Args:
      dataset: known facts, and the rules.
      statistics: counts of the rules without object identity.
      budget: bounds the rows and the time of the joins.
      report: called after each rule.
    """
    order = np.argsort(statistics.body_pairs, kind="stable")
    order = order[statistics.body_pairs[order] <= MAX_PREDICTIONS]
    support = statistics.support.copy()
    predictions = statistics.body_pairs.copy()
    is_counted = np.zeros(len(support), bool)
    interrupt = None
    try:
        facts, sizes = kb.from_dataset(dataset)
        for n_counted, applied in enumerate(
            consequences.iter_consequences(
                facts,
                sizes,
                rule_ids=order.tolist(),
                object_identity=True,
                budget=budget,
            ),
            1,
        ):
            rule = order[n_counted - 1]
            support[rule] = int((applied.fact >= 0).sum())
            predictions[rule] = len(applied.atoms)
            is_counted[rule] = True
            report(n_counted, len(support))
    except RowBudgetExceeded:
        pass  # the notes say what is not counted
    except KeyboardInterrupt as error:
        interrupt = error

    kept = support > 0
    counted = statistics._replace(support=support, body_pairs=predictions)
    return IdentityCounts(
        replace(
            dataset,
            rules=dataset.rules[kept],
            rule_weights=counted.weight[kept],
            rule_counts=None,
            rule_estimates=None,
        ),
        RuleStatistics(*(column[kept] for column in counted)),
        kept,
        _notes(
            int((~is_counted).sum()),
            int((~kept).sum()),
            "an interrupt"
            if interrupt
            else "the limits of time, rows or memory",
        ),
        interrupt,
    )


def _notes(
    n_uncounted: int, n_without_support: int, reason: str
) -> tuple[str, ...]:
    """What was left out or not counted, and why not."""
    notes: list[str] = []
    if n_without_support:
        notes.append(
            f"{n_without_support:,} rules are right nowhere under object identity and were left out"
        )
    if n_uncounted:
        notes.append(
            f"{n_uncounted:,} rules have counts without object identity: {reason} kept them from being counted with it"
        )
    return tuple(notes)
