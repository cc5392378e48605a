"""Which queries a validation ranks, test in the time there is, calibration, and the rankings that they share."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from funcppo.core.host import NO_DEADLINE, Deadline
from funcppo.kg.ranking import ranking
from funcppo.kg.ranking.ranking import RankingProtocol
from funcppo.kg.run import fit, held_out
from funcppo.kg.run import run as run_module
from funcppo.kg.run.run import validation_queries
from funcppo.kg.scores.score import parse
from funcppo.kg.search.task import build_task
from tests.kg.run.runs import CONFIG, new_run, on_graph, seating


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


def test_ranking_of(run, seconds=math.inf, cost=float):
    """Test ranked by rules and then by all, where queries take their cost by any score; the sizes of the rounds."""
    now, sizes = [0.0], []
    rank = held_out._rank

    def take_seconds(run, queries, collected, name, params, *report):
        sizes.append(len(queries))
        now[0] += cost(len(queries))
        return rank(run, queries, collected, name, params, *report)

    def clock():
        return now[0]

    found = held_out.TestRanking(["max-confidence"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_out, "_rank", take_seconds)
        patch.setattr(held_out, "time", SimpleNamespace(monotonic=clock))
        found.rank_by_rules(run, Deadline(at=seconds, clock=clock))
        n_by_rules = found.n_queries
        found.rank_by_all(run, Deadline(at=3 * seconds, clock=clock))
    return found, n_by_rules, sizes


test_ranking_of.__test__ = False


def test_where_there_is_time_test_is_ranked_whole(run, asking):
    for one in (run, asking[0]):
        test = one.task.dataset.test
        found, n_by_rules, _ = test_ranking_of(one)
        assert n_by_rules == found.n_queries == len(test)
        metrics = found.metrics(one)
        assert list(metrics) == ["max-confidence", *held_out.policies(one)]
        protocol = RankingProtocol(sides=ranking.ranked_sides(one.task))
        best = one.state.best_params
        for name, score in (
            ("max-confidence", parse("max-confidence")),
            (list(metrics)[-1], held_out.policy_score(one, best, one.score)),
        ):
            ranked = ranking.rank_split(one.task, test, score, protocol)
            mrr = float(fit.reciprocal_ranks(ranked).mean())
            assert metrics[name]["mrr"] == pytest.approx(mrr, abs=1e-12)
            assert "mrr_interval" not in metrics[name]


def test_where_time_ends_both_rank_the_same_random_sample(tmp_path):
    """Of 20 queries the first 16 are ranked whatever the time."""
    graph = seating(n_tables=10)
    graph = replace(graph, test=graph.valid)
    run = new_run(on_graph(CONFIG, graph, tmp_path))
    found, n_by_rules, sizes = test_ranking_of(run, 17.0)
    metrics = found.metrics(run)
    assert n_by_rules == found.n_queries == sizes[0] == 16
    assert list(metrics) == ["max-confidence", *held_out.policies(run)]
    for of_score in metrics.values():
        assert of_score["n_queries"] == 2 * 16
        low, high = of_score["mrr_interval"]
        assert low - 1e-9 <= of_score["mrr"] <= high + 1e-9


def test_a_round_that_costs_as_much_as_many_queries_has_many(asking):
    """Of 300 queries 16 take .058 s, and all together .2: rounds of 18 would rank 160 in half a second."""
    run, _ = asking
    test = np.resize(run.task.dataset.test, (300, 3))
    task = replace(run.task, dataset=replace(run.task.dataset, test=test))
    cost = lambda n: 0.05 + 0.0005 * n
    _, n_by_rules, _ = test_ranking_of(replace(run, task=task), 0.5, cost)
    assert n_by_rules == 300


def test_first_queries_are_fewer_where_each_takes_long(asking):
    run, _ = asking
    over = Deadline(at=0.0, clock=lambda: 1.0)
    for each, n_ranked in ((0.01, 16), (0.25, 4), (5.0, 1)):
        found = held_out.TestRanking(["max-confidence"])
        found.rank_by_rules(run, over, each=each)
        assert found.n_queries == min(n_ranked, len(run.task.dataset.test))


def test_rules_rank_test_where_there_is_no_time_for_a_search(run, asking):
    """What is learnt from questions reads evidence that is held, for which there is time."""
    over = Deadline(at=0.0, clock=lambda: 1.0)
    for one, names in ((run, []), (asking[0], held_out.policies(asking[0]))):
        found = held_out.TestRanking(["max-confidence"])
        found.rank_by_rules(one, over)
        found.rank_by_all(one, over)
        assert list(found.metrics(one)) == ["max-confidence", *names]


def test_the_interval_of_a_mean_over_a_part_worked_by_hand(run):
    """Reciprocal ranks 1 and 0.5 of two of four queries: 0.75 and 1.959964 * sqrt(0.125 / 2 * (1 - 2 / 4))."""
    split = run.task.dataset.test[:2]
    ranked = held_out._rank(run, split, None, "max-confidence", None)
    part = held_out._rank_part(run, ranked)
    part = part._replace(reciprocal_rank=torch.tensor([1.0, 0.5]))
    found = held_out._summarise_sample(run, [part], 4)
    error = 1.959964 * (0.125 / 2 * 0.5) ** 0.5
    assert found["mrr_interval"] == pytest.approx([0.75 - error, 0.75 + error])
    # A whole split has no error.
    found = held_out._summarise_sample(run, [part], 2)
    assert "mrr_interval" not in found


def test_the_rule_score_ranks_the_queries_of_a_validation(run):
    by_most = replace(run.run_config, rule_score="max-confidence")
    run = replace(run, run_config=by_most)
    ranked = held_out.rank_valid_by_rules(run)
    expected = ranking.rank_split(
        run.task,
        validation_queries(run),
        parse("max-confidence"),
        RankingProtocol(sides=ranking.ranked_sides(run.task)),
    )
    assert torch.equal(
        fit.reciprocal_ranks(ranked), fit.reciprocal_ranks(expected)
    )
    # Where T_P is not held, what rules derive takes as long as T_P.
    model = replace(run.task.least_model, stop_reason="a bound")
    task = replace(run.task, least_model=model)
    assert held_out.rank_valid_by_rules(replace(run, task=task)) is None


# -- a run that learns from questions


def ranks_of(run, split, names=()):
    """The reciprocal ranks of a split by each score, in the order of the queries."""
    task = replace(run.task, dataset=replace(run.task.dataset, test=split))
    test = held_out.TestRanking(names)
    test.rank_by_all(replace(run, task=task), NO_DEADLINE)
    found = {}
    for name, parts in test.parts.items():
        for part in parts:
            queries = part.queries.tolist() * len(ranking.ranked_sides(task))
            sides = part.rows.side.tolist()
            ranks = fit.reciprocal_ranks(part.rows).tolist()
            found.setdefault(name, []).extend(zip(sides, queries, ranks))
    return {name: sorted(rows) for name, rows in found.items()}


@pytest.mark.parametrize("has_facts", [False, True])
def test_rule_scores_are_those_of_the_derivations(has_facts, asking):
    """Whether they come from the evidence of the split, or from joins where a query is a fact."""
    run, _ = asking
    assert run.task.derivability_index is None
    split = run.task.dataset.valid
    if has_facts:
        split = np.concatenate([split, run.task.dataset.train[-1:]])
    names = ["exists@1", "max-confidence", "noisy-or"]
    found = ranks_of(run, split, names)
    protocol = RankingProtocol(sides=ranking.ranked_sides(run.task))
    for name in names:
        ranked = ranking.rank_split(run.task, split, parse(name), protocol)
        expected = sorted(fit.reciprocal_ranks(ranked).tolist())
        assert sorted(rank for *_, rank in found[name]) == expected
    assert set(found) == {*names, *held_out.policies(run)}


def test_where_queries_derive_their_answers_ranks_are_the_same(asking):
    """As where T_P is held, in rounds of few queries."""
    run, _ = asking
    config = run.run_config
    whole = replace(run, task=build_task(run.task.dataset, config.prover))
    assert run.task.answers_plan is not None
    assert whole.task.answers_plan is None
    questions = replace(config.questions, max_valid_firings=60)
    few = replace(run, run_config=replace(config, questions=questions))
    split, names = run.task.dataset.valid, ["exists@1", "noisy-or"]
    assert ranks_of(few, split, names) == ranks_of(whole, split, names)
