"""Small runs on a graph with hostile names, and what a report measures of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from funcppo.kg.run import run_start
from funcppo.kg.show.report import figures
from tests.cli.runner import funcppo
from tests.kg.show.report.graphs import SMALL, write_graph

LEARNERS = {
    "questions": [
        "--set",
        "listwise.n_epochs=1",
        "--set",
        "prover.max_height=1",
    ],
    "proofs": ["--set", "score=success", "--set", "prover.max_height=1"],
}


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Folders of runs, by what they learn from; "other" learns from questions with another seed."""
    folder = tmp_path_factory.mktemp("report")
    graph = write_graph(folder / "graph")
    options = dict(LEARNERS)
    options["other"] = [*LEARNERS["questions"], "--seed", "1"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, more in options.items():
            learner = "proofs" if name == "proofs" else "questions"
            args = ["--out", folder / name, "--learner", learner, *more]
            assert funcppo(monkeypatch, "train", graph, *args, *SMALL) == 0
    return {name: folder / name for name in options}


@pytest.fixture(scope="session")
def reports(runs):
    """What a report measures of the runs, by what they learn from."""
    return {
        name: figures.measure(
            run_start.open_run(folder),
            folder,
            n_queries=14,
            with_entries=True,
        )
        for name, folder in runs.items()
    }
