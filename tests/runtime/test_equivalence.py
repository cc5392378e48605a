"""What is as good as equal passes; a leaf that is wrong does not, however small it is beside others."""

from __future__ import annotations

import math

import pytest
import torch

from funcppo.runtime.equivalence import (
    EquivalenceError,
    check_output,
    check_update,
)

LARGE = torch.tensor([1e3, 2e3])


def test_a_small_leaf_that_is_wrong_is_named_however_large_the_others():
    want = (LARGE, torch.tensor([1e-3, 2e-3]))
    check_output((LARGE * 1.009, want[1] * 0.992), want)
    with pytest.raises(
        EquivalenceError, match=r"^2 of 2 numbers differ from eager in 1$"
    ):
        check_output((LARGE, want[1] * 1.02), want)
    check_output((LARGE, want[1] * 1.02), want, tolerance=0.03)


def test_the_same_infinities_and_no_numbers_are_equal_and_others_are_not():
    odd = torch.tensor([math.inf, math.nan, -math.inf, 1.0])
    check_output(odd.clone(), odd)
    for i in range(4):
        with pytest.raises(EquivalenceError, match=r"^1 of 4 "):
            check_output(torch.where(torch.arange(4) == i, 7.0, odd), odd)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_one_row_in_a_hundred_may_differ(dtype):
    want = (torch.arange(200) + 1).to(dtype)
    for rows, passes in ((2, True), (3, False)):
        other = torch.where(
            torch.arange(200) < rows,
            ~want if dtype == torch.bool else -100 * want,
            want,
        )
        if passes:
            check_output(other, want)
        else:
            with pytest.raises(EquivalenceError, match=r"^3 of 200 "):
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


def test_steps_are_compared_over_four_minibatches_and_by_what_they_change():
    """Both go from 100 by 1 a step; one of them by 1.3 from the fourth on, which is 0.3 of 4."""
    step = lambda last: lambda x, n: (x + torch.where(n == 3, last, 1.0), None)
    start, few, many = torch.tensor([100.0]), torch.arange(3), torch.arange(9)
    check_update(step(1.3), step(1.0), start, few)
    check_update(step(1.03), step(1.0), start, many)
    with pytest.raises(
        EquivalenceError,
        match=r"differs from eager by 0.3 in , where that changes by 4$",
    ):
        check_update(step(1.3), step(1.0), start, many)


def test_params_that_are_wrong_do_not_hide_behind_a_count_of_steps():
    step = lambda by: (
        lambda learner, n: ((learner[0] + by, learner[1] + 1.0), None)
    )
    start = torch.zeros(3), torch.zeros(())
    with pytest.raises(EquivalenceError, match=r" in 0, "):
        check_update(step(1.1e-3), step(1e-3), start, torch.arange(4))


EMPTY = torch.ones(0), torch.ones(0, dtype=torch.int64)
