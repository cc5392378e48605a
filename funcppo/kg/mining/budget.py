"""Work and time that mining may take: both are counted while it runs, and asked before each part of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from funcppo.core.deadline import Clock


class ProgressCallback(Protocol):
    """Receives what is being done, and how much of it is done; both numbers are 0 where that is not known."""

    def __call__(self, stage: str, done: float, total: float, /) -> object: ...


def ignore_progress(stage: str, done: float, total: float) -> None:
    """Show no progress."""


@dataclass(kw_only=True, slots=True)
class Budget:
    """The work and the time of one search, and what is spent of them."""

    max_rows: int
    """Rows that may be computed."""
    seconds: float
    """Time that may pass."""
    progress: ProgressCallback = ignore_progress
    """Called with what is being done."""
    clock: Clock = time.perf_counter
    """Measures the time."""
    rows: float = 0.0
    """Rows computed so far."""
    was_late: bool = False
    """Whether time, and not work, ended some part."""
    _start: float = field(init=False)
    _stage: str = ""
    _stage_start: float = 0.0
    _stage_rows: float = 0.0

    def __post_init__(self) -> None:
        """Start the clock."""
        self._start = self.clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self.clock() - self._start

    def start_stage(self, name: str, expected_rows: float) -> None:
        """Say what is done next, and how much work that is expected to be."""
        self._stage = name
        self._stage_start = self.rows
        self._stage_rows = expected_rows
        self.progress(name, 0.0, expected_rows)

    def spend(self, n_rows: float) -> None:
        """Count work that was done."""
        self.rows += n_rows
        done = self.rows - self._stage_start
        total = max(self._stage_rows, done)
        self.progress(self._stage, done, total)

    def rows_left(self, share: float = 1.0) -> float:
        """Rows until this share of the work is spent, not negative."""
        return max(0.0, share * self.max_rows - self.rows)

    @property
    def spent_share(self) -> float:
        """The share of the work that is spent, or of the time if that is more; the first half of the time is free."""
        return max(self.rows / self.max_rows, self._time_share)

    def is_late(self, share: float = 1.0) -> bool:
        """Whether this share of the time is spent; asked before what is left out if so."""
        late = self._time_share >= share
        self.was_late |= late
        return late

    def is_exhausted(self, share: float = 1.0) -> bool:
        """Whether this share of the work or of the time is spent."""
        return self.is_late(share) or self.rows >= share * self.max_rows

    @property
    def _time_share(self) -> float:
        # Work is planned for half of the time; only a slow machine needs more.
        return 2 * self.elapsed / self.seconds - 1
