"""Sorting of integer keys: on the host by numpy, which sorts values alone much faster than torch does.

A sort that must tell where each value came from packs the position into the low bits of its key, where 63 bits hold
both.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo.core.types import F32, I64, Bool

KEY_BITS = 63  # bits of a non-negative int64
_SIGN_BIT = 1 << 31
# below this many keys a sort by torch takes less than packing does
MIN_PACKED = 2048
# values that numpy sorts in one call, in well under a second: Python answers a signal between two calls
MAX_SORTED_AT_ONCE = 1 << 24


class SortedKeys(NamedTuple):
    """Keys in ascending order."""

    key: I64[Tensor, "n"]
    # where each was before; equal keys stay in their order
    order: I64[Tensor, "n"]


class UniqueKeys(NamedTuple):
    """The distinct values of some keys."""

    key: I64[Tensor, "d"]  # ascending
    inverse: I64[Tensor, "n"]  # position of each key among them


def sort_values(values: Tensor) -> Tensor:
    """The values of an integer tensor of one dimension, ascending."""
    if values.is_cuda or len(values) < MIN_PACKED:
        return torch.sort(values).values
    array = values.numpy().copy()
    _sort_in_place(array)
    return _from_numpy(array)


def sort_keys(key: I64[Tensor, "n"]) -> SortedKeys:
    """Sort keys, equal ones in the order in which they come."""
    position_bits = max(len(key) - 1, 0).bit_length()
    if key.is_cuda or len(key) < MIN_PACKED:
        return SortedKeys(*torch.sort(key, stable=True))
    least, most = (int(bound) for bound in torch.aminmax(key))
    if least < 0 or most.bit_length() + position_bits > KEY_BITS:
        return SortedKeys(*torch.sort(key, stable=True))
    # In place, because tables may have tens of millions of rows.
    packed = key.numpy().astype(np.int64)
    packed <<= position_bits
    packed |= np.arange(len(key))
    _sort_in_place(packed)
    order = packed & ((1 << position_bits) - 1)
    packed >>= position_bits
    return SortedKeys(_from_numpy(packed).to(key.dtype), _from_numpy(order))


def argsort_floats(value: F32[Tensor, "n"]) -> I64[Tensor, "n"]:
    """The positions of values, none of them NaN, in ascending order; equal ones in the order in which they come."""
    if value.is_cuda or len(value) < MIN_PACKED:
        return torch.argsort(value, stable=True)
    # The bits of a float, as an integer, ascend with its size; adding 0 turns -0 into 0.
    bits = (value + 0.0).view(torch.int32).to(torch.int64)
    ascending = torch.where(
        bits < 0, _SIGN_BIT - 1 - (bits + _SIGN_BIT), bits + _SIGN_BIT
    )
    return sort_keys(ascending).order


def unique_values(values: Tensor) -> Tensor:
    """The distinct values of an integer tensor, ascending."""
    ascending = sort_values(values.reshape(-1))
    return ascending[first_of_run(ascending)]


def unique_inverse(values: I64[Tensor, "n"]) -> UniqueKeys:
    """The distinct values of a tensor, ascending, and for each value its position among them."""
    key, order = sort_keys(values)
    is_first = first_of_run(key)
    rank = is_first.cumsum(0) - 1
    inverse = torch.empty_like(order).scatter(0, order, rank)
    return UniqueKeys(key[is_first], inverse)


def value_counts(values: I64[Tensor, "n"]) -> I64[Tensor, "d"]:
    """How often each distinct value of a tensor occurs, in ascending order of the values."""
    ascending = sort_values(values)
    start = first_of_run(ascending).nonzero().squeeze(1)
    return torch.diff(start, append=start.new_tensor([len(ascending)]))


def first_of_run(sorted_key: Tensor) -> Bool[Tensor, "n"]:
    """Mask of the first element of each run of equal values."""
    is_new = sorted_key[1:] != sorted_key[:-1]
    return torch.cat(
        [torch.ones_like(sorted_key[:1], dtype=torch.bool), is_new]
    )


def _sort_in_place(array: np.ndarray) -> None:
    """Sort integers as one call does, but in many short calls: first those below the median, then the others."""
    if len(array) <= MAX_SORTED_AT_ONCE:
        array.sort()
        return
    middle = len(array) // 2
    array.partition(middle)
    _sort_in_place(array[:middle])
    _sort_in_place(array[middle:])


def _from_numpy(array: np.ndarray) -> Tensor:
    """The host tensor that shares the memory of an array."""
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
