"""Claim: learning whose processes are killed at any point ends with the parameters of undisturbed work, bit for bit.

    python experiments/checks/learner_kill_campaign.py [--kills 12] [--stops 1] [--seed 0] [--out FILE]

torchrun starts `fp.train` of a learner of 4 shards in 2 or 4 processes, by turns. A random one of them is killed
(SIGKILL) at a random update, or stopped (SIGSTOP), so that the others wait for it until their deadline. Then torchrun
starts all of them again, or it ends and another number of processes goes on. The checkpoint at the end is compared with
that of one undisturbed process.

Writes a row for each run to experiments/results/learner_kill_campaign.json. Exits 1 when a number differs or a run does
not end.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import write_record
from experiments.checks.kill_campaign import TIMEOUT_SECONDS
from experiments.checks.rank_kill_campaign import find_rank
from experiments.paths import RESULTS, ROOT
from experiments.provenance import describe_machine
from funcppo.experiment import checkpoint
from funcppo.runtime.distributed import STALL_VARIABLE
from funcppo.trainer import PREVIOUS_NAME

STALL_SECONDS = 5.0
N_PROCESSES = (2, 4)
N_UPDATES = 40
N_STEPS = 8 * 16  # of an update
POLL_SECONDS = 0.02
MAX_WAIT = 0.5  # seconds from the chosen update to the signal

Row = dict[str, Any]


def main() -> int:
    """The exit status: 0, or 1 when something differs."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--stops", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "learner_kill_campaign.json"
    )
    parser.add_argument("--learn", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.learn is not None:
        learn(args.learn)
        return 0

    generator = random.Random(args.seed)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        signals = ["SIGKILL"] * args.kills + ["SIGSTOP"] * args.stops
        for row in disturb(signals, Path(name), generator):
            rows.append(row)
            record = {
                "seed": args.seed,
                "machine": describe_machine(),
                "stall_seconds": STALL_SECONDS,
                "n_updates": N_UPDATES,
                **summarise(rows),
                "rows": rows,
            }
            write_record(args.out, record)
            print(row, flush=True)
    return int(any(row["difference"] for row in rows))


def learn(path: Path) -> None:
    """Train a small learner, shared by the processes of torchrun, with a checkpoint after each update."""
    import funcppo as fp

    learner = fp.ppo(
        env=fp.envs.cartpole(),
        network=fp.nets.mlp(16),
        n_envs=8,
        n_steps=16,
        n_shards=4,
    )
    fp.train(
        fp.distribute(learner),
        N_UPDATES * N_STEPS,
        checkpoint=path,
        checkpoint_every=1,
    )


def summarise(rows: list[Row]) -> Row:
    """Counts over all rows."""
    return {
        "n_kills": sum(row["signal"] == "SIGKILL" for row in rows),
        "n_stops": sum(row["signal"] == "SIGSTOP" for row in rows),
        "n_while_learning": sum(row["updates_before"] > 0 for row in rows),
        "n_other_number": sum(
            row["processes_after"] != row["processes"] for row in rows
        ),
        "n_different": sum(bool(row["difference"]) for row in rows),
    }


def disturb(
    signals: list[str], folder: Path, generator: random.Random
) -> Iterator[Row]:
    """Yield a row for each run of which a process got a signal."""
    alone = folder / "alone.npz"
    if error := run(1, alone):
        raise RuntimeError(f"an undisturbed run: {error}")

    number = 0
    while number < len(signals):
        n = N_PROCESSES[number % 2]
        # Every second pair of runs is continued by another number of processes.
        other = number % 4 > 1
        path = folder / f"disturbed-{number}.npz"
        rank, first = generator.randrange(n), generator.randrange(N_UPDATES)
        wait = generator.uniform(0, MAX_WAIT)
        before = send(
            Disturbance(signals[number], rank, first, wait),
            n,
            path,
            restarts=not other,
        )
        if before < 0:  # it had ended before
            path.unlink(missing_ok=True)
            continue
        n_after = N_PROCESSES[(number + 1) % 2] if other else n
        error = run(n_after, path) if other else ""
        yield {
            "processes": n,
            "processes_after": n_after,
            "rank": rank,
            "signal": signals[number],
            "updates_before": before,
            "difference": error or compare(alone, path),
        }
        number += 1


def launch(n: int, path: Path, restarts: int) -> subprocess.Popen[str]:
    """A run in some processes."""
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nproc-per-node", str(n), "--max-restarts", str(restarts)]
    command += ["--monitor-interval", "0.1", "--standalone"]
    command += [__file__, "--learn", str(path)]
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            STALL_VARIABLE: str(STALL_SECONDS),
            "OMP_NUM_THREADS": "1",
        },
    )


def run(n: int, path: Path) -> str:
    """Run to the end; the error, empty if there is none."""
    with launch(n, path, restarts=0) as process:
        _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    return errors[-2000:] if process.returncode else ""


class Disturbance(NamedTuple):
    """A signal to one process."""

    signal: str
    rank: int
    first_update: int  # that is made before
    wait: float  # seconds from then


def send(sent: Disturbance, n: int, path: Path, restarts: bool) -> int:
    """Run, and send a signal to a process.

    Returns:
      Updates made before; -1 if no signal was sent, or the run had ended.
    """
    with launch(n, path, restarts=2 * restarts) as process:
        while (
            process.poll() is None and count_updates(path) < sent.first_update
        ):
            time.sleep(POLL_SECONDS)
        time.sleep(sent.wait)
        target = find_rank(process.pid, sent.rank)
        n_updates = count_updates(path)
        if target is not None and n_updates < N_UPDATES:
            os.kill(target, signal.Signals[sent.signal])
        _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    if restarts and process.returncode:
        raise RuntimeError(f"a run that is started again: {errors[-2000:]}")
    return -1 if target is None or n_updates == N_UPDATES else n_updates


def count_updates(path: Path, name: str = "update") -> int:
    """Updates of a checkpoint, in the tensor of a name; 0 where there is none."""
    previous = path.with_name(PREVIOUS_NAME.format(name=path.name))
    while path.exists() or previous.exists():
        try:
            return int(checkpoint.read(path).arrays[name])
        except checkpoint.DamagedCheckpointError:  # it is being replaced
            time.sleep(POLL_SECONDS)
    return 0


def compare(expected: Path, found: Path) -> str:
    """The first tensor that differs between two checkpoints, or empty."""
    if not found.exists():
        return "no checkpoint"
    arrays = checkpoint.read(found).arrays
    for name, array in checkpoint.read(expected).arrays.items():
        if not np.array_equal(array, arrays[name], equal_nan=True):
            return name
    return ""


if __name__ == "__main__":
    sys.exit(main())
