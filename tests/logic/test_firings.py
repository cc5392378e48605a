"""Firings equal those found by trying every grounding, whatever a question leaves out."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.logic import kb
from funcppo.logic.firings import iter_firings, plan_firings
from funcppo.logic.joins import RowBudget, RowBudgetExceeded
from funcppo.logic.question_types import Questions
from funcppo.logic.triple_index import HEAD, TAIL
from tests import oracles
from tests.oracles import Program, programs

LIKES = 1
X, Y, Z = 4, 5, 6


def ask(rows) -> Questions:
    table = torch.tensor(rows, dtype=torch.int64).view(-1, 4)
    return Questions(*table.unbind(1))


def fire(program, rows, **options):
    """The groundings of each (question, candidate, rule)."""
    built, sizes = kb.build(**program.arrays())
    found: Counter = Counter()
    for part in iter_firings(plan_firings(built, sizes), ask(rows), **options):
        for *triple, count in zip(*(c.tolist() for c in part), strict=True):
            assert count > 0 and tuple(triple) not in found, "each once"
            found[tuple(triple)] = count
    return found


def unknown_facts(row, left_out):
    """What a question leaves out, as a test of an atom."""
    predicate, side, entity, answer = row
    pair = (entity, answer) if side == TAIL else (answer, entity)

    def is_unknown(atom):
        if not answer or len(atom) != 3:
            return False
        if left_out == "pair":
            return atom[1:] in (pair, pair[::-1])
        return atom == (predicate, *pair)

    return is_unknown


def brute_force(program, rows, left_out="fact", object_identity=False):
    found: Counter = Counter()
    for question, row in enumerate(rows):
        predicate, side, entity, _ = row
        is_unknown = unknown_facts(row, left_out)
        facts = {fact for fact in program.facts if not is_unknown(fact)}
        for i, rule in enumerate(program.rules):
            if rule[0][0] != predicate:
                continue
            for substitution in oracles.groundings(
                rule, facts, program.n_constants, object_identity
            ):
                head = oracles.put(rule[0], substitution)
                if head[HEAD + TAIL - side] == entity:
                    found[question, head[side], i] += 1
    return found


def all_questions(program):
    """Every question about a binary predicate, with and without an answer to leave out."""
    constants = range(1, program.n_constants + 1)
    predicates = [p for p, arity in enumerate(program.arity, 1) if arity == 2]
    rows = [
        (p, side, entity, 0)
        for p, side, entity in itertools.product(
            predicates, (HEAD, TAIL), constants
        )
    ]
    for p, *arguments in program.facts:
        if p in predicates:
            head, tail = arguments
            rows += [(p, HEAD, tail, head), (p, TAIL, head, tail)]
    return rows


@given(programs, st.sampled_from(["fact", "pair"]), st.booleans())
@settings(max_examples=150)
def test_firings_are_those_of_every_grounding(program, left_out, identity):
    rows = all_questions(program)
    options = dict(left_out=left_out, object_identity=identity)
    assert fire(program, rows, **options) == brute_force(
        program, rows, **options
    )


def test_two_ways_to_one_answer_count_twice():
    program = Program(
        3,
        (2,),
        ((LIKES, 1, 2), (LIKES, 1, 3), (LIKES, 2, 3), (LIKES, 3, 3)),
        (((LIKES, X, Y), (LIKES, X, Z), (LIKES, Z, Y)),),
    )
    assert fire(program, [(LIKES, TAIL, 1, 0)]) == {(0, 3, 0): 2}
    # likes(1, 3) is the second atom's fact of one way only, likes(3, 3).
    assert fire(program, [(LIKES, TAIL, 1, 3)]) == {(0, 3, 0): 1}


def test_rules_that_differ_in_constants_alone_are_told_apart():
    program = Program(
        3,
        (2, 2),
        ((2, 1, 2), (2, 1, 3), (2, 2, 3)),
        (
            ((LIKES, X, 3), (2, X, 2)),
            ((LIKES, X, 1), (2, X, 3)),
            ((LIKES, X, 1), (2, X, 3)),  # the same rule again
        ),
    )
    found = fire(program, [(LIKES, TAIL, 1, 0), (LIKES, TAIL, 2, 0)])
    assert found == {(0, 3, 0): 1, (0, 1, 1): 1, (0, 1, 2): 1} | {
        (1, 1, 1): 1,
        (1, 1, 2): 1,
    }


def test_rules_of_one_shape_about_many_predicates_are_solved_as_one():
    # more predicates than constants, whose numbers no variable may have
    n_predicates = 9
    facts = tuple((p, 1 + p % 2, 2) for p in range(1, n_predicates + 1))
    a, b = 3, 4  # variables
    rules = tuple(
        ((p, a, 1 + p % 2), (q, a, b))
        for p in range(1, n_predicates + 1)
        for q in range(1, n_predicates + 1)
    )
    program = Program(2, (2,) * n_predicates, facts, rules)
    plan = plan_firings(*kb.build(**program.arrays()))
    assert len(plan.groups) == 1
    rows = all_questions(program)
    found = fire(program, rows)
    assert found == brute_force(program, rows)
    assert len({rule for _, _, rule in found}) == len(rules)


def test_rules_about_other_predicates_cost_a_question_no_join():
    program = Program(
        3,
        (2, 2),
        ((LIKES, 1, 2), (2, 1, 2)),
        (((2, X, Y), (LIKES, Y, X), (LIKES, X, Y)),),
    )
    budget = RowBudget(10**6)
    assert not fire(program, [(LIKES, TAIL, 1, 0)], budget=budget)
    assert not budget.n_joins
    fire(program, [(2, TAIL, 1, 0)], budget=budget)
    assert budget.n_joins


def test_the_work_is_bounded_by_the_budget():
    program = Program(
        3, (2,), ((LIKES, 1, 2),), (((LIKES, X, Y), (LIKES, Y, X)),)
    )
    with pytest.raises(RowBudgetExceeded):
        fire(program, [(LIKES, TAIL, 2, 0)], budget=RowBudget(1))
    assert fire(program, [(LIKES, TAIL, 2, 0)], budget=RowBudget(10**6))
