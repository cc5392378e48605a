"""How large the parts of a run are, by its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from funcppo.config import PPOConfig
from funcppo.kg.run import memory_plan
from funcppo.kg.run.config import RunConfig
from funcppo.kg.run.memory_plan import (
    BASE_BYTES,
    BYTES_PER_TRIPLE,
    LARGEST_PARTS_BYTES,
    memory_share,
    plan_settings,
    split_minibatches,
)
from funcppo.kg.run.time_bounds import BYTES_PER_FIRING, with_time_bounds
from funcppo.kg.scores.aggregation import Capacity
from funcppo.kg.scores.question_config import MAX_FIRINGS

CONFIG = RunConfig(dataset="graph")
N_TRIPLES = 1000
HELD = BASE_BYTES + N_TRIPLES * BYTES_PER_TRIPLE
PPO = PPOConfig(n_envs=16, n_steps=8, n_minibatches=2)


def test_half_of_the_largest_parts_fit_into_half_of_their_memory():
    limit = HELD + LARGEST_PARTS_BYTES // 2
    assert memory_share(limit, N_TRIPLES, "cpu") == pytest.approx(0.5)
    # A little more or less free memory makes no other run.
    assert memory_share(limit + 10**8, N_TRIPLES, "cpu") == memory_share(
        limit, N_TRIPLES, "cpu"
    )
    config, notes = plan_settings(CONFIG, N_TRIPLES, limit)
    assert config.prover.memory_share == pytest.approx(0.5)
    for new, old in (
        (config.prover.max_atoms, CONFIG.prover.max_atoms),
        (config.questions.max_firings, MAX_FIRINGS),
        (config.listwise.max_batch_firings, CONFIG.listwise.max_batch_firings),
    ):
        assert new == pytest.approx(old / 2, abs=1)
    assert len(notes) == 1


def test_settings_stay_where_all_fits():
    limit = HELD + LARGEST_PARTS_BYTES
    usual = with_time_bounds(CONFIG, 0)
    assert plan_settings(CONFIG, N_TRIPLES, limit) == (usual, ())
    assert plan_settings(CONFIG, N_TRIPLES, None) == (usual, ())
    # A GPU takes larger chunks, which need more.
    assert memory_share(limit, N_TRIPLES, "cuda") < 1


def test_a_longer_run_lists_more_firings_where_the_memory_holds_them():
    """Twelve times the time, and memory for twice the firings beside the largest parts; then without a limit."""
    config = replace(CONFIG, seconds=3600.0)
    limit = HELD + LARGEST_PARTS_BYTES + MAX_FIRINGS * BYTES_PER_FIRING
    planned = plan_settings(config, N_TRIPLES, limit).run_config
    assert planned.questions.max_firings == 2 * MAX_FIRINGS
    planned = plan_settings(config, N_TRIPLES, None).run_config
    assert planned.questions.max_firings == 12 * MAX_FIRINGS


def test_memory_that_does_not_suffice_is_an_error_that_says_how_much_would():
    with pytest.raises(ValueError, match="expected at least") as error:
        memory_share(HELD, N_TRIPLES, "cpu")
    needed = int(str(error.value).split("at least ")[1].split()[0])
    assert memory_share(needed, N_TRIPLES, "cpu") >= memory_plan.MIN_SHARE
    with pytest.raises(ValueError, match="expected at least"):
        memory_share(needed - 2, N_TRIPLES, "cpu")


def test_a_minibatch_that_does_not_fit_is_computed_in_parts():
    """64 questions of 100 candidates and firings, and of 20 links: 110 each."""
    size = Capacity(n_candidates=40, n_firings=60, n_links=20)
    assert split_minibatches(PPO, size, 64 * 110) == (PPO, [])
    halved, notes = split_minibatches(PPO, size, 64 * 110 - 1)
    assert halved == replace(PPO, n_microbatches=2)
    assert len(notes) == 1
    smallest, _ = split_minibatches(PPO, size, 1)
    assert smallest.n_microbatches == 64
    # The parts that a user has set are a start; shards divide each part.
    given = replace(PPO, n_microbatches=4, n_shards=2)
    assert split_minibatches(given, size, 1)[0].n_microbatches == 32
