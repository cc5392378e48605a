"""The first epoch of the listwise fit, made while questions are listed: its steps depend on the questions alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.func import grad

from funcppo import optim
from funcppo.config import AdamConfig
from funcppo.core import random, tree
from funcppo.core.deadline import Deadline
from funcppo.kg.logic import firing_chunks
from funcppo.kg.run import listwise_steps
from funcppo.kg.run.listwise_steps import FirstEpochSetup
from funcppo.kg.run.question_training import collect_questions, fit_listwise
from funcppo.kg.scores import evidence, questions
from funcppo.kg.scores.question_config import ListwiseConfig, QuestionConfig
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.search.task import build_task
from tests.kg.run.test_question_training import seating

PLAIN = QuestionConfig(left_out="fact")


@pytest.fixture(scope="module")
def task():
    settings = ProverTaskConfig(
        max_height=1, smoothing=5.0, object_identity=True
    )
    return build_task(seating(), settings)


@pytest.fixture(scope="module")
def collected(task):
    facts = evidence.index_facts(task.kb, task.sizes)
    return collect_questions(task, facts, PLAIN, 0, uses_degrees=False)


def config(collected, **fields):
    settings = {
        "policy": collected.policy,
        "listwise": ListwiseConfig(learning_rate=0.1),
        "world": collected.world.aggregation,
        "params": questions.init(collected.policy, random.key(0)),
        "batch_size": 8,
        "max_size_quantile": 1.0,
        "on_first_step": lambda: None,
    }
    return FirstEpochSetup(**(settings | fields))


def whole_epoch(cfg, listed, size):
    """The epoch over parts of so many questions."""
    epoch = listwise_steps.begin(cfg)
    for start in range(0, len(listed.label), size):
        part = evidence.slice_questions(listed, start, start + size)
        epoch = listwise_steps.learn(cfg, epoch, part)
    return listwise_steps.finish(cfg, epoch)


def assert_equal(one, other):
    for a, b in zip(tree.leaves(one), tree.leaves(other), strict=True):
        assert torch.equal(a, b)


def test_one_batch_is_one_step_down_the_listwise_loss(collected):
    world = collected.world
    first = evidence.slice_questions(
        world.evidence, 0, int(world.question[7]) + 1
    )
    cfg = config(collected)
    epoch = whole_epoch(cfg, first, len(first.label))
    size = collected.policy
    batch = world._replace(evidence=first, question=world.question[:8])
    gradient = grad(questions.listwise_loss, argnums=3)(
        size, batch, cfg.listwise.penalty, cfg.params, batch.question
    )
    params, _ = optim.update(
        AdamConfig(), gradient, optim.init(cfg.params), cfg.params, 0.1
    )
    assert epoch.fit.n_steps == 1 and epoch.n_questions == 8
    # The batch is sorted by size, so that sums are rounded in another order.
    tree.map(torch.testing.assert_close, epoch.fit.params, params)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_the_parts_that_questions_are_listed_in_do_not_matter(collected, size):
    listed = collected.world.evidence
    cfg = config(collected, max_size_quantile=0.9)
    whole = whole_epoch(cfg, listed, len(listed.label))
    assert whole.fit.n_steps > 2 * listwise_steps.GROUP_BATCHES
    again = whole_epoch(cfg, listed, size)
    at_once = listwise_steps.make_first_epoch(cfg, listed)
    assert_equal(at_once.fit.params, whole.fit.params)
    assert again.fit.n_steps == whole.fit.n_steps
    assert_equal(again.fit.params, whole.fit.params)
    assert_equal(again.fit.adam, whole.fit.adam)


def test_every_derived_question_is_in_one_batch(collected, monkeypatch):
    seen, penalties = [], []
    take_step = listwise_steps.take_step

    def watch(policy, world, fit, cfg, question, rate):
        listed = world.evidence
        seen.extend(
            zip(
                listed.label[question].tolist(),
                listed.given[question].tolist(),
                listed.left_out[question].tolist(),
            )
        )
        penalties.append(cfg.penalty.feature_deviation)
        assert rate == 0.1
        return take_step(policy, world, fit, cfg, question, rate)

    monkeypatch.setattr(listwise_steps, "take_step", watch)
    listed = collected.world.evidence
    cfg = config(collected)
    epoch = whole_epoch(cfg, listed, 50)
    derived = (listed.answer >= 0).nonzero().squeeze(1)
    # A last batch is incomplete, unless it is part of a group: up to one batch is left over.
    assert len(set(seen)) == len(seen) == epoch.n_questions
    assert len(derived) - 8 < len(seen) <= len(derived)
    # The prior of the weights counts for the questions so far: half as much in a group that is half of them.
    first, second, *_ = penalties
    assert first == cfg.listwise.penalty.feature_deviation
    n_first, n_second = 8, 8 * listwise_steps.GROUP_BATCHES
    assert second**2 == pytest.approx(
        (n_first + n_second) / n_second * first**2
    )


def test_the_first_step_is_announced_once_and_fewer_than_a_batch_make_none(
    collected,
):
    listed = collected.world.evidence
    told = []
    cfg = config(collected, on_first_step=lambda: told.append(1))
    assert whole_epoch(cfg, listed, 50) is not None and told == [1]
    few = config(collected, batch_size=10_000)
    assert whole_epoch(few, listed, 50) is None


def test_later_epochs_go_on_from_the_first_one(collected, monkeypatch):
    cfg = config(collected)
    first = whole_epoch(cfg, collected.world.evidence, 50).fit
    rates, steps = [], []
    take_step = listwise_steps.take_step

    def watch(policy, world, fit, cfg, question, rate):
        rates.append(rate)
        steps.append(int(fit.adam.step))
        return take_step(policy, world, fit, cfg, question, rate)

    monkeypatch.setattr(listwise_steps, "take_step", watch)
    listwise = replace(cfg.listwise, batch_size=8, n_epochs=3)
    epochs = list(
        fit_listwise(
            collected.policy,
            collected.world,
            cfg.params,
            listwise,
            seed=0,
            first_epoch=first,
        )
    )
    assert len(epochs) == 3
    assert_equal(epochs[0], first.params)
    assert steps == list(range(first.n_steps, first.n_steps + len(rates)))
    n_steps = first.n_steps + len(rates)
    assert rates == pytest.approx(
        [0.1 * (1 - step / n_steps) for step in steps]
    )


def test_the_number_of_questions_repeats_the_first_epoch(
    task, collected, monkeypatch
):
    facts = evidence.index_facts(task.kb, task.sizes)
    cfg = config(collected)
    bounded = collect_questions(
        task,
        facts,
        replace(PLAIN, max_firings=300, seconds=60.0),
        3,
        uses_degrees=False,
        first_epoch=cfg,
    )
    assert bounded.first_epoch is not None
    assert "first epoch" in bounded.notes[1]
    monkeypatch.setattr(firing_chunks, "PILOT_QUESTIONS", 3)
    monkeypatch.setattr(firing_chunks, "MAX_CHUNK_GROWTH", 2)
    again = collect_questions(
        task,
        facts,
        replace(PLAIN, max_questions=bounded.n_questions),
        3,
        uses_degrees=False,
        first_epoch=cfg,
    )
    assert again.n_questions == bounded.n_questions
    assert again.notes[1] == bounded.notes[1]
    assert_equal(again.world, bounded.world)
    assert_equal(again.first_epoch.params, bounded.first_epoch.params)


def test_the_time_of_gradient_steps_does_not_end_the_list(
    task, collected, monkeypatch
):
    now = [0.0]
    take_step = listwise_steps.take_step

    def take_seconds(*args):
        now[0] += 50.0
        return take_step(*args)

    monkeypatch.setattr(listwise_steps, "take_step", take_seconds)
    monkeypatch.setattr(firing_chunks, "MAX_CHUNK_GROWTH", 2)
    facts = evidence.index_facts(task.kb, task.sizes)

    def collect(at):
        now[0] = 0.0
        return collect_questions(
            task,
            facts,
            PLAIN,
            0,
            uses_degrees=False,
            deadline=Deadline(at=at, clock=lambda: now[0]),
            first_epoch=config(collected),
        )

    assert collect(1e6).n_questions == collected.n_questions
    # But the run's own time does.
    assert collect(60.0).n_questions < collected.n_questions
