"""Proofs by a run that learns from questions: the rule with the largest share, one by one and many at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from funcppo.kg.graph import loaders
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.ranking import explain
from funcppo.kg.run import run_proofs, run_start
from funcppo.kg.run.config import RunConfig
from funcppo.kg.scores.question_config import ListwiseConfig, QuestionConfig
from funcppo.kg.search.config import ProverTaskConfig

CONFIG = RunConfig(
    dataset="family_tree:60:0",
    steps=64,
    n_validation_queries=20,
    prover=ProverTaskConfig(max_height=1, smoothing=5.0, object_identity=False),
    questions=QuestionConfig(max_questions=100, degrees=False),
    listwise=ListwiseConfig(n_epochs=1, batch_size=32),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    run = run_start.prepare_run(CONFIG, folder, resume=False)
    assert run.run_config.learner == "questions"
    return run


def test_a_proof_uses_the_rule_that_adds_most(run):
    n_proved = 0
    for row in run.task.dataset.test:
        atom = torch.from_numpy(row).long()
        proof = run_proofs.most_probable_proof(run, atom)
        explanation = run_proofs.explain_answer(run, atom, TAIL)
        assert (proof is None) == (explanation is None)
        if proof is not None:
            root = proof.nodes[0]
            assert root.rule == explanation.rules[0].rule
            assert root.probability == explanation.rules[0].share
            n_proved += 1
            assert run_proofs.explain_answer(run, atom, HEAD) is not None
    assert n_proved > 5


def test_many_proofs_are_those_of_single_answers(run):
    split = torch.from_numpy(run.task.dataset.test.copy()).long()
    program = explain.build_program(run.task)
    proofs = run_proofs.most_probable_proofs(run, split, program)
    assert len(proofs) == len(split)
    for atom, many in zip(split, proofs):
        one = run_proofs.most_probable_proof(run, atom, program)
        if one is None or many is None:
            assert one is many
            continue
        assert one.nodes[0].rule == many.nodes[0].rule
        assert one.nodes[0].probability == pytest.approx(
            many.nodes[0].probability, abs=1e-6
        )


def test_answers_of_many_entities_are_proved(tmp_path, monkeypatch):
    """Two entities of 50,000 are no int32, which the atoms of a split are."""
    pairs = [(f"x{i}", f"y{i}") for i in range(25_000)]
    likes = [(x, "likes", y) for x, y in pairs]
    knows = [(x, "knows", y) for x, y in pairs[-60:]]
    graph = loaders.from_triples(
        likes + knows[:40],
        knows[40:50],
        knows[50:],
        rules="knows(X, Y) :- likes(X, Y)",
    )
    monkeypatch.setattr(loaders, "load", lambda *args, **kwargs: graph)
    options = replace(CONFIG.questions, max_questions=None)
    config = replace(CONFIG, questions=options)
    run = run_start.prepare_run(config, tmp_path, resume=False)
    assert run.run_config.learner == "questions"
    atoms = torch.from_numpy(graph.test.copy())
    assert atoms.dtype == torch.int32
    program = explain.build_program(run.task)
    proofs = run_proofs.most_probable_proofs(run, atoms, program)
    assert len(proofs) == 10 and all(proofs)
