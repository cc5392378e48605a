"""The settings of a run: their range, their file, and that reading them is quick."""

import json
import subprocess
import sys

import pytest

from funcppo.config import AdamConfig, PPOConfig, Schedule
from funcppo.core.settings import CONFIG_FILE, write_config
from funcppo.kg.config import (
    ListwiseConfig,
    Penalty,
    ProverTaskConfig,
    QuestionConfig,
    RunConfig,
    read_config,
)
from funcppo.kg.graph.triples import DataConfig


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(dataset="countries_s1"),
        RunConfig(
            dataset="family_tree:20:1",
            rules="/tmp/rules.txt",
            data=DataConfig(columns="1,3,2", split_ratios="1,0,0"),
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


def _in_ppo(fields):
    return lambda raw: raw | {"ppo": raw["ppo"] | fields}


def _without(key):
    return lambda raw: {name: raw[name] for name in raw if name != key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("dataset"), "dataset: expected a value, got none"),
        (_without("ppo"), "ppo: expected an object, got None"),
        (_in_ppo({"gama": 1.0}), r"ppo.gama: .* \(did you mean ppo.gamma\?\)"),
        (lambda raw: [raw], "expected a JSON object, got"),
        (_in_ppo({"adam": {"b1": 2}}), "ppo.adam.b1: expected 0 to below 1"),
        (_in_ppo({"n_minibatches": 3}), "ppo.n_minibatches: .* 2048, got 3"),
        (lambda raw: raw | {"ppo": 3}, "ppo: expected an object, got 3"),
    ],
)
def test_a_bad_file_is_an_error_that_says_why(change, message, tmp_path):
    write_config(RunConfig(dataset="countries_s1"), tmp_path)
    raw = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps(change(raw)))
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        read_config(tmp_path)


def test_the_settings_import_no_torch():
    code = "import sys, funcppo.kg.config; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (lambda: QuestionConfig(n_best=0), "n_best"),
        (lambda: QuestionConfig(odds_power=0.0), "odds_power"),
        (lambda: ListwiseConfig(learning_rate=-1.0), "learning_rate"),
        (lambda: Penalty(rule_weight=-1.0), "rule_weight"),
    ],
)
def test_a_setting_out_of_range_is_named(config, field):
    with pytest.raises(ValueError, match=f"^{field}: expected "):
        config()
