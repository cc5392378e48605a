"""The readers are timed on the same graph, and must read the same."""

import json
import sys

import pytest

from experiments.benchmarks import loading

pytest.importorskip("duckdb")


def test_each_reader_has_a_row(tmp_path, monkeypatch):
    file = tmp_path / "loading.json"
    monkeypatch.setattr(loading, "REPEATS", 1)
    words = ["loading.py", "--triples", "300", "--out", str(file)]
    monkeypatch.setattr(sys, "argv", words)
    loading.main()
    tiny, text, duckdb = json.loads(file.read_text())["rows"]
    assert [row["reader"] for row in (tiny, text, duckdb)] == [*loading.READERS]
    assert (tiny["n_facts"], text["n_facts"]) == (1, duckdb["n_facts"])
    # With 20 million places hardly any of 300 triples is drawn twice.
    assert 290 < text["n_facts"] <= 300 < text["n_entities"] <= 600
    assert text["fingerprint"] == duckdb["fingerprint"] != tiny["fingerprint"]
    assert min(row["seconds"] for row in (tiny, text, duckdb)) > 0


def test_readers_that_differ_end_the_benchmark(tmp_path, monkeypatch):
    row = {"seconds": 1.0, "peak_mb": 1.0}
    monkeypatch.setattr(
        loading, "read_apart", lambda name, _: row | {"fingerprint": name}
    )
    words = ["loading.py", "--triples", "1", "--out", str(tmp_path / "r.json")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(AssertionError, match="readers differ"):
        loading.main()
    assert not (tmp_path / "r.json").exists()
