"""The graphs that mining is measured on: as many and as large as they are said to be, the same for a seed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from experiments.benchmarks import mining_bounds
from experiments.benchmarks.mining_bounds import GraphShape


def test_shapes_span_the_sizes_that_are_claimed():
    shapes = list(mining_bounds.sample_shapes(40, seed=0))
    assert shapes == list(mining_bounds.sample_shapes(40, seed=0))
    assert shapes != list(mining_bounds.sample_shapes(40, seed=1))
    assert len(shapes) == 40
    for shape in shapes:
        assert 10 <= shape.entities <= 10**6
        assert 1 <= shape.relations <= 1000
        possible = shape.entities**2 * shape.relations
        assert 20 <= shape.facts <= min(possible / 2, mining_bounds.MAX_FACTS)
    for column in zip(*shapes):
        assert max(column) > 100 * min(column)


@pytest.mark.parametrize(
    "shape",
    [
        GraphShape(10, 3, 150),
        GraphShape(10, 1, 50),
        GraphShape(5000, 7, 4000),
        GraphShape(10**6, 1000, 300),
    ],
)
def test_facts_are_distinct_and_as_many_as_the_shape_says(shape):
    facts = mining_bounds.generate_facts(shape, seed=3)
    assert len(np.unique(facts, axis=0)) == len(facts) == shape.facts
    limits = (shape.entities, shape.relations, shape.entities)
    assert (facts >= 0).all() and (facts < np.array(limits)).all()
    again = mining_bounds.generate_facts(shape, seed=3)
    assert np.array_equal(facts, again)
    other = mining_bounds.generate_facts(shape, seed=4)
    assert not np.array_equal(facts, other)


def test_odd_relations_turn_facts_of_the_one_before_round():
    facts = mining_bounds.generate_facts(GraphShape(2000, 2, 4000), seed=0)
    triples = set(map(tuple, facts.tolist()))
    even = [row for row in triples if row[1] == 0]
    turned = sum((b, 1, a) in triples for a, _, b in even)
    assert turned > 0.15 * len(even)  # 0.5 but for facts left out at random


def test_a_graph_is_mined_by_the_program(tmp_path):
    file = tmp_path / "graph.txt"
    shape = GraphShape(30, 2, 400)
    mining_bounds.write_triples(
        file, mining_bounds.generate_facts(shape, seed=0)
    )
    row = mining_bounds.mine(file, 20.0, 4 * 10**9)
    assert row["exit_status"] == 0, row
    assert row["within_memory"] and row["within_rows"]
    # beside the rules the header, and what the counts are of
    assert (
        row["rules"]
        == len((tmp_path / "graph.rules").read_text().splitlines()) - 2
    )
    too_little = mining_bounds.mine(file, 20.0, 10**6)
    assert (
        too_little["exit_status"] == 2 and "--memory" in too_little["error"][0]
    )


def test_limits_are_compared(tmp_path):
    file = tmp_path / "summary.json"
    summary = {
        "n_rules": 1,
        "n_estimated_rules": 0,
        "mining_seconds": 13.0,
        "peak_bytes": 100,
        "rows": 10**8,
        "max_rows": 10**7,
        "notes": [],
    }
    file.write_text(json.dumps(summary))
    row = mining_bounds.read_summary(file, 10.0, 99)
    names = ("within_seconds", "within_memory", "within_rows")
    assert [row[name] for name in names] == [False] * 3
    row = mining_bounds.read_summary(file, 12.0, 100)
    assert [row[name] for name in names] == [True, True, False]
