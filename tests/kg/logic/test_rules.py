"""Rules as queries: the unifier of two atoms equals that of the resolution oracle."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.kg.logic.joins import Rule, most_general_unifier, substitute_rule
from tests import sld

N_CONSTANTS = 2
terms = st.lists(st.integers(1, N_CONSTANTS + 4), min_size=3, max_size=3)


def test_a_chain_of_variables_becomes_one():
    assert most_general_unifier((1, 3, 4, 5), (1, 4, 5, 2), 2) == {
        3: 2,
        4: 2,
        5: 2,
    }
    assert most_general_unifier((1, 3, 3), (1, 1, 2), 2) is None
    assert most_general_unifier((1, 3), (2, 3), 2) is None
    # predicates are no variables
    assert most_general_unifier((4, 1), (5, 1), 2) is None


@given(terms, terms)
@settings(max_examples=2000)
def test_the_unifier_is_a_most_general_one(left, right):
    left, right = (1, *left), (1, *right)
    same, known = (
        most_general_unifier(left, right, N_CONSTANTS),
        sld.unify(left, right, N_CONSTANTS),
    )
    assert (same is None) == (known is None)
    if same is not None and known is not None:
        a, b = (
            substitute_rule(Rule(0, left, (right,)), same).head,
            substitute_rule(Rule(0, left, (right,)), same).body[0],
        )
        assert a == b
        # no variable was bound without need
        assert len(set(a)) == len(set(sld.apply(left, known)))
