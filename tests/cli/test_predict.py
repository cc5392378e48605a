"""`predict`: the scores of `evaluate --details`, files in and out, names of all kinds, resuming, bad input."""

import csv
import io
import json
import math
import os
import signal

import pytest

import funcppo as fp
from funcppo.cli import predict
from funcppo.core import files
from funcppo.kg.graph import loaders
from tests.cli import runner
from tests.cli.conftest import RULES


@pytest.mark.parametrize(
    ("target", "score"),
    [
        ("graph", "auto"),
        ("graph", "max-confidence"),
        ("questions", "evidence"),
        ("questions", "noisy-or@2"),
        ("proofs", "success"),
    ],
)
def test_candidates_are_scored(graph, runs, programs, tmp_path, target, score):
    """Every candidate of every test query, on both sides."""
    subject = graph if target == "graph" else runs / target
    details, queries = tmp_path / "details.jsonl", tmp_path / "queries.txt"
    options = ["--score", score]
    files = ["--details", details, *runner.settings("all_scores=on proofs=off")]
    assert programs("evaluate", subject, *files, *options) == 0
    records = runner.read_records(details)
    dataset = loaders.load(graph)
    asked, answers_of_split = [], []
    for record in records:
        relation, head, tail = dataset.test[record["query_row"]]
        names = [dataset.entities[head - 1], dataset.entities[tail - 1]]
        place = 0 if record["side"] == "head" else 1
        answers_of_split.append(names[place])
        names[place] = "?x"
        asked.append(f"{dataset.predicates[relation - 1]}({', '.join(names)})")
    queries.write_text("\n".join(asked))

    args = [subject, "--queries", queries, "--k", 1000, *options]
    args += ["--set", "with_self=on"]  # a candidate of the evaluation
    found = programs.json("predict", *args, "--known")["queries"]
    new = programs.json("predict", *args)["queries"]
    assert len(found) == len(new) == len(records) == 40
    n_candidates = 0
    for record, name, ranked, only_new in zip(
        records, answers_of_split, found, new
    ):
        others = [a for a in ranked["answers"] if not a["known"]]
        (own,) = [a for a in ranked["answers"] if a["entity"] == name]
        found_scores = [a["quantised_score"] for a in others]
        assert found_scores == record["other_quantised_scores"]
        assert own["quantised_score"] == record["quantised_score"]
        assert own["log_score"] == record["log_score"]
        assert (own["verdict"] == "derived") == record["answer_provable"]
        assert own["known"]
        names = [a["entity"] for a in others]
        assert [a["entity"] for a in only_new["answers"]] == names
        n_candidates += len(others)
    assert n_candidates > 20  # not about nothing


def test_the_answers_are_printed_with_their_proofs(runs, programs):
    for run in ("questions", "proofs"):
        args = [runs / run, "p(e1, ?x)", "--explain", "--k", 2]
        answers = programs.json("predict", *args)["queries"][0]["answers"]
        assert answers
        for answer in answers:
            root = answer["proof"]["nodes"][0]
            assert root["goal_text"] == f"p(e1, {answer['entity']})"
            assert ("evidence" in answer) == (run == "questions")
        assert "by rule" in programs.printed("predict", *args)


def test_what_other_facts_add_is_explained(graph, programs, capsys, tmp_path):
    """In `predict`, and in the lines of `evaluate`: the score without them and what they add make the score."""
    options = ["--score", "noisy-or@2-other-facts", "--height", 1]
    args = [graph, "p(e1, ?x)", "--explain", "--k", 5, *options]
    answers = programs.json("predict", *args)["queries"][0]["answers"]
    details = tmp_path / "details.jsonl"
    args = ["evaluate", graph, "--details", details, *options]
    assert programs(*args) == 0
    records = runner.read_records(details)
    proved = [r for r in records if r["status"] == "proved"]
    assert answers and proved
    assert all(r["other_facts"] is None for r in records if r not in proved)
    for explained in (*answers, *proved):
        others = explained["other_facts"]
        a, b = others["share_of_facts"], others["share_of_derived"]
        if not others["n_facts"]:
            a, b = 1 - a, 1 - b
        assert others["log_odds"] == pytest.approx(math.log(a / b))

    capsys.readouterr()
    args = ["predict", graph, "p(e1, ?x)", "--explain", *options]
    text = programs.printed(*args)
    assert text.count(" log-odds by other facts: it is the tail of ") > 0
    assert "from whether the answer has other facts of the relation" in text
    args = ["check", graph, "--details", details]
    assert "details: " in programs.printed(*args)


def csv_rows(programs, *args):
    """The rows of --csv -."""
    return programs.rows("predict", *args, "--csv", "-")


def test_names_of_all_kinds_are_kept(programs, tmp_path):
    """Spaces, commas, quotes, markup, Unicode and a control character."""
    names = ["a b", "c, d", "e'f", 'g"h', "[/x]:smile:", "Zoë 🙂", "i\x1b[31m"]
    lines = [f"{name}\tborn in\tParis, France\n" for name in names]
    rules = "'lives in'(X, Y) :- 'born in'(X, Y)."
    folder = runner.write_graph(
        tmp_path / "graph", train="".join(lines), rules=rules
    )
    query = "'lives in'(?who, 'Paris, France')"
    (ranked,) = programs.json("predict", folder, query)["queries"]
    assert [answer["entity"] for answer in ranked["answers"]] == names
    rows = csv_rows(programs, folder, query)
    assert [row["entity"] for row in rows] == names
    others = {(row["tail"], row["known"]) for row in rows}
    assert others == {("Paris, France", "false")}
    text = programs.printed("predict", folder, query)
    assert "\x1b" not in text and "'i\\x1b\\[31m'" in text
    assert "[/x]:smile:" in text and "Zoë 🙂" in text

    args = [folder, "--relation", "lives in", "--new", "--out"]
    for suffix in ("csv", "jsonl"):
        path = tmp_path / f"facts.{suffix}"
        assert programs("predict", *args, path) == 0
        facts = runner.read_records(path) if suffix == "jsonl" else None
        if facts is None:
            text = path.read_text(encoding="utf-8")
            facts = list(csv.DictReader(io.StringIO(text)))
        assert [fact["head"] for fact in facts] == names
        assert set(rows[0]) <= set(facts[0])
        assert {str(fact["known"]).lower() for fact in facts} == {"false"}


def test_fewer_answers_and_queries_as_were_written(graph, programs, tmp_path):
    queries = tmp_path / "queries.txt"
    written = [" p( e1,?tail ) ", "'p'('e1', X)", "s(e1,_)"]
    queries.write_bytes("\r\n".join(written).encode())
    args = [graph, "--queries", queries]
    found = programs.json("predict", *args)["queries"]
    assert [query["query"] for query in found] == written
    rows = csv_rows(programs, *args, "--k", 1)
    assert [row["query"] for row in rows] == written
    answers = found[0]["answers"]
    scores = [answer["score"] for answer in answers]
    assert len(scores) > 2 and scores == sorted(scores, reverse=True)
    asked = ("predict", graph, "p(e1, X)")
    (two,) = programs.json(*asked, "--k", 2)["queries"]
    assert (two["answers"], two["n_new"]) == (answers[:2], found[0]["n_new"])
    more = ("--set", f"min_score={scores[1]}")
    (good,) = programs.json(*asked, *more)["queries"]
    kept = [score for score in scores if score >= scores[1]]
    assert [answer["score"] for answer in good["answers"]] == kept


def test_new_facts_are_of_the_queries_best_first(graph, programs, tmp_path):
    out = tmp_path / "facts.jsonl"
    args = [graph, "--relation", "p", "--new"]
    assert programs("predict", *args, "--out", out) == 0
    facts = runner.read_records(out)
    scores = [fact["quantised_score"] for fact in facts]
    assert scores == sorted(scores, reverse=True)
    ranks = [1 + sum(other > score for other in scores) for score in scores]
    assert [fact["rank"] for fact in facts] == ranks

    queries = tmp_path / "queries.txt"
    queries.write_text("".join(f"p(e{i}, X)\n" for i in range(14)))
    asked = [graph, "--queries", queries, "--k", 1000]
    names = ("head", "tail", "quantised_score")
    expected = {
        tuple(answer[x] for x in names)
        for query in programs.json("predict", *asked)["queries"]
        for answer in query["answers"]
    }
    assert len(facts) == len(expected) > 10
    assert {tuple(fact[x] for x in names) for fact in facts} == expected
    shown = programs.json("predict", *args, "--k", 3)
    assert (shown["n_facts"], shown["facts"]) == (len(facts), facts[:3])


def test_new_facts_of_all_relations_by_probability(runs, programs, tmp_path):
    """What `score` says of each."""
    run, out = runs / "questions", tmp_path / "facts.jsonl"
    assert programs("predict", run, "--new", "--out", out) == 0
    facts = runner.read_records(out)
    chances = [fact["probability"] for fact in facts]
    assert chances == sorted(chances, reverse=True)
    assert len({fact["relation"] for fact in facts}) > 1
    names = ("head", "relation", "tail")
    triples = [tuple(fact[name] for name in names) for fact in facts]
    found = fp.open(run).score_triples(triples)
    expected = [x["probability"] for x in found]
    assert chances == pytest.approx(expected, rel=1e-12)
    assert not any(x["known"] for x in found)
    n_derived = 0
    for relation in "pqrs":
        args = (run, "--relation", relation, "--new", "--k", 1)
        n_derived += programs.json("predict", *args)["n_facts"]
    assert len(facts) == n_derived


def test_labels_are_printed_and_ids_are_written(programs, capsys, tmp_path):
    lines = "".join(f"Q{i}\tP1\tQ{i + 1}\n" for i in range(6))
    rules = "1\tP2(X,Y) :- P1(X,Z), P1(Z,Y)\n"
    labels = "Q0\tAnn\nQ1\tBob\nQ2\tEve\nP1\tparent of\nP2\tgrandparent\n"
    texts = {"train": lines, "rules": rules, "labels": labels}
    folder = runner.write_graph(tmp_path / "graph", **texts)
    query, found = "grandparent(Ann, X)", tmp_path / "found.json"
    words = ("predict", folder, query, "--explain", "--json", found)
    text = programs.printed(*words)
    assert "'parent of'('Bob', 'Eve')" in text and "Q2" not in text
    (answer,) = json.loads(found.read_text())["queries"][0]["answers"]
    assert (answer["entity"], answer["label"]) == ("Q2", "Eve")
    assert "P1('Q1', 'Q2')" in json.dumps(answer["proof"])
    for asked, shown in (
        ("P2(Q0, Eve)", "proved: grandparent('Ann', 'Eve')"),
        ("grandparent(Ann, X)", "grandparent('Ann', 'Eve')"),
        ("P2(Q0, Bob)", "nothing derived satisfies 'parent of'("),
    ):
        programs("prove", folder, asked, "--json", found)
        assert shown in capsys.readouterr().out
        assert "Ann" not in found.read_text().replace(asked, "")


def test_unproved_answers_are_marked_in_every_output(runs, programs):
    """The same score and answers before them, whichever score ranks these."""
    args = [runs / "questions", "p(e1, X)", "--k", "14"]
    (without,) = programs.json("predict", *args)["queries"]
    for score in ("evidence", "max-confidence"):
        asked = [*args, "--unproved", "--score", score]
        (found,) = programs.json("predict", *asked)["queries"]
        verdicts = [answer["verdict"] for answer in found["answers"]]
        n = without["n_new"]
        assert verdicts == ["derived"] * n + ["no proof"] * found["n_unproved"]
        assert 0 < found["n_unproved"] == 14 - n - without["n_known"]
    assert all("prior" in answer for answer in found["answers"][n:])
    rows = csv_rows(programs, *asked)
    assert [row["verdict"] for row in rows] == verdicts
    text = programs.printed("predict", *asked)
    n = found["n_unproved"]
    assert f"{n} of {n} answers without" in text
    assert text.count("  no proof, prior ") == n


# -- bad input


def refused(programs, *args):
    """The one line of a program that is refused."""
    return programs.refused("predict", *args, notes=True)


QUERY = ["p(e1, X)"]
NEW = ["--relation", "p", "--new"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["p(e1, e99)"], "unknown entity 'e99'...close: "),
        (["pp(e1, X)"], "unknown relation 'pp'"),
        (["p(e1, e2)"], "one of them a variable...got 2 with 0 variables"),
        (["p(X, X)"], "got 2 with 2 variables"),
        ([""], "expected an atom such as r(h, X), got nothing"),
        (["nonsense"], "query 'nonsense'"),
        ([], "expected QUERY, --queries FILE, or --new"),
        ([*QUERY, "--new"], "got 2 of them"),
        (["--relation", "p"], "expected QUERY"),
        (["--new", "--relation", "pq"], "--relation 'pq': unknown relation"),
        ([*QUERY, "--out", "x"], "--out: expected --new"),
        ([*QUERY, "--csv", "x", "--resume"], "--resume: expected --new"),
        (["--queries", "x", "--csv", "-", "--overwrite"], "--overwrite: expec"),
        (["--queries", "a.csv.part", "--csv", "a.csv"], "--csv a.csv.part: expected another file than a.csv.part"),
        (["--queries", "x", "--csv", "a", "--json", "a.settings.json"],
         "--csv a.settings.json: expected another file than that of --json"),
        ([*QUERY, "--set", "min_score=2"], "--set min_score: expected 0 to 1"),
        ([*QUERY, "--score", "evidence"], "trained run has others"),
        ([*QUERY, "--unproved"], "expected a run that learnt from questions"),
        ([*QUERY, "--unproved", "--set", "min_score=0.1"], "expected one of"),
        ([*NEW, "--unproved"], "--unproved: expected a query"),
        ([*QUERY, "--csv", "-", "--json", "-"], "expected one of them"),
        (["--queries", "{queries}"], "queries.txt:3: query 'p(e1, e2)'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(graph, programs, tmp_path, args, message):
    queries = tmp_path / "queries.txt"
    queries.write_text("p(e1, X)\n\np(e1, e2)\n")
    words = [arg.format(queries=queries) for arg in args]
    line = refused(programs, graph, *words)
    assert runner.contains(line, message), line


def test_a_run_is_asked_about_the_facts_of_today(graph, runs, programs):
    """Also about those of another folder; what cannot be read names it and the run."""
    train = graph / "train.txt"
    text = train.read_text()
    query = [runs / "questions", "p(new, X)"]
    try:
        assert "unknown entity 'new'" in refused(programs, *query)
        train.write_text(text + "new\tq\te1\n")
        changed = programs.json("predict", *query)
        ranked = ("evaluate", query[0], "--max-queries", 1)
        printed = programs.printed(*ranked)
        train.unlink()
        gone = refused(programs, *query)
        assert str(runs / "questions") in gone and str(graph) in gone
        assert "missing split" in gone
        train.write_text("new\tq\te1\n")
        args = [*query, "--graph", graph]
        alone = programs.json("predict", *args)
    finally:
        train.write_text(text)
    note = "facts: 1 new, 0 gone; entities: 1 new; rules and weights are those"
    assert any(note in x for x in changed["notes"])
    assert printed.count(note) == 1
    for found in (changed, alone):
        names = [a["entity"] for a in found["queries"][0]["answers"]]
        assert "e1" in names
    args = [graph, "p(e1, X)", "--graph", graph]
    expected = "--graph: expected a trained run"
    assert expected in refused(programs, *args)


# -- interrupted work


@pytest.fixture
def work(request, graph, tmp_path, programs, monkeypatch):
    """Options of 14 queries, answered in batches of three, and the file of undisturbed work, by its option."""
    monkeypatch.setattr(predict, "FIRST_BATCH_QUERIES", 3)
    # no batch grows
    monkeypatch.setattr(predict, "BATCH_SECONDS", 0.0)
    queries = tmp_path / "queries.txt"
    queries.write_text("\n".join(f"p(e{i}, X)" for i in range(14)))
    args = [graph, *runner.BY_RULES]
    option = getattr(request, "param", "--csv")
    args += NEW if option == "--out" else ["--queries", queries, "--known"]
    whole = tmp_path / "whole"
    assert programs("predict", *args, option, whole) == 0
    return [*args, option], whole


def contents(path):
    """The bytes of a file, without the time in JSON."""
    return b"".join(
        line
        for line in path.read_bytes().splitlines()
        if b"seconds" not in line
    )


def interrupt(monkeypatch, n_batches, *args):
    """Send a SIGINT after some batches are written; the exit status."""
    append, calls = files.append_records, []

    def append_and_interrupt(log, records):
        append(log, records)
        calls.append(records)
        if len(calls) == n_batches:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(files, "append_records", append_and_interrupt)
        return runner.funcppo(patch, "predict", *args)


@pytest.mark.parametrize("work", ["--csv", "--json", "--out"], indirect=True)
def test_broken_work_is_resumed(work, tmp_path, programs, monkeypatch, capsys):
    args, whole = work
    out, part = tmp_path / "out", tmp_path / "out.part"
    capsys.readouterr()
    assert interrupt(monkeypatch, 2, *args, out) == 130
    error = capsys.readouterr().err
    assert f"interrupted after 4 of 14 queries; --resume continues {part}" in (
        error
    )
    assert not out.exists() and part.read_bytes().count(b"\n") == 4

    # a line that was being written when the power failed
    part.write_bytes(part.read_bytes()[:-7])
    assert interrupt(monkeypatch, 3, *args, out, "--resume") == 130
    error = capsys.readouterr().err
    assert f"{part}: dropped 1 unfinished line at its end" in error
    n_done = part.read_bytes().count(b"\n")
    assert not out.exists() and 4 < n_done < 14

    assert programs("predict", *args, out, "--resume") == 0
    if args[-1] != "--out":
        assert f"after {n_done} before" in capsys.readouterr().err
    assert contents(out) == contents(whole) and not part.exists()
    assert (
        programs.printed("predict", *args, out, "--resume")
        == f"{out} is complete already\n"
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ([], "expected --resume, --overwrite or a new file, got a file that"),
        (["--resume", "--k", "3"], "a file made with k 3, got 10"),
        (["--resume", "--score", "max-confidence"], "with score max-conf"),
        (["--resume", "--queries"], "made with queries_digest...got"),
        (["--resume", "--rules"], "made with fingerprint...got"),
    ],
)
def test_other_work_is_not_resumed(
    work, tmp_path, programs, monkeypatch, options, problem
):
    args, _ = work
    out = tmp_path / "out"
    assert interrupt(monkeypatch, 2, *args, out) == 130
    # options that name a file take a changed one
    changed = tmp_path / "changed"
    if options[-1:] == ["--queries"]:
        text = (tmp_path / "queries.txt").read_text()
        changed.write_text(text.replace("e3", "e4"))
        options = [*options, changed]
    if options[-1:] == ["--rules"]:
        changed.write_text(RULES.replace("q(X, X)", "q(Y, Y)"))
        options = [*options, changed]
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    line = refused(programs, *args, out, *options)
    assert runner.contains(line, problem) and str(out) in line
    assert {x: x.read_bytes() for x in tmp_path.iterdir()} == files


def test_answers_and_facts_are_written_as_parquet(programs, tmp_path):
    duckdb = pytest.importorskip("duckdb")
    answers, facts = tmp_path / "a.parquet", tmp_path / "f.parquet"
    words = ["predict", "countries_s1", "--score", "max-confidence"]
    query = ["locatedIn(X, europe)", "--known", "--csv", answers]
    assert programs(*words, *query) == 0
    new = ["--relation", "locatedIn", "--new", "--out", facts]
    assert programs(*words, *new) == 0
    for path in (answers, facts):
        rows = duckdb.sql(f"SELECT rank, score, query FROM '{path}'").fetchall()
        # All facts of this data set are known.
        assert bool(rows) == (path == answers)
        assert all(type(rank) is int for rank, _, _ in rows)
        assert all(0 < score <= 1 for _, score, _ in rows)
    assert programs(*words, *query) == 0  # again


def test_relations_of_a_pair_are_ranked_by_probability(graph, runs, programs):
    run = runs / "questions"
    args = [run, "?r(e1, e2)", "--known"]
    found = programs.json("predict", *args)["answers"]
    chances = [record["probability"] for record in found]
    assert chances == sorted(chances, reverse=True)
    assert {record["relation"] for record in found} == {*"pqrs"}
    known = {r["relation"] for r in found if r["known"]}
    lines = "".join(
        (graph / f"{x}.txt").read_text() for x in ("train", "valid", "test")
    )
    assert known == {r for r in "pqrs" if f"e1\t{r}\te2\n" in lines}
    rows = csv_rows(programs, run, "?(e1, e2)", "--k", 2)
    new = [r["relation"] for r in found if not r["known"]]
    assert [row["relation"] for row in rows] == new[:2]
    printed = programs.printed("predict", *args)
    assert f"?r(e1, e2): {len(found)} of 4 relations" in printed
    for query in ("?r(e1, X)", "?r(e1, nobody)", "?r(e1)"):
        assert refused(programs, run, query)


def test_without_valid_derived_relations_come_first(programs, tmp_path):
    runner.write_graph(
        tmp_path,
        train="a\tp\tb\nb\tp\tc\nc\tz\ta\na\ta\tb\n",
        rules="0.2\tr(X,Y) :- p(X,Z), p(Z,Y)\n0.9\ts(X,Y) :- p(X,Z), p(Z,Y)\n",
    )
    words = ("predict", tmp_path, "?r(a, c)", "--height", 1)
    found = programs.json(*words, "--score", "noisy-or")["answers"]
    verdicts = [record["verdict"] for record in found]
    assert verdicts == ["derived", "derived", *["no proof"] * 3]
    assert {record["probability"] for record in found} == {None}
    scores = [r["score_tail"] for r in found[:2]]
    assert scores == sorted(scores, reverse=True)
