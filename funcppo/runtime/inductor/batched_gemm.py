"""Batched products of a few rows with one small matrix each, as an operator of its own.

A rollout step of many networks under vmap is a large batch of such products. Libraries work on tiles, which these
products leave mostly empty. The kernel of `skinny_bmm` reads each matrix once, from end to end, and multiplies all
rows with it, so it takes as long as reading the matrices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# K and N that the kernel takes: Triton's block sizes are powers of two
SUPPORTED_DIMS = (16, 32, 64, 128)
MAX_MATRIX_ELEMENTS = 1 << 13  # K * N that one block can hold in registers
MIN_BATCH_SIZE = 128  # products that occupy a GPU, one a block


def supports_skinny_bmm(a: Tensor, b: Tensor, max_m: int) -> bool:
    """Return whether `skinny_bmm` takes this batch of products and is worth its launch.

    Args:
      a: left factors [n, M, K].
      b: right factors [n, K, N].
      max_m: the largest number of rows M for which the kernel is the faster one.
    """
    if not a.dtype == b.dtype == torch.float32:
        return False
    if b.ndim != 3:
        return False

    batch_size, m = a.shape[:2]
    k, n = b.shape[1:]
    fits_kernel = (
        k in SUPPORTED_DIMS
        and n in SUPPORTED_DIMS
        and k * n <= MAX_MATRIX_ELEMENTS
    )
    return fits_kernel and 1 < m <= max_m and batch_size >= MIN_BATCH_SIZE


def _skinny_bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b.

    Args:
      a: left factors [n, M, K], of any strides.
      b: right factors [n, K, N], of any strides; K and N are in `SUPPORTED_DIMS`.
    """
    if not a.is_cuda:
        return torch.bmm(a, b)
    # Triton comes with CUDA builds only.
    from funcppo.runtime.inductor.triton_kernels import skinny_bmm_kernel

    batch_size, m, _ = a.shape
    _, k, n = b.shape
    out = a.new_empty((batch_size, m, n))
    grid = (batch_size,)
    skinny_bmm_kernel[grid](
        a, b, out, *a.stride(), *b.stride(), m, n, k, num_warps=1
    )
    return out


def _empty(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((*a.shape[:2], b.shape[2]))


# declared by hand, because `torch.library.custom_op` imports Dynamo
_LIBRARY = torch.library.Library("funcppo", "FRAGMENT")
_LIBRARY.define("skinny_bmm(Tensor a, Tensor b) -> Tensor")
_LIBRARY.impl("skinny_bmm", _skinny_bmm, "CompositeExplicitAutograd")
torch.library.register_fake("funcppo::skinny_bmm", _empty, lib=_LIBRARY)
skinny_bmm: Callable[[Tensor, Tensor], Tensor] = (
    torch.ops.funcppo.skinny_bmm.default
)
