"""Triples: files with tabs or commas and of N-Triples, tables of numbers, random splits, settings.

A file has three columns and no header, unless columns are chosen. A first line of column names (head, relation, tail;
source, target, type; :START_ID, :END_ID, :TYPE; ...) says which column is which; a note says so. A table is int32
[n, 3], head, relation and tail as numbers of names, in the order of the file.

RDF is read by pyoxigraph (extra `rdf`): N-Triples, N-Quads, Turtle, TriG, RDF/XML, JSON-LD. The name of an IRI is its
text without brackets; literals are named as N-Triples write them: `"chat"@fr`,
`"5"^^<http://www.w3.org/2001/XMLSchema#integer>`. So no two terms have one name. Blank nodes keep their labels in
N-Triples and N-Quads, and are numbered in other formats.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import numpy as np

from funcppo.core.files import parse_object, shorten
from funcppo.core.host import import_extra
from funcppo.core.settings import FieldError, Seed, check_fields
from funcppo.kg.graph.text import decode, has_surrogates

Triple = tuple[str, str, str]  # head, relation, tail
RDF_SUFFIXES = (".nt", ".nq", ".ttl", ".trig", ".rdf", ".jsonld")
SUFFIXES = (".txt", ".tsv", ".csv", ".jsonl", ".parquet", *RDF_SUFFIXES)

# Names of the columns of head and tail, and of the relation; of a table with several the first ones count.
_END_COLUMNS = (
    ("head", "tail"),
    ("h", "t"),
    ("subject", "object"),
    ("subj", "obj"),
    ("sub", "obj"),
    ("s", "o"),
    ("source", "target"),
    ("src", "dst"),
    ("from", "to"),
    ("start", "end"),
    (":start_id", ":end_id"),  # Neo4j
    ("head_id", "tail_id"),
    ("source_id", "target_id"),
)
_RELATION_COLUMNS = (
    *("relation", "rel", "r", "predicate", "pred", "p", "property", "edge"),
    *("relationship", ":type", "type", "edge_type", "relation_type"),
    *("relation_id", "label"),
)
_COLUMN_WORDS = {*chain.from_iterable(_END_COLUMNS), *_RELATION_COLUMNS}


class TripleFile(NamedTuple):
    """Triples of a file, as numbers of names, with notes on how it was read."""

    triples: (
        np.ndarray
    )  # int32 [n, 3], head, relation, tail as numbers of names
    first_line: int  # number of the line of the first triple, from 1
    notes: list[str]
    # of a file of stories, which triples are asked, bool [n]; None for another file
    is_asked: np.ndarray | None = None
    labels: Mapping[str, str] = {}  # of its names, as far as it has any


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


def is_rdf(name: str) -> bool:
    """Check, by its name, whether a file is read as RDF."""
    return name.removesuffix(".gz").endswith(RDF_SUFFIXES)


def is_json_lines(name: str) -> bool:
    """Check, by its name, whether a file is read as lines of JSON."""
    return name.removesuffix(".gz").endswith(".jsonl")


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
    if is_rdf(path):
        if columns is not None:
            raise FieldError("columns", "none for RDF", columns)
        return _read_rdf(content, path, numbers)

    return read_rows(iter_rows(content, path), path, numbers, columns)


def read_rows(
    rows: Iterator[list[str]],
    path: str,
    numbers: NameNumbers,
    columns: str | None = None,
) -> TripleFile:
    """Parse the triples in the rows of a file, at least one row; other arguments are those of `read_triples`."""
    first = next(rows)
    if columns is None and first[:1] == ["story"] and len(first) == 4:
        return _read_stories(rows, path, numbers)
    # The names of columns stand on no line of their own.
    is_named = is_json_lines(path) or path.endswith(".parquet")
    chosen = choose_columns(first, columns, path, is_named=is_named)
    if not chosen.has_header:
        named = _iter_triples(chain([first], rows), chosen, path, 1)
        triples = numbers.number(chain.from_iterable(named))
        return drop_header(triples, list(numbers), path, columns)

    # Labels stand in columns of their own.
    labels: dict[str, str] = {}
    rows = _collect_labels(rows, _label_places(first, chosen), labels)
    first_line, n_names = 2 - is_named, len(numbers)
    named = _iter_triples(rows, chosen, path, first_line)
    triples = numbers.number(chain.from_iterable(named))
    for number, name in enumerate(islice(numbers, n_names, None), n_names):
        if is_named and {"\n", "\r", "\0"} & {*name}:
            line = first_line + int((triples == number).any(1).argmax())
            raise ValueError(
                f"{path}:{line}: expected names on one line, got {shorten(name)}"
            )
    names = ", ".join(first[i] for i in chosen.indices)
    note = f"{path}:1: columns {shorten(names)} read as head, relation, tail"
    return TripleFile(
        triples, first_line, [note] * (columns is None), None, labels
    )


def iter_rows(content: bytes, path: str) -> Iterator[list[str]]:
    """Yield the rows of a file, one per line: separated by tabs or commas, or JSON, whose keys are the first row.

    With tabs, quotes have no meaning.
    """
    if is_json_lines(path):
        yield from _iter_json_rows(content, path)
        return
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


def _iter_json_rows(content: bytes, path: str) -> Iterator[list[str]]:
    """Yield the keys of the first object of JSON lines, then the values of each object in their order."""
    keys: list[str] = []
    for number, line in enumerate(content.rstrip(b"\n").split(b"\n"), 1):
        row = parse_object(f"{path}:{number}", line)
        if not keys:
            keys = list(row)
            yield keys
        values = [row.get(key, "") for key in keys]
        names = [values[i] for i in find_columns(keys) or range(len(keys))]
        # A number has several spellings unless it is whole.
        is_other = any(isinstance(x, float | bool | list | dict) for x in names)
        if is_other or has_surrogates("".join(map(str, values))):
            raise ValueError(
                f"{path}:{number}: expected texts or whole numbers, got {shorten(repr(row))}"
            )
        yield ["" if x is None else str(x) for x in values]


class Columns(NamedTuple):
    """Positions of head, relation and tail in a row."""

    indices: Sequence[int]
    n_columns: int  # of every row
    has_header: bool  # the first row holds names of columns


def choose_columns(
    first: Sequence[str],
    columns: str | None,
    path: str,
    *,
    is_named: bool = False,
) -> Columns:
    """Find the positions of head, relation and tail by the first row of a file.

    Args:
      columns: as `parse_columns` reads them; None for those that names tell, or three without a header.
      path: name of the file, for the error.
      is_named: the row holds names of columns, whatever they are.

    Raises:
      ValueError: the file does not have the columns.
    """
    place = path if path.endswith(".parquet") else f"{path}:1"
    if columns is None:
        # A column without a name is that of row numbers.
        has_words = sum(map(is_column_word, first)) > 1 and all(first)
        if is_named or (has_words and len(first) > 3):
            named = choose_by_name(first, f"{place}: ")
            return Columns(named, len(first), has_header=True)
        return Columns((0, 1, 2), 3, has_header=False)

    names = parse_columns(columns)
    by_number = names[0].isdecimal()
    header = [cell.strip() for cell in first]
    if by_number:
        header = [str(number) for number in range(1, len(first) + 1)]
    for name in names:
        if header.count(name) != 1:
            kind = "column" if by_number else "one column"
            line = shorten(separator_of(path).join(first))
            raise ValueError(
                f"{place}: expected {kind} {name}, as --columns says, got {len(first)} columns, {line}"
            )
    indices = [*map(header.index, names)]
    return Columns(indices, len(first), has_header=is_named or not by_number)


def _read_stories(
    rows: Iterable[list[str]], path: str, numbers: NameNumbers
) -> TripleFile:
    """Read the triples of stories, each a graph of its own on a line: its number, facts, an asked pair, its relation.

    An entity is named FILE-STORY:NAME, so that no two stories share one.

    Raises:
      ValueError: a line is of another form; names it.
    """
    names: list[str] = []
    is_asked: list[bool] = []
    stem = Path(path).name.partition(".")[0]
    for line, row in enumerate(rows, 2):
        story, facts, pair, relation = row if len(row) == 4 else ("",) * 4
        triples = [fact.split(",") for fact in facts.split(" ")]
        triples.append([*pair.split(",")[:1], relation, *pair.split(",")[1:]])
        if not all(len(x) == 3 and all(x) for x in triples):
            raise ValueError(
                f"{path}:{line}: expected a story: its number, facts head,relation,tail with spaces between them, "
                f"the asked head,tail and its relation, got {shorten(repr(row))}"
            )
        for head, name, tail in triples:
            graph = f"{stem}-{story}"
            names += [f"{graph}:{head}", name, f"{graph}:{tail}"]
        is_asked += [False] * (len(triples) - 1) + [True]
    note = f"{path}: {sum(is_asked)} stories, each a graph of its own"
    table = numbers.number(names)
    return TripleFile(table, 2, [note], np.array(is_asked, bool))


def _label_places(first: Sequence[str], columns: Columns) -> dict[int, int]:
    """Return {column of names: column of their labels}: that of head is head_label or headLabel."""
    words = [re.sub(r"[ _]?label$", "", _column_word(x)) for x in first]
    is_label = [
        _column_word(x) not in (w, "label") for x, w in zip(first, words)
    ]
    return {
        i: j
        for i in columns.indices
        for j, word in enumerate(words)
        if is_label[j] and word == _column_word(first[i])
    }


def _collect_labels(
    rows: Iterable[list[str]], places: Mapping[int, int], labels: dict[str, str]
) -> Iterator[list[str]]:
    """Yield the rows, and add the labels in their columns."""
    for row in rows:
        for i, j in places.items():
            if max(i, j) < len(row) and row[j]:
                labels.setdefault(row[i], row[j])
        yield row


def find_columns(names: Sequence[str]) -> list[int] | None:
    """Return the columns of head, relation and tail by their names; of three columns without such names, all.

    Args:
      names: as a person wrote them; a type in brackets, as of Neo4j, does not count.

    Returns:
      Their positions; None if the names do not say which these are.
    """
    words = [*map(_column_word, names)]
    known = _COLUMN_WORDS.intersection(words)
    if len(words) == 3 and not known:
        return [0, 1, 2]
    relation = next((x for x in _RELATION_COLUMNS if x in known), "")
    for head, tail in _END_COLUMNS:
        chosen = (head, relation, tail)
        if [words.count(word) for word in chosen] == [1, 1, 1]:
            return [*map(words.index, chosen)]
    return None


def choose_by_name(names: Sequence[str], place: str = "") -> list[int]:
    """Return columns as `find_columns` does.

    Args:
      place: FILE:LINE with a colon, for the error.

    Raises:
      ValueError: the names do not say which columns these are.
    """
    found = find_columns(names)
    if found is None:
        raise ValueError(
            f"{place}expected columns named head, relation, tail (or as `columns` chooses them), got "
            f"{shorten(', '.join(names))}"
        )
    return found


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


def is_column_word(name: str) -> bool:
    """Check whether a name is one that headers have for head, relation or tail."""
    return _column_word(name) in _COLUMN_WORDS


def _column_word(name: str) -> str:
    """Return the name of a column in small letters, without a type of Neo4j as in :START_ID(Person)."""
    return re.sub(r"\(.*\)$", "", name.strip().lower())


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
    triples: np.ndarray, names: Sequence[str], path: str, columns: str | None
) -> TripleFile:
    """Return the triples of a file without the first one if it is a header, in the order that it says.

    It is one if its words are names of columns and occur nowhere else.

    Args:
      columns: that were chosen; their order is kept.

    Raises:
      ValueError: two of its words are such names, of more than two letters, and the third is not.
    """
    numbers: list[int] = triples[0].tolist()
    first = [names[number] for number in numbers]
    words = [n for n, x in zip(numbers, first) if is_column_word(x)]
    is_header = len(words) > 1 and not np.isin(triples[1:], words).any()
    # A pair of short names such as s and t may be anything.
    is_short = any(len(names[n]) < 3 for n in words)
    is_unclear = find_columns(first) is None and (columns or is_short)
    if not is_header or is_unclear:
        return TripleFile(triples, 1, [])
    order = choose_by_name(first, f"{path}:1: ")
    header = shorten(separator_of(path).join(first))
    note = f"{path}:1: {header} read as a header"
    return TripleFile(triples[1:, [0, 1, 2] if columns else order], 2, [note])


# -- RDF


def _read_rdf(content: bytes, path: str, numbers: NameNumbers) -> TripleFile:
    """Read the triples of an RDF file.

    Raises:
      ValueError: pyoxigraph is not installed, or the file is not of its format; names file and line.
    """
    pyoxigraph = import_extra("pyoxigraph", "rdf", f"{path}: RDF")
    _, _, suffix = path.removesuffix(".gz").rpartition(".")
    rdf_format: Any = pyoxigraph.RdfFormat.from_extension(suffix)
    graphs: Counter[str] = Counter()
    # Two readings label a node without a label differently.
    stem = "" if suffix in ("nt", "nq") else Path(path).name.partition(".")[0]
    try:
        quads = pyoxigraph.parse(content, format=rdf_format)
        labels: dict[str, str] = {}
        terms = _iter_terms(quads, stem, graphs, labels)
        triples = numbers.number(terms)
    except SyntaxError as error:
        place, problem = path, str(error)
        if error.lineno is not None:  # that of RDF/XML has no line
            place = f"{path}:{error.lineno}"
            problem = problem.partition(": ")[2].rpartition(" (line")[0]
        raise ValueError(
            f"{place}: expected {rdf_format.name}, got an error: {problem}"
        ) from None
    n_named = graphs.total() - graphs["DEFAULT"]
    note = f"{path}: {n_named} triples stand in named graphs, whose names are left out"
    return TripleFile(triples, 1, [note] if n_named else [], None, labels)


def _iter_terms(
    quads: Iterable[Any],
    stem: str,
    graphs: Counter[str],
    labels: dict[str, str],
) -> Iterator[str]:
    """Yield the names of the terms of quads, one after the other; those of rdfs:label are no triples but labels.

    Args:
      stem: that the numbers of blank nodes follow; empty for their own labels.
      graphs: receives the number of quads of each graph.
      labels: receives labels by name, in English or of no language where there are several.
    """
    blank_nodes: dict[str, str] = {}

    def name_of(term: Any) -> str:
        name = str(term)
        if name.startswith("<") and not name.startswith("<<"):
            return name[1:-1]
        if stem and name.startswith("_:"):
            number = f"_:{stem}-{len(blank_nodes)}"
            return blank_nodes.setdefault(name, number)
        return name

    for quad in quads:
        subject, relation, value = quad.triple
        if relation.value == _RDFS_LABEL and hasattr(value, "datatype"):
            name = name_of(subject)
            if name not in labels or value.language in (None, "en"):
                labels[name] = value.value
            continue
        graphs[str(quad.graph_name)] += 1
        yield from map(name_of, quad.triple)


_RDFS_LABEL = "http://www.w3.org/2000/01/rdf-schema#label"
_ABSOLUTE_IRI = re.compile(r'[A-Za-z][A-Za-z0-9+.-]*:[^\x00-\x20<>"{}|^`\\]+')
_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"(?:@[a-zA-Z0-9-]+|\^\^<[^<>]+>)?')


def format_rdf(rows: Iterable[Triple], name: str) -> bytes:
    """Format triples in the format of RDF that a file of a name has.

    A name that is no term of RDF becomes an IRI, `urn:name:` with its characters as in URLs.
    """
    pyoxigraph = import_extra("pyoxigraph", "rdf", f"{name}: RDF")

    def format_term(term: str, pattern: re.Pattern[str]) -> str:
        if _ABSOLUTE_IRI.fullmatch(term):
            return f"<{term}>"
        is_term = pattern.fullmatch(term)
        return term if is_term else f"<urn:name:{quote(term, safe='')}>"

    blank, never = re.compile(r"_:\w+(?:[.-]+\w+)*"), re.compile("(?!)")
    tail = re.compile(f"{blank.pattern}|{_LITERAL.pattern}")
    lines = (
        f"{format_term(h, blank)} {format_term(r, never)} {format_term(t, tail)} .\n"
        for h, r, t in rows
    )
    _, _, suffix = name.rpartition(".")
    triples = pyoxigraph.parse(
        "".join(lines), format=pyoxigraph.RdfFormat.N_TRIPLES
    )
    written = pyoxigraph.RdfFormat.from_extension(suffix)
    return pyoxigraph.serialize(
        (quad.triple for quad in triples), format=written
    )


# -- tables and splits


def order_of_occurrence(numbers: np.ndarray, n_names: int) -> np.ndarray:
    """Return the distinct numbers in the order of first occurrence.

    Args:
      numbers: int [n], from 0 to n_names - 1.
      n_names: how many there may be.
    """
    unseen = len(numbers)
    first = np.full(n_names, unseen)
    # Of an index that is repeated numpy keeps the last value: backwards, the first one.
    first[numbers[::-1]] = np.arange(unseen)[::-1]
    occurring = np.flatnonzero(first < unseen)
    return occurring[np.argsort(first[occurring], kind="stable")]


def drop_duplicates(triples: np.ndarray) -> np.ndarray:
    """Return the distinct rows of a table, each at its first occurrence.

    Args:
      triples: int [n, 3], none negative.
    """
    _, first = np.unique(row_codes(triples), return_index=True)
    return triples[np.sort(first)]


def row_codes(triples: np.ndarray) -> np.ndarray:
    """Return a number for each row of a table, int64 [n], equal for equal rows."""
    n_a, n_b, n_c = (int(top) + 1 for top in triples.max(axis=0, initial=0))
    code = triples[:, 0].astype(np.int64) * n_c + triples[:, 2]
    if n_a * n_b * n_c >= 1 << 63:
        _, code = np.unique(code, return_inverse=True)
    return code * n_b + triples[:, 1]


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


# -- settings


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Settings of how files of triples are read and split."""

    format: Literal[
        "auto",
        "tsv",
        "csv",
        "jsonl",
        "nt",
        "nq",
        "ttl",
        "trig",
        "rdf",
        "jsonld",
    ] = "auto"
    """Format of a single file. Default: auto, by its ending; tsv for standard input (-)."""
    columns: str | None = None
    """Columns of head, relation and tail in files of triples: three names of the header line, or three numbers from 1,
    with commas between them. Default: the three columns of files without a header."""
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
