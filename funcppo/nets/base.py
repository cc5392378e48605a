"""What every network returns, how actions are drawn from it, and the dense layer that networks are made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcppo import random
from funcppo.types import F32, I64


class PolicyValue(NamedTuple):
    """The output of a discrete actor-critic."""

    logits: F32[Tensor, "B S"]  # the smallest finite number where an action is illegal
    value: F32[Tensor, "B"]


class GaussianPolicyValue(NamedTuple):
    """The output of an actor-critic over continuous actions."""

    mean: F32[Tensor, "B D"]
    log_std: F32[Tensor, "B D"]
    value: F32[Tensor, "B"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """How a network's output is read as a distribution over actions. `out` is the NamedTuple that `apply` returns.

    Functions that another process can import by name let parts of a step compile side by side (`runtime/parallel_compile.py`).
    """

    sample: Callable[[I64[Tensor, "2"], Any], Tensor]  # (key, out) -> action [B, ...]
    log_prob: Callable[[Any, Tensor], Tensor]  # (out, action) -> [B]
    entropy: Callable[[Any], Tensor]  # out -> [B], in nats
    mode: Callable[[Any], Tensor]  # out -> the most probable action [B, ...]


def _log_prob(out: PolicyValue, action: I64[Tensor, "B"]) -> F32[Tensor, "B"]:
    return torch.log_softmax(out.logits, -1).gather(-1, action.unsqueeze(-1)).squeeze(-1)


def _entropy(out: PolicyValue) -> F32[Tensor, "B"]:
    log_p = torch.log_softmax(out.logits, -1)
    p = log_p.exp()
    return -torch.where(p > 0, p * log_p, 0.0).sum(-1)  # a masked action has probability 0 and adds nothing


def _sample(key: I64[Tensor, "2"], out: PolicyValue) -> I64[Tensor, "B"]:
    return random.categorical(key, torch.log_softmax(out.logits, -1))


def _mode(out: PolicyValue) -> I64[Tensor, "B"]:
    return out.logits.argmax(-1)


CATEGORICAL = Distribution(sample=_sample, log_prob=_log_prob, entropy=_entropy, mode=_mode)


def _normal_sample(key: I64[Tensor, "2"], out: GaussianPolicyValue) -> F32[Tensor, "B D"]:
    return out.mean + out.log_std.exp() * random.normal(key, tuple(out.mean.shape))


def _normal_log_prob(out: GaussianPolicyValue, action: F32[Tensor, "B D"]) -> F32[Tensor, "B"]:
    z = (action - out.mean) * torch.exp(-out.log_std)
    return -(0.5 * z * z + out.log_std + 0.5 * math.log(2 * math.pi)).sum(-1)


def _normal_entropy(out: GaussianPolicyValue) -> F32[Tensor, "B"]:
    return (out.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def _mean(out: GaussianPolicyValue) -> F32[Tensor, "B D"]:
    return out.mean


DIAGONAL_GAUSSIAN = Distribution(sample=_normal_sample, log_prob=_normal_log_prob, entropy=_normal_entropy, mode=_mean)


@dataclass(frozen=True, kw_only=True, slots=True)
class Agent:
    """A network as two pure functions, its settings, and the distribution that its output stands for."""

    cfg: Any  # a frozen dataclass; handed to init and apply as their first argument
    init: Callable[[Any, Tensor], Any]  # (cfg, key) -> params
    apply: Callable[[Any, Any, Any, Any], Any]  # (cfg, world, params, obs) -> PolicyValue or GaussianValue
    distribution: Distribution = CATEGORICAL
    within_capacity: Callable[[Any, Any], Tensor] | None = (
        None  # (cfg, obs) -> rows whose output means something [B]; None: all
    )


class Dense(NamedTuple):
    """An affine map, or a stack of them. Sizes differ from layer to layer, so no axis has a name of its own."""

    weight: Tensor  # [..., In, Out]
    bias: Tensor  # [Out]; [..., 1, Out] in a stack


def init_dense(key: I64[Tensor, "2"], n_in: int, n_out: int, scale: float = 1.0) -> Dense:
    """Weights uniform on +-scale sqrt(3 / n_in), so that unit inputs give outputs of variance scale**2; zero bias."""
    bound = scale * (3.0 / n_in) ** 0.5
    return Dense((2.0 * random.uniform(key, (n_in, n_out)) - 1.0) * bound, torch.zeros(n_out, device=key.device))


def dense(params: Dense, x: F32[Tensor, "... In"], matmul_dtype: torch.dtype | None = None) -> F32[Tensor, "... Out"]:
    """x W + b.

    Args:
      products: what the product, and those of its gradients, are computed in; all else, sums included, is as it was.
    """
    if matmul_dtype is None:
        return x @ params.weight + params.bias
    return (x.to(matmul_dtype) @ params.weight.to(matmul_dtype)).to(x.dtype) + params.bias
