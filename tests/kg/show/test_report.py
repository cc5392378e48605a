"""Tables by hand, pictures that draw their tables, and SVG of hostile names that asks for nothing."""

import dataclasses
import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from funcppo.kg.ranking import evaluate
from funcppo.kg.ranking.evaluate import Bins
from funcppo.kg.show import report
from funcppo.kg.show.measure import RuleUse
from funcppo.rl import Returns
from tests.kg.show.html_page import Page

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def pair(reports):
    """Two runs on the same data."""
    return [reports["questions"], reports["other"]]


@pytest.fixture(params=[1, 2], ids=["one run", "two runs"])
def shown(request, pair):
    """Small runs with a log of some updates."""
    log = tuple(
        {"update": update} | dict.fromkeys(report.CURVES, 1.5**update)
        for update in range(3)
    )
    return [dataclasses.replace(run, log=log) for run in pair[: request.param]]


# -- tables


def test_a_band_is_a_standard_deviation_wide_and_of_one_run_has_no_width():
    mean, spread = report.band(np.array([[1.0, 4.0], [3.0, 4.0]]))
    np.testing.assert_allclose(mean, [2.0, 4.0])
    np.testing.assert_allclose(spread, [2**0.5, 0.0])
    assert report.band(np.array([[1.0, 4.0]]))[1].tolist() == [0, 0]
    # a stage that one of two runs has
    mean, spread = report.band(np.array([[1.0], [np.nan]]))
    assert (mean.tolist(), spread.tolist()) == ([1.0], [0.0])


def test_a_curve_has_the_updates_that_all_runs_have(pair):
    log = ({"update": 0, "loss": None}, {"update": 1, "loss": 3.0})
    shorter = dataclasses.replace(pair[0], log=log)
    more = {"update": 2, "loss": 5.0}
    longer = dataclasses.replace(pair[1], log=(*log, more))
    curve = report.curve([shorter, longer], "loss")
    assert curve["update"] == [1] and curve["loss"].tolist() == [[3.0]] * 2
    assert report.curve([longer], "loss")["update"] == [1, 2]
    assert not len(report.curve([shorter], "no such quantity")["update"])


def test_relations_have_the_mrr_of_the_evaluation(pair):
    """Its gain is over the better of the untrained policy and the rules."""
    (table,) = report.relations(pair)
    assert (np.diff(table["queries_and_sides"]) <= 0).all()
    for i, run in enumerate(pair):
        columns = run.by_rules, run.untrained, run.trained
        names = "rule_score", "untrained", "trained"
        for column, metrics in zip(names, columns):
            groups = metrics["by_group"]["relations"]
            assert set(table["relation"]) == set(groups)
            for place, name in enumerate(table["relation"]):
                both = groups[name]["both"]
                assert table[column][i, place] == both["mrr"]["expected"]
                assert table["ceiling"][i, place] == both["ceiling"]
    before = np.maximum(table["rule_score"], table["untrained"])
    assert (table["gain"] == table["trained"] - before).all()


def test_reliability_counts_the_candidates_of_all_runs(pair):
    columns = np.array([1, 0]), np.array([1.0, 0.0]), np.array([2.0, 0.0])
    states = ("untrained", "trained", "trained_at_temperature")
    runs = []
    for run, n in zip(pair, (4, 2)):
        padded = (np.pad(x, (0, 8)) for x in (np.array([n, 0]), *columns))
        bins = dict.fromkeys(states, Bins(*padded))
        runs.append(dataclasses.replace(run, bins=bins))
    for n_runs, n in ((1, 4), (2, 6)):
        losses, found = report.reliability(runs[:n_runs])
        assert losses["policy"] == found["policy"] == list(states)
        assert losses["log_loss"] == [2.0 * n_runs / n] * 3
        low, high = evaluate.wilson(np.array([n_runs]), np.array([n]))
        assert (found["low"], found["high"]) == ([low[0]] * 3, [high[0]] * 3)
        assert found["n_candidates"] == [n] * 3
        assert found["share_right"] == [n_runs / n] * 3

    # without a temperature in each run there is no curve of it
    without = {k: runs[1].bins[k] for k in states[:2]}
    older = dataclasses.replace(runs[1], bins=without)
    losses, _ = report.reliability([runs[0], older])
    assert losses["policy"] == list(states[:2])


def test_rules_are_joined_by_their_text_and_ordered_by_proofs(pair):
    a, b = RuleUse("a", 2, 4.0, 1), RuleUse("b", 1, 2.0, 3)
    used = (a, b), (a,)
    runs = [dataclasses.replace(r, rules=x) for r, x in zip(pair, used)]
    (table,) = report.rules(runs)
    assert table["rule"] == ["b", "a"]
    assert (table["right_in_train"], table["of"]) == ([1, 2], [2, 4])
    np.testing.assert_allclose(table["confidence"], [0.5, 0.5])
    assert table["last_step_of"] == [3, 2]


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
    empty = dataclasses.replace(run, log=(), metrics={}, rules=())
    for kind, words in {
        "results": "expected a test split",
        "curves": "expected lines in metrics.jsonl",
        "relations": "expected a test split",
        "reliability": "expected a test split",
        "rules": "expected test queries that rules derive",
    }.items():
        with pytest.raises(ValueError, match=words):
            report.draw(kind, [empty])
    with pytest.raises(ValueError, match="evidence and success"):
        report.reliability([run, reports["proofs"]])


# -- pictures


def test_bars_and_lines_are_those_of_the_table(shown):
    figure, tables = report.draw("curves", shown)
    for axes, table in zip(figure.axes, tables, strict=True):
        (_, update), (_, values) = table.items()
        np.testing.assert_array_equal(axes.lines[0].get_xdata(), update)
        np.testing.assert_allclose(axes.lines[0].get_ydata(), values.mean(0))
    for kind, column in {"results": "mrr", "relations": "trained"}.items():
        figure, (table,) = report.draw(kind, shown)
        widths = [bar.get_width() for bar in figure.axes[0].patches]
        np.testing.assert_allclose(widths, table[column].mean(0))


@pytest.mark.filterwarnings("error")
def test_pictures_hold_hostile_names_as_text_and_share_no_ids(shown):
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
        attributes = [x for e in root.iter() for x in e.attrib.items()]
        links = {value[1:] for key, value in attributes if key.endswith("href")}
        assert links <= set(own)
        ids += own
        if kind == "relations":
            texts = {element.text for element in root.iter(f"{SVG}text")}
            assert {"<b>likes</b>", '$p$ "q"', "rel\\u202e x"} <= texts
    assert len(set(ids)) == len(ids)
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
def test_a_page_is_well_formed_and_asks_for_nothing(reports, names):
    text, _ = report.render([reports[name] for name in names])
    found = checked(text)
    assert "<script>alert" not in text and "49" not in found.words
    for name in ("<script>alert(1)</script>", '$p$ "q"', "{{ 7*7 }}"):
        assert name in "\n".join(found.words)
    assert "\u202e" not in text and "\x1b" not in text
    assert "x" * 300 not in text


def test_a_page_has_its_parts(reports):
    run = reports["questions"]
    text, tables = report.render([run])
    for part in ("results", "relations", "reliability", "rules", "queries",
                 "runs"):  # fmt: skip
        assert f'<section id="{part}">' in text
    assert '<section id="curves">' not in text  # there is no update
    assert f"<td>{run.trained['mrr']:.4f}</td>" in text
    for state in ("untrained", "trained", "trained_at_temperature"):
        loss = evaluate.log_loss(run.bins[state])
        assert f"<td>{loss:.4f}</td>" in text
    (table,) = tables["relations"]
    assert f"<td>{table['gain'][0][0]:.4f}</td>" in text
    assert "is no probability" in text
    assert "14 of 14 test queries" in text
    assert text.count('<details class="query"') == 14
    assert "ppo.n_envs" in text
    text, tables = report.render([reports["proofs"]])
    assert "not that the atom is true" in text
    assert "is no probability" not in text
    assert '<section id="curves">' in text
    assert set(tables) == set(report.KINDS)


def test_a_page_shows_what_the_valid_split_decided(reports):
    """Whatever the columns of the table in results.json are."""
    run = reports["questions"]
    rows = [{"stage": "<b>", "gain_of": 0.25, "kept": True, "why": None}]
    changed = dataclasses.replace(run, results=run.results | {"choices": rows})
    text, _ = report.render([changed])
    assert '<th scope="col">gain of</th>' in text
    assert "<td>&lt;b&gt;</td><td>0.2500</td><td>True</td><td></td>" in text
    results = dict(run.results)
    results.pop("choices", None)
    text, _ = report.render([dataclasses.replace(run, results=results)])
    assert "valid split decided" not in text


def test_several_runs_give_means_with_a_deviation(reports):
    found = [reports["questions"], reports["other"]]
    metrics = {k: v | {"mrr": 0.125} for k, v in found[1].metrics.items()}
    found[1] = dataclasses.replace(found[1], metrics=metrics)
    (table,) = report.results(found)
    assert table["runs"] == [2] * len(table["score"])
    text, _ = report.render(found)
    mrr = np.array([found[0].trained["mrr"], 0.125])
    assert f"<td>{mrr.mean():.4f} ± {mrr.std(ddof=1):.4f}</td>" in text
    assert "±" not in report.render(found[:1])[0].split("<script>")[0]


def test_what_a_run_lacks_is_said(reports):
    run = reports["questions"]
    none = {"results": {}, "log": (), "metrics": {}, "rules": (), "entries": ()}
    none |= {"best_update": 0, "is_trained": False, "n_ranked": 0}
    stands = {"update": 1, "n_updates": 4, "sizes": run.sizes | {"test": 0}}
    lacking = dataclasses.replace(run, **none, **stands)
    text, _ = report.render([lacking])
    assert "unfinished: the run stands at update 1 of 4" in text
    assert "no update of PPO ranked valid better" in text
    assert "no test split: nothing is ranked" in text
    assert text.count("Not drawn: ") == 5
    for changes, line in (
        ({"n_updates": 4}, "no update of PPO was made"),
        ({"update": 1, "n_updates": 4}, "1 of 4, stopped early"),
        ({"sizes": run.sizes | {"test": 900}}, "14 of 900 test queries are"),
    ):
        text, _ = report.render([dataclasses.replace(run, **changes)])
        assert line in text and "unfinished" not in text
