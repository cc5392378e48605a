"""Bounds of what a run does before PPO, by its time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from funcppo.kg.run import question_bounds
from funcppo.kg.run.config import RunConfig
from funcppo.kg.run.time_bounds import (
    BASE_SECONDS,
    BYTES_PER_FIRING,
    time_factor,
    with_time_bounds,
)
from funcppo.kg.scores.question_config import (
    EMBEDDING_SECONDS,
    LISTING_SECONDS,
    MAX_FIRINGS,
    MAX_LISTWISE_STEPS,
    MAX_VALID_FIRINGS,
    N_NETWORK_STEPS,
    NETWORK_SECONDS,
    EmbeddingConfig,
    ListwiseConfig,
    QuestionConfig,
)

CONFIG = RunConfig(dataset="graph")


def bounds(config, spare_bytes=math.inf):
    planned = with_time_bounds(config, spare_bytes)
    return (
        planned.questions.seconds,
        planned.questions.max_firings,
        planned.questions.max_valid_firings,
        planned.listwise.max_steps,
        planned.embedding.seconds,
    )


@pytest.mark.parametrize(
    ("seconds", "factor"),
    [(300.0, 1), (10.0, 1), (None, 1), (450.0, 1.5), (3600.0, 12)],
)
def test_bounds_grow_with_the_time_of_the_run(seconds, factor):
    assert CONFIG.seconds == BASE_SECONDS
    assert time_factor(seconds) == factor
    assert bounds(replace(CONFIG, seconds=seconds)) == (
        factor * LISTING_SECONDS,
        factor * MAX_FIRINGS,
        factor * MAX_VALID_FIRINGS,
        factor * MAX_LISTWISE_STEPS,
        factor * EMBEDDING_SECONDS,
    )


def test_a_longer_run_tries_a_network_of_as_many_more_steps():
    for seconds, option, factor in (
        (300.0, False, 1),
        (None, False, 1),
        (900.0, "auto", 3),
    ):
        planned = with_time_bounds(replace(CONFIG, seconds=seconds), 0)
        assert planned.questions.bellman_ford == option
        assert planned.bellman_ford.n_steps == factor * N_NETWORK_STEPS
        assert planned.bellman_ford.seconds == factor * NETWORK_SECONDS
    for option in (True, False):
        questions = QuestionConfig(bellman_ford=option)
        config = replace(CONFIG, seconds=900.0, questions=questions)
        planned = with_time_bounds(config, 0)
        assert planned.questions.bellman_ford is option


def test_firings_grow_in_whole_units_that_the_memory_holds():
    config = replace(CONFIG, seconds=1200.0)
    unit = MAX_FIRINGS * BYTES_PER_FIRING
    for spare, factor in ((-unit, 1), (0, 1), (1.9 * unit, 2), (9 * unit, 4)):
        _, listed, of_valid, *_ = bounds(config, spare)
        assert listed == factor * MAX_FIRINGS
        assert of_valid == factor * MAX_VALID_FIRINGS


def test_a_gpu_holds_more_firings_of_valid():
    factor = question_bounds.GPU_FACTOR
    for seconds, units in ((300.0, factor), (100 * 300.0, 100)):
        config = replace(CONFIG, seconds=seconds, device="cuda")
        assert bounds(config)[2] == units * MAX_VALID_FIRINGS


def test_bounds_that_are_set_stay():
    config = replace(
        CONFIG,
        seconds=3600.0,
        questions=QuestionConfig(
            seconds=7.0, max_firings=11, max_valid_firings=12
        ),
        listwise=ListwiseConfig(max_steps=13),
        embedding=EmbeddingConfig(seconds=17.0),
    )
    assert bounds(config) == (7.0, 11, 12, 13, 17.0)
