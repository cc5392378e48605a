"""Where the time of mining goes in 1 and more processes on CPUs: what they share, what rank 0 does alone, what waits.

    python experiments/benchmarks/mining_profile.py --data DATASET [--processes 1 2] [--max-rows N] [--out FILE]

Each process has one thread, and all of a run share one core: so the seconds of a CPU tell how much work there is in
each process, and not how two cores slow each other down. A row is one process of one run. Its phases are disjoint:

- `tasks`: tasks of the search and of counting, which the processes share
- `receive`: to send and to read what another process found
- `votes`: of rank 0 alone: the votes of facts for rules that a task found
- `alone`: of rank 0, all else of mining: plans of the stages, PCA confidences, the choice of rules
- `index`: of the facts, which each process builds
- `wait`: nothing to do until another process is done
- `outside`: start, reading, writing

Of each phase there are the seconds of a CPU, which other programs do not lengthen much, and those of the clock; a wait
takes the second only. From the seconds of a CPU follow two speed-ups of mining on cores of their own: `bound`, if the
tasks of one process were cut equally at no cost, and `expected`, by the tasks as they were: an equal part of those of
all processes, and the other phases of rank 0. `n_tasks` and `result_bytes` are of the tasks that a process did.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import Row, write_record
from experiments.paths import ROOT
from experiments.provenance import describe_machine


class Clock:
    """Seconds of disjoint phases; a phase within another stops that one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.cpu_seconds: dict[str, float] = defaultdict(float)
        self._phases = ["outside"]
        self._times = (time.perf_counter(), time.process_time())

    def read(self) -> None:
        """Add the time since the last call to the phase of now."""
        times = (time.perf_counter(), time.process_time())
        phase = self._phases[-1]
        self.seconds[phase] += times[0] - self._times[0]
        self.cpu_seconds[phase] += times[1] - self._times[1]
        self._times = times

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what runs in the block as a phase."""
        self.read()
        self._phases.append(name)
        try:
            yield
        finally:
            self.read()
            self._phases.pop()

    def wrap(self, name: str, function: Callable[..., Any]) -> Any:
        """The function, whose calls are a phase."""

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return timed


def main() -> int:
    """The exit status: 0, or 1 when files differ or a run fails."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", required=True, help="data set")
    parser.add_argument("--processes", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--max-rows", type=int, default=500_000_000)
    parser.add_argument("--out", type=Path, help="record to write")
    parser.add_argument("--profile", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.profile:
        return profile(args)

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    runs = [run(args, n) for n in args.processes]
    first = runs[0]
    tasks, others = task_seconds(first)
    for done in runs:
        n = done["processes"]
        own_tasks, own_others = task_seconds(done)
        done["is_equal"] = done["sha256"] == first["sha256"]
        done["bound"] = (tasks + others) / (tasks / n + others)
        done["expected"] = (tasks + others) / (own_tasks / n + own_others)
        print(json.dumps(done))
    if args.out:
        record = {
            "machine": describe_machine("cpu"),
            "data": Path(args.data).name,
            "max_rows": args.max_rows,
            "runs": runs,
        }
        write_record(args.out, record)
    return int(not all(done["is_equal"] for done in runs))


def task_seconds(run: Row) -> tuple[float, float]:
    """The seconds of a CPU of the tasks of all processes, and of the other phases of mining of rank 0."""
    tasks = sum(row["cpu_seconds"]["tasks"] for row in run["rows"])
    main_seconds = run["rows"][0]["cpu_seconds"]
    others = sum(
        seconds
        for name, seconds in main_seconds.items()
        if name not in ("tasks", "outside")
    )
    return tasks, others


def run(args: argparse.Namespace, n: int) -> Row:
    """Mine in some processes of torchrun; the rows of the processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--standalone", "--nproc-per-node", str(n), __file__]
        command += ["--data", args.data, "--max-rows", str(args.max_rows)]
        command += ["--profile", str(folder)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, cwd=ROOT, env=environment)
        content = (folder / "rules.tsv").read_bytes()
        rows = [
            json.loads((folder / f"{rank}.json").read_text())
            for rank in range(n)
        ]
    digest = hashlib.sha256(content).hexdigest()
    return {"processes": n, "sha256": digest, "rows": rows}


def profile(args: argparse.Namespace) -> int:
    """Mine as a process of torchrun, and write its seconds; the exit status."""
    clock = Clock()
    from funcppo import cli
    from funcppo.kg.mining import paths, voting
    from funcppo.kg.run import rule_files
    from funcppo.runtime import distributed, task_pool

    processes = distributed.Processes
    iter_results = processes.iter_results
    done = {"n_tasks": 0, "result_bytes": 0}

    def iter_timed(
        self: Any, name: str, n_tasks: int, work: Any, **kwargs: Any
    ) -> Iterator[bytes]:
        timed = clock.wrap("tasks", work)

        def do_task(task: int) -> bytes:
            result = timed(task)
            done["n_tasks"] += 1
            done["result_bytes"] += len(result)
            return result

        return iter_results(self, name, n_tasks, do_task, **kwargs)

    processes.iter_results = iter_timed
    processes._wait = clock.wrap("wait", processes._wait)
    for name in ("_put", "_get"):
        timed = clock.wrap("receive", getattr(processes, name))
        setattr(processes, name, timed)
    for name in ("encode", "decode"):
        timed = clock.wrap("receive", getattr(task_pool, name))
        setattr(task_pool, name, timed)
    for name in ("add_votes", "compact"):
        timed = clock.wrap("votes", getattr(voting, name))
        setattr(voting, name, timed)
    paths.build_edge_index = clock.wrap("index", paths.build_edge_index)
    rule_files.mine_dataset = clock.wrap("alone", rule_files.mine_dataset)

    out = args.profile / "rules.tsv"
    words = ["mine", args.data, "--max-rows", str(args.max_rows)]
    words += ["--seconds", "100000", "--out", str(out)]
    sys.argv = ["funcppo", *words]
    try:
        cli.main()
    finally:
        clock.read()
        rank = os.environ["RANK"]
        row = {
            "rank": int(rank),
            **done,
            "seconds": dict(clock.seconds),
            "cpu_seconds": dict(clock.cpu_seconds),
        }
        (args.profile / f"{rank}.json").write_text(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
