"""Files of triples: head, relation and tail, in columns separated by tabs (.txt, .tsv) or commas (.csv).

A file has three columns and no header, unless columns are chosen. A first line that can be nothing but a header (head,
relation, tail) is read as one, and a note says so.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from funcppo.data.lexer import shorten
from funcppo.ranges import FieldError

Triple = tuple[str, str, str]  # head, relation, tail

SUFFIXES = (".txt", ".tsv", ".csv")

# Words that headers have for the columns.
_HEADER_WORDS = (
    {"head", "h", "subject", "subj", "sub", "s", "source", "from"},
    {"relation", "rel", "r", "predicate", "pred", "p", "property", "edge"},
    {"tail", "t", "object", "obj", "o", "target", "to"},
)


class TripleFile(NamedTuple):
    """The triples of a file."""

    triples: list[Triple]
    first_line: int  # number of the line of the first triple, from 1
    notes: list[str]


class _Columns(NamedTuple):
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


def read_triples(
    text: str, path: str, columns: str | None = None
) -> TripleFile:
    """The triples of a file, one a line.

    Args:
      text: content of the file.
      path: name of the file; its ending says what separates the columns.
      columns: as `parse_columns` reads them; None for the three columns of a file without a header.

    Raises:
      ValueError: a row with another number of columns or an empty name, a column that does not exist, or bad quotes of
        CSV. The message names file and line.
    """
    if not text.strip():
        return TripleFile([], 1, [])

    is_csv = path.removesuffix(".gz").endswith(".csv")
    separator = "," if is_csv else "\t"
    rows = _csv_rows(text, path) if is_csv else _tab_rows(text)
    first = next(rows)
    chosen = _choose_columns(first, columns, f"{path}:1", separator)
    i, j, k = chosen.indices

    triples: list[Triple] = []
    number = 1
    if not chosen.has_header:
        _check_row(first, chosen, f"{path}:1", separator)
        triples.append((first[i], first[j], first[k]))
    for number, row in enumerate(rows, 2):
        is_wrong = len(row) != chosen.n_columns
        if is_wrong or not (row[i] and row[j] and row[k]):
            _check_row(row, chosen, f"{path}:{number}", separator)
        triples.append((row[i], row[j], row[k]))

    if chosen.has_header or not _starts_with_header(triples):
        return TripleFile(triples, 2 if chosen.has_header else 1, [])
    header = shorten(separator.join(triples[0]))
    return TripleFile(triples[1:], 2, [f"{path}:1: {header} read as a header"])


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
) -> _Columns:
    """Where head, relation and tail stand, by the first row of a file."""
    if columns is None:
        return _Columns((0, 1, 2), 3, has_header=False)

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
    return _Columns(tuple(indices), len(first), has_header=not by_number)


def _check_row(
    row: Sequence[str], columns: _Columns, place: str, separator: str
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


def _starts_with_header(triples: Sequence[Triple]) -> bool:
    """Whether the first triple can be nothing but a header: its words name columns and occur nowhere else."""
    first, *others = triples
    for word, known_words in zip(first, _HEADER_WORDS):
        if word.strip().lower() not in known_words:
            return False
    return not any(word in triple for triple in others for word in first)
