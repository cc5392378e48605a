"""What other processes compile is found compiled; what they cannot be told is left alone."""

import io

import pytest
import torch

from funcppo.runtime import parallel_compile
from funcppo.runtime.compile import compile_function
from tests.learning import one_thread

pytestmark = pytest.mark.usefixtures(one_thread.__name__)


def doubled(x, y):
    """Something to compile."""
    return (2.0 * x + y).sum(0)


def received(message: bytes):
    return parallel_compile.TensorSpecUnpickler(io.BytesIO(message)).load()


def test_what_another_process_compiled_is_found_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(parallel_compile, "MAX_WORKERS", 1)
    args = torch.rand(5, 3), torch.rand(3)
    with parallel_compile.compile_in_background([(doubled, args)]) as wait:
        wait()
    torch._dynamo.utils.counters.clear()
    torch.testing.assert_close(compile_function(doubled)(*args), doubled(*args))
    found = torch._dynamo.utils.counters["inductor"]
    assert (found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]) == (1, 0)


def test_tensors_go_as_zeros_that_lie_in_memory_as_they_did():
    x = torch.rand(4, 3).t()
    *_, fn, (a, b, n) = received(parallel_compile._serialize_call((doubled, (x, x, 7))) or b"")
    assert fn is doubled and a is b and n == 7
    assert (a.shape, a.stride(), a.dtype) == (x.shape, x.stride(), x.dtype) and not a.any()


@pytest.mark.parametrize("precision", [None, "high"])
def test_the_precision_of_products_goes_along_where_it_was_asked_for(precision):
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "none"  # other tests may have asked
    if precision is not None:
        torch.set_float32_matmul_precision(precision)
    try:
        told, *_ = received(parallel_compile._serialize_call((doubled, ())) or b"")
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = before
    assert told == precision


def test_what_cannot_be_told_is_left_to_this_process(monkeypatch):
    monkeypatch.setattr(parallel_compile, "MAX_WORKERS", 1)
    monkeypatch.setattr(parallel_compile, "_start_worker", lambda message: pytest.fail("a process was started"))
    with parallel_compile.compile_in_background([(lambda x: x, (torch.rand(2),))]) as wait:
        wait()


def test_few_cores_start_no_process(monkeypatch):
    monkeypatch.setattr(parallel_compile, "MAX_WORKERS", 0)
    monkeypatch.setattr(parallel_compile, "_start_worker", lambda message: pytest.fail("a process was started"))
    with parallel_compile.compile_in_background([(doubled, (torch.rand(2), torch.rand(2)))]) as wait:
        wait()
