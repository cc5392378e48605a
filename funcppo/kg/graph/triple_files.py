"""Files of triples: columns separated by tabs (.txt, .tsv) or commas (.csv), or N-Triples (.nt).

A file has three columns and no header, unless columns are chosen. A first line that can be nothing but a header (head,
relation, tail) is read as one, and a note says so.

Names are numbered without an object for each row. Only of a file with an error the rows are read one by one, to say
which it is.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

import numpy as np

from funcppo.core.files import shorten
from funcppo.core.settings import FieldError
from funcppo.kg.graph.cells import Cells, find_distinct
from funcppo.kg.graph.ntriples import read_ntriples
from funcppo.kg.graph.text_files import decode
from funcppo.kg.graph.triple_table import NameTable

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
