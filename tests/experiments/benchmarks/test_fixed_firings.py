"""The benchmark of fixed shapes counts what does not fit, and ends where firings differ."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.benchmarks import fixed_firings
from funcppo.data import load
from funcppo.logic import kb as kbase
from funcppo.logic.firings import FiringPlan, plan_firings

N = 12  # p is a path of so many facts


@pytest.fixture
def problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[FiringPlan, torch.Tensor]:
    """A plan and its facts; nothing is compiled."""
    facts = [f"e{i}\tp\te{i + 1}\n" for i in range(N)]
    (tmp_path / "train.txt").write_text("".join(facts))
    for name in ("valid", "test"):
        (tmp_path / f"{name}.txt").write_text("")
    rules = tmp_path / "rules.txt"
    rules.write_text("p(X, Y) :- p(Y, X).\np(X, Y) :- p(Z, X), p(Z, Y).\n")
    dataset = load(tmp_path, str(rules))
    kb, sizes = kbase.from_dataset(dataset)
    monkeypatch.setattr(fixed_firings, "compile_function", lambda fn, **_: fn)
    return plan_firings(kb, sizes), torch.from_numpy(dataset.train).long()


@pytest.mark.parametrize("object_identity", [False, True])
def test_a_row_counts_all_firings(
    problem: tuple[FiringPlan, torch.Tensor], object_identity: bool
) -> None:
    row = fixed_firings.measure(*problem, object_identity)
    assert row["questions"] == 2 * N
    assert row["firings"] > N
    assert 0 <= row["overflowed"] <= 2 * N // 20 + 1
    assert row["ragged_seconds"] > 0 < row["compiled_seconds"]


def test_other_firings_end_the_benchmark(
    problem: tuple[FiringPlan, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = fixed_firings.sorted_firings
    monkeypatch.setattr(
        fixed_firings,
        "sorted_firings",
        lambda *args: right(*args)._replace(rule=right(*args).rule + 1),
    )
    with pytest.raises(RuntimeError, match="other firings than expected"):
        fixed_firings.measure(*problem, False)
