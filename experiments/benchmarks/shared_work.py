"""Ranking and mining by several processes: seconds, and whether they write the same bytes.

    python experiments/benchmarks/shared_work.py --device cuda --graph DIR --data DATASET --processes 1 2 --out FILE

`rank` is the filtered ranking of the test split of an indexed graph (`data --index`), or of `--queries` of it, by
noisy-or at height 1, from counted confidences; `mine` mines the data set within a fixed amount of work, which no clock
cuts. Each row has the seconds of the command, those that the program says (of ranking without the start of Python, of
mining without reading), the SHA-256 of the file that it wrote, and the speed-ups over the fewest processes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import Row, write_record
from experiments.paths import ROOT
from experiments.provenance import describe_machine

WORK = ("rank", "mine")
# fields of what the programs say
SECONDS = {"rank": "total_seconds", "mine": "mining_seconds"}


def main() -> int:
    """The exit status: 0, or 1 when files differ or a command fails."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--work", nargs="*", default=WORK, choices=WORK)
    parser.add_argument("--processes", nargs="*", type=int, default=[1, 2])
    parser.add_argument(
        "--graph", help="folder of funcppo data --index, for rank"
    )
    parser.add_argument("--data", help="data set, for mine")
    parser.add_argument(
        "--queries", type=int, help="rank so many; default: all"
    )
    parser.add_argument(
        "--max-rows", type=int, default=500_000_000, help="of mining"
    )
    parser.add_argument("--limit", type=float, default=300.0, help="seconds")
    parser.add_argument("--out", type=Path, help="record to write")
    args = parser.parse_args()

    rows: list[Row] = []
    compared: list[Row] = []
    for work in args.work:
        for n in args.processes:
            rows.append(run(args, work, n))
            print(json.dumps(rows[-1]), flush=True)
            compared = [row | compare(rows, row) for row in rows]
            if args.out:
                machine = describe_machine(args.device)
                record = {"machine": machine, "rows": compared}
                write_record(args.out, record)
    return int(not all(row["is_equal"] for row in compared))


def run(args: argparse.Namespace, work: str, n: int) -> Row:
    """Run a program in some processes of torchrun; its row."""
    row: Row = {"work": work, "processes": n, "device": args.device}
    row["size"] = args.queries if work == "rank" else args.max_rows
    with tempfile.TemporaryDirectory() as name:
        out, summary = Path(name, "out"), Path(name, "summary.json")
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--standalone", "--nproc-per-node", str(n), "-m", "funcppo"]
        command += words(args, work, out)
        command += ["--device", args.device, "--json", str(summary)]
        start = time.perf_counter()
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                cwd=ROOT,
                timeout=args.limit,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        except subprocess.TimeoutExpired:
            return row | {"error": f"took more than {args.limit:g} s"}
        row["seconds"] = time.perf_counter() - start
        if done.returncode:
            return row | {"error": done.stderr[-2000:]}
        content = out.read_bytes()
        told = json.loads(summary.read_text())
    return row | {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "work_seconds": told[SECONDS[work]],
    }


def words(args: argparse.Namespace, work: str, out: Path) -> list[str]:
    """The command line of a work."""
    if work == "rank":
        queries = ["--queries", str(args.queries)] if args.queries else []
        chosen = ["--height", "1", "--score", "noisy-or", "--smoothing", "5"]
        chosen += ["--object-identity", "False"]
        return [
            "evaluate",
            args.graph,
            *chosen,
            *queries,
            "--details",
            str(out),
        ]
    limits = ["--max-rows", str(args.max_rows), "--seconds", "100000"]
    return ["mine", args.data, *limits, "--out", str(out)]


def compare(rows: list[Row], row: Row) -> Row:
    """How a row compares with that of the fewest processes."""
    same_work = [x for x in rows if x["work"] == row["work"]]
    first = min(same_work, key=lambda x: x["processes"])
    if "error" in row or "error" in first:
        return {"is_equal": False}
    return {
        "is_equal": row["sha256"] == first["sha256"],
        "speed_up": first["seconds"] / row["seconds"],
        "work_speed_up": first["work_seconds"] / row["work_seconds"],
    }


if __name__ == "__main__":
    sys.exit(main())
