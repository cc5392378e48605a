"""`report`: a page of a run, of several, of an unfinished one; bad input is one line and writes nothing."""

import json
import sys
from xml.etree import ElementTree

import pytest

from funcppo.kg.show import report


def test_a_page_and_its_tables_are_written(programs, trained, tmp_path):
    out = tmp_path / "report.html"
    result = programs.json("report", trained, "--out", out, "--shown", "2")
    assert set(result["tables"]) == set(report.KINDS)
    results = json.loads((trained / "results.json").read_text())["test"]
    (table,) = result["tables"]["results"]
    assert table["score"] == list(results)
    assert table["mrr"] == [of_score["mrr"] for of_score in results.values()]
    text = out.read_text()
    assert text.count('<details class="query"') == 2
    assert "the five regions, tails only" in text


def test_bad_input_is_one_line_and_writes_nothing(programs, trained, tmp_path):
    def error(*args):
        return programs.refused("report", *args)

    out = tmp_path / "r.html"
    to = ("--out", out)
    own = trained / "results.json"
    wrote = "expected a folder that `funcppo train` wrote"
    assert wrote in error(tmp_path, *to)
    assert "expected a file in a folder" in error(trained, "--out", tmp_path)
    assert "would be overwritten" in error(trained, "--out", own)
    assert "expected another file" in error(trained, *to, "--json", out)
    assert "expected an option, got" in error(trained, trained, *to)
    assert "RUN: expected a value, got none" in error(*to)
    assert "--out" in error(trained)
    for name in ("a.pdf", "a", "a.svgz"):
        words = (trained, "--plot", "rules", "--out", tmp_path / name)
        assert "ends in .svg or .png" in error(*words)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named(programs, monkeypatch, trained, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "r.html"
    line = programs.refused("report", trained, "--out", out)
    assert "pip install 'funcppo[plot]'" in line
    assert not out.exists()


@pytest.mark.parametrize(
    ("kind", "name"), [("rules", "a.svg"), ("curves", "a.PNG")]
)
def test_a_picture_is_written(programs, trained, tmp_path, kind, name):
    out = tmp_path / name
    args = ("report", trained, "--plot", kind, "--out", out, "--shown", "2")
    result = programs.json(*args)
    assert result["plot"] == kind and result["tables"]
    content = out.read_bytes()
    if kind == "curves":
        assert content.startswith(b"\x89PNG")
    else:
        assert ElementTree.fromstring(content).tag.endswith("svg")
