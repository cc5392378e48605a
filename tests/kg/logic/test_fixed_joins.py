"""Rules that are no path rules, by static joins."""

from __future__ import annotations

import torch

from funcppo.kg.logic import firing_chunks, fixed_firings, fixed_joins, kb
from funcppo.kg.logic.firings import plan_firings
from funcppo.kg.logic.triple_index import HEAD, TAIL
from tests.kg.logic.test_firings import LIKES, X, Y, Z, all_questions, ask
from tests.oracles import Program


def test_the_literal_with_the_fewest_rows_comes_first():
    """Of a triangle: after the question and the rule, what the given entity is linked to by the rarer predicate."""
    rare = 2
    facts = [(LIKES, i, j) for i in range(1, 4) for j in range(1, 4)]
    triangle = ((LIKES, X, Y), (LIKES, X, Z), (rare, X, Y), (LIKES, Z, Y))
    program = Program(3, (2, 2), (*facts, (rare, 1, 2)), (triangle,))
    built, sizes = kb.build(**program.arrays())
    plan = plan_firings(built, sizes)
    joins = list(fixed_joins.iter_rule_joins(plan, "fact", False))
    assert len(joins) == 2, "one for each side"
    join, views = joins[TAIL - 1]
    assert join.side == TAIL
    assert [len(step.new) for step in join.steps][-1] == 0, "a check at last"
    n_rows = [len(view.counts) for view in views]
    assert sorted(n_rows) == [1, 1, 9, 9]
    assert n_rows[:2] == [1, 1]


def test_a_shape_without_facts_has_no_join():
    program = Program(
        3, (2, 2), ((LIKES, 1, 2),), (((LIKES, X, 3), (2, X, Y), (2, Y, X)),)
    )
    built, sizes = kb.build(**program.arrays())
    plan = plan_firings(built, sizes)
    assert not list(fixed_joins.iter_rule_joins(plan, "fact", False))


def test_more_rules_than_ids():
    """Views of facts are shared with the ragged listing, whose keys are as wide as an id, and not as a rule."""
    rules = [((LIKES, X, c), (2, d, X)) for c in (1, 2, 3) for d in (1, 2, 3)]
    program = Program(
        3, (2, 2), ((2, 1, 2), (2, 1, 3), (2, 3, 3)), tuple(5 * rules)
    )
    built, sizes = kb.build(**program.arrays())
    assert sizes.n_rules.bit_length() > 2
    questions = ask(all_questions(program))
    for ragged_first in (False, True):
        plan = plan_firings(built, sizes)
        if ragged_first:
            firing_chunks.sorted_firings(plan, questions, "fact", False)
        fixed = fixed_firings.plan_fixed_firings(
            plan, left_out="fact", object_identity=False
        )
        listed = fixed_firings.list_firings(*fixed, questions)
        expected = firing_chunks.sorted_firings(plan, questions, "fact", False)
        n = int(listed.n_firings)
        assert n == len(expected.rule) > 0
        assert torch.equal(listed.firings.rule[:n], expected.rule)


def test_what_nothing_needs_is_counted_and_not_listed():
    """likes(X, 1) <- t(X, Z, W): a row for each X, with as many groundings as there are Z and W."""
    w, t = Z + 1, 2
    facts = ((t, 2, 1, 1), (t, 2, 1, 2), (t, 2, 3, 1), (t, 3, 1, 1))
    program = Program(3, (2, 3), facts, (((LIKES, X, 1), (t, X, Z, w)),))
    built, sizes = kb.build(**program.arrays())
    fixed = fixed_firings.plan_fixed_firings(
        plan_firings(built, sizes), left_out="fact", object_identity=False
    )
    listed = fixed_firings.list_firings(*fixed, ask([(LIKES, HEAD, 1, 0)]))
    assert listed.n_firings == 2
    assert listed.firings.candidate[:2].tolist() == [2, 3]
    assert listed.firings.n_groundings[:2].tolist() == [3, 1]
    assert listed.demand.max() == 2
