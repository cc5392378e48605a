"""The metrics log of a run, metrics.jsonl: a first line with the format version, then one line for each update.

`truncate` makes a log ready to be continued, `append` adds the line of an update, and `read` returns all of them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from funcppo import atomic_io, tree
from funcppo.experiment import formats
from funcppo.train_step import Metrics

Row = dict[str, Any]  # numbers and texts of one update, by name


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


def append(path: Path, row: Row) -> None:
    """Add the line of one update."""
    with open(path, "a") as file:
        file.write(_to_line(row))


def read(path: Path) -> list[Row]:
    """Read the rows of a log, of this format version or an older one, under today's names.

    An unfinished last line is left out: the program ended while it was written.

    Raises:
      ValueError: a line is not a row, or a newer version of funcppo wrote the file.
    """
    version = 1
    rows = []
    for number, line in enumerate(
        path.read_text().splitlines(keepends=True), 1
    ):
        if not line.endswith("\n"):
            break
        row = _parse_row(f"{path}:{number}", line)
        if number == 1 and formats.FORMAT_KEY in row:
            version = formats.check_format(path, row[formats.FORMAT_KEY])
        else:
            rows.append(formats.upgrade_metrics(row) if version == 1 else row)
    return rows


def truncate(path: Path, last_update: int) -> None:
    """Make a log ready for the updates after a checkpoint: drop later rows, and translate an older format.

    Args:
      path: the log; it is created if it is missing.
      last_update: number of the last update in the checkpoint.
    """
    lines = [_to_line({formats.FORMAT_KEY: formats.FORMAT})]
    if path.exists():
        for row in read(path):
            if row["update"] <= last_update:
                lines.append(_to_line(row))
    text = "".join(lines)
    atomic_io.write_atomically(path, lambda file: file.write(text.encode()))


def _to_line(row: Row) -> str:
    """A row as JSON, which has no NaN: null stands for a number that is not finite."""
    finite_row = {
        name: None
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for name, value in row.items()
    }
    return json.dumps(finite_row) + "\n"


def _parse_row(place: str, line: str) -> Row:
    """A line as a row.

    Raises:
      ValueError: it is neither a row nor a first line.
    """
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{place}: expected a JSON object, got {error}"
        ) from None
    is_row = isinstance(row, dict) and (
        "update" in row or formats.FORMAT_KEY in row
    )
    if not is_row:
        raise ValueError(
            f"{place}: expected the metrics of an update, got {line.strip()[:60]}"
        )
    return row
