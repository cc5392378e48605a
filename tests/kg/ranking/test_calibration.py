"""Reliability and temperature: published intervals, bins by hand, and the temperature that made some scores."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from funcppo.kg.ranking import evaluate, rank_metrics


def ranking_of(log_odds, row, is_answer):
    """A ranking with these listed candidates."""
    return SimpleNamespace(
        listed_score=rank_metrics.quantise(
            torch.as_tensor(np.asarray(log_odds), dtype=torch.float64)
        ),
        listed_row=torch.as_tensor(np.asarray(row)),
        is_answer=torch.as_tensor(np.asarray(is_answer)),
        query_row=torch.arange(int(np.max(row, initial=-1)) + 1),
    )


def test_wilson_of_published_values():
    """Newcombe 1998, table I: 81 of 263 is .2553 to .3662; 0 of 20 is 0 to .1611; 15 of 148 is .0624 to .1605."""
    low, high = evaluate.wilson(
        np.array([81, 0, 15, 0]), np.array([263, 20, 148, 0])
    )
    np.testing.assert_allclose(low[:3], [0.2553, 0.0, 0.0624], atol=5e-5)
    np.testing.assert_allclose(high[:3], [0.3662, 0.1611, 0.1605], atol=5e-5)
    assert np.isnan([low[3], high[3]]).all()


def test_candidates_are_counted_in_the_bin_of_their_probability():
    bins = evaluate.bin_probabilities(
        np.array([0.0, 0.05, 0.1, 0.99, 1.0]),
        np.array([False, True, False, True, True]),
    )
    assert bins.n.tolist() == [2, 1, 0, 0, 0, 0, 0, 0, 0, 2]
    assert bins.n_right.tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 0, 2]
    np.testing.assert_allclose(
        bins.probability_sum[[0, 1, 9]], [0.05, 0.1, 1.99]
    )
    losses = -np.log([0.05, 0.9, 0.99])
    np.testing.assert_allclose(bins.log_loss_sum[[0, 1, 9]], losses)
    assert evaluate.log_loss(bins) == pytest.approx(losses.sum() / 5)
    # |1 - .05| + |0 - .1| + |2 - 1.99| over five candidates
    assert evaluate.calibration_error(bins) == pytest.approx(1.06 / 5)


def test_bins_of_parts_add_up():
    p = np.array([0.2, 0.9, 0.4])
    right = np.array([True, False, False])
    parts = [
        evaluate.bin_probabilities(p[:1], right[:1]),
        evaluate.bin_probabilities(p[1:], right[1:]),
    ]
    for both, whole in zip(
        evaluate.add_bins(parts), evaluate.bin_probabilities(p, right)
    ):
        np.testing.assert_allclose(both, whole)


def test_a_temperature_divides_log_odds():
    ranked = ranking_of([1.0, 3.0, -2.0], [0, 0, 1], [True, False, True])
    alone = evaluate.probabilities(
        ranked, among_candidates=False, temperature=2.0
    )
    np.testing.assert_allclose(
        alone, 1 / (1 + np.exp([-0.5, -1.5, 1.0])), rtol=1e-9
    )
    among = evaluate.probabilities(
        ranked, among_candidates=True, temperature=2.0
    )
    weight = np.exp([0.5, 1.5])
    np.testing.assert_allclose(among, [*(weight / weight.sum()), 1.0])


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("among_candidates", [True, False])
def test_the_temperature_of_the_scores_is_found(temperature, among_candidates):
    """Answers are drawn by the true log-odds, and the scores are these times a temperature."""
    generator = np.random.default_rng(0)
    true = generator.normal(0.0, 2.0, (4000, 5))
    if among_candidates:
        noise = generator.gumbel(size=true.shape)
        answer = np.arange(5) == (true + noise).argmax(1)[:, None]
    else:
        answer = generator.random(true.shape) < 1 / (1 + np.exp(-true))
    row = np.repeat(np.arange(len(true)), 5)
    ranked = ranking_of((temperature * true).ravel(), row, answer.ravel())
    found = evaluate.choose_temperature(
        ranked, among_candidates=among_candidates
    )
    # Sampling moves it by a few per cent, and the grid by half a step.
    assert found == pytest.approx(temperature, rel=0.08)


def test_without_candidates_the_temperature_is_1():
    none = ranking_of([], np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool))
    found = evaluate.choose_temperature(none, among_candidates=False)
    assert found == 1.0
    bins = evaluate.bin_ranking(none, among_candidates=False)
    assert evaluate.bins_to_json(bins) == {
        "log_loss": None, "calibration_error": None, "bins": [],
    }  # fmt: skip


def test_json_has_the_bins_that_hold_candidates():
    bins = evaluate.bin_probabilities(
        np.array([0.62, 0.68]), np.array([True, False])
    )
    (row,) = evaluate.bins_to_json(bins)["bins"]
    low, high = evaluate.wilson(np.array([1]), np.array([2]))
    assert row == {
        "from": 0.6, "to": 0.7, "n_candidates": 2, "mean_probability": 0.65,
        "share_right": 0.5, "low": low[0], "high": high[0],
    }  # fmt: skip
