"""Mined rules alone: how well they rank valid and test, and what mining them took.

    python experiments/mine_results.py --data ../shared/data --out experiments/results/mine_results.json

Rules are mined from the known facts, written, read back, and judged as `funcppo evaluate` would: filtered, both sides,
expected ties (Countries: tails among the five regions), in both WAYS. Settings are chosen on valid. The file is
written after each set; sets in it are kept unless --again names them. `--readme` puts the table into the README. What
training adds, `main_results.py` tells.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from funcppo.data import Dataset, load
from funcppo.evaluation import ranking
from funcppo.evaluation import scorers as scorers_
from funcppo.evaluation.ranking import RankingProtocol
from funcppo.experiment import rule_cache
from funcppo.logic import derivability
from funcppo.mining.config import MiningConfig
from funcppo.mining.miner import SMOOTHING_COUNT
from funcppo.prover import task as prover_task
from funcppo.prover.config import ProverTaskConfig

SMOOTHED = ProverTaskConfig(smoothing=SMOOTHING_COUNT)  # the height is chosen by valid
IDENTITY = ProverTaskConfig(smoothing=SMOOTHING_COUNT, object_identity=True, max_height=1)
SETS: dict[str, tuple[MiningConfig, ProverTaskConfig]] = {  # how rules are mined, and how they are applied
    "countries_S1": (MiningConfig(), SMOOTHED),
    "countries_S2": (MiningConfig(), SMOOTHED),
    "countries_S3": (MiningConfig(), SMOOTHED),
    "family": (MiningConfig(), IDENTITY),
    "umls": (MiningConfig(max_length=2), IDENTITY),
    "wn18rr": (MiningConfig(constants=True, min_support=2, min_confidence=0.001, votes_per_fact=5), IDENTITY),
    "fb15k-237": (MiningConfig(constants=True, max_length=2), replace(IDENTITY, object_identity=False)),
}
WAYS = ("plain", "chosen")  # plain counts and no object identity beside what SETS says
SCORES = ("max-confidence", "noisy-or", "noisy-or@3")
HEAD = f"| data | rules | seconds | {' | '.join(f'{s}, plain' for s in SCORES[:2])} | {' | '.join(SCORES)} | ceiling |"
README = Path(__file__).parents[1] / "README.md"


def main() -> None:
    """Measure what the file does not hold yet, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("experiments/results/mine_results.json"))
    parser.add_argument("--only", choices=SETS, action="append")
    parser.add_argument("--again", choices=SETS, action="append", default=[])
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=WAYS, help="how to judge")
    parser.add_argument("--readme", action="store_true", help="put the table in place of the README's")
    args = parser.parse_args()
    stored = json.loads(args.out.read_text()) if args.out.exists() else {"sets": {}}
    for name in [n for n in args.only or SETS if n in args.again or n not in stored["sets"]]:
        stored["sets"][name] = measured(args, name) | {"commit": commit()}
        stored["machine"] = machine()
        args.out.write_text(json.dumps(stored, indent=1) + "\n")
    print(table(stored))
    if args.readme:
        before, after = README.read_text().split(HEAD, 1)
        README.write_text(before + table(stored) + "\n\n" + after.split("\n\n", 1)[1])


def measured(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Mining and the untrained scores of one set."""
    cfg, chosen = SETS[name]
    plain = load(args.data / name)
    with tempfile.TemporaryDirectory() as folder:
        path, start = Path(folder) / "rules.tsv", time.perf_counter()
        found, counts, mined = rule_cache.mine_dataset(plain, cfg)
        rule_cache.write_rule_file(path, found, counts, "tsv")
        seconds = time.perf_counter() - start
        ways = {"plain": replace(chosen, smoothing=None, object_identity=False), "chosen": chosen}
        judged = {way: judge(load(args.data / name, path), ways[way]) for way in args.ways}
    return {
        "settings": {field: getattr(cfg, field) for field in cfg.__slots__},
        "rules": len(found.rules),
        "candidates": mined.n_candidates,
        "estimated": int((mined.rules.std_error > 0).sum()),
        "mining_seconds": round(seconds, 1),
        "notes": list(mined.notes),
        "judged": judged,
    }


def judge(dataset: Dataset, how: ProverTaskConfig) -> dict[str, Any]:
    """Each score's summary on valid and test."""
    start = time.perf_counter()
    ready = prover_task.build_task(dataset, how)
    if ready.derivability_index is None:  # what derives each candidate is found once for all scores
        known = derivability.build_derivability_index_for_atoms(
            ready.kb, ready.sizes, ready.least_model, ready.least_model.atoms
        )
        ready = replace(ready, derivability_index=known)
    row: dict[str, Any] = {"smoothing": how.smoothing, "object_identity": how.object_identity}
    row |= {"height": ready.max_height, "notes": list(ready.notes)}
    sides = RankingProtocol(sides=ranking.ranked_sides(ready))
    scorers = {name: scorers_.make_untrained_scorer(ready, name) for name in SCORES}
    for split in ("valid", "test"):
        ranked = {
            name: ranking.rank_split(ready, getattr(dataset, split), score, sides) for name, score in scorers.items()
        }
        summarised = partial(
            ranking.summarise_ranking, predicates=list(dataset.predicates), with_auc=ready.is_countries
        )
        row[split] = {name: summarised(found) for name, found in ranked.items()}
        for summary in row[split].values():
            del summary["by_group"]
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def table(stored: dict[str, Any]) -> str:
    """Markdown: a row a set, test."""
    lines = [HEAD, "|---" * (HEAD.count("|") - 1) + "|"]
    for name, row in stored["sets"].items():
        plain, chosen = (row["judged"].get(way, {"test": {}})["test"] for way in WAYS)
        key = "auc_pr" if name.startswith("countries") else "mrr"
        numbers = [(plain, score, key) for score in SCORES[:2]] + [(chosen, score, key) for score in SCORES]
        numbers.append((chosen, SCORES[0], "ceiling"))
        shown = [f"{test[score][number]:.3f}" if test else "" for test, score, number in numbers]
        what = f"{name}, {'AUC-PR' if key == 'auc_pr' else 'MRR'}"
        cells = [what, str(row["rules"]), str(row["mining_seconds"]), *shown]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Where the numbers come from."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    cpu = {"cpu": model, "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return cpu | gpu | {"torch": torch.__version__, "python": platform.python_version()}


def commit() -> str:
    """The commit that was run; FUNCPPO_COMMIT names it where there is no checkout."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    return os.environ.get("FUNCPPO_COMMIT") or subprocess.run(asked, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
