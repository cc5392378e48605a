"""Training on question episodes: which questions are asked, and that both objectives learn what rules cannot say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.func import grad

from funcppo import optim
from funcppo.config import AdamConfig, PPOConfig
from funcppo.core import random, tree
from funcppo.core.deadline import Deadline
from funcppo.kg.graph import loaders
from funcppo.kg.logic import derive
from funcppo.kg.logic.derive import select_questions
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.ranking import ranking
from funcppo.kg.ranking.ranking import RankingProtocol
from funcppo.kg.run import budget, evidence_fit
from funcppo.kg.run.evidence_fit import (
    collect_questions,
    iter_epochs,
    refine_with_ppo,
    with_prior,
)
from funcppo.kg.run.run import FirstEpoch
from funcppo.kg.scores import evidence, questions
from funcppo.kg.scores.learned import LearnedScore, Weights
from funcppo.kg.scores.question_config import ListwiseConfig, QuestionConfig
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.search.task import build_task

PLAIN = QuestionConfig(left_out="fact")


def seating(n_tables=24, n_guests=4):
    """Guests sit at tables; one sits beside those of the table that they are not married to.

    The rule derives spouses and others alike; only the link by a marriage tells them apart.
    """
    sits, beside, married = [], [], []
    for table in range(n_tables):
        guests = [f"g{table}_{i}" for i in range(n_guests)]
        sits += [(guest, "sitsAt", f"t{table}") for guest in guests]
        married += [
            (a, "marriedTo", b) for a, b in zip(guests[::2], guests[1::2])
        ]
        beside += [
            (a, "beside", b)
            for i, a in enumerate(guests)
            for j, b in enumerate(guests)
            if i // 2 != j // 2
        ]
    return loaders.from_triples(
        sits + married + [f for i, f in enumerate(beside) if i % 4],
        beside[::4],
        rules="beside(X, Y) :- sitsAt(X, T), sitsAt(Y, T)",
    )


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


def valid_mrr(task, collected, params):
    facts = evidence.index_facts(task.kb, task.sizes)
    weights = Weights(
        facts=facts,
        cfg=collected.policy.aggregation,
        world=collected.world.aggregation,
        params=params.score,
        left_out="fact",
        smoothing=0.0,
    )
    ranked = ranking.rank_split(
        task,
        task.dataset.valid,
        LearnedScore("evidence", weights),
        RankingProtocol(sides=(HEAD, TAIL)),
    )
    return ranking.summarise_ranking(
        ranked, task.dataset.predicates, with_auc=False
    )["mrr"]


def test_every_fact_that_a_rule_derives_is_asked_twice(task, collected):
    n_beside = sum(
        task.dataset.predicates[p - 1] == "beside"
        for p in task.dataset.facts[:, 0]
    )
    assert len(collected.world.question) == 2 * n_beside
    assert f"the answers of {2 * n_beside:,} " in collected.notes[0]
    answers = collected.world.evidence.answer[collected.world.question]
    assert (answers >= 0).all()


def test_a_known_answer_is_no_wrong_answer_but_one_of_valid_is(task, collected):
    """What valid holds is unknown in training."""
    found = collected.world.evidence
    known = {tuple(fact) for fact in task.dataset.facts.tolist()}
    valid = {tuple(fact) for fact in task.dataset.valid.tolist()}
    asked = evidence.training_questions(evidence.binary_facts(task.kb))
    order = random.permutation(random.key(0), len(asked.entity))
    asked = select_questions(asked, order)
    n_valid = 0
    for row, (q, entity) in enumerate(
        zip(found.question.tolist(), found.entity.tolist())
    ):
        given = int(asked.entity[q])
        pair = (entity, given) if asked.side[q] == HEAD else (given, entity)
        atom = (int(asked.predicate[q]), *pair)
        is_answer = row == int(found.answer[q])
        assert (atom in known) == is_answer
        n_valid += atom in valid
    assert n_valid > 0


def test_the_largest_questions_are_left_out_and_counted(task):
    facts = evidence.index_facts(task.kb, task.sizes)
    cfg = replace(PLAIN, max_questions=100, max_size_quantile=0.0)
    few = collect_questions(task, facts, cfg, 0, uses_degrees=False)
    assert "100 of" in few.notes[0]
    n_firings = few.policy.capacity.n_firings
    assert f"more than {n_firings:,} firings and were left out" in few.notes[0]


def test_the_bounds_end_the_list_and_the_number_of_questions_repeats_it(
    task, monkeypatch
):
    monkeypatch.setattr(derive, "PILOT_QUESTIONS", 16)
    monkeypatch.setattr(derive, "MAX_CHUNK_GROUNDINGS", 200)
    facts = evidence.index_facts(task.kb, task.sizes)
    shown = []
    bounded = collect_questions(
        task,
        facts,
        replace(PLAIN, max_firings=100, seconds=60.0),
        3,
        uses_degrees=False,
        on_phase=lambda *args: shown.append(args[1:]),
    )
    assert "with more than 100 firings" in bounded.notes[0]
    n = bounded.n_questions
    n_all = shown[0][1]
    assert 16 < n < n_all and shown[-1][:2] == (n, n_all)
    assert 0.0 < shown[-1][2].seconds_left <= 60.0
    again = collect_questions(
        task, facts, replace(PLAIN, max_questions=n), 3, uses_degrees=False
    )
    assert "firings)" not in again.notes[0] and again.n_questions == n
    for one, other in zip(
        tree.leaves(bounded.world), tree.leaves(again.world), strict=True
    ):
        assert torch.equal(one, other)
    late = collect_questions(
        task, facts, replace(PLAIN, seconds=1e-9), 3, uses_degrees=False
    )
    assert "within 1e-09 seconds" in late.notes[0] and late.n_questions == 16
    over = Deadline(at=0.0)
    late = collect_questions(
        task, facts, PLAIN, 3, uses_degrees=False, deadline=over
    )
    assert "within 0 seconds" in late.notes[0] and late.n_questions == 16


def test_a_batch_that_is_computed_in_parts_has_the_same_gradient(collected):
    """In float32 sums of another order differ by their rounding."""
    size = collected.policy.capacity
    assert budget.batch_firings(7, size) < ListwiseConfig().max_batch_firings
    fitted = [
        next(
            iter_epochs(
                collected.policy,
                collected.world,
                questions.init(collected.policy, random.key(0)),
                ListwiseConfig(max_batch_firings=n_firings, max_steps=3),
                seed=1,
            )
        )
        for n_firings in (4_000_000, budget.batch_firings(7, size), 1)
    ]
    for parts in fitted[1:]:
        tree.map(torch.testing.assert_close, parts, fitted[0])


def test_a_deadline_ends_the_fit_within_an_epoch(collected):
    params = questions.init(collected.policy, random.key(0))
    cfg = ListwiseConfig(batch_size=8)
    over = Deadline(at=0.0)
    (late,) = iter_epochs(
        collected.policy, collected.world, params, cfg, 0, over
    )
    whole = next(iter_epochs(collected.policy, collected.world, params, cfg, 0))
    moved, further = (
        max(
            float((x - y).abs().max())
            for x, y in zip(tree.leaves(p), tree.leaves(params), strict=True)
            if x.numel()
        )
        for p in (late, whole)
    )
    assert 0 < moved < further


def test_the_prior_is_the_policy_that_ppo_starts_from(task, collected):
    params = questions.init(collected.policy, random.key(0))
    params = tree.map(lambda x: x + 0.1, params)
    world = with_prior(collected.policy, collected.world, params)
    question = world.question[:7]
    state = questions.QuestionState(question, torch.zeros(7, dtype=torch.bool))
    obs = questions.observe(collected.policy.capacity, world, state)
    out = questions.apply(collected.policy, world, params, obs)
    torch.testing.assert_close(out.logits, out.prior_logits)
    assert out.logits[obs.action_mask].std() > 0


def test_without_a_derived_answer_there_is_nothing_to_learn():
    graph = loaders.from_triples(
        [("a", "p", "b"), ("c", "q", "d")], rules="p(X, Y) :- q(X, Y)"
    )
    settings = ProverTaskConfig(
        max_height=1, smoothing=5.0, object_identity=False
    )
    task = build_task(graph, settings)
    facts = evidence.index_facts(task.kb, task.sizes)
    with pytest.raises(ValueError, match="no rule derives a known fact"):
        collect_questions(task, facts, PLAIN, 0, uses_degrees=False)


def test_the_listwise_loss_learns_what_a_link_says(task, collected):
    params = questions.init(collected.policy, random.key(0))
    before = valid_mrr(task, collected, params)
    cfg = ListwiseConfig(n_epochs=4, batch_size=32, learning_rate=0.1)
    fitted = list(
        iter_epochs(collected.policy, collected.world, params, cfg, 0)
    )
    assert len(fitted) == 4
    after = valid_mrr(task, collected, fitted[-1])
    assert before < 0.9 and after > before + 0.1
    again = list(iter_epochs(collected.policy, collected.world, params, cfg, 0))
    for one, other in zip(fitted[-1].score, again[-1].score):
        assert torch.equal(one, other)


def test_ppo_learns_it_too_and_without_a_learning_rate_nothing(task, collected):
    params = questions.init(collected.policy, random.key(0))
    before = valid_mrr(task, collected, params)

    def refined(learning_rate):
        ppo = PPOConfig(
            n_envs=128,
            n_steps=1,
            n_updates=30,
            n_minibatches=1,
            learning_rate=learning_rate,
            entropy_coef=0.0,
        )
        *_, (last, _) = refine_with_ppo(
            collected.policy, collected.world, params, ppo, 0
        )
        return last

    assert valid_mrr(task, collected, refined(0.05)) > before + 0.1
    assert valid_mrr(task, collected, refined(0.0)) == before


# -- the first epoch, in the order of the list


@pytest.fixture
def steps(monkeypatch):
    """The gradient steps of a fit: questions, settings, rate, and the steps before."""
    taken = []
    take_step = evidence_fit.take_step

    def watch(policy, world, fit, cfg, question, rate):
        taken.append((world, question, cfg, rate, fit))
        return take_step(policy, world, fit, cfg, question, rate)

    monkeypatch.setattr(evidence_fit, "take_step", watch)
    return taken


def test_each_derived_question_is_in_one_batch_of_the_first_epoch(
    collected, steps
):
    cfg = ListwiseConfig(learning_rate=0.1, batch_size=8, n_epochs=3)
    start = questions.init(collected.policy, random.key(0))
    first = FirstEpoch(batch_size=8, max_size_quantile=1.0)
    fitted = list(
        iter_epochs(
            collected.policy,
            collected.world,
            start,
            cfg,
            seed=0,
            first_epoch=first,
        )
    )
    assert len(fitted) == 3
    rates = [rate for _, _, _, rate, _ in steps]
    n_first = rates.index(next(rate for rate in rates if rate < 0.1))
    seen = []
    for world, question, *_ in steps[:n_first]:
        listed = world.evidence
        key = torch.stack([listed.label, listed.given, listed.left_out], dim=1)
        seen += map(tuple, key[question].tolist())
    # A last batch is incomplete, unless it is part of a group: up to one batch is left over.
    n_derived = int((collected.world.evidence.answer >= 0).sum())
    assert n_derived - 8 < len(set(seen)) == len(seen) <= n_derived

    # The first step is on the first batch, down its loss; its questions are sorted by size, which rounds otherwise.
    world, question, penalty, _, fit = steps[0]
    assert fit.n_steps == 0 and len(question) == 8
    gradient = grad(questions.listwise_loss, argnums=3)(
        collected.policy,
        collected.world,
        penalty.penalty,
        start,
        (collected.world.evidence.answer >= 0).nonzero().squeeze(1)[:8],
    )
    params, _ = optim.update(
        AdamConfig(), gradient, optim.init(start), start, 0.1
    )
    tree.map(torch.testing.assert_close, steps[1][4].params, params)

    # The prior of the weights counts for the questions so far: half as much in a group that is half of them.
    deviations = [cfg.penalty.feature_deviation for _, _, cfg, _, _ in steps]
    assert deviations[0] == cfg.penalty.feature_deviation
    assert deviations[1] ** 2 == pytest.approx(40 / 32 * deviations[0] ** 2)

    # Later epochs go on from the first one; their rate falls over all steps.
    counts = [fit.n_steps for *_, fit in steps]
    assert counts == list(range(len(steps)))
    assert rates[n_first:] == pytest.approx(
        [0.1 * (1 - i / len(steps)) for i in range(n_first, len(steps))]
    )


def test_fewer_questions_than_a_batch_make_no_first_epoch(collected, steps):
    cfg = ListwiseConfig(learning_rate=0.1, n_epochs=2)
    start = questions.init(collected.policy, random.key(0))
    fits = []
    for first in (None, FirstEpoch(batch_size=9999, max_size_quantile=1.0)):
        arguments = collected.policy, collected.world, start, cfg
        fits.append([*iter_epochs(*arguments, 0, first_epoch=first)])
    for one, other in zip(*fits, strict=True):
        pairs = zip(tree.leaves(one), tree.leaves(other), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
