"""Readers: worked lines of each format; reading as the inverse of writing is in test_writers."""

import math

import pytest

from funcppo.kg.graph.loaders import from_text, from_triples
from funcppo.kg.graph.rules import detect_format, read_clauses
from funcppo.kg.graph.text import Atom, Clause, Variable
from tests.kg.graph.clause_strategies import canonical

X, Y, Z = Variable("X"), Variable("Y"), Variable("Z")


def read(text):
    return read_clauses(text, "f", detect_format(text)).clauses


@pytest.mark.parametrize(
    ("line", "weight"),
    [
        ("0.5\tp(X,Y) :- q(X,Z), r(Z,Y)", 0.5),
        ("\t12\t24\t.5\tp(X, Y):-q(X,Z),r(Z, Y).", math.nan),
        ("p(X,Y) :- q(X,Z), r(Z,Y)", math.nan),
        ("24\t12\t0.5\tp(X,Y) <= q(X,A), r(A,Y)", 0.5),
        ("?a  q  ?c  ?c  r  ?b   => ?a  p  ?b\t0.1\t0.5\t0.7\t12", 0.5),
        ("?a q ?c ?c r ?b => ?a p ?b", math.nan),
        ("?a q ?c  ?c r ?b   => ?a p ?b\t0.1\t0.5", 0.5),
        (
            "p(X,Y) :-\n  q(X,Z), % a comment\n  /* another. */ r(Z,Y).",
            math.nan,
        ),
    ],
)
def test_one_rule_in_every_format_gives_one_clause(line, weight):
    expected = Clause(
        Atom("p", (X, Y)), (Atom("q", (X, Z)), Atom("r", (Z, Y))), weight, 1
    )
    assert [canonical(c) for c in read(line)] == [canonical(expected)]


def test_anyburls_zero_rules_are_left_out_and_a_note_says_so():
    """h(X,c) <= holds of every constant, whatever the facts: no derivation, but no reason to refuse the file either."""
    lines = "9\t6\t.6\tknows(X,bob) <= \n8\t4\t.5\tknows(X,Y) <= knows(Y,X)\n7\t1\t.1\tlikes(ann,Y) <=\n"
    assert [len(clause.body) for clause in read(lines)] == [0, 1, 0]
    found = from_triples([("ann", "knows", "bob")], rules=lines)
    assert (len(found.rules), found.predicates) == (1, ("knows",))
    assert found.notes == (
        "rules:1: 2 rules without a body hold of every constant and were left out",
    )


def test_comments_and_header_lines_of_the_line_formats_are_skipped():
    table = (
        "#source_weight\ttrain_support\trule\n# more\n\n1\t2\tp(X) :- q(X)\n"
    )
    assert [(c.weight, c.line) for c in read(table)] == [(1.0, 4)]
    amie = "Rule\tHead Coverage\tStd Confidence\n?a  q  ?b   => ?a  p  ?b\t0.1\t0.2\n"
    assert [(c.weight, c.line) for c in read(amie)] == [(0.2, 2)]


def test_what_amie_prints_around_its_table_is_skipped_and_counted():
    log = (
        "Loading files...\n  Starting data.tsv\nUsing HeadCoverage as pruning metric.\n"
        + "Rule\tHead Coverage\tStd Confidence\n"
        + "?a  q  ?b   => ?a  p  ?b\t0.1\t0.2\n\n"
        + "?a  'x => y'  ?b   => ?b  p  ?a\t0.1\t0.3\n"
        + "Mining done in 1.23 s\n1 rules mined.\n"
    )
    assert detect_format(log) == "AMIE"
    clauses, notes = read_clauses(log, "f", "AMIE")
    assert [(c.weight, c.line) for c in clauses] == [(0.2, 5), (0.3, 7)]
    assert notes == ["f: 5 lines without => skipped"]
    with pytest.raises(ValueError, match="expected at least one clause"):
        read_clauses("Rule\tHead Coverage\nMining done\n", "f", "AMIE")


@pytest.mark.parametrize(
    ("rule", "meaning"),
    [
        (
            "p(me_myself_i,Y) <= q(Y,me_myself_i)",
            "p(Y,Y) <= q(Y,Y)",
        ),
        ("p(X,me_myself_i) <= q(X,A), q(A,b)", "p(X,X) <= q(X,A), q(A,b)"),
        ("p(X,Y) <= q(X,Y), r(c,me_myself_i)", "p(X,Y) <= q(X,Y), r(c,c)"),
    ],
)
def test_anyburls_me_myself_i_is_the_other_argument(rule, meaning):
    line = "9\t6\t.6\t"
    assert read(line + rule) == read(line + meaning)


def test_two_me_myself_i_in_one_atom_are_an_error():
    with pytest.raises(
        ValueError, match=r"^f:1: as AnyBURL: expected one argument beside me_"
    ):
        read("9\t6\t.6\tp(X,Y) <= q(X,Y), r(me_myself_i,me_myself_i)")


def test_capitals_are_variables_by_the_custom_of_each_format():
    assert read("1\tp(Paris,Y) :- q(Y,Paris)")[0].head.args == (
        Variable("Paris"),
        Y,
    )
    assert read("1\t1\t1\tp(Paris,Y) <= q(Y,Q42)")[0][:2] == (
        Atom("p", ("Paris", Y)),
        (Atom("q", (Y, "Q42")),),
    )
    assert read("?a  q  Paris   => ?a  p  Paris")[0].head.args == (
        Variable("a"),
        "Paris",
    )
    assert read("P31(X,Y) :- _q(Y,X)")[0].head == Atom("P31", (X, Y))


def test_each_anonymous_variable_is_another_one():
    (clause,) = read("p(X) :- q(X, _), r(_, X).")
    a, b = clause.body[0].args[1], clause.body[1].args[0]
    assert isinstance(a, Variable) and isinstance(b, Variable) and a != b


def test_a_clause_knows_the_line_where_it_starts():
    program = (
        "% one\n\np(a).\n/* four\n five */ p(b)\n.\n\n\nq(X) :-\n p(X). q(c)."
    )
    assert [c.line for c in read(program)] == [3, 5, 9, 10]


def test_integers_are_read_as_prolog_reads_them():
    assert from_text("p(007, -0, -12, a1).").entities == ("7", "0", "-12", "a1")
