"""Cells of a benchmark, each in a process of its own: made ready side by side, timed one at a time.

A cell's process calls `cell(ready, timed)`: `ready()` compiles and warms up, `timed()` measures and returns a row. All
processes make ready at once, since compiling needs no quiet; none is timed before the last is ready.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

START = time.perf_counter()  # before PyTorch is imported

import torch  # noqa: E402

from funcppo.runtime import compile_cache

MARK = "cell: "


def run(script: str, cells: list[list[str]], width: int, device: str, out: Path | None, limit: float = 500.0) -> None:
    """Write the row of each cell, in order and as it comes; a cell that fails gives a row with its error.

    Args:
      cells: what each process gets after `--cell`.
      width: how many processes at once.
      out: the record; None prints alone.
    """
    from funcppo.atomic_io import write_atomically

    rows: list[dict[str, Any]] = []
    told = machine(device)
    for i in range(0, len(cells), width):
        started = [(cell, _start(script, cell)) for cell in cells[i : i + width]]
        ready = [_read(process) for _, process in started]
        for (cell, process), hello in zip(started, ready):
            row = _ask(process, limit) if "ready" in hello else hello
            rows.append({"cell": " ".join(cell)} | row)
            print(json.dumps(rows[-1]), flush=True)
            if out:
                text = json.dumps({"machine": told, "rows": rows}, indent=1) + "\n"
                write_atomically(out, lambda part, text=text: part.write(text.encode()))


def cell(ready: Callable[[], dict[str, Any]], timed: Callable[[], dict[str, Any]]) -> None:
    """Run one cell, in its own process."""
    try:
        row = ready()
        print(MARK + json.dumps({"ready": True}), flush=True)
        sys.stdin.readline()
        row |= timed()
    except Exception as error:
        row = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
    print(MARK + json.dumps(row), flush=True)


def since_start() -> float:
    """Seconds that this process has taken so far."""
    return time.perf_counter() - START


def compiles() -> dict[str, dict[str, float | bool]]:
    """What each function that was compiled so far, or found compiled on disk, took."""
    return {made.name: {"seconds": made.seconds, "found": made.cache_hit} for made in compile_cache.compile_events}


def machine(device: str) -> dict[str, Any]:
    """Where the numbers come from."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{_cpu()}, {os.cpu_count()} cores"
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    commit = os.environ.get("FUNCPPO_COMMIT") or git  # FUNCPPO_COMMIT names it where there is no checkout
    return {"device": name, "torch": torch.__version__, "python": platform.python_version(), "commit": commit}


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _start(script: str, arguments: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, script, "--cell", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _read(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    return {"error": f"the process ended with status {process.wait()}"}


def _ask(process: subprocess.Popen[str], limit: float) -> dict[str, Any]:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    row = _read(process)
    process.wait(limit)
    return row
