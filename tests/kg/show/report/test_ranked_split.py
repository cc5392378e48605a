"""Ranks of a report are those of an evaluation; probabilities of candidates add up or are the scores themselves."""

from dataclasses import replace

import numpy as np
import pytest

import funcppo as fp
from funcppo.kg.answers import Answerer
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.ranking import calibration
from funcppo.kg.ranking.ranking import RankingProtocol, rank_split
from funcppo.kg.run import run_build, run_start, validation
from funcppo.kg.run.subject import run_subject
from funcppo.kg.search.task import ignore_phase
from funcppo.kg.show.report import tables


@pytest.mark.parametrize("name", ["questions", "proofs"])
def test_metrics_are_those_of_evaluate(runs, reports, name):
    evaluated = fp.open(runs[name]).evaluate("test")
    trained = reports[name].measured.trained.metrics
    for metric in ("mrr", "hits@1", "hits@10", "ceiling", "n_queries"):
        assert trained[metric] == evaluated[metric]


def test_rows_have_the_reciprocal_ranks_that_the_mrr_averages(reports):
    for report in reports.values():
        for rows in report.measured.ranked.values():
            mean = rows.reciprocal_rank.mean()
            assert mean == pytest.approx(rows.metrics["mrr"], rel=1e-12)


def test_fewer_queries_are_ranked_if_asked_for(runs):
    run = run_start.open_run(runs["questions"])
    ranked = tables.rank_test(run, 3, ignore_phase)
    assert len(ranked.queries) == 3 and len(ranked.side) == 6
    assert tables.rank_test(run, 0, ignore_phase).ranked == {}


def test_probabilities_among_candidates_add_up_to_1_for_each_row(runs):
    run = run_start.open_run(runs["questions"])
    ranked = rank_split(
        run.task,
        run.task.dataset.test,
        validation.policy_score(run, run.state.best_params, "evidence"),
        RankingProtocol(),
    )
    p = calibration.probabilities(ranked, among_candidates=True)
    sums = np.bincount(ranked.listed_row.numpy(), weights=p)
    assert len(p) and ((p >= 0) & (p <= 1)).all()
    np.testing.assert_allclose(sums[sums > 0], 1.0)
    # A softmax by hand of the first row.
    row = ranked.listed_row == ranked.listed_row[0]
    odds = np.exp(ranked.listed_score[row].numpy() * 1e-4)
    np.testing.assert_allclose(p[row.numpy()], odds / odds.sum())


def test_a_score_that_is_a_probability_is_taken_as_it_is(runs):
    run = run_start.open_run(runs["proofs"])
    ranked = rank_split(
        run.task,
        run.task.dataset.test,
        validation.policy_score(run, run.state.best_params, "success"),
        RankingProtocol(),
    )
    p = calibration.probabilities(ranked, among_candidates=False)
    odds = np.exp(ranked.listed_score.numpy() * 1e-4)
    assert len(p)
    np.testing.assert_allclose(p, odds / (1 + odds))


def test_ranks_are_the_same_where_queries_derive_their_answers(
    runs, monkeypatch
):
    """In parts, whose queries are in another order."""
    held = run_start.open_run(runs["questions"])
    prover = replace(
        held.run_config.prover, max_atoms=len(held.task.kb.facts) + 1
    )
    config = replace(held.run_config, prover=prover)
    bare = run_build.build_run(config, held.task.dataset, ignore_phase)
    assert bare.task.answers_plan is not None
    bare = replace(bare, questions=held.questions, state=held.state)
    monkeypatch.setattr(validation, "FIRST_CHUNK_QUERIES", 3)
    monkeypatch.setattr(validation, "MAX_CHUNK_ANSWERS", 20)

    found, expected = (
        tables.rank_test(run, None, ignore_phase) for run in (bare, held)
    )
    n = len(found.queries)
    for ranked in (found, expected):
        assert ranked.query_row.tolist() == [*range(n), *range(n)]
        assert ranked.side.tolist() == [HEAD] * n + [TAIL] * n
    assert by_query(found) == by_query(expected)
    assert set(found.bins) == {"untrained", "trained"}
    for state, bins in expected.bins.items():
        assert found.bins[state].n.tolist() == bins.n.tolist()
    for name, ranks in expected.ranked.items():
        assert found.ranked[name].metrics["mrr"] == ranks.metrics["mrr"]

    answerer = Answerer(run_subject(bare))
    shown = tables.choose_queries(answerer, found, n)
    entries = list(tables.iter_entries(answerer, found, shown))
    assert sum(entry.status == "proved" for entry in entries) == n - 2
    for entry in entries:
        for side in entry.sides:
            assert len(side.better) == min(side.n_better, 5)


def by_query(ranked):
    """All numbers of each query and side."""
    trained = list(ranked.ranked.values())[-1]
    columns = zip(
        ranked.side.tolist(),
        ranked.provable.tolist(),
        ranked.n_better.tolist(),
        ranked.n_candidates.tolist(),
        ranked.answer_score.tolist(),
        trained.rank.tolist(),
    )
    atoms = ranked.queries[ranked.query_row].tolist()
    return sorted(
        (tuple(atom), *numbers) for atom, numbers in zip(atoms, columns)
    )
