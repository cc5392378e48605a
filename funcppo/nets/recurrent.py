"""Networks that remember what they have seen of an episode: `gru` and `lstm`.

Dense layers read the observation, a recurrent cell remembers, and another network acts on what it remembers. Actor and
critic share the dense layers and the cell.

Source: Cho et al. 2014, arXiv:1406.1078; Hochreiter & Schmidhuber 1997, "Long short-term memory"; the gates as in
`torch.nn.GRUCell` and `torch.nn.LSTMCell`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from funcppo.core import random
from funcppo.core.settings import Size, check_field, check_fields
from funcppo.core.types import F32, I64
from funcppo.interfaces import AnyAgent, EnvironmentSpec, MaskedObservation
from funcppo.nets.base import (
    Agent,
    Dense,
    NetworkFactory,
    dense,
    features,
    with_features,
)
from funcppo.nets.factories import build_agent
from funcppo.nets.feedforward import (
    HIDDEN_GAIN,
    Activation,
    activate,
    mlp,
    orthogonal,
)

N_GATES = {"gru": 3, "lstm": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentConfig:
    """Static sizes, and the network that acts on what the cell remembers."""

    n_obs: Size  # numbers in an observation
    cell: Literal["gru", "lstm"]
    n_units: Size  # of the cell
    hidden: tuple[Size, ...]  # units of each dense layer before the cell
    activation: Activation
    actor: AnyAgent  # of the hidden state [B, n_units]

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class Cell(NamedTuple):
    """A recurrent cell; gates side by side, in the order of PyTorch: r, z, n of a GRU; i, f, g, o of an LSTM."""

    input: Dense  # [In, n_gates * n_units]
    recurrent: Dense  # [n_units, n_gates * n_units]


class Params(NamedTuple):
    """The dense layers, the cell, and the network that acts."""

    hidden: tuple[Dense, ...]
    cell: Cell
    actor: Any


class GRUMemory(NamedTuple):
    """Memory of a GRU."""

    h: F32[Tensor, "B H"]


class LSTMMemory(NamedTuple):
    """Memory of an LSTM: the hidden state, and the state of the cell."""

    h: F32[Tensor, "B H"]
    c: F32[Tensor, "B H"]


def init(cfg: RecurrentConfig, key: I64[Tensor, "2"]) -> Params:
    """Parameters with orthogonal weights, gain sqrt(2) in dense layers and 1 in each gate, and zero biases."""
    *hidden_keys, input_key, recurrent_key, actor_key = random.split(
        key, len(cfg.hidden) + 3
    ).unbind()

    hidden: list[Dense] = []
    n_in = cfg.n_obs
    for layer_key, n_out in zip(hidden_keys, cfg.hidden):
        weight = orthogonal(layer_key, n_in, n_out, HIDDEN_GAIN)
        hidden.append(Dense(weight, weight.new_zeros(n_out)))
        n_in = n_out
    return Params(
        hidden=tuple(hidden),
        cell=Cell(
            input=_init_gates(cfg, input_key, n_in),
            recurrent=_init_gates(cfg, recurrent_key, cfg.n_units),
        ),
        actor=cfg.actor.init(cfg.actor.cfg, actor_key),
    )


def _init_gates(
    cfg: RecurrentConfig, key: I64[Tensor, "2"], n_in: int
) -> Dense:
    gate_keys = random.split(key, N_GATES[cfg.cell]).unbind()
    gates = [orthogonal(k, n_in, cfg.n_units, 1.0) for k in gate_keys]
    weight = torch.cat(gates, 1)
    return Dense(weight, weight.new_zeros(weight.shape[1]))


def initial_memory(
    cfg: RecurrentConfig, n_rows: int, device: torch.device
) -> GRUMemory | LSTMMemory:
    """Zeros."""
    h = torch.zeros(n_rows, cfg.n_units, device=device)
    return GRUMemory(h) if cfg.cell == "gru" else LSTMMemory(h, h.clone())


def encode(
    cfg: RecurrentConfig,
    world: object,
    params: Params,
    obs: Tensor | MaskedObservation,
) -> Tensor | MaskedObservation:
    """What observations add to the gates of the cell, [B, n_gates * n_units], beside the action mask."""
    x = features(obs)
    for layer in params.hidden:
        x = activate(cfg.activation, dense(layer, x))
    return with_features(obs, dense(params.cell.input, x))


def apply_recurrent(
    cfg: RecurrentConfig,
    world: object,
    params: Params,
    encoded: Tensor | MaskedObservation,
    memory: GRUMemory | LSTMMemory,
) -> tuple[Any, GRUMemory | LSTMMemory]:
    """The output of the network that acts, and the memory after the observations.

    Args:
      encoded: of `encode`.
    """
    memory = cell_step(params.cell.recurrent, features(encoded), memory)
    remembered = with_features(encoded, memory.h)
    actor = cfg.actor
    return actor.apply(actor.cfg, world, params.actor, remembered), memory


def cell_step(
    recurrent: Dense,
    inputs: F32[Tensor, "B G"],
    memory: GRUMemory | LSTMMemory,
) -> GRUMemory | LSTMMemory:
    """The memory after one step: of a GRU,

        r, z = sigmoid(x + V h),  n = tanh(x + r (V h)),  h' = (1 - z) n + z h

    and of an LSTM

        i, f, o = sigmoid(x + V h),  g = tanh(x + V h),  c' = f c + i g,  h' = o tanh(c')

    Args:
      inputs: x of each gate, side by side.
    """
    if isinstance(memory, LSTMMemory):
        i, f, g, o = (inputs + dense(recurrent, memory.h)).chunk(4, -1)
        c = torch.sigmoid(f) * memory.c + torch.sigmoid(i) * torch.tanh(g)
        return LSTMMemory(torch.sigmoid(o) * torch.tanh(c), c)

    h = memory.h
    input_r, input_z, input_n = inputs.chunk(3, -1)
    r, z, n = dense(recurrent, h).chunk(3, -1)
    z = torch.sigmoid(input_z + z)
    n = torch.tanh(input_n + torch.sigmoid(input_r + r) * n)
    return GRUMemory((1.0 - z) * n + z * h)


def agent(cfg: RecurrentConfig) -> AnyAgent:
    """The network, which acts as its last part does."""
    return Agent(
        cfg=cfg,
        init=init,
        initial_memory=initial_memory,
        apply_recurrent=apply_recurrent,
        encode=encode,
        distribution=cfg.actor.distribution,
        action_key_steps=cfg.actor.action_key_steps,
    )


def gru(
    n_units: int = 64,
    *,
    hidden: tuple[int, ...] = (64,),
    activation: Activation = "tanh",
    then: NetworkFactory | None = None,
) -> NetworkFactory:
    """A network with a gated recurrent unit as memory.

    Observations are [B, F], or of type `MaskedObservation` where actions are discrete.

    Args:
      n_units: of the cell.
      hidden: units of each dense layer before the cell.
      activation: of these layers, tanh or relu.
      then: the network that acts on the hidden state. None: `mlp()`, one layer for the policy and one for the value.

    Returns:
      A function of an `EnvironmentSpec` that builds the agent. It raises a ValueError if an option is out of range,
      and a TypeError if `then` is no function that builds an agent.
    """
    return _factory("gru", n_units, hidden, activation, then)


def lstm(
    n_units: int = 64,
    *,
    hidden: tuple[int, ...] = (64,),
    activation: Activation = "tanh",
    then: NetworkFactory | None = None,
) -> NetworkFactory:
    """A network with a long short-term memory; arguments as those of `gru`."""
    return _factory("lstm", n_units, hidden, activation, then)


def _factory(
    cell: Literal["gru", "lstm"],
    n_units: int,
    hidden: tuple[int, ...],
    activation: Activation,
    then: NetworkFactory | None,
) -> NetworkFactory:
    def build(spec: EnvironmentSpec, /) -> AnyAgent:
        # Before the network that reads them is built for so many numbers.
        check_field(RecurrentConfig, "n_units", n_units)
        actor_spec = dataclasses.replace(spec, observation_size=n_units)
        network = mlp() if then is None else then
        actor = build_agent("then", network, actor_spec)
        if actor.initial_memory is not None:
            raise ValueError(
                f"then: expected a network without memory after a {cell}, got one with"
            )
        cfg = RecurrentConfig(
            n_obs=spec.observation_size,
            cell=cell,
            n_units=n_units,
            hidden=hidden,
            activation=activation,
            actor=actor,
        )
        return agent(cfg)

    return build
