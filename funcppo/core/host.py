"""A moment by which work should end.

Work of the host: independent parts that share the cores of a CPU, and pauses of garbage collection.

Results of parts are the same for any number of threads, unlike the last bits of an operation of PyTorch on several
threads. Garbage collection searches for cycles of objects, which takes a share of the time to make many small ones.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

Clock: TypeAlias = Callable[[], float]  # seconds since some moment


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadline:
    """Moment by which work should end; the notes of a result say what was left out."""

    at: float
    """On the clock; infinity for no bound."""
    clock: Clock = time.monotonic

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the moment, at least 0."""
        return max(0.0, self.at - self.clock())

    @property
    def is_over(self) -> bool:
        """Return whether the moment has passed."""
        return self.clock() >= self.at

    def at_most(self, seconds: float) -> Deadline:
        """Return the earlier of this deadline and the moment in `seconds` seconds."""
        at = min(self.at, self.clock() + seconds)
        return Deadline(at=at, clock=self.clock)

    def share(self, share: float) -> Deadline:
        """Return the moment when the given share of the seconds left will be over."""
        if math.isinf(self.at):
            return self
        at = self.clock() + share * self.seconds_left
        return Deadline(at=at, clock=self.clock)


NO_DEADLINE = Deadline(at=math.inf)


class MissingPackageError(ModuleNotFoundError, ValueError):
    """Raised where a package of an extra is not installed; a program ends with its one line."""


def import_extra(module: str, extra: str, what: str) -> Any:
    """Import and return a module of a package that only an extra of this one installs.

    Args:
      what: needs it, for the error.

    Raises:
      MissingPackageError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{what} needs {error.name} (pip install 'funcppo[{extra}]')"
        ) from None


AVAILABLE_CORES = (
    len(os.sched_getaffinity(0))
    if hasattr(os, "sched_getaffinity")
    else os.cpu_count() or 1
)
MAX_THREADS = 8

Part = TypeVar("Part")
Result = TypeVar("Result")


def map_in_threads(
    compute: Callable[[Part], Result],
    parts: Sequence[Part],
    n_threads: int | None = None,
) -> Iterator[Result]:
    """Compute each part in threads; yield the results in the order of the parts.

    Args:
      compute: releases Python's lock for most of its time, as large tensors do. What it raises ends the work.
      n_threads: None for those of `count_threads`. One is that of the caller.
    """
    n_threads = min(len(parts), n_threads or count_threads())
    if n_threads < 2:
        yield from map(compute, parts)
        return
    with ThreadPoolExecutor(n_threads) as threads:
        yield from threads.map(compute, parts)


def count_threads() -> int:
    """Return the number of threads for parallel work: OMP_NUM_THREADS or one per core, at most 8."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    n_threads = int(wanted) if wanted.isdecimal() else AVAILABLE_CORES
    return max(1, min(n_threads, MAX_THREADS))


@contextmanager
def paused_collection() -> Iterator[None]:
    """Pause the garbage collector in the context, for code that makes many objects and no reference cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
