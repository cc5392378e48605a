"""Answers: the candidates and scores of a ranking, derived by query too; names and proofs."""

from functools import partial

import numpy as np
import pytest
import torch

from funcppo.kg.answers import Answerer, OpenQuery, read_open_query
from funcppo.kg.config import ProverTaskConfig
from funcppo.kg.graph import loaders
from funcppo.kg.logic.kb import HEAD, TAIL
from funcppo.kg.ranking import rank_metrics
from funcppo.kg.run.subject import Subject, dataset_subject
from funcppo.kg.scores.score import parse
from funcppo.kg.search.task import build_task
from tests.kg.ranking.scores import FunctionScore

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
    drawn = np.random.default_rng(0).integers([14, 4, 14], size=(160, 3))
    rows = np.unique(drawn, axis=0)
    order = np.random.default_rng(1).permutation(len(rows))
    triples = [
        (f"e{head}", "pqrs"[relation], f"e{tail}")
        for head, relation, tail in rows[order].tolist()
    ]
    return loaders.from_triples(triples[20:], test=triples[:20], rules=RULES)


def make_task(with_derivations):
    cfg = ProverTaskConfig(max_height=1, smoothing=5.0, object_identity=False)
    return build_task(random_dataset(), cfg, with_derivations=with_derivations)


def answerer_of(task, score=NOISY_OR):
    return Answerer(Subject(task, parse(score), None, []))


@pytest.mark.parametrize("score", [NOISY_OR, "exists@1"])
@pytest.mark.parametrize("with_known", [False, True])
def test_answers_are_the_same_where_a_query_derives_them(score, with_known):
    whole, part = make_task(True), make_task(False)
    assert whole.least_model.complete and not part.least_model.complete
    n_constants = whole.dataset.n_constants
    queries = [
        OpenQuery(predicate, side, given)
        for predicate in range(1, whole.dataset.n_predicates + 1)
        for side in (HEAD, TAIL)
        for given in range(1, n_constants + 1)
    ]
    rank = partial(answerer_of(whole, score).rank, with_known=with_known)
    for expected, found in zip(
        rank(queries),
        answerer_of(part, score).rank(queries, with_known=with_known),
    ):
        for x, y in zip(expected, found):
            if isinstance(x, torch.Tensor):
                # of what rules derive there is no prior
                np.testing.assert_array_equal(x, y)
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
    (found,) = answerer_of(task, "noisy-or").rank([OpenQuery(p, TAIL, 1)])
    names = [dataset.entities[i - 1] for i in found.entity.tolist()]
    assert (names, found.rank.tolist()) == (["b", "c", "d"], [1, 1, 3])


LOOP_RULES = """p(X, Y) :- q(X, Y).
s(X, Y) :- q(X, Y).
t(X, X) :- q(X, Y).
"""


@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize("side", [HEAD, TAIL])
def test_the_entity_of_a_query_may_be_no_answer(is_held, side):
    """p: no loop is known. s: one is, in test. t: a rule says so. T_P is held whole or in part."""
    dataset = loaders.from_triples(
        [("a", "q", "a"), ("a", "q", "b"), ("b", "q", "a"), ("b", "p", "z")],
        test=[("z", "s", "z")],
        rules=LOOP_RULES,
    )
    cfg = ProverTaskConfig(max_height=1, smoothing=5.0, object_identity=False)
    task = build_task(dataset, cfg, with_derivations=is_held)
    assert task.least_model.complete == is_held
    answerer = answerer_of(task, "max-confidence")
    queries = [
        OpenQuery(dataset.predicates.index(name) + 1, side, 1) for name in "pst"
    ]
    with_self = answerer.rank(queries)
    found = answerer.rank(queries, with_self=False)
    assert [answers.n_self for answers in with_self] == [0, 0, 0]
    assert [answers.n_self for answers in found] == [1, 0, 0]
    assert [len(answers.entity) for answers in found] == [1, 2, 1]

    # The scores of the others do not change, and their ranks are among those listed.
    for kept, left in zip(with_self, found):
        is_listed = torch.isin(kept.entity, left.entity)
        assert left.entity.tolist() == kept.entity[is_listed].tolist()
        assert left.score.tolist() == kept.score[is_listed].tolist()
    assert with_self[0].rank.tolist() == [1, 1] and found[0].rank[0] == 1


def test_a_score_is_a_probability():
    assert rank_metrics.probability(rank_metrics.ZERO_SCORE) == 0
    assert rank_metrics.probability(rank_metrics.CERTAIN_SCORE) == 1
    assert rank_metrics.probability(0) == 0.5
    log_odds = torch.tensor([-40.0, -3.0, 2.0, 12.0], dtype=torch.float64)
    for x, score in zip(log_odds, rank_metrics.quantise(log_odds).tolist()):
        expected = pytest.approx(float(torch.sigmoid(x)), rel=1e-9)
        assert rank_metrics.probability(score) == expected


# -- in names

CFG = ProverTaskConfig(max_height=1, smoothing=5.0)


def small_dataset():
    triples = [("a", "q", "b"), ("a", "q", "c"), ("a", "p", "b")]
    triples += [("d", "p", "e"), ("b", "q", "a")]
    return loaders.from_triples(triples, rules="p(X, Y) :- q(X, Y).")


@pytest.fixture(params=[True, False], ids=["whole", "in part"])
def answerer(request):
    """Of T_P, or of what each query derives."""
    subject = dataset_subject(small_dataset(), CFG, "max-confidence")
    if request.param:
        subject = subject._replace(task=build_task(small_dataset(), CFG))
    assert subject.task.least_model.complete == request.param
    return Answerer(subject)


def test_each_answer_has_a_name_a_verdict_and_a_proof(answerer):
    query, _ = read_open_query(answerer.dataset, "p(a, X)")
    (found,) = answerer.answer([query], with_known=True, with_explanations=True)
    assert (found.n_new, found.n_known, found.n_entities) == (1, 1, 5)
    by_name = {answer.entity: answer for answer in found.answers}
    found = {name: (a.known, a.verdict) for name, a in by_name.items()}
    assert found == {"b": (True, "derived"), "c": (False, "derived")}
    for name, answer in by_name.items():
        lines = answer.explanation.to_lines()
        # In a list the proof is shown, not the data set.
        assert "explanation=" + "\n".join(lines) + ", label" in repr(answer)
        assert lines[0].startswith(f"p(a, {name})") and "q(a, " in lines[1]
        assert answer.to_json()["proof"]["nodes"][0]["rule"] == 0


def test_a_fact_without_other_facts_is_not_derivable(answerer):
    query, _ = read_open_query(answerer.dataset, "p(X, e)")
    (found,) = answerer.answer([query], with_known=True, with_explanations=True)
    (answer,) = found.answers
    assert (answer.entity, answer.known) == ("d", True)
    assert (answer.verdict, answer.score) == ("no proof", 0.0)
    assert answer.log_score is None and answer.explanation is None


def test_a_query_of_a_program_has_two_arguments():
    program = loaders.from_text("p(a). q(a, b). q(X, X) :- p(X).")
    with pytest.raises(ValueError, match="expected two arguments"):
        read_open_query(program, "p(X)")
    subject = dataset_subject(program, CFG, "max-confidence")
    query, _ = read_open_query(subject.task.dataset, "q(X, a)")
    (found,) = Answerer(subject).answer([query])
    assert [answer.entity for answer in found.answers] == ["a"]


class EveryEntity(FunctionScore):
    """Gives entity e the log-odds e / 8 - 1 without a proof."""

    knows_all = True

    def log_odds_of_all(self, questions):
        row = torch.arange(1, 6).double() / 8 - 1
        return row.repeat(len(questions.entity), 1)


@pytest.mark.parametrize("ranks_all", [False, True])
@pytest.mark.parametrize(
    ("text", "names"), [("p(a, X)", "de"), ("q(X, b)", "cde")]
)
def test_answers_without_a_proof_are_ranked(answerer, text, names, ranks_all):
    """Neither derivable nor known, nor the query's own entity: of no triple both arguments are the same."""
    others = EveryEntity(lambda atoms: torch.zeros(len(atoms)))
    others.ranks_all = ranks_all
    subject = answerer.subject._replace(others=others)
    if ranks_all:
        subject = subject._replace(score=others)
    every = Answerer(subject)
    query, _ = read_open_query(every.dataset, text)
    (proved,) = every.answer([query], k=None)
    (found,) = every.answer([query], k=None, with_unproved=True)
    got = [a for a in found.answers if a.verdict == "no proof"]
    assert [a.entity for a in got] == sorted(names, reverse=True)
    assert found.n_unproved == len(names)
    assert (found.n_new, found.n_self) == (proved.n_new, proved.n_self)
    ids = [every.dataset.entities.index(a.entity) + 1 for a in got]
    assert [a.prior for a in got] == [e / 8 - 1 for e in ids]
    n = len(proved.answers)
    if ranks_all:  # what rules derive has log-odds of 0
        scores = [0.5 for _ in range(n)] + [a.score for a in got]
        assert [a.score for a in found.answers] == sorted(scores)[::-1]
        for a in found.answers:
            assert a.rank == 1 + sum(a.score < b.score for b in found.answers)
    else:
        assert found.answers[:n] == proved.answers
        assert [a.rank for a in got] == list(range(n + 1, n + 1 + len(got)))
        assert all(a.score == 0.0 for a in got)
    for k in (1, 2, 9):
        (first,) = every.answer([query], k=k, with_unproved=True)
        assert first.answers == found.answers[:k]
    assert all("prior" not in a.to_json() for a in proved.answers)
    assert "n_unproved" not in proved.to_json()
    with pytest.raises(ValueError, match="unproved answers: expected a run"):
        answerer.answer([query], with_unproved=True)
