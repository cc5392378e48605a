"""The last step of a derivation: worked by hand, and equal to the smallest grounding over Python sets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from funcppo.kg.logic import fixpoint, kb
from funcppo.kg.logic.prove import find_derivation, find_ground_body
from tests import oracles
from tests.kg.logic.test_fixpoint import EDGE, GRAPH, MANY, PATH, heights
from tests.oracles import Program, programs


def build(program, **options):
    world, sizes = kb.build(**program.arrays())
    return (
        world,
        sizes,
        fixpoint.least_model(
            world, sizes, max_height=None, max_atoms=MANY, **options
        ),
    )


def unpadded(atoms):
    return [tuple(term for term in atom if term) for atom in atoms]


def test_derivations_worked_by_hand():
    """path(1, 3) has height 2, by path(1, 2) and edge(2, 3); the first rule derives path(1, 2) from edge(1, 2)."""
    found = find_derivation(*build(GRAPH), (PATH, 1, 3))
    assert found == (1, ((PATH, 1, 2), (EDGE, 2, 3)))
    assert find_derivation(*build(GRAPH), (PATH, 1, 2)) == (
        0,
        (
            (
                EDGE,
                1,
                2,
            ),
        ),
    )


def test_a_ground_body_worked_by_hand():
    """p(1, 2) by p(X, Y) :- p(X, Z), p(Z, Y): only through p(1, 1) or p(2, 2), and so through p(1, 2) itself."""
    x, y, z = 4, 5, 6
    rules = (((1, x, y), (1, x, z), (1, z, y)), ((1, x, y), (2, y, x)))
    program = Program(
        3, (2, 2), ((1, 1, 1), (1, 1, 2), (1, 1, 3), (2, 2, 1)), rules
    )
    assert (
        find_ground_body(*build(program), (1, 1, 2), rule=0, height=1) is None
    )
    assert find_ground_body(*build(program), (1, 1, 2), rule=1, height=1) == (
        (2, 2, 1),
    )
    other = Program(3, (2, 2), (*program.facts, (1, 3, 2)), rules)
    assert find_ground_body(*build(other), (1, 1, 2), rule=0, height=1) == (
        (1, 1, 3),
        (1, 3, 2),
    )


@given(programs)
@settings(max_examples=150)
def test_a_derivation_is_the_first_rule_with_its_smallest_body_of_smaller_heights(
    program,
):
    for identity in (False, True):
        world, sizes, model = build(program, object_identity=identity)
        found = heights(model)
        for padded, (atom, height) in zip(model.atoms.tolist(), found.items()):
            if height:
                i, body = find_derivation(world, sizes, model, tuple(padded))
                below = {a for a, h in found.items() if h < height}
                assert (
                    i,
                    [tuple(t for t in a if t) for a in body],
                ) == _first_derivation(program, atom, below, identity)


@given(programs)
@settings(max_examples=100)
def test_a_ground_body_is_the_smallest_of_its_rule_without_the_atom(program):
    for identity in (False, True):
        world, sizes, model = build(program, object_identity=identity)
        found = heights(model)
        for padded, atom in zip(model.atoms.tolist(), found):
            for i in range(len(program.rules)):
                for height in (1, 2):
                    below = {
                        a for a, h in found.items() if h < height and a != atom
                    }
                    body = find_ground_body(
                        world, sizes, model, tuple(padded), i, height
                    )
                    expected = _smallest_body(program, i, atom, below, identity)
                    assert (
                        None if body is None else unpadded(body)
                    ) == expected


def _first_derivation(program, atom, below, identity):
    for i in range(len(program.rules)):
        body = _smallest_body(program, i, atom, below, identity)
        if body is not None:
            return i, body
    raise AssertionError


def _smallest_body(program, i, atom, below, identity):
    rule = program.rules[i]
    bindings = [
        s
        for s in oracles.groundings(rule, below, program.n_constants, identity)
        if oracles.put(rule[0], s) == atom
    ]
    names = list(
        dict.fromkeys(
            t for a in rule[1:] for t in a[1:] if t > program.n_constants
        )
    )
    if not bindings:
        return None
    smallest = min(bindings, key=lambda s: [s[v] for v in names])
    return [oracles.put(a, smallest) for a in rule[1:]]


def test_a_fact_and_an_underivable_atom_have_no_derivation():
    world, sizes, model = build(GRAPH)
    with pytest.raises(
        ValueError, match="expected a derived atom of the model, got a fact"
    ):
        find_derivation(world, sizes, model, (EDGE, 1, 2))
    with pytest.raises(
        ValueError, match="expected a derived atom of the model, got none"
    ):
        find_derivation(world, sizes, model, (PATH, 4, 1))
