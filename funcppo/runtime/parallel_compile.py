"""Background processes that compile functions ahead; this process then finds the code in Inductor's cache on disk.

A compiler is one Python thread for most of its time, so compiling in parallel takes other processes. Nothing depends on
them: a function that they cannot compile, or that cannot be sent to them, is compiled here when it is called.
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from funcppo.cores import AVAILABLE_CORES
from funcppo.runtime.compile_cache import TensorSpecPickler

# processes; each of them starts helpers of its own
MAX_WORKERS = AVAILABLE_CORES // 4
WORKER_TIMEOUT_SECONDS = 300.0  # after which a worker is stopped
WORKER_MODULE = "funcppo.runtime.compile_worker"

# started and without a job yet: see `workers_ahead`
_idle_workers: list[subprocess.Popen[bytes]] = []

# a function and its arguments
Call = tuple[Callable[..., object], tuple[object, ...]]


@contextmanager
def workers_ahead(n_workers: int, device: str) -> Iterator[None]:
    """Start processes for the jobs that the block will have, so that they import PyTorch's compiler meanwhile.

    Those that get no job are stopped at the end of the block.

    Args:
      device: on which they will compile.
    """
    n_workers = min(n_workers, MAX_WORKERS)
    _idle_workers.extend(_start_worker(device) for _ in range(n_workers))
    try:
        yield
    finally:
        for worker in _idle_workers:
            worker.kill()
        _idle_workers.clear()


@contextmanager
def compile_in_background(calls: list[Call]) -> Iterator[Callable[[], None]]:
    """Compile functions in other processes while the block runs; yields a function that waits for them.

    Processes that still run at the end of the block are stopped. Functions and settings must be importable by name;
    others cannot be sent. They are left to this process, as are those beyond `MAX_WORKERS`.

    Args:
      calls: functions, each with the arguments to compile it for.
    """
    workers: list[subprocess.Popen[bytes]] = []

    def wait() -> None:
        for worker in workers:
            try:
                worker.wait(WORKER_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                worker.kill()

    try:
        for call in calls:
            if len(workers) >= MAX_WORKERS:
                break
            message = _serialize_call(call)
            if message is not None:
                workers.append(_send(message))
        yield wait
    finally:
        for worker in workers:
            worker.kill()


def _serialize_call(call: Call) -> bytes | None:
    """The pickled fields of `compile_worker.Job` for a call; None if it cannot be pickled."""
    # The cache key distinguishes the default precision from the same value set explicitly.
    is_precision_set = torch.backends.cuda.matmul.fp32_precision != "none"
    fn, args = call
    file = io.BytesIO()
    try:
        precision = (
            torch.get_float32_matmul_precision() if is_precision_set else None
        )
        TensorSpecPickler(file).dump(
            (precision, torch.get_num_threads(), fn, args)
        )
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    return file.getvalue()


def _send(message: bytes) -> subprocess.Popen[bytes]:
    """A process that compiles a job."""
    worker = _idle_workers.pop() if _idle_workers else _start_worker("cpu")
    assert worker.stdin is not None
    with suppress(BrokenPipeError):  # the process may have ended already
        worker.stdin.write(message)
        worker.stdin.close()
    return worker


def _start_worker(device: str) -> subprocess.Popen[bytes]:
    """A process that waits for a job."""
    import_paths = [path or os.getcwd() for path in sys.path]
    return subprocess.Popen(
        [sys.executable, "-m", WORKER_MODULE, device],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(import_paths)},
    )
