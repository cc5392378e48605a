"""Weak and strong scaling of learning over processes.

    python experiments/benchmarks/scaling.py --device cuda --processes 1 2 4 --out experiments/results/scaling-h200.json
    python experiments/benchmarks/scaling.py --device cpu --work cartpole-32 --mode eager --processes 1 2

Each row is one work in some processes of torchrun: the median, lowest and highest time of an update. Strong scaling:
the same environments and shards in any number of processes. Weak scaling: as many more environments as processes, one
shard each. The efficiency is the time of one process over that of the row, for strong scaling divided by the number of
processes.

The work: CartPole, 128 steps (16 of cartpole-32), 4 epochs x 4 minibatches, a 64-64 network; an iteration of the prover
on the embedded Countries S3; and those on Family of `prover.py`. All rows compile side by side, each in processes of
its own; then they are timed one at a time.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

import funcppo as fp
from experiments.benchmarks import prover
from experiments.benchmarks.side_by_side import (
    Row,
    read_message,
    send_message,
    write_record,
)
from experiments.paths import DATA, ROOT, make_parser
from experiments.provenance import describe_machine
from funcppo import train_step
from funcppo.config import PPOConfig
from funcppo.core import tree
from funcppo.kg.graph import loaders
from funcppo.kg.run.train import with_capacity
from funcppo.kg.search import task as prover_task
from funcppo.runtime import distributed

# environments and steps
CARTPOLE = {
    "cartpole-32": (32, 16),
    "cartpole-2048": (2048, 128),
    "cartpole-65536": (65536, 128),
}
COUNTRIES = (
    "countries_s3",
    prover.SMALL_TASK,
    PPOConfig(n_envs=128, n_steps=64),
)
PROVER = {
    "prover": COUNTRIES,
    "family": prover.WORK["family"],
    "family-large": prover.WORK["family-large"],
}
WORK = (*CARTPOLE, *PROVER)
SCALING = ("strong", "weak")
POLL_SECONDS = 0.05


class Cell(NamedTuple):
    """What one row measures."""

    work: str
    scaling: str
    processes: int


def main() -> None:
    """Run the rows and write them."""
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--work", nargs="*", default=WORK, choices=WORK)
    parser.add_argument(
        "--scaling", nargs="*", default=SCALING, choices=SCALING
    )
    parser.add_argument("--processes", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument(
        "--mode", default="compiled", choices=["compiled", "eager"]
    )
    parser.add_argument(
        "--data", default=str(DATA), help="folder of the standard data sets"
    )
    parser.add_argument("--out", type=Path, help="record to write")
    parser.add_argument("--cell", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--gate", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell is not None:
        work, scaling, n, n_shards = args.cell
        measure(args, Cell(work, scaling, int(n)), int(n_shards))
        return

    rows: list[Row] = []
    for row in run_cells(args):
        rows.append(row | {"efficiency": efficiency(rows, row)})
        print(json.dumps(rows[-1]), flush=True)
        if args.out:
            machine = describe_machine(args.device)
            write_record(args.out, {"machine": machine, "rows": rows})


def run_cells(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the row of each cell; all prepare side by side, and are timed one at a time."""
    cells = [
        Cell(work, scaling, n)
        for work in args.work
        for scaling in args.scaling
        for n in args.processes
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = [
            start_cell(args, cell, folder / str(i))
            for i, cell in enumerate(cells)
        ]
        messages = [read_message(process) for process in started]
        for i, (cell, process) in enumerate(zip(cells, started)):
            row = messages[i]
            if "error" not in row:
                (folder / str(i)).touch()
                row = read_message(process)
            process.wait()
            if "error" in row:
                row["error"] = (folder / f"{i}.err").read_text()[-2000:]
            yield cell._asdict() | row


def start_cell(
    args: argparse.Namespace, cell: Cell, gate: Path
) -> subprocess.Popen[str]:
    """The processes of torchrun that measure a cell as soon as a file is there."""
    is_strong = cell.scaling == "strong"
    n_shards = max(args.processes) if is_strong else cell.processes
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(cell.processes), __file__]
    command += ["--device", args.device, "--mode", args.mode]
    command += ["--data", args.data, "--gate", str(gate)]
    command += ["--cell", *map(str, cell), str(n_shards)]
    with gate.with_suffix(".err").open("w") as errors:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT
        )


def efficiency(rows: list[Row], row: Row) -> float | None:
    """The time of one process over that of a row, by the number of processes if they share the work of one."""
    alone = [
        x["update_ms"]
        for x in [*rows, row]
        if (x["work"], x["scaling"], x["processes"])
        == (row["work"], row["scaling"], 1)
        and "update_ms" in x
    ]
    if not alone or "update_ms" not in row:
        return None
    ratio = alone[0] / row["update_ms"]
    return ratio / row["processes"] if row["scaling"] == "strong" else ratio


def measure(args: argparse.Namespace, cell: Cell, n_shards: int) -> None:
    """Time the updates of this process among others; rank 0 prints the row."""
    torch.set_num_threads(1)
    if args.device == "cuda":
        distributed.choose_gpu()  # before the world of the prover is there
    factor = cell.processes if cell.scaling == "weak" else 1
    learner = fp.distribute(make_learner(args, cell.work, factor, n_shards))
    is_main = learner.group is None or learner.group.is_main
    state = learner.init(fp.random.key(0, args.device))
    is_compiled = args.mode == "compiled"
    stepper: Any = fp.compile(learner, state) if is_compiled else learner

    def update() -> None:
        nonlocal state
        state, _ = stepper.step(state)

    update()
    synchronize(args.device)
    if is_main:
        send_message({"ready": True})
    while not args.gate.exists():
        time.sleep(POLL_SECONDS)

    times = time_calls(update, args.device)
    ppo = learner.cfg.ppo
    row: Row = {
        "n_envs": ppo.n_envs,
        "n_steps": ppo.n_steps,
        "n_shards": n_shards,
        "strategy": stepper.record.strategy if is_compiled else "eager",
        "replay_mode": stepper.record.replay_mode if is_compiled else "none",
        "n_graphs": stepper.captured.n_graphs if is_compiled else 0,
        "update_ms": statistics.median(times),
        "lowest_ms": min(times),
        "highest_ms": max(times),
        "steps_per_second": 1e3
        * (ppo.n_envs * ppo.n_steps)
        / statistics.median(times),
        "n_params": tree.ravel(state.params).numel(),
    }
    if is_main:
        send_message(row)


def make_learner(
    args: argparse.Namespace, work: str, factor: int, n_shards: int
) -> fp.Learner[Any, Any]:
    """The learner of a work, with so many times its environments."""
    if work in CARTPOLE:
        n_envs, n_steps = CARTPOLE[work]
        ppo = PPOConfig(
            n_envs=n_envs * factor, n_steps=n_steps, n_shards=n_shards
        )
        cartpole = fp.ppo(env=fp.envs.cartpole(), network=fp.nets.mlp(64, 64))
        return replace(cartpole, cfg=replace(cartpole.cfg, ppo=ppo))

    dataset, settings, ppo = PROVER[work]
    ppo = replace(ppo, n_envs=ppo.n_envs * factor, n_shards=n_shards)
    task = prover_task.build_task(
        loaders.load(dataset.format(data=args.data)), settings, args.device
    )
    cfg = prover_task.build_config(task, ppo)
    world = prover_task.training_world(task)
    state = train_step.init(cfg, world, fp.random.key(0, args.device))
    return fp.Learner(cfg=with_capacity(cfg, world, state), world=world)


def time_calls(call: Callable[[], object], device: str) -> list[float]:
    """Milliseconds of seven calls, after two others."""
    times: list[float] = []
    for _ in range(2 + 7):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    return times[2:]


def synchronize(device: str) -> None:
    """Wait for the GPU, if it is one."""
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
