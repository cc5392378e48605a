"""How many epochs and updates there is time for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from funcppo.config import PPOConfig
from funcppo.kg.run import question_bounds
from funcppo.kg.run.question_training import collect_questions
from funcppo.kg.scores import aggregation, evidence
from funcppo.kg.scores.question_config import ListwiseConfig, QuestionConfig
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.search.task import build_task
from tests.kg.run.test_question_training import seating

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def collected():
    settings = ProverTaskConfig(max_height=1, object_identity=True)
    task = build_task(seating(), settings)
    return collect_questions(
        task,
        evidence.index_facts(task.kb, task.sizes),
        QuestionConfig(left_out="fact"),
        0,
        uses_degrees=False,
    )


def plan(collected, cfg, degrees=(False,), n_questions=None):
    world = collected.world
    if n_questions is not None:
        row = world.question[:1].expand(n_questions)
        world = world._replace(question=row)
    return question_bounds.plan_fit(cfg, collected.policy, world, degrees)


def n_visits(collected):
    """Firings and links of the questions."""
    world = collected.world
    sizes = aggregation.question_sizes(world.evidence, world.question)
    return int(sizes[1].sum() + sizes[2].sum())


def test_the_gradient_steps_bound_the_epochs(collected):
    cfg = ListwiseConfig(n_epochs=8, batch_size=10, max_steps=60)
    for n_questions, n_epochs in ((100, 6), (20, 8), (10_000, 1)):
        bounded = plan(collected, cfg, n_questions=n_questions)
        assert bounded.cfg == replace(cfg, n_epochs=n_epochs)
        said = [f"listwise fit: {n_epochs} of 8 epochs"] * (n_epochs < 8)
        assert [note.partition(",")[0] for note in bounded.notes] == said


def test_the_firings_and_links_bound_the_epochs(collected, monkeypatch):
    cfg = ListwiseConfig()
    assert plan(collected, cfg) == (cfg, (False,), [])
    bound = 3.9 * n_visits(collected)
    monkeypatch.setattr(question_bounds, "MAX_FIT_FIRINGS", bound)
    monkeypatch.setattr(question_bounds, "WEIGHTS_PER_GRADIENT", 1e12)
    bounded = plan(collected, cfg)
    assert bounded.cfg.n_epochs == 3
    assert bounded.notes[0].startswith("listwise fit: 3 of 8 epochs, ")
    # Two fits share the bound, and one epoch is always made.
    both = plan(collected, cfg, (False, True))
    assert both.cfg.n_epochs == 1 and both.degrees == (False, True)
    monkeypatch.setattr(question_bounds, "MAX_FIT_FIRINGS", 1)
    assert plan(collected, cfg).cfg.n_epochs == 1
    # A bound that the user sets takes its place.
    set_bound = replace(cfg, max_gradients=bound)
    assert plan(collected, set_bound).cfg.n_epochs == 3


def test_a_longer_run_takes_more_gradients_unless_their_number_is_set(
    collected, monkeypatch
):
    bound = 3.9 * n_visits(collected)
    monkeypatch.setattr(question_bounds, "MAX_FIT_FIRINGS", bound)
    monkeypatch.setattr(question_bounds, "WEIGHTS_PER_GRADIENT", 1e12)
    for max_gradients, n_epochs in ((None, 7), (bound, 3)):
        bounded = question_bounds.plan_fit(
            ListwiseConfig(max_gradients=max_gradients),
            collected.policy,
            collected.world,
            (False,),
            time_factor=2.0,
        )
        assert bounded.cfg.n_epochs == n_epochs


def test_the_seconds_bound_the_epochs_with_their_validations(
    collected, monkeypatch
):
    n = n_visits(collected)
    monkeypatch.setattr(question_bounds, "WEIGHTS_PER_GRADIENT", 1e12)
    monkeypatch.setattr(question_bounds, "GRADIENTS_PER_SECOND", n)
    for seconds, metric_seconds, n_epochs in (
        (3.5, 0.0, 3),
        (3.5, 0.5, 2),
        (0.0, 1.0, 1),
        (math.inf, 1.0, 8),
    ):
        bounded = question_bounds.plan_fit(
            ListwiseConfig(),
            collected.policy,
            collected.world,
            (False,),
            seconds,
            metric_seconds,
        )
        assert bounded.cfg.n_epochs == n_epochs
        said = ["--seconds" in note for note in bounded.notes]
        assert said == [True] * (n_epochs < 8)


def test_degrees_are_not_weighed_where_moving_their_weights_takes_long(
    collected, monkeypatch
):
    cfg = ListwiseConfig()
    monkeypatch.setattr(question_bounds, "WEIGHTS_PER_GRADIENT", 1e-6)
    bounded = plan(collected, cfg, (False, True))
    assert bounded.degrees == (False,)
    assert bounded.notes[0].startswith("degrees are not weighed")
    # A choice that the user has made is kept.
    assert plan(collected, cfg, (True,)).degrees == (True,)


def test_padded_evidence_and_weights_bound_the_updates(collected, monkeypatch):
    policy = collected.policy
    size = policy.capacity._replace(n_firings=10, n_links=3)
    policy = replace(policy, capacity=size)
    ppo = PPOConfig(n_envs=4, n_steps=8, n_epochs=2, n_minibatches=2)
    cost = 10 * 4 * 8 * (1 + question_bounds.GRADIENT_COST * 2)
    monkeypatch.setattr(question_bounds, "MAX_PPO_FIRINGS", 7.5 * cost)
    monkeypatch.setattr(question_bounds, "WEIGHTS_PER_GRADIENT", 10**9)
    gpu = torch.device("cuda")
    assert question_bounds.n_updates_within(ppo, policy, gpu) == 7.5 * 16
    assert question_bounds.n_updates_within(ppo, policy, CPU) == 7
    speed = 3.5 * cost / 10.0
    monkeypatch.setattr(question_bounds, "PPO_FIRINGS_PER_SECOND", speed)
    assert question_bounds.n_updates_within(ppo, policy, CPU, 10.0) == 3
    assert question_bounds.n_updates_within(ppo, policy, CPU, 0.0) == 1
    more_links = replace(policy, capacity=size._replace(n_links=20))
    assert question_bounds.n_updates_within(ppo, more_links, CPU) == 3
    monkeypatch.setattr(question_bounds, "WEIGHTS_PER_GRADIENT", 1)
    assert question_bounds.n_updates_within(ppo, policy, CPU) < 7
    monkeypatch.setattr(question_bounds, "MAX_PPO_FIRINGS", 1)
    assert question_bounds.n_updates_within(ppo, policy, CPU) == 1


def test_a_least_number_of_epochs_is_made_whatever_the_bounds(
    collected, monkeypatch
):
    monkeypatch.setattr(question_bounds, "MAX_FIT_FIRINGS", 1)
    bounded = question_bounds.plan_fit(
        ListwiseConfig(),
        collected.policy,
        collected.world,
        (False,),
        min_epochs=2,
    )
    assert bounded.cfg.n_epochs == 2
    assert bounded.notes[0].startswith("listwise fit: 2 of 8 epochs")
