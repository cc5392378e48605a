"""Text for people: notes, the progress of work and tables of metrics.

`make_console` opens the console of a program. Names of entities, relations and rules are printed as they are: a name
such as "[/x]" or ":smile:" is neither markup nor an emoji.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from funcppo.cli.common import STANDARD_OUTPUT, JsonObject, named_output
from funcppo.core.deadline import NO_DEADLINE, Deadline

# characters a line, where the output is not a terminal: tables are as wide as their names, so that none is cut in two
FILE_OUTPUT_WIDTH = 10_000
LINE_SECONDS = 10.0  # between lines on work in progress, without a terminal
DEFAULT_MARK = " *"
WIDE_COLUMNS = 100
NUMBER_WIDTH = 6  # of 0.1234
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

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; an error of the system names the stream."""
        with named_output("standard error" if self.stderr else STANDARD_OUTPUT):
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """Raise the error again: rich would exit with status 1, which `funcppo prove` uses for a refutation."""
        raise BrokenPipeError


def make_console(use_stderr: bool) -> Console:
    """Return a console on standard output, or on standard error where the former is for a machine."""
    return _PlainConsole(stderr=use_stderr)


class _Mark(NamedTuple):
    """How much was done at a moment."""

    time: float  # on the monotonic clock, seconds
    done: int


class _Phase:
    """A part of the work that one text names.

    Attributes:
      start: when it began, on the monotonic clock in seconds.
      marks: when work was done, from the last half of the time on; the first one is where its speed is measured from.
    """

    def __init__(self, start: float, first_done: int) -> None:
        self.start = start
        self.marks = [_Mark(start, first_done)]
        self._n_steps = 0

    @property
    def last_done(self) -> int:
        """How much was done last."""
        return self.marks[-1].done

    def record(self, now: float, done: int) -> None:
        """Record how much is done."""
        if done == self.last_done:
            return
        if done < self.last_done:  # another round of the same work
            self.marks = [_Mark(now, done)]
            self._n_steps = 0
            return
        self._n_steps += 1
        self.marks.append(_Mark(now, done))
        middle = (self.start + now) / 2
        while len(self.marks) > 2 and self.marks[1].time <= middle:
            self.marks.pop(0)

    def seconds_left(self, now: float, total: int | None) -> float | None:
        """The time left at the speed of the last half of the time; None where it cannot be told.

        The first step does not tell it: it compiles, or it is a small one that shows how large the next ones may be.
        """
        first, last = self.marks[0], self.marks[-1]
        if total is None or self._n_steps < 2 or last.time <= first.time:
            return None
        speed = (last.done - first.done) / (last.time - first.time)
        left = (total - last.done) / speed - (now - last.time)
        return left if left >= 0 else None


class _TimeLeft(ProgressColumn):
    """The time left in a bar, as the lines tell it."""

    def __init__(self, display: WorkDisplay) -> None:
        super().__init__()
        self._display = display

    def render(self, task: Task) -> Text:
        """The text, empty where it is not known."""
        return Text(self._display.time_left(time.monotonic()))


class WorkDisplay:
    """What a program does: a bar in a terminal, elsewhere a line on standard error every `LINE_SECONDS`."""

    def __init__(
        self, console: Console, text: str, deadline: Deadline = NO_DEADLINE
    ) -> None:
        self._deadline = deadline
        self._phase_deadline = NO_DEADLINE
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.fields[amount]}", markup=False),
                TimeElapsedColumn(),
                _TimeLeft(self),
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
        self,
        text: str,
        done: int = 0,
        total: int | None = None,
        deadline: Deadline = NO_DEADLINE,
        *,
        note: str = "",
    ) -> None:
        """Change what is shown; another text begins a phase, whose time starts at 0, or goes on with an earlier one.

        Args:
          text: what is being done.
          done: how much of it is.
          total: how much there is; None if that is not known.
          deadline: when this part ends, whatever is done.
          note: a free text behind the time.
        """
        if text != self._text:
            self._start_phase(text, done)
        self._done, self._total, self._note = done, total, note
        self._phase_deadline = deadline
        self._phase.record(time.monotonic(), done)
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

    def line(self, now: float) -> str:
        """Return what is shown where there is no terminal.

        Args:
          now: the time on the monotonic clock.
        """
        parts = [
            self._amount(),
            f"{now - self._phase.start:.0f} s",
            self.time_left(now),
            self._note,
        ]
        return f"{self._text}: {', '.join(filter(None, parts))}"

    def time_left(self, now: float) -> str:
        """Return how long the phase will take, in words; empty where that is not known."""
        left = self._phase.seconds_left(now, self._total)
        if left is None:
            return ""
        for deadline in (self._deadline, self._phase_deadline):
            left = min(left, deadline.seconds_left)
        return f"about {left:.0f} s left"

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
            line = self.line(time.monotonic())
            # A closed standard error ends no work.
            with contextlib.suppress(OSError, ValueError):
                print(line, file=sys.stderr, flush=True)


def show_status(
    console: Console, text: str, deadline: Deadline = NO_DEADLINE
) -> WorkDisplay:
    """Return a display of work that begins with a text, to be used as a context; `update_status` changes it.

    Args:
      deadline: when the work ends, whatever is done.
    """
    return WorkDisplay(console, text, deadline)


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
        pad_edge=False,
    )
    # Where a terminal is too narrow, texts are broken, so that no digit is lost.
    table.add_column(columns[0], overflow="fold")
    for name in columns[1:]:
        width = max(len(name), NUMBER_WIDTH)
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table, with more space between its columns where there is room."""
    table.padding = (0, 1) if console.width >= WIDE_COLUMNS else (0, 0)
    console.print(table)


def metrics_table(
    title: str, metrics_by_score: Mapping[str, JsonObject], default: str = ""
) -> Table:
    """Return a table with a row for each score.

    Args:
      title: the line above the table.
      metrics_by_score: the metrics of each score, by the names in METRIC_COLUMNS, with `ceiling` and `n_queries`.
      default: the score by which answers are ranked, which is marked; empty for none.

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
        mark = DEFAULT_MARK if score == default else ""
        table.add_row(score + mark, *cells, str(metrics["n_queries"]))
    if default in metrics_by_score:
        table.caption = f"{DEFAULT_MARK.strip()} `funcppo predict` ranks by it"
        table.caption_justify = "left"
    return table
