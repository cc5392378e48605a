"""Text to tokens and names to text: quoting that is right in both directions.

Two ways to cut text, shared by every rule format:

    LINE    a name is any run without white space, `,` `(` `)`, as in `/m/02(X, a-b)`: queries and line formats
    PROLOG  a name is as in ISO Prolog: `ann`, `'any text'`, `42`

In both, a name in single quotes is never a variable and never a built-in, and takes the escapes of ISO Prolog.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Token(NamedTuple):
    """kind: name, quoted, integer, variable, end, SPACED, or the text itself for `(` `)` `,` `:-` and other symbols."""

    kind: str
    text: str  # of a quoted name: quotes and escapes included


SPACED_PAREN = " ("  # after white space: to Prolog it opens no arguments
QUOTED_PATTERN = r"'(?:[^'\\\n]|\\(?:x[0-9a-fA-F]++\\?|[0-7]++\\?|(?s:.))|'')*+'"
_LINE = re.compile(
    rf"(?P<quoted>{QUOTED_PATTERN})|(?P<symbol>:-|<=|[(),'])"
    r"|(?P<word>\\\+|(?:(?!:-)[^\s,()])++)|\s++"
)
_PROLOG = re.compile(
    rf"(?P<quoted>{QUOTED_PATTERN})|(?P<integer>-?[0-9]++)|(?P<word>[^\W\d]\w*+)|(?P<end>\.(?=\s|%|\Z))"
    r"|(?:\s|%[^\n]*+|/\*(?s:.*?)\*/)++|(?P<symbol>[(),]|[-+*/\\^<>=~:.?@#&$]++|(?s:.))"
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]++)\\?|([0-7]++)\\?|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|((?s:.)))|''")
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b", "s": " "}
_SIMPLE |= {"\n": "", "\\": "\\", "'": "'", '"': '"', "`": "`"}
_ESCAPED = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", "'": "\\'"}
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
_PROLOG_NAME = re.compile(r"[a-z][a-zA-Z0-9_]*")
_BARE = re.compile(r"(?!.*:-)[\w/:.-]*[\w/:-]")  # a full stop at the end would be taken for that of the clause


def shorten(text: str, width: int = 60) -> str:
    """The text on one line, as Python would quote it, cut to `width` characters."""
    return repr(text if len(text) <= width else text[: width - 3] + "...")


def is_variable(text: str) -> bool:
    """Whether an unquoted argument is a variable as in Prolog: `_` or a capital comes first."""
    return text[0] == "_" or text[0].isupper()


def is_anyburl_variable(text: str) -> bool:
    """Whether an unquoted argument is a variable to AnyBURL: one capital of A to Z; Q42 is a constant."""
    return len(text) == 1 and "A" <= text <= "Z"


def is_bare_name(text: str) -> bool:
    """Whether a name needs no quotes in a line format, variables aside."""
    return _BARE.fullmatch(text) is not None


def is_prolog_name(text: str) -> bool:
    """Whether a name needs no quotes in any Prolog: a small letter of a to z, then letters, digits and `_`."""
    return _PROLOG_NAME.fullmatch(text) is not None


def is_integer(text: str) -> bool:
    """Whether a name is an integer as Prolog prints it."""
    return _INTEGER.fullmatch(text) is not None


def quote(text: str) -> str:
    """The name in single quotes, on one line, whatever it holds."""
    return "'" + "".join(_ESCAPED.get(c) or (c if c.isprintable() else f"\\x{ord(c):x}\\") for c in text) + "'"


def unquote(text: str) -> str:
    r"""The name that a quoted text stands for.

    Error: ValueError for an escape that ISO Prolog does not have, or a character that Unicode does not have.
    """
    return _ESCAPE.sub(_unescape, text[1:-1])


def _unescape(match: re.Match[str]) -> str:
    if match.lastindex is None:
        return "'"
    if match.lastindex == 5:
        char = match[5]
        if char not in _SIMPLE:
            raise ValueError(f"want an escape of ISO Prolog, got {shorten(match[0])}")
        return _SIMPLE[char]
    digits = match[match.lastindex]
    code = int(digits, 8 if match.lastindex == 2 else 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"want a character of Unicode, got {shorten(match[0])}")
    return chr(code)


def tokenize_line(text: str, is_variable_fn: Callable[[str], bool] = is_variable) -> list[Token]:
    """The tokens of one line; a full stop at its end is dropped.

    Args:
      variable: whether an unquoted word is a variable.
    """
    found = []
    for match in _LINE.finditer(text.strip().removesuffix(".")):
        kind, word = match.lastgroup, match.group()
        if kind == "word":
            found.append(Token("variable" if is_variable_fn(word) else "name", word))
        elif kind is not None:
            found.append(Token("quoted" if kind == "quoted" else word, word))
    return [*found, Token("end", "the end of the line")]


def tokenize_prolog(program: str) -> Iterator[tuple[int, str, list[Token]]]:
    """(line, text, tokens) of each clause of a program; comments are left out."""
    found: list[Token] = []
    line, counted, start, spaced = 1, 0, 0, False
    for match in _PROLOG.finditer(program):
        kind = match.lastgroup
        if kind is None:
            spaced = True
            continue
        if not found:
            start = match.start()
            line, counted = line + program.count("\n", counted, start), start
        found.append(
            Token(SPACED_PAREN, "(") if spaced and match.group() == "(" else _prolog_token(kind, match.group())
        )
        spaced = False
        if kind == "end":
            yield line, program[start : match.end()], found
            found = []
    if found:
        yield line, program[start:], [*found, Token("end of file", "the end of the file")]


def _prolog_token(kind: str, text: str) -> Token:
    if kind == "word":
        return Token("variable" if is_variable(text) else "name", text)
    if kind == "integer":
        digits = text.lstrip("-").lstrip("0") or "0"
        return Token(kind, "-" + digits if text[0] == "-" and digits != "0" else digits)
    return Token(text if kind == "symbol" else kind, text)
