"""Claim: on a GPU the switches of graphs do what they say, metrics tell of it, and a run outlives SIGTERM.

    python experiments/checks/gpu_operations.py --out experiments/results/gpu_operations-h200.json

A small prover is trained and its test split ranked under PyTorch's profiler, with `--graphs auto` and `--graphs off`,
and `--metrics-file`. A row has how often CUDA graphs were launched, what the metrics say (graphs recorded, replayed or
not, fallbacks by code), and the operators and kernels with the most device time. Then the training is ended by SIGTERM
in the middle and resumed, and once done under `CUDA_LAUNCH_BLOCKING=1`: a row says whether the parameters have the
bits of the undisturbed run. Exits 1 when one does not hold. On a CPU nothing is launched.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import Row, write_record
from experiments.paths import ROOT
from experiments.provenance import describe_machine
from funcppo import checkpoint

TRAIN = (
    *("train", "family_tree:20:0", "--strategy", "eager"),
    *("--ppo.n-envs", "8", "--ppo.n-steps", "4", "--ppo.n-minibatches", "2"),
    *("--prover.max-height", "2", "--learner", "proofs", "--score", "success"),
    *("--n-validations", "1", "--n-validation-queries", "2"),
    *("--checkpoint-every", "1", "--seconds", "None"),
)
PROFILED_STEPS = "64"  # two updates
DISTURBED_STEPS = "25600"  # 800 updates
LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
SERIES = re.compile(
    r'^funcppo_graph_(enabled|recordings_total|fallbacks_total\{reason="(\w+)"\}) (\S+)',
    re.MULTILINE,
)
N_COSTLIEST = 8  # operators and kernels of a row, by device time
# Runs the command line after its first argument, a file for the calls and device times of all operators and kernels.
PROFILE = """
import json, sys
import torch
from funcppo import cli
path = sys.argv.pop(1)
with torch.profiler.profile(acc_events=True) as profile:
    try:
        cli.main()
    except SystemExit as stop:
        status = stop.code
rows = [
    {"name": x.key, "calls": x.count, "device_ms": x.self_device_time_total / 1e3}
    for x in profile.key_averages()
]
with open(path, "w") as file:
    json.dump(rows, file)
sys.exit(status)
"""
MIN_LINES = 20  # of metrics.jsonl before SIGTERM
TIMEOUT_SECONDS = 300


def main() -> int:
    """The exit status: 0, or 1 when a claim does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="record to write")
    args = parser.parse_args()

    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train = [*TRAIN, "--device", args.device, "--steps"]
        rank = ["evaluate", str(folder / "auto"), "--score", "success"]
        rank += ["--device", args.device]
        for graphs in ("auto", "off"):
            words = [*train, PROFILED_STEPS, "--out", str(folder / graphs)]
            rows.append(profile(words, graphs, folder))
        rows += [profile(rank, graphs, folder) for graphs in ("auto", "off")]
        expected = parameters(folder / "auto")
        rows.append(compare("--graphs off", expected, folder / "off"))
        rows += disturb([*train, DISTURBED_STEPS], folder)

    for row in rows:
        print(row, flush=True)
    if args.out:
        machine = describe_machine(args.device)
        write_record(args.out, {"machine": machine, "rows": rows})
    return 0 if args.device == "cpu" else int(not all(map(holds, rows)))


def holds(row: Row) -> bool:
    """Whether a row is what is claimed."""
    if "equal_bits" in row:
        return row["equal_bits"] and row.get("status", 143) == 143
    if row["graphs"] == "off":
        said = not row["enabled"] and set(row["fallbacks"]) == {"disabled"}
        return said and row["launches"] == row["recordings"] == 0
    said = row["enabled"] == 1 and not row["fallbacks"]
    return said and row["launches"] > 0 and row["recordings"] > 0


def disturb(train: list[str], folder: Path) -> list[Row]:
    """Train undisturbed, with launches that are waited for, and with SIGTERM in the middle; the rows of the latter."""
    plain, blocking, ended = (folder / x for x in ("plain", "slow", "ended"))
    run([*train, "--out", str(plain)])
    expected = parameters(plain)
    run([*train, "--out", str(blocking)], CUDA_LAUNCH_BLOCKING="1")
    status = terminate_in_the_middle(train, ended)
    run(["train", "--out", str(ended), "--resume"])
    return [
        compare("CUDA_LAUNCH_BLOCKING=1", expected, blocking),
        {**compare("SIGTERM", expected, ended), "status": status},
    ]


def profile(command: list[str], graphs: str, folder: Path) -> Row:
    """Run a program under the profiler; the launches of graphs, and what its metrics say."""
    report, metrics = folder / "profile.json", folder / "metrics.prom"
    switches = ["--graphs", graphs, "--metrics-file", str(metrics)]
    run(["-c", PROFILE, str(report), *command, *switches], is_code=True)
    said: Row = {"fallbacks": {}}
    for name, code, value in SERIES.findall(metrics.read_text()):
        if not code:
            said[name.removesuffix("_total")] = float(value)
        elif float(value):
            said["fallbacks"][code] = float(value)
    operators = json.loads(report.read_text())
    launches = sum(x["calls"] for x in operators if x["name"] in LAUNCHES)
    kernels = sorted(
        (x for x in operators if x["device_ms"]),
        key=lambda x: -x["device_ms"],
    )
    return {
        "program": command[0],
        "graphs": graphs,
        "launches": launches,
        **said,
        "costliest": kernels[:N_COSTLIEST],
    }


def run(words: list[str], is_code: bool = False, **variables: str) -> None:
    """Run funcppo, or Python on some code, to its end.

    Raises:
      RuntimeError: it failed.
    """
    module = [] if is_code else ["-m", "funcppo"]
    done = subprocess.run(
        [sys.executable, *module, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **variables},
        timeout=TIMEOUT_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr}")


def terminate_in_the_middle(train: list[str], out: Path) -> int:
    """Send SIGTERM to a training that has made some updates; its exit status."""
    command = [sys.executable, "-m", "funcppo", *train, "--out", str(out)]
    lines = out / "metrics.jsonl"
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL
    ) as process:
        end = time.monotonic() + TIMEOUT_SECONDS
        while process.poll() is None and time.monotonic() < end:
            if lines.exists() and lines.read_text().count("\n") >= MIN_LINES:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        return process.wait(timeout=TIMEOUT_SECONDS)


def parameters(out: Path) -> dict[str, bytes]:
    """The bytes of all arrays of a run's checkpoint."""
    arrays = checkpoint.read(out / "checkpoint.npz").arrays
    return {name: array.tobytes() for name, array in arrays.items()}


def compare(name: str, expected: dict[str, bytes], out: Path) -> Row:
    """A row that says whether a run ended with the bits of another."""
    return {"disturbed_by": name, "equal_bits": parameters(out) == expected}


if __name__ == "__main__":
    sys.exit(main())
