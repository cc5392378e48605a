"""What is as good as equal passes; a leaf that is wrong does not, however small it is beside others."""

from __future__ import annotations

import math

import pytest
import torch

from funcppo.runtime.parity import ParityError, check_learning, check_output

LARGE = torch.tensor([1e3, 2e3])


def test_a_small_leaf_that_is_wrong_is_named_however_large_the_others():
    want = (LARGE, torch.tensor([1e-3, 2e-3]))
    check_output((LARGE * 1.009, want[1] * 0.992), want)
    with pytest.raises(ParityError, match=r"^differs from eager by 4.47e-05 in 1, where that changes by 0.00224$"):
        check_output((LARGE, want[1] * 1.02), want)
    check_output((LARGE, want[1] * 1.02), want, parity=0.03)


def test_the_same_infinities_and_no_numbers_are_equal_and_others_are_not():
    odd = torch.tensor([math.inf, math.nan, -math.inf, 1.0])
    check_output(odd.clone(), odd)
    for i in range(4):
        with pytest.raises(ParityError):
            check_output(torch.where(torch.arange(4) == i, 7.0, odd), odd)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_one_integer_in_a_hundred_may_differ(dtype):
    want = torch.arange(200).to(dtype)
    last = torch.arange(200) >= 198
    check_output(torch.where(last, ~want if dtype == torch.bool else -want, want), want)
    last = torch.arange(200) >= 197
    with pytest.raises(ParityError, match=r"^differs from eager in $"):
        check_output(torch.where(last, ~want if dtype == torch.bool else -want, want), want)


def test_steps_are_compared_over_four_minibatches_and_by_what_they_change():
    """Both go from 100 by 1 a step; one of them by 1.3 from the fourth on, which is 0.3 of 4."""
    step = lambda last: lambda x, n: (x + torch.where(n == 3, last, 1.0), None)
    start, few, many = torch.tensor([100.0]), torch.arange(3), torch.arange(9)
    check_learning(step(1.3), step(1.0), start, few)
    check_learning(step(1.03), step(1.0), start, many)
    with pytest.raises(ParityError, match="where that changes by 4"):
        check_learning(step(1.3), step(1.0), start, many)
