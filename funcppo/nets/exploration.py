"""Dense layers with noise that depends on the state and stays the same for several steps: `gsde`.

The noise of an action is a random matrix times the features of the actor's last hidden layer. Where the matrix stays
the same, equal states get equal noise: a policy explores by being another function of the state, and not by trembling.

Source: Raffin et al. 2022, "Smooth exploration for robotic reinforcement learning", arXiv:2005.05719, generalised
state-dependent exploration (gSDE). The details are those of Stable-Baselines3 (`use_sde=True`), such as that features
get no gradient through the noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core import random
from funcppo.core.settings import LogStd, Size, check_fields
from funcppo.core.types import F32, I64
from funcppo.interfaces import (
    DIAGONAL_GAUSSIAN,
    Agent,
    AnyAgent,
    Distribution,
    EnvironmentSpec,
)
from funcppo.nets import feedforward
from funcppo.nets.base import Dense, NetworkFactory, dense
from funcppo.nets.feedforward import Activation, MLPConfig, activate

MIN_VARIANCE = 1e-6  # of an action, in its density: features may all be 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GSDEConfig:
    """Static sizes and options."""

    mlp: MLPConfig  # actor and critic
    # of each number of the noise matrix, before the first update
    first_log_std: LogStd = 0.0
    # steps of a rollout for which the noise matrix stays the same; None: all
    noise_steps: Size | None = None
    # orthogonal weights and zero biases at first; else both are uniform
    orthogonal: bool = True

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class Params(NamedTuple):
    """Actor and critic, and the log deviations of the noise matrix."""

    net: feedforward.Params
    log_std: F32[Tensor, "H U"]


class GSDEPolicyValue(NamedTuple):
    """The output of an actor-critic whose noise is a random matrix times features."""

    mean: F32[Tensor, "B U"]
    log_std: F32[Tensor, "B U"]  # of the action, over all noise matrices
    value: F32[Tensor, "B"]
    features: F32[Tensor, "B H"]  # of the actor's last hidden layer
    matrix_std: F32[Tensor, "H U"]  # of the noise matrix


def init(cfg: GSDEConfig, key: I64[Tensor, "2"]) -> Params:
    """Parameters as those of `mlp`, or uniform ones, with equal deviations for all numbers of the noise matrix."""
    net = feedforward.init(cfg.mlp, key)
    if not cfg.orthogonal:
        net = _init_uniform(cfg.mlp, key, net)
    n_features = net.heads.weight.shape[-2]
    log_std = torch.full(
        (n_features, cfg.mlp.n_actions), cfg.first_log_std, device=key.device
    )
    return Params(net, log_std)


def _init_uniform(
    cfg: MLPConfig, key: I64[Tensor, "2"], like: feedforward.Params
) -> feedforward.Params:
    """Parameters of the shapes of others, uniform on +-1 / sqrt(n_in) in each layer, as those of `torch.nn.Linear`."""
    *hidden_keys, policy_key, value_key = random.split(
        key, len(like.hidden) + 2
    ).unbind()
    hidden = [
        _uniform_layer(k, tuple(layer.weight.shape), tuple(layer.bias.shape))
        for k, layer in zip(hidden_keys, like.hidden)
    ]
    n_in, n_out = like.heads.weight.shape[-2], cfg.n_actions
    policy = _uniform_layer(policy_key, (n_in, n_out), (n_out,))
    value = _uniform_layer(value_key, (n_in, 1), (1,))
    return feedforward.Params(
        tuple(hidden), feedforward.stack_heads(policy, value)
    )


def _uniform_layer(
    key: I64[Tensor, "2"], weight: tuple[int, ...], bias: tuple[int, ...]
) -> Dense:
    """A layer with weights and biases of these shapes."""
    bound = weight[-2] ** -0.5
    weight_key, bias_key = random.split(key).unbind()
    return Dense(
        random.uniform(weight_key, weight, -bound, bound),
        random.uniform(bias_key, bias, -bound, bound),
    )


def apply(
    cfg: GSDEConfig, world: object, params: Params, obs: F32[Tensor, "B F"]
) -> GSDEPolicyValue:
    """Mean and value, and the noise: of the action it has the deviation

    std_u = sqrt(sum over h of features_h^2 exp(2 log_std_hu))
    """
    mlp = cfg.mlp
    n_trunks = 1 if mlp.shared_trunk else 2
    x = obs.expand(n_trunks, *obs.shape)
    for layer in params.net.hidden:
        x = activate(mlp.activation, dense(layer, x, mlp.matmul_dtype))
    mean_and_value = dense(params.net.heads, x, mlp.matmul_dtype)

    features = x[0].detach()
    matrix_std = params.log_std.exp()
    variance = features**2 @ matrix_std**2 + MIN_VARIANCE
    return GSDEPolicyValue(
        mean=mean_and_value[0],
        log_std=0.5 * variance.log(),
        value=mean_and_value[1, :, 0],
        features=features,
        matrix_std=matrix_std,
    )


def _sample(
    key: I64[Tensor, "2"], output: GSDEPolicyValue
) -> F32[Tensor, "B U"]:
    """The mean plus the features times a noise matrix, which the key draws for each row."""
    shape = (output.mean.shape[0], *output.matrix_std.shape)
    matrix = output.matrix_std * random.normal(key, shape)
    return output.mean + (output.features.unsqueeze(-1) * matrix).sum(-2)


GSDE: Distribution[GSDEPolicyValue] = Distribution(
    sample=_sample,
    log_prob=DIAGONAL_GAUSSIAN.log_prob,
    entropy=DIAGONAL_GAUSSIAN.entropy,
    mode=DIAGONAL_GAUSSIAN.mode,
)


def agent(
    cfg: GSDEConfig,
) -> Agent[object, Params, Tensor, GSDEPolicyValue]:
    """The network, with a noise matrix for as many steps as it says."""
    return Agent(
        cfg=cfg,
        init=init,
        apply=apply,
        distribution=GSDE,
        action_key_steps=cfg.noise_steps,
    )


def gsde(
    *hidden: int,
    activation: Activation = "tanh",
    shared_trunk: bool = False,
    first_log_std: float = 0.0,
    noise_steps: int | None = None,
    orthogonal: bool = True,
    matmul_dtype: torch.dtype | None = None,
) -> NetworkFactory:
    """Dense layers for continuous actions, with generalised state-dependent exploration (gSDE).

    Args:
      hidden: units of each hidden layer; the noise is read from the last one of the actor.
      activation: of hidden layers, tanh or relu.
      shared_trunk: actor and critic share the hidden layers.
      first_log_std: log deviation of each number of the noise matrix before the first update, -20 to 2. That of an
        action is larger by half the logarithm of the sum of squared features.
      noise_steps: steps for which the noise matrix of an environment stays the same; a rollout begins with new ones.
        None: the whole rollout.
      orthogonal: weights are orthogonal and biases 0 at first, as those of `mlp`. False: both are uniform, as those of
        `torch.nn.Linear`.
      matmul_dtype: dtype of matrix products; None: that of the params.

    Returns:
      A function of an `EnvironmentSpec` that builds the agent. It raises a ValueError if an option is out of range, or
      actions are discrete.

    Source: Raffin et al. 2022, arXiv:2005.05719.
    """

    build_mlp = feedforward.mlp(
        *hidden,
        activation=activation,
        shared_trunk=shared_trunk,
        matmul_dtype=matmul_dtype,
    )

    def build(spec: EnvironmentSpec, /) -> AnyAgent:
        if not spec.continuous_actions:
            raise ValueError(
                "gsde: expected an environment with continuous actions, got discrete ones"
            )
        cfg = GSDEConfig(
            mlp=build_mlp(spec).cfg,
            first_log_std=first_log_std,
            noise_steps=noise_steps,
            orthogonal=orthogonal,
        )
        return agent(cfg)

    return build
