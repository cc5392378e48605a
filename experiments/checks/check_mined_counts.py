"""Claim: the miner counts as the rule files beside the data sets do, which others made.

    python experiments/checks/check_mined_counts.py --out experiments/results/check_mined_counts.json

All closed paths that derive some fact from others are found as the miner finds them, head by head, and their pairs
counted as it counts them. Each rule of a file that is such a path must be among them with the file's `train_support`
and `train_body_pairs`, unless T_P shows that it derives each of its facts from that fact alone: the miner takes no such
rule. Exits 1 when a rule differs or is missing.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path

import numpy as np
import torch

# the folder that holds `experiments`
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DATA, RESULTS
from experiments.provenance import current_commit, describe_machine
from funcppo.data import Dataset, load
from funcppo.logic import kb
from funcppo.logic.consequences import with_confidence
from funcppo.mining import path_rules, paths

MAX_LENGTH = {  # of the paths that are counted exactly
    "family/rules_rnnlogic.tsv": 3,
    "wn18rr/rules_kns_amie_full.tsv": 3,
    "wn18rr/rules_rnnlogic.tsv": 3,
    "fb15k-237/rules_kns.tsv": 2,
    "fb15k-237/rules_rnnlogic_top.tsv.gz": 2,
}
MAX_PAIR_ROWS = 1 << 60  # no limit: body pairs are counted, never sampled

Labels = tuple[int, ...]  # of the head's edge from X, then of the body's edges
Atom = tuple[int, int, int]  # predicate, first and second argument


def main() -> int:
    """Compare all files; the exit status is 1 where a rule differs or is missing."""
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
    args = parser.parse_args()
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
    return int(
        any(
            row["different"] or row["missing"]
            for row in record["files"].values()
        )
    )


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

    mined = count_paths(dataset, set(listed_paths.values()), max_length)
    absent = [i for i, labels in listed_paths.items() if labels not in mined]
    equal = [
        i
        for i, labels in listed_paths.items()
        if mined.get(labels) == tuple(listed[i])
    ]
    n_circular = int((leave_one_out_support(dataset, absent) == 0).sum())
    return {
        "rules": len(listed),
        "paths": len(listed_paths),
        "equal": len(equal),
        "circular": n_circular,
        "missing": len(absent) - n_circular,
        "different": len(listed_paths) - len(absent) - len(equal),
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
        # odd: the edge is walked backwards
        labels.append(2 * (predicate - 1) + int(here == second))
        here = second if here == first else first
        is_constant = here <= n_constants
        if is_constant or here in visited or (here == y and body):
            return None
        visited.add(here)
    return tuple(labels) if here == y else None


def count_paths(
    dataset: Dataset, wanted: set[Labels], max_length: int
) -> dict[Labels, tuple[float, float]]:
    """Support and body pairs of those among the paths that derive some fact from others."""
    facts = torch.from_numpy(dataset.facts[:, :3]).long()
    edges = paths.build_edge_index(
        facts, dataset.n_predicates, dataset.n_constants
    )
    support = count_support(facts, edges, wanted, max_length)

    body_pairs: dict[Labels, float] = {}
    sampling_keys = torch.zeros(dataset.n_constants + 1)
    for length in range(1, max_length + 1):
        bodies = torch.unique(
            torch.tensor(
                [labels[1:] for labels in support if len(labels) == length + 1]
            ),
            dim=0,
        )
        if len(bodies):
            pairs = path_rules.count_body_pairs(
                edges, bodies, MAX_PAIR_ROWS, sampling_keys, lambda: False
            )
            assert not pairs.std_error.any(), "expected exact counts"
            body_pairs |= {
                tuple(body): total
                for body, total in zip(bodies.tolist(), pairs.total.tolist())
            }
    return {
        labels: (n, body_pairs[labels[1:]]) for labels, n in support.items()
    }


def count_support(
    facts: torch.Tensor,
    edges: paths.EdgeIndex,
    wanted: set[Labels],
    max_length: int,
) -> dict[Labels, float]:
    """The support of those among the paths that derive some fact from others."""
    support: dict[Labels, float] = {}
    for head in sorted({labels[0] for labels in wanted}):
        facts_of_head = (facts[:, 0] == head // 2 + 1).nonzero().squeeze(1)
        for length in range(1, max_length + 1):
            blocks = (
                facts_of_head[:0],
                *paths.split_by_cost(edges, facts_of_head, length),
            )
            parts = [
                paths.find_closed_paths(edges, block, length)
                for block in blocks
            ]
            closed = paths.ClosedPaths(
                *(torch.cat(field) for field in zip(*parts))
            )
            rules = path_rules.path_rules_of_head(edges, closed)
            for body, n in zip(
                rules.body_labels.tolist(), rules.support.tolist()
            ):
                if (head, *body) in wanted:
                    support[head, *body] = n
    return support


def leave_one_out_support(dataset: Dataset, rows: list[int]) -> torch.Tensor:
    """The leave-one-out support of some rules."""
    rules = dataset.rules[rows]
    knowledge_base, sizes = kb.build(
        dataset.facts,
        rules,
        n_constants=dataset.n_constants,
        n_predicates=dataset.n_predicates,
    )
    return with_confidence(knowledge_base, sizes, smoothing=0.0).support


if __name__ == "__main__":
    sys.exit(main())
