"""One file of triples: mined, trained on, resumed, evaluated and proved from, with a split and without."""

from __future__ import annotations

import json

import pytest

from funcppo.kg.config import read_config
from funcppo.kg.graph.loaders import load
from funcppo.kg.graph.triples import DataConfig
from tests.cli.runner import SMALL, funcppo

SPLIT = ("--columns", "s,p,o", "--split-ratios", "0.7,0.2,0.1")
CONFIG = DataConfig(columns="s,p,o", split_ratios="0.7,0.2,0.1")
SHORT = (*SMALL, "--set", "prover.max_height=1", "--steps", "64")


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """A CSV file of a family; every relation but two follows from the others by a rule."""
    path = tmp_path_factory.mktemp("graph") / "family.csv"
    family = load("family_tree:30:1")
    rows = [
        (
            family.entities[h - 1],
            family.predicates[r - 1],
            family.entities[t - 1],
        )
        for r, h, t in [*family.train, *family.valid, *family.test]
    ]
    lines = [f"{h},x,{r},{t}\n" for h, r, t in rows]
    path.write_text("s,note,p,o\n" + "".join(lines))
    return path


@pytest.fixture(scope="module")
def run(graph, tmp_path_factory):
    """A run on the split file, with rules mined from its train part."""
    folder = tmp_path_factory.mktemp("run") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder.parent))
        assert (
            funcppo(patch, "train", graph, "--out", folder, *SPLIT, *SHORT) == 0
        )
    return folder


def test_a_run_keeps_how_its_triples_were_read_and_split(
    run, graph, monkeypatch, capsys
):
    assert read_config(run).data == CONFIG
    results = json.loads((run / "results.json").read_text())
    n_test = len(load(graph, cfg=CONFIG).test)
    assert results["test"]["max-confidence"]["n_queries"] == 2 * n_test
    assert any(note.startswith("split at random") for note in results["notes"])

    assert funcppo(monkeypatch, "evaluate", run, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["n_queries"] == 2 * n_test
    resumed = ("train", graph, "--out", run, "--resume")
    assert funcppo(monkeypatch, *resumed) == 0
    assert json.loads((run / "results.json").read_text())["test"].keys() == (
        results["test"].keys()
    )


def test_a_held_out_triple_is_not_known_to_the_run(
    run, graph, monkeypatch, capsys
):
    dataset = load(graph, cfg=CONFIG)
    relation, head, tail = dataset.test[0]
    query = f"{dataset.predicates[relation - 1]}({dataset.entities[head - 1]}, {dataset.entities[tail - 1]})"
    funcppo(monkeypatch, "prove", run, query, "--json", "-")
    assert json.loads(capsys.readouterr().out)["is_fact"] is False
    whole = ("prove", graph, query, "--columns", "s,p,o", "--json", "-")
    assert funcppo(monkeypatch, *whole) == 0
    assert json.loads(capsys.readouterr().out)["is_fact"] is True


def test_without_a_split_there_is_no_test_and_no_choice_and_that_is_said(
    graph, monkeypatch, capsys, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ("train", graph, "--out", tmp_path / "run", *SPLIT[:2], *SHORT)
    assert funcppo(monkeypatch, *arguments) == 0
    printed = capsys.readouterr().out
    assert "no test split; the test evaluation is skipped" in printed
    assert "no valid split" in printed
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["test"], results["best_valid_metric"]) == ({}, None)

    assert funcppo(monkeypatch, "evaluate", tmp_path / "run") == 2
    assert "--split-ratios" in capsys.readouterr().err


@pytest.mark.parametrize("program", ["evaluate", "prove"])
def test_a_run_is_not_read_in_another_way(program, run, monkeypatch, capsys):
    query = ["p(X, Y)"] if program == "prove" else []
    assert funcppo(monkeypatch, program, run, *query, *SPLIT[:2]) == 2
    assert "is a trained run, which reads its data" in capsys.readouterr().err
