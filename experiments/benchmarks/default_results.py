"""What the programs give at their defaults: `funcppo mine` and `funcppo train`, with no option but the seed.

    python experiments/benchmarks/default_results.py --data DIR

Rules are mined once for each data set, whether or not it comes with some, and every seed is trained with them. A row
holds the results of a run, what was chosen, and the seconds and the peak memory of both programs. The record is written
after every run, and what it holds is not run again. Programs run on `--threads` each, `--jobs` of them side by side.

    python experiments/benchmarks/default_results.py --data DIR --threads 2 --seeds 1 \\
        --out experiments/results/default_results_2_threads.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DATA, RESULTS
from experiments.provenance import current_commit, describe_machine

# A data set whose rules are part of it is trained with these.
OWN_RULES = ("countries_S1", "countries_S2", "countries_S3", "clans:1500:0")
MINED_RULES = (
    *("kinships", "nations", "umls", "family"),
    *("wn18rr", "fb15k-237"),
)
# Beyond the defaults: what `make train` sets.
OPTIONS = {"clans:1500:0": ["--prover.hard-negative-fraction", "0.5"]}


class Cost(NamedTuple):
    """What a program took."""

    seconds: float
    peak_mb: float


def main() -> None:
    """Run what the record does not hold yet."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "default_results.json"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument("--only", choices=(*OWN_RULES, *MINED_RULES))
    args = parser.parse_args()

    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    record: dict[str, Any] = {"runs": []}
    if args.out.exists():
        record = json.loads(args.out.read_text())
    present = {(row["set"], row["seed"]) for row in record["runs"]}
    names = [args.only] if args.only else [*OWN_RULES, *MINED_RULES]
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = []
        for name in names:
            seeds = [s for s in range(args.seeds) if (name, s) not in present]
            if seeds:
                runs.append(pool.submit(run_set, args.data, name, seeds, pool))
        pending = [future for run in runs for future in run.result()]
        for future in as_completed(pending):
            record["runs"].append(future.result())
            write_record(args.out, record)


def run_set(
    data: Path, name: str, seeds: list[int], pool: ThreadPoolExecutor
) -> list[Any]:
    """Mine the rules of a set, if it needs any, and start its trainings; the futures of their rows."""
    target = name if ":" in name else str((data / name).resolve())
    options = OPTIONS.get(name, [])
    if name in OWN_RULES:
        return [
            pool.submit(train, name, target, seed, options, None)
            for seed in seeds
        ]
    rules, mining = mine(target, [])
    options = ["--rules", str(rules), *options]
    return [
        pool.submit(train, name, target, seed, options, mining)
        for seed in seeds
    ]


def mine(target: str, options: list[str]) -> tuple[Path, Cost]:
    """Mine the rules of a data set; their file, and what it took."""
    rules = Path(tempfile.mkdtemp()) / "rules.tsv"
    return rules, call(["mine", target, "--out", str(rules), *options])


def train(
    name: str, target: str, seed: int, options: list[str], mining: Cost | None
) -> dict[str, Any]:
    """The row of one training."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        return train_into(out, name, target, seed, options, mining)


def train_into(
    out: Path,
    name: str,
    target: str,
    seed: int,
    options: list[str],
    mining: Cost | None,
) -> dict[str, Any]:
    """The row of one training, whose run stays in a folder."""
    words = ["train", target, "--out", str(out), "--seed", str(seed)]
    cost = call([*words, *options])
    results = json.loads((out / "results.json").read_text())
    config = json.loads((out / "config.json").read_text())
    results.pop("calibration", None)
    for scores in results["test"].values():
        scores.pop("by_group", None)
    results["dataset"] = name
    return {
        "set": name,
        "seed": seed,
        "rule_score": config["rule_score"],
        "smoothing": config["prover"]["smoothing"],
        "object_identity": config["prover"]["object_identity"],
        "training": cost._asdict(),
        "mining": mining and mining._asdict(),
        "results": results,
        "commit": current_commit(),
        "machine": describe_machine(),
    }


def call(words: list[str]) -> Cost:
    """Run a program.

    Raises:
      RuntimeError: it fails.
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "funcppo", *words],
        stdout=sys.stderr,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if status:
        raise RuntimeError(f"{' '.join(words)}: exit {process.returncode}")
    seconds = time.perf_counter() - start
    return Cost(round(seconds, 1), round(usage.ru_maxrss / 1000, 1))


if __name__ == "__main__":
    main()
