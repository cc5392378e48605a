"""The JSON file of one PyTorch version on one kind of device: where it lies, what may be skipped, what changed."""

import json
import platform
from pathlib import Path
from typing import Any

import torch

from experiments import paths
from experiments.matrix import problem
from experiments.matrix.measure import TOLERANCE, parity_ok
from experiments.matrix.registry import Cell
from experiments.provenance import cpu_model
from funcppo.core.files import write_atomically

RESULTS = paths.RESULTS
COMPARED = ("status", "graphs", "parity_ok")
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
    "I/scan in the compiled loss",
    "I/two backward() of the compiled loss",
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


def holds(record: dict[str, Any], cell: Cell, commit: str) -> bool:
    """Whether a record has a cell that this commit ran."""
    return record["cells"].get(cell.id, {}).get("commit") == commit


def save(file: Path, record: dict[str, Any]) -> None:
    """Write a record whole or not at all."""
    whole = {**record, "cells": dict(sorted(record["cells"].items()))}
    text = json.dumps(whole, indent=1) + "\n"
    write_atomically(file, lambda part: part.write(text.encode()))


def describe(cell: Cell) -> dict[str, str]:
    """What a cell is; `compiles` says what its graphs hold: there are ways that compile the loss alone."""
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
