"""Entry point of a background compiler: compile one function for one set of arguments, and exit.

`parallel_compile.py` starts it as `python -m funcppo.runtime.compile_worker` and writes a `compile_job.Job` to its
standard input, possibly some time later. The result is the entry in the cache on disk. The function is not run: the
process that asked for it does that, when nothing else uses the GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import IO

import torch

from funcppo.core.cores import AVAILABLE_CORES
from funcppo.runtime.compile import compile_function
from funcppo.runtime.compile_cache import CachedFunction
from funcppo.runtime.compile_job import read_job

MAX_FORKS = 8  # processes that compile the kernels of one function


def run_job(file: IO[bytes]) -> None:
    """Compile the function of a pickled job."""
    job = read_job(file)
    torch.set_num_threads(job.n_threads)
    if job.matmul_precision is not None:
        torch.set_float32_matmul_precision(job.matmul_precision)
    function = compile_function(job.fn)
    if isinstance(function, CachedFunction):
        function.compile_ahead(*job.args)


def prepare() -> None:
    """Import the compiler, which is most of the time of a small job, and fork the processes that compile kernels.

    Inductor would start a process for that which imports PyTorch first: seconds, in which it compiles them one by one.
    """
    from torch._inductor import (
        async_compile,
        compile_fx,  # noqa: F401  # pyright: ignore[reportUnusedImport]
        config,
    )

    from funcppo.runtime.inductor import matmul_pass, threefry_lowering  # noqa: F401  # pyright: ignore[reportUnusedImport]  # noqa: F401  # pyright: ignore[reportUnusedImport]

    if torch.cuda.is_available():
        config.worker_start_method = "fork"
        config.compile_threads = max(1, min(MAX_FORKS, AVAILABLE_CORES // 2))
        async_compile.AsyncCompile.wait_pool_ready()


def main() -> None:
    """Compile the job that standard input brings, if it brings one."""
    status = 1
    try:
        prepare()
        run_job(sys.stdin.buffer)
        status = 0
    finally:
        # The end of the interpreter, which has nothing left to do, would take seconds to take PyTorch down.
        for process in multiprocessing.active_children():
            process.kill()
        os._exit(status)


if __name__ == "__main__":
    main()
