"""Entry point of a background compiler: compile one function for one set of arguments, and exit.

`parallel_compile.py` starts it as `python -m funcppo.runtime.compile_worker DEVICE` and writes a `Job` to its standard
input, possibly some time later. The result is the entry in Inductor's cache on disk.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import IO, NamedTuple

import torch
from torch import Tensor

from funcppo.runtime import compile_cache
from funcppo.runtime.compile import compile_function


class Job(NamedTuple):
    """What a worker compiles, and the settings under which the compiled code will be used."""

    # of float32 matrix products; None: PyTorch's default, never set
    matmul_precision: str | None
    n_threads: int  # CPU threads, which Inductor's code for a CPU depends on
    fn: Callable[..., object]
    args: tuple[object, ...]


class TensorSpecUnpickler(pickle.Unpickler):
    """Unpickler for `compile_cache.TensorSpecPickler`: tensors come back as zeros with the same memory layout."""

    def __init__(self, file: IO[bytes]) -> None:
        """Read from `file`."""
        super().__init__(file)
        self._tensors: dict[int, Tensor] = {}

    def persistent_load(
        self,
        pid: tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, str],
    ) -> Tensor:
        """The tensor of a specification; one tensor for each alias number."""
        number, shape, stride, dtype, device = pid
        if number not in self._tensors:
            self._tensors[number] = torch.empty_strided(
                shape, stride, dtype=dtype, device=device
            ).zero_()
        return self._tensors[number]


def run_job(file: IO[bytes]) -> None:
    """Compile the function of a pickled job, by one call of it."""
    job = Job(*TensorSpecUnpickler(file).load())
    torch.set_num_threads(job.n_threads)
    if job.matmul_precision is not None:
        torch.set_float32_matmul_precision(job.matmul_precision)
    compile_function(job.fn)(*job.args)


def forget_fastest_configurations() -> None:
    """Keep the launch configurations that Inductor finds here off the disk.

    Other processes use the GPU meanwhile, so that times say little. The process that uses the code measures again.
    """
    from torch._inductor.runtime.autotune_cache import AutotuneCache

    compile_cache.writes_standalone = False

    def save(*_: object, **__: object) -> None:
        return None

    AutotuneCache.save = save  # pyright: ignore[reportAttributeAccessIssue]


def prepare(device: str) -> None:
    """Import the compiler and start the device: most of the time of a small job."""
    from torch._inductor import compile_fx  # noqa: F401  # pyright: ignore[reportUnusedImport]

    from funcppo.runtime.inductor import (
        matmul_pass,  # noqa: F401  # pyright: ignore[reportUnusedImport]
        threefry_lowering,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    )

    torch.zeros((), device=device)


if __name__ == "__main__":
    prepare(sys.argv[1])
    forget_fastest_configurations()
    run_job(sys.stdin.buffer)
