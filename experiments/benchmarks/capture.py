"""What recording and replaying costs: a CartPole iteration (4 x 128) captured again and again in one process.

    python experiments/bench_capture.py --out experiments/results/bench_capture-h200.json

Rows: the first capture, from an empty pool; captures that reuse the pool; one from a new pool; a copy of 1 MB staged
from the host; and a step that cannot be captured. Each row has capture_ms, replay_ms, stage_copy_ms, fallback_reason.
Then an iteration as one graph and as turns, compiled (CartPole) and not (CartPole; the prover on Countries S3, 64 x 64,
128 turns), each from a new pool, with ready_ms (warm-up, recording and the first iteration, kernels loaded before) and
memory_mb (of the device, held by what was recorded and by its buffers).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from experiments.benchmarks import side_by_side
import torch
from experiments.benchmarks.cartpole import Case
from experiments.benchmarks.prover import Case as Prover

from funcppo import train_step
from funcppo.envs.base import NoWorld
from funcppo.runtime import capture as room
from funcppo.runtime.capture import CapturedStep, capture
from funcppo.runtime.graphed import capture_loop_bodies
from funcppo.runtime.host_transfer import StagingBuffers


def main() -> None:
    """Run the rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    case = Case("4x128", "captured" if args.device == "cuda" else "eager", args.device, "highest")
    start = time.perf_counter()
    parts = case.parts(case.eager)
    fn = case.fn(parts)
    capture(fn, case.start())
    rows = [{"row": "cold start with what caches hold", "seconds": time.perf_counter() - start}]
    room.clear_graph_pools()
    names = ["first, empty pool", *["pool reused"] * args.repeats, "new pool"]
    for name in names:
        if name == "new pool":
            room.clear_graph_pools()
        captured = capture(fn, case.start())
        replay = milliseconds(captured.step, case.synchronise, args.repeats)
        rows.append(row(name, captured, replay, staged(args.device, args.repeats)))
    captured = capture(partial(waits, fn), case.start())
    rows.append(row("a step that waits for the GPU", captured, None, None))
    del captured
    prover = Prover("s3", "eager", args.device, "", "packed")
    learn = partial(train_step.train_step, case.cfg, NoWorld())
    rows += whole_and_turns("CartPole", learn, parts, case.start(), args)
    rows += whole_and_turns("CartPole, eager", learn, train_step.EAGER_PARTS, case.start(), args)
    learn = partial(train_step.train_step, prover.cfg, prover.world)
    rows += whole_and_turns("prover, eager", learn, train_step.EAGER_PARTS, prover.state, args)
    for line in rows:
        print(json.dumps(line))
    if args.out:
        args.out.write_text(json.dumps({"machine": side_by_side.machine(args.device), "rows": rows}, indent=1) + "\n")


def row(name: str, captured: Any, replay_ms: float | None, stage_copy_ms: float | None) -> dict[str, Any]:
    """A capture's row."""
    times = {"capture_ms": captured.capture_ms, "replay_ms": replay_ms, "stage_copy_ms": stage_copy_ms}
    return {"row": name} | times | {"fallback_reason": captured.reason}


def whole_and_turns(
    name: str, step: Callable[..., tuple[Any, Any]], parts: train_step.Parts, state: Any, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """The rows of an iteration as one graph and as turns."""
    step(state, parts=parts)
    ways: dict[str, Callable[[], CapturedStep[Any, Any]]] = {
        "one graph": lambda: capture(partial(step, parts=parts), state),
        "turns": lambda: capture_loop_bodies(step, parts, state),
    }
    rows = []
    for way, record in ways.items():
        room.clear_graph_pools()
        before, start = in_use(args.device), time.perf_counter()
        captured = record()
        captured.step()
        synchronise(args.device)
        more = {"ready_ms": 1e3 * (time.perf_counter() - start), "memory_mb": in_use(args.device) - before}
        replay_ms = milliseconds(captured.step, partial(synchronise, args.device), args.repeats)
        rows.append(row(f"{name}, {way}", captured, replay_ms, None) | more)
        del captured
    return rows


def in_use(device: str) -> float:
    """MB of the device's memory that are taken, what could be given back left out."""
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


def waits(fn: Callable[..., Any], state: Any) -> Any:
    """A step that reads a number back, as a stray `.item()` does."""
    after, shown = fn(state)
    shown.minibatches.item()
    return after, shown


def staged(device: str, repeats: int) -> float:
    """Milliseconds until 1 MB has arrived."""
    values = torch.randn(1 << 18)
    staging = StagingBuffers(values, device)

    def send() -> None:
        staging.put(values)
        staging.wait_copied()
        staging.mark_consumed()

    return milliseconds(send, torch.cuda.synchronize if device == "cuda" else lambda: None, repeats)


def milliseconds(step: Callable[[], Any], synchronise: Callable[[], None], repeats: int) -> float:
    """The median time of a step that is waited for."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        synchronise()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


if __name__ == "__main__":
    main()
