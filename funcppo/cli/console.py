"""Text for people: notes, progress bars and tables of metrics.

`make_console` opens the console of a program. Names of entities, relations and rules are printed as they are: a name
such as "[/x]" or ":smile:" is neither markup nor an emoji.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.status import Status
from rich.table import Table
from rich.text import Text

from funcppo.cli.common import JsonObject

FILE_OUTPUT_WIDTH = 120  # characters a line, where the output is not a terminal
PROGRESS_LINE_SECONDS = 10.0  # between two lines of progress, in a file
METRIC_COLUMNS = ("mrr", "hits@1", "hits@3", "hits@10", "auc_pr")


class _PlainConsole(Console):
    """A console without markup, which leaves a closed pipe to the caller."""

    def __init__(self, *, stderr: bool) -> None:
        super().__init__(
            stderr=stderr,
            markup=False,
            emoji=False,
            highlight=False,
            soft_wrap=True,
        )
        if not self.is_terminal:
            self.width = FILE_OUTPUT_WIDTH

    def on_broken_pipe(self) -> None:
        """Raise the error again: rich would exit with status 1, which `funcppo prove` uses for a refutation."""
        raise BrokenPipeError


def make_console(use_stderr: bool) -> Console:
    """Return a console on standard output, or on standard error where the former is for a machine."""
    return _PlainConsole(stderr=use_stderr)


def progress_bar(console: Console) -> Progress:
    """Return a progress bar with the time left; its field `note` is a free text behind the bar."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
    )


class WorkProgress:
    """How much is done of the present stage of some work, to be used as a context.

    In a terminal a bar with the time left, elsewhere a line every PROGRESS_LINE_SECONDS.
    """

    def __init__(self, console: Console) -> None:
        """Show it on a console."""
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._stage = ""
        self._stage_start = 0.0
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        """Show the bar."""
        self._bar.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Remove the bar."""
        self._bar.stop()

    def __call__(self, stage: str, done: float, total: float) -> None:
        """Show that so much of a stage is done; 0 of 0 if that is not known."""
        now = time.monotonic()
        if stage != self._stage:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(stage, total=total or None)
            self._stage = stage
            self._stage_start = now
        if self._task is not None:
            self._bar.update(self._task, completed=done, total=total or None)

        is_due = now - self._last_line >= PROGRESS_LINE_SECONDS
        if is_due and not self._console.is_terminal:
            self._last_line = now
            self._console.print(self._line(done, total, now))

    def _line(self, done: float, total: float, now: float) -> str:
        """What is done, and how long the rest of the stage takes at the same speed."""
        if not done or not total:
            return f"{self._stage} ..."
        seconds = (now - self._stage_start) * (total - done) / done
        return f"{self._stage}: {done / total:.0%}, about {seconds:.0f} s left"


def show_status(console: Console, text: str) -> Status:
    """Return a spinner beside a text, to be used as a context; `update_status` changes the text."""
    return console.status(Text(text))


def update_status(status: Status, text: str) -> None:
    """Change the text of a spinner; like `Status.update`, but without markup."""
    status.update(Text(text))


def print_notes(console: Console, lines: Iterable[str]) -> None:
    """Print a line for each note on what was chosen, dropped or estimated."""
    for line in lines:
        console.print(f"note: {line}", style="dim")


def metrics_table(
    title: str, metrics_by_score: Mapping[str, JsonObject]
) -> Table:
    """Return a table with a row for each score.

    Args:
      title: the line above the table.
      metrics_by_score: the metrics of each score, by the names in METRIC_COLUMNS, with `ceiling` and `n_queries`.

    Returns:
      A table with those columns of METRIC_COLUMNS that some score has, then the ceiling and the number of queries.
    """
    columns = [
        name
        for name in METRIC_COLUMNS
        if any(name in metrics for metrics in metrics_by_score.values())
    ]
    columns.append("ceiling")

    table = Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
    )
    table.add_column("score", no_wrap=True)
    for name in (*columns, "queries"):
        table.add_column(name, justify="right", no_wrap=True)

    for score, metrics in metrics_by_score.items():
        cells = [
            f"{metrics[name]:.4f}" if name in metrics else ""
            for name in columns
        ]
        table.add_row(score, *cells, str(metrics["n_queries"]))
    return table
