"""Counts and scores of mined rules; the budget of a search."""

from __future__ import annotations

import pytest
import torch

from funcppo.kg.mining import mined_rules
from funcppo.kg.mining.mined_rules import (
    Budget,
    FoundRules,
    MinedRules,
    Thresholds,
)


class FakeClock:
    """A clock that is set by hand."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_rows_are_counted_and_end_the_work():
    budget = Budget(max_rows=100, seconds=10.0, clock=FakeClock())
    assert budget.rows_left() == 100 and not budget.is_exhausted()
    budget.spend(60)
    assert budget.rows_left() == 40 and budget.rows_left(0.5) == 0
    assert budget.is_exhausted(0.5) and not budget.is_exhausted(0.7)
    budget.spend(40)
    assert budget.is_exhausted() and not budget.was_late


def test_the_time_ends_the_work_and_is_told_apart_from_it():
    clock = FakeClock()
    budget = Budget(max_rows=100, seconds=10.0, clock=clock)
    clock.now += 5.0
    assert budget.elapsed == 5.0 and budget.spent_share == 0.0
    clock.now += 4.0  # of the second half of the time, four fifths
    assert budget.spent_share == 0.8
    assert not budget.is_exhausted(0.9) and not budget.was_late
    assert budget.is_exhausted(0.75) and budget.was_late
    clock.now += 1.0
    assert budget.is_late()


def test_a_stage_reports_its_own_work_and_never_more_than_all_of_it():
    calls = []
    budget = Budget(
        max_rows=100,
        seconds=10.0,
        progress=lambda *call: calls.append(call),
        clock=FakeClock(),
    )
    budget.start_stage("one", 10)
    budget.spend(4)
    budget.spend(8)
    budget.start_stage("two", 20)
    budget.spend(5)
    assert calls == [
        ("one", 0, 10),
        ("one", 4, 10),
        ("one", 12, 12),
        ("two", 0, 20),
        ("two", 5, 20),
    ]


# -- test mined rules

INF = float("inf")


def two_rules():
    """The inverse p(X,Y) :- p(Y,X), and p(X,5) :- q(X,Y)."""
    column = lambda *values: torch.tensor(values, dtype=torch.float64)
    return MinedRules(
        labels=torch.tensor([[0, 1, -1, -1], [0, 2, -1, -1]]),
        end_constants=torch.tensor([[0, 0], [5, 0]]),
        support=column(10, 6),
        circular_support=column(2, 0),
        body_pairs=column(20, 12),
        pca_pairs=column(15, 12),
        head_facts=column(30, 30),
        std_error=column(0, 0.1),
        pca_std_error=column(0, INF),
    )


def test_scores_worked_by_hand():
    rules = two_rules()
    assert mined_rules.confidence(rules).tolist() == [0.5, 0.5]
    assert mined_rules.leave_one_out_confidence(rules).tolist() == [8 / 18, 0.5]
    assert mined_rules.smoothed_confidence(rules).tolist() == pytest.approx(
        [8 / 23, 6 / 17 - 0.2]
    )
    held_out = mined_rules.held_out_smoothed_confidence(rules)
    assert held_out.tolist() == pytest.approx([7 / 22, 5 / 16 - 0.2])


def test_each_atom_of_a_body_adds_assumed_failures():
    """Ten of twenty pairs, two circular: 8 of 18 and 5, 10 or 15 failures."""
    rules = mined_rules.select_rules(two_rules(), torch.tensor([0, 0, 0]))
    bodies = [[1, -1, -1], [1, 2, -1], [1, 2, 3]]
    rules = rules._replace(
        labels=torch.tensor([[0, *labels] for labels in bodies])
    )
    assert mined_rules.body_length(rules).tolist() == [1, 2, 3]
    assert mined_rules.smoothed_confidence(rules).tolist() == pytest.approx(
        [8 / 23, 8 / 28, 8 / 33]
    )


def test_a_rule_whose_counts_are_unknown_has_no_score():
    rules = two_rules()._replace(std_error=torch.tensor([INF, INF]).double())
    assert mined_rules.smoothed_confidence(rules).tolist() == [0, 0]


def test_atoms_number_variables_after_the_constants():
    assert mined_rules.rule_atoms(two_rules(), 6)[:, :2].tolist() == [
        [[1, 7, 8], [1, 8, 7]],
        [[1, 7, 5], [2, 7, 8]],
    ]
    assert not mined_rules.rule_atoms(two_rules(), 6)[:, 2:].any()


@pytest.mark.parametrize(
    ("support", "confidence", "kept"),
    [(6, 0.0, 2), (7, 0.0, 1), (9, 0.0, 0), (1, 0.45, 1), (1, 0.4, 2)],
)
def test_thresholds_leave_circular_support_out(support, confidence, kept):
    found = FoundRules(
        two_rules(),
        torch.ones(2),
        fact=torch.tensor([0, 1, 2]),
        rule=torch.tensor([0, 1, 1]),
    )
    above = mined_rules.above_thresholds(
        found, Thresholds(min_support=support, min_confidence=confidence)
    )
    assert len(above.cost) == len(above.rules.support) == kept


def test_kept_rules_keep_their_facts_under_new_numbers():
    found = FoundRules(
        two_rules(),
        torch.tensor([3.0, 4.0]),
        fact=torch.tensor([0, 1, 2]),
        rule=torch.tensor([0, 1, 1]),
    )
    kept = mined_rules.keep(found, torch.tensor([False, True]))
    assert kept.fact.tolist() == [1, 2] and kept.rule.tolist() == [0, 0]
    assert kept.cost.tolist() == [4.0] and kept.rules.support.tolist() == [6.0]
    assert mined_rules.take(found, torch.tensor([1, 0])).cost.tolist() == [4, 3]


def test_labels_of_bodies_are_the_digits_of_their_codes():
    labels = mined_rules.path_labels(
        torch.tensor([0, 2]), torch.tensor([5, 9]), length=2, n_labels=4
    )
    assert labels.tolist() == [
        [0, 1, 1, -1, -1, -1],
        [4, 2, 1, -1, -1, -1],
    ]
