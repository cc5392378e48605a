"""Defaults measured: a row for each seed, and nothing that the record holds is run again."""

import json

from experiments.benchmarks import default_results
from tests.experiments.benchmarks.forked_call import call_forked


def test_a_record_of_two_seeds(tmp_path, monkeypatch):
    name = "family_tree:30:0"
    monkeypatch.setattr(default_results, "OWN_RULES", (name,))
    monkeypatch.setattr(default_results, "MINED_RULES", ())
    monkeypatch.setattr(
        default_results,
        "OPTIONS",
        {name: ["--steps", "64", "--ppo.n-envs", "8", "--strategy", "eager"]},
    )
    record = tmp_path / "record.json"
    for n_seeds in ("1", "2"):
        monkeypatch.setattr(
            "sys.argv", ["x", "--out", str(record), "--seeds", n_seeds]
        )
        default_results.main()
        # the cost of the first seed is measured
        monkeypatch.setattr(default_results, "call", call_forked)

    rows = json.loads(record.read_text())["runs"]
    assert [row["seed"] for row in rows] == [0, 1]
    for row in rows:
        assert row["set"] == name and row["mining"] is None
        assert row["training"]["seconds"] > 0 < row["training"]["peak_mb"]
        assert row["rule_score"] in row["results"]["test"]
        assert row["results"]["seed"] == row["seed"]
