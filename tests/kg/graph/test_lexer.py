"""Lexer: worked tokens, quoting as the inverse of unquoting, and no character lost."""

import os
import subprocess
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from funcppo.core.files import shorten
from funcppo.kg.graph import text as lexer
from funcppo.kg.graph.text import SPACED_PAREN, Token
from tests import prolog
from tests.kg.graph.clause_strategies import NAMES, NASTY

LINE_END = Token("end", "the end of the line")
TEXTS = st.text(
    st.sampled_from("ab X_1.,()'\\\"-:<=~\t\n%")
    | st.characters(exclude_categories=["Cs"]),
    max_size=30,
)


def kinds_and_texts(tokens):
    return [(token.kind, token.text) for token in tokens]


def test_the_tokens_of_a_line_worked_by_hand():
    assert lexer.tokenize_line("/m/02('it''s', X):-not q.") == [
        Token("name", "/m/02"),
        Token("(", "("),
        Token("quoted", "'it''s'"),
        Token(",", ","),
        Token("variable", "X"),
        Token(")", ")"),
        Token(":-", ":-"),
        Token("name", "not"),
        Token("name", "q"),
        LINE_END,
    ]
    assert lexer.tokenize_line("Q42 <= A", lexer.is_anyburl_variable)[:3] == [
        Token("name", "Q42"),
        Token("<=", "<="),
        Token("variable", "A"),
    ]
    assert lexer.tokenize_line("") == lexer.tokenize_line(" . ") == [LINE_END]


def test_the_tokens_of_a_program_worked_by_hand():
    program = "% a comment\np(a1, -007) :- /* two\nlines */ q (X).\nr"
    first, second = lexer.tokenize_prolog(program)
    assert (first.line, first.text) == (
        2,
        "p(a1, -007) :- /* two\nlines */ q (X).",
    )
    assert kinds_and_texts(first.tokens) == [
        ("name", "p"),
        ("(", "("),
        ("name", "a1"),
        (",", ","),
        ("integer", "-7"),
        (")", ")"),
        (":-", ":-"),
        ("name", "q"),
        (SPACED_PAREN, "("),
        ("variable", "X"),
        (")", ")"),
        ("end", "."),
    ]
    assert (second.line, second.text) == (4, "r")
    assert second.tokens == [
        Token("name", "r"),
        Token("end of file", "the end of the file"),
    ]


@given(TEXTS)
def test_a_line_loses_nothing_but_white_space_and_the_last_full_stop(text):
    *tokens, end = lexer.tokenize_line(text)
    assert end == LINE_END
    kept = "".join("".join(token.text for token in tokens).split())
    assert kept == "".join(text.strip().removesuffix(".").split())


@given(
    TEXTS.filter(
        lambda text: "%" not in text and "/*" not in text and "0" not in text
    )
)
def test_a_program_without_comments_loses_nothing_but_white_space(text):
    words = []
    for clause in lexer.tokenize_prolog(text):
        assert text.split("\n")[clause.line - 1].strip()
        words += [
            token.text for token in clause.tokens if token.kind != "end of file"
        ]
    assert "".join("".join(words).split()) == "".join(text.split())


@given(NAMES)
@example("\x00\u2028\n\\'")
def test_unquoting_undoes_quoting_and_a_quoted_name_is_one_token_on_one_line(
    name,
):
    quoted = lexer.quote(name)
    assert lexer.unquote(quoted) == name
    assert quoted.splitlines() == [quoted] and quoted.isprintable()
    assert lexer.tokenize_line(quoted) == [Token("quoted", quoted), LINE_END]
    (clause,) = lexer.tokenize_prolog(quoted + ".")
    assert clause.tokens == [Token("quoted", quoted), Token("end", ".")]


@pytest.mark.parametrize(
    ("quoted", "name"),
    [
        ("'it''s'", "it's"),
        (r"'\x41\'", "A"),
        (r"'\x41'", "A"),
        (r"'\101\b'", "Ab"),
        (r"'\u00e9\U0001F600'", "é😀"),
        (r"'\n\t\e\s\\\'\"\`'", "\n\t\x1b \\'\"`"),
        ("'a\\\nb'", "ab"),
    ],
)
def test_the_escapes_of_iso_prolog(quoted, name):
    assert lexer.unquote(quoted) == name


@pytest.mark.parametrize(
    "quoted", [r"'\q'", r"'\xd800\'", r"'\x110000\'", r"'\777777777\'"]
)
def test_an_escape_that_is_none_is_an_error(quoted):
    with pytest.raises(
        ValueError,
        match=r"^expected (an escape of ISO Prolog|a character of Unicode), got ",
    ):
        lexer.unquote(quoted)


@pytest.mark.parametrize(
    "text", [*NASTY, "7", "-12", "00", "+1", "1_000", "1.0", "٣"]
)
def test_an_integer_is_what_python_prints_for_one(text):
    try:
        expected = str(int(text)) == text and text.isascii()
    except ValueError:
        expected = False
    assert lexer.is_integer(text) == expected


def test_names_and_variables_worked_by_hand():
    names = [
        "ann",
        "Ann",
        "_",
        "X",
        "Q42",
        "a-b",
        "/m/02",
        "b.",
        "a:-b",
        "a b",
        "é",
    ]
    assert [name for name in names if lexer.is_variable(name)] == [
        "Ann",
        "_",
        "X",
        "Q42",
    ]
    assert [name for name in names if lexer.is_anyburl_variable(name)] == ["X"]
    assert [name for name in names if lexer.is_prolog_name(name)] == ["ann"]
    assert [name for name in names if not lexer.is_bare_name(name)] == [
        "b.",
        "a:-b",
        "a b",
    ]


def test_a_long_text_is_cut_to_one_short_line():
    assert shorten("a\nb") == r"'a\nb'"
    assert shorten("x" * 60) == repr("x" * 60)
    assert shorten("x" * 61) == repr("x" * 57 + "...")
    assert shorten("abcdef", width=5) == "'ab...'"


@pytest.mark.skipif(not prolog.AVAILABLE, reason="no swipl on this machine")
def test_the_letters_of_a_name_are_those_of_swi_prolog():
    """At the start and inside of a name; of Unicode 3.2, which every version knows.

    They differ in the middle dot, and in a dozen characters that are refused here.
    """
    old = unicodedata.ucd_3_2_0
    codes = [c for c in range(0x80, 0x3200) if old.category(chr(c)) != "Cn"]
    goal = (
        "forall((between(0x80, 0x31FF, C), char_code(X, C), member(T, [X-a, a-X])),"
        "(T = U-V, atom_concat(U, V, S), catch((term_to_atom(R, S), (var(R) -> K = variable ; R == S -> K = name ;"
        "K = none)), _, K = none), writeln(K)))"
    )
    done = subprocess.run(
        ["swipl", "-q", "-g", goal, "-t", "halt"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "LANG": "C.UTF-8"},
    )
    kinds = done.stdout.split()
    different = set()
    for code in codes:
        start, end = chr(code) + "a", "a" + chr(code)
        theirs = kinds[2 * (code - 0x80) : 2 * (code - 0x80) + 2]
        if [prolog_kind(start), prolog_kind(end)] != theirs:
            different.add(code)
    refused = {0x37A, 0xE33, 0xEB3, 0x1885, 0x1886, 0x2118, 0x212E}
    assert different <= {0xB7, *refused, 0x309B, 0x309C}


def prolog_kind(text):
    """Kind of the token that a text is as a whole; "none" if it is no name and no variable."""
    tokens = [
        t for source in lexer.tokenize_prolog(text) for t in source.tokens
    ]
    kind, word = tokens[0]
    is_whole = word == text and kind in ("name", "variable")
    return kind if is_whole else "none"
