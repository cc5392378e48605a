"""What a run computes from its settings."""

from dataclasses import replace

import pytest
import torch

from funcppo.kg.run.run import learner_config
from funcppo.kg.run.subject import run_subject
from tests.kg.run.runs import CONFIG


def test_the_number_of_updates_is_rounded_up_to_whole_rollouts(run):
    assert [
        learner_config(replace(CONFIG, steps=steps), run.task).ppo.n_updates
        for steps in (1, 16, 17)
    ] == [1, 1, 2]


@pytest.mark.parametrize(
    ("rule_metric", "margin", "reason", "is_rule_score"),
    [
        (None, 0.0, "not-compared", False),
        (0.3, 0.0, "policy-ranks-valid-no-worse", False),
        # Equal, but for the rounding of the policy's metric to float32.
        (0.4, 0.0, "policy-ranks-valid-no-worse", False),
        (0.401, 0.0, "rules-rank-valid-better", True),
        # Where valid is small.
        (0.401, 0.0005, "rules-rank-valid-better", True),
        (0.401, 0.002, "policy-ranks-valid-no-worse", False),
    ],
)
def test_a_run_ranks_by_what_ranks_valid_better(
    run, rule_metric, margin, reason, is_rule_score
):
    state = run.state._replace(best_valid_metric=torch.tensor(0.4))
    run = replace(run, state=state, rule_metric=rule_metric, rule_margin=margin)
    assert run.default_score_reason == reason
    rule_score = run.run_config.rule_score
    expected = rule_score if is_rule_score else "best-proof"
    assert run.default_score == expected
    subject = run_subject(run)
    assert subject.score.name == expected
    assert (subject.policy_run is None) == is_rule_score
    # The policy's own score stays at hand.
    assert run_subject(run, run.score).policy_run is run
    if is_rule_score:
        assert subject.notes == [
            f"answers are ranked by the rule score {rule_score}, auc_pr 0.4010 on valid, rather than by the trained "
            "policy (score best-proof), 0.4000 (--score best-proof takes that one)"
        ]


def test_a_policy_that_was_not_validated_is_not_the_default(run):
    state = run.state._replace(best_valid_metric=torch.tensor(-1.0))
    run = replace(run, state=state, rule_metric=0.0)
    assert run.default_score_reason == "policy-not-validated"
    subject = run_subject(run)
    assert subject.score.name == run.run_config.rule_score
    assert "not validated" in subject.notes[0]
