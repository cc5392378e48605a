"""Tables by hand, pictures that draw their tables, and SVG of hostile names that asks for nothing."""

import dataclasses
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from funcppo.kg.answers import Answerer, calibrate
from funcppo.kg.ranking import evaluate
from funcppo.kg.run.run import open_run
from funcppo.kg.run.subject import run_subject
from funcppo.kg.show import report
from tests.kg.show.graphs import LIKES
from tests.kg.show.html_page import Page

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def run(reports):
    """A small run with a log of some updates."""
    log = tuple(
        {"update": update} | dict.fromkeys(report.CURVES, 1.5**update)
        for update in range(3)
    )
    return dataclasses.replace(reports["questions"], log=log)


# -- tables


def test_a_curve_has_the_updates_with_a_number(run):
    log = ({"update": 0, "loss": None}, {"update": 1, "loss": 3.0})
    run = dataclasses.replace(run, log=log)
    assert report.curve(run, "loss") == {"update": [1], "loss": [3.0]}
    assert not any(report.curve(run, "no such quantity").values())


def test_relations_have_the_mrr_of_the_evaluation(run):
    """Its gain is over the better of the untrained policy and the rules."""
    (table,) = report.relations(run)
    assert (np.diff(table["queries_and_sides"]) <= 0).all()
    columns = run.by_rules, run.untrained, run.trained
    for column, metrics in zip(("rule_score", "untrained", "trained"), columns):
        groups = metrics["by_group"]["relations"]
        assert set(table["relation"]) == set(groups)
        for place, name in enumerate(table["relation"]):
            both = groups[name]["both"]
            assert table[column][place] == both["mrr"]["expected"]
            assert table["ceiling"][place] == both["ceiling"]
    before = np.maximum(table["rule_score"], table["untrained"])
    assert (table["gain"] == table["trained"] - before).all()
    labelled = dataclasses.replace(run, labels={LIKES: "is fond of"})
    names = set(table["relation"]) - {LIKES} | {"is fond of"}
    assert set(report.relations(labelled)[0]["relation"]) == names


def test_reliability_is_that_of_the_scores_of_triples(run):
    losses, bins = report.reliability(run)
    fit = calibrate(Answerer(run_subject(open_run(Path(run.name)))))
    record = evaluate.bins_to_json(fit.bins)
    assert losses["log_loss"] == [record["log_loss"]]
    shares = [row["share_right"] for row in record["bins"]]
    assert bins["share_right"] == shares


def test_nothing_to_draw_is_an_error_of_one_line(reports):
    run = reports["questions"]
    nothing = {"log": (), "metrics": {}, "rules": (), "reliability": {}}
    empty = dataclasses.replace(run, **nothing)
    for kind, words in {
        "results": "expected ranks of test",
        "curves": "expected lines in metrics.jsonl",
        "relations": "expected ranks of test",
        "reliability": "expected ranks of test",
        "rules": "expected test queries that rules derive",
    }.items():
        with pytest.raises(ValueError, match=words):
            report.draw(kind, empty)


# -- pictures


def test_bars_and_lines_are_those_of_the_table(run):
    figure, tables = report.draw("curves", run)
    for axes, table in zip(figure.axes, tables, strict=True):
        (_, update), (_, values) = table.items()
        np.testing.assert_array_equal(axes.lines[0].get_xdata(), update)
        np.testing.assert_allclose(axes.lines[0].get_ydata(), values)
    for kind, column in {"results": "mrr", "relations": "trained"}.items():
        figure, (table,) = report.draw(kind, run)
        widths = [bar.get_width() for bar in figure.axes[0].patches]
        np.testing.assert_allclose(widths, table[column])


@pytest.mark.filterwarnings("error")
def test_pictures_hold_hostile_names_as_text_and_share_no_ids(run):
    ids = []
    for kind in report.KINDS:
        figure, table = report.draw(kind, run)
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


@pytest.mark.parametrize("name", ["questions", "proofs"])
def test_a_page_is_well_formed_asks_for_nothing_and_escapes_names(
    reports, name
):
    text, _ = report.render(reports[name])
    found = checked(text)
    assert "<script>alert" not in text and "49" not in found.words
    for name in ("<script>alert(1)</script>", '$p$ "q"', "{{ 7*7 }}"):
        assert name in "\n".join(found.words)
    assert "\u202e" not in text and "\x1b" not in text
    assert "x" * 300 not in text


def test_a_page_has_its_parts(reports):
    run = reports["questions"]
    text, tables = report.render(run)
    for part in ("results", "relations", "reliability", "rules", "queries",
                 "runs"):  # fmt: skip
        assert f'<section id="{part}">' in text
    assert '<section id="curves">' not in text  # there is no update
    assert f"<td>{run.trained['mrr']:.4f}</td>" in text
    loss = run.reliability["log_loss"]
    assert f"<td>{loss:.4f}</td>" in text
    (table,) = tables["relations"]
    assert f"<td>{table['gain'][0]:.4f}</td>" in text
    assert "14 of 14 test queries" in text
    assert text.count('<details class="query"') == 14
    assert "ppo.n_envs" in text
    text, tables = report.render(reports["proofs"])
    assert '<section id="curves">' in text
    assert set(tables) == set(report.KINDS)


def test_a_page_shows_what_the_valid_split_decided(reports):
    """Whatever the columns of the table in results.json are."""
    run = reports["questions"]
    rows = [{"stage": "<b>", "gain_of": 0.25, "kept": True, "why": None}]
    changed = dataclasses.replace(run, results=run.results | {"choices": rows})
    text, _ = report.render(changed)
    assert '<th scope="col">gain of</th>' in text
    assert "<td>&lt;b&gt;</td><td>0.2500</td><td>True</td><td></td>" in text
    results = dict(run.results)
    results.pop("choices", None)
    text, _ = report.render(dataclasses.replace(run, results=results))
    assert "valid split decided" not in text


def test_what_a_run_lacks_is_said(reports):
    run = reports["questions"]
    none = {"results": {}, "log": (), "metrics": {}, "rules": (), "entries": ()}
    none |= {
        "reliability": {},
        "best_update": 0,
        "is_trained": False,
        "n_ranked": 0,
    }
    stands = {"update": 1, "n_updates": 4, "sizes": run.sizes | {"test": 0}}
    lacking = dataclasses.replace(run, **none, **stands)
    text, _ = report.render(lacking)
    assert "unfinished: the run stands at update 1 of 4" in text
    assert "no update of PPO ranked valid better" in text
    assert "no test split: nothing is ranked" in text
    assert text.count("Not drawn: ") == 5
    for changes, line in (
        ({"n_updates": 4}, "no update of PPO was made"),
        ({"update": 1, "n_updates": 4}, "1 of 4, stopped early"),
        ({"sizes": run.sizes | {"test": 900}}, "14 of 900 test queries are"),
    ):
        text, _ = report.render(dataclasses.replace(run, **changes))
        assert line in text and "unfinished" not in text
