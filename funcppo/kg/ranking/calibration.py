"""How far probabilities of candidates can be read as chances to be the answer, and a temperature that corrects them.

A score becomes a probability in one of two ways: where scores are logits, by a softmax among the candidates of a row;
where a score is itself a probability, as it is. A temperature T divides log-odds before: above 1 it makes a policy less
sure. It changes no ranking.

Source: Guo et al. 2017, arXiv:1706.04599.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from funcppo.core.files import Json
from funcppo.core.types import F64, I64, Bool
from funcppo.kg.ranking import rank_metrics
from funcppo.kg.ranking.ranking import Ranking

N_PROBABILITY_BINS = 10
# quantile of the normal distribution for an interval of 95 %
NORMAL_95 = 1.959963984540054
# probabilities are clipped to [p, 1 - p] before their logarithm
MIN_PROBABILITY = 1e-9
# Temperatures are tried in steps of a factor, first from 1/16 to 16, then around the best.
COARSE_POWERS = np.arange(-4.0, 4.25, 0.5)
FINE_POWERS = np.arange(-0.4375, 0.4376, 0.0625)


class Bins(NamedTuple):
    """Counts and sums over candidates, binned by the probability that a score gives them."""

    n: I64[np.ndarray, "B"]
    n_right: I64[np.ndarray, "B"]  # candidates that are the answer
    probability_sum: F64[np.ndarray, "B"]
    # of -log p of what is the case, that the candidate is the answer or not
    log_loss_sum: F64[np.ndarray, "B"]


def probabilities(
    ranked: Ranking, *, among_candidates: bool, temperature: float = 1.0
) -> F64[np.ndarray, "L"]:
    """Compute the probability that each listed candidate is the answer, from its quantised score.

    Args:
      among_candidates: scores are logits, and the probabilities of the candidates of a row add up to 1; otherwise a
        score is a probability itself.
      temperature: divides the log-odds.
    """
    is_finite = (ranked.listed_score > rank_metrics.ZERO_SCORE) & (
        ranked.listed_score < rank_metrics.CERTAIN_SCORE
    )
    logits = ranked.listed_score.double() * (
        rank_metrics.SCORE_GRID_STEP / temperature
    )
    if not among_candidates:
        certain = (ranked.listed_score > 0).double()
        values = torch.where(is_finite, torch.sigmoid(logits), certain)
        return values.numpy(force=True)

    # A candidate without evidence has the logit -inf.
    logits = torch.where(is_finite, logits, -torch.inf)
    row, size = ranked.listed_row, len(ranked.query_row)
    largest = logits.new_full((size,), -torch.inf)
    largest = largest.scatter_reduce(0, row, logits, "amax")[row]
    weight = torch.exp(logits - torch.where(is_finite, largest, 0.0))
    total = weight.new_zeros(size).scatter_add(0, row, weight)[row]
    return (weight / total.clamp_min(1e-300)).numpy(force=True)


def log_losses(
    probability: F64[np.ndarray, "n"], is_right: Bool[np.ndarray, "n"]
) -> F64[np.ndarray, "n"]:
    """Compute each candidate's log loss: -log p where it is the answer, -log(1 - p) where it is not."""
    chance = np.where(is_right, probability, 1.0 - probability)
    return -np.log(chance.clip(MIN_PROBABILITY, 1.0))


def bin_probabilities(
    probability: F64[np.ndarray, "n"], is_right: Bool[np.ndarray, "n"]
) -> Bins:
    """Count candidates by their probability, in bins of equal width."""
    place = (probability * N_PROBABILITY_BINS).astype(np.int64)
    place = place.clip(0, N_PROBABILITY_BINS - 1)

    def count(weights: np.ndarray | None = None) -> np.ndarray:
        return np.bincount(place, weights, minlength=N_PROBABILITY_BINS)

    return Bins(
        n=count(),
        n_right=count(is_right.astype(np.float64)).astype(np.int64),
        probability_sum=count(probability),
        log_loss_sum=count(log_losses(probability, is_right)),
    )


def bin_ranking(
    ranked: Ranking, *, among_candidates: bool, temperature: float = 1.0
) -> Bins:
    """Count the listed candidates of a ranking in bins of their probability; arguments as in `probabilities`."""
    probability = probabilities(
        ranked, among_candidates=among_candidates, temperature=temperature
    )
    return bin_probabilities(probability, ranked.is_answer.numpy(force=True))


def add_bins(parts: Iterable[Bins]) -> Bins:
    """Add up the bins of several parts, at least one."""
    return Bins(*(np.sum(column, axis=0) for column in zip(*parts)))


def choose_temperature(ranked: Ranking, *, among_candidates: bool) -> float:
    """Choose the temperature with the least log loss over a ranking's listed candidates, to a factor of 2 ** (1 / 16).

    1 where no candidate is listed.
    """
    is_right = ranked.is_answer.numpy(force=True)

    def log_loss(power: float) -> float:
        probability = probabilities(
            ranked,
            among_candidates=among_candidates,
            temperature=float(2.0**power),
        )
        return float(log_losses(probability, is_right).sum())

    # The first of equal ones is taken: it is 1 where all are equal.
    near_one_first = sorted(COARSE_POWERS.tolist(), key=abs)
    coarse = min(near_one_first, key=log_loss)
    near_coarse_first = sorted((coarse + FINE_POWERS).tolist(), key=abs)
    return float(2.0 ** min(near_coarse_first, key=log_loss))


def wilson(
    n_right: I64[np.ndarray, "B"], n: I64[np.ndarray, "B"]
) -> tuple[F64[np.ndarray, "B"], F64[np.ndarray, "B"]]:
    """Compute the 95 % interval of a share of `n_right` among `n` independent cases; NaN where `n` is 0.

        (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Source: Wilson 1927, JASA 22.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        share = n_right / n
        z2 = NORMAL_95**2 / n
        middle = share + z2 / 2
        width = NORMAL_95 * np.sqrt(share * (1 - share) / n + z2 / n / 4)
        return (middle - width) / (1 + z2), (middle + width) / (1 + z2)


def log_loss(bins: Bins) -> float:
    """Return the mean log loss over all candidates of the bins; NaN without candidates."""
    n = int(bins.n.sum())
    return float(bins.log_loss_sum.sum()) / n if n else np.nan


def calibration_error(bins: Bins) -> float:
    """Compute the expected calibration error; NaN without candidates.

    sum_bins n |share that is right - mean probability| / sum_bins n
    """
    n = int(bins.n.sum())
    gap = np.abs(bins.n_right - bins.probability_sum).sum()
    return float(gap) / n if n else np.nan


def to_json(bins: Bins) -> Json:
    """Return log loss, calibration error and the bins that hold candidates as JSON values; null without candidates."""
    is_used = bins.n > 0
    low, high = wilson(bins.n_right, bins.n)
    edges = np.arange(N_PROBABILITY_BINS + 1) / N_PROBABILITY_BINS
    with np.errstate(divide="ignore", invalid="ignore"):
        mean, share = bins.probability_sum / bins.n, bins.n_right / bins.n

    columns = {
        "from": edges[:-1],
        "to": edges[1:],
        "n_candidates": bins.n,
        "mean_probability": mean,
        "share_right": share,
        "low": low,
        "high": high,
    }

    # Bins without candidates are left out.
    rows = zip(*(column[is_used].tolist() for column in columns.values()))
    has_any = bool(is_used.any())
    return {
        "log_loss": log_loss(bins) if has_any else None,
        "calibration_error": calibration_error(bins) if has_any else None,
        "bins": [dict(zip(columns, row)) for row in rows],
    }
