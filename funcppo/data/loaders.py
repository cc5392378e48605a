"""Data sets from files, from memory, and by name.

`load` reads a folder or a file of triples, a Prolog program, or one of the data sets that come with the package:
embedded (`countries_s1`) or generated (`clans:1500:0`). `from_text` and `from_triples` take what is in memory.
"""

from __future__ import annotations

import gzip
import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from funcppo.data.clans import make_clans
from funcppo.data.config import DEFAULT_CONFIG, DataConfig
from funcppo.data.dataset import (
    Dataset,
    duplicate_note,
    from_clauses,
    from_splits,
    with_rules,
)
from funcppo.data.family_tree import make_family_tree
from funcppo.data.lexer import shorten
from funcppo.data.parser import has_variables
from funcppo.data.readers import detect_format, read_clauses
from funcppo.data.rule_tables import read_counts
from funcppo.data.splits import split_triples
from funcppo.data.triple_files import (
    SUFFIXES,
    Triple,
    TripleFile,
    is_triple_file,
    read_triples,
)


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
_TRIPLE_COLUMNS = "head<TAB>relation<TAB>tail"


def load(
    name_or_path: str | Path,
    rules: str | Path | None = None,
    *,
    facts_only: bool = False,
    cfg: DataConfig = DEFAULT_CONFIG,
) -> Dataset:
    """The data set of a folder, a file, or an embedded or generated name; whole or not at all.

    A folder holds train.txt, perhaps valid.txt and test.txt, perhaps facts.txt (known, not trained on) and perhaps
    rules.txt, rules.tsv or rules.pl, the first of these that exists. Triples may stand in .tsv and .csv files too, and
    each file may end in .gz. A file is a list of triples, all of them train, or a Prolog program (.pl).

    Args:
      name_or_path: path of a folder or file, an embedded name, or `family_tree:PEOPLE:SEED`, `clans:PEOPLE:SEED`.
      rules: a rule file to use in place of the data set's own rules.
      facts_only: read only train, which may be empty, and facts of a folder or file of triples, and no rules.
      cfg: how files of triples are read and split.

    Raises:
      ValueError: the data set does not exist or a file is wrong. The message is one line with file and line number,
        what was expected and what was read.
    """
    path = Path(name_or_path)
    name = str(name_or_path)
    embedded = EMBEDDED_DIR / name
    generated = _GENERATED_NAME.fullmatch(name)

    if path.is_dir():
        dataset = _load_folder(path, cfg, facts_only, rules is None)
    elif is_triple_file(name):
        paths = {"train": path}
        dataset = _load_splits(path.name, paths, cfg, facts_only)
    elif name.isidentifier() and embedded.is_dir():
        dataset = _load_folder(embedded, cfg, facts_only, rules is None)
    elif cfg != DEFAULT_CONFIG:
        raise ValueError(
            f"{name}: expected a folder or a file of triples to choose columns of or to split"
        )
    elif name.endswith(_PROLOG_SUFFIXES):
        dataset = _read_program(_read_text(path), path.name, name)
    elif generated:
        generator, n_people, seed = generated.groups()
        dataset = GENERATORS[generator](int(n_people), int(seed))
    else:
        names = ", ".join(_names_of_datasets())
        raise ValueError(
            f"unknown data set {shorten(name)}: expected a folder, a .txt, .tsv, .csv or .pl file or one of {names}"
        )

    if rules is None:
        return dataset
    return _with_rule_file(dataset, Path(rules))


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
    return sorted(embedded) + generated


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
            f"{folder}/train.txt: missing split: expected this file, train.tsv or train.csv, or one of them with .gz"
        )

    dataset = _load_splits(folder.name, paths, cfg, facts_only)
    rule_path = _find_rule_file(folder)
    if rule_path is None or facts_only or not with_own_rules:
        return dataset
    return _with_rule_file(dataset, rule_path)


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
      facts_only: leave valid and test out; train may be empty.
    """
    files = _read_triple_files(paths, cfg, facts_only)
    splits: dict[str, list[Triple]] = {"train": [], "valid": [], "test": []}
    splits |= {split: file.triples for split, file in files.items()}
    notes = [note for file in files.values() for note in file.notes]
    if cfg.split_ratios is None:
        return _with_notes(from_splits(name, splits), notes)

    if "valid" in paths or "test" in paths:
        raise ValueError(
            f"{name}: has valid or test triples already: expected no split_ratios, got {cfg.split_ratios}"
        )
    parts = split_triples(splits["train"], cfg.split_ratios, cfg.split_seed)
    sizes = f"{len(parts.train)} / {len(parts.valid)} / {len(parts.test)}"
    notes.append(
        f"split at random by {cfg.split_ratios} with seed {cfg.split_seed}: {sizes} train / valid / test"
    )
    if parts.n_duplicates:
        notes.append(duplicate_note(parts.n_duplicates))

    splits["train"] = parts.train
    if not facts_only:
        splits |= {"valid": parts.valid, "test": parts.test}
    dataset = from_splits(name, splits)
    return _with_notes(replace(dataset, n_duplicates=parts.n_duplicates), notes)


def _read_triple_files(
    paths: dict[str, Path], cfg: DataConfig, facts_only: bool
) -> dict[str, TripleFile]:
    """The triples of the file of each split, in the order of their ids; see `_load_splits`."""
    files: dict[str, TripleFile] = {}
    for split, path in paths.items():
        is_held_out = split in ("valid", "test")
        if facts_only and is_held_out:
            continue
        file = read_triples(_read_text(path), str(path), cfg.columns)
        may_be_empty = is_held_out or (facts_only and split == "train")
        if not file.triples and not may_be_empty:
            raise ValueError(
                f"{path}: empty: expected lines of {_TRIPLE_COLUMNS}"
            )
        files[split] = file
    _check_spelling(paths, files)
    return files


def _with_rule_file(dataset: Dataset, path: Path) -> Dataset:
    """The data set with the rules of a file in place of its own."""
    text = _read_text(path)
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
    with_file = _with_notes(with_rules(dataset, clauses, str(path)), notes)
    if len(with_file.rules) < len(clauses):
        return with_file  # rules of unknown names were left out
    counts = read_counts(text, with_file, [c.line for c in clauses])
    return replace(with_file, rule_counts=counts)


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


def _read_text(path: Path) -> str:
    """The file as text, unpacked, without a byte order mark, lines ended by \\n."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        byte = error.object[error.start]
        raise ValueError(
            f"{path}:{line}: expected UTF-8, got byte 0x{byte:02x}"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ValueError(f"{path}: expected a whole gzip file") from None
    except OSError as error:
        raise ValueError(
            f"{path}: expected a file that can be read: {error.strerror}"
        ) from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ValueError(f"{path}:{line}: expected text, got a NUL byte")
    return text


def _check_spelling(
    paths: dict[str, Path], files: dict[str, TripleFile]
) -> None:
    """Check that no two entities, and no two relations, differ in white space only.

    Raises:
      ValueError: two do; names the file and line of the second.
    """
    entities: dict[str, None] = {}  # by first occurrence
    relations: dict[str, None] = {}
    for file in files.values():
        for head, relation, tail in file.triples:
            entities[head] = None
            entities[tail] = None
            relations[relation] = None

    for names in (entities, relations):
        spellings: dict[str, str] = {}  # by the name with single spaces
        for name in names:
            first = spellings.setdefault(" ".join(name.split()), name)
            if first != name:
                place = _first_place(name, paths, files)
                spelled = f"{shorten(first)} and {shorten(name)}"
                raise ValueError(
                    f"{place}: expected one spelling, got {spelled}, which differ in white space"
                )


def _first_place(
    name: str, paths: dict[str, Path], files: dict[str, TripleFile]
) -> str:
    """FILE:LINE of the first triple that holds a name."""
    for split, file in files.items():
        for number, triple in enumerate(file.triples, file.first_line):
            if name in triple:
                return f"{paths[split]}:{number}"
    raise KeyError(name)
