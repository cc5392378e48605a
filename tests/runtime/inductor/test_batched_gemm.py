"""The operator is the batched product, and is offered only the products that its kernel takes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcppo.core import random
from funcppo.runtime.inductor.batched_gemm import (
    MIN_BATCH_SIZE,
    SUPPORTED_DIMS,
    skinny_bmm,
    supports_skinny_bmm,
)
from tests.runtime.test_capture import devices


def test_the_product_of_one_row_by_hand():
    """(1, 2) by ((1, 10), (100, 1000)) is (201, 2010), on a CPU for any dimensions."""
    a, b = (
        torch.tensor([[[1.0, 2.0]]]),
        torch.tensor([[[1.0, 10.0], [100.0, 1000.0]]]),
    )
    assert skinny_bmm(a, b).tolist() == [[[201.0, 2010.0]]]


@devices
@given(
    batch=st.sampled_from([1, 2, 128]),
    m=st.integers(1, 8),
    k=st.sampled_from([16, 32, 64]),
    n=st.sampled_from([16, 64, 128]),
    is_transposed=st.booleans(),
)
def test_the_product_is_that_of_float64(device, batch, m, k, n, is_transposed):
    """1e-6 a term of float32 sums of normal numbers."""
    a = random.normal(random.key(0), (batch, m, k)).to(device)
    b = random.normal(
        random.key(1), (batch, n, k) if is_transposed else (batch, k, n)
    ).to(device)
    b = b.mT if is_transposed else b
    torch.testing.assert_close(
        skinny_bmm(a, b).double(),
        a.double() @ b.double(),
        rtol=0,
        atol=1e-6 * k,
    )


def test_the_operator_is_registered_as_pytorch_wants_it():
    """Schema, fake tensors and tracing."""
    torch.library.opcheck(
        skinny_bmm, (torch.ones(3, 2, 16), torch.ones(3, 16, 32))
    )


@pytest.mark.parametrize(
    ("batch", "m", "k", "n", "supported"),
    [
        (MIN_BATCH_SIZE, 4, 64, 64, True),
        (MIN_BATCH_SIZE - 1, 4, 64, 64, False),  # too few for a GPU
        (MIN_BATCH_SIZE, 8, 64, 64, True),
        (MIN_BATCH_SIZE, 9, 64, 64, False),  # too many rows
        (MIN_BATCH_SIZE, 1, 64, 64, False),  # a vector
        (MIN_BATCH_SIZE, 4, 48, 64, False),  # no power of two
        (MIN_BATCH_SIZE, 4, 64, 48, False),
        (MIN_BATCH_SIZE, 4, 128, 64, True),  # 8192 numbers
        (MIN_BATCH_SIZE, 4, 128, 128, False),  # more than a block holds
    ],
)
def test_which_products_the_kernel_takes(batch, m, k, n, supported):
    a, b = torch.empty(batch, m, k), torch.empty(batch, k, n)
    assert supports_skinny_bmm(a, b, max_m=8) == supported
    assert not supports_skinny_bmm(a, b, max_m=0)
    assert not supports_skinny_bmm(a.double(), b.double(), max_m=8)
    assert not supports_skinny_bmm(a, b.double(), max_m=8)


def test_a_product_without_a_batch_is_not_taken():
    assert not supports_skinny_bmm(
        torch.empty(128, 4), torch.empty(4, SUPPORTED_DIMS[0]), max_m=8
    )
