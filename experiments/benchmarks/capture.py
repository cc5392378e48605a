"""What it costs to record CUDA graphs and to replay them.

    python experiments/benchmarks/capture.py --out experiments/results/capture-h200.json

First a CartPole iteration (4 x 128), recorded again and again in one process: from an empty memory pool, from the pool
used before, from a new pool; a copy of 1 MB staged from the host; and a step that cannot be recorded. Each row has
capture_ms, replay_ms, stage_copy_ms and fallback_reason.

Then an iteration as one graph and as loop-body graphs, compiled (CartPole) and not (CartPole; the prover on Countries
S3, 64 x 64, 128 loop turns), each from a new pool, with ready_ms (warm-up, recording and the first iteration, kernels
loaded before) and memory_mb (of the device, held by what was recorded and by its buffers).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

# the folder that holds `experiments`
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.benchmarks.cartpole import CartPoleCase
from experiments.benchmarks.prover import ProverCase
from experiments.benchmarks.side_by_side import Row, write_record
from experiments.provenance import describe_machine
from funcppo import train_step
from funcppo.envs.base import NoWorld
from funcppo.runtime.capture import CapturedStep, capture, clear_graph_pools
from funcppo.runtime.graphed import capture_loop_bodies
from funcppo.runtime.host_transfer import StagingBuffers

STAGED_VALUES = 1 << 18  # 1 MB of float32


def main() -> None:
    """Run the rows and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--out", type=Path, help="record to write")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()

    case = CartPoleCase(
        "4x128",
        "captured" if args.device == "cuda" else "eager",
        args.device,
        "highest",
    )
    parts, rows = measure_captures(case, args.device, args.repeats)

    compare = partial(compare_graphs, device=args.device, repeats=args.repeats)
    step = partial(train_step.train_step, case.cfg, NoWorld())
    rows += compare("CartPole", step, parts, case.state)
    rows += compare("CartPole, eager", step, train_step.EAGER_PARTS, case.state)
    prover = ProverCase("s3", "eager", args.device, "packed", "")
    step = partial(train_step.train_step, prover.cfg, prover.world)
    rows += compare("prover, eager", step, train_step.EAGER_PARTS, prover.state)

    for row in rows:
        print(json.dumps(row))
    if args.out:
        write_record(
            args.out, {"machine": describe_machine(args.device), "rows": rows}
        )


def measure_captures(
    case: CartPoleCase, device: str, repeats: int
) -> tuple[train_step.Parts, list[Row]]:
    """The compiled parts of a case, and the rows of its captures one after another."""
    start = time.perf_counter()
    parts = case.compile_parts()
    step = case.step_function(parts, case.mode)
    capture(step, case.first_state())
    rows: list[Row] = [
        {
            "row": "cold start with what caches hold",
            "seconds": time.perf_counter() - start,
        }
    ]

    clear_graph_pools()
    for name in ["first, empty pool", *["pool reused"] * repeats, "new pool"]:
        if name == "new pool":
            clear_graph_pools()
        captured = capture(step, case.first_state())
        replay_ms = median_milliseconds(
            captured.step, case.synchronise, repeats
        )
        rows.append(
            capture_row(
                name,
                captured,
                replay_ms,
                stage_copy_milliseconds(device, repeats),
            )
        )

    captured = capture(partial(read_back, step), case.first_state())
    rows.append(capture_row("a step that waits for the GPU", captured))
    return parts, rows


def compare_graphs(
    name: str,
    step: Callable[..., tuple[Any, Any]],
    parts: train_step.Parts,
    state: Any,
    *,
    device: str,
    repeats: int,
) -> list[Row]:
    """The rows of an iteration as one graph and as loop-body graphs."""
    step(state, parts=parts)  # loads the kernels
    ways: dict[str, Callable[[], CapturedStep[Any, Any]]] = {
        "one graph": lambda: capture(partial(step, parts=parts), state),
        "loop-body graphs": lambda: capture_loop_bodies(step, parts, state),
    }
    wait = partial(synchronise, device)

    rows = []
    for way, record in ways.items():
        clear_graph_pools()
        before_mb, start = used_megabytes(device), time.perf_counter()
        captured = record()
        captured.step()
        wait()
        ready_ms = 1e3 * (time.perf_counter() - start)
        memory_mb = used_megabytes(device) - before_mb
        row = capture_row(
            f"{name}, {way}",
            captured,
            median_milliseconds(captured.step, wait, repeats),
        )
        rows.append(row | {"ready_ms": ready_ms, "memory_mb": memory_mb})
        del captured  # frees its graph before the next one is recorded
    return rows


def capture_row(
    name: str,
    captured: CapturedStep[Any, Any],
    replay_ms: float | None = None,
    stage_copy_ms: float | None = None,
) -> Row:
    """The row of a captured step."""
    return {
        "row": name,
        "capture_ms": captured.capture_ms,
        "replay_ms": replay_ms,
        "stage_copy_ms": stage_copy_ms,
        "fallback_reason": captured.fallback_reason,
    }


def used_megabytes(device: str) -> float:
    """Memory of the device that is taken, without what its allocator could give back."""
    gc.collect()
    if device != "cuda":
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e6


def synchronise(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def read_back(step: Callable[..., Any], state: Any) -> Any:
    """A step that reads a number back, as a stray `.item()` does."""
    after, metrics = step(state)
    metrics.n_applied_minibatches.item()
    return after, metrics


def stage_copy_milliseconds(device: str, repeats: int) -> float:
    """The time until 1 MB has arrived from the host."""
    values = torch.randn(STAGED_VALUES)
    staging = StagingBuffers(values, device)

    def send() -> None:
        staging.put(values)
        staging.wait_copied()
        staging.mark_consumed()

    return median_milliseconds(send, partial(synchronise, device), repeats)


def median_milliseconds(
    step: Callable[[], Any], wait: Callable[[], None], repeats: int
) -> float:
    """The median time of a step that is waited for."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        wait()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


if __name__ == "__main__":
    main()
