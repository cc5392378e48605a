"""The record of learning curves: a row for each environment, kept when others are run."""

from __future__ import annotations

import json
import sys

import pytest

from experiments.benchmarks import learning_curves
from funcppo.envs.registry import ENVIRONMENTS
from tests.learning import one_thread

pytestmark = pytest.mark.usefixtures(one_thread.__name__)


def test_a_row_holds_the_returns_of_each_seed_and_other_rows_stay(
    monkeypatch, tmp_path
):
    out = tmp_path / "curves.json"
    learning_curves.write_row(out, {"env": "Other-v0", "a": 1})
    learning_curves.write_row(out, {"env": "CartPole-v1", "a": 2})
    words = [
        "--only",
        "CartPole-v1",
        "--seeds",
        "2",
        "--steps",
        "1000",
        "--episodes",
        "2",
    ]
    words += ["--device", "cpu", "--strategy", "eager", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["learning_curves.py", *words])
    assert learning_curves.main() == 0
    other, row = json.loads(out.read_text())["rows"]
    assert other == {"env": "Other-v0", "a": 1}
    assert (row["env"], row["steps"]) == ("CartPole-v1", [512, 1024])
    assert row["is_complete"] and row["strategy"]["strategy"] == "eager"
    for policy in ("greedy", "sampled"):
        returns = row[policy]["by_seed"]
        assert [len(seed) for seed in returns] == [2, 2]
        means = [sum(pair) / 2 for pair in zip(*returns)]
        assert row[policy]["iqm"] == pytest.approx(means)
    sources = {one["source"] for one in row["published"]}
    assert sources == {learning_curves.CLEANRL, learning_curves.ZOO}


def test_published_returns_are_of_environments_that_there_are():
    assert set(learning_curves.PUBLISHED_RETURNS) <= set(ENVIRONMENTS)
