"""`data --index`: programs that open the folder give what they give for the files, to the byte."""

from __future__ import annotations

import json

import pytest

from funcppo.kg.graph import loaders
from funcppo.kg.search import task
from tests.cli.runner import funcppo


@pytest.fixture
def graph(tmp_path):
    """A folder with test triples that are facts, and rules of all kinds: paths and constants."""
    folder = tmp_path / "graph"
    folder.mkdir()
    pairs = [(i, (7 * i + 3) % 11) for i in range(11)] + [(i, (i + 1) % 11) for i in range(8)]  # fmt: skip
    rows = [f"e{a}\tp\te{b}\n" for a, b in dict.fromkeys(pairs)]
    rows += [f"e{a}\tq\te{(3 * a) % 11}\n" for a in range(9)]
    (folder / "train.tsv").write_text("".join(rows))
    facts = "".join(rows[::2])
    (folder / "valid.tsv").write_text("e9\tp\te10\ne2\tp\te8\n")
    (folder / "test.tsv").write_text(f"e10\tp\te0\ne5\tq\te9\n{facts}")
    (folder / "rules.txt").write_text(
        "0.5\tp(X,Y) :- q(X,Z), p(Z,Y)\n"
        "0.5\tp(X,Y) :- p(Y,X)\n"
        "0.5\tq(X,Y) :- p(X,Z), p(Z,Y)\n"
        "0.5\tp(X,Y) :- p(X,e4), q(Y,X)\n"
        "0.5\tq(X,e9) :- p(X,Y)\n"
    )
    return folder


@pytest.mark.parametrize(
    "options",
    [
        ["--height", "1", "--score", "noisy-or"],
        ["--height", "1", "--set", "object_identity=True", "--set", "smoothing=5"],
        ["--height", "2", "--score", "max-confidence"],
        [],
    ],
)  # fmt: skip
def test_ranks_are_those_of_the_files(graph, options, monkeypatch, capsys):
    indexed = graph.with_name("indexed")
    assert funcppo(monkeypatch, "data", graph, "--index", indexed) == 0
    assert "facts" in capsys.readouterr().out
    lines = []
    for target in (graph, indexed):
        details = target.with_suffix(".jsonl")
        program = ["evaluate", target, *options, "--details", details]
        assert funcppo(monkeypatch, *program) == 0
        lines.append(details.read_text())
    assert lines[0] == lines[1]
    assert len(lines[0].splitlines()) >= 6


@pytest.mark.parametrize(
    "program",
    [
        ["predict", "p(e10, X)", "--height", "1", "--score", "noisy-or", "--known"],
        ["data", "--provable", "test", "--height", "fixpoint"],
        ["data"],
        ["prove", "p(e10, X)"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_other_programs_say_the_same_of_both(
    graph, program, monkeypatch, capsys
):
    indexed = graph.with_name("indexed")
    assert funcppo(monkeypatch, "data", graph, "--index", indexed) == 0
    capsys.readouterr()
    name, *options = program
    said = []
    for target in (graph, indexed):
        assert funcppo(monkeypatch, name, target, *options, "--json", "-") == 0
        said.append(strip(json.loads(capsys.readouterr().out)))
    assert said[0] == said[1]


def strip(value):
    """A result without times and the name of the data set."""
    if isinstance(value, dict):
        return {
            key: strip(part)
            for key, part in value.items()
            if "seconds" not in key and key not in ("dataset", "target", "rate")
        }
    return [strip(part) for part in value] if isinstance(value, list) else value


def test_mined_rules_are_those_of_the_files(graph, monkeypatch):
    indexed = graph.with_name("indexed")
    assert funcppo(monkeypatch, "data", graph, "--index", indexed) == 0
    texts = []
    for target in (graph, indexed):
        rules = target.with_suffix(".rules.tsv")
        assert funcppo(monkeypatch, "mine", target, "--out", rules) == 0
        texts.append(rules.read_bytes())
    assert texts[0] == texts[1]


def test_the_counts_of_the_rules_are_stored(graph, monkeypatch):
    indexed = graph.with_name("indexed")
    assert funcppo(monkeypatch, "data", graph, "--index", indexed) == 0
    counts = loaders.read(indexed).rule_counts
    assert counts is not None and (counts[:, 1] > 0).all()


def test_bad_paths_are_one_line(graph, monkeypatch, capsys):
    assert funcppo(monkeypatch, "data", graph, "--index", graph) == 2
    assert "expected a folder that does not exist" in capsys.readouterr().err
    missing = graph / "no" / "folder"
    assert funcppo(monkeypatch, "data", graph, "--index", missing) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("is_indexed", [False, True])
def test_a_run_whose_facts_or_atoms_are_not_held_derives_what_is_asked(
    graph, is_indexed, monkeypatch, capsys
):
    monkeypatch.setattr(task, "MAX_HEADS_PER_ATOM", 0)
    if is_indexed:
        indexed = graph.with_name("indexed")
        assert funcppo(monkeypatch, "data", graph, "--index", indexed) == 0
        graph = indexed
    run = graph.with_name("run")
    program = ["train", graph, "-v", "--out", run]
    settings = ["--set", "prover.max_height=1", "--steps", "1024"]
    assert funcppo(monkeypatch, *program, *settings) == 0
    assert "each query its own when it is asked" in capsys.readouterr().out
    asked = ["predict", run, "p(e10, X)", "--known", "--explain"]
    assert funcppo(monkeypatch, *asked) == 0
    assert "by rule" in capsys.readouterr().out
