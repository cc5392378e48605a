"""Networks: dense layers, convolutions, memories of the episode, and noise that depends on the state.

`mlp`, `cnn`, `nature_cnn`, `gru`, `lstm` and `gsde` build a network for an environment. The actor and the critic of
`mlp` are one stack of matrices, so that a layer of both is one batched matrix product; by default they share nothing.
`cnn` reads images [B, H, W, C] by convolutions that actor and critic share, `gru` and `lstm` dense layers and a
recurrent cell; another network acts on what they make. The noise of `gsde` is a random matrix times the features of the
actor's last hidden layer: where the matrix stays the same, equal states get equal noise.

Source: Huang et al. 2022, "The 37 implementation details of PPO", details 2 and 13; Young & Tian 2019, "MinAtar",
arXiv:1903.03176; Mnih et al. 2015, "Human-level control through deep reinforcement learning"; Cho et al. 2014,
arXiv:1406.1078; Hochreiter & Schmidhuber 1997, "Long short-term memory", with the gates of `torch.nn.GRUCell` and
`torch.nn.LSTMCell`; Raffin et al. 2022, arXiv:2005.05719 (gSDE), with the details of Stable-Baselines3.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from funcppo import rollout
from funcppo.core import random
from funcppo.core.settings import LogStd, Size, check_fields, check_value
from funcppo.core.types import F32, I64, Bool
from funcppo.interfaces import (
    CATEGORICAL,
    DIAGONAL_GAUSSIAN,
    MULTI_CATEGORICAL,
    SQUASHED_GAUSSIAN,
    Agent,
    AnyAgent,
    Distribution,
    EnvironmentSpec,
    MaskedObservation,
    Memory,
    NetworkFactory,
    channel_axis,
    features,
    numbers,
    with_features,
)
from funcppo.nets import cells
from funcppo.nets.cells import Dense, GRUMemory, LSTMMemory, cell_step


class PolicyValue(NamedTuple):
    """Output of an actor-critic over discrete actions."""

    # [B, S], -inf for an illegal action; [B, D, S] for D actions at once, the shorter ones filled up by -inf
    logits: F32[Tensor, "B S"] | F32[Tensor, "B D S"]
    value: F32[Tensor, "B"]


class GaussianPolicyValue(NamedTuple):
    """Output of an actor-critic over continuous actions."""

    mean: F32[Tensor, "B U"]
    log_std: F32[Tensor, "B U"]
    value: F32[Tensor, "B"]


def init_dense(
    key: I64[Tensor, "2"], n_in: int, n_out: int, scale: float = 1.0
) -> Dense:
    """Build a layer with weights uniform on +-scale sqrt(3 / n_in) and zero bias: unit inputs give variance scale^2."""
    bound = scale * (3.0 / n_in) ** 0.5
    weight = (2.0 * random.uniform(key, (n_in, n_out)) - 1.0) * bound
    return Dense(weight, torch.zeros(n_out, device=key.device))


def dense(
    params: Dense,
    x: F32[Tensor, "... In"],
    matmul_dtype: torch.dtype | None = None,
) -> F32[Tensor, "... Out"]:
    """Apply a layer: compute x W + b.

    Args:
      matmul_dtype: dtype of the matrix product and of its gradients; the bias is added in the dtype of `x`. None: the
        dtype of the operands.
    """
    if matmul_dtype is None:
        return x @ params.weight + params.bias
    product = x.to(matmul_dtype) @ params.weight.to(matmul_dtype)
    return product.to(x.dtype) + params.bias


def build_agent(name: str, network: object, spec: EnvironmentSpec) -> AnyAgent:
    """Build the agent for an environment's spec by the function `network`.

    Args:
      name: of the argument that the function was handed in as, for an error.

    Raises:
      TypeError: it is no such function.
      ValueError: of the function, which cannot build a network with its options for these sizes.
    """
    expected = f"{name}: expected a function of an EnvironmentSpec"
    if not callable(network):
        raise TypeError(f"{expected}, got {describe(network)}")
    try:
        agent: object = network(spec)
    except TypeError as error:
        raise TypeError(
            f"{expected}, got {describe(network)}: {error}"
        ) from error
    if not isinstance(agent, Agent):
        raise TypeError(
            f"{expected} that returns an Agent, such as fp.nets.mlp(64, 64), got {describe(network)}, "
            f"which returns {describe(agent)}"
        )
    return cast(AnyAgent, agent)


def describe(value: object) -> str:
    """Describe a value for an error: a function or class by its name, else by its type."""
    name = getattr(value, "__qualname__", None)
    kind = type(value).__name__
    return f"the {kind} {name}" if isinstance(name, str) else kind


HIDDEN_GAIN = math.sqrt(2.0)
Activation: TypeAlias = Literal["tanh", "relu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPConfig:
    """Static sizes and options of an MLP."""

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

    __post_init__ = check_fields


class MLPParams(NamedTuple):
    """Parameters of actor and critic; weights are [2, In, Out], the actor's first. A shared trunk has [1, In, Out]."""

    hidden: tuple[Dense, ...]
    # as wide as the actor's; the critic's is padded with zeros, which get no gradient
    heads: Dense


class GaussianParams(NamedTuple):
    """Parameters of an MLP, with a log standard deviation that does not depend on the observation."""

    net: MLPParams
    # () if it is an output of the network; of gSDE that of the noise matrix
    log_std: F32[Tensor, "U"] | F32[Tensor, "H U"] | tuple[()]


def init_mlp(cfg: MLPConfig, key: I64[Tensor, "2"]) -> MLPParams:
    """Build parameters with orthogonal weights, gain sqrt(2) in hidden layers, 0.01 for the policy, 1 for the value."""
    return _init(cfg, key, cfg.n_actions)


def _init(cfg: MLPConfig, key: I64[Tensor, "2"], n_outputs: int) -> MLPParams:
    """Build parameters like `init_mlp`, with `n_outputs` numbers for the policy."""
    *hidden_keys, policy_key, value_key = random.split(
        key, len(cfg.hidden) + 2
    ).unbind()

    hidden: list[Dense] = []
    n_in = cfg.n_obs
    for layer_key, n_out in zip(hidden_keys, cfg.hidden):
        trunk_keys = random.split(layer_key, 1 if cfg.shared_trunk else 2)
        trunks = [orthogonal(k, n_in, n_out, HIDDEN_GAIN) for k in trunk_keys]
        weight = torch.stack(trunks)
        hidden.append(Dense(weight, weight.new_zeros(len(weight), 1, n_out)))
        n_in = n_out

    # The first policy is nearly uniform.
    heads = stack_heads(
        _orthogonal_layer(policy_key, n_in, n_outputs, 0.01),
        _orthogonal_layer(value_key, n_in, 1, 1.0),
    )
    return MLPParams(hidden=tuple(hidden), heads=heads)


def _orthogonal_layer(
    key: I64[Tensor, "2"], n_in: int, n_out: int, gain: float
) -> Dense:
    """Build a layer with orthogonal weights and zero bias."""
    weight = orthogonal(key, n_in, n_out, gain)
    return Dense(weight, weight.new_zeros(n_out))


def stack_heads(policy: Dense, value: Dense) -> Dense:
    """Stack both heads in one layer, the value's padded to the width of the policy's."""
    padding = (0, policy.bias.shape[0] - 1)
    weight = torch.stack([policy.weight, pad(value.weight, padding)])
    bias = torch.stack([policy.bias, pad(value.bias, padding)])
    return Dense(weight, bias.unsqueeze(1))


def apply_mlp(
    cfg: MLPConfig,
    world: object,
    params: MLPParams,
    obs: F32[Tensor, "B F"] | MaskedObservation,
) -> PolicyValue:
    """Compute logits and value of each row; logits are -inf for actions that the observation masks."""
    logits, value, _ = _apply(cfg, params, numbers(obs))
    if isinstance(obs, MaskedObservation):
        logits = torch.where(obs.action_mask, logits, -torch.inf)
    if cfg.action_sizes is not None:
        logits = _stack_actions(logits, cfg.action_sizes)
    return PolicyValue(logits=logits, value=value)


def _apply(
    cfg: MLPConfig, params: MLPParams, x: F32[Tensor, "B F"]
) -> tuple[F32[Tensor, "B S"], F32[Tensor, "B"], F32[Tensor, "B H"]]:
    """Compute the policy's numbers, the value, and the features of the actor's last hidden layer, for each row."""
    x = x.expand(1 if cfg.shared_trunk else 2, *x.shape)
    for layer in params.hidden:
        x = activate(cfg.activation, dense(layer, x, cfg.matmul_dtype))
    policy_and_value = dense(params.heads, x, cfg.matmul_dtype)
    return policy_and_value[0], policy_and_value[1, :, 0], x[0]


def activate(activation: Activation, x: Tensor) -> Tensor:
    """Apply an activation function by its name."""
    return torch.tanh(x) if activation == "tanh" else torch.relu(x)


def _stack_actions(
    logits: F32[Tensor, "B S"], sizes: tuple[int, ...]
) -> F32[Tensor, "B D S"]:
    """Stack the logits of several actions as [B, D, S], padded by -inf."""
    parts = torch.split(logits, list(sizes), -1)
    padded = [
        pad(part, (0, max(sizes) - part.shape[-1]), value=-torch.inf)
        for part in parts
    ]
    return torch.stack(padded, -2)


def init_gaussian(cfg: MLPConfig, key: I64[Tensor, "2"]) -> GaussianParams:
    """Build parameters like `init_mlp` with unit standard deviations, or nearly so if the network outputs them."""
    if cfg.log_std == "state":
        return GaussianParams(_init(cfg, key, 2 * cfg.n_actions), ())
    return GaussianParams(
        net=init_mlp(cfg, key),
        log_std=torch.zeros(cfg.n_actions, device=key.device),
    )


def apply_gaussian(
    cfg: MLPConfig,
    world: object,
    params: GaussianParams,
    obs: F32[Tensor, "B F"],
) -> GaussianPolicyValue:
    """Compute mean, log standard deviation and value of each row."""
    mean, value, _ = _apply(cfg, params.net, numbers(obs))
    if isinstance(params.log_std, Tensor):
        log_std = params.log_std.expand_as(mean)
    else:
        mean, log_std = torch.split(mean, cfg.n_actions, -1)
        # as in Haarnoja et al. 2018, arXiv:1801.01290
        log_std = log_std.clamp(-20.0, 2.0)
    return GaussianPolicyValue(mean=mean, log_std=log_std, value=value)


def orthogonal(
    key: I64[Tensor, "2"], n_in: int, n_out: int, gain: float
) -> F32[Tensor, "In Out"]:
    """Sample `gain` times a matrix with orthonormal rows or columns, uniform over all such matrices.

    Source: Saxe et al. 2014, arXiv:1312.6120; sign correction of Mezzadri 2007, arXiv:math-ph/0609050.
    """
    gaussian = random.normal(key, (max(n_in, n_out), min(n_in, n_out)))
    factors = torch.linalg.qr(gaussian)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    q, r = cast(tuple[Tensor, Tensor], factors)
    # Without the signs of r's diagonal, q would not be uniform.
    q = q * torch.sign(torch.diagonal(r))
    oriented = q if n_in >= n_out else q.T
    return (gain * oriented).clone(memory_format=torch.contiguous_format)


def mlp_agent(
    cfg: MLPConfig,
) -> Agent[object, MLPParams, Tensor | MaskedObservation, PolicyValue]:
    """Build the MLP agent for discrete actions."""
    distribution = MULTI_CATEGORICAL if cfg.action_sizes else CATEGORICAL
    return Agent(
        cfg=cfg, init=init_mlp, apply=apply_mlp, distribution=distribution
    )


def gaussian_agent(
    cfg: MLPConfig,
) -> Agent[object, GaussianParams, Tensor, GaussianPolicyValue]:
    """Build the MLP agent for continuous actions."""
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
    """Return a factory of MLPs, which builds one for the environment that it is used with.

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
        return mlp_agent(cfg)

    return build


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtraConfig:
    """Network that acts, and how the parameters beside its own begin."""

    reader: AnyAgent
    init: Callable[[EnvironmentSpec, I64[Tensor, "2"]], Any]
    spec: EnvironmentSpec


class ExtraParams(NamedTuple):
    """Parameters of the network that acts, and others that a loss of the user's learns or reads."""

    reader: Any
    extra: Any


def _init_extra(cfg: ExtraConfig, key: I64[Tensor, "2"]) -> ExtraParams:
    reader_key, extra_key = random.split(key).unbind()
    reader = cfg.reader.init(cfg.reader.cfg, reader_key)
    return ExtraParams(reader, cfg.init(cfg.spec, extra_key))


def _read_all(cfg: ExtraConfig, params: ExtraParams, obs: Any) -> Any:
    return obs


def with_extra(
    network: NetworkFactory,
    init: Callable[[EnvironmentSpec, I64[Tensor, "2"]], Any],
) -> NetworkFactory:
    """Return a factory of the network with parameters beside its own, as `ExtraParams`.

    A loss of the user's learns them with Adam's moments of their own; those that it detaches stay as they are.

    Args:
      init: returns the tree of these parameters, from the spec of the environment and a key.
    """

    def build(spec: EnvironmentSpec, /) -> AnyAgent:
        reader = build_agent("network", network, spec)
        cfg = ExtraConfig(reader=reader, init=init, spec=spec)
        return _around(reader, cfg, _init_extra, _read_all)

    return build


def _around(
    reader: AnyAgent,
    cfg: Any,
    init: Callable[..., Any],
    read: Callable[..., Any],
) -> AnyAgent:
    """Build an agent that acts and remembers like the network `cfg.reader` in it, with `params.reader`.

    Args:
      read: what the network in it observes, from `cfg`, the parameters and the observations.
    """
    functions: dict[str, Any] = {"apply": partial(_apply_reader, read)}
    if reader.initial_memory is not None:
        functions = {
            "initial_memory": _reader_memory,
            "apply_recurrent": _apply_recurrent_reader,
            "encode": partial(_encode_for_reader, read),
        }
    if reader.remember is not None:
        functions |= {
            "remember": partial(_remember_reader, "remember"),
            "remember_back": partial(_remember_reader, "remember_back"),
        }
    return Agent(
        cfg=cfg,
        init=init,
        distribution=reader.distribution,
        action_key_steps=reader.action_key_steps,
        **functions,
    )


def _apply_reader(
    read: Callable[..., Any],
    cfg: CNNConfig | ExtraConfig,
    world: object,
    params: CNNParams | ExtraParams,
    obs: Any,
) -> Any:
    seen = read(cfg, params, obs)
    return cfg.reader.apply(cfg.reader.cfg, world, params.reader, seen)


def _encode_for_reader(
    read: Callable[..., Any],
    cfg: CNNConfig | ExtraConfig,
    world: object,
    params: CNNParams | ExtraParams,
    obs: Any,
) -> Any:
    seen = read(cfg, params, obs)
    return rollout.encode(cfg.reader, world, params.reader, seen)


def _reader_memory(
    cfg: CNNConfig | ExtraConfig, n_rows: int, device: torch.device
) -> Memory:
    return rollout.initial_memory(cfg.reader, n_rows, device)


def _apply_recurrent_reader(
    cfg: CNNConfig | ExtraConfig,
    world: object,
    params: CNNParams | ExtraParams,
    encoded: Any,
    memory: Memory,
) -> tuple[Any, Memory]:
    """Apply the reading network to encoded observations; return its output and its next memory."""
    reader = cfg.reader
    assert reader.apply_recurrent is not None
    return reader.apply_recurrent(
        reader.cfg, world, params.reader, encoded, memory
    )


def _remember_reader(
    name: str,
    cfg: CNNConfig | ExtraConfig,
    params: CNNParams | ExtraParams,
    *given: object,
) -> object:
    """Call a loop of the reading network over the steps."""
    return getattr(cfg.reader, name)(cfg.reader.cfg, params.reader, *given)


MINATAR = ((16, 3, 1),)  # channels, kernel size, stride
NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))

# channels, kernel size and stride of a layer without padding
Convolution: TypeAlias = tuple[Size, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CNNConfig:
    """Static sizes of a CNN, and the network that reads its features."""

    image_shape: tuple[Size, Size, Size]  # height, width, channels
    convolutions: tuple[Convolution, ...]
    reader: AnyAgent  # of features [B, F]
    channels_first: bool = False  # images are [B, C, H, W]

    __post_init__ = check_fields


class CNNParams(NamedTuple):
    """Convolution layers in order, and the parameters of the network that reads their features."""

    convolutions: tuple[Dense, ...]  # weights [Out, In, K, K]
    reader: Any


def n_features(
    image_shape: tuple[int, int, int],
    convolutions: tuple[Convolution, ...],
) -> int:
    """Count the numbers that the convolutions produce from an image.

    Raises:
      ValueError: the image is smaller than a kernel.
    """
    height, width, n_channels = image_shape
    for n_out, size, stride in convolutions:
        if min(height, width) < size:
            raise ValueError(
                f"convolutions: expected kernels that fit in an image of {image_shape}, got one of "
                f"{size} x {size} where {height} x {width} are left"
            )
        height = (height - size) // stride + 1
        width = (width - size) // stride + 1
        n_channels = n_out
    return height * width * n_channels


def init_cnn(cfg: CNNConfig, key: I64[Tensor, "2"]) -> CNNParams:
    """Build parameters with orthogonal kernels, gain sqrt(2), and those of the network that reads the features."""
    *layer_keys, reader_key = random.split(
        key, len(cfg.convolutions) + 1
    ).unbind()

    layers: list[Dense] = []
    n_in = cfg.image_shape[2]
    for layer_key, (n_out, size, _) in zip(layer_keys, cfg.convolutions):
        n_inputs = n_in * size**2
        kernel, bias = _orthogonal_layer(
            layer_key, n_inputs, n_out, HIDDEN_GAIN
        )
        weight = kernel.T.reshape(n_out, n_in, size, size)
        layers.append(Dense(weight, bias))
        n_in = n_out
    return CNNParams(tuple(layers), cfg.reader.init(cfg.reader.cfg, reader_key))


def _read_images(
    cfg: CNNConfig, params: CNNParams, obs: Tensor | MaskedObservation
) -> Tensor | MaskedObservation:
    """Replace the images of observations by their convolution features."""
    return with_features(obs, convolve(cfg, params.convolutions, features(obs)))


def convolve(
    cfg: CNNConfig,
    layers: tuple[Dense, ...],
    image: Tensor,
) -> F32[Tensor, "B F"]:
    """Compute the features of images [B, H, W, C], or [B, C, H, W]; bytes are divided by 255 first."""
    x = image if cfg.channels_first else image.permute(0, 3, 1, 2)
    x = x.to(layers[0].weight.dtype)
    if image.dtype == torch.uint8:
        x = x / 255.0
    for params, (_, _, stride) in zip(layers, cfg.convolutions):
        x = torch.relu(conv2d(x, params.weight, params.bias, stride=stride))
    return x.flatten(1)


def cnn(
    *convolutions: tuple[int, int, int],
    then: NetworkFactory | None = None,
    channels_first: bool | None = None,
) -> NetworkFactory:
    """Return a factory of networks for images [B, H, W, C]; by default MinAtar's 16 channels of 3 x 3 and 128 units,
    relu.

    Args:
      convolutions: channels, kernel size and stride of each layer, without padding; relu follows each.
      then: the network that reads their features, e.g. `gru()`. None: `mlp(128, activation="relu", shared_trunk=True)`.
      channels_first: images are [B, C, H, W]. None: where `interfaces.channel_axis` says so, as of (3, 64, 64).

    Returns:
      A function of an `EnvironmentSpec` that builds the agent. It raises a ValueError if observations are no images, or
      smaller than a kernel, and a TypeError if `then` is no function that builds an agent.

    Raises:
      ValueError: a layer is not described by three numbers.
    """
    layers = convolutions or MINATAR
    for layer in layers:
        if not isinstance(layer, tuple) or len(layer) != 3:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"convolutions: expected (channels, kernel size, stride), got {layer!r}"
            )
        check_value("convolutions", Convolution, layer)
    if then is None:
        then = mlp(128, activation="relu", shared_trunk=True)

    def build(spec: EnvironmentSpec, /) -> AnyAgent:
        if len(spec.shape) != 3:
            raise ValueError(
                f"env.spec: expected images (height, width, channels) for a cnn, got observations of {spec.shape}"
            )
        is_first = channels_first
        if is_first is None:
            is_first = channel_axis(spec.shape) == 0
        shape = spec.shape
        if is_first:
            shape = (*shape[1:], shape[0])
        reader_spec = dataclasses.replace(
            spec,
            observation_size=n_features(shape, layers),
            observation_shape=None,
        )
        reader = build_agent("then", then, reader_spec)
        cfg = CNNConfig(
            image_shape=shape,
            convolutions=layers,
            reader=reader,
            channels_first=is_first,
        )
        return _around(reader, cfg, init_cnn, _read_images)

    return build


def nature_cnn(
    *, then: NetworkFactory | None = None, channels_first: bool | None = None
) -> NetworkFactory:
    """Return a factory of the network for Atari frames: 32, 64 and 64 channels, then 512 units, relu.

    Args:
      then: the network that reads the features. None: `mlp(512, activation="relu", shared_trunk=True)`.
      channels_first: as that of `cnn`.
    """
    if then is None:
        then = mlp(512, activation="relu", shared_trunk=True)
    return cnn(*NATURE, then=then, channels_first=channels_first)


N_GATES = {"gru": 3, "lstm": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentConfig:
    """Static sizes of a recurrent network, and the network that acts on the cell's memory."""

    n_obs: Size  # numbers in an observation
    cell: Literal["gru", "lstm"]
    n_units: Size  # of the cell
    hidden: tuple[Size, ...]  # units of each dense layer before the cell
    activation: Activation
    actor: AnyAgent  # of the hidden state [B, n_units]

    __post_init__ = check_fields


class Cell(NamedTuple):
    """Recurrent cell with gates side by side in PyTorch's order: r, z, n of a GRU; i, f, g, o of an LSTM."""

    input: Dense  # [In, n_gates * n_units]
    recurrent: Dense  # [n_units, n_gates * n_units]


class RecurrentParams(NamedTuple):
    """Parameters of the dense layers, of the cell, and of the network that acts."""

    hidden: tuple[Dense, ...]
    cell: Cell
    actor: Any


def init_recurrent(
    cfg: RecurrentConfig, key: I64[Tensor, "2"]
) -> RecurrentParams:
    """Build parameters with orthogonal weights, gain sqrt(2) in dense layers and 1 in each gate, and zero biases."""
    *hidden_keys, input_key, recurrent_key, actor_key = random.split(
        key, len(cfg.hidden) + 3
    ).unbind()
    sizes = (cfg.n_obs, *cfg.hidden)
    hidden = [
        _orthogonal_layer(k, n_in, n_out, HIDDEN_GAIN)
        for k, n_in, n_out in zip(hidden_keys, sizes, cfg.hidden)
    ]
    cell = Cell(
        input=_init_gates(cfg, input_key, sizes[-1]),
        recurrent=_init_gates(cfg, recurrent_key, cfg.n_units),
    )
    actor = cfg.actor.init(cfg.actor.cfg, actor_key)
    return RecurrentParams(tuple(hidden), cell, actor)


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
    """Build a memory of zeros for `n_rows` rows."""
    h = torch.zeros(n_rows, cfg.n_units, device=device)
    return GRUMemory(h) if cfg.cell == "gru" else LSTMMemory(h, h.clone())


def encode(
    cfg: RecurrentConfig,
    world: object,
    params: RecurrentParams,
    obs: Tensor | MaskedObservation,
) -> Tensor | MaskedObservation:
    """Compute the observations' input to the cell's gates, [B, n_gates * n_units]; keep the action mask."""
    x = numbers(obs)
    for layer in params.hidden:
        x = activate(cfg.activation, dense(layer, x))
    return with_features(obs, dense(params.cell.input, x))


def apply_recurrent(
    cfg: RecurrentConfig,
    world: object,
    params: RecurrentParams,
    encoded: Tensor | MaskedObservation,
    memory: GRUMemory | LSTMMemory,
) -> tuple[Any, GRUMemory | LSTMMemory]:
    """Step the cell and apply the acting network; return its output and the next memory.

    Args:
      encoded: of `encode`.
    """
    memory = cell_step(params.cell.recurrent, features(encoded), memory)
    remembered = with_features(encoded, memory.h)
    actor = cfg.actor
    return actor.apply(actor.cfg, world, params.actor, remembered), memory


def remember(
    cfg: RecurrentConfig,
    params: RecurrentParams,
    encoded: Tensor | MaskedObservation,
    done: Bool[Tensor, "T B"],
    memory: GRUMemory | LSTMMemory,
) -> GRUMemory | LSTMMemory:
    """Compute the memory before each of T steps: see `cells.memories`."""
    recurrent = params.cell.recurrent
    return cells.memories(recurrent, features(encoded), done, memory)


def remember_back(
    cfg: RecurrentConfig,
    params: RecurrentParams,
    encoded: Tensor | MaskedObservation,
    done: Bool[Tensor, "T B"],
    before: GRUMemory | LSTMMemory,
    grads: list[Tensor],
) -> list[Tensor]:
    """Compute the gradient in the memory after each of T steps: see `cells.adjoints`."""
    recurrent = params.cell.recurrent
    return cells.adjoints(recurrent, features(encoded), done, before, grads)


def gru(
    n_units: int = 64,
    *,
    hidden: tuple[int, ...] = (64,),
    activation: Activation = "tanh",
    then: NetworkFactory | None = None,
) -> NetworkFactory:
    """Return a factory of networks with a gated recurrent unit as memory.

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
    """Return a factory of networks with a long short-term memory; arguments as those of `gru`."""
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
        check_value("n_units", Size, n_units)
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
        return Agent(
            cfg=cfg,
            init=init_recurrent,
            initial_memory=initial_memory,
            apply_recurrent=apply_recurrent,
            encode=encode,
            remember=remember,
            remember_back=remember_back,
            distribution=actor.distribution,
            action_key_steps=actor.action_key_steps,
        )

    return build


@dataclass(frozen=True, kw_only=True, slots=True)
class GSDEConfig:
    """Static sizes and options of a network with gSDE."""

    mlp: MLPConfig  # actor and critic
    # of each number of the noise matrix, before the first update
    first_log_std: LogStd = 0.0
    # steps of a rollout for which the noise matrix stays the same; None: all
    noise_steps: Size | None = None
    # orthogonal weights and zero biases at first; else both are uniform
    orthogonal: bool = True

    __post_init__ = check_fields


class GSDEPolicyValue(NamedTuple):
    """Output of an actor-critic whose action noise is a random matrix times features."""

    mean: F32[Tensor, "B U"]
    log_std: F32[Tensor, "B U"]  # of the action, over all noise matrices
    value: F32[Tensor, "B"]
    features: F32[Tensor, "B H"]  # of the actor's last hidden layer
    matrix_std: F32[Tensor, "H U"]  # of the noise matrix


def init_gsde(cfg: GSDEConfig, key: I64[Tensor, "2"]) -> GaussianParams:
    """Build parameters like those of `mlp`, or uniform ones, with equal deviations in the whole noise matrix."""
    net = init_mlp(cfg.mlp, key)
    if not cfg.orthogonal:
        net = _init_uniform(key, net)
    n_features = net.heads.weight.shape[-2]
    log_std = torch.full(
        (n_features, cfg.mlp.n_actions), cfg.first_log_std, device=key.device
    )
    return GaussianParams(net, log_std)


def _init_uniform(key: I64[Tensor, "2"], like: MLPParams) -> MLPParams:
    """Build parameters shaped like `like`, uniform on +-1 / sqrt(n_in) in each layer as in `torch.nn.Linear`."""
    weight, bias = like.heads
    policy = Dense(weight[0], bias[0, 0])
    value = Dense(weight[1, :, :1], bias[1, 0, :1])
    layers = [*like.hidden, policy, value]
    keys = random.split(key, len(layers))
    *hidden, policy, value = map(_uniform_layer, keys, layers)
    return MLPParams(tuple(hidden), stack_heads(policy, value))


def _uniform_layer(key: I64[Tensor, "2"], like: Dense) -> Dense:
    """Build a layer of the shapes of another one with uniform weights and biases."""
    bound = like.weight.shape[-2] ** -0.5
    keys = random.split(key)
    return Dense(
        *(
            random.uniform(k, tuple(x.shape), -bound, bound)
            for k, x in zip(keys, like)
        )
    )


def apply_gsde(
    cfg: GSDEConfig,
    world: object,
    params: GaussianParams,
    obs: F32[Tensor, "B F"],
) -> GSDEPolicyValue:
    """Compute mean, value and noise of each row; the noise of action component u has the deviation

    std_u = sqrt(sum over h of features_h^2 exp(2 log_std_hu))
    """
    mean, value, features = _apply(cfg.mlp, params.net, numbers(obs))
    features = features.detach()
    matrix_std = cast(Tensor, params.log_std).exp()
    # Features may all be 0.
    variance = features**2 @ matrix_std**2 + 1e-6
    return GSDEPolicyValue(
        mean=mean,
        log_std=0.5 * variance.log(),
        value=value,
        features=features,
        matrix_std=matrix_std,
    )


def _sample(
    key: I64[Tensor, "2"], output: GSDEPolicyValue
) -> F32[Tensor, "B U"]:
    """Sample actions: the mean plus the features times a noise matrix, drawn by the key for each row."""
    shape = (output.mean.shape[0], *output.matrix_std.shape)
    matrix = output.matrix_std * random.normal(key, shape)
    return output.mean + (output.features.unsqueeze(-1) * matrix).sum(-2)


GSDE: Distribution[GSDEPolicyValue] = Distribution(
    sample=_sample,
    log_prob=DIAGONAL_GAUSSIAN.log_prob,
    entropy=DIAGONAL_GAUSSIAN.entropy,
    mode=DIAGONAL_GAUSSIAN.mode,
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
    """Return a factory of MLPs for continuous actions with generalised state-dependent exploration (gSDE).

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

    build_mlp = mlp(
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
        return Agent(
            cfg=cfg,
            init=init_gsde,
            apply=apply_gsde,
            distribution=GSDE,
            action_key_steps=noise_steps,
        )

    return build
