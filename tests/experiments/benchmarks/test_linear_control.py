"""The control learns from train alone, and ranks as its weights say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.benchmarks import linear_control
from experiments.benchmarks.linear_control import Listed
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.loaders import load

TRAIN = ["a p b", "a p c", "a p d", "a q b", "e p b", "e q b"]


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    """q(a, c) is asked for, and derived as q(a, b), which train holds, and q(a, d)."""
    splits = {"train": TRAIN, "valid": ["a q c"], "test": ["a q c"]}
    for name, lines in splits.items():
        text = "".join("\t".join(line.split()) + "\n" for line in lines)
        (tmp_path / f"{name}.txt").write_text(text)
    rules = tmp_path / "rules.txt"
    rules.write_text("q(X, Y) :- p(X, Y).\n")
    return load(tmp_path, str(rules))


def test_answers_of_valid_and_test_are_wrong_ones_in_training(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists: list[tuple[Listed, Listed]] = []

    def fit(
        train: Listed, valid: Listed, n_weights: int, _: object
    ) -> tuple[float, Any]:
        lists.append((train, valid))
        return 1.0, torch.zeros(2, n_weights)

    monkeypatch.setattr(linear_control, "fit", fit)
    row = linear_control.measure(dataset)
    train, valid = lists[0]
    # Of q(a, ?) b, c and d; of q(e, ?) b; of q(?, b) a or e, twice.
    n_listed = torch.bincount(train.question, minlength=12)
    assert n_listed[n_listed > 0].sort().values.tolist() == [1, 1, 1, 3]
    assert train.is_answer.sum() == 4
    # c and d: b is a known answer; and a.
    assert torch.bincount(
        valid.question, minlength=2
    ).sort().values.tolist() == [
        1,
        2,
    ]
    # c ties with d among five entities less one known answer
    assert row["runs"][0]["test"] == pytest.approx((1 + 0.75) / 2)


def test_a_fit_learns_which_rule_is_right() -> None:
    """Of two candidates the first rule derives the answer, the second the other one."""
    n = 64
    question = torch.arange(n).repeat_interleave(2)
    of_both = torch.arange(2 * n)
    is_answer = of_both % 2 == 0
    listed = Listed(
        n_candidates=torch.full((n,), 2),
        question=question,
        is_answer=is_answer,
        candidate=of_both,
        weight=of_both % 2,
        log_count=torch.ones(2 * n),
    )
    before = linear_control.mean_reciprocal_rank(listed, torch.zeros(2, 2))
    best, weights = linear_control.fit(
        listed, listed, 2, torch.Generator().manual_seed(0)
    )
    assert (before, best) == (0.75, 1.0)
    assert (weights[:, 0] > weights[:, 1]).all()
