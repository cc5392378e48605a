"""The operators compute what PyTorch's do; a batched product is offered only where its kernel takes it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcppo.core import random
from funcppo.runtime.operators import (
    skinny_bmm,
    stable_argsort,
    supports_skinny_bmm,
)
from tests.learning import devices


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
    shape = (batch, n, k) if is_transposed else (batch, k, n)
    b = random.normal(random.key(1), shape).to(device)
    b = b.mT if is_transposed else b
    expected = a.double() @ b.double()
    got = skinny_bmm(a, b).double()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6 * k)


@pytest.mark.parametrize(
    ("batch", "m", "k", "n", "supported"),
    [
        (128, 4, 64, 64, True),
        (127, 4, 64, 64, False),  # too few for a GPU
        (128, 9, 64, 64, False),  # too many rows
        (128, 1, 64, 64, False),  # a vector
        (128, 4, 48, 64, False),  # no power of two
        (128, 8, 128, 64, True),  # 8192 numbers
        (128, 4, 128, 128, False),  # more than a block holds
    ],
)
def test_which_products_the_kernel_takes(batch, m, k, n, supported):
    a, b = torch.empty(batch, m, k), torch.empty(batch, k, n)
    assert supports_skinny_bmm(a, b, max_m=8) == supported
    assert not supports_skinny_bmm(a, b, max_m=0)
    assert not supports_skinny_bmm(a, b.double(), max_m=8)
    assert not supports_skinny_bmm(a[0], b[0], max_m=8)


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("descending", [False, True])
def test_equal_numbers_keep_their_order(dim, descending):
    x = random.bits(random.key(0), (40, 50)) % 7
    _, expected = x.sort(dim=dim, descending=descending, stable=True)
    assert torch.equal(stable_argsort(x, dim, descending), expected)


def test_the_operators_are_registered_as_pytorch_wants_it():
    """Schema, fake tensors and tracing."""
    factors = torch.ones(3, 2, 16), torch.ones(3, 16, 32)
    torch.library.opcheck(skinny_bmm, factors)
    for dtype in (torch.int64, torch.float32):
        x = random.bits(random.key(0), (3, 4)).to(dtype)
        torch.library.opcheck(stable_argsort, (x, -1, False))
