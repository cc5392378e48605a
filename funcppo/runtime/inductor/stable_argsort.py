"""A stable argsort as an operator that Inductor leaves to PyTorch.

Inductor writes a kernel of its own for rows of up to some hundred numbers. For thousands of rows PyTorch's sort is
faster, for few it is as fast, and Triton takes seconds to compile the kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _stable_argsort(x: Tensor, dim: int, descending: bool) -> Tensor:
    """Return `torch.argsort` of x, stable."""
    return torch.argsort(x, dim=dim, descending=descending, stable=True)


def _empty(x: Tensor, dim: int, descending: bool) -> Tensor:
    return torch.empty_like(x, dtype=torch.int64)


# declared by hand, because `torch.library.custom_op` imports Dynamo
_LIBRARY = torch.library.Library("funcppo", "FRAGMENT")
_LIBRARY.define("stable_argsort(Tensor x, int dim, bool descending) -> Tensor")
_LIBRARY.impl("stable_argsort", _stable_argsort, "CompositeExplicitAutograd")
torch.library.register_fake("funcppo::stable_argsort", _empty, lib=_LIBRARY)
stable_argsort: Any = torch.ops.funcppo.stable_argsort.default
