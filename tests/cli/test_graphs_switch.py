"""`--cuda-graphs` in the programs that ask a run: what it says reaches the search, and is recorded."""

from __future__ import annotations

import json

import numpy as np
import pytest
from starlette.testclient import TestClient

from funcppo.cli import common, predict, report, serve
from funcppo.kg.ranking import scoring
from funcppo.kg.search.beam import evaluate_step
from funcppo.kg.show import server
from funcppo.runtime.capture import GraphedStep
from tests.cli.runner import funcppo
from tests.kg.show.graphs import SMALL
from tests.runtime.test_capture import on_gpu

RULES = (
    "p(X, Y) :- q(X, Y).\np(X, Y) :- q(X, Z), q(Z, Y).\nq(X, Y) :- p(Y, X).\n"
)
LEARNER = ["--learner", "proofs", "--set", "score=success"]
LEARNER += [
    "--set",
    "prover.max_height=2",
    "--set",
    "prover.object_identity=False",
]
# why nothing is recorded on a CPU: a code and the sentence
REASONS = {
    "auto": ("no_gpu", "no CUDA tensor in the state"),
    "off": ("disabled", "turned off by --cuda-graphs off"),
}
NOTE = "steps of a search were not replayed as a CUDA graph: "
DEMANDED = "--cuda-graphs manual: expected a CUDA graph, got none: no CUDA tensor in the state"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that finds answers by a search."""
    folder = tmp_path_factory.mktemp("searched")
    graph = folder / "graph"
    graph.mkdir()
    generator = np.random.default_rng(0)
    rows = np.unique(generator.integers([9, 2, 9], size=(90, 3)), axis=0)
    rows = generator.permutation(rows).tolist()
    lines = [f"e{h}\t{'pq'[r]}\te{t}\n" for h, r, t in rows]
    (graph / "train.txt").write_text("".join(lines[20:]))
    (graph / "valid.txt").write_text("".join(lines[10:20]))
    (graph / "test.txt").write_text("".join(lines[:10]))
    (graph / "rules.txt").write_text(RULES)
    with pytest.MonkeyPatch.context() as monkeypatch:
        args = ["--out", folder / "run", *LEARNER, *SMALL]
        assert funcppo(monkeypatch, "train", graph, *args) == 0
    return folder / "run"


@pytest.fixture
def captured_search(monkeypatch):
    """Searches are captured as on a GPU; on a CPU each falls back and says why."""
    monkeypatch.setattr(
        scoring,
        "make_search_step",
        lambda device: GraphedStep(evaluate_step),
    )


@pytest.fixture
def served(monkeypatch):
    """The responses of a program `serve`, which ends after them."""
    got = {}

    class Asked:
        """A server that is asked once."""

        def __init__(self, app, workers):
            self.client = TestClient(app, base_url="http://127.0.0.1:8080")

        def run(self, sockets):
            query = "answers?relation=p&head=e1"
            for path in (f"api/{query}", query, "api/graph"):
                got[path.partition("?")[0]] = self.client.get(path)

    monkeypatch.setattr(server, "Server", Asked)
    return got


def command_of(program, run, folder):
    """A command line that asks the run, and writes JSON to `out.json` in the folder."""
    words = {
        "predict": ["p(e1, X)", "--score", "success"],
        "serve": ["--port", "0", "--score", "success"],
        "report": ["--max-queries", "2", "--out", folder / "page.html"],
    }
    return [program, run, *words[program], "--json", folder / "out.json"]


@pytest.mark.parametrize("graphs", REASONS)
@pytest.mark.parametrize("program", ["predict", "report", "serve"])
def test_what_the_switch_says_reaches_the_search_and_is_recorded(
    run, captured_search, served, monkeypatch, capsys, tmp_path, program, graphs
):
    code, sentence = REASONS[graphs]
    command = command_of(program, run, tmp_path)
    assert funcppo(monkeypatch, *command, "--set", f"cuda_graphs={graphs}") == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["graphs"] == graphs

    if program == "serve":
        assert served["api/answers"].json()["answers"]
        assert NOTE + sentence in served["api/graph"].json()["notes"]
        return
    (replay,) = result.get("replays", [result])
    assert replay["replay_mode"] == "none"
    assert set(replay["fallback_codes"]) == {code}
    if program == "predict":
        assert NOTE + sentence in result["notes"]
        assert NOTE + sentence in capsys.readouterr().err
    if program == "report":
        assert NOTE + sentence in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("program", ["predict", "report"])
def test_a_graph_that_is_demanded_and_not_recorded_is_one_line(
    run, captured_search, monkeypatch, capsys, tmp_path, program
):
    monkeypatch.setattr(common, "is_cuda", lambda device: True)
    for module in (predict, report):
        monkeypatch.setattr(module, "select_device", lambda device: None)
    command = command_of(program, run, tmp_path)
    assert funcppo(monkeypatch, *command, "--set", "cuda_graphs=manual") == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1] == f"funcppo: {DEMANDED}"
    assert list(tmp_path.iterdir()) == []


def test_a_page_whose_graph_is_demanded_and_not_recorded_is_one_line(
    run, captured_search, served, monkeypatch, tmp_path
):
    monkeypatch.setattr(common, "is_cuda", lambda device: True)
    monkeypatch.setattr(serve, "select_device", lambda device: None)
    command = command_of("serve", run, tmp_path)
    assert funcppo(monkeypatch, *command, "--set", "cuda_graphs=manual") == 0
    for path in ("api/answers", "answers"):
        assert served[path].status_code == 500
        assert DEMANDED in served[path].text
    assert served["api/answers"].json() == {"error": DEMANDED}
    assert served["api/graph"].status_code == 200


@on_gpu
@pytest.mark.parametrize("program", ["predict", "report"])
def test_searches_of_a_gpu_are_recorded_unless_the_switch_forbids_it(
    run, monkeypatch, tmp_path, program
):
    modes = {}
    for graphs in ("auto", "off", "trees", "manual"):
        command = command_of(program, run, tmp_path)
        words = ["--device", "cuda", "--set", f"cuda_graphs={graphs}"]
        assert funcppo(monkeypatch, *command, *words) == 0
        result = json.loads((tmp_path / "out.json").read_text())
        (replay,) = result.get("replays", [result])
        modes[graphs] = replay["replay_mode"]
    assert modes == {
        "auto": "cuda-graph",
        "off": "none",
        "trees": "cuda-graph-trees",
        "manual": "cuda-graph",
    }


@on_gpu
@pytest.mark.parametrize("graphs", ["auto", "off", "trees", "manual"])
def test_a_server_records_graphs_in_its_thread_and_answers_alike(
    run, served, monkeypatch, tmp_path, graphs
):
    answers = []
    for words in (
        ["cpu"],
        [
            "cuda",
            "--set",
            f"cuda_graphs={graphs}",
            "--set",
            "request_seconds=600",
        ],
    ):
        command = command_of("serve", run, tmp_path)
        assert funcppo(monkeypatch, *command, "--device", *words) == 0
        found = served["api/answers"].json()["answers"]
        answers.append([(row["entity"], row["verdict"]) for row in found])
        notes = served["api/graph"].json()["notes"]
    assert answers[0] == answers[1]
    assert (NOTE + REASONS["off"][1] in notes) == (graphs == "off")
