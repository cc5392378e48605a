"""The subject of a command: the folder of a training run, or a data set."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from funcppo.cli.common import set_threads
from funcppo.cli.console import make_console, show_status
from funcppo.core.settings import CONFIG_FILE, METRICS_FILE
from funcppo.kg.graph.config import DEFAULT_CONFIG, DataConfig
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.loaders import is_stored_graph, load
from funcppo.kg.run.config import RESULTS_FILE, RUN_FILES, read_config

if TYPE_CHECKING:
    from funcppo.kg.logic.fixpoint import StepCallback


# Files of a data set in a folder, in any format.
_DATA_FILE = re.compile(r"(train|valid|test|facts|rules)\.")


def is_run_folder(target: str) -> bool:
    """Whether the target is the folder of a training run: only such a folder holds a config.json."""
    return (Path(target) / CONFIG_FILE).is_file()


def debug_files(run_folder: Path) -> list[Path]:
    """Files of a run to attach to a report of a bug."""
    names = (CONFIG_FILE, METRICS_FILE, RESULTS_FILE)
    return [run_folder / name for name in names]


def open_dataset(
    target: str, rules: str | None, cfg: DataConfig = DEFAULT_CONFIG
) -> Dataset:
    """Load the data set of a target, showing so on standard error.

    Args:
      target: folder of a training run, embedded name, folder or file of a data set.
      rules: rule file to use instead of the data set's own; None for the latter.
      cfg: how files of triples are read and split.

    Returns:
      The data set; for a run, the one that it was trained on, with the rules that it was trained with.

    Raises:
      ValueError: the target is neither a run nor a data set, or `rules` or `cfg` are given for a run.
    """
    status = show_status(make_console(use_stderr=True), "reading data")
    if not is_run_folder(target):
        with status:
            return load(target, rules, cfg=cfg)

    check_read_as_trained(target, cfg)
    if rules is not None:
        raise ValueError(
            f"--rules {rules}: {target} is a trained run, expected the rules it was trained with"
        )
    from funcppo.kg.run.run_build import load_dataset_of

    folder = Path(target)
    with status:
        return load_dataset_of(read_config(folder), folder)


def check_read_as_trained(run_folder: str, cfg: DataConfig) -> None:
    """Raise ValueError if options ask to read the data of a run in a way of their own."""
    if cfg != DEFAULT_CONFIG:
        options = "--columns, --split-ratios, --split-seed"
        raise ValueError(
            f"{options}: {run_folder} is a trained run, which reads its data as in training"
        )


def print_notes_to_stderr(notes: Iterable[str]) -> None:
    """Print notes, one a line, where they do not mix with a result, and after what has been printed of it."""
    sys.stdout.flush()
    for line in notes:
        print(f"note: {line}", file=sys.stderr)


def set_target_threads(target: str, n_threads: int | None) -> None:
    """Set how many CPU threads an operation uses.

    Args:
      target: folder of a training run, name, folder or file of a data set.
      n_threads: as set; None for as many as the run was trained with, or 1 for a data set.

    Raises:
      ValueError: the config of a run is damaged.
    """
    if n_threads is None:
        is_run = is_run_folder(target)
        n_threads = read_config(Path(target)).threads if is_run else 1
    set_threads(n_threads)


def data_files(target: str, rules: str | None = None) -> list[Path]:
    """Return the files of a target that an output must not overwrite; names of embedded data sets have none.

    Args:
      target: folder of a training run, name, folder or file of a data set.
      rules: rule file that is read in place of the data set's own; None for none.

    Raises:
      ValueError: the config of a run is damaged.
    """
    path = Path(target)
    files = [] if rules is None else [Path(rules)]
    if is_run_folder(target):
        run_config = read_config(path)
        files += [path / name for name in RUN_FILES]
        return files + data_files(run_config.dataset, run_config.rules)
    if is_stored_graph(path):
        return files + [file for file in path.iterdir() if file.is_file()]
    if path.is_dir():
        return files + [
            file for file in path.iterdir() if _DATA_FILE.match(file.name)
        ]
    return [*files, path] if path.is_file() else files


@contextmanager
def fixpoint_progress() -> Iterator[StepCallback]:
    """Show the steps of T_P on standard error.

    Returns:
      A context that yields the function to call before each step and after each of its rules.
    """
    with show_status(make_console(use_stderr=True), "reading") as status:

        def show_step(
            step: int, n_atoms: int, n_done: int, n_rules: int
        ) -> None:
            status.update(
                f"T_P step {step + 1}, from {n_atoms:,} atoms", n_done, n_rules
            )

        yield show_step
