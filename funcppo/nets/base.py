"""What every network returns, and the dense layer they are made of."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funcppo import random
from funcppo.types import F32, I64


class PolicyValue(NamedTuple):
    """The output of a discrete actor-critic."""

    logits: F32[Tensor, "B S"]  # the smallest finite number where an action is illegal
    value: F32[Tensor, "B"]


class Dense(NamedTuple):
    """An affine map."""

    weight: F32[Tensor, "In Out"]
    bias: F32[Tensor, "Out"]


def init_dense(key: I64[Tensor, "2"], n_in: int, n_out: int, scale: float = 1.0) -> Dense:
    """Weights uniform on +-scale sqrt(3 / n_in), so that unit inputs give outputs of variance scale**2; zero bias."""
    bound = scale * (3.0 / n_in) ** 0.5
    return Dense((2.0 * random.uniform(key, (n_in, n_out)) - 1.0) * bound, torch.zeros(n_out, device=key.device))


def dense(params: Dense, x: F32[Tensor, "... In"]) -> F32[Tensor, "... Out"]:
    """x W + b."""
    return x @ params.weight + params.bias
