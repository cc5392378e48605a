"""Small runs: before their first update, and trained to their end."""

from dataclasses import replace

import pytest

from funcppo.core.settings import write_config
from funcppo.kg.run.budget import RunTime
from funcppo.kg.run.train import rank_results, train_run
from tests.kg.run.runs import (
    CONFIG,
    QUESTIONS,
    new_run,
    on_graph,
    seating,
    trained,
)


@pytest.fixture(scope="session")
def started():
    """A run that learns from proofs, before its first update."""
    return new_run(CONFIG)


@pytest.fixture
def run(started):
    return started


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    """The folder of the run that learns from proofs, trained to its end."""
    folder = tmp_path_factory.mktemp("run")
    run = new_run(CONFIG)
    write_config(run.run_config, folder)
    trained(run, folder)
    return folder


@pytest.fixture(scope="session")
def asking(tmp_path_factory):
    """A run that learns from questions, trained to its end, and what results.json has of it."""
    folder = tmp_path_factory.mktemp("asking")
    graph = seating(n_tables=10)
    graph = replace(graph, test=graph.valid)
    config = on_graph(QUESTIONS, graph, folder / "graph")
    run = train_run(config, folder / "run")
    return rank_results(run, RunTime())
