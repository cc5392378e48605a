"""A small training run that several files read."""

from __future__ import annotations

import pytest

from funcppo.kg.ranking import scoring
from tests.cli.runner import TRAINED, funcppo


@pytest.fixture(autouse=True)
def few_batch_sizes(monkeypatch):
    """Of the batch sizes of a search only two are tried."""
    monkeypatch.setattr(scoring, "TRIAL_ROWS", (16, 256))


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of a run of four updates on Countries S1."""
    out = tmp_path_factory.mktemp("run") / "out"
    with pytest.MonkeyPatch.context() as monkeypatch:
        args = ("train", "countries_s1", "--out", out, *TRAINED)
        assert funcppo(monkeypatch, *args) == 0
    return out
