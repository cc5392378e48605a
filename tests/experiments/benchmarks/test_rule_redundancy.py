"""Trials of a chunk of queries rank as the scorers of the package do; the record tells what valid chose."""

import json
import sys

import numpy as np
import pytest
import torch

from experiments.benchmarks import rule_redundancy
from experiments.benchmarks.relation_smoothing import (
    reciprocal_ranks,
    with_constant,
)
from experiments.benchmarks.rule_redundancy import Trial
from funcppo import data
from funcppo.evaluation import scorers
from funcppo.prover.config import ProverTaskConfig
from funcppo.prover.task import build_task, with_other_facts

SETTINGS = ProverTaskConfig(max_height=1, smoothing=0.0, object_identity=True)
RULES = "\n".join(
    [
        "husband(X, Y) :- wife(Y, X)",
        "wife(X, Y) :- husband(Y, X)",
        "wife(X, Y) :- mother(X, Z), father(Y, Z)",
        "wife(X, Y) :- mother(X, Z), son(Z, Y)",
    ]
)


def random_graph():
    """Two relations over twelve entities, with rules that often derive the same, and a valid split."""
    pairs = np.random.default_rng(0).permutation(144)

    def triples(rows, relation):
        return [(f"e{i // 12}", relation, f"e{i % 12}") for i in rows]

    rules = [
        "r(X, Y) :- r(Y, X)",
        "r(X, Y) :- s(X, Y)",
        "r(X, Y) :- s(X, Z), s(Z, Y)",
        "r(X, Y) :- s(X, Z), r(Z, Y)",
        "r(X, Y) :- r(X, Z), r(Z, Y)",
    ]
    return data.from_triples(
        triples(pairs[:40], "r") + triples(pairs[20:60], "s"),
        triples(pairs[40:55], "r"),
        rules="\n".join(rules),
    )


@pytest.mark.parametrize("with_derivations", [True, False])
def test_trials_rank_as_the_scorers_do(monkeypatch, tmp_path, with_derivations):
    monkeypatch.setattr(rule_redundancy, "CHUNK_QUERIES", 7)
    task = build_task(
        random_graph(),
        SETTINGS,
        with_derivations=with_derivations,
    )
    joint = scorers.count_joint(task, "noisy-or-joint")
    assert joint is not None
    task = with_other_facts(task)
    trials = [
        Trial(score, constant)
        for score in (
            "max-plus",
            "noisy-or-joint",
            "noisy-or",
            "noisy-or-joint-other-facts",
        )
        for constant in (1.0, 5.0)
    ]
    valid = task.dataset.valid
    got = rule_redundancy.rank_trials(task, joint, trials, valid)
    for trial in trials:
        of_constant = with_constant(task, trial.constant)
        want = reciprocal_ranks(of_constant, trial.score)
        # chunks list the heads of some queries, then their tails
        assert torch.equal(got[trial].sort().values, want.sort().values)
    assert len({float(ranks.mean()) for ranks in got.values()}) > 3


def test_the_record_has_the_best_of_valid_and_its_gain(tmp_path, monkeypatch):
    folder = tmp_path / "nations"
    folder.mkdir()
    dataset = data.load("family_tree:30:0")
    for split in ("train", "valid", "test"):
        lines = [
            f"{dataset.entities[h - 1]}\t{dataset.predicates[r - 1]}\t{dataset.entities[t - 1]}\n"
            for r, h, t in getattr(dataset, split).tolist()
        ]
        (folder / f"{split}.txt").write_text("".join(lines))
    rules = tmp_path / "rules.txt"
    rules.write_text(RULES)
    out = tmp_path / "record.json"
    words = ["--data", str(tmp_path), "--only", "nations"]
    words += ["--rules", str(rules), "--out", str(out), "--queries", "8"]
    monkeypatch.setattr(sys, "argv", ["rule_redundancy", *words])
    rule_redundancy.main()
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["n_rules"], row["n_valid"]) == (4, 8)
    assert len(row["valid"]) == 2 * (6 + 3)
    plain = [
        trial
        for trial in row["valid"]
        if trial["score"] in rule_redundancy.PLAIN_SCORES
    ]
    assert max(trial["gain"] for trial in plain) == 0.0
    best = max(plain, key=lambda trial: trial["mrr"])
    assert row["plain"]["score"] == best["score"]
    assert row["joint"]["score"] in rule_redundancy.JOINT_SCORES
    assert row["test"]["mrr"] - row["test"]["plain_mrr"] == pytest.approx(
        row["test"]["gain"], abs=1e-6
    )

    # A row of other rules stands beside it, and is replaced by its like.
    labelled = ["rule_redundancy", *words, "--label", "nations, other rules"]
    monkeypatch.setattr(sys, "argv", labelled)
    for _ in range(2):
        rule_redundancy.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["set"] for row in rows] == ["nations", "nations, other rules"]
