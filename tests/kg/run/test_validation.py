"""Which queries a validation ranks, which parameters it keeps, and the settings of its searches."""

import dataclasses
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from funcppo.core import tree
from funcppo.core.deadline import NO_DEADLINE, Deadline
from funcppo.kg.graph import loaders
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.ranking import calibration, ranking
from funcppo.kg.ranking.ranking import RankingProtocol
from funcppo.kg.run import run_start, validation
from funcppo.kg.scores.score import parse
from funcppo.kg.search.task import ignore_phase
from tests.kg.run.runs import CONFIG


@pytest.mark.parametrize(
    ("metric", "best", "is_better"),
    [
        (0.25, 0.5, False),
        (0.5, 0.5, False),
        (0.75, 0.5, True),
        (0.7, 0.7, False),  # 0.7 is above its float32 value
    ],
)
def test_only_a_better_metric_replaces_the_best(
    metric, best, is_better, run, monkeypatch
):
    monkeypatch.setattr(
        validation, "evaluate_policy", lambda *_, **__: {"auc_pr": metric}
    )
    monkeypatch.setattr(validation, "_gains_beyond_chance", lambda *_: True)
    moved = run.state.train_state._replace(
        params=tree.map(lambda x: x + 1.0, run.state.train_state.params),
        update=torch.tensor(9),
    )
    before = run.state._replace(
        train_state=moved, best_valid_metric=torch.tensor(best)
    )
    validated, valid_metric = validation.validate(replace(run, state=before))
    after = validated.state
    assert valid_metric == float(torch.tensor(metric))
    assert torch.equal(after.best_valid_metric, torch.tensor(max(metric, best)))
    assert int(after.best_update) == (9 if is_better else 0)
    params = moved.params if is_better else before.best_params
    assert torch.equal(tree.ravel(after.best_params), tree.ravel(params))


@pytest.mark.parametrize("is_better", [True, False])
def test_the_untrained_policy_is_kept_unless_valid_gains_beyond_chance(
    is_better, run, monkeypatch
):
    """The metric rises by a little; the ranks of the queries decide."""
    monkeypatch.setattr(
        validation, "evaluate_policy", lambda *_, **__: {"auc_pr": 0.51}
    )
    asked = []

    def compare(present, start):
        asked.append((present.reciprocal_rank, start.reciprocal_rank))
        return is_better

    monkeypatch.setattr(validation, "is_better", compare)
    moved = run.state.train_state._replace(
        params=tree.map(lambda x: x + 1.0, run.state.train_state.params),
        update=torch.tensor(9),
    )
    state = run.state._replace(
        train_state=moved, best_valid_metric=torch.tensor(0.5)
    )
    after, metric = validation.validate(replace(run, state=state))
    assert metric == float(torch.tensor(0.51)) and len(asked) == 1
    assert len(asked[0][0]) == len(asked[0][1]) >= run.n_validation_queries
    assert int(after.state.best_update) == (9 if is_better else 0)

    # Trained parameters that were kept are replaced by any better ones.
    kept = state._replace(best_update=torch.tensor(3))
    after, _ = validation.validate(replace(run, state=kept))
    assert int(after.state.best_update) == 9 and len(asked) == 1


def test_a_policy_is_not_evaluated_on_queries_that_cannot_be_ranked(run):
    with pytest.raises(ValueError, match="answer among the 5 candidates"):
        validation.evaluate_policy(
            run,
            run.state.best_params,
            run.task.dataset.test,
            RankingProtocol(sides=(HEAD,)),
        )


def test_without_valid_queries_the_last_parameters_are_kept(run):
    dataset = replace(run.task.dataset, valid=run.task.dataset.valid[:0])
    moved = run.state.train_state._replace(
        params=tree.map(lambda x: x + 1.0, run.state.train_state.params),
        update=torch.tensor(9),
    )
    run = replace(
        run,
        task=replace(run.task, dataset=dataset),
        state=run.state._replace(train_state=moved),
    )
    validated, valid_metric = validation.validate(run)
    after = validated.state
    assert valid_metric is None
    assert (
        int(after.best_update) == 9 and float(after.best_valid_metric) == -1.0
    )
    assert torch.equal(tree.ravel(after.best_params), tree.ravel(moved.params))
    assert (
        tree.leaves(after.best_params)[0].data_ptr()
        != tree.leaves(moved.params)[0].data_ptr()
    )


def test_a_validation_ranks_fewer_queries_where_a_search_is_long(
    tmp_path, monkeypatch
):
    prover = dataclasses.replace(CONFIG.prover, max_height=2)
    config = replace(
        CONFIG, dataset="countries_s2", prover=prover, n_validation_queries=24
    )
    whole = run_start.prepare_run(config, tmp_path, resume=False)
    assert len(validation.validation_queries(whole)) == 24
    n_successors = 35 * validation.count_search_successors(
        whole.cfg.env.cfg.resolve.max_successors, 2
    )  # 35 candidates are derived
    monkeypatch.setattr(
        validation, "MAX_VALIDATION_SUCCESSORS", n_successors * 22 / 24
    )
    part = run_start.prepare_run(config, tmp_path, resume=False)
    assert len(validation.validation_queries(part)) == 22
    assert any("ranks 22 of 24 valid queries" in note for note in part.notes)


def test_a_validation_by_rules_ranks_fewer_queries_where_it_is_long(
    tmp_path, monkeypatch
):
    config = replace(CONFIG, dataset="countries_s2", n_validation_queries=24)
    whole = run_start.prepare_run(config, tmp_path, resume=False)
    queries = validation.validation_queries(whole)
    protocol = RankingProtocol(sides=ranking.ranked_sides(whole.task))
    n_successors = ranking.count_candidates(whole.task, queries, protocol) * (
        whole.cfg.env.cfg.resolve.max_successors
    )
    assert len(queries) == 24 and whole.task.fact_selection == "oracle"
    name = "MAX_VALIDATION_SUCCESSORS_BY_RULES"
    for bound, n_queries in ((n_successors, 24), (n_successors * 22 / 24, 22)):
        monkeypatch.setattr(validation, name, bound)
        part = run_start.prepare_run(config, tmp_path, resume=False)
        assert len(validation.validation_queries(part)) == n_queries
        noted = any("ranks 22 of 24" in note for note in part.notes)
        assert noted == (n_queries < 24)


def test_validation_queries_are_a_fixed_sample(run):
    first, again = (
        validation.validation_queries(run),
        validation.validation_queries(run),
    )
    assert len(first) == 3 and np.array_equal(first, again)
    assert {tuple(query) for query in first} <= {
        tuple(query) for query in loaders.load("countries_s1").valid
    }


def test_as_many_valid_queries_are_ranked_as_the_run_may(tmp_path, monkeypatch):
    """Of a run that learns from proofs; one that learns from questions ranks all."""
    config = replace(CONFIG, dataset="countries_s2", n_validation_queries=None)
    for most, n_queries in ((1000, 24), (7, 7)):
        monkeypatch.setattr(validation, "MAX_PROOF_QUERIES", most)
        part = run_start.prepare_run(config, tmp_path, resume=False)
        assert len(validation.validation_queries(part)) == n_queries
        assert not any("a validation ranks" in note for note in part.notes)


def ranked_within(run, seconds, monkeypatch):
    """The test metrics where a query takes a second, and how many queries each ranking had."""
    now, sizes = [0.0], []
    rank_parts = validation._rank_parts

    def take_seconds(run, split, protocol, names, on_phase, *more):
        sizes.append(len(split))
        for _ in split:
            now[0] += 1.0
            on_phase("ranking")
        return rank_parts(run, split, protocol, names, on_phase, *more)

    def clock():
        return now[0]

    monkeypatch.setattr(validation, "_rank_parts", take_seconds)
    monkeypatch.setattr(validation, "FIRST_ROUND", 2)
    monkeypatch.setattr(validation, "time", SimpleNamespace(monotonic=clock))
    found = validation.evaluate_within(
        run,
        run.task.dataset.test,
        RankingProtocol(sides=ranking.ranked_sides(run.task)),
        ("max-confidence",),
        Deadline(at=seconds, clock=clock),
    )
    return found, sizes, now[0]


def test_where_there_is_time_test_is_ranked_whole(run, monkeypatch):
    n_test = len(run.task.dataset.test)
    found, sizes, _ = ranked_within(run, 3.0 * n_test, monkeypatch)
    assert found.n_queries == n_test and sizes == [2, n_test]
    split = run.task.dataset.test
    protocol = RankingProtocol(sides=ranking.ranked_sides(run.task))
    names = ("max-confidence",)
    assert found.metrics == validation.evaluate_scores(
        run, split, protocol, names
    )


def test_where_time_ends_before_test_a_random_sample_has_an_interval(
    run, monkeypatch
):
    n_test = len(run.task.dataset.test)
    found, sizes, seconds = ranked_within(run, 15.0, monkeypatch)
    assert seconds <= 15.0 + 1.0
    # Two tell that 24 take too long; then rounds within half of what is left.
    assert n_test == 24 and sizes[:2] == [2, 2] and sum(sizes) <= 16
    assert sizes[2] == (15 - 4) // 2
    assert 2 < found.n_queries < n_test
    for metrics in found.metrics.values():
        assert metrics["n_queries"] == found.n_queries
        low, high = metrics["mrr_interval"]
        assert low <= metrics["mrr"] <= high


def test_the_interval_of_a_mean_over_a_part_worked_by_hand(run):
    """Reciprocal ranks 1 and 0.5 of two of four queries: 0.75 and 1.959964 * sqrt(0.125 / 2 * (1 - 2 / 4))."""
    split = run.task.dataset.test[:2]
    protocol = RankingProtocol(sides=(TAIL,))
    parts = validation._rank_parts(run, split, protocol, (), ignore_phase)
    (name, *_) = parts
    (part,) = parts[name]
    part = part._replace(reciprocal_rank=torch.tensor([1.0, 0.5]))
    found = validation._summarise_by_score(run, {name: [part]}, 4)[name]
    error = 1.959964 * (0.125 / 2 * 0.5) ** 0.5
    assert found["mrr_interval"] == pytest.approx([0.75 - error, 0.75 + error])
    # A whole split has no error.
    found = validation._summarise_by_score(run, {name: [part]}, 2)[name]
    assert "mrr_interval" not in found


def test_rankings_are_those_that_are_summarised(run):
    split, protocol = run.task.dataset.test, RankingProtocol(sides=(TAIL,))
    names = ("max-confidence",)
    metrics = validation.evaluate_scores(run, split, protocol, names)
    rankings = dict(validation.iter_rankings(run, split, protocol, names))
    assert list(rankings) == list(metrics)
    for name, ranked in rankings.items():
        assert validation.summarise(run, ranked) == metrics[name]


def test_the_rule_score_ranks_the_queries_of_a_validation(run):
    """As the table of results ranks them."""
    name = "max-confidence"
    run = replace(run, run_config=replace(run.run_config, rule_score=name))
    queries = validation.validation_queries(run)
    protocol = RankingProtocol(sides=ranking.ranked_sides(run.task))
    expected = validation.evaluate_scores(run, queries, protocol, [name])
    metric = ranking.selection_metric(run.task)
    assert validation.rule_metric(run) == expected[name][metric]
    # Where T_P is not held, what rules derive takes as long as T_P.
    model = replace(run.task.least_model, complete=False)
    task = replace(run.task, least_model=model)
    assert validation.rule_metric(replace(run, task=task)) is None


def test_calibration_ranks_valid_before_and_after_training(run):
    """Its bins are those of a ranking by each policy, and the temperature has the least log loss of the trained one."""
    found = validation.calibrate(run, NO_DEADLINE)
    queries = validation.validation_queries(run)
    protocol = RankingProtocol(sides=ranking.ranked_sides(run.task))
    for state, params, temperature in (
        ("untrained", run.state.start_params, 1.0),
        ("trained", run.state.best_params, 1.0),
        ("trained_at_temperature", run.state.best_params, found.temperature),
    ):
        scorer = validation.policy_score(run, params, run.score)
        ranked = ranking.rank_split(run.task, queries, scorer, protocol)
        expected = calibration.bin_ranking(
            ranked, among_candidates=False, temperature=temperature
        )
        for values, by_hand in zip(found.bins[state], expected):
            np.testing.assert_array_equal(values, by_hand)
    losses = {
        state: calibration.log_loss(bins) for state, bins in found.bins.items()
    }
    assert losses["trained_at_temperature"] <= losses["trained"]


def test_calibration_without_time_or_queries_is_none(run):
    over = Deadline(at=0.0, clock=lambda: 1.0)
    assert validation.calibrate(run, over) is None
    dataset = replace(run.task.dataset, valid=run.task.dataset.valid[:0])
    without = replace(run, task=replace(run.task, dataset=dataset))
    assert validation.calibrate(without, NO_DEADLINE) is None


def test_test_is_counted_by_probability_with_the_temperature_and_without(run):
    protocol = RankingProtocol(sides=ranking.ranked_sides(run.task))
    test = run.task.dataset.test
    bins = [
        validation.evaluate_within(
            run, test, protocol, (), NO_DEADLINE, temperature=temperature
        ).bins
        for temperature in (None, 1.0, 4.0)
    ]
    assert [list(found) for found in bins] == [
        ["untrained", "trained"],
        *[["untrained", "trained", "trained_at_temperature"]] * 2,
    ]
    of_trained = bins[0]["trained"].probability_sum
    for found, is_same in zip(bins[1:], (True, False)):
        tempered = found["trained_at_temperature"].probability_sum
        assert np.array_equal(tempered, of_trained) == is_same


@pytest.mark.parametrize(
    ("name", "before", "after", "chosen"),
    [
        ("noisy-or@3", 0.5, 0.6, "noisy-or@3-other-facts"),
        ("noisy-or", 0.5, 0.5004, None),
        ("noisy-or", 0.5, None, None),
        ("noisy-or", None, 0.6, None),
        ("noisy-or-other-facts", 0.5, 0.6, None),
        ("exists@1", 0.5, 0.6, None),
    ],
)
def test_valid_decides_whether_other_facts_are_tried_on_test(
    name, before, after, chosen, run, monkeypatch
):
    asked = []

    def rule_metric(run, name):
        assert run.task.other_facts is not None
        asked.append(name)
        return after

    monkeypatch.setattr(validation, "rule_metric", rule_metric)
    config = replace(run.run_config, rule_score=name)
    run = replace(run, run_config=config, rule_metric=before)
    counted, score, notes = validation.choose_other_facts(run)
    assert score == chosen
    assert (counted.task.other_facts is not None) == bool(chosen)
    assert len(notes) == (chosen is not None)
    if chosen:
        assert asked == [chosen]
        assert notes[0].startswith(f"{chosen}: valid is ranked better")
        assert "0.6000 for 0.5000" in notes[0]


def test_the_metric_with_other_facts_is_that_of_its_scorer(run):
    config = replace(run.run_config, rule_score="noisy-or")
    run = replace(run, run_config=config, rule_metric=-1.0)
    counted, score, _ = validation.choose_other_facts(run)
    assert score == "noisy-or-other-facts"
    queries = validation.validation_queries(run)
    protocol = RankingProtocol(sides=ranking.ranked_sides(run.task))
    scorer = parse(score)
    ranked = ranking.rank_split(run.task, queries, scorer, protocol)
    expected = validation.summarise(run, ranked)["auc_pr"]
    assert validation.rule_metric(counted, score) == expected


def test_counting_other_facts_ends_in_time(run, monkeypatch):
    config = replace(run.run_config, rule_score="noisy-or")
    run = replace(run, run_config=config, rule_metric=0.5)
    name = "noisy-or-other-facts"
    counted, score, notes = validation.choose_other_facts(
        run, Deadline(at=-1.0)
    )
    assert (counted, score) == (run, None)
    assert notes == [
        f"{name}: not tried on valid: there was no time for it (--seconds)"
    ]
    monkeypatch.setattr(validation, "MAX_OTHER_FACT_ROWS", 1)
    counted, score, notes = validation.choose_other_facts(run)
    assert (counted, score) == (run, None)
    assert notes == [
        f"{name}: not tried on valid: counting other facts makes more than 1 rows of joins"
    ]
