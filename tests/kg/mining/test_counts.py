"""Counts and scores of mined rules, the votes of facts, and the budget of a search."""

from random import Random

import pytest
import torch

from funcppo.kg.mining import counts

N_FACTS = 12


class FakeClock:
    """A clock that is set by hand."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_the_time_ends_the_work_and_is_told_apart_from_it():
    clock = FakeClock()
    budget = counts.Budget(max_rows=100, seconds=10.0, clock=clock)
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
    told = {"progress": lambda *call: calls.append(call), "clock": FakeClock()}
    budget = counts.Budget(max_rows=100, seconds=10.0, **told)
    budget.start_stage("one", 10)
    budget.spend(4)
    budget.spend(8)
    budget.start_stage("two", 20)
    budget.spend(5)
    first = [("one", 0, 10), ("one", 4, 10), ("one", 12, 12)]
    assert calls == [*first, ("two", 0, 20), ("two", 5, 20)]


def two_rules():
    """The inverse p(X,Y) :- p(Y,X), and p(X,5) :- q(X,Y)."""
    column = lambda *values: torch.tensor(values, dtype=torch.float64)
    return counts.MinedRules(
        labels=torch.tensor([[0, 1, -1, -1], [0, 2, -1, -1]]),
        end_constants=torch.tensor([[0, 0], [5, 0]]),
        support=column(10, 6),
        circular_support=column(2, 0),
        body_pairs=column(20, 12),
        pca_pairs=column(15, 12),
        head_facts=column(30, 30),
        cost=column(1, 1),
    )


def test_scores_worked_by_hand():
    rules = two_rules()
    assert counts.confidence(rules).tolist() == [0.5, 0.5]
    assert counts.leave_one_out_confidence(rules).tolist() == [8 / 18, 0.5]
    assert counts.smoothed_confidence(rules).tolist() == pytest.approx(
        [8 / 23, 6 / 17]
    )
    held_out = counts.held_out_smoothed_confidence(rules)
    assert held_out.tolist() == pytest.approx([7 / 22, 5 / 16])


def test_atoms_number_variables_after_the_constants():
    assert counts.rule_atoms(two_rules(), 6)[:, :2].tolist() == [
        [[1, 7, 8], [1, 8, 7]],
        [[1, 7, 5], [2, 7, 8]],
    ]
    assert not counts.rule_atoms(two_rules(), 6)[:, 2:].any()


@pytest.mark.parametrize(
    ("support", "confidence", "kept"),
    [(6, 0.0, 2), (7, 0.0, 1), (9, 0.0, 0), (1, 0.45, 1), (1, 0.4, 2)],
)
def test_thresholds_leave_circular_support_out(support, confidence, kept):
    fact, rule = torch.tensor([[0, 1, 2], [0, 1, 1]])
    found = counts.FoundRules(two_rules(), fact=fact, rule=rule)
    above = counts.above_thresholds(found, support, confidence)
    assert len(above.rules.cost) == len(above.rules.support) == kept


def random_rules(random, n_rules):
    """Rules with distinct heads, and facts that they derive."""
    pairs = [
        (fact, rule)
        for rule in range(n_rules)
        for fact in range(N_FACTS)
        if random.random() < 0.3
    ]
    support = torch.tensor(
        [random.randint(1, 9) for _ in range(n_rules)], dtype=torch.float64
    )
    zeros = torch.zeros_like(support)
    number = torch.tensor([random.randint(0, 10**6) for _ in range(n_rules)])
    rules = counts.MinedRules(
        labels=number[:, None].expand(-1, counts.MAX_RULE_ATOMS),
        end_constants=torch.zeros((n_rules, 2), dtype=torch.int64),
        support=support,
        circular_support=zeros,
        body_pairs=support + 3,
        pca_pairs=zeros,
        head_facts=zeros,
        cost=zeros,
    )
    table = torch.tensor(pairs or [(0, 0)])
    return counts.FoundRules(rules, table[:, 0], table[:, 1])


@pytest.mark.parametrize("n_votes", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_each_fact_has_its_best_rules(n_votes, seed):
    random = Random(seed)
    parts = [random_rules(random, random.randint(1, 6)) for _ in range(4)]
    votes = counts.no_votes(N_FACTS, n_votes, torch.device("cpu"))
    of_fact = {fact: [] for fact in range(N_FACTS)}
    for part in parts:
        votes = counts.add_votes(votes, part)
        score = counts.held_out_smoothed_confidence(part.rules).tolist()
        for fact, rule in zip(part.fact.tolist(), part.rule.tolist()):
            if score[rule] > 0:
                label = int(part.rules.labels[rule, 0])
                of_fact[fact].append((score[rule], label))

    # A stable sort: of equal rules the one that was found first.
    best = {
        fact: sorted(rules, key=lambda rule: -rule[0])[:n_votes]
        for fact, rules in of_fact.items()
    }
    labels = [*votes.rules.labels[:, 0].tolist(), None]
    for fact, rules in best.items():
        padded = rules + [(0.0, None)] * (n_votes - len(rules))
        assert votes.score[fact].tolist() == [score for score, _ in padded]
        assert [labels[i] for i in votes.rule[fact].tolist()] == [
            label for _, label in padded
        ]
    assert counts.score_to_beat(votes).tolist() == votes.score[:, -1].tolist()

    whole = counts.compact(votes)
    assert set(whole.rules.labels[:, 0].tolist()) == {
        label for rules in best.values() for _, label in rules
    }
    used = whole.rule[whole.rule >= 0].unique()
    assert used.tolist() == list(range(len(whole.rules.cost)))
