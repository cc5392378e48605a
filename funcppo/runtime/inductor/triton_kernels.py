"""Triton kernels for operations that neither libraries nor Inductor do well; a CUDA build of PyTorch is needed."""

from __future__ import annotations

from typing import Any

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


def _skinny_bmm_kernel(
    a,
    b,
    out,
    a_n,
    a_m,
    a_k,
    b_n,
    b_k,
    b_c,
    rows: tl.constexpr,
    columns: tl.constexpr,
    inner: tl.constexpr,
):
    """out[n, m] = sum over k of a[n, m, k] b[n, k], for one n a block; `out` is contiguous."""
    n = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, inner)
    c = tl.arange(0, columns)

    # The matrix is read once and stays in registers; the loop over the rows is unrolled.
    matrix = tl.load(b + n * b_n + k[:, None] * b_k + c[None, :] * b_c)
    for row in tl.static_range(rows):
        x = tl.load(a + n * a_n + row * a_m + k * a_k)
        product = tl.sum(x[:, None] * matrix, 0)
        tl.store(out + (n * rows + row) * columns + c, product)


skinny_bmm_kernel: Any = triton.jit(_skinny_bmm_kernel)
