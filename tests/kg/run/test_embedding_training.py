"""Link embeddings of a generated graph: what they rank, that they are the same again, and what there is time for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from funcppo.core.deadline import Deadline
from funcppo.kg.graph import loaders
from funcppo.kg.run import embedding_training
from funcppo.kg.scores import evidence, link_embedding
from funcppo.kg.scores.question_config import EmbeddingConfig
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.search.task import build_task

CFG = EmbeddingConfig(
    rank=8, n_folds=2, n_epochs=25, batch_size=32, learning_rate=0.05
)


def colours(n=40):
    """Who likes whom: those whose numbers differ by a multiple of four; a tenth of these facts is test."""
    facts = [
        (f"x{i}", "likes", f"x{j}")
        for i in range(n)
        for j in range(n)
        if i != j and (i - j) % 4 == 0
    ]
    return loaders.from_triples(
        [fact for i, fact in enumerate(facts) if i % 10],
        [],
        [fact for i, fact in enumerate(facts) if not i % 10],
        rules="likes(X, Y) :- likes(Y, X)",
    )


@pytest.fixture(scope="module")
def task():
    settings = ProverTaskConfig(max_height=1, smoothing=5.0)
    return build_task(colours(), settings)


def test_facts_that_were_not_seen_rank_above_chance(task):
    params = embedding_training.train(task, CFG, "fact", 0, "cpu")
    n = task.sizes.n_constants
    asked = evidence.training_questions(torch.from_numpy(task.dataset.test))
    label = evidence.make_label(asked.predicate, asked.side)
    entity = torch.arange(1, n + 1).repeat(len(label))
    row = torch.arange(len(label)).repeat_interleave(n)
    model = torch.full_like(row, CFG.n_folds)
    prior = link_embedding.prior(
        params, model, label[row], asked.entity[row], entity
    ).view(-1, n)
    answer = prior.gather(1, asked.left_out[:, None] - 1)

    # filtered: known answers are no rivals
    known = evidence.training_questions(evidence.binary_facts(task.kb))
    rivals = prior.clone()
    for i in range(len(label)):
        is_same = known.side == asked.side[i]
        is_same = is_same & (known.entity == asked.entity[i])
        rivals[i, known.left_out[is_same] - 1] = -torch.inf
    rank = 1 + (rivals > answer).sum(1)
    # A random order of the 31 or 32 that are left gives 16.
    assert float(rank.double().mean()) < 3


def test_the_same_seed_gives_the_same_vectors_and_another_one_others(task):
    cfg = replace(CFG, n_epochs=1)
    one, same, other = (
        embedding_training.train(task, cfg, "fact", seed, "cpu")
        for seed in (0, 0, 1)
    )
    assert torch.equal(one.entity, same.entity)
    assert torch.equal(one.label, same.label)
    assert not torch.equal(one.entity, other.entity)
    blank = embedding_training.blank(task, cfg, "cpu")
    assert [x.shape for x in blank] == [x.shape for x in one]


def test_what_there_is_no_time_for_is_left_out(task):
    def plan(seconds, cfg=CFG):
        return embedding_training.plan_training(task, cfg, "cpu", seconds)

    whole = plan(1e6)
    assert (whole.cfg, whole.is_too_long) == (CFG, False)
    each = whole.seconds / CFG.n_epochs
    part = plan(10.5 * each)
    assert (part.cfg.n_epochs, part.is_too_long) == (10, False)
    assert part.seconds == pytest.approx(10 * each)
    assert plan(7.5 * each).is_too_long
    # its own bound
    assert plan(1e6, replace(CFG, seconds=7.5 * each)).is_too_long
    # who asks for few gets them
    assert not plan(3.5 * each, replace(CFG, n_epochs=3)).is_too_long

    def count(**options):
        return plan(1e9, replace(CFG, seconds=1e9, **options)).seconds

    # The work grows with rank and models.
    assert count(rank=80, n_folds=20) > count(rank=80) > count()


def test_the_deadline_ends_the_training_after_an_epoch(task):
    over = Deadline(at=0.0, clock=lambda: 1.0)
    cut = embedding_training.train(task, CFG, "fact", 0, "cpu", deadline=over)
    done: list[int] = []
    embedding_training.train(
        task,
        CFG,
        "fact",
        0,
        "cpu",
        lambda text, epoch=0, n=None: done.append(epoch),
        over,
    )
    assert done == [0]
    assert not torch.equal(
        cut.entity, embedding_training.blank(task, CFG, "cpu").entity
    )
