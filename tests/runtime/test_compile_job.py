"""A job brings a function, the layout of its arguments and the settings to another process."""

from __future__ import annotations

import io

import pytest
import torch

from funcppo.runtime.compile_cache import TensorSpecPickler
from funcppo.runtime.compile_job import (
    TensorSpecUnpickler,
    read_job,
    serialize_job,
)


def doubled(x, y):
    """Something to compile."""
    return (2.0 * x + y).sum(0)


def sent(fn, *args):
    return read_job(io.BytesIO(serialize_job(fn, args) or b""))


def pickled(tensors: tuple[object, ...]) -> io.BytesIO:
    file = io.BytesIO()
    TensorSpecPickler(file).dump(tensors)
    file.seek(0)
    return file


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
    assert len(serialize_job(doubled, (torch.rand(1 << 23),)) or b"") < 1000


def test_a_job_has_the_function_and_its_arguments():
    x = torch.rand(4, 3).t()
    job = sent(doubled, x, x, 7)
    a, b, n = job.args
    assert job.fn is doubled and a is b and n == 7
    assert job.n_threads == torch.get_num_threads()
    assert (a.shape, a.stride(), a.dtype) == (x.shape, x.stride(), x.dtype)


@pytest.mark.parametrize("precision", [None, "high"])
def test_the_precision_of_products_is_sent_if_it_was_set(precision):
    before = torch.backends.cuda.matmul.fp32_precision
    # other tests may have set it
    torch.backends.cuda.matmul.fp32_precision = "none"
    if precision is not None:
        torch.set_float32_matmul_precision(precision)
    try:
        job = sent(doubled)
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = before
    assert job.matmul_precision == precision


def test_a_function_without_a_name_cannot_be_sent():
    assert serialize_job(lambda x: x, (torch.rand(2),)) is None
