"""The metrics log of a run, metrics.jsonl, and the same rows for CSV, TensorBoard, Weights & Biases and MLflow.

metrics.jsonl has a first line with the format version, then one line for each update: `truncate` makes it ready to be
continued, `append` adds the line of an update, `read` returns all of them. `open_loggers` makes the other logs from it,
so that after a crash they hold what it holds; then each row is logged there too. This module imports PyTorch when it
is needed, so that the help of a program does not wait for it.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import logging
import math
import numbers
import os
import platform
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from funcppo.core import VERSION, files
from funcppo.core.files import Json, shorten
from funcppo.core.host import import_extra
from funcppo.core.settings import METRICS_FILE, FieldError, check_value

if TYPE_CHECKING:
    from funcppo.runtime.compile import StrategyRecord
    from funcppo.train_step import Metrics


Row = Json  # numbers and texts of one update, by name
LoggerName = Literal["csv", "tensorboard", "wandb", "mlflow"]
LogFn: TypeAlias = Callable[[Row], None]
CSV_FILE = "metrics.csv"
TENSORBOARD_FOLDER = "tensorboard"
EVENTS_SUFFIX = ".funcppo"  # of event files, by which the next start knows them
_OWN_EVENTS = f"*tfevents*{EVENTS_SUFFIX}"
# Causes of rows that are left out, which the notes of a run count.
_NOT_LOGGED = (
    "n_nonfinite_observations",
    "n_nonfinite_rewards",
    "n_empty_masks",
)
_WANDB_ACCOUNT = "an account of W&B (`wandb login`), or WANDB_MODE=offline"


def to_scalars(metrics: Metrics) -> dict[str, float]:
    """Return the metrics of one update as Python numbers by name, with one wait for the device.

    Returns:
      n_episodes, episode_return, episode_length: number of episodes that ended, and the means over them.
      n_truncated_episodes, explained_variance: as in `RolloutMetrics`.
      loss, policy_loss, ...: as in `LossMetrics`, NaN if no minibatch was applied; dropped_fraction only if the
        capacity is limited.
      grad_norm, learning_rate, n_applied_minibatches, n_nonfinite_minibatches: as in `Metrics`.

    Raises:
      ValueError: a measure of a loss of the user's has the name of another metric.
    """
    import torch

    from funcppo.core import tree

    values = torch.stack(tree.leaves(metrics)).tolist()
    names = [path.rpartition(".")[2] for path in tree.paths(metrics)]
    scalars: dict[str, float] = dict(zip(names, values))
    twice = [name for name in scalars if names.count(name) > 1]
    if twice:
        raise ValueError(
            f"loss: extra: expected names that no other metric has, got {twice[0]}"
        )
    # without an episode the sums are 0, and so are the means
    n_episodes = max(scalars["n_episodes"], 1.0)
    for name in ("episode_return", "episode_length"):
        scalars[name] = scalars.pop(f"{name}_sum") / n_episodes
    for name in _NOT_LOGGED:
        del scalars[name]
    return scalars


def append(path: Path, *rows: Row) -> None:
    """Append the rows of one update to a log file, one line each.

    Raises:
      OSError: names the file, which may hold a part of the line: `truncate` removes it.
    """
    with files.named_errors(path), open(path, "ab") as file:
        file.write(b"".join(_to_line(row) for row in rows))


def mean_over_seeds(rows: Sequence[Row]) -> list[Row]:
    """Average the rows of several seeds update by update; return one row for each update.
    Rows without a seed stay as they are.

    Numbers that are not finite, and those that a row lacks, are left out of a mean.
    """
    by_update: dict[int, list[Row]] = {}
    for row in rows:
        by_update.setdefault(row["update"], []).append(row)
    return [_mean_row(group) for group in by_update.values()]


def _mean_row(rows: list[Row]) -> Row:
    """Average the rows of one update over seeds; a metric without a finite value becomes NaN."""
    if "seed" not in rows[0]:
        return rows[0]
    mean: Row = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if row.get(name) is not None]
        finite = list(filter(math.isfinite, values))
        mean[name] = sum(finite) / len(finite) if finite else math.nan
    del mean["seed"]
    return mean | {"update": rows[0]["update"]}


def is_row(value: object) -> bool:
    """Check whether a JSON value is the row of an update: an object with an integer `update`."""
    return isinstance(value, dict) and isinstance(value.get("update"), int)


def read(path: Path) -> list[Row]:
    """Read the rows of a log.

    An unfinished last line is left out: the program ended while it was written.

    Raises:
      ValueError: a line is not a row, or another version of funcppo wrote the file. Names the file and the line.
    """
    return _parse(path)[1]


def _parse(path: Path) -> tuple[Json, list[Row], str]:
    """Return the header of a log, its rows, and the place of an unfinished last line, empty if there is none."""
    lines, unfinished = files.read_lines(path)
    header, rows = dict(*lines[:1]), lines[1:]
    if lines:
        files.check_format(path, header.pop(files.FORMAT_KEY, None))
    for number, row in enumerate(rows, 2):
        if not is_row(row):
            shown = shorten(json.dumps(row))
            raise ValueError(
                f"{path}:{number}: expected the metrics of an update, got {shown}"
            )
    return header, rows, f"{path}:{len(lines) + 1}" if unfinished else ""


def read_header(path: Path) -> Json:
    """Read the fields of a log's first line, without its format version; empty if there is no log of this package."""
    try:
        return _parse(path)[0]
    except (OSError, ValueError):
        return {}


def take_folder(
    folder: Path,
    names: Sequence[LoggerName],
    run_files: Sequence[str],
    overwrite: bool = False,
) -> None:
    """Prepare a folder for a new run: remove the logs of an earlier one, or check that there is none.

    Args:
      run_files: names of the files that the run will write.

    Raises:
      ValueError: one line that names a file of another run or program.
    """
    if overwrite:
        # A run replaces its own files itself, once its first ones are written.
        events = (folder / TENSORBOARD_FOLDER).glob(_OWN_EVENTS)
        for place in (folder / CSV_FILE, *events):
            place.unlink(missing_ok=True)
        return
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder, got a file")
    for name in run_files:
        if (folder / name).exists():
            raise ValueError(
                f"{folder}: holds a run already, {name}: expected another folder, --resume or --overwrite"
            )
    check_no_logs(folder, names)


def check_no_logs(folder: Path, names: Sequence[LoggerName]) -> None:
    """Raise ValueError that names a log of another run or program in a folder, if there is one."""
    places = [folder / METRICS_FILE]
    if "csv" in names:
        places.append(folder / CSV_FILE)
    if "tensorboard" in names:
        places += sorted((folder / TENSORBOARD_FOLDER).glob("*tfevents*"))
    for place in filter(Path.exists, places):
        raise ValueError(
            f"log: {place}: expected no log of another run, got one: choose another folder, or move it away"
        )


def package_versions() -> Json:
    """Return the versions of Python, PyTorch and funcppo, on which the last bits of a result depend."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "funcppo": VERSION,
    }


def run_header(record: StrategyRecord | None) -> Json:
    """Return the header that a log starts with: the strategy of the updates, and the package versions.

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
    """Drop the rows of a log after update `last_update`, so that a run continues from its checkpoint; return notes.

    Args:
      path: the log; it is created if it is missing.
      last_update: number of the last update in the checkpoint.
      header: what the first line says beside the format; None for what it says already.

    Returns:
      A note if the last line was unfinished, and one if updates up to the checkpoint have no line.
    """
    stored, rows, unfinished = {}, [], ""
    if path.exists():
        stored, rows, unfinished = _parse(path)
    kept = [row for row in rows if row["update"] <= last_update]
    notes: list[str] = []
    if unfinished:
        notes.append(f"{unfinished}: unfinished line dropped")
    n_missing = last_update - len({row["update"] for row in kept} - {0})
    if n_missing > 0:
        notes.append(
            f"{path}: {n_missing} of the updates 1 to {last_update} have no line"
        )

    first = stored if header is None else header
    lines = [{files.FORMAT_KEY: files.FORMAT, **first}, *kept]
    content = b"".join(map(_to_line, lines))
    files.write_file(path, content)
    return notes


def _to_line(row: Row) -> bytes:
    """Format a row as one line of JSON, with null for every number that is not finite."""
    finite_row = {
        name: None
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for name, value in row.items()
    }
    return json.dumps(finite_row).encode() + b"\n"


# Other places


def check_loggers(names: Sequence[LoggerName]) -> None:
    """Check that the packages of the named loggers are installed and, for W&B online, that an account is configured.

    Raises:
      FieldError: a name is unknown, a package is missing, or W&B has no account.
    """
    for name in names:
        check_value("log", LoggerName, name)
        if name != "csv":
            import_extra(name, name, f"--log {name}")
    if "wandb" in names and not _has_wandb_account():
        raise FieldError("log", _WANDB_ACCOUNT, "none")


def _has_wandb_account() -> bool:
    """Return whether W&B is set to offline or finds an API key, valid or not."""
    import wandb

    mode = os.environ.get("WANDB_MODE") or wandb.setup().settings.mode
    is_offline = mode in ("offline", "dryrun", "disabled")
    return is_offline or wandb.login(prompt=False, verify=False)


@contextmanager
def open_loggers(
    names: Sequence[LoggerName],
    folder: Path,
    rows: Sequence[Row],
    settings: Mapping[str, Any],
) -> Generator[list[LogFn], None, None]:
    """Open the named loggers for the rest of a run, yield them, and close them at the end.

    Args:
      names: which.
      folder: of the run; receives metrics.csv, tensorboard/, wandb/ and mlflow.db.
      rows: the lines of metrics.jsonl so far, which these logs get first.
      settings: of the run, for W&B and MLflow.

    Yields:
      Functions that log the row of an update.

    Raises:
      FieldError: a name is unknown, a package is missing, W&B has no account, or MLflow does not answer.
      OSError: a file cannot be written.
    """
    check_loggers(names)
    opened: list[LogFn] = []
    with ExitStack() as stack:
        for name in dict.fromkeys(names):
            opened.append(_OPEN[name](folder, rows, settings, stack))
        yield opened


def _open_csv(
    folder: Path, rows: Sequence[Row], _: object, stack: ExitStack
) -> LogFn:
    """Return a function that collects rows; they are written as CSV when the log is closed, with null left empty."""
    path, lines = folder / CSV_FILE, list(rows)

    def write() -> None:
        names = (name for line in lines for name in line)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, dict.fromkeys(("update", *names)))
        writer.writeheader()
        writer.writerows(json.loads(_to_line(line)) for line in lines)
        files.write_file(path, text.getvalue())

    stack.callback(write)
    return lines.append


def _open_tensorboard(
    folder: Path, rows: Sequence[Row], _: object, stack: ExitStack
) -> LogFn:
    """Return a function that logs a row to TensorBoard, under the names of metrics.jsonl."""
    from torch.utils.tensorboard.writer import SummaryWriter

    folder = folder / TENSORBOARD_FOLDER
    # Event files cannot be cut at an update, so all of this run are written again.
    with files.named_errors(folder):
        for path in folder.glob(_OWN_EVENTS):
            path.unlink()
        writer = SummaryWriter(str(folder), filename_suffix=EVENTS_SUFFIX)
    stack.callback(writer.close)

    def log(row: Row) -> None:
        for name, value in _scalars(row).items():
            writer.add_scalar(name, value, row["update"])

    for row in rows:
        log(row)
    return log


def _open_wandb(
    folder: Path,
    rows: Sequence[Row],
    settings: Mapping[str, Any],
    stack: ExitStack,
) -> LogFn:
    """Return a function that logs a row to Weights & Biases, online or offline as WANDB_MODE says."""
    import wandb

    id_file = folder / "wandb" / "funcppo-id.txt"
    with files.named_errors(id_file):
        id_file.parent.mkdir(exist_ok=True)
        if not rows or not id_file.exists():
            id_file.write_text(secrets.token_hex(4))
        run_id = id_file.read_text()
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "funcppo"),
            name=folder.name,
            dir=str(folder),
            config=dict(settings),
            id=run_id,
            resume="allow",
        )
    except wandb.Error as error:
        reason = " ".join(str(error).split())
        raise FieldError("log", _WANDB_ACCOUNT, reason) from None
    stack.callback(run.finish)
    return lambda row: run.log(_scalars(row), step=row["update"])


def _open_mlflow(
    folder: Path,
    rows: Sequence[Row],
    settings: Mapping[str, Any],
    stack: ExitStack,
) -> LogFn:
    """Return a function that logs a row to MLflow, at MLFLOW_TRACKING_URI or in the folder's mlflow.db."""
    import mlflow

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    place = f"sqlite:///{folder.absolute() / 'mlflow.db'}"
    id_file = folder / "mlflow-id.txt"
    is_known = bool(rows) and id_file.exists()
    with _mlflow_errors():
        mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI", place))
        mlflow.set_experiment(
            os.environ.get("MLFLOW_EXPERIMENT_NAME", "funcppo")
        )
        run = mlflow.start_run(
            run_id=id_file.read_text() if is_known else None,
            run_name=folder.name,
            nested=mlflow.active_run() is not None,
        )
        stack.callback(mlflow.end_run)
        if not is_known:
            mlflow.log_params(dict(settings))

    def log(row: Row) -> None:
        with _mlflow_errors():
            mlflow.log_metrics(_scalars(row), step=row["update"])

    if not is_known:
        with files.named_errors(id_file):
            id_file.write_text(run.info.run_id)
        for row in rows:
            log(row)
    return log


@contextmanager
def _mlflow_errors() -> Generator[None, None, None]:
    """Raise an error of MLflow within the context as one line."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        reason = " ".join(str(error).split())
        raise FieldError("log", "a place for MLflow", reason) from None


_OPEN: Mapping[LoggerName, Callable[..., LogFn]] = {
    "csv": _open_csv,
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
}


def _scalars(row: Row) -> dict[str, float]:
    """Return the finite numbers of a row by name, without `update`."""
    return {
        name: float(value)
        for name, value in row.items()
        if name != "update"
        and isinstance(value, numbers.Real)
        and math.isfinite(value)
    }
