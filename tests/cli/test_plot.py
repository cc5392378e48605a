"""`plot`: pictures of every kind as SVG and PNG, and what they draw as JSON."""

import json
from xml.etree import ElementTree

import pytest

from funcppo.kg.show.report import figures
from tests.cli.runner import funcppo


@pytest.mark.parametrize("kind", [k for k in figures.KINDS if k != "weights"])
def test_a_picture_of_each_kind(monkeypatch, capsys, trained, tmp_path, kind):
    out = tmp_path / "a.svg"
    args = ("plot", trained, "--kind", kind, "--out", out, "--queries", "2")
    assert funcppo(monkeypatch, *args, "--json", "-") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["kind"] == kind and result["table"]
    assert ElementTree.fromstring(out.read_bytes()).tag.endswith("svg")


def test_weights_of_a_run_that_searches_proofs_are_refused(
    monkeypatch, capsys, trained, tmp_path
):
    args = ("plot", trained, "--kind", "weights", "--out", tmp_path / "a.svg")
    assert funcppo(monkeypatch, *args) == 2
    assert "expected a run that learns from questions" in (
        capsys.readouterr().err
    )
    assert list(tmp_path.iterdir()) == []


def test_png(monkeypatch, trained, tmp_path):
    out = tmp_path / "a.PNG"
    args = ("plot", trained, "--kind", "curves", "--out", out)
    assert funcppo(monkeypatch, *args) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["a.pdf", "a", "a.svgz"])
def test_another_ending_is_refused(
    monkeypatch, capsys, trained, tmp_path, name
):
    args = ("plot", trained, "--kind", "ranks", "--out", tmp_path / name)
    assert funcppo(monkeypatch, *args) == 2
    assert "ends in .svg or .png" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
