"""Common outputs of networks, and the dense layer that they are made of."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core import random
from funcppo.core.types import F32, I64
from funcppo.interfaces import (
    CATEGORICAL,
    DIAGONAL_GAUSSIAN,
    MULTI_CATEGORICAL,
    SQUASHED_GAUSSIAN,
    ActorCriticOutput,
    Agent,
    Distribution,
    MaskedObservation,
    NetworkFactory,
)

__all__ = [
    "CATEGORICAL",
    "DIAGONAL_GAUSSIAN",
    "MULTI_CATEGORICAL",
    "SQUASHED_GAUSSIAN",
    "ActorCriticOutput",
    "Agent",
    "Dense",
    "Distribution",
    "GaussianPolicyValue",
    "NetworkFactory",
    "PolicyValue",
    "dense",
    "features",
    "init_dense",
    "with_features",
]


def features(obs: Tensor | MaskedObservation) -> Tensor:
    """What an observation shows beside the action mask."""
    return obs.features if isinstance(obs, MaskedObservation) else obs


def with_features(
    obs: Tensor | MaskedObservation, features: Tensor
) -> Tensor | MaskedObservation:
    """The observation with other features, and the action mask where it has one."""
    if isinstance(obs, MaskedObservation):
        return MaskedObservation(features, obs.action_mask)
    return features


class PolicyValue(NamedTuple):
    """The output of an actor-critic over discrete actions."""

    # [B, S], -inf for an illegal action; [B, D, S] for D actions at once, the shorter ones filled up by -inf
    logits: F32[Tensor, "B S"] | F32[Tensor, "B D S"]
    value: F32[Tensor, "B"]


class GaussianPolicyValue(NamedTuple):
    """The output of an actor-critic over continuous actions."""

    mean: F32[Tensor, "B U"]
    log_std: F32[Tensor, "B U"]
    value: F32[Tensor, "B"]


class Dense(NamedTuple):
    """An affine map, or a stack of them. Sizes differ from layer to layer, so their axes have no letters."""

    weight: Tensor  # [..., In, Out]
    bias: Tensor  # [Out]; [..., 1, Out] in a stack


def init_dense(
    key: I64[Tensor, "2"], n_in: int, n_out: int, scale: float = 1.0
) -> Dense:
    """A layer with uniform weights on +-scale sqrt(3 / n_in) and zero bias: unit inputs give variance scale**2."""
    bound = scale * (3.0 / n_in) ** 0.5
    weight = (2.0 * random.uniform(key, (n_in, n_out)) - 1.0) * bound
    return Dense(weight, torch.zeros(n_out, device=key.device))


def dense(
    params: Dense,
    x: F32[Tensor, "... In"],
    matmul_dtype: torch.dtype | None = None,
) -> F32[Tensor, "... Out"]:
    """Apply a layer: x W + b.

    Args:
      matmul_dtype: dtype of the matrix product and of its gradients; the bias is added in the dtype of `x`. None: the
        dtype of the operands.
    """
    if matmul_dtype is None:
        return x @ params.weight + params.bias
    product = x.to(matmul_dtype) @ params.weight.to(matmul_dtype)
    return product.to(x.dtype) + params.bias
