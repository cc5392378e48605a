"""`score`: the ranks of `evaluate`, files in and out, probabilities and labels, unknown names, bad input."""

import csv
import io
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from funcppo.kg import answers
from funcppo.kg.answers import summarise_labels
from funcppo.kg.graph import loaders
from funcppo.kg.logic.kb import HEAD, TAIL
from funcppo.kg.run.run import open_run
from funcppo.kg.run.subject import run_subject
from tests.cli.runner import BY_RULES, read_records, settings, write_graph

RULES = settings("height=1 score=noisy-or smoothing=5 object_identity=False")


def scored(programs, target, triples, *options):
    """The rows that are written as CSV."""
    out = triples.with_suffix(".scores.csv")
    words = [target, triples, "--out", out, *options]
    assert programs("score", *words) == 0
    return list(csv.DictReader(io.StringIO(out.read_text())))


@pytest.mark.parametrize("target", ["graph", "questions", "proofs"])
def test_ranks_and_scores_are_those_of_evaluate(
    graph, runs, programs, monkeypatch, tmp_path, target
):
    subject = graph if target == "graph" else runs / target
    options = RULES if target == "graph" else []
    details, triples = tmp_path / "details.jsonl", tmp_path / "triples.tsv"
    triples.write_text((graph / "test.txt").read_text())
    words = ["evaluate", subject, "--details", details]
    words += settings("proofs=off")
    assert programs(*words, *(BY_RULES if target == "graph" else [])) == 0
    monkeypatch.setattr(answers, "CHUNK_TRIPLES", 7)
    rows = scored(programs, subject, triples, *options)
    records = read_records(details)
    assert len(records) == 2 * len(rows) == 40
    for record in records:
        row = rows[record["query_row"]]
        side = record["side"]
        assert float(row[f"rank_{side}"]) == record["rank"]["realistic"]
        is_derived = record["status"] == "proved"
        assert (row["verdict"] == "derived") == is_derived
        assert row["known"] == "true" and 0 < float(row["probability"]) < 1


def test_all_kinds_of_files_agree(graph, runs, programs, monkeypatch, tmp_path):
    """Also from standard input, with a header; a name that is unknown is a verdict."""
    duckdb = pytest.importorskip("duckdb")
    triples = tmp_path / "triples.csv"
    lines = [line.split() for line in (graph / "test.txt").open()][:9]
    lines += [["e1", "p", "nobody"], ["e1", "likes", "e2"]]
    text = "".join(",".join(line) + "\n" for line in lines)
    triples.write_text("head,relation,tail\n" + text)
    run = runs / "questions"
    rows = scored(programs, run, triples, "--explain")
    verdicts = [row["verdict"] for row in rows]
    assert verdicts[-2:] == ["unknown entity", "unknown relation"]
    assert {"derived", "no proof"} >= set(verdicts[:-2])
    assert all(
        (row["rule"] != "") == (row["verdict"] == "derived") for row in rows
    )

    found = {}
    for ending in ("jsonl", "parquet"):
        out = tmp_path / f"out.{ending}"
        words = [run, triples, "--out", out, "--explain"]
        assert programs("score", *words) == 0
        found[ending] = out
    records = read_records(found["jsonl"])
    for record, row in zip(records, rows, strict=True):
        assert str(record["probability"] or "") == row["probability"]
        assert (record["proof"] is None) == (row["rule"] == "")
    table = duckdb.read_parquet(str(found["parquet"]))
    assert table.columns == [x for x in records[0] if x != "proof"]
    written = [row[3] for row in table.fetchall()]
    assert written == [record["probability"] for record in records]
    assert not list(tmp_path.glob("*.part*"))

    typed = io.BytesIO(text.replace(",", "\t").encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(typed))
    again = programs.rows("score", run, "-")
    for row, other in zip(again, rows, strict=True):
        assert row["probability"] == other["probability"]


def test_a_device_and_a_link_are_not_replaced(graph, programs, tmp_path):
    device, link = tmp_path / "device", tmp_path / "link"
    device.symlink_to(os.devnull)
    link.symlink_to("scores.csv")
    for out in (device, link):
        words = [graph, graph / "test.txt", "--out", out, *RULES]
        assert programs("score", *words) == 0
        assert out.is_symlink()
    assert Path(os.devnull).is_char_device()
    assert len((tmp_path / "scores.csv").read_text().splitlines()) == 21
    assert not list(tmp_path.glob("*.part"))


def test_a_known_fact_is_scored_without_itself(graph, runs, programs, tmp_path):
    """As `predict --known` scores it."""
    triples = tmp_path / "triples.tsv"
    triples.write_text("".join((graph / "train.txt").open()))
    run = runs / "questions"
    rows = scored(programs, run, triples)
    dataset = loaders.load(graph)
    subject_scores = answers_of(run, dataset)
    assert {row["verdict"] for row in rows} == {"derived", "no proof"}
    for row in rows:
        key = row["relation"], row["head"], row["tail"]
        for side, values in subject_scores.items():
            assert float(row[f"score_{side}"]) == values[key]


def answers_of(run, dataset):
    """The scores of the known facts on both sides, by names."""
    answerer = answers.Answerer(run_subject(open_run(run)))
    atoms = torch.from_numpy(dataset.train).long()
    names, relations = dataset.entities, dataset.predicates
    keys = [
        (relations[r - 1], names[h - 1], names[t - 1])
        for r, h, t in dataset.train.tolist()
    ]
    return {
        name: dict(zip(keys, answerer.score(atoms, side)))
        for name, side in (("head", HEAD), ("tail", TAIL))
    }


def test_probabilities_tell_true_from_false_triples(programs, capsys, tmp_path):
    """Where a rule is right nine times of ten; the labels of the file say how well."""
    rng = np.random.default_rng(0)
    facts, held_out, false = [], [], []
    for i in range(200):
        facts.append(f"a{i}\tknows\tb{i}\n")
        other = f"a{i}\tlikes\tb{(i + 7) % 200}\n"
        likes = f"a{i}\tlikes\tb{i}\n" if rng.random() < 0.9 else other
        (held_out if i % 3 == 0 else facts).append(likes)
        false.append(f"a{i}\tlikes\tb{(i + 50) % 200}\n")
    folder = write_graph(
        tmp_path / "graph",
        train="".join(facts),
        valid="".join(held_out[::2]),
        rules="likes(X, Y) :- knows(X, Y)\n",
    )
    labelled = [f"{x.strip()}\t1\n" for x in held_out[1::2]]
    labelled += [f"{x.strip()}\t0\n" for x in false[:60]]
    triples, summary = tmp_path / "triples.tsv", tmp_path / "summary.json"
    triples.write_text("".join(labelled))
    rows = scored(programs, folder, triples, *RULES, "--set", f"json={summary}")
    found = json.loads(summary.read_text())
    # a tenth of the true ones no rule derives
    assert found["auc"] > 0.8 and found["accuracy"] > 0.8
    assert found["calibration"]["calibration_error"] < 0.15
    true, false_ = (
        np.mean([float(r["probability"]) for r in rows if r["label"] == label])
        for label in ("true", "false")
    )
    assert true > 0.7 > 0.3 > false_
    assert "labels: AUC" in capsys.readouterr().err

    (folder / "valid.txt").unlink()
    rows = scored(programs, folder, triples, *RULES)
    assert {row["probability"] for row in rows} == {""}
    assert "no valid split to fit it on" in capsys.readouterr().err


def test_the_area_under_the_curve_counts_equal_scores_half():
    labels = [True, True, False, False]
    found = summarise_labels([0.9, 0.5, 0.5, 0.1], labels, 0.5)
    assert found == {"auc": 0.875, "accuracy": 0.75, "n_true": 2}
    assert summarise_labels([0.5, None], [True, True], 0.4)["auc"] is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected triples, got none"),
        ("a\tp\n", ":1: expected head, relation and tail"),
        ("a\tp\tb\na\tp\tb\t1\n", ":2: expected head, relation and tail"),
        ("a\tp\tb\tmaybe\n", ":1: expected head"),
    ],
)
def test_a_bad_line_is_one_line(graph, programs, tmp_path, text, problem):
    triples = tmp_path / "triples.tsv"
    triples.write_text(text)
    error = programs.refused("score", graph, triples, *RULES)
    assert problem in error
