"""Sorts and distinct values are those of torch, of few keys and of many."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.logic import row_index


@st.composite
def key_tensors(draw):
    """Random keys with repetitions: from the smallest that are packed to ones that do not fit beside a position."""
    n = draw(
        st.sampled_from(
            [0, 1, 2, 100, row_index.MIN_PACKED, 2 * row_index.MIN_PACKED]
        )
    )
    high = draw(st.sampled_from([1, 7, 2**20, 2**51, 2**52, 2**63 - 1]))
    low = draw(st.sampled_from([0, 0, -5]))
    seed = draw(st.integers(0, 2**30))
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (n,), generator=generator)


@given(key_tensors())
def test_they_are_those_of_torch(key):
    expected, order = torch.sort(key, stable=True)
    assert torch.equal(row_index.sort_values(key), expected)
    found = row_index.sort_keys(key)
    assert found.key.dtype == key.dtype
    assert torch.equal(found.key, expected)
    assert torch.equal(found.order, order)

    distinct, inverse, counts = torch.unique(
        key, return_inverse=True, return_counts=True
    )
    assert torch.equal(row_index.unique_values(key), distinct)
    found = row_index.unique_inverse(key)
    assert torch.equal(found.key, distinct)
    assert torch.equal(found.inverse, inverse)
    assert torch.equal(row_index.value_counts(key), counts)
    assert torch.equal(
        row_index.first_of_run(expected).nonzero().squeeze(1),
        torch.cat([counts.new_zeros(1), counts.cumsum(0)])[: len(counts)],
    )


@given(st.integers(0, 2**30), st.sampled_from([5, 3 * row_index.MIN_PACKED]))
def test_floats_are_ordered_as_by_torch(seed, n):
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(n, generator=generator)
    value = torch.cat([value, -value, value.round(), -value.round()])
    value = torch.cat([value, torch.tensor([torch.inf, -torch.inf, 1e-42])])
    expected = torch.argsort(value, stable=True)
    assert torch.equal(row_index.argsort_floats(value), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_type_of_the_keys_stays(dtype):
    key = torch.arange(2 * row_index.MIN_PACKED, dtype=dtype).flip(0) // 3
    assert row_index.sort_keys(key).key.dtype == dtype
    assert row_index.unique_values(key.view(2, -1)).dtype == dtype


def test_the_keys_stay_as_they_were():
    key = torch.arange(2 * row_index.MIN_PACKED).flip(0)
    before = key.clone()
    row_index.sort_values(key)
    row_index.unique_inverse(key)
    assert torch.equal(key, before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_sorts_the_same():
    key = torch.randint(0, 99, (3 * row_index.MIN_PACKED,))
    for here, there in zip(
        row_index.sort_keys(key), row_index.sort_keys(key.cuda())
    ):
        assert torch.equal(here, there.cpu())


class _RecordedArray(np.ndarray):
    """An array that records how many values each call sorts."""

    n_sorted: ClassVar[list[int]] = []

    def sort(self, *args, **options):
        self.n_sorted.append(len(self))
        super().sort(*args, **options)


@given(st.lists(st.integers(-9, 99), max_size=200))
def test_no_call_sorts_more_than_its_share(values):
    """Python answers a signal only between two calls."""
    _RecordedArray.n_sorted.clear()
    array = np.array(values, dtype=np.int64).view(_RecordedArray)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_index, "MAX_SORTED_AT_ONCE", 16)
        row_index._sort_in_place(array)
    assert array.tolist() == sorted(values)
    assert max(_RecordedArray.n_sorted) <= 16


@given(key_tensors())
def test_many_keys_are_sorted_as_few(key):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_index, "MAX_SORTED_AT_ONCE", 100)
        values, keys = row_index.sort_values(key), row_index.sort_keys(key)
    assert torch.equal(values, row_index.sort_values(key))
    assert torch.equal(keys.key, values)
    assert torch.equal(keys.order, row_index.sort_keys(key).order)
