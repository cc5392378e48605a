"""The time at which training reaches a return."""

from __future__ import annotations

import pytest

from experiments.benchmarks import time_to_score
from funcppo.envs.registry import ENVIRONMENTS
from tests.learning import one_thread

pytestmark = pytest.mark.usefixtures(one_thread.__name__)


def test_a_target_is_reached_where_a_curve_first_is_at_it():
    """Of three seeds the second never is, and the third has no episode at first."""
    curves = [
        [(10, 0.1, 5.0), (20, 0.2, 30.0), (30, 0.3, 40.0)],
        [(10, 0.1, 5.0), (20, 0.2, 10.0), (30, 0.3, 29.0)],
        [(10, 0.1, None), (20, 0.2, None), (30, 0.3, 31.0)],
    ]
    assert time_to_score.reached(curves, 30.0) == {
        "n_reached": 2,
        "steps": [20, None, 30],
        "seconds": [0.2, None, 0.3],
        "median_steps": 25.0,
        "median_seconds": 0.25,
    }
    assert time_to_score.reached(curves, 50.0)["median_steps"] is None


def test_environments_are_those_of_the_registry():
    assert set(time_to_score.TARGETS) <= set(ENVIRONMENTS)
