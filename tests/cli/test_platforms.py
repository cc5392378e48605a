"""The programs on macOS and Windows: without what Linux alone has they do the same, and say what they cannot do."""

from __future__ import annotations

import io
import json
import mmap
import os
import signal
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from funcppo import cli
from funcppo.kg.config import RESULTS_FILE
from funcppo.runtime import memory
from tests.cli.runner import TRAINED, funcppo

LINUX_FILES = (
    "_PROCESS_STATUS",
    "_RESET_PEAK",
    "_MACHINE_MEMORY",
    "_PROCESS_GROUPS",
    "_GROUPS",
)


@pytest.fixture(params=["macos", "windows"])
def platform(request, monkeypatch, tmp_path):
    """No /proc, no huge pages, no affinity; on Windows no `resource`, timer and fork either."""
    for name in LINUX_FILES:
        monkeypatch.setattr(memory, name, tmp_path / "absent")
    held = SimpleNamespace(rss=1 << 20, peak_wset=1 << 21)
    machine = SimpleNamespace(total=16 << 30, available=8 << 30)
    psutil: Any = ModuleType("psutil")
    psutil.Process = lambda: SimpleNamespace(memory_info=lambda: held)
    psutil.virtual_memory = lambda: machine
    monkeypatch.setitem(sys.modules, "psutil", psutil)
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    if request.param == "windows":
        monkeypatch.setitem(sys.modules, "resource", None)
        system = SimpleNamespace(platform="win32")
        monkeypatch.setattr(memory, "sys", system)
        for module, name in ((signal, "setitimer"), (os, "fork")):
            monkeypatch.delattr(module, name, raising=False)
    return request.param


def test_a_run_is_trained_resumed_and_ranked(platform, monkeypatch, tmp_path):
    run, details = tmp_path / "run", tmp_path / "details.jsonl"
    words = ("countries_s1", "--out", run, *TRAINED, "--memory", "6GB")
    assert funcppo(monkeypatch, "train", *words) == 0
    results = json.loads((run / RESULTS_FILE).read_text())
    assert any("only Linux ends" in note for note in results["notes"])
    assert all(results["phase_peak_bytes"].values())

    words = ("countries_s1", "--out", run, "--resume", "--steps", "160")
    assert funcppo(monkeypatch, "train", *words) == 0
    words = ("evaluate", run, "--details", details, "--max-queries", "2")
    assert funcppo(monkeypatch, *words) == 0
    assert details.read_bytes().count(b"\n") >= 2


def test_on_windows_output_is_utf_8(monkeypatch, capsys):
    """Its code page 1252 lacks the box of a table and most names."""
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(cli, "_run", lambda words: print("Łódź ├─") or 0)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    assert written.getvalue().decode() == f"Łódź ├─{os.linesep}"
