"""Prolog: what a program may define, `true`, directives; SWI-Prolog is the oracle where it is installed."""

import subprocess

import pytest

from funcppo.kg.graph.loaders import from_text
from funcppo.kg.graph.rules import format_atom, format_rule
from funcppo.kg.graph.text import (
    _BUILT_IN_SET,
    _LIBRARY_SET,
    Atom,
    check_goal,
    check_head,
    declared_by,
    indicator,
    is_built_in,
    is_library_predicate,
    tokenize_prolog,
)
from tests import prolog

# Terms that stand for clauses, or for goals of another module: nothing defines these as predicates.
CLAUSE_SYNTAX = {":-/1", ":-/2", "?-/1", "-->/2", "=>/2", ":/2", "|/2", ",/2"}


def atom(name, arity):
    return Atom(name, tuple("abcdefgh"[:arity]))


def texts(program):
    """Facts and rules of a program as text."""
    d = from_text(program)
    return [
        *(format_atom(d, fact) for fact in d.facts),
        *(format_rule(d, rule) for rule in d.rules),
    ]


def test_a_predicate_has_an_arity():
    assert indicator(atom("edge", 2)) == "edge/2"
    assert is_built_in(atom("length", 2))
    assert not is_built_in(atom("length", 3))
    assert not is_built_in(atom("lengthy", 2))
    assert is_library_predicate(atom("succ", 2))
    assert not is_library_predicate(atom("succ", 3))


def test_heads_and_goals_of_prolog_itself_are_errors():
    check_head(atom("succ", 2))
    check_goal(atom("edge", 2))
    for check, name, arity in (
        (check_head, "length", 2),
        (check_goal, "length", 2),
        (check_goal, "succ", 2),
    ):
        with pytest.raises(ValueError, match=f"built-in {name}/{arity}$"):
            check(atom(name, arity))
    with pytest.raises(ValueError, match=r"got negation not/1$"):
        check_goal(atom("not", 1))


@pytest.mark.skipif(not prolog.AVAILABLE, reason="no swipl on this machine")
def test_what_a_program_may_define_is_what_swi_prolog_lets_it_define():
    names = sorted((_BUILT_IN_SET | _LIBRARY_SET) - CLAUSE_SYNTAX)
    pairs = [name.rsplit("/", 1) for name in names]
    quoted = [
        f"'{name.replace(chr(92), chr(92) * 2)}'-{arity}"
        for name, arity in pairs
    ]
    goal = (
        f"forall(member(N-A, [{', '.join(quoted)}]), (functor(H, N, A), "
        "catch((assertz(m:H), writeln(yes)), error(permission_error(_, _, _), _), writeln(no))))"
    )
    done = subprocess.run(
        ["swipl", "-q", "-g", goal, "-t", "halt"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not done.stderr
    allowed = dict(zip(names, done.stdout.split()))
    assert {
        n for n, answer in allowed.items() if answer == "yes"
    } == _LIBRARY_SET
    assert set(allowed.values()) == {"yes", "no"}


def test_the_goal_true_is_dropped_whether_quoted_or_not():
    assert texts("p(a) :- true. q(X) :- 'true', p(X), true.") == [
        "p(a)",
        "q(X) :- p(X)",
    ]


def test_library_predicates_are_those_of_the_program_if_it_defines_them():
    program = (
        "p(X) :- succ(X, Y), not(Y). not(b). succ(a, b). between(1, 2, 3)."
    )
    assert texts(program) == [
        "not(b)",
        "succ(a, b)",
        "between('1', '2', '3')".replace("'", ""),
        "p(X) :- succ(X, Y), not(Y)",
    ]


def test_predicates_of_one_name_and_different_arities_are_different():
    d = from_text("p(a). p(a, b). q(X) :- p(X, Y), p(X). p :- q(a).")
    assert d.predicates == ("p", "p", "q", "p")
    assert d.arities == (1, 2, 1, 0)
    assert d.facts.tolist() == [[1, 1, 0], [2, 1, 2]]
    assert d.rules.tolist() == [
        [[3, 3, 0], [2, 3, 4], [1, 3, 0]],
        [[4, 0, 0], [3, 1, 0], [0, 0, 0]],
    ]
    assert d.notes == ()


def test_a_goal_that_nothing_defines_is_told_with_its_arity_and_line():
    d = from_text("p(a).\nq :- p(b), p(a, b).\nr :- typo, q, p(a, b).")
    note = "program: no fact and no rule defines 'p/2' (line 2), 'typo/0' (line 3): nothing proves it"
    assert d.notes == (note,)
    many = from_text("p :- " + ", ".join(f"q{i}" for i in range(9)) + ".")
    assert many.notes[0].endswith("'q4/0' (line 1), 4 more: nothing proves it")


DECLARATIONS = [
    ":- dynamic p/1.",
    ":- dynamic(p/1).",
    ":- dynamic p/1, 'q r'/2.",
    ":- discontiguous p/1.",
    ":- table p/1, q/2.",
    ":- style_check(-singleton).",
]


@pytest.mark.parametrize("directive", DECLARATIONS)
def test_declarations_are_skipped_and_counted(directive):
    (source,) = tokenize_prolog(directive)
    name = directive[2:].split("(")[0].split()[0]
    assert declared_by(source.tokens) == name
    d = from_text(f"{directive} p(a).\n{directive}")
    assert d.facts.tolist() == [[1, 1]]
    assert d.notes == (
        f"program: 2 directives skipped, which change no answer here: {name}",
    )


@pytest.mark.parametrize(
    "directive",
    [
        ":- table path(_, min).",
        ":- table path(min).",
        ":- dynamic p/N.",
        ":- dynamic.",
        ":- style_check(X).",
        ":- use_module(library(lists)).",
        ":- p(a).",
        ":- .",
    ],
)
def test_other_directives_are_refused(directive):
    with pytest.raises(ValueError, match="got the directive "):
        from_text(f"{directive} p(a).")
