"""What other processes compile is found on disk; what cannot be sent to them is left to this one."""

import io

import pytest
import torch

from funcppo.runtime import compile_cache, parallel_compile
from funcppo.runtime.compile import compile_function
from funcppo.runtime.compile_worker import TensorSpecUnpickler


def doubled(x, y):
    """Something to compile."""
    return (2.0 * x + y).sum(0)


def received(message: bytes):
    return TensorSpecUnpickler(io.BytesIO(message)).load()


def test_what_another_process_compiled_is_found_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(parallel_compile, "MAX_WORKERS", 1)
    args = torch.rand(5, 3), torch.rand(3)
    with parallel_compile.compile_in_background([(doubled, args)]) as wait:
        wait()
    monkeypatch.setattr(compile_cache, "compile_events", [])
    torch.testing.assert_close(compile_function(doubled)(*args), doubled(*args))
    assert [event.cache_hit for event in compile_cache.compile_events] == [True]


def test_tensors_are_sent_as_zeros_of_the_same_memory_layout():
    x = torch.rand(4, 3).t()
    *_, fn, (a, b, n) = received(
        parallel_compile._serialize_call((doubled, (x, x, 7))) or b""
    )
    assert fn is doubled and a is b and n == 7
    assert (a.shape, a.stride(), a.dtype) == (
        x.shape,
        x.stride(),
        x.dtype,
    ) and not a.any()


@pytest.mark.parametrize("precision", [None, "high"])
def test_the_precision_of_products_is_sent_if_it_was_set(precision):
    before = torch.backends.cuda.matmul.fp32_precision
    # other tests may have set it
    torch.backends.cuda.matmul.fp32_precision = "none"
    if precision is not None:
        torch.set_float32_matmul_precision(precision)
    try:
        sent, *_ = received(
            parallel_compile._serialize_call((doubled, ())) or b""
        )
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = before
    assert sent == precision


def test_a_function_that_cannot_be_sent_is_left_to_this_process(monkeypatch):
    monkeypatch.setattr(parallel_compile, "MAX_WORKERS", 1)
    monkeypatch.setattr(
        parallel_compile,
        "_send",
        lambda message: pytest.fail("a process was started"),
    )
    with parallel_compile.compile_in_background(
        [(lambda x: x, (torch.rand(2),))]
    ) as wait:
        wait()


def test_few_cores_start_no_process(monkeypatch):
    monkeypatch.setattr(parallel_compile, "MAX_WORKERS", 0)
    monkeypatch.setattr(
        parallel_compile,
        "_send",
        lambda message: pytest.fail("a process was started"),
    )
    with parallel_compile.compile_in_background(
        [(doubled, (torch.rand(2), torch.rand(2)))]
    ) as wait:
        wait()


def test_a_process_that_was_started_ahead_gets_the_job_and_others_end(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(parallel_compile, "MAX_WORKERS", 2)
    args = torch.rand(5, 3), torch.rand(3)
    with parallel_compile.workers_ahead(3, "cpu"):
        ahead = [*parallel_compile._idle_workers]
        monkeypatch.setattr(parallel_compile, "_start_worker", pytest.fail)
        with parallel_compile.compile_in_background([(doubled, args)]) as wait:
            wait()
    assert len(ahead) == 2 and parallel_compile._idle_workers == []
    assert [worker.wait(60) for worker in ahead] == [-9, 0]
