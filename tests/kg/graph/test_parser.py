"""Parser: worked clauses, and generated ones that are built of tokens without any text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.graph.text import (
    Atom,
    Token,
    Variable,
    check_safe,
    has_variables,
    parse_atom,
    parse_clause,
    tokenize_line,
    tokenize_prolog,
)

X, Y, Z = Variable("X"), Variable("Y"), Variable("Z")
WORDS = st.text("abcxyz", min_size=1, max_size=3).map(lambda text: "k" + text)
TERMS = WORDS | st.sampled_from("XYZ").map(Variable)
ATOMS = st.builds(Atom, WORDS, st.lists(TERMS, max_size=3).map(tuple))


def tokens_of(atom):
    """The tokens of an atom, without the lexer."""
    tokens = [Token("name", atom.predicate)]
    for i, term in enumerate(atom.args):
        tokens.append(Token("," if i else "(", "," if i else "("))
        tokens.append(
            Token("variable", term.name)
            if isinstance(term, Variable)
            else Token("name", term)
        )
    return [*tokens, Token(")", ")")] if atom.args else tokens


def parse_line(text):
    return parse_clause(tokenize_line(text), ":-", prolog=False)


def parse_program(text):
    (clause,) = tokenize_prolog(text)
    return parse_clause(clause.tokens, ":-", prolog=True)


def test_a_rule_and_a_fact_worked_by_hand():
    rule = parse_line("path(X, Y) :- edge(X, 'a b'), path(Z, Y)")
    assert rule.head == Atom("path", (X, Y))
    assert rule.body == (Atom("edge", (X, "a b")), Atom("path", (Z, Y)))
    assert parse_program("hot.") == (Atom("hot", ()), ())
    assert parse_program("p(-07, 'X').") == (Atom("p", ("-7", "X")), ())


def test_an_atom_ends_where_the_next_token_starts():
    tokens = tokenize_line("p(a, b), q")
    assert parse_atom(tokens, 0, prolog=False) == (Atom("p", ("a", "b")), 6)
    assert parse_atom(tokens, 7, prolog=False).atom == Atom("q", ())


@given(ATOMS, st.lists(ATOMS, max_size=4), st.booleans())
def test_the_clause_of_tokens_is_the_clause_that_they_were_made_of(
    head, body, prolog
):
    tokens = tokens_of(head)
    for i, atom in enumerate(body):
        tokens += [Token("," if i else "<=", ""), *tokens_of(atom)]
    clause = parse_clause([*tokens, Token("end", ".")], "<=", prolog=prolog)
    assert clause == (head, tuple(body))


def test_each_anonymous_variable_has_a_name_of_its_own_that_no_text_can_give():
    _, (atom,) = parse_line("p :- q(_, _, X)")
    first, second, third = (term.name for term in atom.args)
    assert len({first, second, third}) == 3 and third == "X"
    assert " " in first and " " in second


def test_only_in_a_line_format_may_a_predicate_start_with_a_capital():
    assert parse_line("P31(X, Y) :- _q(Y, X)").head == Atom("P31", (X, Y))
    for text in ("P31(X) :- q(X).", "_q(a)."):
        with pytest.raises(ValueError, match=r"^expected a predicate, got "):
            parse_program(text)


@pytest.mark.parametrize(
    "text", ["not(p(a))", "not p", "\\+ p(a)", "\\+(p(a))"]
)
def test_negation_is_an_error_that_says_so(text):
    for parse in (parse_line, parse_program):
        with pytest.raises(
            ValueError, match=r"^expected a predicate, got negation "
        ):
            parse(f"q :- {text}.")


def test_in_a_line_format_not_is_a_name_like_others():
    assert parse_line("q(X) :- not(X)").body == (Atom("not", (X,)),)


def test_a_head_is_safe_when_the_body_has_its_variables():
    check_safe(Atom("p", (X, "a")), (Atom("q", (Y,)), Atom("r", (Y, X))))
    check_safe(Atom("p", ("a", "b")), ())
    for head in (Atom("p", (X, Y)), Atom("p", (Y, X))):
        with pytest.raises(ValueError, match=r"got 'Y' only in the head$"):
            check_safe(head, (Atom("q", (X,)),))
    with pytest.raises(ValueError, match=r"got '_' only in the head$"):
        check_safe(Atom("p", (Variable("_ 2"),)), ())


def test_an_atom_may_have_variables():
    assert has_variables(Atom("p", ("a", X)))
    assert not has_variables(Atom("p", ("a", "X")))


def test_a_question_mark_before_a_variable_is_no_part_of_its_name():
    tokens = [
        Token("name", "p"),
        Token("(", "("),
        Token("variable", "?x"),
        Token(")", ")"),
        Token("end", ""),
    ]
    atom = parse_atom(tokens, 0, prolog=False).atom
    assert atom == Atom("p", (Variable("x"),))
