"""N-Triples: files of RDF triples (.nt), a triple a line, with comments and empty lines.

The name of an IRI is its text without brackets; blank nodes and literals are named as they are written: `_:b1`,
`"chat"@fr`, `"5"^^<http://www.w3.org/2001/XMLSchema#integer>`. Escapes stand for their characters, but for quotes,
backslashes and line breaks in literals, which stay escaped, as in canonical N-Triples. So no two terms have one name.

Source: RDF 1.1 N-Triples, W3C Recommendation 2014, section 7 (grammar) and section 4 (canonical form).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from funcppo.core.files import shorten
from funcppo.kg.graph.triple_table import NameTable

_HEX = "[0-9A-Fa-f]"
_UCHAR = rf"\\u{_HEX}{{4}}|\\U{_HEX}{{8}}"
_FORBIDDEN_IN_IRI = r"\x00-\x20<>\"{}|^`\\"
_IRI = rf"<(?:[^{_FORBIDDEN_IN_IRI}]|{_UCHAR})*>"
_LETTER = (
    "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u02ff\u0370-\u037d\u037f-\u1fff\u200c-\u200d\u2070-\u218f"
    "\u2c00-\u2fef\u3001-\ud7ff\uf900-\ufdcf\ufdf0-\ufffd\U00010000-\U000effff"
)
_NAME_START = rf"{_LETTER}_:"
_NAME_CHAR = rf"{_NAME_START}0-9\-\u00b7\u0300-\u036f\u203f-\u2040"
_BLANK = rf"_:[{_NAME_START}0-9](?:[{_NAME_CHAR}.]*[{_NAME_CHAR}])?"
_STRING = rf'"(?:[^"\\\n\r]|\\[tbnrf"\'\\]|{_UCHAR})*"'
_LITERAL = rf"{_STRING}(?:\^\^{_IRI}|@[A-Za-z]+(?:-[A-Za-z0-9]+)*)?"
_SPACE = r"[ \t]*"
_TRIPLE = re.compile(
    rf"{_SPACE}({_IRI}|{_BLANK}){_SPACE}({_IRI}){_SPACE}({_IRI}|{_BLANK}|{_LITERAL}){_SPACE}\.{_SPACE}(?:#.*)?"
)
_EMPTY = re.compile(rf"{_SPACE}(?:#.*)?")
_ABSOLUTE = re.compile(rf"<[A-Za-z][A-Za-z0-9+.\-]*:[^{_FORBIDDEN_IN_IRI}]*>")
_ESCAPE = re.compile(rf"{_UCHAR}|\\.")
_CHARACTERS = {"t": "\t", "b": "\b", "n": "\n", "r": "\r", "f": "\f"}
_CANONICAL = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r"}
# the datatype of a literal without one
_XSD_STRING = "^^<http://www.w3.org/2001/XMLSchema#string>"
_BLOCK_NAMES = 3 << 15


def read_ntriples(text: str, path: str, names: NameTable) -> np.ndarray:
    """The triples of a file, int32 [n, 3], head, relation and tail as numbers of names.

    Args:
      text: content of the file.
      path: name of the file, for messages.
      names: receives the names.

    Raises:
      ValueError: a line is no triple, or an IRI is not absolute; names file and line.
    """
    blocks: list[np.ndarray] = [np.zeros(0, np.int32)]
    block: list[str] = []
    for name in _iter_names(text, path):
        block.append(name)
        if len(block) == _BLOCK_NAMES:
            blocks.append(names.number(block))
            block.clear()
    blocks.append(names.number(block))
    return np.concatenate(blocks).reshape(-1, 3)


def _iter_names(text: str, path: str) -> Iterator[str]:
    """Yield the names of triples, one after the other."""
    for number, line in enumerate(re.split("[\n\r]", text), 1):
        match = _TRIPLE.fullmatch(line)
        if match is None:
            if _EMPTY.fullmatch(line):
                continue
            raise ValueError(
                f"{path}:{number}: expected `subject predicate object .` of N-Triples, got {shorten(line)}"
            )
        try:
            yield from map(_name_of, match.groups())
        except ValueError as error:
            raise ValueError(
                f"{path}:{number}: {error}, in {shorten(line)}"
            ) from None


def _name_of(term: str) -> str:
    """The name of a term.

    Raises:
      ValueError: an IRI that is not absolute or has a character that it must not, or an escape of no character.
    """
    if term.startswith("_"):
        return term
    if term.startswith("<"):
        return _iri(term)[1:-1]
    end = term.rindex('"') + 1
    string, suffix = term[:end], term[end:]
    if "\\" in string:
        inner = _ESCAPE.sub(_unescape, string[1:-1])
        escaped = "".join(_CANONICAL.get(char, char) for char in inner)
        string = f'"{escaped}"'
    if suffix.startswith("^^"):
        suffix = "^^" + _iri(suffix[2:])
    return string if suffix == _XSD_STRING else string + suffix


def _iri(term: str) -> str:
    """An IRI in brackets, its escapes replaced."""
    iri = _ESCAPE.sub(_unescape, term) if "\\" in term else term
    if not _ABSOLUTE.fullmatch(iri):
        raise ValueError(f"expected an absolute IRI, got {shorten(iri)}")
    return iri


def _unescape(match: re.Match[str]) -> str:
    """The character of an escape."""
    code = match.group()[1:]
    if code[0] not in "uU" or len(code) == 1:
        return _CHARACTERS.get(code, code)
    number = int(code[1:], 16)
    if number > 0x10FFFF or 0xD800 <= number < 0xE000 or number == 0:
        raise ValueError(f"expected a character, got the escape \\{code}")
    return chr(number)
