"""An actor and a critic of the same shape: tanh layers, orthogonal weights, no sharing between the two.

`mlp` builds the network for an environment; `agent` and `gaussian_agent` build it from sizes. Actor and critic are one
stack of matrices, so that a layer of both is one batched matrix product.

Source: the settings of Huang et al. 2022, "The 37 implementation details of PPO", details 2 and 13.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from funcppo import random
from funcppo.interfaces import AnyAgent, EnvironmentSpec, MaskedObservation
from funcppo.nets.base import (
    DIAGONAL_GAUSSIAN,
    Agent,
    Dense,
    GaussianPolicyValue,
    NetworkFactory,
    PolicyValue,
    dense,
)
from funcppo.ranges import Size, check_fields
from funcppo.types import F32, I64

HIDDEN_GAIN = math.sqrt(2.0)
POLICY_GAIN = 0.01  # the first policy is nearly uniform
VALUE_GAIN = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPConfig:
    """Static sizes."""

    n_obs: Size  # numbers in an observation
    n_actions: Size  # discrete actions, or components of a continuous one
    hidden: tuple[Size, ...] = (64, 64)  # units of each hidden layer
    # dtype of matrix products; None: that of the params
    matmul_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class Params(NamedTuple):
    """Actor and critic; weights are [2, In, Out], the actor's first."""

    hidden: tuple[Dense, ...]
    # as wide as the actor's; the critic's is padded with zeros, which get no gradient
    heads: Dense


class GaussianParams(NamedTuple):
    """As `Params`, with a standard deviation that does not depend on the observation."""

    net: Params
    log_std: F32[Tensor, "U"]


def init(cfg: MLPConfig, key: I64[Tensor, "2"]) -> Params:
    """Parameters with orthogonal weights, gain sqrt(2) in hidden layers, 0.01 for the policy, 1 for the value."""
    *hidden_keys, policy_key, value_key = random.split(
        key, len(cfg.hidden) + 2
    ).unbind()

    hidden: list[Dense] = []
    n_in = cfg.n_obs
    for layer_key, n_out in zip(hidden_keys, cfg.hidden):
        actor_and_critic = [
            orthogonal(k, n_in, n_out, HIDDEN_GAIN)
            for k in random.split(layer_key).unbind()
        ]
        hidden.append(
            Dense(
                torch.stack(actor_and_critic),
                torch.zeros(2, 1, n_out, device=key.device),
            )
        )
        n_in = n_out

    policy_weight = orthogonal(policy_key, n_in, cfg.n_actions, POLICY_GAIN)
    value_weight = orthogonal(value_key, n_in, 1, VALUE_GAIN)
    policy_head = Dense(
        policy_weight, torch.zeros(cfg.n_actions, device=key.device)
    )
    value_head = Dense(value_weight, torch.zeros(1, device=key.device))
    return Params(
        hidden=tuple(hidden), heads=stack_heads(policy_head, value_head)
    )


def stack_heads(policy: Dense, value: Dense) -> Dense:
    """Both heads as one stack, the value's padded to the width of the policy's."""
    padding = (0, policy.bias.shape[0] - 1)
    weight = torch.stack([policy.weight, pad(value.weight, padding)])
    bias = torch.stack([policy.bias, pad(value.bias, padding)])
    return Dense(weight, bias.unsqueeze(1))


def apply(
    cfg: MLPConfig,
    world: object,
    params: Params,
    obs: F32[Tensor, "B F"] | MaskedObservation,
) -> PolicyValue:
    """Logits, -inf for actions that the observation masks, and value."""
    features = obs.features if isinstance(obs, MaskedObservation) else obs
    x = features.expand(2, *features.shape)
    for layer in params.hidden:
        x = torch.tanh(dense(layer, x, cfg.matmul_dtype))
    policy_and_value = dense(params.heads, x, cfg.matmul_dtype)
    logits, value = policy_and_value[0], policy_and_value[1, :, 0]
    if isinstance(obs, MaskedObservation):
        logits = torch.where(obs.action_mask, logits, -torch.inf)
    return PolicyValue(logits=logits, value=value)


def init_gaussian(cfg: MLPConfig, key: I64[Tensor, "2"]) -> GaussianParams:
    """Parameters as those of `init`, with unit standard deviations."""
    return GaussianParams(
        net=init(cfg, key),
        log_std=torch.zeros(cfg.n_actions, device=key.device),
    )


def apply_gaussian(
    cfg: MLPConfig,
    world: object,
    params: GaussianParams,
    obs: F32[Tensor, "B F"],
) -> GaussianPolicyValue:
    """Mean, log standard deviation and value."""
    output = apply(cfg, world, params.net, obs)
    return GaussianPolicyValue(
        mean=output.logits,
        log_std=params.log_std.expand_as(output.logits),
        value=output.value,
    )


def orthogonal(
    key: I64[Tensor, "2"], n_in: int, n_out: int, gain: float
) -> F32[Tensor, "In Out"]:
    """`gain` times a matrix with orthonormal rows or columns, uniform over all such matrices.

    Source: Saxe et al. 2014, arXiv:1312.6120; sign correction of Mezzadri 2007, arXiv:math-ph/0609050.
    """
    gaussian = random.normal(key, (max(n_in, n_out), min(n_in, n_out)))
    factors = torch.linalg.qr(gaussian)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    q, r = cast(tuple[Tensor, Tensor], factors)
    # Without the signs of r's diagonal, q would not be uniform.
    q = q * torch.sign(torch.diagonal(r))
    oriented = q if n_in >= n_out else q.T
    return (gain * oriented).clone(memory_format=torch.contiguous_format)


def agent(
    cfg: MLPConfig,
) -> Agent[object, Params, Tensor | MaskedObservation, PolicyValue]:
    """The network for discrete actions."""
    return Agent(cfg=cfg, init=init, apply=apply)


def gaussian_agent(
    cfg: MLPConfig,
) -> Agent[object, GaussianParams, Tensor, GaussianPolicyValue]:
    """The network for continuous actions."""
    return Agent(
        cfg=cfg,
        init=init_gaussian,
        apply=apply_gaussian,
        distribution=DIAGONAL_GAUSSIAN,
    )


def mlp(
    *hidden: int, matmul_dtype: torch.dtype | None = None
) -> NetworkFactory:
    """A network with tanh layers, built for the environment that it is used with.

    Observations are [B, F], or of type `MaskedObservation` where actions are discrete.

    Args:
      hidden: units of each hidden layer.
      matmul_dtype: dtype of matrix products; None: that of the params.

    Returns:
      A function of an `EnvironmentSpec` that builds the agent, categorical or Gaussian as the actions are.
    """

    def build(spec: EnvironmentSpec, /) -> AnyAgent:
        cfg = MLPConfig(
            n_obs=spec.observation_size,
            n_actions=spec.action_size,
            hidden=hidden,
            matmul_dtype=matmul_dtype,
        )
        return gaussian_agent(cfg) if spec.continuous_actions else agent(cfg)

    return build
