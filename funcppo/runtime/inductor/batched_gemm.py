"""Products of a few rows with one small matrix each, for a large batch: learners under vmap taking a rollout step.

Libraries work on tiles that such a product leaves mostly empty. Here a block reads its matrix once, from end to end,
and all rows meet it there, so that the time is that of reading the matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor

SUPPORTED_DIMS = (16, 32, 64, 128)  # of a matrix
MAX_MATRIX_ELEMENTS = 1 << 13  # its entries, that a block can hold


def supports_skinny_bmm(a: Tensor, b: Tensor, max_m: int) -> bool:
    """Whether `product` takes this batch of products, and has enough of them for a GPU."""
    float32 = a.dtype == b.dtype == torch.float32
    small = (
        b.ndim == 3
        and b.shape[1] in SUPPORTED_DIMS
        and b.shape[2] in SUPPORTED_DIMS
        and b.shape[1] * b.shape[2] <= MAX_MATRIX_ELEMENTS
    )
    return float32 and small and 1 < a.shape[1] <= max_m and a.shape[0] >= 128


@torch.library.custom_op("funcppo::thin_product", mutates_args=())
def skinny_bmm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for a [n, rows, K] and b [n, K, N]; K and N of SIDES."""
    if not a.is_cuda:
        return torch.bmm(a, b)
    from funcppo.runtime.inductor.triton_kernels import skinny_bmm_kernel

    out = a.new_empty((*a.shape[:2], b.shape[2]))
    skinny_bmm_kernel[(len(a),)](a, b, out, *a.stride(), *b.stride(), *out.shape[1:], b.shape[1], num_warps=1)
    return out


@skinny_bmm.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((*a.shape[:2], b.shape[2]))
