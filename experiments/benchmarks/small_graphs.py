"""What `funcppo train` gives at its defaults on small graphs: trained against untrained, on parts of the standard sets.

    python experiments/benchmarks/small_graphs.py --data DIR
    python experiments/benchmarks/small_graphs.py --data DIR --sets nations umls --seeds 6 7 8

A graph is drawn from the train file of a set: triples at random, or, where the set is large, a connected part around a
random entity. It is split at random into train, valid and test. `--seeds` draw the graphs; the seed of training is the
default. Each run mines its rules and is a process of its own on one thread; `--processes` of them run side by side. The
record is written after every run, and what it holds is not run again.

A test of 150 triples tells a small gain from a small loss only by chance. A trained run therefore ranks a larger test,
too: other triples of the set, all its files together, between entities that the graph knows. Training and its choices
on valid never see these. A gain has its standard error, both scores paired by triple.
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
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks import default_results
from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DATA, RESULTS
from funcppo.core.types import F64
from funcppo.kg.graph.text_files import read_text
from funcppo.kg.ranking import rank_metrics
from funcppo.kg.ranking.ranking import RankingProtocol, ranked_sides
from funcppo.kg.run import run_build, run_start, validation
from funcppo.kg.run.run import Run
from funcppo.kg.search.task import ignore_phase

RANDOM_SETS = ("kinships", "nations", "umls", "family")
# A random sample of these would hold few triples that share an entity.
CONNECTED_SETS = ("wn18rr", "fb15k-237")
N_TRIPLES = (1_500, 3_000)
SEEDS = (4, 5)
MAX_FACTS = 30  # that a connected part follows from an entity
SPLITS = {"train": 0.8, "valid": 0.1, "test": 0.1}
MAX_LARGE_TEST = 2_000  # triples

Triple = tuple[str, ...]  # head, relation, tail


class Spec(NamedTuple):
    """What a graph is drawn by."""

    set: str
    n_triples: int
    seed: int


class Gain(NamedTuple):
    """What the MRR of a test is higher by one score than by another."""

    mean: float
    error: float  # standard error, of differences by triple


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
    torch.set_num_threads(1)
    record: dict[str, Any] = {"rows": []}
    if args.out.exists():
        record = json.loads(args.out.read_text())
    present = {
        Spec(row["set"], row["triples"], row["seed"]) for row in record["rows"]
    }
    triples = {name: read_triples(args.data / name) for name in args.sets}
    others = {
        name: read_triples(args.data / name, tuple(SPLITS))
        for name in args.sets
    }
    with ThreadPoolExecutor(args.processes) as pool:
        runs = [
            pool.submit(run_graph, spec, triples[spec.set], others[spec.set])
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


def run_graph(
    spec: Spec, triples: Sequence[Triple], others: Sequence[Triple]
) -> dict[str, Any]:
    """Return the row of one graph: its rules, and how the scores of the run rank its test and a larger one.

    Args:
      triples: to draw the graph from.
      others: to draw the larger test from.
    """
    splits = draw_graph(triples, spec)
    with tempfile.TemporaryDirectory() as folder:
        graph, out = Path(folder, "graph"), Path(folder, "run")
        write_splits(graph, splits)
        run = default_results.train_into(out, spec.set, str(graph), 0, [], None)
        trained = run_start.open_run(out)

    own_test = rank_test(trained)
    large_test = rank_test(with_test(trained, draw_test(others, splits, spec)))
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
        "gain": own_test["gain"],
        "large_test": large_test,
        "seconds": run["training"]["seconds"],
        "peak_mb": run["training"]["peak_mb"],
        "machine": run["machine"],
    }


def with_test(run: Run, triples: Sequence[Triple]) -> Run:
    """Return the run with other test triples, of names that it knows."""
    dataset = run.task.dataset
    entity = {name: i for i, name in enumerate(dataset.entities, 1)}
    predicate = {name: i for i, name in enumerate(dataset.predicates, 1)}
    rows = [
        (predicate[relation], entity[head], entity[tail])
        for head, relation, tail in triples
    ]
    dataset = replace(dataset, test=np.array(rows, dtype=np.int32))
    built = run_build.build_run(run.run_config, dataset, ignore_phase)
    return replace(run, task=built.task)


def rank_test(run: Run) -> dict[str, Any]:
    """Return how many triples the test of a run has, their MRR by each score, and two gains.

    The gains are of training over the untrained policy, and over the rule score of what `funcppo predict` ranks by.
    """
    rule_score = run.run_config.rule_score
    ranks = reciprocal_ranks(run, rule_score)
    untrained, *_, trained = validation.policies(run)
    is_policy = run.default_score == run.score
    rank = {
        "untrained": ranks[untrained],
        "rule_score": ranks[rule_score],
        "trained": ranks[trained],
        "answers": ranks[trained if is_policy else rule_score],
    }
    return {
        "n_test_queries": len(run.task.dataset.test),
        "mrr": {
            name: float(of_triple.mean()) for name, of_triple in rank.items()
        },
        "gain": {
            "trained": paired_gain(
                rank["trained"], rank["untrained"]
            )._asdict(),
            "answers": paired_gain(
                rank["answers"], rank["rule_score"]
            )._asdict(),
        },
    }


def reciprocal_ranks(run: Run, rule_score: str) -> dict[str, F64[Tensor, "Q"]]:
    """Return the mean reciprocal rank of each test triple over its sides, by a rule score and by each policy."""
    protocol = RankingProtocol(sides=ranked_sides(run.task))
    parts: dict[str, list[Tensor]] = {}
    rankings = validation.iter_rankings(
        run, run.task.dataset.test, protocol, [rule_score]
    )
    for name, ranked in rankings:
        of_rows = rank_metrics.expected_reciprocal_ranks(ranked.counts)
        total = of_rows.new_zeros(len(ranked.queries))
        total = total.index_add(0, ranked.query_row, of_rows)
        parts.setdefault(name, []).append(total / len(protocol.sides))
    return {name: torch.cat(of_name) for name, of_name in parts.items()}


def paired_gain(rank: F64[Tensor, "Q"], other: F64[Tensor, "Q"]) -> Gain:
    """Return what reciprocal ranks are higher than others of the same triples."""
    gain = rank - other
    return Gain(float(gain.mean()), float(gain.std() / len(gain) ** 0.5))


# -- graphs


def read_triples(
    folder: Path, splits: Sequence[str] = ("train",)
) -> list[Triple]:
    """Return the distinct triples of files of a set, in their order; a file may be packed by gzip, or missing."""
    triples: dict[Triple, None] = {}
    for split in splits:
        file = folder / f"{split}.txt"
        if not file.exists():
            file = folder / f"{split}.txt.gz"
        lines = read_text(file).splitlines() if file.exists() else []
        triples |= dict.fromkeys(tuple(line.split("\t")) for line in lines)
    return list(triples)


def draw_test(
    triples: Sequence[Triple], splits: dict[str, list[Triple]], spec: Spec
) -> list[Triple]:
    """Draw at most `MAX_LARGE_TEST` triples, of names in the train of a graph, that are neither in it nor in valid."""
    train = splits["train"]
    entities = {name for head, _, tail in train for name in (head, tail)}
    relations = {relation for _, relation, _ in train}
    known = {*train, *splits["valid"]}
    others = [
        (head, relation, tail)
        for head, relation, tail in triples
        if (head, relation, tail) not in known
        and {head, tail} <= entities
        and relation in relations
    ]
    rng = random.Random(f"test of {spec.set} {spec.n_triples} {spec.seed}")
    return rng.sample(others, min(len(others), MAX_LARGE_TEST))


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
