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

from funcppo.runtime.kept import Pickler

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
AFFORDABLE = CORES // 4  # processes, each of which has helpers of its own
LIMIT = 300.0  # seconds that another process is waited for


class _Unpickler(pickle.Unpickler):
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
def compiling(calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> Iterator[Callable[[], None]]:
    """Other processes compile each function for its arguments meanwhile; what is yielded waits for them.

    Those that are still at it at the end of the block are stopped. Functions and settings must be importable by name:
    what is not cannot be sent, and is left to this process; so are those for which there are no cores.
    """
    started: list[subprocess.Popen[bytes]] = []

    def wait() -> None:
        for process in started:
            try:
                process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()

    try:
        for call in calls:
            if len(started) < AFFORDABLE and (message := _message(call)):
                started.append(_start(message))
        yield wait
    finally:
        for process in started:
            process.kill()


def _message(call: tuple[Callable[..., Any], tuple[Any, ...]]) -> bytes | None:
    """What another process is told, or None where it cannot be told."""
    file = io.BytesIO()
    asked = torch.backends.cuda.matmul.fp32_precision != "none"  # the cache tells a default from its like asked for
    try:
        precision = torch.get_float32_matmul_precision() if asked else None
        Pickler(file).dump((precision, torch.get_num_threads(), *call))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    return file.getvalue()


def _start(message: bytes) -> subprocess.Popen[bytes]:
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
    from funcppo.runtime.compile import compiled

    precision, n_threads, fn, args = _Unpickler(sys.stdin.buffer).load()
    torch.set_num_threads(n_threads)  # code for a CPU is made for so many
    if precision is not None:
        torch.set_float32_matmul_precision(precision)
    compiled(fn)(*args)


if __name__ == "__main__":
    _main()
