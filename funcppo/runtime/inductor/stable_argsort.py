"""A stable argsort as an operator that Inductor leaves to PyTorch.

Inductor writes a kernel of its own for rows of up to some hundred numbers. For thousands of rows PyTorch's sort is
faster.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("funcppo::stable_argsort", mutates_args=())
def stable_argsort(x: Tensor, dim: int, descending: bool) -> Tensor:
    """Return `torch.argsort` of x, stable."""
    return torch.argsort(x, dim=dim, descending=descending, stable=True)


@stable_argsort.register_fake
def _(x: Tensor, dim: int, descending: bool) -> Tensor:
    return torch.empty_like(x, dtype=torch.int64)
