"""The record has the gain of each score by other facts, and test where valid gained enough."""

import json
import sys

import pytest
import torch

from experiments import tables
from experiments.benchmarks import other_facts
from experiments.benchmarks.rule_redundancy import Trial
from funcppo import data

# a person has one home, and the rule derives those of all friends
PEOPLE = [f"p{i}" for i in range(12)]
TRAIN = [(p, "lives", f"c{i % 3}") for i, p in enumerate(PEOPLE[:9])]
TRAIN += [
    (p, "friend", q)
    for i, p in enumerate(PEOPLE)
    for q in (PEOPLE[(i + 3) % 12], PEOPLE[(i + 1) % 12])
]
VALID = [(p, "lives", f"c{i % 3}") for i, p in enumerate(PEOPLE[9:])]
RULES = "lives(X, Y) :- friend(X, Z), lives(Z, Y)\n"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "nations"
    folder.mkdir()
    for split, triples in (("train", TRAIN), ("valid", VALID), ("test", VALID)):
        lines = ("\t".join(triple) + "\n" for triple in triples)
        (folder / f"{split}.txt").write_text("".join(lines))
    (tmp_path / "rules.txt").write_text(RULES)
    return tmp_path


def test_the_record_has_the_gains_of_valid_and_of_the_best_on_test(
    folder, monkeypatch
):
    redundancy = {
        "set": "nations",
        "plain": {"score": "noisy-or", "constant": 1.0},
        "joint": {"score": "noisy-or-joint", "constant": 1.0},
    }
    records = {"rule_redundancy": {"rows": [redundancy]}}
    monkeypatch.setattr(tables, "load_record", records.__getitem__)
    out = folder / "out.json"
    words = ["--data", folder, "--only", "nations", "--out", out]
    words += ["--rules", folder / "rules.txt"]
    monkeypatch.setattr(sys, "argv", ["other_facts", *map(str, words)])
    for least, is_ranked in ((-1e9, True), (1e9, False)):
        monkeypatch.setattr(other_facts, "MIN_GAIN_ERRORS", least)
        other_facts.main()
        (row,) = json.loads(out.read_text())["rows"]
        assert (row["set"], row["n_rules"], row["n_valid"]) == ("nations", 1, 3)
        assert [trial["score"] for trial in row["valid"]] == [
            "noisy-or",
            "noisy-or-joint",
        ]
        assert row["best"] == redundancy["plain"]
        assert (row["test"] is not None) == is_ranked
        if is_ranked:
            # test has the triples of valid here
            (best, _) = row["valid"]
            assert row["test"]["mrr"] == pytest.approx(best["mrr"])
            assert row["test"]["n_queries"] == 3


def test_the_gain_is_over_the_same_score(folder):
    dataset = data.load(folder / "nations", folder / "rules.txt")
    trials = [Trial("noisy-or", 5.0)]
    row = other_facts.run_set(
        "nations", str(folder / "nations"), folder / "rules.txt", trials,
        n_queries=2, n_jobs=1,
    )  # fmt: skip
    (trial,) = row["valid"]
    queries = torch.from_numpy(other_facts.sample_queries(dataset.valid, 2))
    assert row["n_valid"] == len(queries) == 2
    # what has a home already ranks below what has none
    assert trial["gain"] > 0
