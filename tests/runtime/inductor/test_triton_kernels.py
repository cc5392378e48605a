"""The kernel multiplies matrices of any strides. Triton comes with CUDA builds of PyTorch only."""

from __future__ import annotations

import pytest
import torch

from funcppo.core import random
from tests.runtime.test_capture import on_gpu

pytestmark = on_gpu


def launch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    from funcppo.runtime.inductor.triton_kernels import skinny_bmm_kernel

    # an element that is not written shows
    out = a.new_full((a.shape[0], a.shape[1], b.shape[2]), torch.nan)
    sizes = (a.shape[1], b.shape[2], b.shape[1])
    skinny_bmm_kernel[(len(a),)](
        a, b, out, *a.stride(), *b.stride(), *sizes, num_warps=1
    )
    return out


def test_a_product_with_the_identity_is_the_rows():
    rows = random.normal(random.key(0), (5, 3, 16)).cuda()
    assert torch.equal(
        launch(rows, torch.eye(16, device="cuda").expand(5, 16, 16)), rows
    )


@pytest.mark.parametrize("m", [1, 2, 8])
@pytest.mark.parametrize(("k", "n"), [(16, 16), (128, 64), (64, 128)])
def test_products_of_any_strides_are_those_of_float64(m, k, n):
    """Rows and matrices contiguous, transposed, and cut out of larger ones; 1e-6 a term."""
    a = random.normal(random.key(0), (7, m, k)).cuda()
    b = random.normal(random.key(1), (7, k, n)).cuda()
    layouts = [
        lambda x: x,
        lambda x: x.mT.contiguous().mT,
        lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    ]
    want = a.double() @ b.double()
    for of_a in layouts:
        for of_b in layouts:
            torch.testing.assert_close(
                launch(of_a(a), of_b(b)).double(), want, rtol=0, atol=1e-6 * k
            )
