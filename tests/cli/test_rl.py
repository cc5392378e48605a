"""`rl`: the files of a run, resuming, what is printed, and bad input."""

import json
import shutil
from unittest.mock import Mock

import numpy as np
import pytest

from funcppo import checkpoint, logs
from funcppo.rl import published_settings, read_config
from tests.cli.runner import funcppo, settings

TINY = "ppo.n_envs=4 ppo.n_steps=8 ppo.n_minibatches=2 hidden=8 episodes=2"
SMALL = (*settings(f"{TINY} evaluate_every=2"), "--steps", 128, "--seeds", 2)
WORDS = ("rl", "CartPole-v1", *SMALL)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of four updates."""
    out = tmp_path_factory.mktemp("rl") / "out"
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert funcppo(monkeypatch, *WORDS, "--out", out) == 0
    return out


def read_rows(folder):
    """The rows of a log without their times."""
    rows = logs.read(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def assert_equal_runs(folder, other):
    """Equal states, rows and returns."""
    arrays = checkpoint.read(folder / "checkpoint.npz")[0]
    others = checkpoint.read(other / "checkpoint.npz")[0]
    assert arrays.keys() == others.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, others[name], err_msg=name)
    assert read_rows(folder) == read_rows(other)
    results = [
        json.loads((path / "results.json").read_text())["returns"]
        for path in (folder, other)
    ]
    assert results[0] == results[1]


def test_a_run_leaves_its_config_metrics_checkpoint_and_results(trained):
    files = "config.json metrics.jsonl checkpoint.npz results.json"
    assert {path.name for path in trained.iterdir()} == set(files.split())
    config = read_config(trained)
    assert (config.seeds, config.hidden, config.ppo.n_envs) == (2, (8,), 4)
    assert config.ppo.clip_eps == published_settings("CartPole-v1").ppo.clip_eps
    assert [(row["update"], row["seed"]) for row in read_rows(trained)] == [
        (update, seed) for update in (1, 2, 3, 4) for seed in (0, 1)
    ]
    results = json.loads((trained / "results.json").read_text())
    assert results["format"] == 2 and results["steps"] == 128
    assert results["settings"] == published_settings("CartPole-v1").source
    last = read_rows(trained)[-2:]
    returns = {str(row["seed"]): row["greedy_return"] for row in last}
    assert results["returns"]["greedy"]["by_seed"] == returns
    assert results["strategy"]["failures"][0]["code"] == "short_run"
    header = logs.read_header(trained / "metrics.jsonl")
    for name in ("strategy", "versions"):
        assert header[name] == results[name]


def test_an_environment_of_gymnasium_is_trained_and_resumed(programs, tmp_path):
    words = ("rl", "gymnasium:FrozenLake-v1", *SMALL, "--out", tmp_path)
    assert programs(*words) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["returns"]["greedy"]["by_seed"]) == 2
    assert results["strategy"] is None
    again = programs.printed("rl", "--out", tmp_path, "--resume", "-v")
    assert "new episodes begin" in " ".join(again.split())
    error = programs.refused("rl", "gymnasium:Nowhere-v1")
    assert "Environment `Nowhere` doesn't exist" in error


def test_settings_and_returns_are_printed(programs):
    out = programs.printed(*WORDS)
    assert "settings: PureJaxRL, purejaxrl/ppo.py" in out
    assert "steps 128 (published: 500000)" in out
    assert "ppo.n_steps 8 (published: 128)" in out
    assert "return after 128 steps, 2 episodes a seed" in out
    assert "interquartile mean" in out and "greedy" in out


def test_a_missing_compiler_is_said_before_training(programs, monkeypatch):
    """Nothing told of it but -v, at the end."""
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CXX", "c++-0")
    line = "no C++ compiler is found: expected c++-0"
    out = " ".join(programs.printed(*WORDS).split())
    assert f"note: not compiling: {line}" in out
    assert line not in programs.printed(*WORDS, "--strategy", "eager")
    error = programs.refused(*WORDS, "--strategy", "one-graph")
    assert error.startswith("--strategy: expected auto or eager, since no C++")


def test_an_interrupted_run_is_resumed_bit_for_bit(
    trained, programs, monkeypatch, capsys, tmp_path
):
    """Ended in its first evaluation."""
    with monkeypatch.context() as patch:
        stop = Mock(side_effect=KeyboardInterrupt)
        patch.setattr("funcppo.trainer.Evaluator.evaluate", stop)
        assert funcppo(patch, *WORDS, "--out", tmp_path) == 128
    line = f"interrupted after update 1; `funcppo rl --out {tmp_path} --resume`"
    assert line in capsys.readouterr().out
    words = ("rl", "--out", tmp_path, "--resume")
    assert programs(*words) == 0
    assert_equal_runs(tmp_path, trained)
    # A run that is finished prints its results again.
    assert programs(*words) == 0
    assert_equal_runs(tmp_path, trained)


def test_a_run_is_resumed_with_its_own_settings(trained, programs):
    words = ("--out", trained, "--resume", "--set", "ppo.gamma=0.5")
    words += ("--seeds", 3)
    error = programs.refused("rl", "CartPole-v1", *words)
    assert "ppo.gamma: expected 0.99, got 0.5" in error
    assert "seeds: expected 2, got 3" in error


CONSTANT = (*WORDS, "--set", "ppo.learning_rate_schedule.kind=constant")


@pytest.fixture(scope="module")
def constant(tmp_path_factory):
    """The folder of a run of four updates without a schedule that ends."""
    out = tmp_path_factory.mktemp("constant") / "out"
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert funcppo(monkeypatch, *CONSTANT, "--out", out) == 0
    return out


def test_a_finished_run_goes_on_to_more_steps(constant, programs, tmp_path):
    """And is then the run of so many steps from its beginning; a part of a rollout more changes nothing."""
    run = tmp_path / "run"
    assert programs(*CONSTANT, "--steps", 60, "--out", run) == 0
    results = (run / "results.json").read_bytes()
    words = ("rl", "--out", run, "--resume", "--steps")
    assert programs(*words, 64) == 0
    assert read_config(run).steps == 60
    again = json.loads((run / "results.json").read_text())
    assert again["returns"] == json.loads(results)["returns"]

    assert "extended from 60 to 128 steps" in programs.printed(*words, 128)
    assert read_config(run) == read_config(constant)
    assert_equal_runs(run, constant)


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        (256, "--steps: expected 128, where its learning_rate_schedule ends, got 256"),
        (64, "--steps: expected 128 or more, to extend the run, got 64"),
    ],
)  # fmt: skip
def test_other_steps_that_cannot_be_say_why(steps, problem, trained, programs):
    before = {path: path.read_bytes() for path in trained.iterdir()}
    words = ("rl", "--out", trained, "--resume", "--steps", steps)
    assert programs.refused(*words) == f"{trained}: {problem}"
    assert {path: path.read_bytes() for path in trained.iterdir()} == before


def test_a_run_without_checkpoint_begins_anew(trained, programs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / "checkpoint.npz").rename(run / "previous-checkpoint.npz")
    words = ("rl", "--out", run, "--resume")
    assert "begins" not in programs.printed(*words)

    (run / "previous-checkpoint.npz").unlink()
    (run / "checkpoint.npz").unlink(missing_ok=True)
    out = " ".join(programs.printed(*words).split())
    anew = "the run begins at update 0, and metrics.jsonl anew"
    assert f"expected a checkpoint, got none: {anew}" in out
    assert_equal_runs(run, trained)


def test_help_shows_the_settings_of_an_environment(programs):
    text = " ".join(programs.printed("rl", "Acrobot-v1", "--help-all").split())
    assert "lambda, 0 to 1, of generalised advantage" in text
    assert "(default: 0.94)" in text


def test_what_stands_in_the_folder_of_a_new_run_stays(programs, tmp_path):
    """Another program may have written a checkpoint there, or a log."""
    for name, log in (
        ("checkpoint.npz", ()),
        ("metrics.csv", ("--log", "csv")),
    ):
        out = tmp_path / name[:4]
        out.mkdir()
        (out / name).write_text("mine")
        assert name in programs.refused(*WORDS, "--out", out, *log)
        assert (out / name).read_text() == "mine"


def test_several_places_of_a_log_add_up(programs, tmp_path):
    pytest.importorskip("tensorboard")
    log = ("--log", "csv", "--log", "tensorboard")
    for _ in range(2):
        words = (*WORDS, "--steps", 64, *log, "--overwrite")
        assert programs(*words, "--out", tmp_path) == 0
        assert (tmp_path / "metrics.csv").exists()
        assert len(list((tmp_path / "tensorboard").iterdir())) == 1


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("", "ENV: expected an environment, got none"),
        ("cartpole-v1", "the nearest is CartPole-v1"),
        ("CartPole-v1 --resume", "--resume: expected --out RUN too"),
        ("CartPole-v1 --log csv wandb", "--log csv: expected --out RUN too"),
        ("CartPole-v1 --resume --overwrite", "expected one of them"),
        ("--out {tmp}/x --resume", "expected a folder that `funcppo rl` wrote"),
        ("CartPole-v1 --set ppo.gamma=2", "ppo.gamma: expected 0 to 1"),
        ("CartPole-v1 --set hidden=0", "--set hidden: expected 1 or more"),
        ("MountainCar-v0 --set ppo.n_minibatches=5", "expected a divisor of n_envs * n_steps = 256"),
        ("CartPole-v1 --out {tmp} --json {tmp}/config.json", "--json {tmp}/config.json: expected another file"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_2(
    words, problem, programs, monkeypatch, tmp_path
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = words.format(tmp=tmp_path).split()
    error = programs.refused("rl", *words)
    assert problem.format(tmp=tmp_path) in error
    assert list(tmp_path.iterdir()) == []
