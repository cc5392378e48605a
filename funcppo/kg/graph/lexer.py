"""Tokens of text, and names as text that reads back as the same name.

Two ways to cut text into tokens serve all rule formats:

    line     a name is any run without white space, `,` `(` `)`, as in `/m/02(X, a-b)`: queries and the line formats
    Prolog   a name is as in ISO Prolog: `ann`, `'any text'`, `42`

In both, a name in single quotes is never a variable, and takes the escapes of ISO Prolog.

`tokenize_line` and `tokenize_prolog` cut text; `quote` and `unquote` convert between names and quoted text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, Protocol

from funcppo.core.files import shorten


class Token(NamedTuple):
    """One token of a rule, a fact or a query."""

    # name, quoted, integer, variable, end, end of file, SPACED_PAREN; other symbols are their own
    # kind
    kind: str
    # the characters in the source; of a quoted name with its quotes and escapes
    text: str


class VariableTest(Protocol):
    """Whether an unquoted word is a variable; formats differ in this."""

    def __call__(self, text: str, /) -> bool: ...


class PrologSource(NamedTuple):
    """One clause of a Prolog program, as text and as tokens."""

    line: int  # where the clause starts, from 1
    text: str
    tokens: list[Token]


# tokens of a line format that are made once, however often they occur
MAX_REMEMBERED_TOKENS = 1 << 16
# kind of an opening parenthesis after white space: in Prolog it starts no argument list
SPACED_PAREN = " ("

# Quantifiers are possessive (`*+`, `++`) throughout: backtracking could take quadratic time on long or hostile input.
QUOTED_PATTERN = (
    r"'(?:[^'\\\n]|\\(?:x[0-9a-fA-F]++\\?|[0-7]++\\?|(?s:.))|'')*+'"
)
_LINE_TOKEN = re.compile(
    rf"(?P<quoted>{QUOTED_PATTERN})"
    r"|(?P<symbol>:-|<=|[(),'])"
    r"|(?P<word>\\\+|(?:(?!:-)[^\s,()])++)"
    r"|\s++"
)
_PROLOG_TOKEN = re.compile(
    rf"(?P<quoted>{QUOTED_PATTERN})"
    r"|(?P<integer>-?[0-9]++)"
    r"|(?P<word>[^\W\d](?:\w++|[^\x00-\x7f\s])*+)"
    r"|(?P<end>\.(?=\s|%|\Z))"
    r"|(?:\s|%[^\n]*+|/\*(?s:.*?)\*/)++"
    r"|(?P<symbol>[(),]|[-+*/\\^<>=~:.?@#&$]++|(?s:.))"
)

# Escapes of a quoted name: \xHH..\ and \OOO..\ (hexadecimal, octal), \uHHHH, \UHHHHHHHH, \c, and '' for a quote.
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]++)\\?|([0-7]++)\\?|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|((?s:.)))|''"
)
_OCTAL_GROUP = 2
_LETTER_GROUP = 5
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
_PROLOG_NAME = re.compile(r"[a-z][a-zA-Z0-9_]*")
# no full stop at the end: it would end the clause
_BARE_NAME = re.compile(r"(?!.*:-)[\w/:.-]*[\w/:-]")


def is_variable(text: str) -> bool:
    """Whether an unquoted argument is a variable as in Prolog: `_` or a capital comes first."""
    return text[:1] == "_" or text[:1].isupper()


def is_anyburl_variable(text: str) -> bool:
    """Whether an unquoted argument is a variable in AnyBURL: one capital of A to Z; Q42 is a constant."""
    return len(text) == 1 and "A" <= text <= "Z"


def is_bare_name(text: str) -> bool:
    """Whether a name needs no quotes in a line format, variables aside."""
    return _BARE_NAME.fullmatch(text) is not None


def is_prolog_name(text: str) -> bool:
    """Whether a name needs no quotes in any Prolog: a small letter of a to z, then letters, digits and `_`."""
    return _PROLOG_NAME.fullmatch(text) is not None


def is_integer(text: str) -> bool:
    """Whether a name is an integer as Prolog prints it."""
    return _INTEGER.fullmatch(text) is not None


def quote(text: str) -> str:
    """The name in single quotes, on one line, whatever characters it holds."""
    escaped = "".join(map(_escape, text))
    return f"'{escaped}'"


def format_name(text: str) -> str:
    """The name as a query takes it: on one line, in quotes unless it is plain."""
    return text if is_bare_name(text) else quote(text)


def _escape(char: str) -> str:
    """One character as it stands in a quoted name."""
    if char in _ESCAPE_OF_CHARACTER:
        return _ESCAPE_OF_CHARACTER[char]
    return char if char.isprintable() else f"\\x{ord(char):x}\\"


def escape_unprintable(text: str) -> str:
    """The text with characters that a terminal would not print as themselves escaped as in Python."""
    return "".join(
        char if char.isprintable() else ascii(char)[1:-1] for char in text
    )


def unquote(text: str) -> str:
    """The name that a quoted text stands for.

    Args:
      text: with its quotes, as in a `Token`.

    Raises:
      ValueError: an escape that ISO Prolog does not have, or the code of a character that Unicode does not have.
    """
    return _ESCAPE.sub(_unescape, text[1:-1])


def _unescape(match: re.Match[str]) -> str:
    """The character that one escape stands for."""
    group = match.lastindex
    if group is None:
        return "'"

    if group == _LETTER_GROUP:
        letter = match[_LETTER_GROUP]
        if letter not in _CHARACTER_OF_ESCAPE:
            raise ValueError(
                f"expected an escape of ISO Prolog, got {shorten(match[0])} (a backslash in quotes is doubled)"
            )
        return _CHARACTER_OF_ESCAPE[letter]

    # The other groups hold the digits of a character code. Surrogates are no characters.
    code = int(match[group], 8 if group == _OCTAL_GROUP else 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(
            f"expected a character of Unicode, got {shorten(match[0])}"
        )
    return chr(code)


def tokenize_line(
    text: str, is_variable_fn: VariableTest = is_variable
) -> list[Token]:
    """The tokens of one line, an `end` token last; a full stop at the end of the line is dropped.

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


@lru_cache(MAX_REMEMBERED_TOKENS)
def _line_token(kind: str, text: str, is_variable_fn: VariableTest) -> Token:
    """The token of a match of `_LINE_TOKEN`: the lines of a rule file repeat the same ones."""
    if kind == "word":
        return Token("variable" if is_variable_fn(text) else "name", text)
    return Token(kind if kind == "quoted" else text, text)


def tokenize_prolog(program: str) -> Iterator[PrologSource]:
    """Cut a program into clauses and each clause into tokens; comments are left out.

    Args:
      program: text of the program.

    Returns:
      An iterator over the clauses. The last token of a clause is its full stop, of kind `end`, or a token of kind
      `end of file` where the last full stop is missing.
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
            yield PrologSource(
                line, program[clause_start : match.end()], tokens
            )
            tokens = []

    if tokens:
        tokens.append(Token("end of file", "the end of the file"))
        yield PrologSource(line, program[clause_start:], tokens)


def _prolog_token(kind: str, text: str) -> Token:
    """The token of a match of `_PROLOG_TOKEN`; an integer gets the text that Prolog prints for it."""
    # Prolog and Python draw the letters of a name from the same two classes of Unicode.
    if kind == "word" and not text.isidentifier():
        return Token(text, text)
    if kind == "word":
        return Token("variable" if is_variable(text) else "name", text)
    if kind == "integer":
        digits = text.lstrip("-").lstrip("0") or "0"
        is_negative = text[0] == "-" and digits != "0"
        sign = "-" if is_negative else ""
        return Token(kind, sign + digits)
    if kind == "symbol":
        return Token(text, text)
    return Token(kind, text)
