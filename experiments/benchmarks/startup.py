"""From the start of a process to the end of the first training iteration, and how much of it are imports.

    python experiments/benchmarks/startup.py --out experiments/results/startup-h100.json

Each row is a process of its own, several times: imports of PyTorch, with its compiler, and with what code that Inductor
has generated imports; and the first iteration of learning to prove Countries S3 (prover.py) with nothing compiled,
with full caches of compiled code, and with empty ones. The first process of each row, which may have to write Python's
bytecode or read files for the first time, is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

import torch

from experiments.benchmarks.side_by_side import write_record
from experiments.provenance import describe_machine

IMPORTS = {
    "import torch": "import torch",
    "with its compiler": "import torch._dynamo",
    "with what compiled code imports": "import torch._dynamo, torch._inductor.codegen.wrapper, "
    "torch._inductor.select_algorithm",
}
# modes of prover.py
MODES = {
    "cuda": {"nothing": "eager-loop-body-graphs", "all": "captured"},
    "cpu": {"nothing": "eager", "all": "compiled"},
}


def main() -> None:
    """Measure all rows, and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--out", type=Path, help="record to write")
    args = parser.parse_args()

    rows: list[dict[str, Any]] = []

    def add(name: str, seconds: list[float]) -> None:
        rows.append(
            {"row": name, "seconds": seconds}
            | {"median": statistics.median(seconds)}
        )
        print(json.dumps(rows[-1]), flush=True)
        if args.out:
            machine = describe_machine(args.device)
            write_record(args.out, {"machine": machine, "rows": rows})

    for name, code in IMPORTS.items():
        times = [import_seconds(code) for _ in range(1 + args.repeats)]
        add(name, times[1:])
    modes = MODES[args.device]
    with tempfile.TemporaryDirectory() as cache:
        times = [
            iteration_seconds(modes["nothing"], args.device, cache)
            for _ in range(1 + args.repeats)
        ]
        add("S3, nothing compiled", times[1:])
        times = [
            iteration_seconds(modes["all"], args.device, cache)
            for _ in range(2 + args.repeats)
        ]
        add("S3, empty caches", times[:1])
        add("S3, full caches", times[2:])


def import_seconds(code: str) -> float:
    """Seconds of a process that runs some code."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def iteration_seconds(mode: str, device: str, cache: str) -> float:
    """Seconds from the start of a process to the end of its first iteration.

    Args:
      cache: the folder of compiled code.
    """
    script = Path(__file__).with_name("prover.py")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        words = ("--work", "s3", "--mode", mode, "--device", device)
        subprocess.run(
            [sys.executable, str(script), *words, "--out", str(out)],
            check=True,
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache},
            stdout=sys.stderr,
        )
        (row,) = json.loads(out.read_text())["rows"]
    return row["cold_s"]


if __name__ == "__main__":
    main()
