"""An actor and a critic of the same shape: tanh layers, orthogonal weights, no sharing between the two.

Both are held as one stack of matrices, so that a layer of both is one product.

Source: the settings of Huang et al. 2022, "The 37 implementation details of PPO", details 2 and 13.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from funcppo import random
from funcppo.nets.base import DIAGONAL_GAUSSIAN, Agent, Dense, GaussianPolicyValue, PolicyValue, dense
from funcppo.types import F32, I64


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPConfig:
    """Static sizes."""

    n_obs: int  # numbers in an observation
    n_actions: int  # discrete actions, or components of a continuous one
    hidden: tuple[int, ...] = (64, 64)
    matmul_dtype: torch.dtype | None = None  # of matrices; None: that of the params


class Params(NamedTuple):
    """Actor and critic; weights are [2, In, Out], the actor's first."""

    hidden: tuple[Dense, ...]
    heads: Dense  # as wide as the actor's; the critic's is filled up with zeros, which get no gradient


class GaussianParams(NamedTuple):
    """As `Params`, with a standard deviation that does not depend on the observation."""

    net: Params
    log_std: F32[Tensor, "D"]


def init(cfg: MLPConfig, key: I64[Tensor, "2"]) -> Params:
    """Orthogonal weights, gain sqrt(2), 0.01 for the policy and 1 for the value; zero biases."""
    *hidden_keys, policy_key, value_key = random.split(key, len(cfg.hidden) + 2).unbind()
    hidden, n_in = [], cfg.n_obs
    for hidden_key, n_out in zip(hidden_keys, cfg.hidden):
        pair = [orthogonal(k, n_in, n_out, math.sqrt(2.0)) for k in random.split(hidden_key).unbind()]
        hidden.append(Dense(torch.stack(pair), torch.zeros(2, 1, n_out, device=key.device)))
        n_in = n_out
    policy = Dense(orthogonal(policy_key, n_in, cfg.n_actions, 0.01), torch.zeros(cfg.n_actions, device=key.device))
    value = Dense(orthogonal(value_key, n_in, 1, 1.0), torch.zeros(1, device=key.device))
    return Params(hidden=tuple(hidden), heads=stack_heads(policy, value))


def stack_heads(policy: Dense, value: Dense) -> Dense:
    """Both heads as one stack."""
    fill = (0, policy.bias.shape[0] - 1)
    weight = torch.stack([policy.weight, pad(value.weight, fill)])
    return Dense(weight, torch.stack([policy.bias, pad(value.bias, fill)]).unsqueeze(1))


def apply(cfg: MLPConfig, world: Any, params: Params, obs: F32[Tensor, "B F"]) -> PolicyValue:
    """Logits, none of them masked, and value."""
    x = obs.expand(2, *obs.shape)
    for layer in params.hidden:
        x = torch.tanh(dense(layer, x, cfg.matmul_dtype))
    out = dense(params.heads, x, cfg.matmul_dtype)
    return PolicyValue(logits=out[0], value=out[1, :, 0])


def init_gaussian(cfg: MLPConfig, key: I64[Tensor, "2"]) -> GaussianParams:
    """As `init`, with unit standard deviations."""
    return GaussianParams(net=init(cfg, key), log_std=torch.zeros(cfg.n_actions, device=key.device))


def apply_gaussian(cfg: MLPConfig, world: Any, params: GaussianParams, obs: F32[Tensor, "B F"]) -> GaussianPolicyValue:
    """Mean, log standard deviation and value."""
    out = apply(cfg, world, params.net, obs)
    return GaussianPolicyValue(mean=out.logits, log_std=params.log_std.expand_as(out.logits), value=out.value)


def orthogonal(key: I64[Tensor, "2"], n_in: int, n_out: int, gain: float) -> F32[Tensor, "In Out"]:
    """`gain` times a matrix with orthonormal rows or columns, uniform over all such matrices.

    Source: Saxe et al. 2014, arXiv:1312.6120; sign correction of Mezzadri 2007, arXiv:math-ph/0609050.
    """
    q, r = torch.linalg.qr(random.normal(key, (max(n_in, n_out), min(n_in, n_out))))
    q = q * torch.sign(torch.diagonal(r))
    return (gain * (q if n_in >= n_out else q.T)).clone(memory_format=torch.contiguous_format)


def agent(cfg: MLPConfig) -> Agent:
    """The network for discrete actions."""
    return Agent(cfg=cfg, init=init, apply=apply)


def gaussian_agent(cfg: MLPConfig) -> Agent:
    """The network for continuous actions."""
    return Agent(cfg=cfg, init=init_gaussian, apply=apply_gaussian, distribution=DIAGONAL_GAUSSIAN)
