"""Text of names, atoms and clauses: tokens, quoting, the grammar of rules, and names like a name.

    clause = atom [arrow literal {, literal}]      literal = atom | negation atom | argument operator argument
    atom = name [( argument {, argument} )]

Two ways to cut text into tokens serve all rule formats:

    line     a name is any run without white space, `,` `(` `)`, as in `/m/02(X, a-b)`: queries and the line formats
    Prolog   a name is as in ISO Prolog: `ann`, `'any text'`, `42`

In both, a name in single quotes is never a variable, and takes the escapes of ISO Prolog. A body has its conditions,
which are negated atoms and comparisons, behind its atoms. What is outside Datalog (arithmetic, compound terms) is an
error that names it. Built-ins and directives of Prolog are known by name.
"""

from __future__ import annotations

import difflib
import gzip
import operator
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from decimal import Decimal
from functools import lru_cache
from heapq import nlargest
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from funcppo.core.files import read_file, shorten


class Token(NamedTuple):
    """One token of a rule, a fact or a query."""

    # name, quoted, integer, variable, end, end of file, SPACED_PAREN; other symbols are their own kind
    kind: str
    # the characters in the source; of a quoted name with its quotes and escapes
    text: str


# kind of an opening parenthesis after white space: in Prolog it starts no argument list
SPACED_PAREN = " ("

# Quantifiers are possessive (`*+`, `++`) throughout: backtracking could take quadratic time on long or hostile input.
QUOTED_PATTERN = (
    r"'(?:[^'\\\n]|\\(?:x[0-9a-fA-F]++\\?|[0-7]++\\?|(?s:.))|'')*+'"
)
_LINE_TOKEN = re.compile(
    rf"(?P<quoted>{QUOTED_PATTERN})"
    r"|(?P<symbol>:-|<=|[(),'])"
    r"|(?P<word>\\\+|[!~\u00ac](?=')|(?:(?!:-)[^\s,()])++)"
    r"|\s++"
)
_PROLOG_TOKEN = re.compile(
    rf"(?P<quoted>{QUOTED_PATTERN})"
    r"|(?P<integer>-?[0-9]++(?:\.[0-9]++)?)"
    r"|(?P<word>[^\W\d](?:\w++|[^\x00-\x7f\s])*+)"
    r"|(?P<end>\.(?=\s|%|\Z))"
    r"|(?:\s|%[^\n]*+|/\*(?s:.*?)\*/)++"
    r"|(?P<symbol>[(),]|!=|[-+*/\\^<>=~:.?@#&$]++|(?s:.))"
)

# Escapes of a quoted name: \xHH..\ and \OOO..\ (hexadecimal, octal), \uHHHH, \UHHHHHHHH, \c, and '' for a quote.
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]++)\\?|([0-7]++)\\?|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|((?s:.)))|''"
)
_CHARACTER_OF_ESCAPE = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "e": "\x1b",
    "s": " ",
    "\n": "",  # a backslash at the end of a line continues the name on the next
    "\\": "\\",
    "'": "'",
    '"': '"',
    "`": "`",
}
_ESCAPE_OF_CHARACTER = {
    "\n": "\\n",
    "\t": "\\t",
    "\r": "\\r",
    "\\": "\\\\",
    "'": "\\'",
}

_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
_NUMBER = re.compile(r"[-+]?[0-9]++(?:\.[0-9]++)?(?:[eE][-+]?[0-9]{1,4})?")
# no full stop at the end: it would end the clause
_BARE_NAME = re.compile(r"(?!.*:-)[\w/:.-]*[\w/:-]")


def is_variable(text: str) -> bool:
    """Check whether an unquoted argument is a variable as in Prolog: it starts with `_` or a capital."""
    return text[:1] == "_" or text[:1].isupper()


def is_anyburl_variable(text: str) -> bool:
    """Check whether an unquoted argument is a variable in AnyBURL: one capital of A to Z; Q42 is a constant."""
    return len(text) == 1 and "A" <= text <= "Z"


def has_surrogates(text: str) -> bool:
    """Check whether a text has half a character, such as a byte of a command line that is no UTF-8."""
    return re.search("[\ud800-\udfff]", text) is not None


def is_bare_name(text: str) -> bool:
    """Check whether a name needs no quotes in a line format, variables aside."""
    return _BARE_NAME.fullmatch(text) is not None


def is_integer(text: str) -> bool:
    """Check whether a name is an integer as Prolog prints it."""
    return _INTEGER.fullmatch(text) is not None


def read_number(text: str) -> Decimal | None:
    """Return the value of a name that reads as a number; None for any other name."""
    return Decimal(text) if _NUMBER.fullmatch(text) else None


def quote(text: str) -> str:
    """Return a name in single quotes, on one line, whatever characters it holds."""
    escaped = "".join(
        _ESCAPE_OF_CHARACTER.get(char)
        or (char if char.isprintable() else f"\\x{ord(char):x}\\")
        for char in text
    )
    return f"'{escaped}'"


def format_name(text: str) -> str:
    """Format a name as a query takes it: on one line, in quotes unless it is plain."""
    return text if is_bare_name(text) else quote(text)


def escape_unprintable(text: str) -> str:
    """Escape the characters that a terminal would not print as themselves, as Python does."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else ascii(char)[1:-1] for char in text
    )


def unquote(text: str) -> str:
    """Return the name that a quoted text stands for.

    Args:
      text: with its quotes, as in a `Token`.

    Raises:
      ValueError: an escape that ISO Prolog does not have, or the code of a character that Unicode does not have.
    """
    return _ESCAPE.sub(_unescape, text[1:-1])


def _unescape(match: re.Match[str]) -> str:
    """Return the character that one escape stands for."""
    hexadecimal, octal, short, long, letter = match.groups()
    if letter is not None:
        if letter not in _CHARACTER_OF_ESCAPE:
            raise ValueError(
                f"expected an escape of ISO Prolog, got {shorten(match[0])} (a backslash in quotes is doubled)"
            )
        return _CHARACTER_OF_ESCAPE[letter]
    digits = hexadecimal or octal or short or long
    if digits is None:
        return "'"
    code = int(digits, 8 if octal else 16)
    # Surrogates are no characters.
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(
            f"expected a character of Unicode, got {shorten(match[0])}"
        )
    return chr(code)


def tokenize_line(
    text: str, is_variable_fn: Callable[[str], bool] = is_variable
) -> list[Token]:
    """Cut one line into tokens, an `end` token last; a full stop at the end of the line is dropped.

    Args:
      is_variable_fn: whether an unquoted word is a variable; depends on the format.
    """
    tokens: list[Token] = []
    for match in _LINE_TOKEN.finditer(text.strip().removesuffix(".")):
        kind = match.lastgroup
        if kind is not None:
            tokens.append(_line_token(kind, match.group(), is_variable_fn))

    tokens.append(Token("end", "the end of the line"))
    return tokens


@lru_cache(1 << 16)
def _line_token(
    kind: str, text: str, is_variable_fn: Callable[[str], bool]
) -> Token:
    """Return the token of a match of `_LINE_TOKEN`, cached because the lines of a rule file repeat tokens."""
    if kind == "word":
        return Token("variable" if is_variable_fn(text) else "name", text)
    return Token(kind if kind == "quoted" else text, text)


def tokenize_prolog(program: str) -> Iterator[tuple[int, str, list[Token]]]:
    """Cut a program into clauses and each clause into tokens; comments are left out.

    Args:
      program: text of the program.

    Returns:
      An iterator over the clauses: the line where each starts, from 1, its text and its tokens. The last token is the
      full stop, of kind `end`, or a token of kind `end of file` where the last full stop is missing.
    """
    tokens: list[Token] = []  # of the clause being read
    clause_start = 0  # offset of the clause
    line = 1  # number of the line in which the clause starts
    after_space = False
    for match in _PROLOG_TOKEN.finditer(program):
        kind = match.lastgroup
        if kind is None:
            after_space = True
            continue

        # The first token of a clause. Lines are counted from the last clause on, so the program is read once.
        if not tokens:
            line += program.count("\n", clause_start, match.start())
            clause_start = match.start()
        text = match.group()
        if after_space and text == "(":
            tokens.append(Token(SPACED_PAREN, text))
        else:
            tokens.append(_prolog_token(kind, text))
        after_space = False
        if kind == "end":
            yield line, program[clause_start : match.end()], tokens
            tokens = []

    if tokens:
        tokens.append(Token("end of file", "the end of the file"))
        yield line, program[clause_start:], tokens


def _prolog_token(kind: str, text: str) -> Token:
    """Return the token of a match of `_PROLOG_TOKEN`; a number gets the text that Prolog prints for it."""
    if kind == "integer":
        # Of any length: Python reads integers of at most 4,300 digits.
        whole, point, decimals = text.lstrip("-").partition(".")
        digits = whole.lstrip("0") or "0"
        if point:
            digits += point + (decimals.rstrip("0") or "0")
        sign = "-" if text[0] == "-" and digits.strip("0.") else ""
        return Token(kind, sign + digits)
    # Prolog and Python draw the letters of a name from the same two classes of Unicode.
    if kind == "symbol" or (kind == "word" and not text.isidentifier()):
        return Token(text, text)
    if kind == "word":
        kind = "variable" if is_variable(text) else "name"
    return Token(kind, text)


def as_prolog_number(token: Token) -> Token:
    """Return the token of a line; a name that starts as a number does becomes the integer that Prolog reads.

    Raises:
      ValueError: Prolog reads another number, or none.
    """
    if token.kind != "name" or not re.match("[-+]?[0-9]", token.text):
        return token
    if not re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", token.text):
        raise ValueError(
            f"expected a number or a name, got {shorten(token.text)}"
        )
    return _prolog_token("integer", token.text)


# of a rule file; `funcppo.kg.graph.rules` shows each
FileFormat = Literal["weighted", "AnyBURL", "AMIE", "Prolog"]


class Variable(NamedTuple):
    """Variable of a clause; two of the same name in one clause are the same variable."""

    name: str


COMPARED = "compared"  # the sign of a comparison
# spellings of comparisons; the first line compares names, the second numbers
COMPARISONS = {
    **{"=": "=", "==": "=", "!=": "!=", "\\=": "!=", "\\==": "!="},
    **{"<": "<", "=<": "<=", "<=": "<=", ">": ">", ">=": ">="},
    **{"=:=": "=:=", "=\\=": "=\\="},
}
# tests of two names, or of two values, or of other numbers that stand for them
TESTS: dict[str, Callable[[Any, Any], Any]] = {
    **{"=": operator.eq, "!=": operator.ne, "<": operator.lt},
    **{"<=": operator.le, ">": operator.gt, ">=": operator.ge},
    **{"=:=": operator.eq, "=\\=": operator.ne},
}


class Atom(NamedTuple):
    """Atom predicate(args...), in names; with a sign a condition: a negated atom, or a comparison of two terms."""

    predicate: str  # of a comparison: the operator, a value of `COMPARISONS`
    args: tuple[Variable | str, ...]  # a constant is a plain string
    sign: str = ""  # "not", or `COMPARED`


class Clause(NamedTuple):
    """Clause head :- body; a fact has no body."""

    head: Atom
    body: tuple[Atom, ...]
    weight: float  # nan where the file gives none
    line: int  # where it starts in its file, from 1


# tokens that an atom, or what looks like one, starts with
_ATOM_KINDS = ("name", "quoted", "variable")

# What Prolog calls the symbols that Datalog does not have, for messages.
_SYMBOL_MEANINGS = {
    "\\+": "negation",
    "not": "negation",
    "NOT": "negation",
    "~": "negation",
    "\u00ac": "negation",
    "!": "a cut or negation",
    ";": "a disjunction",
    "|": "a disjunction",
    "->": "an if-then-else",
    "[": "a list",
    "]": "a list",
    "{": "a term in braces",
    "}": "a term in braces",
    '"': "a string",
    "'": "a quote that is never closed",
    "-->": "a grammar rule",
    "?-": "a query mark",
    "-": "a sign or an operator",
}
NEGATIONS = ("!", "~", "\u00ac", "-")  # right before the name of a relation
_OPERATORS = ("is", "mod", "rem", "=", "<", ">", "=<", ">=", "=:=", "=\\=")
_OPERATORS += ("==", "\\=", "\\==", "=..", "@<", "@>")


def is_anonymous(variable: Variable) -> bool:
    """Check whether a variable is a `_`, which the parser gives a name that no text can give."""
    return " " in variable.name


def has_variables(head: Atom) -> bool:
    """Check whether an atom has a variable."""
    return any(isinstance(term, Variable) for term in head.args)


def check_safe(head: Atom, body: tuple[Atom, ...]) -> None:
    """Check that the atoms of the body bind every variable of the head and of the conditions.

    In a negated atom, `_` stands for any constant.

    Args:
      head: head of a clause.
      body: its body; empty for a fact.

    Raises:
      ValueError: they do not; names the variable.
    """
    bound: set[Variable | str] = set()
    for atom in body:
        if not atom.sign:
            bound.update(atom.args)

    for atom in (head, *body):
        part, place = "the head in the body", "the head"
        if atom.sign:
            part, place = "a condition in an atom too", "a condition"
        for term in atom.args:
            if not isinstance(term, Variable) or term in bound:
                continue
            if atom.sign != "not" or not is_anonymous(term):
                # Leave out the number of an anonymous variable.
                name = shorten(term.name.split()[0])
                raise ValueError(
                    f"unsafe: expected every variable of {part}, got {name} only in {place}"
                )


def parse_clause(
    tokens: list[Token], arrow: str, *, prolog: bool
) -> tuple[Atom, tuple[Atom, ...]]:
    """Parse the tokens of one clause, the `end` token included.

    Args:
      arrow: kind of the token between head and body; behind `:-` a body may have conditions.
      prolog: names follow Prolog: a predicate cannot start with a capital, and an integer is no quoted name.

    Returns:
      Head and body, its conditions last; the body is empty for a fact.

    Raises:
      ValueError: the tokens are no clause; says what was expected and what was read.
    """
    parse = _parse_literal
    if arrow != ":-":
        parse = parse_atom
    elif not prolog:
        tokens = _split_operators(tokens)
    head, index = parse_atom(tokens, 0, prolog=prolog)
    body: list[Atom] = []
    separator = arrow
    while tokens[index].kind == separator:
        atom, index = parse(tokens, index + 1, prolog=prolog)
        body.append(atom)
        separator = ","

    if tokens[index].kind != "end":
        raise _unexpected_token_error(
            f"`{separator}` or the end of the clause", tokens[index]
        )
    return head, tuple(sorted(body, key=lambda atom: atom.sign != ""))


_SIGN = "(^[!~\u00ac])(?=.)"  # of negation, before a name
_OPERATOR = re.compile(r"(\\?==|=\\=|=:=|\\=|=<|[<>!]=|[<>=])|" + _SIGN)


def _split_operators(tokens: list[Token]) -> list[Token]:
    """Return the tokens of a line, operators and signs of negation outside of parentheses cut out of words."""
    found: list[Token] = []
    depth = 0
    for token, following in zip(tokens, [*tokens[1:], tokens[-1]]):
        depth += (token.kind == "(") - (token.kind == ")")
        parts = [token.text]
        if not depth and token.kind in ("name", "variable"):
            pattern = _SIGN if following.kind == "(" else _OPERATOR
            parts = [part for part in re.split(pattern, token.text) if part]
        if parts == [token.text] and token.text not in COMPARISONS:
            found.append(token)
            continue
        for part in parts:
            kind = "variable" if is_variable(part) else "name"
            found.append(Token(part if part in COMPARISONS else kind, part))
    return found


def _parse_literal(
    tokens: list[Token], start: int, *, prolog: bool
) -> tuple[Atom, int]:
    """Parse the atom, negated atom or comparison that starts at a token; as `parse_atom` otherwise."""
    first = tokens[start]
    is_term = first.kind in (*_ATOM_KINDS, "integer")
    if is_term and tokens[start + 1].kind in COMPARISONS:
        return _parse_comparison(tokens, start, prolog), start + 3

    # a sign with the atom behind it, perhaps in parentheses
    if first.text not in ("?-", "-") and _is_operator(tokens, start):
        is_around = tokens[start + 1].kind.strip() == "("
        atom, index = parse_atom(tokens, start + 1 + is_around, prolog=prolog)
        if is_around and tokens[index].kind != ")":
            raise _unexpected_token_error(
                "`)` after a negated atom", tokens[index]
            )
        return atom._replace(sign="not"), index + is_around

    return parse_atom(tokens, start, prolog=prolog)


def _parse_comparison(tokens: list[Token], start: int, prolog: bool) -> Atom:
    """Parse the comparison that starts at a token."""
    left, right = (
        _parse_argument(tokens, i, prolog) for i in (start, start + 2)
    )
    name = COMPARISONS[tokens[start + 1].kind]
    for term in (left, right):
        is_name = isinstance(term, str) and read_number(term) is None
        if is_name and name not in ("=", "!="):
            raise ValueError(
                f"expected a number or a variable to compare by {name}, got {shorten(str(term))}"
            )
    return Atom(name, (left, right), COMPARED)


def parse_atom(
    tokens: list[Token], start: int, *, prolog: bool
) -> tuple[Atom, int]:
    """Parse the atom that starts at a token.

    Args:
      start: index of the atom's first token.
      prolog: as in `parse_clause`.

    Returns:
      The atom, and the index of the token after it.

    Raises:
      ValueError: no atom starts there; says what was expected and what was read.
    """
    _check_predicate(tokens, start, prolog)
    predicate, index = tokens[start], start + 1
    args: list[Variable | str] = []
    # Each turn reads an opening parenthesis or a comma, and the argument after it.
    if tokens[index].kind == "(":
        while tokens[index].kind in ("(", ","):
            args.append(_parse_argument(tokens, index + 1, prolog))
            index += 2
        if tokens[index].kind != ")":
            raise _unexpected_token_error(
                "`,` or `)` after an argument", tokens[index]
            )
        index += 1
    return Atom(_token_name(predicate), tuple(args)), index


def _check_predicate(tokens: list[Token], start: int, prolog: bool) -> None:
    """Raise ValueError unless the token at `start` can be a predicate."""
    predicate = tokens[start]
    if predicate.kind.startswith("end") or _is_operator(tokens, start):
        raise _unexpected_token_error("a predicate", predicate)

    # In `X < 3` the operator is what surprises, not the variable before it.
    following = tokens[start + 1]
    if (
        predicate.kind in ("variable", "integer")
        and following.text in _OPERATORS
    ):
        raise _unexpected_token_error("a predicate", following)

    # In a line format `P31(X, Y)` is an atom: with arguments, a capital does not make a variable.
    is_capital = predicate.kind == "variable" and following.kind == "("
    is_name = predicate.kind in ("name", "quoted")
    if not is_name and (prolog or not is_capital):
        raise _unexpected_token_error("a predicate", predicate)
    if following.kind == SPACED_PAREN:
        name = shorten(predicate.text)
        raise ValueError(
            f"expected `(` right after {name}, got a space before it"
        )


def _is_operator(tokens: list[Token], index: int) -> bool:
    """Check whether a negation or `?-` stands where an atom should: before a name, or around an atom."""
    kind, text = tokens[index]
    if kind not in ("name", text) or text not in (
        "not",
        "\\+",
        "?-",
        *NEGATIONS,
    ):
        return False
    if tokens[index + 1].kind in _ATOM_KINDS:
        return True

    # not(p(...)): the three next tokens are a parenthesis, a name and a parenthesis, with or without white space.
    following = [token.kind.strip() for token in tokens[index + 1 : index + 4]]
    is_around = following[::2] == ["(", "("] and following[1] in _ATOM_KINDS
    return text != "?-" and is_around


def _parse_argument(
    tokens: list[Token], index: int, prolog: bool
) -> Variable | str:
    """Parse the argument at a token: a variable, or the name of a constant."""
    token = tokens[index]
    if token.kind not in (*_ATOM_KINDS, "integer"):
        raise _unexpected_token_error("a constant or a variable", token)
    if tokens[index + 1].kind == "(":
        term = shorten(token.text + "(...)")
        raise ValueError(
            f"expected a constant or a variable, got the compound term {term}"
        )

    # Each `_` is a variable of its own. No other variable has a name with a space.
    if token.kind == "variable":
        is_anonymous = token.text == "_"
        name = f"_ {index}" if is_anonymous else token.text.removeprefix("?")
        return Variable(name)
    name = _token_name(token)
    if prolog and token.kind == "quoted" and is_integer(name):
        quoted = shorten(token.text)
        raise ValueError(
            f"expected the number {name} without quotes: to Prolog, {quoted} is another constant"
        )
    return name


def _token_name(token: Token) -> str:
    """Return the name that a token stands for."""
    return unquote(token.text) if token.kind == "quoted" else token.text


def _unexpected_token_error(expected: str, token: Token) -> ValueError:
    """Return the error for an unexpected token; it names what Prolog has and Datalog has not."""
    is_end = token.kind.startswith("end") and token.text != "."
    text = token.text if is_end else shorten(token.text)
    meaning = _SYMBOL_MEANINGS.get(token.text, "")
    if token.kind.startswith("/*"):
        meaning = "a comment that is never closed"
    elif token.text in _OPERATORS:
        meaning = "a built-in"
    if meaning:
        text = f"{meaning} {text}"
    return ValueError(f"expected {expected}, got {text}")


DECLARATIONS = ("dynamic", "discontiguous", "table", "style_check")

_BUILT_INS = """
    true/0 fail/0 false/0 !/0 ,/2 ;/2 ->/2 \\+/1 call/1 call/2 call/3 call/4 call/5 call/6 call/7 call/8 once/1 repeat/0
    catch/3 throw/1 findall/3 bagof/3 setof/3 halt/0 halt/1 :-/1 :-/2 ?-/1 -->/2 =>/2 :/2 |/2
    =/2 \\=/2 ==/2 \\==/2 @</2 @>/2 @=</2 @>=/2 =../2 is/2 =:=/2 =\\=/2 </2 >/2 =</2 >=/2
    var/1 nonvar/1 atom/1 number/1 integer/1 float/1 atomic/1 compound/1 callable/1 ground/1 functor/3 arg/3 copy_term/2
    compare/3 unify_with_occurs_check/2 subsumes_term/2 acyclic_term/1 term_variables/2 numbervars/3
    sort/2 keysort/2 length/2 atom_length/2 atom_concat/3 sub_atom/5 atom_chars/2 atom_codes/2 char_code/2
    number_chars/2 number_codes/2 char_conversion/2 current_char_conversion/2 op/3 current_op/3
    asserta/1 assertz/1 retract/1 retractall/1 abolish/1 clause/2 current_predicate/1 predicate_property/2
    dynamic/1 discontiguous/1 multifile/1 initialization/1 set_prolog_flag/2 current_prolog_flag/2 phrase/2 phrase/3
    read/1 read/2 read_term/2 read_term/3 write/1 write/2 writeq/1 writeq/2 write_canonical/1 write_canonical/2
    write_term/2 write_term/3 nl/0 nl/1 open/3 open/4 close/1 close/2 current_input/1 current_output/1 set_input/1
    set_output/1 set_stream_position/2 stream_property/2 flush_output/0 flush_output/1 at_end_of_stream/0
    at_end_of_stream/1 get_char/1 get_char/2 peek_char/1 peek_char/2 put_char/1 put_char/2 get_code/1 get_code/2
    peek_code/1 peek_code/2 put_code/1 put_code/2 get_byte/1 get_byte/2 peek_byte/1 peek_byte/2 put_byte/1 put_byte/2
"""
_LIBRARY_PREDICATES = """
    not/1 ignore/1 forall/2 aggregate_all/3 *->/2 is_list/1 assert/1 writeln/1 print/1 format/1 format/2 format/3 tab/1
    between/3 dif/2 consult/1 succ/2 plus/3 table/1 ensure_loaded/1 include/1 msort/2 member/2 memberchk/2 append/3
    select/3 delete/3 subtract/3 union/3 nth0/3 nth1/3 last/2 reverse/2 exclude/3 maplist/2 maplist/3 foldl/4 sum_list/2
    atomic_list_concat/2 atomic_list_concat/3 string_concat/3 atom_string/2
"""
_BUILT_IN_SET = frozenset(_BUILT_INS.split())
_LIBRARY_SET = frozenset(_LIBRARY_PREDICATES.split())


def indicator(atom: Atom) -> str:
    """Return the predicate indicator of an atom, such as edge/2."""
    return f"{atom.predicate}/{len(atom.args)}"


def is_built_in(atom: Atom) -> bool:
    """Check whether the predicate of an atom is a built-in of Prolog, which no program can define."""
    return indicator(atom) in _BUILT_IN_SET


def is_library_predicate(atom: Atom) -> bool:
    """Check whether Prolog brings the predicate of an atom unless the program defines it."""
    return indicator(atom) in _LIBRARY_SET


def check_head(head: Atom) -> None:
    """Raise ValueError if the head of a clause is a built-in."""
    if is_built_in(head):
        problem = f"got the built-in {indicator(head)}"
        raise ValueError(
            f"expected a predicate that a program may define, {problem}"
        )


def check_goal(goal: Atom) -> None:
    """Raise ValueError for a goal that Prolog itself would answer: a built-in, or a library predicate."""
    is_known = is_built_in(goal) or is_library_predicate(goal)
    if goal.sign == COMPARED or not is_known:
        return
    kind = "negation" if goal.predicate in ("not", "\\+") else "the built-in"
    raise ValueError(
        f"expected a predicate of facts and rules, got {kind} {indicator(goal)}"
    )


def declared_by(tokens: list[Token]) -> str:
    """Return the name of the declaration in a directive, such as dynamic.

    Args:
      tokens: of the directive, from `:-` to its full stop.

    Raises:
      ValueError: the directive is no declaration, or one that changes answers, as tabling with modes does.
    """
    name = tokens[1].text
    # One or more of name/arity, or options such as -singleton.
    brackets = ("(", SPACED_PAREN, ")", "[", "]", ",")
    kinds = [t.kind for t in tokens[2:-1] if t.kind not in brackets]
    pattern = "((name|quoted) / integer )+"
    if name == "style_check":
        pattern = "([-+] name )*"
    has_arguments = re.fullmatch(pattern, "".join(f"{k} " for k in kinds))
    if name not in DECLARATIONS or not has_arguments:
        expected = (
            f"a fact, a rule or one of the directives {', '.join(DECLARATIONS)}"
        )
        raise ValueError(f"expected {expected}, got the directive {name}")
    return name


def find_similar_names(name: str, known: Sequence[str]) -> list[str]:
    """Return up to three known names with similar spelling, the most similar first."""
    if len(name) > 100:
        return []
    # Of many names those are compared that share the largest part of their pairs of neighbouring characters with it;
    # half a million are looked at in about two seconds.
    if len(known) > 2000:
        pairs = {*pairwise(f"\n{name}\n")}

        def shared_part(other: str) -> float:
            """Return the character pairs that both names share, divided by the pairs of both."""
            n_shared = sum(map(pairs.__contains__, pairwise(f"\n{other}\n")))
            return n_shared / (len(other) + len(name) + 2)

        known = nlargest(2000, islice(known, 500_000), key=shared_part)
    return difflib.get_close_matches(name, known, n=3)


def similar_names_hint(name: str, known: Sequence[str]) -> str:
    """Return a hint that lists the known names of similar spelling, or says that there are none."""
    similar = find_similar_names(name, known)
    if similar:
        return "close: " + ", ".join(map(quote, similar))
    return f"none of {len(known)} is spelled like it"


def is_negated(kind: str, name: str, relations: Collection[str]) -> bool:
    """Check whether a name is that of a relation after a sign of negation, as other rule languages write it."""
    is_signed = kind == "relation" and name[:1] in NEGATIONS
    return is_signed and name[1:].strip() in relations


def unknown_name_message(kind: str, name: str, known: Sequence[str]) -> str:
    """Return the message for an unknown name; it says negation, or suggests known names of similar spelling.

    Args:
      kind: relation or entity.
      name: the unknown name.
      known: all names of this kind.
    """
    if is_negated(kind, name, known):
        return f"expected a relation, got the negation {shorten(name)}"
    hint = similar_names_hint(name, known)
    return (
        f"unknown {kind} {shorten(name)}: expected one of the data's ({hint})"
    )


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_content(path: Path) -> bytes:
    """Read the bytes of a file, unpacked, without a byte order mark, lines ended by \\n.

    Raises:
      ValueError: the file cannot be read or unpacked.
    """
    try:
        is_stream = str(path) == "-"
        content = sys.stdin.buffer.read() if is_stream else read_file(path)
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ValueError(f"{path}: expected a whole gzip file") from None
    except OSError as error:
        raise ValueError(
            f"{path}: expected a file that can be read: {error.strerror}"
        ) from None
    content = content.removeprefix(_BYTE_ORDER_MARK)
    has_returns = b"\r" in content
    return content.replace(b"\r\n", b"\n") if has_returns else content


def decode(content: bytes, path: str) -> str:
    """Decode the content of a file as UTF-8 text.

    Raises:
      ValueError: it is no UTF-8 or has a NUL byte; names file and line.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise ValueError(
            f"{path}:{line}: expected UTF-8, got byte 0x{byte:02x}"
        ) from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ValueError(f"{path}:{line}: expected text, got a NUL byte")
    return text


def read_text(path: Path) -> str:
    """Read a file as text; raises as `read_content` and `decode` do."""
    return decode(read_content(path), str(path))


# ---- Texts as they are shown.


def display(text: str) -> str:
    """Escape control characters and marks of direction in a text, and cut it if it is very long.

    Words and texts that are very long are cut, and end with how many characters they have. A word is cut by itself, so
    that a long name in an atom does not hide what follows.
    """
    text = re.sub(r"\S{201,}", lambda match: _cut_long(match[0], 200), text)
    return escape_unprintable(_cut_long(text, 4000))


def _cut_long(text: str, width: int) -> str:
    """Return the first characters of a long text, followed by its length; a short text as it is."""
    if len(text) <= width:
        return text
    return f"{text[:width]}… ({len(text):,} characters)"


def score_text(score: float) -> str:
    """Format a score with its leading digits."""
    return f"{score:.4f}" if score >= 0.0001 or not score else f"{score:.1e}"
