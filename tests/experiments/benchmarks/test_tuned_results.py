"""A row holds the options of both programs, and nothing that the record holds is run again."""

import json

import pytest

from experiments.benchmarks import default_results, tuned_results
from experiments.benchmarks.tuned_results import Options
from tests.experiments.benchmarks.forked_call import call_forked


def test_a_record_of_one_seed(tmp_path, monkeypatch):
    data = tmp_path / "data" / "small"
    data.mkdir(parents=True)
    people = range(12)
    likes = [f"p{i}\tlikes\tp{(i + 1) % 12}\n" for i in people]
    knows = [f"p{i}\tknows\tp{(i + 1) % 12}\n" for i in people]
    (data / "train.txt").write_text("".join(likes + knows[:8]))
    (data / "valid.txt").write_text("".join(knows[8:10]))
    (data / "test.txt").write_text("".join(knows[10:]))
    training = ["--steps", "64", "--ppo.n-envs", "8", "--strategy", "eager"]
    options = Options(["--min-support", "3"], training)
    monkeypatch.setattr(tuned_results, "SETTINGS", {"small": options})
    monkeypatch.setattr(default_results, "call", call_forked)

    record = tmp_path / "record.json"
    words = ["x", "--data", str(data.parent), "--out", str(record)]
    words += ["--only", "small"]
    monkeypatch.setattr("sys.argv", [*words, "--seeds", "0"])
    tuned_results.main()
    (row,) = json.loads(record.read_text())["runs"]
    assert row["options"] == options._asdict()
    assert row["mining"]["seconds"] > 0
    # `likes` gives the tail of every `knows`
    assert row["results"]["test"]["exists@1"]["ceiling"] == pytest.approx(1.0)

    before = record.read_text()
    tuned_results.main()
    assert record.read_text() == before
