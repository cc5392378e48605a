"""Tables of runs: bins by hand, bands over runs, and agreement with the metrics of an evaluation."""

import dataclasses
import json

import numpy as np
import pytest

from funcppo.kg.ranking import calibration
from funcppo.kg.ranking.calibration import Bins
from funcppo.kg.show.report import tables
from funcppo.kg.show.report.tables import (
    LearntWeights,
    MovedRelation,
    MovedWeight,
    RuleUse,
    ScoreRanks,
)


def test_a_band_is_a_standard_deviation_wide_and_of_one_run_has_no_width():
    drawn = tables.band(np.array([[1.0, 4.0], [3.0, 4.0]]))
    np.testing.assert_allclose(drawn.mean, [2.0, 4.0])
    np.testing.assert_allclose(drawn.high - drawn.mean, [2**0.5, 0.0])
    one = tables.band(np.array([[1.0, 4.0]]))
    np.testing.assert_array_equal(one.low, one.high)


@pytest.fixture
def pair(reports):
    """Two runs on the same data."""
    return [reports["questions"].measured, reports["other"].measured]


def test_a_curve_has_the_updates_that_all_runs_have(pair):
    log = ({"update": 0, "loss": None}, {"update": 1, "loss": 3.0})
    shorter = dataclasses.replace(pair[0], log=log)
    longer = dataclasses.replace(
        pair[1], log=(*log, {"update": 2, "loss": 5.0})
    )
    curve = tables.curve([shorter, longer], "loss")
    assert curve.update.tolist() == [1] and curve.value.tolist() == [[3.0]] * 2
    assert curve.n_left_out == 1
    assert tables.curve([longer], "loss").update.tolist() == [1, 2]
    assert not len(tables.curve([shorter], "no such quantity").update)


def test_curves_hold_the_lines_of_the_log(reports):
    run = reports["proofs"].measured
    curve = tables.curve([run], "valid_metric")
    logged = {
        r["update"]: r["valid_metric"] for r in run.log if "valid_metric" in r
    }
    logged = {u: value for u, value in logged.items() if value is not None}
    assert len(logged) >= 2
    assert dict(zip(curve.update.tolist(), curve.value[0].tolist())) == logged


def test_shares_of_ranks_add_up_to_1_and_the_last_is_what_no_rule_derives(pair):
    table = tables.ranks(pair)
    for shares in (table.untrained, table.trained):
        np.testing.assert_allclose(shares.sum(1), 1.0)
        np.testing.assert_allclose(
            shares[:, -1], [1 - run.provable.mean() for run in pair]
        )
    # Two of 14 queries, on both sides.
    np.testing.assert_allclose(table.trained[:, -1], 2 / 14)
    first = (pair[0].trained.rank <= 1) & pair[0].provable
    np.testing.assert_allclose(table.trained[0, 0], first.mean())


def test_ranks_fall_into_the_bins_that_name_them(pair):
    rows = pair[0].trained._replace(rank=np.array([1, 1.5, 3, 4, 1000, 1001.0]))
    run = dataclasses.replace(
        pair[0],
        provable=np.array([True] * 6),
        relation=np.ones(6, dtype=np.int64),
        ranked={"evidence, untrained": rows, "evidence, trained": rows},
    )
    table = tables.ranks([run])
    counts = dict(zip(table.bins, (table.trained[0] * 6).round().astype(int)))
    assert {name: n for name, n in counts.items() if n} == {
        "1": 1, "2-3": 2, "4-10": 1, "301-1000": 1, "> 1000": 1,
    }  # fmt: skip


def test_relations_have_the_mrr_of_the_evaluation(pair):
    table = tables.relations(pair)
    assert (np.diff(table.n_rows) <= 0).all()
    for i, run in enumerate(pair):
        groups = run.trained.metrics["by_group"]["relations"]
        assert set(table.names) == set(groups)
        for name, trained, ceiling in zip(
            table.names, table.trained[i], table.ceiling[i]
        ):
            both = groups[name]["both"]
            assert trained == pytest.approx(both["mrr"]["expected"])
            assert ceiling == pytest.approx(both["ceiling"])


def test_reliability_of_one_run_is_wilsons_and_of_several_a_deviation(pair):
    columns = np.array([1, 0]), np.array([1.0, 0.0]), np.array([2.0, 0.0])
    bins = [Bins(np.array([n, 0]), *columns) for n in (4, 2)]
    states = ("untrained", "trained", "trained_at_temperature")
    runs = [
        dataclasses.replace(r, bins=dict.fromkeys(states, b))
        for r, b in zip(pair, bins)
    ]
    one = tables.calibrations(runs[:1]).trained
    both = tables.calibrations(runs).trained_at_temperature
    low, high = calibration.wilson(np.array([1]), np.array([4]))
    assert (one.low[0], one.high[0]) == (low[0], high[0])
    assert one.probability[0, 0] == 0.25 and np.isnan(one.frequency[0, 1])
    np.testing.assert_allclose(both.frequency[:, 0], [0.25, 0.5])
    np.testing.assert_allclose(both.high[0] - both.low[0], 2 * 0.25 / 2**0.5)
    np.testing.assert_allclose(both.log_loss, [0.5, 1.0])


def test_without_a_temperature_in_each_run_there_is_no_curve_of_it(pair):
    table = tables.calibrations(pair)
    assert table.temperature == tuple(run.temperature for run in pair)
    assert table.trained_at_temperature is not None
    older = dataclasses.replace(pair[1], results={})
    table = tables.calibrations([pair[0], older])
    assert table.trained_at_temperature is None and table.temperature == ()


def test_gains_are_over_the_better_score_and_the_greatest_loss_is_first(pair):
    """Two relations of two rows: one gains over the untrained policy, the other loses to the rules."""
    run = pair[0]

    def ranked(values):
        reciprocal = np.array(values)
        return ScoreRanks(1 / reciprocal, reciprocal, {})

    named = dict(zip(run.ranked, run.ranked.values()))
    named[run.config.rule_score] = ranked([0.1, 0.1, 1.0, 0.6])
    named[f"{run.score}, untrained"] = ranked([0.2, 0.4, 0.1, 0.1])
    named[f"{run.score}, trained"] = ranked([0.6, 0.6, 0.5, 0.5])
    run = dataclasses.replace(
        run,
        ranked=named,
        relation=np.array([1, 1, 2, 2]),
        provable=np.ones(4, dtype=bool),
    )
    table = tables.gains([run])
    assert table.names == (run.predicates[1], run.predicates[0])
    np.testing.assert_allclose(table.gain[0], [0.5 - 0.8, 0.6 - 0.3])
    np.testing.assert_allclose(table.rules[0], [0.8, 0.1])
    # Deviations of the differences -.5, -.1 and .4, .2, over the root of 2.
    np.testing.assert_allclose(
        table.error, np.array([0.08, 0.02]) ** 0.5 / 2**0.5
    )
    other = dataclasses.replace(
        run, ranked=named | {f"{run.score}, trained": ranked([0.8] * 4)}
    )
    both = tables.gains([run, other])
    np.testing.assert_allclose(both.gain.mean(0), [-0.15, 0.4])
    np.testing.assert_allclose(both.error, [0.3 / 2**0.5, 0.2 / 2**0.5])


def test_weights_of_several_runs_are_means_and_relations_count_0_where_still(
    pair,
):
    a = MovedWeight("link", "e", "r", "head", 0.0, 1.0)
    b = MovedWeight("rule", "f", "s", "tail", 0.5, -1.5)
    runs = [
        dataclasses.replace(
            pair[0],
            learnt=LearntWeights(2, (b, a), (MovedRelation("s", 1, 2.0),)),
        ),
        dataclasses.replace(
            pair[1],
            learnt=LearntWeights(
                1, (a._replace(after=3.0),), (MovedRelation("r", 1, 3.0),)
            ),
        ),
    ]
    single, by_relation = tables.weights(runs)
    # Both moved by 2; the order of their first listing decides.
    assert single.evidence == ("f", "e") and single.n_runs.tolist() == [1, 2]
    assert single.after.tolist() == [-1.5, 2.0]
    assert by_relation.names == ("r", "s")
    assert by_relation.distance.tolist() == [1.5, 1.0]
    assert by_relation.n_moved.tolist() == [0.5, 0.5]


def test_a_run_that_searches_proofs_has_no_weights_of_evidence(reports):
    with pytest.raises(ValueError, match="got one that learns from proofs"):
        tables.weights([reports["proofs"].measured])


def test_scores_of_different_kinds_have_no_common_reliability(reports):
    runs = [reports[name].measured for name in ("questions", "proofs")]
    with pytest.raises(ValueError, match="evidence and success"):
        tables.calibrations(runs)


def test_rules_are_joined_by_their_text_and_ordered_by_proofs(pair):
    a = RuleUse("a", 2, 4.0, 0.5, 0.7, 3, 0)
    b = RuleUse("b", 1, 2.0, 0.5, 0.1, 1, 2)
    runs = [
        dataclasses.replace(pair[0], rules=(a, b)),
        dataclasses.replace(pair[1], rules=(a._replace(after=0.9),)),
    ]
    table = tables.rules(runs)
    assert table.texts == ("b", "a") and table.n_runs.tolist() == [1, 2]
    np.testing.assert_allclose(table.after, [0.1, 0.8])
    np.testing.assert_allclose(table.confidence, [0.5, 0.5])
    assert table.n_firings.tolist() == [1, 6]


def test_runs_on_other_triples_are_refused(pair):
    other = dataclasses.replace(
        pair[1], data_fingerprint="?", name="b", dataset={"name": "family"}
    )
    tables.check_same_data(pair)
    with pytest.raises(ValueError, match="b: expected a run on the data of"):
        tables.check_same_data([pair[0], other])


def test_tables_are_json_without_nan(pair):
    for table in (
        tables.calibrations(pair),
        *tables.weights(pair),
        tables.gains(pair),
        tables.ranks(pair),
        (tables.curve(pair, "loss"),),
    ):
        text = json.dumps(tables.to_json(table), allow_nan=False)
        assert json.loads(text)
    assert tables.to_json(tables.ranks(pair))["bins"][0] == "1"


def test_only_settings_that_differ_are_listed(pair):
    names = dict(tables.changed_settings(pair[1]))
    assert names["seed"] == "1" and names["ppo.n_envs"] == "8"
    assert "ppo.gamma" not in names
