"""What scores candidates: which scores a run and a data set have, and what is chosen for a data set."""

from dataclasses import replace

import pytest
import torch

from funcppo import data
from funcppo.evaluation.settings_choice import choose_settings
from funcppo.experiment.subject import (
    check_untrained_score,
    dataset_subject,
    height_of_score,
    make_subject_predictor,
    run_subject,
)
from funcppo.prover.config import ProverTaskConfig

OPEN = ProverTaskConfig(
    max_height=None, smoothing="auto", object_identity="auto"
)


def test_a_data_set_has_what_its_valid_split_chooses():
    dataset = data.load("countries_s1")
    choice = choose_settings(dataset, OPEN)
    subject = dataset_subject(dataset, OPEN)
    assert subject.score == choice.score
    assert subject.task.cfg == choice.settings
    assert subject.policy_run is None


def test_a_run_has_its_own_score_by_default(run):
    state = run.state._replace(best_valid_metric=torch.tensor(1.0))
    run = replace(run, state=state)
    subject = run_subject(run)
    assert (subject.score, subject.policy_run) == ("best-proof", run)
    assert subject.notes == ["the run stands at update 0 of 4"]
    untrained = run_subject(run, "noisy-or")
    assert (untrained.score, untrained.policy_run) == ("noisy-or", None)
    assert untrained.notes == []
    assert subject.embedding is None and untrained.embedding is None
    with pytest.raises(ValueError, match="R learnt from proofs, expected"):
        run_subject(run, "evidence", "R")


def test_a_score_of_all_entities_ranks_no_answers(run):
    subject = run_subject(run, "greedy")
    with pytest.raises(ValueError, match="--score greedy: expected"):
        make_subject_predictor(subject)


def test_a_policy_score_needs_a_run():
    check_untrained_score("noisy-or@2", "D")
    with pytest.raises(ValueError, match="--score success: D is no trained"):
        check_untrained_score("success", "D")


def test_existence_sets_the_height():
    assert height_of_score("exists@3", None) == 3
    assert height_of_score("exists@0", None) == 1
    assert height_of_score("exists@2", 3) == 3
    assert height_of_score("noisy-or", None) is None
    for score in ("exists@3", "exists@x"):
        with pytest.raises(ValueError, match="--score"):
            height_of_score(score, 2)
