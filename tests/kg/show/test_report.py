"""Tables by hand, pictures that draw their tables, and SVG of hostile names that asks for nothing."""

import dataclasses
import itertools
import json
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import matplotlib.legend
import numpy as np
import pytest

from funcppo.kg.ranking import evaluate
from funcppo.kg.ranking.evaluate import Bins
from funcppo.kg.show import report
from funcppo.kg.show.measure import (
    LearntWeights,
    MovedWeight,
    RuleUse,
    ScoreRanks,
)
from funcppo.rl import Returns
from tests.kg.show.html_page import Page

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def pair(reports):
    """Two runs on the same data."""
    return [reports["questions"], reports["other"]]


@pytest.fixture(params=[1, 2], ids=["one run", "two runs"])
def shown(request, pair):
    """Small runs, as if training had moved some weights: it keeps the untrained ones where valid has a few queries."""
    moved = [
        MovedWeight("link", f"evidence {i}", name, "head", 0.5, i - 20.0)
        for i in range(40)
        for name in ("<b>likes</b>", '$p$ "q"', "rel\u202e x")
    ]
    learnt = LearntWeights(
        len(moved), tuple(moved), (("<b>likes</b>", 40, 2.5),)
    )
    log = tuple(
        {"update": update} | dict.fromkeys(report.CURVES, 1.5**update)
        for update in range(3)
    )
    return [
        dataclasses.replace(run, learnt=learnt, log=log)
        for run in pair[: request.param]
    ]


# -- tables


def test_a_band_is_a_standard_deviation_wide_and_of_one_run_has_no_width():
    mean, spread = report.band(np.array([[1.0, 4.0], [3.0, 4.0]]))
    np.testing.assert_allclose(mean, [2.0, 4.0])
    np.testing.assert_allclose(spread, [2**0.5, 0.0])
    assert report.band(np.array([[1.0, 4.0]]))[1].tolist() == [0, 0]


def test_a_curve_has_the_updates_that_all_runs_have(pair):
    log = ({"update": 0, "loss": None}, {"update": 1, "loss": 3.0})
    shorter = dataclasses.replace(pair[0], log=log)
    longer = dataclasses.replace(
        pair[1], log=(*log, {"update": 2, "loss": 5.0})
    )
    curve = report.curve([shorter, longer], "loss")
    assert curve["update"].tolist() == [1]
    assert curve["value"].tolist() == [[3.0]] * 2
    assert curve["n_left_out"] == 1
    assert report.curve([longer], "loss")["update"].tolist() == [1, 2]
    assert not len(report.curve([shorter], "no such quantity")["update"])


def test_ranks_fall_into_the_bins_that_name_them(pair):
    rows = pair[0].trained._replace(
        rank=np.array([1, 1.5, 3, 4, 1000, 1001, 2.0])
    )
    run = dataclasses.replace(
        pair[0],
        provable=np.array([True] * 6 + [False]),
        ranked={"evidence, untrained": rows, "evidence, trained": rows},
    )
    table = report.ranks([run])
    counts = (table["trained"][0] * 7).round().astype(int)
    assert {name: n for name, n in zip(table["bins"], counts) if n} == {
        "1": 1, "2-3": 2, "4-10": 1, "301-1000": 1, "> 1000": 1,
        "not derivable": 1,
    }  # fmt: skip


def test_relations_have_the_mrr_of_the_evaluation(pair):
    table = report.relations(pair)
    assert (np.diff(table["n_rows"]) <= 0).all()
    for i, run in enumerate(pair):
        groups = run.trained.metrics["by_group"]["relations"]
        assert set(table["names"]) == set(groups)
        for name, trained, ceiling in zip(
            table["names"], table["trained"][i], table["ceiling"][i]
        ):
            both = groups[name]["both"]
            assert trained == pytest.approx(both["mrr"]["expected"])
            assert ceiling == pytest.approx(both["ceiling"])


def test_gains_are_over_the_better_score_and_the_greatest_loss_is_first(pair):
    """Two relations of two rows: one gains over the untrained policy, the other loses to the rules."""
    run = pair[0]

    def ranked(values):
        reciprocal = np.array(values)
        return ScoreRanks(1 / reciprocal, reciprocal, {})

    named = dict(run.ranked)
    named[run.config.rule_score] = ranked([0.1, 0.1, 1.0, 0.6])
    named[f"{run.score}, untrained"] = ranked([0.2, 0.4, 0.1, 0.1])
    named[f"{run.score}, trained"] = ranked([0.6, 0.6, 0.5, 0.5])
    run = dataclasses.replace(
        run,
        ranked=named,
        relation=np.array([1, 1, 2, 2]),
        provable=np.ones(4, dtype=bool),
    )
    table = report.gains([run])
    assert table["names"].tolist() == [run.predicates[1], run.predicates[0]]
    np.testing.assert_allclose(table["gain"][0], [0.5 - 0.8, 0.6 - 0.3])
    np.testing.assert_allclose(table["rules"][0], [0.8, 0.1])
    # Deviations of the differences -.5, -.1 and .4, .2, over the root of 2.
    np.testing.assert_allclose(
        table["error"], np.array([0.08, 0.02]) ** 0.5 / 2**0.5
    )
    other = dataclasses.replace(
        run, ranked=named | {f"{run.score}, trained": ranked([0.8] * 4)}
    )
    both = report.gains([run, other])
    np.testing.assert_allclose(both["gain"].mean(0), [-0.15, 0.4])
    np.testing.assert_allclose(both["error"], [0.3 / 2**0.5, 0.2 / 2**0.5])


def test_reliability_of_one_run_is_wilsons_and_of_several_a_deviation(pair):
    columns = np.array([1, 0]), np.array([1.0, 0.0]), np.array([2.0, 0.0])
    bins = [Bins(np.array([n, 0]), *columns) for n in (4, 2)]
    states = ("untrained", "trained", "trained_at_temperature")
    runs = [
        dataclasses.replace(r, bins=dict.fromkeys(states, b))
        for r, b in zip(pair, bins)
    ]
    one = report.reliability(runs[:1])["trained"]
    both = report.reliability(runs)["trained_at_temperature"]
    low, high = evaluate.wilson(np.array([1]), np.array([4]))
    assert (one["low"][0], one["high"][0]) == (low[0], high[0])
    assert one["probability"][0, 0] == 0.25
    assert np.isnan(one["frequency"][0, 1])
    np.testing.assert_allclose(both["frequency"][:, 0], [0.25, 0.5])
    width = both["high"][0] - both["low"][0]
    np.testing.assert_allclose(width, 2 * 0.25 / 2**0.5)
    np.testing.assert_allclose(both["log_loss"], [0.5, 1.0])

    # without a temperature in each run there is no curve of it
    older = dataclasses.replace(pair[1], results={})
    table = report.reliability([pair[0], older])
    assert table["trained_at_temperature"] is None
    assert table["temperature"] == []


def test_rules_are_joined_by_their_text_and_ordered_by_proofs(pair):
    a = RuleUse("a", 2, 4.0, 0.5, 0.7, 3, 0)
    b = RuleUse("b", 1, 2.0, 0.5, 0.1, 1, 2)
    runs = [
        dataclasses.replace(pair[0], rules=(a, b)),
        dataclasses.replace(pair[1], rules=(a._replace(after=0.9),)),
    ]
    table = report.rules(runs)
    assert table["texts"] == ["b", "a"] and table["n_runs"].tolist() == [1, 2]
    np.testing.assert_allclose(table["after"], [0.1, 0.8])
    np.testing.assert_allclose(table["confidence"], [0.5, 0.5])
    assert table["n_firings"].tolist() == [1, 6]


def returns_of(n_seeds):
    """Seeds that return their number, plus 100 at the second evaluation."""
    greedy = np.arange(float(n_seeds))[:, None] + np.array([[0.0, 100.0]])
    zeros = np.zeros(2, dtype=np.int64)
    seeds = tuple(range(n_seeds))
    return Returns(seeds, np.array([10, 20]), greedy, -greedy, zeros)


def test_a_return_curve_is_the_interquartile_mean_with_its_interval():
    table = report.return_curve("a", "CartPole-v1", returns_of(8), "greedy")
    assert table["steps"].tolist() == [10, 20] and table["n_seeds"] == 8
    np.testing.assert_allclose(table["iqm"], [3.5, 103.5])
    assert (table["low"] < table["iqm"]).all()
    assert (table["iqm"] < table["high"]).all()
    one = report.return_curve("a", "CartPole-v1", returns_of(1), "sampled")
    assert one["low"].tolist() == one["iqm"].tolist() == one["high"].tolist()


def test_nothing_to_draw_is_an_error_of_one_line(reports):
    run = reports["questions"]
    still = run.learnt._replace(weights=(), relations=())
    empty = dataclasses.replace(run, log=(), ranked={}, rules=(), learnt=still)
    for kind, words in {
        "curves": "expected lines in metrics.jsonl",
        "ranks": "expected a test split",
        "relations": "expected a test split",
        "gains": "expected a test split",
        "reliability": "expected a test split",
        "weights": "expected weights that training moved",
        "rules": "expected test queries that rules derive",
    }.items():
        with pytest.raises(ValueError, match=words):
            report.draw(kind, [empty])
    with pytest.raises(ValueError, match="got one that learns from proofs"):
        report.weights([reports["proofs"]])
    with pytest.raises(ValueError, match="evidence and success"):
        report.reliability([run, reports["proofs"]])


# -- pictures


def test_bars_and_lines_are_those_of_the_table(shown):
    figure, table = report.draw("curves", shown)
    assert [curve["name"] for curve in table] == list(report.CURVES)
    line = figure.axes[0].lines[0]
    np.testing.assert_array_equal(line.get_xdata(), table[0]["update"])
    np.testing.assert_allclose(line.get_ydata(), table[0]["value"].mean(0))

    figure, table = report.draw("gains", shown)
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    np.testing.assert_allclose(widths, table["gain"].mean(0))

    figure, (single, by_relation) = report.draw("weights", shown)
    for axes, values in zip(
        figure.axes,
        (single["after"] - single["before"], by_relation["distance"]),
    ):
        widths = [bar.get_width() for bar in axes.patches]
        np.testing.assert_allclose(widths, values[: report.MAX_BARS])

    figure, table = report.draw("ranks", shown)
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    drawn = [*table["untrained"].mean(0), *table["trained"].mean(0)]
    np.testing.assert_allclose(heights, drawn)


@pytest.fixture
def slow_clock(monkeypatch):
    """A clock of Matplotlib by which whatever it times takes a minute."""
    minutes = itertools.count(0.0, 60.0)
    clock = SimpleNamespace(perf_counter=lambda: next(minutes))
    monkeypatch.setattr(matplotlib.legend, "time", clock)
    return minutes


@pytest.mark.filterwarnings("error")
def test_pictures_hold_hostile_names_as_text_and_share_no_ids(
    shown, slow_clock
):
    """Without a warning: Matplotlib warns of a legend that took a second, unless its place was asked for."""
    ids = []
    for kind in report.KINDS:
        figure, table = report.draw(kind, shown)
        assert json.loads(json.dumps(report.to_json(table), allow_nan=False))
        inline = report.to_inline_svg(figure, kind, 'a "title" <x>')
        assert "currentColor" in inline and report.INK not in inline
        for text in (report.to_svg(figure).decode(), inline):
            root = ElementTree.fromstring(text)
            tags = {element.tag.removeprefix(SVG) for element in root.iter()}
            assert not tags & {"script", "image", "foreignObject", "b"}
            for element in root.iter():
                for key, value in element.attrib.items():
                    assert not key.lower().startswith("on")
                    assert "http" not in value
        own = [e.get("id") for e in root.iter() if e.get("id")]
        links = [
            value
            for element in root.iter()
            for key, value in element.attrib.items()
            if key.endswith("href")
        ]
        assert all(link[1:] in own for link in links)
        ids += own
        if kind == "relations":
            texts = {element.text for element in root.iter(f"{SVG}text")}
            assert {"<b>likes</b>", '$p$ "q"', "rel\\u202e x"} <= texts
    assert len(set(ids)) == len(ids)
    assert next(slow_clock) > 0.0
    assert report.to_png(figure).startswith(b"\x89PNG")


def checked(text):
    """The parts of a page that is well-formed and asks for nothing."""
    found = Page(text)
    tags = [tag for tag, _ in found.tags]
    assert set(tags) >= {"html", "head", "body", "title", "svg"}
    assert tags.count("script") == tags.count("style") == 1
    assert not set(tags) & {"img", "link", "iframe", "object", "b"}
    assert all(link.startswith("#") for link in found.links)
    assert not re.search(r"url\((?!#)|@import", text)
    return found


@pytest.mark.parametrize(
    "names", [["questions"], ["proofs"], ["questions", "other"]]
)
def test_a_page_is_well_formed_asks_for_nothing_and_escapes_names(
    reports, names
):
    text = report.render([reports[name] for name in names])
    found = checked(text)
    assert "<script>alert" not in text and "49" not in found.words
    for name in ("<script>alert(1)</script>", '$p$ "q"', "{{ 7*7 }}"):
        assert name in "\n".join(found.words)
    assert "\u202e" not in text and "\x1b" not in text
    assert "x" * 300 not in text


def test_a_page_has_its_parts(reports):
    run = reports["questions"]
    text = report.render([run])
    for part in ("results", "ranks", "relations", "gains", "reliability",
                 "rules", "weights", "queries", "runs"):  # fmt: skip
        assert f'<section id="{part}">' in text
    assert '<section id="curves">' not in text  # there is no update
    assert f"<td>{run.trained.metrics['mrr']:.4f}</td>" in text
    assert "is no probability" in text
    assert "14 of 14 test queries" in text
    assert text.count('<details class="query"') == 14
    assert "ppo.n_envs" in text
    text = report.render([reports["proofs"]])
    assert "not that the atom is true" in text
    assert "is no probability" not in text
    assert '<section id="weights">' not in text
    assert '<section id="curves">' in text


def test_a_page_says_what_learning_moved_and_what_it_did_to_probabilities(
    reports,
):
    run = reports["questions"]
    weight = MovedWeight("link", "<b>links</b>", "r", "head", 0.5, -1.25)
    learnt = LearntWeights(7, (weight,), (("r", 7, 1.75),))
    moved = dataclasses.replace(run, learnt=learnt)
    text = report.render([moved])
    checked(text)
    assert "training moved 7 weights; the 1 that moved most are listed" in text
    for cell in ("&lt;b&gt;links&lt;/b&gt;", "-1.250", "1.750"):
        assert f"<td>{cell}</td>" in text
    assert f"<td>trained, temperature {run.temperature:.3g}</td>" in text
    for state in ("untrained", "trained", "trained_at_temperature"):
        loss = evaluate.log_loss(run.bins[state])
        assert f"<td>{loss:.4f}</td>" in text
    gain = report.gains([run])["gain"]
    assert f"<td>{gain[0, 0]:+.4f}" in text


def test_a_page_shows_what_the_valid_split_decided(reports):
    """Whatever the columns of the table in results.json are."""
    run = reports["questions"]
    rows = [{"stage": "<b>", "gain_of": 0.25, "kept": True, "why": None}]
    changed = dataclasses.replace(run, results=run.results | {"choices": rows})
    text = report.render([changed])
    assert '<th scope="col">gain of</th>' in text
    assert "<td>&lt;b&gt;</td><td>0.2500</td><td>True</td><td></td>" in text
    results = dict(run.results)
    results.pop("choices", None)
    text = report.render([dataclasses.replace(run, results=results)])
    assert "valid split decided" not in text


def test_several_runs_give_means_with_a_deviation(reports):
    found = [reports["questions"], reports["other"]]
    table = report.results_table(found)
    assert all(row[-1] == "2" and "±" in row[1] for row in table["rows"])
    one = report.results_table(found[:1])
    assert "±" not in "".join(one["rows"][0])


def test_what_a_run_lacks_is_said(reports):
    run = reports["questions"]
    lacking = dataclasses.replace(
        run,
        update=1,
        n_updates=4,
        is_trained=False,
        best_update=0,
        results={},
        log=(),
        ranked={},
        sizes=run.sizes | {"test": 0},
        n_ranked=0,
        rules=(),
        entries=(),
    )
    text = report.render([lacking])
    assert "unfinished: the run stands at update 1 of 4" in text
    assert "no update of PPO ranked valid better" in text
    assert "no test split: nothing is ranked" in text
    assert text.count("Not drawn: ") == 6
    for changes, line in (
        ({"n_updates": 4}, "no update of PPO was made"),
        ({"update": 1, "n_updates": 4}, "1 of 4, stopped early"),
        (
            {"sizes": run.sizes | {"test": 900}},
            "14 of 900 test queries are ranked",
        ),
    ):
        text = report.render([dataclasses.replace(run, **changes)])
        assert line in text and "unfinished" not in text
