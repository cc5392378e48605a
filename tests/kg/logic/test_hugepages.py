"""A table on huge pages holds the same numbers elsewhere; a small one stays where it is."""

from __future__ import annotations

import mmap

import pytest
import torch

from funcppo.kg.logic import row_index


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_large_table_in_huge_pages_is_the_same_table_elsewhere(dtype):
    table = torch.arange(
        row_index.MIN_HUGE_PAGE_BYTES // dtype.itemsize, dtype=dtype
    ).view(2, -1)
    copied = row_index.on_huge_pages(table)
    assert copied.dtype == dtype and torch.equal(copied, table)
    assert (copied.data_ptr() != table.data_ptr()) == hasattr(
        mmap, "MADV_HUGEPAGE"
    )
    small = table[:, 1:]
    assert row_index.on_huge_pages(small) is small


def test_without_huge_pages_the_table_is_returned(monkeypatch):
    monkeypatch.setattr(row_index, "MIN_HUGE_PAGE_BYTES", 1)
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    table = torch.arange(10)
    assert row_index.on_huge_pages(table) is table
