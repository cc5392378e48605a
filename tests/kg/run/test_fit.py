"""Questions, the listwise fit and priors: what is asked, that all learn what rules cannot say, and their time."""

import math
import time
from dataclasses import replace

import pytest
import torch

from funcppo.core import random, tree
from funcppo.core.host import Deadline
from funcppo.kg.config import (
    BellmanFordConfig,
    EmbeddingConfig,
    ListwiseConfig,
    ProverTaskConfig,
    QuestionConfig,
)
from funcppo.kg.graph import loaders
from funcppo.kg.logic import derive
from funcppo.kg.logic.kb import HEAD, TAIL
from funcppo.kg.logic.row_index import select_rows
from funcppo.kg.ranking import ranking
from funcppo.kg.ranking.ranking import RankingProtocol
from funcppo.kg.run import budget, fit
from funcppo.kg.run.fit import Training, list_questions
from funcppo.kg.scores import evidence, learned, path_network
from funcppo.kg.scores.learned import LearnedScore
from funcppo.kg.search.task import build_task
from tests.kg.run import runs
from tests.learning import assert_trees_equal

PLAIN = QuestionConfig(left_out="fact")
OVER = Deadline(at=0.0, clock=lambda: 1.0)


@pytest.fixture(scope="module")
def task():
    settings = ProverTaskConfig(
        max_height=1, smoothing=5.0, object_identity=True
    )
    return build_task(runs.seating(), settings)


@pytest.fixture(scope="module")
def collected(task):
    return list_questions(task, fit.set_up(task, PLAIN), PLAIN, 0)


@pytest.fixture(scope="module")
def setup(collected):
    return collected[0]


@pytest.fixture(scope="module")
def start(setup):
    return fit.untrained_params(setup)


def valid_mrr(task, setup, params):
    score = LearnedScore("evidence", fit.make_weights(task, setup, params))
    both = RankingProtocol(sides=(HEAD, TAIL))
    ranked = ranking.rank_split(task, task.dataset.valid, score, both)
    return float(fit.reciprocal_ranks(ranked).mean())


# -- the questions


def test_every_fact_that_a_rule_derives_is_asked_twice(task, collected):
    setup, n_questions, note = collected
    n_beside = sum(
        task.dataset.predicates[p - 1] == "beside"
        for p in task.dataset.facts[:, 0]
    )
    assert n_questions == 2 * len(task.dataset.facts)
    assert len(setup.world.question) == 2 * n_beside
    assert f"the answers of {2 * n_beside:,} " in note
    answers = setup.world.evidence.answer[setup.world.question]
    assert (answers >= 0).all()


def test_a_known_answer_is_no_wrong_answer_but_one_of_valid_is(task, setup):
    """What valid holds is unknown in training."""
    found = setup.world.evidence
    known = {tuple(fact) for fact in task.dataset.facts.tolist()}
    valid = {tuple(fact) for fact in task.dataset.valid.tolist()}
    asked = evidence.training_questions(evidence.binary_facts(task.kb))
    order = random.permutation(random.key(0), len(asked.entity))
    asked = select_rows(asked, order)
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
    cfg = replace(PLAIN, max_questions=100, max_size_quantile=0.0)
    few, n_questions, note = list_questions(
        task, fit.set_up(task, PLAIN), cfg, 0
    )
    listed, rows = few.world.evidence, few.world.question
    n_firings = learned.capacity(listed, rows).n_firings
    assert n_questions == 100 and "100 of" in note
    assert f"more than {n_firings:,} firings and were left out" in note


def test_the_bounds_end_the_list_and_questions_repeat_it(task, monkeypatch):
    monkeypatch.setattr(derive, "PILOT_QUESTIONS", 16)
    monkeypatch.setattr(derive, "MAX_CHUNK_GROUNDINGS", 200)
    setup = fit.set_up(task, PLAIN)
    shown = []
    cfg, show = replace(PLAIN, max_firings=100), lambda *x: shown.append(x[1:])
    late = Deadline(at=60.0, clock=lambda: 0.0)
    bounded, n, note = list_questions(task, setup, cfg, 3, show, late)
    assert "with more than 100 firings" in note and note.kind == "cut"
    n_all = shown[0][1]
    assert 16 < n < n_all and shown[-1][:2] == (n, n_all)
    assert shown[-1][2].seconds_left == 60.0
    cfg = replace(PLAIN, max_questions=n)
    again, n_again, note = list_questions(task, setup, cfg, 3)
    assert n_again == n and note.kind == "detail"
    assert_trees_equal(bounded.world, again.world, rtol=0, atol=0)
    # What is listed is kept where more are asked.
    few = list_questions(task, setup, PLAIN, 3, most=40)[0]
    more = list_questions(task, few, PLAIN, 3, most=n)[0]
    assert_trees_equal(more.world, again.world, rtol=0, atol=0)
    _, n_late, note = list_questions(task, setup, PLAIN, 3, deadline=OVER)
    assert "within 0 seconds" in note and n_late == 16


def test_without_a_derived_answer_there_is_nothing_to_learn():
    graph = loaders.from_triples(
        [("a", "p", "b"), ("c", "q", "d")], rules="p(X, Y) :- q(X, Y)"
    )
    cfg = ProverTaskConfig(max_height=1, smoothing=5.0, object_identity=False)
    task = build_task(graph, cfg)
    with pytest.raises(ValueError, match="no rule derives a known fact"):
        list_questions(task, fit.set_up(task, PLAIN), PLAIN, 0)


def test_what_is_left_out_follows_the_links_of_valid(task):
    assert fit.resolve_left_out(task, QuestionConfig()).left_out == "pair"
    for valid in (task.dataset.train[:1], task.dataset.train[:0]):
        other = replace(task, dataset=replace(task.dataset, valid=valid))
        assert fit.resolve_left_out(other, QuestionConfig()).left_out == "fact"
    set_ = QuestionConfig(left_out="pair")
    assert fit.resolve_left_out(task, set_) is set_


# -- the listwise fit


def test_a_batch_that_is_computed_in_parts_has_the_same_gradient(setup, start):
    """In float32 sums of another order differ by their rounding."""
    question = setup.world.question[:40]
    size = learned.capacity(setup.world.evidence, question)
    of_parts = budget.batch_firings(7, size)
    assert of_parts < ListwiseConfig().max_batch_firings
    arguments = setup.weighed, setup.world, start
    gradients = [
        fit.batch_gradient(
            *arguments, ListwiseConfig(max_batch_firings=n), question
        )
        for n in (4_000_000, of_parts, 1)
    ]
    for parts in gradients[1:]:
        tree.map(torch.testing.assert_close, parts, gradients[0])


def test_the_listwise_loss_learns_what_a_link_says(task, setup, start):
    before = valid_mrr(task, setup, start)
    cfg = ListwiseConfig(n_epochs=4, batch_size=32, learning_rate=0.1)
    one, other = (fit.fit_training(setup, cfg, 0).run() for _ in range(2))
    assert before < 0.9 and valid_mrr(task, setup, one.params) > before + 0.1
    assert all(map(torch.equal, one.params, other.params))
    again = fit.fit_training(setup, cfg, 0, one.params)
    weights = again.state.params.linked_weight
    assert torch.equal(weights, one.params.linked_weight)


def shares_of(n_steps, seconds, n_first=0):
    """The shares of the learning rate at each step of a training, which take a second each."""
    now, shares = [0.0], []

    def take(batch, share, state):
        now[0] += 1.0
        shares.append(round(share, 3))
        return state + batch

    batches = (torch.ones(()) for _ in range(n_steps))
    training = Training("steps", take, torch.zeros(()), batches, n_steps)
    for _ in range(n_first):
        training._make(1.0)
    deadline = Deadline(at=now[0] + seconds, clock=lambda: now[0])
    assert int(training.run(deadline=deadline)) == training.n_made
    assert training.is_run and training.n_made == len(shares)
    return shares


def test_a_rate_falls_with_the_steps_or_with_the_time_whichever_is_further():
    assert shares_of(4, math.inf) == [1.0, 0.75, 0.5, 0.25]
    assert shares_of(4, 40.0) == [1.0, 0.75, 0.5, 0.25]
    assert shares_of(100, 4.0) == [1.0, 0.75, 0.5, 0.25]
    assert shares_of(4, 0.0) == [1.0]
    # The first steps, which tell the time, are steps of the training.
    assert shares_of(4, 40.0, 2) == [1.0, 0.75, 0.5, 0.25]
    assert shares_of(100, 2.0, 2) == [1.0, 0.99, 0.98, 0.5]


def test_a_slow_first_step_does_not_tell_the_seconds_of_all():
    """It loads what computes it."""

    def take(batch, share, state):
        time.sleep(0.0 if state else 0.6)
        return state + batch

    batches = (torch.ones(()) for _ in range(100))
    training = Training("steps", take, torch.zeros(()), batches, 100)
    assert training.seconds < 10.0


def test_the_first_steps_tell_the_seconds_of_all(setup, colours, chains):
    cfg = ListwiseConfig(n_epochs=8, batch_size=32)
    for training in (
        fit.fit_training(setup, cfg, 0),
        fit.embedding_training(colours, EMBEDDING, "fact", 0),
        fit.network_training(chains, NETWORK, "fact", 0),
    ):
        assert training.seconds == training.step_seconds * training.n_steps > 0
        assert 1 < training.n_made <= fit.MAX_FIRST_STEPS
        n_made = training.n_made
        training.run(deadline=OVER)
        assert training.n_made == n_made + 1


def test_the_time_of_valid_queries_is_that_of_their_candidates_too(
    task, setup, monkeypatch
):
    """A hub has few rules and many candidates."""
    now, list_split = [0.0], ranking.list_split

    def listed(task, split, *args, **named):
        now[0] += len(split)
        return list_split(task, split, *args, **named)

    monkeypatch.setattr(ranking, "list_split", listed)
    monkeypatch.setattr(fit.time, "monotonic", lambda: now[0])
    queries = task.dataset.facts[:40]
    for seconds, expected in ((0.5, 1), (5.0, 8), (100.0, 40)):
        found = fit.count_queries_within(
            task, setup.facts, queries, 1e9, 1e9, seconds
        )
        assert found == expected


def test_weights_are_widened_by_zeros(setup, start):
    wide = fit.with_weights_of(setup, uses_embedding=True)
    params = tree.map(lambda x: x + 1.0, start)
    found = fit.widened(wide, params)
    assert torch.equal(found.linked_weight, params.linked_weight)
    assert not found.prior_weight.any() and len(found.prior_weight)


# -- link embeddings

EMBEDDING = EmbeddingConfig(
    rank=8, n_folds=2, n_epochs=25, batch_size=32, learning_rate=0.05
)
NETWORK = BellmanFordConfig(
    width=8, n_layers=2, n_steps=100, batch_size=8, learning_rate=0.02
)


SETTINGS = ProverTaskConfig(max_height=1, smoothing=5.0)


@pytest.fixture(scope="module")
def colours():
    """Who likes whom."""
    return build_task(runs.colours(), SETTINGS)


@pytest.fixture(scope="module")
def chains():
    """Chains of three persons."""
    return build_task(runs.elders(24), SETTINGS)


def test_a_seed_gives_the_same_numbers_another_others(colours, chains):
    embedding = replace(EMBEDDING, n_epochs=1)
    network = replace(NETWORK, n_steps=2)
    for make, task, cfg in (
        (fit.embedding_training, colours, embedding),
        (fit.network_training, chains, network),
    ):
        one, same, other = (
            make(task, cfg, "fact", seed).run().params for seed in (0, 0, 1)
        )
        leaves = [tree.ravel(x) for x in (one, same, other)]
        assert torch.equal(leaves[0], leaves[1])
        assert not torch.equal(leaves[0], leaves[2])


def test_nothing_is_asked_or_trained_about_further_facts():
    triples = [("a", "r", "b"), ("b", "r", "c"), ("c", "s", "a")]
    triples += [("a", "s", "c"), ("b", "s", "c")]
    known = loaders.from_triples(triples, rules="r(X,Y) :- s(Y,X)")
    dataset = replace(known, train=known.train[:3])
    task = build_task(dataset, ProverTaskConfig(max_height=1))
    asked = fit.training_facts(task)
    assert sorted(asked.tolist()) == sorted(dataset.train.tolist())
    n_labels = evidence.n_labels(task.sizes)
    sizes = path_network.network_config(
        BellmanFordConfig(), task.sizes.n_constants, n_labels
    )
    facts = evidence.binary_facts(task.kb)
    for left_out in ("fact", "pair"):
        graph = path_network.build_graph(sizes, facts, left_out)
        edges = path_network.edges_of(sizes, graph, asked)
        questions = path_network.edge_questions(graph, edges)
        of_train = path_network.build_graph(sizes, asked, left_out)
        every = torch.arange(len(of_train.edge_target))
        expected = path_network.edge_questions(of_train, every)
        found, wanted = (
            torch.stack(x, 1).tolist() for x in (questions, expected)
        )
        assert sorted(found) == sorted(wanted)
