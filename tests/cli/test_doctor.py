"""`doctor`: the strategies that are tried, the one that works, the step that it prepares, and the machine."""

from dataclasses import replace
from functools import partial
from importlib.metadata import version

import pytest
import torch

from funcppo import learner, train_step
from funcppo.runtime import compile as compilation
from tests.cli.runner import doctor, json_of


def test_a_strategy_that_breaks_is_named_with_the_reason_and_the_next_one_is_in_use(
    monkeypatch, capsys
):
    """One that raises as soon as it is compiled, of a step that is not compiled otherwise, to save time."""

    def broken(*args, **kwargs):
        torch._dynamo.graph_break(msg="broken from outside")
        return train_step.minibatch_step(*args, **kwargs)

    monkeypatch.setattr(
        train_step,
        "EAGER_PARTS",
        replace(train_step.EAGER_PARTS, minibatch_step=broken),
    )
    # by the name that the learner has imported
    select = partial(learner.select_strategy, backend="eager", rollout_parts=())
    monkeypatch.setattr(learner, "select_strategy", select)
    status, report = json_of(capsys, doctor, "--device", "cpu")
    record = report["strategy"]
    failure = record["failures"][0]
    assert status == 0
    assert (record["replay_mode"], record["device"]) == ("none", "cpu")
    assert record["strategy"] != "one-graph"
    assert failure["name"] == "one-graph"
    assert failure["error_type"] == "Unsupported"
    assert record["torch_version"] == torch.__version__


def test_with_quick_it_tries_nothing(monkeypatch, capsys):
    monkeypatch.setattr("funcppo.cli.doctor._prepare_environment", None)
    status, report = json_of(capsys, doctor, "--quick")
    assert status == 0 and "strategy" not in report
    assert report["torch"] == version("torch")


@pytest.mark.parametrize(
    ("variable", "reason", "options"),
    [
        ("TORCH_COMPILE_DISABLE", "TORCH_COMPILE_DISABLE=1 turns", []),
        ("CXX", "no C++ compiler is found: expected 1; ", ["--profile"]),
    ],
)
def test_nothing_is_tried_where_nothing_can_be_compiled(
    variable, reason, options, monkeypatch, capsys
):
    """It compiled for minutes, or tried to; the report says why it does not, once."""
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(compilation, "_record_calls", None)
    assert doctor("--device", "cpu", "--cuda-graphs", "off", *options) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "strategy eager on cpu, replay: none" in output
    assert "graphs off" in output
    assert f"not compiling: {reason}" in output
    assert output.count(reason) == 1
    if options:
        assert "aten::" in output and "0 compilations" in output


def test_the_step_of_either_is_prepared(trained, monkeypatch, capsys, tmp_path):
    """As their programs prepare it: both of these are eager, the one by its settings, the other by a variable."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "set again by --cache-dir")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    options = ("--fill-cache", str(trained), "--cache-dir", str(tmp_path))
    status, report = json_of(capsys, doctor, *options)
    assert (status, report["strategy"]["strategy"]) == (0, "eager")
    assert report["cache_dir"] == str(tmp_path / "compiled")
    assert report["compiles"] == 0

    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    status, report = json_of(capsys, doctor, "--fill-cache", "CartPole-v1")
    assert (status, report["strategy"]["strategy"]) == (0, "eager")


def test_an_output_is_checked_before_anything_is_compiled(programs):
    error = programs.refused("doctor", "--json", "nowhere/doctor.json")
    assert error.startswith("--json nowhere/doctor.json: expected a file in a")


@pytest.mark.parametrize("name", ["countries_s1", "CartPole-v9"])
def test_what_is_neither_run_nor_environment_is_one_line(name, programs):
    assert programs.refused("doctor", "--fill-cache", name) == (
        f"--fill-cache {name}: expected the folder of a run or an environment of `funcppo rl`"
    )
