"""Scores that need no training: worked by hand, equal to sums over Python sets, and their limits."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.logic import fixpoint, kb
from funcppo.kg.logic.fixpoint import Derivations
from funcppo.kg.ranking import rank_metrics
from funcppo.kg.scores import rules
from tests.oracles import Program

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
