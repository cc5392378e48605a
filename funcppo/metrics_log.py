"""The metrics log of a run, metrics.jsonl: a first line with the format version, then one line for each update.

`truncate` makes a log ready to be continued, `append` adds the line of an update, and `read` returns all of them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from funcppo.core import files, tree
from funcppo.core.files import Json, shorten
from funcppo.runtime.compile import StrategyRecord
from funcppo.train_step import Metrics
from funcppo.version import VERSION

Row = Json  # numbers and texts of one update, by name


def to_scalars(metrics: Metrics) -> dict[str, float]:
    """The metrics of one update as Python numbers, with one wait for the device.

    Returns:
      n_episodes, episode_return, episode_length: number of episodes that ended, and the means over them.
      n_truncated_episodes, explained_variance: as in `RolloutMetrics`.
      loss, policy_loss, ...: as in `LossMetrics`, NaN if no minibatch was applied; dropped_fraction only if the
        capacity is limited.
      grad_norm, learning_rate, n_applied_minibatches, n_nonfinite_minibatches: as in `Metrics`.
    """
    values = torch.stack(tree.leaves(metrics)).tolist()
    numbers: Any = tree.unflatten(metrics, values)
    rollout = numbers.rollout
    # without an episode the sums are 0, and so are the means
    n_episodes = max(rollout.n_episodes, 1.0)
    scalars = {
        "n_episodes": rollout.n_episodes,
        "episode_return": rollout.episode_return_sum / n_episodes,
        "episode_length": rollout.episode_length_sum / n_episodes,
        "n_truncated_episodes": rollout.n_truncated_episodes,
        "explained_variance": rollout.explained_variance,
    }
    for name, number in numbers.loss._asdict().items():
        is_measured = number != ()
        if is_measured:
            scalars[name] = number
    for name in (
        "grad_norm",
        "learning_rate",
        "n_applied_minibatches",
        "n_nonfinite_minibatches",
    ):
        scalars[name] = getattr(numbers, name)
    return scalars


def append(path: Path, *rows: Row) -> None:
    """Add the line of one update, or its lines.

    Raises:
      OSError: names the file, which may hold a part of the line: `truncate` removes it.
    """
    with files.named_errors(path), open(path, "ab") as file:
        file.write(b"".join(_to_line(row) for row in rows))


def mean_over_seeds(rows: Sequence[Row]) -> list[Row]:
    """One row an update, with the means of its rows of several seeds; other rows stay as they are.

    Numbers that are not finite, and those that a row lacks, are left out of a mean.
    """
    by_update: dict[int, list[Row]] = {}
    for row in rows:
        by_update.setdefault(row["update"], []).append(row)
    return [_mean_row(group) for group in by_update.values()]


def _mean_row(rows: list[Row]) -> Row:
    """The mean of the rows of an update."""
    if "seed" not in rows[0]:
        return rows[0]
    mean: Row = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if row.get(name) is not None]
        finite = [value for value in values if math.isfinite(value)]
        mean[name] = sum(finite) / len(finite) if finite else math.nan
    del mean["seed"]
    return mean | {"update": rows[0]["update"]}


def is_row(value: object) -> bool:
    """Whether a value of JSON is the row of an update."""
    return isinstance(value, dict) and isinstance(value.get("update"), int)


def read(path: Path) -> list[Row]:
    """Read the rows of a log.

    An unfinished last line is left out: the program ended while it was written.

    Raises:
      ValueError: a line is not a row, or another version of funcppo wrote the file. Names the file and the line.
    """
    rows: list[Row] = []
    *lines, _ = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        place = f"{path}:{number}"
        row = files.parse_object(place, line)
        if number == 1:
            files.check_format(path, row.get(files.FORMAT_KEY))
            continue
        if not is_row(row):
            shown = shorten(line.decode(errors="replace"))
            raise ValueError(
                f"{place}: expected the metrics of an update, got {shown}"
            )
        rows.append(row)
    return rows


def read_header(path: Path) -> Json:
    """Read what the first line of a log says beside its format; nothing where there is no log or no such line."""
    if not path.exists():
        return {}
    first, *others = path.read_bytes().split(b"\n")
    row = files.parse_object(f"{path}:1", first) if others else {}
    if files.FORMAT_KEY not in row:
        return {}
    return {
        name: value for name, value in row.items() if name != files.FORMAT_KEY
    }


def package_versions() -> Json:
    """The versions that the last bits of a result depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "funcppo": VERSION,
    }


def run_header(record: StrategyRecord | None) -> Json:
    """What the first line of a log says of the updates after it: how they are made, and the versions.

    Args:
      record: how the step is run; None where it is eager, and no strategy was chosen.
    """
    return {
        "strategy": record and dataclasses.asdict(record),
        "versions": package_versions(),
    }


def truncate(
    path: Path, last_update: int, header: Json | None = None
) -> list[str]:
    """Make a log ready for the updates after a checkpoint: drop later rows, and translate an older format.

    Args:
      path: the log; it is created if it is missing.
      last_update: number of the last update in the checkpoint.
      header: what the first line says beside the format; None for what it says already.

    Returns:
      A note if the last line was unfinished, and one if updates up to the checkpoint have no line.
    """
    header = read_header(path) if header is None else header
    kept = [_to_line({files.FORMAT_KEY: files.FORMAT, **header})]
    notes = []
    logged: set[int] = set()
    if path.exists():
        for row in read(path):
            if row["update"] <= last_update:
                kept.append(_to_line(row))
                logged.add(row["update"])
        *lines, unfinished = path.read_bytes().split(b"\n")
        if unfinished:
            notes.append(f"{path}:{len(lines) + 1}: unfinished line dropped")

    n_missing = last_update - len(logged - {0})
    if n_missing > 0:
        notes.append(
            f"{path}: {n_missing} of the updates 1 to {last_update} have no line"
        )
    files.write_atomically(path, lambda file: file.write(b"".join(kept)))
    return notes


def _to_line(row: Row) -> bytes:
    """A row as JSON, which has no NaN: null stands for a number that is not finite."""
    finite_row = {
        name: None
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for name, value in row.items()
    }
    return json.dumps(finite_row).encode() + b"\n"
