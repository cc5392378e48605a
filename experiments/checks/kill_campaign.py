"""Claim: a program that is killed at any point goes on to the files of undisturbed work, bit for bit.

    python experiments/checks/kill_campaign.py [--kills 200] [--terms 40] [--seed 0] [--out FILE]

`train`, `evaluate --details`, `mine` and `predict --new` are each run once undisturbed. Then each is started, killed
after a random time, resumed and killed again until it ends by itself, and its files are compared: tensors and texts by
their bytes, lines of metrics and results without times and without the notes on what was resumed. `mine` starts again,
since it has nothing to resume. SIGTERM is sent likewise, and the time until the process has ended is recorded.

Writes a row for each program that ended, with its kills, to experiments/results/kill_campaign.json. Exits 1 when a file
differs, a resumed program fails, or a half-written file stays.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import write_record
from experiments.paths import RESULTS, ROOT
from experiments.provenance import describe_machine
from funcppo import checkpoint

# Fields of metrics.jsonl and results.json that tell times and memory, or what was resumed.
LEFT_OUT = {
    *("seconds", "total_seconds", "replay_ms", "notes"),
    *("phase_seconds", "phase_peak_bytes"),
}
N_ENTITIES, N_FACTS = 250, 1200
MAX_TERM_SECONDS = 2.0  # within which SIGTERM ends a program
# of the undisturbed time: what starts again must be left alone now and then
MAX_DELAY = 1.3
TIMEOUT_SECONDS = 600  # a program that takes longer hangs

Row = dict[str, Any]
Files = dict[str, bytes]  # contents to compare, by name


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program and its outputs."""

    name: str
    words: tuple[str, ...]  # of its command line; {out}, {data} are paths
    # how to go on, where a killed process may have left something
    resume: tuple[str, ...]
    read: Callable[[Path], Files]  # what is compared, of {out}


@dataclass(kw_only=True)
class Chain:
    """A program from its start to its end, with the signals in between."""

    signal_name: str
    seconds_before: list[float] = field(default_factory=list)
    seconds_to_end: list[float] = field(default_factory=list)
    error: str = ""


def main() -> int:
    """The exit status: 0, or 1 when something differs."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--terms", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "kill_campaign.json"
    )
    args = parser.parse_args()

    record: Row = {
        "seed": args.seed,
        "machine": describe_machine(),
        "max_term_seconds": MAX_TERM_SECONDS,
        "rows": [],
    }
    generator = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "data"
        write_data(data, generator)
        for program in PROGRAMS:
            for signal_name, n in (
                ("SIGKILL", args.kills),
                ("SIGTERM", args.terms),
            ):
                n_signals = -(-n // len(PROGRAMS))
                for row in disturb(
                    program, signal_name, n_signals, folder, generator
                ):
                    record["rows"].append(row)
                    write_record(args.out, record | summarise(record["rows"]))
                    print(row, flush=True)
    return int(any(row["difference"] for row in record["rows"]))


def summarise(rows: list[Row]) -> Row:
    """Counts over all rows."""
    waits = [
        seconds
        for row in rows
        if row["signal"] == "SIGTERM"
        for seconds in row["seconds_to_end"]
    ]
    return {
        "n_kills": sum(
            row["n_signals"] for row in rows if row["signal"] == "SIGKILL"
        ),
        "n_terms": len(waits),
        "n_slow_terms": sum(wait > MAX_TERM_SECONDS for wait in waits),
        "longest_term_seconds": max(waits, default=0.0),
        "n_different": sum(bool(row["difference"]) for row in rows),
    }


def write_data(folder: Path, generator: random.Random) -> None:
    """A random graph in which rules derive many facts that it does not hold."""
    folder.mkdir()
    entities = [f"e{i}" for i in range(N_ENTITIES)]
    triples = sorted(
        {
            (
                generator.choice(entities),
                generator.choice(("p", "q", "r")),
                generator.choice(entities),
            )
            for _ in range(N_FACTS)
        }
    )
    lines = ["\t".join(triple) + "\n" for triple in triples]
    generator.shuffle(lines)
    (folder / "train.txt").write_text("".join(lines[:-200]))
    (folder / "valid.txt").write_text("".join(lines[-200:-180]))
    (folder / "test.txt").write_text("".join(lines[-180:]))
    (folder / "rules.txt").write_text(
        "0.5\tr(X,Y) :- p(X,Z), q(Z,Y)\n0.4\tp(X,Y) :- q(Y,Z), r(Z,X)\n"
        "0.3\tq(X,Y) :- r(X,Z), r(Z,Y)\n"
    )


def disturb(
    program: Program,
    signal_name: str,
    n_signals: int,
    folder: Path,
    generator: random.Random,
) -> Iterator[Row]:
    """Yield the row of a program each time that it ends, until it has had so many signals."""
    expected_folder = folder / f"{program.name}-{signal_name}"
    expected_folder.mkdir()
    seconds = run_undisturbed(program, expected_folder)
    expected = program.read(expected_folder / "out")

    n_sent = 0
    while n_sent < n_signals:
        with tempfile.TemporaryDirectory(dir=folder) as name:
            work = Path(name)
            chain = Chain(signal_name=signal_name)
            while not chain.error:
                after = generator.uniform(0, MAX_DELAY * seconds)
                if signal_after(program, work, after, chain):
                    break
            found = program.read(work / "out") if not chain.error else {}
            difference = chain.error or compare(expected, found)
            n_sent += len(chain.seconds_before)
            yield {
                "program": program.name,
                "signal": signal_name,
                "n_signals": len(chain.seconds_before),
                "seconds_before": chain.seconds_before,
                "seconds_to_end": chain.seconds_to_end,
                "undisturbed_seconds": round(seconds, 3),
                "difference": difference,
            }
            if chain.error:
                return


def run_undisturbed(program: Program, work: Path) -> float:
    """Run a program to its end; the seconds that it took."""
    start = time.perf_counter()
    with start_program(program, work) as process:
        _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    if process.returncode:
        raise RuntimeError(f"{program.name}: {errors}")
    return time.perf_counter() - start


def start_program(program: Program, work: Path) -> subprocess.Popen[str]:
    """Start a program, or let it go on with what is in a folder."""
    places = {"out": str(work / "out"), "data": str(work.parent / "data")}
    words = [word.format(**places) for word in program.words]
    is_run = (work / "out" / "config.json").exists()
    if is_run or program.name != "train":
        words += program.resume
    return subprocess.Popen(
        [sys.executable, "-m", "funcppo", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(work / "cache")},
    )


def signal_after(
    program: Program, work: Path, after: float, chain: Chain
) -> bool:
    """Start a program and send it a signal after some seconds; whether it has ended by itself before."""
    number = signal.Signals[chain.signal_name]
    with start_program(program, work) as process:
        try:
            _, errors = process.communicate(timeout=after)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
            start = time.perf_counter()
            _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
            chain.seconds_before.append(round(after, 3))
            chain.seconds_to_end.append(round(time.perf_counter() - start, 3))
    status = process.returncode
    # A program that is told to end while Python itself starts has no handler yet, and one may end just before.
    if status not in (0, -number, 128 + number):
        chain.error = f"exit status {status}: {errors.strip()}"
    return status == 0


def compare(expected: Files, found: Files) -> str:
    """Empty where all files are equal, else the names of those that are not."""
    names = sorted(set(expected) | set(found))
    return ", ".join(n for n in names if expected.get(n) != found.get(n))


def read_run(out: Path) -> Files:
    """The files of a run: arrays by name, lines and results without what tells times."""
    files: Files = {path.name: b"" for path in out.iterdir()}
    # A run that was killed between two checkpoints ends with another previous one.
    for name, array in checkpoint.read(out / "checkpoint.npz").arrays.items():
        head = f"{array.dtype} {array.shape}".encode()
        files[f"checkpoint.npz {name}"] = head + array.tobytes()
    files["config.json"] = (out / "config.json").read_bytes()
    lines = (out / "metrics.jsonl").read_text().splitlines()
    for number, line in enumerate(lines):
        files[f"metrics.jsonl {number}"] = without_times(line)
    results = (out / "results.json").read_text()
    files["results.json"] = without_times(results)
    return files


def without_times(text: str) -> bytes:
    """An object of JSON without the fields that are left out."""
    fields = json.loads(text)
    for name in LEFT_OUT & set(fields):
        del fields[name]
    return json.dumps(fields).encode()


def read_outputs(out: Path) -> Files:
    """The output and all files beside it whose names begin like its own."""
    return {
        path.name: path.read_bytes()
        for path in out.parent.iterdir()
        if path.is_file()
    }


PROGRAMS = (
    Program(
        name="train",
        words=(
            *("train", "countries_s1", "--out", "{out}", "--steps", "960"),
            *("--ppo.n-envs", "8", "--ppo.n-steps", "4"),
            *("--ppo.n-minibatches", "2", "--prover.embed-dim", "4"),
            *("--prover.hidden-dim", "8", "--n-validations", "4"),
            *("--n-validation-queries", "6", "--score", "best-proof"),
            *("--learner", "proofs", "--strategy", "eager"),
            # a limit of time would sample the test split
            *("--checkpoint-every", "0.001", "--seconds", "None"),
        ),
        resume=("--resume",),
        read=read_run,
    ),
    Program(
        name="evaluate",
        words=(
            *("evaluate", "{data}", "--details", "{out}", "--height", "2"),
            *("--score", "noisy-or", "--smoothing", "5"),
        ),
        resume=("--resume",),
        read=read_outputs,
    ),
    Program(
        name="mine",
        words=("mine", "{data}", "--out", "{out}", "--max-length", "3"),
        resume=(),
        read=read_outputs,
    ),
    Program(
        name="predict",
        words=(
            *("predict", "{data}", "--relation", "r", "--new"),
            *("--out", "{out}", "--height", "2", "--smoothing", "5"),
            *("--score", "noisy-or"),
        ),
        resume=("--resume",),
        read=read_outputs,
    ),
)


if __name__ == "__main__":
    sys.exit(main())
