# pyright: standard
"""Recurrent cells: one step, and two loops over the steps of a minibatch as an operator each.

`memories` are those of a cell before each of several steps, and `adjoints` what they get from the steps after. In a
compiled function an operator is one node, so that neither the time to compile nor the graph grows with the number of
steps. On a GPU each is one kernel of Triton for cells whose weights fit shared memory, up to 64 units on an H100;
otherwise PyTorch computes the same, step by step. A CPU is faster by the compiled loop of `tree.graph_scan`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcppo.core.types import F32, Bool

# rows of a program: the fewest that a product of Triton takes
N_ROWS = 16


class Dense(NamedTuple):
    """Affine map, or a stack of them. Sizes differ from layer to layer, so their axes have no letters."""

    weight: Tensor  # [..., In, Out]
    bias: Tensor  # [Out]; [..., 1, Out] in a stack


class GRUMemory(NamedTuple):
    """Memory of a GRU."""

    h: F32[Tensor, "B H"]


class LSTMMemory(NamedTuple):
    """Memory of an LSTM: its hidden state and its cell state."""

    h: F32[Tensor, "B H"]
    c: F32[Tensor, "B H"]


def cell_step(
    recurrent: Dense,
    inputs: F32[Tensor, "B G"],
    memory: GRUMemory | LSTMMemory,
) -> GRUMemory | LSTMMemory:
    """Compute the memory after one step: of a GRU,

        r, z = sigmoid(x + V h),  n = tanh(x + r (V h)),  h' = (1 - z) n + z h

    and of an LSTM

        i, f, o = sigmoid(x + V h),  g = tanh(x + V h),  c' = f c + i g,  h' = o tanh(c')

    Args:
      inputs: x of each gate, side by side.
    """
    products = memory.h @ recurrent.weight + recurrent.bias
    if isinstance(memory, LSTMMemory):
        i, f, g, o = (inputs + products).chunk(4, -1)
        c = torch.sigmoid(f) * memory.c + torch.sigmoid(i) * torch.tanh(g)
        return LSTMMemory(torch.sigmoid(o) * torch.tanh(c), c)

    input_r, input_z, input_n = inputs.chunk(3, -1)
    r, z, n = products.chunk(3, -1)
    z = torch.sigmoid(input_z + z)
    n = torch.tanh(input_n + torch.sigmoid(input_r + r) * n)
    return GRUMemory((1.0 - z) * n + z * memory.h)


def memories(
    recurrent: Dense,
    inputs: F32[Tensor, "T B G"],
    done: Bool[Tensor, "T B"],
    memory: GRUMemory | LSTMMemory,
) -> GRUMemory | LSTMMemory:
    """Compute the memory [T, B, H] before each step; it is 0 after the end of an episode.

    Args:
      inputs: of each step, as those of `cell_step`.
      done: an episode ends with the step.
      memory: before the first step.
    """
    found = _memories(inputs, done, *recurrent, torch.stack(memory))
    return type(memory)(*found)


def adjoints(
    recurrent: Dense,
    inputs: F32[Tensor, "T B G"],
    done: Bool[Tensor, "T B"],
    before: GRUMemory | LSTMMemory,
    grads: list[Tensor],
) -> list[Tensor]:
    """Compute d_{t+1} of `rollout.adjoints` for each step t: the gradient of a loss in the memory after it.

    Args:
      before: of `memories`.
      grads: of the loss in each of them, the others being given; a tensor [T, B, H] for each of the memory's.
    """
    products = before.h @ recurrent.weight + recurrent.bias
    is_lstm = isinstance(before, LSTMMemory)
    factors = (_lstm_factors if is_lstm else _gru_factors)(
        inputs, products, before
    )
    of_gates, through = (torch.where(done[..., None], 0.0, x) for x in factors)
    found = _adjoints(of_gates, through, recurrent.weight, torch.stack(grads))
    return list(found)


def _gru_factors(
    x: Tensor, products: Tensor, memory: Any
) -> tuple[Tensor, Tensor]:
    """Return factors of the gradient in a memory after a step: for that of the products V h, and of the memory before.

    Returns:
      [T, B, G] for the products; [1, T, B, H] for what reaches the memory before the step beside them.
    """
    input_r, input_z, input_n = x.chunk(3, -1)
    r, z, hidden = products.chunk(3, -1)
    r, z = torch.sigmoid(input_r + r), torch.sigmoid(input_z + z)
    n = torch.tanh(input_n + r * hidden)
    of_n = (1 - z) * (1 - n * n)
    of_z = (memory.h - n) * z * (1 - z)
    of_r = of_n * hidden * r * (1 - r)
    return torch.cat([of_r, of_z, of_n * r], -1), z[None]


def _lstm_factors(
    x: Tensor, products: Tensor, memory: Any
) -> tuple[Tensor, Tensor]:
    """As `_gru_factors`, of an LSTM: factors of the gradient in c for the first three gates, of that in h for the last.

    Returns:
      [T, B, G] for the products; [2, T, B, H]: from the gradient in h to that in c, and from that to c before the step.
    """
    i, f, g, o = (x + products).chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    y = torch.tanh(f * memory.c + i * g)
    of_i, of_f = g * i * (1 - i), memory.c * f * (1 - f)
    of_g, of_o = i * (1 - g * g), y * o * (1 - o)
    of_gates = torch.cat([of_i, of_f, of_g, of_o], -1)
    return of_gates, torch.stack([o * (1 - y * y), f])


# -- by PyTorch. A memory is [K, B, H]: h alone of a GRU, h and c of an LSTM.


def _as_memory(x: Tensor) -> GRUMemory | LSTMMemory:
    return GRUMemory(*x) if len(x) == 1 else LSTMMemory(*x)


def _memories_by_steps(
    x: Tensor, done: Tensor, weight: Tensor, bias: Tensor, memory: Tensor
) -> Tensor:
    before: list[Tensor] = []
    for inputs, is_last in zip(x, done):
        before.append(memory)
        after = cell_step(Dense(weight, bias), inputs, _as_memory(memory))
        memory = torch.stack(after).masked_fill(is_last[:, None], 0.0)
    return torch.stack(before, 1)


def _adjoints_by_steps(
    of_gates: Tensor, through: Tensor, weight: Tensor, grads: Tensor
) -> Tensor:
    adjoint = torch.zeros_like(grads[:, 0])
    after: list[Tensor] = []
    for t in reversed(range(len(of_gates))):
        after.append(adjoint)
        h, c = adjoint[0], adjoint[-1]
        past = adjoint * through[:, t]
        gates = [h, h, h]
        if len(adjoint) == 2:
            c = c + past[0]
            past = torch.stack([torch.zeros_like(c), c * through[1, t]])
            gates = [c, c, c, h]
        of_h = (of_gates[t] * torch.cat(gates, -1)) @ weight.mT
        adjoint = grads[:, t] + past
        adjoint = torch.cat([adjoint[:1] + of_h, adjoint[1:]])
    return torch.stack(after[::-1], 1)


# -- by kernels


def _memories_on_gpu(
    x: Tensor, done: Tensor, weight: Tensor, bias: Tensor, memory: Tensor
) -> Tensor:
    if not _has_kernel(x, memory):
        return _memories_by_steps(x, done, weight, bias, memory)
    from funcppo.runtime import triton_kernels

    out = _empty_memories(x, done, weight, bias, memory)
    inputs = [v.contiguous() for v in (x, done, weight, bias, memory)]
    _launch(triton_kernels.memories_kernel, inputs, out)
    return out


def _adjoints_on_gpu(
    of_gates: Tensor, through: Tensor, weight: Tensor, grads: Tensor
) -> Tensor:
    if not _has_kernel(of_gates, grads):
        return _adjoints_by_steps(of_gates, through, weight, grads)
    from funcppo.runtime import triton_kernels

    out = _empty_adjoints(grads)
    inputs = [v.contiguous() for v in (of_gates, through, weight.mT, grads)]
    _launch(triton_kernels.adjoints_kernel, inputs, out)
    return out


def _has_kernel(x: Tensor, memory: Tensor) -> bool:
    """Return whether a program of a kernel holds the weights of a cell in the memory that it shares."""
    from funcppo.runtime import triton_kernels

    # as Triton allots: 7 tiles of padded units by units to each kernel of a GRU, 9 to one of an LSTM
    n_tiles = 7 if len(memory) == 1 else 9
    n_bytes = 4 * n_tiles * _padded(memory.shape[-1]) ** 2
    is_small = n_bytes <= triton_kernels.shared_memory(x.device)
    return is_small and x.dtype == torch.float32


def _padded(n_units: int) -> int:
    return max(16, 1 << (n_units - 1).bit_length())


def _launch(kernel: Any, inputs: list[Tensor], out: Tensor) -> None:
    n_kinds, n_steps, n_rows, n_units = out.shape
    precision = torch.get_float32_matmul_precision()
    kernel[(-(-n_rows // N_ROWS),)](
        *inputs,
        out,
        n_steps,
        n_rows,
        n_units=n_units,
        U=_padded(n_units),
        R=N_ROWS,
        is_lstm=n_kinds == 2,
        precision="tf32x3" if precision == "highest" else "tf32",
        num_warps=4,
    )


def _empty_memories(
    x: Tensor, done: Tensor, weight: Tensor, bias: Tensor, memory: Tensor
) -> Tensor:
    return memory.new_empty(len(memory), *x.shape[:2], memory.shape[-1])


def _empty_adjoints(*inputs: Tensor) -> Tensor:
    return torch.empty_like(inputs[-1], memory_format=torch.contiguous_format)


# -- the operators, declared by hand, because `torch.library.custom_op` imports Dynamo

_LIBRARY = torch.library.Library("funcppo", "FRAGMENT")
_LIBRARY.define(
    "memories(Tensor x, Tensor done, Tensor weight, Tensor bias, Tensor memory) -> Tensor"
)
_LIBRARY.define(
    "adjoints(Tensor of_gates, Tensor through, Tensor weight, Tensor grads) -> Tensor"
)
_LIBRARY.impl("memories", _memories_by_steps, "CPU")
_LIBRARY.impl("adjoints", _adjoints_by_steps, "CPU")
_LIBRARY.impl("memories", _memories_on_gpu, "CUDA")
_LIBRARY.impl("adjoints", _adjoints_on_gpu, "CUDA")
torch.library.register_fake("funcppo::memories", _empty_memories, lib=_LIBRARY)
torch.library.register_fake("funcppo::adjoints", _empty_adjoints, lib=_LIBRARY)
_memories: Any = torch.ops.funcppo.memories.default
_adjoints: Any = torch.ops.funcppo.adjoints.default
