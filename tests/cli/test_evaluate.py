"""`evaluate`: the metrics and the lines of --details, every score, bad input, Ctrl-C."""

import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from funcppo.cli import common
from funcppo.kg.ranking import evaluator, ranking
from tests.cli.runner import contains, funcppo

FILES_PAGE = Path(__file__).parents[2] / "docs" / "files.md"


def test_the_metrics_are_those_of_the_lines_in_details(
    trained, monkeypatch, capsys, tmp_path
):
    details = tmp_path / "ranks.jsonl"
    assert (
        funcppo(
            monkeypatch,
            "evaluate",
            trained,
            "--json",
            "-",
            "--details",
            details,
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    keys = (
        "mrr",
        "hits@1",
        "hits@3",
        "hits@10",
        "n_tied",
        "ceiling",
        "n_queries",
        "n_candidates",
        "total_seconds",
        "score",
    )
    assert all(key in result for key in keys)
    assert not result["compiled"] and result["uncompiled_reason"]
    assert result["uncompiled_code"] == "no_search"
    assert result["graphs"] == "auto" and isinstance(result["notes"], list)
    assert result["replay_mode"] == "none" and result["fallback_codes"] == {}
    assert result["device"] == "cpu"
    assert result["versions"]["torch"] == torch.__version__
    fields = re.findall(r"`([\w@]+)`", FILES_PAGE.read_text())
    assert set(result) <= set(fields)
    lines = [json.loads(line) for line in details.read_text().splitlines()]
    expected = [
        np.mean([1 / (x["n_better"] + 1 + i) for i in range(x["n_equal"] + 1)])
        for x in lines
    ]
    assert result["mrr"] == pytest.approx(np.mean(expected), abs=1e-12)
    proved = [line for line in lines if line["status"] == "proved"]
    assert proved and all(
        0 < line["proof"]["nodes"][0]["probability"] <= 1 for line in proved
    )


FAILURES = "funcppo_strategy_failures_total"


@pytest.mark.parametrize("of_run", [True, False])
def test_debugging_names_the_files_of_the_run_and_of_the_evaluation(
    trained, monkeypatch, capsys, tmp_path, of_run
):
    target = trained if of_run else "countries_s1"
    ranks = tmp_path / "ranks.jsonl"
    words = (
        "evaluate",
        target,
        "--debug",
        "--max-queries",
        1,
        "--details",
        ranks,
    )
    assert funcppo(monkeypatch, *words) == 0
    (line,) = (
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("debug: ")
    )
    assert str(ranks) in line
    for name in ("config.json", "metrics.jsonl", "results.json"):
        assert (f"{target}/{name}" in line) == of_run


def test_metrics_count_what_is_ranked(trained, monkeypatch, capsys, tmp_path):
    path = tmp_path / "funcppo.prom"
    words = ("evaluate", trained, "--metrics-file", path, "--json", "-")
    assert funcppo(monkeypatch, *words) == 0
    result = json.loads(capsys.readouterr().out)
    lines = set(path.read_text().splitlines())
    assert f"funcppo_queries_ranked_total {result['n_queries']:.1f}" in lines
    assert f"funcppo_candidates_scored_total {result['n_scored']:.1f}" in lines
    assert f"funcppo_answers_lost_total {result['n_missed']:.1f}" in lines
    assert f'{FAILURES}{{reason="{result["uncompiled_code"]}"}} 1.0' in lines
    (run_info,) = (x for x in lines if x.startswith("funcppo_run_info{"))
    assert 'dataset="countries_s1",device="cpu",program="evaluate"' in run_info
    assert 'strategy="eager"' in run_info
    assert "funcppo_world_size 1.0" in lines
    assert "funcppo_finished 1.0" in lines


@pytest.mark.parametrize(
    "score",
    [
        "exists@1",
        "max-confidence",
        "noisy-or@3",
        "noisy-or-other-facts",
        "greedy",
        "success",
    ],
)
def test_every_score_ranks(trained, monkeypatch, capsys, score):
    args = (
        "evaluate",
        trained,
        "--score",
        score,
        "--negatives",
        "3",
        "--split",
        "valid",
        "--json",
        "-",
    )
    assert funcppo(monkeypatch, *args) == 0
    assert json.loads(capsys.readouterr().out)["score"] == score


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (
            ("{run}", "--negatives", "-3"),
            "--negatives: expected all, or a number ... got '-3'",
        ),
        (
            ("{run}", "--negatives", "some"),
            "--negatives: expected all, or a number ... got 'some'",
        ),
        (
            ("countries_s1", "--score", "exists@0"),
            "score 'exists@0': expected exists@H, max-confidence, noisy-or",
        ),
        (
            ("countries_s1", "--score", "success"),
            "of a trained run); a trained run has others",
        ),
        (("{run}", "--score", "loud"), "success, best-proof, greedy, exists@H"),
        (
            ("{run}", "--set", "object_identity=True"),
            "--object-identity: ... is a trained run, which has its own",
        ),
        (
            ("{run}", "--height", "1"),
            "--height: ... is a trained run, which has its own",
        ),
        (
            ("countries_s1", "--set", "smoothing=-1"),
            "--set smoothing: expected 0 or more or auto, got -1.0",
        ),
        (
            ("countries_s1", "--score", "success"),
            "score 'success': expected exists@H, max-confidence",
        ),
        (
            ("countries_s1", "--max-queries", "0"),
            "--max-queries: expected 1 or more, got 0",
        ),
        (
            ("countries_s1", "--resume"),
            "--resume, --overwrite: expected --details FILE",
        ),
        (("{tmp}",), "train.txt"),
        (
            ("{run}", "--metrics-file", "{tmp}"),
            "--metrics-file ...: expected a file in a folder that exists",
        ),
        (("countries_s1", "--memory", "1MB"), "--memory 1000000: ... at least"),
        (("{run}", "--memory", "1MB"), "--memory 1000000: ... at least"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    trained, monkeypatch, capsys, tmp_path, args, line
):
    assert (
        funcppo(
            monkeypatch,
            "evaluate",
            *(arg.format(tmp=tmp_path, run=trained) for arg in args),
        )
        == 2
    )
    error = capsys.readouterr().err
    assert contains(error, line)
    assert error.startswith("funcppo: ") and error.count("\n") == 1


def test_some_queries_are_ranked_and_only_these_are_counted(
    monkeypatch, capsys
):
    args = (
        "evaluate",
        "family_tree:60:0",
        "--split",
        "valid",
        "--score",
        "exists@1",
        "--height",
        "1",
    )
    assert funcppo(monkeypatch, *args, "--max-queries", "5", "--json", "-") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["n_queries"], result["height"], result["split"]) == (
        10,
        1,
        "valid",
    )  # both sides of 5 queries


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_an_interrupt_ends_the_ranking_after_the_query_in_progress(
    number, monkeypatch, capsys, tmp_path
):
    """Without --details the text says how to make it resumable."""
    evaluate_queries = evaluator.evaluate_queries

    def interrupt_first_query(*args):
        for records in evaluate_queries(*args):
            os.kill(os.getpid(), number)
            yield records

    monkeypatch.setattr(evaluator, "evaluate_queries", interrupt_first_query)
    args = (
        "evaluate",
        "family_tree:60:0",
        "--score",
        "exists@1",
        "--height",
        "1",
    )
    assert funcppo(monkeypatch, *args) == 128 + number
    output = " ".join(capsys.readouterr().out.split())
    assert contains(
        output,
        "interrupted after 1 of ... queries; with --details FILE, --resume could continue",
    )


def test_an_interrupt_ends_a_query_that_takes_long(
    trained, monkeypatch, capsys, tmp_path
):
    """The second chunk of queries does not end: the first one is kept, and the rest is ranked later."""
    details, whole = tmp_path / "ranks.jsonl", tmp_path / "whole.jsonl"
    rank_split = ranking.rank_split
    n_chunks = []

    def endless(task, split, scorer, protocol, *query_id):
        n_chunks.extend(query_id)
        if len(n_chunks) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                time.sleep(0.01)
        return rank_split(task, split, scorer, protocol, *query_id)

    with monkeypatch.context() as patch:
        patch.setattr(common, "GRACE_SECONDS", 0.01)
        patch.setattr(ranking, "rank_split", endless)
        arguments = ("evaluate", trained, "--details", details)
        assert funcppo(patch, *arguments) == 130
    output = capsys.readouterr().out
    assert contains(output, "interrupted after 1 of 24 queries; --resume")
    assert len(details.read_text().splitlines()) == 1
    assert funcppo(monkeypatch, *arguments, "--resume") == 0
    assert funcppo(monkeypatch, "evaluate", trained, "--details", whole) == 0
    assert details.read_text() == whole.read_text()
