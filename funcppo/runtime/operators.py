"""Operators of this package in graphs of PyTorch; importing the module registers them, and imports no compiler.

`skinny_bmm` multiplies a few rows with one small matrix each. A rollout step of many networks under vmap is a large
batch of such products. Libraries work on tiles, which these products leave mostly empty. The kernel reads each matrix
once, from end to end, and multiplies all rows with it, so it takes as long as reading the matrices.

`stable_argsort` is one that Inductor leaves to PyTorch. Inductor writes a kernel of its own for rows of up to some
hundred numbers. For thousands of rows PyTorch's sort is faster, for few it is as fast, and Triton takes seconds to
compile the kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def supports_skinny_bmm(a: Tensor, b: Tensor, max_m: int) -> bool:
    """Return whether `skinny_bmm` supports this batch of products and is worth its launch.

    Args:
      a: left factors [n, M, K].
      b: right factors [n, K, N].
      max_m: the largest number of rows M for which the kernel is the faster one.
    """
    if not a.dtype == b.dtype == torch.float32 or b.ndim != 3:
        return False
    batch_size, m = a.shape[:2]
    k, n = b.shape[1:]
    # Triton's blocks are powers of two; one block holds a matrix in registers.
    sizes = (16, 32, 64, 128)
    fits_kernel = k in sizes and n in sizes and k * n <= 8192
    # 128 products, one a block, occupy a GPU.
    return fits_kernel and 1 < m <= max_m and batch_size >= 128


def _skinny_bmm(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b for a batch of small matrices.

    Args:
      a: left factors [n, M, K], of any strides.
      b: right factors [n, K, N], of any strides, that `supports_skinny_bmm`.
    """
    if not a.is_cuda:
        return torch.bmm(a, b)
    # Triton comes with CUDA builds only.
    from funcppo.runtime.triton_kernels import skinny_bmm_kernel

    batch_size, m, _ = a.shape
    _, k, n = b.shape
    out = a.new_empty((batch_size, m, n))
    grid = (batch_size,)
    skinny_bmm_kernel[grid](
        a, b, out, *a.stride(), *b.stride(), m, n, k, num_warps=1
    )
    return out


def _stable_argsort(x: Tensor, dim: int, descending: bool) -> Tensor:
    """Return the indices of a stable sort of x, [.., n] int64."""
    return torch.argsort(x, dim=dim, descending=descending, stable=True)


# declared by hand, because `torch.library.custom_op` imports Dynamo
_LIBRARY = torch.library.Library("funcppo", "FRAGMENT")
_LIBRARY.define("skinny_bmm(Tensor a, Tensor b) -> Tensor")
_LIBRARY.impl("skinny_bmm", _skinny_bmm, "CompositeExplicitAutograd")
_LIBRARY.define("stable_argsort(Tensor x, int dim, bool descending) -> Tensor")
_LIBRARY.impl("stable_argsort", _stable_argsort, "CompositeExplicitAutograd")


@torch.library.register_fake("funcppo::skinny_bmm", lib=_LIBRARY)
def _empty_product(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((*a.shape[:2], b.shape[2]))


@torch.library.register_fake("funcppo::stable_argsort", lib=_LIBRARY)
def _empty_order(x: Tensor, dim: int, descending: bool) -> Tensor:
    return torch.empty_like(x, dtype=torch.int64)


skinny_bmm: Any = torch.ops.funcppo.skinny_bmm.default
stable_argsort: Any = torch.ops.funcppo.stable_argsort.default
