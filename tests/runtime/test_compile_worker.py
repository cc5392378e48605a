"""A worker compiles what its job names, under the job's settings."""

from __future__ import annotations

import io

import pytest
import torch
from torch._inductor.runtime.autotune_cache import AutotuneCache

from funcppo.optim import clip_by_global_norm
from funcppo.runtime import compile_cache
from funcppo.runtime.compile import compile_function
from funcppo.runtime.compile_cache import TensorSpecPickler
from funcppo.runtime.compile_worker import (
    TensorSpecUnpickler,
    forget_fastest_configurations,
    run_job,
)

LIMIT = torch.tensor(1.0)


def pickled(job: tuple[object, ...]) -> io.BytesIO:
    file = io.BytesIO()
    TensorSpecPickler(file).dump(job)
    file.seek(0)
    return file


@pytest.fixture
def global_settings():
    """Restores what a job sets."""
    n_threads, precision = (
        torch.get_num_threads(),
        torch.backends.cuda.matmul.fp32_precision,
    )
    yield
    torch.set_num_threads(n_threads)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = precision


def test_a_tensor_comes_back_as_zeros_with_its_layout():
    """A transposed matrix of 3 columns, an empty tensor, a boolean, and a number."""
    x = torch.rand(4, 3).t()
    a, b, c, n = TensorSpecUnpickler(
        pickled((x, torch.ones(0, 2), torch.tensor(True), 7))
    ).load()
    assert (a.shape, a.stride(), a.dtype) == (
        (3, 4),
        (1, 3),
        torch.float32,
    ) and not a.any()
    assert (b.shape, c.shape, c.dtype, n) == (
        (0, 2),
        (),
        torch.bool,
        7,
    ) and not c


def test_tensors_are_the_same_one_where_they_were():
    x, y = torch.rand(3), torch.rand(3)
    a, (b, c) = TensorSpecUnpickler(pickled((x, (y, x)))).load()
    assert a is c and a is not b


def test_a_tensor_s_values_are_not_sent():
    """32 MB of them."""
    assert len(pickled((torch.rand(1 << 23),)).getvalue()) < 1000


def test_a_job_leaves_its_code_on_disk(tmp_path, monkeypatch, global_settings):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = torch.arange(6.0)
    assert not compile_function(clip_by_global_norm).is_cached(x, LIMIT)
    run_job(
        pickled(
            (None, torch.get_num_threads(), clip_by_global_norm, (x, LIMIT))
        )
    )
    assert compile_function(clip_by_global_norm).is_cached(x, LIMIT)
    assert not compile_function(clip_by_global_norm).is_cached(x[:5], LIMIT)


def test_a_job_s_settings_are_those_under_which_it_compiles(
    tmp_path, monkeypatch, global_settings
):
    """The code is found under them, and not under others."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.set_float32_matmul_precision("highest")
    x = torch.arange(6.0)
    run_job(pickled(("high", 2, clip_by_global_norm, (x, LIMIT))))
    assert (torch.get_float32_matmul_precision(), torch.get_num_threads()) == (
        "high",
        2,
    )
    assert compile_function(clip_by_global_norm).is_cached(x, LIMIT)
    torch.set_num_threads(1)
    assert not compile_function(clip_by_global_norm).is_cached(x, LIMIT)


def test_launch_configurations_that_a_worker_measures_are_not_stored(
    monkeypatch,
):
    """Inductor stores them by this method; one of another name would be replaced without effect."""
    stored = []
    monkeypatch.setattr(
        AutotuneCache, "save", lambda *args, **options: stored.append(args)
    )
    monkeypatch.setattr(compile_cache, "writes_standalone", True)
    AutotuneCache.save(None)
    forget_fastest_configurations()
    AutotuneCache.save(None)
    assert len(stored) == 1 and not compile_cache.writes_standalone
