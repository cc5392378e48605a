"""Back large host tables with huge pages, to reduce TLB misses on random access."""

from __future__ import annotations

import mmap

import numpy as np
from torch import Tensor

from funcppo.kg.logic.typed_torch import from_numpy

# bytes; smaller tables are within reach of the processor's caches
MIN_HUGE_PAGE_BYTES = 1 << 25


def on_huge_pages(table: Tensor) -> Tensor:
    """Copy a large CPU tensor onto huge pages where the system grants them.

    Returns:
      The copy; the tensor itself if it is small or on another device, or if there are no huge pages.
    """
    is_large = (
        table.device.type == "cpu" and table.nbytes >= MIN_HUGE_PAGE_BYTES
    )
    if not is_large or not hasattr(mmap, "MADV_HUGEPAGE"):
        return table
    try:
        memory = mmap.mmap(
            -1, table.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without huge pages, or no memory for a copy
        return table

    source = table.numpy()
    copy = np.frombuffer(memory, dtype=source.dtype).reshape(table.shape)
    np.copyto(copy, source)
    return from_numpy(copy)
