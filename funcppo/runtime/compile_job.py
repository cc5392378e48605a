"""What another process is to compile, as bytes: a function, its arguments without their values, and settings."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import IO, NamedTuple

import torch
from torch import Tensor

from funcppo.runtime.compile_cache import TensorSpecPickler


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


def serialize_job(
    fn: Callable[..., object], args: tuple[object, ...]
) -> bytes | None:
    """The job of compiling a function under the settings of this process; None if it cannot be pickled.

    Functions and settings must be importable by name.
    """
    # The cache key distinguishes the default precision from the same value set explicitly.
    is_precision_set = torch.backends.cuda.matmul.fp32_precision != "none"
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


def read_job(file: IO[bytes]) -> Job:
    """The job that `serialize_job` wrote; tensors are zeros."""
    return Job(*TensorSpecUnpickler(file).load())
