"""A worker compiles what its job names, under the job's settings, and does not run it."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
import torch

from funcppo.optim import clip_by_global_norm
from funcppo.runtime.compile import compile_function
from funcppo.runtime.compile_cache import TensorSpecPickler
from funcppo.runtime.compile_worker import run_job

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


def test_a_job_leaves_its_code_on_disk(tmp_path, monkeypatch, global_settings):
    """It has not run, so that there is no standalone form of it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = torch.arange(6.0)
    function = compile_function(clip_by_global_norm)
    assert not function.is_cached(x, LIMIT)
    job = (None, torch.get_num_threads(), clip_by_global_norm, (x, LIMIT))
    run_job(pickled(job))
    assert function.is_cached(x, LIMIT)
    assert not function.is_cached(x[:5], LIMIT)
    assert not [*tmp_path.rglob("*.standalone")]


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


def test_a_worker_that_gets_no_job_ends():
    """As where the program ends before it has one."""
    command = [sys.executable, "-m", "funcppo.runtime.compile_worker"]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
    assert ended.returncode == 1
