"""`mine`: a file that reads back as the same rules in each format; bad input; training on data without rules."""

import itertools
import json

import numpy as np
import pytest

from funcppo.cli import Terminated
from funcppo.kg.config import RESULTS_FILE, read_config
from funcppo.kg.graph.loaders import load
from funcppo.kg.graph.rules import RULE_FILE_FORMATS
from funcppo.kg.mining import miner
from funcppo.kg.run import rule_files
from tests.cli.runner import SMALL, contains, json_of, mine, write_graph


@pytest.fixture
def folder(tmp_path):
    """parent and child are inverse; names that need quotes."""
    people = ["Ann, the 'elder'", "bob", "X", "_y", 'a "b"', "comma,comma"]
    people += ["(c)", "42"]
    pairs = list(itertools.pairwise(people))
    triples = [f"{a}\tparent of\t{b}\n{b}\tchild:-of\t{a}\n" for a, b in pairs]
    texts = {"train": "".join(triples), "valid": triples[0]}
    return str(write_graph(tmp_path, test=triples[0], **texts))


@pytest.mark.parametrize("form", RULE_FILE_FORMATS)
def test_each_format_reads_back_as_equal_rules(folder, tmp_path, capsys, form):
    out = tmp_path / "mined.txt"
    options = ("--format", form, "--min-support", "1", "--constants")
    status, result = json_of(capsys, mine, folder, "--out", str(out), *options)
    assert status == 0 and result["n_rules"] > 0
    assert result["file_format"] == form
    kinds = result["n_rules_by_kind"]
    assert result["n_rules"] == sum(kinds.values())
    assert "of length 1" in kinds
    dataset = load(folder)
    mined, counts, _ = rule_files.mine_dataset(
        dataset, rule_files.mining_config(dataset, min_support=1)
    )
    again = load(folder, out)
    assert np.array_equal(again.rules, mined.rules)
    assert len(mined.rules) == result["n_rules"]
    confidence = counts.support / counts.body_pairs
    if form == "tsv":
        confidence = counts.weight
    assert again.rule_weights == pytest.approx(confidence, rel=1e-5)


def test_the_columns_of_the_table_are_the_counts(folder, tmp_path, capsys):
    """child(X, Y) :- parent(Y, X) is right for all 7 pairs; smoothed confidence 7 / 12, leave-one-out as plain.

    Its reverse is as good: equal rules are in the order of their heads' names.
    """
    out = tmp_path / "mined.tsv"
    assert mine(folder, "--out", str(out), "--max-length", "1") == 0
    header, *lines, mark = (
        line.split("\t") for line in out.read_text().splitlines()
    )
    assert mark[0] == "#counts"
    columns = "#source_weight train_support train_body_pairs train_conf"
    assert header[:4] == columns.split()
    numbers = "0.583333 7 7 1 1 1 7 1 0 0"
    assert lines[0][:-1] == numbers.split()
    assert lines[0][-1] == "'child:-of'(X, Y) :- 'parent of'(Y, X)"
    printed = capsys.readouterr().out
    assert len(lines) == 2
    assert "2 rules (2 of length 1) of 4 candidates" in printed


def test_rules_alone_go_to_standard_output(folder, tmp_path, capsys):
    out = tmp_path / "mined.tsv"
    assert mine(folder, "--out", str(out)) == 0
    capsys.readouterr()
    assert mine(folder, "--out", "-") == 0
    shown = capsys.readouterr()
    assert shown.out == out.read_text() and "rules (" in shown.err


def test_no_rule_above_the_thresholds_is_an_empty_file(tmp_path, capsys):
    (tmp_path / "train.txt").write_text("a\tr\tb\n")
    out = tmp_path / "mined"
    assert mine(str(tmp_path), "--out", str(out)) == 0
    line = "1 facts give no rule with support 5 and confidence 0.01"
    assert line in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 1


S1 = "countries_s1 --out {tmp}/r"


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("no_such_set --out {tmp}/r", "unknown data set"),
        ("{tmp}/empty.tsv --out {tmp}/r", "empty.tsv: empty: expected"),
        ("countries_s1 --out {tmp}/none/r", "expected a file in a folder"),
        (f"{S1} --json {{tmp}}/r", "expected another file than that of --out"),
        ("countries_s1 --out - --json -", "another file than that of --out"),
        (f"{S1} --max-length 6", "--max-length: expected 1 to 5, got 6"),
        (f"{S1} --memory much", "--memory: expected bytes below"),
        (f"{S1} --memory 10MB", "--memory 10000000: expected at least"),
        ("{tmp} --out {tmp}/r", "train.txt"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(programs, tmp_path, args, line):
    (tmp_path / "empty.tsv").touch()
    words = args.format(tmp=tmp_path).split()
    error = programs.refused("mine", *words)
    assert contains(error, line)
    assert not (tmp_path / "r").exists()


def test_training_mines_or_reads_them(programs, monkeypatch, tmp_path):
    tree = load("family_tree:60:2")
    splits = ("train", "valid", "test")
    texts = {split: family_lines(tree, split) for split in splits}
    data = write_graph(tmp_path / "data", **texts)
    mined = tmp_path / "mined"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert mine(str(data), "--out", str(mined), "--seconds", "400") == 0

    words = f"--steps 64 {' '.join(SMALL)} --seconds None"
    words += " --set prover.max_height=1 --set mining_seconds=400"
    for said in ("no rules given:", "those mined before"):
        out = tmp_path / said[:2]
        printed = programs.printed("train", data, *words.split(), "--out", out)
        assert said in " ".join(printed.split())
        assert ("mined in" in printed) == (said == "no rules given:")
        assert (out / "rules.tsv").read_text() == mined.read_text()
    assert read_config(out).rules == "rules.tsv"
    results = json.loads((out / RESULTS_FILE).read_text())
    assert results["rules"] == len(load(data, out / "rules.tsv").rules) > 0
    assert programs("train", data, "--out", out, "--resume") == 0
    assert programs("evaluate", out) == 0


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt, 130), (Terminated, 143)]
)
def test_interrupts_write_rules(programs, monkeypatch, tmp_path, error, status):
    def stop_search(*_):
        raise error

    monkeypatch.setattr(miner._Miner, "_search_constants", stop_search)
    out = tmp_path / "rules.tsv"
    arguments = ("mine", "family_tree:60:2", "--constants", "--out", out)
    file = tmp_path / "summary.json"
    assert programs(*arguments, "--json", file) == status
    summary = json.loads(file.read_text())
    assert summary["interrupted"] and summary["n_rules"] > 0
    # beside the rules the header, and what the counts are of
    assert len(out.read_text().splitlines()) == 2 + summary["n_rules"]
    assert "interrupted: the rules found by then are kept" in summary["notes"]


def family_lines(tree, split="train"):
    """A split of a data set as triples, a line each."""
    return "".join(
        f"{tree.entities[a - 1]}\t{tree.predicates[p - 1]}\t{tree.entities[b - 1]}\n"
        for p, a, b in getattr(tree, split)
    )
