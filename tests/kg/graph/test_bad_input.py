"""Bad input: one line that names file and line, what was expected and what was found; nothing half-loaded."""

import sys

import pytest

from experiments.checks.fuzz_parsers import fuzz
from funcppo.kg.graph.loaders import from_text, from_triples
from funcppo.kg.graph.rules import parse_query


def message(call, *args):
    with pytest.raises(ValueError) as caught:
        call(*args)
    text = str(caught.value)
    assert "\n" not in text and caught.value.__suppress_context__ | (
        caught.value.__context__ is None
    )
    return text


KNOWN = [("ann", "knows", "bob"), ("bob", "knows", "cid")]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (
            "# nothing\n",
            "rules: expected at least one clause, got none",
        ),
        (
            "1\tknows(X,Y) :- lows(Y,X)\n1\tknows(X,Y) :- nows(Y,X)",
            "rules:1: unknown relation 'lows': expected one of the data's (close: 'knows'), in a rule for 'knows'",
        ),
        (
            "1\tknows(X,zed) :- knows(zed,X)",
            "rules:1: unknown entity 'zed': expected one of the data's (none of 3 is spelled like it),"
            " in a rule for 'knows'",
        ),
        (
            "1\tknows(X,Y) :- knows(Y,X,X)",
            "rules:1: arity clash: expected 2 arguments for 'knows', as elsewhere, got 3, in a rule for 'knows'",
        ),
        (
            "1\tnew(X,Y) :- knows(Y,X)\n1\tnew(X) :- knows(Y,X)",
            "rules:2: arity clash: expected 2 arguments for 'new', as elsewhere, got 1, in a rule for 'new'",
        ),
        (
            "1\tknows(X,Y) :- knows(Y,X)\n1\tknows(X,Y) :- knows(Y X)",
            "rules:2: as weighted: expected `,` or `)` after an argument, got 'X',"
            " in '1\\tknows(X,Y) :- knows(Y X)'",
        ),
        (
            "1\tknows(X,Y)",
            "rules:1: as weighted: expected `:-` and a body after the head: facts belong in facts.txt,"
            " in '1\\tknows(X,Y)'",
        ),
        (
            "1\tknows(X,Y) :- ",
            "rules:1: as weighted: expected a predicate, got the end of the line, in '1\\tknows(X,Y) :-'",
        ),
        (
            "high\tknows(X,Y) :- knows(Y,X)",
            "rules:1: as weighted: expected a number as the weight, got 'high',"
            " in 'high\\tknows(X,Y) :- knows(Y,X)'",
        ),
        (
            "1\tknows(X,Y) :- knows(Y,X)\nknows(X,Y) :- knows(Y,X)",
            "rules:2: as weighted: expected 2 columns, got 1, in 'knows(X,Y) :- knows(Y,X)'",
        ),
        (
            "1\tknows(X,Y) :- knows(X,Z)",
            "rules:1: as weighted: unsafe: expected every variable of the head in the body,"
            " got 'Y' only in the head, in '1\\tknows(X,Y) :- knows(X,Z)'",
        ),
        (
            "1\tknows(X,Y) :- not knows(Y,X)",
            "rules:1: as weighted: expected a predicate, got negation 'not', in '1\\tknows(X,Y) :- not knows(Y,X)'",
        ),
        (
            "3\t2\t.6\tknows(ann,bob) <= ",
            "rules:1: as AnyBURL: expected `<=` and a body after the head: facts belong in facts.txt,"
            " in '3\\t2\\t.6\\tknows(ann,bob) <='",
        ),
        (
            "3\t2\t.6\tknows(X,bob) <= likes(X,bob) <= ",
            "rules:1: as AnyBURL: expected `,` or the end of the clause, got '<=',"
            " in '3\\t2\\t.6\\tknows(X,bob) <= likes(X,bob) <='",
        ),
        (
            "?a  knows  ?b   => ?b  knows",
            "rules:1: as AMIE: expected triples `?a  relation  ?b`, then `=>` and one triple,"
            " in '?a  knows  ?b   => ?b  knows'",
        ),
        (
            "?a  ?r  ?b   => ?b  knows  ?a",
            "rules:1: as AMIE: expected a relation between two constants or variables, got '?a ?r ?b',"
            " in '?a  ?r  ?b   => ?b  knows  ?a'",
        ),
    ],
)
def test_a_bad_rule_is_named(rules, expected):
    assert message(from_triples, KNOWN, [], [], rules) == expected


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (
            "p(a).\nq :-\n  p(f(X)).",
            "2: expected a constant or a variable, got the compound term 'f(...)', ",
        ),
        (
            "p([a]).",
            "1: expected a constant or a variable, got a list '[', in 'p([a]).'",
        ),
        (
            "p (a).",
            "1: expected `(` right after 'p', got a space before it, in 'p (a).'",
        ),
        (
            "q(X) :- 'p q'/**/(X).",
            "1: expected `(` right after \"'p q'\", got a space before it, ",
        ),
        (
            "q :- \\+ p.",
            "1: expected a predicate, got negation '\\\\+', in 'q :- \\\\+ p.'",
        ),
        (
            "q :- not(p).",
            "1: expected a predicate of facts and rules, got negation not/1, in 'q :- not(p).'",
        ),
        (
            "q :- not p.",
            "1: expected a predicate, got negation 'not', in 'q :- not p.'",
        ),
        (
            "q :- 'fail'.",
            "1: expected a predicate of facts and rules, got the built-in fail/0, in \"q :- 'fail'.\"",
        ),
        (
            "p(a). q(X) :- p(X), '\\\\='(X, a).",
            "1: expected a predicate of facts and rules, got the built-in \\=/2, in ",
        ),
        (
            "'length'(a, b).",
            "1: expected a predicate that a program may define, got the built-in length/2, in ",
        ),
        (
            "p(a).\nq(X) :- p(X), succ(X, Y).",
            "2: expected a predicate of facts and rules, got the built-in succ/2, in ",
        ),
        (
            "p(a). q(Y) :- p(X), length(X, Y).",
            "1: expected a predicate of facts and rules, got the built-in length/2, in 'q(Y) :- p(X), length(X, Y).'",
        ),
        (
            "q(X) :- p(X), X < 3.",
            "1: expected a predicate, got a built-in '<', in 'q(X) :- p(X), X < 3.'",
        ),
        (
            "q(X) :- p(Y), X is Y.",
            "1: expected a predicate, got a built-in 'is', in 'q(X) :- p(Y), X is Y.'",
        ),
        (
            "q :- p, !.",
            "1: expected a predicate, got a cut '!', in 'q :- p, !.'",
        ),
        (
            "q :- p ; r.",
            "1: expected `,` or the end of the clause, got a disjunction ';', in 'q :- p ; r.'",
        ),
        (
            "q :- p -> r.",
            "1: expected `,` or the end of the clause, got an if-then-else '->', in ",
        ),
        (
            ":- initialization(main).",
            "1: expected a fact, a rule or one of the directives dynamic, discontiguous, table, style_check, got the "
            "directive initialization, in ",
        ),
        (
            "p(a).\n:- table path(_, min).",
            "2: expected a fact, a rule or one of the directives dynamic, discontiguous, table, style_check, got the "
            "directive table, in ",
        ),
        (
            "?- p(X).",
            "1: expected a fact or a rule, got a query ?-, in '?- p(X).'",
        ),
        (
            "p(a).\n\np(X).",
            "3: unsafe: expected every variable of the head in the body, got 'X' only in the",
        ),
        (
            "p(_).",
            "1: unsafe: expected every variable of the head in the body, got '_' only in the head",
        ),
        (
            "p(a)\nq(b).",
            "1: expected `:-` or the end of the clause, got 'q', in 'p(a)\\nq(b).'",
        ),
        (
            "p(a).\nq(b)",
            "2: expected `:-` or the end of the clause, got the end of the file, in 'q(b)'",
        ),
        ("P(a).", "1: expected a predicate, got 'P', in 'P(a).'"),
        ("p().", "1: expected a constant or a variable, got ')', in 'p().'"),
        (
            "p(1.5).",
            "1: expected `,` or `)` after an argument, got '.', in 'p(1.5).'",
        ),
        (
            "p('1').",
            "1: expected the number 1 without quotes: to Prolog, \"'1'\" is another constant, in ",
        ),
        (
            'p("a").',
            "1: expected a constant or a variable, got a string '\"', in ",
        ),
        (
            "p('a).",
            "1: expected a constant or a variable, got a quote that is never closed",
        ),
        (
            "p('\\q').",
            "1: expected an escape of ISO Prolog, got '\\\\q' (a backslash in quotes is doubled), in ",
        ),
        (
            "p('\\xd800\\').",
            "1: expected a character of Unicode, got '\\\\xd800\\\\', in ",
        ),
        (
            "p(a). /* b",
            "1: expected a predicate, got a comment that is never closed '/*', in '/* b'",
        ),
        (
            "p --> q.",
            "1: expected `:-` or the end of the clause, got a grammar rule '-->', in ",
        ),
    ],
)
def test_what_is_not_datalog_is_named(program, expected):
    assert message(from_text, program).startswith(
        "program:" + expected.replace(": ", ": as Prolog: ", 1)
    )


def test_an_empty_program_is_named():
    assert (
        message(from_text, " \n") == "program: empty: expected facts or rules"
    )
    assert (
        message(from_text, "% none\n")
        == "program: as Prolog: expected at least one clause, got none"
    )


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (
            "knows(ann, bbo)",
            "unknown entity 'bbo': expected one of the data's (close: 'bob')",
        ),
        (
            "know(ann, X)",
            "unknown relation 'know': expected one of the data's (close: 'knows')",
        ),
        (
            "knows(ann)",
            "arity clash: expected 2 arguments for 'knows', as elsewhere, got 1",
        ),
        (
            "knows(ann, X",
            "expected `,` or `)` after an argument, got the end of the line",
        ),
        ("knows(ann, X), knows(X, bob)", "expected one atom, got ',' after it"),
        ("", "expected a predicate, got the end of the line"),
        ("X", "expected a predicate, got 'X'"),
        (
            "has met(ann, bob)",
            "expected one atom, got 'met' after it; a name with spaces is written in single quotes, with \\' for a "
            "quote in it",
        ),
        (
            "knows('Al's kid', bob)",
            "expected `,` or `)` after an argument, got 's'; a name with spaces is written in single quotes, with "
            "\\' for a quote in it",
        ),
    ],
)
def test_a_bad_query_is_named(query, expected):
    dataset = from_triples(
        [("ann", "knows", "bob")], [], [], "likes(X, Y) :- knows(X, Y)"
    )
    assert (
        message(parse_query, dataset, query) == f"query {query!r}: {expected}"
    )


def test_a_query_for_what_only_bodies_of_rules_have_is_named():
    dataset = from_text("knows(ann, bob). likes(X, Y) :- knows(X, Y), no(Y).")
    expected = "expected a predicate of some fact or of a rule's head, got 'no'"
    assert (
        message(parse_query, dataset, "no(X)") == f"query 'no(X)': {expected}"
    )


@pytest.mark.parametrize(
    "text",
    [
        "p(",
        "p(f(",
        "(",
        "p :- q, ",
        "[",
        "p('a",
        "\\+ ",
        "/*",
        "p(a, ",
        "a.b",
        "X :- ",
    ],
)
def test_a_million_characters_and_any_depth_give_one_short_line(text):
    assert sys.getrecursionlimit() < 200_000
    assert len(message(from_text, text * 200_000)) < 250


def test_a_body_of_a_million_characters_is_refused_and_one_of_a_hundred_atoms_is_read():
    expected = "program:2: expected at most 100 atoms in the body of a rule, got 200001, in a rule for 'p'"
    assert message(from_text, "q.\np :- " + "q, " * 200_000 + "q.") == expected
    assert from_text("q. p :- " + "q, " * 99 + "q.").rules.shape == (1, 101, 2)


def test_a_million_characters_that_are_right_are_read():
    dataset = from_text("p(" + "a," * 499_998 + "b).")
    assert (dataset.entities, dataset.atom_width) == (("a", "b"), 500_000)


def test_mutated_input_raises_nothing_but_one_line_of_value_error():
    counts = fuzz(n_bytes=1_000_000, seed=0)
    assert (
        counts["bytes"] >= 1_000_000
        and counts["accepted"] > 100
        and counts["rejected"] > 100
    )
