"""Explorers of a graph with hostile names: of a run that learnt from questions, of one from proofs, and untrained."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from funcppo.kg.answers import Answerer
from funcppo.kg.graph import loaders
from funcppo.kg.run.subject import dataset_subject, open_run_subject
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.show.serve.app import Site
from funcppo.kg.show.serve.explorer import Explorer
from tests.cli.runner import funcppo
from tests.kg.show.graphs import SMALL, write_graph

LEARNERS = {
    "questions": [
        "--set",
        "listwise.n_epochs=1",
        "--set",
        "prover.max_height=1",
    ],
    "proofs": ["--set", "score=success", "--set", "prover.max_height=2"],
}
BASE = "http://127.0.0.1:8080"


@pytest.fixture(scope="session")
def graph(tmp_path_factory):
    """The folder of the graph."""
    return write_graph(tmp_path_factory.mktemp("serve") / "graph")


@pytest.fixture(scope="session")
def runs(graph):
    """Folders of runs by what they learn from."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for learner, more in LEARNERS.items():
            out = graph.parent / learner
            args = ["--out", out, "--learner", learner, *more, *SMALL]
            assert funcppo(monkeypatch, "train", graph, *args) == 0
    return {learner: graph.parent / learner for learner in LEARNERS}


@pytest.fixture(scope="session")
def explorers(graph, runs):
    """Explorers by what their score has learnt from; `untrained` by nothing."""
    settings = ProverTaskConfig(max_height=2, object_identity=False)
    dataset = loaders.load(str(graph))
    subjects = {
        "untrained": dataset_subject(dataset, settings, "max-confidence")
    }
    for learner, folder in runs.items():
        subjects[learner] = open_run_subject(folder)
    return {
        name: Explorer(Answerer(subject)) for name, subject in subjects.items()
    }


@pytest.fixture(scope="session")
def site(explorers):
    """The site of the run that learnt from questions."""
    return Site(explorers["questions"], seconds=60)


@pytest.fixture(scope="session")
def clients(explorers, site):
    """Clients of the sites, by what their score has learnt from."""
    sites = {
        name: Site(explorer, seconds=60) for name, explorer in explorers.items()
    }
    sites["questions"] = site
    return {
        name: TestClient(
            one.make_app("127.0.0.1"),
            base_url=BASE,
            follow_redirects=False,
            raise_server_exceptions=False,
        )
        for name, one in sites.items()
    }


@pytest.fixture(scope="session")
def client(clients):
    """A client of the run that learnt from questions."""
    return clients["questions"]
