"""Claim: SIGTERM and Ctrl-C (SIGINT) end every program within two seconds, at whatever point of its work.

    python experiments/checks/term_campaign.py [--terms 40] [--seed 0] [--graphs NAME ...] [--out FILE]

`train` (in a minute), `mine`, `evaluate --details`, `provable` and `predict --new` run on graphs of `fifty_graphs.py`,
and get one of the signals, in turn, at a random moment of the time that they take undisturbed. The choice of settings
on valid is part of the work of `evaluate` and `predict`. A row holds the last line on the work in progress,
the seconds from the signal to the end, and those of them that the process had a processor: on a busy machine the first
are longer. Of a program that takes longer than two seconds it holds the line of code that it was at.

Writes experiments/results/term_campaign.json after each row. Exits 1 when a program was slow in its own time.
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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks import fifty_graphs
from experiments.benchmarks.side_by_side import write_record
from experiments.paths import RESULTS, ROOT
from experiments.provenance import describe_machine

GRAPHS = ("e60-r25-d0.1", "e250-r5-d0.01-odd")
SIGNALS = (signal.SIGTERM, signal.SIGINT)
# ended by itself, by a signal that it handled, or by one before it could
ENDS = (0, 143, 130, -signal.SIGTERM, -signal.SIGINT)
MAX_SECONDS = 2.0
HANG_SECONDS = 120.0  # after which a program that does not answer is killed
# `kill -USR1` makes the process print where it is. A shell lets what it starts in the background ignore SIGINT.
START = (
    "import faulthandler, runpy, signal; faulthandler.register(signal.SIGUSR1); "
    "signal.signal(signal.SIGINT, signal.default_int_handler); "
    "runpy.run_module('funcppo', run_name='__main__', alter_sys=True)"
)
PROGRAMS: dict[str, tuple[str, ...]] = {
    "train": (
        *("train", "{data}", "--out", "{out}", "--overwrite"),
        *("--seconds", "60"),
    ),
    "mine": ("mine", "{data}", "--out", "{out}"),
    "evaluate": (
        *("evaluate", "{data}", "--rules", "{rules}", "--json", "{out}"),
        *("--details", "{out}-details", "--overwrite"),
    ),
    "provable": ("provable", "{data}", "--rules", "{rules}", "--json", "{out}"),
    "predict": (
        *(
            "predict",
            "{data}",
            "--rules",
            "{rules}",
            "--relation",
            "{relation}",
        ),
        *("--new", "--out", "{out}", "--overwrite"),
    ),
}

Row = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0, or 1 when a program was slow."""
    specs = {spec.name: spec for spec in fifty_graphs.make_specs()}
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--terms", type=int, default=40, help="a graph")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--graphs",
        nargs="+",
        choices=specs,
        default=GRAPHS,
        metavar="NAME",
        help="of fifty_graphs.py",
    )
    parser.add_argument(
        "--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS)
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "term_campaign.json"
    )
    args = parser.parse_args(argv)

    generator = random.Random(args.seed)
    record: Row = {"machine": describe_machine(), "rows": []}
    with tempfile.TemporaryDirectory() as name:
        for graph in args.graphs:
            places = write_inputs(Path(name, graph), specs[graph], args.seed)
            seconds = {
                program: terminate(program, places, None)["seconds_before"]
                for program in args.programs
            }
            for number in range(args.terms):
                program = args.programs[number % len(args.programs)]
                after = generator.uniform(0, seconds[program])
                number_of_signal = SIGNALS[
                    number // len(args.programs) % len(SIGNALS)
                ]
                row = terminate(program, places, after, number_of_signal)
                row["graph"] = graph
                record["rows"].append(row)
                print(json.dumps(row), flush=True)
                write_record(args.out, record | summarise(record["rows"]))
    return int(summarise(record["rows"])["n_slow"] > 0)


def write_inputs(
    folder: Path, spec: fifty_graphs.Spec, seed: int
) -> dict[str, str]:
    """Write a graph and mine its rules; the paths and names that the command lines of programs hold."""
    data, rules = folder / "data", folder / "rules.tsv"
    folder.mkdir()
    fifty_graphs.write_graph(data, spec, seed)
    words = [sys.executable, "-m", "funcppo", "mine", str(data)]
    subprocess.run(
        [*words, "--out", str(rules)], cwd=ROOT, check=True, capture_output=True
    )
    first = (data / "train.txt").read_text().splitlines()[0]
    return {
        "data": str(data),
        "rules": str(rules),
        "out": str(folder / "out"),
        "cache": str(folder / "cache"),
        "relation": first.split("\t")[1],
    }


def terminate(
    program: str,
    places: dict[str, str],
    after: float | None,
    signal_number: signal.Signals = signal.SIGTERM,
) -> Row:
    """Start a program and send it a signal after some seconds; None lets it end by itself."""
    words = [word.format(**places) for word in PROGRAMS[program]]
    if program == "train":
        out = Path(places["out"] + "-run")
        words[words.index(places["out"])] = str(out)
        # Rules are mined, not found in a cache.
        words += ["--cache-dir", f"{places['cache']}-{time.monotonic_ns()}"]
    start = time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", START, *words],
            stdout=subprocess.DEVNULL,
            stderr=errors,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        row: Row = {"program": program}
        try:
            process.wait(timeout=after)
        except subprocess.TimeoutExpired:
            row |= _send(process, signal_number)
        ended = time.perf_counter()
        errors.seek(0)
        lines = errors.read().decode(errors="replace").splitlines()
    if row.get("seconds_to_end", 0.0) > MAX_SECONDS:
        row["place"] = next((x.strip() for x in lines if "File" in x), "")
    # What it says of its end and where it was is not its work.
    ends = (": terminated", ": interrupted", "File")
    lines = [x for x in lines if not any(end in x for end in ends)]
    before = ended - start - row.get("seconds_to_end", 0.0)
    return row | {
        "seconds_before": round(before, 2),
        "status": process.returncode,
        "last_line": lines[-1] if lines else "",
    }


def _send(
    process: subprocess.Popen[bytes], signal_number: signal.Signals
) -> Row:
    """Send a signal; the seconds until the process has ended, and how long it had a processor meanwhile."""
    start = time.perf_counter()
    busy = last = _processor_seconds(process.pid)
    process.send_signal(signal_number)
    asked = False
    while True:
        waited = time.perf_counter() - start
        if process.poll() is not None:
            break
        busy_now = _processor_seconds(process.pid)
        if busy_now >= 0:
            last = busy_now
        if waited > MAX_SECONDS and not asked:
            asked = True
            process.send_signal(signal.SIGUSR1)
        if waited > HANG_SECONDS:
            process.kill()
        time.sleep(0.01)
    return {
        "signal": signal_number.name,
        "seconds_to_end": round(waited, 2),
        "processor_seconds": round(max(0.0, last - busy), 2),
    }


def _processor_seconds(pid: int) -> float:
    """How long a process has had a processor; -1 where it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1.0
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def summarise(rows: list[Row]) -> Row:
    """Counts over all rows."""
    sent = [row for row in rows if "seconds_to_end" in row]
    return {
        "n_terms": len(sent),
        "max_seconds": MAX_SECONDS,
        "longest_seconds": max((x["seconds_to_end"] for x in sent), default=0),
        "longest_processor_seconds": max(
            (x["processor_seconds"] for x in sent), default=0
        ),
        "n_slow": sum(x["processor_seconds"] > MAX_SECONDS for x in sent),
        "n_failed": sum(x["status"] not in ENDS for x in sent),
    }


if __name__ == "__main__":
    sys.exit(main())
