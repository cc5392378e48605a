"""Link embeddings and Bellman-Ford networks: what they rank, that they are the same again, and their time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from funcppo.core import tree
from funcppo.core.deadline import Deadline
from funcppo.kg.graph import loaders
from funcppo.kg.logic import row_index
from funcppo.kg.run import priors, run_start
from funcppo.kg.scores import evidence, link_embedding, path_network
from funcppo.kg.scores.question_config import (
    BellmanFordConfig,
    EmbeddingConfig,
    QuestionConfig,
)
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.search.task import build_task, ignore_phase
from tests.kg.run.test_evidence_fit import seating
from tests.kg.run.test_fits_of_a_run import CONFIG

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
    params = priors.train_embedding(task, CFG, "fact", 0, "cpu")
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
        priors.train_embedding(task, cfg, "fact", seed, "cpu")
        for seed in (0, 0, 1)
    )
    assert torch.equal(one.entity, same.entity)
    assert torch.equal(one.label, same.label)
    assert not torch.equal(one.entity, other.entity)
    blank = priors.blank_embedding(task, cfg, "cpu")
    assert [x.shape for x in blank] == [x.shape for x in one]


def test_what_there_is_no_time_for_is_left_out(task):
    def plan(seconds, cfg=CFG):
        return priors.plan_embedding(task, cfg, "cpu", seconds)

    whole = plan(1e6)
    assert (whole.cfg, whole.is_too_long) == (CFG, False)
    each = whole.seconds / CFG.n_epochs
    part = plan(10.5 * each)
    assert (part.cfg.n_epochs, part.is_too_long) == (10, False)
    assert part.seconds == pytest.approx(10 * each)
    assert plan(7.5 * each).is_too_long
    # who asks for few gets them
    assert not plan(3.5 * each, replace(CFG, n_epochs=3)).is_too_long

    def count(**options):
        return plan(1e9, replace(CFG, **options)).seconds

    # The work grows with rank and models.
    assert count(rank=80, n_folds=20) > count(rank=80) > count()


def test_the_deadline_ends_the_training_after_an_epoch(task):
    over = Deadline(at=0.0, clock=lambda: 1.0)
    cut = priors.train_embedding(task, CFG, "fact", 0, "cpu", deadline=over)
    done: list[int] = []
    priors.train_embedding(
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
        cut.entity, priors.blank_embedding(task, CFG, "cpu").entity
    )


# -- Bellman-Ford networks


NETWORK = BellmanFordConfig(
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
def chains():
    settings = ProverTaskConfig(max_height=1, smoothing=5.0)
    return build_task(families(), settings)


def priors_of_test(chains, params):
    """The prior of every entity as an answer to the questions of test."""
    n = chains.sizes.n_constants
    prior = path_network.make_network(
        params, evidence.binary_facts(chains.kb), n
    )
    asked = evidence.training_questions(torch.from_numpy(chains.dataset.test))
    open_ = asked._replace(left_out=torch.zeros_like(asked.left_out))
    counts = torch.full_like(asked.entity, n)
    entity = torch.arange(1, n + 1).repeat(len(counts))
    offsets = row_index.offsets(counts)
    values = path_network.candidate_scores(
        prior, open_, "fact", offsets, entity
    )
    return values.view(-1, n), asked.left_out


def test_facts_that_were_not_seen_rank_first(chains):
    params, reason = priors.train_bellman_ford(
        chains, NETWORK, "fact", 0, "cpu"
    )
    assert not reason
    values, answer = priors_of_test(chains, params)
    assert torch.equal(values.argmax(1) + 1, answer)


def test_the_same_seed_gives_the_same_weights_and_another_one_others(chains):
    cfg = replace(NETWORK, n_steps=2)
    one, same, other = (
        priors.train_bellman_ford(chains, cfg, "fact", seed, "cpu")[0]
        for seed in (0, 0, 1)
    )
    assert all(map(torch.equal, one, same))
    assert not torch.equal(one.asked, other.asked)
    assert not torch.equal(one.output, other.output)
    blank = priors.blank_bellman_ford(chains, cfg, "cpu")
    assert [x.shape for x in blank] == [x.shape for x in one]
    assert not any(x.any() for x in tree.leaves(blank))


def test_steps_without_time_are_left_out(chains):
    wanted = replace(NETWORK, n_steps=1000)

    def plan(seconds, cfg=wanted, n_questions=0):
        return priors.plan_bellman_ford(
            chains, cfg, n_questions, "cpu", seconds
        )

    whole = plan(math.inf)
    assert (whole.cfg, whole.is_too_long) == (wanted, False)
    each = whole.seconds / wanted.n_steps
    part = plan(300.5 * each)
    assert (part.cfg.n_steps, part.is_too_long) == (300, False)
    assert part.seconds == pytest.approx(300 * each)
    assert plan(199.5 * each).is_too_long
    # who asks for few gets them
    assert not plan(3.5 * each, replace(NETWORK, n_steps=3)).is_too_long

    # The priors take a part of the time.
    of_priors = plan(math.inf, n_questions=40_000).seconds - whole.seconds
    assert of_priors > 0
    assert plan(300.5 * each, n_questions=40_000).is_too_long
    both = plan(of_priors + 300.5 * each, n_questions=40_000)
    assert both.cfg.n_steps == 300

    def count(**options):
        return plan(math.inf, replace(NETWORK, **options)).seconds

    # The work grows with what is asked for.
    for option in ({"width": 80}, {"n_layers": 20}, {"batch_size": 64}):
        assert count(**option) > count()


def test_the_deadline_ends_the_training_after_a_step(chains):
    over = Deadline(at=0.0, clock=lambda: 1.0)
    done: list[tuple[int, int | None]] = []
    cut, _ = priors.train_bellman_ford(
        chains,
        NETWORK,
        "fact",
        0,
        "cpu",
        lambda text, step=0, n=None, deadline=None: done.append((step, n)),
        over,
    )
    assert done == [(1, NETWORK.n_steps)]
    first, _ = priors.train_bellman_ford(
        chains, replace(NETWORK, n_steps=1), "fact", 0, "cpu"
    )
    # The rate of the first step does not depend on how many are planned.
    assert all(map(torch.equal, cut, first))


# -- priors of a run


# more than the time of a test
LONG = BellmanFordConfig(width=4, n_layers=2, n_steps=3, seconds=1e-9)


@pytest.fixture
def graph(monkeypatch):
    graph = seating(n_tables=10)
    monkeypatch.setattr(loaders, "load", lambda *args, **kwargs: graph)
    return graph


def prepared(folder, option, on_phase=ignore_phase):
    options = QuestionConfig(embedding=False, walks=False, bellman_ford=option)
    config = replace(CONFIG, questions=options, bellman_ford=LONG)
    return run_start.prepare_run(
        config, folder, resume=False, on_phase=on_phase
    )


def test_a_network_is_not_tried_by_default(graph, tmp_path):
    phases = []
    run = prepared(tmp_path, None, lambda text, *_: phases.append(text))
    assert run.run_config.questions.bellman_ford is False
    assert run.questions.facts.network is None
    assert not any("Bellman-Ford" in text for text in (*phases, *run.notes))


def test_a_network_without_time_is_not_tried(graph, tmp_path):
    run = prepared(tmp_path, "auto")
    assert run.run_config.questions.bellman_ford is False
    (note,) = (note for note in run.notes if "Bellman-Ford" in note)
    assert "a Bellman-Ford network is not tried: " in note
    assert "questions.bellman_ford=on trains it" in note


def test_a_network_that_is_set_makes_all_its_steps_and_says_how_long(
    graph, tmp_path
):
    phases = []
    run = prepared(
        tmp_path, True, lambda text, *rest: phases.append((text, *rest))
    )
    assert run.run_config.questions.bellman_ford is True
    steps = [p for p in phases if p[0] == "training a Bellman-Ford network"]
    assert [p[1:3] for p in steps] == [(1, 3), (2, 3), (3, 3)]
    before = [text for text, *_ in phases if "network, about" in text]
    assert len(before) == 1
    note = "Bellman-Ford network: 3 of 3 steps and the priors of "
    assert sum(line.startswith(note) for line in run.notes) == 1
    assert run.questions.world.evidence.path_score.any()
