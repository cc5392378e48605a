"""Rules and queries: worked lines, reading as the inverse of writing, what is no Datalog, tables of rules."""

import json
import math
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from experiments.checks.fuzz_parsers import fuzz
from funcppo.kg.graph.loaders import from_text, from_triples
from funcppo.kg.graph.rules import (
    RULE_FILE_FORMATS,
    RuleStatistics,
    detect_format,
    format_atom,
    format_clause,
    format_rule,
    format_rule_table,
    parse_query,
    read_clauses,
    read_query,
    with_counts_line,
    with_encoded_rules,
    with_read_counts,
)
from funcppo.kg.graph.text import (
    Atom,
    Clause,
    Variable,
    format_name,
    is_built_in,
    is_library_predicate,
    quote,
)
from tests import prolog
from tests.kg.graph.clause_strategies import (
    ARITIES,
    BINARY,
    FACTS,
    NAMES,
    NASTY,
    canonical,
    rules,
)

X, Y, Z = Variable("X"), Variable("Y"), Variable("Z")
PEOPLE = [
    ("Zoë", "citizen of", "China"),
    ("Li", "citizen of", "China"),
    ("Q42", "P31", "Q5"),
    ("_x", "P31", "A"),
]
PROGRAM = "p('Ann', bob). p(X, Y) :- p(Y, X), q(X). q(bob)."


def read(text):
    clauses, _ = read_clauses(text, "f", detect_format(text))
    return clauses


def message(call, *args):
    """The one line of an error of input, without a chain of others."""
    with pytest.raises(ValueError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    error = caught.value
    assert error.__suppress_context__ or error.__context__ is None
    return str(error)


# -- queries


@pytest.mark.parametrize(
    ("query", "ids", "variables"),
    [
        ("P31(X, 'Q5').", [2, 8, 5], ("X",)),
        ("P31(X, Y)", [2, 8, 9], ("X", "Y")),
        ("P31(X, X)", [2, 8, 8], ("X",)),
        ("P31(_, _)", [2, 8, 9], ("_0", "_1")),
        ("P31(?x, ?x)", [2, 8, 8], ("x",)),
        ("s(Li, X)", [3, 3, 8], ("X",)),
        # A name of the data is that entity.
        ("'citizen of'(Zoë, China)", [1, 1, 2], ()),
        ("'citizen of'(?Zoë, ?who)", [1, 8, 9], ("Zoë", "who")),
        ("P31(Q42, Y2)", [2, 4, 8], ("Y2",)),
        ("P31(_x, _)", [2, 6, 8], ("_0",)),
        ("P31(?A, A)", [2, 8, 7], ("A",)),
    ],
)
def test_a_query_worked_by_hand(query, ids, variables):
    dataset = from_triples(PEOPLE, rules="s(X,Y) :- P31(Y,X)")
    found = read_query(dataset, query)
    assert (found.atom.tolist(), found.variables) == (ids, variables)
    atom = parse_query(dataset, query)
    assert atom.tolist() == ids and atom.dtype == np.int64


CLOSE = "expected one of the data's (close:"
NONE = "expected one of the data's (none of 7 is spelled like it)"
VARIABLE = "; a variable is ?x or a single capital"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("'citizen of'(Zoe, China)", f"unknown entity 'Zoe': {CLOSE} 'Zoë'){VARIABLE}"),
        ("P31(Q43, X)", f"unknown entity 'Q43': {CLOSE} 'Q42'){VARIABLE}"),
        ("P31(_y, X)", f"unknown entity '_y': {NONE}{VARIABLE}"),
        ("P31('', Y)", f"unknown entity '': {NONE}"),
        ("P3(Q42, X)", f"unknown relation 'P3': {CLOSE} 'P31')"),
        ("P31(Q42)", "arity clash: expected 2 arguments for 'P31', as elsewhere, got 1"),
        ("P31(Q42, X", "expected `,` or `)` after an argument, got the end of the line"),
        ("P31(Q42, X), P31(X, Q5)", "expected one atom, got ',' after it"),
        ("", "expected a predicate, got the end of the line"),
        ("X", "expected a predicate, got 'X'"),
        ("citizen of(Li, X)", "expected one atom, got 'of' after it; a name with spaces is written in single quotes, "
         "with \\' for a quote in it"),
        ("P31('Al's kid', Q5)", "expected `,` or `)` after an argument, got 's'; a name with spaces is written in "
         "single quotes, with \\' for a quote in it"),
    ],
)  # fmt: skip
def test_a_bad_query_is_named(query, expected):
    dataset = from_triples(PEOPLE)
    problem = message(read_query, dataset, query)
    assert problem == f"query {query!r}: {expected}"


@pytest.mark.parametrize("arrow", [":-", "<="])
def test_a_variable_of_a_rule_that_is_called_like_an_entity_is_told(arrow):
    columns = "9\t6\t" if arrow == "<=" else ""
    rules = f"{columns}0.6\tP31(Y,Y) {arrow} P31(Y,bob), P31(Q1,X)\n"
    people = [("bob", "P31", "X"), ("Q1", "P31", "bob")]
    # In AnyBURL Q1 is a constant.
    name, more = ("X", "") if columns else ("Q1", " (2 names of this kind)")
    note = f"rules:1: {name} is a variable here; the entity is '{name}', in single quotes{more}"
    assert from_triples(people, rules=rules).notes == (note,)
    quoted = rules.replace("Q1", "'Q1'").replace("X", "'X'")
    assert not from_triples(people, rules=quoted).notes
    marked = "?X  P31  ?b   => ?b  P31  ?X\t0\t1"
    assert not from_triples(people, rules=marked).notes


@pytest.mark.parametrize(
    ("query", "constant"),
    [("007", "7"), ("7", "7"), ("-07", "-7"), ("-0", "0"), ("000", "0"), ("'007'", "007")],
)  # fmt: skip
def test_an_integer_in_a_query_is_read_as_in_the_program(query, constant):
    program = from_text("p(0). p(7). p(-7). p('007').")
    assert from_text(f"p({query}).").entities == (constant,)
    read = read_query(program, f"p({query})")
    assert program.entities[read.atom[1] - 1] == constant
    # In triples it is the name that it is.
    triples = from_triples([("007", "p", "7")])
    assert parse_query(triples, "p(007, X)").tolist() == [1, 1, 3]
    for number in ("7.", "0x7", "7e1", "1_000", "0'a", "+7", "7a"):
        problem = message(read_query, program, f"p({number})")
        assert "expected a number or a name" in problem


def test_in_a_program_capitals_are_variables_and_unknown_constants_are_told():
    d = from_text(PROGRAM)
    query = read_query(d, "p(Ann, ?x)")
    assert (query.atom.tolist(), query.variables) == ([1, 3, 4], ("Ann", "x"))
    note = "Ann is a variable here; the entity is 'Ann', in single quotes"
    assert query.notes == (note,) and query.dataset is d
    query = read_query(d, "p(X, bobb)")
    assert query.dataset.entities == ("Ann", "bob", "bobb")
    assert (query.atom.tolist(), query.variables) == ([1, 4, 3], ("X",))
    assert query.notes == ("no fact and no rule has 'bobb' (close: 'bob')",)
    # Variables of rules are numbered from C + 1 on.
    assert d.rules.tolist() == [[[1, 3, 4], [1, 4, 3], [2, 3, 0]]]
    assert query.dataset.rules.tolist() == [[[1, 4, 5], [1, 5, 4], [2, 4, 0]]]


def test_predicates_of_a_program_are_found_by_name_and_arity():
    d = from_text("p(1). p(a, b). q(X) :- p(X, X), no(X).")
    assert parse_query(d, "p(1)").tolist() == [1, 1, 0]
    assert parse_query(d, "p(a, X)").tolist() == [2, 2, 4]
    problem = message(parse_query, d, "p(a, b, X)")
    assert "expected 1 or 2 arguments for 'p'" in problem
    problem = "query 'no(X)': expected a predicate of some fact or of a rule's head, got 'no'"
    assert message(parse_query, d, "no(X)") == problem
    # In Prolog p('1') fails where p(1) holds; a data set has names alone.
    assert "expected the number 1 without" in message(read_query, d, "p('1')")
    names = from_triples([("1", "r", "2")])
    assert parse_query(names, "r('1', '2')").tolist() == [1, 1, 2]


# -- reading


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
)  # fmt: skip
def test_one_rule_in_every_format_gives_one_clause(line, weight):
    body = (Atom("q", (X, Z)), Atom("r", (Z, Y)))
    expected = Clause(Atom("p", (X, Y)), body, weight, 1)
    assert [canonical(c) for c in read(line)] == [canonical(expected)]


def test_comments_headers_and_what_amie_prints_are_skipped():
    table = (
        "#source_weight\ttrain_support\trule\n# more\n\n1\t2\tp(X) :- q(X)\n"
    )
    assert [(c.weight, c.line) for c in read(table)] == [(1.0, 4)]
    log = (
        "Loading files...\n  Starting data.tsv\nUsing HeadCoverage as pruning metric.\n"
        "Rule\tHead Coverage\tStd Confidence\n?a  q  ?b   => ?a  p  ?b\t0.1\t0.2\n\n"
        "?a  'x => y'  ?b   => ?b  p  ?a\t0.1\t0.3\nMining done in 1.23 s\n1 rules mined.\n"
    )
    assert detect_format(log) == "AMIE"
    clauses, notes = read_clauses(log, "f", "AMIE")
    assert [(c.weight, c.line) for c in clauses] == [(0.2, 5), (0.3, 7)]
    assert notes == ["f: 5 lines without => skipped"]
    problem = message(read_clauses, "Rule\tHead\nMining done\n", "f", "AMIE")
    assert "expected at least one clause" in problem


def test_what_only_anyburl_writes_is_read_or_left_out():
    """me_myself_i is the other argument; h(X,c) <= holds of every constant, whatever the facts: no derivation."""
    for rule, meaning in (
        ("p(me_myself_i,Y) <= q(Y,me_myself_i)", "p(Y,Y) <= q(Y,Y)"),
        ("p(X,me_myself_i) <= q(X,A), q(A,b)", "p(X,X) <= q(X,A), q(A,b)"),
        ("p(X,Y) <= q(X,Y), r(c,me_myself_i)", "p(X,Y) <= q(X,Y), r(c,c)"),
    ):
        line = "9\t6\t.6\t"
        assert read(line + rule) == read(line + meaning)
    lines = "9\t6\t.6\tknows(X,bob) <= \n8\t4\t.5\tknows(X,Y) <= knows(Y,X)\n7\t1\t.1\tlikes(ann,Y) <=\n"
    assert [len(clause.body) for clause in read(lines)] == [0, 1, 0]
    found = from_triples([("ann", "knows", "bob")], rules=lines)
    assert (len(found.rules), found.predicates) == (1, ("knows",))
    note = "rules:1: 2 rules without a body hold of every constant and were left out"
    assert found.notes == (note,)


def test_a_clause_knows_the_line_where_it_starts():
    program = (
        "% one\n\np(a).\n/* four\n five */ p(b)\n.\n\n\nq(X) :-\n p(X). q(c)."
    )
    assert [c.line for c in read(program)] == [3, 5, 9, 10]


# -- what is no rule, and no Datalog

KNOWN = [("ann", "knows", "bob"), ("bob", "knows", "cid")]
IN_KNOWS = "in a rule for 'knows'"


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ("# nothing\n", ": expected at least one clause, got none"),
        ("1\tknows(X,Y) :- lows(Y,X)\n1\tknows(X,Y) :- nows(Y,X)",
         ":1: unknown relation 'lows': expected one of the data's (close: 'knows'), " + IN_KNOWS),
        ("1\tknows(X,zed) :- knows(zed,X)",
         ":1: unknown entity 'zed': expected one of the data's (none of 3 is spelled like it), " + IN_KNOWS),
        ("1\tknows(X,Y) :- knows(Y,X,X)",
         ":1: arity clash: expected 2 arguments for 'knows', as elsewhere, got 3, " + IN_KNOWS),
        ("1\tnew(X,Y) :- knows(Y,X)\n1\tnew(X) :- knows(Y,X)",
         ":2: arity clash: expected 2 arguments for 'new', as elsewhere, got 1, in a rule for 'new'"),
        ("1\tknows(X,Y) :- knows(Y,X)\n1\tknows(X,Y) :- knows(Y X)",
         ":2: as weighted: expected `,` or `)` after an argument, got 'X', in '1\\tknows(X,Y) :- knows(Y X)'"),
        ("1\tknows(X,Y)", ":1: as weighted: expected `:-` and a body after the head: facts belong in facts.txt, "
         "in '1\\tknows(X,Y)'"),
        ("1\tknows(X,Y) :- ",
         ":1: as weighted: expected a predicate, got the end of the line, in '1\\tknows(X,Y) :-'"),
        ("high\tknows(X,Y) :- knows(Y,X)", ":1: as weighted: expected a number from 0 on as the weight, got 'high', "
         "in 'high\\tknows(X,Y) :- knows(Y,X)'"),
        *((f"{weight}\tknows(X,Y) :- knows(Y,X)", ":1: as weighted: expected a number from 0 on as the weight, got "
           f"'{weight}', in '{weight}\\tknows(X,Y) :- knows(Y,X)'") for weight in ("nan", "inf", "-1", "1e999")),
        *((f"9\t6\t{weight}\tp(X,Y) <= p(Y,X)", ":1: as AnyBURL: expected a number from 0 on as the weight, got "
           f"'{weight}', in '9\\t6\\t{weight}\\tp(X,Y) <= p(Y,X)'") for weight in ("nan", "-1")),
        ("1\tknows(X,Y) :- knows(Y,X)\nknows(X,Y) :- knows(Y,X)",
         ":2: as weighted: expected 2 columns, got 1, in 'knows(X,Y) :- knows(Y,X)'"),
        ("1\tknows(X,Y) :- knows(X,Z)", ":1: as weighted: unsafe: expected every variable of the head in the body, "
         "got 'Y' only in the head, in '1\\tknows(X,Y) :- knows(X,Z)'"),
        ("1\tknows(X,Y) :- not knows(Y,X)", ":1: as weighted: unsafe: expected every variable of the head in the body, "
         "got 'X' only in the head, in '1\\tknows(X,Y) :- not knows(Y,X)'"),
        ("1\tknows(X,X) :- knows(X,Y), !knows(Y,Z)", ":1: as weighted: unsafe: expected every variable of a condition "
         "in an atom too, got 'Z' only in a condition, in '1\\tknows(X,X) :- knows(X,Y), !knows(Y,Z)'"),
        ("1\t~knows(X,Y) :- knows(X,Y)", ":1: as weighted: expected a predicate, got negation '~', in "
         "'1\\t~knows(X,Y) :- knows(X,Y)'"),
        ("1\tknows(X,Y) :- knows(X,Y), X<ann", ":1: as weighted: expected a number or a variable to compare by <, got "
         "'ann', in '1\\tknows(X,Y) :- knows(X,Y), X<ann'"),
        ("1\tknows(X,Y) :- knows(X,Y), not new(X,Y)\n1\tnew(X,Y) :- old(Y,X)\n1\told(X,Y) :- knows(X,Y)",
         ":1: expected no cycle through a negation, got 'knows' :- not 'new', 'new' :- 'old', 'old' :- 'knows', "
         + IN_KNOWS),
        ("9\t6\t.6\tp(X,Y) <= p(Y,X), not p(X,Y)", ":1: as AnyBURL: expected a predicate, got negation 'not', in "
         "'9\\t6\\t.6\\tp(X,Y) <= p(Y,X), not p(X,Y)'"),
        ("3\t2\t.6\tknows(ann,bob) <= ", ":1: as AnyBURL: expected `<=` and a body after the head: facts belong in "
         "facts.txt, in '3\\t2\\t.6\\tknows(ann,bob) <='"),
        ("3\t2\t.6\tknows(X,bob) <= likes(X,bob) <= ", ":1: as AnyBURL: expected `,` or the end of the clause, got "
         "'<=', in '3\\t2\\t.6\\tknows(X,bob) <= likes(X,bob) <='"),
        ("9\t6\t.6\tp(X,Y) <= q(X,Y), r(me_myself_i,me_myself_i)", ":1: as AnyBURL: expected one argument beside "
         "me_myself_i, which repeats it, got 0, in '9\\t6\\t.6\\tp(X,Y) <= q(X,Y), r(me_myself_i,me_myself_i)'"),
        ("?a  knows  ?b   => ?b  knows", ":1: as AMIE: expected triples `?a  relation  ?b`, then `=>` and one triple, "
         "in '?a  knows  ?b   => ?b  knows'"),
        ("?a  ?r  ?b   => ?b  knows  ?a", ":1: as AMIE: expected a relation between two constants or variables, got "
         "'?a ?r ?b', in '?a  ?r  ?b   => ?b  knows  ?a'"),
    ],
)  # fmt: skip
def test_a_bad_rule_file_is_named(rules, expected):
    problem = message(from_triples, KNOWN, [], [], rules)
    assert problem == f"rules{expected}"


TERM = "expected a constant or a variable, got "
PREDICATE = "expected a predicate, got "
GOAL = "expected a predicate of facts and rules, got "
DIRECTIVE = "expected a fact, a rule or one of the directives dynamic, discontiguous, table, style_check, got "
UNSAFE = "unsafe: expected every variable of the head in the body, got "
UNBOUND = "unsafe: expected every variable of a condition in an atom too, got "
END = "the end of the clause, got "


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("p(a).\nq :-\n  p(f(X)).", "2: " + TERM + "the compound term 'f(...)', in "),
        ("p([a]).", "1: " + TERM + "a list '[', in 'p([a]).'"),
        ("p (a).", "1: expected `(` right after 'p', got a space before it, in 'p (a).'"),
        ("q(X) :- 'p q'/**/(X).", "1: expected `(` right after \"'p q'\", got a space before it, in "),
        ("q :- \\+ \\+ p.", "1: " + PREDICATE + "negation '\\\\+', in "),
        ("\\+ p :- q.", "1: " + PREDICATE + "negation '\\\\+', in "),
        ("q :- \\+ (p(a), r).", "1: expected `)` after a negated atom, got ',', in "),
        ("q :- \\+ 'fail'.", "1: " + GOAL + "the built-in fail/0, in "),
        ("q :- p(X), \\+ r(X, Y).", "1: " + UNBOUND + "'Y' only in a condition"),
        ("q :- p(X), X < _.", "1: " + UNBOUND + "'_' only in a condition"),
        ("q :- X = a.", "1: " + UNBOUND + "'X' only in a condition"),
        ("q :- not(p).", "1: " + GOAL + "negation not/1, in 'q :- not(p).'"),
        ("q :- 'fail'.", "1: " + GOAL + "the built-in fail/0, in \"q :- 'fail'.\""),
        ("p(a). q(X) :- p(X), '\\\\='(X, a).", "1: " + GOAL + "the built-in \\=/2, in "),
        ("'length'(a, b).", "1: expected a predicate that a program may define, got the built-in length/2, in "),
        ("p(a).\nq(X) :- p(X), succ(X, Y).", "2: " + GOAL + "the built-in succ/2, in "),
        ("q(X) :- p(X), \\+ X < 3.", "1: " + PREDICATE + "a built-in '<', in "),
        ("q(X) :- p(X), X < a.", "1: expected a number or a variable to compare by <, got 'a', in "),
        ("q(X) :- p(X), X < 3 + 4.", "1: expected `,` or " + END + "'+', in "),
        ("q(X) :- p(Y), X is Y.", "1: " + PREDICATE + "a built-in 'is', in 'q(X) :- p(Y), X is Y.'"),
        ("q :- p, !.", "1: " + PREDICATE + "a cut or negation '!', in 'q :- p, !.'"),
        ("q :- p ; r.", "1: expected `,` or " + END + "a disjunction ';', in 'q :- p ; r.'"),
        ("q :- p -> r.", "1: expected `,` or " + END + "an if-then-else '->', in "),
        (":- initialization(main).", "1: " + DIRECTIVE + "the directive initialization, in "),
        ("p(a).\n:- table path(_, min).", "2: " + DIRECTIVE + "the directive table, in "),
        ("?- p(X).", "1: expected a fact or a rule, got a query ?-, in '?- p(X).'"),
        ("p(a).\n\np(X).", "3: " + UNSAFE + "'X' only in the head"),
        ("p(_).", "1: " + UNSAFE + "'_' only in the head"),
        ("p(a)\nq(b).", "1: expected `:-` or " + END + "'q', in 'p(a)\\nq(b).'"),
        ("p(a).\nq(b)", "2: expected `:-` or " + END + "the end of the file, in 'q(b)'"),
        ("P(a).", "1: " + PREDICATE + "'P', in 'P(a).'"),
        ("p().", "1: " + TERM + "')', in 'p().'"),
        ("p(1.5e3).", "1: expected `,` or `)` after an argument, got 'e3', in 'p(1.5e3).'"),
        ("p('1').", "1: expected the number 1 without quotes: to Prolog, \"'1'\" is another constant, in "),
        ('p("a").', "1: " + TERM + "a string '\"', in "),
        ("p('a).", "1: " + TERM + "a quote that is never closed"),
        ("p('\\q').", "1: expected an escape of ISO Prolog, got '\\\\q' (a backslash in quotes is doubled), in "),
        ("p('\\xd800\\').", "1: expected a character of Unicode, got '\\\\xd800\\\\', in "),
        ("p(a). /* b", "1: " + PREDICATE + "a comment that is never closed '/*', in '/* b'"),
        ("p --> q.", "1: expected `:-` or " + END + "a grammar rule '-->', in "),
        ("% none\n", " expected at least one clause, got none"),
    ],
)  # fmt: skip
def test_what_is_not_datalog_is_named(program, expected):
    line, _, problem = expected.partition(" ")
    place = f"program:{line}" if line else "program:"
    found = message(from_text, program)
    assert found.startswith(f"{place} as Prolog: {problem}")


@pytest.mark.parametrize(
    "text",
    ["p(", "p(f(", "(", "p :- q, ", "[", "p('a", "\\+ ", "/*", "p(a, ", "a.b", "X :- "],
)  # fmt: skip
def test_a_million_characters_and_any_depth_give_one_short_line(text):
    assert sys.getrecursionlimit() < 200_000
    assert len(message(from_text, text * 200_000)) < 250


def test_long_bodies_are_refused_and_long_atoms_are_read():
    problem = "program:2: expected at most 100 atoms in the body of a rule, got 200001, in a rule for 'p'"
    assert message(from_text, "q.\np :- " + "q, " * 200_000 + "q.") == problem
    assert from_text("q. p :- " + "q, " * 99 + "q.").rules.shape == (1, 101, 2)
    dataset = from_text("p(" + "a," * 499_998 + "b).")
    assert (dataset.entities, dataset.atom_width) == (("a", "b"), 500_000)
    assert from_text("p(" + "7" * 5000 + ").").entities == ("7" * 5000,)


def test_mutated_input_raises_nothing_but_one_line_of_value_error():
    counts = fuzz(n_bytes=1_000_000, seed=0)
    assert counts["bytes"] >= 1_000_000
    assert counts["accepted"] > 100 and counts["rejected"] > 100


# -- writing, the inverse of reading

LINES = {
    "tsv": "{weight}\t{rule}\n",
    "AnyBURL": "0\t0\t{weight}\t{rule}\n",
    "AMIE": "{rule}\t0\t{weight}\n",
}


def format_amie(head, body, _):
    """A rule as AMIE writes it."""
    terms = (term for atom in (head, *body) for term in atom.args)
    variables = [t for t in dict.fromkeys(terms) if isinstance(t, Variable)]
    words = {v: "?" + "xyzwabcdefgh"[i] for i, v in enumerate(variables)}
    head, *atoms = (
        "  ".join(words.get(x) or format_name(x) for x in (h, name, t))
        for name, (h, t), _ in (head, *body)
    )
    return f"{'  '.join(atoms)}   => {head}"


def format_file(clauses, file_format):
    """The text of a file of rules in a line format."""
    lines = []
    for head, body, weight, _ in clauses:
        write = format_amie if file_format == "AMIE" else format_clause
        rule = write(head, body, file_format)
        shown = "" if math.isnan(weight) else repr(weight)
        lines.append(LINES[file_format].format(weight=shown, rule=rule))
    return "".join(lines)


def format_program(clauses):
    """The text of a program, every name in quotes but integers."""

    def format_term(term):
        if isinstance(term, Variable):
            return term.name
        is_integer = term.lstrip("-").isdecimal() and term.isascii()
        return term if is_integer and str(int(term)) == term else quote(term)

    lines = []
    for head, body, *_ in clauses:
        texts = []
        for predicate, args, _ in (head, *body):
            terms = ", ".join(map(format_term, args))
            texts.append(quote(predicate) + f"({terms})" * bool(args))
        lines.append(" :- ".join([texts[0], *[", ".join(texts[1:])] * bool(body)]))  # fmt: skip
    return "".join(line + ".\n" for line in lines)


def test_a_rule_in_every_format_worked_by_hand():
    (clause,) = read("0.5\tp(U,'A b') :- q(U,V), 'r s'(V,U)")
    assert [format_file([clause], name) for name in LINES] == [
        "0.5\tp(X, 'A b') :- q(X, Y), 'r s'(Y, X)\n",
        "0\t0\t0.5\tp(X,'A b') <= q(X,A), 'r s'(A,X)\n",
        "?x  q  ?y  ?y  'r s'  ?x   => ?x  p  'A b'\t0\t0.5\n",
    ]
    (clause,) = read("p(A,B,C,D,E,F) :- q(A,B,C,D,E,F)")
    text = "p(X, Y, Z, W, V1, V2) :- q(X, Y, Z, W, V1, V2)"
    assert format_clause(clause.head, clause.body, "tsv") == text
    # The shapes and names of PyClause's page on rule types: another name for an inner variable is an error there.
    for rule, text in (
        ("p(U,V) :- q(U,W), r(Z,W), s(Z,V)", "p(X,Y) <= q(X,A), r(B,A), s(B,Y)"),
        ("p(U,V) :- q(V,U)", "p(X,Y) <= q(Y,X)"),
        ("p(U,cc) :- q(V,U)", "p(X,cc) <= q(A,X)"),
        ("p(cc,U) :- q(U,V)", "p(cc,Y) <= q(Y,A)"),
        ("p(U,U) :- q(U,V)", "p(X,X) <= q(X,A)"),
    ):  # fmt: skip
        ((head, body, *_),) = read(rule)
        assert format_clause(head, body, "AnyBURL") == text


@pytest.mark.parametrize(
    ("form", "arity"),
    [("tsv", ARITIES), ("AnyBURL", ARITIES), ("AMIE", BINARY)],
)
@given(data=st.data())
def test_line_formats_read_back_what_they_print(form, arity, data):
    rule = rules(arity, has_conditions=form == "tsv")
    clauses = data.draw(st.lists(rule, min_size=1, max_size=4))
    text = format_file(clauses, form)
    assert detect_format(text) == {"tsv": "weighted"}.get(form, form)
    assert [canonical(c) for c in read(text)] == [canonical(c) for c in clauses]


NASTY_ATOMS = [
    atom
    for atom in (Atom(n, (n,) * k) for n in NASTY for k in range(3))
    if not is_built_in(atom)
]
# No predicate is one of Prolog's own, of that name and arity.
PROLOG_CLAUSES = (rules(ARITIES) | FACTS).filter(
    lambda clause: (
        not any(
            is_built_in(a) or is_library_predicate(a)
            for a in (clause.head, *clause.body)
        )
    )
)


@given(st.lists(PROLOG_CLAUSES, min_size=1, max_size=4))
@example([Clause(atom, (), math.nan, 0) for atom in NASTY_ATOMS])
def test_a_program_in_quotes_is_read_as_it_was_written(clauses):
    text = format_program(clauses)
    assert detect_format(text) == "Prolog"
    unweighted = (clause._replace(weight=math.nan) for clause in clauses)
    assert list(map(canonical, read(text))) == list(map(canonical, unweighted))


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
    atom = st.tuples(st.integers(1, d.n_predicates), term, term)
    atoms = data.draw(st.lists(atom, min_size=1, max_size=3))
    rule = np.array([(1, *atoms[-1][1:]), *atoms])
    # Variables are numbered by first occurrence.
    variables = dict.fromkeys(rule[:, 1:][rule[:, 1:] > d.n_constants].tolist())
    numbers = {v: d.n_constants + 1 + i for i, v in enumerate(variables)}
    for row in rule:
        row[1:] = [numbers.get(term, term) for term in row[1:].tolist()]
    again = from_triples(triples, rules=format_rule(d, rule))
    assert again.rules.tolist() == [rule.tolist()]


@pytest.mark.skipif(not prolog.AVAILABLE, reason="no swipl on this machine")
def test_quoting_is_that_of_prolog_in_both_directions(tmp_path):
    """SWI-Prolog reads our text as the same characters, and we read the text that its writeq gives for them."""
    letters = [chr(code) for code in range(1, 0x250)]
    names = [*NASTY, *(c + "a" for c in letters), *("a" + c for c in letters)]
    names = [n for n in names if "\x00" not in n]
    heads = [Atom("p", (f"k{i}", n)) for i, n in enumerate(names)]
    text = format_program(Clause(head, (), math.nan, 0) for head in heads)
    (tmp_path / "ours.pl").write_text(text, encoding="utf-8")
    out, quoted = prolog.run(
        "forall(p(_, N), (atom_codes(N, C), print(C), nl)),"
        "forall(p(K, N), (writeq(user_error, q(K, N)), write(user_error, '.\\n')))",
        tmp_path / "ours.pl",
    )
    codes = [json.loads(line) for line in out.splitlines()]
    assert ["".join(map(chr, c)) for c in codes] == names
    # `p(=>)` needs quotes here, not in Prolog
    known = [any(c.isalnum() or c in " _'(,\n\t" for c in n) for n in names]
    lines = quoted.split(".\n")
    theirs = "".join(f"{x}.\n" for x, is_known in zip(lines, known) if is_known)
    clauses, _ = read_clauses(theirs, "theirs", "Prolog")
    back = [clause.head.args[1] for clause in clauses]
    assert back == [n for n, is_known in zip(names, known) if is_known]


# -- tables

TRIPLES = [("ann", "knows", "bob"), ("bob", "likes", "cid")]


def statistics(*rows):
    """Statistics of rules, one row of six numbers each."""
    return RuleStatistics(*np.array(rows, np.float64).reshape(-1, 6).T)


def test_the_lines_of_each_format_worked_by_hand():
    """Support 6 of 8 body pairs, 2 of them circular, 7.2 PCA pairs, 12 facts of the head."""
    d = from_triples(TRIPLES, rules="likes(X,Y) :- knows(Y,Z), likes(Z,X)")
    counts = statistics([0.4, 6, 8, 2, 7.2, 12])
    header, line, _ = format_rule_table(d, counts, "tsv").splitlines()
    assert dict(zip(header.split("\t"), line.split("\t"))) == {
        "#source_weight": "0.4",
        "train_support": "6",
        "train_body_pairs": "8",
        "train_conf": "0.75",
        "pca_conf": "0.833333",
        "head_coverage": "0.5",
        "loo_support": "4",
        "loo_conf": "0.666667",
        "std_error": "0",
        "pca_std_error": "0",
        "rule": "likes(X, Y) :- knows(Y, Z), likes(Z, X)",
    }
    text = format_rule_table(d, counts, "AnyBURL")
    assert text == "8\t6\t0.75\tlikes(X,Y) <= knows(Y,A), likes(A,X)\n"
    d = from_triples(TRIPLES, rules="likes(X,Y) :- knows(Y,X)")
    line = format_rule_table(d, statistics([0] * 6), "tsv").splitlines()[1]
    assert line.split("\t")[:-1] == ["0"] * 10
    for file_format in RULE_FILE_FORMATS:
        bare = from_triples(TRIPLES)
        text = format_rule_table(bare, statistics(), file_format)
        assert len(text.splitlines()) == (file_format != "AnyBURL")


def test_counts_are_read_from_a_file_of_the_same_facts_that_nobody_edited():
    """The second rule's are estimates, as former versions wrote them."""
    rules = "likes(X,Y) :- knows(Y,X)\nknows(X,Y) :- likes(Y,X)"
    d = from_triples(TRIPLES, rules=rules)
    counts = statistics([0.4, 6, 8, 2, 7, 9], [0.1, 5, 9, 1, 9, 9])
    table, _ = format_rule_table(d, counts, "tsv").split("#counts")
    table = table.replace("4\t0.5\t0\t0", "4\t0.5\t0.1\t0")
    assert "\t0.1\t0\t" in table
    text = with_counts_line(table, d)
    other_order = from_triples(TRIPLES[::-1], rules=rules)
    found = with_read_counts(text, other_order, [2, 3])
    assert found.rule_counts is not None
    assert found.rule_counts.tolist() == [[6, 8, 2], [-1, -1, -1]]

    # A held-out triple changes nothing, a known one all.
    more = [("cid", "likes", "ann")]
    for changed, dataset, has_counts in (
        (text, from_triples(TRIPLES, test=more), True),
        (text, from_triples(TRIPLES + more), False),
        (text.replace("\t8\t", "\t9\t"), d, False),
        (text.replace("knows", "likes"), d, False),
        (text.rpartition("#")[0], d, False),
        ("", d, False),
    ):
        found = with_read_counts(changed, dataset, [2])
        assert (found.rule_counts is not None) == has_counts


@given(st.lists(NAMES, min_size=4, max_size=4, unique=True), st.floats(0, 1))
def test_a_table_reads_back_as_the_same_rules_and_weights(names, weight):
    a, b, relation, other = names
    known = [(a, relation, b), (b, other, a)]
    table = np.zeros((3, 3, 3), np.int32)
    table[0, :2] = [[1, 3, 4], [2, 4, 3]]
    table[1] = [[2, 3, 4], [1, 3, 5], [1, 5, 4]]
    table[2, :2] = [[1, 3, 1], [2, 2, 3]]  # relation(X, a) :- other(b, X)
    counts = statistics(*[[weight, 3, 4, 0, 4, 6]] * 3)
    d = with_encoded_rules(from_triples(known), table, counts)
    for file_format in RULE_FILE_FORMATS:
        text = format_rule_table(d, counts, file_format)
        again = from_triples(known, rules=text)
        assert again.rules.tolist() == table.tolist()
        expected = weight if file_format == "tsv" else 0.75
        # files hold six digits
        assert again.rule_weights == pytest.approx([expected] * 3, rel=1e-5)


def test_encoded_rules_are_cut_to_the_longest_and_padded_to_the_atoms_of_the_data():
    wide = from_triples(TRIPLES, rules="p(X,Y,Z) :- knows(X,Y), likes(Y,Z)")
    atoms = np.zeros((2, 5, 3), np.int32)
    atoms[:, 0] = [1, 4, 5]
    atoms[:, 1] = [2, 5, 4]
    d = with_encoded_rules(wide, atoms, statistics([0.5] * 6, [0.25] * 6))
    assert d.rules.tolist() == [[[1, 4, 5, 0], [2, 5, 4, 0]]] * 2
    assert d.rule_weights.tolist() == [0.5, 0.25]
    empty = with_encoded_rules(wide, atoms[:0], statistics())
    assert empty.rules.shape == (0, 1, 4)
