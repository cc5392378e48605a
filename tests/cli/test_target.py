"""Targets: the folder of a run is told from a data set; a run brings its own data set and rules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from funcppo.cli.options import (
    data_files,
    open_dataset,
    set_target_threads,
)
from funcppo.core.settings import write_config
from funcppo.kg.graph.loaders import load
from funcppo.kg.run.config import RUN_FILES, RunConfig

RULE = "0.5\tlocatedIn(X, Y) :- neighborOf(X, Y)\n"


@pytest.fixture
def rule_file(tmp_path):
    path = tmp_path / "other.txt"
    path.write_text(RULE)
    return str(path)


@pytest.mark.parametrize(
    ("stored", "typed", "used"), [(3, None, 3), (3, 2, 2), (None, None, 1)]
)
def test_threads_are_those_of_the_run_unless_typed(
    stored, typed, used, tmp_path, monkeypatch
):
    numbers = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    if stored is not None:
        config = RunConfig(dataset="countries_s1", threads=stored)
        write_config(config, tmp_path)
    set_target_threads(str(tmp_path), typed)
    assert numbers == [used]


def test_a_run_brings_the_data_set_and_the_rules_it_was_trained_with(
    tmp_path, rule_file
):
    write_config(RunConfig(dataset="countries_s1", rules=rule_file), tmp_path)
    dataset = open_dataset(str(tmp_path), None)
    expected = load("countries_s1", rule_file)
    assert (
        dataset.fingerprint
        == expected.fingerprint
        != load("countries_s1").fingerprint
    )
    with pytest.raises(
        ValueError,
        match="is a trained run, expected the rules it was trained with",
    ):
        open_dataset(str(tmp_path), rule_file)

    write_config(RunConfig(dataset=str(tmp_path / "moved")), tmp_path)
    with pytest.raises(ValueError, match="the run needs its data set"):
        open_dataset(str(tmp_path), None)


def test_the_files_of_a_target_are_those_of_its_data_rules_and_run(
    tmp_path, rule_file
):
    data = tmp_path / "data"
    data.mkdir()
    names = ["train.txt", "valid.tsv", "test.csv.gz", "facts.txt", "rules.pl"]
    for name in (*names, "notes.txt", "trainer.txt"):
        (data / name).write_text("")
    expected = {data / name for name in names}
    assert set(data_files(str(data))) == expected
    assert set(data_files(str(data), rule_file)) == {
        *expected,
        Path(rule_file),
    }
    program = data / "notes.txt"
    assert data_files(str(program)) == [program]
    assert data_files("countries_s1") == []

    run = tmp_path / "run"
    run.mkdir()
    write_config(RunConfig(dataset=str(data), rules=rule_file), run)
    assert set(data_files(str(run))) == {
        *expected,
        Path(rule_file),
        *(run / name for name in RUN_FILES),
    }
