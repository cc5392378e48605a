"""Knowledge graphs in Python: the answers of the command line, results that print, nothing left behind."""

import builtins
import dataclasses
import html
import itertools
import json
import math
import re
import sys
import tempfile
from types import SimpleNamespace

import numpy as np
import pytest

import funcppo as fp
from funcppo.config import PPOConfig
from funcppo.kg import config
from funcppo.kg.mining import MiningConfig, MiningOptions
from funcppo.kg.run import choices, train
from tests.cli.runner import funcppo

RULES = "p(X, Y) :- q(X, Y).\np(X, Y) :- q(X, Z), r(Z, Y).\nq(X, Y) :- r(Y, X)."
PPO = PPOConfig(n_envs=4, n_steps=4, n_epochs=1, n_minibatches=2)
PLAIN = {
    "embedding": False,
    "bellman_ford": False,
    "odds_power": 1.0,
    "no_proof": None,
}
SETTINGS = {"steps": 64, "strategy": "eager", "n_validations": 1, "ppo": PPO}
SETTINGS |= {"device": "cpu", "questions": config.QuestionConfig(**PLAIN)}
SMALL_PROVER = config.ProverTaskConfig(
    max_height=1,
    smoothing=5.0,
    object_identity=False,
    embed_dim=4,
    hidden_dim=4,
)
PANDAS = SimpleNamespace(DataFrame=lambda rows, columns: (rows, columns))
HOSTILE = "<script>'&\"\x1b[1m"


def triples():
    drawn = np.random.default_rng(0).integers([12, 3, 12], size=(120, 3))
    rows = np.unique(drawn, axis=0)
    rows = rows[np.random.default_rng(1).permutation(len(rows))]
    return [(f"e{h}", "pqr"[r], f"e{t}") for h, r, t in rows.tolist()]


def load_graph():
    rows = triples()
    return fp.load(rows[20:], valid=rows[:10], test=rows[10:20], rules=RULES)


@pytest.fixture(scope="module")
def graph():
    return load_graph()


@pytest.fixture(scope="module", params=["questions", "proofs"])
def run(request, graph, tmp_path_factory):
    """A trained run in a folder."""
    out = tmp_path_factory.mktemp("run") / "out"
    settings = SETTINGS | {"learner": request.param, "prover": SMALL_PROVER}
    with pytest.MonkeyPatch.context() as monkeypatch:
        # What is learnt answers, whatever ten triples say.
        for module in (choices, train):
            monkeypatch.setattr(module, "is_better", lambda *ranks: True)
        return fp.fit(graph, out=out, **settings)


def command(monkeypatch, capsys, *args):
    """The JSON of a command line."""
    capsys.readouterr()
    assert funcppo(monkeypatch, *args, "--json", "-") == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_answers_as_the_command_line_does(run, monkeypatch, capsys):
    for name in ("e1", "e2"):
        queries = {"head": f"p({name}, X)", "tail": f"p(X, {name})"}
        for given, query in queries.items():
            words = "predict", run.folder, query, "--known", "--k", 100
            (expected,) = command(monkeypatch, capsys, *words)["queries"]
            found = run.predict("p", **{given: name}, k=None, known=True)
            assert found.to_json() == expected["answers"]
            assert (found.query, found.n_new) == (query, expected["n_new"])


def test_a_run_ranks_and_proves_as_programs_do(run, monkeypatch, capsys):
    expected = command(monkeypatch, capsys, "evaluate", run.folder)
    evaluation = run.evaluate()
    for name in ("mrr", "hits@1", "hits@10", "ceiling", "n_queries"):
        assert evaluation[name] == expected[name], name
    atom = f"p(e1, {run.predict('p', head='e1')[0].entity})"
    expected = command(monkeypatch, capsys, "prove", run.folder, atom)
    proved = run.prove(atom)
    assert proved.to_json()["proof"] == expected["proof"]
    assert (proved.verdict, proved.known) == ("proved", False)
    assert proved.tree.startswith(atom) and "digraph" in proved.to_dot()
    best = run.prove(atom, proofs=2).to_json()
    (first, *_) = best["proofs"]
    assert best["proof"] == expected["proof"] and len(best["proofs"]) <= 2
    assert first["probability"] == first["proof"]["nodes"][0]["probability"]


def test_an_opened_run_is_the_run(run):
    opened = fp.open(run.folder)
    assert opened.trained and opened.score == run.score
    assert repr(opened) == repr(run)
    found = run.predict("p", tail="e3")
    assert opened.predict("p", tail="e3") == found
    assert run.predict("p(X, e3)") == found
    untrained = fp.open(run.folder, score="noisy-or")
    assert not untrained.trained and untrained.score == "noisy-or"
    before = [path.read_bytes() for path in run.folder.glob("*.*")]
    with pytest.raises(ValueError, match="holds a run already"):
        fp.fit("countries_s1", out=run.folder)
    assert before == [path.read_bytes() for path in run.folder.glob("*.*")]


def test_each_answer_can_be_explained(run):
    answers = run.predict("p", head="e1", explain=True)
    for answer in answers:
        lines = answer.explanation.to_lines()
        assert lines[0].startswith(f"p(e1, {answer.entity})")
        assert lines == run.explain(f"p(e1, {answer.entity})").to_lines()
        has_evidence = "evidence" in answer.explanation.to_json()
        assert has_evidence == (run.score == "evidence")


def test_a_report_is_a_page_of_the_run(run, graph, tmp_path):
    run.report(tmp_path / "r.html", queries=1)
    text = (tmp_path / "r.html").read_text()
    assert text.count('<details class="query"') == 1
    mrr = run.evaluate("test")["mrr"]
    assert f"<td>{mrr:.4f}</td>" in text
    # The page is of the run, by whatever score it is opened.
    opened = fp.open(run.folder, score="noisy-or")
    opened.report(tmp_path / "same.html", queries=1)
    assert (tmp_path / "same.html").exists()
    with pytest.raises(ValueError, match="expected a trained run in a folder"):
        fp.open(graph).report(tmp_path / "other.html")
    assert not (tmp_path / "other.html").exists()


def test_a_graph_is_scored_without_training(graph):
    untrained = fp.open(graph)
    assert not untrained.trained and untrained.folder is None
    assert "rule confidences" in repr(untrained)
    found = untrained.predict("p", head="e1")
    assert len(found) == len(list(found)) > 0
    scores = [answer.score for answer in found]
    assert scores == sorted(scores, reverse=True)
    assert found[0].rank == 1 and found[:1] == found.answers[:1]
    refuted = untrained.prove("r(e1, e1)")
    assert refuted.verdict == "refuted" and refuted.tree == ""
    assert repr(refuted).startswith("refuted within height 1: r(e1, e1)")


def test_a_proof_is_looked_for_up_to_a_height():
    rows = [(f"e{i}", "next", f"e{i + 1}") for i in range(4)]
    rules = "to(X, Y) :- next(X, Y).\nto(X, Y) :- next(X, Z), to(Z, Y)."
    opened = fp.open(fp.load(rows, rules=rules))
    found = [opened.prove("to(e0, e4)", height=n).verdict for n in (1, 3, 4)]
    assert found == ["refuted", "refuted", "proved"]


def test_nothing_is_left_behind_without_a_folder(graph, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fitted = fp.fit(graph, **SETTINGS, prover=SMALL_PROVER)
    assert fitted.folder is None and not list(tmp_path.iterdir())
    assert fitted.predict("p", head="e1").answers
    assert fitted.evaluate().metrics and fitted.prove("p(e1, e2)").verdict


def test_rules_are_mined_where_there_are_none():
    rows = [(f"a{i}", "parent", f"b{i}") for i in range(12)]
    rows += [(f"b{i}", "child", f"a{i}") for i in range(11)]
    graph = fp.load(rows)
    assert not graph.rules
    mined = fp.mine(graph, seconds=500, max_length=1)
    assert "child(X, Y) :- parent(Y, X)" in mined.rules
    assert fp.mine(rows, seconds=500, max_length=1).rules == mined.rules
    fitted = fp.fit(mined, **SETTINGS)
    assert fitted.predict("child", head="b11")[0].entity == "a11"


def test_results_graphs_and_runs_print_with_names_escaped():
    rows = [(HOSTILE, "q", "b"), ("c", "q", "b")]
    graph = fp.load(rows, rules="p(X, Y) :- q(X, Y).")
    opened = fp.open(graph)
    found = opened.predict("p", tail="b")
    assert {answer.entity for answer in found} == {HOSTILE, "c"}
    assert "\x1b" not in repr(found) and "rank" in repr(found)
    opened.notes = (HOSTILE,)
    for shown in (found, graph, opened):
        text = shown._repr_html_()
        assert "<script>" not in text and html.escape("<script>") in text
        assert "\x1b" not in text
    assert graph._repr_html_().startswith("<svg") and "1 notes" in text
    (answer,) = opened.predict("p", head="c", explain=True)
    assert answer.explanation._repr_html_().startswith("<svg")
    picture, text = opened.prove("p(c, b)")._repr_html_().split("<pre>")
    assert text.startswith("proved") and "<svg" in picture
    assert set(graph.triples) == set(rows)
    program = fp.load(rows[:1]).dataset
    unary = fp.Graph(dataclasses.replace(program, arities=(1,)))
    assert unary._repr_html_().startswith("<table")


def test_many_queries_are_answered_in_one_table(graph, monkeypatch):
    opened = fp.open(graph)
    texts = [f"p(e{i}, X)" for i in range(12)] + ["q(X, e3)"]
    found = opened.predict_many(texts, k=3, known=True)
    alone = [opened.predict(text, k=3, known=True) for text in texts]
    assert list(found) == [answer for of in alone for answer in of]
    assert found.queries == tuple(of.query for of in alone for _ in of)
    monkeypatch.setitem(sys.modules, "pandas", PANDAS)
    rows, columns = found.to_dataframe()
    names = ["query", "rank", "head", "relation", "tail"]
    assert columns[:5] == names
    assert [row[2] for row in rows] == [answer.head for answer in found]
    with pytest.raises(ValueError, match=r"queries\[1\]: .*unknown entity"):
        opened.predict_many(["p(e1, X)", "p(zzz, X)"])


def test_new_facts_are_those_of_the_command_line(run, monkeypatch, capsys):
    words = ("predict", run.folder, "--relation", "p", "--new", "--k", 7)
    expected = command(monkeypatch, capsys, *words)["facts"]
    found = run.new_facts("p", k=7)
    assert list(found.queries) == [fact.pop("query") for fact in expected]
    assert [answer.to_json() for answer in found] == expected
    with pytest.raises(ValueError, match="unknown relation 'zzz'"):
        run.new_facts("zzz")


def test_progress_is_shown_where_somebody_reads_it(graph, monkeypatch, capsys):
    monkeypatch.setattr("time.monotonic", itertools.count().__next__)
    fp.mine(graph, max_length=1, seconds=1e6)
    assert capsys.readouterr().err == ""
    fp.mine(graph, progress=True, max_length=1, seconds=1e6)
    lines = capsys.readouterr().err.split("\r")
    assert lines[-2].strip() == lines[-1] == ""
    assert len(lines) > 3 and lines[1].rstrip().endswith(" s")


def test_the_typed_options_are_the_settings():
    for options, settings, own in (
        (config.FitOptions, config.RunConfig, {"dataset", "rules", "data"}),
        (MiningOptions, MiningConfig, set()),
    ):
        names = {field.name for field in dataclasses.fields(settings)}
        assert {*options.__annotations__} == names - own


def test_a_query_says_how_its_names_were_read():
    """A capital that names an entity is that entity; a relation may have a parenthesis in its name."""
    rows = [("X", "p (old)", "b"), ("X", "q", "b"), ("c", "q", "d")]
    opened = fp.open(fp.load(rows, rules="'p (old)'(A, B) :- q(A, B)."))
    found = opened.predict("'p (old)'(c, ?t)")
    assert [answer.entity for answer in found] == ["d"] and not found.notes
    found = opened.predict("'p (old)'(X, ?t)", known=True)
    assert found.query == "'p (old)'('X', Y)"
    assert opened.predict(found.query).query == found.query
    assert found.notes == ("X is an entity here; write ?x for a variable",)
    assert "note: X is an entity here" in repr(found)
    with pytest.raises(ValueError, match="head or tail, got neither"):
        opened.predict("p (old)")


def test_results_are_data_frames_where_pandas_is(graph, monkeypatch):
    found = fp.open(graph).predict("p", head="e1", k=2)
    monkeypatch.setitem(sys.modules, "pandas", PANDAS)
    rows, columns = found.to_dataframe()
    assert columns == ["rank", "entity", "score", "known", "verdict"]
    assert [row[1] for row in rows] == [answer.entity for answer in found]

    real_import = builtins.__import__

    def without_pandas(name, *args):
        if name == "pandas":
            raise ImportError(name)
        return real_import(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_pandas)
    with pytest.raises(ImportError, match="needs pandas"):
        found.to_dataframe()


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda k: k.predict("p"), "expected head or tail, got neither"),
        (lambda k: k.predict("p(e1, e2)"), "two arguments, one of them a vari"),
        (lambda k: k.predict("p", head="e1", tail="e2"), "got both"),
        (lambda k: k.predict("pp", head="e1"), "unknown relation 'pp'"),
        (lambda k: k.predict("p", head="e99"), "unknown entity.*close: "),
        (lambda k: k.prove("p(e1, X)"), "expected no variables"),
        (lambda k: k.explain("p(e1, e2)", "left"), "one of head, tail"),
        (lambda k: k.evaluate("train"), "expected one of test, valid"),
        (lambda k: fp.load([("a", "p")]), "triple 0: expected three names"),
        (lambda k: fp.load("no such data"), "unknown data set"),
        (lambda k: fp.load("countries_s1", test=[]), "valid and test only"),
        (lambda k: fp.fit(fp.load([("a", "p", "b")])), "the data hold none"),
        (lambda k: fp.open(fp.load([("a", "p", "b")])), r"expected rules \(funcppo.mine"),
        (lambda k: fp.open(__file__), r"expected the folder of a run, or a graph .*got a file"),
        (lambda k: fp.load([]), "load: expected at least one triple, got none"),
        (lambda k: fp.mine("countries_s1", seconds=-1), "seconds: expected"),
        (lambda k: k.predict("p(e1, X)", k=1.5), "k: expected an integer"),
        (lambda k: k.predict("p(e1, X)", k=0), "k: expected 1 or more, got 0"),
        (lambda k: k.predict("p(e1, X)", min_score=math.nan), "min_score: expected 0 to 1, got nan"),
        (lambda k: k.predict(None), "relation: expected a text, got None"),
        (lambda k: k.prove(None), "query: expected a text, got None"),
        (lambda k: k.prove("p(\udcff, X)"), "expected UTF-8"),
        (lambda k: k.report(5), "path: expected a text or a path, got 5"),
        (lambda k: fp.open(None), "source: expected the folder of a run"),
        (lambda k: fp.open("x", choice_seconds=math.nan), "choice_seconds: expected"),
        (lambda k: fp.open("x", device=1), "device: expected a text, got 1"),
        (lambda k: fp.load([("a", "p", "b")], rules="none"), "can be read"),
        (lambda k: fp.load("countries_s1", rules=5), "rules: expected a text"),
        (lambda k: fp.load([("\udcff", "p", "b")]), "expected three names"),
        (lambda k: fp.fit("countries_s1", out="/dev/null"), "/dev/null: expected a folder, got a file"),
        (lambda k: fp.fit("countries_s1", learner="guide"), "learner: expected one that ranks"),
        (lambda k: fp.fit("countries_s1", memory="1gb"), "memory: expected an integer, got '1gb'"),
        (lambda k: fp.fit("countries_s1", on_update=3), "on_update: expected a function, got 3"),
        (lambda k: fp.fit([("a", "p", "b")], seconds=0), "seconds: expected more than 0"),
        (lambda k: fp.fit([("a", "p", "b")], out="x", log=["x"]), "log: expected one of"),
        (lambda k: k.predict_many("p(e1, X)"), "queries: expected a list of texts"),
        (lambda k: k.predict_many([3]), r"queries\[0\]: expected a text, got 3"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(graph, ask, message):
    with pytest.raises(ValueError, match=message) as error:
        ask(fp.open(graph))
    assert "\n" not in str(error.value)


def test_an_unknown_setting_is_told_with_the_nearest_ones():
    with pytest.raises(TypeError, match=r"fit: .* stepz: .*'steps'"):
        fp.fit("countries_s1", stepz=3)
    with pytest.raises(TypeError, match=r"mine: .*'seconds'"):
        fp.mine("countries_s1", second=3)


def test_the_examples_of_the_docstrings_run(monkeypatch, tmp_path):
    """The indented lines of every docstring, in the order of the module's own."""
    graph = fp.load("countries_s1")
    run = fp.open(graph)
    names = ("predict", "predict_many", "new_facts", "prove", "explain")
    methods = (getattr(fp.Knowledge, name) for name in names)
    pattern = re.compile(r"^ +((?:graph|run|print)\b.*)$", re.MULTILINE)
    for function in (fp.load, *methods):
        lines = pattern.findall(function.__doc__)
        assert lines, function
        for line in lines:
            exec(line, {"fp": fp, "run": run, "graph": graph})
