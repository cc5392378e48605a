"""Claim: this checkout computes bit for bit what another commit computed.

    python experiments/checks/check_unchanged.py --baseline COMMIT
    python experiments/checks/check_unchanged.py --baseline COMMIT --only train --out unchanged.json
    python experiments/checks/check_unchanged.py --baseline COMMIT --data DIR      also the standard data sets below DIR

Both commits do the same runs on this machine, in folders of their own: learning to prove, ranking a split query by
query, mining rules, PPO on CartPole and Pendulum, and cells of the compile matrix. Tensors are compared by their bytes,
numbers by their shortest decimal form, rule files by their text. Names of fields, and their order within a line of
JSON, are not compared, so that a renaming is no difference; times are left out. Exits 1 when a value differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.paths import ROOT

# Fields that hold a time, say how a step ran and not what it computed, or that
# commits before 0.2 do not write.
IGNORED_FIELDS = {
    "seconds",
    "seconds_in_all",
    "total_seconds",
    "phase_peak_bytes",
    "phase_seconds",
    "phases",
    "replay_ms",
    "format",
    "compiles",
    "found",
    "cache_hits",
    "recompiles",
    "recordings",
    "rerecordings",
    "skips",
    "cudagraph_recordings",
    "cudagraph_rerecordings",
    "cudagraph_skips",
    "fallback_reason",
    "n_truncated_episodes",
    "explained_variance",
    "n_applied_minibatches",
}
# A program for any commit: modules of the environments and networks have moved.
CONTROL = """
import hashlib
from funcppo import random, train_step, tree
from funcppo.config import Config, PPOConfig
from funcppo.envs.base import NoWorld
try:
    from funcppo.envs.classic_control import {env}
    from funcppo.nets import feedforward as mlp
except ImportError:
    from funcppo.envs import {env}
    from funcppo.nets import mlp
cfg = Config(ppo=PPOConfig(n_steps=32), env={env}.environment({env}.{settings}()), agent=mlp.{agent})
state = train_step.init(cfg, NoWorld(), random.key(0))
for _ in range(3):
    state, metrics = train_step.train_step(cfg, NoWorld(), state)
    for leaf in [*tree.leaves(state), *tree.leaves(metrics)]:
        print(leaf.dtype, tuple(leaf.shape), hashlib.sha256(leaf.contiguous().numpy().tobytes()).hexdigest())
"""
CARTPOLE = CONTROL.format(
    env="cartpole",
    settings="CartPoleConfig",
    agent="agent(mlp.MLPConfig(n_obs=4, n_actions=2))",
)
PENDULUM = CONTROL.format(
    env="pendulum",
    settings="PendulumConfig",
    agent="gaussian_agent(mlp.MLPConfig(n_obs=3, n_actions=1))",
)
MAX_ERROR_CHARACTERS = 2000  # of what a failing process printed

Values = list[str]
Run = Callable[[Path, Path], Values]  # (checkout, empty folder) -> results


def main() -> int:
    """The exit status: 0, or 1 when a value differs."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--baseline", required=True, metavar="COMMIT")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="runs with this in the name"
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="standard data sets"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the comparison as JSON"
    )
    args = parser.parse_args()

    runs = RUNS | (
        runs_on_standard_data(args.data.resolve()) if args.data else {}
    )
    with baseline_checkout(args.baseline) as baseline:
        rows = [
            compare_run(name, run, baseline)
            for name, run in runs.items()
            if args.only in name
        ]
    if args.out:
        report = make_report(args.baseline, rows)
        args.out.write_text(json.dumps(report, indent=2) + "\n")
    return int(any(row["difference"] for row in rows))


@contextmanager
def baseline_checkout(commit: str) -> Iterator[Path]:
    """A working tree of a commit, removed afterwards."""
    with tempfile.TemporaryDirectory() as scratch:
        checkout = Path(scratch) / "baseline"
        add = ["git", "worktree", "add", "-q", "--detach"]
        subprocess.run([*add, str(checkout), commit], cwd=ROOT, check=True)
        try:
            yield checkout
        finally:
            remove = ["git", "worktree", "remove", "--force"]
            subprocess.run([*remove, str(checkout)], cwd=ROOT, check=True)


def compare_run(name: str, run: Run, baseline: Path) -> dict[str, Any]:
    """The row of one run, done by the baseline and by this checkout."""
    results = []
    for checkout in (baseline, ROOT):
        with tempfile.TemporaryDirectory() as folder:
            results.append(run(checkout, Path(folder)))
    before, after = results
    difference = compare(before, after)
    print(f"{name}: {len(after)} values, {difference or 'equal'}", flush=True)
    return {
        "run": name,
        "values": len(after),
        "sha256": hashlib.sha256("\n".join(after).encode()).hexdigest(),
        "difference": difference,
    }


def compare(before: Values, after: Values) -> str:
    """Empty where both are equal, else the first difference."""
    if len(before) != len(after):
        return f"{len(before)} values before, {len(after)} now"
    pairs = enumerate(zip(before, after, strict=True))
    differing = [i for i, (a, b) in pairs if a != b]
    if not differing:
        return ""
    i = differing[0]
    return (
        f"{len(differing)} of {len(before)} values differ, "
        f"first {i}: {before[i]} before, {after[i]} now"
    )


def make_report(baseline: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of a comparison."""
    import torch

    return {
        "baseline": full_hash(baseline),
        "commit": full_hash("HEAD"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "rows": rows,
    }


def full_hash(commit: str) -> str:
    """The hash of a commit."""
    command = ["git", "rev-parse", commit]
    return subprocess.check_output(command, cwd=ROOT, text=True).strip()


# What the runs compute


def call(checkout: Path, *args: str, statuses: tuple[int, ...] = (0,)) -> str:
    """What a Python process prints that imports the package of a checkout.

    Args:
      statuses: exit statuses that are no failure.
    """
    # One thread, so that sums have one order; a fixed width of tables.
    env = os.environ | {
        "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    done = subprocess.run(
        [sys.executable, *args],
        cwd=checkout,
        env=env,
        capture_output=True,
        text=True,
    )
    if done.returncode not in statuses:
        printed = done.stdout[-MAX_ERROR_CHARACTERS:]
        printed += done.stderr[-MAX_ERROR_CHARACTERS:]
        command = " ".join(args)
        raise SystemExit(
            f"{checkout}: {command}: exit {done.returncode}\n{printed}"
        )
    return done.stdout


def numbers(value: Any, name: str = "") -> Iterator[str]:
    """The numbers of JSON as text, in order, without the names of fields.

    Args:
      name: of the field that holds the value; some hold times.
    """
    if name in IGNORED_FIELDS:
        return
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield repr(value)


def json_numbers(text: str) -> Values:
    """The numbers of one JSON text, sorted: fields have no order."""
    return sorted(numbers(json.loads(text)))


def json_lines(path: Path) -> Values:
    """The numbers of a JSON Lines file, line by line."""
    lines = path.read_text().splitlines()
    return [number for line in lines for number in json_numbers(line)]


def tensors(path: Path) -> Values:
    """Type, shape and hash of every tensor of a checkpoint, in its order."""
    values = []
    with np.load(path) as file:
        for name in file.files:
            if name.startswith("__"):  # what it says about itself
                continue
            array = file[name]
            digest = hashlib.sha256(array.tobytes()).hexdigest()
            values.append(f"{array.dtype} {array.shape} {digest}")
    return values


def training(dataset: str, *options: str) -> Run:
    """Learning to prove, then ranking the test split query by query."""

    def run(checkout: Path, folder: Path) -> Values:
        out, details = folder / "run", folder / "details.jsonl"
        train = ["train", dataset, "--out", str(out), "--steps", "16384"]
        call(checkout, "-m", "funcppo", *train, *options)
        evaluate = ["evaluate", str(out), "--split", "test"]
        call(checkout, "-m", "funcppo", *evaluate, "--details", str(details))
        return [
            *tensors(out / "checkpoint.npz"),
            *json_lines(out / "metrics.jsonl"),
            *json_numbers((out / "results.json").read_text()),
            *json_lines(details),
        ]

    return run


def mining(dataset: str, *options: str) -> Run:
    """The rule file of a data set."""

    def run(checkout: Path, folder: Path) -> Values:
        out = folder / "rules.tsv"
        mine = ["mine", dataset, "--out", str(out), *options]
        call(checkout, "-m", "funcppo", *mine)
        return out.read_text().splitlines()

    return run


def program(source: str) -> Run:
    """What a program prints."""

    def run(checkout: Path, folder: Path) -> Values:
        return call(checkout, "-c", source).splitlines()

    return run


def matrix_cells(*names: str) -> Run:
    """Status, graphs and parity of some cells of the compile matrix."""

    def run(checkout: Path, folder: Path) -> Values:
        script = "experiments/full_step_matrix.py"
        options = ["--fresh", "--time", "none", "--out", str(folder)]
        # Status 1: a cell does not end as the committed record says.
        call(checkout, script, *options, "--only", *names, statuses=(0, 1))
        record = json.loads(next(folder.glob("*.json")).read_text())
        values = []
        for cell, row in sorted(record["cells"].items()):
            for field in ("status", "graphs", "breaks", "parity"):
                values.append(f"{cell}: {row.get(field)}")
        return values

    return run


RUNS: dict[str, Run] = {
    "train countries_s3": training("countries_s3"),
    "train countries_s1": training("countries_s1"),
    "train family_tree:60:1": training("family_tree:60:1"),
    "mine countries_s2": mining("countries_s2"),
    "mine family_tree:130:2": mining("family_tree:130:2", "--constants"),
    "matrix cells": matrix_cells("0/*aot_eager*", "6/*aot_eager*"),
    "ppo cartpole": program(CARTPOLE),
    "ppo pendulum": program(PENDULUM),
}


def runs_on_standard_data(data: Path) -> dict[str, Run]:
    """Runs on the standard data sets."""
    return {
        "train umls": training(str(data / "umls")),
        "mine umls": mining(str(data / "umls")),
        "mine family": mining(str(data / "family"), "--max-length", "2"),
    }


if __name__ == "__main__":
    raise SystemExit(main())
