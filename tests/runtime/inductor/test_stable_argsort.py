"""The operator is a stable argsort, for eager code and for a compiler."""

from __future__ import annotations

import pytest
import torch

from funcppo.core import random
from funcppo.runtime.inductor.stable_argsort import stable_argsort


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("descending", [False, True])
def test_equal_numbers_keep_their_order(dim: int, descending: bool) -> None:
    x = random.bits(random.key(0), (40, 50)) % 7
    values, expected = x.sort(dim=dim, descending=descending, stable=True)
    order = stable_argsort(x, dim, descending)
    assert torch.equal(order, expected)
    assert torch.equal(x.gather(dim, order), values)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_compiler_knows_shape_and_dtype(dtype: torch.dtype) -> None:
    x = random.bits(random.key(0), (3, 4)).to(dtype)
    torch.library.opcheck(stable_argsort, (x, -1, False))
