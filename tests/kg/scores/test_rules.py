"""Scores that need no training: worked by hand, equal to sums over Python sets, and their limits."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.config import ProverTaskConfig
from funcppo.kg.graph import loaders
from funcppo.kg.logic import fixpoint, kb
from funcppo.kg.logic.derive import make_label
from funcppo.kg.logic.fixpoint import Derivations, count_rules, with_confidence
from funcppo.kg.logic.kb import HEAD, TAIL
from funcppo.kg.ranking import rank_metrics
from funcppo.kg.scores import rules
from funcppo.kg.scores import rules as rule_scores
from funcppo.kg.search.task import build_task, with_other_facts
from tests import oracles
from tests.oracles import Program, programs

SAME = Program(2, (2, 2), ((1, 1, 2),), (((2, 3, 4), (1, 3, 4)),) * 5)
# of an atom and a rule
pairs = st.sets(st.tuples(st.integers(0, 6), st.integers(0, 4)))


def log_odds(score, support, found, pairs=4.0, **settings):
    """The scores of 7 atoms by rules that are right `support` times out of `pairs`."""
    world, _ = kb.build(**SAME.arrays())
    support = torch.tensor(support).float()
    world = world._replace(
        support=support, body_pairs=torch.full_like(support, pairs)
    )
    atom, rule = (
        torch.tensor(sorted(found), dtype=torch.int64).reshape(-1, 2).unbind(1)
    )
    parts = [Derivations(atom[:3], rule[:3]), Derivations(atom[3:], rule[3:])]
    return score(world, parts, 7, **settings)


def scored(score, support, found, **settings):
    """The same as probabilities."""
    return log_odds(score, support, found, **settings).sigmoid().tolist()


def noisy_or(confidences, power):
    return (1 - math.prod(1 - c**power for c in confidences)) ** (1 / power)


@given(
    st.lists(st.integers(0, 4), min_size=5, max_size=5),
    pairs,
    st.sampled_from([1.0, 1.5, 3.0]),
    st.integers(1, 6),
)
def test_each_atom_is_scored_by_the_rules_that_derive_it(
    support, found, power, n_best
):
    """By all of them, or by the best."""
    own = [
        sorted(support[r] / 4 for a, r in found if a == atom)
        for atom in range(7)
    ]
    assert scored(rules.max_confidence, support, found) == pytest.approx(
        [max(c, default=0) for c in own]
    )
    got = scored(rules.noisy_or, support, found, power=power)
    assert got == pytest.approx([noisy_or(c, power) for c in own], rel=1e-12)
    got = scored(
        rules.noisy_or_of_best, support, found, n_best=n_best, power=power
    )
    want = [noisy_or(c[-n_best:], power) for c in own]
    assert got == pytest.approx(want, rel=1e-12)


SUPPORT = [1, 30, 700, 990, 999] * 20  # of 1,000


@given(
    st.sets(st.tuples(st.integers(0, 6), st.integers(0, 99)), min_size=1),
    st.randoms(use_true_random=False),
)
def test_noisy_or_keeps_apart_what_many_rules_derive(found, random):
    """Log-odds of exact fractions, up to 300; 1e-12 is float64. Another order of summation gives the same ranks."""
    got = log_odds(rules.noisy_or, SUPPORT, found, 1000.0)
    for atom in range(7):
        wrong = math.prod(
            Fraction(1000 - SUPPORT[r], 1000) for a, r in found if a == atom
        )
        right = 1 - Fraction(wrong)
        if not right:
            assert float(got[atom]) == -math.inf
            continue
        # of numerator and denominator alone: they exceed what a float holds
        exact = math.log(right.numerator) - math.log(right.denominator)
        exact -= math.log(wrong.numerator) - math.log(wrong.denominator)
        assert float(got[atom]) == pytest.approx(exact, rel=1e-12, abs=1e-12)

    order = random.sample(range(100), 100)
    shuffled = log_odds(
        rules.noisy_or,
        [SUPPORT[r] for r in order],
        {(atom, order.index(r)) for atom, r in found},
        1000.0,
    )
    assert torch.equal(
        rank_metrics.quantise(got), rank_metrics.quantise(shuffled)
    )


@pytest.mark.parametrize("power", [1.0, 3.0])
def test_atoms_of_a_certain_rule_are_equal_and_above_all_others(power):
    """Whatever else derives them: their score is 1."""
    found = {(0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (2, 3), (2, 4)}
    score = partial(rules.noisy_or, power=power)
    got = log_odds(score, [4, 3, 3, 3, 3], found)
    assert torch.isposinf(got[:2]).all()
    assert torch.isfinite(got[2])
    line = rank_metrics.quantise(got)
    assert line[0] == line[1] > line[2]
    assert torch.isposinf(
        log_odds(rules.max_confidence, [4, 3, 3, 3, 3], found)[:2]
    ).all()


def test_only_what_is_derived_within_the_height_exists():
    """path(1, 3) takes two steps on a chain of two edges, path(3, 1) cannot be derived."""
    x, y, z = 4, 5, 6
    path = (((2, x, y), (1, x, y)), ((2, x, y), (2, x, z), (1, z, y)))
    chain = Program(3, (2, 2), ((1, 1, 2), (1, 2, 3)), path)
    model = fixpoint.least_model(
        *kb.build(**chain.arrays()), max_height=None, max_atoms=100
    )
    atoms = torch.tensor(
        [[1, 1, 2], [2, 1, 2], [2, 1, 3], [2, 3, 1]], dtype=torch.int32
    )
    for max_height, expected in (
        (0, [1, 0, 0, 0]),
        (1, [1, 1, 0, 0]),
        (2, [1, 1, 1, 0]),
    ):
        assert (
            rules.is_derived(model, max_height, atoms).long().tolist()
            == expected
        )


# Everybody has one city, and some cities have several people.
LIVES = [
    ("ann", "lives", "rome"),
    ("bob", "lives", "rome"),
    ("cid", "lives", "oslo"),
]
FRIENDS = [
    ("ann", "friend", "bob"),
    ("ann", "friend", "cid"),
    ("dan", "friend", "cid"),
    ("dan", "friend", "ann"),
]
RULES = """
lives(X, Y) :- friend(X, Z), lives(Z, Y)
lives(X, Y) :- friend(Z, X), lives(Z, Y)
"""


def small_task(**settings):
    dataset = loaders.from_triples(LIVES + FRIENDS, rules=RULES)
    return build_task(dataset, ProverTaskConfig(max_height=1, **settings))


def test_an_own_fact_is_no_other_fact():
    task = with_other_facts(small_task())
    assert task.other_facts is not None
    ids = {name: i for i, name in enumerate(task.dataset.entities, 1)}
    lives = task.dataset.predicates.index("lives") + 1
    pairs = [("ann", "rome"), ("cid", "oslo"), ("cid", "rome"), ("dan", "oslo")]
    atoms = torch.tensor([[lives, ids[x], ids[y]] for x, y in pairs])
    for side, expected in ((HEAD, [0, 0, 1, 0]), (TAIL, [1, 0, 2, 1])):
        found = rule_scores.count_other_facts_of(
            task.kb, task.sizes, task.other_facts.degrees, atoms, side
        )
        assert found.tolist() == expected


def count_sets(program, found):
    """The counts by predicate and side, and by rule, from the sets of atoms that the rules derive."""
    facts = set(program.facts)

    def others(atom, side):
        return [
            fact
            for fact in facts - {atom}
            if fact[0] == atom[0] and fact[side] == atom[side]
        ]

    of_facts, of_rules = {}, []
    for predicate, arity in enumerate(program.arity, 1):
        own = [fact for fact in facts if fact[0] == predicate]
        for side in (HEAD, TAIL) if arity == 2 else ():
            n_with = sum(bool(others(fact, side)) for fact in own)
            of_facts |= {(predicate, side): (len(own), n_with)}
    for rule, (head, *_) in enumerate(program.rules):
        new = {atom for i, atom in found if i == rule} - facts
        if len(head) != 3:
            of_rules.append((0, 0, 0))
            continue
        n_with = (sum(bool(others(a, s)) for a in new) for s in (HEAD, TAIL))
        of_rules.append((len(new), *n_with))
    return of_facts, of_rules


@pytest.mark.parametrize("object_identity", [False, True])
@given(program=programs)
def test_counts_are_those_of_sets(program, object_identity):
    world, sizes = kb.build(**program.arrays())
    counts = rule_scores.count_other_facts(
        world, sizes, object_identity=object_identity
    )
    of_facts, of_rules = count_sets(
        program,
        oracles.consequences(program, False, object_identity),
    )
    for (predicate, side), expected in of_facts.items():
        label = int(make_label(torch.tensor(predicate), side))
        assert expected == (
            int(counts.n_facts[label]),
            int(counts.n_facts_with[label]),
        )
    got = torch.cat([counts.n_derived[:, None], counts.n_derived_with], 1)
    assert got.tolist() == [list(row) for row in of_rules]

    # The shares weigh the rules by their confidences, in float64.
    rule_counts = count_rules(world, sizes, object_identity=object_identity)
    world = with_confidence(world, rule_counts, 3.0)
    shares = rule_scores.other_fact_shares(world, counts)
    support = rule_counts.support - rule_counts.circular_support
    pairs = rule_counts.body_pairs - rule_counts.circular_support + 3
    for (predicate, side), (n_facts, n_with) in of_facts.items():
        label = int(make_label(torch.tensor(predicate), side))
        rules = [
            (c, of_rules[i])
            for i, c in enumerate((support.double() / pairs).tolist())
            if program.rules[i][0][0] == predicate
        ]
        assert float(shares.of_facts[label]) == (n_with + 1) / (n_facts + 2)
        n_new = sum(c * row[0] for c, row in rules)
        n_new_with = sum(c * row[side] for c, row in rules)
        assert float(shares.of_derived[label]) == pytest.approx(
            (n_new_with + 1) / (n_new + 2), rel=1e-14
        )
