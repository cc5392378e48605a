"""Load data sets: from files, from memory, from DuckDB, from PyKEEN, by name, or from a stored graph.

`load` reads a folder or a file of triples, a Prolog program, one of the data sets that come with the package, embedded
(`countries_s1`) or generated (`clans:1500:0`), or one of PyKEEN (`pykeen:kinships`). `from_text` and `from_triples`
take what is in memory: tuples, arrays, data frames and triples factories of PyKEEN, none of which is imported.

A stored graph is a folder of arrays that every process of a host maps instead of reading; `graph.json` names the arrays
with their sizes. DuckDB (extra `big`) reads Parquet and large files with all cores and bounded memory.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import importlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from funcppo.core import host
from funcppo.core.files import (
    named_errors,
    remove_stale_parts,
    shorten,
    sync_folder,
)
from funcppo.kg.graph.config import DEFAULT_CONFIG, DataConfig
from funcppo.kg.graph.dataset import (
    MAX_PAIRS,
    Dataset,
    StoredParts,
    duplicate_note,
    from_clauses,
    from_splits,
    from_tables,
    index_triples,
    iter_inverse_pairs,
    with_rules,
)
from funcppo.kg.graph.rules import (
    detect_format,
    is_mined_with_held_out,
    read_clauses,
    with_read_counts,
)
from funcppo.kg.graph.samples import make_clans, make_family_tree
from funcppo.kg.graph.text import (
    has_variables,
    read_content,
    read_first_line,
    read_text,
    similar_names_hint,
)
from funcppo.kg.graph.triples import (
    SUFFIXES,
    MappedNames,
    NameColumns,
    NameTable,
    Triple,
    TripleFile,
    choose_columns,
    drop_header,
    is_ntriples,
    is_triple_file,
    order_of_occurrence,
    parse_columns,
    read_triples,
    separator_of,
    split_triples,
    to_columns,
)

# by relation and other relation: the facts of the first that the other has with exchanged arguments
Inverses = dict[int, dict[int, int]]
SPLITS = ("train", "valid", "test")
DEGREE_QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


class SplitDescription(NamedTuple):
    """One split; all numbers but the first are of held-out triples beside the known facts (train and facts)."""

    n_triples: int
    n_entities: int
    n_relations: int
    n_known: int  # triples that are known facts
    n_linked: int  # triples whose two entities a known fact links, either way round; of train: another fact does
    n_unseen_entities: int  # entities that no known fact has
    n_unseen_relations: int


class RelationDescription(NamedTuple):
    """One relation; shares and means are over the known facts, nan without any."""

    name: str
    n_facts: int
    n_valid: int
    n_test: int
    tails_per_head: float  # mean over the heads that it has
    heads_per_tail: float
    functional_share: float  # of its heads that have one tail
    inverse_functional_share: float  # of its tails that have one head
    symmetric_share: (
        float | None
    )  # of its facts whose inverse it has too, loops left out; None: not searched
    inverse: (
        str | None
    )  # the other relation that has most of its facts with exchanged arguments
    inverse_share: float | None  # of its facts


class Description(NamedTuple):
    """A data set of triples."""

    splits: dict[str, SplitDescription]
    relations: list[RelationDescription]  # the largest first
    degree_quantiles: dict[
        str, float
    ]  # of the number of known facts of an entity
    n_other_atoms: int  # facts that do not have two arguments, left out
    notes: list[str]


def describe(dataset: Dataset) -> Description:
    """Describe the facts of two arguments of a data set and its held-out triples.

    Args:
      dataset: has such facts.

    Raises:
      ValueError: it has none.
    """
    is_binary = np.array([False, *(n == 2 for n in dataset.arities)])
    tables = {
        name: table[is_binary[table[:, 0]]][:, :3]
        for name, table in {
            "facts": dataset.facts,
            **{split: getattr(dataset, split) for split in SPLITS},
        }.items()
    }
    facts = (
        tables["facts"]
        if dataset.atom_width > 2
        else np.zeros((0, 3), np.int32)
    )
    if not len(facts):
        raise ValueError(
            f"{dataset.name}: expected facts of two arguments to describe, got none"
        )

    inverses = _count_inverses(facts, dataset.n_predicates)
    notes = list(dataset.notes)
    if inverses is None:
        notes.append(
            f"symmetric and inverse relations were not searched: over {MAX_PAIRS:,} pairs of inverse triples"
        )

    degree = np.bincount(
        facts[:, 1:].ravel(), minlength=dataset.n_constants + 1
    )[1:]
    return Description(
        splits={
            split: _describe_split(tables[split], facts, split == "train")
            for split in SPLITS
        },
        relations=_describe_relations(dataset, tables, inverses),
        degree_quantiles={
            f"{share:g}": float(np.quantile(degree, share))
            for share in DEGREE_QUANTILES
        },
        n_other_atoms=len(dataset.facts) - len(facts),
        notes=notes,
    )


def _describe_split(
    table: np.ndarray, facts: np.ndarray, is_train: bool
) -> SplitDescription:
    """A split beside the known facts."""
    if not len(table):
        return SplitDescription(*[0] * len(SplitDescription._fields))
    pairs = _pair_codes(np.concatenate([facts, table]))
    fact_pair, pair = pairs[: len(facts)], pairs[len(facts) :]
    distinct, count = np.unique(fact_pair, return_counts=True)
    # Of a fact the pair must be linked by another fact too.
    linked = distinct[count > 1] if is_train else distinct

    n_relations = int(max(facts[:, 0].max(), table[:, 0].max(initial=0)))
    fact_row, row = index_triples([facts, table], n_relations).rows
    is_known = np.isin(row, fact_row)
    return SplitDescription(
        n_triples=len(table),
        n_entities=len(np.unique(table[:, 1:])),
        n_relations=len(np.unique(table[:, 0])),
        n_known=int(is_known.sum()),
        n_linked=int(np.isin(pair, linked).sum()),
        n_unseen_entities=len(np.setdiff1d(table[:, 1:], facts[:, 1:])),
        n_unseen_relations=len(np.setdiff1d(table[:, 0], facts[:, 0])),
    )


def _pair_codes(table: np.ndarray) -> np.ndarray:
    """A number for the two entities of each triple, the same either way round."""
    head, tail = table[:, 1].astype(np.int64), table[:, 2].astype(np.int64)
    n_entities = 1 + int(table[:, 1:].max(initial=0))
    return np.minimum(head, tail) * n_entities + np.maximum(head, tail)


def _describe_relations(
    dataset: Dataset,
    tables: dict[str, np.ndarray],
    inverses: Inverses | None,
) -> list[RelationDescription]:
    """All relations of two arguments, the largest first."""
    size = dataset.n_predicates + 1
    n = {
        name: np.bincount(table[:, 0], minlength=size)
        for name, table in tables.items()
    }
    facts = tables["facts"]
    heads, heads_once = _count_arguments(facts, 1, size)
    tails, tails_once = _count_arguments(facts, 2, size)
    is_loop = facts[:, 1] == facts[:, 2]
    n_loops = np.bincount(facts[is_loop, 0], minlength=size)

    relations: list[RelationDescription] = []
    for i in (np.argsort(-n["facts"][1:], kind="stable") + 1).tolist():
        if dataset.arities[i - 1] != 2:
            continue
        n_facts = int(n["facts"][i])
        symmetric, inverse, share = None, None, None
        if inverses is not None:
            others = dict(inverses.get(i, {}))
            symmetric = _share(others.pop(i, 0), n_facts - int(n_loops[i]))
            if others:
                best = max(others, key=lambda other: others[other])
                inverse = dataset.predicates[best - 1]
                share = _share(others[best], n_facts - int(n_loops[i]))
        relations.append(
            RelationDescription(
                name=dataset.predicates[i - 1],
                n_facts=n_facts,
                n_valid=int(n["valid"][i]),
                n_test=int(n["test"][i]),
                tails_per_head=_share(n_facts, heads[i]),
                heads_per_tail=_share(n_facts, tails[i]),
                functional_share=_share(heads_once[i], heads[i]),
                inverse_functional_share=_share(tails_once[i], tails[i]),
                symmetric_share=symmetric,
                inverse=inverse,
                inverse_share=share,
            )
        )
    return relations


def _count_arguments(
    facts: np.ndarray, place: int, size: int
) -> tuple[list[int], list[int]]:
    """For each relation how many entities it has in a place, and how many of them once."""
    n_entities = 1 + int(facts[:, place].max())
    code = facts[:, 0].astype(np.int64) * n_entities + facts[:, place]
    distinct, count = np.unique(code, return_counts=True)
    relation = distinct // n_entities
    return (
        np.bincount(relation, minlength=size).tolist(),
        np.bincount(relation[count == 1], minlength=size).tolist(),
    )


def _count_inverses(facts: np.ndarray, n_relations: int) -> Inverses | None:
    """How many facts of each relation each relation has with exchanged arguments; None: too many pairs."""
    triples = index_triples([facts], n_relations)
    if int(triples.inverse_count.sum()) > MAX_PAIRS:
        return None
    codes, counts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for part in iter_inverse_pairs(triples, np.arange(len(triples.relation))):
        a, b = triples.relation[part.triple], triples.relation[part.inverse]
        code, count = np.unique(a * n_relations + b, return_counts=True)
        codes.append(code)
        counts.append(count)
    code, index = np.unique(np.concatenate(codes), return_inverse=True)
    total = np.bincount(index, np.concatenate(counts), len(code))
    found: Inverses = {}
    for pair, n in zip(code.tolist(), total.astype(int).tolist()):
        relation, other = divmod(pair, n_relations)
        found.setdefault(relation + 1, {})[other + 1] = n
    return found


def _share(part: int, whole: int) -> float:
    """A part of a whole; nan of nothing."""
    return part / whole if whole else float("nan")


HEADER = ("head", "relation", "tail")
# other names of the three columns of a data frame
COLUMN_NAMES = (HEADER, ("subject", "predicate", "object"), ("h", "r", "t"))
# characters that no name in a file may have
FORBIDDEN = ("\n", "\r", "\0")


def to_triples(source: object) -> list[Triple]:
    """The (head, relation, tail) names of triples in memory.

    Args:
      source: tuples of three names; an array [n, 3] of names; a data frame of pandas or polars, lazy or not, with the
        columns head, relation and tail (or subject, predicate and object, or h, r and t), or with three columns; or a
        TriplesFactory of PyKEEN. A name is a text or a whole number.

    Raises:
      ValueError: it is none of these, or a name is missing, empty or has a line break; names the row.
    """
    rows = _rows(source)
    triples: list[Triple] = []
    for number, row in enumerate(rows):
        names = (
            [_name(value) for value in row]
            if isinstance(row, Sequence) and not isinstance(row, str)
            else []
        )
        if len(names) != 3 or None in names:
            raise ValueError(
                f"triple {number}: expected three names (texts without line breaks, or whole numbers), got "
                f"{shorten(repr(row))}"
            )
        head, relation, tail = map(str, names)
        triples.append((head, relation, tail))
    return triples


def write_splits(dataset: Dataset, folder: Path) -> None:
    """Write the triples of a data set to a new folder, as CSV files with a header.

    `load` with `DataConfig(columns="head,relation,tail")` reads them back with the same names and ids.

    Args:
      dataset: triples of train, valid and test, without further facts.
    """
    folder.mkdir(parents=True)
    for split in ("train", "valid", "test"):
        table: np.ndarray = getattr(dataset, split)
        if split != "train" and not len(table):
            continue
        path = folder / f"{split}.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(
                file, lineterminator="\n", quoting=csv.QUOTE_ALL
            )
            writer.writerow(HEADER)
            for relation, head, tail in table[:, :3].tolist():
                writer.writerow(
                    [
                        dataset.entities[head - 1],
                        dataset.predicates[relation - 1],
                        dataset.entities[tail - 1],
                    ]
                )


def _rows(source: Any) -> Iterable[Any]:
    """The rows of triples in memory.

    Raises:
      ValueError: there are none to be read.
    """
    if hasattr(source, "mapped_triples"):
        return _factory_rows(source)
    if hasattr(source, "collect"):  # a lazy data frame
        source = source.collect()
    if hasattr(source, "columns"):  # a data frame
        labels = {str(label): label for label in source.columns}
        names = _frame_columns(list(labels))
        return list(zip(*(source[labels[name]].to_list() for name in names)))
    if isinstance(source, np.ndarray):
        if source.ndim != 2 or source.shape[1] != 3:
            raise ValueError(
                f"expected an array of the shape [n, 3], got {list(source.shape)}"
            )
        return source.tolist()
    if isinstance(source, Iterable) and not isinstance(source, str | bytes):
        return source
    raise ValueError(
        f"expected triples: tuples, an array, a data frame or a triples factory, got {type(source).__name__}"
    )


def _factory_rows(factory: Any) -> list[tuple[object, object, object]]:
    """The rows of a triples factory, whose own table of labels is slow and warns of it.

    Raises:
      ValueError: it has no labels.
    """
    if not hasattr(factory, "entity_id_to_label"):
        raise ValueError(
            "expected a triples factory with labels (TriplesFactory), got one with ids alone"
        )
    entities = factory.entity_id_to_label
    relations = factory.relation_id_to_label
    return [
        (entities[head], relations[relation], entities[tail])
        for head, relation, tail in factory.mapped_triples.tolist()
    ]


def _frame_columns(columns: list[str]) -> list[str]:
    """The three columns of a data frame.

    Raises:
      ValueError: it does not have them.
    """
    for names in COLUMN_NAMES:
        if all(name in columns for name in names):
            return list(names)
    if len(columns) == 3:
        return columns
    raise ValueError(
        f"expected the columns {', '.join(HEADER)}, or three columns, got {', '.join(columns)}"
    )


def _name(value: object) -> str | None:
    """A value as a name; None if it is none."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        return None
    return None if any(char in value for char in FORBIDDEN) else str(value)


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
                    _load_split(database, split, path, columns)
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


def _load_split(
    database: Any, split: str, path: Path, columns: str | None
) -> None:
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


PREFIX = "pykeen:"
_FACTORIES = {"train": "training", "valid": "validation", "test": "testing"}


def load_pykeen(name: str) -> Dataset:
    """The data set of PyKEEN of a name such as pykeen:kinships, its splits as PyKEEN has them.

    Raises:
      ValueError: PyKEEN is not installed, has no such data set, or cannot load it.
    """
    try:
        # PyKEEN is optional, and its types are not needed to run.
        datasets: Any = importlib.import_module("pykeen.datasets")
    except ImportError as error:
        raise ValueError(
            f"{shorten(name)}: data sets of PyKEEN need PyKEEN (pip install pykeen): {error}"
        ) from None

    asked = name.removeprefix(PREFIX)
    known = sorted(datasets.dataset_resolver.lookup_dict)
    if asked not in known:
        hint = similar_names_hint(asked, known)
        raise ValueError(
            f"{shorten(name)}: expected {PREFIX}NAME with a data set of PyKEEN, which has no {shorten(asked)} ({hint})"
        )
    try:
        dataset = datasets.get_dataset(dataset=asked)
        splits = {
            split: to_triples(getattr(dataset, factory))
            for split, factory in _FACTORIES.items()
            if getattr(dataset, factory) is not None
        }
    # Downloads and their files fail in ways that have no type in common.
    except Exception as error:
        problem = " ".join(str(error).split())
        raise ValueError(
            f"{shorten(name)}: PyKEEN could not load it: {problem}"
        ) from None
    return from_splits(name, {"train": [], "valid": [], "test": []} | splits)


MANIFEST = "graph.json"
# version of the folder's format
FORMAT = 1
_KIND = "funcppo index"
_FACT_TABLE = "index."  # before the names of the tables of the index
_STORED_NAMES = "entities."  # before the columns of names
_FIELDS = ("name", "predicates", "arities", "n_duplicates", "notes")
_SPLITS = ("valid", "test", "facts")


def is_stored_graph(path: Path) -> bool:
    """Whether a path is a folder that `write` made."""
    return (path / MANIFEST).is_file()


def write(
    dataset: Dataset,
    fact_tables: Mapping[str, np.ndarray],
    sources: Sequence[Path],
    folder: Path,
) -> int:
    """Write a data set and the index of its facts to a new folder, or in place of one that `write` made.

    A process that is killed leaves `FOLDER.PID.part`, which is no stored graph.

    Args:
      fact_tables: `logic.kb.index_facts` of the facts.
      sources: files that the data set was read from.
      folder: what to write.

    Returns:
      The size of the folder, in bytes.

    Raises:
      ValueError: the folder exists and is no stored graph, or the data set is a program.
      OSError: names what could not be written.
    """
    check_output(folder)
    if dataset.is_program:
        raise ValueError(f"{dataset.name}: expected triples, got a program")
    folder = folder.resolve()
    remove_stale_parts(folder.parent, [folder.name])
    part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    with named_errors(part):
        part.mkdir()
        try:
            n_bytes = _write_files(dataset, fact_tables, sources, part)
            if folder.exists():
                shutil.rmtree(folder)
            os.replace(part, folder)
            sync_folder(folder.parent)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return n_bytes


def check_output(folder: Path) -> None:
    """Raise ValueError if a folder exists and is no stored graph, which `write` would replace."""
    if folder.exists() and not is_stored_graph(folder):
        raise ValueError(
            f"--index {folder}: expected a folder that does not exist, or one of `funcppo data --index`"
        )


def read(folder: Path) -> Dataset:
    """The data set of a folder; its arrays are mapped from the files, and their pages read where they are used.

    Raises:
      ValueError: the folder is of another version, or a file is missing, too short or damaged; names it.
    """
    manifest = _read_manifest(folder)
    arrays = {
        name: _map_array(folder, name, described)
        for name, described in manifest["arrays"].items()
    }

    facts = arrays["facts"]
    entities = MappedNames(
        NameColumns(*(arrays[_STORED_NAMES + f] for f in NameColumns._fields))
    )
    dataset = Dataset(
        name=manifest["name"],
        entities=entities,
        predicates=tuple(manifest["predicates"]),
        arities=tuple(manifest["arities"]),
        train=facts[: manifest["n_train"]],
        valid=arrays["valid"],
        test=arrays["test"],
        facts=facts,
        rules=arrays["rules"],
        rule_weights=arrays["rule_weights"],
        rule_counts=arrays.get("rule_counts"),
        n_duplicates=manifest["n_duplicates"],
        notes=(*manifest["notes"], *_changed_sources(manifest["sources"])),
    )

    # what was computed of the data when they were stored
    stored = StoredParts(
        dataset=dataset,
        fingerprint=manifest["fingerprint"],
        fact_tables={
            name.removeprefix(_FACT_TABLE): array
            for name, array in arrays.items()
            if name.startswith(_FACT_TABLE)
        },
    )
    return dataclasses.replace(dataset, stored=stored)


def _describe_source(path: Path) -> dict[str, Any]:
    """What a file is known again by."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"sha256": digest, **_size_and_time(path)}


def _size_and_time(path: Path) -> dict[str, int]:
    """The size of a file in bytes, and when it was changed last in nanoseconds."""
    status = path.stat()
    return {"size": status.st_size, "changed_ns": status.st_mtime_ns}


def _changed_sources(sources: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A note on each file that is not as it was when the data set was read from it."""
    notes: list[str] = []
    for name, described in sources.items():
        path = Path(name)
        if path.is_file() and not (
            _size_and_time(path).items() <= described.items()
        ):
            notes.append(f"{name}: has changed since it was indexed")
    return notes


def _write_files(
    dataset: Dataset,
    fact_tables: Mapping[str, np.ndarray],
    sources: Sequence[Path],
    folder: Path,
) -> int:
    """Write the arrays and then the manifest; returns their bytes."""
    names = to_columns(dataset.entities)._asdict()
    arrays = {_STORED_NAMES + field: array for field, array in names.items()}
    arrays |= {split: getattr(dataset, split) for split in _SPLITS}
    arrays |= {"rules": dataset.rules, "rule_weights": dataset.rule_weights}
    if dataset.rule_counts is not None:
        arrays["rule_counts"] = dataset.rule_counts
    arrays |= {_FACT_TABLE + name: a for name, a in fact_tables.items()}
    for name, array in arrays.items():
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        _write_synced(folder / name, content.data)

    manifest: dict[str, Any] = {
        "kind": _KIND,
        "format": FORMAT,
        **{field: getattr(dataset, field) for field in _FIELDS},
        "n_train": len(dataset.train),
        "fingerprint": dataset.fingerprint,
        "sources": {
            str(path.resolve()): _describe_source(path) for path in sources
        },
        "arrays": {
            name: {"dtype": array.dtype.str, "shape": array.shape}
            for name, array in arrays.items()
        },
    }
    manifest["digest"] = _digest(manifest)
    text = json.dumps(manifest, indent=2, ensure_ascii=False).encode()
    _write_synced(folder / MANIFEST, memoryview(text))
    sync_folder(folder)
    return len(text) + sum(array.nbytes for array in arrays.values())


def _write_synced(path: Path, content: memoryview) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder.

    Raises:
      ValueError: it is damaged, or of another version or program.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("kind") != _KIND:
        raise ValueError(
            f"{path}: expected the description of a folder of `funcppo data --index`, got another or a damaged file"
        )
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{path}: expected format {FORMAT}, got {manifest.get('format')}: index the data set again"
        )
    if manifest.pop("digest", None) != _digest(manifest):
        raise ValueError(
            f"{path}: expected the file that `funcppo data --index` wrote, got a changed or damaged one"
        )
    return manifest


def _digest(manifest: Mapping[str, Any]) -> str:
    """A hash of a manifest."""
    text = json.dumps(manifest, sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _map_array(
    folder: Path, name: str, described: Mapping[str, Any]
) -> np.ndarray:
    """An array of a folder, mapped from its file.

    Raises:
      ValueError: the file is missing or has another size.
    """
    path = folder / name
    dtype, shape = np.dtype(described["dtype"]), tuple(described["shape"])
    expected = dtype.itemsize * int(np.prod(shape))
    size = path.stat().st_size if path.is_file() else None
    if size != expected:
        got = "no file" if size is None else f"{size:,}"
        raise ValueError(
            f"{path}: expected {expected:,} bytes, got {got}: index the data set again"
        )
    if not expected:
        return np.zeros(shape, dtype)
    # Copied on write: PyTorch takes no memory that must not be written to.
    return np.asarray(np.memmap(path, dtype, "c", shape=shape))


class Generator(Protocol):
    """Generates a data set of any size."""

    def __call__(self, n_people: int, seed: int) -> Dataset: ...


EMBEDDED_DIR = Path(__file__).parent / "embedded"
# named NAME:PEOPLE:SEED
GENERATORS: dict[str, Generator] = {
    "family_tree": make_family_tree,
    "clans": make_clans,
}
_GENERATED_NAME = re.compile(
    rf"({'|'.join(GENERATORS)}):([0-9]{{1,9}}):([0-9]{{1,9}})"
)
_RULE_FILES = ("rules.txt", "rules.tsv", "rules.pl")
_PROLOG_SUFFIXES = (".pl", ".pl.gz")
# What names between NUL bytes that are not single-spaced have.
_UNUSUAL_SPACES = (
    "  ",
    " \0",
    "\0 ",
    *(c for c in map(chr, range(1, 0x3001)) if c.isspace() and c != " "),
)
_TRIPLE_COLUMNS = "head<TAB>relation<TAB>tail"


def load(
    name_or_path: str | Path,
    rules: str | Path | None = None,
    *,
    facts_only: bool = False,
    cfg: DataConfig = DEFAULT_CONFIG,
) -> Dataset:
    """The data set of a folder, a file, or an embedded or generated name, or of PyKEEN; whole or not at all.

    A folder holds train.txt, perhaps valid.txt and test.txt, perhaps facts.txt (known, not trained on) and perhaps
    rules.txt, rules.tsv or rules.pl, the first of these that exists. Triples may stand in .tsv, .csv and .nt files too,
    and each file may end in .gz. A file is a list of triples, all of them train, or a Prolog program (.pl).

    Args:
      name_or_path: path of a folder or file, an embedded name, or `family_tree:PEOPLE:SEED`, `clans:PEOPLE:SEED`,
        `pykeen:NAME`.
      rules: a rule file to use in place of the data set's own rules.
      facts_only: read only train, which may be empty beside facts, and facts of a folder or file of triples, and no
        rules.
      cfg: how files of triples are read and split.

    Raises:
      ValueError: the data set does not exist or a file is wrong. The message is one line with file and line number,
        what was expected and what was read.
    """
    dataset = _load_named(str(name_or_path), cfg, facts_only, rules is None)
    if rules is None:
        return dataset
    return with_rule_file(dataset, Path(rules))


def _load_named(
    name: str, cfg: DataConfig, facts_only: bool, with_own_rules: bool
) -> Dataset:
    """The data set of a path or a name, perhaps with its own rules; see `load`."""
    path = Path(name)
    embedded = EMBEDDED_DIR / name
    generated = _GENERATED_NAME.fullmatch(name)

    if is_stored_graph(path):
        dataset = _open_stored(path, cfg, facts_only)
    elif path.is_dir():
        dataset = _load_folder(path, cfg, facts_only, with_own_rules)
    elif is_triple_file(name):
        paths = {"train": path}
        dataset = _load_splits(path.name, paths, cfg, facts_only)
    elif name.isidentifier() and embedded.is_dir():
        dataset = _load_folder(embedded, cfg, facts_only, with_own_rules)
    elif cfg != DEFAULT_CONFIG:
        raise ValueError(
            f"{name}: expected a folder or a file of triples to choose columns of or to split"
        )
    elif name.endswith(_PROLOG_SUFFIXES):
        dataset = _read_program(read_text(path), path.name, name)
    elif name.startswith(PREFIX):
        dataset = load_pykeen(name)
    elif generated:
        generator, n_people, seed = generated.groups()
        dataset = GENERATORS[generator](int(n_people), int(seed))
    else:
        names = ", ".join(_names_of_datasets())
        raise ValueError(
            f"unknown data set {shorten(name)}: expected a folder (of triples, or of a run where a program takes one), "
            f"a .txt, .tsv, .csv, .nt or .pl file or one of {names}"
        )
    return dataset


def from_text(program: str, name: str = "program") -> Dataset:
    """The data set of a Prolog program in memory; raises as `load` does for a file of that name."""
    return _read_program(program, name, name)


def from_triples(
    train: list[Triple],
    valid: list[Triple] | None = None,
    test: list[Triple] | None = None,
    rules: str = "",
) -> Dataset:
    """The data set of triples in memory.

    Args:
      train: known triples, as (head, relation, tail).
      valid: held-out triples for validation; none by default.
      test: held-out triples for the final evaluation; none by default.
      rules: text of a rule file, in any format that `readers` lists.

    Raises:
      ValueError: as `load` does for files.
    """
    dataset = from_splits(
        "triples", {"train": train, "valid": valid or [], "test": test or []}
    )
    if not rules:
        return dataset
    clauses, notes = read_clauses(rules, "rules", detect_format(rules))
    return _with_notes(with_rules(dataset, clauses, "rules"), notes)


def _names_of_datasets() -> list[str]:
    """Names that `load` accepts beside paths."""
    embedded = [path.name for path in EMBEDDED_DIR.glob("*") if path.is_dir()]
    generated = [f"{generator}:PEOPLE:SEED" for generator in GENERATORS]
    return [*sorted(embedded), *generated, f"{PREFIX}NAME"]


def _load_folder(
    folder: Path, cfg: DataConfig, facts_only: bool, with_own_rules: bool
) -> Dataset:
    """The data set of a folder, with the first of its rule files."""
    paths: dict[str, Path] = {}
    for split in ("train", "valid", "test", "facts"):
        files = [folder / f"{split}{suffix}" for suffix in SUFFIXES]
        path = _find_file(*files)
        if path:
            paths[split] = path
    if "train" not in paths:
        raise ValueError(
            f"{folder}/train.txt: missing split: expected this file, train.tsv, train.csv or train.nt, or one of "
            "them with .gz"
        )

    dataset = _load_splits(folder.name, paths, cfg, facts_only)
    rule_path = _find_rule_file(folder)
    if rule_path is None or facts_only or not with_own_rules:
        return dataset
    return with_rule_file(dataset, rule_path)


def _open_stored(path: Path, cfg: DataConfig, facts_only: bool) -> Dataset:
    """The data set of a folder of `funcppo data --index`, perhaps without held-out triples and rules."""
    if cfg != DEFAULT_CONFIG:
        raise ValueError(
            f"{path}: is a folder of `funcppo data --index`: expected options of reading and splitting there"
        )
    dataset = read(path)
    if not facts_only:
        return dataset
    return replace(
        dataset,
        valid=dataset.valid[:0],
        test=dataset.test[:0],
        rules=dataset.rules[:0],
        rule_weights=dataset.rule_weights[:0],
        rule_counts=None,
    )


def _read_program(program: str, name: str, path: str) -> Dataset:
    """The data set of the text of a Prolog program."""
    clauses, notes = read_clauses(program, path, "Prolog")
    return _with_notes(from_clauses(name, clauses, path), notes)


def _with_notes(dataset: Dataset, notes: list[str]) -> Dataset:
    """The data set with further notes."""
    return replace(dataset, notes=(*dataset.notes, *notes))


def _load_splits(
    name: str, paths: dict[str, Path], cfg: DataConfig, facts_only: bool
) -> Dataset:
    """The data set of the files of some splits.

    Args:
      name: name of the data set.
      paths: file of each split that has one; train always, perhaps valid, test and facts.
      cfg: how they are read, and split.
      facts_only: leave valid and test out; train may be empty beside facts.
    """
    files, names = _read_triple_files(paths, cfg, facts_only)
    _check_spelling(paths, files, names)
    no_triples = np.zeros((0, 3), np.int32)
    splits = dict.fromkeys(("train", "valid", "test"), no_triples)
    splits |= {split: file.triples for split, file in files.items()}
    notes = [note for file in files.values() for note in file.notes]
    if cfg.split_ratios is None:
        return _with_notes(from_tables(name, names, splits), notes)

    if "valid" in paths or "test" in paths:
        raise ValueError(
            f"{name}: has valid or test triples already: expected no split_ratios, got {cfg.split_ratios}"
        )
    parts = split_triples(
        splits["train"], names, cfg.split_ratios, cfg.split_seed
    )
    sizes = f"{len(parts.train)} / {len(parts.valid)} / {len(parts.test)}"
    notes.append(
        f"split at random by {cfg.split_ratios} with seed {cfg.split_seed}: {sizes} train / valid / test"
    )
    if parts.n_duplicates:
        notes.append(duplicate_note(parts.n_duplicates))

    splits["train"] = parts.train
    if not facts_only:
        splits |= {"valid": parts.valid, "test": parts.test}
    dataset = from_tables(name, names, splits)
    return _with_notes(replace(dataset, n_duplicates=parts.n_duplicates), notes)


def _read_triple_files(
    paths: dict[str, Path], cfg: DataConfig, facts_only: bool
) -> NumberedFiles:
    """The triples of the file of each split, and the names that they number; see `_load_splits`."""
    held_out = {"valid", "test"}
    if facts_only:
        paths = {s: path for s, path in paths.items() if s not in held_out}
    if cfg.reader == "duckdb" or any(map(is_parquet, paths.values())):
        read = read_files(paths, cfg.columns)
    else:
        table = NameTable()
        files = {
            split: read_triples(
                read_content(path), str(path), table, cfg.columns
            )
            for split, path in paths.items()
        }
        read = NumberedFiles(files, table.names())

    # A folder may have all its known facts in facts.txt.
    may_be_empty = held_out
    if facts_only and "facts" in paths:
        may_be_empty = {*held_out, "train"}
    for split, file in read.files.items():
        if not len(file.triples) and split not in may_be_empty:
            raise ValueError(
                f"{paths[split]}: empty: expected lines of {_TRIPLE_COLUMNS}"
            )
    return read


@host.paused_collection()
def with_rule_file(dataset: Dataset, path: Path) -> Dataset:
    """The data set with the rules of a file in place of its own."""
    text = read_text(path)
    is_prolog = path.name.endswith(_PROLOG_SUFFIXES)
    file_format = "Prolog" if is_prolog else detect_format(text)
    clauses, notes = read_clauses(text, str(path), file_format)

    for clause in clauses:
        is_fact = not clause.body and not has_variables(clause.head)
        if is_fact:
            place = f"{path}:{clause.line}: as {file_format}"
            raise ValueError(
                f"{place}: expected rules with a body: facts belong in facts.txt"
            )
    if is_mined_with_held_out(text, dataset):
        notes.append(
            f"{path}: mined from all triples, those of valid and test too: their ranks are better than those of unseen "
            "triples (give `funcppo mine` the same --split-ratios and data.split_seed)"
        )
    with_file = _with_notes(with_rules(dataset, clauses, str(path)), notes)
    if len(with_file.rules) < len(clauses):
        return with_file  # rules of unknown names were left out
    return with_read_counts(text, with_file, [c.line for c in clauses])


def _find_file(*paths: Path) -> Path | None:
    """The one of the files, or of these with .gz, that exists; None if none does. It is an error if several do."""
    existing: list[Path] = []
    for path in paths:
        packed = path.with_name(path.name + ".gz")
        existing += [file for file in (path, packed) if file.exists()]
    if len(existing) > 1:
        first, second, *_ = existing
        raise ValueError(
            f"{first}: expected one of it and {second.name}, got both"
        )
    return existing[0] if existing else None


def _find_rule_file(folder: Path) -> Path | None:
    """The first rule file that the folder holds; None if it holds none."""
    for name in _RULE_FILES:
        path = _find_file(folder / name)
        if path:
            return path
    return None


def _check_spelling(
    paths: dict[str, Path], files: dict[str, TripleFile], names: list[str]
) -> None:
    """Check that no two entities, and no two relations, differ in white space only.

    Raises:
      ValueError: two do; names the file and line of the second.
    """
    # Only a name that is not single-spaced can be another spelling.
    text = "\0" + "\0".join(names) + "\0"
    if not any(spaces in text for spaces in _UNUSUAL_SPACES):
        return
    single_spaced = [" ".join(name.split()) for name in names]
    # Terms of N-Triples are exact.
    texts = {
        split: file
        for split, file in files.items()
        if not is_ntriples(str(paths[split]))
    }
    tables = [file.triples for file in texts.values()]
    rows = np.concatenate([*tables, np.zeros((0, 3), np.int32)])
    for column in (rows[:, [0, 2]].ravel(), rows[:, 1]):
        spellings: dict[str, int] = {}  # by the name with single spaces
        for number in order_of_occurrence(column, len(names)).tolist():
            first = spellings.setdefault(single_spaced[number], number)
            if first != number:
                place = _first_place(number, paths, texts)
                spelled = (
                    f"{shorten(names[first])} and {shorten(names[number])}"
                )
                raise ValueError(
                    f"{place}: expected one spelling, got {spelled}, which differ in white space"
                )


def _first_place(
    number: int, paths: dict[str, Path], files: dict[str, TripleFile]
) -> str:
    """FILE:LINE of the first triple that holds a name of that number."""
    for split, file in files.items():
        rows = np.flatnonzero((file.triples == number).any(axis=1))
        if len(rows):
            return f"{paths[split]}:{file.first_line + int(rows[0])}"
    raise KeyError(number)
