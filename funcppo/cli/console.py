"""Text for people: notes, the progress of work and tables of metrics.

`make_console` opens the console of a program. Names of entities, relations and rules are printed as they are: a name
such as "[/x]" or ":smile:" is neither markup nor an emoji.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from funcppo.cli.common import JsonObject

# characters a line, where the output is not a terminal: tables are as wide as their names, so that none is cut in two
FILE_OUTPUT_WIDTH = 10_000
LINE_SECONDS = 10.0  # between lines on work in progress, without a terminal
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


@dataclasses.dataclass(slots=True)
class _Phase:
    """A part of the work that one text names."""

    start: float  # on the monotonic clock, seconds
    first_done: int  # how much was done when it began
    last_done: int = 0


class WorkDisplay:
    """What a program does: a bar in a terminal, elsewhere a line on standard error every `LINE_SECONDS`."""

    def __init__(self, console: Console, text: str) -> None:
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.fields[amount]}", markup=False),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("", total=None, amount="", note="")
        self._has_ended = threading.Event()
        self._phases: dict[str, _Phase] = {}
        self._start_phase(text, 0)
        self.update(text)

    def __enter__(self) -> WorkDisplay:
        if self._bar:
            self._bar.start()
        else:
            threading.Thread(target=self._print_lines, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._has_ended.set()
        if self._bar:
            self._bar.stop()

    def update(
        self, text: str, done: int = 0, total: int | None = None, note: str = ""
    ) -> None:
        """Change what is shown; another text begins a phase, whose time starts at 0, or goes on with an earlier one.

        Args:
          text: what is being done.
          done: how much of it is.
          total: how much there is; None if that is not known.
          note: a free text behind the time.
        """
        if text != self._text:
            self._start_phase(text, done)
        self._done, self._total, self._note = done, total, note
        self._phase.last_done = done
        if self._bar:
            self._bar.update(
                self._task,
                description=text,
                completed=done,
                total=total,
                amount=self._amount(),
                note=note,
            )

    def report(self, stage: str, done: float, total: float) -> None:
        """Change what is shown, by numbers that need not be whole; 0 of 0 where they are not known."""
        self.update(stage, round(done), round(total) or None)

    def line(self, seconds: float) -> str:
        """Return what is shown where there is no terminal.

        Args:
          seconds: time since the phase began.
        """
        parts = [self._amount(), f"{seconds:.0f} s"]
        n_new = self._done - self._phase.first_done
        if self._total is not None and n_new > 0:
            left = (self._total - self._done) * seconds / n_new
            parts.append(f"about {left:.0f} s left")
        parts.append(self._note)
        return f"{self._text}: {', '.join(filter(None, parts))}"

    def _start_phase(self, text: str, first_done: int) -> None:
        """Begin a phase; one that had done less under the same text goes on, such as training after a validation."""
        phase = self._phases.get(text)
        if phase is None or not 0 < phase.last_done <= first_done:
            phase = _Phase(time.monotonic(), first_done)
        self._phases[text] = self._phase = phase
        self._text = text
        self._done: int = first_done
        self._total: int | None = None
        self._note = ""
        if self._bar:
            self._bar.reset(self._task, completed=first_done, total=None)
            self._bar.tasks[0].start_time = phase.start

    def _amount(self) -> str:
        if self._total is None:
            return ""
        return f"{self._done:,} of {self._total:,}"

    def _print_lines(self) -> None:
        while not self._has_ended.wait(LINE_SECONDS):
            line = self.line(time.monotonic() - self._phase.start)
            # A closed standard error ends no work.
            with contextlib.suppress(OSError, ValueError):
                print(line, file=sys.stderr, flush=True)


def show_status(console: Console, text: str) -> WorkDisplay:
    """Return a display of work that begins with a text, to be used as a context; `update_status` changes it."""
    return WorkDisplay(console, text)


def update_status(status: WorkDisplay, text: str) -> None:
    """Change the text of a display of work."""
    status.update(text)


def print_notes(console: Console, lines: Iterable[str]) -> None:
    """Print a line for each note on what was chosen, dropped or estimated."""
    for line in lines:
        console.print(f"note: {line}", style="dim")


def make_table(title: str, columns: Sequence[str]) -> Table:
    """Return a table without rows.

    Args:
      title: the line above the table.
      columns: their names; the first one holds texts, the others numbers.
    """
    table = Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
    )
    table.add_column(columns[0], no_wrap=True)
    for name in columns[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    return table


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

    table = make_table(title, ("score", *columns, "queries"))

    for score, metrics in metrics_by_score.items():
        cells = [
            f"{metrics[name]:.4f}" if name in metrics else ""
            for name in columns
        ]
        table.add_row(score, *cells, str(metrics["n_queries"]))
    return table
