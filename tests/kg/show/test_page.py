"""The page: well-formed, without any request, hostile names as text, honest about what a run lacks."""

import dataclasses
import re

import pytest

from funcppo.kg.ranking import evaluate
from funcppo.kg.show import figures, page
from funcppo.kg.show.measure import LearntWeights, MovedWeight
from tests.kg.show.html_page import Page


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
    text = page.render([reports[name] for name in names])
    found = checked(text)
    assert "<script>alert" not in text and "49" not in found.words
    for name in ("<script>alert(1)</script>", '$p$ "q"', "{{ 7*7 }}"):
        assert name in "\n".join(found.words)
    assert "\u202e" not in text and "\x1b" not in text
    assert "x" * 300 not in text


def test_a_page_has_its_parts(reports):
    report = reports["questions"]
    text = page.render([report])
    for part in ("results", "curves", "ranks", "relations", "gains",
                 "reliability", "rules", "weights", "queries", "runs"):  # fmt: skip
        assert f'<section id="{part}">' in text
    assert f"<td>{report.trained.metrics['mrr']:.4f}</td>" in text
    assert "is no probability" in text
    assert "14 of 14 test queries" in text
    assert text.count('<details class="query"') == 14
    assert "ppo.n_envs" in text
    text = page.render([reports["proofs"]])
    assert "not that the atom is true" in text
    assert "is no probability" not in text
    assert '<section id="weights">' not in text


def test_a_page_says_what_learning_moved_and_what_it_did_to_probabilities(
    reports,
):
    run = reports["questions"]
    weight = MovedWeight("link", "<b>links</b>", "r", "head", 0.5, -1.25)
    learnt = LearntWeights(7, (weight,), (("r", 7, 1.75),))
    moved = dataclasses.replace(run, learnt=learnt)
    text = page.render([moved])
    checked(text)
    assert "training moved 7 weights; the 1 that moved most are listed" in text
    for cell in ("&lt;b&gt;links&lt;/b&gt;", "-1.250", "1.750"):
        assert f"<td>{cell}</td>" in text
    assert f"<td>trained, temperature {run.temperature:.3g}</td>" in text
    for state in ("untrained", "trained", "trained_at_temperature"):
        loss = evaluate.log_loss(run.bins[state])
        assert f"<td>{loss:.4f}</td>" in text
    gain = figures.gains([run])["gain"]
    assert f"<td>{gain[0, 0]:+.4f}" in text


def test_several_runs_give_means_with_a_deviation(reports):
    found = [reports["questions"], reports["other"]]
    table = page.results_table(found)
    assert all(row[-1] == "2" and "±" in row[1] for row in table["rows"])
    one = page.results_table(found[:1])
    assert "±" not in "".join(one["rows"][0])


def test_what_a_run_lacks_is_said(reports):
    run = reports["questions"]
    lacking = dataclasses.replace(
        run,
        update=1,
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
    text = page.render([lacking])
    assert "unfinished: the run stands at update 1 of 4" in text
    assert "no update of PPO ranked valid better" in text
    assert "no test split: nothing is ranked" in text
    assert text.count("Not drawn: ") == 6
    for changes, line in (
        ({"update": 0, "best_update": 0}, "no update of PPO was made"),
        ({"update": 1}, "1 of 4, stopped early"),
        (
            {"sizes": run.sizes | {"test": 900}},
            "14 of 900 test queries are ranked",
        ),
    ):
        text = page.render([dataclasses.replace(run, **changes)])
        assert line in text and "unfinished" not in text
