"""T_P: equal to a least model over Python sets, to Prolog, and to the published counts."""

from __future__ import annotations

from hypothesis import given, settings

from funcppo.logic import consequences as consequences_
from funcppo.logic import fixpoint, joins, kb
from tests import oracles
from tests.oracles import programs

MANY = 10**9  # a budget that no test reaches


def build(program):
    return kb.build(**program.arrays())


def atoms_of(table):
    return [tuple(t for t in row if t) for row in table.tolist()]


def model_of(program, max_height=None, **options):
    model = fixpoint.least_model(*build(program), max_height=max_height, budget=MANY, **options)
    return dict(zip(atoms_of(model.atoms), model.height.tolist())), model


@given(programs)
@settings(max_examples=400, deadline=None)
def test_the_model_is_the_least_model_with_its_heights(program):
    found, model = model_of(program)
    assert found == oracles.least_model(program)
    assert model.complete and model.fixpoint
    assert list(found) == sorted(found)


@given(programs)
@settings(max_examples=100, deadline=None)
def test_object_identity_binds_variables_apart(program):
    assert model_of(program, object_identity=True)[0] == oracles.least_model(program, object_identity=True)


@given(programs)
@settings(max_examples=200, deadline=None)
def test_consequences_are_the_heads_of_one_application(program):
    for leave_one_out in (False, True):
        for identity in (False, True):
            found = consequences_.consequences(*build(program), leave_one_out=leave_one_out, object_identity=identity)
            pairs = list(zip(found.rule.tolist(), atoms_of(found.atoms)))
            assert len(pairs) == len(set(pairs))
            assert set(pairs) == oracles.consequences(program, leave_one_out, identity)


@given(programs)
@settings(max_examples=60, deadline=None)
def test_pieces_of_any_size_give_the_same_model(program):
    whole = model_of(program)[0]
    size, joins.PIECE = joins.PIECE, 2
    try:
        assert model_of(program)[0] == whole
    finally:
        joins.PIECE = size
