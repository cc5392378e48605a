"""A run trained without a terminal: the run of the same settings, with its files, and none in a folder in use."""

import dataclasses

import pytest
import torch

from funcppo.core import tree
from funcppo.core.settings import METRICS_FILE
from funcppo.kg.run import fitting, run_start
from tests.kg.run.runs import CONFIG, N_UPDATES, trained


def test_the_run_is_the_one_that_its_folder_opens(run, tmp_path):
    updates = []
    fitted = fitting.fit(
        CONFIG, tmp_path / "a", on_update=lambda i, _: updates.append(i)
    )
    assert updates == list(range(1, N_UPDATES + 1))
    opened = run_start.open_run(tmp_path / "a")
    expected, _ = trained(run, tmp_path)
    for other in (opened, expected):
        for x, y in zip(
            tree.leaves(fitted.state.best_params),
            tree.leaves(other.state.best_params),
        ):
            assert torch.equal(x, y)
    assert (tmp_path / "a" / METRICS_FILE).read_text().count("\n") > N_UPDATES


def test_a_folder_in_use_is_refused_before_any_work(tmp_path):
    fitting.fit(dataclasses.replace(CONFIG, steps=16), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="holds a run already"):
        fitting.fit(CONFIG, tmp_path)
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}


def test_several_processes_are_refused_which_would_write_into_one_folder(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(fitting.distributed, "launched_size", lambda: 2)
    with pytest.raises(ValueError, match=r"^fit: expected one process, got 2"):
        fitting.fit(CONFIG, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_metrics_are_logged_where_they_are_asked_for(tmp_path):
    config = dataclasses.replace(CONFIG, steps=16)
    fitting.fit(config, tmp_path, log=["csv"])
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["update", "0", "1"]
