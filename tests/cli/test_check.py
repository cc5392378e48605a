"""`check`: what it prints and returns where all agrees, where the engine is made to err, and for bad input."""

import json
import re

import pytest

from funcppo.cli import check as check_module
from funcppo.cli.check import Check
from funcppo.cli.options import parse_options
from funcppo.kg.graph.loaders import load
from funcppo.kg.ranking.recount_check import compare_proof_file
from funcppo.kg.search import task as prover_task
from tests.cli.runner import json_of, read_records, write_graph

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
    assert (status, result["score"]) == (0, "best-proof")
    assert result["dataset"] == "countries_s1"
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
    pattern = r"body pairs (\d+) of (\d+), recounted (\d+) of \2$"
    found = re.search(pattern, lines[1])
    assert found and int(found[1]) == int(found[3]) + 1


# -- samples and bad input


def test_a_program_without_a_split_has_its_rules_counted(tmp_path, capsys):
    program = tmp_path / "p.pl"
    program.write_text("e(a, b).\ne(b, c).\np(X, Y) :- e(X, Z), e(Z, Y).\n")
    found = lines_of(capsys, str(program), *FAST)
    assert found == (0, ["supports: 1 of 1 rules agree"])


def test_nothing_compared_is_an_error(programs, monkeypatch, capsys, tmp_path):
    out = tmp_path / "check.json"
    args = ["check", "countries_s1", "--json", out]
    monkeypatch.setattr(check_module, "TIME_SHARES", [1e-12] * 4)
    assert programs(*args) == 2
    captured = capsys.readouterr()
    assert "nothing could be compared" in captured.err
    assert "1 rules not compared within" in captured.out
    checks = json.loads(out.read_text())["checks"]
    assert [part["n_compared"] for part in checks] == [0] * 4


@pytest.mark.parametrize(
    "options, message",
    [
        (["--seconds", "0"], "--seconds: expected more than 0, got 0.0"),
        (["--set", "n_rules=0"], "--set n_rules: expected 1 or more, got 0"),
        (["--rules", "none.txt"], "none.txt"),
    ],
)
def test_bad_options_are_one_line(programs, options, message):
    error = programs.refused("check", "countries_s1", *options)
    assert message in error


# -- test triples that are known facts


@pytest.fixture(params=[1, 2])
def leaky(tmp_path, request):
    """A folder, a height, and which of its test triples the rules derive from other facts within that height.

    p(a, b) and p(g, h) follow from q. p(c, d) does not; at height 2 it follows from q(c, d), which only p(c, d) itself
    derives.
    """
    back = "q(X,Y) :- p(X,Y).\n" if request.param == 2 else ""
    write_graph(
        tmp_path,
        train="a\tp\tb\na\tq\tb\nc\tp\td\ng\tq\th\ne\tp\tf\n",
        valid="e\tq\tf\n",
        # Of the four, p(a, b) and p(c, d) are in train too.
        test="a\tp\tb\nc\tp\td\ng\tp\th\nc\tq\td\n",
        rules="p(X,Y) :- q(X,Y).\n" + back,
    )
    return tmp_path, str(request.param), [True, False, True, bool(back)]


@pytest.mark.parametrize(
    ("score", "negatives"), [("noisy-or", "all"), ("exists", "5")]
)
def test_a_known_fact_is_provable_by_others(leaky, programs, score, negatives):
    """`evaluate`, its --details, `provable`, `data`, `predict` and `check` say the same."""
    folder, height, is_provable = leaky
    n_provable = sum(is_provable)
    score += f"@{height}" if score == "exists" else ""
    settings = ["--height", height, "--score", score]
    details = folder / "details.jsonl"

    def run(program, *args):
        return programs.json(program, folder, *args)

    settings += ["--negatives", negatives, "--details", details]
    result = run("evaluate", *settings)
    lines = read_records(details)
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

    (query,) = run("predict", "p(c, X)", "--known", *settings[:4])["queries"]
    verdicts = {a["entity"]: a["verdict"] for a in query["answers"]}
    assert verdicts["d"] == "no proof"
    checks = run("check", *FAST)["checks"]
    assert [part["n_disagreeing"] for part in checks] == [0] * 4


# -- proofs in a file

WORLD = """
reach(X, Y) :- link(X, Y).
reach(X, Z) :- link(X, Y), reach(Y, Z).
link(a, b). link(b, 'C d'). link(b, b).
"""


def changes(value):
    """JSON values that differ from one in one place; a probability that is none may become any."""
    others = {str: ["x"], int: [value + 1, str(value)] if type(value) is int else []}  # fmt: skip
    yield from others.get(type(value), [])
    yield from [["x"], {}] if value is None else [None]
    if isinstance(value, list):
        yield from [value[:-1], value + value[:1]] if value else [[1]]
        for i, x in enumerate(value):
            yield from ([*value[:i], y, *value[i + 1 :]] for y in changes(x))
    if isinstance(value, dict):
        for name, x in value.items():
            yield {key: y for key, y in value.items() if key != name}
            yield from ({**value, name: y} for y in changes(x))


@pytest.mark.parametrize(
    ("program", "query", "place", "claims"),
    [
        ("prove", "reach(a, 'C d')", (), ["query", "proof"]),
        ("predict", "p(c, X)", ("queries", 0, "answers", 0), ["relation", "proof"]),
    ],
)  # fmt: skip
def test_a_proof_in_a_file_holds_until_anything_in_it_is_changed(
    tmp_path, capsys, programs, program, query, place, claims
):
    data, file = tmp_path / "world.pl", tmp_path / "proof.json"
    data.write_text(WORLD)
    if program == "predict":
        train = "a\tq\tb\nc\tq\td\na\tp\tb\n"
        rules = "p(X,Y) :- q(X,Y).\n"
        data = write_graph(tmp_path / "g", train=train, rules=rules)
    options = ["--explain", "--height", "1", "--score", "noisy-or"]
    words = [program, data, query, *options * (program == "predict")]
    assert programs(*words, "--json", file) == 0
    words = ["check", file, "--set", f"graph={data}"]
    assert programs(*words) == 0

    document = json.loads(file.read_text())
    holder = document
    for key in place:
        holder = holder[key]
    original = {name: holder[name] for name in claims}
    variants = [
        (name, value) for name in claims for value in changes(holder[name])
    ]
    assert len(variants) > 50
    dataset = load(data)
    for name, value in variants:
        holder |= original | {name: value}
        file.write_text(json.dumps(document))
        if not isinstance(holder["proof"], dict):  # no proof is left
            with pytest.raises(ValueError, match="expected a proof"):
                compare_proof_file(file, dataset)
            continue
        (line,) = compare_proof_file(file, dataset).disagreements
        assert re.match("(nodes?|root|proof|answer|expected at least)", line)
        assert "\n" not in line
    capsys.readouterr()
    assert programs(*words) == 1
    file.write_text("{}")
    for refused, what in ((words, "a proof"), (["check", file], "--set graph")):
        expected = f"{file}: expected {what}"
        assert programs.refused(*refused).startswith(expected)
