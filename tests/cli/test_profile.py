"""`profile`: the operators of a program within a window of time, and the program as it is without."""

from __future__ import annotations

import gzip
import json
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from funcppo.cli import mine, profile
from tests.cli.runner import funcppo

MINE = ("mine", "countries_s1", "--max-length", "2", "--out")


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Stands for `mine`: one operator, a signal of the system's timer, another operator."""

    json: str | None = None

    def run(self) -> int:
        torch.ones(3).cos()[0].item()
        # the next signal of the timer, as it would come
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 0 < left <= 600
        signal.getsignal(signal.SIGALRM)(signal.SIGALRM, None)
        torch.ones(3).sin()[0].item()
        return 7


@pytest.fixture
def profiled(monkeypatch, tmp_path):
    """A function from a command line to the exit status and the JSON of `profile`."""

    def run(*words) -> tuple[int, dict]:
        file = tmp_path / "profile.json"
        status = funcppo(monkeypatch, "profile", "--json", file, *words)
        return status, json.loads(file.read_text())

    return run


def names(report) -> set[str]:
    return {row["name"] for row in report["rows"]}


@pytest.mark.parametrize(
    "options, expected, missing",
    [
        (("--seconds", "600"), "aten::cos", "aten::sin"),
        (("--after", "600"), "aten::sin", "aten::cos"),
    ],
)
def test_a_profile_has_what_runs_within_its_window(
    profiled, monkeypatch, options, expected, missing
):
    monkeypatch.setattr(mine, "Mine", Stages)
    status, report = profiled("--top", "99", *options, "mine")
    assert status == 7
    assert expected in names(report) and missing not in names(report)
    (row,) = (row for row in report["rows"] if row["name"] == expected)
    assert row["calls"] == 1 and row["cpu_ms"] > 0
    assert report["n_kernels"] == 0 and report["device_ms"] == 0
    assert "aten::item" in names(report) and report["waits"] == []


@dataclass(frozen=True, kw_only=True)
class SlowStart:
    """Stands for `mine`: a signal of the system's timer, and an operator."""

    json: str | None = None

    def run(self) -> int:
        signal.getsignal(signal.SIGALRM)(signal.SIGALRM, None)
        torch.ones(3).sin()
        return 0


def test_a_window_that_ends_before_the_first_operator_is_an_error(
    monkeypatch, capsys
):
    monkeypatch.setattr(mine, "Mine", SlowStart)
    words = ("profile", "--seconds", "600", "mine")
    assert funcppo(monkeypatch, *words) == 2
    *_, error = capsys.readouterr().err.splitlines()
    assert "--seconds 600: expected a window with an operator" in error


def test_a_program_does_under_a_profile_what_it_does_without(
    profiled, monkeypatch, tmp_path
):
    rules, plain = tmp_path / "rules.tsv", tmp_path / "plain.tsv"
    trace = tmp_path / "trace.json.gz"
    words = ("--top", "2", "--trace", trace, *MINE, rules)
    status, report = profiled(*words)
    assert status == 0 and len(report["rows"]) == 2
    assert funcppo(monkeypatch, *MINE, plain) == 0
    assert rules.read_bytes() == plain.read_bytes()
    with gzip.open(trace) as file:
        assert json.load(file)["traceEvents"]
    times = [row["cpu_ms"] + row["device_ms"] for row in report["rows"]]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "PROGRAM: expected one of train, evaluate, mine"),
        (("doctor",), "PROGRAM: expected one of train, evaluate, mine"),
        ((*MINE, "x", "--no-such"), "--no-such"),
        (("--after", "600", *MINE, "{tmp}/x.tsv"), "--after 600: expected"),
        (
            ("--trace", "{tmp}/none/t.json", *MINE, "{tmp}/x.tsv"),
            "--trace {tmp}/none/t.json: expected a file in a folder that exists",
        ),
        (
            ("--json", "{tmp}/x", "--trace", "{tmp}/x", *MINE, "{tmp}/y"),
            "--trace {tmp}/x: expected another file than that of --json",
        ),
    ],
)
def test_what_cannot_be_profiled_is_one_line(
    monkeypatch, capsys, tmp_path, words, message
):
    words = [word.format(tmp=tmp_path) for word in words]
    assert funcppo(monkeypatch, "profile", *words) == 2
    *_, error = capsys.readouterr().err.splitlines()
    assert error.startswith("funcppo: ")
    assert message.format(tmp=tmp_path) in error


@dataclass(frozen=True, kw_only=True)
class Debugged(Stages):
    """The same with the switch that sets the variable."""

    debug: bool = True


@pytest.mark.parametrize(
    ("value", "program", "is_blocking"),
    [
        (None, Stages, False),
        ("0", Stages, False),
        ("1", Stages, True),
        (None, Debugged, True),
    ],
)
def test_times_under_launch_blocking_are_told_as_such(
    profiled, monkeypatch, capsys, value, program, is_blocking
):
    """An operator stands for the kernel of a GPU; without kernels nothing is waited for."""
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", value)
    monkeypatch.setattr(mine, "Mine", program)
    for kernel in ("aten::cos", "none"):
        is_kernel = partial(is_named, kernel)
        monkeypatch.setattr(profile, "is_kernel", is_kernel)
        _, report = profiled("--seconds", "600", "mine")
        assert report["launch_blocking"] == is_blocking
        line = "each launch waits for its kernel"
        is_told = is_blocking and kernel == "aten::cos"
        assert (line in capsys.readouterr().err) == is_told


def is_named(name, event) -> bool:
    return event.key == name


def write_a_part(path: str) -> None:
    """What PyTorch leaves on a full disk, having logged an error."""
    Path(path).write_text('{"traceEvents": [{"ph": "X", "na')


@pytest.mark.parametrize(
    "export, file, message",
    [
        (write_a_part, "t.json", "--trace {file}: expected all events"),
        (lambda path: None, "t.json.gz", "--trace {file}: expected all events"),
        (None, "/dev/full", "{file}: No space left on device"),
    ],
    ids=["part", "nothing", "full"],
)
def test_a_trace_that_cannot_be_written_leaves_the_table_and_the_json(
    profiled, monkeypatch, capsys, tmp_path, export, file, message
):
    monkeypatch.setattr(mine, "Mine", Stages)
    if export is not None:
        monkeypatch.setattr(
            torch.profiler.profile,
            "export_chrome_trace",
            lambda profile, path: export(path),
        )
    file = tmp_path / file
    status, report = profiled("--seconds", "600", "--trace", file, "mine")
    assert status == 2 and "aten::cos" in names(report)
    *table, error = capsys.readouterr().err.splitlines()
    assert message.format(file=file) in error
    assert any("aten::cos" in line for line in table)
    assert file == Path("/dev/full") or not file.exists()
