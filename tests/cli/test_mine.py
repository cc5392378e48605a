"""`mine`: a file that reads back as the same rules in each format; bad input; training on data without rules."""

from __future__ import annotations

import errno
import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.data import from_triples, load
from funcppo.data.readers import detect_format, read_clauses
from funcppo.data.rule_tables import (
    RULE_FILE_FORMATS,
    compatibility_notes,
    format_rule_table,
)
from funcppo.data.writers import to_clauses
from funcppo.experiment import rule_cache
from funcppo.experiment.config import RESULTS_FILE, read_config
from funcppo.mining.config import MiningConfig
from tests.cli.runner import SMALL, contains, funcppo, json_of, mine

names = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]),
    min_size=1,
    max_size=6,
).filter(str.strip)


@pytest.fixture
def folder(tmp_path):
    """parent and child are inverse; names that need quotes."""
    people = [
        "Ann, the 'elder'",
        "bob",
        "X",
        "_y",
        'a "b"',
        "comma,comma",
        "(c)",
        "42",
    ]
    pairs = list(itertools.pairwise(people))
    triples = [f"{a}\tparent of\t{b}\n{b}\tchild:-of\t{a}\n" for a, b in pairs]
    for name, lines in {
        "train": triples,
        "valid": triples[:1],
        "test": triples[:1],
    }.items():
        (tmp_path / f"{name}.txt").write_text("".join(lines))
    return str(tmp_path)


@pytest.mark.parametrize("form", RULE_FILE_FORMATS)
def test_a_file_of_each_format_reads_back_as_the_same_rules(
    folder, tmp_path, capsys, form
):
    out = tmp_path / "mined.txt"
    status, result = json_of(
        capsys,
        mine,
        folder,
        "--out",
        str(out),
        "--format",
        form,
        "--min-support",
        "1",
        "--constants",
    )
    assert (
        status == 0 and result["n_rules"] > 0 and result["file_format"] == form
    )
    assert (
        result["n_rules"]
        == sum(result["n_path_rules_by_length"].values())
        + result["n_constant_rules"]
    )
    dataset = load(folder)
    mined, counts, _ = rule_cache.mine_dataset(
        dataset, MiningConfig(min_support=1, constants=True)
    )
    again = load(folder, out)
    assert (
        np.array_equal(again.rules, mined.rules)
        and len(mined.rules) == result["n_rules"]
    )
    confidence = (
        counts.weight if form == "tsv" else counts.support / counts.body_pairs
    )
    assert again.rule_weights == pytest.approx(confidence, rel=1e-5)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcd"),
            st.sampled_from("pq"),
            st.sampled_from("abcd"),
        ),
        min_size=3,
    ),
    st.lists(names, min_size=6, max_size=6, unique=True),
)
@settings(max_examples=60)
def test_whatever_the_names_are_printing_and_parsing_is_the_identity(
    triples, new
):
    rename = dict(zip("abcdpq", new))
    dataset = from_triples(
        [tuple(rename[name] for name in triple) for triple in triples]
    )
    mined, counts, _ = rule_cache.mine_dataset(
        dataset, MiningConfig(min_support=1, max_length=2, constants=True)
    )
    if len(mined.rules):
        for form in RULE_FILE_FORMATS:
            text = format_rule_table(mined, counts, form)
            read, _ = read_clauses(text, "rules", detect_format(text))
            written = to_clauses(mined)[1]
            assert [(c.head.predicate, len(c.body)) for c in read] == [
                (c.head.predicate, len(c.body)) for c in written
            ]
            again = from_triples(
                [tuple(rename[name] for name in triple) for triple in triples],
                rules=text,
            )
            assert np.array_equal(again.rules, mined.rules)


def test_the_columns_of_the_table_are_the_counts(folder, tmp_path, capsys):
    """child(X, Y) :- parent(Y, X) is right for all 7 pairs; smoothed confidence 7 / 12, leave-one-out as plain.

    Its reverse is as good: equal rules are in the order of their heads' names.
    """
    out = tmp_path / "mined.tsv"
    assert mine(folder, "--out", str(out), "--max-length", "1") == 0
    header, *lines = (line.split("\t") for line in out.read_text().splitlines())
    assert header[:4] == [
        "#source_weight",
        "train_support",
        "train_body_pairs",
        "train_conf",
    ]
    assert lines[0][:-1] == [
        "0.583333",
        "7",
        "7",
        "1",
        "1",
        "1",
        "7",
        "1",
        "0",
        "0",
    ]
    assert lines[0][-1] == "'child:-of'(X, Y) :- 'parent of'(Y, X)"
    assert (
        len(lines) == 2
        and "2 rules (2 of length 1) of 2 candidates" in capsys.readouterr().out
    )


def test_rules_go_to_standard_output_and_all_else_elsewhere(
    folder, tmp_path, capsys
):
    out = tmp_path / "mined.tsv"
    assert mine(folder, "--out", str(out)) == 0
    capsys.readouterr()
    assert mine(folder, "--out", "-") == 0
    shown = capsys.readouterr()
    assert shown.out == out.read_text() and "rules (" in shown.err


def test_the_same_seed_gives_the_same_file(tmp_path):
    texts = []
    for i, seed in enumerate(["0", "0", "1"]):
        assert (
            mine(
                "family_tree:400:1",
                "--out",
                str(tmp_path / f"{i}"),
                "--max-rows",
                "20000",
                "--seed",
                seed,
            )
            == 0
        )
        texts.append((tmp_path / f"{i}").read_text())
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("train", ["a\tr\tb\n", ""], ids=["one fact", "none"])
@pytest.mark.parametrize("form", RULE_FILE_FORMATS)
def test_without_a_rule_above_the_thresholds_the_file_holds_none(
    tmp_path, capsys, form, train
):
    """Only train.txt is read, and it may be empty."""
    (tmp_path / "train.txt").write_text(train)
    assert (
        mine(str(tmp_path), "--out", str(tmp_path / "mined"), "--format", form)
        == 0
    )
    out = capsys.readouterr().out
    assert (
        f"{len(train) // 6} facts give no rule with support 5 and confidence 0.01"
        in " ".join(out.split())
    )
    assert len((tmp_path / "mined").read_text().splitlines()) == (
        form != "AnyBURL"
    )


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("no_such_set", "--out", "{tmp}/r"), "unknown data set"),
        (
            ("countries_s1", "--out", "{tmp}/none/r"),
            "expected a file in a folder that exists",
        ),
        (
            ("countries_s1", "--out", "{tmp}"),
            "expected a file in a folder that exists",
        ),
        (
            ("countries_s1", "--out", "{tmp}/r", "--json", "{tmp}/r"),
            "expected another file than that of --out",
        ),
        (
            ("countries_s1", "--out", "-", "--json", "-"),
            "expected another file than that of --out",
        ),
        (
            ("countries_s1", "--out", "{tmp}/r", "--max-length", "4"),
            "--max-length: expected 1 to 3, got 4",
        ),
        (
            ("countries_s1", "--out", "{tmp}/r", "--min-support", "0"),
            "--min-support: expected 1 or more, got 0",
        ),
        (
            ("countries_s1", "--out", "{tmp}/r", "--min-confidence", "2"),
            "--min-confidence: expected 0 to 1, got 2.0",
        ),
        (
            ("countries_s1", "--out", "{tmp}/r", "--time-limit", "0"),
            "--time-limit: expected more than 0, got 0.0",
        ),
        (("{tmp}", "--out", "{tmp}/r"), "train.txt"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    monkeypatch, capsys, tmp_path, args, line
):
    assert (
        funcppo(monkeypatch, "mine", *(a.format(tmp=tmp_path) for a in args))
        == 2
    )
    error = capsys.readouterr().err
    assert contains(error, line) and error.count("\n") == 1
    assert not (tmp_path / "r").exists()


def test_a_folder_without_permission_is_an_error_before_mining(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(
        os, "access", lambda *_: False
    )  # to root all folders are open
    monkeypatch.setattr(rule_cache, "mine_dataset", None)
    assert (
        funcppo(monkeypatch, "mine", "countries_s1", "--out", tmp_path / "r")
        == 2
    )
    assert (
        capsys.readouterr().err
        == f"funcppo: --out {tmp_path}/r: no permission to write it\n"
    )


def test_a_full_disk_is_one_line_that_names_the_file_and_leaves_the_old_one(
    monkeypatch, capsys, tmp_path
):
    (tmp_path / "r").write_text("old")
    monkeypatch.setattr(
        os,
        "fsync",
        Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")),
    )
    assert (
        funcppo(monkeypatch, "mine", "countries_s1", "--out", tmp_path / "r")
        == 2
    )
    assert (
        capsys.readouterr().err
        == f"funcppo: {tmp_path}/r: No space left on device\n"
    )
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [
        ("r", "old")
    ]


def test_a_pipe_and_a_link_stay_what_they_are(folder, tmp_path):
    """As root, a file put in the place of /dev/null would be everyone's."""
    pipe, link, real = tmp_path / "pipe", tmp_path / "link", tmp_path / "real"
    os.mkfifo(pipe)
    link.symlink_to(real)
    with ThreadPoolExecutor() as reader:
        read = reader.submit(pipe.read_text)
        assert (
            mine(folder, "--out", str(pipe))
            == mine(folder, "--out", str(link))
            == 0
        )
        assert pipe.is_fifo() and link.is_symlink()
        assert (
            read.result(10) == real.read_text() and len(real.read_text()) > 100
        )


def test_a_cache_folder_that_cannot_be_made_is_an_error_before_mining(
    monkeypatch, tmp_path
):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(rule_cache, "mine_dataset", None)
    with pytest.raises(OSError, match="file"):
        rule_cache.get_or_mine_rules(
            load("countries_s1"),
            MiningConfig(),
            "cpu",
            print,
            tmp_path / "file" / "cache",
        )


@pytest.mark.parametrize(
    ("triples", "n"),
    [
        ([("Ann B", "likes", "bob")], {"AnyBURL": 0, "AMIE": 0}),
        ([("ann", "likes it", "bob")], {"AnyBURL": 1, "AMIE": 1}),
        ([("a", "likes", "bob")], {"AnyBURL": 2, "AMIE": 0}),
    ],
)
def test_names_that_the_tools_of_a_format_do_not_know_are_noted(triples, n):
    """likes(Y, X) names none; likes(X, a) does, and so does likes(a, X)."""
    a, p, _ = triples[0]
    rules = f"1\t'{p}'(X,Y) :- '{p}'(Y,X)\n"
    rules += (
        f"1\t'{p}'(X,'{a}') :- '{p}'(X,Y)\n1\t'{p}'('{a}',X) :- '{p}'(X,Y)\n"
        if n["AnyBURL"] == 2
        else ""
    )
    dataset = from_triples(triples, rules=rules)
    assert compatibility_notes(dataset, "tsv") == []
    for form, count in n.items():
        notes = compatibility_notes(dataset, form)
        assert (
            notes == []
            if not count
            else notes[0].startswith(f"{count} rules hold names in quotes")
        )


def test_training_without_rules_mines_first_and_keeps_what_it_mined(
    monkeypatch, capsys, tmp_path
):
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    tree = load("family_tree:60:2")
    for split in ("train", "valid", "test"):
        rows = getattr(tree, split)
        line = lambda p, a, b: (
            f"{tree.entities[a - 1]}\t{tree.predicates[p - 1]}\t{tree.entities[b - 1]}\n"
        )
        (data / f"{split}.txt").write_text("".join(line(*row) for row in rows))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    args = ("train", data, "--steps", "64", "--prover.max-height", "1", *SMALL)
    assert funcppo(monkeypatch, *args, "--out", out) == 0
    assert (
        "no rules given:" in (output := capsys.readouterr().out)
        and "mined in" in output
    )
    run = read_config(out)
    assert run.rules == str(out / "rules.tsv")
    assert (
        json.loads((out / RESULTS_FILE).read_text())["rules"]
        == len(load(str(data), run.rules).rules)
        > 0
    )
    assert funcppo(monkeypatch, *args, "--out", tmp_path / "again") == 0
    assert "using those mined before" in " ".join(
        capsys.readouterr().out.split()
    )
    assert (tmp_path / "again" / "rules.tsv").read_text() == (
        out / "rules.tsv"
    ).read_text()
    assert funcppo(monkeypatch, *args, "--out", out, "--resume") == 0
    assert funcppo(monkeypatch, "evaluate", out) == 0
