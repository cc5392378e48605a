"""The settings of a run: their range, their file, and that reading them is quick."""

import json
import subprocess
import sys

import pytest

from funcppo.config import AdamConfig, PPOConfig, Schedule
from funcppo.experiment.config import (
    CONFIG_FILE,
    RunConfig,
    read_config,
    write_config,
)
from funcppo.prover.config import ProverTaskConfig


@pytest.mark.parametrize(
    "name",
    ["steps", "n_validations", "n_validation_queries", "max_nonfinite_updates"],
)
def test_counts_are_at_least_1(name):
    assert getattr(RunConfig(dataset="countries_s1", **{name: 1}), name) == 1
    with pytest.raises(ValueError, match=f"^{name}=0: expected 1 or more$"):
        RunConfig(dataset="countries_s1", **{name: 0})


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(dataset="countries_s1"),
        RunConfig(
            dataset="family_tree:20:1",
            rules="/tmp/rules.txt",
            steps=7,
            score="success",
            prover=ProverTaskConfig(
                max_height=2, fact_selection="policy", smoothing=0.5
            ),
            ppo=PPOConfig(
                clip_eps_schedule=Schedule(
                    kind="cosine", warmup_updates=3, end_factor=0.1
                ),
                adam=AdamConfig(weight_decay=0.1, decoupled_weight_decay=False),
                advantage_ddof=None,
            ),
        ),
    ],
    ids=["defaults", "others"],
)
def test_a_config_is_read_as_it_was_written(config, tmp_path):
    write_config(config, tmp_path)
    assert read_config(tmp_path) == config
    assert json.loads((tmp_path / CONFIG_FILE).read_text())["format"] == 2


def test_the_file_lists_every_setting_under_its_name(tmp_path):
    write_config(RunConfig(dataset="countries_s1", n_validations=3), tmp_path)
    raw = json.loads((tmp_path / CONFIG_FILE).read_text())
    assert (
        raw["n_validations"] == 3 and raw["prover"]["fact_selection"] == "auto"
    )
    assert raw["ppo"]["learning_rate_schedule"] == {
        "kind": "linear",
        "warmup_updates": 0,
        "end_factor": 0.0,
    }


def _without(key):
    return lambda raw: {
        name: value for name, value in raw.items() if name != key
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _without("ppo"),
            "expected the settings of a run, got a file without 'ppo'",
        ),
        (
            _without("dataset"),
            "expected the settings of a run, got .*'dataset'",
        ),
        (
            lambda raw: raw | {"colour": 1},
            "expected the settings of a run, got .*'colour'",
        ),
        (lambda raw: [raw], "expected the settings of a run"),
        (lambda raw: raw | {"steps": 0}, "steps=0: expected 1 or more"),
    ],
    ids=["no group", "no field", "unknown field", "no object", "out of range"],
)
def test_a_bad_file_is_an_error_that_says_what_is_wrong(
    change, message, tmp_path
):
    write_config(RunConfig(dataset="countries_s1"), tmp_path)
    raw = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps(change(raw)))
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(
        ValueError,
        match=f"`funcppo train` wrote, got one without {CONFIG_FILE}",
    ):
        read_config(tmp_path)
    (tmp_path / CONFIG_FILE).write_text("{")
    with pytest.raises(
        ValueError, match="expected the settings of a run, got invalid JSON"
    ):
        read_config(tmp_path)


def test_reading_a_config_imports_no_torch():
    program = "import sys, funcppo.experiment.config; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
