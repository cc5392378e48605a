"""Fifty graphs: their sizes, what is written of them, and the row of one run."""

import json
import math

import numpy as np
import pytest

from experiments.benchmarks import fifty_graphs
from experiments.benchmarks.fifty_graphs import Spec
from funcppo.kg.graph.loaders import load

SMALL = Spec(60, 5, 0.01, has_odd_names=False)
ODD = Spec(250, 5, 0.01, has_odd_names=True)
DENSE = Spec(14, 5, 0.5, has_odd_names=False)


def test_there_are_fifty_graphs_of_all_sizes():
    specs = fifty_graphs.make_specs()
    assert len({spec.name for spec in specs}) == 50
    for field, extremes in (
        ("n_entities", (14, 100_000)),
        ("n_relations", (1, 500)),
        ("density", (1e-6, 0.5)),
    ):
        values = [getattr(spec, field) for spec in specs]
        assert (min(values), max(values)) == extremes
    assert sum(spec.has_odd_names for spec in specs) == 10


@pytest.mark.parametrize("spec", [SMALL, ODD, DENSE], ids=lambda s: s.name)
def test_a_graph_is_read_as_it_was_made(spec, tmp_path):
    n_triples = fifty_graphs.write_graph(tmp_path / "graph", spec, seed=3)
    dataset = load(str(tmp_path / "graph"))
    splits = (dataset.train, dataset.valid, dataset.test)
    assert sum(len(split) for split in splits) == n_triples
    assert [len(split) / n_triples for split in splits] == pytest.approx(
        [0.8, 0.1, 0.1], abs=1 / n_triples
    )
    size = spec.pairs_per_relation * spec.n_relations
    assert 0.5 * size <= n_triples <= size
    assert dataset.n_constants <= spec.n_entities
    if spec.has_odd_names:
        assert {"Zoë's e1", "[/x] e0"} <= set(dataset.entities)


def test_a_graph_depends_on_its_seed_alone(tmp_path):
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        fifty_graphs.write_graph(tmp_path / folder, SMALL, seed)
    a, b, c = ((tmp_path / x / "train.txt").read_bytes() for x in "abc")
    assert a == b != c


def test_derived_relations_follow_from_earlier_ones():
    """All but the noise of a relation is a copy, an inverse or a composition."""
    rng = np.random.default_rng(0)
    relations = fifty_graphs.make_relations(rng, Spec(200, 3, 0.01, False))
    sets = [{tuple(pair) for pair in pairs.tolist()} for pairs in relations]
    for number in (1, 2):
        earlier = sets[:number]
        sources = [*earlier, *({(y, x) for x, y in s} for s in earlier)]
        for first in earlier:
            for second in earlier:
                tails = {}
                for y, z in second:
                    tails.setdefault(y, []).append(z)
                sources.append(
                    {(x, z) for x, y in first for z in tails.get(y, [])}
                )
        share = max(len(sets[number] & s) for s in sources) / len(sets[number])
        assert share >= 1 - 1.5 * fifty_graphs.NOISE


def test_a_run_has_a_row_and_is_not_run_again(tmp_path, monkeypatch):
    record = tmp_path / "record.json"
    options = "--steps 64 --ppo.n-envs 8 --strategy eager"
    words = ["x", "--out", str(record), "--graphs", SMALL.name]
    monkeypatch.setattr("sys.argv", [*words, "--options", options])
    monkeypatch.setattr(fifty_graphs, "make_specs", lambda: [SMALL, DENSE])
    fifty_graphs.main()
    fifty_graphs.main()
    (row,) = json.loads(record.read_text())["runs"]
    assert (row["graph"], row["seed"], row["status"]) == (SMALL.name, 0, 0)
    assert row["seconds"] > 0 < row["peak_mb"]
    assert row["answer_seconds"] is None and row["error"] == ""
    scores = {"max-confidence", "noisy-or", f"{row['score']}, trained"}
    assert scores <= set(row["mrr"]) and row["n_rules"] > 0
    assert 0 < row["ceiling"] <= 1
    assert row["seconds_limit"] == 300 and not row["test_is_sample"]
    assert {"mining", "training"} <= set(row["phase_seconds"])
    assert row["machine"]["torch"] and "commit" in row["machine"]


def test_after_the_last_start_nothing_is_run():
    assert fifty_graphs.run_graph(SMALL, 0, 1.0, (), -math.inf) is None


def test_what_is_not_run_has_no_row(tmp_path, monkeypatch):
    record = tmp_path / "record.json"
    words = ["x", "--out", str(record), "--start-seconds", "-1"]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setattr(fifty_graphs, "make_specs", lambda: [SMALL])
    fifty_graphs.main()
    assert not record.exists()


def test_a_run_at_its_limit_is_interrupted():
    """One that does not end by itself."""
    words = ["serve", "countries_s1", "--port", "0"]
    outcome = fifty_graphs.run_program(words, 0.0)
    assert outcome.status != 0 and outcome.answer_seconds is not None
