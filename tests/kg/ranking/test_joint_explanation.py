"""The shares of rules in `noisy-or-joint`: they make the score, and a proof names them."""

import dataclasses
import math

import pytest
import torch

from funcppo.kg.graph import loaders
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.ranking import joint_explanation, scorers
from funcppo.kg.ranking.joint_explanation import RuleShare
from funcppo.kg.ranking.ranking import ScorerBySide
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.search.task import build_task

SCORE = "noisy-or-joint@3"
FACTS = [
    ("a", "s", "b"),
    ("b", "s", "c"),
    ("c", "s", "d"),
    ("a", "t", "b"),
    ("b", "t", "c"),
    ("d", "t", "a"),
    ("b", "u", "a"),
    ("c", "u", "b"),
    ("a", "r", "b"),
    ("b", "r", "d"),
    ("d", "r", "a"),
]
RULES = """
r(X, Y) :- s(X, Y)
r(X, Y) :- t(X, Y)
r(X, Y) :- u(Y, X)
"""


@pytest.fixture(params=["held", "by question"])
def task(request):
    """Derivations are held, or found by each question."""
    dataset = loaders.from_triples(FACTS, rules=RULES)
    task = build_task(dataset, ProverTaskConfig(max_height=1, smoothing=1.0))
    if request.param == "held":
        return task
    return build_task(
        dataset,
        dataclasses.replace(task.cfg, max_atoms=1),
        by_query_if_large=True,
    )


def atoms_of(task, *names):
    ids = {name: i for i, name in enumerate(task.dataset.entities, 1)}
    r = task.dataset.predicates.index("r") + 1
    return torch.tensor([[r, ids[x], ids[y]] for x, y in names])


def test_shares_make_the_score_of_each_answer(task):
    """In any order, twice, and of a known fact, which does not derive itself."""
    joint = scorers.count_joint(task, SCORE)
    assert joint is not None
    atoms = atoms_of(task, "bc", "ab", "cd", "bc", "da")
    distinct = torch.unique(atoms, dim=0)
    n_less = 0
    for side in (HEAD, TAIL):
        scorer = scorers.make_untrained_scorer(task, SCORE, joint)
        if isinstance(scorer, ScorerBySide):
            scorer = scorer.of(side)
        score = {
            tuple(atom): p
            for atom, p in zip(
                distinct.tolist(), scorer(distinct.int()).sigmoid().tolist()
            )
        }
        found = joint_explanation.explain_answers(
            task, SCORE, joint, atoms, side
        )
        for atom, shares in zip(atoms.tolist(), found, strict=True):
            made = 1 - math.prod(1 - rule.share for rule in shares)
            assert made == pytest.approx(score[tuple(atom)], abs=1e-12)
            assert made == pytest.approx(joint_explanation.noisy_or(shares))
            n_less += sum(rule.share < rule.confidence for rule in shares)
            assert all(rule.share <= rule.confidence for rule in shares)
        assert [len(shares) for shares in found] == [3, 3, 1, 3, 1]
    assert n_less > 0


def test_a_share_names_what_both_rules_derive(task):
    """Of r(b, c), which u(c, b) derives too: s, t and u all derive r(a, b) and r(b, c), of which r(a, b) is a fact.

    t is right for 2 of 3, with smoothing 2 / 4; s and u for 1 of 3 and 1 of 2: 1 / 4 and 1 / 3.
    """
    joint = scorers.count_joint(task, SCORE)
    assert joint is not None
    (shares,) = joint_explanation.explain_answers(
        task, SCORE, joint, atoms_of(task, "bc"), TAIL
    )
    by_rule = {rule.rule: rule for rule in shares}
    assert [rule.rule for rule in shares] == [1, 2, 0]
    assert [rule.confidence for rule in shares] == pytest.approx(
        [1 / 2, 1 / 3, 1 / 4]
    )
    assert by_rule[1] == RuleShare(1, 0.5, 0.5, None, None, None)
    # Of 2 + 3 atoms together with rule 1, which derives 3, 1 + 3 (1 - 1/2 (2/3)^(1/3)) are right.
    wrong = (1 + 3 / 2 * (2 / 3) ** (1 / 3)) / 5
    assert by_rule[2].share == pytest.approx(1 - wrong / 0.5)
    assert (by_rule[2].beside, by_rule[2].n_both, by_rule[2].n_both_facts) == (
        1,
        2,
        1,
    )

    lines = joint_explanation.to_lines(task.dataset, shares)
    score = joint_explanation.noisy_or(shares)
    assert lines[0] == f"noisy-or {score:.4f} of what counts of 3 rules:"
    assert lines[1].endswith("by rule 1: r(X, Y) :- t(X, Y)")
    text = "beside rule 1; atoms that both derive: 2, facts among them: 1"
    assert text in lines[3]
    fields = joint_explanation.to_json(task.dataset, shares)
    assert fields[1] == by_rule[2]._asdict() | {
        "rule_text": "r(X, Y) :- u(Y, X)"
    }
