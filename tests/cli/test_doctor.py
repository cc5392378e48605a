"""The doctor tries the ladder on this machine and says what came of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.metadata import version

import pytest
import torch
import tyro

from funcppo import train_step
from funcppo.cli.doctor import Doctor
from funcppo.runtime import compile as ladder
from tests.cli.runner import json_of
from tests.learning import one_thread

pytestmark = pytest.mark.usefixtures(one_thread.__name__)


def doctor(*args: str) -> int:
    return tyro.cli(Doctor, args=list(args)).run()


def test_a_rung_that_breaks_is_named_with_the_reason_and_the_next_one_is_in_use(monkeypatch, capsys):
    """One that raises as soon as it is compiled; aot_eager, which compiles quickly, in Inductor's place."""

    def broken(*args, **kwargs):
        torch._dynamo.graph_break(msg="broken from outside")
        return train_step.minibatch_step(*args, **kwargs)

    monkeypatch.setattr(train_step, "EAGER_PARTS", replace(train_step.EAGER_PARTS, minibatch_step=broken))
    monkeypatch.setattr(ladder, "select_strategy", partial(ladder.select_strategy, backend="aot_eager"))
    status, found = json_of(capsys, doctor, "--device", "cpu")
    record = found["strategy"]
    (failure,) = record["failures"]
    assert status == 0 and (record["rung"], record["replay"], record["device"]) == ("two-graphs", "none", "cpu")
    assert (failure["name"], failure["error"], failure["torch"]) == ("one-graph", "Unsupported", torch.__version__)


def test_what_is_found_is_printed(monkeypatch, capsys):
    failure = ladder.Failure(name="one-graph", error_type="Unsupported", message="[call] refused", torch_version="2.9")
    record = ladder.StrategyRecord(
        strategy="two-graphs",
        failures=(failure,),
        torch_version="2.9",
        device="cuda:0",
        backend="inductor",
        replay_mode="manual graph",
    )
    monkeypatch.setattr("funcppo.cli.doctor.try_strategies", lambda device: record)
    assert doctor("--device", "cpu") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"torch {version('torch')}" in said
    assert "strategy two-graphs on cuda:0, replayed by: manual graph" in said
    assert "not one-graph: Unsupported: [call] refused" in said


def test_asked_for_versions_alone_it_tries_nothing(monkeypatch, capsys):
    monkeypatch.setattr("funcppo.cli.doctor.try_strategies", None)
    status, found = json_of(capsys, doctor, "--quick")
    assert status == 0 and "strategy" not in found and found["torch"] == version("torch")
