"""Proofs by a run that learns from questions: the rule with the largest share, one by one and many at a time."""

from __future__ import annotations

import pytest
import torch

from funcppo.evaluation import explain
from funcppo.evaluation.evidence_ranking import MIN_CHUNK_QUERIES
from funcppo.experiment import run_proofs, run_start
from funcppo.experiment.config import RunConfig
from funcppo.logic.triple_index import HEAD, TAIL
from funcppo.prover.config import ProverTaskConfig
from funcppo.prover.question_config import ListwiseConfig, QuestionConfig

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


@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_many_proofs_are_those_of_single_answers(run, order, monkeypatch):
    split = run.task.dataset.test
    program = explain.build_program(run.task)
    prove = run_proofs.SplitProofs(run, split, program)
    sizes = []
    best_rules = run_proofs._best_rules

    def count(run, atoms):
        sizes.append(len(atoms))
        return best_rules(run, atoms)

    monkeypatch.setattr(run_proofs, "_best_rules", count)
    rows = split if order == "ascending" else split[::-1]
    for row in rows:
        atom = torch.from_numpy(row.copy())
        one = run_proofs.most_probable_proof(run, atom.long(), program)
        other = prove(atom)
        if one is None or other is None:
            assert one is other
            continue
        assert one.nodes[0].rule == other.nodes[0].rule
        assert one.nodes[0].probability == pytest.approx(
            other.nodes[0].probability, abs=1e-6
        )
    # Only what is asked for in order is worth solving ahead.
    assert max(sizes) <= MIN_CHUNK_QUERIES
    assert (max(sizes) > 1) == (order == "ascending")
