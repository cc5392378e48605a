"""Inductor's lowering of the random bits' operator `funcppo::threefry2x32`; importing the module registers it.

The operator becomes one expression of 20 rounds. Written as 150 graph operations it would be most of the graph, and
Inductor would inline its chain of rounds again and again. A small output is recomputed where it is used, which costs
less than a kernel of its own; a large one is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor.ir import Pointwise, TensorBox
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import ops

from funcppo.core import random

# output words from which a kernel of their own costs less than recomputing them
MIN_WORDS_TO_REALIZE = 1024

_Word = Any  # a value in Inductor's virtualized arithmetic
# reads one element of an input, given its index
_Loader = Callable[[Sequence[_Word]], _Word]


@register_lowering(
    torch.ops.funcppo.threefry2x32.default,
    broadcast=True,
    type_promotion_kind=None,
)
def _threefry2x32(*words: TensorBox) -> list[TensorBox]:
    """Both output words of the operator; `words` are its two key words and its two counter words."""
    loaders = [word.make_loader() for word in words]
    device = words[0].get_device()
    size = words[0].get_size()
    outputs = [_pointwise_output(loaders, i, device, size) for i in range(2)]

    if math.prod(int(n) for n in size) >= MIN_WORDS_TO_REALIZE:
        for output in outputs:
            output.realize()
    return outputs


def _pointwise_output(
    loaders: list[_Loader],
    output_index: int,
    device: torch.device | None,
    size: Sequence[_Word],
) -> TensorBox:
    """One output word as a pointwise expression of the four input words."""

    def compute(index: Sequence[_Word]) -> _Word:
        key_and_counter = (load(index) for load in loaders)
        words = random.threefry_rounds(
            *key_and_counter, constant=_constant, rotate_left=_rotate_left
        )
        return words[output_index]

    return Pointwise.create(
        device=device, dtype=torch.int64, inner_fn=compute, ranges=size
    )


def _constant(n: int) -> _Word:
    return ops.constant(n, torch.int64)


def _rotate_left(x: _Word, n_bits: int) -> _Word:
    """A 32-bit word rotated to the left; the bits above the lowest 32 are left undefined."""
    shifted = ops.bitwise_left_shift(x, _constant(n_bits))
    return shifted | ops.bitwise_right_shift(shifted, _constant(32))
