"""Learned scores beside untrained ones, over seeds.

    python experiments/main_results.py --data ../shared/data --out experiments/results/main_results.json

Each run is one of `funcppo train`. Where a set has several options to try, each is trained at seed 0, and the one that
ranks the valid split best is trained at the other seeds too and once at learning rate 0. The file is written after
every run, and what it holds is not run again. Mined rules are those of `mine_results.py`, applied as there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from statistics import mean, stdev
from threading import Lock
from typing import NamedTuple

import torch
from experiments.benchmarks.mining_results import SETS as MINED
from experiments.benchmarks.mining_results import commit, machine

from funcppo.atomic_io import write_atomically
from funcppo.data import load
from funcppo.experiment import rule_cache


def options(**given: str) -> list[str]:
    """Command-line options: `hard_fraction="1"` under a prefix becomes `--prover.hard-negative-fraction 1`."""
    return [word for name, value in given.items() for word in (f"--{name.replace('__', '.').replace('_', '-')}", value)]


HEAD = "| data | rules | exists | max-confidence | noisy-or | untrained | trained | learning rate 0 | ceiling | s |"
README = Path(__file__).parents[1] / "README.md"


class Set(NamedTuple):
    """A data set with its rules, and how it is trained."""

    settings: list[str]  # beyond the defaults
    tried: Sequence[list[str]] = ([],)  # more of them, of which the valid split chooses one


def products(*axes: list[list[str]]) -> list[list[str]]:
    """Every choice of one from each axis."""
    return [[word for part in parts for word in part] for parts in itertools.product(*axes)]


def with_mined(name: str, **given: str) -> list[str]:
    """Options of a set with mined rules, applied as they are judged untrained."""
    how = MINED[name][1]
    given |= {"rules": "{mined}", "prover__smoothing": str(how.smoothing)}
    given |= {"prover__max_height": str(how.max_height)} if how.max_height else {}
    return [*options(**given), *(["--prover.object-identity"] if how.object_identity else [])]


SHARES = [options(prover__hard_negative_fraction=share) for share in ("0", "0.5", "1")]
WEIGHTS = [options(ppo__entropy_coef=weight) for weight in ("0.3", "0.05", "1")]
HEIGHT_1 = {"prover__max_height": "1", "score": "success", "n_validations": "4"}
SMALL_NET = {"prover__embed_dim": "16", "prover__hidden_dim": "32"}
MANY_RULES = {
    **HEIGHT_1,
    **SMALL_NET,
    "n_validation_queries": "500",
    "n_validations": "12",
    "steps": "5000000",
    "device": "{device}",
    "prover__hard_negative_fraction": "1",
    "ppo__learning_rate": "3e-3",
    "ppo__n_envs": "4096",
    "ppo__n_minibatches": "16",
}
LONGER = {
    "n_validations": "8",
    "steps": "400000",
    "prover__hard_negative_fraction": "1",
    "ppo__entropy_coef": "1",
    "ppo__n_envs": "512",
    "ppo__n_minibatches": "16",
}
RATES = [options(ppo__learning_rate=rate) for rate in ("1e-3", "3e-3")]
GENTLE = [*products(RATES, [WEIGHTS[2]]), *products([options(ppo__learning_rate="3e-4"), RATES[0]], [WEIGHTS[0]])]
FEWER_STEPS = {"steps": "60000", "n_validations": "4"}
BOUND = {"prover__max_successors": "64"}  # room for all successors of a goal with a known argument: 51 facts, 4 rules
MANY_MINED = MANY_RULES | {"n_validations": "6", "steps": "650000", "ppo__n_envs": "1024"}
SETS = {
    "countries_S1": Set([]),
    "countries_S2": Set([], products(SHARES, WEIGHTS)),
    "countries_S3": Set([], products([options(prover__max_height=h) for h in "23"], SHARES[:2], WEIGHTS[:2])),
    "family": Set(
        options(prover__max_height="2", score="best-proof", n_validations="4", n_validation_queries="300"),
        products(SHARES, WEIGHTS),
    ),
    "family, height 1": Set(options(**HEIGHT_1), products(SHARES, WEIGHTS[::2])),
    "umls": Set(options(**HEIGHT_1), products(SHARES, WEIGHTS[::2])),
    "family_kns": Set(options(**HEIGHT_1, prover__hard_negative_fraction="0.5")),
    "family_kns, 100 negatives": Set(options(**HEIGHT_1, prover__hard_negative_fraction="0.5")),
    "wn18rr": Set(options(**HEIGHT_1, prover__hard_negative_fraction="0.5")),
    "countries_S1, mined rules": Set(with_mined("countries_S1", **FEWER_STEPS)),
    "countries_S2, mined rules": Set(with_mined("countries_S2", **FEWER_STEPS, **BOUND), SHARES[1:]),
    "countries_S3, mined rules": Set(with_mined("countries_S3", **FEWER_STEPS, **BOUND), SHARES[1:]),
    "umls, mined rules": Set(with_mined("umls", **LONGER), RATES),
    "family, mined rules": Set(with_mined("family", **LONGER), RATES),
    "wn18rr, mined rules": Set(with_mined("wn18rr", **MANY_MINED), GENTLE),
    "fb15k-237, mined rules": Set(with_mined("fb15k-237", **MANY_MINED), GENTLE),
    "family, RNNLogic rules": Set(
        options(
            **HEIGHT_1 | LONGER,
            n_validation_queries="300",
            rules="{data}/family/rules_rnnlogic.tsv",
            device="{device}",
        ),
        products(RATES, [options(**SMALL_NET), []]),
    ),
    "wn18rr, RNNLogic rules": Set(options(**MANY_RULES, rules="{data}/wn18rr/rules_rnnlogic.tsv"), WEIGHTS[:2]),
    "fb15k-237, RNNLogic rules": Set(
        options(**MANY_RULES, rules="{data}/fb15k-237/rules_rnnlogic_top.tsv.gz"), WEIGHTS[:2]
    ),
}
MINING = Lock()  # one run mines at a time: the next ones then find the rules
# Sets that are not judged by a full ranking of all test queries; the untrained policy is then that of learning rate 0.
JUDGED = {"family_kns, 100 negatives": ["--negatives", "100", "--queries", "1000"]}


def main() -> None:
    """Run what the file does not hold yet, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("experiments/results/main_results.json"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--device", default="cpu", help="where the sets with thousands of rules are trained")
    parser.add_argument("--mined", type=Path, default=Path("runs/mined"), help="folder that keeps mined rules")
    parser.add_argument("--only", choices=SETS, action="append")
    parser.add_argument("--readme", action="store_true", help="put the table in place of the README's")
    args = parser.parse_args()
    stored = {"tried": [], "runs": []} | (json.loads(args.out.read_text()) if args.out.exists() else {})
    names = args.only or list(SETS)
    every = ",".join(map(str, range(max(1, torch.cuda.device_count()))))
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or every).split(",")
    gpus = SimpleQueue[str]()  # one for each run at a time
    for i in range(args.jobs):
        gpus.put(visible[i % len(visible)])
    train = partial(run, args.data, args.device, args.mined, gpus)
    with ThreadPoolExecutor(args.jobs) as pool:
        done = {(row["set"], *row["options"]) for row in stored["tried"]}
        trials = [(n, o) for n in names for o in SETS[n].tried if len(SETS[n].tried) > 1 and (n, *o) not in done]
        for future in as_completed([pool.submit(train, *trial, seed=0) for trial in trials]):
            keep_better(stored, future.result())
            save(args.out, stored)
        done = {(row["set"], row["seed"], row["learning_rate_0"]) for row in stored["runs"]}
        variants = [(0, False), (0, True), *((seed, False) for seed in range(1, args.seeds))]
        left = [(n, s, f) for s, f in variants for n in names if (n, s, f) not in done]
        runs = [pool.submit(train, n, chosen(stored["tried"], n), seed=s, frozen=f) for n, s, f in left]
        for future in as_completed(runs):
            if not future.exception():
                stored["runs"].append(future.result())
                save(args.out, stored)
        for future in runs:
            future.result()  # a run that failed says so once the others are kept
    print(table(stored["runs"]))
    if args.readme:
        before, after = README.read_text().split(HEAD, 1)
        README.write_text(before + table(stored["runs"]) + "\n\n" + after.split("\n\n", 1)[1])


def save(file: Path, stored: dict) -> None:
    """Put the record in place of the file."""
    text = json.dumps(stored, indent=1) + "\n"
    write_atomically(file, lambda part: part.write(text.encode()))


def keep_better(stored: dict, row: dict) -> None:
    """Note what a trial came to; the best of a set so far is its run at seed 0."""
    name, options = row["set"], row["options"]
    trial = {"set": name, "options": options, "best_valid": row["results"]["best_valid"]}
    stored["tried"].append(trial)
    if chosen(stored["tried"], name) == options:
        others = [r for r in stored["runs"] if (r["set"], r["seed"], r["learning_rate_0"]) != (name, 0, False)]
        stored["runs"] = [*others, row]


def chosen(tried: list[dict], name: str) -> list[str]:
    """The options of a set that ranked valid best; of equals those that come first in `SETS`."""
    valid = {tuple(row["options"]): row["best_valid"] for row in tried if row["set"] == name}
    return max(SETS[name].tried, key=lambda options: valid.get(tuple(options), -1.0))


def run(
    data: Path,
    device: str,
    kept: Path,
    gpus: SimpleQueue[str],
    name: str,
    options: list[str],
    *,
    seed: int,
    frozen: bool = False,
) -> dict:
    """One run of the program on a GPU that is free, its results without the tables by relation."""
    source, settings = name.split(",")[0], SETS[name].settings
    mined = mined_file(data, source, kept) if "{mined}" in settings else None
    with tempfile.TemporaryDirectory() as out:
        settings = [part.format(data=data, device=device, mined=mined) for part in settings]
        settings += [*options, "--seed", str(seed)]
        settings += ["--ppo.learning-rate", "0", "--n-validations", "1"] if frozen else []  # all looks see the same
        program = [sys.executable, "-m", "funcppo", "train", str(data / source), "--out", f"{out}/run"]
        gpu = gpus.get()
        try:
            seen = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
            subprocess.run([*program, *settings], check=True, stdout=sys.stderr, env=seen)
        finally:
            gpus.put(gpu)
        results = json.loads((Path(out) / "run" / "results.json").read_text())
        if name in JUDGED:
            names = (f"exists@{results['height']}", "max-confidence", "noisy-or", results["score"])
            found = {score: evaluated(Path(out) / "run", score, JUDGED[name]) for score in names}
            results["test"] = found | {f"{results['score']}, trained": found.pop(results["score"])}
    for row in results["test"].values():
        del row["by_group"]
    results["dataset"] = name
    return {
        "set": name,
        "seed": seed,
        "learning_rate_0": frozen,
        "options": options,
        "commit": commit(),
        "machine": machine(),
        "results": results,
    }


def mined_file(data: Path, source: str, kept: Path) -> Path:
    """The rules of a data set, mined unless they are kept."""
    with MINING:
        facts = load(data / source, facts_only=True)
        return rule_cache.get_or_mine_rules(facts, MINED[source][0], "cpu", lambda _: None, kept)[0]


def evaluated(folder: Path, score: str, how: list[str]) -> dict:
    """What `funcppo evaluate` says of a run."""
    target = folder / "evaluated.json"
    command = [sys.executable, "-m", "funcppo", "evaluate", str(folder), "--score", score, "--json", str(target)]
    subprocess.run([*command, *how], check=True, stdout=sys.stderr)
    return json.loads(target.read_text())


def table(runs: list[dict]) -> str:
    """Markdown, a row a set in the order of `SETS`: the baselines, then mean and spread over seeds."""
    lines = [HEAD, "|---" * 10 + "|"]
    for name in (name for name in SETS if any(row["set"] == name for row in runs)):
        mine, frozen = (
            [row["results"] for row in runs if row["set"] == name and row["learning_rate_0"] == still]
            for still in (False, True)
        )
        lines.append("| " + " | ".join(cells(name, mine, frozen)) + " |")
    return "\n".join(lines)


def cells(name: str, mine: list[dict], frozen: list[dict]) -> list[str]:
    """One row of the table: the results of a set over seeds, and at learning rate 0."""
    number, label = ("auc_pr", "AUC-PR") if name.startswith("countries") else ("mrr", "MRR")
    first, height = mine[0]["test"], mine[0]["height"]

    def policy(results: list[dict], kind: str) -> str:
        names = [f"{r['score']}, {kind}" for r in results]
        return spread([r["test"][n][number] for r, n in zip(results, names) if n in r["test"]])

    return [
        f"{name}, {label}" + ("" if "height" in name else f", height {height}"),
        str(mine[0]["rules"]),
        *(shown(first[score][number]) for score in (f"exists@{height}", "max-confidence", "noisy-or")),
        *(policy(mine, kind) for kind in ("untrained", "trained")),
        policy(frozen, "trained"),
        shown(first["max-confidence"]["ceiling"]),
        f"{mean(r['seconds'] for r in mine):.0f}",
    ]


def shown(value: float) -> str:
    """Four digits, as rankings are compared."""
    return f"{value:.4f}"


def spread(values: list[float]) -> str:
    """Mean, and the standard deviation over seeds where there is one."""
    if not values:
        return ""
    wide = f" ± {stdev(values):.4f}" if len(values) > 1 and stdev(values) > 5e-5 else ""
    return f"{shown(mean(values))}{wide}"


if __name__ == "__main__":
    main()
