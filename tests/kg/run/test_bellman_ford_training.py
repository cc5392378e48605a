"""Bellman-Ford networks of a generated graph: what they rank, that they are the same again, and their time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from funcppo.core import tree
from funcppo.core.deadline import Deadline
from funcppo.kg.graph import loaders
from funcppo.kg.logic import row_index
from funcppo.kg.run import bellman_ford_training
from funcppo.kg.scores import evidence, network_prior
from funcppo.kg.scores.question_config import BellmanFordConfig
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.search.task import build_task

CFG = BellmanFordConfig(
    width=8, n_layers=2, n_steps=100, batch_size=8, learning_rate=0.02
)


def families(n=24):
    """Chains of three persons: every parent is known, and of four grandparents three; the fourth is test."""
    parents = [
        (f"x{i}{a}", "parent", f"x{i}{b}")
        for i in range(n)
        for a, b in ("ab", "bc")
    ]
    elders = [(f"x{i}a", "grandparent", f"x{i}c") for i in range(n)]
    return loaders.from_triples(
        parents + [fact for i, fact in enumerate(elders) if i % 4],
        [],
        [fact for i, fact in enumerate(elders) if not i % 4],
        rules="grandparent(X, Y) :- parent(X, Z), parent(Z, Y)",
    )


@pytest.fixture(scope="module")
def task():
    settings = ProverTaskConfig(max_height=1, smoothing=5.0)
    return build_task(families(), settings)


def priors_of_test(task, params):
    """The prior of every entity as an answer to the questions of test."""
    n = task.sizes.n_constants
    prior = network_prior.make_prior(params, evidence.binary_facts(task.kb), n)
    asked = evidence.training_questions(torch.from_numpy(task.dataset.test))
    open_ = asked._replace(left_out=torch.zeros_like(asked.left_out))
    counts = torch.full_like(asked.entity, n)
    entity = torch.arange(1, n + 1).repeat(len(counts))
    offsets = row_index.offsets(counts)
    values = network_prior.prior(prior, open_, "fact", offsets, entity)
    return values.view(-1, n), asked.left_out


def test_facts_that_were_not_seen_rank_first(task):
    params, reason = bellman_ford_training.train(task, CFG, "fact", 0, "cpu")
    assert not reason
    values, answer = priors_of_test(task, params)
    assert torch.equal(values.argmax(1) + 1, answer)


def test_the_same_seed_gives_the_same_weights_and_another_one_others(task):
    cfg = replace(CFG, n_steps=2)
    one, same, other = (
        bellman_ford_training.train(task, cfg, "fact", seed, "cpu").params
        for seed in (0, 0, 1)
    )
    assert all(map(torch.equal, one, same))
    assert not torch.equal(one.asked, other.asked)
    assert not torch.equal(one.output, other.output)
    blank = bellman_ford_training.blank(task, cfg, "cpu")
    assert [x.shape for x in blank] == [x.shape for x in one]
    assert not any(x.any() for x in tree.leaves(blank))


def test_what_there_is_no_time_for_is_left_out(task, monkeypatch):
    monkeypatch.setattr(bellman_ford_training, "MIN_STEPS", 20)

    def plan(seconds, cfg=CFG, n_questions=0):
        return bellman_ford_training.plan_training(
            task, cfg, n_questions, "cpu", seconds
        )

    whole = plan(math.inf)
    assert (whole.cfg, whole.is_too_long) == (CFG, False)
    each = whole.seconds / CFG.n_steps
    part = plan(30.5 * each)
    assert (part.cfg.n_steps, part.is_too_long) == (30, False)
    assert part.seconds == pytest.approx(30 * each)
    assert plan(19.5 * each).is_too_long
    # who asks for few gets them
    assert not plan(3.5 * each, replace(CFG, n_steps=3)).is_too_long

    # The priors take a part of the time.
    of_priors = plan(math.inf, n_questions=4000).seconds - whole.seconds
    assert of_priors > 0
    assert plan(30.5 * each, n_questions=4000).is_too_long
    both = plan(of_priors + 30.5 * each, n_questions=4000)
    assert both.cfg.n_steps == 30

    def count(**options):
        return plan(math.inf, replace(CFG, **options)).seconds

    # The work grows with what is asked for.
    for option in ({"width": 80}, {"n_layers": 20}, {"batch_size": 64}):
        assert count(**option) > count()


def test_the_deadline_ends_the_training_after_a_step(task):
    over = Deadline(at=0.0, clock=lambda: 1.0)
    done: list[tuple[int, int | None]] = []
    cut = bellman_ford_training.train(
        task,
        CFG,
        "fact",
        0,
        "cpu",
        lambda text, step=0, n=None, deadline=None: done.append((step, n)),
        over,
    )
    assert done == [(1, CFG.n_steps)]
    first = bellman_ford_training.train(
        task, replace(CFG, n_steps=1), "fact", 0, "cpu"
    )
    # The rate of the first step does not depend on how many are planned.
    assert all(map(torch.equal, cut.params, first.params))


@pytest.mark.parametrize(("total_gb", "at_once_gb"), [(80.0, 4.0), (8.0, 0.8)])
def test_a_small_gpu_holds_fewer_questions_at_once(
    total_gb, at_once_gb, monkeypatch
):
    monkeypatch.setattr(
        bellman_ford_training.memory, "total_bytes", lambda _: total_gb * 1e9
    )
    found = bellman_ford_training._max_step_bytes("cuda:1")
    assert found == pytest.approx(at_once_gb * 1e9)
    assert bellman_ford_training._max_step_bytes("cpu") == 1e9
