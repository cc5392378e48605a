"""What scores candidates: which scores a run and a data set have, and what is chosen for a data set."""

from dataclasses import replace

import pytest
import torch

from funcppo.kg.answers import Answerer
from funcppo.kg.config import ProverTaskConfig
from funcppo.kg.graph import loaders
from funcppo.kg.logic.kb import TAIL
from funcppo.kg.run.choices import choose_settings
from funcppo.kg.run.subject import dataset_subject, run_subject
from funcppo.kg.search import task as prover_task

OPEN = ProverTaskConfig(
    max_height=None, smoothing="auto", object_identity="auto"
)


def test_a_data_set_has_what_its_valid_split_chooses():
    dataset = loaders.load("countries_s1")
    choice = choose_settings(dataset, OPEN)
    subject = dataset_subject(dataset, OPEN)
    assert subject.score.name == choice.best.score
    assert subject.task.cfg == choice.best.apply(OPEN)
    assert subject.policy_run is None


def graph_of_height_2():
    """Four pairs of which `s` is known, `r` follows in one step and `t`, which valid asks for, in two."""
    pairs = [(f"a{i}", f"b{i}") for i in range(20)]
    triples = [(a, "s", b) for a, b in pairs]
    valid = [(a, "t", b) for a, b in pairs[:4]]
    known = [(a, r, b) for a, b in pairs[4:] for r in "rt"]
    rules = "r(X, Y) :- s(X, Y)\nt(X, Y) :- r(X, Y)\n"
    return loaders.from_triples(triples + known, valid, rules=rules)


def test_a_choice_that_has_no_time_takes_the_defaults_and_says_so():
    graph = graph_of_height_2()
    assert dataset_subject(graph, OPEN).task.max_height == 2
    subject = dataset_subject(graph, OPEN, choice_seconds=1e-9)
    assert subject.task.max_height == 1
    assert subject.score.name == "noisy-or@3"
    notes = " ".join(subject.notes)
    assert "height 1 not tried: more time than was left" in notes


def test_the_height_below_is_taken_where_all_that_follows_is_too_much():
    graph = graph_of_height_2()
    n_facts = len(graph.facts)
    # the first step adds four atoms, the second one too
    cfg = replace(OPEN, max_atoms=n_facts + 4)
    choice = choose_settings(graph, cfg)
    assert choice.best.height == 2
    subject = dataset_subject(graph, cfg)
    assert subject.task.max_height == 1
    assert subject.score.name == choice.by_height[0].score
    assert any("height 2 not taken" in note for note in subject.notes)
    with pytest.raises(ValueError, match="T_P to height 2 stopped"):
        dataset_subject(graph, replace(cfg, max_height=2))


def test_a_run_has_its_own_score_by_default(run):
    state = run.state._replace(best_valid_metric=torch.tensor(1.0))
    run = replace(run, state=state)
    subject = run_subject(run)
    assert (subject.score.name, subject.policy_run) == ("best-proof", run)
    assert subject.notes == ["the run stands at update 0 of 4"]
    untrained = run_subject(run, "noisy-or")
    assert (untrained.score.name, untrained.policy_run) == ("noisy-or", None)
    assert untrained.notes == []
    assert subject.others is None and untrained.others is None
    with pytest.raises(ValueError, match="'evidence': expected success, best"):
        run_subject(run, "evidence")


def test_other_facts_are_counted_once_for_many_queries(run, monkeypatch):
    """Of a data set, and of a run with another rule score; a score that reads none counts none."""
    calls = []
    count = prover_task.count_other_facts

    def count_other_facts(*args, **settings):
        calls.append(1)
        return count(*args, **settings)

    monkeypatch.setattr(prover_task, "count_other_facts", count_other_facts)
    dataset = loaders.load("family_tree:30:0")
    cfg = replace(OPEN, max_height=1)
    subjects = [
        dataset_subject(dataset, cfg, "noisy-or-other-facts"),
        run_subject(run, "noisy-or-other-facts"),
    ]
    assert len(calls) == 2
    for subject in subjects:
        answerer = Answerer(subject)
        split = torch.from_numpy(subject.task.dataset.valid).long()
        for i in range(0, len(split), 4):
            answerer.score(split[i : i + 4], TAIL)
    assert len(calls) == 2
    assert dataset_subject(dataset, cfg, "noisy-or").task.other_facts is None


def test_existence_sets_the_height():
    graph = graph_of_height_2()
    assert dataset_subject(graph, OPEN, "exists@2").task.max_height == 2
    cfg = replace(OPEN, max_height=2)
    assert dataset_subject(graph, cfg, "exists@1").task.max_height == 2
    with pytest.raises(ValueError, match="exists@3: expected --height 3 or"):
        dataset_subject(graph, cfg, "exists@3")


@pytest.mark.parametrize(
    ("rule_metric", "metric", "is_better", "reason", "is_rule_score"),
    [
        (None, 0.4, True, "not-compared", False),
        (0.3, 0.4, True, "learnt-ranks-valid-better", False),
        (0.39, 0.4, False, "learnt-gains-by-chance", True),
        (0.41, 0.4, True, "rules-gain-by-chance", False),
        (0.3, -1.0, True, "policy-not-validated", True),
    ],
)
def test_a_run_ranks_by_rules_unless_what_is_learnt_gains_beyond_chance(
    run, rule_metric, metric, is_better, reason, is_rule_score
):
    state = run.state._replace(best_valid_metric=torch.tensor(metric))
    run = replace(
        run, state=state, rule_metric=rule_metric, is_learnt_better=is_better
    )
    assert run.default_score_reason == reason
    rule_score = run.run_config.rule_score
    expected = rule_score if is_rule_score else "best-proof"
    assert run.default_score == expected
    subject = run_subject(run)
    assert subject.score.name == expected
    assert (subject.policy_run is None) == is_rule_score
    # What is learnt stays at hand.
    assert run_subject(run, run.score).policy_run is run
    if metric == 0.4 and is_rule_score:
        assert subject.notes == [
            f"answers are ranked by the rule score {rule_score}, auc_pr 0.3900 on valid, rather than by what was "
            "learnt (score best-proof), 0.4000, which gains less than two standard errors (--score best-proof takes "
            "that one)"
        ]
