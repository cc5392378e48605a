"""The time and the memory of a run, and the bounds of its work."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from funcppo.config import PPOConfig
from funcppo.kg.config import (
    EMBEDDING_SECONDS,
    LISTING_SECONDS,
    MAX_FIRINGS,
    MAX_LISTWISE_STEPS,
    MAX_VALID_FIRINGS,
    N_NETWORK_STEPS,
    NETWORK_SECONDS,
    ListwiseConfig,
    ProverTaskConfig,
    QuestionConfig,
    RunConfig,
)
from funcppo.kg.run import budget, fit
from funcppo.kg.run.budget import RunTime
from funcppo.kg.scores import learned
from funcppo.kg.scores.learned import Capacity
from funcppo.kg.search.task import build_task
from tests.kg.run.runs import seating

CONFIG = RunConfig(dataset="graph")
N_TRIPLES = 1000
HELD, LARGEST = budget._needed_bytes(N_TRIPLES, "cpu")


# -- the time


def test_what_a_phase_leaves_later_ones_have():
    now = [5.0]
    run_time = RunTime(100.0, clock=lambda: now[0])
    assert run_time.until(RunTime.MINING).seconds_left == 40.0
    now[0] += 10.0
    run_time.end_phase("mining")
    left = run_time.until(RunTime.CHOICE).seconds_left
    assert left == pytest.approx(100 * RunTime.CHOICE - 10)
    for seconds in (2.0, 1.0):
        now[0] += seconds
        run_time.end_phase("training")
    assert run_time.phases == {"mining": 10.0, "training": 3.0}
    peaks = run_time.peak_bytes
    assert 0 < peaks["mining"] <= peaks["training"]


def test_work_that_the_user_has_set_does_not_count():
    now = [0.0]
    run_time = RunTime(100.0, clock=lambda: now[0])
    now[0] = 500.0
    run_time.end_phase("training", is_set=True)
    assert run_time.phases == {"training": 500.0}
    left = run_time.until(RunTime.CHOICE).seconds_left
    assert left == pytest.approx(100 * RunTime.CHOICE)


def test_a_phase_that_begins_late_has_its_part_of_what_is_left():
    now = [0.0]
    run_time = RunTime(100.0, clock=lambda: now[0])
    now[0] = 70.0
    part = (RunTime.CHOICE - RunTime.MINING) / (1 - RunTime.MINING)
    left = run_time.until(RunTime.CHOICE).seconds_left
    assert left == pytest.approx(30 * part)
    now[0] = 200.0
    assert all(run_time.until(share).is_over for share in RunTime.SHARES)
    assert RunTime(None).until(RunTime.MINING).seconds_left == math.inf


@pytest.mark.parametrize(
    ("seconds", "factor"),
    [(300.0, 1), (10.0, 1), (None, 1), (450.0, 1.5), (3600.0, 12)],
)
def test_bounds_grow_with_the_time_of_the_run(seconds, factor):
    config = replace(CONFIG, seconds=seconds)
    planned, notes = budget.plan_settings(config, N_TRIPLES, None)
    assert planned.questions.seconds == factor * LISTING_SECONDS
    assert planned.questions.max_firings == factor * MAX_FIRINGS
    assert planned.questions.max_valid_firings == factor * MAX_VALID_FIRINGS
    assert planned.listwise.max_steps == factor * MAX_LISTWISE_STEPS
    assert planned.embedding.seconds == factor * EMBEDDING_SECONDS
    assert planned.bellman_ford.n_steps == factor * N_NETWORK_STEPS
    assert planned.bellman_ford.seconds == factor * NETWORK_SECONDS
    tried = "auto" if factor > 1 else False
    assert planned.questions.bellman_ford == tried
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


def test_a_minibatch_that_does_not_fit_is_computed_in_parts():
    """64 questions of 100 candidates and firings, and of 20 links: 110 each."""
    ppo = PPOConfig(n_envs=16, n_steps=8, n_minibatches=2)
    size = Capacity(n_candidates=40, n_firings=60, n_links=20)

    def split(ppo, most):
        return budget.split_minibatches(ppo, size, most).n_microbatches

    assert split(ppo, 64 * 110) == 1
    assert split(ppo, 64 * 110 - 1) == 2
    assert split(ppo, 1) == 64
    # The parts that a user has set are a start; shards divide each part.
    assert split(replace(ppo, n_microbatches=4, n_shards=2), 1) == 32


# -- the listwise fit and PPO


@pytest.fixture(scope="module")
def setup():
    settings = ProverTaskConfig(max_height=1, object_identity=True)
    task = build_task(seating(), settings)
    cfg = QuestionConfig(left_out="fact", degrees=False)
    return fit.list_questions(task, fit.set_up(task, cfg), cfg, 0)[0]


def epoch_gradients(setup):
    """Gradients of firings and links in an epoch, its weights counted in their unit."""
    sizes = learned.question_sizes(setup.world.evidence, setup.world.question)
    n_labels = learned.n_labels(setup.policy.aggregation.sizes)
    of_weights = n_labels * n_labels / budget.WEIGHTS_PER_GRADIENT
    return int(sizes[1].sum() + sizes[2].sum()) + of_weights


def test_the_gradient_steps_bound_the_epochs(setup):
    cfg = ListwiseConfig(n_epochs=8, batch_size=10, max_steps=60)
    row = setup.world.question[:1]
    # The learning rate does not fall in the first epoch.
    for n_questions, n_epochs in ((100, 6), (20, 8), (10_000, 2)):
        world = setup.world._replace(question=row.expand(n_questions))
        found, _, notes = budget.plan_fit(cfg, setup.policy, world, (False,))
        assert found == n_epochs
        said = [f"listwise fit: {n_epochs} of 8 epochs"] * (n_epochs < 8)
        assert [note.partition(",")[0] for note in notes] == said


def test_gradients_and_seconds_bound_the_epochs(setup):
    of_epoch = epoch_gradients(setup)
    cfg = ListwiseConfig(batch_size=len(setup.world.question))

    def n_epochs(gradients=None, degrees=(False,), **bounds):
        given = replace(cfg, max_gradients=gradients)
        return budget.plan_fit(
            given, setup.policy, setup.world, degrees, **bounds
        )[:2]

    assert n_epochs() == (8, (False,))
    assert n_epochs(3.9 * of_epoch) == (3, (False,))
    assert n_epochs(1.0) == (2, (False,))
    # Two fits share the bound, and one alone is made where both take too long, unless that was asked for.
    assert n_epochs(1e9, (False, True)) == (8, (False, True))
    assert n_epochs(1.0, (False, True)) == (2, (False,))
    assert n_epochs(1.0, (True,)) == (2, (True,))
    seconds = of_epoch / budget.GRADIENTS_PER_SECOND
    assert n_epochs(seconds=3.5 * seconds)[0] == 3
    assert n_epochs(seconds=5.0 * seconds, metric_seconds=seconds)[0] == 2


def test_padded_evidence_and_seconds_bound_the_updates(setup):
    ppo = PPOConfig(n_envs=4, n_steps=8, n_epochs=2, n_minibatches=2)
    size = setup.policy.capacity._replace(n_firings=10**5, n_links=3)
    policy = replace(setup.policy, capacity=size)
    cost = 10**5 * 4 * 8 * (1 + 3 * 2)
    n_most = int(budget.MAX_PPO_FIRINGS / cost)
    assert budget.n_updates_within(ppo, policy, "cpu") == n_most
    on_gpu = budget.n_updates_within(ppo, policy, "cuda")
    assert on_gpu == int(16 * budget.MAX_PPO_FIRINGS / cost)
    seconds = 2.5 * cost / budget.PPO_FIRINGS_PER_SECOND
    assert budget.n_updates_within(ppo, policy, "cpu", seconds) == 2
    assert budget.n_updates_within(ppo, policy, "cpu", 0.0) == 1
    links = replace(policy, capacity=size._replace(n_links=2 * 10**5))
    assert budget.n_updates_within(ppo, links, "cpu") == n_most // 2
