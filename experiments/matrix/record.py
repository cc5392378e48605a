"""The JSON file of one PyTorch version on one kind of device: where it lies, what may be skipped, what changed."""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import json
import os
import platform
import tokenize
from pathlib import Path
from typing import Any

import torch

from experiments import paths
from experiments.matrix import polyfills, problem
from experiments.matrix.measure import TOLERANCE, parity_ok
from experiments.matrix.registry import Cell, Way
from experiments.provenance import cpu_model

RESULTS = paths.RESULTS
COMPARED = ("status", "graphs", "parity_ok")
MATHS = (
    "losses",
    "optim",
    "tree",
    "nets.base",
    "nets.feedforward",
)  # what of the library decides how a cell ends

LOSS_ONLY = (
    "0/loss compiled",
    "6/as written",
    "6/the same",
    "7/as written",
    "8/as written",
    "9/as written",
    "10/as written",
    "11/as written",
    "I/the wrapped loss",
    "I/the compiled loss",
)
NETWORK_ONLY = "I/AOTInductor package of the network"


def path(folder: Path, version: str, device: str) -> Path:
    """As in full_step_matrix-2.13.0-cpu.json; a GPU's name is one word."""
    kind = device.lower().removeprefix("nvidia ").replace(" ", "-")
    return folder / f"full_step_matrix-{version.split('+')[0]}-{kind}.json"


def device() -> str:
    """cpu, or the GPU's name."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def empty() -> dict[str, Any]:
    """A record without cells, and what all its cells share."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device(),
        "processor": cpu_model(),
        "seed": 0,
        "threads": 1,
        "shape": {
            "obs": problem.SIZE.obs,
            "hidden": [problem.SIZE.hidden],
            "actions": problem.SIZE.actions,
            "rows": problem.SIZE.rows,
        },
        "tolerance": {
            str(dtype).removeprefix("torch."): value
            for dtype, value in TOLERANCE.items()
        },
        "cells": {},
    }


def load(file: Path) -> dict[str, Any]:
    """A record; an empty one where there is no file."""
    return json.loads(file.read_text()) if file.exists() else empty()


def resumed(file: Path) -> dict[str, Any]:
    """A record to complete; ValueError when another machine, or another Python, made it."""
    found, here = load(file), empty()
    differs = [
        key for key in here if key != "cells" and found[key] != here[key]
    ]
    if differs:
        were = ", ".join(
            f"{key} {found[key]}, here {here[key]}" for key in differs
        )
        raise ValueError(
            f"{file} is of another machine ({were}); choose another folder by --out"
        )
    return found


def holds(record: dict[str, Any], cell: Cell) -> bool:
    """Whether a record has a cell as its code is now."""
    return record["cells"].get(cell.id, {}).get("source") == source(cell.way)


def save(file: Path, record: dict[str, Any]) -> None:
    """Write a record whole or not at all."""
    part = file.with_suffix(".part")
    part.write_text(
        json.dumps(
            {**record, "cells": dict(sorted(record["cells"].items()))}, indent=1
        )
        + "\n"
    )
    os.replace(part, file)


def describe(cell: Cell) -> dict[str, str]:
    """What a cell is; `compiles` says what its graphs hold (there are ways that compile the loss alone), `source` which
    code it ran."""
    way = cell.way
    return {
        "approach": way.approach,
        "title": way.title,
        "variant": way.variant,
        "backend": cell.backend,
        "mode": cell.mode,
        "compiles": "loss"
        if cell.id.startswith(LOSS_ONLY)
        else "network"
        if cell.id.startswith(NETWORK_ONLY)
        else "step"
        if way.compiled
        else "nothing",
        "source": source(way),
    }


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """One line for each cell, in both records, that does not end as it did; times are not compared."""
    lines = []
    for name in sorted(old["cells"].keys() & new["cells"].keys()):
        before, after = (
            _outcome(record["cells"][name]) for record in (old, new)
        )
        if before != after:
            lines.append(f"{name}: {_words(before)} -> {_words(after)}")
    return lines


def _outcome(cell: dict[str, Any]) -> tuple[Any, ...]:
    filled = {**cell, "parity_ok": parity_ok(cell)}
    return tuple(filled.get(key) for key in COMPARED)


def _words(outcome: tuple[Any, ...]) -> str:
    return ", ".join(f"{key} {value}" for key, value in zip(COMPARED, outcome))


def source(way: Way) -> str:
    """A hash of the code that a cell runs, docstrings apart: with another one it is run again."""
    files = {_file(f"funcppo.{name}") for name in MATHS}
    files |= _closure(_file(way.build.__module__)) | _closure(
        _file("experiments.matrix.measure")
    )
    files -= {
        _file("experiments.matrix.causes")
    }  # it tells exceptions apart, and makes none
    files |= {_file(polyfills.__name__)} if polyfills.needed() else set()
    return hashlib.sha256(
        "".join(_code(file) for file in sorted(files)).encode()
    ).hexdigest()[:12]


@functools.cache
def _code(file: str) -> str:
    """The lines of a file without comments and docstrings: as text, which every version of Python cuts alike."""
    text = Path(file).read_text()
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]

    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and ast.get_docstring(node) is not None
        ):
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            for row in range(docstring.lineno, docstring.end_lineno + 1):
                lines[row - 1] = ""
    stripped = [line.rstrip() for line in lines]
    return "\n".join(line for line in stripped if line)


def _file(module: str) -> str:
    """The file of a module of the project; empty for others."""
    stem = paths.ROOT / module.replace(".", "/")
    candidates = (stem.with_suffix(".py"), stem / "__init__.py")
    return next((str(file) for file in candidates if file.exists()), "")


@functools.cache
def _closure(file: str) -> frozenset[str]:
    """A file and all files of the matrix that it imports."""
    seen, todo = set(), [file]
    while todo:
        current = todo.pop()
        if current and current not in seen:
            seen.add(current)
            todo += [_file(name) for name in _imports(current)]
    return frozenset(seen)


def _imports(file: str) -> list[str]:
    nodes = [
        node
        for node in ast.walk(ast.parse(Path(file).read_text()))
        if isinstance(node, ast.ImportFrom)
    ]
    names = [
        name
        for n in nodes
        if n.module
        for name in (n.module, *(f"{n.module}.{a.name}" for a in n.names))
    ]
    return [name for name in names if name.startswith("experiments.")]
