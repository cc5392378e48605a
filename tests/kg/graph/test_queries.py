"""Queries: what a name without quotes stands for, in a data set and in a program."""

import numpy as np
import pytest

from funcppo.kg.graph.loaders import from_text, from_triples
from funcppo.kg.graph.rules import parse_query, read_query

PEOPLE = [
    ("Zoë", "citizen of", "China"),
    ("Li", "citizen of", "China"),
    ("Q42", "P31", "Q5"),
    ("_x", "P31", "A"),
]


def read(dataset, text):
    query = read_query(dataset, text)
    return query.atom.tolist(), query.variables


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ("r(a, b)", [1, 1, 2]),
        ("r(X, 'b').", [1, 3, 2]),
        ("r(X, Y)", [1, 3, 4]),
        ("r(X, X)", [1, 3, 3]),
        ("r(_, _)", [1, 3, 4]),
        ("r(?x, ?y)", [1, 3, 4]),
        ("r(?x, ?x)", [1, 3, 3]),
        ("s(b, X)", [2, 2, 3]),
    ],
)
def test_a_query_worked_by_hand(query, ids):
    d = from_triples([("a", "r", "b")], rules="s(X,Y) :- r(Y,X)")
    atom = parse_query(d, query)
    assert atom.tolist() == ids and atom.dtype == np.int64


@pytest.mark.parametrize(
    ("query", "ids", "variables"),
    [
        ("'citizen of'(Zoë, China)", [1, 1, 2], ()),
        ("'citizen of'(X, China)", [1, 7 + 1, 2], ("X",)),
        ("'citizen of'(?Zoë, ?who)", [1, 8, 9], ("Zoë", "who")),
        ("P31(Q42, Y2)", [2, 4, 8], ("Y2",)),
        ("P31(_x, _)", [2, 6, 8], ("_0",)),
        ("P31(_, _)", [2, 8, 9], ("_0", "_1")),
        ("P31(?A, A)", [2, 8, 7], ("A",)),
    ],
)
def test_a_name_of_the_data_is_that_entity_whatever_its_first_letter(
    query, ids, variables
):
    assert read(from_triples(PEOPLE), query) == (ids, variables)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (
            "'citizen of'(Zoe, China)",
            "unknown entity 'Zoe': expected one of the data's (close: 'Zoë'); a variable is ?x or a single capital",
        ),
        (
            "P31(Q43, X)",
            "unknown entity 'Q43': expected one of the data's (close: 'Q42'); a variable is ?x or a single capital",
        ),
        (
            "P31(_y, X)",
            "unknown entity '_y': expected one of the data's (none of 7 is spelled like it);"
            " a variable is ?x or a single capital",
        ),
        (
            "P31(q, X)",
            "unknown entity 'q': expected one of the data's (none of 7 is spelled like it);"
            " a variable is ?x or a single capital",
        ),
        (
            "P31('', Y)",
            "unknown entity '': expected one of the data's (none of 7 is spelled like it)",
        ),
        (
            "P31('X', Y)",
            "unknown entity 'X': expected one of the data's (none of 7 is spelled like it);"
            " a variable is ?x or a single capital",
        ),
    ],
)
def test_a_name_that_is_neither_an_entity_nor_a_variable_is_an_error(
    query, expected
):
    with pytest.raises(ValueError) as caught:
        read_query(from_triples(PEOPLE), query)
    assert str(caught.value) == f"query {query!r}: {expected}"


def test_a_single_capital_that_is_an_entity_is_told():
    query = read_query(from_triples(PEOPLE), "P31(X, A)")
    assert query.notes == ("A is an entity here; write ?a for a variable",)
    assert not read_query(from_triples(PEOPLE), "P31(X, 'A')").notes
    assert not read_query(from_triples(PEOPLE), "P31(Q42, X)").notes


PROGRAM = "p('Ann', bob). p(X, Y) :- p(Y, X), q(X). q(bob)."


def test_in_a_program_capitals_are_variables():
    d = from_text(PROGRAM)
    query = read_query(d, "p(Ann, ?x)")
    assert (query.atom.tolist(), query.variables) == ([1, 3, 4], ("Ann", "x"))
    assert query.notes == (
        "Ann is a variable here; the entity is 'Ann', in single quotes",
    )
    assert query.dataset is d
    assert read(d, "p('Ann', _b)") == ([1, 1, 3], ("_b",))


def test_a_constant_that_a_program_does_not_have_is_added_and_told():
    d = from_text(PROGRAM)
    query = read_query(d, "p(X, bobb)")
    assert query.dataset.entities == ("Ann", "bob", "bobb")
    assert (query.atom.tolist(), query.variables) == ([1, 4, 3], ("X",))
    assert query.notes == ("no fact and no rule has 'bobb' (close: 'bob')",)
    # Variables of rules are numbered from C + 1 on.
    assert d.rules.tolist() == [[[1, 3, 4], [1, 4, 3], [2, 3, 0]]]
    assert query.dataset.rules.tolist() == [[[1, 4, 5], [1, 5, 4], [2, 4, 0]]]


def test_predicates_of_a_program_are_found_by_name_and_arity():
    d = from_text("p(a). p(a, b). q(X) :- p(X, X).")
    assert read(d, "p(a)")[0] == [1, 1, 0]
    assert read(d, "p(a, X)")[0] == [2, 1, 3]
    with pytest.raises(ValueError, match="expected 1 or 2 arguments for 'p'"):
        read_query(d, "p(a, b, X)")


def test_an_integer_in_quotes_is_no_number_in_a_program():
    """In Prolog p('1') fails where p(1) holds; a data set has names alone."""
    d = from_text("p(1).")
    assert read(d, "p(1)")[0] == [1, 1]
    with pytest.raises(ValueError, match="expected the number 1 without"):
        read_query(d, "p('1')")
    names = from_triples([("1", "r", "2")])
    assert read(names, "r('1', '2')")[0] == [1, 1, 2]
