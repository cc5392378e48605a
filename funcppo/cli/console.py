"""Text for people: notes, progress bars and tables of metrics.

`make_console` opens the console of a program. Names of entities, relations and rules are printed as they are: a name
such as "[/x]" or ":smile:" is neither markup nor an emoji.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.status import Status
from rich.table import Table
from rich.text import Text

from funcppo.cli.common import JsonObject

FILE_OUTPUT_WIDTH = 120  # characters a line, where the output is not a terminal
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
