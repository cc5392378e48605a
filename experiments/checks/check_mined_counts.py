"""Whether the miner counts as the rule files beside the data sets do, which others made.

    python experiments/check_mined_counts.py --data ../shared/data --out experiments/results/check_mined_counts.json

All closed paths that derive some fact from others are found as the miner finds them, head by head, and their pairs
counted as it counts them. Each rule of a file that is such a path must be among them with the file's `train_support`
and `train_body_pairs`, unless T_P shows that it derives each of its facts from that fact alone: the miner takes no such
rule. Exit status 1 when a rule differs or is missing.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path

import numpy as np
import torch
from experiments.benchmarks.mining_results import commit, machine

from funcppo.data import Dataset, load
from funcppo.logic import kb
from funcppo.logic.consequences import with_confidence
from funcppo.mining import path_rules, paths

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
    for name in args.only or FILES:
        folder, longest = Path(name).parent.name, FILES[name]
        data = load(args.data / folder, args.data / name)
        stored["files"][name] = compared(data, columns(args.data / name), longest)
        stored["files"][name] |= {"longest": longest, "commit": commit()}
        stored["machine"] = machine()
        args.out.write_text(json.dumps(stored, indent=1) + "\n")
        print(name, stored["files"][name])
    return int(any(row["different"] or row["missing"] for row in stored["files"].values()))


def counts(data: Dataset, walks: set[Walk], longest: int) -> dict[Walk, tuple[float, float]]:
    """Support and body pairs of those among the walks that derive some fact from others."""
    facts = torch.from_numpy(data.facts[:, :3]).long()
    steps, draw = paths.build_edge_index(facts, data.n_predicates, data.n_constants), torch.zeros(data.n_constants + 1)
    support = dict[Walk, float]()
    for head in sorted({walk[0] for walk in walks}):
        mine = (facts[:, 0] == head // 2 + 1).nonzero().squeeze(1)
        for length in range(1, longest + 1):
            blocks = (mine[:0], *paths.split_by_cost(steps, mine, length))
            parts = [paths.find_closed_paths(steps, block, length) for block in blocks]
            found = path_rules.path_rules_of_head(steps, paths.ClosedPaths(*(torch.cat(same) for same in zip(*parts))))
            closing = {(head, *body): n for body, n in zip(found.body_labels.tolist(), found.support.tolist())}
            support |= {walk: closing[walk] for walk in walks & closing.keys()}
    total = dict[Walk, float]()
    for length in range(1, longest + 1):
        bodies = torch.unique(torch.tensor([w[1:] for w in support if len(w) == length + 1]), dim=0)
        if len(bodies):
            pairs = path_rules.count_body_pairs(steps, bodies, 1 << 60, draw, lambda: False)
            assert not pairs.std_error.any(), "want exact counts"
            total |= dict(zip(map(tuple, bodies.tolist()), pairs.total.tolist()))
    return {walk: (n, total[walk[1:]]) for walk, n in support.items()}


def columns(path: Path) -> np.ndarray:
    """`train_support` and `train_body_pairs` of each rule."""
    text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
    return np.array([line.split("\t")[1:3] for line in text.splitlines() if not line.startswith("#")], dtype=float)


def compared(data: Dataset, listed: np.ndarray, longest: int) -> dict[str, int]:
    """How many rules of a file are such paths, and how many of these have the same counts."""
    walks = [walk_of([tuple(atom) for atom in rule if atom[0]], data.n_constants) for rule in data.rules.tolist()]
    listed_paths = [i for i, walk in enumerate(walks) if walk is not None and len(walk) <= longest + 1]
    mined = counts(data, {walks[i] for i in listed_paths}, longest)
    absent = [i for i in listed_paths if walks[i] not in mined]
    same = [i for i in listed_paths if i not in set(absent) and mined[walks[i]] == tuple(listed[i])]
    circular = int((alone(data, absent) == 0).sum())
    result = {"rules": len(listed), "paths": len(listed_paths), "equal": len(same), "from no other fact": circular}
    return result | {"missing": len(absent) - circular, "different": len(listed_paths) - len(absent) - len(same)}


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
