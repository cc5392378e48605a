"""Which queries a validation ranks, test in the time there is, calibration, and the rankings that they share."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from funcppo.core.host import NO_DEADLINE, Deadline
from funcppo.kg.logic.kb import HEAD, TAIL
from funcppo.kg.ranking import evaluate, ranking
from funcppo.kg.ranking.ranking import RankingProtocol
from funcppo.kg.run import fit, held_out
from funcppo.kg.run import run as run_module
from funcppo.kg.run.run import (
    build_run,
    validation_queries,
    with_valid_evidence,
)
from funcppo.kg.scores.score import parse
from tests.kg.run.runs import CONFIG, new_run


def test_queries_that_cannot_be_ranked_are_refused(run):
    with pytest.raises(ValueError, match="answer among the 5 candidates"):
        held_out.metrics_within(
            run, run.task.dataset.test, RankingProtocol(sides=(HEAD,)), ()
        )


@pytest.mark.parametrize("height", [1, 2])
def test_a_validation_ranks_fewer_queries_where_it_is_long(height, monkeypatch):
    """By rules alone it may compute ten times as many successors."""
    prover = replace(CONFIG.prover, max_height=height)
    config = replace(
        CONFIG, dataset="countries_s2", prover=prover, n_validation_queries=24
    )
    whole = new_run(config)
    queries = validation_queries(whole)
    assert len(queries) == 24
    protocol = RankingProtocol(sides=ranking.ranked_sides(whole.task))
    n_successors = whole.cfg.env.cfg.resolve.max_successors
    if height == 2:
        n_successors = run_module.count_search_successors(n_successors, 2)
    else:
        n_successors /= 10
    n = ranking.count_candidates(whole.task, queries, protocol)
    for share, n_queries in ((1.001, 24), (22.5 / 24, 22)):
        bound = n * n_successors * share
        monkeypatch.setattr(run_module, "MAX_VALIDATION_SUCCESSORS", bound)
        part = new_run(config)
        assert len(validation_queries(part)) == n_queries
        noted = any("ranks 22 of 24 valid" in note for note in part.notes)
        assert noted == (n_queries < 24)


def ranked_within(run, seconds, monkeypatch):
    """The test metrics where a query takes a second, and how many queries each ranking had."""
    now, sizes = [0.0], []
    rank_parts = held_out._rank_parts

    def take_seconds(run, split, protocol, names, on_phase, *more):
        sizes.append(len(split))
        for _ in split:
            now[0] += 1.0
            on_phase("ranking")
        return rank_parts(run, split, protocol, names, on_phase, *more)

    def clock():
        return now[0]

    monkeypatch.setattr(held_out, "_rank_parts", take_seconds)
    monkeypatch.setattr(held_out, "time", SimpleNamespace(monotonic=clock))
    found = held_out.metrics_within(
        run,
        run.task.dataset.test,
        RankingProtocol(sides=ranking.ranked_sides(run.task)),
        ("max-confidence",),
        Deadline(at=seconds, clock=clock),
    )
    return found, sizes, now[0]


def test_where_there_is_time_test_is_ranked_whole(run, monkeypatch):
    test = run.task.dataset.test
    protocol = RankingProtocol(sides=ranking.ranked_sides(run.task))
    names = ("max-confidence",)
    expected = held_out.metrics_within(run, test, protocol, names)[0]
    rankings = dict(held_out.iter_rankings(run, test, protocol, names))
    assert list(rankings) == list(expected)
    for name, ranked in rankings.items():
        assert fit.summarise(run.task, ranked) == expected[name]
    found, sizes, _ = ranked_within(run, 3.0 * len(test), monkeypatch)
    assert sizes == [16, len(test)]
    assert (found[0], found[1]) == (expected, len(test))


def test_where_time_ends_before_test_a_random_sample_has_an_interval(
    run, monkeypatch
):
    n_test = len(run.task.dataset.test)
    found, sizes, seconds = ranked_within(run, 33.0, monkeypatch)
    metrics, n_queries, _ = found
    # Sixteen tell that 24 take too long; then they are ranked by all scores, and no round fits any more.
    assert (n_test, n_queries, sizes) == (24, 16, [16, 16])
    assert seconds <= 33.0
    for of_score in metrics.values():
        assert of_score["n_queries"] == n_queries
        low, high = of_score["mrr_interval"]
        assert low <= of_score["mrr"] <= high


def test_the_interval_of_a_mean_over_a_part_worked_by_hand(run):
    """Reciprocal ranks 1 and 0.5 of two of four queries: 0.75 and 1.959964 * sqrt(0.125 / 2 * (1 - 2 / 4))."""
    split = run.task.dataset.test[:2]
    protocol = RankingProtocol(sides=(TAIL,))
    parts = held_out._rank_parts(run, split, protocol, (), lambda *_: None)
    (part,) = next(iter(parts.values()))
    part = part._replace(reciprocal_rank=torch.tensor([1.0, 0.5]))
    found = held_out._summarise_sample(run, [part], 4)
    error = 1.959964 * (0.125 / 2 * 0.5) ** 0.5
    assert found["mrr_interval"] == pytest.approx([0.75 - error, 0.75 + error])
    # A whole split has no error.
    found = held_out._summarise_sample(run, [part], 2)
    assert "mrr_interval" not in found


def test_the_rule_score_ranks_the_queries_of_a_validation(run):
    """As the table of results ranks them."""
    name = "max-confidence"
    run = replace(run, run_config=replace(run.run_config, rule_score=name))
    queries = validation_queries(run)
    protocol = RankingProtocol(sides=ranking.ranked_sides(run.task))
    expected = held_out.metrics_within(run, queries, protocol, [name])[0]
    metric = ranking.selection_metric(run.task)
    assert held_out.rule_metric(run) == expected[name][metric]
    # Where T_P is not held, what rules derive takes as long as T_P.
    model = replace(run.task.least_model, stop_reason="a bound")
    task = replace(run.task, least_model=model)
    assert held_out.rule_metric(replace(run, task=task)) is None


def test_calibration_ranks_valid_before_and_after_training(run):
    """Its bins are those of a ranking by each policy, and the temperature has the least log loss of the trained one."""
    temperature, found = held_out.calibrate(run, NO_DEADLINE)
    for state, params, at in (
        ("untrained", run.state.start_params, 1.0),
        ("trained", run.state.best_params, 1.0),
        ("trained_at_temperature", run.state.best_params, temperature),
    ):
        expected = evaluate.bin_ranking(
            held_out.rank_valid(run, params),
            among_candidates=False,
            temperature=at,
        )
        for values, by_hand in zip(found[state], expected):
            np.testing.assert_array_equal(values, by_hand)
    losses = {state: evaluate.log_loss(bins) for state, bins in found.items()}
    assert losses["trained_at_temperature"] <= losses["trained"]

    # Test is counted without the temperature and with it.
    protocol = RankingProtocol(sides=ranking.ranked_sides(run.task))
    bins = [
        held_out.metrics_within(
            run, run.task.dataset.test, protocol, (), temperature=temperature
        )[2]
        for temperature in (None, 1.0, 4.0)
    ]
    assert list(bins[0]) == ["untrained", "trained"]
    for counted, is_same in zip(bins[1:], (True, False)):
        tempered = counted["trained_at_temperature"].probability_sum
        same = np.array_equal(tempered, bins[0]["trained"].probability_sum)
        assert same == is_same


# -- a run that learns from questions


@pytest.mark.parametrize("has_facts", [False, True])
def test_rule_scores_are_those_of_the_derivations(has_facts, asking):
    """Whether they come from the evidence of the split, or from joins where a query is a fact."""
    run, _ = asking
    assert run.task.derivability_index is None
    split = run.task.dataset.valid
    if has_facts:
        split = np.concatenate([split, run.task.dataset.train[-1:]])
    protocol = RankingProtocol(sides=ranking.ranked_sides(run.task))
    names = ["exists@1", "max-confidence", "noisy-or"]
    found = held_out.metrics_within(run, split, protocol, names)[0]
    for name in names:
        ranked = ranking.rank_split(run.task, split, parse(name), protocol)
        expected = fit.summarise(run.task, ranked)
        # an atom has a score for each side where scores come from evidence
        assert found[name].pop("n_scored") >= expected.pop("n_scored")
        assert found.pop(name) == expected
    assert set(found) == set(held_out.policies(run))


def test_where_queries_derive_their_answers_metrics_are_the_same(
    asking, monkeypatch
):
    """Validation, and a whole split in chunks."""
    held, _ = asking
    settings = replace(
        held.run_config.prover, max_atoms=len(held.task.kb.facts) + 1
    )
    config = replace(held.run_config, prover=settings)
    bare = build_run(config, held.task.dataset)
    assert held.task.answers_plan is None
    assert bare.task.answers_plan is not None
    assert any("derives its own answers" in note for note in bare.notes)

    params = held.state.best_params
    ranked = with_valid_evidence(bare).valid_evidence
    expected = held.valid_evidence.quality(held.questions, params)
    assert ranked.quality(held.questions, params).metric == expected.metric

    bare = replace(bare, questions=held.questions, state=held.state)
    split = held.task.dataset.valid
    protocol = RankingProtocol(sides=ranking.ranked_sides(held.task))
    names = ["exists@1", "noisy-or"]
    expected = held_out.metrics_within(held, split, protocol, names)[0]
    monkeypatch.setattr(held_out, "FIRST_CHUNK_QUERIES", 3)
    monkeypatch.setattr(held_out, "MAX_CHUNK_ANSWERS", 20)
    found = held_out.metrics_within(bare, split, protocol, names)[0]
    for name, metrics in expected.items():
        # an answer of two chunks is scored in both
        assert found[name].pop("n_scored") >= metrics.pop("n_scored")
        assert found[name] == metrics
