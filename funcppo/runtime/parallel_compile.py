"""Functions compiled by other processes, side by side; this one then finds what they made in Inductor's cache on disk.

A compiler is one thread of Python for most of its time. Nothing depends on the other processes: what they could not
compile, or what was not sent to them, is compiled here when it is called.
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from funcppo.runtime.compile_cache import TensorSpecPickler

AVAILABLE_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
MAX_WORKERS = AVAILABLE_CORES // 4  # processes, each of which has helpers of its own
WORKER_TIMEOUT_SECONDS = 300.0  # seconds that another process is waited for


class TensorSpecUnpickler(pickle.Unpickler):
    """Tensors of zeros in their place."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._made: dict[int, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        name, shape, stride, dtype, device = pid
        if name not in self._made:
            self._made[name] = torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
        return self._made[name]


@contextmanager
def compile_in_background(calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> Iterator[Callable[[], None]]:
    """Other processes compile each function for its arguments meanwhile; what is yielded waits for them.

    Those that are still at it at the end of the block are stopped. Functions and settings must be importable by name:
    what is not cannot be sent, and is left to this process; so are those for which there are no cores.
    """
    started: list[subprocess.Popen[bytes]] = []

    def wait() -> None:
        for process in started:
            try:
                process.wait(WORKER_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()

    try:
        for call in calls:
            if len(started) < MAX_WORKERS and (message := _serialize_call(call)):
                started.append(_start_worker(message))
        yield wait
    finally:
        for process in started:
            process.kill()


def _serialize_call(call: tuple[Callable[..., Any], tuple[Any, ...]]) -> bytes | None:
    """What another process is told, or None where it cannot be told."""
    file = io.BytesIO()
    asked = torch.backends.cuda.matmul.fp32_precision != "none"  # the cache tells a default from its like asked for
    try:
        precision = torch.get_float32_matmul_precision() if asked else None
        TensorSpecPickler(file).dump((precision, torch.get_num_threads(), *call))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    return file.getvalue()


def _start_worker(message: bytes) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it may have ended already
        process.stdin.write(message)
        process.stdin.close()
    return process


def _main() -> None:
    from funcppo.runtime.compile import compile_function

    precision, n_threads, fn, args = TensorSpecUnpickler(sys.stdin.buffer).load()
    torch.set_num_threads(n_threads)  # code for a CPU is made for so many
    if precision is not None:
        torch.set_float32_matmul_precision(precision)
    compile_function(fn)(*args)


if __name__ == "__main__":
    _main()
