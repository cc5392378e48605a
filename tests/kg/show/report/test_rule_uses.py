"""Rules before and after learning: confidences without training, what the policy gives with it, counts of proofs."""

import dataclasses

import pytest
import torch

from funcppo.core import tree
from funcppo.kg import answers
from funcppo.kg.ranking import explain
from funcppo.kg.run import run_start
from funcppo.kg.show.report.tables import rule_uses


def opened(runs, name):
    """A run, the atoms of its test split that rules derive, and their proofs."""
    run = run_start.open_run(runs[name])
    atoms = torch.from_numpy(run.task.dataset.test[:-2]).long()
    found = [answers.most_probable_proof(run, atom) for atom in atoms]
    atoms = atoms[[proof is not None for proof in found]]
    return run, atoms, [proof for proof in found if proof]


def test_untrained_evidence_stands_for_the_confidence(runs):
    """The weights before training give a rule the odds of its confidence."""
    run, atoms, proofs = opened(runs, "questions")
    smoothing = run.task.cfg.smoothing or 0.0
    uses = rule_uses(run, atoms, proofs)
    assert sum(use.n_proofs for use in uses) == len(proofs) > 0
    for use in uses:
        smoothed = use.support / (use.body_pairs + smoothing)
        assert use.before == pytest.approx(min(smoothed, 0.999), rel=1e-4)


def test_a_policy_that_is_not_trained_keeps_its_choices(runs):
    run, atoms, proofs = opened(runs, "proofs")
    trained = rule_uses(run, atoms, proofs)
    moved = tree.map(lambda x: x + 0.1, run.state.start_params)
    for params, is_kept in ((run.state.start_params, True), (moved, False)):
        state = run.state._replace(best_params=params)
        uses = rule_uses(dataclasses.replace(run, state=state), atoms, proofs)
        assert [use.before for use in uses] == [use.before for use in trained]
        assert all(use.before == use.after for use in uses) == is_kept


def test_choices_of_a_policy_are_those_of_its_proofs(runs):
    run, atoms, proofs = opened(runs, "proofs")
    choices = explain.rule_choices(
        run.task, run.cfg, run.state.best_params, atoms[:1]
    )
    probability = dict(zip(choices.rule.tolist(), choices.probability.tolist()))
    root = proofs[0].nodes[0]
    assert probability[root.rule] == pytest.approx(root.probability, rel=1e-5)


def test_no_atoms_use_no_rules(runs):
    run, atoms, _ = opened(runs, "questions")
    assert rule_uses(run, atoms[:0], []) == ()
