"""Facts proved from other facts: worked by hand, equal to the least model without the fact, and within a bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from funcppo.kg.logic import kb, prove
from funcppo.kg.logic.joins import RowBudget
from tests import oracles
from tests.oracles import Program, programs

MANY = 10**9
P, Q, S = 1, 2, 3
X, Y = 5, 6
# p and q follow from each other, and q from s.
CIRCLE = Program(
    4,
    (2, 2, 2),
    ((P, 1, 2), (P, 3, 4), (P, 2, 3), (Q, 2, 3), (S, 1, 2)),
    (
        ((P, X, Y), (Q, X, Y)),
        ((Q, X, Y), (P, X, Y)),
        ((Q, X, Y), (S, X, Y)),
    ),
)


def heights(program, max_height, max_rows=MANY, facts=None, **options):
    base, sizes = kb.build(**program.arrays())
    found = prove.fact_heights(
        base,
        sizes,
        base.facts if facts is None else facts,
        max_height=max_height,
        max_atoms=MANY,
        budget=RowBudget(max_rows),
        **options,
    )
    return found.height.tolist(), found.n_undecided


@pytest.mark.parametrize(
    ("max_height", "p_1_2"), [(0, -1), (1, -1), (2, 2), (3, 2), (None, 2)]
)
def test_a_fact_is_proved_from_other_facts_alone(max_height, p_1_2):
    """In the order of the facts: p(1, 2), p(2, 3), p(3, 4), q(2, 3), s(1, 2).

    p(1, 2) follows from s(1, 2) by q(1, 2); p(2, 3) and q(2, 3) from each other, in one step; p(3, 4) only by way of
    q(3, 4), which nothing but p(3, 4) itself derives; no rule derives s.
    """
    in_one_step = -1 if max_height == 0 else 1
    assert heights(CIRCLE, max_height) == (
        [p_1_2, in_one_step, -1, in_one_step, -1],
        0,
    )


def test_facts_come_in_any_order_and_may_repeat():
    facts = torch.tensor([[P, 3, 4], [P, 1, 2], [P, 3, 4], [P, 1, 2]])
    assert heights(CIRCLE, None, facts=facts) == ([-1, 2, -1, 2], 0)


@pytest.mark.parametrize("object_identity", [False, True])
@pytest.mark.parametrize("max_height", [1, 2, None])
@given(program=programs)
@settings(max_examples=40)
def test_the_height_is_that_of_the_least_model_without_the_fact(
    max_height, object_identity, program
):
    found, n_undecided = heights(
        program, max_height, object_identity=object_identity
    )
    assert n_undecided == 0
    expected = []
    for fact in program.facts:
        others = tuple(other for other in program.facts if other != fact)
        model = oracles.least_model(
            replace(program, facts=others),
            max_height,
            object_identity=object_identity,
        )
        expected.append(model.get(fact, -1))
    assert found == expected


def test_what_a_bound_leaves_undecided_is_counted_and_not_proved():
    """Nothing is decided within 0 rows; in between, those that are removed one by one are open."""
    assert heights(CIRCLE, None, max_rows=0) == ([-1] * 5, 5)
    base, sizes = kb.build(**CIRCLE.arrays())
    budget = RowBudget(MANY)
    prove.fact_heights(
        base,
        sizes,
        base.facts,
        max_height=1,
        max_atoms=MANY,
        budget=budget,
    )
    # After the rules there are rows for the removal of one fact, but not for its T_P.
    found, n_undecided = heights(
        CIRCLE, None, max_rows=budget.n_rows + sizes.n_facts
    )
    assert (found, n_undecided) == ([-1, 1, -1, 1, -1], 3)
