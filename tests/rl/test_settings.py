"""Published settings, and the config.json of a run of `funcppo rl`."""

from __future__ import annotations

import dataclasses
import json

import pytest

import funcppo as fp
from funcppo.core.settings import CONFIG_FILE, write_config
from funcppo.rl import run
from funcppo.rl.settings import (
    PUBLISHED,
    RLConfig,
    is_rl_run,
    published_settings,
    read_config,
    settings_of,
)

SETTINGS = published_settings("Pendulum-v1")
CONFIG = RLConfig(
    env="Pendulum-v1",
    **{
        field.name: getattr(SETTINGS, field.name)
        for field in dataclasses.fields(SETTINGS)
    },
)


def test_it_is_read_as_it_was_written(tmp_path):
    write_config(CONFIG, tmp_path)
    assert read_config(tmp_path) == CONFIG
    assert is_rl_run(tmp_path)
    assert settings_of(CONFIG) == SETTINGS


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"seeds": 0}, "seeds: expected 1 or more, got 0"),
        ({"hidden": [64, "x"]}, "hidden: expected an integer, got"),
        ({"unknown": 1}, "unknown: expected the name of a setting, got an"),
        ({"format": 99}, "expected format version 2, got 99"),
        ({"ppo": {"gamma": 2}}, "ppo.gamma: expected 0 to 1, got 2"),
    ],
)
def test_a_bad_one_is_one_line_that_names_file_and_field(
    changes, problem, tmp_path
):
    write_config(CONFIG, tmp_path)
    path = tmp_path / CONFIG_FILE
    raw = json.loads(path.read_text())
    ppo = raw["ppo"] | changes.pop("ppo", {})
    path.write_text(json.dumps(raw | changes | {"ppo": ppo}))
    with pytest.raises(ValueError) as error:
        read_config(tmp_path)
    assert str(path) in str(error.value) and problem in str(error.value)


def test_a_folder_of_another_program_is_named(tmp_path):
    (tmp_path / CONFIG_FILE).write_text('{"dataset": "countries_s1"}')
    assert not is_rl_run(tmp_path)
    expected = "expected a folder that `funcppo rl` wrote, got"
    for folder, found in (
        (tmp_path, f"one with another {CONFIG_FILE}"),
        (tmp_path / "none", "none"),
    ):
        with pytest.raises(ValueError, match=f"{expected} {found}$"):
            read_config(folder)
    (tmp_path / CONFIG_FILE).unlink()
    with pytest.raises(
        ValueError, match=f"{expected} one without {CONFIG_FILE}"
    ):
        read_config(tmp_path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_learner_is_made_of_each(name):
    """Its first state is what checks network and environment against each other."""
    learner = run.make_learner(name, published_settings(name))
    state = learner.init(fp.random.key(0))
    assert int(state.update) == 0
    assert learner.cfg.ppo == published_settings(name).ppo


def test_others_have_the_defaults_and_say_so():
    settings = published_settings("MyEnv-v0")
    assert settings.ppo == fp.PPOConfig()
    assert "none are published" in settings.source
