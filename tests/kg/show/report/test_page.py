"""The page: well-formed, without any request, hostile names as text, honest about what a run lacks."""

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from funcppo.kg.ranking import calibration
from funcppo.kg.show.report import page, tables
from funcppo.kg.show.report.figures import RunReport
from funcppo.kg.show.report.tables import (
    LearntWeights,
    MovedRelation,
    MovedWeight,
)

VOID = {"meta", "input", "br", "hr", "img", "link", "source"}
# attributes of HTML and SVG that make a browser fetch something
FETCHING = {"src", "href", "xlink:href", "action", "srcset", "data", "poster"}


class Checker(HTMLParser):
    """Checks nesting, and collects texts and tags."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.problems = [], [], []
        self.texts = {"": []}

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            value = value or ""
            if name.startswith("on"):
                self.problems.append(f"{tag} {name}")
            if name in FETCHING and not value.startswith("#"):
                self.problems.append(f"{tag} {name}={value}")
            if name == "style" and re.search(r"url\((?!#)", value):
                self.problems.append(f"{tag} style={value}")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, text):
        place = self.open[-1] if self.open else ""
        self.texts.setdefault(place, []).append(text)


def checked(text):
    """The checker of a page that is well-formed and asks for nothing."""
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == [] and checker.problems == []
    assert set(checker.tags) >= {"html", "head", "body", "title", "svg"}
    assert checker.tags.count("script") == checker.tags.count("style") == 1
    assert not set(checker.tags) & {"img", "link", "iframe", "object", "b"}
    assert not re.search(r"url\((?!#)|@import", "".join(checker.texts["style"]))
    return checker


def test_the_checker_sees_what_it_is_for():
    for text in (
        "<p><b></p>",
        "<img src=x>",
        '<a href="http://x">x</a>',
        "<p onclick=x></p>",
        '<p style="a: url(http://x)"></p>',
    ):
        checker = Checker()
        checker.feed(text)
        assert checker.problems, text


@pytest.mark.parametrize(
    "names", [["questions"], ["proofs"], ["questions", "other"]]
)
def test_a_page_is_well_formed_asks_for_nothing_and_escapes_names(
    reports, names
):
    text = page.render([reports[name] for name in names])
    texts = checked(text).texts
    assert "<script>alert" not in text and "49" not in texts["bdi"]
    shown = "\n".join(text for found in texts.values() for text in found)
    for name in ("<script>alert(1)</script>", '$p$ "q"', "{{ 7*7 }}"):
        assert name in shown
    assert "\u202e" not in text and "\x1b" not in text
    assert "x" * 300 not in text


def test_a_page_has_its_parts(reports):
    report = reports["questions"]
    text = page.render([report])
    for part in ("results", "curves", "ranks", "relations", "gains",
                 "reliability", "rules", "weights", "queries", "runs"):  # fmt: skip
        assert f'<section id="{part}">' in text
    mrr = report.measured.trained.metrics["mrr"]
    assert f"<td>{mrr:.4f}</td>" in text
    assert "is no probability" in text
    assert "14 of 14 test queries" in text
    assert text.count('<details class="query"') == 14
    assert "ppo.n_envs" in text


def test_a_page_says_what_learning_moved_and_what_it_did_to_probabilities(
    reports,
):
    run = reports["questions"].measured
    weight = MovedWeight("link", "<b>links</b>", "r", "head", 0.5, -1.25)
    relation = MovedRelation("r", 7, 1.75)
    moved = dataclasses.replace(
        run, learnt=LearntWeights(7, (weight,), (relation,))
    )
    text = page.render([RunReport(moved, [])])
    checked(text)
    assert "training moved 7 weights; the 1 that moved most are listed" in text
    for cell in ("&lt;b&gt;links&lt;/b&gt;", "-1.250", "1.750"):
        assert f"<td>{cell}</td>" in text
    for value in (run.temperature, run.results["calibration"]["temperature"]):
        assert f"<td>trained, temperature {value:.3g}</td>" in text
    losses = [
        calibration.log_loss(run.bins[state])
        for state in ("untrained", "trained", "trained_at_temperature")
    ]
    assert all(f"<td>{loss:.4f}</td>" in text for loss in losses)
    gain = tables.gains([run])
    assert f"<td>{gain.gain[0, 0]:+.4f}" in text


def test_success_is_called_what_it_is(reports):
    text = page.render([reports["proofs"]])
    assert "not that the atom is true" in text
    assert "is no probability" not in text


def test_several_runs_give_means_with_a_deviation(reports):
    found = [reports["questions"], reports["other"]]
    table = page.results_table([report.measured for report in found])
    assert all(row[-1] == "2" and "±" in row[1] for row in table.rows)
    one = page.results_table([found[0].measured])
    assert "±" not in "".join(one.rows[0])


def test_runs_on_other_data_have_no_page(reports):
    report = reports["other"]
    other = report.measured
    other = dataclasses.replace(other, data_fingerprint="?")
    with pytest.raises(ValueError, match="other triples"):
        page.render([reports["questions"], RunReport(other, [])])


def test_what_a_run_lacks_is_said(reports):
    run = reports["questions"].measured
    lacking = dataclasses.replace(
        run,
        update=1,
        is_trained=False,
        best_update=0,
        results={},
        log=(),
        ranked={},
        n_test=0,
        n_ranked=0,
        rules=(),
    )
    text = page.render([RunReport(lacking, [])])
    assert "unfinished: the run stands at update 1 of 4" in text
    assert "no update of PPO ranked valid better" in text
    assert "no test split: nothing is ranked" in text
    assert text.count("Not drawn: ") == 6
    unchanged = dataclasses.replace(run, update=0, best_update=0)
    text = page.render([RunReport(unchanged, [])])
    assert "no update of PPO was made" in text
    stopped = dataclasses.replace(run, update=1)
    text = page.render([RunReport(stopped, [])])
    assert "1 of 4, stopped early" in text and "unfinished" not in text
    sampled = dataclasses.replace(run, n_test=900)
    text = page.render([RunReport(sampled, [])])
    assert "14 of 900 test queries are ranked" in text
