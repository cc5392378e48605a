"""A generated graph of any size: written, indexed, opened, looked up, and its test triples ranked by several processes.

    python experiments/benchmarks/large_graph.py --triples 200000000 --processes 8 --folder DIR --out FILE

The graph is in groups of entities and three relations a, b, c, so that c(x, z) :- a(x, y), b(y, z) holds for some of
the triples. It has ten triples an entity; held out are 1,000 triples that a rule derives. A row for each phase, which
the record holds as soon as the phase ends:

    write     the triples as a file with tabs
    index     `funcppo data --index`: seconds of its phases, bytes of the folder, the peak of its memory
    open      a fresh process opens the folder and builds the knowledge base
    look up   facts by themselves, a batch at a time
    rank      `funcppo evaluate` by several processes: the peak of what they hold together (PSS: a page that n processes
              share counts 1/n in each), and its part that is not shared with the page cache
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import Row, write_record
from experiments.paths import ROOT, make_parser
from experiments.provenance import describe_machine

TRIPLES_PER_ENTITY = 10
ENTITIES_PER_GROUP = 200_000
RELATIONS_PER_GROUP = 3
RULE_GROUPS = 16  # groups that have rules and test triples
HELD_OUT_EVERY = 97  # of the compositions, one in so many is held out
N_QUERIES = 1000
ENTITY_DIGITS, RELATION_DIGITS = 9, 5
BLOCK_ROWS = 1 << 20
LOOKUPS = 1024  # of a batch
BATCHES = 1000
PSS_SECONDS = 1.0  # between two readings of memory


class Shape(NamedTuple):
    """The sizes of a graph."""

    n_groups: int
    n_entities: int  # of each group
    n_triples: int  # of each relation

    @property
    def total(self) -> int:
        """Triples of the graph."""
        return self.n_groups * RELATIONS_PER_GROUP * self.n_triples


def main() -> None:
    """Measure all phases and write the record."""
    parser = make_parser(__doc__)
    parser.add_argument("--triples", type=int, default=10_000_000)
    parser.add_argument("--processes", type=int, default=2, help="that rank")
    parser.add_argument("--threads", type=int, default=1, help="of indexing")
    parser.add_argument("--folder", type=Path, help="for the data; emptied")
    parser.add_argument("--out", type=Path, help="record to write")
    args = parser.parse_args()
    measure(args)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The record, which is written after each phase."""
    shape = shape_of(args.triples)
    folder: Path = args.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    record: dict[str, Any] = {
        "machine": describe_machine(),
        "options": {
            "triples": shape.total,
            "processes": args.processes,
            "threads": args.threads,
        },
        "rows": [],
    }
    phases: dict[str, Callable[[], Row]] = {
        "write": partial(write_graph, shape, folder / "graph", args.threads),
        "index": partial(index_graph, folder, args.threads),
        "open": partial(run_here, "open_graph", folder / "indexed"),
        "look up": partial(run_here, "look_up", folder / "indexed"),
        "rank": partial(rank, folder / "indexed", args.processes),
    }
    for name, phase in phases.items():
        start = time.perf_counter()
        row = phase()
        seconds = round(time.perf_counter() - start, 2)
        record["rows"].append({"phase": name, "seconds": seconds} | row)
        print(json.dumps(record["rows"][-1]), flush=True)
        if args.out is not None:
            write_record(args.out, record)
    return record


# -- the graph


def shape_of(n_triples: int) -> Shape:
    """The sizes of a graph of about so many triples."""
    n_entities = max(n_triples // TRIPLES_PER_ENTITY, 100)
    n_groups = -(-n_entities // ENTITIES_PER_GROUP)
    return Shape(
        n_groups=n_groups,
        n_entities=n_entities // n_groups,
        n_triples=n_triples // (n_groups * RELATIONS_PER_GROUP),
    )


def write_graph(shape: Shape, folder: Path, n_processes: int) -> Row:
    """Write train.tsv, test.tsv and rules.tsv."""
    folder.mkdir()
    path = folder / "train.tsv"
    width = len(lines(np.zeros((1, 3), np.int64))[0])
    with path.open("wb") as file:
        file.truncate(shape.total * width)
    starts = range(0, shape.total, BLOCK_ROWS)
    with ProcessPoolExecutor(n_processes) as pool:
        list(pool.map(partial(_write_block, shape, path, width), starts))
    (folder / "test.tsv").write_bytes(lines(held_out(shape)).tobytes())
    (folder / "rules.tsv").write_text("\n".join(rules(shape)) + "\n")
    return {"n_triples": shape.total, "bytes": path.stat().st_size}


def _write_block(shape: Shape, path: Path, width: int, start: int) -> None:
    """Write the lines of some rows to their place."""
    rows = np.arange(start, min(start + BLOCK_ROWS, shape.total))
    with path.open("r+b") as file:
        file.seek(start * width)
        file.write(lines(triples(shape, rows)).tobytes())


def triples(shape: Shape, rows: np.ndarray) -> np.ndarray:
    """Some triples of the graph, all of them distinct: int64 [n, 3], head, relation and tail, from 0."""
    j, relation = np.divmod(rows, shape.n_groups * RELATIONS_PER_GROUP)
    group, role = np.divmod(relation, RELATIONS_PER_GROUP)
    size = shape.n_entities
    occurrence, x = np.divmod(j, size)
    tail = _map(x, role, size)

    # Of an entity the first tail composes; the others are elsewhere, each in a quarter of its own.
    quarter = size // 4
    elsewhere = 1 + x * 31 % quarter + (occurrence - 1) % 3 * quarter
    shift = np.where(occurrence > 0, elsewhere, 0)
    is_held_out = (occurrence == 0) & (role == 2) & (x % HELD_OUT_EVERY == 0)
    shift = np.where(is_held_out, size - 1, shift)
    tail = (tail + shift) % size
    return np.stack([group * size + x, relation, group * size + tail], axis=1)


def _map(x: np.ndarray, role: np.ndarray, size: int) -> np.ndarray:
    """The entity that a relation maps another one to: a(x) and b(x) are permutations, c(x) is b(a(x))."""
    a, b = (x + 7) % size, (x + size // 3) % size
    return np.choose(role, [a, b, (a + size // 3) % size])


def held_out(shape: Shape) -> np.ndarray:
    """The test triples, as `triples` gives them: c(x, b(a(x))), which train does not hold."""
    n_groups = min(RULE_GROUPS, shape.n_groups)
    x = np.arange(0, min(shape.n_entities, shape.n_triples), HELD_OUT_EVERY)
    group, x = (a.ravel() for a in np.meshgrid(np.arange(n_groups), x, indexing="ij"))  # fmt: skip
    chosen = np.linspace(0, len(x) - 1, min(N_QUERIES, len(x))).astype(np.int64)
    group, x = group[chosen], x[chosen]
    tail = _map(x, np.full_like(x, 2), shape.n_entities)
    first = group * shape.n_entities
    relation = group * RELATIONS_PER_GROUP + 2
    return np.stack([first + x, relation, first + tail], axis=1)


def rules(shape: Shape) -> Iterator[str]:
    """Yield the rules of the first groups."""
    for group in range(min(RULE_GROUPS, shape.n_groups)):
        first = group * RELATIONS_PER_GROUP
        a, b, c = (f"P{first + i:0{RELATION_DIGITS}}" for i in range(3))
        yield f"0.5\t'{c}'(X,Y) :- '{a}'(X,Z), '{b}'(Z,Y)"
        yield f"0.5\t'{a}'(X,Y) :- '{c}'(X,Z), '{b}'(Y,Z)"


def lines(table: np.ndarray) -> np.ndarray:
    """Triples as lines of one width, uint8 [n, width]: Q000000012<TAB>P00001<TAB>Q000000345."""
    columns: list[np.ndarray] = []
    for column, letter, n_digits, end in zip(
        table.T,
        "QPQ",
        (ENTITY_DIGITS, RELATION_DIGITS, ENTITY_DIGITS),
        "\t\t\n",
    ):
        columns.append(np.full(len(table), ord(letter), np.uint8))
        for place in reversed(range(n_digits)):
            digit = column // 10**place % 10
            columns.append((digit + ord("0")).astype(np.uint8))
        columns.append(np.full(len(table), ord(end), np.uint8))
    return np.stack(columns, axis=1)


# -- the phases


def index_graph(folder: Path, n_threads: int) -> Row:
    """Run `funcppo data --index`."""
    result = folder / "index.json"
    process = start_funcppo(
        [
            *("data", str(folder / "graph")),
            *("--index", str(folder / "indexed"), "--json", str(result)),
            *("--set", f"threads={n_threads}"),
        ]
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit("funcppo data --index failed")
    found = json.loads(result.read_text())
    return {
        "phases": found["seconds"],
        "n_facts": found["n_facts"],
        "n_entities": found["n_entities"],
        "bytes": found["n_bytes"],
        "bytes_per_fact": round(found["n_bytes"] / found["n_facts"], 2),
        "peak_bytes": usage.ru_maxrss * 1024,
    }


def run_here(phase: str, indexed: Path) -> Row:
    """A phase in a fresh process."""
    code = f"from experiments.benchmarks import large_graph as g; g.{phase}({str(indexed)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        check=True,
        cwd=ROOT,
    )
    return json.loads(done.stdout)


def open_graph(indexed: str) -> None:
    """Print how long opening takes."""
    import torch

    from funcppo.kg.graph import loaders
    from funcppo.kg.logic import kb

    torch.set_num_threads(1)
    start = time.perf_counter()
    dataset = loaders.load(indexed)
    read = time.perf_counter()
    kb.from_dataset(dataset)
    row = {
        "load_seconds": round(read - start, 4),
        "build_seconds": round(time.perf_counter() - read, 4),
    }
    print(json.dumps(row))


def look_up(indexed: str) -> None:
    """Print how long lookups of facts take, in microseconds a batch."""
    import torch

    from funcppo.kg.graph import loaders
    from funcppo.kg.logic import kb

    torch.set_num_threads(1)
    built, sizes = kb.from_dataset(loaders.load(indexed))
    draw = torch.Generator().manual_seed(0)
    seconds: list[float] = []
    for _ in range(BATCHES):
        row = torch.randint(sizes.n_facts, (LOOKUPS,), generator=draw)
        atoms = built.facts[row].long()
        start = time.perf_counter()
        found = kb.fact_id(built, sizes, atoms)
        seconds.append(time.perf_counter() - start)
        assert torch.equal(found, row)
    quantiles = np.quantile(seconds, [0.5, 0.9]) * 1e6
    row = {"facts": LOOKUPS, "batches": BATCHES}
    row |= dict(zip(("median_us", "p90_us"), quantiles.round(1).tolist()))
    print(json.dumps(row))


def rank(indexed: Path, n_processes: int) -> Row:
    """Run `funcppo evaluate` by several processes, and watch their memory."""
    result = indexed.with_name("ranked.json")
    options = ["evaluate", str(indexed), "--height", "1", "--score", "noisy-or"]
    options += ["--set", "smoothing=5", "--set", "object_identity=False"]
    process = start_funcppo([*options, "--json", str(result)], n_processes)
    peak = {"pss": 0, "pss_anon": 0, "pss_file": 0}
    while process.poll() is None:
        held = held_bytes(process.pid)
        if held["pss"] > peak["pss"]:
            peak = held
        time.sleep(PSS_SECONDS)
    if process.returncode:
        raise SystemExit("funcppo evaluate failed")
    metrics = json.loads(result.read_text())
    return {
        "processes": n_processes,
        "n_queries": metrics["n_queries"],
        "mrr": metrics["mrr"],
        "n_candidates": metrics["n_candidates"],
        "peak_pss_bytes": peak["pss"],
        "peak_pss_private_bytes": peak["pss_anon"],
        "peak_pss_mapped_bytes": peak["pss_file"],
    }


def start_funcppo(
    arguments: list[str], n_processes: int = 1
) -> subprocess.Popen[bytes]:
    """Start a program, by torchrun if in several processes."""
    launch = [sys.executable, "-m"]
    if n_processes > 1:
        launch += ["torch.distributed.run", "--standalone"]
        launch += [f"--nproc-per-node={n_processes}", "-m"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*launch, "funcppo", *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        env=environment,
    )


def held_bytes(root: int) -> dict[str, int]:
    """What a process and all that it started hold together, in bytes, by kind."""
    totals = {"pss": 0, "pss_anon": 0, "pss_file": 0}
    for process in (root, *descendants(root)):
        try:
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:  # it has ended
            continue
        for line in text.splitlines():
            name, _, value = line.partition(":")
            if name.lower() in totals:
                totals[name.lower()] += int(value.split()[0]) * 1024
    return totals


def descendants(root: int) -> Iterator[int]:
    """Yield the processes that a process started, and those that they did."""
    for path in Path(f"/proc/{root}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:  # it has ended
            continue
        for child in map(int, children):
            yield child
            yield from descendants(child)


if __name__ == "__main__":
    main()
