"""Files of triples read by DuckDB (extra `big`): Parquet, and columns separated by tabs or commas, packed or not.

DuckDB reads with all cores and holds what does not fit its memory on the disk, in a temporary folder. Names and triples
are those that `triple_files` reads.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from funcppo.core.files import shorten
from funcppo.kg.graph.in_memory import COLUMN_NAMES
from funcppo.kg.graph.text_files import read_first_line
from funcppo.kg.graph.triple_files import (
    TripleFile,
    choose_columns,
    drop_header,
    is_ntriples,
    parse_columns,
    separator_of,
)

PARQUET = ".parquet"
# rows that are copied from DuckDB at a time
_BLOCK_ROWS = 1 << 23
_NAMES = ("h", "r", "t")
# of what DuckDB would use by itself, four fifths of the memory of the machine or of its container: a half
_MEMORY_SHARE = 0.625


class NumberedFiles(NamedTuple):
    """The triples of some files, by split, as numbers of names."""

    files: dict[str, TripleFile]
    names: list[str]


def is_parquet(path: Path) -> bool:
    """Whether a file is read as Parquet."""
    return path.suffix == PARQUET


def read_files(paths: Mapping[str, Path], columns: str | None) -> NumberedFiles:
    """The triples of the file of each split.

    Args:
      columns: as `triple_files.parse_columns` reads them; None for the three columns of a file.

    Raises:
      ValueError: DuckDB is not installed, or a file is wrong; names the file.
    """
    try:
        import duckdb
    except ModuleNotFoundError:
        raise ValueError(
            "reading by DuckDB needs the extra `big` (pip install 'funcppo[big]'): No module named 'duckdb'"
        ) from None
    with tempfile.TemporaryDirectory(prefix="funcppo-") as folder:
        config: Any = {"temp_directory": folder}
        database = duckdb.connect(f"{folder}/triples.db", config=config)
        with closing(database):
            _limit_memory(database)
            for split, path in paths.items():
                try:
                    _load(database, split, path, columns)
                except duckdb.Error as error:
                    line = " ".join(str(error).split())
                    raise ValueError(f"{path}: DuckDB: {line}") from None
                _check_names(database, split, path)
            return _number(database, paths, columns)


def _limit_memory(database: Any) -> None:
    """Let DuckDB keep half of the memory, and the rest of a large file in its folder."""
    (setting,) = database.execute(
        "SELECT current_setting('memory_limit')"
    ).fetchone()
    number, unit = setting.split()  # 18.8 GiB
    limit = f"{_MEMORY_SHARE * float(number):.3f}{unit}"
    database.execute(f"SET memory_limit = '{limit}'")


def _load(database: Any, split: str, path: Path, columns: str | None) -> None:
    """Copy the three columns of a file to the table of its split; rows are in the order of the file."""
    if is_parquet(path):
        source, chosen = _parquet_source(database, path, columns)
    else:
        source, chosen = _text_source(path, columns)
    selected = ", ".join(
        f"CAST({column} AS VARCHAR) AS {name}"
        for column, name in zip(chosen, _NAMES)
    )
    database.execute(f"CREATE TABLE {split} AS SELECT {selected} FROM {source}")


def _text_source(path: Path, columns: str | None) -> tuple[str, list[str]]:
    """What reads a file with tabs or commas, and the names of head, relation and tail there."""
    if is_ntriples(str(path)):
        raise ValueError(
            f"{path}: expected columns of tabs or commas or Parquet for DuckDB, got N-Triples"
        )
    chosen = choose_columns(read_first_line(path), str(path), columns)
    named = [f"c{i}" for i in range(chosen.n_columns)]
    types = ", ".join(f"'{name}': 'VARCHAR'" for name in named)
    is_csv = separator_of(str(path)) == ","
    quote = '"' if is_csv else ""
    delimiter = "," if is_csv else "\\t"
    source = (
        f"read_csv({_quote(str(path))}, delim='{delimiter}', quote='{quote}', escape='{quote}', auto_detect=false, "
        f"header={str(chosen.has_header).lower()}, columns={{{types}}}, strict_mode=true)"
    )
    return source, [named[i] for i in chosen.indices]


def _parquet_source(
    database: Any, path: Path, columns: str | None
) -> tuple[str, list[str]]:
    """What reads a Parquet file, and the names of head, relation and tail there."""
    source = f"read_parquet({_quote(str(path))})"
    described = database.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()
    present: list[str] = [row[0] for row in described]
    if columns is not None:
        wanted = parse_columns(columns)
        if wanted[0].isdecimal():
            numbers = [int(number) - 1 for number in wanted]
            wanted = [present[i] for i in numbers if i < len(present)]
    else:
        known = [list(names) for names in COLUMN_NAMES]
        wanted = next((n for n in known if set(n) <= {*present}), present)
    if len(wanted) != 3 or not {*wanted} <= {*present}:
        raise ValueError(
            f"{path}: expected three columns (--columns chooses them), got {shorten(', '.join(present))}"
        )
    return source, [_quote(name, '"') for name in wanted]


def _check_names(database: Any, split: str, path: Path) -> None:
    """Raise ValueError if a name is missing, has a line break or a NUL byte, or white space that text files drop."""
    is_csv = separator_of(str(path)) == "," and not is_parquet(path)
    wrong = "{0} IS NULL OR {0} = '' OR contains({0}, chr(10)) OR contains({0}, chr(13)) OR contains({0}, chr(0))"
    if is_csv:
        wrong += " OR starts_with({0}, ' ')"
    condition = " OR ".join(wrong.format(name) for name in _NAMES)
    row = database.execute(
        f"SELECT rowid, h, r, t FROM {split} WHERE {condition} LIMIT 1"
    ).fetchone()
    if row is not None:
        raise ValueError(
            f"{path}: row {row[0] + 1}: expected three names on one line without spaces before them, got "
            f"{shorten(repr(row[1:]))}"
        )


def _number(
    database: Any, paths: Mapping[str, Path], columns: str | None
) -> NumberedFiles:
    """Number the names of all splits, and copy the numbered triples."""
    every_name = " UNION ALL ".join(
        f"SELECT {name} AS name FROM {split}"
        for split in paths
        for name in _NAMES
    )
    database.execute(
        "CREATE TABLE names AS SELECT name, CAST(row_number() OVER () - 1 AS INTEGER) AS number "
        f"FROM (SELECT DISTINCT name FROM ({every_name}))"
    )

    names = _fetch_names(database)

    # a first line of column names is no triple; a Parquet file has none
    files: dict[str, TripleFile] = {}
    for split, path in paths.items():
        triples = _fetch_triples(database, split)
        names_columns = (
            columns is not None and not parse_columns(columns)[0].isdecimal()
        )
        if len(triples) and not names_columns and not is_parquet(path):
            files[split] = drop_header(
                triples, names, str(path), separator_of(str(path))
            )
        else:
            files[split] = TripleFile(triples, 1, [])
    return NumberedFiles(files, names)


def _fetch_names(database: Any) -> list[str]:
    """The names in the order of their numbers."""
    found = database.execute("SELECT name FROM names ORDER BY number")
    names: list[str] = []
    while rows := found.fetchmany(_BLOCK_ROWS >> 3):
        names += [row[0] for row in rows]
    return names


def _fetch_triples(database: Any, split: str) -> np.ndarray:
    """The triples of a split as numbers of names, int32 [n, 3], in the order of the file."""
    # Joins keep no order: each row carries its place.
    database.execute(
        f"CREATE TABLE numbered AS SELECT s.rowid AS place, a.number AS h, b.number AS r, c.number AS t FROM {split} s "
        "JOIN names a ON s.h = a.name JOIN names b ON s.r = b.name JOIN names c ON s.t = c.name"
    )
    n_rows = database.execute("SELECT count(*) FROM numbered").fetchone()[0]
    triples = np.empty((n_rows, 3), np.int32)
    for first in range(0, n_rows, _BLOCK_ROWS):
        block = database.execute(
            "SELECT place, h, r, t FROM numbered WHERE rowid >= ? AND rowid < ?",
            [first, first + _BLOCK_ROWS],
        ).fetchnumpy()
        for column, name in enumerate(_NAMES):
            triples[block["place"], column] = block[name]
    database.execute("DROP TABLE numbered")
    return triples


def _quote(text: str, mark: str = "'") -> str:
    """A text as a literal of SQL, or a name with other marks."""
    return mark + text.replace(mark, mark + mark) + mark
