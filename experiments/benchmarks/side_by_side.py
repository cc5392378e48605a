"""Run the cells of a benchmark, each in a process of its own: prepared side by side, timed one at a time.

The process of a cell calls `run_cell(prepare, measure)`: `prepare()` compiles and warms up, `measure()` takes the
times. All processes prepare at once, because compiling needs no quiet machine; none measures before the last is ready.
With `run_growing_cell` a cell that takes long is in the record as far as it has come.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.provenance import describe_machine
from funcppo.core.files import write_atomically
from funcppo.runtime import cache

Row = dict[str, Any]

MESSAGE_PREFIX = "cell: "  # begins a line that is meant for the parent
# environment variable: the system-wide clock when the process was started
STARTED_AT = "BENCHMARK_CELL_STARTED_AT"
IS_COMPLETE = "is_complete"  # false in a row that is not measured to its end
IMPORTED_AT = time.perf_counter()


def run_cells(
    script: str,
    cells: Mapping[str, list[str]],
    n_processes: int,
    device: str,
    out: Path | None,
    exit_limit_seconds: float = 500.0,
) -> None:
    """Print the row of each cell, and write all rows so far after each; a cell that fails gives a row with its error.

    Args:
      script: the program to run, which takes `--cell ARGUMENT ...`.
      cells: the arguments of each cell, by its name in the record.
      n_processes: how many prepare at once.
      out: the record; None prints alone.
    """
    rows: list[Row] = []
    machine = describe_machine(device)
    names = list(cells)
    for first in range(0, len(names), n_processes):
        group = names[first : first + n_processes]
        processes = {name: _start(script, cells[name]) for name in group}
        messages = {
            name: read_message(process) for name, process in processes.items()
        }

        for name in group:
            row = messages[name]
            if "ready" in row:
                for row in _measure(processes[name], exit_limit_seconds):
                    if out:
                        unfinished = {"cell": name} | row
                        record = {"rows": [*rows, unfinished]}
                        write_record(out, {"machine": machine} | record)
            rows.append({"cell": name} | row)
            print(json.dumps(rows[-1]), flush=True)
            if out:
                write_record(out, {"machine": machine, "rows": rows})


def write_record(file: Path, record: Mapping[str, Any]) -> None:
    """Put a record in place of a file, whole or not at all."""
    text = json.dumps(record, indent=1) + "\n"
    write_atomically(file, lambda part: part.write(text.encode()))


def run_cell(prepare: Callable[[], Row], measure: Callable[[], Row]) -> None:
    """Run one cell, in its own process: prepare, wait for the parent, measure, send the row."""
    run_growing_cell(prepare, lambda: [measure()])


def run_growing_cell(
    prepare: Callable[[], Row], measure: Callable[[], Iterable[Row]]
) -> None:
    """Run one cell whose row is sent, and recorded with `is_complete` false, each time that `measure` yields.

    What it yields is put into the row, in place of what has the same name. A failure leaves what was measured before.
    """
    row: Row = {}
    try:
        row |= prepare()
        send_message({"ready": True})
        sys.stdin.readline()
        for measured in measure():
            row |= measured
            send_message({IS_COMPLETE: False} | row)
    except Exception as error:
        lines = str(error).splitlines() or [""]
        row["error"] = f"{type(error).__name__}: {lines[0]}"
    send_message(row)


def seconds_since_start() -> float:
    """Seconds since this process was started."""
    return time.perf_counter() - float(os.environ.get(STARTED_AT, IMPORTED_AT))


def compile_seconds() -> dict[str, dict[str, float | bool]]:
    """Of each function compiled so far: its seconds, and whether it was found compiled on disk."""
    events = cache.compile_events
    return {
        event.name: {"seconds": event.seconds, "found": event.cache_hit}
        for event in events
    }


def _start(script: str, arguments: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, script, "--cell", *arguments]
    env = os.environ | {STARTED_AT: str(time.perf_counter())}
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )


def send_message(message: Row) -> None:
    """Print what the parent of this process reads by `read_message`."""
    print(MESSAGE_PREFIX + json.dumps(message), flush=True)


def read_message(process: subprocess.Popen[str]) -> Row:
    """Return the next message of a process, or an error if it has ended."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(MESSAGE_PREFIX):
            return json.loads(line.removeprefix(MESSAGE_PREFIX))
    return {"error": f"the process ended with status {process.wait()}"}


def _measure(
    process: subprocess.Popen[str], limit_seconds: float
) -> Iterator[Row]:
    """The row of a cell, as far as it has come; the last one has all of it, or an error."""
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    row: Row = {}
    message = read_message(process)
    while IS_COMPLETE in message:
        row = message
        yield row
        message = read_message(process)
    process.wait(limit_seconds)
    yield row | message if "error" in message else message
