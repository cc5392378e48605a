"""Claim: `funcppo mine` keeps to its time and memory on any graph.

    python experiments/benchmarks/mining_bounds.py

Forty graphs are generated: from ten to a million entities, from one to a thousand relations, and from a millionth to a
half of all possible facts, at most MAX_FACTS. Each is mined by the program in a process of its own, on one core. A row
of the record holds what the graph is, what mining took, and whether that is within the limits. The record is written
after each graph; graphs that it holds are not mined again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments import tables
from experiments.benchmarks.side_by_side import write_record
from experiments.paths import RESULTS, ROOT
from experiments.provenance import describe_machine

N_GRAPHS = 40
MIN_FACTS = 20
MAX_FACTS = 200_000
SECONDS = 10.0  # limit of mining
MEMORY = 2_000_000_000  # limit in bytes, of the whole process
GRACE_SECONDS = 2.0  # the index is built, and the last part of the work done, beyond the limit
MAX_MINUTES = 10  # a program that takes longer hangs


class GraphShape(NamedTuple):
    """What a graph is generated from."""

    entities: int
    relations: int
    facts: int


def sample_shapes(n_graphs: int, seed: int) -> Iterator[GraphShape]:
    """Yield sizes of graphs, each size uniform on a logarithmic scale.

    The first two are the extremes: ten entities with half of all facts, and a million entities with a thousand
    relations.
    """
    random = np.random.default_rng(seed)
    yield GraphShape(10, 1000, 50_000)
    yield GraphShape(1_000_000, 1000, MAX_FACTS)
    for _ in range(n_graphs - 2):
        entities = round(10 ** random.uniform(1, 6))
        relations = round(10 ** random.uniform(0, 3))
        density = 10 ** random.uniform(-6, math.log10(0.5))
        most = min(MAX_FACTS, entities**2 * relations // 2)
        n_facts = round(density * entities**2 * relations)
        yield GraphShape(
            entities, relations, min(max(n_facts, MIN_FACTS), most)
        )


def generate_facts(shape: GraphShape, seed: int) -> np.ndarray:
    """[N, 3]: first argument, relation and second argument of the facts of a graph, distinct, from 0.

    A few entities and relations have most facts. Half of the facts of an odd relation are those of the relation before
    it, turned round.
    """
    random = np.random.default_rng(seed)
    found = np.zeros((0, 3), dtype=np.int64)
    while len(found) < shape.facts:
        n_rows = 2 * (shape.facts - len(found)) + 100
        first, second = (
            shape.entities * random.random((2, n_rows)) ** 2
        ).astype(np.int64)
        relation = random.integers(shape.relations, size=n_rows)
        rows = np.stack([first, relation, second], axis=1)
        pairs = rows[(relation % 2 == 0) & (relation + 1 < shape.relations)]
        copied = pairs[random.random(len(pairs)) < 0.5]
        inverse = copied[:, [2, 1, 0]] + np.array([0, 1, 0])
        found = np.unique(np.concatenate([found, rows, inverse]), axis=0)
        if len(rows) > 10 * shape.entities**2 * shape.relations:
            break
    kept = random.permutation(len(found))[: shape.facts]
    return found[np.sort(kept)]


def write_triples(file: Path, facts: np.ndarray) -> None:
    """Write facts as lines of three names."""
    lines = (f"e{a}\tr{p}\te{b}\n" for a, p, b in facts.tolist())
    file.write_text("".join(lines))


def mine(file: Path, seconds: float, memory: int) -> dict[str, Any]:
    """What the program says of its work, its exit status, and what the system says of its memory and time."""
    summary_file = file.with_suffix(".json")
    command = [sys.executable, "-m", "funcppo", "mine", str(file)]
    command += ["--out", str(file.with_suffix(".rules"))]
    command += ["--json", str(summary_file)]
    command += ["--seconds", str(seconds), "--memory", str(memory)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(file.parent / "cache"),
    }
    start = time.perf_counter()
    with subprocess.Popen(
        ["timeout", f"{MAX_MINUTES}m", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        _, errors = process.communicate()
    row: dict[str, Any] = {
        "exit_status": process.returncode,
        "total_seconds": round(time.perf_counter() - start, 1),
    }
    if process.returncode:
        return row | {"error": errors.decode().strip().splitlines()[-1:]}
    return row | read_summary(summary_file, seconds, memory)


def read_summary(file: Path, seconds: float, memory: int) -> dict[str, Any]:
    """What the program's summary says, and whether it kept to its limits."""
    summary = json.loads(file.read_text())
    return {
        "rules": summary["n_rules"],
        "estimated_rules": summary["n_estimated_rules"],
        "mining_seconds": summary["mining_seconds"],
        "peak_bytes": summary["peak_bytes"],
        "rows": summary["rows"],
        "max_rows": summary["max_rows"],
        # but for where the rules are kept for later
        "notes": [n for n in summary["notes"] if "funcppo train" not in n],
        "within_seconds": summary["mining_seconds"] <= seconds + GRACE_SECONDS,
        "within_memory": summary["peak_bytes"] <= memory,
        # Estimates take a little more where all is spent, and a part of the work is done whole.
        "within_rows": summary["rows"] <= 1.1 * summary["max_rows"] + 2**21,
    }


def main() -> None:
    """Mine the graphs that the record does not hold yet, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS / "mining_bounds.json",
        help="record to complete",
    )
    parser.add_argument("--graphs", type=int, default=N_GRAPHS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--memory", type=int, default=MEMORY)
    args = parser.parse_args()

    record = {
        "machine": describe_machine(),
        "seed": args.seed,
        "seconds": args.seconds,
        "memory_bytes": args.memory,
        "graphs": [],
    }
    if args.out.exists():
        record = json.loads(args.out.read_text())
    shapes = list(sample_shapes(args.graphs, args.seed))
    for i in range(len(record["graphs"]), args.graphs):
        facts = generate_facts(shapes[i], args.seed + i)
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "graph.txt"
            write_triples(file, facts)
            row = mine(file, args.seconds, args.memory)
        size = shapes[i]._asdict() | {"facts": len(facts)}
        n_possible = shapes[i].entities ** 2 * shapes[i].relations
        record["graphs"].append(
            size | {"density": len(facts) / n_possible} | row
        )
        write_record(args.out, record)
        print(record["graphs"][-1], flush=True)
    print(tables.mining_bounds_table(record))


if __name__ == "__main__":
    main()
