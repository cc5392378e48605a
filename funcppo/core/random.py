"""Explicit random keys: Threefry-2x32 in plain tensor ops, so CPU, GPU, vmap and compile agree.

A key is `I64[Tensor, "2"]` holding two 32-bit words. A key is used once: split it, never reuse it.
Every function takes keys with leading axes too and then samples independently for each: `uniform(keys[B, 2], (4,))`
is `[B, 4]`, row b from key b alone. Bit-equal to `jax.random` with `jax_threefry_partitionable=True`.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", SC'11 (Random123).
"""

# pyright: reportUnknownMemberType=false
# PyTorch leaves the parameters of `torch.library` and `broadcast_shapes` without types.

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol, Self, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from funcppo.core.tree import is_eager
from funcppo.core.types import F32, I64, check_tensor

_MASK = 0xFFFFFFFF  # 32 bits
# bits that even and odd groups of four rounds rotate by
_ROTATIONS = (
    (13, 15, 26, 6),
    (17, 29, 16, 24),
)
_PARITY = 0x1BD11BDA

Sampler = TypeVar("Sampler", bound=Callable[..., Tensor])


class WordArithmetic(Protocol):
    """Operations that the Threefry rounds need of a 32-bit word, held in 64 bits."""

    def __add__(self, other: Self | int, /) -> Self: ...
    def __and__(self, other: Self | int, /) -> Self: ...
    def __xor__(self, other: Self | int, /) -> Self: ...


# A tensor, or what a compiler computes with in its place.
Word = TypeVar("Word", bound=WordArithmetic)


def threefry_rounds(
    k0: Word,
    k1: Word,
    x0: Word,
    x1: Word,
    constant: Callable[[int], Word | int],
    rotate_left: Callable[[Word, int], Word],
) -> tuple[Word, Word]:
    """Apply the 20 rounds of Threefry-2x32 to a counter, in the arithmetic of the given words; return two words.

    Args:
      k0, k1: the key.
      x0, x1: the counter.
      constant: a Python integer as a word.
      rotate_left: a word whose low 32 bits are rotated to the left by some bits; those above may be anything.

    Returns:
      Two words below 2**32.

    Source: Salmon et al. 2011, section 3.3.
    """
    mask = constant(_MASK)
    key_schedule = (k0, k1, k0 ^ k1 ^ constant(_PARITY))

    # x0 is only added to, so it may grow past 32 bits until the end. x1 is rotated, so it is masked at every use.
    x0 = x0 + k0
    x1 = (x1 + k1) & mask
    for group in range(5):
        for n_bits in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (rotate_left(x1, n_bits) ^ x0) & mask
        x0 = x0 + key_schedule[(group + 1) % 3]
        x1 = (x1 + (key_schedule[(group + 2) % 3] + constant(group + 1))) & mask
    return x0 & mask, x1


def _rotate_left(word: Tensor, n_bits: int) -> Tensor:
    shifted = word << n_bits
    return shifted | shifted >> 32


def _rotate_uint32(word: np.ndarray, n_bits: int) -> np.ndarray:
    return word << n_bits | word >> (32 - n_bits)


# The rounds are one operator: their 150 operations would be most of what a compiler has to read.
# `runtime/inductor.py` writes them out. The operator is declared by hand because
# `torch.library.custom_op` imports Dynamo at the first draw: seconds that an eager run can spare.
_LIBRARY = torch.library.Library("funcppo", "DEF")
_LIBRARY.define(
    "threefry2x32(Tensor k0, Tensor k1, Tensor x0, Tensor x1) -> (Tensor, Tensor)",
    tags=(torch.Tag.flexible_layout,),
)


def _threefry2x32_eager(
    k0: Tensor, k1: Tensor, x0: Tensor, x1: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the operator eagerly: on a CPU in NumPy's uint32; else in int64, as torch has no portable uint32."""
    if k0.device.type == "cpu":
        words: list[Any] = [
            x.numpy().astype(np.uint32) for x in (k0, k1, x0, x1)
        ]
        with np.errstate(over="ignore"):
            made = threefry_rounds(
                *words, constant=np.uint32, rotate_left=_rotate_uint32
            )
        high, low = (torch.from_numpy(np.asarray(x, np.int64)) for x in made)
        return high, low
    return threefry_rounds(
        k0, k1, x0, x1, constant=int, rotate_left=_rotate_left
    )


def _threefry2x32_fake(*words: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs of the right shape, without values."""
    shape: torch.Size = torch.broadcast_shapes(*(word.shape for word in words))
    return words[0].new_empty(shape), words[0].new_empty(shape)


def _threefry2x32_vmap(
    info: object, batch_dims: tuple[int | None, ...], *words: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """Compute the operator under vmap: batch axes go first, and ranks are padded to broadcast."""
    rank = max(
        word.ndim - (dim is not None) for word, dim in zip(words, batch_dims)
    )

    def batch_first(word: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return word
        new_axes = [None] * (rank + 1 - word.ndim)
        return word.movedim(dim, 0)[(slice(None), *new_axes)]

    outputs = threefry2x32(
        *(batch_first(word, dim) for word, dim in zip(words, batch_dims))
    )
    return outputs, (0, 0)


_LIBRARY.impl("threefry2x32", _threefry2x32_eager, "CompositeExplicitAutograd")
torch.library.register_fake(
    "funcppo::threefry2x32", _threefry2x32_fake, lib=_LIBRARY
)
torch.library.register_vmap(
    "funcppo::threefry2x32", _threefry2x32_vmap, lib=_LIBRARY
)


threefry2x32: Callable[..., tuple[Tensor, Tensor]] = (
    torch.ops.funcppo.threefry2x32.default
)


def _hash_counter(key: Tensor, counter: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the two words that a key makes of a counter below 2**32."""
    return threefry2x32(
        key[..., 0], key[..., 1], torch.zeros_like(counter), counter
    )


def check_key(key: object) -> None:
    """Check that a value is a key.

    Raises:
      TypeError: says what was expected and what came.
    """
    check_tensor(key, [2], torch.int64, "key: one of random.key(seed)")


def key(seed: int, device: torch.device | str = "cpu") -> I64[Tensor, "2"]:
    """Build a key [2] from a seed, which is taken modulo 2**64.

    Raises:
      TypeError: the seed is no integer.
      ValueError: it has more than 64 bits.
    """
    if not hasattr(seed, "__index__"):
        raise TypeError(f"seed: expected an integer, got {type(seed).__name__}")
    if not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(
            f"seed: expected an integer of 64 bits, got one of {int(seed).bit_length()} bits"
        )
    words = [seed >> 32 & _MASK, seed & _MASK]
    return torch.tensor(words, dtype=torch.int64, device=device)


# Keys whose rows are used one after another: the numbers of the rows by their addresses, and what draws from all rows.
_ahead: list[
    tuple[Tensor, dict[int, int], Callable[..., tuple[Tensor, ...]]]
] = []
MAX_NUMBERS_AHEAD = 1024  # of a row: drawing more takes longer than calling


@contextmanager
def drawing_ahead(*keys: I64[Tensor, "T ... 2"]) -> Generator[None]:
    """In the context, draw from a row of `keys` as from all rows at once: the same numbers in fewer calls.

    In compiled functions, and under `torch.vmap`, each row is drawn from by itself.
    """

    def draw(
        keys: Tensor, sample: Callable[..., Tensor], *args: object
    ) -> tuple[Tensor, ...]:
        return sample(keys, *args).unbind()

    for x in keys:
        rows = {row.data_ptr(): i for i, row in enumerate(x.unbind())}
        _ahead.append((x, rows, functools.cache(functools.partial(draw, x))))
    try:
        yield
    finally:
        del _ahead[len(_ahead) - len(keys) :]


def _draws_ahead(sample: Sampler) -> Sampler:
    """Return a sampler that heeds `drawing_ahead`."""

    @functools.wraps(sample)
    def call(
        key: I64[Tensor, "... 2"], shape: tuple[int, ...], *limits: float
    ) -> Tensor:
        if not _ahead or not is_eager():
            return sample(key, shape, *limits)
        n_numbers = math.prod((*key.shape[:-1], *shape))
        layout = (key.shape, key.stride())
        for keys, rows, draw in _ahead:
            row = rows.get(key.data_ptr())
            is_row = layout == (keys.shape[1:], keys.stride()[1:])
            if row is not None and is_row and n_numbers <= MAX_NUMBERS_AHEAD:
                return draw(sample, shape, *limits)[row]
        return sample(key, shape, *limits)

    return cast(Sampler, call)


def fold_in(
    key: I64[Tensor, "... 2"], data: Tensor | int
) -> I64[Tensor, "... 2"]:
    """Compute the `data`-th child of `key`, `data` modulo 2**32; `fold_in(k, i) == split(k, n)[i]`."""
    if isinstance(data, int):
        data = torch.full((), data & _MASK, device=key.device)
    data = data.to(torch.int64) & _MASK
    return torch.stack(_hash_counter(key, data), dim=-1)


def split(key: I64[Tensor, "... 2"], num: int = 2) -> I64[Tensor, "... num 2"]:
    """Split a key into `num` independent keys, its children 0 .. num - 1."""
    return fold_in(key.unsqueeze(-2), torch.arange(num, device=key.device))


@_draws_ahead
def bits(
    key: I64[Tensor, "... 2"], shape: tuple[int, ...]
) -> I64[Tensor, "..."]:
    """Sample 32 random bits for each element, as integers in [0, 2**32)."""
    counter = torch.arange(math.prod(shape), device=key.device)
    high, low = _hash_counter(key.unsqueeze(-2), counter)
    return (high ^ low).reshape((*key.shape[:-1], *shape))


@_draws_ahead
def uniform(
    key: I64[Tensor, "... 2"],
    shape: tuple[int, ...],
    minval: float = 0.0,
    maxval: float = 1.0,
) -> F32[Tensor, "..."]:
    """Sample uniform numbers on [minval, maxval), from 23 random bits each."""
    low = round_to_float32(minval)
    high = round_to_float32(maxval)

    # Scaled in float64: there the product is exact, so a fused multiply-add changes no bit.
    unit = (bits(key, shape) >> 9).to(torch.float64) * 2.0**-23
    return (unit * round_to_float32(high - low) + low).to(torch.float32)


def round_to_float32(x: float) -> float:
    """Round to the nearest float32, ties to even; the result is no tensor, as Inductor keeps constants in float64."""
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(mantissa * 2.0**24), exponent - 24)


@_draws_ahead
def normal(
    key: I64[Tensor, "... 2"], shape: tuple[int, ...]
) -> F32[Tensor, "..."]:
    """Sample standard normal numbers by inversion: sqrt(2) erfinv(u), u uniform on (-1, 1)."""
    return torch.erfinv(uniform(key, shape, -1.0 + 2.0**-24, 1.0)) * math.sqrt(
        2.0
    )


@_draws_ahead
def gumbel(
    key: I64[Tensor, "... 2"], shape: tuple[int, ...]
) -> F32[Tensor, "..."]:
    """Sample standard Gumbel numbers by inversion: -log(-log(u)), u uniform on (0, 1)."""
    smallest = torch.finfo(torch.float32).tiny  # log(0) would be -inf
    return -torch.log(-torch.log(uniform(key, shape).clamp_min(smallest)))


def categorical(
    key: I64[Tensor, "2"], logits: F32[Tensor, "... S"]
) -> I64[Tensor, "..."]:
    """Sample one index in each row with probability softmax(logits), by the Gumbel-max trick.

    A logit of -inf or `torch.finfo(dtype).min` masks its index: it is never sampled if another index is not masked.

    Source: Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030.
    """
    return (gumbel(key, tuple(logits.shape)) + logits).argmax(-1)


def permutation(key: I64[Tensor, "... 2"], n: int) -> I64[Tensor, "... n"]:
    """Sample a random order of 0 .. n - 1, by sorting on random bits several times.

    With 32 bits some of n numbers are equal, and a stable sort leaves those in their old order. Each further sort
    makes that bias smaller; their number is that of `jax.random.permutation`.
    """
    n_rounds = math.ceil(3 * math.log(max(1, n)) / math.log(_MASK))
    order = torch.arange(n, device=key.device).expand(*key.shape[:-1], n)
    for _ in range(n_rounds):
        key, sort_key = split(key).unbind(-2)
        ranks = torch.argsort(bits(sort_key, (n,)), dim=-1, stable=True)
        order = order.gather(-1, ranks)
    return order


def unit_from_key(words: I64[Tensor, "... 2"]) -> F32[Tensor, "..."]:
    """Return uniform numbers on [0, 1) with 24 bits, from keys that are used for nothing else."""
    return (words[..., 0] >> 8).to(torch.float32) * 2.0**-24


def integer_from_key(
    words: I64[Tensor, "... 2"], bound: Tensor | int
) -> I64[Tensor, "..."]:
    """Return uniform integers on 0 .. bound - 1, from 63 bits of keys that are used for nothing else.

    No value is likelier than another by more than bound / 2**63.
    """
    high = words[..., 0] & 0x7FFFFFFF
    return ((high << 32) + words[..., 1]) % bound
