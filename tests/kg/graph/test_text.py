"""Text: tokens, quoting as the inverse of unquoting, clauses, what Prolog has of its own, names of similar spelling."""

import difflib
import random
import re
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from funcppo.kg.graph import text as lexer
from funcppo.kg.graph.loaders import from_text, from_triples
from funcppo.kg.graph.rules import format_atom, format_rule, parse_query
from tests import prolog
from tests.kg.graph.clause_strategies import NAMES, NASTY

LINE_END = lexer.Token("end", "the end of the line")
TEXTS = st.text(
    st.sampled_from("ab X_1.,()'\\\"-:<=~\t\n%")
    | st.characters(exclude_categories=["Cs"]),
    max_size=30,
)
X, Y, Z = lexer.Variable("X"), lexer.Variable("Y"), lexer.Variable("Z")
has_prolog = pytest.mark.skipif(
    not prolog.AVAILABLE, reason="no swipl on this machine"
)


def ask_prolog(goal):
    """The words that SWI-Prolog prints for a goal."""
    out, errors = prolog.run(goal)
    assert not errors
    return out.split()


# -- tokens


def test_the_tokens_of_a_line_worked_by_hand():
    kinds = "name ( quoted , variable ) :- name name"
    texts = "/m/02 ( 'it''s' , X ) :- not q"
    expected = list(map(lexer.Token, kinds.split(), texts.split()))
    tokens = lexer.tokenize_line("/m/02('it''s', X):-not q.")
    assert tokens == [*expected, LINE_END]
    *tokens, _ = lexer.tokenize_line("Q42 <= A", lexer.is_anyburl_variable)
    assert [token.kind for token in tokens] == ["name", "<=", "variable"]
    assert [token.text for token in tokens] == ["Q42", "<=", "A"]
    assert lexer.tokenize_line("") == lexer.tokenize_line(" . ") == [LINE_END]


def test_the_tokens_of_a_program_worked_by_hand():
    program = "% a comment\np(a1, -007) :- /* two\nlines */ q (X).\nr"
    (line, text, tokens), second = lexer.tokenize_prolog(program)
    assert (line, text) == (2, "p(a1, -007) :- /* two\nlines */ q (X).")
    kinds = ["name", "(", "name", ",", "integer", ")", ":-", "name"]
    kinds += [lexer.SPACED_PAREN, "variable", ")", "end"]
    assert [token.kind for token in tokens] == kinds
    words = " ".join(token.text for token in tokens)
    assert words == "p ( a1 , -7 ) :- q ( X ) ."
    end = lexer.Token("end of file", "the end of the file")
    assert second == (4, "r", [lexer.Token("name", "r"), end])


@given(TEXTS)
def test_a_line_loses_nothing_but_white_space_and_the_last_full_stop(text):
    *tokens, end = lexer.tokenize_line(text)
    assert end == LINE_END
    kept = "".join("".join(token.text for token in tokens).split())
    assert kept == "".join(text.strip().removesuffix(".").split())


@given(TEXTS.filter(lambda text: not {"%", "0"} & {*text} and "/*" not in text))
def test_a_program_without_comments_loses_nothing_but_white_space(text):
    words = []
    for line, _, tokens in lexer.tokenize_prolog(text):
        assert text.split("\n")[line - 1].strip()
        words += [t.text for t in tokens if t.kind != "end of file"]
    assert "".join("".join(words).split()) == "".join(text.split())


@given(NAMES)
@example("\x00\u2028\n\\'")
def test_unquoting_undoes_quoting_and_a_name_is_one_token(name):
    quoted = lexer.quote(name)
    assert lexer.unquote(quoted) == name
    assert quoted.splitlines() == [quoted] and quoted.isprintable()
    assert lexer.tokenize_line(quoted) == [
        lexer.Token("quoted", quoted),
        LINE_END,
    ]
    ((_, _, tokens),) = lexer.tokenize_prolog(quoted + ".")
    assert tokens == [lexer.Token("quoted", quoted), lexer.Token("end", ".")]


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


def test_names_variables_and_integers_worked_by_hand():
    names = ["ann", "Ann", "_", "X", "Q42", "a-b", "/m/02", "b.", "a:-b", "a b"]
    assert [*filter(lexer.is_variable, names)] == ["Ann", "_", "X", "Q42"]
    assert [*filter(lexer.is_anyburl_variable, names)] == ["X"]
    plain = [name for name in names if lexer.is_bare_name(name)]
    assert plain == names[:7]
    for text in [*NASTY, "7", "-12", "00", "+1", "1_000", "1.0", "٣"]:
        is_integer = re.fullmatch("0|-?[1-9][0-9]*", text) is not None
        assert lexer.is_integer(text) == is_integer


@has_prolog
def test_the_letters_of_a_name_are_those_of_swi_prolog():
    """At the start and inside of a name; of Unicode 3.2, which every version knows.

    They differ in the middle dot, and in a dozen characters that are refused here.
    """
    old = unicodedata.ucd_3_2_0
    codes = [c for c in range(0x80, 0x3200) if old.category(chr(c)) != "Cn"]
    kinds = ask_prolog(
        "forall((between(0x80, 0x31FF, C), char_code(X, C), member(T, [X-a, a-X])),"
        "(T = U-V, atom_concat(U, V, S), catch((term_to_atom(R, S), (var(R) -> K = variable ; R == S -> K = name ;"
        "K = none)), _, K = none), writeln(K)))"
    )
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
    (kind, word), *_ = next(lexer.tokenize_prolog(text))[2]
    is_whole = word == text and kind in ("name", "variable")
    return kind if is_whole else "none"


# -- clauses


def parse_line(text):
    return lexer.parse_clause(lexer.tokenize_line(text), ":-", prolog=False)


def parse_program(text):
    ((_, _, tokens),) = lexer.tokenize_prolog(text)
    return lexer.parse_clause(tokens, ":-", prolog=True)


def test_a_rule_and_a_fact_worked_by_hand():
    head, body = parse_line("path(X, Y) :- edge(X, 'a b'), path(Z, Y)")
    assert head == lexer.Atom("path", (X, Y))
    assert body == (lexer.Atom("edge", (X, "a b")), lexer.Atom("path", (Z, Y)))
    assert parse_program("hot.") == (lexer.Atom("hot", ()), ())
    assert parse_program("p(-07, 'X').") == (lexer.Atom("p", ("-7", "X")), ())
    assert parse_line("q(X) :- not(X)")[1] == (lexer.Atom("not", (X,)),)
    tokens = lexer.tokenize_line("p(a, b), q")
    assert lexer.parse_atom(tokens, 0, prolog=False) == (
        lexer.Atom("p", ("a", "b")),
        6,
    )
    assert lexer.parse_atom(tokens, 7, prolog=False)[0] == lexer.Atom("q", ())


def test_each_anonymous_variable_has_a_name_of_its_own_that_no_text_can_give():
    _, (atom,) = parse_line("p :- q(_, _, X)")
    first, second, third = (term.name for term in atom.args)
    assert len({first, second, third}) == 3 and third == "X"
    assert " " in first and " " in second


# -- what Prolog has of its own

# Terms that stand for clauses, or for goals of another module: nothing defines these as predicates.
CLAUSE_SYNTAX = {":-/1", ":-/2", "?-/1", "-->/2", "=>/2", ":/2", "|/2", ",/2"}


@has_prolog
def test_what_a_program_may_define_is_what_swi_prolog_lets_it_define():
    known = lexer._BUILT_IN_SET | lexer._LIBRARY_SET
    names = sorted(known - CLAUSE_SYNTAX)
    escaped = (name.replace(chr(92), chr(92) * 2) for name in names)
    pairs = (name.rsplit("/", 1) for name in escaped)
    quoted = [f"'{name}'-{arity}" for name, arity in pairs]
    answers = ask_prolog(
        f"forall(member(N-A, [{', '.join(quoted)}]), (functor(H, N, A), "
        "catch((assertz(m:H), writeln(yes)), error(permission_error(_, _, _), _), writeln(no))))"
    )
    allowed = {n for n, answer in zip(names, answers) if answer == "yes"}
    assert allowed == lexer._LIBRARY_SET
    assert set(answers) == {"yes", "no"}


def texts(program):
    """Facts and rules of a program as text."""
    d = from_text(program)
    facts = [format_atom(d, fact) for fact in d.facts]
    return [*facts, *(format_rule(d, rule) for rule in d.rules)]


def test_true_is_dropped_and_library_predicates_may_be_defined():
    program = "p(a) :- true. q(X) :- 'true', p(X), true."
    assert texts(program) == ["p(a)", "q(X) :- p(X)"]
    program = "p(X) :- succ(X, Y), not(Y). not(b). succ(a, b)."
    expected = ["not(b)", "succ(a, b)", "p(X) :- succ(X, Y), not(Y)"]
    assert texts(program) == expected
    assert from_text("p(007, -0, -12, a1).").entities == ("7", "0", "-12", "a1")


def test_a_goal_that_nothing_defines_is_told_with_its_arity_and_line():
    d = from_text("p(a).\nq :- p(b), p(a, b).\nr :- typo, q, p(a, b).")
    note = "program: no fact and no rule defines 'p/2' (line 2), 'typo/0' (line 3): nothing proves it"
    assert d.notes == (note,)
    many = from_text("p :- " + ", ".join(f"q{i}" for i in range(9)) + ".")
    assert many.notes[0].endswith("'q4/0' (line 1), 4 more: nothing proves it")


@pytest.mark.parametrize(
    "directive",
    [":- dynamic p/1.", ":- dynamic(p/1).", ":- dynamic p/1, 'q r'/2.", ":- discontiguous p/1.",
     ":- table p/1, q/2.", ":- style_check(-singleton)."],
)  # fmt: skip
def test_declarations_are_skipped_and_counted(directive):
    ((_, _, tokens),) = lexer.tokenize_prolog(directive)
    name = directive[2:].split("(")[0].split()[0]
    assert lexer.declared_by(tokens) == name
    d = from_text(f"{directive} p(a).\n{directive}")
    assert d.facts.tolist() == [[1, 1]]
    note = f"program: 2 directives skipped, which change no answer here: {name}"
    assert d.notes == (note,)


def test_other_directives_are_refused():
    goals = ["table path(_, min)", "table path(min)", "dynamic p/N", "dynamic"]
    goals += ["style_check(X)", "use_module(library(lists))", "p(a)", ""]
    for goal in goals:
        with pytest.raises(ValueError, match="got the directive "):
            from_text(f":- {goal}. p(a).")


# -- names of similar spelling


def test_a_name_of_similar_spelling_is_suggested():
    known = ["france", "spain"]
    message = lexer.unknown_name_message("entity", "fance", known)
    assert message.endswith("(close: 'france')")
    message = lexer.unknown_name_message("entity", "zzz", known)
    assert message.endswith("(none of 2 is spelled like it)")
    assert lexer.find_similar_names("a" * 101, ["a" * 101]) == []


@given(NAMES)
def test_a_suggestion_can_be_pasted_into_a_query(name):
    pasted = lexer.similar_names_hint(name, [name]).removeprefix("close: ")
    dataset = from_triples([(name, "r", f"{name}b")])
    assert parse_query(dataset, f"r({pasted}, ?x)").tolist() == [1, 1, 3]


def test_of_many_names_the_nearest_are_found():
    """As of few: a letter more, one less, another one, two that change places; names with line breaks count."""
    generator = random.Random(0)
    letters = "abcdefghijklmnop "
    known = ["".join(generator.choices(letters, k=12)) for _ in range(2500)]
    known[7] = "line\nbreak at seven"
    for name in known[:8]:
        at = generator.randrange(1, len(name) - 2)
        for typo in (
            name[:at] + "x" + name[at:],
            name[:at] + name[at + 1 :],
            name[:at] + "y" + name[at + 1 :],
            name[:at] + name[at + 1] + name[at] + name[at + 2 :],
        ):
            expected = difflib.get_close_matches(typo, known, n=1)
            assert (
                lexer.find_similar_names(typo, known)[:1] == expected == [name]
            )
    assert lexer.find_similar_names("zzzzzz", known) == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<b> & \"q\"", "<b> & \"q\""),
        ("a\x1b[31m\nb", "a\\x1b[31m\\nb"),
        ("\u202eevil", "\\u202eevil"),
        ("\u05e9\u05dc\u05d5\u05dd", "\u05e9\u05dc\u05d5\u05dd"),
        ("\u65e5\u672c\x00", "\u65e5\u672c\\x00"),
        ("", ""),
        ("x" * 200, "x" * 200),
        (f"r({'x' * 5000} , b)", f"r({'x' * 198}… (5,002 characters) , b)"),
        ("word " * 1000, "word " * 800 + "… (5,000 characters)"),
    ],
)  # fmt: skip
def test_what_cannot_be_seen_is_escaped_and_what_is_long_is_cut(text, shown):
    assert lexer.display(text) == shown
    texts = [lexer.score_text(score) for score in (0.12345, 1.23e-7, 0.0)]
    assert texts == ["0.1235", "1.2e-07", "0.0000"]
