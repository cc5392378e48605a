"""Records of single queries: what is summed up from them, stopped, gone on with and refused."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from funcppo import data
from funcppo.evaluation import evaluator, ranking, result_log, scorers
from funcppo.evaluation.ranking import RankingProtocol
from funcppo.prover import task as prover_task
from funcppo.prover.config import ProverTaskConfig
from tests.cli.test_train import funcppo

CHECK = Path(__file__).parents[1] / "experiments" / "check_ranks.py"
EVALUATE = ("evaluate", "family_tree:60:0", "--split", "valid", "--score", "noisy-or", "--height", "1", "--details")


def judging(name: str, score: str, **how) -> evaluator.Evaluator:
    ready = prover_task.build_task(data.load(name), ProverTaskConfig(max_height=2))
    scorer, prove = scorers.make_untrained_scorer(ready, score), lambda atom: None
    protocols = RankingProtocol(**how)
    return evaluator.Evaluator(
        task=ready, protocol=protocols, scorer=scorer, prove=prove, proof_threshold=-float("inf"), all_scores=False
    )


def close(got, want):
    """Equal but for the order in which floating-point numbers were added."""
    if isinstance(want, dict):
        assert got.keys() >= want.keys()
        for key in want:
            close(got[key], want[key])
    else:
        assert got == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("countries_s2", {"sides": (2,)}),
        ("countries_s2", {}),
        ("family_tree:60:0", {}),
        ("family_tree:60:0", {"n_negatives": 7}),
        ("family_tree:60:0", {"score_unprovable": True}),
    ],
)
@pytest.mark.parametrize("score", ["exists@1", "noisy-or"])
def test_a_summary_of_records_is_that_of_the_whole_ranking(name, how, score, monkeypatch):
    monkeypatch.setattr(evaluator, "FIRST_CHUNK_QUERIES", 3)
    judging_ = judging(name, score, **how)
    dataset = judging_.task.dataset
    split = dataset.test if len(dataset.test) else dataset.valid
    ranked = ranking.rank_split(judging_.task, split, judging_.scorer, judging_.protocol)
    want = ranking.summarise_ranking(ranked, list(dataset.predicates), with_auc=judging_.task.is_countries)
    parts = list(evaluator.evaluate_chunks(judging_, split, np.arange(len(split))))
    assert len(parts) > 1
    found = [record for part in parts for record in part]
    got = result_log.summarise_records(found[::-1], dataset.predicates, with_auc=judging_.task.is_countries)
    del want["n_scored"]  # atoms of several queries count once there, and once a query here
    close(got, want)


def test_the_records_of_some_queries_are_among_those_of_all():
    """Corruptions are keyed by the row of the split, whatever else is ranked."""
    judging_ = judging("family_tree:60:0", "noisy-or", n_negatives=5)
    split = judging_.task.dataset.test
    every = [r for part in evaluator.evaluate_chunks(judging_, split, np.arange(len(split))) for r in part]
    some = [r for part in evaluator.evaluate_chunks(judging_, split, np.array([1, 4, 7])) for r in part]
    assert some == [record for record in every if record["query"] in (1, 4, 7)]


@pytest.mark.parametrize(("offset", "near"), [(0.0, 0), (0.5e-4 - 1e-6, 69), (0.5e-4 + 1e-6, 69), (0.5e-4 + 4e-6, 0)])
def test_queries_whose_scores_could_round_otherwise_are_counted(offset, near):
    """Every score is a grid line plus the offset; half a line is where rounding goes the other way."""
    judging_ = judging("family_tree:60:0", "noisy-or", sides=(2,))
    scorer = lambda atoms: torch.full((len(atoms),), -0.25 + offset, dtype=torch.float64)
    judging_ = dataclasses.replace(judging_, scorer=scorer)
    split = judging_.task.dataset.valid
    found = [r for part in evaluator.evaluate_chunks(judging_, split, np.arange(len(split))) for r in part]
    assert result_log.summarise_records(found, judging_.task.dataset.predicates, with_auc=False)["near_grid"] == near


def interrupted(monkeypatch, after: int):
    """A Ctrl-C while the part `after` is ranked; parts of two queries."""
    whole = evaluator.evaluate_chunks

    def stopped(*args):
        for i, part in enumerate(whole(*args)):
            if i == after:
                os.kill(os.getpid(), signal.SIGINT)
            yield part

    monkeypatch.setattr(evaluator, "FIRST_CHUNK_QUERIES", 2)
    monkeypatch.setattr(evaluator, "TARGET_CHUNK_SECONDS", 1e-9)
    monkeypatch.setattr(evaluator, "evaluate_chunks", stopped)


def test_an_interrupted_evaluation_goes_on_where_it_stopped(tmp_path, capsys):
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        assert funcppo(patch, *EVALUATE, whole, "--json", tmp_path / "whole.json") == 0
    with pytest.MonkeyPatch.context() as patch:
        interrupted(patch, after=2)
        assert funcppo(patch, *EVALUATE, part) == 130
    assert "--resume continues" in capsys.readouterr().out
    n = len(part.read_text().splitlines())
    assert 0 < n < len(whole.read_text().splitlines())
    with open(part, "a") as file:
        file.write('{"query": 5, "side": "he')  # the line that was being written when the power failed
    with pytest.MonkeyPatch.context() as patch:
        assert funcppo(patch, *EVALUATE, part, "--resume", "--json", tmp_path / "part.json") == 0
    assert part.read_bytes() == whole.read_bytes()
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("whole.json", "part.json"))
    for result in (one, two):
        del result["total_seconds"], result["peak_bytes"]
    assert one == two


def test_a_file_of_something_else_is_not_gone_on_with(tmp_path, monkeypatch, capsys):
    path = tmp_path / "ranks.jsonl"
    assert funcppo(monkeypatch, *EVALUATE, path, "--queries", "4") == 0
    before = path.read_bytes()
    for extra, expected in [
        ([], "exists: want --resume, --overwrite or another file"),
        (["--resume", "--negatives", "3"], "made with negatives None, want 3"),
        (["--resume", "--height", "2"], "made with height 1, want 2"),
        (["--resume", "--smoothing", "5"], "made with smoothing None, want 5.0"),
        (["--resume", "--object-identity"], "made with object_identity False, want True"),
    ]:
        capsys.readouterr()
        assert funcppo(monkeypatch, *EVALUATE, path, "--queries", "4", *extra) == 2
        error = capsys.readouterr().err.splitlines()
        assert expected in error[-1] and sum(line.startswith("funcppo: ") for line in error) == 1
        assert path.read_bytes() == before
    path.write_text("not a record\n")
    assert funcppo(monkeypatch, *EVALUATE, path, "--queries", "4", "--resume") == 2
    assert "ranks.jsonl:1: want a line of JSON" in capsys.readouterr().err
    assert funcppo(monkeypatch, *EVALUATE, path, "--queries", "4", "--overwrite") == 0
    assert path.read_bytes() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_one_line(monkeypatch, capsys):
    assert funcppo(monkeypatch, *EVALUATE, "/dev/full", "--queries", "4") == 2
    error = capsys.readouterr().err
    assert "/dev/full: No space left on device: what it holds stays" in error and "Traceback" not in error


def test_a_path_that_cannot_be_written_is_told_before_the_work(tmp_path, monkeypatch, capsys):
    for path in (tmp_path / "no" / "such" / "folder.jsonl", tmp_path):
        assert funcppo(monkeypatch, "evaluate", "no_such_set", "--details", path) == 2
        assert "want a file that can be written" in capsys.readouterr().err


def test_an_independent_script_finds_the_same_numbers(tmp_path, monkeypatch):
    """And finds a rank that was tampered with, a score, and a summary of other lines."""
    path, summary = tmp_path / "ranks.jsonl", tmp_path / "summary.json"
    folder = tmp_path / "hops"
    folder.mkdir()
    (folder / "train.txt").write_text("a\thop\tb\nb\thop\tc\nc\thop\td\na\tfar\tc\nc\tfar\td\n")
    (folder / "valid.txt").write_text("a\thop\td\n")
    (folder / "test.txt").write_text("b\tfar\td\na\tfar\td\n")
    (folder / "rules.txt").write_text("far(X,Y) :- hop(X,Z), hop(Z,Y)\nfar(X,Y) :- hop(X,Y)\n")
    args = ("evaluate", folder, "--score", "noisy-or", "--height", "1")
    assert funcppo(monkeypatch, *args, "--all-scores", "--details", path, "--json", summary) == 0
    check = lambda: subprocess.run([sys.executable, CHECK, path, "--summary", summary], capture_output=True, text=True)
    assert check().returncode == 0, check().stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {"proved", "refuted"} <= {row["status"] for row in rows}
    assert all((row["proof"] is not None) == (row["status"] == "proved") for row in rows)
    at = next(i for i, row in enumerate(rows) if row["others"] and row["line"] is not None)
    for change in ({"better": rows[at]["better"] + 1}, {"line": rows[at]["line"] - 10**6}):
        path.write_text("".join(json.dumps(row | (change if i == at else {})) + "\n" for i, row in enumerate(rows)))
        assert check().returncode == 1
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[2:]))
    assert check().returncode == 1
