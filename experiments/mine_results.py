"""Mined rules alone: how well they rank the test split, and what mining them took; and what training adds.

    python experiments/mine_results.py --data ../shared/data --out experiments/results/mine_results.json
    python experiments/mine_results.py --train umls --out experiments/results/mine_results.json

Rules are mined from the known facts, written, read back, and judged as `funcppo evaluate` would: filtered, both sides,
expected ties (Countries: tails among the five regions). Beside the two scores of the library stands max-confidence with
the confidence that the miner ranks by: leave-one-out, smoothed. The file is written after each set; sets in it are kept
unless --again names them. `--train` runs `funcppo train` on a set's mined rules and stores what it reports.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from funcppo import mining, problem, protocol, queries
from funcppo.config import MineConfig, ProverSettings
from funcppo.data import load
from funcppo.data.mined import Counts
from funcppo.logic import baselines
from funcppo.logic.mine import SMOOTHING
from funcppo.problem import Problem
from funcppo.protocol import Protocol

SETS: dict[str, tuple[MineConfig, int | None]] = {  # settings, and the height of proofs: None chooses by valid
    "countries_S1": (MineConfig(), None),
    "countries_S2": (MineConfig(), None),
    "countries_S3": (MineConfig(), None),
    "family": (MineConfig(), 1),
    "umls": (MineConfig(max_length=2), 1),
    "wn18rr": (MineConfig(constants=True, min_confidence=0.001), 1),
    "fb15k-237": (MineConfig(constants=True, max_length=2), 1),
}
TRAIN = ["--ppo.n-envs", "128", "--ppo.learning-rate", "3e-4", "--score", "best-proof", "--validations", "5"]


def main() -> None:
    """Measure what the file does not hold yet, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("experiments/results/mine_results.json"))
    parser.add_argument("--only", choices=SETS, action="append")
    parser.add_argument("--again", choices=SETS, action="append", default=[])
    parser.add_argument("--train", choices=SETS, action="append", default=[], help="sets to train on, and nothing else")
    parser.add_argument("--steps", type=int, default=60_000, help="of training")
    args = parser.parse_args()
    stored = json.loads(args.out.read_text()) if args.out.exists() else {"sets": {}, "trained": {}}
    for name in args.train or [n for n in args.only or SETS if n in args.again or n not in stored["sets"]]:
        kind, row = ("trained", trained(args, name)) if args.train else ("sets", measured(args.data, name))
        stored[kind][name] = row | {"commit": commit()}
        stored["machine"] = machine()
        args.out.write_text(json.dumps(stored, indent=1) + "\n")
    print(table(stored))


def measured(data: Path, name: str) -> dict[str, Any]:
    """Mining and the untrained scores of one set."""
    cfg, height = SETS[name]
    plain = load(data / name, own_rules=False)
    with tempfile.TemporaryDirectory() as folder:
        path, start = Path(folder) / "rules.tsv", time.perf_counter()
        found, counts, mined = mining.mine_dataset(plain, cfg)
        mining.save(path, found, counts, "tsv")
        seconds, start = time.perf_counter() - start, time.perf_counter()
        ready = problem.build(load(data / name, path), ProverSettings(max_height=height))
    row = {
        "settings": {field: getattr(cfg, field) for field in cfg.__slots__},
        "rules": len(found.rules),
        "candidates": mined.n_candidates,
        "estimated": int((mined.rules.error > 0).sum()),
        "mining_seconds": round(seconds, 1),
        "height": ready.max_height,
        "notes": [*mined.notes, *ready.notes],
        "test": scores(ready, counts),
    }
    return row | {"judging_seconds": round(time.perf_counter() - start, 1)}


def scores(ready: Problem, counts: Counts) -> dict[str, Any]:
    """Each score's summary; what derives the candidates is found once."""
    memo: list[Any] = []
    kb = ready.kb
    alone = torch.from_numpy(counts.support - counts.circular).float()
    pairs = torch.from_numpy(counts.body_pairs - counts.circular).float() + SMOOTHING
    ways = {
        "max-confidence": (baselines.max_confidence, kb),
        "noisy-or": (baselines.noisy_or, kb),
        "max-confidence, smoothed": (baselines.max_confidence, kb._replace(support=alone, body_pairs=pairs)),
    }
    found = {}
    for name, (score, world) in ways.items():

        def scorer(atoms: torch.Tensor, score: Any = score, world: Any = world) -> torch.Tensor:
            if not memo:
                memo.append(baselines.derivations(kb, ready.sizes, ready.model, ready.max_height, atoms))
            return score(world, memo, len(atoms))

        how = Protocol(sides=(queries.TAIL,) if ready.regions else (queries.HEAD, queries.TAIL))
        ranked = problem.rank(ready, ready.dataset.test, scorer, how)
        found[name] = protocol.summarise(ranked, list(ready.dataset.predicates), with_auc=ready.regions)
        del found[name]["by_group"]
    return found


def trained(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """What `funcppo train` reports on a set's mined rules, seed 0."""
    cfg, height = SETS[name]
    with tempfile.TemporaryDirectory() as folder:
        rules, out = Path(folder) / "rules.tsv", Path(folder) / "out"
        found, counts, _ = mining.mine_dataset(load(args.data / name, own_rules=False), cfg)
        mining.save(rules, found, counts, "tsv")
        command = [sys.executable, "-m", "funcppo", "train", str(args.data / name), "--rules", str(rules)]
        command += ["--out", str(out), "--steps", str(args.steps), *TRAIN]
        command += ["--prover.max-height", str(height)] if height else []
        subprocess.run(command, check=True, stdout=sys.stderr)
        results = json.loads((out / "results.json").read_text())
    for row in results["test"].values():
        del row["by_group"]
    return {key: value for key, value in results.items() if key not in ("dataset", "notes")}


def table(stored: dict[str, Any]) -> str:
    """Markdown: a row a set."""
    names = ["max-confidence", "noisy-or", "max-confidence, smoothed"]
    lines = [
        f"| data | rules | seconds | {' | '.join(names)} | trained | ceiling |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in stored["sets"].items():
        key = "auc_pr" if "auc_pr" in row["test"]["noisy-or"] else "mrr"
        cells = [f"{row['test'][score][key]:.3f}" for score in names]
        after = stored["trained"].get(name)
        cells.append(f"{after['test'][after['score'] + ', trained'][key]:.3f}" if after else "")
        what = f"{name}, {'AUC-PR' if key == 'auc_pr' else 'MRR'}"
        ceiling = f"{row['test']['noisy-or']['ceiling']:.3f}"
        lines.append(f"| {what} | {row['rules']} | {row['mining_seconds']} | {' | '.join(cells)} | {ceiling} |")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Where the numbers come from."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return {"cpu": model, "cores": os.cpu_count(), "threads": torch.get_num_threads()} | versions


def commit() -> str:
    """The commit that was run; FUNCPPO_COMMIT names it where there is no checkout."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    return os.environ.get("FUNCPPO_COMMIT") or subprocess.run(asked, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
