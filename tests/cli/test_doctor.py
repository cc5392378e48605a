"""`doctor`: the strategies that are tried, the one that works, and the machine."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.metadata import version

import torch

from funcppo import train_step
from funcppo.runtime import compile as compilation
from tests.cli.runner import doctor, json_of


def test_a_strategy_that_breaks_is_named_with_the_reason_and_the_next_one_is_in_use(
    monkeypatch, capsys
):
    """One that raises as soon as it is compiled; aot_eager, which compiles quickly, in Inductor's place."""

    def broken(*args, **kwargs):
        torch._dynamo.graph_break(msg="broken from outside")
        return train_step.minibatch_step(*args, **kwargs)

    monkeypatch.setattr(
        train_step,
        "EAGER_PARTS",
        replace(train_step.EAGER_PARTS, minibatch_step=broken),
    )
    monkeypatch.setattr(
        compilation,
        "select_strategy",
        partial(compilation.select_strategy, backend="aot_eager"),
    )
    status, report = json_of(capsys, doctor, "--device", "cpu")
    record = report["strategy"]
    (failure,) = record["failures"]
    assert status == 0 and (
        record["strategy"],
        record["replay_mode"],
        record["device"],
    ) == (
        "two-graphs",
        "none",
        "cpu",
    )
    assert (
        failure["name"],
        failure["error_type"],
        failure["torch_version"],
    ) == (
        "one-graph",
        "Unsupported",
        torch.__version__,
    )


def test_the_report_is_printed(monkeypatch, capsys):
    failure = compilation.Failure(
        name="one-graph",
        error_type="Unsupported",
        message="[call] refused",
        torch_version="2.9",
    )
    record = compilation.StrategyRecord(
        strategy="two-graphs",
        failures=(failure,),
        torch_version="2.9",
        device="cuda:0",
        backend="inductor",
        replay_mode="cuda-graph",
    )
    monkeypatch.setattr(
        "funcppo.cli.doctor.try_strategies", lambda device: record
    )
    assert doctor("--device", "cpu") == 0
    output = " ".join(capsys.readouterr().out.split())
    assert f"torch {version('torch')}" in output
    assert "strategy two-graphs on cuda:0, replay: cuda-graph" in output
    assert "one-graph failed: Unsupported: [call] refused" in output


def test_with_quick_it_tries_nothing(monkeypatch, capsys):
    monkeypatch.setattr("funcppo.cli.doctor.try_strategies", None)
    status, report = json_of(capsys, doctor, "--quick")
    assert (
        status == 0
        and "strategy" not in report
        and report["torch"] == version("torch")
    )


def test_nothing_is_tried_where_the_compiler_is_turned_off(monkeypatch, capsys):
    """It compiled for minutes; a stance or a variable is obeyed, and the report says which."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.setattr(compilation, "_record_calls", None)
    assert doctor("--device", "cpu", "--graphs", "off") == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "strategy eager on cpu, replay: none" in output
    assert "graphs off" in output
    assert (
        "others not tried: TORCH_COMPILE_DISABLE=1 turns the compiler off"
        in output
    )
