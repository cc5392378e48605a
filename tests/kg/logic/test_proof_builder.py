"""Building proofs: worked by hand; what is built holds, from the least model and from every trace of a slow prover."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.kg.logic import prove
from funcppo.kg.logic.prove import Choice
from tests.kg.logic.proof_cases import (
    COUNTRIES,
    C,
    X,
    Y,
    Z,
    checked,
    programs,
    proved_by_model,
    substitute,
)


def traces(program, root, max_height, budget):
    """Choices of every proof that leftmost resolution finds, breadth first, within a number of resolution steps."""
    todo, steps = [([(root, 0)], [], itertools.count(1000))], 0
    while todo and steps < budget:
        steps += 1
        ((goal, height), *rest), choices, fresh = todo.pop(0)
        options = [
            ("rule", i, r)
            for i, r in enumerate(program.rules)
            if height < max_height
        ]
        options += [
            ("fact", i, [f]) for i, f in enumerate(program.facts) if f != root
        ]
        for kind, i, clause in options:
            names = {
                t: next(fresh)
                for t in sorted(
                    {
                        t
                        for a in clause
                        for t in a[1:]
                        if t > program.n_constants
                    }
                )
            }
            head, *body = (substitute(a, names) for a in clause)
            theta = unifier(head, goal, program.n_constants)
            if theta is None:
                continue
            goals = [
                (substitute(a, theta), h)
                for a, h in [*((b, height + 1) for b in body), *rest]
            ]
            goals = [
                (a, h)
                for a, h in goals
                if a == root or a not in program.fact_set
            ]
            chosen = [*choices, (kind, i, random.Random(steps).random())]
            if goals:
                todo.append((goals, chosen, fresh))
            else:
                yield chosen


def unifier(left, right, n_constants):
    """An idempotent most general unifier, by rewriting all equations at each step; None if there is none."""
    if left[0] != right[0]:
        return None
    equations, theta = list(zip(left[1:], right[1:])), {}
    while equations:
        (s, t), *equations = equations
        if s == t:
            continue
        if s <= n_constants:
            s, t = t, s
        if s <= n_constants:
            return None
        rewrite = lambda u, s=s, t=t: t if u == s else u
        equations = [(rewrite(a), rewrite(b)) for a, b in equations]
        theta = {v: rewrite(u) for v, u in theta.items()} | {s: t}
    return theta


def test_a_trace_of_choices_worked_by_hand():
    """france is next to germany, which is in europe; the last goal is a fact and needs no choice."""
    choices = [Choice("rule", 0, 0.83), Choice("fact", 0, 0.5)]
    proof = prove.from_trace(COUNTRIES, (2, 1, 3), choices)
    assert [
        (node.goal, node.rule, node.probability) for node in proof.nodes
    ] == [
        ((2, 1, 3), 0, 0.83),
        ((1, 1, 2), None, 0.5),
        ((2, 2, 3), None, None),
    ]


def test_a_program_leaves_padding_atoms_out():
    program = prove.make_program(
        [[1, 1, 0]],
        [[[1, X, 0], [1, X, 0], [0, 0, 0]], [[1, 2, 0], [0, 0, 0], [0, 0, 0]]],
        C,
    )
    assert program.facts == ((1, 1, 0),) and program.fact_set == {(1, 1, 0)}
    assert program.rules == (((1, X, 0), (1, X, 0)), ((1, 2, 0),))


@given(programs())
@settings(max_examples=60)
def test_a_proof_from_the_model_holds_within_its_height(program):
    for height, proof in proved_by_model(program):
        assert checked(program, proof, max_height=height) == []


@given(programs(), st.data())
@settings(max_examples=150)
def test_a_proof_from_a_trace_holds_and_keeps_the_probability_of_every_choice(
    program, data
):
    root = data.draw(
        st.tuples(st.integers(1, 3), st.integers(1, C), st.integers(1, C))
        | st.sampled_from(program.facts)
    )
    for choices in itertools.islice(
        traces(program, root, max_height=3, budget=40), 5
    ):
        proof = prove.from_trace(program, root, choices)
        assert proof.nodes[0].goal == root
        assert checked(program, proof, max_height=3, leave_one_out=True) == []
        chosen = [
            node.probability
            for node in proof.nodes
            if node.probability is not None
        ]
        assert sorted(chosen) == sorted(p for _, _, p in choices)
        rules = [node.rule for node in proof.nodes if node.rule is not None]
        assert sorted(rules) == sorted(
            i for kind, i, _ in choices if kind == "rule"
        )


def test_bindings_found_later_are_seen_in_earlier_nodes():
    """p(X,Y) :- q(X,Z), q(Z,Y): Z is open when q(X,Z) is resolved by q(V,W) :- r(V,W); r's fact binds it."""
    program = prove.make_program(
        [(3, 1, 2), (2, 2, 3)],
        [[(1, X, Y), (2, X, Z), (2, Z, Y)], [(2, Y, X), (3, Y, X)]],
        C,
    )
    proof = prove.from_trace(
        program,
        (1, 1, 3),
        [("rule", 0, None), ("rule", 1, None), ("fact", 0, None)],
    )
    assert [node.goal for node in proof.nodes] == [
        (1, 1, 3),
        (2, 1, 2),
        (2, 2, 3),
        (3, 1, 2),
    ]
    assert proof.nodes[1].substitution == ((X, 2), (Y, 1))


def test_an_open_root_is_bound_by_its_proof():
    """locatedIn(Y, europe), whose variable has the id of one of the rule's."""
    proof = prove.from_trace(
        COUNTRIES, (2, Y, 3), [("rule", 0, None), ("fact", 0, None)]
    )
    assert proof.nodes[0].goal == (2, 1, 3) and checked(COUNTRIES, proof) == []
    unsafe = prove.make_program([(2, 1, 1)], [[(1, X, Y), (2, X, X)]], C)
    with pytest.raises(ValueError, match="unbound"):
        prove.from_trace(
            unsafe, (1, X, Y), [("rule", 0, None), ("fact", 0, None)]
        )


def test_a_known_root_is_derived_when_it_is_left_out():
    """Two neighbours: each is a fact, and the other's symmetric image."""
    program = prove.make_program([(1, 1, 2), (1, 2, 1)], COUNTRIES.rules, C)
    derive = lambda atom: (1, [(1, atom[2], atom[1])])
    proof = prove.from_model(program, derive, (1, 1, 2), leave_one_out=True)
    assert [node.rule for node in proof.nodes] == [1, None]
    assert checked(program, proof, max_height=1, leave_one_out=True) == []
    assert prove.from_trace(program, (1, 1, 2), [("rule", 1, None)]) == proof
    assert (
        len(
            prove.from_model(
                program, derive, (1, 1, 2), leave_one_out=False
            ).nodes
        )
        == 1
    )


def test_a_root_met_again_is_not_a_fact_there():
    """p(1, 2) by symmetry twice meets p(1, 2), a fact, which is no leaf of its own proof."""
    program = prove.make_program([(1, 1, 2)], COUNTRIES.rules, C)
    with pytest.raises(ValueError, match="leave 1 goals unproved"):
        prove.from_trace(
            program, (1, 1, 2), [("rule", 1, None), ("rule", 1, None)]
        )


def test_a_choice_that_does_not_apply_is_named():
    known = prove.make_program(
        [(1, 1, 1), (1, 1, 2)], [[(1, X, X), (1, X, Y)]], C
    )
    for root, choices, text in (
        # p(X, X) and p(1, 2)
        ((1, 1, 2), [("rule", 0, None)], "choice 0: rule 0 does not resolve"),
        # of another predicate
        ((2, 1, 1), [("rule", 0, None)], "choice 0: rule 0 does not resolve"),
        # leave-one-out
        ((1, 1, 2), [("fact", 1, None)], "choice 0: fact 1 does not resolve"),
        ((1, 1, 1), [("fact", 2, None)], "choice 0: there is no fact 2"),
        ((1, 1, 1), [("fact", -1, None)], "choice 0: there is no fact -1"),
        ((1, 1, 1), [("end", 0, None)], "choice 0: there is no end 0"),
        ((1, 2, 2), [("rule", 0, None)], "leave 1 goals unproved"),
        ((1, 1, 1), [], "leave 1 goals unproved"),
        (
            (1, 1, 1),
            [("rule", 0, None), ("fact", 1, None), ("fact", 1, None)],
            "choice 2: no goal is left",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            prove.from_trace(known, root, choices)
