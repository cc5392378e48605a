# pyright: standard
"""An actor and a critic of two hidden layers each by kernels, and the gradient of PPO's loss in their parameters.

`mlp_outputs` is one operator and `mlp_gradient` another; a third has the critic's values of some rows. Each is one
kernel of Triton (`runtime.triton_kernels`), where between two layers nothing waits for memory; there are none on a CPU.
`torch.vmap` maps them all. Automatic differentiation takes the derivative of the loss in the outputs alone; that of the
parameters comes from the second operator.

`loss_gradient` is `minibatch.loss_gradient`, `final_value` is `rollout.estimate_final_value`, and `rollout_step` is
`rollout.rollout_step`, where `reason_against` has none; `actor_step` and `values` are two halves of that step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, cast

import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor
from torch.func import grad_and_value

from funcppo import minibatch, rollout
from funcppo.config import Config
from funcppo.core import tree
from funcppo.core.settings import reads_scalars_apart
from funcppo.core.types import F32, I64, Bool, Obs, Params
from funcppo.losses import Batch, LossMetrics, Scalars, finite_rows, loss_fn
from funcppo.nets import networks
from funcppo.nets.networks import (
    Activation,
    Dense,
    MLPParams,
    numbers,
    with_features,
)
from funcppo.rollout import RandomInputs, RolloutState, Transition


class Tile(NamedTuple):
    """Sizes with which a program of a kernel computes."""

    precision: str  # of products, as Triton names it
    n_rows: int  # at once
    n_warps: int
    max_registers: int | None = None  # of a thread
    n_stages: int = 1  # tiles whose loads are under way at once


# By the precision of products, `bfloat16` or that of `torch.set_float32_matmul_precision`, the fastest tiles measured.
# Tensor cores have no product of float32: one of three TF32 products (tf32x3) is as exact, and faster.
FORWARD_TILES = {
    "highest": Tile("tf32x3", 64, 4, n_stages=3),
    "high": Tile("tf32", 64, 4, 128),
    "medium": Tile("tf32", 64, 4, 128),
    "bfloat16": Tile("bfloat16", 64, 4, 128),
}
# in place of the former for few rows of all learners, where a program waits more than it computes
FEW_ROWS_TILE = Tile("ieee", 32, 8, 128)
# in place of that one for wide observations
FEW_WIDE_ROWS_TILES = {
    "highest": Tile("tf32x3", 16, 4, n_stages=3),
    "high": Tile("tf32", 16, 4, n_stages=3),
    "medium": Tile("tf32", 16, 4, n_stages=3),
    "bfloat16": Tile("bfloat16", 16, 4, n_stages=3),
}
BACKWARD_TILES = {
    "highest": Tile("tf32x3", 32, 4),
    "high": Tile("tf32", 32, 2),
    "medium": Tile("tf32", 32, 2),
    "bfloat16": Tile("bfloat16", 64, 4),
}
# Programs for each stack of layers, about as many as a GPU runs at once; of each the gradient is summed by itself.
MAX_PROGRAMS = 132
PROGRAM_ROWS = 32  # a program has a multiple of so many

# The outputs of the layers of the actor and of the critic for each row: of the heads [2, B, S], of the first hidden
# layer and of the second [2, B, H].
LayerOutputs: TypeAlias = tuple[Tensor, Tensor, Tensor]
# The activation of hidden layers, and whether the operands of products are rounded to bfloat16.
Settings: TypeAlias = tuple[Activation, bool]


def mlp_outputs(
    params: MLPParams, x: F32[Tensor, "B F"], settings: Settings
) -> LayerOutputs:
    """Apply the layers to each row; return the outputs of all of them.

    Args:
      params: of two hidden layers, which actor and critic do not share.
    """
    return _dense_forward(x, tree.leaves(params), *settings)


def mlp_gradient(
    params: MLPParams,
    x: F32[Tensor, "B F"],
    outputs: LayerOutputs,
    of_heads: F32[Tensor, "2 B S"],
    settings: Settings,
) -> MLPParams:
    """Compute the gradient of the parameters, given the gradient of the heads' outputs."""
    (_, _), (w2, _), (w3, _) = *params.hidden, params.heads
    _, y1, y2 = outputs
    partial_sums = _dense_backward(of_heads, x, y1, y2, w2, w3, *settings)
    return tree.unravel(params, partial_sums.sum(-2))


def critic_values(
    params: MLPParams,
    x: F32[Tensor, "B F"],
    is_needed: Bool[Tensor, "B"],
    settings: Settings,
) -> F32[Tensor, "B"]:
    """Compute the critic's values of the rows that are needed; 0 for all other rows."""
    return _dense_values(x, is_needed, tree.leaves(params), *settings)


# -- by kernels


def _forward_on_gpu(
    x: Tensor, leaves: list[Tensor], activation: Activation, is_bfloat16: bool
) -> tuple[Tensor, Tensor, Tensor]:
    heads, y1, y2 = outputs = _empty_outputs(x, leaves)
    tile, n_part_rows = _forward_tile(x, _precision(is_bfloat16))
    n_rows, n_programs = _programs(x, n_part_rows)
    grid = n_programs, 2 * _n_learners(x)
    _launch_forward(x, leaves, (y1, y2, heads), activation, tile, grid, n_rows)
    return outputs


def _values_on_gpu(
    x: Tensor,
    is_needed: Tensor,
    leaves: list[Tensor],
    activation: Activation,
    is_bfloat16: bool,
) -> Tensor:
    out = x.new_zeros(x.shape[:-1])
    needed = is_needed.contiguous()
    tile = FORWARD_TILES[_precision(is_bfloat16)]
    grid = -(-x.shape[-2] // tile.n_rows), _n_learners(x)
    outputs = (needed, needed, out)
    _launch_forward(
        x, leaves, outputs, activation, tile, grid, tile.n_rows, True
    )
    return out


def _launch_forward(
    x: Tensor,
    leaves: list[Tensor],
    outputs: tuple[Tensor, ...],
    activation: Activation,
    tile: Tile,
    grid: tuple[int, int],
    n_rows: int,
    values_only: bool = False,
) -> None:
    """Launch the forward kernel.

    Args:
      outputs: its y1, y2 and out.
      n_rows: of a program.
    """
    from funcppo.runtime import triton_kernels

    inputs = [_of_learners(v, x.ndim == 3) for v in (x, *leaves)]
    kernel: Any = triton_kernels.forward_kernel
    kernel[grid](
        *inputs,
        *outputs,
        *(v.stride(0) for v in inputs),
        x.shape[-2],
        n_rows,
        **_constants(x, leaves[2], leaves[4], tile, wide_columns=32),
        is_tanh=activation == "tanh",
        values_only=int(values_only),
    )


def _backward_on_gpu(
    g: Tensor,
    x: Tensor,
    y1: Tensor,
    y2: Tensor,
    w2: Tensor,
    w3: Tensor,
    activation: Activation,
    is_bfloat16: bool,
) -> Tensor:
    from funcppo.runtime import triton_kernels

    n_rows, n_programs = _backward_programs(x)
    sums = _sums_of(n_programs, g, x, y1, y2)
    tile = BACKWARD_TILES[_precision(is_bfloat16)]
    constants = _constants(x, w2, w3, tile, wide_columns=64)
    n_parts = -(-x.shape[-1] // int(constants["X"]))
    inputs = [_of_learners(v, x.ndim == 3) for v in (x, w2, w3)]
    kernel: Any = triton_kernels.backward_kernel
    kernel[n_programs, 2 * _n_learners(x), n_parts](
        g.contiguous(),
        inputs[0],
        y1.contiguous(),
        y2.contiguous(),
        *inputs[1:],
        sums,
        *(v.stride(0) for v in inputs),
        x.shape[-2],
        n_rows,
        sums.shape[-1],
        **constants,
        is_tanh=activation == "tanh",
    )
    return sums


def _constants(
    x: Tensor,
    w2: Tensor,
    w3: Tensor,
    tile: Tile,
    wide_columns: int,
) -> dict[str, int | str]:
    """Return the constants that a kernel is compiled for, by name.

    Args:
      wide_columns: numbers of a wide observation that a program takes at once.
    """
    widths = (x.shape[-1], *w2.shape[-2:], w3.shape[-1])
    names = ("n_obs", "n_first", "n_second", "n_outputs")
    # at least 16, for products on tensor cores
    padded = [max(16, 1 << (n - 1).bit_length()) for n in widths]
    if _is_wide(x):
        padded = [wide_columns, *padded[1:]]
    constants = {
        **dict(zip(names, widths)),
        **dict(zip("XFSY", padded)),
        "R": tile.n_rows,
        "precision": tile.precision,
        "num_warps": tile.n_warps,
        "num_stages": tile.n_stages,
    }
    if tile.max_registers is not None:
        constants["maxnreg"] = tile.max_registers
    return constants


def _precision(is_bfloat16: bool) -> str:
    """Return the precision of matrix products."""
    return "bfloat16" if is_bfloat16 else torch.get_float32_matmul_precision()


def _n_learners(x: Tensor) -> int:
    return x.shape[0] if x.ndim == 3 else 1


def _of_learners(x: Tensor, is_batched: bool) -> Tensor:
    """Return the tensor with a leading axis of learners, contiguous for each of them."""
    x = x if is_batched else x[None]
    return x if x[0].is_contiguous() else x.contiguous()


def _is_wide(x: Tensor) -> bool:
    """Return whether a program reads the numbers of an observation in several parts."""
    return x.shape[-1] > 64


def _forward_tile(x: Tensor, precision: str) -> tuple[Tile, int]:
    """Choose the tile of the forward kernel; return it, and what a program's number of rows is a multiple of."""
    is_few = x.shape[:-1].numel() <= 4096
    if is_few and _is_wide(x):
        return FEW_WIDE_ROWS_TILES[precision], 16
    if is_few and precision != "bfloat16":
        return FEW_ROWS_TILE, PROGRAM_ROWS
    return FORWARD_TILES[precision], PROGRAM_ROWS


def _backward_programs(x: Tensor) -> tuple[int, int]:
    """Return the rows of a program and the number of programs, for the backward kernel."""
    return _programs(x, 64 if _is_wide(x) else PROGRAM_ROWS)


def _programs(x: Tensor, n_part_rows: int) -> tuple[int, int]:
    """Return the rows of a program, a multiple of `n_part_rows`, and the number of programs for a stack of layers."""
    n_parts = -(-x.shape[-2] // n_part_rows)
    n_of_program = min(n_parts, -(-n_parts * _n_learners(x) // MAX_PROGRAMS))
    return n_of_program * n_part_rows, -(-n_parts // n_of_program)


def _empty_outputs(
    x: Tensor, leaves: list[Tensor], *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    def empty(weight: Tensor) -> Tensor:
        shape = (*x.shape[:-2], 2, x.shape[-2], weight.shape[-1])
        return x.new_empty(shape)

    w1, w2, w3 = leaves[::2]
    return empty(w3), empty(w1), empty(w2)


def _empty_values(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[:-1])


def _empty_sums(
    g: Tensor, x: Tensor, y1: Tensor, y2: Tensor, *_: object
) -> Tensor:
    return _sums_of(_backward_programs(x)[1], g, x, y1, y2)


def _sums_of(
    n_programs: int, g: Tensor, x: Tensor, y1: Tensor, y2: Tensor
) -> Tensor:
    sizes = [v.shape[-1] for v in (x, y1, y2, g)]
    n_params = 2 * sum((n + 1) * m for n, m in pairwise(sizes))
    return x.new_empty((*x.shape[:-2], n_programs, n_params))


# -- the operators, declared by hand, because `torch.library.custom_op` imports Dynamo

_LIBRARY = torch.library.Library("funcppo", "FRAGMENT")
_LIBRARY.define(
    "dense_forward(Tensor x, Tensor[] leaves, str activation, bool is_bfloat16) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "dense_backward(Tensor g, Tensor x, Tensor y1, Tensor y2, Tensor w2, Tensor w3, str activation, "
    "bool is_bfloat16) -> Tensor"
)
_LIBRARY.define(
    "dense_values(Tensor x, Tensor is_needed, Tensor[] leaves, str activation, bool is_bfloat16) -> Tensor"
)
_LIBRARY.impl("dense_forward", _forward_on_gpu, "CUDA")
_LIBRARY.impl("dense_backward", _backward_on_gpu, "CUDA")
_LIBRARY.impl("dense_values", _values_on_gpu, "CUDA")
_dense_forward: Any = torch.ops.funcppo.dense_forward.default
_dense_backward: Any = torch.ops.funcppo.dense_backward.default
_dense_values: Any = torch.ops.funcppo.dense_values.default


def _map_learners(
    op: Callable[..., Any], info: Any, dims: Any, *args: Any
) -> tuple[Any, Any]:
    """Apply an operator under `torch.vmap`, with the mapped axis of each tensor first."""
    leaves, structure = torch_pytree.tree_flatten(args)

    def map_first(x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        if dim is None:
            return x.expand(info.batch_size, *x.shape)
        return x.movedim(dim, 0)

    leaves = list(map(map_first, leaves, torch_pytree.tree_leaves(dims)))
    result = op(*torch_pytree.tree_unflatten(leaves, structure))
    return result, torch_pytree.tree_map(lambda _: 0, result)


for name, fake in (
    ("dense_forward", _empty_outputs),
    ("dense_backward", _empty_sums),
    ("dense_values", _empty_values),
):
    torch.library.register_fake(f"funcppo::{name}", fake, lib=_LIBRARY)
    rule = partial(_map_learners, getattr(torch.ops.funcppo, name).default)
    torch.library.register_vmap(f"funcppo::{name}", rule, lib=_LIBRARY)


def reason_against(cfg: Config) -> str:
    """Return why the kernels cannot compute the learner's network; empty if they can."""
    # units and outputs that a program holds, and numbers of an observation, of which it holds some at a time
    max_width, max_outputs, max_obs = 64, 16, 1024
    agent = cfg.update_agent or cfg.agent
    if agent.apply not in (networks.apply_mlp, networks.apply_gaussian):
        return "the network is none of `fp.nets.mlp`"
    if cfg.update_agent is not None:
        return "the update has a network of its own"
    if cfg.loss is not None:
        return "the loss is the user's own"

    net: networks.MLPConfig = agent.cfg
    if net.shared_trunk:
        return "actor and critic share their hidden layers"
    if len(net.hidden) != 2:
        return f"the network has {len(net.hidden)} hidden layers, not 2"
    if max(net.hidden) > max_width:
        return f"a layer of {max(net.hidden)} units, more than {max_width}"
    if net.n_obs > max_obs:
        return f"an observation of {net.n_obs} numbers, more than {max_obs}"
    n_outputs = net.n_actions * (2 if net.log_std == "state" else 1)
    if n_outputs > max_outputs:
        return f"{n_outputs} outputs, more than {max_outputs}"
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
    """Compute the gradient of the loss over the given rows of a batch, and the loss metrics, by the kernels."""
    settings = _settings(cfg)
    selected = minibatch.select_rows(cfg, batch, rows)
    obs: Any = selected.obs
    # As `loss_fn` reads them: all numbers of a row that is not finite are 0.
    is_finite = finite_rows(selected)
    x = torch.where(is_finite[:, None], numbers(obs), 0.0)
    layers = _layers(params)
    outputs = mlp_outputs(layers, x, settings)
    stand_in = _with_outputs(params, outputs[0])
    selected = selected._replace(obs=with_features(obs, x[:, :0]))
    loss = partial(loss_fn, cfg, world)
    gradient, (_, metrics) = grad_and_value(loss, has_aux=True)(
        stand_in, selected, scalars
    )
    of_layers = mlp_gradient(
        layers, x, outputs, _layers(gradient).heads.bias, settings
    )
    grads = _with_layers(gradient, of_layers)
    return cast(Params, grads), cast(LossMetrics, metrics)


@reads_scalars_apart
def final_value(
    cfg: Config, world: object, params: object, trajectory: Transition[Any]
) -> F32[Tensor, "T B"]:
    """Compute V of the last observation of each truncated episode, [T, B], at its last step; 0 elsewhere."""
    if not rollout.uses_final_obs(cfg):
        return rollout.estimate_final_value(cfg, world, params, trajectory)
    final_obs: Any = trajectory.final_obs
    value = critic_values(
        _layers(params),
        numbers(final_obs).flatten(0, 1),
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
    """Make a rollout step with the network by the kernels: see `rollout.rollout_step`."""
    settings = _settings(cfg)

    def apply(net: Any, world: object, params: Any, obs: Any) -> Any:
        x = numbers(obs)
        outputs = mlp_outputs(_layers(params), x, settings)
        params = _with_outputs(params, outputs[0])
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
    """Make a rollout step without the critic's value, which no step needs; `values` computes all values later."""
    next_state, transition = rollout.rollout_step(
        cfg, world, params, rollout_state, random_inputs
    )
    return next_state, transition._replace(value=())  # pyright: ignore[reportArgumentType]


@reads_scalars_apart
def values(
    cfg: Config, world: object, params: object, obs: Any
) -> F32[Tensor, "T B"]:
    """Compute the critic's value [T, B] of each observation of a rollout."""
    x = numbers(obs)
    flat = x.flatten(0, 1)
    is_needed = flat.new_ones(len(flat), dtype=torch.bool)
    value = critic_values(_layers(params), flat, is_needed, _settings(cfg))
    return value.view(x.shape[:2])


def _settings(cfg: Config) -> Settings:
    net: networks.MLPConfig = cfg.agent.cfg
    return net.activation, net.matmul_dtype is not None


def _layers(params: Any) -> networks.MLPParams:
    """Return the layers among the parameters of a network."""
    is_gaussian = isinstance(params, networks.GaussianParams)
    return params.net if is_gaussian else params


def _with_outputs(params: Any, heads: Tensor) -> Any:
    """Build parameters without hidden layers whose biases are the given outputs, for empty observations.

    It returns its biases, which are the outputs of each row.
    """
    no_weights = heads.new_zeros(2, 0, heads.shape[-1])
    layers = networks.MLPParams((), Dense(no_weights, heads))
    return _with_layers(params, layers)


def _with_layers(params: Any, layers: networks.MLPParams) -> Any:
    """Replace the layers among the parameters."""
    if isinstance(params, networks.GaussianParams):
        return networks.GaussianParams(layers, params.log_std)
    return layers
