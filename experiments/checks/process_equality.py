"""Claim: PPO learns the same parameters in one process and in several, to the bit eagerly and within rounding compiled.

    python experiments/checks/process_equality.py --device cuda --processes 1 2 4 --out FILE

CartPole (256 environments, 32 steps, a 64-64 network, 4 epochs x 4 minibatches) and the prover on the embedded
Countries S3 (64 environments, 16 steps), as many shards as the largest number of processes. Each row says how the step
was run, and how far it is from one process after one update and after some: the largest L2 distance of a tensor of
parameters and moments, relative to the distance that learning moved it; 0 means equal bits. Compiled rows are judged
after one update: later ones may sample another action where a probability was rounded otherwise.

Exits 1 when eager bits differ, or a compiled first update by more than `equivalence.DEFAULT_TOLERANCE`. `--mode
deterministic` is eager with `torch.use_deterministic_algorithms(True)`: where eager bits differ and these do not, an
operator has no fixed order.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

import funcppo as fp
from experiments.benchmarks.prover import SMALL_TASK
from experiments.benchmarks.side_by_side import Row, write_record
from experiments.paths import ROOT
from experiments.provenance import describe_machine
from funcppo.config import PPOConfig
from funcppo.core import tree
from funcppo.kg.graph import loaders
from funcppo.kg.search import task as prover_task
from funcppo.runtime import collectives
from funcppo.runtime.equivalence import DEFAULT_TOLERANCE

SIZES = {"cartpole": (256, 32), "prover": (64, 16)}  # environments, steps
DEFAULT_MODES = ("eager", "compiled")
MODES = (*DEFAULT_MODES, "deterministic")
N_UPDATES = 5
TINY = 1e-30


class Cell(NamedTuple):
    """What one row compares."""

    work: str
    mode: str
    processes: int


def main() -> int:
    """The exit status: 0, or 1 when something differs."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--work", nargs="*", default=[*SIZES], choices=SIZES)
    parser.add_argument(
        "--mode", nargs="*", default=DEFAULT_MODES, choices=MODES
    )
    parser.add_argument("--processes", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--out", type=Path, help="record to write")
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell is not None:
        work, mode, path = args.cell
        learn(args, work, mode, Path(path))
        return 0

    cells = [
        Cell(work, mode, n)
        for work in args.work
        for mode in args.mode
        for n in args.processes
    ]
    with (
        tempfile.TemporaryDirectory() as name,
        ThreadPoolExecutor(args.jobs) as pool,
    ):
        folder = Path(name)
        errors = list(
            pool.map(lambda cell: run_cell(args, cell, folder), cells)
        )
        rows = [
            compare(args, cell, error, folder)
            for cell, error in zip(cells, errors)
        ]
    for row in rows:
        print(row)
    if args.out:
        machine = describe_machine(args.device)
        write_record(args.out, {"machine": machine, "rows": rows})
    return int(not all(row["is_equal"] for row in rows))


def run_cell(args: argparse.Namespace, cell: Cell, folder: Path) -> str:
    """Run the processes of a cell; the error, empty if there is none."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(cell.processes), __file__]
    command += ["--processes", str(max(args.processes))]
    command += ["--device", args.device, "--cell", cell.work, cell.mode]
    command += [str(path_of(cell, folder))]
    env = dict(os.environ)
    if cell.mode == "deterministic":  # PyTorch asks for it
        env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=env
    )
    return done.stderr[-2000:] if done.returncode else ""


def path_of(cell: Cell, folder: Path) -> Path:
    """The file of what a cell learned."""
    return folder / f"{cell.work}-{cell.mode}-{cell.processes}.npz"


def learn(args: argparse.Namespace, work: str, mode: str, path: Path) -> None:
    """Make some updates with the other processes; rank 0 writes what they learned after the first and the last."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode == "deterministic")
    if args.device == "cuda":
        collectives.choose_gpu()  # before the world of the prover is there
    learner = fp.distribute(
        make_learner(work, max(args.processes), args.device)
    )
    state = learner.init(fp.random.key(0, args.device))
    found = {f"0/{name}": x for name, x in learned(state).items()}
    stepper: Any = fp.compile(learner, state) if mode == "compiled" else learner
    for update in range(1, N_UPDATES + 1):
        state, _ = stepper.step(state)
        found |= {f"{update}/{name}": x for name, x in learned(state).items()}

    if learner.group is None or learner.group.is_main:
        record = stepper.record if mode == "compiled" else None
        facts = {
            "strategy": record.strategy if record else mode,
            "rollout": record.rollout if record else "steps",
            "replay_mode": record.replay_mode if record else "none",
            "n_graphs": str(stepper.captured.n_graphs if record else 0),
        }
        np.savez(path, **found, **{f"fact/{k}": v for k, v in facts.items()})


def learned(state: Any) -> dict[str, np.ndarray]:
    """Parameters and moments by name."""
    tensors = (state.params, state.opt_state)
    leaves = [x.cpu().numpy().copy() for x in tree.leaves(tensors)]
    return dict(zip(tree.paths(tensors), leaves))


def make_learner(work: str, n_shards: int, device: str) -> fp.Learner[Any, Any]:
    """The learner of a work."""
    n_envs, n_steps = SIZES[work]
    ppo = PPOConfig(n_envs=n_envs, n_steps=n_steps, n_shards=n_shards)
    if work == "cartpole":
        cartpole = fp.ppo(env=fp.envs.cartpole(), network=fp.nets.mlp(64, 64))
        return replace(cartpole, cfg=replace(cartpole.cfg, ppo=ppo))
    task = prover_task.build_task(
        loaders.load("countries_s3"), SMALL_TASK, device
    )
    return fp.Learner(
        cfg=prover_task.build_config(task, ppo),
        world=prover_task.training_world(task),
    )


def compare(
    args: argparse.Namespace, cell: Cell, error: str, folder: Path
) -> Row:
    """The row of a cell."""
    row: Row = cell._asdict() | {"n_updates": N_UPDATES, "error": error}
    alone = path_of(cell._replace(processes=min(args.processes)), folder)
    path = path_of(cell, folder)
    if not (alone.exists() and path.exists()):
        return row | {"is_equal": False}
    expected, found = np.load(alone), np.load(path)
    row |= {
        name.removeprefix("fact/"): str(found[name])
        for name in found.files
        if name.startswith("fact/")
    }
    first, last = (difference(expected, found, i) for i in (1, N_UPDATES))
    limit = DEFAULT_TOLERANCE if cell.mode == "compiled" else 0.0
    checked = first if cell.mode == "compiled" else last
    return row | {
        "difference_after_1": first,
        "difference_after_all": last,
        "limit": limit,
        "is_equal": checked <= limit,
    }


def difference(expected: Any, found: Any, update: int) -> float:
    """The largest distance of a tensor after an update, relative to the distance that it moved since the start."""
    largest = 0.0
    for key in expected.files:
        if not key.startswith(f"{update}/"):
            continue
        start = expected[f"0/{key.removeprefix(f'{update}/')}"]
        distance = norm(found[key] - expected[key])
        if distance > 0:
            change = norm(expected[key] - start)
            largest = max(largest, distance / max(change, TINY))
    return largest


def norm(x: np.ndarray) -> float:
    """The L2 norm of a tensor."""
    return float(np.linalg.norm(x.astype(np.float64)))


if __name__ == "__main__":
    sys.exit(main())
