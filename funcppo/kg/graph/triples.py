"""Triples: tables, files and random splits.

Names of a stored data set: mapped from files, so that all processes of a host share them.

Names stand one after the other in one file, and offsets tell where each starts. A name is found by a hash of its bytes:
the hashes are stored in ascending order, each with the id of its name.

Triples as tables of numbers of names: how files of millions of lines are held.

A table is int32 [n, 3], head, relation and tail as numbers of a `NameTable`, in the order of the file.

N-Triples: files of RDF triples (.nt), a triple a line, with comments and empty lines.

The name of an IRI is its text without brackets; blank nodes and literals are named as they are written: `_:b1`,
`"chat"@fr`, `"5"^^<http://www.w3.org/2001/XMLSchema#integer>`. Escapes stand for their characters, but for quotes,
backslashes and line breaks in literals, which stay escaped, as in canonical N-Triples. So no two terms have one name.

Source: RDF 1.1 N-Triples, W3C Recommendation 2014, section 7 (grammar) and section 4 (canonical form).

Random splits of triples into train, valid and test.

Files of triples: columns separated by tabs (.txt, .tsv) or commas (.csv), or N-Triples (.nt).

A file has three columns and no header, unless columns are chosen. A first line that can be nothing but a header (head,
relation, tail) is read as one, and a note says so.

Names are numbered without an object for each row. Only of a file with an error the rows are read one by one, to say
which it is.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from typing import NamedTuple, overload

import numpy as np

from funcppo.core.files import shorten
from funcppo.core.settings import FieldError
from funcppo.kg.graph.text import Cells, decode, find_distinct, hash_cells

_BLOCK_NAMES = 1 << 16


class NameColumns(NamedTuple):
    """Distinct names as arrays."""

    content: np.ndarray  # uint8, the names in UTF-8, one after the other
    offsets: np.ndarray  # int64 [n + 1], where each starts
    hashes: np.ndarray  # uint64 [n], ascending
    ids: np.ndarray  # int32 [n], the id, from 1, of the name of each hash


def to_columns(names: Sequence[str]) -> NameColumns:
    """The columns of distinct names."""
    if isinstance(names, MappedNames):
        return names.columns
    parts: list[bytes] = []
    lengths = [np.zeros(1, np.int64)]
    for first in range(0, len(names), _BLOCK_NAMES):
        block = [name.encode() for name in names[first : first + _BLOCK_NAMES]]
        lengths.append(np.fromiter(map(len, block), np.int64, len(block)))
        parts.append(b"".join(block))
    content = b"".join(parts)
    return index_names(
        np.frombuffer(content, np.uint8), np.cumsum(np.concatenate(lengths))
    )


def index_names(content: np.ndarray, offsets: np.ndarray) -> NameColumns:
    """The columns of names that stand one after the other."""
    cells = Cells(offsets[:-1], np.diff(offsets))
    hashes = hash_cells(content.tobytes(), cells)
    order = np.argsort(hashes, kind="stable")
    return NameColumns(
        content, offsets, hashes[order], (order + 1).astype(np.int32)
    )


class MappedNames(Sequence[str]):
    """Distinct names as a sequence; each is made when it is read."""

    def __init__(self, columns: NameColumns) -> None:
        """The names of some columns."""
        self.columns = columns

    def __len__(self) -> int:
        """How many names there are."""
        return len(self.columns.ids)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        """The name at an index, or the names of a slice."""
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        i = range(len(self))[index]
        start, stop = self.columns.offsets[i : i + 2].tolist()
        return self.columns.content[start:stop].tobytes().decode()

    def __iter__(self) -> Iterator[str]:
        """The names in their order, read block by block."""
        for first in range(0, len(self), _BLOCK_NAMES):
            bounds = self.columns.offsets[first : first + _BLOCK_NAMES + 1]
            start = int(bounds[0])
            block = self.columns.content[start : bounds[-1]].tobytes()
            ends = (bounds - start).tolist()
            for a, b in pairwise(ends):
                yield block[a:b].decode()

    def __contains__(self, name: object) -> bool:
        """Whether a name is one of these."""
        return isinstance(name, str) and self.find(name) is not None

    def find(self, name: str) -> int | None:
        """The id of a name, from 1; None where it is not one of these."""
        content = name.encode("utf-8", "surrogatepass")
        cell = Cells(np.zeros(1, np.int64), np.array([len(content)]))
        columns, wanted = self.columns, hash_cells(content, cell)[0]
        row = int(np.searchsorted(columns.hashes, wanted))
        while row < len(self) and columns.hashes[row] == wanted:
            number = int(columns.ids[row])
            start, stop = columns.offsets[number - 1 : number + 1].tolist()
            if columns.content[start:stop].tobytes() == content:
                return number
            row += 1
        return None


class NameIds(Mapping[str, int]):
    """The ids of mapped names, from 1."""

    def __init__(self, names: MappedNames) -> None:
        """The ids of some names."""
        self._names = names

    def __getitem__(self, name: str) -> int:
        """The id of a name."""
        number = self._names.find(name)
        if number is None:
            raise KeyError(name)
        return number

    def __iter__(self) -> Iterator[str]:
        """The names in the order of their ids."""
        return iter(self._names)

    def __len__(self) -> int:
        """How many names there are."""
        return len(self._names)


Triple = tuple[str, str, str]  # head, relation, tail
# rows that are worked on at a time, where a table may have hundreds of millions
_TABLE_BLOCK_ROWS = 1 << 22


class NameTable:
    """Names of entities and relations, numbered from 0 in the order in which they come."""

    def __init__(self) -> None:
        """No names."""
        self._numbers: defaultdict[str, int] = defaultdict()
        self._numbers.default_factory = self._numbers.__len__

    def __len__(self) -> int:
        """How many names there are."""
        return len(self._numbers)

    def names(self) -> list[str]:
        """The names in the order of their numbers."""
        return list(self._numbers)

    def number(self, names: Sequence[str]) -> np.ndarray:
        """The numbers of names, int32 [n]; names that are not in the table join it."""
        numbers = map(self._numbers.__getitem__, names)
        return np.fromiter(numbers, np.int32, len(names))

    def number_triples(self, triples: Sequence[Triple]) -> np.ndarray:
        """The table of triples, int32 [n, 3]; their names join this table."""
        names = [name for triple in triples for name in triple]
        return self.number(names).reshape(-1, 3)


def order_of_occurrence(numbers: np.ndarray, n_names: int) -> np.ndarray:
    """The distinct numbers among some, in the order of first occurrence.

    Args:
      numbers: int [n], from 0 to n_names - 1.
      n_names: how many there may be.
    """
    unseen = len(numbers)
    first = np.full(n_names, unseen)
    # Of an index that is repeated numpy keeps the last value: backwards, the first one.
    for start in reversed(range(0, unseen, _TABLE_BLOCK_ROWS)):
        block = numbers[start : start + _TABLE_BLOCK_ROWS]
        places = np.arange(start, start + len(block))
        first[block[::-1]] = places[::-1]
    occurring = np.flatnonzero(first < unseen)
    return occurring[np.argsort(first[occurring], kind="stable")]


def drop_duplicates(triples: np.ndarray) -> np.ndarray:
    """The distinct rows of a table, each at its first occurrence.

    Args:
      triples: int [n, 3], none negative.
    """
    if not len(triples) or not _has_duplicates(_row_codes(triples)):
        return triples
    # Where each came from takes longer to find than that none repeats another.
    _, first = np.unique(_row_codes(triples), return_index=True)
    return triples[np.sort(first)]


def _row_codes(triples: np.ndarray) -> np.ndarray:
    """A number for each row of a table, int64 [n], equal for equal rows."""
    n_a, n_b, n_c = (int(top) + 1 for top in triples.max(axis=0))
    code = triples[:, 0].astype(np.int64)
    code *= n_c
    code += triples[:, 2]
    if n_a * n_b * n_c >= 1 << 63:
        _, code = np.unique(code, return_inverse=True)
    code *= n_b
    code += triples[:, 1]
    return code


def _has_duplicates(codes: np.ndarray) -> bool:
    """Whether two numbers are equal; they are sorted in place, as a table may have hundreds of millions."""
    codes.sort()
    return bool((codes[1:] == codes[:-1]).any())


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
_BLOCK_LINES_NT = 3 << 15


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
        if len(block) == _BLOCK_LINES_NT:
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


_TOLERANCE = 1e-6  # of the sum of the ratios


class Split(NamedTuple):
    """The parts of a table of triples, each in the order of the table."""

    train: np.ndarray  # int32 [n, 3]
    valid: np.ndarray
    test: np.ndarray
    n_duplicates: int  # triples that were dropped because they repeat another


def parse_ratios(text: str) -> tuple[float, float, float]:
    """The shares of train, valid and test that a text such as 0.8,0.1,0.1 states.

    Raises:
      FieldError: not three shares from 0 to 1 that sum to 1, or no share for train.
    """
    try:
        train, valid, test = map(float, text.split(","))
    except ValueError:
        train, valid, test = 0.0, 0.0, 0.0
    has_sum = math.isclose(train + valid + test, 1, abs_tol=_TOLERANCE)
    if not has_sum or not (train > 0 and valid >= 0 and test >= 0):
        expected = (
            "shares of train, valid and test that sum to 1, as 0.8,0.1,0.1"
        )
        raise FieldError("split_ratios", expected, text)
    return train, valid, test


def split_triples(
    triples: np.ndarray, names: Sequence[str], ratios: str, seed: int
) -> Split:
    """Split triples at random, each distinct one into one part.

    A triple's place in the random order is a hash of the seed and its names. So the split depends neither on the order
    of the triples nor on a version of a random generator.

    Args:
      triples: int32 [n, 3], head, relation and tail as numbers of names, in any order.
      names: the names.
      ratios: as `parse_ratios` reads them.
      seed: seed of the random order.

    Raises:
      ValueError: a part whose share is not 0 would be empty.
    """
    shares = parse_ratios(ratios)
    distinct = drop_duplicates(triples)
    n_valid, n_test = (round(share * len(distinct)) for share in shares[1:])
    sizes = (len(distinct) - n_valid - n_test, n_valid, n_test)
    for share, size in zip(shares, sizes):
        if share > 0 and size < 1:
            raise ValueError(
                f"split_ratios {ratios}: expected triples enough for each part, got {len(distinct)}"
            )

    hashes = _hash_triples(distinct, names, seed)
    in_random_order = np.lexsort((hashes[:, 1], hashes[:, 0]))
    n_held_out = n_test + n_valid
    return Split(
        train=distinct[np.sort(in_random_order[n_held_out:])],
        valid=distinct[np.sort(in_random_order[n_test:n_held_out])],
        test=distinct[np.sort(in_random_order[:n_test])],
        n_duplicates=len(triples) - len(distinct),
    )


def _hash_triples(
    triples: np.ndarray, names: Sequence[str], seed: int
) -> np.ndarray:
    """A hash of the seed and the names of each triple, uint64 [n, 2], the first half more significant."""
    key = str(seed).encode()
    hashes = bytearray()
    rows: list[list[int]] = triples.tolist()
    for head, relation, tail in rows:
        text = "\t".join((names[head], names[relation], names[tail])).encode()
        hashes += hashlib.blake2b(text, digest_size=16, key=key).digest()
    return np.frombuffer(hashes, ">u8").reshape(-1, 2)


SUFFIXES = (".txt", ".tsv", ".csv", ".nt", ".parquet")

# Words that headers have for the columns.
_HEADER_WORDS = (
    {"head", "h", "subject", "subj", "sub", "s", "source", "from"},
    {"relation", "rel", "r", "predicate", "pred", "p", "property", "edge"},
    {"tail", "t", "object", "obj", "o", "target", "to"},
)


# what is read at a time, of a file with tabs and of one with commas
_BLOCK_BYTES = 1 << 20
_BLOCK_ROWS = 1 << 15
_PROBE_BYTES = 1000
_TAB, _NEWLINE = np.frombuffer(b"\t\n", np.uint8)


class TripleFile(NamedTuple):
    """The triples of a file."""

    triples: (
        np.ndarray
    )  # int32 [n, 3], head, relation, tail as numbers of names
    first_line: int  # number of the line of the first triple, from 1
    notes: list[str]


class Columns(NamedTuple):
    """Where head, relation and tail stand in a row."""

    indices: tuple[int, ...]
    n_columns: int  # of every row
    has_header: bool  # the first row holds names of columns


def parse_columns(text: str) -> list[str]:
    """The three columns that a text such as head,relation,tail or 1,3,2 states.

    Raises:
      FieldError: not three different names, or not three different numbers from 1.
    """
    names = [name.strip() for name in text.split(",")]
    n_numbers = sum(map(_is_number, names))
    if n_numbers == len(names):
        names = [str(int(name)) for name in names]
    is_valid = len(names) == len(set(names)) == 3 and all(names)
    if not is_valid or n_numbers not in (0, 3) or "0" in names:
        expected = "three names or three numbers from 1, as head,relation,tail or 1,2,3"
        raise FieldError("columns", expected, text)
    return names


def _is_number(text: str) -> bool:
    """Whether the text is a short decimal number."""
    return text.isdecimal() and text.isascii() and len(text) < 10


def is_triple_file(name: str) -> bool:
    """Whether a file of that name is read as triples."""
    return name.removesuffix(".gz").endswith(SUFFIXES)


class _Irregular(Exception):
    """The content of a file is not what it should be; its rows, one by one, say why."""


def is_ntriples(name: str) -> bool:
    """Whether a file of that name is read as N-Triples."""
    return name.removesuffix(".gz").endswith(".nt")


def read_triples(
    content: bytes, path: str, names: NameTable, columns: str | None = None
) -> TripleFile:
    """The triples of a file, one a line.

    Args:
      content: of the file, as `text_files.read_content` gives it.
      path: name of the file; its ending says what separates the columns.
      names: receives the names of the file.
      columns: as `parse_columns` reads them; None for the three columns of a file without a header.

    Raises:
      ValueError: no UTF-8, a row with another number of columns or an empty name, a column that does not exist, or bad
        quotes of CSV. The message names file and line.
    """
    if _is_blank(content):
        return TripleFile(np.zeros((0, 3), np.int32), 1, [])
    if is_ntriples(path):
        if columns is not None:
            raise FieldError("columns", "none for N-Triples", columns)
        return TripleFile(
            read_ntriples(decode(content, path), path, names), 1, []
        )

    separator = separator_of(path)
    number_rows = _number_csv if separator == "," else _number_tabs
    chosen = triples = None
    with suppress(_Irregular, ValueError, csv.Error):
        if b"\0" in content:
            raise _Irregular
        content = content.rstrip(b"\n")
        end = content.find(b"\n")
        line = content[: end if end >= 0 else len(content)]
        chosen = choose_columns(line, path, columns)
        triples = number_rows(content, chosen, names)
    if chosen is None or triples is None:
        _check_rows(decode(content, path), path, columns)
        raise AssertionError(f"{path}: a row is wrong, and none was found")

    if chosen.has_header:
        return TripleFile(triples[1:], 2, [])
    return drop_header(triples, names.names(), path, separator)


def drop_header(
    triples: np.ndarray, names: list[str], path: str, separator: str
) -> TripleFile:
    """The triples of a file, of which the first may be a header that nobody announced.

    It is one if its words are those of headers and occur nowhere else.
    """
    first = [names[number] for number in triples[0]]
    if not _is_header(first) or np.isin(triples[1:], triples[0]).any():
        return TripleFile(triples, 1, [])
    header = shorten(separator.join(first))
    return TripleFile(triples[1:], 2, [f"{path}:1: {header} read as a header"])


def _is_blank(content: bytes) -> bool:
    """Whether there is nothing but white space."""
    start = content[:_PROBE_BYTES].decode(errors="ignore")
    return not start.strip() and not content.decode(errors="replace").strip()


def separator_of(path: str) -> str:
    """What separates the columns of a file of that name."""
    return "," if path.removesuffix(".gz").endswith(".csv") else "\t"


def choose_columns(line: bytes, path: str, columns: str | None) -> Columns:
    """Where head, relation and tail stand, by the first line of a file."""
    separator = separator_of(path)
    text = decode(line, path)
    rows = _csv_rows(text, path) if separator == "," else _tab_rows(text)
    return _choose_columns(next(rows, []), columns, f"{path}:1", separator)


def _number_tabs(
    content: bytes, columns: Columns, names: NameTable
) -> np.ndarray:
    """The numbered rows of a file with tabs, int32 [n, 3]; quotes have no meaning."""
    if columns.n_columns > 3:
        content.decode()  # columns that are not chosen must be UTF-8 too
    parts: list[Cells] = []
    first = 0
    while first < len(content):
        end = content.find(b"\n", first + _BLOCK_BYTES)
        end = len(content) if end < 0 else end
        start, length = _find_cells(content[first:end] + b"\n", columns)
        parts.append(Cells(start + first, length))
        first = end + 1

    cells = Cells(*map(np.concatenate, zip(*parts)))
    chosen, inverse = find_distinct(content, cells)
    spans = zip(cells.start[chosen].tolist(), cells.length[chosen].tolist())
    texts = [content[at : at + size].decode() for at, size in spans]
    return names.number(texts)[inverse].reshape(-1, 3)


def _find_cells(block: bytes, columns: Columns) -> Cells:
    """Where the names of whole lines with tabs stand, row after row.

    Raises:
      _Irregular: a line has another number of columns, or no name where one should be.
    """
    width = columns.n_columns
    codes = np.frombuffer(block, np.uint8)
    # bytes that are smaller wrap around
    ends = np.flatnonzero(codes - _TAB <= _NEWLINE - _TAB)
    if len(ends) % width:
        raise _Irregular
    start = np.concatenate([[0], ends[:-1] + 1]).reshape(-1, width)
    ends = ends.reshape(-1, width)
    is_line_end = codes[ends] == _NEWLINE
    if is_line_end[:, :-1].any() or not is_line_end[:, -1].all():
        raise _Irregular
    start = start[:, columns.indices].ravel()
    length = ends[:, columns.indices].ravel() - start
    if not length.all():
        raise _Irregular
    return Cells(start, length)


def _number_csv(
    content: bytes, columns: Columns, names: NameTable
) -> np.ndarray:
    """The numbered rows of a file with commas, int32 [n, 3]."""
    text = io.TextIOWrapper(io.BytesIO(content), "utf-8", newline="")
    reader = csv.reader(text, skipinitialspace=True, strict=True)
    blocks: list[np.ndarray] = []
    n_rows = 0
    while rows := list(islice(reader, _BLOCK_ROWS)):
        n_rows += len(rows)
        has_line_breaks = reader.line_num != n_rows
        if has_line_breaks or {*map(len, rows)} != {columns.n_columns}:
            raise _Irregular
        chosen = [[row[i] for row in rows] for i in columns.indices]
        if not all(map(all, chosen)):
            raise _Irregular
        blocks.append(np.stack([*map(names.number, chosen)], axis=1))
    return np.concatenate(blocks)


def _check_rows(text: str, path: str, columns: str | None) -> None:
    """Raise ValueError for the first row of a file that is wrong."""
    separator = separator_of(path)
    rows = _csv_rows(text, path) if separator == "," else _tab_rows(text)
    first = next(rows)
    chosen = _choose_columns(first, columns, f"{path}:1", separator)
    if not chosen.has_header:
        _check_row(first, chosen, f"{path}:1", separator)
    for number, row in enumerate(rows, 2):
        _check_row(row, chosen, f"{path}:{number}", separator)


def _tab_rows(text: str) -> Iterator[list[str]]:
    """The rows of a file with tabs; quotes have no meaning."""
    for line in text.rstrip("\n").split("\n"):
        yield line.split("\t")


def _csv_rows(text: str, path: str) -> Iterator[list[str]]:
    """The rows of a file with commas, one a line."""
    source = io.StringIO(text.rstrip("\n"), newline="")
    reader = csv.reader(source, skipinitialspace=True, strict=True)
    number = 0
    try:
        for number, row in enumerate(reader, 1):
            if reader.line_num != number:
                raise ValueError(
                    f"{path}:{number}: expected a row on one line, got one with a line break in quotes"
                )
            yield row
    except csv.Error as error:
        raise ValueError(
            f"{path}:{number + 1}: expected comma-separated values: {error}"
        ) from None


def _choose_columns(
    first: Sequence[str], columns: str | None, place: str, separator: str
) -> Columns:
    """Where head, relation and tail stand, by the first row of a file."""
    if columns is None:
        return Columns((0, 1, 2), 3, has_header=False)

    names = parse_columns(columns)
    by_number = _is_number(names[0])
    header = [cell.strip() for cell in first]
    if by_number:
        indices = [int(name) - 1 for name in names]
        missing = [name for name in names if int(name) > len(first)]
    else:
        missing = [name for name in names if header.count(name) != 1]
        indices = [header.index(name) for name in names if name in header]
    if missing:
        kind = "column" if by_number else "one column"
        line = shorten(separator.join(first))
        raise ValueError(
            f"{place}: expected {kind} {missing[0]}, as --columns says, got {len(first)} columns, {line}"
        )
    return Columns(tuple(indices), len(first), has_header=not by_number)


def _check_row(
    row: Sequence[str], columns: Columns, place: str, separator: str
) -> None:
    """Raise ValueError if a row has another number of columns, or no name where one should be."""
    names = ("head", "relation", "tail")
    if columns.n_columns == 3:
        shown = "<TAB>" if separator == "\t" else separator
        expected = f"3 columns {shown.join(names)}"
    else:
        expected = f"{columns.n_columns} columns, as in the first line"

    line = shorten(separator.join(row))
    if len(row) != columns.n_columns:
        is_wide = len(row) > columns.n_columns == 3
        hint = " (--columns chooses three)" if is_wide else ""
        raise ValueError(
            f"{place}: expected {expected}, got {len(row)}{hint}, in {line}"
        )
    if not all(row[index] for index in columns.indices):
        raise ValueError(
            f"{place}: expected {expected}, got an empty one, in {line}"
        )


def _is_header(names: Sequence[str]) -> bool:
    """Whether the words of a first row are those that headers have."""
    return all(
        word.strip().lower() in known_words
        for word, known_words in zip(names, _HEADER_WORDS)
    )
