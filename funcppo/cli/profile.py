"""`funcppo profile`: where the time of another program goes."""

from __future__ import annotations

import gzip
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Annotated, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from tyro.conf import Positional, arg

from funcppo import cli
from funcppo.cli.common import (
    JsonObject,
    check_output_path,
    check_overwrites,
    write_json,
)
from funcppo.cli.console import make_console
from funcppo.cli.options import JsonOutput, OptionalFile, Program
from funcppo.core import atomic_io
from funcppo.core.settings import NonNegativeFloat, PositiveFloat, PositiveInt

if TYPE_CHECKING:
    from rich.console import Console
    from torch.profiler import profile

PROFILED = ("train", "evaluate", "mine", "predict", "rl")
HAS_TIMER = hasattr(signal, "setitimer")
# calls in which the host waits for a GPU
WAITING_CALLS = (
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaDeviceSynchronize",
    "aten::item",
    "cudaMemcpy",
)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Run a program under PyTorch's profiler and print where its time goes: operators, kernels, waits.

    As in `funcppo profile --after 20 train DATASET --out RUN`, which profiles five seconds of training; its own options
    stand before the name of the program: train, evaluate, mine, predict or rl. The program itself does what it always
    does.

    Exit status: that of the program; 2 bad input, or nothing was profiled.
    """

    command: Annotated[Positional[tuple[str, ...]], arg(metavar="PROGRAM...")]
    """Program to run, with its options."""
    after: Annotated[NonNegativeFloat, arg(metavar="SECONDS")] = 0.0
    """Seconds of the program before the profile begins, to leave out how it starts."""
    seconds: Annotated[PositiveFloat, arg(metavar="SECONDS")] = 5.0
    """Seconds to profile: an operator takes some hundred bytes of memory each time that it runs."""
    top: PositiveInt = 15
    """Number of operators and kernels in the table, those with the most time of their own."""
    trace: OptionalFile = None
    """Write all events to FILE for chrome://tracing or Perfetto, compressed if its name ends in .gz. Default: no
    file."""
    json: JsonOutput = None
    """Write the profile as JSON to FILE; - writes it to standard output, after what the program prints. Default: no
    JSON."""

    def run(self) -> int:
        """Run the program and print its profile on standard error.

        Returns:
          The exit status.
        """
        program = _parse_command(self.command)
        if program is None:
            return 0
        if self.trace is not None:
            check_output_path("--trace", Path(self.trace))
            check_overwrites(
                [("--json", self.json), ("--trace", self.trace)], []
            )
        import torch

        from funcppo.runtime.monitor import Monitor

        # All activities that there are: those of the CPU, and of a GPU if one is found.
        profile = torch.profiler.profile(acc_events=True)
        start = time.perf_counter()
        window = _Window(profile, self.seconds)
        with Monitor() as monitor, window.opened_after(self.after):
            status = program.run()
        seconds = time.perf_counter() - start
        if profile.profiler is None:
            raise ValueError(
                f"--after {self.after:g}: expected less than the {seconds:.0f} s of the program"
            )

        report = _describe(profile, self.top) | monitor.report()
        report["launch_blocking"] = _is_launch_blocking(program)
        if not report["rows"]:
            raise ValueError(
                f"--seconds {self.seconds:g}: expected a window with an operator, got none from --after {self.after:g} "
                f"on in the {seconds:.0f} s of the program"
            )
        write_json(self.json, report)
        _print_report(make_console(use_stderr=True), report)
        if self.trace is not None:
            _write_trace(profile, Path(self.trace))
        return status


def _parse_command(command: Sequence[str]) -> Program | None:
    """The program of a command line; None after --help.

    Raises:
      ValueError: it cannot be profiled.
    """
    if not command or command[0] not in PROFILED:
        got = command[0] if command else "none"
        raise ValueError(
            f"PROGRAM: expected one of {', '.join(PROFILED)}, got {got}"
        )
    return cli.parse_program(command[0], command[1:])


def _is_launch_blocking(program: Program) -> bool:
    """Whether CUDA lets the host wait for each kernel: by its variable, or by --debug, which sets it."""
    value = os.environ.get("CUDA_LAUNCH_BLOCKING", "0")
    return value not in ("", "0") or getattr(program, "debug", False)


class _Window:
    """Profiles so many seconds of a program.

    A profile begins and ends in the thread that works, so a timer of the system interrupts that. Windows has no such
    timer: there all of the program is profiled.
    """

    def __init__(self, profile: profile, seconds: float) -> None:
        """Begin nothing yet."""
        self._profile = profile
        self._seconds = seconds
        self._is_running = False

    @contextmanager
    def opened_after(self, seconds: float) -> Iterator[None]:
        """Profile the block from so many seconds on."""
        if HAS_TIMER:
            signal.signal(signal.SIGALRM, self._handle_alarm)
        if HAS_TIMER and seconds:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        else:
            self._start()
        try:
            yield
        finally:
            if HAS_TIMER:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
            if self._is_running:
                self._stop()

    def _handle_alarm(self, number: int, frame: FrameType | None) -> None:
        """Begin, or end where it has begun."""
        if self._is_running:
            self._stop()
        else:
            self._start()

    def _start(self) -> None:
        self._is_running = True
        self._profile.start()
        if HAS_TIMER:
            signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def _stop(self) -> None:
        self._is_running = False
        self._profile.stop()


def _describe(profile: profile, n_rows: int) -> JsonObject:
    """The operators and kernels with the most time of their own, and the waits for the device."""
    averages = profile.key_averages()
    on_device = sum(event.self_device_time_total for event in averages)
    n_kernels = sum(event.count for event in averages if is_kernel(event))
    # Without a device `aten::item` waits for none.
    waits = [
        event
        for event in averages
        if event.key in WAITING_CALLS and n_kernels > 0
    ]
    return {
        "cpu_ms": sum(event.self_cpu_time_total for event in averages) / 1e3,
        "device_ms": on_device / 1e3,
        "n_kernels": n_kernels,
        "rows": [
            _row(event)
            for event in sorted(averages, key=_own_time, reverse=True)[:n_rows]
        ],
        "waits": [_row(event) for event in waits],
    }


def _write_trace(profile: profile, path: Path) -> None:
    """Write all events to a file, compressed if its name ends in .gz.

    PyTorch logs that it cannot write a file and raises nothing, so that it writes to a temporary one, which is checked.

    Raises:
      OSError: a file cannot be written, or PyTorch wrote a part of its one.
    """
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(whole))
        if not _ends_as_json(whole):
            raise OSError(
                f"--trace {path}: expected all events in a file in {tempfile.gettempdir()}, got some; is it full?"
            )

        def write(file: IO[bytes]) -> None:
            with open(whole, "rb") as events:
                if path.suffix != ".gz":
                    shutil.copyfileobj(events, file)
                    return
                with gzip.GzipFile(fileobj=file, mode="wb") as compressed:
                    shutil.copyfileobj(events, compressed)

        atomic_io.write_atomically(path, write)


def _ends_as_json(path: Path) -> bool:
    """Whether a file is there and ends as a JSON object does."""
    if not path.exists() or not path.stat().st_size:
        return False
    with open(path, "rb") as file:
        file.seek(-min(16, path.stat().st_size), os.SEEK_END)
        return file.read().rstrip().endswith(b"}")


def _own_time(event: Any) -> float:
    """Time of an operator or kernel without what it calls, in microseconds."""
    return event.self_cpu_time_total + event.self_device_time_total


def is_kernel(event: Any) -> bool:
    """Whether an event ran on the device."""
    return event.self_device_time_total > 0 and event.self_cpu_time_total == 0


def _row(event: Any) -> JsonObject:
    """The calls and the times of an operator or kernel."""
    return {
        "name": event.key,
        "calls": event.count,
        "cpu_ms": event.self_cpu_time_total / 1e3,
        "device_ms": event.self_device_time_total / 1e3,
    }


def _print_report(console: Console, report: JsonObject) -> None:
    """Print the table and the totals."""
    table = Table(box=SIMPLE_HEAD)
    for name in ("operator or kernel", "calls", "CPU ms", "device ms"):
        table.add_column(name, justify="left" if "kernel" in name else "right")
    for row in report["rows"]:
        table.add_row(
            row["name"][:70],
            f"{row['calls']:,}",
            f"{row['cpu_ms']:,.1f}",
            f"{row['device_ms']:,.1f}",
        )
    console.print(table)

    waits = [f"{row['name']} {row['calls']:,}" for row in report["waits"]]
    console.print(
        f"{report['cpu_ms']:,.0f} ms of operators on the CPU, {report['device_ms']:,.0f} ms of "
        f"{report['n_kernels']:,} kernels on the device; waits for it: {', '.join(waits) or 'none'}"
    )
    if report["launch_blocking"] and report["n_kernels"]:
        console.print(
            "under CUDA_LAUNCH_BLOCKING: each launch waits for its kernel, whose time is in that of the CPU too"
        )
    console.print(
        f"in the whole program: {report['compiles']} compilations, {report['recompiles']} of them again; "
        f"{report['cudagraph_recordings']} CUDA graphs recorded"
    )
