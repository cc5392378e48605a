"""From the start of a process to the end of the first training iteration, and how much of it are imports.

    python experiments/benchmarks/startup.py --out experiments/results/startup-h100.json

Each row is a process of its own, several times: imports of PyTorch, with its compiler, and with what code that Inductor
has generated imports; and the first iteration of learning to prove Countries S3 (prover.py) and of CartPole, 4 x 128
(cartpole.py), with nothing compiled, with empty caches of compiled code, and with full ones. Where JAX is
installed, CartPole in JAX, too, with its own cache on disk; its clock begins before the import of JAX, after that of
PyTorch. The first process of each row of imports, and of JAX, may have to write Python's bytecode or read files for the
first time: it is not counted.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.paths import make_parser

STARTED_AT = "BENCHMARK_CELL_STARTED_AT"  # that of side_by_side.py
IMPORTS = {
    "import torch": "import torch",
    "with its compiler": "import torch._dynamo",
    "with what compiled code imports": "import torch._dynamo, torch._inductor.codegen.wrapper, "
    "torch._inductor.select_algorithm",
}
# modes of prover.py and of cartpole.py
MODES = {
    "cuda": {"nothing": "eager-graph", "all": "captured"},
    "cpu": {"nothing": "eager", "all": "compiled"},
}
WORKS = ("S3", "CartPole")
JAX_WORK = "CartPole in JAX"


def main() -> None:
    """Measure all rows, and write them."""
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default="cuda", choices=MODES)
    parser.add_argument("--out", type=Path, help="record to write")
    parser.add_argument(
        "--process",
        nargs=3,
        metavar=("WORK", "MODE", "DEVICE"),
        help=argparse.SUPPRESS,
    )
    args = parser.parse_args()
    if args.process:
        print(run_process(*args.process))
        return
    measure(args.device, args.repeats, args.out)


def measure(device: str, repeats: int, out: Path | None) -> None:
    """Measure all rows; the record is written after each."""
    from experiments.benchmarks.side_by_side import write_record
    from experiments.provenance import describe_machine

    rows: list[dict[str, Any]] = []

    def add(name: str, seconds: list[float]) -> None:
        rows.append(
            {"row": name, "seconds": seconds}
            | {"median": statistics.median(seconds)}
        )
        print(json.dumps(rows[-1]), flush=True)
        if out:
            machine = describe_machine(device)
            write_record(out, {"machine": machine, "rows": rows})

    for name, code in IMPORTS.items():
        times = [import_seconds(code) for _ in range(1 + repeats)]
        add(name, times[1:])
    works = [*WORKS, *([JAX_WORK] if importlib.util.find_spec("jax") else [])]
    for work in works:
        run = partial(iteration_seconds, work, device=device)
        if work in WORKS:
            mode = MODES[device]["nothing"]
            times = [run(mode) for _ in range(1 + repeats)]
            add(f"{work}, nothing compiled", times[1:])
        mode = MODES[device]["all"]
        if work == JAX_WORK:
            run(mode)
        with tempfile.TemporaryDirectory() as cache:
            times = [run(mode, cache=cache) for _ in range(1 + repeats)]
        add(f"{work}, empty caches", times[:1])
        add(f"{work}, full caches", times[1:])


def import_seconds(code: str) -> float:
    """Seconds of a process that runs some code."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def iteration_seconds(
    work: str, mode: str, device: str, cache: str | None = None
) -> float:
    """Seconds from the start of a process to the end of its first iteration.

    Args:
      cache: the folder of compiled code; None for one that is empty.
    """
    with tempfile.TemporaryDirectory() as empty:
        folder = cache or empty
        ended = subprocess.run(
            [sys.executable, __file__, "--process", work, mode, device],
            check=True,
            env=os.environ
            | {
                STARTED_AT: str(time.perf_counter()),
                "TORCHINDUCTOR_CACHE_DIR": folder,
                "TRITON_CACHE_DIR": f"{folder}/triton/0",
                "JAX_COMPILATION_CACHE_DIR": f"{folder}/jax",
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
    return float(ended.stdout.splitlines()[-1])


def run_process(work: str, mode: str, device: str) -> float:
    """Run the first iteration of a work, and return the seconds since this process was started."""
    from experiments.benchmarks.side_by_side import seconds_since_start

    if work == JAX_WORK:
        from experiments.benchmarks.cartpole import Jax

        os.environ[STARTED_AT] = str(time.perf_counter())
        return Jax("4x128", device, "highest").prepare()["cold_s"]
    if work == "CartPole":
        from experiments.benchmarks.cartpole import make_case

        case = make_case("4x128", mode, device, "highest")
    else:
        from experiments.benchmarks.prover import ProverCase

        case = ProverCase("s3", mode, device, "")
    captured = case.capture(case.iteration)
    captured.step()
    case.synchronise()
    return seconds_since_start()


if __name__ == "__main__":
    main()
