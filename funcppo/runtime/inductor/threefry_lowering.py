"""What Inductor makes of the random bits' operator: one expression, computed where it is used if it is small.

Spelled out operation by operation it is most of the graph, and Inductor inlines an unshared chain of rounds again and
again. Few words cost less there than a kernel of their own; many would be computed once for every reader.
"""

from __future__ import annotations

import math

import torch
from torch._inductor.ir import Pointwise, TensorBox
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import ops

from funcppo import random

MIN_WORDS_TO_REALIZE = 1024  # words that are worth a kernel of their own


@register_lowering(torch.ops.funcppo.threefry2x32.default, broadcast=True, type_promotion_kind=None)
def _threefry2x32(*words: TensorBox) -> list[TensorBox]:
    loaders = [word.make_loader() for word in words]

    def number(n: int):
        return ops.constant(n, torch.int64)

    def rotated(x, r: int):
        doubled = ops.bitwise_left_shift(x, number(r))
        return doubled | ops.bitwise_right_shift(doubled, number(32))

    def output(i: int) -> TensorBox:
        return Pointwise.create(
            device=words[0].get_device(),
            dtype=torch.int64,
            inner_fn=lambda index: random.threefry_rounds(
                *(load(index) for load in loaders), constant=number, rotate_left=rotated
            )[i],
            ranges=words[0].get_size(),
        )

    both = [output(0), output(1)]
    if math.prod(int(n) for n in words[0].get_size()) >= MIN_WORDS_TO_REALIZE:
        for box in both:
            box.realize()
    return both
