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
    """Compute out[n, m] = sum over k of a[n, m, k] b[n, k], one n per block; `out` is contiguous."""
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


def _sum_products_kernel(
    offsets,
    left_row,
    right_row,
    edge,
    is_kept,
    left,
    right,
    out,
    width,
    columns: tl.constexpr,
    has_right: tl.constexpr,
    has_mask: tl.constexpr,
    dtype: tl.constexpr,
):
    """Sum products of rows by part: out[p] = sum over i of part p of left[left_row[i]] * right[right_row[i]].

    Without a right, out[p] is the sum of left[i]. With a mask, products of edges that are not kept are left out.

    A program has some columns of a part. Programs that run together have the same columns, so that what they read
    of the rows stays in the cache.
    """
    part = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    is_column = column < width
    total = tl.zeros([columns], dtype=dtype)
    for i in range(tl.load(offsets + part), tl.load(offsets + part + 1)):
        if has_right:
            place = tl.load(left_row + i) * width + column
            x = tl.load(left + place, is_column, 0.0).to(dtype)
            place = tl.load(right_row + i) * width + column
            product = x * tl.load(right + place, is_column, 0.0).to(dtype)
            if has_mask:
                kept = tl.load(is_kept + tl.load(edge + i))
                product = product * kept.to(dtype)
            total += product
        else:
            row = left + i * width
            total += tl.load(row + column, is_column, 0.0).to(dtype)
    tl.store(out + part * width + column, total, is_column)


sum_products_kernel: Any = triton.jit(_sum_products_kernel)
