"""The time and the memory of a run, and the bounds of its work."""

import math
from dataclasses import replace

import pytest

from funcppo.kg.config import MAX_FIRINGS, MAX_VALID_FIRINGS, RunConfig
from funcppo.kg.run import budget
from funcppo.kg.run.budget import RunTime

CONFIG = RunConfig(dataset="graph", device="cpu")
N_TRIPLES = 1000
HELD, LARGEST = budget._needed_bytes(N_TRIPLES, "cpu")


# -- the time


def test_learning_has_the_time_that_is_not_reserved():
    now = [5.0]
    run_time = RunTime(100.0, clock=lambda: now[0])
    run_time.reserved = {"test": 20.0}
    assert run_time.part().seconds_left == 80.0
    assert run_time.part(0.25).seconds_left == 20.0
    now[0] += 10.0
    assert run_time.end_phase("mining") == 10.0
    assert run_time.part().seconds_left == 70.0
    assert run_time.end.seconds_left == 90.0
    for seconds in (2.0, 1.0):
        now[0] += seconds
        run_time.end_phase("training")
    assert run_time.phases == {"mining": 10.0, "training": 3.0}
    peaks = run_time.peak_bytes
    assert 0 < peaks["mining"] <= peaks["training"]
    # What is reserved again takes the place of what was.
    for seconds in (100.0, 3.0):
        run_time.reserve("priors", seconds)
    assert run_time.reserved == {"test": 20.0, "priors": 3.0}
    # Late in a run what was reserved stays, though a fifth of the time left would be less.
    now[0] = 80.0
    run_time.reserve("priors", 3.0)
    assert run_time.reserved["priors"] == 3.0
    run_time.reserve("priors", 5.0)
    assert run_time.reserved["priors"] == 3.0
    run_time.reserve("priors", 4.0, 1.0)
    assert run_time.reserved["priors"] == 4.0
    now[0] = 200.0
    assert run_time.part().is_over
    # A second is left in a short run too, and a run may have begun before.
    short = RunTime(5.0, clock=lambda: 13.0, began=10.0)
    short.reserve("test", 1.0)
    assert short.reserved["test"] == pytest.approx(0.95)
    assert (short.seconds, short.end.seconds_left) == (3.0, 2.0)
    assert RunTime(None).part(0.1).seconds_left == math.inf


@pytest.mark.parametrize(
    ("seconds", "factor"),
    [(300.0, 1), (10.0, 1), (None, 1), (450.0, 1.5), (3600.0, 12)],
)
def test_bounds_grow_with_the_time_of_the_run(seconds, factor):
    config = replace(CONFIG, seconds=seconds)
    planned, notes = budget.plan_settings(config, N_TRIPLES, None)
    assert planned.questions.max_firings == factor * MAX_FIRINGS
    assert planned.questions.max_valid_firings == factor * MAX_VALID_FIRINGS
    assert notes == []


# -- the memory


def test_half_of_the_largest_parts_fit_into_half_of_their_memory():
    limit = HELD + LARGEST // 2
    # A little more or less free memory makes no other run.
    assert budget.memory_share(limit + 10**8, N_TRIPLES, "cpu") == 0.5
    config, notes = budget.plan_settings(CONFIG, N_TRIPLES, limit)
    assert config.prover.memory_share == pytest.approx(0.5)
    for new, old in (
        (config.prover.max_atoms, CONFIG.prover.max_atoms),
        (config.questions.max_firings, MAX_FIRINGS),
        (config.listwise.max_batch_firings, CONFIG.listwise.max_batch_firings),
    ):
        assert new == pytest.approx(old / 2, abs=1)
    assert [note.kind for note in notes] == ["cut"]
    # A GPU takes larger chunks, which need more.
    assert budget.memory_share(HELD + LARGEST, N_TRIPLES, "cuda") < 1


def test_memory_that_does_not_suffice_is_an_error_that_says_how_much_would():
    with pytest.raises(ValueError, match="expected at least") as error:
        budget.memory_share(HELD, N_TRIPLES, "cpu")
    needed = int(str(error.value).split("at least ")[1].split()[0])
    share = budget.memory_share(needed, N_TRIPLES, "cpu")
    assert share >= budget.MIN_SHARE
    with pytest.raises(ValueError, match="expected at least"):
        budget.memory_share(needed - 2, N_TRIPLES, "cpu")
