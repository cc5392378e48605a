"""Votes equal those of a table of all rules and facts, in whatever parts the rules come."""

from __future__ import annotations

from random import Random

import pytest
import torch

from funcppo.kg.mining import miner
from funcppo.kg.mining.mined_rules import (
    MAX_RULE_ATOMS,
    FoundRules,
    MinedRules,
    held_out_smoothed_confidence,
)

N_FACTS = 12


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
    rules = MinedRules(
        labels=number[:, None].expand(-1, MAX_RULE_ATOMS),
        end_constants=torch.zeros((n_rules, 2), dtype=torch.int64),
        support=support,
        circular_support=zeros,
        body_pairs=support + 3,
        pca_pairs=zeros,
        head_facts=zeros,
        std_error=zeros,
        pca_std_error=zeros,
    )
    table = torch.tensor(pairs or [(0, 0)])
    return FoundRules(rules, support, table[:, 0], table[:, 1])


@pytest.mark.parametrize("n_votes", [1, 3])
@pytest.mark.parametrize("seed", range(10))
def test_each_fact_has_its_best_rules(n_votes, seed):
    random = Random(seed)
    parts = [random_rules(random, random.randint(1, 6)) for _ in range(4)]
    votes = miner.no_votes(N_FACTS, n_votes, torch.device("cpu"))
    of_fact = {fact: [] for fact in range(N_FACTS)}
    for part in parts:
        votes = miner.add_votes(votes, part)
        score = held_out_smoothed_confidence(part.rules).tolist()
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
    assert miner.score_to_beat(votes).tolist() == votes.score[:, -1].tolist()

    elected = miner.rules_with_votes(votes)
    assert set(elected.rules.labels[:, 0].tolist()) == {
        label for rules in best.values() for _, label in rules
    }


def test_rules_without_a_vote_are_dropped_and_the_rest_numbered_again(
    monkeypatch,
):
    random = Random(0)
    votes = miner.no_votes(N_FACTS, 1, torch.device("cpu"))
    monkeypatch.setattr(miner, "MIN_COMPACTED_RULES", 0)
    for _ in range(20):
        votes = miner.add_votes(votes, random_rules(random, 5))
        assert len(votes.cost) <= N_FACTS
    whole = miner.compact(votes)
    used = whole.rule[whole.rule >= 0].unique()
    assert used.tolist() == list(range(len(whole.cost)))


def test_counts_of_rules_are_replaced_in_place_of_others():
    votes = miner.no_votes(N_FACTS, 1, torch.device("cpu"))
    votes = miner.add_votes(votes, random_rules(Random(1), 6))
    rows = torch.tensor([1])
    other = MinedRules(*(column[rows] for column in votes.rules))
    other = other._replace(pca_pairs=torch.tensor([7.0]).double())
    replaced = miner.replace_rules(votes, rows, other)
    expected = torch.zeros(len(votes.cost))
    expected[1] = 7
    assert replaced.rules.pca_pairs.tolist() == expected.tolist()
    assert torch.equal(replaced.rules.support, votes.rules.support)
