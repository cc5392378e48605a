"""Which rules are walked, and walks whose counts are known by hand; that they are right is tested by test_firings."""

import itertools

import pytest
import torch

from funcppo.kg.logic import derive, joins, kb
from funcppo.kg.logic.derive import Questions, plan_firings
from funcppo.kg.logic.joins import RowBudget, RowBudgetExceeded, Rule
from funcppo.kg.logic.triple_index import HEAD, TAIL
from tests.oracles import Program

N_CONSTANTS = 9
X, Y, Z, W = 10, 11, 12, 13
H, A, B = 1, 2, 3


def steps(head, *body):
    return derive.chain_steps(Rule(0, head, body), N_CONSTANTS)


def test_the_steps_of_a_chain_lead_from_the_given_argument_to_the_other():
    rule = (H, X, Y), (B, W, Z), (A, X, Z), (A, W, Y)  # atoms in any order
    assert steps(*rule) == (2 * A, 2 * B + 1, 2 * A)
    assert steps((H, X, Y), (A, Y, X)) == (2 * A + 1,)
    assert steps((H, X, Y, 0), (A, X, Y, 0)) == (2 * A,)  # padded


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ((H, X, Y), [(A, X, Z)]),  # does not reach the end
        ((H, X, Y), [(A, X, Z), (B, W, Y)]),  # is in two parts
        ((H, X, Y), [(A, X, Y), (B, X, Y)]),  # goes two ways
        ((H, X, Y), [(A, X, Z), (B, Z, X), (A, X, Y)]),  # comes back
        ((H, X, Y), [(A, X, Y), (B, Y, Z)]),  # goes on
        ((H, X, Y), [(A, X, Z), (B, Z, Z), (A, Z, Y)]),  # has a loop
        ((H, X, X), [(A, X, X)]),
        ((H, X, 5), [(A, X, 5)]),
        ((H, X, Y), [(A, X, 5), (A, 5, Y)]),
        ((H, 5, Y), [(A, 5, Y)]),
        ((H, X), [(A, X)]),
        ((H, X, Y, Z), [(A, X, Y, Z)]),
        ((H, X, Y), [(A, X, 0), (B, X, Y)]),  # a unary atom, padded
        ((H, X, Y), []),
        ((H, X, X), []),
    ],
)
def test_other_bodies_are_no_chains(head, body):
    assert steps(head, *body) is None


def ladder(n):
    """Two facts from each rung to both entities of the next: 2 ** n ways from the first to the last."""
    facts = [(A, 1, 2), (A, 1, 3)]
    for rung in range(1, n):
        low = 2 * rung
        facts += [(A, i, j) for i in (low, low + 1) for j in (low + 2, low + 3)]
    return facts


def walk(questions, n_atoms, **options):
    """All firings of a chain of atoms over a ladder as long as it."""
    variables = [20, *range(22, 21 + n_atoms), 21]
    body = [(A, i, j) for i, j in itertools.pairwise(variables)]
    facts = sorted(ladder(n_atoms))
    program = Program(19, (2, 2), tuple(facts), (((H, 20, 21), *body),))
    built, sizes = kb.build(**program.arrays())
    plan = plan_firings(built, sizes)
    assert not plan.groups  # no rule is left to joins
    options = dict(left_out="fact", object_identity=False) | options
    return list(
        derive.iter_chain_firings(plan.chains, sizes, questions, **options)
    )


def ask(*rows):
    return Questions(*torch.tensor(rows).unbind(1))


@pytest.mark.parametrize("object_identity", [False, True])
def test_ways_are_counted(object_identity):
    (fired,) = walk(ask((H, TAIL, 1, 0)), 5, object_identity=object_identity)
    assert fired.candidate.tolist() == [10, 11]
    assert fired.n_groundings.tolist() == [16, 16]
    assert not len(fired.walk)


@pytest.mark.parametrize("object_identity", [False, True])
def test_probabilities_of_walks_that_meet_add_up(object_identity):
    options = dict(object_identity=object_identity, with_walks=True)
    (fired,) = walk(ask((H, TAIL, 1, 0)), 5, **options)
    assert fired.n_groundings.tolist() == [16, 16]
    assert fired.walk.tolist() == [1 << 59, 1 << 59]
    assert fired.rule.tolist() == [0, 0]


@pytest.mark.parametrize("object_identity", [False, True])
def test_walks_are_the_same_in_small_pieces(object_identity, monkeypatch):
    """Also where the neighbours of an entity are in two of them."""
    questions = ask((H, TAIL, 1, 0), (H, HEAD, 8, 0), (H, HEAD, 9, 0))
    options = dict(object_identity=object_identity, with_walks=True)
    whole = walk(questions, 4, **options)
    assert all(len(part.walk) for part in whole)
    monkeypatch.setattr(joins, "MAX_CHUNK_ROWS", 1)
    pieces = walk(questions, 4, **options)
    for expected, found in zip(whole, pieces, strict=True):
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other)


def test_neighbours_are_the_same_found_by_search(monkeypatch):
    """Where a table of all offsets would be too large."""
    questions = ask((H, TAIL, 1, 0), (H, HEAD, 8, 0), (H, TAIL, 19, 0))
    whole = walk(questions, 4, with_walks=True)
    monkeypatch.setattr(derive, "MAX_OFFSETS", 0)
    searched = walk(questions, 4, with_walks=True)
    for expected, found in zip(whole, searched, strict=True):
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other)

    none = Program(3, (2, 2), (), (((H, 4, 5), (A, 4, 6), (A, 6, 5)),))
    built, sizes = kb.build(**none.arrays())
    plan = plan_firings(built, sizes).chains
    assert not list(
        derive.iter_chain_firings(
            plan,
            sizes,
            ask((H, TAIL, 1, 0)),
            left_out="fact",
            object_identity=False,
        )
    )


def test_walks_spend_their_budget():
    questions = ask((H, TAIL, 1, 0))
    with pytest.raises(RowBudgetExceeded):
        walk(questions, 3, budget=RowBudget(6 * joins.JOIN_OVERHEAD_ROWS))
    # Two joins for each of three steps, over at most eight rows.
    assert walk(
        questions, 3, budget=RowBudget(6 * joins.JOIN_OVERHEAD_ROWS + 30)
    )


@pytest.mark.parametrize("left_out", ["fact", "pair"])
def test_a_fact_that_is_left_out_is_not_walked_backwards_either(left_out):
    """h(x, y) :- a(x, z), h(w, z), a(w, y): from 1 over 2 back to 1, along h(1, 2), and on to 2 and 3."""
    body = [(A, X, Z), (H, W, Z), (A, W, Y)]
    facts = ((H, 1, 2), (A, 1, 2), (A, 1, 3))
    program = Program(N_CONSTANTS, (2, 2), facts, (((H, X, Y), *body),))
    plan = plan_firings(*kb.build(**program.arrays()))

    def candidates(answer):
        parts = derive.iter_chain_firings(
            plan.chains,
            plan.sizes,
            ask((H, TAIL, 1, answer)),
            left_out=left_out,
            object_identity=False,
        )
        return [entity for p in parts for entity in p.candidate.tolist()]

    assert candidates(0) == [2, 3]
    assert candidates(2) == []
    # What links 1 and 3 is no part of the way to 2.
    assert candidates(3) == ([2, 3] if left_out == "fact" else [2])
