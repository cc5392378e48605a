"""Data sets from files, from memory, and by name.

`load` reads a folder of triples, a Prolog program, or one of the data sets that come with the package: embedded
(`countries_s1`) or generated (`clans:1500:0`). `from_text` and `from_triples` take what is in memory.
"""

from __future__ import annotations

import gzip
import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from funcppo.data.clans import make_clans
from funcppo.data.dataset import (
    Dataset,
    Triple,
    from_clauses,
    from_splits,
    with_rules,
)
from funcppo.data.family_tree import make_family_tree
from funcppo.data.lexer import shorten
from funcppo.data.parser import has_variables
from funcppo.data.readers import detect_format, read_clauses


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
) -> Dataset:
    """The data set of a folder, a `.pl` program, or an embedded or generated name; whole or not at all.

    A folder holds train.txt, valid.txt and test.txt (head<TAB>relation<TAB>tail), perhaps facts.txt (known, not
    trained on) and perhaps rules.txt, rules.tsv or rules.pl, the first of these that exists; each may end in .gz.

    Args:
      name_or_path: path of a folder or program, an embedded name, or `family_tree:PEOPLE:SEED`, `clans:PEOPLE:SEED`.
      rules: a rule file to use in place of the data set's own rules.
      facts_only: of a folder read only train.txt, which may be empty, and facts.txt.

    Raises:
      ValueError: the data set does not exist or a file is wrong. The message is one line with file and line number,
        what was expected and what was read.
    """
    path = Path(name_or_path)
    name = str(name_or_path)
    embedded = EMBEDDED_DIR / name
    generated = _GENERATED_NAME.fullmatch(name)

    if path.is_dir() and facts_only:
        dataset = _load_known_facts(path)
    elif path.is_dir():
        dataset = _load_folder(path, with_own_rules=rules is None)
    elif path.name.endswith(_PROLOG_SUFFIXES):
        dataset = _load_program(path)
    elif name.isidentifier() and embedded.is_dir():
        dataset = _load_folder(embedded, with_own_rules=rules is None)
    elif generated:
        generator, n_people, seed = generated.groups()
        dataset = GENERATORS[generator](int(n_people), int(seed))
    else:
        names = ", ".join(_names_of_datasets())
        raise ValueError(
            f"unknown data set {shorten(name)}: expected a folder, a .pl file or one of {names}"
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


def _load_folder(folder: Path, *, with_own_rules: bool) -> Dataset:
    """The data set of a folder, with the first of its rule files."""
    paths: dict[str, Path] = {}
    for split in ("train", "valid", "test"):
        paths[split] = _require_file(folder / f"{split}.txt")
    dataset = _load_splits(folder, paths)

    rule_path = _find_rule_file(folder)
    if rule_path is None or not with_own_rules:
        return dataset
    return _with_rule_file(dataset, rule_path)


def _load_program(path: Path) -> Dataset:
    """The data set of a Prolog program."""
    return _read_program(_read_text(path), path.name, str(path))


def _read_program(program: str, name: str, path: str) -> Dataset:
    """The data set of the text of a Prolog program."""
    clauses, notes = read_clauses(program, path, "Prolog")
    return _with_notes(from_clauses(name, clauses, path), notes)


def _with_notes(dataset: Dataset, notes: list[str]) -> Dataset:
    """The data set with further notes."""
    return replace(dataset, notes=(*dataset.notes, *notes))


def _load_known_facts(folder: Path) -> Dataset:
    """The data set of train.txt, which may be empty, and facts.txt."""
    train_path = _require_file(folder / "train.txt")
    return _load_splits(folder, {"train": train_path}, may_be_empty="train")


def _load_splits(
    folder: Path, paths: dict[str, Path], may_be_empty: str = ""
) -> Dataset:
    """The data set of the files of some splits, and of facts.txt if it exists.

    Args:
      folder: where facts.txt may be; its name is that of the data set.
      paths: file of each split.
      may_be_empty: the split whose file may be empty; "" for none.
    """
    paths = dict(paths)
    facts_path = _find_file(folder / "facts.txt")
    if facts_path:
        paths["facts"] = facts_path

    splits: dict[str, list[Triple]] = {}
    for split, path in paths.items():
        is_optional = split == may_be_empty
        splits[split] = _read_triples(path, may_be_empty=is_optional)
    _check_spelling(paths, splits)

    no_triples: dict[str, list[Triple]] = {"train": [], "valid": [], "test": []}
    return from_splits(folder.name, no_triples | splits)


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
    return _with_notes(with_rules(dataset, clauses, str(path)), notes)


def _find_file(path: Path) -> Path | None:
    """The file or its .gz, whichever exists; None if neither does. It is an error if both do."""
    packed = path.with_name(path.name + ".gz")
    if path.exists() and packed.exists():
        raise ValueError(
            f"{path}: expected one of it and {packed.name}, got both"
        )
    if path.exists():
        return path
    return packed if packed.exists() else None


def _find_rule_file(folder: Path) -> Path | None:
    """The first rule file that the folder holds; None if it holds none."""
    for name in _RULE_FILES:
        path = _find_file(folder / name)
        if path:
            return path
    return None


def _require_file(path: Path) -> Path:
    """The file of a split or its .gz, whichever exists; it is an error if neither does."""
    existing = _find_file(path)
    if existing is None:
        raise ValueError(
            f"{path}: missing split: expected this file or {path.name}.gz"
        )
    return existing


def _read_text(path: Path) -> str:
    """The file as text, unpacked, without a byte order mark, lines ended by \\n."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        return content.decode("utf-8-sig").replace("\r\n", "\n")
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


def _read_triples(path: Path, *, may_be_empty: bool) -> list[Triple]:
    """The triples of a file, one a line."""
    text = _read_text(path)
    if may_be_empty and not text.strip():
        return []

    lines = text.rstrip("\n").split("\n")
    if lines == [""]:
        raise ValueError(f"{path}: empty: expected lines of {_TRIPLE_COLUMNS}")

    triples: list[Triple] = []
    for number, line in enumerate(lines, 1):
        columns = line.split("\t")
        if len(columns) != 3 or not all(columns):
            problem = "an empty one" if len(columns) == 3 else str(len(columns))
            place = f"{path}:{number}"
            raise ValueError(
                f"{place}: expected 3 columns {_TRIPLE_COLUMNS}, got {problem}, in {shorten(line)}"
            )
        head, relation, tail = columns
        triples.append((head, relation, tail))
    return triples


def _check_spelling(
    paths: dict[str, Path], splits: dict[str, list[Triple]]
) -> None:
    """Check that no two entities, and no two relations, differ in white space only.

    Raises:
      ValueError: two do; names the file and line of the second.
    """
    entities: dict[str, None] = {}  # by first occurrence
    relations: dict[str, None] = {}
    for rows in splits.values():
        for head, relation, tail in rows:
            entities[head] = None
            entities[tail] = None
            relations[relation] = None

    for names in (entities, relations):
        spellings: dict[str, str] = {}  # by the name with single spaces
        for name in names:
            first = spellings.setdefault(" ".join(name.split()), name)
            if first != name:
                place = _first_place(name, paths, splits)
                spelled = f"{shorten(first)} and {shorten(name)}"
                raise ValueError(
                    f"{place}: expected one spelling, got {spelled}, which differ in white space"
                )


def _first_place(
    name: str, paths: dict[str, Path], splits: dict[str, list[Triple]]
) -> str:
    """FILE:LINE of the first triple that holds a name."""
    for split, rows in splits.items():
        for number, row in enumerate(rows, 1):
            if name in row:
                return f"{paths[split]}:{number}"
    raise KeyError(name)
