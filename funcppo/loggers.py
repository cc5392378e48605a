"""Metrics of a run for the tools that people track experiments with: CSV, TensorBoard, Weights & Biases.

`open_loggers` makes them from the run's metrics.jsonl, so that after a crash they hold what that holds; then each line
that is added there is logged too.
"""

from __future__ import annotations

import csv
import importlib
import inspect
import math
import numbers
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from funcppo.core import files
from funcppo.core.settings import FieldError

if TYPE_CHECKING:
    from funcppo.metrics_log import Row

LoggerName = Literal["jsonl", "csv", "tensorboard", "wandb"]
CSV_FILE = "metrics.csv"
TENSORBOARD_FOLDER = "tensorboard"
WANDB_FOLDER = "wandb"
WANDB_ID_FILE = "funcppo-id.txt"  # in the folder of W&B
WANDB_PROJECT = "funcppo"
WANDB_ACCOUNT = "an account of W&B (`wandb login`), or WANDB_MODE=offline"

# the package that a logger needs, which is an extra of the same name
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}


class MetricsLogger(Protocol):
    """Receives the lines of a metrics log."""

    def log(self, row: Row, /) -> None:
        """Receive the numbers and texts of one update."""
        ...

    def close(self) -> None:
        """Write what is held back."""
        ...


def check_loggers(names: Sequence[LoggerName]) -> None:
    """Check that the packages of some loggers are there, and W&B's account where it is online.

    Raises:
      FieldError: a name is unknown, a package is missing, or W&B has no account.
    """
    for name in names:
        if name not in get_args(LoggerName):
            expected = f"one of {', '.join(get_args(LoggerName))}"
            raise FieldError("log", expected, name)
        package = _PACKAGES.get(name)
        if package is None:
            continue
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            extra = f"the extra `{name}` (pip install 'funcppo[{name}]')"
            raise FieldError("log", extra, str(error)) from None
    if "wandb" in names and not _is_offline() and not _has_wandb_key():
        raise FieldError("log", WANDB_ACCOUNT, "none")


def _is_offline() -> bool:
    """Whether W&B is set to stay offline, by a variable or by `wandb offline`."""
    import wandb

    offline = ("offline", "dryrun", "disabled")
    mode = os.environ.get("WANDB_MODE") or wandb.setup().settings.mode
    return mode in offline


def _has_wandb_key() -> bool:
    """Whether W&B finds the key of an account; it is not asked whether the key is valid."""
    import wandb

    if "prompt" in inspect.signature(wandb.login).parameters:
        return wandb.login(prompt=False, verify=False)
    return wandb.api.api_key is not None


@contextmanager
def open_loggers(
    names: Sequence[LoggerName],
    folder: Path,
    rows: Sequence[Row],
    settings: Mapping[str, Any],
) -> Iterator[list[MetricsLogger]]:
    """Open loggers for the rest of a run, and close them at its end.

    Args:
      names: which; jsonl is metrics.jsonl itself and adds nothing.
      folder: of the run; receives metrics.csv, tensorboard/ and wandb/.
      rows: the lines of metrics.jsonl so far; without any the run is new, and its files take the place of older ones.
      settings: of the run, for W&B.

    Raises:
      FieldError: a name is unknown, a package is missing, or W&B has no account.
      OSError: a file cannot be written.
    """
    check_loggers(names)
    with ExitStack() as stack:
        loggers: list[MetricsLogger] = []
        for name in dict.fromkeys(names):
            if name == "jsonl":
                continue
            if name == "csv":
                logger: MetricsLogger = _CsvLogger(folder / CSV_FILE, rows)
            elif name == "tensorboard":
                logger = _TensorboardLogger(folder / TENSORBOARD_FOLDER, rows)
            else:
                logger = _WandbLogger(folder, rows, settings)
            stack.callback(logger.close)
            loggers.append(logger)
        yield loggers


class _CsvLogger:
    """One line an update; the file is written anew where a line has a column that it lacks."""

    def __init__(self, path: Path, rows: Sequence[Row]) -> None:
        self._path = path
        self._rows = [_csv_row(row) for row in rows]
        self._columns: list[str] = []
        self._rewrite()

    def log(self, row: Row, /) -> None:
        cells = _csv_row(row)
        self._rows.append(cells)
        if not cells.keys() <= set(self._columns):
            self._rewrite()
            return
        with (
            files.named_errors(self._path),
            open(self._path, "a", newline="", encoding="utf-8") as file,
        ):
            csv.DictWriter(file, self._columns).writerow(cells)

    def close(self) -> None:
        """Nothing is held back."""

    def _rewrite(self) -> None:
        names = (name for row in self._rows for name in row)
        self._columns = list(dict.fromkeys(("update", *names)))

        def write(file: Any) -> None:
            text = _EncodedFile(file)
            writer = csv.DictWriter(text, self._columns)
            writer.writeheader()
            writer.writerows(self._rows)

        files.write_atomically(self._path, write)


class _EncodedFile:
    """A binary file that takes text."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, text: str) -> None:
        self._file.write(text.encode())


class _TensorboardLogger:
    """Scalars of TensorBoard, under their names in metrics.jsonl."""

    def __init__(self, folder: Path, rows: Sequence[Row]) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        # Event files cannot be cut at an update, so all of them are written anew.
        with files.named_errors(folder):
            if folder.exists():
                shutil.rmtree(folder)
            self._writer = SummaryWriter(str(folder))
        for row in rows:
            self.log(row)

    def log(self, row: Row, /) -> None:
        for name, value in _scalars(row).items():
            self._writer.add_scalar(name, value, row["update"])

    def close(self) -> None:
        self._writer.close()


class _WandbLogger:
    """A run of Weights & Biases, online or offline as its own variables say (WANDB_MODE, WANDB_PROJECT)."""

    def __init__(
        self, folder: Path, rows: Sequence[Row], settings: Mapping[str, Any]
    ) -> None:
        import wandb

        id_file = folder / WANDB_FOLDER / WANDB_ID_FILE
        with files.named_errors(id_file):
            id_file.parent.mkdir(exist_ok=True)
            if not rows or not id_file.exists():
                id_file.write_text(secrets.token_hex(4))
            run_id = id_file.read_text()
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", WANDB_PROJECT),
                name=folder.name,
                dir=str(folder),
                config=dict(settings),
                id=run_id,
                resume="allow",
            )
        except wandb.Error as error:
            reason = " ".join(str(error).split())
            raise FieldError("log", WANDB_ACCOUNT, reason) from None

    def log(self, row: Row, /) -> None:
        self._run.log(_scalars(row), step=row["update"])

    def close(self) -> None:
        self._run.finish()


def _scalars(row: Row) -> dict[str, float]:
    """The finite numbers of a line."""
    return {
        name: float(value)
        for name, value in row.items()
        if name != "update"
        and isinstance(value, numbers.Real)
        and math.isfinite(value)
    }


def _csv_row(row: Row) -> dict[str, Any]:
    """A line of metrics.jsonl as cells; a number that is not finite is empty, as it is null there."""
    return {
        name: ""
        if value is None
        or (isinstance(value, float) and not math.isfinite(value))
        else value
        for name, value in row.items()
    }
