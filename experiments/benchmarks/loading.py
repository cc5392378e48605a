"""How long reading two million triples takes, and how much memory, by each reader.

    python experiments/benchmarks/loading.py --out experiments/results/loading.json

A file of tab-separated names (200,000 entities, 500 relations) is read by `fp.load` in a process of its own, by turns;
medians of seconds, and the most memory of the process. `process` is a process that loads a graph of one triple: what
the libraries take. Both readers must give the same fingerprint.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

import numpy as np

from experiments.benchmarks.side_by_side import write_record
from experiments.provenance import describe_machine
from funcppo.kg.graph import loaders
from funcppo.kg.graph.config import DataConfig

N_TRIPLES, N_ENTITIES, N_RELATIONS = 2_000_000, 200_000, 500
REPEATS = 3
READERS = ("process", "text", "duckdb")


def main() -> None:
    """Write the graph, read it by turns, and write the record; or read it once in this process with --read."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--triples", type=int, default=N_TRIPLES)
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        print(json.dumps(read(*args.read)))
        return
    if args.out is None:
        parser.error("--out: expected a file, got none")

    with tempfile.TemporaryDirectory() as folder:
        graph, tiny = Path(folder, "graph.tsv"), Path(folder, "tiny.tsv")
        write_graph(graph, args.triples)
        tiny.write_text("a\tr\tb\n")
        samples: dict[str, list[dict[str, Any]]] = {
            name: [] for name in READERS
        }
        for _ in range(REPEATS):
            for name in READERS:
                file = tiny if name == "process" else graph
                samples[name].append(read_apart(name, file))
    rows = [summarise(name, found) for name, found in samples.items()]
    assert rows[1]["fingerprint"] == rows[2]["fingerprint"], "readers differ"
    record = {"machine": describe_machine(), "n_triples": args.triples}
    write_record(args.out, {**record, "rows": rows})


def write_graph(file: Path, n_triples: int) -> None:
    """Random triples, some of them twice."""
    rng = np.random.default_rng(0)
    head, tail = rng.integers(N_ENTITIES, size=(2, n_triples)).tolist()
    relation = rng.integers(N_RELATIONS, size=n_triples).tolist()
    with file.open("w") as lines:
        lines.writelines(
            f"entity {h}\trelation {r}\tentity {t}\n"
            for h, r, t in zip(head, relation, tail)
        )


def read_apart(reader: str, file: Path) -> dict[str, Any]:
    """What `read` found in a process of its own."""
    words = [sys.executable, __file__, "--read", reader, str(file)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def read(reader: str, file: str) -> dict[str, Any]:
    """Read a file; seconds, memory, and what was read."""
    cfg = DataConfig(reader="duckdb" if reader == "duckdb" else "text")
    start = time.perf_counter()
    dataset = loaders.load(file, cfg=cfg)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "seconds": seconds,
        "peak_mb": peak / 1000,
        "n_facts": len(dataset.facts),
        "n_entities": dataset.n_constants,
        "fingerprint": dataset.fingerprint,
    }


def summarise(reader: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """A row: medians of time and memory."""
    medians = {
        name: round(statistics.median(one[name] for one in found), 4)
        for name in ("seconds", "peak_mb")
    }
    return {"reader": reader, **found[0], **medians}


if __name__ == "__main__":
    main()
