"""Defaults measured: a row for each seed, and nothing that the record holds is run again."""

import json

from experiments.benchmarks import default_results


def test_a_record_of_two_seeds(tmp_path, monkeypatch):
    """The first seed is trained, and the second is all that is run when it is asked for too."""
    name = "family_tree:30:0"
    monkeypatch.setattr(default_results, "OWN_RULES", (name,))
    monkeypatch.setattr(default_results, "MINED_RULES", ())
    monkeypatch.setattr(
        default_results,
        "OPTIONS",
        {name: ["--steps", "64", "--ppo.n-envs", "8", "--strategy", "eager"]},
    )
    record = tmp_path / "record.json"
    words = ["x", "--out", str(record), "--seeds"]
    monkeypatch.setattr("sys.argv", [*words, "1"])
    default_results.main()
    (row,) = json.loads(record.read_text())["runs"]
    assert row["set"] == name and row["mining"] is None
    assert row["training"]["seconds"] > 0 < row["training"]["peak_mb"]
    assert row["rule_score"] in row["results"]["test"]
    assert row["results"]["seed"] == row["seed"] == 0

    monkeypatch.setattr(
        default_results,
        "train",
        lambda name, target, seed, *_: {"set": name, "seed": seed},
    )
    monkeypatch.setattr("sys.argv", [*words, "2"])
    default_results.main()
    other = {"set": name, "seed": 1}
    assert json.loads(record.read_text())["runs"] == [row, other]
