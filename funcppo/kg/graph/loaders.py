"""Data sets from files, from memory, and by name.

`load` reads a folder or a file of triples, a Prolog program, one of the data sets that come with the package, embedded
(`countries_s1`) or generated (`clans:1500:0`), or one of PyKEEN (`pykeen:kinships`). `from_text` and `from_triples`
take what is in memory.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from funcppo.core import garbage_collection
from funcppo.core.files import shorten
from funcppo.kg.graph import pykeen_sets, stored_graph
from funcppo.kg.graph.clans import make_clans
from funcppo.kg.graph.config import DEFAULT_CONFIG, DataConfig
from funcppo.kg.graph.dataset import (
    Dataset,
    duplicate_note,
    from_clauses,
    from_splits,
    from_tables,
    with_rules,
)
from funcppo.kg.graph.duckdb_files import NumberedFiles, is_parquet, read_files
from funcppo.kg.graph.family_tree import make_family_tree
from funcppo.kg.graph.parser import has_variables
from funcppo.kg.graph.readers import detect_format, read_clauses
from funcppo.kg.graph.rule_tables import (
    is_mined_with_held_out,
    with_read_counts,
)
from funcppo.kg.graph.splits import split_triples
from funcppo.kg.graph.text_files import read_content, read_text
from funcppo.kg.graph.triple_files import (
    SUFFIXES,
    TripleFile,
    is_ntriples,
    is_triple_file,
    read_triples,
)
from funcppo.kg.graph.triple_table import NameTable, Triple, order_of_occurrence


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
    dataset = _load(str(name_or_path), cfg, facts_only, rules is None)
    if rules is None:
        return dataset
    return with_rule_file(dataset, Path(rules))


def _load(
    name: str, cfg: DataConfig, facts_only: bool, with_own_rules: bool
) -> Dataset:
    """The data set of a path or a name, perhaps with its own rules; see `load`."""
    path = Path(name)
    embedded = EMBEDDED_DIR / name
    generated = _GENERATED_NAME.fullmatch(name)

    if stored_graph.is_stored_graph(path):
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
    elif name.startswith(pykeen_sets.PREFIX):
        dataset = pykeen_sets.load_pykeen(name)
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
    return [*sorted(embedded), *generated, f"{pykeen_sets.PREFIX}NAME"]


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
    dataset = stored_graph.read(path)
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


@garbage_collection.paused()
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
            "triples (give `funcppo mine` the same --split-ratios and --split-seed)"
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
