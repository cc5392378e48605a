"""Files to data sets: a folder of triples, a Prolog program, an embedded name."""

from __future__ import annotations

import gzip
import re
import zlib
from pathlib import Path
from typing import cast

from funcppo.data.clans import make_clans
from funcppo.data.dataset import Dataset, Triple, from_clauses, from_splits, with_rules
from funcppo.data.family_tree import make_family_tree
from funcppo.data.lexer import shorten
from funcppo.data.parser import has_variables
from funcppo.data.readers import detect_format, read_clauses

EMBEDDED_DIR = Path(__file__).parent / "embedded"
GENERATORS = {
    "family_tree": make_family_tree,
    "clans": make_clans,
}  # NAME:PEOPLE:SEED -> GENERATORS[NAME](PEOPLE, SEED)
_GENERATED = re.compile(rf"({'|'.join(GENERATORS)}):([0-9]{{1,9}}):([0-9]{{1,9}})")
_RULE_FILES = ("rules.txt", "rules.tsv", "rules.pl")


def load(name_or_path: str | Path, rules: str | Path | None = None, *, facts_only: bool = False) -> Dataset:
    """The data set of a folder, a `.pl` program or an embedded name, whole or not at all.

    A folder holds train.txt, valid.txt and test.txt (head<TAB>relation<TAB>tail), perhaps facts.txt (known, not
    trained on) and perhaps rules.txt, rules.tsv or rules.pl, the first of these that exists; each may end in .gz.

    Args:
      rules: a rule file to use in place of the data set's own rules.
      facts_only: of a folder read train.txt, which may be empty, and facts.txt alone.
    Errors: ValueError, one line naming file and line, what was expected and what was found.
    """
    path = Path(name_or_path)
    embedded = EMBEDDED_DIR / str(name_or_path)
    if path.is_dir():
        dataset = _facts(path) if facts_only else _folder(path, default_rules=rules is None)
    elif path.name.endswith((".pl", ".pl.gz")):
        dataset = from_clauses(path.name, read_clauses(_text(path), str(path), "Prolog"), str(path))
    elif str(name_or_path).isidentifier() and embedded.is_dir():
        dataset = _folder(embedded, default_rules=rules is None)
    elif match := _GENERATED.fullmatch(str(name_or_path)):
        generator, n_people, seed = match.groups()
        dataset = GENERATORS[generator](int(n_people), int(seed))
    else:
        folders = sorted(p.name for p in EMBEDDED_DIR.glob("*") if p.is_dir())
        names = [*folders, *(f"{generator}:PEOPLE:SEED" for generator in GENERATORS)]
        problem = f"want a folder, a .pl file or one of {', '.join(names)}"
        raise ValueError(f"unknown data set {shorten(str(name_or_path))}: {problem}")
    return dataset if rules is None else _with_rule_file(dataset, Path(rules))


def from_text(program: str, name: str = "program") -> Dataset:
    """The data set of a Prolog program held in memory; errors as for a file of that name."""
    return from_clauses(name, read_clauses(program, name, "Prolog"), name)


def from_triples(
    train: list[Triple], valid: list[Triple] | None = None, test: list[Triple] | None = None, rules: str = ""
) -> Dataset:
    """The data set of triples held in memory, and rules in any format; errors as for files."""
    dataset = from_splits("triples", {"train": train, "valid": valid or [], "test": test or []})
    return with_rules(dataset, read_clauses(rules, "rules", detect_format(rules)), "rules") if rules else dataset


def _folder(folder: Path, *, default_rules: bool) -> Dataset:
    paths = {split: _existing(folder / f"{split}.txt") for split in ("train", "valid", "test")}
    dataset = _split(folder, paths)
    found = next((p for name in _RULE_FILES if (p := _variant(folder / name))), None)
    return _with_rule_file(dataset, found) if found and default_rules else dataset


def _facts(folder: Path) -> Dataset:
    return _split(folder, {"train": _existing(folder / "train.txt")}, may_be_empty="train")


def _split(folder: Path, paths: dict[str, Path], may_be_empty: str = "") -> Dataset:
    extra = _variant(folder / "facts.txt")
    paths = paths | ({"facts": extra} if extra else {})
    splits = {split: _triples(path, split == may_be_empty) for split, path in paths.items()}
    _check_spelling(paths, splits)
    return from_splits(folder.name, {"train": [], "valid": [], "test": []} | splits)


def _with_rule_file(dataset: Dataset, path: Path) -> Dataset:
    text = _text(path)
    form = "Prolog" if path.name.endswith((".pl", ".pl.gz")) else detect_format(text)
    clauses = read_clauses(text, str(path), form)
    for clause in clauses:
        if not clause.body and not has_variables(clause.head):
            raise ValueError(f"{path}:{clause.line}: as {form}: want rules with a body: facts belong in facts.txt")
    return with_rules(dataset, clauses, str(path))


def _variant(path: Path) -> Path | None:
    """The file or its .gz, whichever exists."""
    found = [p for p in (path, path.with_name(path.name + ".gz")) if p.exists()]
    if len(found) > 1:
        raise ValueError(f"{path}: want one of it and {found[1].name}, got both")
    return found[0] if found else None


def _existing(path: Path) -> Path:
    found = _variant(path)
    if found is None:
        raise ValueError(f"{path}: missing split: want this file or {path.name}.gz")
    return found


def _text(path: Path) -> str:
    """The file as text, unpacked, without a byte order mark, lines ended by \\n."""
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: want UTF-8, got byte 0x{error.object[error.start]:02x}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ValueError(f"{path}: want a whole gzip file") from None
    except OSError as error:
        raise ValueError(f"{path}: want a file that can be read: {error.strerror}") from None


def _triples(path: Path, may_be_empty: bool) -> list[Triple]:
    text = _text(path)
    if may_be_empty and not text.strip():
        return []
    lines = text.rstrip("\n").split("\n")
    if lines == [""]:
        raise ValueError(f"{path}: empty: want lines of head<TAB>relation<TAB>tail")
    rows = [cast(Triple, tuple(line.split("\t"))) for line in lines]
    for at, row in enumerate(rows, 1):
        if len(row) != 3 or not all(row):
            got = f"{len(row)}" if len(row) != 3 else "an empty one"
            problem = f"want 3 columns head<TAB>relation<TAB>tail, got {got}"
            raise ValueError(f"{path}:{at}: {problem}, in {shorten(lines[at - 1])}")
    return rows


def _check_spelling(paths: dict[str, Path], splits: dict[str, list[Triple]]) -> None:
    """Errors: ValueError when two entities, or two relations, differ in white space only."""
    names = [dict.fromkeys(t for rows in splits.values() for row in rows for t in (row[0], row[2]))]
    names += [dict.fromkeys(row[1] for rows in splits.values() for row in rows)]
    for distinct in names:
        spellings: dict[str, str] = {}
        for name in distinct:
            other = spellings.setdefault(" ".join(name.split()), name)
            if other != name:
                places = ((s, at) for s, rows in splits.items() for at, row in enumerate(rows, 1) if name in row)
                split, at = next(places)
                problem = f"want one spelling, got {shorten(other)} and {shorten(name)}, which differ in white space"
                raise ValueError(f"{paths[split]}:{at}: {problem}")
