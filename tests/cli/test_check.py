"""`check`: what it prints and returns where all agrees, where the engine is made to err, and for bad input."""

from __future__ import annotations

import json
import re

import pytest

from funcppo.cli.check import Check
from funcppo.cli.options import parse_options
from funcppo.kg.search import task as prover_task
from tests.cli.runner import funcppo, json_of

FAST = ["--max-queries", "8", "--seconds", "3600"]  # never cut by the clock


def check(*args: str) -> int:
    return parse_options(Check, args).run()


def lines_of(capsys, *args):
    """The exit status and the printed lines but notes, with the seconds cut off."""
    capsys.readouterr()
    status = check(*args)
    lines = capsys.readouterr().out.splitlines()
    return status, [
        line.rpartition(" (")[0] if " agree (" in line else line
        for line in lines
        if not line.startswith("note: ")
    ]


# -- agreement


def test_a_data_set_agrees_line_by_line(capsys):
    assert lines_of(capsys, "countries_s1", *FAST) == (
        0,
        [
            "supports: 1 of 1 rules agree",
            "candidates: 40 of 40 candidates agree",
            "ranks: 8 of 8 queries agree",
            "proofs: 8 of 8 proofs agree",
        ],
    )


def test_a_run_agrees_with_the_scores_of_its_policy(trained, capsys):
    status, result = json_of(capsys, check, str(trained), *FAST)
    checks = {part["kind"]: part for part in result["checks"]}
    assert (status, result["score"], result["dataset"]) == (
        0,
        "best-proof",
        "countries_s1",
    )
    assert [part["n_compared"] for part in checks.values()] == [1, 40, 8, 8]
    assert [part["n_disagreeing"] for part in checks.values()] == [0] * 4
    assert result["prepare_seconds"] > 0
    assert checks["ranks"]["notes"] == ["scores are the policy's (best-proof)"]


# -- disagreement


def test_a_support_that_is_off_by_one_is_reported(capsys, monkeypatch):
    """The engine counts one more fact for each rule."""
    count = prover_task.with_confidence

    def off_by_one(*args, **kwargs):
        kb = count(*args, **kwargs)
        return kb._replace(support=kb.support + 1)

    monkeypatch.setattr(prover_task, "with_confidence", off_by_one)
    status, lines = lines_of(capsys, "countries_s1", *FAST)
    assert status == 1
    assert lines[0] == "supports: 0 of 1 rules agree"
    found = re.search(
        r"body pairs (\d+) of (\d+), recounted (\d+) of \2$", lines[1]
    )
    assert found and int(found[1]) == int(found[3]) + 1


# -- lines of --details


# -- samples and bad input


def test_a_program_without_a_split_has_its_rules_counted(tmp_path, capsys):
    program = tmp_path / "p.pl"
    program.write_text("e(a, b).\ne(b, c).\np(X, Y) :- e(X, Z), e(Z, Y).\n")
    assert lines_of(capsys, str(program), *FAST) == (
        0,
        ["supports: 1 of 1 rules agree"],
    )


def test_nothing_compared_is_an_error(monkeypatch, capsys, tmp_path):
    out = tmp_path / "check.json"
    args = ["check", "countries_s1", "--seconds", "1e-9", "--json", out]
    assert funcppo(monkeypatch, *args) == 2
    captured = capsys.readouterr()
    assert "nothing could be compared" in captured.err
    assert "1 rules not compared within" in captured.out
    assert [
        part["n_compared"] for part in json.loads(out.read_text())["checks"]
    ] == [0] * 4


@pytest.mark.parametrize(
    "options, message",
    [
        (["--seconds", "0"], "--seconds: expected more than 0, got 0.0"),
        (["--set", "n_rules=0"], "--set n_rules: expected 1 or more, got 0"),
        (["--rules", "none.txt"], "none.txt"),
    ],
)
def test_bad_options_are_one_line(monkeypatch, capsys, options, message):
    assert funcppo(monkeypatch, "check", "countries_s1", *options) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


# -- test triples that are known facts

# Of the four, p(a, b) and p(c, d) are in train too.
LEAKY_TEST = "a\tp\tb\nc\tp\td\ng\tp\th\nc\tq\td\n"


@pytest.fixture(params=[1, 2])
def leaky(tmp_path, request):
    """A folder, a height, and which of its test triples the rules derive from other facts within that height.

    p(a, b) and p(g, h) follow from q. p(c, d) does not; at height 2 it follows from q(c, d), which only p(c, d) itself
    derives.
    """
    (tmp_path / "train.txt").write_text(
        "a\tp\tb\na\tq\tb\nc\tp\td\ng\tq\th\ne\tp\tf\n"
    )
    (tmp_path / "valid.txt").write_text("e\tq\tf\n")
    (tmp_path / "test.txt").write_text(LEAKY_TEST)
    back = "q(X,Y) :- p(X,Y).\n" if request.param == 2 else ""
    (tmp_path / "rules.txt").write_text("p(X,Y) :- q(X,Y).\n" + back)
    return tmp_path, str(request.param), [True, False, True, bool(back)]


@pytest.mark.parametrize(
    ("score", "negatives"), [("noisy-or", "all"), ("exists", "5")]
)
def test_a_known_fact_is_provable_if_other_facts_prove_it(
    leaky, monkeypatch, capsys, score, negatives
):
    """`evaluate`, its --details, `provable`, `data`, `predict` and `check` say the same."""
    folder, height, is_provable = leaky
    n_provable = sum(is_provable)
    score += f"@{height}" if score == "exists" else ""
    settings = ["--height", height, "--score", score]
    details = folder / "details.jsonl"

    def run(program, *args):
        assert funcppo(monkeypatch, program, folder, *args, "--json", "-") == 0
        return json.loads(capsys.readouterr().out)

    result = run(
        "evaluate", *settings, "--negatives", negatives, "--details", details
    )
    lines = [json.loads(line) for line in details.read_text().splitlines()]
    assert result["ceiling"] == n_provable / 4
    for line in lines:
        expected = is_provable[line["query_row"]]
        assert line["answer_provable"] == expected
        assert line["status"] == ("proved" if expected else "no proof")
        assert (line["log_score"] is not None) == expected
        assert (line["proof"] is not None) == expected

    provable = run("data", "--provable", "test", "--height", height)
    assert provable["n_known_facts"] == 2
    assert list(provable["n_derivable_by_height"].values())[-1] == n_provable
    derivable = run("data", "--height", height)["derivable"]["test"]
    assert sum(derivable.values()) == n_provable

    (query,) = run("predict", "p(c, X)", "--known", *settings)["queries"]
    verdicts = {a["entity"]: a["verdict"] for a in query["answers"]}
    assert verdicts["d"] == "no proof"
    checks = run("check", *FAST)["checks"]
    assert [part["n_disagreeing"] for part in checks] == [0] * 4
