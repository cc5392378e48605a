"""Answers in names: proofs of facts from other facts, where T_P is held in part too; queries as text."""

import dataclasses

import pytest
import torch

from funcppo import data
from funcppo.evaluation.prediction import OpenQuery
from funcppo.experiment.answers import (
    Answerer,
    format_query,
    read_open_query,
    score_atoms,
)
from funcppo.experiment.subject import dataset_subject
from funcppo.logic.triple_index import HEAD, TAIL
from funcppo.prover.config import ProverTaskConfig

CFG = ProverTaskConfig(max_height=1, smoothing=5.0)


def small_dataset():
    triples = [("a", "q", "b"), ("a", "q", "c"), ("a", "p", "b")]
    triples += [("d", "p", "e"), ("b", "q", "a")]
    return data.from_triples(triples, rules="p(X, Y) :- q(X, Y).")


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
    program = data.from_text("p(a). q(a, b). q(X, X) :- p(X).")
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
