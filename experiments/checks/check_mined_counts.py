"""Claim: the miner counts as the rule files beside the data sets do, which others made.

    python experiments/checks/check_mined_counts.py --out experiments/results/check_mined_counts.json

Each rule of a file that is a closed path is counted as the miner counts it, with no limit of the work. It must have the
file's `train_support` and `train_body_pairs`. Rules that derive each of their facts from that fact alone, which the
miner does not write, are counted apart. Exits 1 when a rule differs.

    python experiments/checks/check_mined_counts.py --mined RULES.tsv --dataset wn18rr --sample 500

compares the counts that `funcppo mine` wrote, of a sample of its path rules of each length, with the record left alone.
Long rules are counted another way than they are found.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DATA, RESULTS
from experiments.provenance import current_commit, describe_machine
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.loaders import load
from funcppo.kg.mining import counting, paths
from funcppo.kg.mining.budget import Budget
from funcppo.kg.mining.mined_rules import MAX_RULE_ATOMS, FoundRules, MinedRules

MAX_LENGTH = {  # of the paths that are counted exactly
    "family/rules_rnnlogic.tsv": 3,
    "wn18rr/rules_kns_amie_full.tsv": 3,
    "wn18rr/rules_rnnlogic.tsv": 3,
    "fb15k-237/rules_kns.tsv": 2,
    "fb15k-237/rules_rnnlogic_top.tsv.gz": 2,
}

Labels = tuple[int, ...]  # of the head's edge from X, then of the body's edges
Atom = tuple[int, int, int]  # predicate, first and second argument


def main() -> int:
    """Compare all files; the exit status is 1 where a rule differs."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=DATA,
        help="folder of the standard data sets",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS / "check_mined_counts.json",
        help="record to write",
    )
    parser.add_argument("--only", choices=MAX_LENGTH, action="append")
    parser.add_argument(
        "--mined", type=Path, help="file of `funcppo mine` to check instead"
    )
    parser.add_argument(
        "--dataset", default="wn18rr", help="data set of --mined"
    )
    parser.add_argument(
        "--sample",
        type=int,
        default=500,
        help="rules of each length of --mined",
    )
    args = parser.parse_args()
    if args.mined is not None:
        dataset = load(args.data / args.dataset, args.mined)
        row = compare_sample(dataset, read_counts(args.mined), args.sample)
        print(args.mined, row)
        return int(row["different"] > 0)
    record = (
        json.loads(args.out.read_text()) if args.out.exists() else {"files": {}}
    )
    for name in args.only or MAX_LENGTH:
        file = args.data / name
        dataset = load(file.parent, file)
        row = compare_counts(dataset, read_counts(file), MAX_LENGTH[name])
        record["files"][name] = row | {
            "longest": MAX_LENGTH[name],
            "commit": current_commit(),
        }
        record["machine"] = describe_machine()
        write_record(args.out, record)
        print(name, record["files"][name])
    return int(any(row["different"] for row in record["files"].values()))


def read_counts(file: Path) -> np.ndarray:
    """[R 2]: `train_support` and `train_body_pairs` of each rule of a file."""
    raw = file.read_bytes()
    text = (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode()
    return np.array(
        [
            line.split("\t")[1:3]
            for line in text.splitlines()
            if not line.startswith("#")
        ],
        dtype=float,
    )


def compare_sample(
    dataset: Dataset, listed: np.ndarray, n_sampled: int
) -> dict[str, int]:
    """As `compare_counts`, for a random sample of the rules of each length.

    Args:
      n_sampled: rules of each length, at most.
    """
    random = np.random.default_rng(0)
    n_atoms = (dataset.rules[:, 1:, 0] > 0).sum(1)
    # The counts of a rule with constants are no walks.
    has_constant = (
        (dataset.rules[:, :, 1:] > 0)
        & (dataset.rules[:, :, 1:] <= dataset.n_constants)
    ).any((1, 2))
    rows = [
        random.permutation(((n_atoms == n) & ~has_constant).nonzero()[0])
        for n in np.unique(n_atoms)
    ]
    sample = np.concatenate([some[:n_sampled] for some in rows])
    part = replace(dataset, rules=dataset.rules[sample], rule_counts=None)
    return compare_counts(part, listed[sample], MAX_RULE_ATOMS - 1)


def compare_counts(
    dataset: Dataset, listed: np.ndarray, max_length: int
) -> dict[str, int]:
    """How many rules of a file are closed paths, and how many of these have the same counts."""
    listed_paths: dict[int, Labels] = {}
    for i, rule in enumerate(dataset.rules.tolist()):
        labels = path_labels(
            [tuple(atom) for atom in rule if atom[0]], dataset.n_constants
        )
        if labels is not None and len(labels) <= max_length + 1:
            listed_paths[i] = labels

    labels = sorted(
        set(listed_paths.values()), key=lambda path: (len(path), path)
    )
    mined = dict(zip(labels, count_paths(dataset, labels)))
    equal = [
        i
        for i, path in listed_paths.items()
        if mined[path][:2] == tuple(listed[i])
    ]
    circular = [
        i
        for i in equal
        if mined[listed_paths[i]][2] == mined[listed_paths[i]][0]
    ]
    return {
        "rules": len(listed),
        "paths": len(listed_paths),
        "equal": len(equal),
        "circular": len(circular),
        "different": len(listed_paths) - len(equal),
    }


def path_labels(atoms: list[Atom], n_constants: int) -> Labels | None:
    """A rule as the edge labels of a path from X to Y; None where it is none.

    Args:
      atoms: the head, then the body in any order.
    """
    predicate, x, y = atoms[0]
    body = atoms[1:]
    labels = [2 * (predicate - 1)]
    here, visited = x, {x}
    while body:
        edges = [atom for atom in body if here in atom[1:]]
        if len(edges) != 1 or edges[0][1] == edges[0][2]:
            return None
        predicate, first, second = edges[0]
        body = [atom for atom in body if atom != edges[0]]
        labels.append(
            2 * (predicate - 1) + int(here == second)
        )  # odd: the edge is walked backwards
        here = second if here == first else first
        is_constant = here <= n_constants
        if is_constant or here in visited or (here == y and body):
            return None
        visited.add(here)
    return tuple(labels) if here == y else None


def count_paths(
    dataset: Dataset, paths_: list[Labels]
) -> list[tuple[float, float, float]]:
    """Support, body pairs and circular support of each path."""
    facts = torch.from_numpy(dataset.facts[:, :3]).long()
    edges = paths.build_edge_index(
        facts, dataset.n_predicates, dataset.n_constants
    )
    labels = pad_sequence(
        [torch.tensor(path) for path in paths_],
        batch_first=True,
        padding_value=-1,
    )
    labels = pad(labels, (0, MAX_RULE_ATOMS - labels.shape[1]), value=-1)
    none = torch.zeros(len(labels), dtype=torch.float64)
    counts = [none] * (len(MinedRules._fields) - 2)
    rules = MinedRules(labels, torch.zeros_like(labels[:, :2]), *counts)
    cost = torch.tensor([n_walks(edges, path[1:]) for path in paths_])
    found = FoundRules(rules, cost.double(), labels[:0, 0], labels[:0, 0])

    everyone = torch.linspace(0, 1 - 2**-20, edges.n_entity_ids)
    unlimited = Budget(max_rows=1 << 62, seconds=1e12)
    counted = [(0.0, 0.0, 0.0)] * len(paths_)
    count = partial(counting.count_tasks, edges, everyone)
    for part in counting.count_exactly(edges, found, count, unlimited, 1.0):
        columns = (
            part.rows,
            part.rules.support,
            part.rules.body_pairs,
            part.rules.circular_support,
        )
        for row, *values in zip(*(column.tolist() for column in columns)):
            counted[row] = tuple(values)
    return counted


def n_walks(edges: paths.EdgeIndex, body: Labels) -> float:
    """The number of walks along a body and its prefixes."""
    reached = torch.ones(edges.n_entity_ids, dtype=torch.float64)
    total = 0.0
    for label in body:
        step = edges.label == label
        reached = torch.bincount(
            edges.target[step],
            reached[edges.source[step]],
            minlength=edges.n_entity_ids,
        )
        total += float(reached.sum())
    return total


if __name__ == "__main__":
    sys.exit(main())
