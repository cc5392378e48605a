"""Weak and strong scaling of learning over processes, and what the collective itself costs.

    python experiments/benchmarks/scaling.py --device cuda --processes 1 2 4 --out experiments/results/scaling-h200.json
    python experiments/benchmarks/scaling.py --device cpu --work cartpole-32 --mode eager --processes 1 2

Each row is one work in some processes of torchrun: the median, lowest and highest time of an update, and of gathering a
gradient of its size, as it stands alone between two updates. Strong scaling: the same environments and shards in any
number of processes. Weak scaling: as many more environments as processes, one shard each. The efficiency is the time of
one process over that of the row, for strong scaling divided by the number of processes.

The work: CartPole, 128 steps (16 of cartpole-32), 4 epochs x 4 minibatches, a 64-64 network; and an iteration of the
prover on the embedded Countries S3.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

import funcppo as fp
from experiments.benchmarks.side_by_side import Row, write_record
from experiments.paths import ROOT
from experiments.provenance import describe_machine
from funcppo import data, tree
from funcppo.config import PPOConfig
from funcppo.prover import task as prover_task
from funcppo.prover.config import ProverTaskConfig

# environments and steps
WORK = {
    "cartpole-32": (32, 16),
    "cartpole-2048": (2048, 128),
    "cartpole-65536": (65536, 128),
    "prover": (128, 64),
}
SCALING = ("strong", "weak")
PREFIX = "row: "  # begins the line that is meant for the parent


def main() -> None:
    """Run the rows and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--work", nargs="*", default=list(WORK), choices=WORK)
    parser.add_argument(
        "--scaling", nargs="*", default=SCALING, choices=SCALING
    )
    parser.add_argument("--processes", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument(
        "--mode", default="compiled", choices=["compiled", "eager"]
    )
    parser.add_argument("--repeats", type=int, default=7, help="timed updates")
    parser.add_argument("--out", type=Path, help="record to write")
    parser.add_argument("--cell", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell is not None:
        work, scaling, n, n_shards = args.cell
        measure(args, work, scaling, int(n), int(n_shards))
        return

    rows: list[Row] = []
    for work in args.work:
        for scaling in args.scaling:
            for n in args.processes:
                row = run_cell(args, work, scaling, n)
                rows.append(row | {"efficiency": efficiency(rows, row)})
                print(json.dumps(rows[-1]), flush=True)
                if args.out:
                    machine = describe_machine(args.device)
                    write_record(args.out, {"machine": machine, "rows": rows})


def run_cell(args: argparse.Namespace, work: str, scaling: str, n: int) -> Row:
    """The row that some processes of torchrun measure."""
    n_shards = max(args.processes) if scaling == "strong" else n
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(n), __file__]
    command += ["--device", args.device, "--mode", args.mode]
    command += ["--repeats", str(args.repeats)]
    command += ["--cell", work, scaling, str(n), str(n_shards)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    for line in done.stdout.splitlines():
        if line.startswith(PREFIX):
            return json.loads(line.removeprefix(PREFIX))
    raise SystemExit(f"{work}, {n} processes: {done.stderr[-2000:]}")


def efficiency(rows: list[Row], row: Row) -> float | None:
    """The time of one process over that of a row, by the number of processes if they share the work of one."""
    alone = [
        x["update_ms"]
        for x in [*rows, row]
        if (x["work"], x["scaling"], x["processes"])
        == (row["work"], row["scaling"], 1)
    ]
    if not alone:
        return None
    ratio = alone[0] / row["update_ms"]
    return ratio / row["processes"] if row["scaling"] == "strong" else ratio


def measure(
    args: argparse.Namespace, work: str, scaling: str, n: int, n_shards: int
) -> None:
    """Time the updates of this process among others; rank 0 prints the row."""
    torch.set_num_threads(1)
    n_envs, n_steps = WORK[work]
    if scaling == "weak":
        n_envs *= n
    ppo = PPOConfig(n_envs=n_envs, n_steps=n_steps, n_shards=n_shards)
    learner = fp.distribute(make_learner(work, ppo))
    state = learner.init(fp.random.key(0, args.device))
    is_compiled = args.mode == "compiled"
    stepper: Any = fp.compile(learner, state) if is_compiled else learner

    def update() -> None:
        nonlocal state
        state, _ = stepper.step(state)

    times = time_calls(update, args)
    row: Row = {
        "work": work,
        "scaling": scaling,
        "processes": n,
        "n_envs": n_envs,
        "n_steps": n_steps,
        "n_shards": n_shards,
        "strategy": stepper.record.strategy if is_compiled else "eager",
        "replay_mode": stepper.record.replay_mode if is_compiled else "none",
        "update_ms": statistics.median(times),
        "lowest_ms": min(times),
        "highest_ms": max(times),
        "steps_per_second": 1e3 * n_envs * n_steps / statistics.median(times),
        "n_params": tree.ravel(state.params).numel(),
    }
    if learner.group is not None:
        gradients = tree.ravel(state.params).expand(n_shards // n, -1)
        gather = learner.group.all_gather
        gather_times = time_calls(lambda: gather(gradients), args)
        row["gather_ms"] = statistics.median(gather_times)
        row["n_gathers"] = 1 + ppo.n_epochs * ppo.n_minibatches
    if learner.group is None or learner.group.is_main:
        print(PREFIX + json.dumps(row), flush=True)


def make_learner(work: str, ppo: PPOConfig) -> fp.Learner[Any, Any]:
    """The learner of a work."""
    if work == "prover":
        task = prover_task.build_task(
            data.load("countries_s3"), ProverTaskConfig(max_height=2)
        )
        return fp.Learner(
            cfg=prover_task.build_config(task, ppo),
            world=prover_task.training_world(task),
        )
    cartpole = fp.ppo(env=fp.envs.cartpole(), network=fp.nets.mlp(64, 64))
    cfg = fp.Config(ppo=ppo, env=cartpole.cfg.env, agent=cartpole.cfg.agent)
    return fp.Learner(cfg=cfg, world=cartpole.world)


def time_calls(
    call: Callable[[], object], args: argparse.Namespace
) -> list[float]:
    """Milliseconds of some calls, after two others."""
    times: list[float] = []
    for _ in range(2 + args.repeats):
        synchronize(args.device)
        start = time.perf_counter()
        call()
        synchronize(args.device)
        times.append(1e3 * (time.perf_counter() - start))
    return times[2:]


def synchronize(device: str) -> None:
    """Wait for the GPU, if it is one."""
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
