"""Load data sets: from files, from memory, from DuckDB, from PyKEEN, by name, or from a stored graph.

`load` reads a folder or a file of triples, standard input (-), a Prolog program, one of the data sets that come with
the package, embedded (`countries_s1`) or generated (`clans:1500:0`), or one of PyKEEN (`pykeen:kinships`). `from_text`
and `from_triples` take what is in memory: tuples, arrays, data frames, Arrow tables and triples factories of PyKEEN.

A stored graph is a folder with a file of PyTorch that every process of a host maps instead of reading. DuckDB (extra
`big`) reads Parquet.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib
import io
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from funcppo.core import host
from funcppo.core.files import (
    remove_stale_parts,
    shorten,
    write_atomically,
    write_file,
)
from funcppo.core.host import import_extra
from funcppo.core.settings import FieldError
from funcppo.kg.graph.dataset import (
    SPLITS,
    Dataset,
    StoredParts,
    assign_ids,
    duplicate_note,
    from_clauses,
    from_splits,
    from_tables,
    index_entities,
    with_rules,
)
from funcppo.kg.graph.rules import (
    detect_format,
    is_mined_with_held_out,
    read_clauses,
    variable_notes,
    with_read_counts,
)
from funcppo.kg.graph.samples import make_clans, make_family_tree
from funcppo.kg.graph.text import (
    has_surrogates,
    has_variables,
    read_content,
    read_text,
    similar_names_hint,
    unknown_name_message,
)
from funcppo.kg.graph.triples import (
    DEFAULT_CONFIG,
    SUFFIXES,
    DataConfig,
    NameNumbers,
    Triple,
    TripleFile,
    choose_by_name,
    drop_duplicates,
    format_rdf,
    is_rdf,
    is_triple_file,
    order_of_occurrence,
    read_rows,
    read_triples,
    split_triples,
)

EMBEDDED_DIR = Path(__file__).parent / "embedded"
# of a number of people and a seed; named NAME:PEOPLE:SEED
GENERATORS: dict[str, Callable[[int, int], Dataset]] = {
    "family_tree": make_family_tree,
    "clans": make_clans,
}
_GENERATED_NAME = re.compile(
    rf"({'|'.join(GENERATORS)}):([0-9]{{1,9}}):([0-9]{{1,9}})"
)
_PYKEEN = "pykeen:"
_PROLOG_SUFFIXES = (".pl", ".pl.gz")


def load(
    name_or_path: str | Path,
    rules: str | Path | None = None,
    *,
    train_only: bool = False,
    with_rules: bool = True,
    cfg: DataConfig = DEFAULT_CONFIG,
) -> Dataset:
    """Load a data set by path (folder or file) or by name (embedded, generated, or of PyKEEN).

    A folder holds train.txt, perhaps valid.txt and test.txt, perhaps facts.txt (known, not trained on) and perhaps
    rules.txt, rules.tsv or rules.pl, the first of these that exists. Triples may stand in files of all `SUFFIXES`,
    and each may end in .gz. Triples as numbers, as in folders of OpenKE and PyKEEN, are read too. A file is a list
    of triples, all of them train, or a Prolog program (.pl).

    Args:
      name_or_path: path of a folder or file, an embedded name, or `family_tree:PEOPLE:SEED`, `clans:PEOPLE:SEED`,
        `pykeen:NAME`.
      rules: a rule file to use in place of the data set's own rules.
      train_only: read only train of a folder or file of triples, and no rules.
      with_rules: read the rules of a folder.
      cfg: how files of triples are read and split.

    Raises:
      ValueError: the data set does not exist or a file is wrong. The message is one line with file and line number,
        what was expected and what was read.
    """
    if not str(name_or_path):
        raise ValueError("data set: expected a name or a path, got no text")
    with_own = with_rules and rules is None
    dataset = _load_named(str(name_or_path), cfg, train_only, with_own)
    if rules is None:
        return dataset
    return with_rule_file(dataset, Path(rules))


def _load_named(
    name: str, cfg: DataConfig, train_only: bool, with_own_rules: bool
) -> Dataset:
    """Load the data set of a path or a name, with its own rules if `with_own_rules`; see `load`."""
    path = Path(name)
    embedded = EMBEDDED_DIR / name
    if is_stored_graph(path):
        return _open_stored(path, cfg, train_only)
    if path.is_dir():
        return _load_folder(path, cfg, train_only, with_own_rules)
    if name == "-" or is_triple_file(name) or cfg.format != "auto":
        return _load_splits(path.name, {"train": path}, cfg, train_only)
    if name.isidentifier() and embedded.is_dir():
        return _load_folder(embedded, cfg, train_only, with_own_rules)

    if cfg != DEFAULT_CONFIG:
        raise ValueError(
            f"{name}: expected a folder or a file of triples to choose columns of or to split"
        )
    if name.endswith(_PROLOG_SUFFIXES):
        return _read_program(read_text(path), path.name, name)
    if name.startswith(_PYKEEN):
        return _load_pykeen(name)
    if generated := _GENERATED_NAME.fullmatch(name):
        generator, n_people, seed = generated.groups()
        return GENERATORS[generator](int(n_people), int(seed))
    names = sorted(p.name for p in EMBEDDED_DIR.glob("*") if p.is_dir())
    names += [f"{generator}:PEOPLE:SEED" for generator in GENERATORS]
    raise ValueError(
        f"unknown data set {shorten(name)}: expected a folder (of triples, or of a run where a program takes one), "
        f"a file that ends in {', '.join(SUFFIXES)} or .pl, - for standard input, or one of {', '.join(names)}, "
        f"{_PYKEEN}NAME"
    )


def from_text(program: str, name: str = "program") -> Dataset:
    """Build the data set of a Prolog program in memory; raises as `load` does for a file of that name."""
    return _read_program(program, name, name)


def from_triples(
    train: list[Triple],
    valid: list[Triple] | None = None,
    test: list[Triple] | None = None,
    rules: str = "",
) -> Dataset:
    """Build the data set of triples in memory.

    Args:
      train: known triples, as (head, relation, tail).
      valid: held-out triples for validation; none by default.
      test: held-out triples for the final evaluation; none by default.
      rules: text of a rule file, in any format that `rules` lists.

    Raises:
      ValueError: as `load` does for files.
    """
    dataset = from_splits(
        "triples", {"train": train, "valid": valid or [], "test": test or []}
    )
    if not rules:
        return dataset
    file_format = detect_format(rules)
    clauses, notes = read_clauses(rules, "rules", file_format)
    notes += variable_notes(dataset, clauses, "rules", file_format)
    return _with_notes(with_rules(dataset, clauses, "rules"), notes)


def _read_program(program: str, name: str, path: str) -> Dataset:
    """Build the data set of the text of a Prolog program."""
    clauses, notes = read_clauses(program, path, "Prolog")
    return _with_notes(from_clauses(name, clauses, path), notes)


def _with_notes(dataset: Dataset, notes: list[str]) -> Dataset:
    """Return the data set with further notes."""
    return replace(dataset, notes=(*dataset.notes, *notes))


@host.paused_collection()
def with_rule_file(dataset: Dataset, path: Path) -> Dataset:
    """Return the data set with the rules of a file in place of its own."""
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
    notes += variable_notes(dataset, clauses, str(path), file_format)
    with_file = _with_notes(with_rules(dataset, clauses, str(path)), notes)
    if len(with_file.rules) < len(clauses):
        return with_file  # rules were left out
    return with_read_counts(text, with_file, [c.line for c in clauses])


# -- folders and files of triples


def _load_folder(
    folder: Path, cfg: DataConfig, train_only: bool, with_own_rules: bool
) -> Dataset:
    """Load the data set of a folder, with the first of its rule files if `with_own_rules`."""
    if cfg.format != "auto":
        raise FieldError("format", "none for a folder", cfg.format)
    paths: dict[str, Path] = {}
    for split in (*SPLITS, "facts"):
        files = [folder / f"{split}{suffix}" for suffix in SUFFIXES]
        if path := _find_file(*files):
            paths[split] = path
    if "train" not in paths:
        for layout in _ID_LAYOUTS:
            if (folder / layout.splits["train"]).is_file():
                return _load_ids(folder, layout, cfg)
        raise ValueError(
            f"{folder}/train.txt: missing split: expected this file, train.tsv, train.csv or train.nt, or one of "
            "them with .gz"
        )

    dataset = _load_splits(folder.name, paths, cfg, train_only)
    if labels := _find_file(folder / "labels.tsv", folder / "labels.txt"):
        dataset = replace(dataset, labels=_read_labels(labels))
    if train_only or not with_own_rules:
        return dataset
    path = find_rules(folder)
    return dataset if path is None else with_rule_file(dataset, path)


def _read_labels(path: Path) -> dict[str, str]:
    """Read names with their labels; raises ValueError, with file and line, where a line has not two columns."""
    found: dict[str, str] = {}
    lines = read_text(path).removesuffix("\n").split("\n")
    for number, line in enumerate(lines, 1):
        name, _, label = line.removesuffix("\r").partition("\t")
        if not (name and label) or "\t" in label:
            raise ValueError(
                f"{path}:{number}: expected name<TAB>label, got {shorten(line)}"
            )
        found[name] = label
    return found


def find_rules(folder: Path) -> Path | None:
    """Return the first rule file of a folder, rules.txt, rules.tsv or rules.pl; None without one."""
    found = (
        _find_file(folder / name)
        for name in ("rules.txt", "rules.tsv", "rules.pl")
    )
    return next(filter(None, found), None)


def find_split(folder: Path, name: str) -> Path:
    """Return the file of a split by its name in the folder of a data set, such as test_hard, or by its path.

    Raises:
      ValueError: there is none, or there are several.
    """
    found = _find_file(*(folder / f"{name}{suffix}" for suffix in SUFFIXES))
    if found is None and is_triple_file(name) and Path(name).is_file():
        return Path(name)
    if found is None:
        raise ValueError(
            f"split {shorten(name)}: expected test, valid, a file {name}.txt (.tsv, .csv, ...) in {folder}, or a file "
            "of triples"
        )
    return found


def with_test(
    dataset: Dataset, path: Path, cfg: DataConfig = DEFAULT_CONFIG
) -> Dataset:
    """Return a data set with the triples of a file as its test split; its own test stays known to be true.

    Args:
      dataset: without rules, whose ids new entities would shift.

    What the file's stories tell is known, and test are the triples that they ask.

    Raises:
      ValueError: the file is wrong or empty, or has a relation that the data set does not have.
    """
    table, ids, file, names = _read_atoms(dataset, path, cfg, extend=True)
    if not len(table):
        raise ValueError(f"{path}: empty: expected triples")
    is_asked = file.is_asked
    is_unknown = table[:, 0] == 0
    if is_unknown.any():
        row = int(is_unknown.argmax())
        relation = names[file.triples[row, 1]]
        problem = unknown_name_message("relation", relation, dataset.predicates)
        line = f":{file.first_line + row}" if is_asked is None else ""
        raise ValueError(f"{path}{line}: {problem}")
    facts = dataset.facts
    if is_asked is not None:
        facts = np.concatenate([facts, table[~is_asked]])
        facts, table = drop_duplicates(facts), table[is_asked]
    return replace(
        _with_known_table(dataset, dataset.test),
        entities=tuple(ids),
        facts=facts,
        test=table,
        stored=None,
    )


def with_known(
    dataset: Dataset, path: Path, cfg: DataConfig = DEFAULT_CONFIG
) -> Dataset:
    """Return a data set with the triples of a file known to be true; those of unknown names are counted and left out.

    Raises:
      ValueError: the file is wrong.
    """
    table, *_ = _read_atoms(dataset, path, cfg)
    is_kept = (table[:, :3] > 0).all(1)
    n_left_out = len(table) - int(is_kept.sum())
    note = f"{path}: {n_left_out} of {len(table)} triples have unknown names and say nothing of the candidates"
    known = _with_known_table(dataset, table[is_kept])
    return _with_notes(known, [note] * (n_left_out > 0))


def with_candidates(dataset: Dataset, path: Path) -> Dataset:
    """Return a data set whose queries are ranked against the entities of a file, one a line.

    Triples of valid with others are known to be true and are not ranked, so that they choose nothing.

    Raises:
      ValueError: the file is empty, or has an unknown entity; names the line.
    """
    ids = index_entities(dataset)
    chosen: set[int] = set()
    for number, line in enumerate(read_text(path).split("\n"), 1):
        name = line.removesuffix("\r")
        if name in ids:
            chosen.add(ids[name])
        elif name:
            problem = unknown_name_message("entity", name, dataset.entities)
            raise ValueError(f"{path}:{number}: {problem}")
    if not chosen:
        raise ValueError(f"{path}: expected an entity a line, got none")
    candidates = np.array(sorted(chosen))
    is_chosen = np.isin(dataset.valid[:, 1:3], candidates)
    is_ranked = is_chosen[:, 0] & is_chosen[:, 1]
    others = dataset.valid[~is_ranked]
    note = f"valid: {len(others)} of {len(is_ranked)} triples have other entities than {path} and are not ranked"
    dataset = replace(
        _with_known_table(dataset, others),
        valid=dataset.valid[is_ranked],
        candidates=candidates,
        stored=None,
    )
    return _with_notes(dataset, [note] * (len(others) > 0))


def _with_known_table(dataset: Dataset, table: np.ndarray) -> Dataset:
    """Return the data set with more triples that are known to be true."""
    if dataset.known is not None:
        table = np.concatenate([dataset.known, table])
    return replace(dataset, known=table)


def _read_atoms(
    dataset: Dataset,
    path: Path,
    cfg: DataConfig,
    *,
    extend: bool = False,
) -> tuple[np.ndarray, Mapping[str, int], TripleFile, list[str]]:
    """Read the triples of a file as atoms of a data set [n, W], in which a name that it does not have is 0.

    Args:
      extend: give new entities ids too.

    Returns:
      The atoms, the ids of entities, the file, and the names that it numbers.
    """
    files, names = _read_files({"train": path}, cfg)
    triples = files["train"].triples
    ids = index_entities(dataset)
    if extend:
        ends = map(names.__getitem__, triples[:, [0, 2]].ravel().tolist())
        ids = assign_ids(chain(ids, ends))
    relations = {name: i for i, name in enumerate(dataset.predicates, 1)}
    entity, relation = (
        np.array([known.get(name, 0) for name in names], np.int32)
        for known in (ids, relations)
    )
    table = np.zeros((len(triples), dataset.atom_width), np.int32)
    table[:, 0] = relation[triples[:, 1]]
    table[:, 1:3] = entity[triples[:, [0, 2]]]
    return table, ids, files["train"], names


class _IdLayout(NamedTuple):
    """Files of a data set that holds triples as numbers, relative to its folder."""

    splits: Mapping[str, str]
    names: Mapping[str, str]  # of entities and of relations with their numbers
    columns: Sequence[int]  # of head, relation and tail


_OPENKE = _IdLayout(
    {split: f"{split}2id.txt" for split in SPLITS},
    {kind: f"{kind}2id.txt" for kind in ("entity", "relation")},
    (0, 2, 1),
)
_PYKEEN_FOLDERS = ("training", "validation", "testing")
_ID_LAYOUTS = (
    _OPENKE,
    _IdLayout(
        {
            split: f"{folder}/numeric_triples.tsv.gz"
            for split, folder in zip(SPLITS, _PYKEEN_FOLDERS)
        },
        {
            kind: f"training/{kind}_to_id.tsv.gz"
            for kind in ("entity", "relation")
        },
        (0, 1, 2),
    ),
)


def id_files(folder: Path) -> list[Path]:
    """List the files of a data set that holds triples as numbers; empty for another folder."""
    names = (
        n for x in _ID_LAYOUTS for n in (*x.splits.values(), *x.names.values())
    )
    return [folder / name for name in names if (folder / name).is_file()]


def _load_ids(folder: Path, layout: _IdLayout, cfg: DataConfig) -> Dataset:
    """Load a data set of triples as numbers, as OpenKE and PyKEEN write them, with a first line of a count or a header.

    Raises:
      ValueError: a line is of another form, or a number has no name; names the file.
    """
    if cfg != DEFAULT_CONFIG:
        raise ValueError(
            f"{folder}: expected no settings of reading for triples of numbers"
        )
    place = int(layout is _OPENKE)  # of the number, beside its name
    entities, relations = (
        _read_numbered(folder / layout.names[kind], place)
        for kind in ("entity", "relation")
    )
    splits: dict[str, np.ndarray] = {}
    for split, name in layout.splits.items():
        path = folder / name
        splits[split] = np.zeros((0, 3), np.int32)
        if not path.is_file():
            continue
        try:
            table = np.loadtxt(path, np.int32, skiprows=1, ndmin=2)
            table = table[:, layout.columns]
        except (ValueError, IndexError) as error:
            problem = "expected three numbers a line below the first one"
            raise ValueError(f"{path}: {problem}: {error}") from None
        limits = [len(entities), len(relations), len(entities)]
        if (table < 0).any() or (table >= limits).any():
            raise ValueError(
                f"{path}: expected numbers that {' and '.join(layout.names.values())} name, got another"
            )
        splits[split] = table + np.array([0, len(entities), 0], np.int32)
    return from_tables(folder.name, [*entities, *relations], splits)


def _read_numbered(path: Path, place: int) -> list[str]:
    """Read names with their numbers from 0 on below a first line; return the names in that order.

    Args:
      place: column of the number, 0 or 1; the other one is that of the name.
    """
    lines = read_text(path).removesuffix("\n").split("\n")[1:]
    rows = [line.split("\t") for line in lines]
    for number, row in enumerate(rows, 2):
        if len(row) != 2:
            raise ValueError(
                f"{path}:{number}: expected a name and a number, got {shorten(lines[number - 2])}"
            )
    names = {row[place].strip(): row[1 - place] for row in rows}
    try:
        return [names[str(number)] for number in range(len(rows))]
    except KeyError:
        raise ValueError(
            f"{path}: expected the numbers 0 to {len(rows) - 1}, each once"
        ) from None


def _find_file(*paths: Path) -> Path | None:
    """Return which of the files exists, plain or with .gz; None if none exists.

    It is an error if several exist.
    """
    candidates = [p for path in paths for p in (path, Path(f"{path}.gz"))]
    existing = [path for path in candidates if path.exists()]
    if len(existing) > 1:
        first, second, *_ = existing
        raise ValueError(
            f"{first}: expected one of it and {second.name}, got both"
        )
    return existing[0] if existing else None


def _load_splits(
    name: str, paths: dict[str, Path], cfg: DataConfig, train_only: bool
) -> Dataset:
    """Build a data set from one file per split.

    Args:
      name: name of the data set.
      paths: file of each split that has one; train always, perhaps valid, test and facts.
      cfg: how they are read, and split.
      train_only: leave all but train out.
    """
    is_split = "valid" in paths or "test" in paths
    if train_only:
        paths = {"train": paths["train"]}
    files, names = _read_files(paths, cfg)
    for split, file in files.items():
        if not len(file.triples) and split in ("train", "facts"):
            raise ValueError(
                f"{paths[split]}: empty: expected lines of head<TAB>relation<TAB>tail"
            )
    _check_spelling(paths, files, names, cfg)
    splits = _split_stories(files)
    notes = [note for file in files.values() for note in file.notes]
    labels = dict(chain.from_iterable(x.labels.items() for x in files.values()))
    if cfg.split_ratios is None:
        dataset = replace(from_tables(name, names, splits), labels=labels)
        return _with_notes(dataset, notes)

    if is_split:
        raise ValueError(
            f"{name}: has valid or test triples already: expected no split_ratios, got {cfg.split_ratios}"
        )
    dataset = _split_at_random(name, names, splits, cfg, train_only)
    return _with_notes(replace(dataset, labels=labels), notes)


def _split_at_random(
    name: str,
    names: Sequence[str],
    splits: dict[str, np.ndarray],
    cfg: DataConfig,
    train_only: bool,
) -> Dataset:
    """Build a data set whose train triples are split at random, with notes on it."""
    assert cfg.split_ratios is not None, "the shares are set"
    parts = split_triples(
        splits["train"], names, cfg.split_ratios, cfg.split_seed
    )
    sizes = " / ".join(str(len(parts[split])) for split in SPLITS)
    n_duplicates = len(splits["train"]) - sum(map(len, parts.values()))
    notes = [
        f"split at random by {cfg.split_ratios} with seed {cfg.split_seed}: {sizes} train / valid / test"
    ]
    if n_duplicates:
        notes.append(duplicate_note(n_duplicates))
    splits |= {"train": parts["train"]} if train_only else parts
    dataset = from_tables(name, names, splits)
    return _with_notes(replace(dataset, n_duplicates=n_duplicates), notes)


def _split_stories(files: Mapping[str, TripleFile]) -> dict[str, np.ndarray]:
    """Return the triples of each split; what the stories of held-out triples tell is known."""
    splits = dict.fromkeys(SPLITS, np.zeros((0, 3), np.int32))
    splits |= {split: file.triples for split, file in files.items()}
    for split, file in files.items():
        if split in SPLITS[1:] and file.is_asked is not None:
            told = [splits["facts"]] if "facts" in splits else []
            told.append(file.triples[~file.is_asked])
            splits["facts"] = np.concatenate(told)
            splits[split] = file.triples[file.is_asked]
    return splits


def _read_files(
    paths: dict[str, Path], cfg: DataConfig
) -> tuple[dict[str, TripleFile], list[str]]:
    """Read the triples of each split's file; return them and the names that they number."""
    numbers = NameNumbers()
    files: dict[str, TripleFile] = {}
    for split, path in paths.items():
        shown = str(path)
        if cfg.format != "auto" or shown == "-":
            shown += f".{cfg.format}".replace("auto", "tsv")
        if path.suffix == ".parquet":
            rows = parquet_rows(path)
            files[split] = read_rows(rows, shown, numbers, cfg.columns)
            continue
        content = read_content(path)
        files[split] = read_triples(content, shown, numbers, cfg.columns)
    return files, list(numbers)


def _check_spelling(
    paths: dict[str, Path],
    files: dict[str, TripleFile],
    names: list[str],
    cfg: DataConfig,
) -> None:
    """Check that no two entities, and no two relations, differ in white space only.

    Raises:
      ValueError: two do; names the file and line of the second.
    """
    # Only a name that is not single-spaced can be another spelling.
    single_spaced = [" ".join(name.split()) for name in names]
    if single_spaced == names:
        return
    for columns in ([0, 2], [1]):
        spellings: dict[str, int] = {}  # by the name with single spaces
        for split, file in files.items():
            # Terms of RDF are exact.
            if is_rdf(str(paths[split])) or is_rdf(f".{cfg.format}"):
                continue
            rows = file.triples[:, columns]
            order = order_of_occurrence(rows.ravel(), len(names))
            for number in order.tolist():
                first = spellings.setdefault(single_spaced[number], number)
                if first != number:
                    line = file.first_line + (rows == number).any(1).argmax()
                    raise ValueError(
                        f"{paths[split]}:{line}: expected one spelling, got {shorten(names[first])} and "
                        f"{shorten(names[number])}, which differ in white space"
                    )


# -- triples in memory


def to_triples(source: object) -> list[Triple]:
    """Convert triples in memory to (head, relation, tail) names.

    Args:
      source: tuples of three names; an array [n, 3] of names; a data frame of pandas or polars, lazy or not, with the
        columns head, relation and tail (or other words for them), or with three columns of other names; what has
        `__arrow_c_stream__`, by pyarrow; or a TriplesFactory of PyKEEN. A name is a text or a whole number.

    Raises:
      ValueError: it is none of these, or a name is missing, empty or has a line break; names the row.
    """
    triples: list[Triple] = []
    for number, row in enumerate(_rows_in_memory(source)):
        is_row = isinstance(row, Sequence) and not isinstance(row, str)
        if not is_row or len(row) != 3 or not all(map(_is_name, row)):
            raise ValueError(
                f"triple {number}: expected three names (texts without line breaks, or whole numbers), got "
                f"{shorten(repr(row))}"
            )
        head, relation, tail = map(str, row)
        triples.append((head, relation, tail))
    return triples


def _is_name(value: object) -> bool:
    """Check whether a value is a whole number or a text that may be a name."""
    if isinstance(value, str):
        is_line = not {"\n", "\r", "\0"} & {*value}
        return bool(value) and is_line and not has_surrogates(value)
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _rows_in_memory(source: Any) -> Iterable[Any]:
    """Return the rows of triples in memory, of any supported type.

    Raises:
      ValueError: there are none to be read.
    """
    if hasattr(source, "mapped_triples"):
        # The own table of labels of a triples factory is slow and warns of it.
        if not hasattr(source, "entity_id_to_label"):
            raise ValueError(
                "expected a triples factory with labels (TriplesFactory), got one with ids alone"
            )
        entities = source.entity_id_to_label
        relations = source.relation_id_to_label
        return [
            (entities[head], relations[relation], entities[tail])
            for head, relation, tail in source.mapped_triples.tolist()
        ]
    if hasattr(source, "collect"):  # a lazy data frame
        source = source.collect()
    is_frame = hasattr(source, "to_dict")
    if not is_frame and hasattr(source, "__arrow_c_stream__"):
        arrow: Any = importlib.import_module("pyarrow")
        source = arrow.table(source).to_pydict()
        return list(zip(*_named_columns(source)))
    if hasattr(source, "columns"):
        columns = {str(label): source[label] for label in source.columns}
        return list(zip(*(x.to_list() for x in _named_columns(columns))))
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


def _named_columns(columns: Mapping[str, Any]) -> list[Any]:
    """Return the columns of head, relation and tail by their names."""
    names = list(columns)
    return [columns[names[i]] for i in choose_by_name(names)]


def write_splits(dataset: Dataset, path: str) -> list[Path]:
    """Write the triples of a data set to files, of tabs, CSV, Parquet or RDF by their ending.

    `load` reads them back with the same names.

    Args:
      path: where `{split}` stands for train, valid and test; without it the known facts are written to this file.

    Returns:
      The files.

    Raises:
      ValueError: a name with a tab for a file with tabs, an ending of no format, or atoms of other than two arguments.
    """
    entities, predicates = dataset.entities, dataset.predicates
    is_binary = np.array([0, *dataset.arities]) == 2
    paths: list[Path] = []
    for split in SPLITS if "{split}" in path else ("facts",):
        table: np.ndarray = getattr(dataset, split)
        if split in SPLITS[1:] and not len(table):
            continue
        if not is_binary[table[:, 0]].all():
            raise ValueError(
                f"{dataset.name}: expected facts of two arguments, to write them as triples"
            )
        numbers: list[list[int]] = table[:, :3].tolist()
        rows = [
            (entities[head - 1], predicates[relation - 1], entities[tail - 1])
            for relation, head, tail in numbers
        ]
        file = Path(path.replace("{split}", split))
        content = format_triples(rows, file.name)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, content)
        paths.append(file)
    return paths


def format_triples(rows: Sequence[Triple], name: str) -> bytes:
    """Format triples as a file of a name; raises as `write_splits` does."""
    header = ("head", "relation", "tail")
    if is_rdf(name):
        return format_rdf(rows, name)
    if name.endswith((".tsv", ".txt")):
        text = "".join("\t".join(row) + "\n" for row in rows)
        if text.count("\t") != 2 * len(rows):
            raise ValueError(f"{name}: expected names without tabs, got one")
        return text.encode()
    if not name.endswith((".csv", ".parquet")):
        raise ValueError(
            f"{name}: expected a name that ends in .tsv, .csv, .parquet or one of RDF"
        )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerows([header, *rows])
    if name.endswith(".csv"):
        return text.getvalue().encode()
    return format_parquet(text.getvalue(), dict.fromkeys(header, "VARCHAR"))


# -- DuckDB


def format_parquet(csv_text: str, columns: Mapping[str, str]) -> bytes:
    """Convert CSV with a header to Parquet.

    Args:
      columns: type of DuckDB of each column.
    """
    duckdb = import_extra("duckdb", "big", "Parquet")
    with tempfile.TemporaryDirectory(prefix="funcppo-") as name:
        source, target = Path(name) / "in.csv", Path(name) / "out.parquet"
        source.write_text(csv_text, encoding="utf-8")
        with closing(duckdb.connect()) as database:
            database.execute(
                f"COPY (SELECT * FROM read_csv({_quote_path(source)}, header=true, delim=',', quote='\"', escape='\"', "
                f"auto_detect=false, columns={dict(columns)})) TO {_quote(str(target))} (FORMAT parquet)"
            )
        return target.read_bytes()


def parquet_rows(path: Path) -> Iterator[list[str]]:
    """Yield the names of the columns of a Parquet file, then its rows as texts.

    Raises:
      ValueError: DuckDB is not installed, or cannot read the file.
    """
    duckdb = import_extra("duckdb", "big", "Parquet")
    source = f"SELECT * FROM read_parquet({_quote_path(path)})"
    try:
        with closing(duckdb.connect()) as database:
            table = database.execute(source)
            yield [column[0] for column in table.description]
            while rows := table.fetchmany(1 << 14):
                for row in rows:
                    yield ["" if x is None else str(x) for x in row]
    except (duckdb.Error, UnicodeDecodeError) as error:
        problem = "no such file"
        if path.is_file():
            problem = str(error).partition("\n")[0]
        raise ValueError(f"{path}: expected Parquet, got {problem}") from None


def _quote_path(path: Path) -> str:
    """Quote a path as an SQL literal of that one file, whatever characters its name has."""
    return _quote(re.sub(r"[*?\[]", r"[\g<0>]", str(path.resolve())))


def _quote(text: str, mark: str = "'") -> str:
    """Quote a text as an SQL literal, or as an identifier with another mark."""
    return mark + text.replace(mark, mark + mark) + mark


# -- PyKEEN


def _load_pykeen(name: str) -> Dataset:
    """Load a data set of PyKEEN by a name such as pykeen:kinships, with PyKEEN's splits.

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

    asked = name.removeprefix(_PYKEEN)
    known = sorted(datasets.dataset_resolver.lookup_dict)
    if asked not in known:
        hint = similar_names_hint(asked, known)
        raise ValueError(
            f"{shorten(name)}: expected {_PYKEEN}NAME with a data set of PyKEEN, which has no {shorten(asked)} ({hint})"
        )
    try:
        dataset = datasets.get_dataset(dataset=asked)
        factories = (dataset.training, dataset.validation, dataset.testing)
        splits = {
            split: [] if factory is None else to_triples(factory)
            for split, factory in zip(SPLITS, factories)
        }
    # Downloads and their files fail in ways that have no type in common.
    except Exception as error:
        problem = " ".join(str(error).split())
        raise ValueError(
            f"{shorten(name)}: PyKEEN could not load it: {problem}"
        ) from None
    return from_splits(name, splits)


# -- stored graphs

STORED_FILE = "graph.pt"
_FORMAT = 3  # of the file


def is_stored_graph(path: Path) -> bool:
    """Check whether a path is a folder that `write` made."""
    return (path / STORED_FILE).is_file()


def write(
    dataset: Dataset,
    fact_tables: Mapping[str, np.ndarray],
    sources: Sequence[Path],
    folder: Path,
) -> int:
    """Write a data set and the index of its facts to a new folder, or in place of one that `write` made.

    Args:
      fact_tables: `logic.kb.index_facts` of the facts.
      sources: files that the data set was read from.
      folder: what to write.

    Returns:
      The size of the file, in bytes.

    Raises:
      ValueError: the data set is a program.
      OSError: names what could not be written.
    """
    import torch

    if dataset.is_program:
        raise ValueError(f"{dataset.name}: expected triples, got a program")
    fields = {
        field.name: getattr(dataset, field.name)
        for field in dataclasses.fields(dataset)
        if field.name not in ("entities", "train", "stored")
    }
    groups: dict[str, Mapping[str, Any]] = {
        "fields": fields,
        "fact_tables": fact_tables,
    }
    names = json.dumps(dataset.entities).encode()
    stored: dict[str, Any] = {
        "format": _FORMAT,
        "n_train": len(dataset.train),
        # a tensor of bytes: millions of texts take a while one by one
        "entities": torch.frombuffer(bytearray(names), dtype=torch.uint8),
        "sources": {str(path.resolve()): _file_state(path) for path in sources},
    }
    for name, group in groups.items():
        stored[name] = {
            key: torch.from_numpy(np.ascontiguousarray(value))
            if isinstance(value, np.ndarray)
            else value
            for key, value in group.items()
        }
    folder.mkdir(parents=True, exist_ok=True)
    remove_stale_parts(folder, [STORED_FILE])
    path = folder / STORED_FILE
    write_atomically(path, lambda file: torch.save(stored, file))
    return path.stat().st_size


def _file_state(path: Path) -> list[int]:
    """Return the size of a file in bytes, and the time of its last change in nanoseconds."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def read(folder: Path) -> Dataset:
    """Read the data set of a stored graph; its arrays are mapped from the file and read where they are used.

    Raises:
      ValueError: the file is of another version, too short or damaged; names it.
    """
    import torch

    path = folder / STORED_FILE
    try:
        stored = torch.load(path, mmap=True, weights_only=True)
        found = stored.get("format")
    # What is no such file fails in ways that have no type in common.
    except Exception as error:
        problem = str(error).partition("\n")[0]
        raise ValueError(
            f"{path}: expected the file that `funcppo data --index` wrote, got a damaged one: {problem}"
        ) from None
    if found != _FORMAT:
        raise ValueError(
            f"{path}: expected format {_FORMAT}, got {found}: index the data set again"
        )

    def group(name: str) -> dict[str, Any]:
        """Return the values of a group, with tensors as arrays."""
        return {
            key: value.numpy() if isinstance(value, torch.Tensor) else value
            for key, value in stored[name].items()
        }

    fields = group("fields")
    for name, state in stored["sources"].items():
        if Path(name).is_file() and _file_state(Path(name)) != state:
            note = f"{name}: has changed since it was indexed"
            fields["notes"] = (*fields["notes"], note)
    dataset = Dataset(
        **fields,
        entities=tuple(json.loads(stored["entities"].numpy().tobytes())),
        train=fields["facts"][: stored["n_train"]],
    )
    parts = StoredParts(dataset=dataset, fact_tables=group("fact_tables"))
    return replace(dataset, stored=parts)


def _open_stored(path: Path, cfg: DataConfig, train_only: bool) -> Dataset:
    """Read the data set of a stored graph, without held-out triples and rules if `train_only`."""
    if cfg != DEFAULT_CONFIG:
        raise ValueError(
            f"{path}: is a folder of `funcppo data --index`: expected options of reading and splitting there"
        )
    dataset = read(path)
    if not train_only:
        return dataset
    return replace(
        dataset,
        facts=dataset.train,
        valid=dataset.valid[:0],
        test=dataset.test[:0],
        rules=dataset.rules[:0],
        rule_weights=dataset.rule_weights[:0],
        rule_counts=None,
    )
