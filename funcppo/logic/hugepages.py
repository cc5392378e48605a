"""Large tables of the host in huge pages, so that a read at a random place seldom has to look its page up in memory."""

from __future__ import annotations

import mmap

import numpy as np
import torch
from torch import Tensor

MIN_HUGE_PAGE_BYTES = 1 << 25  # bytes; the caches of a processor reach smaller tables anyway


def on_huge_pages(table: Tensor) -> Tensor:
    """The table, copied where the system may give it huge pages; as it is on another device, or where it is small."""
    if table.device.type != "cpu" or table.nbytes < MIN_HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return table
    try:
        memory = mmap.mmap(-1, table.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without huge pages, or no room for a copy
        return table
    copied = np.frombuffer(memory, dtype=table.numpy().dtype).reshape(table.shape)
    np.copyto(copied, table.numpy())
    return torch.from_numpy(copied)
