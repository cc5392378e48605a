"""Laws of the training queries; the oracles are Python sets and exact probabilities."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.core import random
from funcppo.kg.logic import kb
from funcppo.kg.search import env


def within_six_sigma(counts, probabilities):
    """Each count of a multinomial within 6 standard deviations: a false alarm in 10**8 fixed seeds."""
    n, p = sum(counts), np.array(probabilities)
    return bool(
        (abs(np.array(counts) - n * p) <= 6 * np.sqrt(n * p * (1 - p))).all()
    )


FACTS = np.array([[1, 1, 2], [1, 2, 3], [1, 3, 1], [2, 1, 1], [3, 2, 0]])
KB, SIZES = kb.build(
    FACTS, np.zeros((0, 2, 3), int), n_constants=3, n_predicates=3
)
HARD = torch.tensor([[1, 3, 3], [2, 2, 2]], dtype=torch.int32)


def sample(seed, n, positive, hard):
    return env.sample_training_queries(
        random.split(random.key(seed), n),
        KB,
        SIZES,
        KB.facts,
        HARD,
        positive,
        hard,
    )


@given(st.integers(0, 2**32), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=50)
def test_a_label_says_whether_the_query_is_a_train_fact(seed, positive, hard):
    query, label, failed = sample(seed, 50, positive, hard)
    facts = {tuple(f) for f in FACTS.tolist()}
    assert label.tolist() == [tuple(q) in facts for q in query.tolist()]
    assert not (failed & ~label).any()


def test_negatives_are_uniform_over_corruptions_that_are_no_facts():
    """Every (fact, argument, constant) that gives no fact is equally likely, whatever the arity."""
    facts, weight = {tuple(f) for f in FACTS.tolist()}, {}
    for f in facts:
        arity = sum(a > 0 for a in f[1:])
        for j, c in itertools.product(range(1, arity + 1), range(1, 4)):
            atom = (*f[:j], c, *f[j + 1 :])
            if atom not in facts:
                weight[atom] = weight.get(atom, 0) + 1 / arity
    query, _, failed = sample(1, 20000, 0.0, 0.0)
    atoms = [tuple(q) for q in query[~failed].tolist()]
    assert set(atoms) == set(weight)
    total = sum(weight.values())
    assert within_six_sigma(
        [atoms.count(a) for a in weight], [w / total for w in weight.values()]
    )
    # 5 facts, 3 constants: the chance that one try is a fact
    p = 1 - total / 15
    n_failed = int(failed.sum())
    assert within_six_sigma([n_failed, len(atoms)], [p**8, 1 - p**8])


def test_fractions_are_the_configured_ones():
    query, label, failed = sample(2, 20000, 0.25, 0.4)
    in_hard = (query[:, None] == HARD).all(-1).any(-1)
    is_positive = label & ~failed
    assert within_six_sigma(
        [int(is_positive.sum()), int((~is_positive).sum())], [0.25, 0.75]
    )
    only_hard, _, failed = sample(2, 200, 0.0, 1.0)
    assert (only_hard[:, None] == HARD).all(-1).any(
        -1
    ).all() and not failed.any()
    # corruptions may be hard negatives too
    assert in_hard.double().mean() >= 0.75 * 0.4 - 0.02


@pytest.mark.parametrize("fact", [[1, 1, 1], [1, 0, 0]])
def test_a_row_without_a_negative_is_a_flagged_positive(fact):
    """One constant, or no argument: every corruption is the fact itself."""
    only, sizes = kb.build(
        np.array([fact]),
        np.zeros((0, 2, 3), int),
        n_constants=1,
        n_predicates=1,
    )
    query, label, failed = env.sample_training_queries(
        random.split(random.key(0), 4),
        only,
        sizes,
        only.facts,
        HARD[:0],
        0.0,
        0.0,
    )
    assert failed.all() and label.all() and query.tolist() == [fact] * 4


def test_rows_are_drawn_independently_of_their_number():
    few, many = sample(3, 5, 0.5, 0.2), sample(3, 9, 0.5, 0.2)
    assert [t.tolist() for t in few] == [t[:5].tolist() for t in many]


def test_a_table_to_sample_from_must_not_be_empty():
    keys = random.split(random.key(0), 4)
    with pytest.raises(
        ValueError,
        match="expected facts to sample queries from, got 5 train facts and 0 hard neg",
    ):
        env.sample_training_queries(
            keys, KB, SIZES, KB.facts, HARD[:0], 0.5, 0.1
        )
    with pytest.raises(ValueError, match="got 0 train facts"):
        env.sample_training_queries(
            keys, KB, SIZES, KB.facts[:0], HARD, 0.5, 0.1
        )
