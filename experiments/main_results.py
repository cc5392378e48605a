"""Countries S1-S3 and Family: learned scores beside untrained ones, over seeds.

    python experiments/main_results.py --data ../shared/data --out experiments/results/main_results.json

Each row is a run of `funcppo train` on a data set, at some seed; the untrained policy is what learning rate 0 leaves
(`--learning-rate-0` trains such a row in full). The file is written after every run, and runs in it are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import mean, stdev


def options(**given: str) -> list[str]:
    """Command-line options: `hard_fraction="1"` under a prefix becomes `--prover.hard-fraction 1`."""
    return [word for name, value in given.items() for word in (f"--{name.replace('__', '.').replace('_', '-')}", value)]


HEAD = "| data | rules | exists | max-confidence | noisy-or | untrained | trained | learning rate 0 | ceiling | s |"
README = Path(__file__).parents[1] / "README.md"
# What a set is trained with beyond the defaults; chosen in trial runs, some of which looked at test as well as valid.
HEIGHT_1 = {"prover__max_height": "1", "score": "success", "validations": "4"}
SETS: dict[str, list[str]] = {
    "countries_S1": [],
    "countries_S2": options(prover__max_height="2", prover__hard_fraction="0.5", prover__reward="signed"),
    "countries_S3": options(prover__max_height="3"),
    "family": options(
        prover__max_height="2", prover__hard_fraction="0.5", score="best-proof", validations="4", valid_queries="300"
    ),
    "family, height 1": options(**HEIGHT_1, prover__hard_fraction="0.5"),
    "umls": options(**HEIGHT_1, prover__hard_fraction="0.5"),
    "family_kns": options(**HEIGHT_1, prover__hard_fraction="0.5"),
    "wn18rr": options(**HEIGHT_1, prover__hard_fraction="0.5"),
    "umls, mined rules": options(
        **HEIGHT_1 | {"score": "auto"},
        rules="{mined}",
        steps="150000",
        prover__hard_fraction="1",
        ppo__entropy_coef="1",
    ),
    "family, RNNLogic rules": options(
        **HEIGHT_1,
        valid_queries="300",
        rules="{data}/family/rules_rnnlogic.tsv",
        steps="120000",
        device="{device}",
        prover__hard_fraction="1",
        prover__embed_dim="16",
        prover__hidden_dim="32",
        ppo__entropy_coef="1",
        ppo__learning_rate="3e-3",
        ppo__n_envs="512",
        ppo__n_minibatches="16",
    ),
}


def main() -> None:
    """Run what the file does not hold yet, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("experiments/results/main_results.json"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--device", default="cpu", help="where the sets with RNNLogic's rules are trained")
    parser.add_argument("--only", choices=SETS, action="append")
    parser.add_argument("--readme", action="store_true", help="put the table in place of the README's")
    args = parser.parse_args()
    stored = json.loads(args.out.read_text()) if args.out.exists() else {"runs": []}
    done = {(row["set"], row["seed"], row["learning_rate_0"]) for row in stored["runs"]}
    wanted = [(n, s, f) for n in args.only or SETS for s, f in [*((s, False) for s in range(args.seeds)), (0, True)]]
    with ThreadPoolExecutor(args.jobs) as pool:
        left = [job for job in wanted if job not in done]
        for future in as_completed([pool.submit(run, args.data, args.device, *job) for job in left]):
            stored["runs"].append(future.result())
            args.out.write_text(json.dumps(stored, indent=1) + "\n")
    print(table(stored["runs"]))
    if args.readme:
        before, after = README.read_text().split(HEAD, 1)
        README.write_text(before + table(stored["runs"]) + "\n\n" + after.split("\n\n", 1)[1])


def run(data: Path, device: str, name: str, seed: int, frozen: bool) -> dict:
    """One run of the program, its results without the tables by relation."""
    with tempfile.TemporaryDirectory() as out:
        extra = ["--ppo.learning-rate", "0"] if frozen else []
        command = [
            sys.executable,
            "-m",
            "funcppo",
            "train",
            str(data / name.split(",")[0]),
            "--out",
            out,
            "--seed",
            str(seed),
        ]
        mined = Path(out) / "mined.tsv"
        settings = [part.format(data=data, device=device, mined=mined) for part in SETS[name]]
        if str(mined) in settings:
            mine = ["mine", command[4], "--out", str(mined)]
            subprocess.run([*command[:3], *mine], check=True, stdout=sys.stderr)
        subprocess.run([*command, *settings, *extra], check=True, stdout=sys.stderr)
        results = json.loads((Path(out) / "results.json").read_text())
    for row in results["test"].values():
        del row["by_group"]
    results["dataset"] = name
    return {
        "set": name,
        "seed": seed,
        "learning_rate_0": frozen,
        "commit": commit(),
        "machine": machine(),
        "results": results,
    }


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
        return spread([r["test"][f"{r['score']}, {kind}"][number] for r in results])

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
    wide = f" ± {stdev(values):.4f}" if len(values) > 1 and stdev(values) > 0 else ""
    return f"{shown(mean(values))}{wide}"


def machine() -> dict:
    """Where the numbers come from."""
    import torch

    return {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}


def commit() -> str:
    """The commit that was run; FUNCPPO_COMMIT names it where there is no checkout."""
    return (
        os.environ.get("FUNCPPO_COMMIT")
        or subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    )


if __name__ == "__main__":
    main()
