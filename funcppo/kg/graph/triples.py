"""Triples: files with tabs or commas and of N-Triples, tables of numbers, random splits, mapped names, settings.

A file has three columns and no header, unless columns are chosen. A first line that can be nothing but a header (head,
relation, tail) is read as one, and a note says so. A table is int32 [n, 3], head, relation and tail as numbers of
names, in the order of the file.

N-Triples (.nt) are RDF triples, one a line, with comments and empty lines. The name of an IRI is its text without
brackets; blank nodes and literals are named as they are written: `_:b1`, `"chat"@fr`,
`"5"^^<http://www.w3.org/2001/XMLSchema#integer>`. Escapes stand for their characters, but for quotes, backslashes and
line breaks in literals, which stay escaped, as in canonical N-Triples. So no two terms have one name.

Names of a stored data set are mapped from files, so that all processes of a host share them. They stand one after the
other in one file, offsets tell where each starts, and a name is found by its CRC-32.

Source: RDF 1.1 N-Triples, W3C Recommendation 2014, section 7 (grammar) and section 4 (canonical form).
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Literal, NamedTuple, overload

import numpy as np

from funcppo.core.files import shorten
from funcppo.core.settings import FieldError, Seed, check_fields
from funcppo.kg.graph.text import decode

Triple = tuple[str, str, str]  # head, relation, tail
SUFFIXES = (".txt", ".tsv", ".csv", ".nt", ".parquet")

# Words that headers have for the columns.
_HEADER_WORDS = (
    {"head", "h", "subject", "subj", "sub", "s", "source", "from"},
    {"relation", "rel", "r", "predicate", "pred", "p", "property", "edge"},
    {"tail", "t", "object", "obj", "o", "target", "to"},
)


class TripleFile(NamedTuple):
    """Triples of a file, as numbers of names, with notes on how it was read."""

    triples: (
        np.ndarray
    )  # int32 [n, 3], head, relation, tail as numbers of names
    first_line: int  # number of the line of the first triple, from 1
    notes: list[str]


class NameNumbers(defaultdict[str, int]):
    """Numbers of names, from 0 in order of first use; looking up a new name adds it."""

    def __init__(self) -> None:
        """Start without names."""
        super().__init__()
        self.default_factory = self.__len__

    def number(self, names: Iterable[str]) -> np.ndarray:
        """Return the numbers of names, three per triple, as int32 [n, 3]; new names are added."""
        numbers = np.fromiter(map(self.__getitem__, names), np.int32)
        return numbers.reshape(-1, 3)


# -- files


def is_triple_file(name: str) -> bool:
    """Check, by its name, whether a file is read as triples."""
    return name.removesuffix(".gz").endswith(SUFFIXES)


def is_ntriples(name: str) -> bool:
    """Check, by its name, whether a file is read as N-Triples."""
    return name.removesuffix(".gz").endswith(".nt")


def separator_of(path: str) -> str:
    """Return the column separator for a file name: a comma for .csv, otherwise a tab."""
    return "," if path.removesuffix(".gz").endswith(".csv") else "\t"


def read_triples(
    content: bytes, path: str, numbers: NameNumbers, columns: str | None = None
) -> TripleFile:
    """Parse the triples of a file, one per line.

    Args:
      content: of the file, as `text.read_content` gives it.
      path: name of the file; its ending says what separates the columns.
      numbers: receives the names of the file.
      columns: as `parse_columns` reads them; None for the three columns of a file without a header.

    Raises:
      ValueError: no UTF-8, a row with another number of columns or an empty name, a column that does not exist, bad
        quotes of CSV, or no N-Triples. The message names file and line.
    """
    text = decode(content, path)
    if not text or text.isspace():
        return TripleFile(np.zeros((0, 3), np.int32), 1, [])
    if is_ntriples(path):
        if columns is not None:
            raise FieldError("columns", "none for N-Triples", columns)
        return TripleFile(numbers.number(_iter_terms(text, path)), 1, [])

    rows = iter_rows(content, path)
    first = next(rows)
    chosen = choose_columns(first, columns, path)
    first_line = 2
    if not chosen.has_header:
        first_line, rows = 1, chain([first], rows)
    named = _iter_triples(rows, chosen, path, first_line)
    triples = numbers.number(chain.from_iterable(named))
    if chosen.has_header:
        return TripleFile(triples, first_line, [])
    return drop_header(triples, list(numbers), path)


def iter_rows(content: bytes, path: str) -> Iterator[list[str]]:
    """Yield the rows of a tab- or comma-separated file, one row per line; with tabs, quotes have no meaning."""
    file = io.BytesIO(content.rstrip(b"\n"))
    if separator_of(path) == "\t":
        for line in io.TextIOWrapper(file, "utf-8", newline="\n"):
            yield line.removesuffix("\n").split("\t")
        return
    lines = io.TextIOWrapper(file, "utf-8", newline="")
    reader = csv.reader(lines, skipinitialspace=True, strict=True)
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


class Columns(NamedTuple):
    """Positions of head, relation and tail in a row."""

    indices: Sequence[int]
    n_columns: int  # of every row
    has_header: bool  # the first row holds names of columns


def choose_columns(
    first: Sequence[str], columns: str | None, path: str
) -> Columns:
    """Find the positions of head, relation and tail by the first row of a file.

    Raises:
      ValueError: the file does not have the columns.
    """
    if columns is None:
        return Columns((0, 1, 2), 3, has_header=False)

    names = parse_columns(columns)
    by_number = names[0].isdecimal()
    header = [cell.strip() for cell in first]
    if by_number:
        header = [str(number) for number in range(1, len(first) + 1)]
    missing = [name for name in names if header.count(name) != 1]
    if missing:
        kind = "column" if by_number else "one column"
        line = shorten(separator_of(path).join(first))
        raise ValueError(
            f"{path}:1: expected {kind} {missing[0]}, as --columns says, got {len(first)} columns, {line}"
        )
    return Columns([*map(header.index, names)], len(first), not by_number)


def parse_columns(text: str) -> list[str]:
    """Parse three columns from a text such as head,relation,tail or 1,3,2.

    Raises:
      FieldError: not three different names, or not three different numbers from 1.
    """
    names = [name.strip() for name in text.split(",")]
    n_numbers = sum(bool(re.fullmatch("[0-9]{1,9}", name)) for name in names)
    if n_numbers == len(names):
        names = [str(int(name)) for name in names]
    is_valid = len(names) == len(set(names)) == 3 and all(names)
    if not is_valid or n_numbers not in (0, 3) or "0" in names:
        expected = "three names or three numbers from 1, as head,relation,tail or 1,2,3"
        raise FieldError("columns", expected, text)
    return names


def _iter_triples(
    rows: Iterable[list[str]], columns: Columns, path: str, first_line: int
) -> Iterator[Sequence[str]]:
    """Yield the names of head, relation and tail of each row.

    Raises:
      ValueError: a row has another number of columns, or no name where one should be.
    """
    i, j, k = columns.indices
    width = columns.n_columns
    for number, row in enumerate(rows, first_line):
        if len(row) != width or not (row[i] and row[j] and row[k]):
            raise ValueError(
                f"{path}:{number}: {_row_problem(row, width, separator_of(path))}"
            )
        yield row[i], row[j], row[k]


def _row_problem(row: list[str], width: int, separator: str) -> str:
    """Describe what is wrong with a row: its number of columns, or an empty name."""
    if width == 3:
        shown = "<TAB>" if separator == "\t" else separator
        expected = f"3 columns {shown.join(('head', 'relation', 'tail'))}"
    else:
        expected = f"{width} columns, as in the first line"
    got = "an empty one"
    if len(row) != width:
        is_wide = len(row) > width == 3
        got = f"{len(row)}{' (--columns chooses three)' if is_wide else ''}"
    return f"expected {expected}, got {got}, in {shorten(separator.join(row))}"


def drop_header(
    triples: np.ndarray, names: Sequence[str], path: str
) -> TripleFile:
    """Return the triples of a file without the first one if it is a header.

    It is one if its words are those of headers and occur nowhere else.
    """
    row: list[int] = triples[0].tolist()
    first = [names[number] for number in row]
    are_words = all(
        word.strip().lower() in known
        for word, known in zip(first, _HEADER_WORDS)
    )
    if not are_words or np.isin(triples[1:], triples[0]).any():
        return TripleFile(triples, 1, [])
    header = shorten(separator_of(path).join(first))
    return TripleFile(triples[1:], 2, [f"{path}:1: {header} read as a header"])


# -- N-Triples

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
# all three groups are empty where the line holds no triple
_LINE = re.compile(
    rf"{_SPACE}(?:({_IRI}|{_BLANK}){_SPACE}({_IRI}){_SPACE}({_IRI}|{_BLANK}|{_LITERAL}){_SPACE}\.)?{_SPACE}(?:#.*)?"
)
_ABSOLUTE = re.compile(rf"<[A-Za-z][A-Za-z0-9+.\-]*:[^{_FORBIDDEN_IN_IRI}]*>")
_ESCAPE = re.compile(rf"{_UCHAR}|\\.")
_CHARACTERS = {"t": "\t", "b": "\b", "n": "\n", "r": "\r", "f": "\f"}
_CANONICAL = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r"}
# the datatype of a literal without one
_XSD_STRING = "^^<http://www.w3.org/2001/XMLSchema#string>"


def _iter_terms(text: str, path: str) -> Iterator[str]:
    """Yield the names of the terms of N-Triples, one after the other."""
    for number, line in enumerate(re.split("[\n\r]", text), 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(
                f"{path}:{number}: expected `subject predicate object .` of N-Triples, got {shorten(line)}"
            )
        if match[1] is None:
            continue
        try:
            yield from map(_term_name, match.groups())
        except ValueError as error:
            raise ValueError(
                f"{path}:{number}: {error}, in {shorten(line)}"
            ) from None


def _term_name(term: str) -> str:
    """Return the name of an N-Triples term.

    Raises:
      ValueError: an IRI that is not absolute or has a character that it must not, or an escape of no character.
    """
    if term.startswith("_"):
        return term
    if term.startswith("<"):
        return _unescape_iri(term)[1:-1]
    end = term.rindex('"') + 1
    string, suffix = term[:end], term[end:]
    if "\\" in string:
        inner = _ESCAPE.sub(_unescape, string[1:-1])
        escaped = "".join(_CANONICAL.get(char, char) for char in inner)
        string = f'"{escaped}"'
    if suffix.startswith("^^"):
        suffix = "^^" + _unescape_iri(suffix[2:])
    return string if suffix == _XSD_STRING else string + suffix


def _unescape_iri(term: str) -> str:
    """Return an IRI in brackets with its escapes replaced."""
    iri = _ESCAPE.sub(_unescape, term)
    if not _ABSOLUTE.fullmatch(iri):
        raise ValueError(f"expected an absolute IRI, got {shorten(iri)}")
    return iri


def _unescape(match: re.Match[str]) -> str:
    """Return the character that an escape sequence stands for."""
    code = match.group()[1:]
    if len(code) == 1:
        return _CHARACTERS.get(code, code)
    number = int(code[1:], 16)
    if number > 0x10FFFF or 0xD800 <= number < 0xE000 or number == 0:
        raise ValueError(f"expected a character, got the escape \\{code}")
    return chr(number)


# -- tables and splits


def order_of_occurrence(numbers: np.ndarray, n_names: int) -> np.ndarray:
    """Return the distinct numbers in the order of first occurrence.

    Args:
      numbers: int [n], from 0 to n_names - 1.
      n_names: how many there may be.
    """
    unseen = len(numbers)
    first = np.full(n_names, unseen)
    # Of an index that is repeated numpy keeps the last value: backwards, the first one. A table may have hundreds of
    # millions of rows, so four million are worked on at a time.
    for start in reversed(range(0, unseen, 1 << 22)):
        block = numbers[start : start + (1 << 22)]
        places = np.arange(start, start + len(block))
        first[block[::-1]] = places[::-1]
    occurring = np.flatnonzero(first < unseen)
    return occurring[np.argsort(first[occurring], kind="stable")]


def drop_duplicates(triples: np.ndarray) -> np.ndarray:
    """Return the distinct rows of a table, each at its first occurrence.

    Args:
      triples: int [n, 3], none negative.
    """
    if not len(triples):
        return triples
    codes = np.sort(_row_codes(triples))
    if not (codes[1:] == codes[:-1]).any():
        return triples
    # Where each came from takes longer to find than that none repeats another.
    _, first = np.unique(_row_codes(triples), return_index=True)
    return triples[np.sort(first)]


def _row_codes(triples: np.ndarray) -> np.ndarray:
    """Return a number for each row of a table, int64 [n], equal for equal rows."""
    n_a, n_b, n_c = (int(top) + 1 for top in triples.max(axis=0))
    code = triples[:, 0].astype(np.int64)
    code *= n_c
    code += triples[:, 2]
    if n_a * n_b * n_c >= 1 << 63:
        _, code = np.unique(code, return_inverse=True)
    code *= n_b
    code += triples[:, 1]
    return code


def parse_ratios(text: str) -> tuple[float, float, float]:
    """Parse the shares of train, valid and test from a text such as 0.8,0.1,0.1.

    Raises:
      FieldError: not three shares from 0 to 1 that sum to 1, or no share for train.
    """
    try:
        train, valid, test = map(float, text.split(","))
    except ValueError:
        train, valid, test = 0.0, 0.0, 0.0
    has_sum = math.isclose(train + valid + test, 1, abs_tol=1e-6)
    if not has_sum or not (train > 0 and valid >= 0 and test >= 0):
        expected = (
            "shares of train, valid and test that sum to 1, as 0.8,0.1,0.1"
        )
        raise FieldError("split_ratios", expected, text)
    return train, valid, test


def split_triples(
    triples: np.ndarray, names: Sequence[str], ratios: str, seed: int
) -> dict[str, np.ndarray]:
    """Split distinct triples at random; return {"train", "valid", "test": table}.

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
    n_train = len(distinct) - n_valid - n_test
    for share, size in zip(shares, (n_train, n_valid, n_test)):
        if share > 0 and size < 1:
            raise ValueError(
                f"split_ratios {ratios}: expected triples enough for each part, got {len(distinct)}"
            )

    key = str(seed).encode()
    hashes: list[bytes] = []
    rows: list[list[int]] = distinct.tolist()
    for row in rows:
        text = "\t".join(names[number] for number in row).encode()
        digest = hashlib.blake2b(text, digest_size=16, key=key)
        hashes.append(digest.digest())
    order = np.array(sorted(range(len(hashes)), key=hashes.__getitem__), int)
    parts = np.split(order, [n_test, n_test + n_valid])
    test, valid, train = (distinct[np.sort(part)] for part in parts)
    return {"train": train, "valid": valid, "test": test}


# -- mapped names


class MappedNames(Sequence[str]):
    """Sequence of distinct names over mapped arrays; each string is made when it is read."""

    def __init__(self, columns: Mapping[str, np.ndarray]) -> None:
        """Wrap the columns that hold the names.

        Args:
          columns: content, uint8, the names in UTF-8, one after the other; offsets, int64 [n + 1], where each starts;
            hashes, int64 [n], CRC-32, ascending; ids, int32 [n], the id, from 1, of the name of each hash.
        """
        self.columns = columns

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self.columns["ids"])

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        """Return the name at an index, or the names of a slice."""
        places = range(len(self))[index]
        if isinstance(places, int):
            return self[places : places + 1][0]
        bounds = self.columns["offsets"][places.start : places.stop + 1]
        ends = (bounds - bounds[0]).tolist()
        block = self.columns["content"][bounds[0] : bounds[-1]].tobytes()
        return tuple(block[a:b].decode() for a, b in pairwise(ends))

    def __iter__(self) -> Iterator[str]:
        """Yield the names in their order."""
        # block by block, as reading one is slow
        for first in range(0, len(self), 1 << 16):
            yield from self[first : first + (1 << 16)]

    def __contains__(self, name: object) -> bool:
        """Check whether a name is in the sequence."""
        return isinstance(name, str) and self.find(name) is not None

    def find(self, name: str) -> int | None:
        """Return the id of a name, from 1; None for an unknown name."""
        wanted = zlib.crc32(name.encode("utf-8", "surrogatepass"))
        hashes, ids = self.columns["hashes"], self.columns["ids"]
        row = int(np.searchsorted(hashes, wanted))
        while row < len(self) and hashes[row] == wanted:
            number = int(ids[row])
            if self[number - 1] == name:
                return number
            row += 1
        return None


def map_names(names: Sequence[str]) -> MappedNames:
    """Convert distinct names to `MappedNames`."""
    if isinstance(names, MappedNames):
        return names
    content = bytearray()
    offsets = np.zeros(len(names) + 1, np.int64)
    hashes = np.zeros(len(names), np.int64)
    for i, name in enumerate(names):
        encoded = name.encode()
        content += encoded
        offsets[i + 1] = len(content)
        hashes[i] = zlib.crc32(encoded)
    order = np.argsort(hashes, kind="stable")
    columns = {
        "content": np.frombuffer(content, np.uint8),
        "offsets": offsets,
        "hashes": hashes[order],
        "ids": (order + 1).astype(np.int32),
    }
    return MappedNames(columns)


class NameIds(Mapping[str, int]):
    """Mapping from mapped names to their ids, from 1."""

    def __init__(self, names: MappedNames) -> None:
        """Wrap mapped names."""
        self._names = names

    def __getitem__(self, name: str) -> int:
        """Return the id of a name."""
        number = self._names.find(name)
        if number is None:
            raise KeyError(name)
        return number

    def __iter__(self) -> Iterator[str]:
        """Yield the names in the order of their ids."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._names)


# -- settings


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Settings of how files of triples are read and split."""

    columns: str | None = None
    """Columns of head, relation and tail in files of triples: three names of the header line, or three numbers from 1,
    with commas between them. Default: the three columns of files without a header."""
    reader: Literal["text", "duckdb"] = "text"
    """What reads files with tabs or commas: text reads them whole, duckdb in bounded memory with all cores (extra
    `big`). Parquet is always read by DuckDB."""
    split_ratios: str | None = None
    """Shares of train, valid and test, such as 0.8,0.1,0.1, by which the triples of one file, or of a folder without
    valid and test, are split at random. Default: no split; a single file is train."""
    split_seed: Seed = 0
    """Random seed of --split-ratios; the same seed gives the same split of the same triples."""

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
          FieldError: a setting is out of range, or is no list of columns or shares; the message names it.
        """
        check_fields(self)
        if self.columns is not None:
            parse_columns(self.columns)
        if self.split_ratios is not None:
            parse_ratios(self.split_ratios)
        elif self.split_seed:
            raise FieldError("split_seed", "split_ratios too", self.split_seed)


DEFAULT_CONFIG = DataConfig()
