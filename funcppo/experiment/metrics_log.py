"""What a run writes down as it goes: `metrics.jsonl`, a line an update."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from funcppo import atomic_io, tree
from funcppo.train_step import Metrics


def to_scalars(metrics: Metrics) -> dict[str, float]:
    """The metrics of one update as numbers; the device is waited for once."""
    numbers: Any = tree.unflatten(metrics, torch.stack(tree.leaves(metrics)).tolist())
    rollout, n = numbers.rollout, max(numbers.rollout.n_episodes, 1.0)
    means = {"return": rollout.episode_return_sum / n, "length": rollout.episode_length_sum / n}
    rest = {name: getattr(numbers, name) for name in ("grad_norm", "learning_rate", "n_nonfinite_minibatches")}
    loss = {name: number for name, number in numbers.loss._asdict().items() if number != ()}
    return {"episodes": rollout.n_episodes} | means | loss | rest


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a line."""
    with open(path, "a") as file:
        file.write(json.dumps(row) + "\n")


def truncate(path: Path, last_update: int) -> None:
    """Drop the rows after the checkpoint that a resumed run starts from."""
    if path.exists():
        rows = [line for line in path.read_text().splitlines() if line and json.loads(line)["update"] <= last_update]
        atomic_io.write_atomically(path, lambda file: file.write("".join(r + "\n" for r in rows).encode()))
