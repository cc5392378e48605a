"""Claim: this checkout computes bit for bit what another commit computed.

    python experiments/checks/check_unchanged.py --baseline COMMIT
    python experiments/checks/check_unchanged.py --baseline COMMIT --only train --out unchanged.json
    python experiments/checks/check_unchanged.py --baseline COMMIT --data DIR
                                                                    also the standard data sets below DIR

Both commits do the same runs on this machine, in folders of their own: learning to prove, ranking a split query by
query, mining rules, PPO on CartPole and Pendulum, and cells of the compile matrix. Tensors are compared by their bytes,
numbers by their shortest decimal form, rule files by their text. Names of fields are not compared, so that a renaming
is no difference; times are left out. Exits 1 when a value differs.
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
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
# Fields that hold a time, or say how a step ran and not what it computed.
IGNORED = {
    "seconds",
    "seconds_in_all",
    "total_seconds",
    "replay_ms",
    "format",
    "compiles",
    "found",
    "cache_hits",
    "recompiles",
    "recordings",
    "rerecordings",
    "skips",
    "fallback_reason",
}
CONTROL = """
import hashlib
from funcppo import random, train_step, tree
from funcppo.config import Config, PPOConfig
from funcppo.envs.classic_control import {env}
from funcppo.envs.base import NoWorld
from funcppo.nets import feedforward as mlp
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

Values = list[str]
# (checkout, empty folder) -> what the run computed
Run = Callable[[Path, Path], Values]


def call(checkout: Path, *args: str, statuses: tuple[int, ...] = (0,)) -> str:
    """What a Python process prints that imports the package of a checkout; one thread, so that sums have one order."""
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
        raise SystemExit(
            f"{checkout}: {' '.join(args)}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.stdout


def numbers(value: Any, name: str = "") -> Iterator[str]:
    """The leaves of JSON as text, in order, without their names."""
    if name in IGNORED:
        return
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield repr(value)


def json_lines(path: Path) -> Values:
    """Every number of a JSON Lines file."""
    return [
        number
        for line in path.read_text().splitlines()
        for number in numbers(json.loads(line))
    ]


def tensors(path: Path) -> Values:
    """Type, shape and hash of every tensor of a checkpoint, in its order; what it says about itself is left out."""
    with np.load(path) as file:
        arrays = [
            file[name] for name in file.files if not name.startswith("__")
        ]
    return [
        f"{a.dtype} {a.shape} {hashlib.sha256(a.tobytes()).hexdigest()}"
        for a in arrays
    ]


def training(dataset: str, *options: str) -> Run:
    """Learning to prove, then ranking the test split with a line for every query."""

    def run(checkout: Path, folder: Path) -> Values:
        out, details = folder / "run", folder / "details.jsonl"
        call(
            checkout,
            "-m",
            "funcppo",
            "train",
            dataset,
            "--out",
            str(out),
            "--steps",
            "16384",
            *options,
        )
        call(
            checkout,
            "-m",
            "funcppo",
            "evaluate",
            str(out),
            "--split",
            "test",
            "--details",
            str(details),
        )
        results = list(numbers(json.loads((out / "results.json").read_text())))
        return [
            *tensors(out / "checkpoint.npz"),
            *json_lines(out / "metrics.jsonl"),
            *results,
            *json_lines(details),
        ]

    return run


def mining(dataset: str, *options: str) -> Run:
    """The rule file of a data set."""

    def run(checkout: Path, folder: Path) -> Values:
        out = folder / "rules.tsv"
        call(
            checkout,
            "-m",
            "funcppo",
            "mine",
            dataset,
            "--out",
            str(out),
            *options,
        )
        return out.read_text().splitlines()

    return run


def program(source: str) -> Run:
    """What a program prints."""
    return lambda checkout, folder: call(checkout, "-c", source).splitlines()


def cells(*names: str) -> Run:
    """Status, graphs and parity of some cells of the compile matrix."""

    def run(checkout: Path, folder: Path) -> Values:
        options = (
            "--fresh",
            "--time",
            "none",
            "--out",
            str(folder),
            "--only",
            *names,
        )
        # 1: not as the committed record
        call(
            checkout,
            "experiments/full_step_matrix.py",
            *options,
            statuses=(0, 1),
        )
        record = json.loads(next(folder.glob("*.json")).read_text())
        wanted = ("status", "graphs", "breaks", "parity")
        return [
            f"{cell}: {row.get(field)}"
            for cell, row in sorted(record["cells"].items())
            for field in wanted
        ]

    return run


RUNS: dict[str, Run] = {
    "train countries_s3": training("countries_s3"),
    "train countries_s1": training("countries_s1"),
    "train family_tree:60:1": training("family_tree:60:1"),
    "mine countries_s2": mining("countries_s2"),
    "mine family_tree:130:2": mining("family_tree:130:2", "--constants"),
    "matrix cells": cells("0/*aot_eager*", "6/*aot_eager*"),
    "ppo cartpole": program(CARTPOLE),
    "ppo pendulum": program(PENDULUM),
}


def standard(data: Path) -> dict[str, Run]:
    """Runs on the standard data sets, where they are at hand."""
    return {
        "train umls": training(str(data / "umls")),
        "mine umls": mining(str(data / "umls")),
        "mine family": mining(str(data / "family"), "--max-length", "2"),
    }


def compare(before: Values, after: Values) -> str:
    """Empty where both are equal, else the first difference."""
    if len(before) != len(after):
        return f"{len(before)} values before, {len(after)} now"
    differing = [
        i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b
    ]
    if not differing:
        return ""
    first = differing[0]
    return f"{len(differing)} of {len(before)} values differ, first {first}: {before[first]} before, {after[first]} now"


def main() -> int:
    """The exit status: 0, or 1 when a value differs."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--baseline",
        required=True,
        metavar="COMMIT",
        help="the commit to compare with",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="only runs whose name holds this text",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder that holds the standard data sets",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the comparison as JSON"
    )
    args = parser.parse_args()

    runs = {
        name: run
        for name, run in (
            RUNS | (standard(args.data) if args.data else {})
        ).items()
        if args.only in name
    }
    rows, changed = [], 0
    with tempfile.TemporaryDirectory() as scratch:
        baseline = Path(scratch) / "baseline"
        subprocess.run(
            [
                "git",
                "worktree",
                "add",
                "-q",
                "--detach",
                str(baseline),
                args.baseline,
            ],
            cwd=ROOT,
            check=True,
        )
        try:
            for name, run in runs.items():
                folders = [
                    Path(tempfile.mkdtemp(dir=scratch)) for _ in range(2)
                ]
                before, after = (
                    run(checkout, folder)
                    for checkout, folder in zip(
                        (baseline, ROOT), folders, strict=True
                    )
                )
                difference = compare(before, after)
                changed += bool(difference)
                digest = hashlib.sha256("\n".join(after).encode()).hexdigest()
                rows.append(
                    {
                        "run": name,
                        "values": len(after),
                        "sha256": digest,
                        "difference": difference,
                    }
                )
                print(
                    f"{name}: {len(after)} values, {difference or 'equal'}",
                    flush=True,
                )
        finally:
            subprocess.run(
                ["git", "worktree", "remove", "--force", str(baseline)],
                cwd=ROOT,
                check=True,
            )
    if args.out:
        args.out.write_text(
            json.dumps(report(args.baseline, rows), indent=2) + "\n"
        )
    return bool(changed)


def report(baseline: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of a comparison."""
    import torch

    commit = lambda name: subprocess.check_output(
        ["git", "rev-parse", name], cwd=ROOT, text=True
    ).strip()
    return {
        "baseline": commit(baseline),
        "commit": commit("HEAD"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "rows": rows,
    }


if __name__ == "__main__":
    raise SystemExit(main())
