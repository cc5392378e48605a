"""Products of a few rows with one small matrix each, for a large batch: learners under vmap taking a rollout step.

Libraries work on tiles that such a product leaves mostly empty. Here a block reads its matrix once, from end to end,
and all rows meet it there, so that the time is that of reading the matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError:  # a PyTorch without GPU comes without it, and never asks for the kernel
    triton = None

SIDES = (16, 32, 64, 128)  # of a matrix
WHOLE = 1 << 13  # its entries, that a block can hold


def fits(a: Tensor, b: Tensor, rows: int) -> bool:
    """Whether `product` takes this batch of products, and has enough of them for a GPU."""
    float32 = a.dtype == b.dtype == torch.float32
    small = b.ndim == 3 and b.shape[1] in SIDES and b.shape[2] in SIDES and b.shape[1] * b.shape[2] <= WHOLE
    return float32 and small and 1 < a.shape[1] <= rows and a.shape[0] >= 128


@torch.library.custom_op("funcppo::thin_product", mutates_args=())
def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for a [n, rows, K] and b [n, K, N]; K and N of SIDES."""
    if not a.is_cuda:
        return torch.bmm(a, b)
    out = a.new_empty((*a.shape[:2], b.shape[2]))
    _kernel[(len(a),)](a, b, out, *a.stride(), *b.stride(), *out.shape[1:], b.shape[1])
    return out


@product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((*a.shape[:2], b.shape[2]))


if triton is not None:

    @triton.jit
    def _kernel(
        a, b, out, a_n, a_m, a_k, b_n, b_k, b_c, rows: tl.constexpr, columns: tl.constexpr, inner: tl.constexpr
    ):
        n = tl.program_id(0).to(tl.int64)
        k, c = tl.arange(0, inner), tl.arange(0, columns)
        matrix = tl.load(b + n * b_n + k[:, None] * b_k + c[None, :] * b_c)
        for row in tl.static_range(rows):
            x = tl.load(a + n * a_n + row * a_m + k * a_k)
            tl.store(out + (n * rows + row) * columns + c, tl.sum(x[:, None] * matrix, 0))
