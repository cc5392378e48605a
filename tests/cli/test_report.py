"""`report`: a page of a run, of several, of an unfinished one; bad input is one line and writes nothing."""

import json
import shutil
from xml.etree import ElementTree

import pytest

from funcppo.kg.show import report
from tests.cli.runner import funcppo


def failed(monkeypatch, capsys, *args):
    """The one line of a report that ends with exit status 2."""
    capsys.readouterr()
    assert funcppo(monkeypatch, "report", *args) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("funcppo: ")
    return error


def test_a_page_and_its_tables_are_written(
    monkeypatch, capsys, trained, tmp_path
):
    out = tmp_path / "report.html"
    args = ("report", trained, "--out", out, "--shown", "2", "--json", "-")
    assert funcppo(monkeypatch, *args) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["tables"]) == set(report.KINDS)
    assert result["tables"]["results"][0]["runs"] == [1] * 3
    text = out.read_text()
    assert text.count('<details class="query"') == 2
    assert "the five regions, tails only" in text


def test_an_unfinished_run_has_a_page_that_says_so(
    monkeypatch, capsys, trained, tmp_path
):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    config = json.loads((run / "config.json").read_text())
    config["steps"] *= 3
    (run / "config.json").write_text(json.dumps(config))
    (run / "results.json").unlink()
    out = tmp_path / "r.html"
    args = ("report", run, "--out", out, "--shown", "0")
    assert funcppo(monkeypatch, *args) == 0
    text = out.read_text()
    assert "unfinished: the run stands at update 4 of 12" in text
    assert "results.json is missing" in text


def test_bad_input_is_one_line_and_writes_nothing(
    monkeypatch, capsys, trained, tmp_path
):
    def error(*args):
        return failed(monkeypatch, capsys, *args)

    out = tmp_path / "r.html"
    assert "expected a folder that `funcppo train` wrote" in error(
        tmp_path, "--out", out
    )
    assert "expected a file in a folder" in error(trained, "--out", tmp_path)
    assert "would be overwritten" in error(
        trained, "--out", trained / "results.json"
    )
    assert "expected another file" in error(
        trained, "--out", out, "--json", out
    )
    assert "got it twice" in error(trained, trained, "--out", out)
    assert "got none" in error("--out", out)
    assert "--out" in error(trained)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_one_line(monkeypatch, capsys, trained, tmp_path):
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    out = tmp_path / "r.html"
    line = failed(monkeypatch, capsys, trained, "--out", out)
    assert "pip install 'funcppo[plot]'" in line
    assert not out.exists()


@pytest.mark.parametrize(
    ("kind", "name"), [("rules", "a.svg"), ("curves", "a.PNG")]
)
def test_a_picture_is_written(
    monkeypatch, capsys, trained, tmp_path, kind, name
):
    out = tmp_path / name
    args = ("report", trained, "--plot", kind, "--out", out, "--shown", "2")
    assert funcppo(monkeypatch, *args, "--json", "-") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["plot"] == kind and result["tables"]
    content = out.read_bytes()
    if kind == "curves":
        assert content.startswith(b"\x89PNG")
    else:
        assert ElementTree.fromstring(content).tag.endswith("svg")


def test_a_picture_that_cannot_be_is_one_line(
    monkeypatch, capsys, trained, tmp_path
):
    for name in ("a.pdf", "a", "a.svgz"):
        words = (trained, "--plot", "rules", "--out", tmp_path / name)
        assert "ends in .svg or .png" in failed(monkeypatch, capsys, *words)
    assert list(tmp_path.iterdir()) == []
