"""Ranked answers of open queries: the candidates and scores of a ranking, known answers apart, T_P held in part."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch

from funcppo.kg.graph import loaders
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.ranking import prediction, rank_metrics, ranking, scorers
from funcppo.kg.ranking.candidates import RankingProtocol
from funcppo.kg.ranking.prediction import OpenQuery, make_predictor, probability
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.search.task import build_task

NOISY_OR = "noisy-or@3"


RULES = """p(X, Y) :- q(X, Y).
p(X, Y) :- q(X, Z), r(Z, Y).
q(X, Y) :- r(Y, X).
q(X, Y) :- p(X, Z), p(Z, Y).
r(X, Y) :- s(X, Y), q(X, X).
r(X, e3) :- s(X, e2).
"""


def random_dataset():
    """160 random triples of 4 relations over 14 entities, 20 of them in test."""
    rows = np.unique(
        np.random.default_rng(0).integers([14, 4, 14], size=(160, 3)), axis=0
    )
    order = np.random.default_rng(1).permutation(len(rows))
    triples = [
        (f"e{head}", "pqrs"[relation], f"e{tail}")
        for head, relation, tail in rows[order].tolist()
    ]
    return loaders.from_triples(triples[20:], test=triples[:20], rules=RULES)


def make_task(**settings):
    cfg = ProverTaskConfig(
        **{"max_height": 1, "smoothing": 5.0, "object_identity": False}
        | settings
    )
    return build_task(random_dataset(), cfg)


def predictor_of(task, score=NOISY_OR):
    return make_predictor(
        task, lambda task: scorers.make_untrained_scorer(task, score)
    )


def split_queries(task, split):
    return [
        (OpenQuery(int(row[0]), side, int(row[HEAD + TAIL - side])), row)
        for side in (HEAD, TAIL)
        for row in split
    ]


@pytest.mark.parametrize("height", [1, 2])
@pytest.mark.parametrize("score", [NOISY_OR, "max-confidence"])
def test_candidates_and_scores_are_those_of_a_ranking(height, score):
    task = make_task(max_height=height)
    split = task.dataset.test
    ranked = ranking.rank_split(
        task,
        split,
        scorers.make_untrained_scorer(task, score),
        RankingProtocol(),
    )
    queries = split_queries(task, split)
    answers = predictor_of(task, score).rank([query for query, _ in queries])
    n_listed = 0
    for i, found in enumerate(answers):
        others = (ranked.listed_row == i) & ~ranked.is_answer
        expected = ranked.listed_score[others].sort(descending=True).values
        assert found.score.tolist() == expected.tolist()
        n_listed += len(expected)
    assert n_listed > 50  # not about nothing


def test_known_answers_are_marked_and_have_their_score_in_a_ranking():
    task = make_task()
    split = task.dataset.test
    ranked = ranking.rank_split(
        task,
        split,
        scorers.make_untrained_scorer(task, NOISY_OR),
        RankingProtocol(),
    )
    queries = split_queries(task, split)
    answers = predictor_of(task).rank(
        [query for query, _ in queries], with_known=True
    )
    for i, ((query, row), found) in enumerate(zip(queries, answers)):
        place = found.entity.tolist().index(int(row[query.side]))
        assert bool(found.is_known[place])
        assert int(found.score[place]) == int(ranked.answer_score[i])
        assert bool(found.is_derivable[place]) == bool(
            ranked.answer_provable[i]
        )
        assert found.n_known == int(found.is_known.sum())
        assert found.n_new == int((~found.is_known).sum())


def test_a_fact_is_derived_from_other_facts_only():
    dataset = loaders.from_triples(
        [("a", "p", "b"), ("a", "q", "b"), ("a", "q", "c"), ("d", "p", "e")],
        rules="p(X, Y) :- q(X, Y).\np(X, Y) :- p(X, Y).",
    )
    task = build_task(dataset, ProverTaskConfig(max_height=1))
    p, a, d = 1, 1, dataset.entities.index("d") + 1
    found, of_d = predictor_of(task, "max-confidence").rank(
        [OpenQuery(p, TAIL, a), OpenQuery(p, TAIL, d)], with_known=True
    )
    names = [dataset.entities[i - 1] for i in found.entity.tolist()]
    assert dict(zip(names, found.is_known.tolist())) == {"b": True, "c": False}
    assert found.is_derivable.all() and found.n_new == 1
    # p(d, e) follows from itself alone.
    assert of_d.is_known.tolist() == [True]
    assert of_d.is_derivable.tolist() == [False]
    assert of_d.score.tolist() == [rank_metrics.ZERO_SCORE]


@pytest.mark.parametrize("score", [NOISY_OR, "exists@1"])
@pytest.mark.parametrize("with_known", [False, True])
@pytest.mark.parametrize("max_questions", [0, 10**6])
def test_the_answers_are_the_same_where_t_p_is_held_in_part(
    score, with_known, max_questions, monkeypatch
):
    """Also to queries that neither valid nor test asks; whether derivations are found by questions or by rules."""
    monkeypatch.setattr(prediction, "MAX_INDEX_QUESTIONS", max_questions)
    whole = make_task()
    n_atoms = len(whole.least_model.atoms)
    part = make_task(max_atoms=n_atoms - 1)
    assert whole.least_model.complete and not part.least_model.complete
    n_constants = whole.dataset.n_constants
    queries = [
        OpenQuery(predicate, side, given)
        for predicate in range(1, whole.dataset.n_predicates + 1)
        for side in (HEAD, TAIL)
        for given in range(1, n_constants + 1)
    ]
    rank = partial(predictor_of(whole, score).rank, with_known=with_known)
    for expected, found in zip(
        rank(queries),
        predictor_of(part, score).rank(queries, with_known=with_known),
    ):
        for x, y in zip(expected, found):
            if isinstance(x, torch.Tensor):
                assert x.tolist() == y.tolist()
            else:
                assert x == y


def test_equal_scores_share_the_rank_of_the_first():
    dataset = loaders.from_triples(
        [("a", "q", x) for x in "bcd"]
        + [("a", "s", "b"), ("a", "s", "c"), ("z", "p", "b"), ("z", "s", "b")],
        rules="p(X, Y) :- q(X, Y).\np(X, Y) :- s(X, Y).",
    )
    task = build_task(dataset, ProverTaskConfig(max_height=1, smoothing=5.0))
    p = dataset.predicates.index("p") + 1
    (found,) = predictor_of(task, "noisy-or").rank([OpenQuery(p, TAIL, 1)])
    names = [dataset.entities[i - 1] for i in found.entity.tolist()]
    assert (names, found.rank.tolist()) == (["b", "c", "d"], [1, 1, 3])


LOOP_RULES = """p(X, Y) :- q(X, Y).
s(X, Y) :- q(X, Y).
t(X, X) :- q(X, Y).
"""


@pytest.mark.parametrize("max_atoms", [None, 5])
@pytest.mark.parametrize("side", [HEAD, TAIL])
def test_the_entity_of_a_query_is_left_out_where_nothing_says_that_it_may_be(
    max_atoms, side
):
    """p: no loop is known. s: one is, in test. t: a rule says so. T_P is held whole or in part."""
    dataset = loaders.from_triples(
        [("a", "q", "a"), ("a", "q", "b"), ("b", "q", "a"), ("b", "p", "z")],
        test=[("z", "s", "z")],
        rules=LOOP_RULES,
    )
    cfg = ProverTaskConfig(max_height=1, smoothing=5.0, object_identity=False)
    if max_atoms:
        cfg = dataclasses.replace(cfg, max_atoms=max_atoms)
    task = build_task(dataset, cfg)
    assert task.least_model.complete == (max_atoms is None)
    predictor = predictor_of(task, "max-confidence")
    queries = [
        OpenQuery(dataset.predicates.index(name) + 1, side, 1) for name in "pst"
    ]
    with_self = predictor.rank(queries)
    found = predictor.rank(queries, with_self=False)
    assert [answers.n_self for answers in with_self] == [0, 0, 0]
    assert [answers.n_self for answers in found] == [1, 0, 0]
    assert [answers.n_new for answers in found] == [1, 2, 1]

    # The scores of the others do not change, and their ranks are among those listed.
    for kept, left in zip(with_self, found):
        is_listed = torch.isin(kept.entity, left.entity)
        assert left.entity.tolist() == kept.entity[is_listed].tolist()
        assert left.score.tolist() == kept.score[is_listed].tolist()
    assert with_self[0].rank.tolist() == [1, 1] and found[0].rank[0] == 1


def test_repeated_queries_are_answered_in_the_order_asked():
    task = make_task()
    queries = [query for query, _ in split_queries(task, task.dataset.test)][:5]
    asked = [*queries[::-1], queries[0]]
    found = predictor_of(task).rank(asked)
    assert [answers.query for answers in found] == asked


def test_a_score_is_a_probability():
    assert probability(rank_metrics.ZERO_SCORE) == 0
    assert probability(rank_metrics.CERTAIN_SCORE) == 1
    assert probability(0) == 0.5
    log_odds = torch.tensor([-40.0, -3.0, 2.0, 12.0], dtype=torch.float64)
    for x, score in zip(log_odds, rank_metrics.quantise(log_odds).tolist()):
        assert probability(score) == pytest.approx(
            float(torch.sigmoid(x)), rel=1e-9
        )
