"""Writers: writing and reading as inverses, and Prolog itself as the oracle for quoting."""

import json
import math
import os
import shutil
import subprocess

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from funcppo.kg.graph.loaders import from_text, from_triples
from funcppo.kg.graph.rules import (
    detect_format,
    format_atom,
    format_clauses,
    format_rule,
    format_rule_clause,
    parse_query,
    proof_names,
    read_clauses,
    to_clauses,
)
from funcppo.kg.graph.text import (
    Atom,
    Clause,
    Variable,
    is_built_in,
    is_library_predicate,
)
from tests.kg.graph.clause_strategies import (
    ARITIES,
    BINARY,
    FACTS,
    NAMES,
    NASTY,
    canonical,
    rules,
)


def read(text):
    return read_clauses(text, "f", detect_format(text)).clauses


def has_meaning_in_prolog(clause):
    """Whether Prolog has a predicate of its own of that name and arity."""
    atoms = (clause.head, *clause.body)
    return any(is_built_in(a) or is_library_predicate(a) for a in atoms)


PROLOG_FACTS = FACTS.filter(lambda clause: not has_meaning_in_prolog(clause))
PROLOG_RULES = rules(ARITIES).filter(
    lambda clause: not has_meaning_in_prolog(clause)
)


def unweighted(clauses):
    return [clause._replace(weight=math.nan) for clause in clauses]


def test_a_rule_in_every_format_worked_by_hand():
    (clause,) = read("0.5\tp(U,'A b') :- q(U,V), 'r s'(V,U)")
    assert (
        format_clauses([clause], "weighted")
        == "0.5\tp(X, 'A b') :- q(X, Y), 'r s'(Y, X)\n"
    )
    assert (
        format_clauses([clause], "AnyBURL")
        == "0\t0\t0.5\tp(X,'A b') <= q(X,A), 'r s'(A,X)\n"
    )
    assert (
        format_clauses([clause], "AMIE")
        == "?x  q  ?y  ?y  'r s'  ?x   => ?x  p  'A b'\t0\t0.5\n"
    )
    assert (
        format_clauses([clause], "Prolog")
        == "p(X, 'A b') :- q(X, Y), 'r s'(Y, X).\n"
    )


def test_variables_are_named_x_y_z_w_and_then_by_number():
    (clause,) = read("p(A,B,C,D,E,F) :- q(A,B,C,D,E,F)")
    assert (
        format_rule_clause(clause, "weighted")
        == "p(X, Y, Z, W, V1, V2) :- q(X, Y, Z, W, V1, V2)"
    )


def test_a_fact_can_be_written_in_prolog_only():
    fact = Clause(Atom("p", ("a", "b")), (), math.nan, 0)
    assert format_clauses([fact], "Prolog") == "p(a, b).\n"
    for file_format in ("weighted", "AnyBURL", "AMIE"):
        with pytest.raises(
            ValueError,
            match=f"^expected a rule with a body to write as {file_format}, got the fact p",
        ):
            format_clauses([fact], file_format)


def test_an_atom_that_is_not_binary_cannot_be_written_in_amie():
    (clause,) = read("p(X) :- q(X, X)")
    with pytest.raises(
        ValueError,
        match=r"^expected binary atoms to write as AMIE, got 'p\(X\)'$",
    ):
        format_clauses([clause], "AMIE")


@pytest.mark.parametrize("atom", ["is(a, b)", "nl", "'\\\\='(a, b)"])
def test_a_built_in_cannot_be_defined_in_prolog(atom):
    (clause,) = read(f"1\t{atom} :- q(a)")
    with pytest.raises(
        ValueError,
        match=r"^expected a predicate that Prolog lets a program define, got ",
    ):
        format_clauses([clause], "Prolog")


def test_the_names_of_proofs_are_those_of_atoms_and_rules():
    d = from_triples(
        [("a", "r", "b c")], rules="r(X,Y) :- r(Y,X)\ns(X,Y) :- r(X,Y)"
    )
    names = proof_names(d)
    assert (
        names.format_atom((1, 1, 2))
        == format_atom(d, d.train[0])
        == "r(a, 'b c')"
    )
    assert names.format_atom(np.array([2, 3, 2])) == "s(X, 'b c')"
    assert [names.format_rule(i) for i in (0, 1)] == [
        format_rule(d, rule) for rule in d.rules
    ]
    assert names.format_rule(1) == "s(X, Y) :- r(X, Y)"
    assert [names.format_predicate(i) for i in (1, 2)] == ["r", "s"]
    # names as they are, without quotes
    assert [names.format_term(i) for i in (1, 2, 3, 4)] == [
        "a",
        "b c",
        "X",
        "Y",
    ]


def test_the_clauses_of_a_data_set_are_those_it_was_read_from():
    facts, rules_read = to_clauses(
        from_text("edge(a, b). hot.\npath(X, Y) :- edge(X, Y), hot.")
    )
    assert [fact.head for fact in facts] == [
        Atom("edge", ("a", "b")),
        Atom("hot", ()),
    ]
    x, y = Variable("X"), Variable("Y")
    (rule,) = rules_read
    assert rule[:2] == (
        Atom("path", (x, y)),
        (Atom("edge", (x, y)), Atom("hot", ())),
    )
    assert [clause.line for clause in (*facts, *rules_read)] == [1, 2, 1]


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        (
            "p(U,V) :- q(U,W), r(Z,W), s(Z,V)",
            "p(X,Y) <= q(X,A), r(B,A), s(B,Y)",
        ),
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
    assert (
        format_clauses(
            read(f"p(X0, X25) :- {body.rsplit(', q', 2)[0]}"), "AnyBURL"
        ).count("W,Z")
        == 1
    )
    with pytest.raises(
        ValueError,
        match="at most 24 variables beside the head's to write as AnyBURL, got 26",
    ):
        format_clauses(read(f"p(X0, X27) :- {body}"), "AnyBURL")


@given(
    st.lists(rules(ARITIES), min_size=1, max_size=4),
    st.sampled_from(["weighted", "AnyBURL"]),
)
@settings(max_examples=300)
def test_line_formats_read_back_what_they_print(clauses, form):
    text = format_clauses(clauses, form)
    assert detect_format(text) == form
    assert [canonical(c) for c in read(text)] == [canonical(c) for c in clauses]


@given(st.lists(rules(BINARY), min_size=1, max_size=4))
@settings(max_examples=300)
def test_amie_reads_back_what_it_prints(clauses):
    text = format_clauses(clauses, "AMIE")
    assert detect_format(text) == "AMIE"
    assert [canonical(c) for c in read(text)] == [canonical(c) for c in clauses]


@given(st.lists(PROLOG_RULES | PROLOG_FACTS, min_size=1, max_size=4))
@example(
    [
        Clause(Atom(n, (n,) * k), (), math.nan, 0)
        for n in NASTY
        for k in range(3)
        if not is_built_in(Atom(n, (n,) * k))
    ]
)
@settings(max_examples=300)
def test_prolog_reads_back_what_it_prints(clauses):
    text = format_clauses(clauses, "Prolog")
    assert detect_format(text) == "Prolog"
    assert [canonical(c) for c in read(text)] == [
        canonical(c) for c in unweighted(clauses)
    ]


@given(
    st.lists(PROLOG_FACTS, min_size=1, max_size=4),
    st.lists(PROLOG_RULES, max_size=3),
)
def test_a_data_set_written_as_a_program_is_the_same_data_set(facts, rest):
    dataset = from_text(format_clauses([*facts, *rest], "Prolog"))
    known, derived = to_clauses(dataset)
    assert (
        from_text(format_clauses([*known, *derived], "Prolog")).fingerprint
        == dataset.fingerprint
    )


@given(
    st.lists(st.tuples(NAMES, NAMES, NAMES), min_size=1, max_size=4), st.data()
)
@example([("X", "_", "it's"), ("a,b", "not", "\n")], None)
def test_a_printed_atom_or_rule_reads_back_as_the_same(triples, data):
    d = from_triples(triples)
    for atom in d.train:
        assert parse_query(d, format_atom(d, atom)).tolist() == atom.tolist()
    if data is None:
        return
    term = st.integers(1, d.n_constants + 6)
    atoms = data.draw(
        st.lists(
            st.tuples(st.integers(1, d.n_predicates), term, term),
            min_size=1,
            max_size=3,
        )
    )
    rule = number_variables(
        np.array([(1, *[t for t in atoms[-1][1:]]), *atoms]), d.n_constants
    )
    again = from_triples(triples, rules=format_rule(d, rule))
    assert again.rules.tolist() == [rule.tolist()]


def number_variables(rule: np.ndarray, n_constants: int) -> np.ndarray:
    """Variables numbered by first occurrence."""
    seen: dict[int, int] = {}
    for atom in rule:
        for j in (1, 2):
            if atom[j] > n_constants:
                atom[j] = seen.setdefault(
                    int(atom[j]), n_constants + 1 + len(seen)
                )
    return rule


@pytest.mark.skipif(
    shutil.which("swipl") is None,
    reason="no swipl: SWI-Prolog is the oracle here",
)
def test_quoting_is_that_of_prolog_in_both_directions(tmp_path):
    """SWI-Prolog reads our text as the same characters, and we read the text that its writeq gives for them."""
    names = [
        *NASTY,
        *(chr(c) + "a" for c in range(1, 0x250)),
        *("a" + chr(c) for c in range(1, 0x250)),
    ]
    names = [n for n in names if "\x00" not in n]
    facts = [
        Clause(Atom("p", ("k" + str(i), n)), (), math.nan, 0)
        for i, n in enumerate(names)
    ]
    (tmp_path / "ours.pl").write_text(
        format_clauses(facts, "Prolog"), encoding="utf-8"
    )
    goal = (
        "forall(p(_, N), (atom_codes(N, C), print(C), nl)),"
        "forall(p(K, N), (writeq(user_error, q(K, N)), write(user_error, '.\\n')))"
    )
    command = ["swipl", "-q", "-g", f"consult('ours.pl'), {goal}", "-t", "halt"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        timeout=60,
        env={**os.environ, "LANG": "C.UTF-8"},
    )
    codes = [json.loads(line) for line in done.stdout.decode().splitlines()]
    assert ["".join(map(chr, c)) for c in codes] == names
    # `p(=>)` needs quotes here, not in Prolog
    symbols = lambda n: not any(c.isalnum() or c in " _'(,\n\t" for c in n)
    theirs = [
        line
        for line, n in zip(done.stderr.decode().split(".\n"), names)
        if not symbols(n)
    ]
    back = [
        c.head.args[1]
        for c in read_clauses(
            ".\n".join(theirs) + ".\n", "theirs", "Prolog"
        ).clauses
    ]
    assert back == [n for n in names if not symbols(n)]
