"""Whether a long run keeps its memory and its speed: many updates of a small learner, measured window by window.

    python experiments/checks/soak.py --out experiments/results/soak-cpu.json
    python experiments/checks/soak.py --device cuda --out experiments/results/soak-h200.json

CartPole learns with the step compiled, and captured on a GPU, and the metrics of every update are read on the host, as
`funcppo train` does. A row of the record is a window of updates:

    ms_per_update     the median of the window, on a CPU of processor time, which other work does not share
    host_bytes        resident memory of the process, without what is free
    device_bytes      allocated on the GPU; 0 on a CPU
    n_objects         objects that Python's garbage collector tracks

The first tenth of the windows warms up. Memory is flat if neither kind grows by more than 1 MiB from the end of the
warm-up to the last window; the speed does not drift if the median of the last tenth of the windows is at most 1.2
times that of the tenth after the warm-up.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

import funcppo as fp
from experiments.benchmarks.side_by_side import Row, write_record
from experiments.paths import make_parser
from experiments.provenance import describe_machine
from funcppo.logs import to_scalars
from funcppo.runtime import memory

MAX_GROWTH_BYTES = 1 << 20
MAX_SLOWDOWN = 1.2
WINDOWS = 100
KEPT_MEMORY = ("host_bytes", "device_bytes")


def main() -> None:
    """Run, judge, and write the record; exit 1 where memory grows or updates slow down."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--updates", type=int, default=100_000)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="end after these"
    )
    parser.add_argument("--envs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--out", type=Path, help="record to write")
    args = parser.parse_args()
    torch.set_num_threads(1)

    learner, state = make_learner(
        args.updates, args.envs, args.steps, args.device
    )
    rows = run_windows(learner, state, args.updates, args.device, args.seconds)
    verdict = judge(rows)
    for name, value in verdict.items():
        print(f"{name}: {value}")
    if args.out:
        record = {
            "machine": describe_machine(args.device),
            "updates": rows[-1]["update"],
            "updates_asked_for": args.updates,
            "n_envs": args.envs,
            "n_steps": args.steps,
            "strategy": learner.record.strategy,
            "replay_mode": learner.record.replay_mode,
            "verdict": verdict,
            "rows": rows,
        }
        write_record(args.out, record)
    sys.exit(0 if verdict["is_flat"] and verdict["keeps_its_speed"] else 1)


def make_learner(
    n_updates: int, n_envs: int, n_steps: int, device: str
) -> tuple[Any, Any]:
    """A compiled learner of CartPole, and its first state."""
    ppo = fp.ppo(
        env=fp.envs.cartpole(),
        network=fp.nets.mlp(4),
        n_envs=n_envs,
        n_steps=n_steps,
        n_updates=n_updates,
        n_epochs=1,
        n_minibatches=1,
    )
    state = ppo.init(fp.random.key(0, device))
    return fp.compile(ppo, state), state


def run_windows(
    learner: Any, state: Any, n_updates: int, device: str, max_seconds: float
) -> list[Row]:
    """A row for each window of updates, the last one that which ends after `max_seconds`."""
    per_window = max(1, n_updates // WINDOWS)
    rows: list[Row] = []
    clock = time.process_time if device == "cpu" else time.perf_counter
    began = time.perf_counter()
    for first in range(0, n_updates, per_window):
        if time.perf_counter() - began > max_seconds:
            break
        seconds: list[float] = []
        for _ in range(min(per_window, n_updates - first)):
            start = clock()
            state, metrics = learner.step(state)
            to_scalars(metrics)  # waits for the device
            seconds.append(clock() - start)
        rows.append(measure(first + len(seconds), seconds, device))
        print(rows[-1], flush=True)
    return rows


def measure(update: int, seconds: list[float], device: str) -> Row:
    """The row of a window that ended at an update."""
    gc.collect()
    on_gpu = device.startswith("cuda")
    return {
        "update": update,
        "ms_per_update": 1e3 * statistics.median(seconds),
        "host_bytes": memory.used_bytes("cpu"),
        "device_bytes": memory.used_bytes(device) if on_gpu else 0,
        "n_objects": len(gc.get_objects()),
    }


def judge(rows: list[Row]) -> dict[str, Any]:
    """How much memory grew after the warm-up, and how much slower the updates became."""
    tenth = max(1, len(rows) // 10)
    steady = rows[tenth:]
    growth = {name: steady[-1][name] - steady[0][name] for name in KEPT_MEMORY}

    def median_ms(part: list[Row]) -> float:
        return statistics.median(row["ms_per_update"] for row in part)

    slowdown = median_ms(steady[-tenth:]) / median_ms(steady[:tenth])
    return {
        "growth_bytes": growth,
        "slowdown": slowdown,
        "is_flat": max(growth.values()) <= MAX_GROWTH_BYTES,
        "keeps_its_speed": slowdown <= MAX_SLOWDOWN,
    }


if __name__ == "__main__":
    main()
