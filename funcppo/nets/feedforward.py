"""An actor and a critic of the same shape: dense layers, orthogonal weights, by default no sharing between the two.

`mlp` builds the network for an environment; `agent` and `gaussian_agent` build it from sizes. Actor and critic are one
stack of matrices, so that a layer of both is one batched matrix product.

Source: the settings of Huang et al. 2022, "The 37 implementation details of PPO", details 2 and 13.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from funcppo.core import random
from funcppo.core.settings import Size, check_fields
from funcppo.core.types import F32, I64
from funcppo.interfaces import AnyAgent, EnvironmentSpec, MaskedObservation
from funcppo.nets.base import (
    CATEGORICAL,
    DIAGONAL_GAUSSIAN,
    MULTI_CATEGORICAL,
    SQUASHED_GAUSSIAN,
    Agent,
    Dense,
    GaussianPolicyValue,
    NetworkFactory,
    PolicyValue,
    dense,
    features,
)

HIDDEN_GAIN = math.sqrt(2.0)
POLICY_GAIN = 0.01  # the first policy is nearly uniform
VALUE_GAIN = 1.0
# of log deviations that depend on the observation, as in Haarnoja et al. 2018, arXiv:1801.01290
LOG_STD_RANGE = (-20.0, 2.0)

Activation: TypeAlias = Literal["tanh", "relu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPConfig:
    """Static sizes and options."""

    n_obs: Size  # numbers in an observation
    n_actions: Size  # discrete actions, or components of a continuous one
    hidden: tuple[Size, ...] = (64, 64)  # units of each hidden layer
    # dtype of matrix products; None: that of the params
    matmul_dtype: torch.dtype | None = None
    activation: Activation = "tanh"  # of hidden layers
    # one stack of hidden layers for actor and critic
    shared_trunk: bool = False
    # sizes of several discrete actions at once, n_actions in all
    action_sizes: tuple[Size, ...] | None = None
    # of continuous actions: the log deviations are parameters (free), or outputs of the network (state)
    log_std: Literal["free", "state"] = "free"
    # of continuous actions: between -1 and 1, by tanh
    squash: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class Params(NamedTuple):
    """Actor and critic; weights are [2, In, Out], the actor's first. Those of a shared trunk are [1, In, Out]."""

    hidden: tuple[Dense, ...]
    # as wide as the actor's; the critic's is padded with zeros, which get no gradient
    heads: Dense


class GaussianParams(NamedTuple):
    """As `Params`, with a standard deviation that does not depend on the observation."""

    net: Params
    log_std: (
        F32[Tensor, "U"] | tuple[()]
    )  # () if it is an output of the network


def init(cfg: MLPConfig, key: I64[Tensor, "2"]) -> Params:
    """Parameters with orthogonal weights, gain sqrt(2) in hidden layers, 0.01 for the policy, 1 for the value."""
    return _init(cfg, key, cfg.n_actions)


def _init(cfg: MLPConfig, key: I64[Tensor, "2"], n_outputs: int) -> Params:
    """As `init`, with `n_outputs` numbers for the policy."""
    *hidden_keys, policy_key, value_key = random.split(
        key, len(cfg.hidden) + 2
    ).unbind()

    hidden: list[Dense] = []
    n_in = cfg.n_obs
    for layer_key, n_out in zip(hidden_keys, cfg.hidden):
        trunk_keys = random.split(layer_key, _n_trunks(cfg)).unbind()
        trunks = [orthogonal(k, n_in, n_out, HIDDEN_GAIN) for k in trunk_keys]
        bias = torch.zeros(len(trunks), 1, n_out, device=key.device)
        hidden.append(Dense(torch.stack(trunks), bias))
        n_in = n_out

    policy_weight = orthogonal(policy_key, n_in, n_outputs, POLICY_GAIN)
    value_weight = orthogonal(value_key, n_in, 1, VALUE_GAIN)
    policy_head = Dense(
        policy_weight, torch.zeros(n_outputs, device=key.device)
    )
    value_head = Dense(value_weight, torch.zeros(1, device=key.device))
    return Params(
        hidden=tuple(hidden), heads=stack_heads(policy_head, value_head)
    )


def _n_trunks(cfg: MLPConfig) -> int:
    return 1 if cfg.shared_trunk else 2


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
    logits, value = _apply(cfg, params, features(obs))
    if isinstance(obs, MaskedObservation):
        logits = torch.where(obs.action_mask, logits, -torch.inf)
    if cfg.action_sizes is not None:
        logits = _stack_actions(logits, cfg.action_sizes)
    return PolicyValue(logits=logits, value=value)


def _apply(
    cfg: MLPConfig, params: Params, x: F32[Tensor, "B F"]
) -> tuple[F32[Tensor, "B S"], F32[Tensor, "B"]]:
    """The numbers for the policy, and the value."""
    x = x.expand(_n_trunks(cfg), *x.shape)
    for layer in params.hidden:
        x = activate(cfg.activation, dense(layer, x, cfg.matmul_dtype))
    policy_and_value = dense(params.heads, x, cfg.matmul_dtype)
    return policy_and_value[0], policy_and_value[1, :, 0]


def activate(activation: Activation, x: Tensor) -> Tensor:
    """Apply the activation function of a name."""
    return torch.tanh(x) if activation == "tanh" else torch.relu(x)


def _stack_actions(
    logits: F32[Tensor, "B S"], sizes: tuple[int, ...]
) -> F32[Tensor, "B D S"]:
    """The logits of several actions, side by side, as a stack in which -inf fills up the shorter ones."""
    parts = torch.split(logits, list(sizes), -1)
    padded = [
        pad(part, (0, max(sizes) - part.shape[-1]), value=-torch.inf)
        for part in parts
    ]
    return torch.stack(padded, -2)


def init_gaussian(cfg: MLPConfig, key: I64[Tensor, "2"]) -> GaussianParams:
    """Parameters as those of `init`, with unit standard deviations, or nearly so if they are outputs."""
    if cfg.log_std == "state":
        return GaussianParams(_init(cfg, key, 2 * cfg.n_actions), ())
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
    mean, value = _apply(cfg, params.net, obs)
    if isinstance(params.log_std, Tensor):
        log_std = params.log_std.expand_as(mean)
    else:
        mean, log_std = torch.split(mean, cfg.n_actions, -1)
        log_std = log_std.clamp(*LOG_STD_RANGE)
    return GaussianPolicyValue(mean=mean, log_std=log_std, value=value)


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
    distribution = MULTI_CATEGORICAL if cfg.action_sizes else CATEGORICAL
    return Agent(cfg=cfg, init=init, apply=apply, distribution=distribution)


def gaussian_agent(
    cfg: MLPConfig,
) -> Agent[object, GaussianParams, Tensor, GaussianPolicyValue]:
    """The network for continuous actions."""
    return Agent(
        cfg=cfg,
        init=init_gaussian,
        apply=apply_gaussian,
        distribution=SQUASHED_GAUSSIAN if cfg.squash else DIAGONAL_GAUSSIAN,
    )


def mlp(
    *hidden: int,
    activation: Activation = "tanh",
    shared_trunk: bool = False,
    log_std: Literal["free", "state"] = "free",
    squash: bool = False,
    matmul_dtype: torch.dtype | None = None,
) -> NetworkFactory:
    """A network of dense layers, built for the environment that it is used with.

    Observations are [B, F], or of type `MaskedObservation` where actions are discrete.

    Args:
      hidden: units of each hidden layer.
      activation: of hidden layers, tanh or relu.
      shared_trunk: actor and critic share the hidden layers.
      log_std: of continuous actions, the log standard deviations. free: parameters that do not depend on the
        observation; state: outputs of the network, between -20 and 2.
      squash: continuous actions are between -1 and 1, by tanh; see `wrappers.rescale_action`.
      matmul_dtype: dtype of matrix products; None: that of the params.

    Returns:
      A function of an `EnvironmentSpec` that builds the agent: categorical, of several actions, or Gaussian as the
      actions are. It raises a ValueError if an option is out of range, or does not fit the actions.
    """

    def build(spec: EnvironmentSpec, /) -> AnyAgent:
        cfg = MLPConfig(
            n_obs=spec.observation_size,
            n_actions=spec.action_size,
            hidden=hidden,
            matmul_dtype=matmul_dtype,
            activation=activation,
            shared_trunk=shared_trunk,
            action_sizes=spec.action_sizes,
            log_std=log_std,
            squash=squash,
        )
        if spec.continuous_actions:
            return gaussian_agent(cfg)
        if squash or log_std != "free":
            option = "squash" if squash else "log_std"
            raise ValueError(
                f"{option}: expected an environment with continuous actions, got discrete ones"
            )
        return agent(cfg)

    return build
