"""Published settings, the config.json of a run of `funcppo rl`, its learner, and what returns of several seeds say."""

import dataclasses
import json

import numpy as np
import pytest

import funcppo as fp
from funcppo import logs, rl
from funcppo.core.settings import CONFIG_FILE, METRICS_FILE, write_config
from funcppo.envs.wrappers import MomentsConfig

SETTINGS = rl.published_settings("Pendulum-v1")
FIELDS = [field.name for field in dataclasses.fields(SETTINGS)]
SET = {name: getattr(SETTINGS, name) for name in FIELDS}
CONFIG = rl.RLConfig(env="Pendulum-v1", **SET)


def test_it_is_read_as_it_was_written(tmp_path):
    write_config(CONFIG, tmp_path)
    assert rl.read_config(tmp_path) == CONFIG
    assert rl.is_rl_run(tmp_path)


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
def test_a_bad_one_is_a_line_with_file_and_field(changes, problem, tmp_path):
    write_config(CONFIG, tmp_path)
    path = tmp_path / CONFIG_FILE
    raw = json.loads(path.read_text())
    ppo = raw["ppo"] | changes.pop("ppo", {})
    path.write_text(json.dumps(raw | changes | {"ppo": ppo}))
    with pytest.raises(ValueError) as error:
        rl.read_config(tmp_path)
    assert str(path) in str(error.value) and problem in str(error.value)


def test_a_folder_of_another_program_is_named(tmp_path):
    (tmp_path / CONFIG_FILE).write_text('{"dataset": "countries_s1"}')
    assert not rl.is_rl_run(tmp_path)
    expected = "expected a folder that `funcppo rl` wrote, got"
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError, match=expected):
            rl.read_config(folder)


@pytest.mark.parametrize("name", rl.PUBLISHED)
def test_a_learner_is_made_of_each(name):
    """Its first state is what checks network and environment against each other."""
    learner = rl.make_learner(name, rl.published_settings(name))
    state = learner.init(fp.random.key(0))
    assert int(state.update) == 0
    assert learner.cfg.ppo == rl.published_settings(name).ppo


def test_others_have_the_defaults_and_say_so():
    settings = rl.published_settings("MyEnv-v0")
    assert settings.ppo == fp.PPOConfig()
    assert "none are published" in settings.source


def row(update, seed, greedy, sampled):
    """A row of the log."""
    return {
        "seed": seed,
        "update": update,
        "steps": 10 * update,
        "greedy_return": greedy,
        "sampled_return": sampled,
        "n_unfinished_episodes": seed,
    }


def test_returns_are_read_from_the_rows_with_an_evaluation(tmp_path):
    path = tmp_path / METRICS_FILE
    logs.truncate(path, 0)
    logs.append(path, {"seed": 3, "update": 1, "steps": 10})
    logs.append(path, row(2, 3, 1.0, 2.0), row(2, 4, 3.0, 4.0))
    logs.append(path, row(4, 3, 5.0, 6.0), row(4, 4, 7.0, 8.0))
    got = rl.read_returns(tmp_path)
    assert got.seeds == (3, 4) and got.steps.tolist() == [20, 40]
    assert got.greedy.tolist() == [[1.0, 5.0], [3.0, 7.0]]
    assert got.sampled.tolist() == [[2.0, 6.0], [4.0, 8.0]]
    assert got.n_unfinished.tolist() == [7, 7]

    summary = rl.summarize(got)
    assert summary["greedy"]["mean"] == summary["greedy"]["iqm"] == 6.0
    assert summary["greedy"]["iqm_interval"] == [5.0, 7.0]
    assert summary["sampled"]["by_seed"] == {"3": 6.0, "4": 8.0}


def test_a_log_without_an_evaluation_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"{METRICS_FILE}: expected an eval"):
        rl.read_returns(tmp_path)


def test_environments_are_wrapped_as_the_settings_say():
    settings = dataclasses.replace(
        rl.published_settings("Pendulum-v1"), normalize_reward=True
    )
    outer = rl.make_learner("Pendulum-v1", settings).cfg.env.cfg
    assert isinstance(outer.settings, MomentsConfig)
    assert outer.settings.gamma == 0.9
    image = rl.make_learner(
        "MinAtar/Breakout-v1", rl.published_settings("CartPole-v1")
    )
    assert image.cfg.env.spec.observation_shape is None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("exploration", "gsde"),
        ("noise_steps", 4),
        ("first_log_std", -1.0),
        ("orthogonal", False),
    ],
)
def test_gsde_or_its_options_are_refused_where_they_cannot_be(option, value):
    published = rl.published_settings("CartPole-v1")
    settings = dataclasses.replace(published, **{option: value})
    with pytest.raises(ValueError, match=f"{option}: expected"):
        rl.make_learner("CartPole-v1", settings)


@pytest.mark.parametrize(
    ("returns", "expected"),
    [
        ([1.0, 2.0, 3.0, 100.0], 2.5),
        ([100.0, 1.0, 3.0], 104 / 3),  # a quarter of 3 is none
        ([7.0], 7.0),
    ],
)
def test_the_interquartile_mean_of_small_samples(returns, expected):
    got = rl.interquartile_mean(np.array(returns))
    assert got == pytest.approx(expected)


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution():
    """400 seeds: half of it is 1.96 standard errors, within a tenth for the 2000 resamples."""
    returns = np.random.default_rng(0).normal(5.0, 2.0, 400)
    got = rl.estimate(returns, rl.mean_return)
    half = 1.96 * returns.std() / 20
    assert got.value == pytest.approx(returns.mean())
    assert got.value - got.low == pytest.approx(half, rel=0.1)
    assert got.high - got.value == pytest.approx(half, rel=0.1)


def test_one_seed_has_an_interval_of_no_width():
    got = rl.estimate(np.array([3.0]))
    assert got == (3.0, 3.0, 3.0) and str(got) == "3.0 [3.0, 3.0]"
