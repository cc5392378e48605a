"""Returns of the last episodes and learning curves, counted by hand."""

import pytest
import torch

from experiments.benchmarks.learn_control import (
    Curves,
    last_returns,
    learning_curves,
)

# Two seeds, three updates.
N_EPISODES = torch.tensor([[4.0, 1.0], [2.0, 1.0], [3.0, 1.0]])
RETURN_SUM = torch.tensor([[4.0, 10.0], [6.0, 20.0], [30.0, 60.0]])
CURVES = Curves(N_EPISODES, RETURN_SUM)


def test_the_last_episodes_are_of_whole_updates():
    assert last_returns(CURVES, 3) == [10.0, 30.0]
    assert last_returns(CURVES, 2) == [10.0, 40.0]
    assert last_returns(CURVES, 4) == pytest.approx([36 / 5, 30.0])


def test_a_curve_is_the_mean_return_of_each_part():
    long = Curves(
        N_EPISODES.repeat_interleave(20, 0), RETURN_SUM.repeat_interleave(20, 0)
    )
    first, second = learning_curves(long)
    assert len(first) == len(second) == 20
    assert (first[0], first[-1]) == (1.0, 10.0) and (second[0], second[-1]) == (
        10.0,
        60.0,
    )
