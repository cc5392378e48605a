"""Small runs on a graph with hostile names, what a report measures of them, and explorers of the runs and the graph."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from funcppo.kg.answers import Answerer
from funcppo.kg.config import ProverTaskConfig
from funcppo.kg.graph import loaders
from funcppo.kg.run import choices, train
from funcppo.kg.run.run import open_run
from funcppo.kg.run.subject import dataset_subject, run_subject
from funcppo.kg.show import measure
from funcppo.kg.show.explorer import Explorer, Site
from tests.cli.runner import funcppo, settings
from tests.kg.show.graphs import SMALL, write_graph

SET = "listwise.n_epochs=1 prover.max_height=1 prover.object_identity=False "
SET += "questions.embedding=False questions.bellman_ford=False "
SET += "questions.odds_power=1 questions.no_proof=None"
QUESTIONS = settings(SET)
RUNS = {
    "questions": QUESTIONS,
    "other": [*QUESTIONS, "--seed", "1"],
    "proofs": ["--set", "score=success", "--set", "prover.max_height=2"],
}


@pytest.fixture(scope="session")
def graph(tmp_path_factory) -> Path:
    """The folder of the graph."""
    return write_graph(tmp_path_factory.mktemp("show") / "graph")


@pytest.fixture(scope="session")
def runs(graph) -> dict[str, Path]:
    """Folders of runs, by what they learn from; "other" learns from questions with another seed."""
    folder = graph.parent
    with pytest.MonkeyPatch.context() as monkeypatch:
        # What is learnt is kept, of which a report tells, whatever twelve triples say.
        for module in (choices, train):
            monkeypatch.setattr(module, "is_better", lambda *ranks: True)
        for name, more in RUNS.items():
            learner = "proofs" if name == "proofs" else "questions"
            args = ["--out", folder / name, "--learner", learner, *more]
            assert funcppo(monkeypatch, "train", graph, *args, *SMALL) == 0
    return {name: folder / name for name in RUNS}


@pytest.fixture(scope="session")
def reports(runs):
    """What a report measures of the runs, by what they learn from."""
    return {
        name: measure.measure(
            open_run(folder), folder, n_queries=14, with_entries=True
        )
        for name, folder in runs.items()
    }


@pytest.fixture(scope="session")
def explorers(graph, runs):
    """Explorers by what their score has learnt from; `untrained` by nothing."""
    cfg = ProverTaskConfig(max_height=2, object_identity=False)
    dataset = loaders.load(str(graph))
    subjects = {"untrained": dataset_subject(dataset, cfg, "max-confidence")}
    for learner in ("questions", "proofs"):
        score = "evidence" if learner == "questions" else "success"
        subjects[learner] = run_subject(open_run(runs[learner]), score)
    return {
        name: Explorer(Answerer(subject)) for name, subject in subjects.items()
    }


@pytest.fixture(scope="session")
def sites(explorers):
    """Sites by what their score has learnt from."""
    return {
        name: Site(explorer, seconds=60) for name, explorer in explorers.items()
    }


def make_client(site):
    """A client of a site."""
    return TestClient(
        site.make_app("127.0.0.1"),
        base_url="http://127.0.0.1:8080",
        follow_redirects=False,
        raise_server_exceptions=False,
    )


@pytest.fixture(scope="session")
def clients(sites):
    """Clients of the sites, by what their score has learnt from."""
    return {name: make_client(site) for name, site in sites.items()}


@pytest.fixture(scope="session")
def client(clients):
    """A client of the run that learnt from questions."""
    return clients["questions"]
