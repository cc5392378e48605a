"""Answers in names: proofs of facts from other facts, where T_P is held in part too; queries as text."""

import dataclasses

import pytest
import torch

from funcppo.core import random
from funcppo.kg.graph import loaders
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.ranking.prediction import OpenQuery
from funcppo.kg.run.answers import (
    Answerer,
    format_query,
    read_open_query,
    score_atoms,
)
from funcppo.kg.run.subject import dataset_subject
from funcppo.kg.scores import link_embedding
from funcppo.kg.scores.question_config import EmbeddingConfig
from funcppo.kg.search.config import ProverTaskConfig

CFG = ProverTaskConfig(max_height=1, smoothing=5.0)


def small_dataset():
    triples = [("a", "q", "b"), ("a", "q", "c"), ("a", "p", "b")]
    triples += [("d", "p", "e"), ("b", "q", "a")]
    return loaders.from_triples(triples, rules="p(X, Y) :- q(X, Y).")


@pytest.fixture(params=[False, True], ids=["whole", "in part"])
def answerer(request):
    """Of T_P, or of the part of it that valid and test ask for, which is nothing."""
    cfg = dataclasses.replace(CFG, max_atoms=6) if request.param else CFG
    subject = dataset_subject(small_dataset(), cfg, "max-confidence")
    assert subject.task.least_model.complete != request.param
    return Answerer(subject)


def test_each_answer_has_a_name_a_verdict_and_a_proof(answerer):
    query, _ = read_open_query(answerer.dataset, "p(a, X)")
    (found,) = answerer.answer([query], with_known=True, with_explanations=True)
    assert (found.n_new, found.n_known, found.n_entities) == (1, 1, 5)
    by_name = {answer.entity: answer for answer in found.answers}
    assert {name: (a.known, a.verdict) for name, a in by_name.items()} == {
        "b": (True, "proved"),
        "c": (False, "proved"),
    }
    for name, answer in by_name.items():
        lines = answer.explanation.to_lines()
        # In a list the proof is shown, not the data set.
        assert repr(answer).endswith("\n".join(lines) + ")")
        assert lines[0].startswith(f"p(a, {name})") and "q(a, " in lines[1]
        assert answer.to_json()["proof"]["nodes"][0]["rule"] == 0


def test_a_fact_without_other_facts_is_not_derivable(answerer):
    query, _ = read_open_query(answerer.dataset, "p(X, e)")
    (found,) = answerer.answer([query], with_known=True, with_explanations=True)
    (answer,) = found.answers
    assert (answer.entity, answer.known) == ("d", True)
    assert (answer.verdict, answer.score) == ("not derivable", 0.0)
    assert answer.log_score is None and answer.explanation is None


def test_an_entity_that_no_rule_derives_has_no_answers(answerer):
    query, _ = read_open_query(answerer.dataset, "q(c, X)")
    assert answerer.answer([query])[0].answers == ()


@pytest.mark.parametrize(
    ("text", "side", "given"), [("p(a, ?x)", TAIL, "a"), ("p(_, e)", HEAD, "e")]
)
def test_a_query_is_read_and_written(text, side, given):
    dataset = small_dataset()
    query, _ = read_open_query(dataset, text)
    predicate = dataset.predicates.index("p") + 1
    entity = dataset.entities.index(given) + 1
    assert query == OpenQuery(predicate, side, entity)
    expected = "p(a, X)" if side == TAIL else "p(X, e)"
    assert format_query(dataset, query) == expected


def test_a_query_of_a_program_has_two_arguments():
    program = loaders.from_text("p(a). q(a, b). q(X, X) :- p(X).")
    with pytest.raises(ValueError, match="expected two arguments"):
        read_open_query(program, "p(X)")
    subject = dataset_subject(program, CFG, "max-confidence")
    query, _ = read_open_query(subject.task.dataset, "q(X, a)")
    (found,) = Answerer(subject).answer([query])
    assert [answer.entity for answer in found.answers] == ["a"]


def test_atoms_are_scored_as_answers_are():
    subject = dataset_subject(small_dataset(), CFG, "noisy-or")
    answerer = Answerer(subject)
    query, _ = read_open_query(answerer.dataset, "p(a, X)")
    (found,) = answerer.answer([query], with_known=True)
    ids = {name: i for i, name in enumerate(answerer.dataset.entities, 1)}
    rows = [[query.predicate, ids["a"], ids[a.entity]] for a in found.answers]
    scores = score_atoms(subject, torch.tensor(rows), TAIL)
    assert scores == [answer.score for answer in found.answers]


@pytest.fixture
def with_embedding(answerer):
    """The answerer with link embeddings of two models, of which the last has seen all facts."""
    n_entities, n_labels = 5, 2 * 2 + 2
    embedding = link_embedding.init(
        EmbeddingConfig(rank=3, n_folds=1), n_entities, n_labels, random.key(0)
    )
    subject = answerer.subject._replace(embedding=embedding)
    return Answerer(subject)


@pytest.mark.parametrize(
    ("text", "side"), [("p(a, X)", TAIL), ("q(X, b)", HEAD)]
)
def test_unproved_answers_follow_all_others_by_their_prior(
    with_embedding, text, side
):
    dataset = with_embedding.dataset
    query, _ = read_open_query(dataset, text)
    (proved,) = with_embedding.answer([query], k=None)
    (found,) = with_embedding.answer([query], k=None, with_unproved=True)
    n = len(proved.answers)
    assert found.answers[:n] == proved.answers
    unproved = found.answers[n:]
    # Neither derivable nor known, nor the query's own entity: of no triple both arguments are the same.
    known = {"p(a, X)": {"a", "b", "c"}, "q(X, b)": {"a", "b"}}[text]
    names = {answer.entity for answer in unproved}
    assert names == set(dataset.entities) - known
    assert found.n_unproved == len(names)

    entity = torch.tensor(
        [dataset.entities.index(a.entity) + 1 for a in unproved]
    )
    prior = link_embedding.prior(
        with_embedding.subject.embedding,
        torch.full_like(entity, 1),
        torch.full_like(entity, 2 * query.predicate + side - HEAD),
        torch.full_like(entity, query.given),
        entity,
    )
    assert [a.prior for a in unproved] == pytest.approx(prior.tolist())
    assert prior.tolist() == sorted(prior.tolist(), reverse=True)
    assert [a.rank for a in unproved] == list(range(n + 1, n + 1 + len(names)))
    for answer in unproved:
        assert (answer.verdict, answer.score) == ("unproved", 0.0)
        assert not answer.known and answer.explanation is None
        assert answer.to_json()["prior"] == answer.prior
    assert all("prior" not in a.to_json() for a in proved.answers)
    assert "n_unproved" not in proved.to_json()


def test_unproved_answers_fill_up_what_k_leaves(with_embedding):
    query, _ = read_open_query(with_embedding.dataset, "p(a, X)")
    for k, verdicts in {
        1: ["proved"],
        2: ["proved", "unproved"],
        9: ["proved", "unproved", "unproved"],
    }.items():
        (found,) = with_embedding.answer([query], k=k, with_unproved=True)
        assert [answer.verdict for answer in found.answers] == verdicts
        assert found.n_unproved == 2


def test_known_answers_and_the_own_entity_are_listed_once_at_most(
    with_embedding,
):
    query, _ = read_open_query(with_embedding.dataset, "p(X, e)")
    (found,) = with_embedding.answer(
        [query], with_known=True, with_self=True, with_unproved=True
    )
    verdicts = {a.entity: a.verdict for a in found.answers}
    assert len(found.answers) == 5
    assert verdicts == {"d": "not derivable"} | dict.fromkeys(
        "abce", "unproved"
    )


def test_without_link_embeddings_there_are_no_unproved_answers(answerer):
    query, _ = read_open_query(answerer.dataset, "p(a, X)")
    with pytest.raises(ValueError, match="expected a run with link embeddings"):
        answerer.answer([query], with_unproved=True)
