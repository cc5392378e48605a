"""How many cores of a CPU this process may use."""

from __future__ import annotations

import os

AVAILABLE_CORES = (
    len(os.sched_getaffinity(0))
    if hasattr(os, "sched_getaffinity")
    else os.cpu_count() or 1
)
MAX_THREADS = 8


def count_threads() -> int:
    """How many threads share work that has parts: as many as OMP_NUM_THREADS says, or one a core, at most 8.

    The results are the same for any number of them, unlike those of an operation of PyTorch on several threads.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    n_threads = int(wanted) if wanted.isdecimal() else AVAILABLE_CORES
    return max(1, min(n_threads, MAX_THREADS))
