"""Confidences of rules that are smoothed towards those of their relation."""

import json
import sys

import pytest
import torch

from experiments.benchmarks import relation_smoothing
from funcppo import data
from funcppo.logic.kb import rule_confidence
from funcppo.prover.config import ProverTaskConfig
from funcppo.prover.task import build_task


def test_confidences_move_towards_that_of_their_relation():
    settings = ProverTaskConfig(
        max_height=1, smoothing=0.0, object_identity=False
    )
    task = build_task(data.load("family_tree:60:0"), settings)
    kb = task.kb
    for rule in range(task.sizes.n_rules):
        same = kb.rules[:, 0, 0] == kb.rules[rule, 0, 0]
        share = kb.support[same].sum() / kb.body_pairs[same].sum()
        expected = (kb.support[rule] + 5 * share) / (kb.body_pairs[rule] + 5)
        smoothed = relation_smoothing.with_relation(task, 5.0).kb
        assert rule_confidence(smoothed)[rule] == pytest.approx(expected)
    plain = relation_smoothing.with_constant(task, 0.0).kb
    assert torch.equal(rule_confidence(plain), rule_confidence(kb))


def test_the_record_has_each_constant_and_strength(tmp_path, monkeypatch):
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
    rules.write_text("wife(X, Y) :- husband(Y, X)\n")
    out = tmp_path / "record.json"
    words = ["--data", str(tmp_path), "--only", "nations"]
    words += ["--rules", str(rules), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["relation_smoothing", *words])
    relation_smoothing.main()
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2 * (4 + 3)
    assert {row["n_rules"] for row in rows} == {1}
    reference = [
        row["valid_gain"]
        for row in rows
        if (row["kind"], row["strength"]) == ("constant", 5.0)
    ]
    assert reference == [0.0, 0.0]
