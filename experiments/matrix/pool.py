"""Processes, one for each cell: examined side by side, then timed in turns when nothing else runs.

The cells of a wave and the baseline run one block of steps each, round after round, so that whatever slows the machine
meets all of them. A cell's speed-up is the median over the rounds of its ratio to the baseline's block of the round.
"""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from experiments.paths import ROOT

MARK = "@cell "  # begins a line that is meant for the parent
# seconds of a block; more where a cell may be examined for longer
TIMING_LIMIT = 60.0
BASELINE = "0/eager, fused Adam/none/default"
SCRIPT = ROOT / "experiments" / "full_step_matrix.py"
Result = dict[str, Any]


class Worker:
    """A process that examines one cell, waits, and times it."""

    def __init__(self, cell_id: str, device: str, limit: float) -> None:
        self.cell_id, self.device, self.limit = cell_id, device, limit
        self.folder = tempfile.mkdtemp(prefix="matrix-")
        self.process: subprocess.Popen[str] | None = None
        self.timed_out = False

    def start(self) -> Result:
        """What it found; a status of its own where the process ended or hung instead."""
        env = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": self.folder,
            "TRITON_CACHE_DIR": f"{self.folder}/triton",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": self.folder,
        }
        began = time.perf_counter()
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(SCRIPT),
                "--worker",
                self.cell_id,
                "--device",
                self.device,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(f"{self.folder}/stderr", "w"),  # noqa: SIM115
            text=True,
            env=env,
            start_new_session=True,
        )
        result = self._read(self.limit)
        return {
            **(result or self._ended()),
            "seconds": round(time.perf_counter() - began, 1),
        }

    def time_block(self) -> Result:
        """Microseconds a step of one block; nothing where that failed."""
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return {}
        return self._read(max(TIMING_LIMIT, self.limit)) or {}

    def alive(self) -> bool:
        """Whether it waits."""
        return self.process is not None and self.process.poll() is None

    def close(self) -> None:
        """End the process and remove its folder."""
        if self.alive():
            self._kill()
        if self.process is not None:
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self, limit: float) -> Result | None:
        assert self.process is not None and self.process.stdout is not None
        timer = threading.Timer(limit, self._time_out)
        timer.start()
        line = next(
            (line for line in self.process.stdout if line.startswith(MARK)),
            None,
        )
        timer.cancel()
        return json.loads(line.removeprefix(MARK)) if line else None

    def _time_out(self) -> None:
        self.timed_out = True
        self._kill()

    def _kill(self) -> None:
        """Its compilers too: it leads a group of its own."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)

    def _ended(self) -> Result:
        assert self.process is not None
        code = self.process.wait()
        if self.timed_out:
            return {"parity": {}, "status": "timeout", "limit_s": self.limit}
        lines = Path(f"{self.folder}/stderr").read_text().strip().splitlines()
        error = {
            "type": f"exit {code}",
            "message": (lines or [""])[-1][:200],
            "cause": "",
            "dtype": "",
        }
        return {"parity": {}, "status": "crash", "error": error}


class Plan(NamedTuple):
    """How cells are run."""

    device: str
    limit: float  # seconds that examining one cell may take
    jobs: int  # cells examined at a time
    # finished processes that wait until all is quiet, to be timed, at most
    wave: int
    timed: Callable[[str], bool]  # whether a cell is timed
    rounds: int = 11  # blocks of each cell


def run(
    cell_ids: list[str], plan: Plan, done: Callable[[str, Result], None]
) -> None:
    """Call `done` with the result of every cell: first those that are not timed, then wave by wave."""
    timed = [name for name in cell_ids if plan.timed(name)]
    waves = [[name for name in cell_ids if not plan.timed(name)]]
    waves += [
        timed[start : start + plan.wave]
        for start in range(0, len(timed), plan.wave)
    ]
    for wave in waves:
        _wave(
            [Worker(name, plan.device, plan.limit) for name in wave], plan, done
        )


def _wave(
    workers: list[Worker], plan: Plan, done: Callable[[str, Result], None]
) -> None:
    slots, report = threading.Semaphore(plan.jobs), threading.Lock()
    waiting: list[tuple[Worker, Result]] = []

    def examine(worker: Worker) -> None:
        with slots:
            result = worker.start()
        if plan.timed(worker.cell_id) and worker.alive():
            waiting.append((worker, result))
            return
        worker.close()
        with report:
            done(worker.cell_id, result)

    threads = [
        threading.Thread(target=examine, args=(worker,)) for worker in workers
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if waiting:
            time_in_turns(waiting, plan, done)
    finally:
        for worker in workers:
            worker.close()


def time_in_turns(
    waiting: list[tuple[Worker, Result]],
    plan: Plan,
    done: Callable[[str, Result], None],
) -> None:
    """Report cells, whose workers wait, with their times."""
    baseline = Worker(BASELINE, plan.device, plan.limit)
    try:
        baseline.start()
        workers = [baseline, *(worker for worker, _ in waiting)]
        rounds = [
            [worker.time_block() for worker in workers]
            for _ in range(plan.rounds)
        ]
    finally:
        baseline.close()
    first, *others = zip(*rounds)
    for (worker, result), blocks in zip(waiting, others):
        done(worker.cell_id, {**result, **summarize(list(blocks), list(first))})


def summarize(blocks: list[Result], baseline: list[Result]) -> Result:
    """The median time of a cell and its speed-up, each with the quartiles; nothing if a block is missing."""
    if not all(blocks):
        return {}
    times = [block["us"] for block in blocks]
    low, middle, high = statistics.quantiles(times, n=4)
    result: Result = {
        "step_us": round(middle, 1),
        "step_us_quartiles": [round(low, 1), round(high, 1)],
    }
    if all(baseline):
        ratios = [b["us"] / time for b, time in zip(baseline, times)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        result["speedup"] = round(middle, 3)
        result["speedup_quartiles"] = [round(low, 3), round(high, 3)]
    if "peak_bytes" in blocks[-1]:
        result["peak_bytes"] = blocks[-1]["peak_bytes"]
    return result
