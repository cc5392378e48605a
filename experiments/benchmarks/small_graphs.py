"""What `funcppo train` gives at its defaults on small graphs: trained against untrained, on parts of the standard sets.

    python experiments/benchmarks/small_graphs.py --data DIR
    python experiments/benchmarks/small_graphs.py --data DIR --sets nations umls --seeds 6 7 8

A graph is drawn from the train file of a set: triples at random, or, where the set is large, a connected part around a
random entity. It is split at random into train, valid and test. `--seeds` draw the graphs; the seed of training is the
default. Each run mines its rules and is a process of its own on one thread; `--processes` of them run side by side. The
record is written after every run, and what it holds is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks import default_results
from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DATA, RESULTS
from funcppo.data.text_files import read_text

RANDOM_SETS = ("kinships", "nations", "umls", "family")
# A random sample of these would hold few triples that share an entity.
CONNECTED_SETS = ("wn18rr", "fb15k-237")
N_TRIPLES = (1_500, 3_000)
SEEDS = (4, 5)
MAX_FACTS = 30  # that a connected part follows from an entity
SPLITS = {"train": 0.8, "valid": 0.1, "test": 0.1}

Triple = tuple[str, ...]  # head, relation, tail


class Spec(NamedTuple):
    """What a graph is drawn by."""

    set: str
    n_triples: int
    seed: int


def main() -> None:
    """Run what the record does not hold yet."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = (*RANDOM_SETS, *CONNECTED_SETS)
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "small_graphs-cpu.json"
    )
    parser.add_argument("--sets", nargs="+", choices=names, default=names)
    parser.add_argument("--triples", nargs="+", type=int, default=N_TRIPLES)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()

    os.environ["OMP_NUM_THREADS"] = "1"
    record: dict[str, Any] = {"rows": []}
    if args.out.exists():
        record = json.loads(args.out.read_text())
    present = {
        Spec(row["set"], row["triples"], row["seed"]) for row in record["rows"]
    }
    triples = {name: read_triples(args.data / name) for name in args.sets}
    with ThreadPoolExecutor(args.processes) as pool:
        runs = [
            pool.submit(run_graph, spec, triples[spec.set])
            for spec in make_specs(triples, args.triples, args.seeds)
            if spec not in present
        ]
        for future in as_completed(runs):
            record["rows"].append(future.result())
            print(json.dumps(record["rows"][-1]), flush=True)
            write_record(args.out, record)


def make_specs(
    triples: dict[str, list[Triple]], sizes: Sequence[int], seeds: Sequence[int]
) -> list[Spec]:
    """Return the graphs to draw: of each set those sizes that it has triples for."""
    specs: list[Spec] = []
    for seed in seeds:
        for n in sizes:
            specs += [
                Spec(name, n, seed)
                for name, of_set in triples.items()
                if n <= len(of_set)
            ]
    return specs


def run_graph(spec: Spec, triples: Sequence[Triple]) -> dict[str, Any]:
    """Return the row of one graph: its rules, and how the scores of the run rank its test."""
    with tempfile.TemporaryDirectory() as folder:
        graph = Path(folder, "graph")
        write_splits(graph, draw_graph(triples, spec))
        run = default_results.train(spec.set, str(graph), 0, [], None)

    results, test = run["results"], run["results"]["test"]
    score, rule_score = results["score"], run["rule_score"]
    mrr = {
        "untrained": test[f"{score}, untrained"]["mrr"],
        "rule_score": test[rule_score]["mrr"],
        "trained": test[f"{score}, trained"]["mrr"],
    }
    # what `funcppo predict` ranks by
    is_policy = results["default_score"] == score
    mrr["answers"] = mrr["trained" if is_policy else "rule_score"]
    return {
        "set": spec.set,
        "triples": spec.n_triples,
        "seed": spec.seed,
        "n_rules": results["rules"],
        "height": results["height"],
        "n_test_queries": results["n_test_queries"],
        "score": score,
        "rule_score": rule_score,
        "default_score": results["default_score"],
        "mrr": mrr,
        "ceiling": test[rule_score]["ceiling"],
        "seconds": run["training"]["seconds"],
        "peak_mb": run["training"]["peak_mb"],
        "machine": run["machine"],
    }


# -- graphs


def read_triples(folder: Path) -> list[Triple]:
    """Return the distinct triples of the train file of a set, in its order; the file may be packed by gzip."""
    file = folder / "train.txt"
    if not file.exists():
        file = folder / "train.txt.gz"
    lines = read_text(file).splitlines()
    return list(dict.fromkeys(tuple(line.split("\t")) for line in lines))


def draw_graph(
    triples: Sequence[Triple], spec: Spec
) -> dict[str, list[Triple]]:
    """Draw the triples of a graph from those of its set, and split them.

    Returns:
      The triples of each split, by its name.
    """
    rng = random.Random(f"{spec.set} {spec.n_triples} {spec.seed}")
    if spec.set in CONNECTED_SETS:
        drawn = draw_connected(rng, triples, spec.n_triples)
    else:
        drawn = rng.sample(triples, spec.n_triples)

    rng.shuffle(drawn)
    splits: dict[str, list[Triple]] = {}
    start = 0
    for name, share in SPLITS.items():
        end = start + round(share * spec.n_triples)
        splits[name] = drawn[start:end]
        start = end
    return splits


def draw_connected(
    rng: random.Random, triples: Sequence[Triple], n: int
) -> list[Triple]:
    """Draw n triples around a random entity, breadth-first; of an entity at most `MAX_FACTS` are followed.

    Raises:
      ValueError: there are not so many around any entity.
    """
    rows_of: dict[str, list[int]] = {}
    for row, (head, _, tail) in enumerate(triples):
        for entity in {head, tail}:
            rows_of.setdefault(entity, []).append(row)

    # An entity may stand in a small part that nothing connects with the rest.
    for start in rng.sample(sorted(rows_of), len(rows_of)):
        rows = _rows_around(rng, triples, rows_of, start, n)
        if len(rows) == n:
            return [triples[row] for row in rows]
    raise ValueError(f"expected {n} connected triples")


def _rows_around(
    rng: random.Random,
    triples: Sequence[Triple],
    rows_of: dict[str, list[int]],
    start: str,
    n: int,
) -> list[int]:
    """At most n rows around an entity, nearest first; each shares an entity with one before it."""
    found: dict[int, None] = {}
    seen, waiting = {start}, deque([start])
    while waiting and len(found) < n:
        rows = rows_of[waiting.popleft()]
        for row in rng.sample(rows, min(len(rows), MAX_FACTS)):
            found[row] = None
            head, _, tail = triples[row]
            for entity in (head, tail):
                if entity not in seen:
                    seen.add(entity)
                    waiting.append(entity)
    return list(found)[:n]


def write_splits(folder: Path, splits: dict[str, list[Triple]]) -> None:
    """Write train.txt, valid.txt and test.txt of a graph."""
    folder.mkdir(parents=True)
    for name, triples in splits.items():
        text = "".join("\t".join(triple) + "\n" for triple in triples)
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
