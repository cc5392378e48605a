"""Priors of a run: time bounds a network that is tried, and none that is set."""

from __future__ import annotations

from dataclasses import replace

import pytest

from funcppo.kg.graph import loaders
from funcppo.kg.run import bellman_ford_training, run_start
from funcppo.kg.scores.question_config import BellmanFordConfig, QuestionConfig
from funcppo.kg.search.task import ignore_phase
from tests.kg.run.test_question_run import CONFIG
from tests.kg.run.test_question_training import seating

# more than the time of a test
LONG = BellmanFordConfig(width=4, n_layers=2, n_steps=3, seconds=1e-9)


@pytest.fixture(autouse=True)
def graph(monkeypatch):
    graph = seating(n_tables=10)
    monkeypatch.setattr(loaders, "load", lambda *args, **kwargs: graph)
    return graph


def prepared(folder, option, on_phase=ignore_phase):
    options = QuestionConfig(embedding=False, walks=False, bellman_ford=option)
    config = replace(CONFIG, questions=options, bellman_ford=LONG)
    return run_start.prepare_run(
        config, folder, resume=False, on_phase=on_phase
    )


def test_a_network_is_not_tried_by_default(tmp_path):
    phases = []
    run = prepared(tmp_path, None, lambda text, *_: phases.append(text))
    assert run.run_config.questions.bellman_ford is False
    assert run.questions.facts.network is None
    assert not any("Bellman-Ford" in text for text in (*phases, *run.notes))


def test_a_network_without_time_is_not_tried(tmp_path):
    run = prepared(tmp_path, "auto")
    assert run.run_config.questions.bellman_ford is False
    (note,) = (note for note in run.notes if "Bellman-Ford" in note)
    assert "a Bellman-Ford network is not tried: " in note
    assert "--questions.bellman-ford True trains it" in note


def test_a_network_that_is_set_makes_all_its_steps_and_says_how_long(tmp_path):
    phases = []
    run = prepared(
        tmp_path, True, lambda text, *rest: phases.append((text, *rest))
    )
    assert run.run_config.questions.bellman_ford is True
    steps = [p for p in phases if p[0] == bellman_ford_training.TEXT]
    assert [p[1:3] for p in steps] == [(1, 3), (2, 3), (3, 3)]
    before = [text for text, *_ in phases if "network, about" in text]
    assert len(before) == 1
    note = "Bellman-Ford network: 3 of 3 steps and the priors of "
    assert sum(line.startswith(note) for line in run.notes) == 1
    assert run.questions.world.evidence.network_prior.any()
