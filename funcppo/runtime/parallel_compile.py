"""Background processes that compile functions ahead; this process then finds the code in the cache on disk.

A compiler is one Python thread for most of its time, so compiling in parallel takes other processes. Nothing depends on
them: a function that they cannot compile, or that cannot be sent to them, is compiled here when it is called.

This module does not import PyTorch, so that a program can start them before it does (`start_workers`).
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from funcppo.core.cores import AVAILABLE_CORES
from funcppo.runtime import cache_folder

# processes; each of them starts helpers of its own
MAX_WORKERS = AVAILABLE_CORES // 4
N_PARTS = 4  # of a training step, which are compiled by themselves
WORKER_TIMEOUT_SECONDS = 300.0  # after which a worker is stopped
WORKER_MODULE = "funcppo.runtime.compile_worker"

# started and without a job yet: see `start_workers`
_idle_workers: list[subprocess.Popen[bytes]] = []


def start_workers(n_workers: int = N_PARTS) -> None:
    """Start the processes that will compile, so that they import PyTorch's compiler meanwhile.

    A program that trains calls it before it imports PyTorch. None are started where anything is in the cache on disk.
    """
    if cache_folder.may_hold_code():
        return
    if not _idle_workers:
        atexit.register(stop_idle_workers)
    n_missing = min(n_workers, MAX_WORKERS) - len(_idle_workers)
    _idle_workers.extend(_start_worker() for _ in range(n_missing))


def stop_idle_workers() -> None:
    """Stop processes that have no job."""
    for worker in _idle_workers:
        _kill(worker)
    _idle_workers.clear()


class Background:
    """Jobs of other processes, by name."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._workers: dict[str, subprocess.Popen[bytes]] = {}

    def submit(self, name: str, job: bytes | None) -> bool:
        """Let another process compile a job; return whether one does, of which there are at most `MAX_WORKERS`."""
        if job is None or len(self._workers) >= MAX_WORKERS:
            return False
        worker = _idle_workers.pop() if _idle_workers else _start_worker()
        assert worker.stdin is not None
        with suppress(BrokenPipeError):  # the process may have ended already
            worker.stdin.write(job)
            worker.stdin.close()
        self._workers[name] = worker
        return True

    def wait(self, name: str) -> None:
        """Wait for a job, if there is one of this name."""
        worker = self._workers.get(name)
        if worker is None:
            return
        try:
            worker.wait(WORKER_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            _kill(worker)

    def stop(self) -> None:
        """Stop the processes that still run."""
        for worker in self._workers.values():
            _kill(worker)


@contextmanager
def in_background() -> Iterator[Background]:
    """Jobs that other processes compile while the block runs; processes that are left at its end are stopped."""
    background = Background()
    try:
        yield background
    finally:
        background.stop()
        stop_idle_workers()


def _start_worker() -> subprocess.Popen[bytes]:
    """A process that waits for a job, and has its own group, which helpers of it belong to."""
    import_paths = [path or os.getcwd() for path in sys.path]
    return subprocess.Popen(
        [sys.executable, "-m", WORKER_MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(import_paths)},
        start_new_session=True,
    )


def _kill(worker: subprocess.Popen[bytes]) -> None:
    """Stop a process and its helpers, and take note of its end."""
    if worker.poll() is not None:
        return
    if sys.platform == "win32":
        worker.kill()
    else:
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
