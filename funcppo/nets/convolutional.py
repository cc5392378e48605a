"""Convolutions over images, whose features another network reads: `cnn` and `nature_cnn`.

Images are [B, H, W, C]. Actor and critic share the convolutions.

Source: the networks of Young & Tian 2019, "MinAtar", arXiv:1903.03176, and of Mnih et al. 2015, "Human-level control
through deep reinforcement learning"; initialisation of Huang et al. 2022, "The 37 implementation details of PPO".
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from funcppo import rollout
from funcppo.core import random
from funcppo.core.settings import Size, check_fields
from funcppo.core.types import F32, I64
from funcppo.interfaces import (
    AnyAgent,
    EnvironmentSpec,
    MaskedObservation,
    Memory,
)
from funcppo.nets.base import Agent, NetworkFactory, features, with_features
from funcppo.nets.factories import build_agent
from funcppo.nets.feedforward import HIDDEN_GAIN, mlp, orthogonal

MINATAR = ((16, 3, 1),)  # channels, kernel size, stride
NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
MAX_BYTE = 255.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvolutionConfig:
    """One layer, without padding."""

    n_channels: Size
    kernel_size: Size
    stride: Size

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class CNNConfig:
    """Static sizes, and the network that reads the features."""

    image_shape: tuple[Size, Size, Size]  # height, width, channels
    convolutions: tuple[ConvolutionConfig, ...]
    reader: AnyAgent  # of features [B, F]

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class Convolution(NamedTuple):
    """A layer."""

    weight: Tensor  # [Out, In, K, K]
    bias: Tensor  # [Out]


class Params(NamedTuple):
    """The layers in order, and the parameters of the network that reads their features."""

    convolutions: tuple[Convolution, ...]
    reader: Any


def n_features(
    image_shape: tuple[int, int, int],
    convolutions: tuple[ConvolutionConfig, ...],
) -> int:
    """Numbers that the convolutions make of an image.

    Raises:
      ValueError: the image is smaller than a kernel.
    """
    height, width, n_channels = image_shape
    for layer in convolutions:
        if min(height, width) < layer.kernel_size:
            raise ValueError(
                f"convolutions: expected kernels that fit in an image of {image_shape}, got one of "
                f"{layer.kernel_size} x {layer.kernel_size} where {height} x {width} are left"
            )
        height = (height - layer.kernel_size) // layer.stride + 1
        width = (width - layer.kernel_size) // layer.stride + 1
        n_channels = layer.n_channels
    return height * width * n_channels


def init(cfg: CNNConfig, key: I64[Tensor, "2"]) -> Params:
    """Parameters with orthogonal kernels, gain sqrt(2), and those of the network that reads the features."""
    *layer_keys, reader_key = random.split(
        key, len(cfg.convolutions) + 1
    ).unbind()

    layers: list[Convolution] = []
    n_in = cfg.image_shape[2]
    for layer_key, layer in zip(layer_keys, cfg.convolutions):
        n_out, size = layer.n_channels, layer.kernel_size
        kernel = orthogonal(layer_key, n_in * size**2, n_out, HIDDEN_GAIN)
        weight = kernel.T.reshape(n_out, n_in, size, size)
        layers.append(Convolution(weight, kernel.new_zeros(n_out)))
        n_in = n_out
    return Params(tuple(layers), cfg.reader.init(cfg.reader.cfg, reader_key))


def apply(
    cfg: CNNConfig,
    world: object,
    params: Params,
    obs: Tensor | MaskedObservation,
) -> Any:
    """The output of the network that reads the features of the images, and the action mask where there is one."""
    read = _read_images(cfg, params, obs)
    return cfg.reader.apply(cfg.reader.cfg, world, params.reader, read)


def _read_images(
    cfg: CNNConfig, params: Params, obs: Tensor | MaskedObservation
) -> Tensor | MaskedObservation:
    """The observations with features in place of images."""
    return with_features(obs, convolve(cfg, params.convolutions, features(obs)))


def convolve(
    cfg: CNNConfig,
    layers: tuple[Convolution, ...],
    image: Tensor,
) -> F32[Tensor, "B F"]:
    """Features of images [B, H, W, C]; bytes are divided by 255 first."""
    x = image.permute(0, 3, 1, 2).to(layers[0].weight.dtype)
    if image.dtype == torch.uint8:
        x = x / MAX_BYTE
    for params, layer in zip(layers, cfg.convolutions):
        x = torch.relu(
            conv2d(x, params.weight, params.bias, stride=layer.stride)
        )
    return x.flatten(1)


def initial_memory(cfg: CNNConfig, n_rows: int, device: torch.device) -> Memory:
    """That of the network that reads the features."""
    return rollout.initial_memory(cfg.reader, n_rows, device)


def encode(
    cfg: CNNConfig,
    world: object,
    params: Params,
    obs: Tensor | MaskedObservation,
) -> Any:
    """What the network that reads the features makes of them without its memory."""
    read = _read_images(cfg, params, obs)
    return rollout.encode(cfg.reader, world, params.reader, read)


def apply_recurrent(
    cfg: CNNConfig,
    world: object,
    params: Params,
    encoded: Any,
    memory: Memory,
) -> tuple[Any, Memory]:
    """The output of the network that reads the features, and its memory after the observations."""
    reader = cfg.reader
    assert reader.apply_recurrent is not None
    return reader.apply_recurrent(
        reader.cfg, world, params.reader, encoded, memory
    )


def agent(cfg: CNNConfig) -> AnyAgent:
    """The network, which acts, and remembers, as the one that reads its features."""
    reader = cfg.reader
    if reader.initial_memory is None:
        return Agent(
            cfg=cfg,
            init=init,
            apply=apply,
            distribution=reader.distribution,
            action_key_steps=reader.action_key_steps,
        )
    return Agent(
        cfg=cfg,
        init=init,
        initial_memory=initial_memory,
        apply_recurrent=apply_recurrent,
        encode=encode,
        distribution=reader.distribution,
        action_key_steps=reader.action_key_steps,
    )


def cnn(
    *convolutions: tuple[int, int, int], then: NetworkFactory | None = None
) -> NetworkFactory:
    """A network for images [B, H, W, C]; by default that of MinAtar: 16 channels of 3 x 3, then 128 units, relu.

    Args:
      convolutions: channels, kernel size and stride of each layer, without padding; relu follows each.
      then: the network that reads their features, e.g. `gru()`. None: `mlp(128, activation="relu", shared_trunk=True)`.

    Returns:
      A function of an `EnvironmentSpec` that builds the agent. It raises a ValueError if observations are no images, or
      smaller than a kernel, and a TypeError if `then` is no function that builds an agent.

    Raises:
      ValueError: a layer is not described by three numbers.
    """
    layers = tuple(map(_read_convolution, convolutions or MINATAR))
    if then is None:
        then = mlp(128, activation="relu", shared_trunk=True)

    def build(spec: EnvironmentSpec, /) -> AnyAgent:
        if len(spec.shape) != 3:
            raise ValueError(
                f"env.spec: expected images (height, width, channels) for a cnn, got observations of {spec.shape}"
            )
        shape = spec.shape
        reader_spec = dataclasses.replace(
            spec,
            observation_size=n_features(shape, layers),
            observation_shape=None,
        )
        return agent(
            CNNConfig(
                image_shape=shape,
                convolutions=layers,
                reader=build_agent("then", then, reader_spec),
            )
        )

    return build


def _read_convolution(numbers: object) -> ConvolutionConfig:
    """The layer that three numbers describe."""
    if not isinstance(numbers, tuple | list) or len(cast(Any, numbers)) != 3:
        raise ValueError(
            f"convolutions: expected (channels, kernel size, stride), got {numbers!r}"
        )
    channels, size, stride = cast(tuple[int, int, int], numbers)
    return ConvolutionConfig(
        n_channels=channels, kernel_size=size, stride=stride
    )


def nature_cnn(*, then: NetworkFactory | None = None) -> NetworkFactory:
    """The network for frames of Atari: 32, 64 and 64 channels, then 512 units, relu.

    Args:
      then: the network that reads the features. None: `mlp(512, activation="relu", shared_trunk=True)`.
    """
    if then is None:
        then = mlp(512, activation="relu", shared_trunk=True)
    return cnn(*NATURE, then=then)
