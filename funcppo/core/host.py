"""Work of the host: independent parts that share the cores of a CPU, and pauses of garbage collection.

Results of parts are the same for any number of threads, unlike the last bits of an operation of PyTorch on several
threads. Garbage collection searches for cycles of objects, which takes a share of the time to make many small ones.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

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
    """Yield what is computed from each part, in their order.

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
    """How many threads share work that has parts: as many as OMP_NUM_THREADS says, or one a core, at most 8."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    n_threads = int(wanted) if wanted.isdecimal() else AVAILABLE_CORES
    return max(1, min(n_threads, MAX_THREADS))


@contextmanager
def paused_collection() -> Iterator[None]:
    """Make objects without a search for cycles, where there are many and none of them is in a cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
