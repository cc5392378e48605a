"""Shared parts of the programs: errors, JSON, output paths, devices, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
import torch
import torch._dynamo.config  # it reads the environment once

from funcppo.cli import common
from funcppo.runtime.capture import are_trees_demanded, capture
from funcppo.runtime.compile import reason_against_compiling


def test_an_error_is_one_line_and_an_exit_status(capsys):
    with pytest.raises(SystemExit) as stop:
        common.exit_with_error("no such file")
    assert (stop.value.code, capsys.readouterr().err) == (
        2,
        "funcppo: no such file\n",
    )
    with pytest.raises(SystemExit) as stop:
        common.exit_with_error("interrupted", status=130)
    assert stop.value.code == 130


def test_json_starts_with_the_version_of_its_format(tmp_path, capsys):
    common.write_json(str(tmp_path / "result.json"), {"name": "Zoë", "n": 1})
    text = (tmp_path / "result.json").read_text()
    assert "Zoë" in text
    assert list(json.loads(text).items()) == [
        ("format", common.JSON_FORMAT),
        ("name", "Zoë"),
        ("n", 1),
    ]
    common.write_json("-", {"n": 1})
    assert json.loads(capsys.readouterr().out) == {"format": 2, "n": 1}
    common.write_json(None, {"n": 1})
    assert capsys.readouterr().out == ""


def test_debugging_turns_compiler_and_graphs_off_and_shows_where_it_failed(
    tmp_path, capsys
):
    with (
        pytest.raises(ValueError),
        common.debug_mode(True, [tmp_path / "config.json"]),
    ):
        assert reason_against_compiling() == "TORCH_COMPILE_DISABLE=1"
        assert torch.are_deterministic_algorithms_enabled()
        captured = capture(lambda x: (x, x), torch.ones(1))
        assert captured.fallback_reason == "turned off by --debug"
        raise ValueError("inside")
    told = capsys.readouterr().err
    first, *_, last = told.splitlines()
    assert f"attach to a report: {tmp_path}/config.json" in first
    assert "Traceback" in told and last == "ValueError: inside"
    assert reason_against_compiling() == ""
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_output_path_is_a_file_in_a_folder_that_exists(
    tmp_path, monkeypatch
):
    common.check_output_path("--out", tmp_path / "new")
    (tmp_path / "old").write_text("")
    common.check_output_path("--out", tmp_path / "old")
    for path in (tmp_path, tmp_path / "none" / "new"):
        with pytest.raises(
            ValueError,
            match=f"^--out {path}: expected a file in a folder that exists$",
        ):
            common.check_output_path("--out", path)
    monkeypatch.setattr(
        os, "access", lambda path, mode: False
    )  # to root all folders are open
    with pytest.raises(ValueError, match="no permission to write it"):
        common.check_output_path("--out", tmp_path / "new")


def test_an_output_is_no_input_and_no_other_output(tmp_path):
    """Under whatever name: another spelling, a symbolic link, a hard link."""
    data = tmp_path / "train.txt"
    data.write_text("")
    (tmp_path / "symbolic").symlink_to(data)
    (tmp_path / "hard").hardlink_to(data)
    for name in ("train.txt", "x/../train.txt", "symbolic", "hard"):
        (tmp_path / "x").mkdir(exist_ok=True)
        path = tmp_path / name
        with pytest.raises(
            ValueError,
            match=f"^--out {path}: expected another file than {data}, which would be overwritten$",
        ):
            common.check_overwrites([("--out", path)], [data])

    new = tmp_path / "new"
    other = str(tmp_path / "x" / ".." / "new")
    with pytest.raises(
        ValueError,
        match=f"^--json {other}: expected another file than that of --out$",
    ):
        common.check_overwrites([("--out", new), ("--json", other)], [data])

    outputs = [("--out", new), ("--json", None), ("--details", "/dev/null")]
    common.check_overwrites(outputs, [data, tmp_path / "absent"])
    twice = [("--json", "/dev/null"), ("--details", "/dev/null")]
    common.check_overwrites(twice, [])


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_device_is_checked_and_auto_resolved(has_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    common.select_device("cpu")
    common.select_device("auto")
    if has_gpu:
        common.select_device("cuda")
    else:
        with pytest.raises(
            ValueError,
            match=r"^--device cuda: expected a CUDA device, PyTorch found none$",
        ):
            common.select_device("cuda")
    assert common.resolve_device("auto") == ("cuda" if has_gpu else "cpu")
    assert (common.resolve_device("cpu"), common.resolve_device("cuda")) == (
        "cpu",
        "cuda",
    )


def test_a_gpu_is_selected_by_its_number(monkeypatch):
    """What names no device, such as a stream, is then on that GPU too."""
    selected = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    common.select_device("cuda:1")
    common.select_device("cuda")
    assert selected == [1]
    with pytest.raises(
        ValueError,
        match=r"^--device cuda:2: expected cuda:0 to cuda:1, PyTorch found no",
    ):
        common.select_device("cuda:2")
    assert common.resolve_device("cuda:1") == "cuda:1"


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"
)
def test_the_second_gpu_becomes_the_current_one():
    before = torch.cuda.current_device()
    try:
        common.select_device("cuda:1")
        assert torch.ones(1, device="cuda").device.index == 1
    finally:
        torch.cuda.set_device(before)


def test_graphs_that_are_demanded_are_recorded_or_an_error(monkeypatch):
    for graphs in ("manual", "trees"):
        with (
            pytest.raises(
                ValueError,
                match=rf"^--cuda-graphs {graphs}: expected --device cuda, got cpu, .*auto runs the same step",
            ),
            common.graphs_allowed(graphs, "cpu"),
        ):
            raise AssertionError
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with (
        pytest.raises(
            ValueError,
            match=r"^--cuda-graphs manual: expected a CUDA graph, got none: no CUDA",
        ),
        common.graphs_allowed("manual", "auto"),
    ):
        capture(lambda state: (state, ()), torch.ones(1))
    for graphs in ("auto", "off"):
        with common.graphs_allowed(graphs, "cpu"):
            capture(lambda state: (state, ()), torch.ones(1))
            assert not are_trees_demanded()
    with common.graphs_allowed("trees", "cuda"):
        assert are_trees_demanded()


SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize(
    ("second", "error"),
    [
        (signal.SIGINT, KeyboardInterrupt),
        (signal.SIGTERM, common.Terminated),
    ],
)
def test_a_first_signal_is_deferred_and_a_second_raises(first, second, error):
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(error) as raised, common.defer_interrupt() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), first)
        assert interrupt.requested
        assert interrupt.exit_status == 128 + first
        os.kill(os.getpid(), second)
    assert type(raised.value) is error
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (signal.SIGINT, KeyboardInterrupt),
        (signal.SIGTERM, common.Terminated),
    ],
)
def test_a_signal_is_repeated_if_the_work_does_not_end(
    number, error, monkeypatch
):
    monkeypatch.setattr(common, "GRACE_SECONDS", 0.01)
    with pytest.raises(error), common.defer_interrupt():
        os.kill(os.getpid(), number)
        while True:
            time.sleep(0.01)


def test_the_handlers_of_signals_are_restored():
    before = [signal.getsignal(number) for number in SIGNALS]
    with common.raise_terminated():
        assert signal.getsignal(signal.SIGTERM) is not before[1]
        with common.defer_interrupt() as interrupt:
            assert signal.getsignal(signal.SIGINT) is not before[0]
        with pytest.raises(common.Terminated):
            os.kill(os.getpid(), signal.SIGTERM)
    assert not interrupt.requested
    assert [signal.getsignal(number) for number in SIGNALS] == before
