"""Small runs on a graph with hostile names, what a report measures of them, and explorers of the runs and the graph."""

from __future__ import annotations

from pathlib import Path

import pytest

from funcppo.kg.run import run_start
from funcppo.kg.show import measure
from tests.cli.runner import funcppo
from tests.kg.show.graphs import SMALL, write_graph

QUESTIONS = ["--set", "listwise.n_epochs=1", "--set", "prover.max_height=1"]
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
            run_start.open_run(folder),
            folder,
            n_queries=14,
            with_entries=True,
        )
        for name, folder in runs.items()
    }
