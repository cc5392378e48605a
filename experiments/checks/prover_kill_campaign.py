"""Claim: training and mining whose processes are killed at any point end with the files of undisturbed work.

    python experiments/checks/prover_kill_campaign.py [--minutes 5] [--seed 0] [--out FILE]

torchrun starts `train --resume` and `mine` in 2 or 4 processes, by turns. A random one of them is killed (SIGKILL)
after a random time, or every eighth time stopped (SIGSTOP), so that the others wait for it until their deadline. Then
torchrun starts all again; every second training is ended instead, and gone on with in another number of processes. The
parameters, moments and environments of the last checkpoint, and the rule file, are compared with those of one process.

Writes a row for each to experiments/results/prover_kill_campaign.json. Exits 1 when something differs.
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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import write_record
from experiments.checks import learner_kill_campaign
from experiments.checks.kill_campaign import TIMEOUT_SECONDS
from experiments.checks.rank_kill_campaign import find_rank
from experiments.paths import RESULTS, ROOT
from experiments.provenance import describe_machine
from funcppo.runtime.distributed import STALL_VARIABLE

STALL_SECONDS = 20.0
N_PROCESSES = (2, 4)
STOP_EVERY = 8  # disturbances of which one is a SIGSTOP
DATA = "family_tree:20:1"
TRAIN = ("train", DATA, "--resume", "--ppo.n-shards", "4", "--steps", "1024")
TRAIN += ("--ppo.n-envs", "8", "--ppo.n-steps", "8", "--checkpoint-every")
TRAIN += ("0.01", "--n-validations", "2", "--n-validation-queries", "6")
COMMANDS = {
    "questions": (*TRAIN, "--learner", "questions"),
    "proofs": (*TRAIN, "--learner", "proofs", "--score", "best-proof"),
    "mining": ("mine", "family_tree:1000:1", "--max-rows", "6000000"),
}

Row = dict[str, Any]


def main() -> int:
    """The exit status: 0, or 1 when something differs."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "prover_kill_campaign.json"
    )
    args = parser.parse_args()

    rows: list[Row] = []
    stop = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as name:
        for row in disturb(Path(name), random.Random(args.seed)):
            rows.append(row)
            record = {
                "seed": args.seed,
                "machine": describe_machine(),
                "stall_seconds": STALL_SECONDS,
                **summarise(rows),
                "rows": rows,
            }
            write_record(args.out, record)
            print(row, flush=True)
            if time.monotonic() > stop:
                break
    return int(any(row["difference"] for row in rows))


def summarise(rows: list[Row]) -> Row:
    """Counts over all rows."""
    return {
        "n_kills": sum(row["signal"] == "SIGKILL" for row in rows),
        "n_stops": sum(row["signal"] == "SIGSTOP" for row in rows),
        "n_while_updating": sum(row["updates_before"] > 0 for row in rows),
        "n_other_number": sum(
            row["processes_after"] != row["processes"] for row in rows
        ),
        "n_different": sum(bool(row["difference"]) for row in rows),
    }


def disturb(folder: Path, generator: random.Random) -> Iterator[Row]:
    """Yield a row for each program of which a process got a signal, for ever."""
    seconds: dict[str, float] = {}
    for kind in COMMANDS:
        start = time.monotonic()
        if error := finish(launch(1, kind, folder / kind, restarts=0)):
            raise RuntimeError(f"undisturbed {kind}: {error}")
        seconds[kind] = time.monotonic() - start

    number = 0
    while True:
        kind = list(COMMANDS)[number % len(COMMANDS)]
        n = generator.choice(N_PROCESSES)
        out = folder / f"{kind}-{number}"
        is_ended = kind != "mining" and generator.random() < 0.5
        rank = generator.randrange(n)
        name = "SIGSTOP" if number % STOP_EVERY == 5 else "SIGKILL"

        process = launch(n, kind, out, restarts=0 if is_ended else 2)
        time.sleep(generator.uniform(0.3, 1.0) * seconds[kind])
        target = find_rank(process.pid, rank)
        n_updates = learner_kill_campaign.count_updates(
            out / "checkpoint.npz", "train_state.update"
        )
        if target is not None:
            os.kill(target, signal.Signals[name])
        error = finish(process)
        if target is None:  # it had ended before
            continue

        n_after = n
        if is_ended:
            n_after = generator.choice([x for x in (1, 2, 4) if x != n])
            error = finish(launch(n_after, kind, out, restarts=0))
        yield {
            "kind": kind,
            "processes": n,
            "processes_after": n_after,
            "rank": rank,
            "signal": name,
            "updates_before": n_updates,
            "difference": error or compare(kind, folder / kind, out),
        }
        number += 1


def launch(
    n: int, kind: str, out: Path, restarts: int
) -> subprocess.Popen[str]:
    """A program in some processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(n), "--max-restarts", str(restarts)]
    command += ["--monitor-interval", "0.1", "-m", "funcppo"]
    return subprocess.Popen(
        [*command, *COMMANDS[kind], "--out", str(out)],
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


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for the end of a program; the error, empty if there is none."""
    with process:
        _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    return errors[-2000:] if process.returncode else ""


def compare(kind: str, expected: Path, found: Path) -> str:
    """What differs between two outputs, or empty."""
    if kind != "mining":
        return learner_kill_campaign.compare(
            expected / "checkpoint.npz", found / "checkpoint.npz"
        )
    if not found.exists():
        return "no rule file"
    is_equal = expected.read_bytes() == found.read_bytes()
    return "" if is_equal else "rule file"


if __name__ == "__main__":
    sys.exit(main())
