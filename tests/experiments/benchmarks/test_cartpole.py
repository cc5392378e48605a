"""Cells of the benchmark do what their modes say, and differ from the eager step by what was changed."""

import pytest
import torch

from experiments.benchmarks import cartpole
from experiments.benchmarks.cartpole import CartPoleCase


@pytest.mark.parametrize("work", ["4x128", "update"])
def test_an_eager_cell_equals_the_eager_step(work):
    row = CartPoleCase(work, "eager", "cpu", "highest").prepare()
    assert row["difference_from_eager"] == 0.0 and row["replay_mode"] == "none"


def test_a_difference_is_a_share_of_the_change():
    case = CartPoleCase("4x128", "eager", "cpu", "highest")

    def state(value: float):
        return case.state._replace(params=[torch.tensor([value, 0.0])])

    assert cartpole.relative_difference(
        state(3.5), state(3.0), state(1.0)
    ) == pytest.approx(0.25)


def test_large_minibatches_of_a_whole_iteration_fit_a_cache():
    assert (
        CartPoleCase(
            "2048x128", "whole-iteration", "cpu", "highest"
        ).microbatches
        == 32
    )
    assert (
        CartPoleCase("4x128", "whole-iteration", "cpu", "highest").microbatches
        == 1
    )
    assert (
        CartPoleCase("2048x128", "captured", "cpu", "highest").microbatches == 1
    )
    assert (
        CartPoleCase("2048x128", "captured", "cpu", "highest", 8).microbatches
        == 8
    )


def test_steps_are_timed_until_a_repeat_is_long_enough(monkeypatch):
    """With a clock that the step moves: 4 ms of wall time and 3 ms of processor time each."""
    clock = {"wall": 0.0, "processor": 0.0}

    def step() -> None:
        clock["wall"] += 0.004
        clock["processor"] += 0.003

    monkeypatch.setattr(cartpole.time, "perf_counter", lambda: clock["wall"])
    monkeypatch.setattr(
        cartpole.time, "process_time", lambda: clock["processor"]
    )
    row = cartpole.time_steps(step, lambda: None)
    assert row["iteration_ms"] == pytest.approx(4.0) and row[
        "processor_ms"
    ] == pytest.approx(3.0)
    assert row["steps_a_repeat"] >= 50 and row["spread_ms"] == pytest.approx(
        0.0, abs=1e-9
    )
