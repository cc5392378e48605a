"""What the programs print for people: on standard error while they work, tables and proofs at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

FILE_OUTPUT_WIDTH = 120  # where the output goes to a file, whose readers have no terminal to fit
METRIC_COLUMNS = ("mrr", "hits@1", "hits@3", "hits@10", "auc_pr")


def make_console(use_stderr: bool) -> Console:
    """Where people read: standard output, or standard error where the former is for a machine."""
    wide = Console(stderr=use_stderr, highlight=False, soft_wrap=True)
    return (
        wide
        if wide.is_terminal
        else Console(stderr=use_stderr, highlight=False, soft_wrap=True, width=FILE_OUTPUT_WIDTH)
    )


def progress_bar(console: Console) -> Progress:
    """A bar with the time left; `note` is a free text behind it."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


def print_notes(console: Console, lines: Iterable[str]) -> None:
    """One line each on what was chosen, dropped or left out."""
    for line in lines:
        console.print(f"note: {line}", style="dim")


def metrics_table(title: str, metrics_by_score: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row for each score."""
    columns = [name for name in METRIC_COLUMNS if any(name in row for row in metrics_by_score.values())]
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("score", no_wrap=True)
    for name in (*columns, "ceiling", "queries"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, row in metrics_by_score.items():
        cells = [f"{row[name]:.4f}" if name in row else "" for name in (*columns, "ceiling")]
        table.add_row(label, *cells, str(row["n_queries"]))
    return table
