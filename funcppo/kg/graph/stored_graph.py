"""A data set as a folder of arrays, which every process of a host maps instead of reading.

`write` makes the folder, `read` opens it. `graph.json` names the arrays with their sizes, and is what makes a folder a
stored graph; the folder gets its name when all of it is on the disk.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from funcppo.core.files import named_errors, remove_stale_parts, sync_folder
from funcppo.kg.graph.dataset import Dataset, StoredParts
from funcppo.kg.graph.names import MappedNames, NameColumns, to_columns

MANIFEST = "graph.json"
# version of the folder's format
FORMAT = 1
_KIND = "funcppo index"
_FACT_TABLE = "index."  # before the names of the tables of the index
_NAMES = "entities."  # before the columns of names
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
        NameColumns(*(arrays[_NAMES + f] for f in NameColumns._fields))
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
    arrays = {_NAMES + field: array for field, array in names.items()}
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
