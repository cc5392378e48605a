"""`evaluate`: the metrics and the lines of --details, every score, its search, bad input, Ctrl-C."""

import math
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import funcppo as fp
from funcppo.cli import common
from funcppo.kg.graph.loaders import load
from funcppo.kg.ranking import evaluate as evaluation
from funcppo.kg.ranking import ranking
from funcppo.kg.search.task import COUNTRIES_REGIONS
from tests.cli.runner import (
    BY_RULES,
    contains,
    funcppo,
    read_records,
    settings,
    write_graph,
)

FILES_PAGE = Path(__file__).parents[2] / "docs" / "files.md"


def test_metrics_are_as_in_details_and_prometheus(trained, programs, tmp_path):
    details, exported = tmp_path / "ranks.jsonl", tmp_path / "funcppo.prom"
    files = ("--details", details, "--metrics-file", exported)
    result = programs.json("evaluate", trained, *files)
    assert not result["compiled"]
    assert result["graphs"] == "auto" and isinstance(result["notes"], list)
    assert result["replay_mode"] == "none" and result["fallback_codes"] == {}
    assert result["device"] == "cpu"
    assert result["versions"]["torch"] == torch.__version__
    fields = re.findall(r"`([\w@]+)`", FILES_PAGE.read_text())
    assert {"mrr", "hits@10", "row_steps"} < set(result) <= set(fields)
    lines = read_records(details)
    expected = np.mean([line["reciprocal_rank"] for line in lines])
    assert result["mrr"] == pytest.approx(expected, abs=1e-12)
    proved = [line for line in lines if line["status"] == "proved"]
    assert proved and all(
        0 < line["proof"]["nodes"][0]["probability"] <= 1 for line in proved
    )

    series = set(exported.read_text().splitlines())
    assert f"funcppo_queries_ranked_total {result['n_queries']:.1f}" in series
    assert f"funcppo_candidates_scored_total {result['n_scored']:.1f}" in series
    assert f"funcppo_answers_lost_total {result['n_missed']:.1f}" in series
    (run_info,) = (x for x in series if x.startswith("funcppo_run_info{"))
    assert 'dataset="countries_s1",device="cpu",program="evaluate"' in run_info
    assert "funcppo_finished 1.0" in series


def test_an_evaluation_prints_few_other_lines(trained, programs, tmp_path):
    for target in (trained, "family_tree:30:0"):
        details = tmp_path / Path(target).name
        words = ("evaluate", target, "--details", details)
        lines = [x for x in programs.printed(*words).splitlines() if x.strip()]
        assert lines[0].split(": ")[1].count(",") >= 4
        assert lines[-1].endswith(f": {details}")
        assert len(lines) <= 6 + 4 + 1  # title, head, rule, row; caption
        # a run has nothing to choose
        is_chosen = "note: " in programs.printed(*words, "--overwrite", "-v")
        assert is_chosen == (target != trained)


@pytest.mark.parametrize(
    "score",
    [
        "exists@1",
        "max-confidence",
        "noisy-or@3",
        "noisy-or-other-facts",
        "success",
    ],
)
def test_every_score_ranks(trained, programs, score):
    words = f"--score {score} --negatives 3 --split valid --max-queries 5"
    result = programs.json("evaluate", trained, *words.split())
    assert (result["score"], result["split"]) == (score, "valid")
    assert result["n_queries"] == 5  # one side of each


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("{run} --negatives -3", "--negatives: expected all or 1 to"),
        ("{run} --negatives some", "all or an integer, got 'some'"),
        ("{s1} --score exists@0", "'exists@0': expected exists@H (1 if deriv"),
        ("{s1} --score success", "'success': exp...a trained run has others"),
        ("{run} --score loud", "success, best-proof, exists@H"),
        ("{run} --set object_identity=True", "is a trained run, which has its"),
        ("{run} --height 1", "--height: ... is a trained run, which has its"),
        ("{s1} --set smoothing=-1", "expected 0 or more or auto, got -1.0"),
        ("{s1} --device cpu --cuda-graphs manual", "--device cuda, got cpu"),
        ("{s1} --holes relation --negatives 5", "--holes entity, got relation"),
        ("{s1} --resume", "--resume, --overwrite: expected --details"),
        ("{s1} --out {tmp}/x --negatives 5", "--out: expected --negatives all"),
        ("{s1} --out -", "--out: expected a file, got -"),
        ("{s1} --score {tmp}/not.pl", "not.pl:1: expected a triple of the"),
        ("{s1} --score {tmp}/not.pl --resume", "--resume: expected a score"),
        ("{run} --score {tmp}/not.pl", "': expected success, best-proof"),
        ("{tmp}", "train.txt"),
        ("{run} --metrics-file {tmp}", "expected a file in a folder that exi"),
        ("{s1} --memory 1MB", "--memory 1000000: ... at least"),
        ("{run} --memory 1MB", "--memory 1000000: ... at least"),
        ("{s1} --rules {tmp}/not.pl", "without negation ... as 'locatedIn"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    trained, programs, tmp_path, args, line
):
    rule = "locatedIn(X, Y) :- neighborOf(X, Y), not neighborOf(Y, X)."
    (tmp_path / "not.pl").write_text(rule)
    places = {"tmp": tmp_path, "run": trained, "s1": "countries_s1"}
    error = programs.refused("evaluate", *args.format(**places).split())
    assert contains(error, line), error


def test_an_interrupted_query_is_ranked_by_a_later_evaluation(
    trained, programs, monkeypatch, capsys, tmp_path
):
    """The second window does not end: the first one is kept, and the rest is ranked later."""
    details, whole = tmp_path / "ranks.jsonl", tmp_path / "whole.jsonl"
    rank_split = ranking.rank_split
    n_chunks = []

    def endless(task, split, scorer, protocol, *query_id):
        n_chunks.extend(query_id)
        if len(n_chunks) % 2 == 0:
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                time.sleep(0.01)
        return rank_split(task, split, scorer, protocol, *query_id)

    with monkeypatch.context() as patch:
        patch.setattr(common, "GRACE_SECONDS", 0.01)
        patch.setattr(ranking, "rank_split", endless)
        patch.setattr(
            evaluation,
            "plan_windows",
            lambda _, split, rows, **__: np.split(rows, len(rows)),
        )
        arguments = ("evaluate", trained, "--details", details)
        assert funcppo(patch, *arguments) == 130
        output = capsys.readouterr().out
        assert "interrupted after 1 of 24 queries; --resume" in output
        assert funcppo(patch, "evaluate", trained) == 130
        output = capsys.readouterr().out
        assert "--resume needs --details FILE" in output
    assert len(details.read_text().splitlines()) == 1
    with details.open("a") as file:
        # the line that was being written when the power failed
        file.write('{"query_row": 5, "side": "he')
    resumed = programs.json(*arguments, "--resume")
    expected = programs.json("evaluate", trained, "--details", whole)
    assert details.read_bytes() == whole.read_bytes()
    measured = ("total_seconds", "peak_bytes", "memory_limit_bytes", "notes")
    for name in set(expected) - {*measured}:
        assert resumed[name] == expected[name], name


@pytest.mark.parametrize("verbose", [False, True])
def test_lines_that_were_dropped_are_named(verbose, programs, tmp_path):
    fact = "a\te\tb\n"
    texts = {"train": 2 * fact, "valid": "a\tp\tb\n", "test": 2 * "b\tp\tb\n"}
    write_graph(tmp_path, rules="p(X,Y) :- e(X,Y)\n", **texts)
    options = ["--height", "1", "--score", "exists@1", *["-v"] * verbose]
    printed = programs.printed("evaluate", tmp_path, *options)
    dropped = "train: 1 lines repeat another and were dropped"
    repeated = "test: 1 of 2 triples repeat another"
    if verbose:
        assert f"note: {dropped}\n" in printed and repeated in printed
    else:
        assert f"data: {dropped} (and " in printed
        assert repeated not in printed


def test_relations_are_ranked_as_predict_lists_them(
    graph, runs, programs, tmp_path
):
    run = runs / "questions"
    details = tmp_path / "ranks.jsonl"
    words = ("--holes", "relation", "--details", details)
    result = programs.json("evaluate", run, *words)
    assert len(read_records(details)) == result["n_queries"]
    error = programs.refused("check", run, "--details", details)
    assert "expected None, got 'relations'" in error
    knowledge = fp.open(run)
    triples = load(graph).test
    reciprocals, hits = [], []
    for r, h, t in triples.tolist():
        head, tail = (knowledge.dataset.entities[i - 1] for i in (h, t))
        own = knowledge.dataset.predicates[r - 1]
        found = knowledge._scorer.relations(head, tail, with_known=True)
        values = {
            x["relation"]: -x["probability"]
            for x in found
            if x["relation"] == own or not x["known"]
        }
        first = sum(x < values[own] for x in values.values())
        equal = list(values.values()).count(values[own])
        places = range(first + 1, first + equal + 1)
        reciprocals.append(np.mean([1 / place for place in places]))
        hits.append((first == 0) / equal)
    assert result["n_queries"] == len(hits)
    assert result["accuracy"] == pytest.approx(np.mean(hits))
    assert result["mrr"] == pytest.approx(np.mean(reciprocals))


def test_the_relation_of_a_story_follows_by_several_rules(programs, tmp_path):
    """The rule that more linked pairs of train contradict loses, however many pairs are not linked, or only told."""
    rows = ["story\tfacts\tasked pair\trelation"]
    rows += [f"{i}\t0,p,1 1,q,2\t0,2\t{'r' if i else 's'}" for i in range(4)]
    rows += [f"{i}\t0,r,1 1,q,2 2,p,3\t0,2\tr" for i in range(4, 7)]
    (tmp_path / "train.tsv").write_text("\n".join(rows) + "\n")
    story = "1\t0,p,1 1,q,2 2,q,3 3,q,4\t0,4\tr"
    (tmp_path / "test_4.tsv").write_text(f"{rows[0]}\n{story}\n")
    told = "0,p,1 1,q,2 0,s,2 2,q,3 0,s,3\t3,0\tp"
    told = [f"{i}\t{told}" for i in range(20)]
    (tmp_path / "test.tsv").write_text("\n".join([rows[0], *told]) + "\n")
    (tmp_path / "rules.txt").write_text(
        "1\tr(X,Y) :- p(X,Z), q(Z,Y)\n1\ts(X,Y) :- p(X,Z), q(Z,Y)\n"
        "1\tr(X,Y) :- r(X,Z), q(Z,Y)\n1\ts(X,Y) :- s(X,Z), q(Z,Y)\n"
    )
    words = (tmp_path, "--split", "test_4", "--holes", "relation")
    for height, accuracy in ((2, 0.25), (3, 1.0)):
        score = ("--score", f"linked-proof-product@{height}")
        result = programs.json("evaluate", *words, *score)
        assert result["accuracy"] == accuracy
        assert result["ceiling"] == float(height == 3)


def test_a_named_split_known_and_candidates(graph, runs, programs, tmp_path):
    """A named file takes the place of test, whose triples stay known; what is known is no wrong answer."""
    lines = (graph / "test.txt").read_text().splitlines(keepends=True)
    (graph / "test_hard.txt").write_text("".join(lines[:6]))
    entities = sorted({name for x in lines[:6] for name in x.split()[::2]})
    files = {"filter": "e0\tq\te1\nstranger\tq\te1\n", "some": ""}
    files |= {"candidates": "\n".join(entities), "empty": "\n"}
    paths = {name: tmp_path / f"{name}.txt" for name in files}
    for name, text in files.items():
        paths[name].write_text(text)

    try:
        for target, options in ((graph, BY_RULES), (runs / "questions", ())):
            asked = ("evaluate", target, *options)
            hard = (*asked, "--split", "test_hard")
            found = programs.json(*hard)
            # the filter holds all of test either way
            rest = programs.json(*asked, "--max-queries", 20)
            assert (found["n_queries"], rest["n_queries"]) == (12, 40)
            more = settings(f"filter={paths['filter']}")
            filtered = programs.json(*hard, *more)
            n_fewer = found["n_candidates"] - filtered["n_candidates"]
            assert n_fewer >= 0
            assert any(
                "1 of 2 triples have unknown" in x for x in filtered["notes"]
            )
            more = settings(f"candidates={paths['candidates']}")
            few = programs.json(*hard, *more)
            assert few["n_candidates"] <= 12 * len(entities)
            assert few["mrr"] >= found["mrr"]
            for words, problem in (
                (["--split", "test_easy"], "split 'test_easy': expected test"),
                (settings(f"candidates={paths['empty']}"), "an entity a line"),
                (settings(f"candidates={paths['filter']}"), ":1: unknown"),
            ):
                assert problem in programs.refused(*asked, *words, notes=True)
            assert programs(*asked, *settings(f"filter={paths['some']}")) == 0
    finally:
        (graph / "test_hard.txt").unlink()


def judge(path, folder, mark, by_type=False):
    """MRR and hits@10 of a file of rankings by Python sets, and both with 0 for answers that are not listed."""
    true, sums = set(), np.zeros(4)
    for split in ("train", "valid", "test"):
        triples = [x.split("\t") for x in (folder / f"{split}.txt").open()]
        true |= {(h, r, t.strip()) for h, r, t in triples}
    # the entities that known triples of a relation have in a place, or all
    entities = {
        (relation, place): {
            name
            for x in true
            for name in ((x[place],) if by_type else x[::2])
            if x[1] == relation or not by_type
        }
        for relation in "pqrs"
        for place in (0, 2)
    }
    lists = {}  # of each question, whichever triple asks it
    for line in path.read_text().splitlines():
        word, _, text = line.partition(" ")
        if word not in ("Heads:", "Tails:"):
            h, r, t = line.split(mark)
            continue
        cells = text.strip().split("\t")
        key = (word, r, t) if word == "Heads:" else (word, h, r)
        lists.setdefault(key, {}).update(zip(cells[::2], cells[1::2]))
    for h, r, t in [(h, r, t.strip()) for h, r, t in triples]:
        heads = {x for x in entities[r, 0] if x == h or (x, r, t) not in true}
        tails = {x for x in entities[r, 2] if x == t or (h, r, x) not in true}
        for key, answer, kept in (
            (("Heads:", r, t), h, heads),
            (("Tails:", h, r), t, tails),
        ):
            listed = lists.get(key, {})
            score = {x: float(listed.get(x, -math.inf)) for x in kept}
            better = sum(x > score[answer] for x in score.values())
            n_equal = [*score.values()].count(score[answer])
            places = better + 1 + np.arange(n_equal)
            found = np.mean([1 / places, places <= 10], 1)
            sums += [*found, found[0] * (answer in listed), 1]
    return sums[:3] / sums[3]


def test_the_area_under_the_curve_reads_all_scores_of_a_file(
    programs, tmp_path
):
    dataset = load("countries_s1")
    names = dataset.entities
    score = np.random.default_rng(0).permutation(5 * len(dataset.test))
    rows = score.reshape(-1, 5).tolist()
    lines, answers = [], []
    for (_, head, tail), values in zip(
        dataset.test.tolist(), rows, strict=True
    ):
        cells = zip(COUNTRIES_REGIONS, map(str, values))
        text = "\t".join(x for pair in cells for x in pair)
        lines += [f"{names[head - 1]} locatedIn {names[tail - 1]}"]
        lines += [f"Tails: {text}"]
        answers.append(values[COUNTRIES_REGIONS.index(names[tail - 1])])
    out = tmp_path / "out"
    out.write_text("".join(f"{x}\n" for x in lines))
    found = programs.json("evaluate", "countries_s1", "--score", out)
    # the mean of the precisions at the answers
    places = len(score) - np.sort(answers)[::-1]
    expected = np.mean((1 + np.arange(len(places))) / places)
    assert found["auc_pr"] == pytest.approx(expected, abs=1e-6)


def test_rankings_are_written_and_judged(
    graph, runs, programs, monkeypatch, tmp_path
):
    """What is written of rules and of a run, and another's file, have the metrics of an evaluation by Python sets."""
    names = ("mrr", "hits@10", "mrr_scored")
    for target, options in ((graph, BY_RULES), (runs / "questions", ())):
        out = tmp_path / f"{target.name}.ranking"
        written = programs.json("evaluate", target, *options, "--out", out)
        found = programs.json("evaluate", graph, "--score", out)
        expected = judge(out, graph, " ")
        for result in (written, found):
            values = [result[name] for name in names]
            assert values == pytest.approx(expected, abs=1e-12)
            assert result["n_candidates"] == written["n_candidates"]
        for height in (1, 2)[: 1 + (target == graph)]:
            words = ["evaluate", target, *options]
            words[3:4] = [height] * (target == graph)
            programs.json(*words, "--out", out)
            words += settings("candidates=types")
            typed = programs.json(*words)
            assert typed["n_candidates"] < written["n_candidates"]
            expected = judge(out, graph, " ", by_type=True)
            values = [typed[name] for name in names]
            assert values == pytest.approx(expected, abs=1e-12)
        words[0] = "predict"
        assert "got types" in programs.refused(*words, "p(e0, X)", notes=True)

    # Another system: ties, known answers, a triple of no split, triples that are missing, any numbers.
    lines = []
    for line in [*(graph / "test.txt").open()][5:]:
        lines.append(line.strip())
        triple = lines[-1].split("\t")
        for word, i in (("Heads: ", 0), ("Tails: ", 2)):
            # the same list for each answer of a question
            asked = "".join([*triple[:i], *triple[i + 1 :], word])
            draw = np.random.default_rng([*asked.encode()])
            chosen = draw.permutation(14)[: draw.integers(14)]
            score = draw.integers(-3, 3, 14) / 7
            cells = (f"e{x}\t{score[x]}\t" for x in chosen)
            lines.append(word + "".join(cells))
    lines += ["e0\tp\te0", "Heads: e1\t0.5"]
    other = tmp_path / "other"
    other.write_text("".join(f"{x}\n" for x in lines))
    details = tmp_path / "ranks.jsonl"
    monkeypatch.chdir(tmp_path)
    for name in ("auto", "noisy-or-top-3@1.5"):
        Path(name).write_text("no rankings")
        score = programs.json("evaluate", graph, "--score", name)["score"]
        assert score.startswith("noisy-or" if name != "auto" else "")
    for words in (("--details", details), ("--negatives", 13)):
        found = programs.json("evaluate", graph, "--score", other, *words)
        values = [found[name] for name in names]
        assert values == pytest.approx(judge(other, graph, "\t"), abs=1e-12)
    assert len(read_records(details)) == found["n_queries"] == 40
    assert contains(found["notes"][0], "... of 40 questions have no ranking")
    assert programs.json("check", graph, "--score", other)["checks"]
    for text, problem in (
        ("Heads: e0\t1", ":1: expected a triple of the data, or Heads:"),
        ("e0 p e1\nTails: e2\t1\te3", ":2: ... got 'Tails: e2"),
        ("e0 p e1\nTails: e2\tnan", ":2: expected"),
        ("e0 p e1\nTails: e2\t1\te2\t2", ":2: expected... one score"),
        ("e0 p e1\nTails: e2\t1\ne0 p e3\nTails: e2\t2", ":4: expected"),
        ("\n", ": expected rankings, got none"),
        ("e0 p e1\n\nHeads: e99\t0.5", ":3: expected...do not have: 'e99'"),
        ("e0 p e1 e2", ":1: expected a triple"),
    ):
        other.write_text(text)
        error = programs.refused("evaluate", graph, "--score", other)
        assert contains(error, problem), error
