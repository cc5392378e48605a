"""The gradient of PPO's loss for a network of two hidden layers, which is computed by kernels, and values by a third.

The network's outputs come from one kernel, the derivative of the loss in them from automatic differentiation, and the
gradient of the parameters from another kernel. `loss_gradient` is `minibatch.loss_gradient`, `final_value` is
`rollout.estimate_final_value`, and `rollout_step` is `rollout.rollout_step`, where `reason_against` has none;
`actor_step` and `values` are two halves of that step.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import grad_and_value

from funcppo import minibatch, rollout
from funcppo.config import Config
from funcppo.core.settings import reads_scalars_apart
from funcppo.core.types import F32, I64, Obs, Params
from funcppo.losses import Batch, LossMetrics, Scalars, finite_rows, loss_fn
from funcppo.nets import dense_operator, feedforward
from funcppo.nets.base import Dense, features, with_features
from funcppo.rollout import RandomInputs, RolloutState, Transition

# units of a layer, and outputs, that a program holds
MAX_WIDTH = 64
MAX_OUTPUTS = 16
# numbers of an observation, of which a program holds some at a time
MAX_OBS = 1024


def reason_against(cfg: Config) -> str:
    """Why the kernels cannot compute the network of a learner; empty if they can."""
    agent = cfg.update_agent or cfg.agent
    if agent.apply not in (feedforward.apply, feedforward.apply_gaussian):
        return "the network is none of `nets.feedforward`"
    if cfg.update_agent is not None:
        return "the update has a network of its own"
    net: feedforward.MLPConfig = agent.cfg
    if net.shared_trunk:
        return "actor and critic share their hidden layers"
    if len(net.hidden) != 2:
        return f"the network has {len(net.hidden)} hidden layers, not 2"
    if max(net.hidden) > MAX_WIDTH:
        return f"a layer of {max(net.hidden)} units, more than {MAX_WIDTH}"
    if net.n_obs > MAX_OBS:
        return f"an observation of {net.n_obs} numbers, more than {MAX_OBS}"
    n_outputs = net.n_actions * (2 if net.log_std == "state" else 1)
    if n_outputs > MAX_OUTPUTS:
        return f"{n_outputs} outputs, more than {MAX_OUTPUTS}"
    if net.matmul_dtype not in (None, torch.bfloat16):
        return f"products of {net.matmul_dtype}"
    return ""


@reads_scalars_apart
def loss_gradient(
    cfg: Config,
    world: object,
    params: Params,
    batch: Batch[Obs],
    rows: I64[Tensor, "MB"],
    scalars: Scalars,
) -> tuple[Params, LossMetrics]:
    """The gradient of the loss over some rows of the batch, and the metrics of the loss."""
    settings = _settings(cfg)
    selected = minibatch.select_rows(cfg, batch, rows)
    obs: Any = selected.obs
    # As `loss_fn` reads them: all numbers of a row that is not finite are 0.
    is_finite = finite_rows(selected)
    x = torch.where(is_finite[:, None], features(obs), 0.0)
    layers = _layers(params)
    outputs = dense_operator.apply(layers, x, settings)
    stand_in = _with_outputs(params, outputs.heads)
    selected = selected._replace(obs=with_features(obs, x[:, :0]))
    loss = partial(loss_fn, cfg, world)
    gradient, (_, metrics) = grad_and_value(loss, has_aux=True)(
        stand_in, selected, scalars
    )
    of_layers = dense_operator.gradient(
        layers, x, outputs, _layers(gradient).heads.bias, settings
    )
    grads = _with_layers(gradient, of_layers)
    return cast(Params, grads), cast(LossMetrics, metrics)


@reads_scalars_apart
def final_value(
    cfg: Config, world: object, params: object, trajectory: Transition[Any]
) -> F32[Tensor, "T B"]:
    """V of the last observation of each truncated episode, at its last step; 0 elsewhere."""
    if not rollout.uses_final_obs(cfg):
        return rollout.estimate_final_value(cfg, world, params, trajectory)
    final_obs: Any = trajectory.final_obs
    value = dense_operator.values(
        _layers(params),
        features(final_obs).flatten(0, 1),
        trajectory.truncated.flatten(),
        _settings(cfg),
    )
    return value.view_as(trajectory.reward)


@reads_scalars_apart
def rollout_step(
    cfg: Config,
    world: object,
    params: object,
    rollout_state: RolloutState[Any],
    random_inputs: RandomInputs[Any],
) -> tuple[RolloutState[Any], Transition[Any]]:
    """Observe, act and step, then reset the rows that finished: see `rollout.rollout_step`."""
    settings = _settings(cfg)

    def apply(net: Any, world: object, params: Any, obs: Any) -> Any:
        x = features(obs)
        outputs = dense_operator.apply(_layers(params), x, settings)
        params = _with_outputs(params, outputs.heads)
        return cfg.agent.apply(net, world, params, with_features(obs, x[:, :0]))

    agent = dataclasses.replace(cfg.agent, apply=apply)
    return rollout.rollout_step(
        dataclasses.replace(cfg, agent=agent),
        world,
        params,
        rollout_state,
        random_inputs,
    )


@reads_scalars_apart
def actor_step(
    cfg: Config,
    world: object,
    params: object,
    rollout_state: RolloutState[Any],
    random_inputs: RandomInputs[Any],
) -> tuple[RolloutState[Any], Transition[Any]]:
    """`rollout.rollout_step` without the critic's value, which no step waits for: `values` has those of all steps."""
    next_state, transition = rollout.rollout_step(
        cfg, world, params, rollout_state, random_inputs
    )
    return next_state, transition._replace(value=())  # pyright: ignore[reportArgumentType]


@reads_scalars_apart
def values(
    cfg: Config, world: object, params: object, obs: Any
) -> F32[Tensor, "T B"]:
    """The critic's value of each observation of a rollout, whose tensors are [T, B, ...]."""
    x = features(obs)
    flat = x.flatten(0, 1)
    is_needed = flat.new_ones(len(flat), dtype=torch.bool)
    value = dense_operator.values(
        _layers(params), flat, is_needed, _settings(cfg)
    )
    return value.view(x.shape[:2])


def _settings(cfg: Config) -> dense_operator.Settings:
    net: feedforward.MLPConfig = cfg.agent.cfg
    return dense_operator.Settings(
        net.activation, is_bfloat16=net.matmul_dtype is not None
    )


def _layers(params: Any) -> feedforward.Params:
    """The layers among the parameters of a network."""
    is_gaussian = isinstance(params, feedforward.GaussianParams)
    return params.net if is_gaussian else params


def _with_outputs(params: Any, heads: Tensor) -> Any:
    """Parameters of a network without hidden layers, for observations without numbers.

    It returns its biases, which are the outputs of each row.
    """
    no_weights = heads.new_zeros(2, 0, heads.shape[-1])
    layers = feedforward.Params((), Dense(no_weights, heads))
    return _with_layers(params, layers)


def _with_layers(params: Any, layers: feedforward.Params) -> Any:
    """The parameters with other layers."""
    if isinstance(params, feedforward.GaussianParams):
        return feedforward.GaussianParams(layers, params.log_std)
    return layers
