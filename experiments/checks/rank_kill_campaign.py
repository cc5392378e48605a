"""Claim: an evaluation whose processes are killed at any point ends with the files of undisturbed work, bit for bit.

    python experiments/checks/rank_kill_campaign.py [--kills 20] [--stops 2] [--seed 0] [--out FILE]

torchrun starts `evaluate --details FILE --resume` in 2 or 3 processes, by turns, and starts them again when one ends.
A random one of them is killed (SIGKILL) after a random time, or stopped (SIGSTOP), so that the others wait for it until
their deadline. The files are compared with those of one undisturbed process.

Writes a row for each evaluation to experiments/results/rank_kill_campaign.json. Exits 1 when a file differs or an
evaluation does not end.
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
from experiments.checks.kill_campaign import (
    MAX_DELAY,
    TIMEOUT_SECONDS,
    compare,
    read_outputs,
    write_data,
)
from experiments.paths import RESULTS, ROOT
from experiments.provenance import describe_machine

STALL_SECONDS = 5.0
N_PROCESSES = (2, 3)

Row = dict[str, Any]


def main() -> int:
    """The exit status: 0, or 1 when something differs."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stops", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "rank_kill_campaign.json"
    )
    args = parser.parse_args()

    generator = random.Random(args.seed)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder / "data", generator)
        for row in disturb(args.kills, args.stops, folder, generator):
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
    return int(any(row["difference"] for row in rows))


def summarise(rows: list[Row]) -> Row:
    """Counts over all rows."""
    return {
        "n_kills": sum(row["signal"] == "SIGKILL" for row in rows),
        "n_stops": sum(row["signal"] == "SIGSTOP" for row in rows),
        "n_while_ranking": sum(row["lines_before"] > 0 for row in rows),
        "n_different": sum(bool(row["difference"]) for row in rows),
    }


def disturb(
    n_kills: int, n_stops: int, folder: Path, generator: random.Random
) -> Iterator[Row]:
    """Yield a row for each evaluation of which a process got a signal."""
    start = time.perf_counter()
    expected = evaluate(1, folder, "alone")
    seconds = time.perf_counter() - start
    if len(expected) == 1:
        raise RuntimeError(f"an undisturbed evaluation: {next(iter(expected))}")

    signals = ["SIGKILL"] * n_kills + ["SIGSTOP"] * n_stops
    number = 0
    while number < len(signals):
        n = N_PROCESSES[number % len(N_PROCESSES)]
        sent = Disturbance(
            signals[number],
            rank=generator.randrange(n),
            after=generator.uniform(0.2, MAX_DELAY) * seconds,
        )
        found = evaluate(n, folder, f"disturbed-{number}", sent)
        if sent.lines_before < 0:  # it had ended before
            continue
        yield {
            "processes": n,
            "rank": sent.rank,
            "signal": sent.signal_name,
            "seconds_before": round(sent.after, 3),
            "lines_before": sent.lines_before,
            "undisturbed_seconds": round(seconds, 3),
            "difference": compare(expected, found),
        }
        number += 1


class Disturbance:
    """A signal to one process after some time."""

    def __init__(self, signal_name: str, rank: int, after: float) -> None:
        """A signal that is not sent yet."""
        self.signal_name = signal_name
        self.rank = rank
        self.after = after
        self.lines_before = -1  # of the details when it was sent; -1 before

    def send(self, launcher: int, details: Path) -> None:
        """Send the signal to a process that a launcher has started."""
        target = find_rank(launcher, self.rank)
        if target is None:
            return
        lines = details.read_bytes().count(b"\n") if details.exists() else 0
        os.kill(target, signal.Signals[self.signal_name])
        self.lines_before = lines


def evaluate(
    n: int, folder: Path, name: str, sent: Disturbance | None = None
) -> dict[str, bytes]:
    """The files of an evaluation by some processes, of which one gets a signal."""
    work = folder / name
    work.mkdir(exist_ok=True)
    details = work / "details.jsonl"
    details.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nproc-per-node", str(n), "--max-restarts", "2"]
    command += ["--monitor-interval", "0.1", "--standalone"]
    command += ["-m", "funcppo", "evaluate", str(folder / "data")]
    command += ["--details", str(details), "--resume", "--height", "2"]
    command += ["--score", "noisy-or", "--smoothing", "5"]
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "FUNCPPO_STALL_SECONDS": str(STALL_SECONDS)},
    ) as process:
        if sent is not None:
            time.sleep(sent.after)
            sent.send(process.pid, details)
        _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    if process.returncode:
        return {f"exit status {process.returncode}: {errors[-2000:]}": b""}
    return read_outputs(details)


def find_rank(launcher: int, rank: int) -> int | None:
    """The id of the process of a rank that a launcher has started; None where there is none."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            parent = int(
                (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
            )
            variables = (entry / "environ").read_bytes().split(b"\0")
        except (OSError, IndexError):  # it has ended
            continue
        if parent == launcher and f"RANK={rank}".encode() in variables:
            return int(entry.name)
    return None


if __name__ == "__main__":
    sys.exit(main())
