"""Whether the miner counts as the rule files beside the data sets do, which others made.

    python experiments/check_mined_counts.py --data ../shared/data --out experiments/results/check_mined_counts.json

All closed paths that some fact speaks for are mined without pruning. Each rule of a file that is such a path must be
among them with the file's `train_support` and `train_body_pairs`, unless leave-one-out leaves it fewer than two facts:
such rules are never kept, and are counted by T_P here. Exit status 1 when a rule differs or is missing.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path

import numpy as np
import torch
from mine_results import commit, machine

from funcppo.config import MineConfig
from funcppo.data import Dataset, load
from funcppo.logic import kb, mine
from funcppo.logic.consequences import with_confidence

ALL = dict(min_support=1, min_confidence=0.0, votes=1 << 40)
FILES = {  # and the longest paths that are counted exactly
    "family/rules_rnnlogic.tsv": 3,
    "wn18rr/rules_kns_amie_full.tsv": 3,
    "wn18rr/rules_rnnlogic.tsv": 3,
    "fb15k-237/rules_kns.tsv": 2,
    "fb15k-237/rules_rnnlogic_top.tsv.gz": 2,
}
Walk = tuple[int, ...]  # labels of the head's step from X, then of the body's


def main() -> int:
    """Compare all files; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("experiments/results/check_mined_counts.json"))
    parser.add_argument("--only", choices=FILES, action="append")
    args = parser.parse_args()
    stored = json.loads(args.out.read_text()) if args.out.exists() else {"files": {}}
    mined: dict[tuple[str, int], dict[Walk, tuple[float, float]]] = {}
    for name in args.only or FILES:
        folder, longest = Path(name).parent.name, FILES[name]
        data = load(args.data / folder, args.data / name)
        if (folder, longest) not in mined:
            mined[folder, longest] = counts(data, longest)
        stored["files"][name] = compared(data, columns(args.data / name), mined[folder, longest], longest)
        stored["files"][name] |= {"longest": longest, "commit": commit()}
        stored["machine"] = machine()
        args.out.write_text(json.dumps(stored, indent=1) + "\n")
        print(name, stored["files"][name])
    return int(any(row["different"] or row["missing"] for row in stored["files"].values()))


def counts(data: Dataset, longest: int) -> dict[Walk, tuple[float, float]]:
    """Support and body pairs of every path rule that leave-one-out leaves two facts at least."""
    facts, cfg = torch.from_numpy(data.facts), MineConfig(max_length=longest, **ALL)
    rules = mine.mine(facts, data.n_predicates, data.n_constants, cfg).rules
    assert not rules.error.any(), "want exact counts: raise the work"
    walks = [tuple(label for label in row if label >= 0) for row in rules.walk.tolist()]
    return dict(zip(walks, zip(rules.support.tolist(), rules.body_pairs.tolist())))


def columns(path: Path) -> np.ndarray:
    """`train_support` and `train_body_pairs` of each rule."""
    text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
    return np.array([line.split("\t")[1:3] for line in text.splitlines() if not line.startswith("#")], dtype=float)


def compared(data: Dataset, listed: np.ndarray, mined: dict[Walk, tuple[float, float]], longest: int) -> dict[str, int]:
    """How many rules of a file are such paths, and how many of these are mined with the same counts."""
    walks = [walk_of([tuple(atom) for atom in rule if atom[0]], data.n_constants) for rule in data.rules.tolist()]
    paths = [i for i, walk in enumerate(walks) if walk is not None and len(walk) <= longest + 1]
    absent = [i for i in paths if walks[i] not in mined]
    same = [i for i in paths if i not in set(absent) and mined[walks[i]] == tuple(listed[i])]
    few = int((alone(data, absent) < 2).sum())
    result = {"rules": len(listed), "paths": len(paths), "equal": len(same), "fewer than two facts": few}
    return result | {"missing": len(absent) - few, "different": len(paths) - len(absent) - len(same)}


def alone(data: Dataset, rows: list[int]) -> torch.Tensor:
    """The leave-one-out support of some rules."""
    world, sizes = kb.build(data.facts, data.rules[rows], n_constants=data.n_constants, n_predicates=data.n_predicates)
    return with_confidence(world, sizes, smoothing=0.0).support


def walk_of(atoms: list[tuple[int, ...]], n_constants: int) -> Walk | None:
    """A rule as the steps of a path from X to Y, None where it is none."""
    (_, x, y), body = atoms[0], atoms[1:]
    walk, here, seen = [2 * (atoms[0][0] - 1)], x, {x}
    while body:
        steps = [(p, a, b) for p, a, b in body if here in (a, b)]
        if len(steps) != 1 or steps[0][1] == steps[0][2]:
            return None
        predicate, first, second = steps[0]
        body = [atom for atom in body if atom != steps[0]]
        walk.append(2 * (predicate - 1) + int(here == second))
        here = second if here == first else first
        if here <= n_constants or here in seen or (here == y and body):
            return None
        seen.add(here)
    return tuple(walk) if here == y else None


if __name__ == "__main__":
    sys.exit(main())
