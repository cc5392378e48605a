"""What a command is asked about: a training run's folder, or a data set."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from funcppo.data import Dataset, load

if TYPE_CHECKING:
    from funcppo.logic.fixpoint import StepCallback

RUN_CONFIG_FILE = "config.json"  # what tells the folder of a run from that of a data set


def is_run_folder(target: str) -> bool:
    """Whether the target is the folder of a training run."""
    return (Path(target) / RUN_CONFIG_FILE).is_file()


def open_dataset(target: str, rules: str | None) -> Dataset:
    """The data set of a target, its notes told on standard error.

    Errors: ValueError, one line, for what is neither a run nor a data set, or rules that a run did not learn with.
    """
    if is_run_folder(target):
        from funcppo.experiment.training import read_config

        if rules is not None:
            raise ValueError(f"--rules {rules}: {target} is a trained run, want the rules that it learnt with")
        run = read_config(Path(target))
        target, rules = run.dataset, run.rules
    dataset = load(target, rules)
    for line in dataset.notes:
        print(f"note: {line}", file=sys.stderr)
    return dataset


@contextmanager
def fixpoint_progress() -> Iterator[StepCallback]:
    """A progress line of T_P on standard error, where that is a terminal."""
    from rich.console import Console

    with Console(stderr=True).status("reading") as status:
        yield lambda step, atoms, seconds: status.update(f"T_P step {step}: {atoms:,} atoms, {seconds:.1f} s")
