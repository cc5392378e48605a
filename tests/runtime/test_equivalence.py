"""What is as good as equal passes; a leaf that is wrong does not, however small it is beside others."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch

from funcppo.runtime.equivalence import (
    DEFAULT_TOLERANCE,
    TF32_TOLERANCE,
    EquivalenceError,
    check_output,
    check_update,
)

LARGE = torch.tensor([1e3, 2e3])


def test_a_small_leaf_that_is_wrong_is_named_however_large_the_others():
    want = (LARGE, torch.tensor([1e-3, 2e-3]))
    check_output((LARGE * 1.00002, want[1] * 0.99998), want)
    with pytest.raises(
        EquivalenceError, match=r"^2 of 2 numbers differ from eager in 1$"
    ):
        check_output((LARGE, want[1] * 1.002), want)
    check_output((LARGE, want[1] * 1.002), want, tolerance=0.003)


def test_the_same_infinities_and_no_numbers_are_equal_and_others_are_not():
    odd = torch.tensor([math.inf, math.nan, -math.inf, 1.0])
    check_output(odd.clone(), odd)
    for i in range(4):
        with pytest.raises(EquivalenceError, match=r"^1 of 4 "):
            check_output(torch.where(torch.arange(4) == i, 7.0, odd), odd)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_one_row_in_a_thousand_may_differ_and_none_of_fewer(dtype):
    for n, rows, passes in ((2000, 2, True), (2000, 3, False), (999, 1, False)):
        want = (torch.arange(n) + 1).to(dtype)
        other = torch.where(
            torch.arange(n) < rows,
            ~want if dtype == torch.bool else -100 * want,
            want,
        )
        if passes:
            check_output(other, want)
        else:
            with pytest.raises(EquivalenceError, match=rf"^{rows} of {n} "):
                check_output(other, want)


def test_numbers_that_are_small_beside_their_like_may_be_lost_and_leaves_may_be_empty():
    want = torch.cat([torch.ones(50), torch.full((50,), 1e-6)])
    check_output(
        (
            torch.where(want < 1, 0.0, want),
            torch.ones(0),
            torch.ones(0, dtype=torch.int64),
        ),
        (want, *EMPTY),
    )


def test_what_rounding_leaves_of_equal_numbers_is_no_difference():
    """A share of variance that is explained, of values that explain none."""
    check_output(torch.tensor(6e-8), torch.tensor(0.0))
    with pytest.raises(EquivalenceError, match=r"^1 of 1 "):
        check_output(torch.tensor(6e-6), torch.tensor(0.0))


def test_one_less_a_quotient_may_be_off_by_the_rounding_of_one():
    """As the explained variance of a critic that explains nothing yet; a number like it of another name may not."""

    class Measures(NamedTuple):
        explained_variance: torch.Tensor
        other: torch.Tensor

    small = torch.tensor([0.004, -0.008])
    want = Measures(small, small)
    check_output((want._replace(explained_variance=small + 2e-5),), (want,))
    for actual, name in (
        (want._replace(explained_variance=small + 1e-4), "explained_variance"),
        (want._replace(other=small + 2e-5), "other"),
    ):
        with pytest.raises(EquivalenceError, match=rf"in 0\.{name}$"):
            check_output((actual,), (want,))


def test_steps_are_compared_over_four_minibatches_and_by_what_they_change():
    """Both go from 1 by 1 a step; one of them by 1.001 in the fourth, a 4,000th of its change."""
    step = lambda last: lambda x, n: (x + torch.where(n == 3, last, 1.0), x)
    start, few, many = torch.tensor([1.0]), torch.arange(3), torch.arange(9)
    check_update(step(1.001), step(1.0), start, few)
    check_update(step(1.0001), step(1.0), start, many)
    with pytest.raises(
        EquivalenceError,
        match=r"differs from eager by 0.001 in , where that changes by 4$",
    ):
        check_update(step(1.001), step(1.0), start, many)


def test_counts_of_an_update_are_equal_and_its_metrics_are_close():
    step = lambda count, metric: (
        lambda state, n: ((state[0] + 1.0, state[1] + count), metric * (n + 1))
    )
    start = torch.zeros(3), torch.tensor(1_000_000)
    right, many = step(1_000_000, 1.0), torch.arange(4)
    check_update(step(1_000_000, 1.00001), right, start, many)
    with pytest.raises(EquivalenceError, match="differs from eager by 4 in 1"):
        check_update(step(1_000_001, 1.0), right, start, many)
    with pytest.raises(EquivalenceError, match=r"^1 of 1 numbers"):
        check_update(step(1_000_000, 1.0001), right, start, many)


def test_a_change_below_the_rounding_of_a_leaf_is_no_difference():
    """1e-9 of 1 in float32, as at the end of a schedule of the learning rate."""
    step = lambda by: lambda x, n: (x + by, None)
    check_update(step(1.2e-7), step(0.0), torch.ones(9), torch.arange(1))
    with pytest.raises(EquivalenceError):
        check_update(step(5e-7), step(0.0), torch.ones(9), torch.arange(1))


def test_params_that_are_wrong_do_not_hide_behind_a_count_of_steps():
    step = lambda by: (
        lambda learner, n: ((learner[0] + by, learner[1] + 1.0), None)
    )
    start = torch.zeros(3), torch.zeros(())
    with pytest.raises(EquivalenceError, match=r" in 0, "):
        check_update(step(1.1e-3), step(1e-3), start, torch.arange(4))


EMPTY = torch.ones(0), torch.ones(0, dtype=torch.int64)


def test_a_difference_of_numbers_near_one_is_off_by_the_rounding_of_products():
    """The policy loss of the first minibatch is 0: a mean of advantages, with ratios of 1 but for rounding."""
    exact, rounded = torch.zeros(64), torch.full((64,), 1e-4)
    check_output(rounded, exact, TF32_TOLERANCE)
    for wrong, tolerance in ((1e-3, TF32_TOLERANCE), (1e-5, DEFAULT_TOLERANCE)):
        with pytest.raises(EquivalenceError):
            check_output(torch.full((64,), wrong), exact, tolerance)
