"""The generated graph: distinct triples, held-out ones that a rule derives, lines of one width, and all its phases."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest

from experiments.benchmarks import large_graph
from funcppo.kg.graph.loaders import load


@pytest.mark.parametrize("n_triples", [3000, 6_000_000])
def test_triples_are_distinct_and_held_out_ones_are_compositions(n_triples):
    shape = large_graph.shape_of(n_triples)
    assert 0.9 * n_triples <= shape.total <= n_triples
    rows = np.arange(min(shape.total, 300_000))
    known = set(map(tuple, large_graph.triples(shape, rows).tolist()))
    assert len(known) == len(rows)
    test = large_graph.held_out(shape).tolist()
    assert test and not known & set(map(tuple, test))
    if len(rows) == shape.total:
        steps = {(h, r): t for h, r, t in sorted(known)}
        derived = [(h, r - 2) in steps for h, r, _ in test]
        assert all(derived)


def test_lines_have_one_width_and_read_back(tmp_path):
    shape = large_graph.shape_of(3000)
    row = large_graph.write_graph(shape, tmp_path / "graph", 1)
    dataset = load(tmp_path / "graph")
    assert len(dataset.facts) == row["n_triples"] == shape.total
    assert not dataset.n_duplicates and dataset.n_unseen_entities == 0
    assert len(dataset.rules) == 2 and len(dataset.test) >= 3


def test_a_record_has_a_row_for_each_phase(tmp_path, monkeypatch):
    """Programs that other processes run are left out."""
    for phase in ("index_graph", "run_here", "rank"):
        monkeypatch.setattr(large_graph, phase, lambda *args: {})
    out = tmp_path / "record.json"
    args = argparse.Namespace(
        triples=3000, processes=2, threads=1, reader="text",
        folder=tmp_path / "work", out=out,
    )  # fmt: skip
    large_graph.measure(args)
    phases = [row["phase"] for row in json.loads(out.read_text())["rows"]]
    assert phases == ["write", "index", "open", "look up", "rank"]


def test_memory_of_this_process_is_seen():
    import os

    held = large_graph.held_bytes(os.getpid())
    assert held["pss"] >= held["pss_anon"] > 1 << 20
