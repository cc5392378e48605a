"""Rule formats: worked lines, printing and reading as inverses, and Prolog itself as the oracle for quoting."""

import json
import math
import os
import shutil
import subprocess

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from funcppo.data import from_text
from funcppo.data.loaders import from_triples
from funcppo.data.parser import Atom, Clause, Variable
from funcppo.data.readers import detect_format, read_clauses
from funcppo.data.writers import format_clauses, to_clauses

X, Y, Z = Variable("X"), Variable("Y"), Variable("Z")
NASTY = [
    *(
        "X",
        "_",
        "_x",
        "P31",
        "ann lee",
        "a,b",
        "it's",
        "f(x)",
        "a:-b",
        "b.",
        "\\+",
        "not",
        "is",
        "true",
        "1",
        "-7",
        "-0",
    ),
    *(
        "01",
        '"',
        "Å",
        "#",
        "?a",
        "=>",
        "a<=b",
        "%",
        "/*",
        "\t",
        "\n",
        "\\",
        "a\\nb",
        "\x1f'",
        "  ",
        " => ",
        "日本",
        "Rule\t",
    ),
    *("\u2028", "0.5", "a  b", "''", "'q'", "/m/02_x.y-z:w", "\U0001f600", "é", ".", "[]", "x|y", "\x00", "nl", "V1"),
]
NAMES = st.sampled_from(NASTY) | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)
TERMS = st.builds(Variable, st.sampled_from("ABCDEF")) | NAMES
WEIGHTS = st.just(math.nan) | st.floats(allow_nan=False)


ARITIES, BINARY = st.integers(0, 3), st.just(2)


def atoms(terms, arity):
    return st.builds(Atom, NAMES, arity.flatmap(lambda n: st.tuples(*[terms] * n)))


@st.composite
def rules(draw, arity):
    """A safe rule: the head's terms are constants, or come from the body."""
    body = tuple(draw(st.lists(atoms(TERMS, arity), min_size=1, max_size=3)))
    bound = [t for atom in body for t in atom.args]
    head = draw(atoms(st.sampled_from(bound) if bound else NAMES, arity))
    return Clause(head, body, draw(WEIGHTS), 0)


FACTS = st.builds(lambda head: Clause(head, (), math.nan, 0), atoms(NAMES, ARITIES))


def canonical(clause):
    """Variables named by first occurrence, nan made comparable, the line left out."""
    names = {}
    rename = lambda t: names.setdefault(t, len(names)) if isinstance(t, Variable) else t
    parts = [(atom.predicate, tuple(map(rename, atom.args))) for atom in (clause.head, *clause.body)]
    return parts, repr(clause.weight)


def read(text):
    return read_clauses(text, "f", detect_format(text))


def unweighted(clauses):
    return [clause._replace(weight=math.nan) for clause in clauses]


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
        ("p(X,Y) :-\n  q(X,Z), % a comment\n  /* another. */ r(Z,Y).", math.nan),
    ],
)
def test_one_rule_in_every_format_gives_one_clause(line, weight):
    expected = Clause(Atom("p", (X, Y)), (Atom("q", (X, Z)), Atom("r", (Z, Y))), weight, 1)
    assert [canonical(c) for c in read(line)] == [canonical(expected)]


def test_anyburls_zero_rules_are_left_out_and_told_of():
    """h(X,c) <= holds of every constant, whatever the facts: no derivation, but no reason to refuse the file either."""
    lines = "9\t6\t.6\tknows(X,bob) <= \n8\t4\t.5\tknows(X,Y) <= knows(Y,X)\n7\t1\t.1\tlikes(ann,Y) <=\n"
    assert [len(clause.body) for clause in read(lines)] == [0, 1, 0]
    found = from_triples([("ann", "knows", "bob")], rules=lines)
    assert (len(found.rules), found.predicates) == (1, ("knows",))
    assert found.notes == ("rules:1: 2 rules without a body hold of every constant and were left out",)


def test_comments_and_header_lines_of_the_line_formats_are_skipped():
    table = "#source_weight\ttrain_support\trule\n# more\n\n1\t2\tp(X) :- q(X)\n"
    assert [(c.weight, c.line) for c in read(table)] == [(1.0, 4)]
    amie = "Rule\tHead Coverage\tStd Confidence\n?a  q  ?b   => ?a  p  ?b\t0.1\t0.2\n"
    assert [(c.weight, c.line) for c in read(amie)] == [(0.2, 2)]


def test_capitals_are_variables_by_the_custom_of_each_format():
    assert read("1\tp(Paris,Y) :- q(Y,Paris)")[0].head.args == (Variable("Paris"), Y)
    assert read("1\t1\t1\tp(Paris,Y) <= q(Y,Q42)")[0][:2] == (Atom("p", ("Paris", Y)), (Atom("q", (Y, "Q42")),))
    assert read("?a  q  Paris   => ?a  p  Paris")[0].head.args == (Variable("a"), "Paris")
    assert read("P31(X,Y) :- _q(Y,X)")[0].head == Atom("P31", (X, Y))


def test_each_anonymous_variable_is_another_one():
    (clause,) = read("p(X) :- q(X, _), r(_, X).")
    a, b = clause.body[0].args[1], clause.body[1].args[0]
    assert isinstance(a, Variable) and isinstance(b, Variable) and a != b


def test_a_clause_knows_the_line_where_it_starts():
    program = "% one\n\np(a).\n/* four\n five */ p(b)\n.\n\n\nq(X) :-\n p(X). q(c)."
    assert [c.line for c in read(program)] == [3, 5, 9, 10]


def test_integers_are_read_as_prolog_reads_them():
    assert from_text("p(007, -0, -12, a1).").entities == ("7", "0", "-12", "a1")


@given(st.lists(rules(ARITIES), min_size=1, max_size=4), st.sampled_from(["weighted", "AnyBURL"]))
@settings(max_examples=300, deadline=None)
def test_line_formats_read_back_what_they_print(clauses, form):
    text = format_clauses(clauses, form)
    assert detect_format(text) == form
    assert [canonical(c) for c in read(text)] == [canonical(c) for c in clauses]


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("p(U,V) :- q(U,W), r(Z,W), s(Z,V)", "p(X,Y) <= q(X,A), r(B,A), s(B,Y)"),
        ("p(U,V) :- q(V,U)", "p(X,Y) <= q(Y,X)"),
        ("p(U,cc) :- q(V,U)", "p(X,cc) <= q(A,X)"),
        ("p(cc,U) :- q(U,V)", "p(cc,Y) <= q(Y,A)"),
        ("p(cc,U) :- q(dd,U)", "p(cc,Y) <= q(dd,Y)"),
        ("p(U,U) :- q(U,V)", "p(X,X) <= q(X,A)"),
    ],
)
def test_variables_of_anyburl_are_those_that_pyclause_takes(rule, line):
    """The shapes and names of its page on rule types: another name for an inner variable is an error there."""
    assert format_clauses(read(rule), "AnyBURL") == f"0\t0\t\t{line}\n"


def test_a_rule_with_more_variables_than_letters_cannot_be_said_in_anyburl():
    body = ", ".join(f"q(X{i}, X{i + 1})" for i in range(27))
    assert format_clauses(read(f"p(X0, X25) :- {body.rsplit(', q', 2)[0]}"), "AnyBURL").count("W,Z") == 1
    with pytest.raises(ValueError, match="at most 24 variables beside the head's to write as AnyBURL, got 26"):
        format_clauses(read(f"p(X0, X27) :- {body}"), "AnyBURL")


@given(st.lists(rules(BINARY), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_amie_reads_back_what_it_prints(clauses):
    text = format_clauses(clauses, "AMIE")
    assert detect_format(text) == "AMIE"
    assert [canonical(c) for c in read(text)] == [canonical(c) for c in clauses]


@given(st.lists(rules(ARITIES) | FACTS, min_size=1, max_size=4))
@example([Clause(Atom(n, (n,) * k), (), math.nan, 0) for n in NASTY for k in range(3)])
@settings(max_examples=300, deadline=None)
def test_prolog_reads_back_what_it_prints(clauses):
    text = format_clauses(clauses, "Prolog")
    assert detect_format(text) == "Prolog"
    assert [canonical(c) for c in read(text)] == [canonical(c) for c in unweighted(clauses)]


@given(st.lists(FACTS, min_size=1, max_size=4), st.lists(rules(ARITIES), max_size=3))
@settings(deadline=None)
def test_a_data_set_written_as_a_program_is_the_same_data_set(facts, rest):
    try:
        dataset = from_text(format_clauses([*facts, *rest], "Prolog"))
    except ValueError as error:
        assert "arity clash" in str(error)
        return
    known, derived = to_clauses(dataset)
    assert from_text(format_clauses([*known, *derived], "Prolog")).fingerprint == dataset.fingerprint


@pytest.mark.skipif(shutil.which("swipl") is None, reason="no swipl: SWI-Prolog is the oracle here")
def test_quoting_is_that_of_prolog_in_both_directions(tmp_path):
    """SWI-Prolog reads our text as the same characters, and we read the text that its writeq gives for them."""
    names = [*NASTY, *(chr(c) + "a" for c in range(1, 0x250)), *("a" + chr(c) for c in range(1, 0x250))]
    names = [n for n in names if "\x00" not in n]
    facts = [Clause(Atom("p", ("k" + str(i), n)), (), math.nan, 0) for i, n in enumerate(names)]
    (tmp_path / "ours.pl").write_text(format_clauses(facts, "Prolog"), encoding="utf-8")
    goal = (
        "forall(p(_, N), (atom_codes(N, C), print(C), nl)),"
        "forall(p(K, N), (writeq(user_error, q(K, N)), write(user_error, '.\\n')))"
    )
    command = ["swipl", "-q", "-g", f"consult('ours.pl'), {goal}", "-t", "halt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, env={**os.environ, "LANG": "C.UTF-8"})
    codes = [json.loads(line) for line in done.stdout.decode().splitlines()]
    assert ["".join(map(chr, c)) for c in codes] == names
    symbols = lambda n: not any(c.isalnum() or c in " _'(,\n\t" for c in n)  # `p(=>)` needs quotes here, not in Prolog
    theirs = [line for line, n in zip(done.stderr.decode().split(".\n"), names) if not symbols(n)]
    back = [c.head.args[1] for c in read_clauses(".\n".join(theirs) + ".\n", "theirs", "Prolog")]
    assert back == [n for n in names if not symbols(n)]
