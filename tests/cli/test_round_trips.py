"""What one program writes, the others read: the same triples, rules, answers, scores and runs."""

import csv
import io
import shutil
from pathlib import Path

import pytest

import funcppo as fp
from funcppo.kg.graph import loaders
from tests.cli.runner import json_of, prove, read_records, settings, write_graph

NAMES = ["a b", 'q"uote', "it's", "x,y", "7", "007", "_u", "X", "\u65e5", "[]"]
NAMES += ["a\\b", "true", "-7", "?v", "#h", ";s", "<b>", "http://x.org/a#b"]
RELATIONS = ["r", "has part", "P'", "s,t"]
RULES = """0.5\tr(X,Y) :- 'has part'(X,Y)
0.25\t'has part'(X,Y) :- 'P\\''(Y,X)
0.5\t's,t'(X,'x,y') :- r(X,Z)
"""
FIXED = settings("score=noisy-or height=1 smoothing=5 object_identity=off")


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A folder of triples and rules whose names need quotes in some format."""
    folder = tmp_path_factory.mktemp("odd")
    n = len(NAMES)
    rows = [
        (NAMES[i], RELATIONS[(i + j) % 4], NAMES[(3 * i + j + 1) % n])
        for i in range(n)
        for j in range(4)
    ]
    lines = ["\t".join(row) + "\n" for row in rows]
    parts = {"valid": lines[:4], "test": lines[4:8], "train": lines[8:]}
    texts = {name: "".join(part) for name, part in parts.items()}
    return write_graph(folder, rules=RULES, **texts)


def named(dataset, table):
    names, relations = dataset.entities, dataset.predicates
    return [
        (names[h - 1], relations[r - 1], names[t - 1])
        for r, h, t in table.tolist()
    ]


@pytest.mark.parametrize("ending", ["tsv", "csv", "parquet"])
def test_written_triples_are_read_and_scored(odd, tmp_path, programs, ending):
    pytest.importorskip("duckdb")
    out = f"out={tmp_path}/{{split}}.{ending}"
    assert programs("data", odd, "--set", out) == 0
    before, after = loaders.load(odd), loaders.load(tmp_path)
    for split in ("train", "valid", "test"):
        tables = [named(d, getattr(d, split)) for d in (before, after)]
        assert tables[0] == tables[1]
    words = [odd, tmp_path / f"test.{ending}", *FIXED]
    assert programs("score", *words, "--out", tmp_path / "s.jsonl") == 0  # fmt: skip
    rows = read_records(tmp_path / "s.jsonl")
    triples = [(row["head"], row["relation"], row["tail"]) for row in rows]
    assert triples == named(before, before.test)


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_new_facts_and_scores_are_triples(odd, tmp_path, programs, ending):
    """By `score`, what it wrote itself included, and as a data set."""
    pytest.importorskip("duckdb")
    new, *scored = (tmp_path / f"{x}.{ending}" for x in ("new", "s1", "s2"))
    words = [odd, "--relation", "has part", "--new", "--out", new]
    words += ["--score", "noisy-or", "--height", "1"]
    assert programs("predict", *words) == 0
    for source, target in zip((new, scored[0]), scored):
        words = [odd, source, *FIXED, "--out", target]
        assert programs("score", *words) == 0
    datasets = [loaders.load(path) for path in (new, *scored)]
    triples = [named(d, d.train) for d in datasets]
    assert triples[0] == triples[1] == triples[2] and len(triples[0]) > 3
    if ending != "parquet":
        assert scored[0].read_text() == scored[1].read_text()


@pytest.mark.parametrize("form", ["tsv", "AnyBURL"])
def test_all_readers_read_the_same_rules(odd, tmp_path, programs, capsys, form):
    out = tmp_path / "rules.tsv"
    words = [odd, "--min-support", "2", "--format", "tsv"]
    assert programs("mine", *words, "--out", out) == 0
    other = tmp_path / "other"
    words[-1] = form
    assert programs("mine", *words, "--out", other) == 0
    rules = [loaders.load(odd, str(x)).rules.tolist() for x in (out, other)]
    assert sorted(rules[0]) == sorted(rules[1]) and rules[0]
    counts = []
    for file in (out, other):
        options = ["--rules", str(file), "--all"]
        query = "'has part'(X, Y)"
        status, found = json_of(capsys, prove, str(odd), query, *options)
        atoms = sorted(answer["atom"] for answer in found["answers"])
        counts.append((status, atoms))
    assert counts[0] == counts[1]
    query, *_ = counts[0][1]  # a printed answer is a query
    assert prove(str(odd), query, "--rules", str(other)) == 0


@pytest.mark.parametrize("learner", ["questions", "proofs"])
def test_a_run_and_its_moved_copy_are_the_same_to_every_reader(
    runs, graph, tmp_path, monkeypatch, programs, learner
):
    moved = tmp_path / "a b" / "\u65e5*[x]"
    shutil.copytree(runs / learner, moved)
    outputs = []
    for place, run in enumerate((runs / learner, moved)):
        folder = tmp_path / str(place)
        folder.mkdir()
        monkeypatch.chdir(folder)
        for words in (
            ["evaluate", run, "--details", "e.jsonl"],
            ["predict", run, "p(e0, ?x)", "--csv", "p.csv", "--known"],
            ["score", run, graph / "test.txt", "--out", "s.csv"],
            ["check", run, "--max-queries", "2", "--details", "e.jsonl"],
            ["report", run, "--out", "r.html"],
        ):
            assert programs(*words) == 0, words[0]
        answers = programs.printed("prove", run, "p(e0, ?x)", "--all")
        predictions = fp.open(run).predict("p(e0, ?x)", known=True)
        found = [str(x.score) for x in predictions.answers]
        names = ("e.jsonl", "p.csv", "s.csv")
        outputs.append((answers, found, [Path(x).read_text() for x in names]))
    assert outputs[0] == outputs[1]
    _, found, (_, table, _) = outputs[0]
    listed = [row["score"] for row in csv.DictReader(io.StringIO(table))]
    assert listed == found and len(found) > 3


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"a\tr\t\xff\n", "triples.tsv:1: expected UTF-8, got byte 0xff"),
        (b"PAR1", "triples.parquet: expected Parquet, got "),
    ],
)
def test_a_file_of_triples_that_is_no_text_is_one_line(
    odd, tmp_path, programs, monkeypatch, content, problem
):
    name = problem.partition(":")[0]
    (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    error = programs.refused("score", odd, name, *FIXED)
    assert error.startswith(problem)


def test_a_header_tells_the_order_of_the_columns(odd, tmp_path, programs):
    """As pandas and networkx name them."""
    file = tmp_path / "t.csv"
    file.write_text('source,target,relation\n"a b",7,r\n')
    assert (
        programs.printed("score", odd, file, *FIXED)
        .splitlines()[1]
        .startswith("a b,r,7,")
    )


def test_queries_that_are_no_utf_8_and_a_loop_of_links_are_one_line(
    odd, tmp_path, programs, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.txt").write_bytes(b"r(7,X)\n\xff\n")
    (tmp_path / "loop").symlink_to("loop")
    for words, problem in (
        (["predict", odd, "--queries", "q.txt", "--csv", "o.csv"], "q.txt:2: expected UTF-8"),
        (["data", odd, "--rules", "loop"], "Symlink loop"),
        (["data", odd, "--rules", "/dev/zero"], "zero: expected a file that can be read: a device without an end"),
        (["data", odd, "--config", "/dev/full"], "full: a device without an end"),
        (["prove", odd, "r(7,X)", "--json", "loop"], "Symlink loop"),
    ):  # fmt: skip
        error = programs.refused(*words)
        assert problem in error
